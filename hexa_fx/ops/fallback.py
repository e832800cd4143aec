"""Implementations for devices without kernels of their own: plain torch, correct anywhere.

They do not synchronise where torch has a grouped matmul for the case (`torch._grouped_mm`), nor while a CUDA graph is captured.
Otherwise each operator reads the offsets on the host once. A device's kernels, registered with
``torch.library.impl("hexa::esmm", "CUDA")`` or `hexa_fx.ops.library.register_kernel`, replace them.
"""

from __future__ import annotations

import logging
from functools import lru_cache

import torch
from torch import Tensor

from hexa_fx.ops import library
from hexa_fx.ops.cpu import groups_of
from hexa_fx.ops.rows import accumulate_dtype, expert_of_row, expert_rows, flip, gather_rows, invert, routed_rows
from hexa_fx.ops.table import Esfk, Esmm, Ess, Estmm
from hexa_fx.torch_private import grouped_mm

logger = logging.getLogger(__name__)


@lru_cache(maxsize=64)
def _log_once(op: str, device: str, how: str) -> None:
    level = logging.DEBUG if device == "cuda" else logging.WARNING  # on CUDA whoever runs this has said why
    logger.log(level, "hexa::%s has no kernel for %s here; running %s", op, device, how)


def reindex_any(top_k_index: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Stable sort; ids out of range are sentinels."""
    ids = top_k_index.reshape(-1).to(torch.int32)
    ids = torch.where((ids < 0) | (ids > num_experts), num_experts, ids)
    ids, order = torch.sort(ids, stable=True)
    experts = torch.arange(num_experts + 1, dtype=torch.int32, device=ids.device)
    offs = torch.searchsorted(ids, experts, out_int32=True)
    v = order.to(torch.int32)
    return v, invert(v), offs


@library.kernel("esmm", "any")
def esmm_any(o: Esmm) -> Tensor:
    """Gather, grouped matmul, bias."""
    rows = gather_rows(o.x, o.v, o.top_k)
    kn = o.weight.transpose(1, 2) if o.layout == "nk" else o.weight
    y = _grouped_mm(rows, kn, o.offs)
    if o.bias is not None:
        y = y + expert_rows(o.bias, o.offs, y.shape[0])
    return torch.where(routed_rows(o.offs, y.shape[0]), y, 0)


@library.kernel("ess", "any")
def ess_any(o: Ess) -> Tensor:
    """index_add over the experts of the rows (in float32; the order of the sum is not fixed on a GPU)."""
    rows = gather_rows(o.g, o.v, o.top_k).to(accumulate_dtype(o.g.dtype))
    if o.scale is not None and o.v is not None:
        rows = rows * o.scale.reshape(-1).index_select(0, o.v).to(rows.dtype).unsqueeze(1)
    experts = o.offs.shape[0] - 1
    y = rows.new_zeros((experts + 1, o.g.shape[1]))
    return y.index_add_(0, expert_of_row(o.offs, rows.shape[0]), rows)[:experts].to(o.g.dtype)


@library.kernel("estmm", "any")
def estmm_any(o: Estmm) -> Tensor:
    """Gather, grouped outer product."""
    x, g = gather_rows(o.x, o.x_index, o.top_k), gather_rows(o.g, o.g_index, o.top_k)
    return _grouped_outer(g, x, o.offs) if o.layout == "nk" else _grouped_outer(x, g, o.offs)


@library.kernel("esfk", "any")
def esfk_any(o: Esfk) -> tuple[Tensor, Tensor, Tensor]:
    """Its three parts."""
    ops = torch.ops.hexa
    dx = ops.esmm(o.g, o.weight, None, None, o.offs, 1, flip(o.layout))
    dw = ops.estmm(o.x, o.g, o.x_index, None, o.offs, o.top_k, o.layout)
    db = ops.ess(o.g, None, o.offs, 1, None) if o.has_bias else o.g.new_empty(0)
    return dx, dw, db


def _grouped_mm(x: Tensor, weight: Tensor, offs: Tensor) -> Tensor:
    """(n, N) of x (n, K) and weight (E, K, N). Rows without an expert are unspecified."""
    if takes_grouped_mm(x, weight):
        _log_once("esmm", x.device.type, "torch's grouped matmul")
        return grouped_mm(x, weight, offs=offs[1:].contiguous())
    if _capturing(x):
        _log_once("esmm", x.device.type, "every expert on every row, as a CUDA graph is being captured")
        expert = expert_of_row(offs, x.shape[0]).unsqueeze(1)
        y = x.new_zeros((x.shape[0], weight.shape[2]))
        for e in range(weight.shape[0]):
            y = torch.where(expert == e, x @ weight[e], y)
        return y
    if type(weight) is Tensor:  # a subclass is somebody's experiment
        _log_once("esmm", x.device.type, f"one matmul an expert, which reads the offsets on the host ({x.dtype})")
    y = x.new_zeros((x.shape[0], weight.shape[2]))
    for e, start, end in groups_of(offs.tolist()):
        torch.mm(x[start:end], weight[e], out=y[start:end])
    return y


def _grouped_outer(x: Tensor, g: Tensor, offs: Tensor) -> Tensor:
    """(E, K, N), the sum of ``x[p]^T g[p]`` over each expert's rows."""
    experts = offs.shape[0] - 1
    if takes_grouped_mm(x, g) and x.shape[0] > 0:
        _log_once("estmm", x.device.type, "torch's grouped matmul")
        return grouped_mm(x.t(), g, offs=offs[1:].contiguous())
    if _capturing(x):
        _log_once("estmm", x.device.type, "every expert on every row, as a CUDA graph is being captured")
        expert = expert_of_row(offs, x.shape[0]).unsqueeze(1)
        return torch.stack([torch.where(expert == e, x, 0).t() @ g for e in range(experts)])
    _log_once("estmm", x.device.type, f"one matmul an expert, which reads the offsets on the host ({x.dtype})")
    y = x.new_zeros((experts, x.shape[1], g.shape[1]))
    for e, start, end in groups_of(offs.tolist()):
        torch.mm(x[start:end].t(), g[start:end], out=y[e])
    return y


def takes_grouped_mm(a: Tensor, b: Tensor) -> bool:
    """Whether grouped_mm works without a host read: bfloat16 on Hopper or newer, all strides multiples of 16 bytes."""
    if a.device.type != "cuda" or a.dtype != torch.bfloat16 or not hasattr(torch, "_grouped_mm"):
        return False
    if torch.cuda.get_device_capability(a.device) < (9, 0) or a.shape[0] == 0:
        return False
    return all(_aligned(t) for t in (a, b))


def _aligned(t: Tensor) -> bool:
    unit = 16 // t.element_size()
    inner = [s for s in t.stride() if s != 1]
    return t.data_ptr() % 16 == 0 and 1 in t.stride()[-2:] and all(s % unit == 0 for s in inner)


def _capturing(t: Tensor) -> bool:
    return t.device.type == "cuda" and torch.cuda.is_current_stream_capturing()


library.register_kernel("reindex", "any", reindex_any)
