"""Routings, operands and float64 references of the GPU tests."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

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


@contextmanager
def no_waiting() -> Iterator[None]:
    """A context in which the host must not wait for the device."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
