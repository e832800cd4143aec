"""MoE blocks of installable libraries for one process, each made small, as their own code builds them."""

from __future__ import annotations

import dataclasses
import types
from typing import Any

import torch
from torch import nn

from benchmarks.library_registry import D, E, I, block, mlp, rows, tokens


@block("mixture-of-experts", "MoE, second policy 'random'")
def mixture_of_experts() -> nn.Module:
    from mixture_of_experts import MoE

    return MoE(D, num_experts=E, hidden_dim=I)


@block("mixture-of-experts", "MoE, second policy 'all'")
def mixture_of_experts_all() -> nn.Module:
    from mixture_of_experts import MoE

    return MoE(D, num_experts=E, hidden_dim=I, second_policy_train="all", second_policy_eval="all")


@block("mixture-of-experts", "HeirarchicalMoE (two levels of routing)")
def hierarchical() -> nn.Module:
    from mixture_of_experts import HeirarchicalMoE

    return HeirarchicalMoE(D, num_experts=(2, 2), hidden_dim=I, second_policy_train="all", second_policy_eval="all")


@block("st-moe-pytorch", "MoE, straight-through dispatch")
def st_moe() -> nn.Module:
    from st_moe_pytorch import MoE

    return MoE(D, num_experts=E, expert_hidden_mult=2)


@block("st-moe-pytorch", "MoE, straight_through_dispatch_tensor=False")
def st_moe_plain() -> nn.Module:
    from st_moe_pytorch import MoE

    return MoE(D, num_experts=E, expert_hidden_mult=2, straight_through_dispatch_tensor=False)


@block("st-moe-pytorch", "SparseMoEBlock, top 3")
def st_moe_block() -> nn.Module:
    from st_moe_pytorch import MoE, SparseMoEBlock

    moe = MoE(D, num_experts=E, gating_top_n=3, straight_through_dispatch_tensor=False)
    return SparseMoEBlock(moe, add_ff_before=True)


@block("st-moe-pytorch", "MoE with experts given, straight-through dispatch")
def st_moe_given() -> nn.Module:
    from st_moe_pytorch import MoE

    return MoE(D, num_experts=E, experts=nn.ModuleList(mlp() for _ in range(E)))


@block("st-moe-pytorch", "MoE with experts given, plain dispatch")
def st_moe_given_plain() -> nn.Module:
    from st_moe_pytorch import MoE

    experts = nn.ModuleList(mlp() for _ in range(E))
    return MoE(D, num_experts=E, experts=experts, straight_through_dispatch_tensor=False)


@block("pytorch-mixtures", "TopkMoE, ff experts")
def pytorch_mixtures_ff() -> nn.Module:
    return _pytorch_mixtures("TopkMoE")


@block("pytorch-mixtures", "TopkMoE, k = 1")
def pytorch_mixtures_top1() -> nn.Module:
    return _pytorch_mixtures("TopkMoE", expert_act="gelu", topk=1)


@block("pytorch-mixtures", "ExpertChoiceMoE (experts choose tokens)")
def pytorch_mixtures_expert_choice() -> nn.Module:
    return _pytorch_mixtures("ExpertChoiceMoE")


def _pytorch_mixtures(name: str, expert_act: str = "silu", topk: int = 2) -> nn.Module:
    import pytorch_mixtures

    config = pytorch_mixtures.MoEConfig(D, I, E, "ff", expert_act, "topk", 2.0, topk, torch.float32)
    return getattr(pytorch_mixtures, name)(config)


@block("soft-moe-pytorch", "SoftMoE")
def soft_moe() -> nn.Module:
    from soft_moe_pytorch import SoftMoE

    return SoftMoE(D, seq_len=8, num_experts=E)


@block("soft-mixture-of-experts", "SoftMoE")
def soft_mixture() -> nn.Module:
    from soft_mixture_of_experts.soft_moe import SoftMoE

    return SoftMoE(D, D, E, 2)


@block("litgpt", "LLaMAMoE (Mixtral)")
def litgpt() -> nn.Module:
    return _litgpt(n_expert=E, n_expert_per_token=2)


@block("litgpt", "LLaMAMoE, grouped top-k router (DeepSeek V3)")
def litgpt_grouped() -> nn.Module:
    moe = _litgpt(
        n_expert=8, n_expert_per_token=2, n_expert_groups=4, n_topk_groups=2,
        n_topk_scores_per_group=2, n_shared_expert=1, routed_scaling_factor=2.5, norm_topk_prob=True,
    )  # fmt: skip
    nn.init.normal_(moe.gate.weight)
    return moe


def _litgpt(**options: Any) -> nn.Module:
    from litgpt.config import Config
    from litgpt.model import LLaMAMoE

    return LLaMAMoE(
        Config.from_name(
            "Mixtral-8x7B-v0.1",
            n_embd=D,
            moe_intermediate_size=I,
            intermediate_size=I,
            n_head=4,
            n_query_groups=2,
            **options,
        )
    )


@block("diffusers", "HiDream MOEFeedForwardSwiGLU (numpy counts in eval mode)")
def diffusers_hidream() -> nn.Module:
    from diffusers.models.transformers.transformer_hidream_image import MOEFeedForwardSwiGLU

    return MOEFeedForwardSwiGLU(D, 2 * I, E, 2)


@block("torchtitan", "MoE, sigmoid router, grouped_mm", dtypes=(torch.bfloat16,))
def torchtitan() -> nn.Module:
    from torchtitan.models.common import linear, moe, token_dispatcher

    router = moe.TokenChoiceTopKRouter.Config(
        num_experts=E, gate=linear.Linear.Config(in_features=D, out_features=E, bias=False), top_k=2, route_norm=True
    )
    experts = moe.RoutedExperts.Config(
        inner_experts=moe.GroupedExperts.Config(dim=D, hidden_dim=I, num_experts=E),
        token_dispatcher=token_dispatcher.LocalTokenDispatcher.Config(num_experts=E, top_k=2),
    )
    return moe.MoE(moe.MoE.Config(num_experts=E, routed_experts=experts, router=router))


@block("torchtitan", "MoE, routers of groups, shared experts, a bias that balances", dtypes=(torch.bfloat16,))
def torchtitan_groups() -> nn.Module:
    from torchtitan.models.common import config_utils

    router = config_utils.make_router_config(
        dim=D,
        num_experts=8,
        gate_param_init={},
        top_k=2,
        score_func="sigmoid",
        num_expert_groups=4,
        num_limited_groups=2,
    )
    experts = config_utils.make_routed_experts_config(
        dim=D,
        hidden_dim=I,
        num_experts=8,
        top_k=2,
        param_init={},
        comm_backend="standard",
        non_blocking_capacity_factor=None,
    )
    shared = config_utils.make_ffn_config(dim=D, hidden_dim=I, w1_param_init={}, w2w3_param_init={})
    config = config_utils.make_moe_config(num_experts=8, router=router, routed_experts=experts, shared_experts=shared)
    return config.build()


@block("torchtitan", "GptOssMoE, biases by rows", dtypes=(torch.bfloat16,))
def torchtitan_gpt_oss() -> nn.Module:
    from torchtitan.models.common import linear, moe, token_dispatcher
    from torchtitan.models.gpt_oss import moe as gpt_oss

    router = moe.TokenChoiceTopKRouter.Config(
        num_experts=E,
        gate=linear.Linear.Config(in_features=D, out_features=E),
        top_k=2,
        score_func="softmax",
        route_norm=True,
    )
    experts = moe.RoutedExperts.Config(
        inner_experts=gpt_oss.GptOssGroupedExperts.Config(dim=D, hidden_dim=I, num_experts=E),
        token_dispatcher=token_dispatcher.LocalTokenDispatcher.Config(num_experts=E, top_k=2),
    )
    return gpt_oss.GptOssMoE(gpt_oss.GptOssMoE.Config(num_experts=E, routed_experts=experts, router=router))


@block("mixlora", "MixLoraSparseMoe: LoRA experts around one MLP", inputs=tokens)
def mixlora() -> nn.Module:
    from mixlora.config import MixLoraConfig
    from mixlora.lora_linear import LoraLinear
    from mixlora.model import MixLoraSparseMoe
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaMLP

    base = LlamaMLP(LlamaConfig(hidden_size=D, intermediate_size=I, num_attention_heads=4))
    config = MixLoraConfig.from_config({
        "base_model_name_or_path": "x", "task_type": "CAUSAL_LM", "peft_type": "MIXLORA", "r": 4, "lora_alpha": 8,
        "lora_dropout": 0.05, "bias": "none", "target_modules": ["gate_proj", "up_proj", "down_proj"],
        "routing_strategy": "mixlora", "num_experts": E, "top_k": 2, "act_fn": "silu",
    })  # fmt: skip
    config.dtype_, config.model_type_ = torch.float32, "llama"
    moe = MixLoraSparseMoe(base, config)
    moe.gate_ = torch.randn(E, D)
    for e in range(E):
        for name in ("gate_proj", "up_proj", "down_proj"):
            lora = LoraLinear(getattr(base, name), config)
            nn.init.normal_(lora.lora_B.weight)
            moe.experts_[f"experts.{e}.{name}"] = lora
    return moe


@block("mergoo", "MoeLayer (a mixture of single Linear layers)")
def mergoo() -> nn.Module:
    from mergoo.compose_layers import MoeLayer

    return MoeLayer(D, I, bias=True, num_experts=E)


@block("mergoo", "LoRAMoeLayer (base layer plus LoRA experts)")
def mergoo_lora() -> nn.Module:
    from mergoo.compose_layers import LoRAMoeLayer

    adapter = {"r": 4, "lora_alpha": 8, "lora_dropout": 0.0, "init_lora_weights": True, "use_rslora": False}
    config = types.SimpleNamespace(
        num_experts_per_tok=2, num_experts=E, hidden_size=D, adapter_configs=[adapter | {"use_dora": False}] * E
    )
    layer = LoRAMoeLayer(config, D, I, bias=True)
    for lora in layer.lora_B.values():
        nn.init.normal_(lora.weight)
    return layer


@block("latent-moe", "LatentMoE, loop")
def latent_moe() -> nn.Module:
    return _latent("loop")


@block("latent-moe", "LatentMoE, grouped")
def latent_moe_grouped() -> nn.Module:
    return _latent("grouped")


def _latent(impl: str) -> nn.Module:
    from latent_moe import LatentMoE, LatentMoEConfig

    names = {field.name for field in dataclasses.fields(LatentMoEConfig)}
    options = {"d": D, "m": I, "n_experts": E, "top_k": 2, "alpha": 2, "n_shared": 1, "impl": impl}
    return LatentMoE(LatentMoEConfig(**{k: v for k, v in options.items() if k in names}))


@block("omegavit", "MixtureOfExperts")
def omegavit() -> nn.Module:
    from omegavit.main import MixtureOfExperts, ViTConfig

    return MixtureOfExperts(ViTConfig(hidden_size=D, num_experts=E, expert_capacity=8))


@block("swarms-torch", "SwitchMoE", inputs=rows, stand_ins=("torchvision", "datasets"))
def swarms_torch() -> nn.Module:
    from swarms_torch import SwitchMoE

    return SwitchMoE(D, I, D, E)


@block("switch-transformers", "SwitchMoE", inputs=rows, stand_ins=("torchvision", "triton"))
def switch_transformers() -> nn.Module:
    from switch_transformers import SwitchMoE

    return SwitchMoE(D, I, D, E)


@block("moe-mamba", "SwitchMoE of MoEMambaBlock", inputs=rows, stand_ins=("torchvision",))
def moe_mamba() -> nn.Module:
    from moe_mamba.model import SwitchMoE

    return SwitchMoE(D, I, D, E)


@block("uni2ts", "MoEFeedForward (Moirai-MoE, routing by distance)", inputs=lambda: (*tokens(), torch.randn(E, D)))
def uni2ts() -> nn.Module:
    from uni2ts.module.ffn import MoEFeedForward

    return MoEFeedForward(E, 2, D, hidden_dim=I, bias=False)


@block("esmoe", "ESMoE (convolutional experts for whole images)",
       inputs=lambda: (torch.randn(3, D, 6, 6, generator=torch.Generator().manual_seed(1)),))  # fmt: skip
def esmoe() -> nn.Module:
    from esmoe.module import ESMoE

    return ESMoE(E, 2, channels=D)


@block("peer-pytorch", "PEER (a million one-neuron experts by product keys)")
def peer() -> nn.Module:
    from PEER_pytorch import PEER

    return PEER(D, heads=2, num_experts=64, num_experts_per_head=4, dim_key=8)


@block("nemo-automodel", "MoE, loop over experts, auxiliary loss")
def nemo() -> nn.Module:
    return _nemo("torch", aux_loss_coeff=0.01)


@block("nemo-automodel", "MoE, grouped_mm, groups of experts, bias")
def nemo_grouped() -> nn.Module:
    groups = {"n_routed_experts": 8, "n_expert_groups": 4, "n_limited_groups": 2}
    return _nemo("torch_mm", score_func="sigmoid", gate_bias_update_factor=1e-3, route_scale=2.5, **groups)


@block("nemo-automodel", "MoE, grouped_mm, gpt-oss, weights inside the experts")
def nemo_gpt_oss() -> nn.Module:
    return _nemo("torch_mm", expert_activation="swigluoai", expert_bias=True, router_bias=True, n_shared_experts=0)


@block("nemo-automodel", "MoE, grouped_mm, latent experts")
def nemo_latent() -> nn.Module:
    return _nemo("torch_mm", moe_latent_size=8)


def _nemo(experts: str, **options: Any) -> nn.Module:
    from nemo_automodel.components.models.common.utils import BackendConfig
    from nemo_automodel.components.moe.config import MoEConfig
    from nemo_automodel.components.moe.layers import MoE

    plain = {
        "n_routed_experts": E, "n_shared_experts": 1, "n_activated_experts": 2, "n_expert_groups": 1, "n_limited_groups": 1,
        "train_gate": True, "gate_bias_update_factor": 0.0, "aux_loss_coeff": 0.0, "score_func": "softmax", "route_scale": 1.0,
        "dim": D, "inter_dim": I, "moe_inter_dim": I, "norm_topk_prob": True, "dtype": torch.float32,
    }  # fmt: skip
    backend = BackendConfig(
        attn="sdpa", linear="torch", rms_norm="torch", experts=experts, dispatcher="torch", rope_fusion=False
    )
    made = MoE(MoEConfig(**{**plain, **options}), backend)
    with torch.no_grad():
        made.init_weights(torch.device("cpu"))
    return made


@block(
    "ai2-olmo-core",
    "Olmo3MoeSparseMLP (its model for transformers)",
    stand_ins=("boto3", "botocore", "google", "beaker", "smashed", "datasets", "cached_path", "dill"),
)
def olmo() -> nn.Module:
    from olmo_core.nn.moe.v2.hf import configuration_olmo3moe, modeling_olmo3moe

    config = configuration_olmo3moe.Olmo3MoeConfig(
        hidden_size=D,
        moe_intermediate_size=I,
        shared_expert_intermediate_size=I,
        n_routed_experts=E,
        num_experts_per_tok=2,
    )
    return modeling_olmo3moe.Olmo3MoeSparseMLP(config)
