"""The options of `hexa_fx.optimize`, and their defaults from environment variables."""

from __future__ import annotations

import dataclasses
import difflib
import fnmatch
import functools
import logging
import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from hexa_fx.errors import InputError

logger = logging.getLogger(__name__)

COMPUTE = ("native", "fp8_block")
"""Values of `HexaConfig.compute`."""

OTHER_VARIABLES = (
    "AUTOTUNE BUILD_JOBS CACHE_DIR CHECKED COMPILER CUDA_ARCH CUDA_INCLUDE CUTLASS_INCLUDE DISABLE_JIT DUMP_DIR FEW_TOKENS KEEP "
    "KERNEL_PACK LOGS NVCC PROGRESS VERBOSE_BUILD WAIT_FOR_KERNELS"
).split()
"""Environment variables that are no options of `HexaConfig`, without ``HEXA_FX_``."""

_TRUE, _FALSE = ("1", "true", "yes", "on"), ("0", "false", "no", "off")


@dataclass(frozen=True)
class HexaConfig:
    """Options of `hexa_fx.optimize`.

    Args:
        verify: compare every rewritten block with its original, and leave the block as it was if they differ.
        strict: raise instead of warning when no block was rewritten, or when a rewritten block differs from its original.
        recompute_h: save only a block's input for backward, and compute the pre-activations again there.
        probe_tokens: how many tokens of the example inputs are used, at most, to analyse a block.
        own_code_when_small: on a CPU, a block runs its own code on inputs that are so small that it is faster there.
        analysis_bytes: memory that the analysis of a block may hold beside the model, on its device and on the host (four experts
            in float64 if that is more). Large weights are raised to float64 piece by piece.
        batch_invariant: a token's result has the same bits in any batch, with or without gradients; slower (docs/training.md).
        skip: paths of blocks, or of modules around them, that are left as they are: patterns of `fnmatch` with commas between
            them; ``*`` switches everything off (so does ``HEXA_FX_SKIP=*`` in the environment).
        specialisations: for how many kinds of calls (modes, dtypes, autocast, settings) a block is analysed; past that, calls of
            new kinds run its own code.
        check_every: one call in so many runs the original too and compares; a block that differs is left to its original, with a
            warning, or raises if ``strict`` (docs/contract.md). 0: never, which costs nothing.
        compute: in what experts multiply: ``native``, their tensors' dtype, or ``fp8_block``, e4m3 with a scale for 128 elements of
            a row and for 128 x 128 of a weight (docs/fp8.md). What that adds to results is measured and reported.

    The remaining fields are techniques of the paper. All are on; switch one off to see what it contributes
    (docs/swin_moe.md). Results stay the same.

        expert_operators: expert-specific operators (section 3.1); off: dispatch, torch's grouped matmul, combine.
        fused_kernel: dX, dW and db of a projection in one kernel (ESFK, section 3.2).
        topk_memory: only intermediate tensors grow with k (section 3.2); off: the experts' inputs and outputs do too.
        shared_cache: data-centric layers gather weights into one cache (section 3.3); off: each keeps its own for backward.
        overlap: weights are gathered ahead of their use (section 3.3).

    Raises:
        InputError: a field has a value of the wrong type, ``probe_tokens``, ``analysis_bytes`` or ``specialisations`` is less than
            1, ``check_every`` less than 0, ``compute`` is unknown, or ``batch_invariant``, FP8 and ablations are combined.
    """

    verify: bool = True
    strict: bool = False
    recompute_h: bool = False
    probe_tokens: int = 256
    own_code_when_small: bool = True
    analysis_bytes: int = 2 << 30
    batch_invariant: bool = False
    skip: str = ""
    specialisations: int = 8
    check_every: int = 0
    compute: str = "native"
    expert_operators: bool = True
    fused_kernel: bool = True
    topk_memory: bool = True
    shared_cache: bool = True
    overlap: bool = True

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if type(value) is not type(field.default):
                raise InputError(f"HexaConfig({field.name}={value!r}): expected {type(field.default).__name__}")
        for name in ("probe_tokens", "analysis_bytes", "specialisations"):
            if getattr(self, name) < 1:
                raise InputError(f"HexaConfig({name}={getattr(self, name)}): expected at least 1")
        if self.check_every < 0:
            raise InputError(f"HexaConfig(check_every={self.check_every}): expected 0 or more")
        if self.batch_invariant and not (self.expert_operators and self.fused_kernel):
            raise InputError(
                "HexaConfig(batch_invariant=True) needs expert_operators and fused_kernel, which are switched off"
            )
        if self.compute not in COMPUTE:
            raise InputError(f"HexaConfig(compute={self.compute!r}): expected one of {', '.join(COMPUTE)}")
        ablated = not (self.expert_operators and self.fused_kernel and self.topk_memory)
        if self.compute != "native" and (self.batch_invariant or ablated):
            raise InputError(
                f"HexaConfig(compute={self.compute!r}) goes with neither batch_invariant nor an ablation; leave these as they are"
            )

    @property
    def off(self) -> bool:
        """Whether everything is switched off."""
        return self.skip.strip() == "*"

    def skips(self, path: str) -> bool:
        """Whether the block at a path is left as it is, since it or a module around it is to be skipped."""
        names = path.split(".")
        around = [".".join(names[: n + 1]) for n in range(len(names))]
        return any(fnmatch.filter(around, pattern) for pattern in self._patterns())

    def say_unknown(self, paths: Collection[str]) -> None:
        """Warns of what is to be skipped and is at none of these paths of a model's modules."""
        for pattern in self._patterns():
            if not fnmatch.filter(paths, pattern):
                logger.warning("skip=%r: named_modules() of the model lists no such path", pattern)

    def _patterns(self) -> list[str]:
        return [pattern.strip() for pattern in self.skip.split(",") if pattern.strip()]

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ, **given: bool | int | str) -> HexaConfig:
        """Fields from ``given``, else from their variables (``HEXA_FX_VERIFY``, ``HEXA_FX_PROBE_TOKENS``, ...), else the defaults.

        Raises:
            InputError: a variable's text is not a value of its field; the message lists what it may be.
        """
        for name in environment:
            if name.startswith("HEXA_FX_"):
                _say_unless_known(name.removeprefix("HEXA_FX_"))
        values: dict[str, bool | int | str] = {}
        for field in dataclasses.fields(cls):
            text = environment.get(f"HEXA_FX_{field.name.upper()}")
            if text is not None:
                values[field.name] = _parse(f"HEXA_FX_{field.name.upper()}", text, type(field.default))
        return cls(**{**values, **given})  # type: ignore[arg-type]


@functools.cache
def _say_unless_known(name: str) -> None:
    known = {*OTHER_VARIABLES, *(field.name.upper() for field in dataclasses.fields(HexaConfig))}
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean HEXA_FX_{near[0]}?" if near else "docs/environment.md lists those that there are"
        logger.warning("HEXA_FX_%s is set, and hexa_fx reads no such variable: %s", name, hint)


def checked_mode() -> bool:
    """HEXA_FX_CHECKED alone, since every re-index asks for it."""
    return os.environ.get("HEXA_FX_CHECKED", "").lower() in _TRUE


def _parse(name: str, text: str, kind: type) -> bool | int | str:
    lowered, boolean = text.strip().lower(), kind is bool
    if kind is str:
        return text.strip()
    if boolean and lowered in _TRUE + _FALSE:
        return lowered in _TRUE
    if not boolean and lowered.isdecimal():
        return int(lowered)
    expected = "/".join(_TRUE + _FALSE) if boolean else "a whole number"
    raise InputError(f"{name}={text!r}: expected {expected}")
