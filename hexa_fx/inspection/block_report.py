"""The report of one block, as data."""

from __future__ import annotations

import copy
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, Literal

from hexa_fx.errors import InputError, named
from hexa_fx.inspection.advice import advice
from hexa_fx.inspection.costs import Costs
from hexa_fx.inspection.kernels import KernelUse, kernels_of
from hexa_fx.inspection.stages import FfnCase
from hexa_fx.ir import NEVER_SMALL, Small, SourceLocation
from hexa_fx.packed import packed_weights
from hexa_fx.runtime.forward import HexaForward
from hexa_fx.runtime.install import NO_CALLS, Calls, calls_of, why_original

Status = Literal["rewritten", "refused", "already", "waiting"]


@dataclass(frozen=True)
class CheckReport:
    """How a rewritten block compared with its original.

    Args:
        cases: number of comparisons (over sizes, forced routings and modes) that could be made.
        forward_error, gradient_error: largest difference, relative to the largest value of the original tensor.
        seconds: how long the comparison took.
        dtype: of the comparison: float64, or the block's own where it holds something that cannot be copied.
        all_experts: whether tokens were sent to every expert.
    """

    cases: int
    forward_error: float
    gradient_error: float
    seconds: float
    dtype: str = "float64"
    all_experts: bool = False

    def __str__(self) -> str:
        """In words."""
        reached = ", all experts reached" if self.all_experts else ""
        why = "" if self.dtype == "float64" else ", as the block cannot be copied"
        errors = f"forward {self.forward_error:.1e}, gradients {self.gradient_error:.1e}"
        return f"checked in {self.dtype}{why} ({self.cases} cases{reached}), largest relative error {errors}"


@dataclass(frozen=True)
class BlockReport:
    """One MoE block of the model.

    Args:
        path: the block's path in the model.
        status: ``rewritten``, ``refused``, ``already`` where its code calls hexa_fx's operators itself, or ``waiting`` for a call,
            since its weights are not here before.
        reason, location: why the block was left as it is, and the line of the user's code behind it.
        idiom: how the user's code runs the experts.
        num_experts, top_k, hidden_size, intermediate_size: E, k, D and I.
        expert: the expert function, e.g. ``silu(x Wg) * (x Wu) Wd``; for an unusual one, its operations in order.
        weights: how the user stores them: one parameter per expert (``listed``), (E, ., .) (``stacked``), or (E*., .)
            (``packed``).
        same_as: path of the identical block whose analysis was reused.
        check: result of the comparison; None if it was switched off or the block was refused.
        seconds: time for capture, detection and rewriting.
        activation: name of the activation.
        layout: how a weight lies in memory, and how gate and up lie in it.
        code: class of the block, and where its forward is written.
        rewritten_to: what runs instead.
        costs: FLOPs, bytes moved and memory kept for backward, before and after.
        kernels: on a GPU, the kernels that forward and backward launch. Elsewhere use `kernels_on`.
        case: sizes and dtype of the block's call.
        collectives: the collectives of this rank's graph, in order, if the block is spread over devices.
        devices: over how many devices it is spread.
        small_tokens: on a CPU, inputs of up to this many tokens run the block's own code, which is faster for them: without and
            with gradients.
        compute: what experts multiply in, if it is not their tensors' dtype, and what that adds to outputs on the example; or
            whether they are batch invariant, if that was asked for.
        forward: what `optimize` installed, which knows what is so now. It is not pickled.
    """

    path: str
    status: Status
    reason: str = ""
    location: SourceLocation | None = None
    idiom: str = ""
    num_experts: int = 0
    top_k: int = 0
    hidden_size: int = 0
    intermediate_size: int = 0
    expert: str = ""
    weights: str = ""
    same_as: str | None = None
    check: CheckReport | None = None
    seconds: float = 0.0
    activation: str = ""
    layout: str = ""
    code: SourceLocation | None = None
    rewritten_to: str = ""
    costs: Costs | None = None
    kernels: tuple[KernelUse, ...] = ()
    case: FfnCase | None = None
    collectives: tuple[str, ...] = ()
    devices: int = 1
    small_tokens: Small = NEVER_SMALL
    compute: str = ""
    forward: HexaForward | None = field(default=None, compare=False, repr=False)

    def __repr__(self) -> str:
        sizes = f", {self.idiom}, {self.sizes}" if self.num_experts else ""
        return f"<BlockReport {self.name}: {self.state}{sizes}{': ' + self.reason if self.reason else ''}>"

    def __deepcopy__(self, memo: dict[int, Any]) -> BlockReport:
        """With the forward that is copied along, if one is: where its module is being copied."""
        copied = memo.get(id(self.forward))
        if copied is None and self.forward is not None and self.forward.is_copied(memo):
            copied = copy.deepcopy(self.forward, memo)
        return replace(self, forward=copied)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "forward": None}

    @property
    def name(self) -> str:
        """The path, in words where it is empty."""
        return named(self.path)

    @property
    def state(self) -> str:
        """``rewritten``; ``left as it is``; ``already on hexa_fx's operators``; ``not called yet``."""
        return _STATES[self.status]

    @property
    def calls(self) -> Calls:
        """How its calls ran since `optimize`, outside of compiled code."""
        return NO_CALLS if self.forward is None else calls_of(self.forward)

    @property
    def now(self) -> str:
        """Why the block would run its own code if it were called now, or raise an error if its weights are cut; empty if it would
        do neither, or nothing was installed.
        """
        return why_original(self.forward) if self.forward is not None else ""

    @property
    def does_now(self) -> str:
        """What it would do, for the reason that is ``now``."""
        return "cannot be called now" if self.forward is not None and self.forward.lost else "runs its own code now"

    @property
    def packed(self) -> str:
        """In which format its weights are packed now, and what that saves; empty if they are not."""
        try:
            weights = [] if self.forward is None else packed_weights(self.forward.module)
        except ReferenceError:  # of a model that is gone
            return ""
        if not weights:
            return ""
        dense, stored = sum(w.numel() * w.itemsize for w in weights), sum(w.stored_bytes for w in weights)
        formats = ", ".join(dict.fromkeys(w.format for w in weights))
        unit, name = (2**20, "MiB") if dense >= 2**20 else (2**10, "KiB")
        return f"{formats}, {stored / unit:.1f} {name} in place of {dense / unit:.1f}"

    @property
    def sizes(self) -> str:
        """``E=8 k=2 D=64 I=256``."""
        return f"E={self.experts_now} k={self.top_k} D={self.hidden_size} I={self.intermediate_size}"

    @property
    def experts_now(self) -> int:
        """How many experts there are, which some may have been cut off from by now."""
        if self.forward is not None and self.weights == "stacked" and self.devices == 1:
            with suppress(AttributeError, ReferenceError):  # under an adapter; of a model that is gone
                read = (name for made in self.forward.specialisations for name in made.matrices)
                found = [self.forward.module.get_parameter(name) for name in read]
                return next((len(stack) for stack in found if stack.dim() == 3), self.num_experts)
        return self.num_experts

    @property
    def advice(self) -> str:
        """What to do about the refusal; empty if there is none."""
        return advice(self.reason) if self.reason and self.status != "already" else ""

    def kernels_on(self, arch: int, tokens: int | None = None) -> tuple[KernelUse, ...]:
        """The kernels that the block would launch on compute capability ``arch``, for ``tokens`` (default: the example's).

        Needs no GPU. Empty for experts of an unusual form, which do not run as `hexa::moe_ffn`.

        Raises:
            KernelError: there are no kernels for ``arch``. InputError: ``arch`` is no whole number, or ``tokens`` less than 1.
        """
        if tokens is not None and (type(tokens) is not int or tokens < 1):
            raise InputError(f"tokens={tokens!r}: expected a whole number of at least 1")
        return kernels_of(self.case.resized(tokens), arch) if self.case is not None else ()

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        plain = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in _NOT_PLAIN}
        found = {name: asdict(v) if hasattr(v, "__dataclass_fields__") else v for name, v in plain.items()}
        found["num_experts"] = self.experts_now
        found["advice"], found["now"], found["packed"] = self.advice, self.now, self.packed
        found["calls"] = {**self.calls._asdict(), "own": dict(self.calls.own)}
        found["kernels"] = [{**asdict(k), "name": k.name, "cached": k.cached} for k in self.kernels]
        return found


_STATES: dict[Status, str] = {
    "rewritten": "rewritten",
    "refused": "left as it is",
    "already": "already on hexa_fx's operators",
    "waiting": "not called yet",
}
_NOT_PLAIN = ("case", "kernels", "forward")
