"""Cuts a layer's expert parameters down to a rank's slice, and remembers what was cut.

Parameters keep their names, so that `named_parameters` has the same keys on every rank, and a record of each cut is enough to write
and read checkpoints in the shape of the original model.

Where shares are equal, a stacked parameter is replaced by one that is a DTensor, which wrappers, optimizers and checkpoints know
how to treat. What DTensor has no placement for, unequal shares, stays a plain tensor, and so do lists of experts.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from hexa_fx.distributed.geometry import Chunk, Geometry, taken
from hexa_fx.distributed.groups import local_part
from hexa_fx.errors import PlanError
from hexa_fx.isolation.module_tree import inside, is_unit_of_fsdp, with_ancestors
from hexa_fx.sources import peft

_OTHER = {torch.float32: torch.float64}


@dataclass(frozen=True)
class WeightSource:
    """The parameters behind one weight of the canonical node.

    Args:
        parts: one path when the weight is stored stacked, (E, ...). Else, for each part that is concatenated along the
            first dimension of an expert's matrix, one path an expert.
        stacked: whether the parameter has the expert dimension itself.
        form: ``concat`` or ``interleaved`` where the parameter holds this weight and another (gate and up of a ``split``
            expert) as halves or alternating channels; both are cut at once.
        dim: the intermediate dimension of the stacked parameter.
        experts: where the experts' matrices lie below each other in one matrix, their number.
    """

    parts: tuple[tuple[str, ...], ...]
    stacked: bool
    form: Literal["own", "concat", "interleaved"] = "own"
    dim: int = 1
    experts: int = 0


@dataclass(frozen=True)
class LayerWeights:
    """The expert weights of one layer, by role (`geometry.ROLES`).

    Args:
        path: the layer's name in the plan.
        root: the module that the sources' paths start from, as a path in the model.
    """

    path: str
    root: str
    geometry: Geometry
    sources: Mapping[str, WeightSource]

    def names(self, source: WeightSource) -> list[str]:
        """The parameters of a source, by their names in the model."""
        return [inside(self.root, path) for path in itertools.chain.from_iterable(source.parts)]


@dataclass(frozen=True, eq=False)
class ShardedParameter:
    """A parameter, originally of shape ``whole``, of which this rank holds ``chunks``.

    Args:
        name: in the model.
        original: the parameter as the cut left it. Others, such as FSDP2, may put one of their own in its place.
        owner: the module that holds it, under the last part of its name.
    """

    name: str
    original: Tensor
    owner: nn.Module
    whole: tuple[int, ...]
    chunks: tuple[Chunk, ...]

    @property
    def key(self) -> str:
        """Its name in ``owner``."""
        return self.name.rpartition(".")[2]

    @property
    def held_shape(self) -> list[int]:
        """Of what this rank holds by the plan."""
        shape = list(self.whole)
        shape[self.chunks[0].dim] = sum(chunk.length for chunk in self.chunks)
        return shape

    @property
    def parameter(self) -> Tensor:
        """The parameter that the module holds now."""
        held: Tensor = getattr(self.owner, self.key)
        return held


def other_parameters(model: nn.Module, shards: Iterable[ShardedParameter]) -> Iterator[tuple[str, nn.Module, str]]:
    """What is trained of a model and was not cut: its name, the module that holds it, and the last part of the name."""
    cut = {id(shard.parameter) for shard in shards}
    for path, module in model.named_modules():
        for key, parameter in module._parameters.items():
            if parameter is not None and parameter.requires_grad and id(parameter) not in cut:
                yield inside(path, key), module, key


def check_cuttable(model: nn.Module, layers: Iterable[LayerWeights]) -> None:
    """Raises `PlanError`, on every rank alike, if a parameter of these layers cannot be cut; nothing is cut yet.

    It is a plain one, one module holds it, and one layer reads it, once or as halves of it.
    """
    uses: dict[int, tuple[str, str, str]] = {}
    for weights in layers:
        read = [(name, source.form) for source in weights.sources.values() for name in weights.names(source)]
        for name, form in read:
            parameter, use = find_tensor(model, name), (name, weights.path, form)
            if type(parameter) not in (nn.Parameter, Tensor):
                raise PlanError(f"{name!r} is a {type(parameter).__name__}, which cannot be cut: {_remedy(parameter)}")
            first = uses.setdefault(id(parameter), use)
            if first is not use and (first != use or form == "own"):
                raise _shared(first[0], f"is used twice, by {first[1]!r} and as {name!r} by {weights.path!r}")
    places = {_place(model, name): name for name, _, _ in uses.values()}
    for path, module in model.named_modules():
        for key, held in module._parameters.items():
            if id(held) in uses and (id(module), key) not in places:
                raise _shared(uses[id(held)][0], f"is also {'.'.join(filter(None, (path, key)))!r}")


def check_plain(model: nn.Module, layers: Iterable[LayerWeights]) -> None:
    """Raises `PlanError`, on every rank alike, if there is an adapter on a parameter of these layers."""
    adapters = peft.adapted_parameters(model)
    for weights in layers:
        for name in itertools.chain.from_iterable(map(weights.names, weights.sources.values())):
            if _place(model, name) in adapters:
                raise adapted(name)


def _place(model: nn.Module, name: str) -> tuple[int, str]:
    path, _, key = name.rpartition(".")
    return id(model.get_submodule(path)), key


def adapted(name: str) -> PlanError:
    """What is said of an adapter or another parametrization on a parameter that is spread over ranks."""
    return PlanError(
        f"something is added to {name!r} in every call (an adapter, a parametrization), of which its slices know nothing: train "
        "adapters on experts under FSDP2, after optimize_ without mesh=, or put them on other modules"
    )


def _remedy(parameter: Tensor) -> str:
    if isinstance(parameter, DTensor):
        return "partition the model before wrapping it in DDP or FSDP2"
    return "partition a model whose experts are plain parameters, or leave it whole on every device (no mesh=)"


def _shared(name: str, how: str) -> PlanError:
    return PlanError(
        f"{name!r} {how}: each rank keeps a slice of it for one use, so it cannot be cut; give each use a parameter of its own, or "
        "share the whole block"
    )


def cut_layer(
    model: nn.Module, weights: LayerWeights, lo: int, hi: int, mesh: DeviceMesh | None = None
) -> list[ShardedParameter]:
    """Shrinks the parameters of a layer to channels ``lo .. hi`` of the intermediate size, in place.

    Args:
        mesh: 1-d; stacked parameters become DTensors over it. All ranks of it then have to hold equally many channels.
    """
    wanted: dict[str, tuple[Chunk, ...]] = {}
    stacked: set[str] = set()
    for role, source in weights.sources.items():
        chunks = _chunks(weights.geometry, role, source, lo, hi)
        names = weights.names(source)
        wanted |= dict.fromkeys(names, chunks)
        stacked |= set(names) if source.stacked else set()
    return [_cut_parameter(model, name, chunks, mesh if name in stacked else None) for name, chunks in wanted.items()]


def _chunks(geometry: Geometry, role: str, source: WeightSource, lo: int, hi: int) -> tuple[Chunk, ...]:
    size, length = geometry.shape.intermediate_size, hi - lo
    if not source.stacked and len(source.parts) > 1:  # gate and up are parameters of their own: each has only its half
        return (Chunk(geometry.dim(role) - 1, lo, 0, length),)
    if source.form == "concat":
        chunks: tuple[Chunk, ...] = (Chunk(source.dim, lo, 0, length), Chunk(source.dim, size + lo, length, length))
    elif source.form == "interleaved":
        chunks = (Chunk(source.dim, 2 * lo, 0, 2 * length),)
    else:
        chunks = tuple(replace(chunk, dim=source.dim) for chunk in geometry.chunks(role, lo, hi))
    if source.experts:
        return _below_each_other(chunks, source, size, length)
    return chunks if source.stacked else tuple(replace(chunk, dim=chunk.dim - 1) for chunk in chunks)


def _below_each_other(chunks: tuple[Chunk, ...], source: WeightSource, size: int, length: int) -> tuple[Chunk, ...]:
    """The chunks of one expert, repeated for every expert."""
    local = sum(chunk.length for chunk in chunks)
    whole = local // length * size if length else size
    return tuple(
        replace(chunk, start=chunk.start + expert * whole, local=chunk.local + expert * local)
        for expert in range(source.experts)
        for chunk in chunks
    )


def _cut_parameter(model: nn.Module, name: str, chunks: tuple[Chunk, ...], mesh: DeviceMesh | None) -> ShardedParameter:
    parameter = find_tensor(model, name)
    whole = tuple(parameter.shape)
    local = taken(parameter.data, chunks)
    exchange(parameter, local)
    path, _, key = name.rpartition(".")
    owner = model.get_submodule(path)
    if mesh is not None and isinstance(parameter, nn.Parameter):
        spread = distributed(local, whole, chunks, mesh)
        parameter = nn.Parameter(spread, requires_grad=parameter.requires_grad)
        owner.register_parameter(key, parameter)
    return ShardedParameter(name, parameter, owner, whole, chunks)


def exchange(parameter: Tensor, value: Tensor) -> None:
    """Gives a parameter values of another shape, and no gradient; it stays the same object."""
    with torch.no_grad():
        # A live graph keeps autograd's record of the old shape; a detour through another dtype drops it.
        parameter.data = parameter.data.new_empty(0, dtype=_OTHER.get(parameter.dtype, torch.float32))
        parameter.data = value
    parameter.grad = None


def distributed(local: Tensor, whole: tuple[int, ...], chunks: tuple[Chunk, ...], mesh: DeviceMesh) -> DTensor:
    """A rank's equal share of a tensor as a DTensor. Several chunks are its shares of as many equal parts of the dimension."""
    dim, parts = chunks[0].dim, len(chunks)
    placement: Any = Shard(dim) if parts == 1 else _StridedShard(dim, split_factor=parts)
    stride = torch.empty(whole, device="meta").stride()
    return DTensor.from_local(local, mesh, [placement], run_check=False, shape=torch.Size(whole), stride=stride)


def find_tensor(model: nn.Module, name: str) -> Tensor:
    """A parameter or buffer by its dotted name; raises `PlanError` if there is none."""
    value: object = model
    for key in name.split("."):
        value = getattr(value, key, None)
    if not isinstance(value, Tensor):
        raise PlanError(f"the model has no parameter or buffer {name!r}")
    return value


def parameters_here(shards: Sequence[ShardedParameter], model: nn.Module | None) -> tuple[Tensor, ...]:
    """What was cut of a layer, as this rank holds it; nothing where FSDP2 has put parameters of its own in its place."""
    replaced = [shard for shard in shards if shard.parameter is not shard.original]
    if replaced and model is not None:
        around = map(model.get_submodule, with_ancestors(replaced[0].name.rpartition(".")[0]))
        if any(map(is_unit_of_fsdp, around)):
            return ()
    return tuple(local_part(shard.parameter) for shard in shards)
