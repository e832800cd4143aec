"""Options of `hexa_fx.optimize`, with an overlay from the environment."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from dataclasses import dataclass

from hexa_fx.errors import InputError

_TRUE, _FALSE = ("1", "true", "yes", "on"), ("0", "false", "no", "off")


@dataclass(frozen=True)
class HexaConfig:
    """What `hexa_fx.optimize` may do.

    Args:
        verify: compare every rewritten block with its original before it is accepted, and leave it as it was if they differ.
        strict: raise when nothing was rewritten or a block differs, instead of warning.
        recompute_h: keep only the block's input for backward and compute the pre-activations again there.
        probe_tokens: at most this many tokens of the example are used to understand a block.

    Techniques of the paper, all on; switch one off to see what it is worth (docs/swin_moe.md), values stay the same:

        expert_operators: expert-specific operators (section 3.1); off: dispatch, torch's grouped matmul, combine.
        fused_kernel: dX, dW and db of a projection in one kernel (ESFK, section 3.2).
        topk_memory: only intermediate tensors grow with k (section 3.2); off: inputs and outputs of the experts do too.
        shared_cache: data-centric layers gather weights into one cache (section 3.3); off: each keeps its own for backward.
        overlap: gathers of weights are issued ahead of their use (section 3.3).

    Raises:
        InputError: a field has a value of another type, or ``probe_tokens`` is less than 1.
    """

    verify: bool = True
    strict: bool = False
    recompute_h: bool = False
    probe_tokens: int = 256
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
        if self.probe_tokens < 1:
            raise InputError(f"HexaConfig(probe_tokens={self.probe_tokens}): expected at least 1")

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ, **given: bool | int) -> HexaConfig:
        """Defaults, then variables named after the fields (``HEXA_FX_VERIFY``, ``HEXA_FX_PROBE_TOKENS``, ...), then ``given``.

        Raises:
            InputError: a variable holds something else than its type; names the values it may have.
        """
        values: dict[str, bool | int] = {}
        for field in dataclasses.fields(cls):
            text = environment.get(f"HEXA_FX_{field.name.upper()}")
            if text is not None:
                values[field.name] = _parse(f"HEXA_FX_{field.name.upper()}", text, isinstance(field.default, bool))
        return cls(**{**values, **given})  # type: ignore[arg-type]


def _parse(name: str, text: str, boolean: bool) -> bool | int:
    lowered = text.strip().lower()
    if boolean and lowered in _TRUE + _FALSE:
        return lowered in _TRUE
    if not boolean and lowered.isdecimal():
        return int(lowered)
    expected = "/".join(_TRUE + _FALSE) if boolean else "a whole number"
    raise InputError(f"{name}={text!r}: expected {expected}")
