"""Checks at every call what a rewritten forward assumes. A miss is not an error: the original forward runs."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn

import torch
from torch.compiler import is_compiling

from hexa_fx.ir import InputGuard
from hexa_fx.torch_private import _is_any_autocast_enabled, _len_torch_function_stack

_TORCHS = ("torch", "hexa_fx")

log = logging.getLogger(__name__)
_said: set[tuple[str, str]] = set()

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
"""Where a module keeps the hooks that only its own call runs."""


AGAIN = "call hexa_fx.undo_ and hexa_fx.optimize_ on the model to have it rewritten as it is now"
ADAPTED = (
    "hexa_fx.optimize_ (after hexa_fx.undo_) makes it part of the code, which is rewritten if it multiplies rows by parameters "
    "(IA3, VeRA, MiSS, a dropout, a bias), not if it makes a weight of several (LoHa, LoKr, OFT, DoRA with a dropout)"
)
"""What helps where an adapter that came later is no plain LoRA."""

ON_A_STACK = (
    "PEFT adds such an adapter to the weight, in the block's own code: it is read as factors only where the rewritten module "
    "holds the parameter itself"
)
"""What helps against an adapter on a stack of a submodule of the block: nothing, so that nothing is advised."""

LEFT = "left to the original: "
"""Before the reason, where the original runs in a rewritten block's place."""


class GuardMiss(Exception):
    """A rewritten block met something that it was not made for. `hexa_fx.runtime.install.HexaForward` catches it, and has the call
    analysed.

    ``called``: path and result of each submodule that has been called by then and is not to be called again.
    """

    called: Sequence[tuple[str, Any]] = ()


def without_frames(miss: GuardMiss) -> GuardMiss:
    """The same without its traceback: its frames hold the tensors of the call and the miss itself, so that all of them would stay
    until Python next looks for such circles, which many who train have it do rarely."""
    miss.__context__ = None
    return miss.with_traceback(None)


class OwnCodeOnly(GuardMiss):
    """Operators cannot stand for the block in this call, whatever an analysis of it finds."""


def say_in_trace(path: str, reason: str) -> bool:
    """Logs once why compiled code is the block's own; a tracer calls it while it traces."""
    if (path, reason) not in _said:
        _said.add((path, reason))
        log.warning("%s runs its original forward under torch.compile: %s", path, reason)
    return True


say_in_trace._dynamo_marked_constant = True  # type: ignore[attr-defined]  # as torch.compiler does it, which imports dynamo


class SizeMiss(GuardMiss):
    """A size condition of a rewritten graph does not hold, nor will it for other inputs of the same sizes."""


class ReadMiss(GuardMiss):
    """Something that was read from Python has another value; ``read``: its name, which says where it lies."""

    def __init__(self, read: str) -> None:
        super().__init__(f"{read!r} is not what it was when the block was rewritten; {AGAIN}")
        self.read = read


def require(condition: Any, expected: str) -> None:
    """A guard node of a rewritten graph: raises `SizeMiss` unless ``condition`` holds.

    The original forward then runs from its beginning, so a rewriter places these nodes before anything that has an
    effect (submodule calls, random numbers, buffer updates).

    ``condition``: of sizes: a bool, or something with a truth value (a symbolic bool under tracing).
    """
    if not condition:
        raise SizeMiss(f"expected {expected}")


def require_finite(values: torch.Tensor, expected: str) -> None:
    """As `require`, unless all that experts gave is finite. Waits for the device, as the code's own check does."""
    if not values.isfinite().all():
        raise OwnCodeOnly(f"expected {expected}")


def item(value: Any) -> Any:
    """A number that a module keeps, for which a tensor stood in the recorded run. Raises `GuardMiss` if there is a tensor now."""
    if isinstance(value, torch.Tensor):
        raise GuardMiss("a number that the block counts with is a tensor now")
    return value


def require_experts(ids: torch.Tensor, past: int, experts: int) -> torch.Tensor:
    """A guard node of a rewritten graph: ids that the block is given, as its code reads them that looks up with them.

    On a CPU it raises `OwnCodeOnly` unless all of them are at least zero and less than ``past``: the original says what is wrong
    with them, if anything is. Elsewhere that would wait for the device. ``experts``: how many there are, if -1 stands for the last
    one; else 0.
    """
    if ids.device.type != "cpu" or is_compiling():
        return ids.remainder(experts) if experts else ids
    least, most = ids.aminmax() if ids.numel() else (0, 0)
    if least < 0 or most >= past:
        raise OwnCodeOnly("among the experts' ids that it is given is one of no expert")
    return ids


class RoutingMiss(GuardMiss):
    """A router gave something of another form: the reason, and what has been ``called``."""

    @property
    def called(self) -> Sequence[tuple[str, Any]]:  # type: ignore[override]  # a tracer makes no exceptions with own attributes
        called: Sequence[tuple[str, Any]] = self.args[1]
        return called

    def __str__(self) -> str:
        return str(self.args[0])


def require_routing(
    tokens: tuple[torch.Tensor, torch.dtype],
    sources: Sequence[tuple[torch.Tensor, int, int, torch.dtype]],
    called: Sequence[tuple[str, Any]],
    forms: Sequence[Any] = (),
) -> None:
    """A guard node of a rewritten graph: raises `RoutingMiss` unless the routing has the form that it was recorded in.

    Dtypes count only where tokens have theirs, and nothing changes what calls give: a model in another dtype may give others, which
    verification has seen.

    Args:
        tokens: (..., D), and their recorded dtype.
        sources: what routers gave, how many numbers of it belong to a token (0: unknown), its dimensions and recorded dtype.
        called: see `GuardMiss`.
        forms: of each result, in which lists, tuples and dicts it gave something, and where it gave None.
    """
    given, recorded = tokens
    exact = given.dtype == recorded and not (_is_any_autocast_enabled() or _len_torch_function_stack())
    if not all(is_of_form(result, form) for (_, result), form in zip(called, forms)):
        raise RoutingMiss(
            f"a module gives other results, or None for one, than when the block was rewritten; {AGAIN}", called
        )
    rows = given.numel() // given.shape[-1]
    for values, each, dimensions, dtype in sources:
        same = values.dim() == dimensions and (values.dtype == dtype or not exact)
        if not same or (each and values.numel() != rows * each):
            raise RoutingMiss(
                f"what the router gives is not of the form that it was rewritten for ({each or 'as many'} {dtype} for a token); "
                f"{AGAIN}",
                called,
            )


def is_of_form(result: Any, form: Any) -> bool:
    """Whether lists, tuples and dicts hold as much, and None lies where it did."""
    if isinstance(form, dict):
        same = isinstance(result, dict) and result.keys() == form.keys()
        return same and all(is_of_form(result[key], form[key]) for key in form)
    if isinstance(form, (list, tuple)):
        same = isinstance(result, (list, tuple)) and len(result) == len(form)
        return same and all(map(is_of_form, result, form))
    return (result is None) == (form is None)


def check_inputs(
    guards: Sequence[InputGuard], read: Sequence[str], values: Mapping[str, Any], defaults: Mapping[str, Any]
) -> None:
    """Raises `GuardMiss` for the first input that differs from what was traced, and unless every argument that the graph neither
    reads nor guards has its default value."""
    covered = [*(guard.name for guard in guards), *read]
    for name in covered:
        if name not in values:
            raise GuardMiss(f"the input {name!r} is missing")
    for guard in guards:
        check_input(guard, values[guard.name])
    for name, value in values.items():
        if name not in covered and (name not in defaults or value is not defaults[name]):
            raise GuardMiss(f"the input {name!r} was not given when the block was recorded")


def dtype_class(dtype: torch.dtype) -> str:
    """``floating``, ``complex``, ``bool`` or ``integer``."""
    if dtype.is_floating_point:
        return "floating"
    if dtype.is_complex:
        return "complex"
    return "bool" if dtype == torch.bool else "integer"


def is_plain(value: Any) -> bool:
    """Whether it is a tensor of a class of torch's: another one may have functions of its own in place of torch's."""
    kind = type(value)
    return kind is torch.Tensor or (issubclass(kind, torch.Tensor) and kind.__module__.partition(".")[0] in _TORCHS)


ASKED_OF_INPUTS = {
    "dtype": ("x.dtype", "dtype {}"),
    "device": ("x.device.type", "device {}"),
    "contiguous": ("x.is_contiguous()", "is_contiguous() {}"),
    "requires_grad": ("x.requires_grad", "requires_grad {}"),
    "ndim": ("x.ndim", "{} dimensions"),
    "last": ("x.shape[-1]", "{} in a row"),
}
"""By the name under which an `InputGuard` says what it is to be: what is asked of a tensor ``x``, and in words."""
_READ: dict[str, Callable[[torch.Tensor], Any]] = {
    name: eval(f"lambda x: {code}") for name, (code, _) in ASKED_OF_INPUTS.items()
}


def check_input(guard: InputGuard, value: Any) -> None:
    """Raises `GuardMiss` if one input differs from what was traced."""
    if guard.kind == "constant":
        _check_constant(guard, value)
        return
    if not isinstance(value, torch.Tensor):
        raise GuardMiss(f"the input {guard.name!r} is not a tensor")
    if not is_plain(value):
        kind = type(value)
        raise GuardMiss(
            f"the input {guard.name!r} is a {kind.__module__}.{kind.__qualname__}, which the block's code may tell from other "
            "tensors, and which may make functions of torch its own; as_subclass(torch.Tensor) makes a plain one"
        )
    if guard.dtype is not None and dtype_class(value.dtype) != dtype_class(guard.dtype):
        raise GuardMiss(f"the input {guard.name!r} is not {dtype_class(guard.dtype)}")
    for name, (_, said) in ASKED_OF_INPUTS.items():
        wanted = getattr(guard, name)
        if wanted is None or (name == "dtype" and not guard.exact_dtype):
            continue
        now = _READ[name](value)
        if now != wanted:
            raise GuardMiss(
                f"the input {guard.name!r} has {said.format(now)}; the block was recorded with {said.format(wanted)}, and "
                "hexa_fx.undo_ and hexa_fx.optimize_ record it anew"
            )
    if guard.filled and value.numel() == 0:
        raise SizeMiss(f"the input {guard.name!r} is empty, of which the block's code gives something else")


def _check_constant(guard: InputGuard, value: Any) -> None:
    if value is guard.value:
        return
    if isinstance(value, torch.Tensor):
        raise GuardMiss(f"the input {guard.name!r} was a constant and is now a tensor")
    if type(value) is not type(guard.value) or not equal(value, guard.value):
        raise GuardMiss(f"the input {guard.name!r} has another value than the traced one")


def equal(now: Any, before: Any) -> bool:
    """Whether two values are; not where there are tensors or arrays in one of them."""
    try:
        return bool(now == before)
    except (RuntimeError, ValueError):
        return False


def parts_of(name: str, value: Any) -> dict[str, tuple[Any, Any]]:
    """Of an argument that is a tuple, list or dict with tensors: names for what it holds, and the keys. Empty for anything else."""
    if type(value) is dict:
        held = value
    elif type(value) is list or (isinstance(value, tuple) and (type(value) is tuple or hasattr(value, "_fields"))):
        held = dict(enumerate(value))
    else:
        return {}
    found = {f"{name}__{key}": (key, item) for key, item in held.items()}
    has_tensors = any(isinstance(item, torch.Tensor) or parts_of(part, item) for part, (_, item) in found.items())
    return found if has_tensors and all(map(str.isidentifier, found)) and len(found) == len(held) else {}


class Form(NamedTuple):
    """What stands for such an argument itself: its type, and its keys or places."""

    kind: type
    keys: tuple[Any, ...]

    @classmethod
    def of(cls, value: Any) -> Form:
        return cls(type(value), tuple(value) if isinstance(value, dict) else tuple(range(len(value))))


@dataclass(frozen=True)
class ArgumentNames:
    """The names of a forward's arguments.

    Args:
        positional: names that positional arguments fill, in order.
        accepted: names that keywords may use besides.
        defaults: values of arguments that were left out.
        open_ended: whether any other keyword is taken too (``**kwargs``).
        rest: name of ``*args``, if there is one.
    """

    positional: tuple[str, ...]
    accepted: frozenset[str]
    defaults: Mapping[str, Any]
    open_ended: bool
    rest: str | None = None

    @classmethod
    def of(cls, forward: Callable[..., Any], unbound: bool) -> ArgumentNames:
        parameters = list(inspect.signature(forward).parameters.values())[1 if unbound else 0 :]
        by_position = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
        return cls(
            positional=tuple(p.name for p in parameters if p.kind in by_position),
            accepted=frozenset(p.name for p in parameters if p.kind in by_name),
            defaults={p.name: p.default for p in parameters if p.default is not inspect.Parameter.empty},
            open_ended=any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters),
            rest=next((p.name for p in parameters if p.kind is inspect.Parameter.VAR_POSITIONAL), None),
        )

    def bind(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments of a call by name: those of ``**kwargs`` under their own names, those of ``*args`` as ``args_0``, ...; what
        lies in a tuple, list or dict with tensors likewise, and its form under its own name. Raises `GuardMiss` if there are too
        many arguments or an unknown keyword; the original then says what is wrong."""
        values = dict(self.defaults)
        given = self.positional[: len(args)]
        values.update(zip(given, args))
        if len(args) > len(self.positional):
            if self.rest is None:
                raise GuardMiss("there are more positional arguments than names for them")
            values.update({f"{self.rest}_{i}": value for i, value in enumerate(args[len(self.positional) :])})
        for name, value in kwargs.items():
            if name in given or (name not in self.accepted and not self.open_ended):
                raise GuardMiss(f"the keyword {name!r} is not one of its arguments")
            values[name] = value
        return {part: item for name, value in values.items() for part, item in _apart(name, value)}


def _apart(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    parts = parts_of(name, value)
    yield name, Form.of(value) if parts else value
    for part, (_, item) in parts.items():
        yield from _apart(part, item)


class SignatureOfOriginal:
    """Descriptor that gives a `HexaForward` the ``inspect.signature`` of the forward it stands for."""

    def __get__(self, instance: Any, owner: type) -> inspect.Signature | None:
        if instance is None:
            return None
        return inspect.signature(instance.own_forward or type(instance.module).forward.__get__(instance.module))


class NoGlobals:
    """``__globals__`` of a rewritten forward: `torch.jit.script` asks for it before it compiles a function's code."""

    def __get__(self, forward: object, owner: type) -> NoReturn:
        raise AttributeError(
            "a forward that hexa_fx rewrote has no Python code of its own for torch.jit.script; call hexa_fx.undo_ on the model "
            "first, or use torch.jit.trace, torch.export or torch.compile, which take it"
        )
