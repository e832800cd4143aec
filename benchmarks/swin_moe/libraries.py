"""Tutel and MegaBlocks in place of `model.Experts`, wherever they can be imported. Thin: routing stays the model's own.

Neither is installed with hexa_fx. Both build CUDA code for the torch at hand: `benchmarks/swin_moe/peers.sh` fetches their archives
and builds them into a folder for PYTHONPATH.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.swin_moe.baselines import OtherExperts, in_compute_dtype
from benchmarks.swin_moe.model import Experts


class NotInstalled(Exception):
    """The library of a row is not here."""


def library(name: str) -> Any:
    """The module ``name``; raises `NotInstalled` where importing it fails, whatever the reason."""
    try:
        return importlib.import_module(name)
    except Exception as error:  # compiled for another torch, no CUDA, ...
        raise NotInstalled(f"not installed ({name}: {type(error).__name__}: {str(error)[:120]})") from error


class TutelExperts(OtherExperts):
    """Tutel's routing data, dispatch, all-to-all and combine around batched products.

    Args:
        factor: capacity factor; 0 takes what the fullest expert needs.
    """

    def __init__(self, experts: Experts, group: Any = None, factor: float = 1.25) -> None:
        super().__init__(experts, group)
        self.moe, self.net, self.factor = library("tutel.moe"), library("tutel.net"), factor

    def forward(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        rows = in_compute_dtype(x)
        # Tutel takes scores and finds the top k again; the weights in their experts' columns are such scores.
        scores = torch.zeros(x.shape[0], self.count, device=x.device).scatter(1, ids, weights.float())
        routed, _ = self.moe.top_k_routing(scores, top_k=ids.shape[1], capacity_factor=self.factor)
        sent = self.moe.fast_encode(rows, routed)
        if self.world > 1:
            sent = self.net.all_to_all(sent, 1, 0, group=self.group)
        w1, b1, w2, b2 = (in_compute_dtype(p) for p in (self.w1, self.b1, self.w2, self.b2))
        hidden = F.gelu(torch.matmul(sent, w1.transpose(1, 2)) + b1[:, None])
        out = torch.matmul(hidden, w2.transpose(1, 2)) + b2[:, None]
        if self.world > 1:
            out = self.net.all_to_all(out, 0, 1, group=self.group)
        y = self.moe.fast_decode(out, routed)
        if ids.shape[1] == 1:
            return y.to(x.dtype)  # one choice is weighted by its own score
        return (y * weights.sum(-1, keepdim=True)).to(x.dtype)  # several are normalised by Tutel


class MegablocksExperts(nn.Module):
    """MegaBlocks' MoE (capacity 1) or dMoE layer behind its router. Its experts have no biases; the model's are left out.

    Args:
        dropless: dMoE.
    """

    def __init__(self, experts: Experts, group: Any = None, dropless: bool = True) -> None:
        super().__init__()
        self.layers = library("megablocks.layers.dmoe" if dropless else "megablocks.layers.moe")
        self.losses = library("megablocks.layers.moe")
        arguments = library("megablocks.layers.arguments")
        count, hidden, dim = experts.w1.shape
        rank = torch.distributed.get_rank(group) if group is not None else 0
        world = torch.distributed.get_world_size(group) if group is not None else 1
        settings = arguments.Arguments(
            hidden_size=dim,
            ffn_hidden_size=hidden,
            moe_num_experts=count,
            moe_top_k=1,
            moe_capacity_factor=1,
            moe_expert_model_parallelism=world > 1,
            expert_parallel_group=group,
            bias=False,
            return_bias=False,
            activation_fn=F.gelu,
            mlp_impl="grouped",
            fp16=False,
            bf16=True,
            device=experts.w1.device,
        )
        self.settings, self.count = settings, count
        self.experts = (self.layers.ParallelDroplessMLP if dropless else self.layers.ParallelMLP)(settings)
        own = slice(rank * count // world, (rank + 1) * count // world)
        with torch.no_grad():
            w1, w2 = experts.w1[own], experts.w2[own].transpose(1, 2)
            w1 = w1.reshape(-1, dim) if dropless else w1.transpose(1, 2)
            self.experts.mlp.w1.copy_(w1)
            self.experts.mlp.w2.copy_(w2.reshape(-1, dim) if dropless else w2)

    def forward(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        self.settings.moe_top_k = self.experts.top_k = ids.shape[1]
        self.losses.clear_load_balancing_loss()
        rows = x.to(self.experts.mlp.w1.dtype).unsqueeze(1)
        scores = torch.zeros(x.shape[0], self.count, device=x.device, dtype=rows.dtype)
        return self.experts(rows, scores, weights.to(rows.dtype), ids).view(x.shape).to(x.dtype)
