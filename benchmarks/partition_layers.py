"""Layers for bench_partition.py: attention, router, experts; and the same layer under plain expert parallelism and FSDP2."""

from __future__ import annotations

import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
import torch.fx as fx
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.nn.functional import scaled_dot_product_attention

import hexa_fx.ops  # noqa: F401
from hexa_fx.ir import RewrittenBlock
from hexa_fx.passes.partition.install import Installed, install_plan
from hexa_fx.plan import ExpertShape, Plan

HEAD = 128


def _random(generator: torch.Generator, device: Any, dtype: torch.dtype, *size: int) -> nn.Parameter:
    values = torch.randn(size, device=device, dtype=dtype, generator=generator)
    return nn.Parameter(values.mul_(size[-1] ** -0.5))


class Attention(nn.Module):
    """Causal attention over sequences of ``length`` tokens, with a residual."""

    def __init__(self, width: int, length: int, device: Any, dtype: torch.dtype, generator: torch.Generator) -> None:
        super().__init__()
        self.length, self.heads = length, max(1, width // HEAD)
        self.qkv = _random(generator, device, dtype, width, 3 * width)
        self.out = _random(generator, device, dtype, width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (x @ self.qkv).view(-1, self.length, 3, self.heads, x.shape[1] // self.heads).unbind(2)
        if x.shape[0]:
            a = scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True)
            mixed = a.transpose(1, 2)
        else:  # torch returns None for the empty batch of a rank with B_i = 0
            mixed = q + k + v
        return x + mixed.reshape(-1, x.shape[1]) @ self.out


class Experts(nn.Module):
    """Router and experts: the block that is partitioned."""

    def __init__(self, shape: ExpertShape, device: Any, dtype: torch.dtype, generator: torch.Generator) -> None:
        super().__init__()
        d, i, e = shape.hidden_size, shape.intermediate_size, shape.num_experts
        self.top_k, self.gated = shape.top_k, shape.matrices == 3
        self.router = _random(generator, device, dtype, d, e)
        self.w1 = _random(generator, device, dtype, e, (2 if self.gated else 1) * i, d)
        self.w2 = _random(generator, device, dtype, e, d, i)

    def forward(self, x: Tensor) -> Tensor:
        weights, index = torch.topk(torch.softmax((x @ self.router).float(), -1), self.top_k, -1)
        static = ("silu" if self.gated else "gelu", "concat" if self.gated else "none", [], "nk", "nk", False)
        return torch.ops.hexa.moe_ffn(x, index, weights.to(x.dtype), self.w1, None, None, None, self.w2, None, *static)


class ExpertParallel(nn.Module):
    """Whole experts on each rank; token rows travel by all-to-all, as everyone does it. Counts are read by the host."""

    def __init__(self, experts: Experts, rank: int, world: int) -> None:
        super().__init__()
        count = experts.w1.shape[0] // world
        mine = slice(rank * count, (rank + 1) * count)
        self.router, self.top_k, self.gated = experts.router, experts.top_k, experts.gated
        self.w1 = nn.Parameter(experts.w1.data[mine].clone())
        self.w2 = nn.Parameter(experts.w2.data[mine].clone())
        self.world, self.count = world, count

    def forward(self, x: Tensor) -> Tensor:
        weights, index = torch.topk(torch.softmax((x @ self.router).float(), -1), self.top_k, -1)
        expert, order = index.flatten().sort(stable=True)
        sent = torch.bincount(expert, minlength=self.world * self.count)
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent)
        counts = torch.stack([sent.view(self.world, -1).sum(1), received.view(self.world, -1).sum(1)]).tolist()
        rows = self._exchange(x[order // self.top_k], counts[1], counts[0])
        local = torch.arange(self.count, device=x.device).repeat(self.world).repeat_interleave(received)
        static = ("silu" if self.gated else "gelu", "concat" if self.gated else "none", [], "nk", "nk", False)
        y = torch.ops.hexa.moe_ffn(rows, local[:, None], None, self.w1, None, None, None, self.w2, None, *static)
        back = self._exchange(y, counts[0], counts[1])
        scaled = back * weights.flatten()[order, None].to(x.dtype)
        return torch.zeros_like(x).index_add(0, order // self.top_k, scaled)

    def _exchange(self, rows: Tensor, out: list[int], given: list[int]) -> Tensor:
        moved = all_to_all_single_autograd(rows, out, given, dist.group.WORLD)
        return torch.ops._c10d_functional.wait_tensor(moved)


class Layer(nn.Module):
    def __init__(self, shape: ExpertShape, length: int, device: Any, dtype: torch.dtype, seed: int) -> None:
        super().__init__()
        generator = torch.Generator(device=device).manual_seed(seed)
        self.attention = Attention(shape.hidden_size, length, device, dtype, generator)
        self.moe: nn.Module = Experts(shape, device, dtype, generator)

    def forward(self, x: Tensor) -> Tensor:
        x = self.attention(x)
        return x + self.moe(x)


class Stack(nn.Module):
    """``layers`` layers of random weights, equal on all ranks."""

    def __init__(self, layers: int, shape: ExpertShape, length: int, device: Any, dtype: torch.dtype) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(shape, length, device, dtype, seed) for seed in range(layers)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x

    def blocks(self) -> list[RewrittenBlock]:
        """The MoE blocks as the rewrite hands them over."""
        found = []
        for i, layer in enumerate(self.layers):
            graph = fx.symbolic_trace(layer.moe).graph
            for node in graph.nodes:
                if "moe_ffn" in str(node.target):
                    node.meta["top_k"] = layer.moe.top_k
            found.append(RewrittenBlock(f"layers.{i}.moe", graph))
        return found


def partition(model: Stack, plan: Plan, stream: Any = None) -> Installed:
    """Cuts the model and makes its blocks run partitioned graphs, the experts on ``stream`` if one is given."""
    installed = install_plan(model, model.blocks(), plan)
    for forms in installed.blocks:
        for block in forms.values():
            module = model.get_submodule(block.path)
            for node in block.graph.nodes:
                if stream is not None and "moe_ffn" in str(node.target):
                    node.target = _experts_on(stream)
            module.forward = types.MethodType(type(fx.GraphModule(module, block.graph)).forward, module)
            installed.session.bind(module, block.path)
    installed.session.follow(model)
    return installed


@contextmanager
def on(stream: Any) -> Iterator[None]:
    """Inside, ``stream`` is the current one. It goes on where the current one is, and that one goes on behind it. None: nothing."""
    if stream is None:
        yield
        return
    before = torch.cuda.current_stream()
    stream.wait_stream(before)
    with torch.cuda.stream(stream):
        yield
    before.wait_stream(stream)


def _experts_on(stream: Any) -> Any:
    def experts(*args: Any) -> Tensor:
        with on(stream):
            y: Tensor = torch.ops.hexa.moe_ffn(*args)
        y.record_stream(torch.cuda.current_stream())
        return y

    return experts


def expert_parallel(model: Stack) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    for layer in model.layers:
        layer.moe = ExpertParallel(layer.moe, rank, world)


def fsdp2(model: Stack) -> None:
    """Every layer is gathered for its forward and again for its backward."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    kind = next(model.parameters()).device.type
    mesh = init_device_mesh(kind, (dist.get_world_size(),))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
