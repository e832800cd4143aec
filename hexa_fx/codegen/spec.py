"""What a kernel is: one frozen value that everything after it (text, key, cubin, launcher) is a function of.

The vocabulary is CUTLASS Python's (`cutlass_library`): element types, math operations and schedules are its enums.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

from hexa_fx.codegen.cutlass import DataType, KernelScheduleType, MathOperation
from hexa_fx.errors import KernelError

if TYPE_CHECKING:
    from hexa_fx.ir import Glu, Layout

Option = int | float | str | bool

_ENUMS: dict[str, Any] = {
    "dtype": DataType,
    "out_dtype": DataType,
    "math": MathOperation,
    "schedule": KernelScheduleType,
}


class SpecError(KernelError, ValueError):
    """A KernelSpec that no kernel can serve. Raised before anything is emitted; lists every reason."""

    message = "kernel {op} ({family}, sm_{arch}) cannot be generated: {detail}"


@dataclass(frozen=True)
class KernelSpec:
    """One kernel, fully determined. Hashable; `to_json` / `from_json` round-trip.

    Args:
        family: which template serves it: one of `hexa_fx.codegen.family_names`.
        op: the operator of docs/operators.md, e.g. ``esmm``.
        arch: compute capability the cubin is built for, 80 for 8.0.
        dtype: element type of the operands in memory.
        out_dtype: element type of the result; None is `dtype`.
        math: ``multiply_add``: the tensor core's own type (tf32 for f32); ``multiply_add_fast_f32``: 3xTF32, exact to
            about float32 rounding. Accumulation is float32 always (float64 for f64).
        bm, bn, bk: tile; 0 where the family has none.
        stages: shared-memory stages of the main loop.
        schedule: `KernelScheduleType.Multistage` (mma.sync), or a warp-specialised one (wgmma).
        layout: of the weight: ``nk`` is (E, N, K), ``kn`` is (E, K, N).
        gather: the row operand is read through ``v``.
        activation: folded into the epilogue, ``none`` for a plain store.
        glu: how gate and up are stored in the weight.
        bias, scale: whether a bias row per expert, a factor per slot is applied.
        accumulate: weight gradients and sums are added to what the result holds, in the accumulators' type, or weight gradients in
            the operands'; see `adding`.
        aligned: every address and stride is a multiple of 16 bytes. False takes the slower, element-wise path.
        options: what only one family knows, sorted pairs; see `with_options`.
    """

    family: str
    op: str
    arch: int
    dtype: DataType = DataType.bf16
    out_dtype: DataType | None = None
    math: MathOperation = MathOperation.multiply_add
    bm: int = 0
    bn: int = 0
    bk: int = 0
    stages: int = 0
    schedule: KernelScheduleType = KernelScheduleType.Multistage
    layout: Layout = "nk"
    gather: bool = False
    activation: str = "none"
    glu: Glu = "none"
    bias: bool = False
    scale: bool = False
    accumulate: bool = False
    aligned: bool = True
    options: tuple[tuple[str, Option], ...] = ()

    @property
    def out(self) -> DataType:
        """Element type of the result."""
        return self.out_dtype or self.dtype

    @property
    def wide(self) -> DataType:
        """Element type of the accumulators."""
        return DataType.f64 if self.dtype is DataType.f64 else DataType.f32

    @property
    def key(self) -> str:
        """Short identity of the spec (not of the text it renders to)."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()[:16]

    def option(self, name: str, default: Option = 0) -> Option:
        """The value of one of `options`, or `default`."""
        return dict(self.options).get(name, default)

    def with_options(self, **values: Option) -> KernelSpec:
        """A copy with these options set; kept sorted so that equal specs are equal."""
        merged = {**dict(self.options), **values}
        return replace(self, options=tuple(sorted(merged.items())))

    def adding(self, to: DataType | None = None) -> KernelSpec:
        """The same with a result that is added to, of the accumulators' type or of another."""
        return replace(self, accumulate=True, out_dtype=to or self.wide)

    @property
    def adds_floats(self) -> bool:
        """Whether a result is added to in the accumulators' type."""
        return self.accumulate and self.out is self.wide

    def to_json(self) -> str:
        """One line, keys sorted, enums by their CUTLASS name. Fields at their default are left out."""
        values = {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) != f.default}
        values.update({name: values[name].name for name in _ENUMS if name in values})
        return json.dumps(values, sort_keys=True, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> KernelSpec:
        """Inverse of `to_json`. Raises ValueError on unknown fields."""
        values = json.loads(text)
        unknown = set(values) - {f.name for f in fields(cls)}
        if unknown:
            raise ValueError(f"KernelSpec has no field {', '.join(sorted(unknown))}")
        for name, enum in _ENUMS.items():
            if values.get(name) is not None:
                values[name] = enum[values[name]]
        values["options"] = tuple((str(k), v) for k, v in values.get("options", ()))
        return cls(**values)
