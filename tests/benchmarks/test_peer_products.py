"""Peers of single products get the operands that ours have, and must return what float32 gives."""

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.peer_products import Product, deepgemm
from hexa_fx.formats.fp8_scaling import BLOCK, ELEMENT

EXPERTS, ROWS = 2, 2 * BLOCK


def _wide(scales: Tensor, dim: int) -> Tensor:
    return scales.repeat_interleave(BLOCK, dim)


def _package(error: float) -> Any:
    """What DeepGEMM's two functions compute, as its interface says, off by a factor."""

    def rows(x: Any, w: Any, out: Tensor, layout: Tensor) -> None:
        for e in range(EXPERTS):
            weight = w[0][e].float() * _wide(_wide(w[1][e], 0), 1)
            out[layout == e] = ((x[0].float() * _wide(x[1], 1))[layout == e] @ weight.t() * error).to(out.dtype)

    def weights(x: Any, w: Any, out: Tensor, ks: list[int], sizes: Tensor, add: Tensor) -> None:
        assert ks == sizes.tolist()
        done = 0
        for e, count in enumerate(ks):
            operands = []
            for (flat, scales), width in zip((x, w), out.shape[1:]):
                part = flat[done * width : (done + count) * width].view(width, count).float()
                operands.append(part * _wide(scales[:, done // BLOCK : (done + count) // BLOCK], 1))
            out[e] = add[e] + operands[0] @ operands[1].t() * error
            done += count

    return SimpleNamespace(
        get_mk_alignment_for_contiguous_layout=lambda: BLOCK,
        get_mn_major_tma_aligned_tensor=lambda scales: scales,
        m_grouped_fp8_gemm_nt_contiguous=rows,
        k_grouped_fp8_gemm_nt_contiguous=weights,
    )


def _elements(*shape: int) -> Tensor:
    return torch.randn(shape).clamp_(-4, 4).to(ELEMENT)


def _products() -> list[Product]:
    n, k, columns = EXPERTS * ROWS, BLOCK, 2 * BLOCK
    groups = n // BLOCK + EXPERTS
    x, w = _elements(n, k), _elements(EXPERTS, columns, k)
    return [
        Product("rows", x, torch.rand(n, k // BLOCK) + 0.5, w, torch.rand(EXPERTS, columns // BLOCK, k // BLOCK) + 0.5),
        Product(
            "weights",
            _elements(groups, k, BLOCK),
            torch.rand(groups, k) + 0.5,
            _elements(groups, columns, BLOCK),
            torch.rand(groups, columns) + 0.5,
            EXPERTS,
        ),
    ]


@pytest.mark.parametrize("number", [0, 1])
def test_the_peer_gets_the_same_operands(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    monkeypatch.setitem(sys.modules, "deep_gemm", _package(1.0))
    deepgemm(_products()[number])()


@pytest.mark.parametrize("number", [0, 1])
def test_a_peer_that_computes_something_else_is_left_out(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    monkeypatch.setitem(sys.modules, "deep_gemm", _package(1.05))
    with pytest.raises(ValueError, match="differ by"):
        deepgemm(_products()[number])
