"""MoE blocks of libraries that want torch.distributed, each made small, as their own code builds them."""

from __future__ import annotations

import types
from typing import Any
from unittest import mock

from torch import nn

from benchmarks.library_registry import D, E, I, block, mlp, one_process


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
