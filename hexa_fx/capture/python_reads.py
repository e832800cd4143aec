"""Notes what a recorded run reads from Python, wherever it lies: a graph contains it as it was.

While the block runs, the classes of its modules, and of every object that the code comes to through them, note which attributes
are read, missing ones included. Python tells which functions run; what these can read by global names is in their
code. Lists, dicts and other built-in kinds cannot note anything, so all that they hold counts as read. What changes without a
trace, such as an iterator, is noted as such, and a block that depends on it is refused.
"""

from __future__ import annotations

import dataclasses
import gc
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from threading import get_ident
from typing import Any

import torch
from torch import nn

from hexa_fx.capture.calls import SETS_DATA, user_location
from hexa_fx.capture.class_reads import ClassReads
from hexa_fx.capture.collect import without_stand_in
from hexa_fx.capture.environment_reads import asking_noted
from hexa_fx.capture.module_reads import modules_noted
from hexa_fx.capture.ran_code import RanCode, words
from hexa_fx.capture.read_edges import Edge, ReadEdges
from hexa_fx.capture.set_objects import MetObjects
from hexa_fx.capture.started_functions import of_this_thread as here
from hexa_fx.capture.started_functions import untold
from hexa_fx.capture.tensor_attributes import asked_and_set_ones_noted, present_ones
from hexa_fx.ir import PythonRead
from hexa_fx.isolation.held_objects import MODULE_STATE, is_object
from hexa_fx.isolation.hidden_sources import ATTRIBUTE, DATA, HOOK, OF_PAST
from hexa_fx.isolation.lookup import REGISTRIES, getattr_of, lookup, own_names
from hexa_fx.isolation.module_tree import modules_of
from hexa_fx.isolation.read_values import IsA, Keys, Names, Unreadable, is_unreadable, keys_inside, snapshot
from hexa_fx.isolation.users_code import is_users, logs, module_name

_IMMUTABLE = 1 << 8  # Py_TPFLAGS_IMMUTABLETYPE
_MACHINERY = tuple("torch.nn.modules.module torch.overrides torch.fx torch._ torch.utils hexa_fx. inspect".split())
_TREE = frozenset(
    "parameters named_parameters buffers named_buffers modules named_modules children named_children state_dict".split()
)
_OF_GRADIENTS = frozenset({"requires_grad", "is_leaf", "grad", "grad_fn", "is_inference"})
_HOOKS = ("register_hook", "register_post_accumulate_grad_hook", "retain_grad")
_CHANGED = {**dict.fromkeys(_HOOKS, HOOK), SETS_DATA: DATA, "requires_grad_": ATTRIBUTE, **OF_PAST}
"""What is done to a tensor, or asked of it, and no condition."""
_OF_WHOLE = frozenset({"__dict__", "__getstate__", "__deepcopy__"})
_OF_MODE = frozenset({"training", "__dict__"})
_QUIET = MODULE_STATE - {*REGISTRIES, *_OF_MODE}
"""What every call of a module asks torch's dicts of hooks, eight times, and what is never noted."""
_BEHIND_NOTHING = "setting of an object ({}) that lies behind no attribute and no global name, and"
_PASSED_THROUGH = ("hexa_fx.", "torch._tensor", "torch.overrides")


class PythonReads:
    """What one run reads.

    Args:
        block: the module that will run.
    """

    def __init__(self, block: nn.Module) -> None:
        self.scope: Callable[[], str] = lambda: ""
        self.was_set: Callable[[Any, Any], bool] = lambda holder, key: False
        self.in_functions: list[set[str]] = []
        self._block = block
        self.edges = ReadEdges(block)
        self._met: dict[int, Any] = {}
        self.objects = MetObjects()
        self._patched: dict[type, dict[str, Any]] = {}
        self._busy, self._running, self._thread = False, False, 0
        self.ran = RanCode(self._read, lambda: self.scope())
        self.classes = ClassReads(self._read, self._patch, self.edges, self.ran)

    @contextmanager
    def noted(self) -> Iterator[None]:
        """A context in which reads are noted, but for those of the garbage collector's callbacks: it waits until the end."""
        collected = gc.isenabled()
        gc.disable()
        gc.collect(0)  # what is made from now on is younger than all that is there
        self._running, self._thread = True, get_ident()
        for cls in (dataclasses.Field, *map(type, modules_of(self._block))):
            self._patch(cls)
        try:
            with (
                asking_noted(self._read, here(self.ran.switches)),
                asked_and_set_ones_noted(self._met, here(self._read), here(untold(self.note_done))),
                modules_noted(here(untold(self._read))),
                self.ran.noted(),
            ):
                if "forward" in vars(self._block):  # a wrapper, which is a part of the block; its caller reads it
                    self._read(self._block, "forward", "")
                yield
        finally:
            self._running = False  # what is met from now on stays as it is
            if collected:
                gc.enable()
            for cls, before in self._patched.items():
                for name, own in before.items():
                    if own is None:
                        type.__delattr__(cls, name)
                    else:
                        type.__setattr__(cls, name, own)
        self._anchor()

    def values(self) -> tuple[PythonRead, ...]:
        """Everything that was read, by every way to it from a module or a Python module."""
        hidden = (
            PythonRead(scope, (name,), Unreadable(kind), False, frozenset({scope}), location)
            for scope, (name, kind, location) in self.ran.hidden.items()
        )
        return (*self.edges.values(), *hidden)

    # -- noting ---------------------------------------------------------------------------------------------------------

    def _read(self, holder: Any, key: Any, scope: str | None = None) -> Any:
        """Notes that ``key`` of ``holder`` is read, and returns what lies there."""
        if key == "__dict__" and isinstance(holder, type):
            self._whole(holder)
            return vars(holder)
        edge = self._edge(holder, key)
        edge.scopes.add(self.scope() if scope is None else scope)
        edge.times += 1
        return edge.value

    def _edge(self, holder: Any, key: Any) -> Edge:
        edges = self.edges.of(holder)
        if key not in edges:
            busy, self._busy = self._busy, True
            try:
                value = without_stand_in(lookup(holder, key))
                noted = snapshot(value)
                edges[key] = Edge(holder, key, value, noted, set(), own=self.was_set(holder, key))
                if is_unreadable(value, noted):
                    edges[key].noted, edges[key].location = Unreadable(type(value).__name__), user_location()
                self._meet(edges[key])
            finally:
                self._busy = busy
        return edges[key]

    def _meet(self, edge: Edge) -> None:
        """Sees to it that reads of what lies there are noted too, and what is set in it."""
        value, noted = edge.value, edge.noted
        if id(value) in self._met:
            return
        self._met[id(value)] = value
        self.objects.meet(edge.holder, value, edge.own)
        self.classes.meet(value)
        for key in keys_inside(value, noted) if edge.key != "__mro__" else ():
            self._edge(value, key).inside = True
        if isinstance(noted, (IsA, Keys)) and (isinstance(value, nn.Module) or is_object(value)):
            self._patch(type(value))

    def _patch(self, cls: type) -> None:
        """Makes a class note reads; an object whose class cannot counts as read as a whole."""
        if not self._running or cls in self._patched or cls.__flags__ & _IMMUTABLE or not cls.__flags__ & (1 << 9):
            return
        noting = self._noting(cls.__getattribute__)
        noting.noting = getattr_of(cls)  # type: ignore[attr-defined]
        methods = {"__getattribute__": noting, **({} if issubclass(cls, nn.Module) else self.objects.noting(cls))}
        self._patched[cls] = {name: vars(cls).get(name) for name in methods}
        for name, method in methods.items():
            type.__setattr__(cls, name, method)

    def _noting(self, plain: Callable[..., Any]) -> Callable[[Any, str], Any]:
        def __getattribute__(holder: Any, name: str) -> Any:
            if not self._busy and (not name.startswith("__") or name in _OF_WHOLE) and get_ident() == self._thread:
                if name not in _QUIET:
                    self._note(holder, name, sys._getframe(1))
                elif name.endswith("_hooks") and is_users(module_name(sys._getframe(1).f_globals)):
                    self._read(holder, name)
            return plain(holder, name)

        return __getattribute__

    @untold
    def _note(self, holder: Any, name: str, frame: types.FrameType) -> None:
        reader = _reader(frame)
        made_meanwhile = id(holder) not in self.edges.modules and id(holder) not in self._met
        if made_meanwhile and self._is_new(holder, name, reader):
            made_meanwhile = False
        if logs(reader) or (made_meanwhile and name not in _OF_MODE):
            return
        if reader.startswith(_MACHINERY):
            # Of a module under torch.compile it is made with the module: what it calls counts, and that is a module again.
            made = type(holder).__module__ == "torch._dynamo.eval_frame"
            if made or (name, reader) != ("forward", "torch.nn.modules.module"):
                return
        elif isinstance(holder, nn.Module) and name in _TREE:
            for module in holder.modules():
                for registry in REGISTRIES:
                    self._names(module, registry)
        if name in _OF_MODE:
            self.ran.asks["mode"].add(self.scope())
        if made_meanwhile:
            return
        if name in _OF_WHOLE:
            if is_users(reader):
                self._whole(holder)
            return
        if name in REGISTRIES and isinstance(holder, nn.Module):
            self._names(holder, name)
        elif name not in MODULE_STATE or name == "training":
            self._read(holder, name)

    def _is_new(self, holder: Any, name: str, reader: str) -> bool:
        """Whether an object that no read has led to so far was there before the run: then its reads count too."""
        if not is_users(reader) or name in MODULE_STATE or not self.classes.is_new(holder, name, self.scope()):
            return False
        self._met[id(holder)] = holder
        self.objects.meet(None, holder, False)
        return True

    def _names(self, module: nn.Module, registry: str) -> None:
        names = Names(frozenset(vars(module)[registry]))
        for name in names.names:
            self._read(module, name)
        edge = Edge(module, registry, names, names)
        self.edges.of(module).setdefault(registry, edge).scopes.add(self.scope())

    def _whole(self, holder: Any) -> None:
        """Notes a read of an object's or a class's ``__dict__``."""
        own = own_names(holder)
        for name in own:
            self._read(holder, name)
        edge = Edge(holder, "__dict__", Names(own), Names(own))
        self.edges.of(holder).setdefault("__dict__", edge).scopes.add(self.scope())

    def note_of_tensor(self, tensor: Any, attribute: str) -> None:
        """Notes that the code calls torch, or asks something of a tensor that is no number of it, such as ``requires_grad``."""
        frame: types.FrameType | None = sys._getframe(1)
        self.ran.settle(frame, "tensor's dtype" if attribute == "dtype" else "caught errors")
        while frame is not None and module_name(frame.f_globals).startswith(_PASSED_THROUGH):
            frame = frame.f_back
        if (
            frame is None
            or attribute not in _OF_GRADIENTS | _CHANGED.keys()
            or not is_users(module_name(frame.f_globals))
        ):
            return
        if attribute in _CHANGED:
            self.note_done(tensor, attribute)
        elif id(tensor) in self._met and attribute != "is_inference":
            self._read(tensor, attribute)
        else:
            self.note_of_gradients({self.scope()})
            if attribute == "is_inference":
                self.ran.note_state(torch.is_inference_mode_enabled, self.scope())

    def note_done(self, tensor: Any, attribute: str) -> None:
        """Notes that code sets an attribute of a tensor, or does else what no graph shows."""
        if attribute == "data" or (attribute.startswith("requires_grad") and not self.edges.is_held(tensor)):
            return  # the recorder tells of the first by another name, or as of a write, and records the second
        self.ran.hidden[self.scope()] = attribute, _CHANGED.get(attribute, ATTRIBUTE), user_location()

    def note_of_gradients(self, scopes: set[str]) -> None:
        """Notes that code asks whether a value that was computed has a gradient: if gradients are on, and by what it is made of.

        They are never on inside an `autograd.Function`. There it asks what holds outside, which is noted once the function is over.
        """
        if self.in_functions:
            self.in_functions[-1].update(scopes)
            return
        self.ran.asks["gradient"] |= scopes
        for scope in scopes:
            self.ran.note_state(torch.is_grad_enabled, scope)

    # -- after the run --------------------------------------------------------------------------------------------------

    def _anchor(self) -> None:
        """Notes what was read of classes, and tensors' attributes; names objects that no read leads to."""
        for module in modules_of(self._block):
            called = self.edges.get(module, "forward")
            for scope in called.scopes if called else ():
                self._read(module, "__class__", scope)
                self._read(type(module), "__call__", scope)
        found = {id(edge.value) for edge in self.edges}
        self.ran.texts = {word for edge in self.edges for word in words(_items(edge.noted))}
        self.classes.anchor(reversed([*modules_of(self._block), *self._met.values()]), found)
        for read in list(present_ones(self._met.values(), partial(self.ran.mention, of_all=False))):
            self._read(*read)
        for name, kind, scopes in self.classes.hidden():
            self.ran.hidden |= {scope: (name, _BEHIND_NOTHING.format(kind), None) for scope in scopes}


def _items(noted: Any) -> tuple[Any, ...]:
    """What was read itself, or items, keys and values in it."""
    if type(noted) is dict:
        return *noted, *noted.values()
    return tuple(noted) if type(noted) in (list, tuple, set, frozenset) else (noted,)


def _reader(frame: types.FrameType | None) -> str:
    """The Python module whose code reads. What `copy` reads is read by who makes the copy."""
    while frame is not None and module_name(frame.f_globals) in ("copy", "copyreg"):
        frame = frame.f_back
    return "" if frame is None else module_name(frame.f_globals)
