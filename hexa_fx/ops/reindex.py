"""``hexa::reindex``: the re-index vector of the paper (Algorithm 1), compact and stable."""

from __future__ import annotations

import torch
from torch import Tensor

from hexa_fx.errors import InputError
from hexa_fx.ops import checks, library
from hexa_fx.ops.rows import invert

library.define("reindex(Tensor top_k_index, SymInt num_experts) -> (Tensor v, Tensor inv, Tensor offs)")


def reindex(top_k_index: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Sorts the routed rows by expert (paper, Algorithm 1).

    Args:
        top_k_index: (T, k) integer, expert of every slot ``t*k + s``. ``num_experts`` is the sentinel: that slot
            contributes nothing.
        num_experts: E.

    Returns:
        v: (T*k,) int32, slot of every row, sorted by expert, stable; sentinel slots last.
        inv: (T*k,) int32, row of every slot.
        offs: (E+1,) int32, rows of expert e are ``offs[e] .. offs[e+1]``.

    Raises:
        InputError: wrong shape or dtype; on a CPU also for an id below 0 or above ``num_experts``. Other devices do not
            look (that would stop the device) and take such an id as the sentinel.
    """
    v, inv, offs = torch.ops.hexa.reindex(top_k_index, num_experts)
    return v, inv, offs


def check(top_k_index: Tensor, num_experts: int) -> None:
    """Shape and dtype of the arguments."""
    if top_k_index.ndim != 2 or top_k_index.dtype not in checks.INTEGER:
        raise InputError(
            f"hexa::reindex: top_k_index is {checks.shape(top_k_index)}; expected integer (tokens, experts a token)"
        )
    checks.require(num_experts >= 1, "reindex", f"num_experts is {num_experts}; expected 1 or more")


def reindex_cpu(top_k_index: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """CPU kernel: a stable sort, and the offsets by bisection of the sorted ids."""
    ids, order = torch.sort(top_k_index.reshape(-1), stable=True)
    if ids.numel() and (ids[0] < 0 or ids[-1] > num_experts):
        raise InputError(
            f"hexa::reindex: expert ids run from {int(ids[0])} to {int(ids[-1])}; expected 0 to {num_experts - 1}, or "
            f"{num_experts} for a slot that contributes nothing"
        )
    offs = torch.searchsorted(ids, torch.arange(num_experts + 1, dtype=ids.dtype), out_int32=True)
    v = order.to(torch.int32)
    return v, invert(v), offs


def _fake(top_k_index: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    n = top_k_index.shape[0] * top_k_index.shape[1]
    int32 = {"dtype": torch.int32, "device": top_k_index.device}
    return torch.empty(n, **int32), torch.empty(n, **int32), torch.empty(num_experts + 1, **int32)  # type: ignore[call-overload]


library.register_kernel("reindex", "cpu", reindex_cpu, check)
library.register_fake("reindex", _fake, check)
