"""State dicts and optimizers of a model whose experts are slices.

Of equal shares, which are DTensors, torch knows what they are, but takes no others beside them in one call with ``foreach`` or
``fused``. So while an optimizer steps, DTensors of a mesh are groups of their own.

State dicts of plain slices are marked, and refused where they are another rank's or whole. Nothing would be noticed otherwise,
since slices may have equal shapes: what the first rank saved would load on all. Of optimizers torch has no hook of all state dicts,
but one of all steps, and before the first step there is no state to give. The mark is a value of a parameter group, which
`load_state_dict` keeps, so that what was loaded into a new optimizer is found in its first step. The optimizer itself has it from
then on: state dicts that torch.distributed.checkpoint flattens are read by the values that the groups of the optimizer have.
"""

from __future__ import annotations

import functools
import hashlib
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import astuple
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

from torch import Tensor, nn, optim
from torch.compiler import is_compiling
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from hexa_fx.contexts import set_to
from hexa_fx.distributed.shards import ShardedParameter
from hexa_fx.errors import PlanError

log = logging.getLogger(__name__)

MARK = "hexa_fx_slices"
_are_known: ContextVar[bool] = ContextVar("slices_are_known", default=False)


are_known = _are_known.get
"""Whether who takes a state dict knows that it has slices."""


def known_slices() -> AbstractContextManager[None]:
    """Within it, who takes a state dict knows that it has slices."""
    return set_to(_are_known, True)


class SliceStates:
    """Watches the state dicts that the modules give and take that hold what was cut, whatever module around them is asked.

    Args:
        shards: what was cut. DTensors say themselves what they are; of those in several pieces it is said who can write them.
    """

    def __init__(self, shards: Sequence[ShardedParameter]) -> None:
        self._of: dict[nn.Module, list[ShardedParameter]] = {}
        for shard in shards:
            if is_slice(shard) or len(shard.chunks) > 1:
                self._of.setdefault(shard.owner, []).append(shard)
        self._said = False

    @property
    def owners(self) -> Iterable[nn.Module]:
        """The modules to hook."""
        return self._of

    def given(self, owner: nn.Module, _state: Any, prefix: str, metadata: dict[str, Any]) -> None:
        """Called with every state dict that an owner gives."""
        slices = list(filter(is_slice, self._of[owner]))
        if slices:
            metadata[MARK] = mark_of(slices)  # torch keeps it beside what it saves of a state dict
        if self._said or are_known():
            return
        self._said, first = True, (slices or self._of[owner])[0]
        name, shape = prefix + first.key, tuple(first.parameter.shape)
        log.warning(*(_OF_SLICES, name, shape, first.whole) if slices else (_OF_PIECES, name))

    def taken(
        self, owner: nn.Module, state: Mapping[str, Any], prefix: str, metadata: Mapping[str, Any], *_: Any
    ) -> None:
        """Called with every state dict that an owner is to load.

        Raises:
            PlanError: what would be loaded into a slice is whole, or a slice of another rank or plan.
        """
        slices = list(filter(is_slice, self._of[owner]))
        here = {prefix + shard.key: shard for shard in slices if prefix + shard.key in state}
        for name, shard in here.items():
            check_slice(f"{name!r} of the state dict", state[name], shard)
        mark = mark_of(slices)
        if here and metadata.get(MARK, mark) != mark:
            raise not_ours(f"{next(iter(here))!r} of the state dict")


_OF_SLICES = (
    "state_dict() of a model that is spread over devices has this rank's slices, %r as %s and not %s: "
    "hexa_fx.distributed.checkpoint.save writes whole weights, and load reads them, on one device too"
)
_OF_PIECES = (
    "%r is a DTensor of which each rank has several pieces (gate and up), which torch.distributed.checkpoint cannot write: "
    "hexa_fx.distributed.checkpoint.save does, and torch's save of what hexa_fx.distributed.checkpoint.state_dict returns"
)


def is_slice(shard: ShardedParameter) -> bool:
    """Whether a parameter has less than the whole, and nothing but this package knows. DTensors have the shape of the whole."""
    return tuple(shard.original.shape) != shard.whole


def mark_of(shards: Iterable[ShardedParameter]) -> int:
    """The same of no other slices."""
    held = [(shard.key, shard.whole, *map(astuple, shard.chunks)) for shard in shards]
    return int(hashlib.sha256(repr(held).encode()).hexdigest()[:12], 16)


def check_slice(what: str, value: object, shard: ShardedParameter) -> None:
    """Raises `PlanError` if a value for a slice has the shape of the whole."""
    held = tuple(shard.parameter.shape)
    if isinstance(value, Tensor) and tuple(value.shape) == shard.whole != held:
        raise PlanError(
            f"{what} is whole, the model holds this rank's slice {held}: load it before optimize_, or use "
            "hexa_fx.distributed.checkpoint, which cuts what it loads"
        )


def check_element_wise(state: Mapping[str, object], shard: ShardedParameter) -> None:
    """Raises `PlanError` if an optimizer keeps something of a slice that is neither of its shape nor one number.

    Nobody could put that together, and what one rank has would be taken for all.
    """
    held = tuple(shard.parameter.shape)
    for key, value in state.items():
        if isinstance(value, Tensor) and value.numel() != 1 and tuple(value.shape) != held:
            raise PlanError(
                f"an optimizer keeps {key!r} of {shard.name!r} as {tuple(value.shape)}, which is {held}: only what "
                "it keeps of every element can be put together or moved. Give the experts, "
                "hexa_fx.distributed.gradients.expert_parameters(session), to one that works on single elements (AdamW, SGD)"
            )


def not_ours(what: str) -> PlanError:
    """What is said where another rank's slices, or those of another plan, would be taken for this rank's."""
    return PlanError(
        f"{what} is a slice of another rank or plan: use hexa_fx.distributed.checkpoint, which writes whole weights and cuts what "
        "it loads"
    )


_ON_MATRICES = (optim.Adafactor, optim.LBFGS, optim.Muon)
_ON_ELEMENTS = (
    *(optim.SGD, optim.Adam, optim.RMSprop, optim.Adagrad, optim.Adadelta, optim.Adamax),
    *(optim.NAdam, optim.RAdam, optim.ASGD, optim.Rprop, optim.SparseAdam),
)
"""torch's optimizers, by what they look at. AdamW is an Adam."""


class _Slices:
    """What a session cut to plain slices, for as long as the session lives."""

    def __init__(self, shards: Iterable[ShardedParameter]) -> None:
        self.shards = tuple(filter(is_slice, shards))

    def end(self) -> None:
        _watched.discard(self)


_watched: WeakSet[_Slices] = WeakSet()
_looked_at: WeakKeyDictionary[Optimizer, int] = WeakKeyDictionary()
"""Optimizers that made steps, and how many sessions had begun to watch by then."""
_sessions = 0
_groups_of: WeakKeyDictionary[Optimizer, list[dict[str, Any]]] = WeakKeyDictionary()
"""The groups of optimizers that are stepping on parts of these."""
_hooked: WeakSet[Optimizer] = WeakSet()
_said: WeakSet[Optimizer] = WeakSet()
_warned: WeakSet[type[Optimizer]] = WeakSet()
_made: set[int] = set()
"""Marks made under the plans that hold now. ZeroRedundancyOptimizer copies its groups' values to an optimizer of its own, which has
some of their parameters."""


def watch_optimizers(shards: Iterable[ShardedParameter]) -> Callable[[], None]:
    """Watches the optimizers of these parameters from their next step on. Keep what it returns; its call ends the watch."""
    global _sessions
    _sessions += 1
    slices = _Slices(shards)
    _watched.add(slices)
    _made.clear()
    _around_every_step()
    return slices.end


def check_optimizer(optimizer: Optimizer) -> None:
    """Looks at the state of an optimizer, which may have been loaded.

    Raises:
        PlanError: it is whole where a parameter is a slice, or of another rank's slices or another plan's.
    """
    for group, here in _slices_in(optimizer):
        for shard in here:
            for value in optimizer.state.get(shard.parameter, {}).values():
                check_slice(f"the optimizer's state of {shard.name!r}", value, shard)
        if here and group.get(MARK) not in {None, mark_of(here), *_made}:
            raise not_ours(f"the optimizer's state of {here[0].name!r}")
    mark_optimizer(optimizer)


def mark_optimizer(optimizer: Optimizer) -> None:
    """Marks the groups of an optimizer whose state is of the slices that its parameters are now."""
    for group, here in _slices_in(optimizer):
        group.pop(MARK, None)
        if here:
            group[MARK] = mark_of(here)
            _made.add(group[MARK])


def optimizers_of(shards: Iterable[ShardedParameter]) -> list[Optimizer]:
    """The optimizers that made steps and have state of these parameters."""
    wanted = {id(shard.parameter) for shard in shards}
    return [o for o in _looked_at if any(id(p) in wanted and values for p, values in o.state.items())]


def _slices_in(optimizer: Optimizer) -> list[tuple[dict[str, Any], list[ShardedParameter]]]:
    """The slices of every parameter group."""
    known = {id(shard.parameter): shard for slices in _watched for shard in slices.shards}
    return [(group, [known[id(p)] for p in group["params"] if id(p) in known]) for group in optimizer.param_groups]


@functools.cache
def _around_every_step() -> None:
    """Once in a process, since the hooks are of all optimizers; those who partition nothing have none."""
    register_optimizer_step_pre_hook(_stepping)
    register_optimizer_step_post_hook(_stepped)


def _stepping(optimizer: Optimizer, *_: Any) -> None:
    if is_compiling():
        return
    _stepped(optimizer)  # if an error broke off the step before
    if _looked_at.get(optimizer) != _sessions:
        _look_at(optimizer)
    parts = [part for group in optimizer.param_groups for part in _by_mesh(group)]
    if len(parts) > len(optimizer.param_groups):
        _groups_of[optimizer], optimizer.param_groups = optimizer.param_groups, parts


def _stepped(optimizer: Optimizer, *_: Any) -> None:
    groups = _groups_of.pop(optimizer, None)
    if groups is None:
        return
    parts = {id(part["params"][0]): part for part in optimizer.param_groups if part["params"]}
    for group in groups:
        if group["params"]:
            group.update(parts[id(group["params"][0])] | {"params": group["params"]})
    optimizer.param_groups = groups


def _by_mesh(group: dict[str, Any]) -> list[dict[str, Any]]:
    """A parameter group as one for plain parameters and one for the DTensors of each mesh, in the order of their first ones."""
    kinds: dict[Any, list[Any]] = {}
    for parameter in group["params"]:
        kinds.setdefault(parameter.device_mesh if isinstance(parameter, DTensor) else None, []).append(parameter)
    return [group] if len(kinds) < 2 else [group | {"params": params} for params in kinds.values()]


def _look_at(optimizer: Optimizer) -> None:
    slices = [shard for _, here in _slices_in(optimizer) for shard in here]
    if optimizer in _hooked:  # what it loaded was looked at then, and its marks may be of an earlier plan
        mark_optimizer(optimizer)
    if slices:
        check_optimizer(optimizer)
        if optimizer not in _hooked:
            _check_steps(optimizer)
            optimizer.register_state_dict_post_hook(_given)
            optimizer.register_load_state_dict_post_hook(check_optimizer)
            _hooked.add(optimizer)
    _looked_at[optimizer] = _sessions


def _check_steps(optimizer: Optimizer) -> None:
    """Raises `PlanError` if an optimizer does something else to slices than to the whole; says once where that is not known."""
    first = next(shard for _, here in _slices_in(optimizer) for shard in here)
    if isinstance(optimizer, _ON_MATRICES):
        raise PlanError(
            f"{type(optimizer).__name__} looks at whole matrices (norms, factored moments) and has only this rank's slices of "
            f"{first.name!r} and others, so that its steps would not be those of one device: give the experts, "
            "hexa_fx.distributed.gradients.expert_parameters(session), to one that works on single elements (AdamW, SGD), or plan "
            "with strategy='fsdp', which keeps them whole for it"
        )
    if not isinstance(optimizer, _ON_ELEMENTS) and type(optimizer) not in _warned:
        _warned.add(type(optimizer))
        log.warning(
            "%s may look at whole matrices (norms, factored moments), and has only this rank's slices of %r and others: its "
            "steps are then not those of one device. Those that look at single elements (AdamW, SGD) are the same on slices; "
            "if this one looks at no more, ignore this",
            *(type(optimizer).__name__, first.name),
        )


def _given(optimizer: Optimizer, state: Mapping[str, Any]) -> None:
    """Called with every state dict that an optimizer gives. Its groups are copies."""
    held = [here for _, here in _slices_in(optimizer)]
    for group, here in zip(state["param_groups"], held):
        group.pop(MARK, None)
        if here and not are_known():
            group[MARK] = mark_of(here)
    if any(held) and not are_known() and optimizer not in _said:
        _said.add(optimizer)
        first = next(filter(None, held))[0]
        log.warning(
            "state_dict() of an optimizer has the state of this rank's slices, of %r as %s and not %s: "
            "hexa_fx.distributed.checkpoint.save(path, model, session, optimizer) writes whole state, and load reads it, on one "
            "device too; torch.distributed.checkpoint writes what hexa_fx.distributed.checkpoint.state_dict returns",
            *(first.name, tuple(first.parameter.shape), first.whole),
        )
