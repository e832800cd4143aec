"""Finds by experiment where the experts of an installed block are chosen, so that a run can choose others there.

The module that holds the router runs up to the block's operator, which shows the ids and gate values that arrive. Ids are then
forced on the calls that gave them: the operator has to get exactly these, with gate values that follow them.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from hexa_fx.capture.observe import Observation
from hexa_fx.capture.probes import probe_inputs
from hexa_fx.ir import Choice, RoutingSite
from hexa_fx.isolation.contents import Sandbox
from hexa_fx.isolation.module_state import ModuleState
from hexa_fx.isolation.module_tree import with_ancestors
from hexa_fx.isolation.torch_state import SEED, autocast_uncached, random_state_kept, training_mode
from hexa_fx.isolation.written_tensors import tensors_restored
from hexa_fx.routing.trial import Reached, Trial
from hexa_fx.runtime.forward import HexaForward

log = logging.getLogger(__name__)

TOKENS = 16
"""Of the example, on which routers are tried."""

_NOWHERE = "no top-k, argmax, max, sort or multinomial over scores in its code, or around it, gives the ids that its experts get"
_LOOSE = "its gate values do not follow the ids that are chosen"
_MASKED = "its router leaves out the scores of experts by a choice of its own, which forced ids cannot undo"

_OPERATORS = re.compile(r"\b\w*(?:moe_ffn|moe_ffn_fixed|moe_ffn_fp8|reindex)\(")


@autocast_uncached()
@random_state_kept()
def find_sites(
    model: nn.Module,
    around: Mapping[str, Sequence[Observation]],
    same_as: Mapping[str, str | None],
    effects: Sandbox,
) -> None:
    """Notes on every installed block where its experts are chosen, or why that is not known, for train and eval mode.

    Args:
        around: calls of each block and of the modules around it, innermost first, by the block's path.
        same_as: by path, the earlier block that a block is identical to, which chooses alike within itself.
        effects: of the analysis, of which these runs have the same.
    """
    for path, levels in around.items():
        forward, paths = _installed(model, path), modules_around(model, path)
        tried = [_Level(forward, level, paths.index(level.path)) for level in levels if level.path in paths]
        for training in (True, False):
            site = None if (twin := same_as[path]) is None else _installed(model, twin).sites.get(training)
            if isinstance(site, RoutingSite) and site.above == 0:
                forward.sites[training] = site
            elif forward.in_mode(training) is not None:
                forward.sites[training] = _find(forward, training, tried)
    effects.restore()


def _installed(model: nn.Module, path: str) -> HexaForward:
    forward = model.get_submodule(path).forward
    assert isinstance(forward, HexaForward)
    return forward


def modules_around(model: nn.Module, path: str) -> list[str]:
    """Paths of a block and of the modules around it, without adapters' wrappers, which come and go."""
    block, *others = with_ancestors(path)
    return [block, *(other for other in others if not hasattr(model.get_submodule(other), "base_layer"))]


def _find(forward: HexaForward, training: bool, levels: Sequence[_Level]) -> RoutingSite | str:
    made = forward.in_mode(training)
    assert made is not None
    if len(_OPERATORS.findall(made.program.source)) > 1:
        return "it holds several mixtures of experts"
    reason = _NOWHERE
    for level in levels:
        try:
            found = _at_level(forward, training, level)
        except Exception as error:  # of the user's code, on fewer tokens than the example has
            log.debug("%s: the router was not found: %s", level.call.path, error)
            said = str(error).partition("\n")[0]
            found = f"its code failed on a part of the example ({type(error).__name__}: {said})"
        if isinstance(found, RoutingSite):
            return found
        reason = found if reason == _NOWHERE else reason
    return reason


@dataclass(frozen=True)
class _Seen:
    """What a router gave in one mode, and what was found by it."""

    source: str
    natural: Reached
    choices: Mapping[Choice, Tensor]
    found: RoutingSite | str

    def is_alike(self, source: str, natural: Reached, choices: Mapping[Choice, Tensor]) -> bool:
        """Whether the same code gave the same, to the block's operator and on the way."""
        one, two = (
            [reached.index, reached.weights, *seen.values()]
            for reached, seen in ((self.natural, self.choices), (natural, choices))
        )
        return (
            self.source == source
            and list(self.choices) == list(choices)
            and all(a is b or (a is not None and b is not None and torch.equal(a, b)) for a, b in zip(one, two))
        )


class _Level:
    """A module that may hold the router, ``above`` modules around the block of ``forward``, with a call of it."""

    def __init__(self, forward: HexaForward, call: Observation, above: int) -> None:
        self.forward, self.call, self.above, self.module = forward, call, above, call.module
        self.args, self.kwargs = probe_inputs(call.args, call.kwargs, TOKENS)
        self.known: list[_Seen] = []
        self.state: ModuleState  # of the mode that is tried

    def run(self, trial: Trial) -> Reached | None:
        """What the operator gets; None if it is not called."""
        self.forward.called.append(trial.arrive)
        try:
            with random_state_kept(SEED), torch.no_grad(), trial:
                self.module(*self.args, **self.kwargs)
        except Exception:
            if trial.reached is None:
                raise
        finally:
            self.forward.called.remove(trial.arrive)
        self.state.restore()  # routers may count their calls, and anneal by it
        if trial.reached is None and trial.index is not None:
            return Reached(trial.index, None)
        return trial.reached


def _at_level(forward: HexaForward, training: bool, level: _Level) -> RoutingSite | str:
    with _tried(level, forward, training):
        trial = Trial()
        natural = level.run(trial)
        made = forward.in_mode(training)
        if natural is None or made is None or made.num_experts is None:
            return _NOWHERE
        experts, program = made.num_experts, made.program
        if known := next((seen for seen in level.known if seen.is_alike(program.source, natural, trial.seen)), None):
            return known.found
        columns = _columns(natural.index, trial.seen, experts)
        if columns is None:
            return _NOWHERE
        top_k = natural.index.numel() // len(trial.seen[columns[0][0]])
        site = RoutingSite(level.above, columns, (), top_k, experts)
        found = _tested(level, site, trial.seen, natural)
        level.known.append(_Seen(program.source, natural, trial.seen, found))
        return found


@contextmanager
def _tried(level: _Level, forward: HexaForward, training: bool) -> Iterator[None]:
    """A context in which the block runs its rewritten code whatever the size, in train or eval mode; all is put back afterwards."""
    with training_mode(level.module, training), tensors_restored(level.module), forward.on_trial():
        small, level.state = [each.small for each in forward.specialisations], ModuleState(level.module)
        forward.never_small()
        try:
            yield
        finally:
            for each, limits in zip(forward.specialisations, small):
                each.small = limits
            level.state.restore()


def _columns(index: Tensor, seen: Mapping[Choice, Tensor], experts: int) -> tuple[tuple[Choice, ...], ...] | None:
    """The calls whose ids are those of the operator (rows, k), or (rows * k, 1), where it keeps them."""
    flat, found = index.reshape(-1), []
    for choice, ids in seen.items():
        k = flat.numel() // max(1, len(ids))
        whole = ids.shape[1] == k or (choice.name in ("sort", "argsort") and 0 < k < ids.shape[1])
        fits = choice.size >= experts and whole and k * len(ids) == flat.numel()
        if fits and _agree(flat, ids[:, :k].reshape(-1), experts):
            found.append(choice)
    if found:
        return (tuple(found),)
    single = {c: ids[:, 0] for c, ids in seen.items() if c.size >= experts and len(ids) == len(index)}
    columns = tuple(tuple(c for c, ids in single.items() if _agree(column, ids, experts)) for column in index.unbind(1))
    return columns if all(columns) else None


def _agree(index: Tensor, ids: Tensor, experts: int) -> bool:
    """Whether ``index`` holds ``ids`` wherever it holds an expert at all, and it does somewhere."""
    kept = (index >= 0) & (index < experts)
    return bool(kept.any() and (index == ids)[kept].all())


def _tested(level: _Level, site: RoutingSite, seen: Mapping[Choice, Tensor], natural: Reached) -> RoutingSite | str:
    chosen = torch.cat([seen[calls[0]] for calls in site.columns], 1)[:, : site.top_k]
    generator = torch.Generator().manual_seed(0)
    order = torch.rand(len(chosen), site.num_experts, generator=generator, device="cpu").argsort(1)[:, : site.top_k]
    at_random = order.contiguous().to(chosen.device)
    reached = _forced(level, site, at_random)
    if reached is None or not _agree(reached.index.reshape(-1), at_random.reshape(-1), site.num_experts):
        return _NOWHERE
    if natural.weights is None or natural.weights.numel() != chosen.numel():
        return site
    weights = natural.weights.reshape(chosen.shape)
    in_any_order = len(site.columns) == 1  # a second choice may be weighed by what the first one left
    order = chosen.flip(1) if in_any_order else chosen
    reached = _forced(level, site, order)
    expected = weights.flip(1) if in_any_order else weights
    if reached is None or reached.weights is None or not _close(reached.weights.reshape(chosen.shape), expected):
        return _LOOSE
    return _with_groups(level, site, seen, chosen.roll(1, 0), weights)


def _with_groups(
    level: _Level, site: RoutingSite, seen: Mapping[Choice, Tensor], others: Tensor, weights: Tensor
) -> RoutingSite | str:
    """The site, with the choices of groups that have to follow if the experts of other tokens are to have gate values."""
    if bool((weights == 0).any()):
        return site
    groups = [c for c, ids in seen.items() if 1 < c.size < site.num_experts and len(ids) == len(others)]
    groups = [c for c in groups if site.num_experts % c.size == 0 and c.width < c.size]
    for among in ((), *((group,) for group in groups)):
        found = RoutingSite(site.above, site.columns, among, site.top_k, site.num_experts)
        reached = _forced(level, found, others)
        if reached is not None and reached.weights is not None and not bool((reached.weights == 0).any()):
            return found
    return _MASKED


def _close(found: Tensor, wanted: Tensor) -> bool:
    return torch.allclose(found.double(), wanted.double(), rtol=1e-3, atol=1e-5, equal_nan=True)


def _forced(level: _Level, site: RoutingSite, ids: Tensor) -> Reached | None:
    return level.run(Trial(forced_ids(site, ids), frozenset(site.groups), site.columns[0][0].size))


def forced_ids(site: RoutingSite, ids: Tensor) -> dict[Choice, Tensor]:
    """What each call of a site is to choose so that the experts are ``ids`` (rows, k); a call among groups gets all of them."""
    pieces = [ids] if len(site.columns) == 1 else ids.split(1, 1)
    forced = {choice: piece for calls, piece in zip(site.columns, pieces) for choice in calls}
    return forced | dict.fromkeys(site.groups, ids)
