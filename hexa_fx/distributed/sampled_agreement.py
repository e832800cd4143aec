"""Compares, now and then, a few numbers that ranks hold: their slices of the experts differ, and everything else is the same.

What works on all parameters of a model does not know of slices. ZeroRedundancyOptimizer and a broadcast of the state give all ranks
those of one, averages of models and a loop of all_reduce mix them, and where each rank takes a norm alone, ranks clip by different
factors. Slices of equal shares have equal shapes, so that nothing else would notice.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from itertools import combinations
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.compiler import is_compiling
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import Optimizer

from hexa_fx.distributed.axes import local_part
from hexa_fx.distributed.collective_errors import guarded
from hexa_fx.distributed.groups import Groups
from hexa_fx.distributed.lockstep import is_capturing
from hexa_fx.distributed.optimizer_states import before_every_step
from hexa_fx.distributed.shards import ShardedParameter, other_parameters
from hexa_fx.distributed.slice_states import not_ours
from hexa_fx.errors import PlanError

log = logging.getLogger(__name__)

_NUMBERS, _OTHERS, _STRIDE = 64, 4, 7919
_watching: WeakSet[SampledAgreement] = WeakSet()


class SampledAgreement:
    """What is compared in the first, second, fourth, eighth, ... forward, over the host group: 5 KiB a rank.

    Gradients are those that an optimizer found in its first, second, fourth, ... step.
    """

    def __init__(self, groups: Groups) -> None:
        self._groups = groups
        self._guard = guarded("the comparison of a few weights")
        self._forwards = 0
        self._steps: WeakKeyDictionary[Optimizer, int] = WeakKeyDictionary()
        self._places: list[tuple[str, nn.Module, str]] = []
        self._last_seen = torch.zeros(0, _NUMBERS, device="cpu")
        self._gradients: dict[int, Tensor] = {}
        self._of_step: dict[int, int] = {}
        self._said: set[str] = set()

    def watch(self, model: nn.Module, shards: Sequence[ShardedParameter]) -> None:
        """Chooses what is compared: of what was cut of a model, and of its other parameters. A collective call."""
        first = next((shard for shard in shards if len(shard.whole) > 1), None)
        if self._groups.world == 1 or first is None:
            return
        others = list(other_parameters(model, shards))
        self._places = [(first.name, first.owner, first.name.rpartition(".")[2])]
        self._places += others[:: max(1, len(others) // _OTHERS)][:_OTHERS]
        if any(_near(self._gathered()[0][:, 0])):  # a model whose channels were copied to make more of them
            self._places = []
        else:
            _watching.add(self)
            before_every_step(_note_gradients)

    def check(self) -> None:
        """Called when a forward of the model begins, on all ranks.

        Raises:
            PlanError: the slices of two ranks, or their gradients, have become equal.
        """
        self._forwards += 1
        if self._forwards & (self._forwards - 1) or not self._places or is_capturing():
            return
        values, gradients, steps = self._gathered()
        self._refuse("", _near(values[:, 0]))
        self._refuse("the gradients of ", _equal(gradients[:, 0]))
        for number, (name, owner, key) in enumerate(self._places[1:], 1):
            of_one_step = bool((steps[:, number] == steps[0, number]).all())
            apart = _spread(gradients[:, number]) if of_one_step else 0.0
            self._compare(name, _rounding(owner._parameters.get(key)), _spread(values[:, number]), apart)

    def check_loaded(self, owner: nn.Module, *_: Any) -> None:
        """Called when a module has loaded a state dict, on this rank alone.

        Raises:
            PlanError: its slice is much nearer to what another rank had when ranks last compared than to its own.
        """
        if not self._places or owner is not self._places[0][1]:
            return
        name, _owner, key = self._places[0]
        held = owner._parameters.get(key)
        values = _sample(held, held, True)
        apart = (self._last_seen - values).square().mean(-1)
        if apart.min() < 0.25 * min(apart[self._groups.rank], values.var()):
            raise not_ours(f"{name!r} that was loaded")

    def _refuse(self, what: str, alike: Iterator[tuple[int, int]]) -> None:
        for pair in alike:
            ranks = [dist.get_process_group_ranks(self._groups.main)[rank] for rank in pair]
            raise PlanError(
                f"{what}the slices of {self._places[0][0]!r} on ranks {ranks} have become equal: something has broadcast, averaged "
                "or summed over ranks what is different channels on each (ZeroRedundancyOptimizer, averages of models, a loop of "
                "all_reduce). Keep hexa_fx.distributed.gradients.expert_parameters(session) out of it, in an optimizer of their "
                "own, and go on from a checkpoint of before"
            )

    def _compare(self, name: str, rounding: float, values: float, gradients: float) -> None:
        """Says by how much ranks differ in what they all have whole. Gradients that were summed together are equal, but for how
        different devices scale them.
        """
        if gradients > max(1e-5, 2 * rounding):
            self._say(
                "the gradient of %r differs between ranks by %.1g of its size: call sync_gradients before the optimizer's step, "
                "and clip_grad_norm_ of hexa_fx.distributed.gradients, not torch's, which takes each rank's slices alone",
                *(name, gradients),
            )
        elif values > 1e-2:
            self._say(
                "%r differs between ranks by %.1g of its size: their optimizers made different steps. With a GradScaler call "
                "unscale_ of hexa_fx.distributed.gradients, so that all ranks skip a step or none",
                *(name, values),
            )

    def note_gradients(self, optimizer: Optimizer) -> None:
        """Called before a step of any optimizer."""
        steps = self._steps[optimizer] = self._steps.get(optimizer, 0) + 1
        if steps & (steps - 1) or is_capturing():
            return
        held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        for number, (_, owner, key) in enumerate(self._places):
            parameter = owner._parameters.get(key)
            if parameter is not None and id(parameter) in held:
                self._gradients[number] = _sample(parameter, parameter.grad, number == 0)
                self._of_step[number] = steps

    def _gathered(self) -> tuple[Tensor, Tensor, Tensor]:
        """Values and gradients, (ranks, parameters, numbers), zeros where a rank has none; and the steps of the gradients."""
        mine = torch.zeros(1 + _OTHERS, 2 * _NUMBERS + 1, dtype=torch.float64, device="cpu")
        values, gradients, steps = mine.split((_NUMBERS, _NUMBERS, 1), -1)
        for number, (_, owner, key) in enumerate(self._places):
            parameter = owner._parameters.get(key)
            values[number] = _sample(parameter, parameter, number == 0)
            gradients[number] = self._gradients.get(number, 0.0)
            steps[number] = self._of_step.get(number, 0)
        parts = [torch.empty_like(mine) for _ in range(self._groups.world)]
        with self._guard:
            dist.all_gather(parts, mine, group=self._groups.host)
        of_all = torch.stack(parts).split((_NUMBERS, _NUMBERS, 1), -1)
        self._last_seen = of_all[0][:, 0]
        return of_all[0], of_all[1], of_all[2]

    def _say(self, text: str, *args: Any) -> None:
        if text not in self._said:
            self._said.add(text)
            log.warning(text, *args)


def _note_gradients(optimizer: Optimizer, *_: Any) -> None:
    if not is_compiling():
        for agreement in _watching:
            agreement.note_gradients(optimizer)


def _sample(parameter: Tensor | None, value: Tensor | None, cut: bool) -> Tensor:
    """Numbers from all over a parameter or its gradient. Zeros where FSDP keeps one that is not cut, in parts of its own."""
    apart = getattr(parameter, "_fsdp_flattened", False) or (isinstance(parameter, DTensor) and not cut)
    held = None if value is None or apart else local_part(value).detach()
    if held is None or held.layout != torch.strided or not held.numel():
        return torch.zeros(_NUMBERS, dtype=torch.float64, device="cpu")
    numbers = torch.arange(_NUMBERS, device=held.device)
    if cut and value is parameter:  # unequal slices that were mixed agree from the first element on
        return held.reshape(-1)[numbers % held.numel()]
    return held[tuple(numbers * _STRIDE % size for size in held.shape)].expand(_NUMBERS)


def _rounding(parameter: Tensor | None) -> float:
    return 0.0 if parameter is None else torch.finfo(parameter.dtype).eps


def _near(values: Tensor) -> Iterator[tuple[int, int]]:
    """Which rows differ by much less than the numbers of one do: averages, and what was trained on from there."""
    for left, right in combinations(range(len(values)), 2):
        apart = (values[left] - values[right]).square().mean().sqrt()
        if apart < 0.1 * values[left].std():
            yield left, right


def _equal(values: Tensor) -> Iterator[tuple[int, int]]:
    """Which rows are equal, though not one number everywhere."""
    for left, right in combinations(range(len(values)), 2):
        if values[left].std() > 0 and torch.equal(values[left], values[right]):
            yield left, right


def _spread(values: Tensor) -> float:
    """How much rows differ, over the largest number; 0 where a rank has nothing."""
    if not values.any(-1).all():
        return 0.0
    return float((values.amax(0) - values.amin(0)).max() / values.abs().max())
