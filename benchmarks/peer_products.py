"""Single products of other packages: FP8 ones for `bench_fp8.py`, packed weights' for `bench_packed.py`."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hexa_fx.formats.fp8_scaling import BLOCK


class Product(NamedTuple):
    """Operands of a grouped FP8 product, of experts with equally many rows.

    Args:
        kind: ``rows``: x (n, K) times w (E, N, K), scales of 1 x 128 and of 128 x 128; ``weights``: x^T w of each expert's
            rows, transposed in groups of 128 rows: (G, M, 128) and (G, N, 128), a scale for each column of a group.
        x, x_scales, w, w_scales: the operands.
        experts: E, where w does not say it.
    """

    kind: str
    x: Tensor
    x_scales: Tensor
    w: Tensor
    w_scales: Tensor
    experts: int = 0


def deepgemm(o: Product) -> Callable[[], object]:
    """DeepGEMM's product. Raises where it is not installed, cannot do these sizes or computes something else."""
    gemm = importlib.import_module("deep_gemm")
    return _rows(gemm, o) if o.kind == "rows" else _weights(gemm, o)


def _rows(gemm: Any, o: Product) -> Callable[[], object]:
    experts, columns, _ = o.w.shape
    count = o.x.shape[0] // experts
    if count % gemm.get_mk_alignment_for_contiguous_layout():
        raise ValueError(f"{count} rows an expert")
    layout = torch.arange(experts, device=o.x.device, dtype=torch.int32).repeat_interleave(count)
    out = torch.empty(o.x.shape[0], columns, device=o.x.device, dtype=torch.bfloat16)
    x, w = (o.x, gemm.get_mn_major_tma_aligned_tensor(o.x_scales)), (o.w, o.w_scales)

    def run() -> None:
        gemm.m_grouped_fp8_gemm_nt_contiguous(x, w, out, layout)

    run()
    last = slice(-count, None)
    scales = o.w_scales[-1].repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
    exact = _scaled(o.x[last], o.x_scales[last].repeat_interleave(BLOCK, 1)) @ _scaled(o.w[-1], scales).t()
    _compare(out[last], exact)
    return run


def _weights(gemm: Any, o: Product) -> Callable[[], object]:
    """Each expert's part as one matrix of all its rows, which is what it reads."""
    groups = o.x.shape[0] // o.experts - 1  # there is room for one more of each
    ks = [groups * BLOCK] * o.experts
    sizes = torch.tensor(ks, device=o.x.device, dtype=torch.int32)
    out = torch.zeros(o.experts, o.x.shape[1], o.w.shape[1], device=o.x.device)
    of_all = [each[: groups * o.experts].unflatten(0, (o.experts, groups)) for each in (o.x, o.w)]
    x, w = (each.transpose(1, 2).flatten(2) for each in of_all)
    scales = [each[: groups * o.experts].t() for each in (o.x_scales, o.w_scales)]
    operands = [(each.flatten(), scale) for each, scale in zip((x, w), scales)]

    def run() -> None:
        gemm.k_grouped_fp8_gemm_nt_contiguous(*operands, out, ks, sizes, out)

    run()
    wide = [_scaled(each[-1], scale[:, -groups:].repeat_interleave(BLOCK, 1)) for each, scale in zip((x, w), scales)]
    _compare(out[-1], wide[0] @ wide[1].t())
    return run


def _scaled(x: Tensor, scales: Tensor) -> Tensor:
    return x.float() * scales


def _compare(found: Tensor, exact: Tensor) -> None:
    """Raises unless results are those in float32, to the rounding of bfloat16 and of accumulation on tensor cores."""
    error = float((found.float() - exact).norm() / exact.norm())
    if not error < 0.01:
        raise ValueError(f"results differ by {error:.3g} of their norm")


PEERS: dict[str, Callable[[Product], Callable[[], object]]] = {"deepgemm": deepgemm}
"""By name: makes a call of a product's operands."""


_HUMMING: dict[str, dict[str, Any]] = {
    "fp8_block": {"dtype": "float8e4m3", "group_size": BLOCK, "group_size_n": BLOCK},
    "mxfp4": {"dtype": "float4e2m1", "group_size": 32, "scale_dtype": "float8e8m0"},
}
"""Its weights by the names of our formats."""


def humming(name: str, columns: int, x: Tensor, offs: Tensor) -> Callable[[], object]:
    """Humming's product of rows in expert order and packed weights, of random numbers. Raises as `deepgemm` does.

    Args:
        name: of the weights' format.
        columns: N of weights (E, N, K).
        x: (n, K) bfloat16.
        offs: (E + 1,), where the rows of experts begin.
    """
    experts, k = len(offs) - 1, x.shape[1]
    new = importlib.import_module("humming.layer").HummingLayer
    layer = new(columns, k, dict(_HUMMING[name]), num_experts=experts, torch_dtype=x.dtype).to(x.device)
    weight = torch.randn(experts, columns, k, dtype=x.dtype, device=x.device) * k**-0.5
    packed = layer.weight_schema.quant_tensor(weight, layer.weight_schema, x.dtype)
    exact = layer.weight_schema.dequant_tensors(packed)
    layer.load_from_tensors(packed)
    layer.transform()
    ends = offs.long()

    def run() -> Tensor:
        return layer(x, expert_layout=ends, compute_config={"gemm_type": "grouped_contiguous"})  # type: ignore[no-any-return]

    most = int(offs.diff().argmax())
    rows = slice(int(offs[most]), int(offs[most + 1]))
    _compare(run()[rows], x[rows].float() @ exact[most].float().t())
    return run
