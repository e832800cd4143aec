"""The expert-specific operators ``hexa::*`` (docs/operators.md) and their Python wrappers.

Importing it defines the operators in torch.library. T tokens, k experts per token, n = T*k routed rows, E experts,
D model size, I intermediate size.
"""

from __future__ import annotations

from hexa_fx import registry
from hexa_fx.ops import fp8_reference, moe_ffn_fp8, products  # noqa: F401  (register kernels and formulas)
from hexa_fx.ops.activations import ACTIVATIONS, Activation
from hexa_fx.ops.library import wrapper
from hexa_fx.ops.moe_ffn import experts, moe_ffn

esmm = wrapper("esmm")
activate = wrapper("activate", params=())
activate_backward = wrapper("activate_backward", params=())
esmm_act = wrapper("esmm_act", params=(), keep_h=True)
esmm_act_backward = wrapper("esmm_act_backward", params=())
low_rank_gradients = wrapper("low_rank_gradients", scale=1.0, experts_last=False)
scaled_transpose = wrapper("scaled_transpose", scale=1.0)
estmm = wrapper("estmm")
ess = wrapper("ess", scale=None)
esfk = wrapper("esfk")
estmm_add = wrapper("estmm_add")
ess_add = wrapper("ess_add", scale=None)
esfk_add = wrapper("esfk_add")
reindex = wrapper("reindex")
combine = wrapper("combine")

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
