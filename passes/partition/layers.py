"""The expert layers of a rewritten block, as partitioning sees them: which parameters they read and how those are laid out."""

from __future__ import annotations

import logging
import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
import torch.fx as fx
from torch import Tensor, nn

from hexa_fx.distributed import nodes
from hexa_fx.distributed.geometry import ROLES, Geometry, shape_of
from hexa_fx.distributed.shards import LayerWeights, WeightSource, find_tensor
from hexa_fx.errors import PlanError
from hexa_fx.ir import RewrittenBlock
from hexa_fx.isolation.module_tree import inside
from hexa_fx.passes.partition.collectives import ffn_arguments, moe_ffns
from hexa_fx.plan import LayerPlan

log = logging.getLogger(__name__)

Modes = Mapping[Any, RewrittenBlock]
"""One block's rewritten forms by mode (train, eval). They read the same weights."""


def modes_of(block: RewrittenBlock | Modes) -> Modes:
    return {"any": block} if isinstance(block, RewrittenBlock) else block


def any_mode(block: RewrittenBlock | Modes) -> RewrittenBlock:
    return next(iter(modes_of(block).values()))


def that_spread(block: Modes) -> Modes:
    """The modes in which experts can be spread, if there are any: with dropout inside them, train mode runs experts step by step.

    The other mode is left to the block's own code, which cannot run on slices and says so when it is called there.
    """
    spread = {mode: form for mode, form in block.items() if moe_ffns(form.graph)}
    if spread and len(spread) < len(block):
        left = ", ".join(str(mode) for mode in block if mode not in spread)
        path = any_mode(block).path or "the model"
        log.warning(
            "%s has its own code in %s mode, which cannot run on slices: its experts run step by step there", path, left
        )
    return spread or block


def read_layers(model: nn.Module, block: RewrittenBlock) -> list[LayerWeights]:
    """The expert layers of a rewritten block: which parameters they read and how those are laid out."""
    layers = [_read_layer(model, block, node) for node in moe_ffns(block.graph)]
    if len(layers) == 1:
        return layers
    # A graph of several layers (of a whole model): each is named after the module that owns its first weight.
    first = (layer.sources["w1"].parts[0][0] for layer in layers)
    named = [replace(layer, path=inside(block.path, w1.rpartition(".")[0])) for layer, w1 in zip(layers, first)]
    if len({layer.path for layer in named}) == len(named):
        return named
    return [replace(layer, path=f"{layer.path}#{i}") for i, layer in enumerate(named)]


def observed_tokens(block: RewrittenBlock) -> int | None:
    """Tokens that reached the block's experts when it was recorded, if the graph still says so."""
    found = moe_ffns(block.graph)
    shape = _shape_of_ids(found[0]) if found else None
    return None if shape is None else int(shape[0])


def _read_layer(model: nn.Module, block: RewrittenBlock, node: fx.Node) -> LayerWeights:
    args = ffn_arguments(node)
    found = {role: _read(model, block, args[role], role) for role in ROLES if args[role] is not None}
    whole = {role: read.value for role, read in found.items()}
    ids = _shape_of_ids(node)
    top_k = node.meta.get("top_k", 1 if ids is None else ids[1])
    shape = shape_of(whole["w1"], args["glu"], args["layout1"], int(top_k))
    bias = args["b1"] is not None or args["b3"] is not None
    geometry = Geometry(shape, args["glu"], args["layout1"], args["layout2"], bias)
    sources = {role: _source(read, role, geometry, block) for role, read in found.items()}
    return LayerWeights(block.path, block.path, geometry, sources)


# --- what a weight of the canonical node is in the model ------------------------------------------------------------


@dataclass(frozen=True)
class _Read:
    """A weight as the graph reads it: parameters, the views taken of them in order, and the result without data."""

    parts: tuple[tuple[str, ...], ...]
    stacked: bool
    views: tuple[fx.Node, ...]
    stored: Tensor
    value: Tensor


def _read(model: nn.Module, block: RewrittenBlock, value: Any, role: str) -> _Read:
    views = [*_views(value)][::-1]
    node = views[0].args[0] if views else value
    if not isinstance(node, fx.Node) or node.op not in ("get_attr", "call_module"):
        raise PlanError(
            f"{role} of {block.path!r} is computed by {getattr(node, 'target', node)!r}, so there is no parameter that could "
            "be cut: only weights read as they are stored, or through slices, flatten and unflatten, can be partitioned"
        )
    parts, stacked, stored = _stored(model, block, node)
    seen = stored
    for view in views:
        cut = view.op == "call_function"
        seen = seen[view.args[1]] if cut else getattr(seen, str(view.target))(*view.args[1:], **view.kwargs)  # type: ignore[index]
    return _Read(parts, stacked, tuple(views), stored, seen)


def _stored(model: nn.Module, block: RewrittenBlock, node: fx.Node) -> tuple[tuple[tuple[str, ...], ...], bool, Tensor]:
    """The parameters that a node reads, whether they are one that is stacked, and the whole, as a tensor without data."""
    parts = next((packed.parts for packed in block.packed if packed.name == node.target), None)
    first = [find_tensor(model, inside(block.path, part[0])) for part in parts or ((str(node.target),),)]
    if parts is None:
        return ((str(node.target),),), True, torch.empty_like(first[0], device="meta")
    rows, *width = zip(*(one.shape for one in first))  # parts are concatenated along their first dimension
    return parts, False, torch.empty((len(parts[0]), sum(rows), *(sizes[0] for sizes in width)), device="meta")


def _source(read: _Read, role: str, geometry: Geometry, block: RewrittenBlock) -> WeightSource:
    """How channels of a role lie in the parameter: as they are, or in halves or alternating with another role's."""
    dim, form, per_expert = geometry.dim(role), _form(read, role, geometry), False
    for view in reversed(read.views):  # from the role back to the parameter
        if view.op == "call_method" and view.target == "flatten":
            first = int(str(view.args[1])) if len(view.args) > 1 else 0
            dim += read.stored.dim() - read.value.dim() if dim >= first else 0
        elif view.op == "call_method":  # unflatten(0, (E, -1)) of a matrix that holds the experts below each other
            per_expert, dim = dim == 1, dim - 1
    if form == "unknown":
        raise PlanError(
            f"{role} of {block.path!r} is a slice of {read.parts[0][0]!r} that partitioning does not know: halves and every "
            "second channel can be cut, "
            + ", ".join(str(view.args[1]) for view in read.views if view.op == "call_function")
            + " cannot"
        )
    experts = read.value.shape[0] if per_expert else 0
    return WeightSource(read.parts, read.stacked, form, dim, experts)  # type: ignore[arg-type]


def _form(read: _Read, role: str, geometry: Geometry) -> Literal["own", "concat", "interleaved", "unknown"]:
    dim, size = geometry.dim(role), geometry.shape.intermediate_size
    found: set[str] = {_piece(view, dim, size) for view in read.views if view.op == "call_function"} - {"whole"}
    if not found:
        return "own"
    if len(found) > 1 or geometry.glu != "split" or role == "w2":
        return "unknown"
    return {"half": "concat", "second": "interleaved"}.get(found.pop(), "unknown")  # type: ignore[return-value]


def _piece(view: fx.Node, dim: int, size: int) -> str:
    """``half`` of a dimension, every ``second`` of it, ``whole`` where only experts are chosen."""
    slices = view.args[1] if isinstance(view.args[1], tuple) else (view.args[1],)
    if not all(isinstance(s, slice) for s in slices):
        return "other"
    chosen = [(place, s) for place, s in enumerate(slices) if s != slice(None)]
    if all(place == 0 and s.step is None for place, s in chosen):
        return "whole"
    if len(chosen) != 1 or chosen[0][0] != dim:
        return "other"
    piece = chosen[0][1]
    if piece in (slice(None, size), slice(size, None), slice(0, size), slice(size, 2 * size)):
        return "half"
    return "second" if piece in (slice(None, None, 2), slice(1, None, 2)) else "other"


def follow_cut(graph: fx.Graph, layers: Sequence[LayerWeights], plans: Sequence[LayerPlan], rank: int) -> None:
    """Moves, in place, the bounds of slices that take half of a weight to where the halves of this rank's slice meet."""
    for node, layer, planned in zip(moe_ffns(graph), layers, plans):
        size, local = planned.shape.intermediate_size, planned.shards[rank]
        for role, value in ffn_arguments(node).items():
            if role in layer.sources and layer.sources[role].form == "concat":
                for view in (view for view in _views(value) if view.op == "call_function"):
                    view.args = (view.args[0], _moved(view.args[1], layer.geometry.dim(role), size, local))


def read_local(graph: fx.Graph) -> None:
    """Lets a graph read, in place, its rank's slice of expert parameters that may be DTensors. Their grouping by views stays."""
    for node in moe_ffns(graph):
        for role in ROLES:
            stored = ffn_arguments(node)[role]
            for view in _views(stored):
                stored = view.args[0]
            if not isinstance(stored, fx.Node) or stored.op != "get_attr":
                continue
            with graph.inserting_after(stored):
                local = graph.call_function(nodes.local_weight, (stored,))
            stored.replace_all_uses_with(local)
            local.args = (stored,)


def _views(value: Any) -> Iterator[fx.Node]:
    """The views that a weight is read through, the last first."""
    views = ("call_function", operator.getitem), ("call_method", "flatten"), ("call_method", "unflatten")
    while isinstance(value, fx.Node) and (value.op, value.target) in views:
        yield value
        value = value.args[0]


def _moved(index: Any, dim: int, size: int, local: int) -> Any:
    slices = list(index) if isinstance(index, tuple) else [index]
    if len(slices) <= dim:
        return index
    piece = slices[dim]
    bounds = {None: None, 0: 0, size: local, 2 * size: 2 * local}
    slices[dim] = slice(bounds[piece.start], bounds[piece.stop], piece.step)
    return tuple(slices)


def _shape_of_ids(node: fx.Node) -> torch.Size | None:
    """(T, k) of a canonical node's ids when it was recorded, if they say so."""
    ids = ffn_arguments(node)["top_k_index"]
    value = ids.meta.get("val", ids.meta.get("example_value")) if isinstance(ids, fx.Node) else None
    return value.shape if isinstance(value, Tensor) else None
