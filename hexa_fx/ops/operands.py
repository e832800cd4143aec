"""The operands of a layer, of products and of the activation's backward: a frozen record an operator, its schema's fields in order.

The kernels of every device, their checks and their shape rules begin with ``EsmmAct(*args)`` and hand that on. What the fields are
is said in the operators' own docstrings. T tokens, n rows in expert order, E experts.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from hexa_fx.ir import Glu, Layout
from hexa_fx.ops.activations import inner_width
from hexa_fx.ops.rows import columns_of, row_count


class Esmm(NamedTuple):
    """Of `hexa_fx.ops.esmm.esmm`."""

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    v: Tensor | None
    offs: Tensor
    top_k: int
    layout: Layout

    @property
    def rows(self) -> int:
        """n."""
        return row_count(self.x, self.v)

    @property
    def columns(self) -> int:
        """N."""
        return columns_of(self.weight, self.layout)

    @property
    def plain(self) -> EsmmAct:
        """The same as a product whose activation does nothing."""
        rows = (self.v, self.offs, self.top_k, self.layout)
        return EsmmAct(self.x, self.weight, self.bias, None, None, *rows, "none", "none")


class EsmmAct(NamedTuple):
    """Of `hexa_fx.ops.esmm_act.esmm_act`."""

    x: Tensor
    w1: Tensor
    b1: Tensor | None
    w3: Tensor | None
    b3: Tensor | None
    v: Tensor | None
    offs: Tensor
    top_k: int
    layout: Layout
    activation: str
    glu: Glu
    params: tuple[float, ...] = ()
    keep_h: bool = True

    @property
    def rows(self) -> int:
        """n."""
        return row_count(self.x, self.v)

    @property
    def width(self) -> int:
        """Columns of h."""
        columns = columns_of(self.w1, self.layout)
        return 2 * columns if self.glu == "split" else columns

    @property
    def inner(self) -> int:
        """Columns of a, and of one half of a gated h."""
        return inner_width(columns_of(self.w1, self.layout), self.glu)


class EsmmActBackward(NamedTuple):
    """Of `hexa_fx.ops.esmm_act_backward.esmm_act_backward`."""

    dy: Tensor
    weight: Tensor
    h: Tensor
    top_k_weights: Tensor | None
    v: Tensor
    offs: Tensor
    top_k: int
    layout: Layout
    activation: str
    glu: Glu
    params: tuple[float, ...] = ()

    @property
    def inner(self) -> int:
        """Columns of a."""
        return columns_of(self.weight, self.layout)


class ActivateBackward(NamedTuple):
    """Of `hexa_fx.ops.activate.activate_backward`."""

    da: Tensor
    h: Tensor
    top_k_weights: Tensor | None
    v: Tensor | None
    offs: Tensor | None
    activation: str
    glu: Glu
    params: tuple[float, ...] = ()


class Estmm(NamedTuple):
    """Of `hexa_fx.ops.estmm.estmm`."""

    x: Tensor
    g: Tensor
    x_index: Tensor | None
    g_index: Tensor | None
    offs: Tensor
    top_k: int
    layout: Layout

    @property
    def rows(self) -> int:
        """n."""
        return row_count(self.x, self.x_index)

    @property
    def experts(self) -> int:
        """E."""
        return self.offs.shape[0] - 1


class Esfk(NamedTuple):
    """Of `hexa_fx.ops.esfk.esfk`."""

    x: Tensor
    g: Tensor
    weight: Tensor
    x_index: Tensor | None
    offs: Tensor
    top_k: int
    layout: Layout
    has_bias: bool

    @property
    def experts(self) -> int:
        """E."""
        return self.offs.shape[0] - 1


class MoeFfn(NamedTuple):
    """Of `hexa_fx.ops.moe_ffn.moe_ffn`."""

    x: Tensor
    top_k_index: Tensor
    top_k_weights: Tensor | None
    w1: Tensor
    b1: Tensor | None
    w3: Tensor | None
    b3: Tensor | None
    w2: Tensor
    b2: Tensor | None
    activation: str
    glu: Glu
    params: tuple[float, ...]
    layout1: Layout
    layout2: Layout
    recompute_h: bool

    @property
    def rows(self) -> int:
        """n."""
        return self.top_k_index.shape[0] * self.top_k_index.shape[1]

    @property
    def width(self) -> int:
        """Columns of h."""
        columns = columns_of(self.w1, self.layout1)
        return 2 * columns if self.glu == "split" else columns

    @property
    def output_size(self) -> int:
        """Columns of y."""
        return columns_of(self.w2, self.layout2)
