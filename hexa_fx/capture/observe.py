"""Runs a whole model once on example inputs and notes where MoE blocks may be.

A block is worth recording if it holds parameters that could belong to experts, and if something is selected by index inside
it or in its arguments. Names only suggest where to look; detection decides what a block is.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.compiler import is_compiling
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from hexa_fx import operations as ops
from hexa_fx.capture import overlooked
from hexa_fx.capture.calls import user_location
from hexa_fx.capture.copies import copied
from hexa_fx.capture.host import scripts_as_python
from hexa_fx.capture.probes import probe_inputs
from hexa_fx.capture.records import memory_of
from hexa_fx.ir import SourceLocation
from hexa_fx.isolation.choices import numbers_intervals
from hexa_fx.isolation.module_state import restored
from hexa_fx.isolation.module_tree import is_inside, modules_of, named_modules, with_ancestors
from hexa_fx.isolation.size import is_out_of_memory
from hexa_fx.isolation.torch_state import random_state_kept
from hexa_fx.isolation.written_tensors import tensors_restored
from hexa_fx.runtime.preflight import sharded_units
from hexa_fx.torch_private import DisableTorchFunction, _ConvNd

CONVOLUTIONS = (_ConvNd,)


def may_hold_experts(path: str, module: nn.Module) -> bool:
    """Whether stacked or listed matrices of the module, or its name, suggest experts."""
    own = list(module.parameters(recurse=False))
    frozen = [b for b in module.buffers(recurse=False) if b.is_floating_point() and b.dim() == 3 and min(b.shape) > 1]
    stacked = any(p.dim() >= 3 and sum(size > 1 for size in p.shape) > 1 for p in own)
    if (len(frozen) > 1 or stacked) and not isinstance(module, CONVOLUTIONS):
        return True
    if "expert" in path.rpartition(".")[2].lower() or "expert" in type(module).__name__.lower():
        return any(True for _ in module.parameters())
    if sum(p.dim() == 2 for p in own) >= 2 and not type(module).__module__.startswith("torch."):
        return True  # bare matrices, each possibly of all experts
    several = isinstance(module, (nn.ParameterList, nn.ParameterDict)) and len(module) > 1
    return several or _is_list_of_alikes(module)


def holds_numbered(module: nn.Module) -> bool:
    """Whether some children have names that differ in one number and matrices of the same shapes, as ``ffn_0``, ``ffn_1``, ..."""
    alike: Counter[Hashable] = Counter()
    numbered = [(name, child) for name, child in module.named_children() if any(map(str.isdigit, name))]
    for name, child in numbered if len(numbered) > 2 else ():
        shapes = tuple((n, tuple(p.shape)) for n, p in child.named_parameters())
        if any(len(shape) == 2 for _, shape in shapes) and not isinstance(child, nn.Embedding):
            alike.update((name[: at.start()], name[at.end() :], shapes) for at in re.finditer(r"\d+", name))
    return max(alike.values(), default=0) > 2  # two may be layers


def _is_list_of_alikes(module: nn.Module) -> bool:
    """Whether the children are numbered (or in a dictionary) and have the same parameters, as experts do, but layers too."""
    children = list(module.named_children())
    numbered = all(name.isdigit() or name.rpartition("_")[2].isdigit() for name, _ in children)
    if len(children) < 2 or not (numbered or isinstance(module, nn.ModuleDict)):
        return False
    shapes = {tuple((n, tuple(p.shape)) for n, p in child.named_parameters()) for _, child in children}
    tables = all(isinstance(child, nn.Embedding) for _, child in children)  # codebooks, or one for each feature
    return len(shapes) == 1 and shapes != {()} and not tables


def is_one_stack(module: nn.Module) -> bool:
    """Whether the module is one stacked weight, such as a projection of all experts."""
    return not any(True for _ in module.children()) and sum(p.dim() >= 3 for p in module.parameters()) == 1


_INTEGERS = (torch.int64, torch.int32)
_WHOLE_NUMBERS = (*_INTEGERS, torch.int16, torch.int8, torch.uint8)


@dataclass(repr=False)
class ModelRun(TorchFunctionMode):
    """The mode that notes what is selected, and by hooks which modules run and what they are given.

    Args:
        wanted: paths of modules of which the first call is to be noted.
        most_tokens: about as many at most are noted of what a module is given.
    """

    model: nn.Module
    wanted: set[str]
    most_tokens: int | None
    recorded: dict[str, Observation] = field(default_factory=dict)
    """First calls by path."""
    called: dict[str, SourceLocation | None] = field(default_factory=dict)
    """Where modules were called first, by path."""
    stack: list[str] = field(default_factory=list)
    """Paths of the modules that run, outermost first."""
    selecting: set[str] = field(default_factory=set)
    chained: set[str] = field(default_factory=set)
    """Lists in which a member was given another member's output."""
    giving_ids: set[str] = field(default_factory=set)
    """Modules that give whole numbers or marks alone, such as which keys an attention is to read: no experts' outputs."""
    used: set[int] = field(default_factory=set)
    """Parameters that functions of torch were given, by id."""

    def __post_init__(self) -> None:
        super().__init__()
        self._tables = set(map(memory_of, _whole_numbers_of(self.model)))
        self._produced_by: dict[int, str] = {}  # id of an output -> the list its module stands in
        self._alive: list[torch.Tensor] = []  # keeps these ids unique
        self._given: dict[str, list[torch.Tensor]] = {}
        self._versions: dict[str, list[int]] = {}  # of these tensors, when the module was left

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, ops.canonical(getattr(func, "__name__", ""))
        if is_compiling():  # as torch.cond() does, which the compiler follows through this code, too
            return func(*args, **kwargs)
        for given in (*args, *kwargs.values()):
            several = given if type(given) in (list, tuple) else (given,)
            self.used.update(id(each) for each in several if isinstance(each, nn.Parameter))
        result = func(*args, **kwargs)
        if self.stack and (_selects(name, args, result) or self._finds_ids(name, args, kwargs)):
            self.selecting.add(self.stack[-1])
        return result

    def _finds_ids(self, name: str, args: Any, kwargs: Any) -> bool:
        """Whether whole numbers are looked up in a table of whole numbers that a module keeps: a token's expert by its id, say."""
        if name not in ops.LOOK_UPS:
            return False
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        if len(tensors) < 2 or any(tensor.dtype not in _WHOLE_NUMBERS for tensor in tensors):
            return False
        return any(type(tensor) is torch.Tensor and memory_of(tensor) in self._tables for tensor in tensors)

    @contextmanager
    def hooked(self) -> Iterator[None]:
        """A context in which hooks of all modules note their calls, at whose end it is known which arguments were written to."""
        handles = []
        for path, module in named_modules(self.model):
            if not isinstance(module, torch.jit.ScriptModule):  # which takes no hooks
                handles.append(module.register_forward_pre_hook(partial(self._enter, path), with_kwargs=True))
                handles.append(module.register_forward_hook(self._leave))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
        for path, before in self._versions.items():
            written = before != [tensor._version for tensor in self._given[path]]
            self.recorded[path] = replace(self.recorded[path], written=written)

    def _enter(self, path: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.stack.append(path)
        if path not in self.called:
            self.called[path] = None if is_compiling() else user_location()  # as torch.cond() does
        owner = path.rpartition(".")[0]
        if any(self._produced_by.get(id(item)) == owner for item in args if isinstance(item, torch.Tensor)):
            self.chained.add(owner)
        if path in self.wanted and path not in self.recorded:
            with DisableTorchFunction():
                if self.most_tokens is not None:
                    args, kwargs = probe_inputs(args, kwargs, self.most_tokens)
                self.recorded[path] = Observation(path, module, copied(args), copied(kwargs))
                tensors = (t for t in (*args, *kwargs.values()) if isinstance(t, torch.Tensor))
                self._given[path] = [tensor for tensor in tensors if not tensor.is_inference()]

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        path = self.stack.pop()
        tensors = [leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor)]
        if tensors and not any(tensor.is_floating_point() for tensor in tensors):
            self.giving_ids.add(path)
        if path in self._given:
            self._versions.setdefault(path, [tensor._version for tensor in self._given[path]])
        owner, _, name = path.rpartition(".")
        first = output[0] if isinstance(output, tuple) and output else output
        if any(map(str.isdigit, name)) and isinstance(first, torch.Tensor):
            self._produced_by[id(first)] = owner
            self._alive.append(first)


def _whole_numbers_of(model: nn.Module) -> Iterator[torch.Tensor]:
    """Tensors of whole numbers among the model's buffers and attributes."""
    for module in modules_of(model):
        for value in (*module._buffers.values(), *vars(module).values()):
            if type(value) is torch.Tensor and value.dtype in _WHOLE_NUMBERS and value.dim() > 0:
                yield value


def _selects(name: str, args: Any, result: Any) -> bool:
    """Whether a function of torch selects by index."""
    # remainders of what weights are packed in, and of fractions, are no selections: those of positions and ids are
    codes = name == "remainder" and getattr(args[0], "dtype", torch.int64) not in _INTEGERS
    if name in ops.BY_INDEX and not codes:
        return True
    # numpy may choose by what it is given
    return numbers_intervals(name, args, result) or name in ("numpy", "__array__")


NEVER_CALLED = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)
"""Modules that only hold others."""


@dataclass(frozen=True)
class Observation:
    """A module's first call during the run, with copies of its arguments; and what was ``given``, once others are in its place.

    Args:
        gradients: whether they are on in it, which counts where the code asks.
        written: whether the code around the module writes to what it was given, after the call.
        numbers: other values of numbers that modules keep and that are to be asked for in every call, by dotted name
            (`hexa_fx.capture.record.Replacements`).
    """

    path: str
    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    given: tuple[Any, Any] | None = None
    gradients: bool = True
    written: bool = False
    numbers: Mapping[str, float] = field(default_factory=dict)


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
    """Runs ``model`` without gradients, or with them if it asks for some itself, and returns candidates in the order of
    ``named_modules(model)``.

    Buffers, attributes, hooks and the random state are restored afterwards, and parameters if they were written to, with what
    ``with_parameters`` restores. Errors of the model itself are not caught. At most about ``most_tokens`` of what a module is given
    are noted.
    """
    modules = dict(named_modules(model))
    suspects, numbered, packed = _suspects(model, modules)
    others = any(isinstance(module, nn.Embedding) for module in modules.values())
    if not (suspects | numbered | packed or others or overlooked.in_plain_lists(model)):
        return []
    for gradients in (False, True):
        wanted = {ancestor for path in suspects | numbered | packed for ancestor in with_ancestors(path)}
        run, sharded = ModelRun(model, wanted, most_tokens), sharded_units(model)
        try:
            with (
                tensors_restored(model, with_parameters),
                restored(model),
                random_state_kept(),
                run.hooked(),
                torch.set_grad_enabled(gradients),
                scripts_as_python(all_of_them=False),
                run,
            ):
                model(*args, **kwargs)
                for unit in sharded:
                    unit.reshard()  # type: ignore[operator]  # an outermost one leaves that to backward, and shards are put back here
            break
        except RuntimeError as error:
            if gradients or not torch.is_grad_enabled() or is_out_of_memory(error):
                raise
    suspects = (suspects | numbered - run.chained) - run.giving_ids | suspects & {""}
    if most_tokens is not None:  # a call, of which others will follow
        suspects, packed = ({path for path in paths if _ran(path, run)} for paths in (suspects, packed))
    found = _candidates(suspects, run)
    left = _overlooked(suspects | packed, run, {candidate.levels[0].path for candidate in found})
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


def _ran(path: str, run: ModelRun) -> bool:
    """Whether a module was called, or the one that holds it as a list, or code around it took its weights."""
    if any(id(p) in run.used for p in run.model.get_submodule(path).parameters()):
        return True
    while path and isinstance(run.model.get_submodule(path), NEVER_CALLED):
        path = path.rpartition(".")[0]
    return path in run.called


def _overlooked(suspects: set[str], run: ModelRun, found: set[str]) -> list[Candidate]:
    """Blocks with what looks like experts, beside those that are ``found``, that choose none by index."""
    in_lists = overlooked.in_plain_lists(run.model, run.selecting)
    left: dict[str, tuple[str, SourceLocation | None]] = {path: (reason, None) for path, reason in in_lists.items()}
    looked_at = (path for path in suspects if not _is_list_of_layers(path, run))
    told = [said for path in looked_at if (said := overlooked.why_overlooked(run.model, path, run.called)) is not None]
    left |= {block: (reason, location) for block, reason, location in reversed(told)}  # the first of each counts
    left = {b: why for b, why in left.items() if not any(b == p or is_inside(p, b) or is_inside(b, p) for p in found)}
    return [
        Candidate(
            (run.recorded.get(path) or Observation(path, run.model.get_submodule(path), (), {}),),
            reason,
            location=location,
        )
        for path, (reason, location) in left.items()
        if not any(is_inside(other, path) for other in left)
    ]


_LEVELS, _AROUND = 3, 6


def _candidates(suspects: set[str], run: ModelRun) -> list[Candidate]:
    found: dict[str, Candidate] = {}
    halves = _halves(run.model, suspects, run.selecting)
    suspects = (suspects | {path.rpartition(".")[0] for path in halves}) - halves
    for path in (path for path, _ in named_modules(run.model) if path in suspects):
        if _is_list_of_layers(path, run):
            continue
        recorded = (run.recorded[p] for p in with_ancestors(path) if p in run.recorded)
        around = [observation for observation in recorded if _can_be_block(observation, run.selecting)]
        if around:
            found.setdefault(around[0].path, Candidate(tuple(around[:_LEVELS]), around=tuple(around[:_AROUND])))
    innermost = {path: c for path, c in found.items() if not any(is_inside(other, path) for other in found)}
    candidates = []
    for path, candidate in innermost.items():  # without the levels that contain another one
        others = [other for other in innermost if other != path]
        levels = (o for o in candidate.levels if not any(is_inside(other, o.path) for other in others))
        candidates.append(Candidate(tuple(levels), around=candidate.around))
    return candidates


def _halves(model: nn.Module, suspects: set[str], selecting: set[str]) -> set[str]:
    """Modules of one stacked weight that are no blocks: projections, beside another such module, and routers of groups of experts.

    The former only where the module around them is a suspect too, or chooses; it is looked at in their place.
    """
    lone = [path for path in suspects if path and is_one_stack(model.get_submodule(path))]
    owners = [path.rpartition(".")[0] for path in lone]
    halves = {path for path, owner in zip(lone, owners) if owners.count(owner) > 1 and owner in suspects | selecting}
    wide = [path for path in suspects if any(p.dim() > 3 for p in model.get_submodule(path).parameters(recurse=False))]
    return halves | {p for p, owner in zip(lone, owners) if p in selecting and any(is_inside(w, owner) for w in wide)}


def _is_list_of_layers(path: str, run: ModelRun) -> bool:
    """Whether the members each do their own routing, or feed each other, without any routing beside them."""
    owner = path.rpartition(".")[0]
    inside = {s for s in run.selecting if is_inside(s, path)}
    beside = {s for s in run.selecting if path and (s == owner or is_inside(s, owner))} - inside
    members = (s[len(path) :].lstrip(".").split(".")[0].rpartition("_")[2] for s in inside)
    if not beside and inside and all(map(str.isdigit, members)):
        return True
    return path in run.chained and not run.selecting & {owner, path}


def _can_be_block(observation: Observation, selecting: set[str]) -> bool:
    """Whether the module or a child selects by index, or is given indices along with tokens."""
    path = observation.path
    if any(s == path or is_inside(s, path) or path == "" for s in selecting):
        return True
    given = [*observation.args, *observation.kwargs.values()]
    tensors = [value for value in given if isinstance(value, torch.Tensor)]
    indices = any(not t.is_floating_point() for t in tensors) or any(map(_is_array_of_integers, given))
    return indices and any(t.is_floating_point() for t in tensors)


def _is_array_of_integers(value: Any) -> bool:
    return "numpy" in sys.modules and isinstance(value, sys.modules["numpy"].ndarray) and value.dtype.kind in "iu"
