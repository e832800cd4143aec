"""The table of quantisation for FP8 block compute. Letters and layouts are those of `hexa_fx.ops.table_fp8`."""

from __future__ import annotations

from typing import Annotated

from torch import Tensor

from hexa_fx.formats.fp8_scaling import padded
from hexa_fx.ir import Glu, Layout
from hexa_fx.ops.forms import Form, shape
from hexa_fx.ops.library import operator
from hexa_fx.ops.records import Operands
from hexa_fx.ops.rows import columns_of, flip
from hexa_fx.ops.table_fp8 import (
    QUANTIZABLE,
    Grouped,
    QuantizedRows,
    elements,
    groups_and_scales,
    rows_and_scales,
    scales,
)


def _quantizable(dims: str, by: str = "") -> Form:
    return Form(dims, QUANTIZABLE, "of 16 or 32 bits ", by=by)


def weight_sizes(w: Tensor, layout: str, glu: str) -> tuple[int, int, int]:
    """E, and the rows and columns of what `quantize_weight_fp8` makes of a weight."""
    n, k = columns_of(w, layout), columns_of(w, flip(layout))
    if glu == "none":
        return w.shape[0], padded(n), padded(k)
    return w.shape[0], 2 * padded(n if glu == "split" else n // 2), padded(k)


@operator("quantize_rows_fp8")
class QuantizeRowsFp8(Operands):
    """Rows in blocks of 1 x 128.

    Args:
        x: any strides.
        binary: scales are powers of two, as `GroupRowsFp8` asks for.

    Results:
        q: (R, C') e4m3.
        s: (R, C' / 128) float32.
    """

    x: Annotated[Tensor, _quantizable("R C")]
    binary: bool
    returns = "(Tensor q, Tensor s)"

    def results(self) -> tuple[Tensor, Tensor]:
        return rows_and_scales(self.x, self.x.shape[0], padded(self.x.shape[1]))


class _Numbers(Operands):
    x: Annotated[Tensor, _quantizable("n C", by="v")]


@operator("quantize_columns_fp8")
class QuantizeColumnsFp8(Grouped, _Numbers):
    """Rows gathered into expert order and transposed in groups of 128 rows, each column of a group with its scale.

    Results:
        q: (G, C', 128) e4m3. ``q[F(e) + j, c, r]`` is of row ``offs[e] + 128 j + r`` and column c, where F(e) is the sum of
            ``ceil(rows / 128)`` over the experts before e; zero where the expert has no such row.
        s: (G, C') float32, of the 128 rows of a group in a column.
    """

    returns = "(Tensor q, Tensor s)"

    def results(self) -> tuple[Tensor, Tensor]:
        return groups_and_scales(self.x, self.groups(self.x), padded(self.x.shape[1]))


@operator("group_rows_fp8")
class GroupRowsFp8(Grouped, QuantizedRows):
    """Quantised rows as `QuantizeColumnsFp8` lays rows out, of whose columns 128 share a scale in a group.

    It is the largest of the 128 rows' scales. All are powers of two (`QuantizeRowsFp8` with ``binary``), so that elements stay the
    numbers that they are but for those that become denormal; as activations in section 3.3.3 of the DeepSeek-V3 report
    (arXiv 2412.19437).

    Results:
        q: (G, C', 128) e4m3.
        s: (G, C').
    """

    returns = "(Tensor q, Tensor s)"

    def results(self) -> tuple[Tensor, Tensor]:
        return groups_and_scales(self.x, self.groups(self.x), self.x.shape[1])


@operator("quantize_weight_fp8")
class QuantizeWeightFp8(Operands):
    """Quantises a projection's weight in blocks of 128 x 128 into buffers, in either orientation.

    Gate and up become the first and the second half of the rows. Every element of the buffers is written.

    Args:
        q, s: of N' rows, where N' is 2 I' for a gated weight, and K' columns.
        q_t, s_t: the same elements and scales, transposed; or None.
        w: (E, N, K) for layout ``nk``, (E, K, N) for ``kn``, any strides.
        w3: the up projection, shaped as w, for glu ``split``.
        glu: how gate and up lie in w, as in `FfnSpec`; ``none`` for the second projection.
    """

    q: Annotated[Tensor, elements("E R C", written=True)]
    s: Annotated[Tensor, scales("E R/128 C/128", written=True)]
    q_t: Annotated[Tensor | None, elements("E C R", written=True)]
    s_t: Annotated[Tensor | None, scales("E C/128 R/128", written=True)]
    w: Annotated[Tensor, _quantizable("E P Q")]
    w3: Annotated[Tensor | None, _quantizable("E P Q")]
    layout: Layout
    glu: Glu
    returns = "()"

    def faults(self) -> str:
        if (self.w3 is not None) != (self.glu == "split") or (self.w3 is not None and self.w3.dtype != self.w.dtype):
            return f"w3 is {None if self.w3 is None else shape(self.w3)}; only 'split' has one, like w"
        expected = weight_sizes(self.w, self.layout, self.glu)
        return "" if tuple(self.q.shape) == expected else f"q is {shape(self.q)}; expected {expected}"
