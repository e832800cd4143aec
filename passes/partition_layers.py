"""The expert layers of a rewritten block, as partitioning sees them: which parameters they read and how those are laid out."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.fx as fx
from torch import Tensor, nn

from hexa_fx.errors import PlanError
from hexa_fx.ir import RewrittenBlock
from hexa_fx.passes.collectives import ffn_arguments, is_moe_ffn
from hexa_fx.runtime.distributed.geometry import ROLES, Geometry, shape_of
from hexa_fx.runtime.distributed.shards import LayerWeights, WeightSource, find_tensor


def read_layers(model: nn.Module, block: RewrittenBlock) -> list[LayerWeights]:
    """The expert layers of a rewritten block: which parameters they read and how those are laid out."""
    found = [node for node in block.graph.nodes if is_moe_ffn(node)]
    layers = [_read_layer(model, block, node) for node in found]
    if len(layers) == 1:
        return layers
    # A graph of several layers (of a whole model): each is named after the module that owns its first weight.
    named = [replace(layer, path=_owner(block, layer)) for layer in layers]
    if len({layer.path for layer in named}) == len(named):
        return named
    return [replace(layer, path=f"{layer.path}#{i}") for i, layer in enumerate(named)]


def _owner(block: RewrittenBlock, layer: LayerWeights) -> str:
    inside = layer.sources["w1"].parts[0][0].rpartition(".")[0]
    return ".".join(part for part in (block.path, inside) if part)


def _read_layer(model: nn.Module, block: RewrittenBlock, node: fx.Node) -> LayerWeights:
    args = ffn_arguments(node)
    sources = {role: _source(block, args[role], role) for role in ROLES if args[role] is not None}
    whole = {role: _meta(model, block.path, source) for role, source in sources.items()}
    top_k = _top_k(args["top_k_index"])
    shape = shape_of(whole["w1"], whole.get("w3"), whole["w2"], args["glu"], args["layout1"], top_k)
    bias = args["b1"] is not None or args["b3"] is not None
    geometry = Geometry(shape, args["glu"], args["layout1"], args["layout2"], bias)
    return LayerWeights(block.path, block.path, geometry, sources)


def _source(block: RewrittenBlock, value: Any, role: str) -> WeightSource:
    if not isinstance(value, fx.Node) or value.op not in ("get_attr", "call_module"):
        raise PlanError(
            f"{role} of {block.path!r} is {value!r}, which is no parameter of the block: only weights read as they are "
            "stored can be cut"
        )
    for packed in block.packed:
        if packed.name == value.target:
            return WeightSource(packed.parts, stacked=False)
    return WeightSource(((str(value.target),),), stacked=True)


def _meta(model: nn.Module, path: str, source: WeightSource) -> Tensor:
    """A weight's whole shape, as a tensor without data."""

    def find(name: str) -> Tensor:
        return find_tensor(model, f"{path}.{name}" if path else name)

    if source.stacked:
        return torch.empty_like(find(source.parts[0][0]), device="meta")
    experts = len(source.parts[0])
    first = [torch.empty_like(find(part[0]), device="meta") for part in source.parts]
    return torch.cat(first, dim=0).expand(experts, *[-1] * first[0].dim())


def _top_k(index: Any) -> int:
    value = index.meta.get("val", index.meta.get("example_value")) if isinstance(index, fx.Node) else None
    return int(value.shape[1]) if isinstance(value, Tensor) else 1
