"""A small model of MoE layers around the canonical operator, whole on one process or partitioned."""

import types
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.fx as fx
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import _StridedShard

import hexa_fx.ops  # noqa: F401
from hexa_fx.distributed.groups import local_part
from hexa_fx.distributed.session import PartitionSession
from hexa_fx.ir import RewrittenBlock
from hexa_fx.passes.partition.install import Installed, install_plan
from hexa_fx.plan import ExpertShape, LayerPlan, Plan

E, D, I, K = 4, 8, 24, 2  # noqa: E741


@dataclass(frozen=True)
class Kind:
    """Which expert: how gated, layouts, biases, top-k."""

    glu: str = "concat"
    layout1: str = "nk"
    layout2: str = "nk"
    bias: bool = True
    top_k: int = K


SPLITS = {
    1: {"even": ((I,), (6,))},
    2: {"even": ((12, 12), (3, 3)), "uneven": ((8, 16), (5, 2)), "h0": ((24, 0), (2, 3)), "b0": ((8, 16), (6, 0))},
    4: {
        "even": ((6, 6, 6, 6), (2, 2, 2, 2)),
        "uneven": ((2, 10, 4, 8), (1, 5, 2, 4)),
        "zeros": ((16, 0, 8, 0), (3, 4, 0, 2)),
    },
}
KINDS = {
    "mlp": Kind("none"),
    "concat": Kind("concat", bias=False),
    "concat-kn": Kind("concat", "kn", "kn"),
    "interleaved": Kind("interleaved", "nk", "kn"),
    "split": Kind("split", "kn", "nk"),
    "top1": Kind("split", top_k=1, bias=False),
}
MODES = {
    "model": ("model_centric",) * 3,
    "data": ("data_centric",) * 3,
    "mixed": ("data_centric", "model_centric", "data_centric"),
}


def make_plan(
    world: int,
    split: str,
    modes: Any,
    kinds: Any,
    slots: int = 1,
    static: bool = False,
    reduce: str = "reduce_scatter",
    **extra: Any,
) -> Plan:
    shards, tokens = SPLITS[world][split]
    owner = max(range(world), key=lambda r: shards[r])
    layers = tuple(
        LayerPlan(f"layers.{i}", mode, ExpertShape(4, 8, I, 2 if k.glu == "none" else 3), shards, reduce, owner)
        for i, (mode, k) in enumerate(zip(modes, kinds))
    )
    return Plan(world, layers, tokens, tokens if static else None, slots, **extra)


class MoEBlock(nn.Module):
    """Attention's stand-in, a router, experts by `hexa::moe_ffn`, and a residual."""

    def __init__(self, kind: Kind, seed: int, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.kind = kind
        generator = torch.Generator().manual_seed(seed)

        def rand(*size: int) -> nn.Parameter:
            return nn.Parameter(torch.randn(size, generator=generator, dtype=torch.float64).mul(0.2).to(dtype))

        wide = 2 * I if kind.glu in ("concat", "interleaved") else I
        self.wa, self.wg = rand(D, D), rand(D, E)
        self.w1 = rand(*((E, wide, D) if kind.layout1 == "nk" else (E, D, wide)))
        self.w2 = rand(*((E, D, I) if kind.layout2 == "nk" else (E, I, D)))
        self.w3 = rand(*((E, I, D) if kind.layout1 == "nk" else (E, D, I))) if kind.glu == "split" else None
        self.b1 = rand(E, wide) if kind.bias else None
        self.b3 = rand(E, I) if kind.bias and kind.glu == "split" else None
        self.b2 = rand(E, D) if kind.bias else None

    def forward(self, x: Tensor) -> Tensor:
        x = x + torch.tanh(x @ self.wa)
        weights, index = torch.topk(torch.softmax(x @ self.wg, -1), self.kind.top_k, -1)
        kind = self.kind
        y = torch.ops.hexa.moe_ffn(
            x,
            index,
            weights,
            *(self.w1, self.b1, self.w3, self.b3, self.w2, self.b2),
            *("silu", kind.glu, [], kind.layout1, kind.layout2, False),
        )
        return x + y


class Net(nn.Module):
    def __init__(self, kinds: list[Kind], dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.layers = nn.ModuleList([MoEBlock(kind, seed, dtype) for seed, kind in enumerate(kinds)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def rewritten(model: Net) -> list[RewrittenBlock]:
    """What the rewrite hands to the partition."""
    return [RewrittenBlock(f"layers.{i}", fx.symbolic_trace(layer).graph) for i, layer in enumerate(model.layers)]


def run_graph(block: nn.Module, graph: fx.Graph) -> None:
    """Makes a block run a graph on its own parameters."""
    code = type(fx.GraphModule(block, graph)).forward
    block.forward = types.MethodType(code, block)


def install(model: Net, plan: Plan, **kwargs: Any) -> Installed:
    """Partitions the model in place."""
    installed = install_plan(model, rewritten(model), plan, **kwargs)
    for (block,) in (forms.values() for forms in installed.blocks):
        run_graph(model.get_submodule(block.path), block.graph)
        installed.session.bind(model.get_submodule(block.path), block.path)
    return installed


def batch(rows: int, seed: int = 7, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x, t = (torch.randn(rows, D, generator=generator, dtype=torch.float64) for _ in range(2))
    return x.to(dtype), t.to(dtype)


def loss_sum(y: Tensor, target: Tensor) -> Tensor:
    return ((y - target) ** 2).sum()


def own(sizes: tuple[int, ...], rank: int) -> slice:
    """A rank's slice of something split by sizes."""
    return slice(sum(sizes[:rank]), sum(sizes[: rank + 1]))


def cut(session: PartitionSession, name: str, whole: Tensor) -> Tensor:
    """This rank's slice of a whole parameter (or gradient), or all of it if the plan did not cut it."""
    for shard in session.shards:
        if shard.name == name:
            parts = [whole.narrow(c.dim, c.start, c.length) for c in shard.chunks]
            return torch.cat(parts, shard.chunks[0].dim)
    return whole


def held(session: PartitionSession, name: str, tensor: Tensor) -> Tensor:
    """What `cut` gives of a whole one, of one that the partitioned model has."""
    return local_part(tensor) if name in {shard.name for shard in session.shards} else full(tensor)


def gradient_pairs(
    model: Net, whole: Net, session: PartitionSession, replicated: str = "sum"
) -> list[tuple[Tensor, Tensor]]:
    """(partitioned, one process) gradients of every parameter; replicated ones are summed over ranks first."""
    experts = {shard.name for shard in session.shards}
    pairs = []
    for (name, p), (_, q) in zip(model.named_parameters(), whole.named_parameters()):
        grad = local_part(p.grad).clone()
        if name not in experts and replicated == "sum":
            dist.all_reduce(grad)
        pairs.append((grad, cut(session, name, q.grad)))
    return pairs


def full(tensor: Tensor) -> Tensor:
    """A tensor that may be spread over ranks, whole. torch 2.11's `full_tensor` does not put shares of two pieces together."""
    if not isinstance(tensor, DTensor):
        return tensor
    mesh, (*outer, inner) = tensor.device_mesh, tensor.placements
    if not isinstance(inner, _StridedShard):
        return tensor.full_tensor()
    held = tensor.to_local()
    if outer:
        held = DTensor.from_local(held, mesh[mesh.mesh_dim_names[:-1]], outer, run_check=False).full_tensor()
    parts = [torch.empty_like(held) for _ in range(mesh.size(-1))]
    dist.all_gather(parts, held.contiguous(), group=mesh.get_group(-1))
    pieces = zip(*(part.chunk(inner.split_factor, inner.dim) for part in parts))
    return torch.cat([piece for of_all in pieces for piece in of_all], inner.dim)


def largest(pairs: list[tuple[Tensor, Tensor]]) -> float:
    """Largest difference of any pair; of DTensors, of what this rank has."""
    pairs = [(local_part(a), local_part(b)) for a, b in pairs]
    assert all(a.shape == b.shape for a, b in pairs)
    return max((float((a - b).detach().abs().max()) for a, b in pairs if a.numel()), default=0.0)
