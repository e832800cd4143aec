"""Other packages' MoE layers on the benchmark's own parameters. Each maker raises ImportError where its package is missing.

Their interfaces differ by version; whatever an adapter raises becomes a line of the table instead of a row. MegaBlocks and Tutel
are not here: they route inside their layers, so they cannot take the benchmark's routing.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

Layer = Callable[[], Tensor]


def _sonic() -> Callable[..., Tensor]:
    """SonicMoE of tokens, expert ids and routing weights (T, k), and transformers' weights (E, 2 I, D) and (E, D, I)."""
    functional, enums = (importlib.import_module(f"sonicmoe.{name}") for name in ("functional", "enums"))

    def run(
        x: Tensor, ids: Tensor, gates: Tensor, w1: Tensor, b1: Tensor | None, w2: Tensor, b2: Tensor | None
    ) -> Tensor:
        tokens = torch.arange(x.shape[0], device=x.device, dtype=torch.int32).repeat_interleave(ids.shape[1])
        out = functional.moe_general_routing_inputs(
            x,
            gates.reshape(-1).float(),
            tokens,
            ids.reshape(-1).int(),
            w1.permute(1, 2, 0),
            b1,
            w2.permute(1, 2, 0),
            b2,
            E=w2.shape[0],
            stream_id=torch.cuda.current_stream().cuda_stream,
            activation_type=enums.ActivationType.SWIGLU,
            is_inference_mode_enabled=not torch.is_grad_enabled(),
            concat_layout=True,
        )
        return out[0]  # type: ignore[no-any-return]

    return run


def sonic(shape: Any, p: Any) -> Layer:
    """SonicMoE, with gate and up side by side as the parameters have them."""
    run = _sonic()
    return lambda: run(p.x, p.ids, p.gates, p.w1, p.b1, p.w2, p.b2)


def register_sonic() -> str:
    """Makes the installed SonicMoE a value of transformers' ``experts_implementation`` (its own asks a hub); returns its name."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    run = _sonic()

    def experts(self: Any, x: Tensor, ids: Tensor, gates: Tensor) -> Tensor:
        return run(x, ids, gates, self.gate_up_proj, None, self.down_proj, None)

    ALL_EXPERTS_FUNCTIONS.register("sonic-package", experts)
    return "sonic-package"


def liger(shape: Any, p: Any) -> Layer:
    """Liger's Triton layer."""
    fused = importlib.import_module("liger_kernel.ops.fused_moe").LigerFusedMoEFunction
    return lambda: fused.apply(p.x, p.w1, p.w2, p.ids, p.gates)


def scatter(shape: Any, p: Any) -> Layer:
    """ScatterMoE's gated layer. It takes up before gate, so its values are not those of the others."""
    mlp = importlib.import_module("scattermoe.mlp").GLUMLP(shape.model, shape.inner, shape.experts, shape.top_k, F.silu)
    mlp.experts.weight, mlp.output_experts.weight = p.w1, p.w2
    return lambda: mlp(p.x, p.gates, p.ids)


MAKERS: dict[str, Callable[[Any, Any], Layer]] = {"sonic": sonic, "liger": liger, "scatter": scatter}
"""Name in ``--impls`` -> what makes the layer from a shape and its parameters."""


def vllm_experts() -> Callable[..., Tensor]:
    """vLLM's Triton layer on (x, w1, w2, gates, ids); w1 (E, 2 I, D), w2 (E, D, I)."""
    fused = importlib.import_module("vllm.model_executor.layers.fused_moe.fused_moe").fused_experts
    return lambda x, w1, w2, gates, ids: fused(x, w1, w2, gates.float(), ids.int())


def sglang_experts() -> Callable[..., Tensor]:
    """SGLang's Triton layer on the same."""
    module = importlib.import_module("sglang.srt.layers.moe.fused_moe_triton.fused_moe")
    return lambda x, w1, w2, gates, ids: module.fused_experts_impl(x, w1, w2, gates.float(), ids.int())
