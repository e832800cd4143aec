"""Routings, operands and float64 references of the GPU tests."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from hexa_fx.ops.activations import activation_forward, weighted_backward
from hexa_fx.ops.rows import flip
from hexa_fx.ops.table import Esfk, Esmm, EsmmAct, EsmmActBackward, Estmm
from hexa_fx.ops.table_variants import EsmmActBackwardLowRank, EsmmLowRank

Result = TypeVar("Result")

DEVICE = "cuda"
TOLERANCE = {torch.bfloat16: 4e-3, torch.float16: 6e-4, torch.float32: 4e-6, torch.float64: 1e-13}
"""Per-row relative error: output rounding (2^-9, 2^-12), 3xTF32, float64."""
TF32_TOLERANCE = 2e-3

ROUTINGS = ("random", "all_to_one", "empty_experts", "duplicates", "sentinels", "none_routed")


@dataclass(frozen=True)
class Routing:
    """What reindex gives, computed by torch."""

    index: Tensor
    v: Tensor
    inv: Tensor
    offs: Tensor
    top_k: int
    experts: int

    @property
    def n(self) -> int:
        return self.v.shape[0]

    @property
    def routed(self) -> int:
        return int(self.offs[-1])


def make_routing(kind: str, tokens: int, top_k: int, experts: int) -> Routing:
    index = torch.randint(0, experts, (tokens, top_k), device=DEVICE)
    if kind == "all_to_one":
        index[:] = experts // 2
    elif kind == "empty_experts":
        index = index // 2 * 2 % experts
    elif kind == "duplicates":
        index[:, 1:] = index[:, :1]
    elif kind == "sentinels":
        index[torch.rand(tokens, top_k, device=DEVICE) < 0.3] = experts
    elif kind == "none_routed":
        index[:] = experts
    return reference_reindex(index, experts)


def reference_reindex(index: Tensor, experts: int) -> Routing:
    flat = index.reshape(-1).long()
    flat = torch.where((flat < 0) | (flat > experts), experts, flat)
    ids, v = torch.sort(flat, stable=True)
    inv = torch.empty_like(v)
    inv[v] = torch.arange(v.numel(), device=v.device)
    offs = torch.searchsorted(ids, torch.arange(experts + 1, device=ids.device))
    return Routing(index, v.int(), inv.int(), offs.int(), index.shape[1], experts)


def randn(*shape: int, dtype: torch.dtype, scale: float = 1.0) -> Tensor:
    return (torch.randn(*shape, device=DEVICE, dtype=torch.float32) * scale).to(dtype)


def stacked(experts: int, n: int, k: int, layout: str, dtype: torch.dtype) -> Tensor:
    """A weight, of whose products k are added up."""
    return randn(*((experts, n, k) if layout == "nk" else (experts, k, n)), dtype=dtype, scale=k**-0.5)


def gathered(x: Tensor, index: Tensor | None, top_k: int) -> Tensor:
    return x.double() if index is None else x.double()[index.long() // top_k]


def reference_esmm(x: Tensor, w: Tensor, bias: Tensor | None, v: Tensor | None, r: Routing, layout: str) -> Tensor:
    rows, w = gathered(x, v, r.top_k), w.double()
    w = w.transpose(1, 2) if layout == "nk" else w
    y = rows.new_zeros(rows.shape[0], w.shape[2])
    offs = r.offs.tolist()
    for e in range(r.experts):
        y[offs[e] : offs[e + 1]] = rows[offs[e] : offs[e + 1]] @ w[e]
        if bias is not None:
            y[offs[e] : offs[e + 1]] += bias[e].double()
    return y


def reference_estmm(
    x: Tensor, g: Tensor, x_index: Tensor | None, g_index: Tensor | None, r: Routing, layout: str
) -> Tensor:
    x, g = gathered(x, x_index, r.top_k), gathered(g, g_index, r.top_k)
    offs = r.offs.tolist()
    dw = [x[offs[e] : offs[e + 1]].t() @ g[offs[e] : offs[e + 1]] for e in range(r.experts)]
    return torch.stack(dw if layout == "kn" else [d.t() for d in dw])


def row_error(out: Tensor, ref: Tensor) -> float:
    """Largest relative error of a row; rows whose reference is zero must be zero. NaN never passes."""
    out, ref = out.double().reshape(-1, out.shape[-1]), ref.double().reshape(-1, ref.shape[-1])
    if not out.numel():
        return 0.0
    size = ref.norm(dim=1)
    error = (out - ref).norm(dim=1)
    relative = torch.where(size > 0, error / size, torch.where(error == 0, 0.0, float("inf")))
    return float("inf") if bool(relative.isnan().any()) else float(relative.max())


def assert_close(out: Tensor, ref: Tensor, dtype: torch.dtype, factor: float = 1.0) -> None:
    assert out.shape == ref.shape
    error = row_error(out, ref)
    assert error <= TOLERANCE[dtype] * factor, f"per-row relative error {error:.2e}"


def sums(g: Tensor, r: Routing) -> Tensor:
    """Of every expert's rows."""
    return reference_estmm(torch.ones(r.n, 1, device=g.device), g, None, None, r, "kn")[:, 0]


def reference_product(o: Esmm | EsmmAct, r: Routing) -> Tensor:
    """An esmm, or the pre-activation of an esmm_act; with a second product where the record has one."""
    each = ((o.w1, o.b1, "c"), (o.w3, o.b3, "c3")) if isinstance(o, EsmmAct) else ((o.weight, o.bias, "c"),)
    found = []
    for w, bias, c in each:
        if w is not None:
            y = reference_esmm(o.x, w, bias, o.v, r, o.layout)
            u = getattr(o, "u", None)
            found.append(y if u is None else y + reference_esmm(u, getattr(o, c), None, None, r, o.layout))
    return torch.cat(found, 1)


Run = Callable[..., Any]
"""An operator or a family's code of it, of a record, and perhaps of a tile."""


def check_esmm(run: Run, o: Esmm, r: Routing, *tile: object) -> None:
    assert_close(run(o, *tile), reference_product(o, r), o.x.dtype)


def check_esmm_act(
    run: Run, o: EsmmAct, r: Routing, *tile: object, exact: EsmmAct | None = None, within: float | None = None
) -> None:
    """Rows of no expert are zero. exact: with weights as they are read; within: another tolerance than the dtype's."""
    (h, a), want = run(o, *tile), reference_product(exact or o, r)
    tolerance = within or TOLERANCE[o.x.dtype]
    assert row_error(h, want) <= tolerance if o.keep_h else h.shape[0] == 0
    activated = activation_forward(want, o.activation, o.glu, o.params)
    activated[r.routed :] = 0
    assert row_error(a, activated) <= 2 * tolerance


def check_esmm_act_backward(run: Run, o: EsmmActBackward, r: Routing, *tile: object) -> None:
    (dh, a, dots), dtype, h = run(o, *tile), o.dy.dtype, o.h.double()
    da = reference_product(o.to(EsmmLowRank if isinstance(o, EsmmActBackwardLowRank) else Esmm, x=o.dy), r)
    static = (o.activation, o.glu, o.params)
    if o.top_k_weights is None:
        assert_close(dh, weighted_backward(da, h, None, *static)[0], dtype, 2)
        return
    w, acted = o.top_k_weights.double().view(-1)[o.v.long()].unsqueeze(1), activation_forward(h, *static)
    w[r.routed :] = 0
    assert_close(a, acted * w, dtype, 2)
    assert_close(dh, weighted_backward(da * w, h, None, *static)[0], dtype, 2)
    by_row = dots.double()[o.v.long()]
    size = da.norm(dim=1) * acted.norm(dim=1) + 1e-9
    wrong = ((by_row - (da * acted).sum(1)).abs() / size)[: r.routed]
    assert not (wrong >= TOLERANCE[dtype]).any()
    assert not wrong.isnan().any()
    assert not by_row[r.routed :].any()


def check_estmm(run: Run, o: Estmm, r: Routing, *tile: object) -> None:
    assert_close(run(o, *tile), reference_estmm(o.x, o.g, o.x_index, o.g_index, r, o.layout), o.x.dtype)


def check_esfk(run: Run, o: Esfk, r: Routing, *tile: object, factor: float = 1.0) -> Tensor | None:
    """Gives db, which is compared if there is a bias; ``factor``: of its tolerance."""
    dx, dw, db = run(o, *tile)
    assert_close(dx, reference_esmm(o.g, o.weight, None, None, r, flip(o.layout)), o.x.dtype)
    assert_close(dw, reference_estmm(o.x, o.g, o.x_index, None, r, o.layout), o.x.dtype)
    if o.has_bias:
        assert_close(db, sums(o.g, r), o.x.dtype, factor)
    return db  # type: ignore[no-any-return]


def graph_of(run: Callable[[], Result]) -> tuple[torch.cuda.CUDAGraph, Result]:
    """A call as a graph, and what its replays write to."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = run()
    return graph, result


@contextmanager
def no_waiting() -> Iterator[None]:
    """A context in which the host must not wait for the device."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
