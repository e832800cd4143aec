"""``hexa::low_rank_gradients`` on CUDA: one reading of the rows where the family low_rank takes them."""

from __future__ import annotations

from types import SimpleNamespace

from torch import Tensor

from hexa_fx.cuda import low_rank_sm90
from hexa_fx.cuda.calls import cuda_kernel
from hexa_fx.cuda.gemm import esfk, esmm, estmm
from hexa_fx.cuda.rows import scaled_transpose
from hexa_fx.ops.low_rank_gradients import composed
from hexa_fx.ops.table import LowRankGradients

_OTHERS = SimpleNamespace(esfk=esfk, esmm=esmm, estmm=estmm, scaled_transpose=scaled_transpose)


@cuda_kernel("low_rank_gradients")
def low_rank_gradients(o: LowRankGradients) -> tuple[Tensor, Tensor]:
    """See hexa_fx.ops.low_rank_gradients."""
    return low_rank_sm90.gradients(o) or composed(o, by=_OTHERS)
