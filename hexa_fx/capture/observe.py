"""Runs a whole model once on example inputs and notes where MoE blocks may be.

A block is worth recording if it holds parameters that could belong to experts, and if something is selected by index inside
it or in its arguments. Names only suggest where to look; detection decides what a block is.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from hexa_fx.capture import overlooked
from hexa_fx.capture.copies import copied
from hexa_fx.capture.probes import probe_inputs
from hexa_fx.capture.scripted import scripts_as_python
from hexa_fx.capture.selections import Selections
from hexa_fx.capture.suspects import CONVOLUTIONS, holds_numbered, is_one_stack, may_hold_experts
from hexa_fx.ir import SourceLocation
from hexa_fx.isolation.module_snapshot import restored
from hexa_fx.isolation.module_tree import named_modules
from hexa_fx.isolation.random_state import random_state_kept
from hexa_fx.isolation.written_tensors import tensors_restored
from hexa_fx.runtime.preflight import sharded_units
from hexa_fx.torch_private import DisableTorchFunction

NEVER_CALLED = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)
"""Modules that only hold others."""


@dataclass(frozen=True)
class Observation:
    """A module's first call during the run, with copies of its arguments; and what was ``given``, once others are in its place.

    Args:
        gradients: whether they are on in it, which counts where the code asks.
        written: whether the code around the module writes to what it was given, after the call.
    """

    path: str
    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    given: tuple[Any, Any] | None = None
    gradients: bool = True
    written: bool = False


@dataclass(frozen=True)
class Candidate:
    """A place to look for an MoE block: the innermost module that may be one, then the modules around it.

    Args:
        levels: modules that may be the block.
        reason: why there is nothing to look for in a block that holds what looks like experts; it has one level.
        around: these levels, and further modules around them in which something is selected.
        location: of the code that is the reason, where one line is.
    """

    levels: tuple[Observation, ...]
    reason: str = ""
    around: tuple[Observation, ...] = ()
    location: SourceLocation | None = None


def observe(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    with_parameters: Callable[[], object] = lambda: None,
    most_tokens: int | None = None,
) -> list[Candidate]:
    """Runs ``model`` without gradients and returns candidates in the order of ``named_modules(model)``.

    Buffers, attributes, hooks and the random state are restored afterwards, and parameters if they were written to, with what
    ``with_parameters`` restores. Errors of the model itself are not caught. At most about ``most_tokens`` of what a module is given
    are noted.
    """
    modules = dict(named_modules(model))
    suspects, numbered, packed = _suspects(model, modules)
    others = any(isinstance(module, (nn.Embedding, *CONVOLUTIONS)) for module in modules.values())
    others |= overlooked.may_be_cut(model)
    if not (suspects | numbered | packed or others or overlooked.in_plain_lists(model)):
        return []
    recorded: dict[str, Observation] = {}
    mode, sharded = Selections(model), sharded_units(model)
    with (
        tensors_restored(model, with_parameters),
        restored(model),
        random_state_kept(),
        _hooks(model, suspects | numbered | packed, mode, recorded, most_tokens),
        torch.no_grad(),
        scripts_as_python(all_of_them=False),
        mode,
    ):
        model(*args, **kwargs)
        for unit in sharded:
            unit.reshard()  # type: ignore[operator]  # an outermost one leaves that to backward, and shards are put back here
    suspects |= numbered - mode.chained
    if most_tokens is not None:  # a call, of which others will follow
        suspects, packed = ({path for path in paths if _ran(model, path, mode)} for paths in (suspects, packed))
    found = _candidates(model, suspects, mode, recorded)
    left = _overlooked(model, suspects | packed, mode, recorded, {candidate.levels[0].path for candidate in found})
    order = {path: number for number, (path, _) in enumerate(named_modules(model))}
    return sorted([*found, *left], key=lambda candidate: order[candidate.levels[0].path])


def _suspects(model: nn.Module, modules: Mapping[str, nn.Module]) -> tuple[set[str], set[str], set[str]]:
    """Paths of what may hold experts by its weights, by the names of its children, or packed."""
    suspects = {path for path, module in modules.items() if may_hold_experts(path, module)}
    suspects |= overlooked.owners_of_shared(model, suspects) & modules.keys()
    numbered = {path for path, module in modules.items() if holds_numbered(module)} - suspects
    return suspects, numbered, {path for path, module in modules.items() if overlooked.packed_experts(module)}


def ancestors_of_suspects(model: nn.Module) -> set[str]:
    """Paths of what may hold experts, and of all modules around it."""
    kinds = _suspects(model, dict(named_modules(model)))
    return {ancestor for paths in kinds for path in paths for ancestor in with_ancestors(path)}


def _ran(model: nn.Module, path: str, mode: Selections) -> bool:
    """Whether a module was called, or the one that holds it as a list, or code around it took its weights."""
    if any(id(p) in mode.used for p in model.get_submodule(path).parameters()):
        return True
    while path and isinstance(model.get_submodule(path), NEVER_CALLED):
        path = path.rpartition(".")[0]
    return path in mode.called


def _overlooked(
    model: nn.Module,
    suspects: set[str],
    mode: Selections,
    recorded: Mapping[str, Observation],
    found: set[str],
) -> list[Candidate]:
    """Blocks with what looks like experts, beside those that are ``found``, that choose none by index."""
    left: dict[str, str] = {}
    for path in suspects:
        said = None if _is_list_of_layers(path, mode) else overlooked.why_overlooked(model, path, mode.runs)
        if said is not None:
            left.setdefault(*said)
    hidden = overlooked.in_groups(model, mode.selecting) | overlooked.in_plain_lists(model, mode.selecting)
    parts = {path: why for path, (why, _) in mode.runs.parts().items()}
    left = hidden | mode.runs.tables() | left | parts
    left = {b: why for b, why in left.items() if not any(b == p or _is_inside(p, b) or _is_inside(b, p) for p in found)}
    return [
        Candidate(
            (recorded.get(path) or Observation(path, model.get_submodule(path), (), {}),),
            reason,
            location=mode.runs.place_of(path, reason),
        )
        for path, reason in overlooked.innermost(left).items()
    ]


@contextmanager
def _hooks(
    model: nn.Module, suspects: set[str], mode: Selections, recorded: dict[str, Observation], most_tokens: int | None
) -> Iterator[None]:
    """Records the arguments of suspects and of the modules around them, and tracks which module is running."""
    wanted = {ancestor for path in suspects for ancestor in with_ancestors(path)}
    handles = []
    produced_by: dict[int, str] = {}  # id of an output -> the list its module stands in
    alive: list[torch.Tensor] = []  # keeps these ids unique
    given: dict[str, list[torch.Tensor]] = {}
    versions: dict[str, list[int]] = {}  # of these tensors, when the module was left

    def enter(path: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            mode.stack.append(path)
            mode.called.add(path)
            mode.runs.see(path, (*args, *kwargs.values()))
            owner = path.rpartition(".")[0]
            if any(produced_by.get(id(item)) == owner for item in args if isinstance(item, torch.Tensor)):
                mode.chained.add(owner)
            if path in wanted and path not in recorded:
                with DisableTorchFunction():
                    if most_tokens is not None:
                        args, kwargs = probe_inputs(args, kwargs, most_tokens)
                    recorded[path] = Observation(path, module, copied(args), copied(kwargs))
                    given[path] = [
                        t for t in (*args, *kwargs.values()) if isinstance(t, torch.Tensor) and not t.is_inference()
                    ]

        return hook

    def leave(module: nn.Module, args: Any, output: Any) -> None:
        path = mode.stack.pop()
        if path in given:
            versions.setdefault(path, [tensor._version for tensor in given[path]])
        owner, _, name = path.rpartition(".")
        if not any(map(str.isdigit, name)):
            return
        first = output[0] if isinstance(output, tuple) and output else output
        if isinstance(first, torch.Tensor):
            produced_by[id(first)] = owner
            alive.append(first)

    for path, module in named_modules(model):
        if isinstance(module, torch.jit.ScriptModule):  # which takes no hooks
            continue
        handles.append(module.register_forward_pre_hook(enter(path), with_kwargs=True))
        handles.append(module.register_forward_hook(leave))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
    for path, before in versions.items():
        written = before != [tensor._version for tensor in given[path]]
        recorded[path] = replace(recorded[path], written=written)


def with_ancestors(path: str) -> Iterator[str]:
    """The dotted path of a module, then of everything that holds it, the model (an empty path) last."""
    yield path
    while path:
        path = path.rpartition(".")[0]
        yield path


_LEVELS, _AROUND = 3, 6


def _candidates(
    model: nn.Module, suspects: set[str], mode: Selections, recorded: Mapping[str, Observation]
) -> list[Candidate]:
    found: dict[str, Candidate] = {}
    halves = _halves(model, suspects, mode.selecting)
    suspects = (suspects | {path.rpartition(".")[0] for path in halves}) - halves
    for path in (path for path, _ in named_modules(model) if path in suspects):
        if _is_list_of_layers(path, mode):
            continue
        around = [
            recorded[p] for p in with_ancestors(path) if p in recorded and _can_be_block(recorded[p], mode.selecting)
        ]
        if around:
            found.setdefault(around[0].path, Candidate(tuple(around[:_LEVELS]), around=tuple(around[:_AROUND])))
    innermost = {path: c for path, c in found.items() if not any(_is_inside(other, path) for other in found)}
    return [_alone(path, candidate, innermost) for path, candidate in innermost.items()]


def _halves(model: nn.Module, suspects: set[str], selecting: set[str]) -> set[str]:
    """Modules of one stacked weight that are no blocks: projections, beside another such module, and routers of groups of experts.

    The former only where the module around them is a suspect too, or chooses; it is looked at in their place.
    """
    lone = [path for path in suspects if path and is_one_stack(model.get_submodule(path))]
    owners = [path.rpartition(".")[0] for path in lone]
    halves = {path for path, owner in zip(lone, owners) if owners.count(owner) > 1 and owner in suspects | selecting}
    wide = [path for path in suspects if any(p.dim() > 3 for p in model.get_submodule(path).parameters(recurse=False))]
    return halves | {p for p, owner in zip(lone, owners) if p in selecting and any(_is_inside(w, owner) for w in wide)}


def _alone(path: str, candidate: Candidate, others: Mapping[str, Candidate]) -> Candidate:
    """The candidate without the levels that contain another candidate."""
    levels = [o for o in candidate.levels if not any(other != path and _is_inside(other, o.path) for other in others)]
    return Candidate(tuple(levels), around=candidate.around)


def _is_inside(path: str, other: str) -> bool:
    return path != other and path.startswith(f"{other}." if other else "")


def _is_list_of_layers(path: str, mode: Selections) -> bool:
    """Whether the members each do their own routing, or feed each other, without any routing beside them."""
    owner = path.rpartition(".")[0]
    inside = {s for s in mode.selecting if _is_inside(s, path)}
    beside = {s for s in mode.selecting if path and (s == owner or _is_inside(s, owner))} - inside
    if not beside and inside and all(_is_member(s[len(path) :].lstrip(".")) for s in inside):
        return True
    return path in mode.chained and not mode.selecting & {owner, path}


def _is_member(relative: str) -> bool:
    return relative.split(".")[0].rpartition("_")[2].isdigit()


def _can_be_block(observation: Observation, selecting: set[str]) -> bool:
    """Whether the module or a child selects by index, or is given indices along with tokens."""
    path = observation.path
    if any(s == path or _is_inside(s, path) or path == "" for s in selecting):
        return True
    given = [*observation.args, *observation.kwargs.values()]
    tensors = [value for value in given if isinstance(value, torch.Tensor)]
    indices = any(not t.is_floating_point() for t in tensors) or any(map(_is_array_of_integers, given))
    return indices and any(t.is_floating_point() for t in tensors)


def _is_array_of_integers(value: Any) -> bool:
    return "numpy" in sys.modules and isinstance(value, sys.modules["numpy"].ndarray) and value.dtype.kind in "iu"
