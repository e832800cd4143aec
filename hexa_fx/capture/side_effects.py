"""Results that a run leaves beside its output and its modules' attributes: in lists, dicts and objects that it changes in place.

A loss appended to ``self.losses``, to a global list, or set on an object that several modules share is not seen in the graph.
"""

from __future__ import annotations

import sys
import types
from collections import deque
from collections.abc import Container, Iterable, Iterator
from itertools import chain
from typing import Any

import torch
from torch import nn

from hexa_fx.capture.access_log import KINDS, AccessPath, access_paths_to
from hexa_fx.capture.rng_state import Streams
from hexa_fx.capture.symint import SYMBOLIC
from hexa_fx.ir import PythonRead
from hexa_fx.isolation.closures import functions_of, globals_of_held, keeps, kept_by_functions
from hexa_fx.isolation.contents import Contents, Holder, contents, held_by_modules, is_of_other_library
from hexa_fx.isolation.held_objects import LITERALS, MISSING, MODULE_STATE, is_object, items, objects_in
from hexa_fx.isolation.lookup import CALLED, Answer, lookup
from hexa_fx.isolation.module_tree import named_modules, named_tensors
from hexa_fx.isolation.read_values import CACHED
from hexa_fx.isolation.users_code import module_name
from hexa_fx.torch_private import is_traceable_wrapper_subclass

_DATA = (*LITERALS, torch.Tensor, *KINDS, tuple, set, frozenset)
_LISTS = frozenset({*KINDS, set})
_OF_NOTHING = frozenset({*LITERALS, types.ModuleType, types.BuiltinFunctionType})
"""Most of what namespaces hold."""
_MOST = 256
_BYTES_OF_ARRAYS = 1 << 26
_OF_OTHERS = frozenset({"torch", "builtins", "numpy", "hexa_fx", *sys.stdlib_module_names})


class SideEffects:
    """What the modules hold and what their code reaches by global names, as it is before a run.

    Args:
        block: the module that will run.
        namespaces: globals of the modules that define the block's classes.
    """

    def __init__(self, block: nn.Module, namespaces: list[dict[str, Any]]) -> None:
        self._block, self._by_code = block, _with_homes(namespaces)
        known = set(map(id, self._by_code))
        self._namespaces = [*self._by_code, *(each for each in globals_of_held(block) if id(each) not in known)]
        inside = [*held_by_modules(block), *_of_outside_modules(block)]
        outside = [*_reached(self._namespaces, block)]
        self._held, self._global = Contents(inside), Contents(outside)
        self._watched = {*self._held.holders(), *self._global.holders()}
        holders = (holder.value for holder in (*inside, *outside))
        values = chain(holders, self._held.items(), self._global.items())
        self._arrays = [(array, array.copy()) for array in _changeable_arrays(values)]
        self._streams = Streams(block)
        self._caches = [(f, f.cache_info().currsize) for namespace in namespaces for f in _cached_in(namespace)]
        self._counts = False
        """Whether runs changed something outside of modules that nobody relies on."""
        self._codes = [(p, p.data) for p in named_tensors(block, "_parameters").values() if _holds_codes(p)]

    def changed(self) -> list[Holder]:
        """What the run changed. Of globals, only those that tensors of the run were put into: others are caches and counters."""
        held = [holder for holder, _ in self._held.changed()]
        return held + [holder for holder, new in self._global.changed() if _has_results(new)]

    def watches(self, value: Any) -> bool:
        """Whether ``value`` is among what is looked at."""
        return id(value) in self._watched

    def access_paths(self, in_place: list[Holder], read: Iterable[Any]) -> Iterator[AccessPath]:
        """All ways to the lists, deques and dicts among ``in_place`` and ``read``.

        The latter count as read (`hexa_fx.capture.python_reads`) until their stand-ins show that they are not, in eval mode say.
        """
        wanted = {id(value) for value in (*(holder.value for holder in in_place), *read) if type(value) in KINDS}
        return access_paths_to(wanted, self._block, self._by_code)

    def drawn(self) -> list[str]:
        """Streams of random numbers, beside torch's own, that the run drew from."""
        return self._streams.drawn()

    def undo_but_for(self, relied_on: Iterable[tuple[nn.Module, PythonRead]]) -> None:
        """As `undo`, unless something that runs changed is read in every call, or may have been changed by a function that does not
        run again, since it caches its results; then as `restore`, since parts may belong together.

        Args:
            relied_on: what is read, each with the module that it is relative to.
        """
        changed = self._changed_outside()
        cached = any(function.cache_info().currsize != before for function, before in self._caches)
        stays = len(changed) > 0 and (cached or any(_passes(changed, *read) for read in relied_on))
        self._counts = len(changed) > 0 and not stays
        if stays:
            self._global.restore(_has_results)
        self.undo_again()
        self._restore_inside()

    def undo_again(self) -> None:
        """As `undo`, outside of modules, after other runs; nothing where runs changed nothing there, or it is to stay."""
        if self._counts:
            self._undo_outside()

    def _changed_outside(self) -> set[Any]:
        """Ids of arrays and of what is reached by global names, and of the globals of Python modules with a name."""
        changed: set[Any] = {id(array) for array, before in self._arrays if not _equal(array, before)}
        for holder, new in self._global.changed():
            if not _is_data(new):
                continue
            before = self._global.before(holder)
            now = dict(contents(holder.value))
            keys = {key for key in before | now if before.get(key, MISSING) is not now.get(key, MISSING)}
            is_namespace = any(holder.value is namespace for namespace in self._namespaces)
            changed |= {(id(holder.value), key) for key in keys} if is_namespace else {id(holder.value)}
        return changed

    def undo(self) -> None:
        """Puts everything back, also what counts as a cache or a counter, and the numbers of numpy's arrays.

        But not locks, threads and the like that something outside of modules has made for itself: they may be in use.
        """
        self._undo_outside()
        self._restore_inside()

    def _undo_outside(self) -> None:
        self._global.restore(_is_data)
        for array, values in self._arrays:
            array[...] = values

    def restore(self) -> None:
        """Of globals, too, only what holds tensors of the run is put back."""
        self._global.restore(_has_results)
        self._restore_inside()

    def _restore_inside(self) -> None:
        self._streams.restore()
        self._held.restore()
        for parameter, data in self._codes:
            if (parameter.data_ptr(), parameter.shape) != (data.data_ptr(), data.shape):
                parameter.data = data


def _passes(places: Container[Any], block: nn.Module, read: PythonRead) -> bool:
    """Whether the way to what is read leads through one of these: ids of objects, or of namespaces with a name."""
    holder: Any = sys.modules.get(read.root) if read.is_global else block.get_submodule(read.root)
    for key in read.steps:
        if id(holder) in places or (id(getattr(holder, "__dict__", None)), key) in places:
            return True
        if key == CALLED or isinstance(key, Answer):  # which would run the user's code
            return False
        holder = lookup(holder, key)
    return id(holder) in places


def _equal(array: Any, before: Any) -> bool:
    """Whether an array holds what it did, NaN included."""
    return bool(array.shape == before.shape and array.tobytes() == before.tobytes())


def _changeable_arrays(values: Iterable[Any]) -> Iterator[Any]:
    """The arrays of numpy's that a run may change, each once and the smaller first, as far as there is room for copies."""
    kind = getattr(sys.modules.get("numpy"), "ndarray", None)
    found = {id(value): value for value in values if type(value) is kind}
    left = _BYTES_OF_ARRAYS
    for array in sorted(found.values(), key=lambda array: int(array.nbytes)):
        if not array.flags.writeable:
            continue
        left -= array.nbytes
        if left < 0:
            return
        yield array


def _holds_codes(parameter: torch.Tensor) -> bool:
    """Whether a parameter is of a class of its own on plain memory, which a quantiser may lay out anew in its first use."""
    return is_of_other_library(parameter) and not parameter.is_meta and not is_traceable_wrapper_subclass(parameter)


def _of_outside_modules(block: nn.Module) -> Iterator[Holder]:
    """What modules keep that the block knows but does not own, such as a model in a list that hides it from torch."""
    modules = named_modules(block)
    seen = {id(module) for _, module in modules}
    for path, module in modules:
        for steps, value in objects_in(module, lambda name: name not in MODULE_STATE):
            for key, other in items(value).items():
                if not isinstance(other, nn.Module) or id(other) in seen:
                    continue
                seen.add(id(other))
                label = ".".join(map(str, (path or "self", *steps, key)))
                yield Holder(label, vars(other))
                lists = ((name, held) for name, held in vars(other).items() if name not in MODULE_STATE)
                yield from (Holder(f"{label}.{name}", held) for name, held in lists if type(held) in _LISTS)


def _with_homes(namespaces: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The namespaces, and those of the functions, classes and Python modules that they name."""
    all_of_them = {id(namespace): namespace for namespace in namespaces}
    for namespace in namespaces:
        all_of_them |= {id(other): other for value in list(namespace.values()) if (other := _home(value)) is not None}
    return list(all_of_them.values())


def _reached(namespaces: list[dict[str, Any]], block: nn.Module) -> Iterator[Holder]:
    """The namespaces, the lists, dicts, objects and classes in them, the lists and dicts in these, and what functions keep, those
    that modules hold too."""
    seen: set[int] = set()
    kept: set[int] = set()
    yield from kept_by_functions(functions_of(block), kept)
    for namespace in namespaces:
        where = module_name(namespace).rpartition(".")[2]
        yield Holder(f"the globals of {where}", namespace)
        for name, value in namespace.copy().items():
            if type(value) in _OF_NOTHING:
                continue
            if keeps(value):
                yield from kept_by_functions([(name, value)], kept)
            if name.startswith("__") or id(value) in seen or not _may_hold(value):
                continue
            seen.add(id(value))
            yield Holder(name, value)
            held = contents(value)
            for key, inner in held if len(held) <= _MOST else ():
                if type(inner) in _LISTS and id(inner) not in seen:
                    seen.add(id(inner))
                    yield Holder(f"{name}.{key}", inner)


def _cached_in(namespace: dict[str, Any]) -> Iterator[Any]:
    """Functions and methods of a Python module that cache their results."""
    for value in list(namespace.values()):
        for member in list(vars(value).values()) if isinstance(value, type) else (value,):
            if isinstance(member, CACHED) and member.__module__ == module_name(namespace):
                yield member


def _home(value: Any) -> dict[str, Any] | None:
    """The globals of the code behind a function, class or Python module of the user's."""
    name = value.__name__ if isinstance(value, types.ModuleType) else getattr(value, "__module__", None)
    if not isinstance(name, str) or name.partition(".")[0] in _OF_OTHERS or name not in sys.modules:
        return None
    return vars(sys.modules[name])


def _may_hold(value: Any) -> bool:
    if isinstance(value, type):
        return value.__module__.partition(".")[0] not in _OF_OTHERS
    return is_object(value) and (
        isinstance(value, (list, dict, set, deque)) or type(value).__module__.partition(".")[0] not in _OF_OTHERS
    )


def _has_results(new: list[Any]) -> bool:
    return any(map(of_the_run, new))


def of_the_run(value: Any) -> bool:
    """Whether a value is a tensor, a number read from one, or a short list or dict of such."""
    if isinstance(value, (list, tuple)):
        return any(map(of_the_run, value[:16]))
    if type(value) is dict:
        return any(map(of_the_run, list(value.values())[:16]))
    return isinstance(value, (torch.Tensor, *SYMBOLIC))


def _is_data(new: list[Any]) -> bool:
    """Whether values are numbers, texts, tensors, arrays, and collections of whatever, as caches and counts are made of."""
    return all(isinstance(value, _DATA) or type(value).__module__ == "numpy" for value in new)


class SideEffectMonitor:
    """Which modules' code changes ``holders`` and draws random numbers. To be told whenever one hands over to another."""

    def __init__(self, holders: list[Holder], block: nn.Module) -> None:
        self._holders, self._block = holders, block
        self._last, self._streams = Contents(holders), Streams(block)
        self._scopes: dict[tuple[str, bool], set[str]] = {}

    def leave(self, scope: str) -> None:
        changed = [(holder.label, False) for holder, _ in self._last.changed()]
        drawn = [(label, True) for label in self._streams.drawn()]
        for found in (*changed, *drawn):
            self._scopes.setdefault(found, set()).add(scope)
        if changed or drawn:
            self._last, self._streams = Contents(self._holders), Streams(self._block)

    def found(self) -> Iterator[tuple[str, bool, frozenset[str]]]:
        """Labels, whether it is random numbers, paths of modules."""
        for (label, drawn), scopes in self._scopes.items():
            yield label, drawn, frozenset(scopes)
