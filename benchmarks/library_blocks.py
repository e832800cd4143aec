"""MoE blocks of installable libraries, each made small, as their own code builds them. See benchmarks/libraries.py."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.machinery
import sys
import tempfile
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn

D, I, E = 16, 24, 4  # noqa: E741


@dataclass(frozen=True)
class LibraryBlock:
    """A block of a library.

    Args:
        distribution: name on the package index. what: class and the options that matter.
        make: builds the block; raises ImportError where the library is not there.
        inputs: positional arguments of a call.
        stand_ins: modules that the library imports and its MoE code does not use; replaced where they are not installed.
        sparse: False for blocks that are dense by nature or no mixture for single tokens: a refusal is right.
        dtypes: of the comparison, the first in which the block runs.
    """

    distribution: str
    what: str
    make: Callable[[], nn.Module]
    inputs: Callable[[], tuple[Any, ...]]
    stand_ins: tuple[str, ...] = ()
    sparse: bool = True
    dtypes: tuple[torch.dtype, ...] = (torch.float64, torch.float32)


def tokens(batch: int = 4, sequence: int = 8, width: int = D) -> tuple[Any, ...]:
    """One tensor (batch, sequence, width)."""
    return (torch.randn(batch, sequence, width, generator=torch.Generator().manual_seed(1)),)


def rows() -> tuple[Any, ...]:
    """One tensor (tokens, width)."""
    return (tokens()[0].flatten(0, 1),)


BLOCKS: list[LibraryBlock] = []


def block(distribution: str, what: str, **options: Any) -> Callable[[Callable[[], nn.Module]], Callable[[], nn.Module]]:
    """Adds the decorated function to `BLOCKS`."""

    def add(make: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
        BLOCKS.append(LibraryBlock(distribution, what, make, options.pop("inputs", tokens), **options))
        return make

    return add


def mlp(width: int = D, hidden: int = I) -> nn.Module:
    return nn.Sequential(nn.Linear(width, hidden), nn.ReLU(), nn.Linear(hidden, width))


# -- libraries that want torch.distributed ---------------------------------------------------------------------------


def one_process() -> None:
    """A process group of this process alone."""
    if not dist.is_initialized():
        store = dist.FileStore(tempfile.mkstemp()[1], 1)
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)


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


# -- libraries for one process -----------------------------------------------------------------------------------------


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
    return _pytorch_mixtures("TopkMoE", "ff")


@block("pytorch-mixtures", "TopkMoE, k = 1")
def pytorch_mixtures_top1() -> nn.Module:
    return _pytorch_mixtures("TopkMoE", "ff", expert_act="gelu", topk=1)


@block("pytorch-mixtures", "ExpertChoiceMoE (experts choose tokens)", sparse=False)
def pytorch_mixtures_expert_choice() -> nn.Module:
    return _pytorch_mixtures("ExpertChoiceMoE", "ff")


def _pytorch_mixtures(name: str, expert: str, expert_act: str = "silu", topk: int = 2) -> nn.Module:
    import pytorch_mixtures

    config = pytorch_mixtures.MoEConfig(D, I, E, expert, expert_act, "topk", 2.0, topk, torch.float32)
    return getattr(pytorch_mixtures, name)(config)


@block("soft-moe-pytorch", "SoftMoE", sparse=False)
def soft_moe() -> nn.Module:
    from soft_moe_pytorch import SoftMoE

    return SoftMoE(D, seq_len=8, num_experts=E)


@block("soft-mixture-of-experts", "SoftMoE", sparse=False)
def soft_mixture() -> nn.Module:
    from soft_mixture_of_experts.soft_moe import SoftMoE

    return SoftMoE(D, D, E, 2)


@block("litgpt", "LLaMAMoE (Mixtral)")
def litgpt() -> nn.Module:
    return _litgpt("Mixtral-8x7B-v0.1", n_expert=E, n_expert_per_token=2)


@block("litgpt", "LLaMAMoE, grouped top-k router (DeepSeek V3)")
def litgpt_grouped() -> nn.Module:
    moe = _litgpt(
        "Mixtral-8x7B-v0.1", n_expert=8, n_expert_per_token=2, n_expert_groups=4, n_topk_groups=2,
        n_topk_scores_per_group=2, n_shared_expert=1, routed_scaling_factor=2.5, norm_topk_prob=True,
    )  # fmt: skip
    nn.init.normal_(moe.gate.weight)
    return moe


def _litgpt(name: str, **options: Any) -> nn.Module:
    from litgpt.config import Config
    from litgpt.model import LLaMAMoE

    return LLaMAMoE(
        Config.from_name(
            name, n_embd=D, moe_intermediate_size=I, intermediate_size=I, n_head=4, n_query_groups=2, **options
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


@block("swarms-torch", "SwitchMoE", inputs=rows, stand_ins=("torchvision",))
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


@block("esmoe", "ESMoE (convolutional experts for whole images)", sparse=False,
       inputs=lambda: (torch.randn(3, D, 6, 6, generator=torch.Generator().manual_seed(1)),))  # fmt: skip
def esmoe() -> nn.Module:
    from esmoe.module import ESMoE

    return ESMoE(E, 2, channels=D)


@block("peer-pytorch", "PEER (a million one-neuron experts by product keys)", sparse=False)
def peer() -> nn.Module:
    from PEER_pytorch import PEER

    return PEER(D, heads=2, num_experts=64, num_experts_per_head=4, dim_key=8)


@block("megablocks", "MoE")
def megablocks() -> nn.Module:
    from megablocks.layers.arguments import Arguments
    from megablocks.layers.moe import MoE

    return MoE(Arguments(hidden_size=D, ffn_hidden_size=I, moe_num_experts=E))


# -- stand-ins ---------------------------------------------------------------------------------------------------------


class _StandIns:
    """An import finder that makes empty modules of the given names."""

    def __init__(self, roots: tuple[str, ...]) -> None:
        self.roots = roots

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        return importlib.machinery.ModuleSpec(name, self) if name.split(".")[0] in self.roots else None  # type: ignore[arg-type]

    def create_module(self, spec: Any) -> Any:
        module = mock.MagicMock(name=spec.name)
        module.__path__, module.__version__, module.__file__ = [], "0", spec.name
        return module

    def exec_module(self, module: Any) -> None:
        """Nothing to run."""


@contextmanager
def stand_ins(names: tuple[str, ...]) -> Iterator[None]:
    """Imports of ``names`` that fail otherwise give empty modules inside the block."""
    missing = tuple(name for name in names if importlib.util.find_spec(name) is None)
    finder = _StandIns(missing)
    sys.meta_path.append(finder)  # type: ignore[arg-type]
    try:
        yield
    finally:
        sys.meta_path.remove(finder)  # type: ignore[arg-type]
        for name in [name for name in sys.modules if name.split(".")[0] in missing]:
            del sys.modules[name]
