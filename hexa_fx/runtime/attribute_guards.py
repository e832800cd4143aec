"""Checks that what a recorded run read from Python is still the same: attributes, globals, closures, hooks, modes.

A graph contains settings such as the number of experts per token as they were when the block was recorded. If someone sets
``block.top_k``, appends an expert, puts a `forward` on a module or switches a dropout on, the original forward runs instead, so
that nobody gets a stale result.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import cached_property, partial
from types import MappingProxyType, ModuleType, NoneType
from typing import Any, TypeAlias

import torch
import torch.fx
from torch import nn
from torch.nn.modules import module as torch_module

from hexa_fx.ir import PythonRead, RewrittenBlock
from hexa_fx.isolation.lookup import is_collection, is_object, lookup
from hexa_fx.isolation.module_tree import (
    inside,
    kept_tensors,
    named_modules,
    named_tensors,
    one_by_another,
    tensors_by_name,
    with_ancestors,
)
from hexa_fx.isolation.read_values import Bound, Code, IsA, Names, snapshot
from hexa_fx.runtime.guards import AGAIN, HOOKS, GuardMiss, OwnCodeOnly, ReadMiss
from hexa_fx.runtime.paths import base_of
from hexa_fx.runtime.resolution import Resolution, is_another_number, lies_in, still_the_same, submodule

HOOKS_OF_ALL = (
    torch_module._global_forward_hooks,
    torch_module._global_forward_pre_hooks,
    torch_module._global_backward_hooks,
    torch_module._global_backward_pre_hooks,
)


Check: TypeAlias = Callable[[Any], bool]
"""A function of the block that says whether everything lies where it was found."""


class AttributeGuards:
    """What a rewritten forward relies on, checked at every call in a few microseconds.

    Objects on the way (``self.config``) may be exchanged for others that say the same. Under a compiler dtypes, what a
    module itself holds (numbers, texts, submodules), also in an object or dict, and settings outside of the block are checked.

    Args:
        block: the module as it was recorded; referenced weakly.
        called: paths of submodules that the graph calls, which always do what they currently do.
        reads: what the recorded run read.
        packed: paths of parameters that are read as one weight, and of which that is checked with them.
        own_forward: the forward that the block's instance had of its own, such as a wrapper; None if it had the class's.
        dtypes: of parameters and buffers by path, which have to stay.
        in_trace: what counts under a compiler besides ``reads``.
        weights: paths of tensors that the rewritten forward reads in every call, so that parameters need not be looked at before.
    """

    def __init__(
        self,
        block: nn.Module,
        called: Iterable[str] = (),
        reads: Iterable[PythonRead] = (),
        packed: Iterable[str] = (),
        own_forward: Callable[..., Any] | None = None,
        dtypes: Mapping[str, torch.dtype] = MappingProxyType({}),
        in_trace: Iterable[PythonRead] = (),
        weights: frozenset[str] = frozenset(),
    ) -> None:
        self.own_forward = own_forward
        self.dtypes = dict(dtypes)
        found = [read for read in reads if not _is_forward(read) or (own_forward is not None and len(read.steps) > 1)]
        of_class = PythonRead("", ("__class__", "forward"), snapshot(type(block).forward))
        # The rewritten one lies in front of it, also of one that comes later.
        self.forward = () if own_forward else (of_class,)
        read = _names(found)
        tensors = (item for item in tensors_by_name(block).items() if item[0] in read or item[0] in weights)
        self.other_names = *one_by_another(named_modules(block, every=True)), *one_by_another(tensors)
        shared = {name for names in self.other_names for name in names}  # the graph reads one of the names alone
        alone = (named_tensors(block, "_parameters", every=True).keys() & weights) - shared
        self.reads = tuple(_merged(r for r in found if r.value != IsA(torch.Tensor) or str(r) not in alone))
        seen_in_trace = (read for read in (*self.reads, *in_trace) if not (called and str(read) in called))
        self.in_trace = [checked for read in seen_in_trace for checked in _in_trace(block, read)]
        self.packed = frozenset(above for path in packed for above in [*with_ancestors(path)][1:])
        self.owners = frozenset(path.rpartition(".")[0] for path in packed)
        under = frozenset(path for path in self.owners if base_of(own := block.get_submodule(path)) is not own)
        paths = (path for path, _ in _read(block, "", under.union(called)))
        self.inner = tuple(path for path in paths if path and path not in self.owners)
        self.bind(block)

    @classmethod
    def of(
        cls, block: nn.Module, rewritten: RewrittenBlock, own_forward: Callable[..., Any] | None = None
    ) -> AttributeGuards:
        """Those of a rewritten forward."""
        packed = [path for weight in rewritten.packed for part in weight.parts for path in part]
        asked = any(guard.exact_dtype for guard in rewritten.guards)
        dtypes = _dtypes_read(block, rewritten) if asked else {}
        called, read = called_in(rewritten.graph), {str(n.target) for n in rewritten.graph.find_nodes(op="get_attr")}
        weights = frozenset({*read, *packed})
        return cls(block, called, rewritten.reads, packed, own_forward, dtypes, rewritten.in_trace, weights)

    def bind(self, block: nn.Module) -> None:
        """Watches ``block`` from now on: the same one, or a copy that may still be incomplete."""
        self._block = weakref.ref(block)
        self.see_through(MappingProxyType({}))

    def see_through(self, bases: Mapping[int, nn.Module]) -> None:
        """Looks anew, and takes ``bases[id(module)]`` for a module."""
        self._bases = bases
        self._is_same: Check | None = None
        self._missed: PythonRead | None = None
        self._are_hooked: Callable[[], bool] = lambda: False

    def check(self) -> None:
        """Raises `GuardMiss` if anything changed. Not where a compiler traces."""
        block, is_same = self._block(), self._is_same  # read once: other threads may check, too
        if is_same is None or not is_same(block):
            self._resolve()  # raises if something differs, and otherwise knows the new objects
        if self._are_hooked():
            raise OwnCodeOnly("an expert has hooks, which only its own code calls")

    def check_in_trace(self) -> None:
        """The same where a compiler traces: dtypes, settings and what has two names, by plain attribute access, which a tracer
        follows and looks at in every call."""
        block: Any = self._block()
        modules: dict[str, Any] = {"": block}
        if any(type(block).forward is not read.value for read in self.forward):
            raise GuardMiss(f"its class is not what it was when the block was rewritten; {AGAIN}")
        for path, dtype in self.dtypes.items():
            owner, _, name = path.rpartition(".")
            now = getattr(self._walked(modules, owner), name, None)
            if isinstance(now, torch.Tensor) and now.dtype != dtype:
                raise GuardMiss(f"{path!r} is {now.dtype}; the block was recorded with {dtype}")
        for root, steps, noted in self.in_trace:
            in_block = isinstance(root, str)
            if in_block and _is_module(noted):
                value = self._walked(modules, inside(root, steps[0]))
            else:
                value = _entered(self._walked(modules, root) if in_block else root, steps)
            if not _is_still(value, noted):
                where = f" of {root or 'the block'!r}" if in_block else ", which the code reads,"
                raise GuardMiss(f"{steps[-1]!r}{where} is not what it was when the block was rewritten")
        for name, first in self.other_names:
            if self._walked(modules, name) is not self._walked(modules, first):
                raise GuardMiss(f"{name!r} is no longer {first!r}, as it was when the block was rewritten; {AGAIN}")

    def _walked(self, modules: dict[str, Any], path: str) -> Any:
        """The module or tensor at a path, None if there is none; ``modules``: those that are known."""
        if path not in modules:
            above, _, key = path.rpartition(".")
            found = getattr(self._walked(modules, above), key, None)
            modules[path] = base_of(found) if path in self.owners and isinstance(found, nn.Module) else found
        return modules[path]

    def _resolve(self) -> None:
        block, missed = self._block(), self._missed
        assert block is not None
        if missed is not None and is_another_number(block, missed):
            raise ReadMiss(str(missed))
        self._is_same = None
        names = frozenset(name for names in self.other_names for name in names)
        reads = (*self.forward, *self.reads)
        try:
            found = Resolution(block, reads, self.packed, self.own_forward, self.dtypes, self._bases, names)
        except ReadMiss as miss:
            self._missed = next((read for read in reads if str(read) == miss.read), None)
            raise
        modules: dict[str, Any] = dict(named_modules(block, every=True))
        known = modules | tensors_by_name(block) if self.other_names else {}
        for name, first in self.other_names:
            one, other = known.get(name), known.get(first)
            if self._bases.get(id(one), one) is not self._bases.get(id(other), other):
                raise GuardMiss(f"{name!r} is no longer {first!r}, as it was when the block was rewritten; {AGAIN}")
        # Those in modules that are called are not among the reads.
        for above, _, name in (path.rpartition(".") for path in names - modules.keys()):
            held_in = (modules[above]._parameters, modules[above]._buffers) if above in modules else ()
            found.checks += [lies_in(held, name, held[name]) for held in held_in if name in held]
        inner = [submodule(modules, path) for path in self.inner]
        found.checks += [lies_in(vars(m), HOOKS[0], getattr(m, HOOKS[0])) for m in inner]  # as in `paths`
        self._are_hooked = partial(any, [*HOOKS_OF_ALL, *(getattr(m, hooks) for m in inner for hooks in HOOKS)])
        self._is_same = still_the_same(found)  # last: other threads take it as it is

    def __deepcopy__(self, memo: dict[int, Any]) -> AttributeGuards:
        """For a copy of the block, to which it is to be bound. What lies outside of it is the same for both, whatever its name."""
        made = object.__new__(AttributeGuards)
        made.__dict__.update(self.__dict__, own_forward=copy.deepcopy(self.own_forward, memo))
        return made


def _merged(reads: Iterable[PythonRead]) -> Iterator[PythonRead]:
    """With one condition for all that names lead to outside of the block."""
    bounds: dict[tuple[int, Any], Bound] = {}
    for read in reads:
        if isinstance(read.value, Code):
            bounds |= {(id(bound.holder), bound.key): bound for bound in read.value.bounds}
        else:
            yield read
    if bounds:
        yield PythonRead("", ("code",), Code(tuple(bounds.values())), True)


def _dtypes_read(block: nn.Module, rewritten: RewrittenBlock) -> dict[str, torch.dtype]:
    """Of the floating parameters and buffers that a graph, the modules that it calls and the code read, by path, as they were read;
    of those side by side the first."""
    parts = [part for weight in rewritten.packed for part in weight.parts]
    read = _names(rewritten.reads).difference(*parts) | {part[0] for part in parts}
    read.update(str(node.target) for node in rewritten.graph.find_nodes(op="get_attr", sort=False))
    called = called_in(rewritten.graph, always=False)
    named = tensors_by_name(block) | kept_tensors(block)
    floating = ((path, tensor) for path, tensor in named.items() if tensor.is_floating_point())
    found = {path: tensor.dtype for path, tensor in floating if path in read or is_within(path, called)}
    return {path: rewritten.dtypes.get(path, dtype) for path, dtype in found.items()}


def _names(reads: Iterable[PythonRead]) -> set[str]:
    """Of what is read from the block's modules."""
    return {inside(read.root, read.steps[0]) for read in reads if not read.is_global}


def hooked(block: nn.Module, graph: torch.fx.Graph) -> str:
    """Path of a module that has hooks but that the graph reads instead of calling; empty if there is none."""
    inner = ((path, module) for path, module in _read(block, "", called_in(graph)) if path)
    return next((path for path, module in inner if any(getattr(module, hooks) for hooks in HOOKS)), "")


ELSEWHERE = "elsewhere"
"""Marks, in a node's ``meta``, a call of a submodule that the code calls in other places too, where the graph does not."""


def called_in(graph: torch.fx.Graph, always: bool = True) -> frozenset[str]:
    """Paths of the submodules that the graph calls; ``always``: wherever the code does."""
    calls = (node for node in graph.nodes if node.op == "call_module")
    return frozenset(str(node.target) for node in calls if not (always and ELSEWHERE in node.meta))


def _in_trace(block: nn.Module, read: PythonRead) -> Iterator[tuple[Any, tuple[str, ...], Any]]:
    """What a compiler checks of a read: the path of its module, or what holds it outside of the block; the steps from there; and
    what was noted. That is a setting (a number, a text, or a list of these) of a module or of an object or dict, a submodule, or
    how many of them there are."""
    if isinstance(read.value, Code):
        for bound in read.value.bounds:
            entered = isinstance(bound.holder, (ModuleType, type)) or _is_entered(bound.holder)
            if entered and _is_name(bound.key):
                yield from ((bound.holder, (bound.key, *more), value) for more, value in _settings(bound.noted))
        return
    steps = read.steps
    if read.is_global or not all(map(_is_name, steps)):
        return
    if isinstance(read.value, (IsA, Names)):
        if len(steps) == 1 and (steps[0] == "_modules" or _is_module(read.value)):
            yield read.root, steps, read.value
        return
    holder: Any = block.get_submodule(read.root)
    for key in steps[:-1]:
        holder = lookup(holder, key)  # which asks no property of the user's or of a parametrization: that may write
        if not _is_entered(holder):
            return
    yield from ((read.root, (*steps, *more), value) for more, value in _settings(read.value))


def _is_name(step: Any) -> bool:
    return type(step) is str and not step.startswith("__")


def _is_entered(holder: Any) -> bool:
    """Whether it is a dict, or an object of the user's, of which a tracer sees what it holds."""
    asked = isinstance(holder, (property, cached_property))
    return type(holder) is dict or (is_object(holder) and not is_collection(holder) and not asked)


def _settings(noted: Any) -> Iterator[tuple[tuple[str, ...], Any]]:
    """A number, a text, or a list of these; those that a dict holds, by their keys."""
    held = {(key,): value for key, value in noted.items()} if type(noted) is dict else {(): noted}
    for steps, value in held.items():
        values = value if type(value) is list else [value]
        named = all(type(step) is str for step in steps)
        if named and all(type(each) in (bool, int, float, str, NoneType) for each in values):
            yield steps, value


def _entered(value: Any, steps: tuple[str, ...]) -> Any:
    """What a tracer finds at some attributes, or keys of dicts, of each other."""
    for name in steps:
        value = value.get(name) if isinstance(value, dict) else getattr(value, name, None)
    return value


def _is_module(noted: Any) -> bool:
    return isinstance(noted, IsA) and issubclass(noted.kind, nn.Module)


def _is_still(value: Any, noted: Any) -> bool:
    if isinstance(noted, IsA):
        return isinstance(value, noted.kind)  # FSDP2 and parametrizations make other classes of a module's
    if isinstance(noted, Names):
        return len(value) == len(noted.names)
    return type(value) is type(noted) and bool(value == noted)


def _is_forward(read: PythonRead) -> bool:
    """Whether it is the block's forward, in whose place there is a rewritten one, or what that holds."""
    return not read.is_global and (read.root, read.steps[0]) == ("", "forward")


def is_within(scope: str, paths: Collection[str]) -> bool:
    """Whether the module at ``scope`` is one of those at ``paths``, or in one."""
    return any(scope == path or scope.startswith(f"{path}.") for path in paths)


def _read(module: nn.Module, path: str, called: frozenset[str]) -> Iterator[tuple[str, nn.Module]]:
    """The block and those of its modules that are neither called nor inside one that is."""
    yield path, module
    for name, child in module._modules.items():
        below = inside(path, name)
        if child is not None and below not in called:
            yield from _read(child, below, called)
