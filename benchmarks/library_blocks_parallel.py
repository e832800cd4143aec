"""MoE blocks of libraries that want torch.distributed, each made small, as their own code builds them."""

from __future__ import annotations

import types
from typing import Any
from unittest import mock

import torch
from torch import nn

from benchmarks.library_registry import D, E, I, block, mlp, one_process, tokens


@block("fairscale", "MOELayer, Top2Gate")
def fairscale() -> nn.Module:
    from fairscale.nn.moe import MOELayer, Top2Gate

    one_process()
    return MOELayer(Top2Gate(D, E), nn.ModuleList(mlp() for _ in range(E)))


@block("deepspeed", "MoE, k=1")
def deepspeed_top1() -> nn.Module:
    return _deepspeed(k=1)


@block("deepspeed", "MoE, k=2, without sampling")
def deepspeed_top2() -> nn.Module:
    return _deepspeed(k=2, top2_2nd_expert_sampling=False)


@block("deepspeed", "MoE, k=2, second choice sampled")
def deepspeed_top2_sampled() -> nn.Module:
    return _deepspeed(k=2)


@block("deepspeed", "MoE, k=1, tokens never dropped")
def deepspeed_no_drop() -> nn.Module:
    return _deepspeed(k=1, drop_tokens=False)


@block("deepspeed", "MoE, residual (PR-MoE)")
def deepspeed_residual() -> nn.Module:
    return _deepspeed(k=1, use_residual=True)


def _deepspeed(**options: Any) -> nn.Module:
    import deepspeed
    from deepspeed.moe.layer import MoE

    one_process()
    deepspeed.init_distributed("gloo", verbose=False)
    layer = MoE(D, mlp(), num_experts=E, **options)
    layer.set_deepspeed_parallelism()
    return layer


@block("torchscale", "xmoe MOELayer, Top1Gate")
def torchscale_top1() -> nn.Module:
    return _torchscale("Top1Gate", use_fp32=False)


@block("torchscale", "xmoe MOELayer, Top2Gate")
def torchscale_top2() -> nn.Module:
    return _torchscale("Top2Gate", use_fp32=False, second_expert_policy="all")


def _torchscale(gate: str, **options: Any) -> nn.Module:
    one_process()
    with mock.patch("torch.cuda.device_count", return_value=1):
        from torchscale.component.xmoe import moe_layer, routing

        args = types.SimpleNamespace(moe_expert_count=E, batch_size=4, batch_size_valid=4)
        return moe_layer.MOELayer(getattr(routing, gate)(D, E, **options), nn.ModuleList(mlp() for _ in range(E)), args)


@block("llama-models", "llama4 MoE (all experts on scaled tokens, detached)")
def llama_models() -> nn.Module:
    import fairscale.nn.model_parallel.initialize as parallel
    from llama_models.llama4.args import MoEArgs
    from llama_models.llama4.moe import MoE

    one_process()
    if not parallel.model_parallel_is_initialized():
        parallel.initialize_model_parallel(1)
    return MoE(D, 2 * I, 1.0, 4, MoEArgs(num_experts=E, top_k=1))


def _sequences() -> tuple[Any, ...]:
    """One tensor (sequence, batch, width)."""
    return tokens(8, 4)


@block("megatron-core", "MoELayer, local experts, allgather", inputs=_sequences)
def megatron() -> nn.Module:
    return _megatron()


@block("megatron-core", "MoELayer, auxiliary and z loss", inputs=_sequences)
def megatron_losses() -> nn.Module:
    return _megatron(moe_router_load_balancing_type="aux_loss", moe_aux_loss_coeff=0.01, moe_z_loss_coeff=1e-3)


@block("megatron-core", "MoELayer, sigmoid router in float32, bias, shared", inputs=_sequences, dtypes=(torch.float32,))
def megatron_bias() -> nn.Module:
    scored = {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True, "moe_router_dtype": "fp32"}
    return _megatron(moe_shared_expert_intermediate_size=I, moe_router_topk_scaling_factor=2.5, **scored)


@block("megatron-core", "MoELayer, capacity, the least probable dropped", inputs=_sequences)
def megatron_capacity() -> nn.Module:
    return _megatron(moe_expert_capacity_factor=1.0, moe_token_drop_policy="probs")


def _megatron(**options: Any) -> nn.Module:
    """On a CPU it asks CUDA for its device, and for a function of transformer_engine that is not there."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.moe import moe_utils
    from megatron.core.transformer.transformer_config import TransformerConfig

    if not torch.cuda.is_available():
        torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment, return-value]
    moe_utils.te_general_gemm = None
    one_process()
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(1, 1)
    options = {"moe_router_load_balancing_type": "none", **options}
    config = TransformerConfig(
        num_layers=1, hidden_size=D, num_attention_heads=2, num_moe_experts=E, moe_router_topk=2, moe_ffn_hidden_size=I,
        moe_token_dispatcher_type="allgather", use_cpu_initialization=True, add_bias_linear=False, gated_linear_unit=True,
        activation_func=nn.functional.silu, bias_activation_fusion=False, **options,
    )  # fmt: skip
    spec = get_moe_module_spec(use_te=False, num_experts=E, moe_grouped_gemm=False)
    groups = ProcessGroupCollection.use_mpu_process_groups()
    layer: nn.Module = spec.module(config=config, submodules=spec.submodules, pg_collection=groups)
    return layer
