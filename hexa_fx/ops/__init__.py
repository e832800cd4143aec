"""The expert-specific operators ``hexa::*`` (docs/operators.md), one module each, and their Python wrappers.

Importing it defines the operators in torch.library. T tokens, k experts per token, n = T*k routed rows, E experts,
D model size, I intermediate size.
"""

from __future__ import annotations

from hexa_fx import registry
from hexa_fx.ops.activations import ACTIVATIONS, Activation
from hexa_fx.ops.esmm import activate, activate_backward, esmm, esmm_act, esmm_act_backward
from hexa_fx.ops.esmm_packed import low_rank_gradients, scaled_transpose
from hexa_fx.ops.experts import experts
from hexa_fx.ops.fallback import reindex_any as _fallback  # noqa: F401  (registers the generic kernels)
from hexa_fx.ops.fp8_reference import _ess as _fp8  # noqa: F401  (registers the operators)
from hexa_fx.ops.moe_ffn import moe_ffn
from hexa_fx.ops.moe_ffn_fp8 import why_not as _fp8_block  # noqa: F401  (registers the operator)
from hexa_fx.ops.reindex import combine, reindex
from hexa_fx.ops.second_derivatives import _backward as _second  # noqa: F401  (registers the formula)
from hexa_fx.ops.weight_gradients import esfk, esfk_add, ess, ess_add, estmm, estmm_add

__all__ = [
    "ACTIVATIONS",
    "Activation",
    "activate",
    "activate_backward",
    "combine",
    "esfk",
    "esfk_add",
    "esmm",
    "esmm_act",
    "esmm_act_backward",
    "ess",
    "ess_add",
    "estmm",
    "estmm_add",
    "experts",
    "low_rank_gradients",
    "moe_ffn",
    "reindex",
    "scaled_transpose",
]

registry.cuda_kernels()()  # touches no device and imports no kernel
