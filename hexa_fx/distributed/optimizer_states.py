"""Optimizers whose parameters are slices: their state dicts, and steps that would need the whole. Said once.

State dicts are marked, and refused where they are another rank's or whole.

torch has no hook of all optimizers' state dicts, but one of all their steps, and before the first step there is no state to give.
The mark is a value of a parameter group, which `load_state_dict` keeps, so that what was loaded into a new optimizer is found in
its first step. The optimizer itself has it from then on: state dicts that torch.distributed.checkpoint flattens are read by the
values that the groups of the optimizer have.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any
from weakref import WeakSet

from torch import optim
from torch.compiler import is_compiling
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from hexa_fx.distributed.shards import ShardedParameter
from hexa_fx.distributed.slice_states import MARK, are_known, check_slice, is_slice, mark_of, not_ours
from hexa_fx.errors import PlanError

log = logging.getLogger(__name__)

_ON_MATRICES = (optim.Adafactor, optim.LBFGS, optim.Muon)
_ON_ELEMENTS = (
    *(optim.SGD, optim.Adam, optim.RMSprop, optim.Adagrad, optim.Adadelta, optim.Adamax),
    *(optim.NAdam, optim.RAdam, optim.ASGD, optim.Rprop, optim.SparseAdam),
)
"""torch's optimizers, by what they look at. AdamW is an Adam."""


class _Slices:
    """What a session cut, for as long as the session lives."""

    def __init__(self, shards: Iterable[ShardedParameter]) -> None:
        self.shards = tuple(filter(is_slice, shards))

    def end(self) -> None:
        _watched.discard(self)


_watched: WeakSet[_Slices] = WeakSet()
_looked_at: WeakSet[Optimizer] = WeakSet()
_hooked: WeakSet[Optimizer] = WeakSet()
_said: WeakSet[Optimizer] = WeakSet()
_warned: WeakSet[type[Optimizer]] = WeakSet()
_made: set[int] = set()
"""Marks made under the plans that hold now. ZeroRedundancyOptimizer copies its groups' values to an optimizer of its own, which has
some of their parameters."""


def watch(shards: Iterable[ShardedParameter]) -> Callable[[], None]:
    """Watches the optimizers of these parameters from their next step on. Keep what it returns; its call ends the watch."""
    slices = _Slices(shards)
    _watched.add(slices)
    _looked_at.clear()
    _made.clear()
    _before_every_step()
    return slices.end


def check(optimizer: Optimizer) -> None:
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
    mark(optimizer)


def mark(optimizer: Optimizer) -> None:
    """Marks the groups of an optimizer whose state is of the slices that its parameters are now."""
    for group, here in _slices_in(optimizer):
        group.pop(MARK, None)
        if here:
            group[MARK] = mark_of(here)
            _made.add(group[MARK])


def holders(shards: Iterable[ShardedParameter]) -> list[Optimizer]:
    """The optimizers that made steps and have state of these parameters."""
    wanted = {id(shard.parameter) for shard in shards}
    return [
        optimizer for optimizer in _hooked if any(id(p) in wanted and values for p, values in optimizer.state.items())
    ]


def _slices_in(optimizer: Optimizer) -> list[tuple[dict[str, Any], list[ShardedParameter]]]:
    """The slices of every parameter group."""
    known = {id(shard.parameter): shard for slices in _watched for shard in slices.shards}
    return [(group, [known[id(p)] for p in group["params"] if id(p) in known]) for group in optimizer.param_groups]


@functools.cache
def _before_every_step() -> None:
    """Once in a process, since the hook is of all optimizers; those who partition nothing have none."""
    register_optimizer_step_pre_hook(_stepping)


def _stepping(optimizer: Optimizer, *_: Any) -> None:
    if is_compiling() or optimizer in _looked_at:
        return
    _check_kinds(optimizer)
    slices = [shard for _, here in _slices_in(optimizer) for shard in here]
    if optimizer in _hooked:  # what it loaded was looked at then, and its marks may be of an earlier plan
        mark(optimizer)
    if slices:
        check(optimizer)
        if optimizer not in _hooked:
            _check_steps(optimizer)
            optimizer.register_state_dict_post_hook(_given)
            optimizer.register_load_state_dict_post_hook(check)
            _hooked.add(optimizer)
    _looked_at.add(optimizer)


def _check_kinds(optimizer: Optimizer) -> None:
    """Raises `PlanError` where torch would say that it got mixed tensors, and not what helps."""
    for group in optimizer.param_groups:
        kinds = {isinstance(p, DTensor) for p in group["params"] if p.grad is not None}
        if len(kinds) == 2 and (group.get("foreach") or group.get("fused")):
            raise PlanError(
                f"{type(optimizer).__name__} has DTensors beside plain parameters, which foreach=True and fused=True do not take: "
                "give each kind a parameter group of its own, or make the optimizer with foreach=False, fused=False"
            )


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
