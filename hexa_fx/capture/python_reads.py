"""Notes what a recorded run reads from Python, wherever it lies: a graph contains it as it was.

While the block runs, the classes of its modules, and of every object that the code comes to through them, note which attributes
are read, missing ones included. Python tells which functions run; what these can read by global names is in their
code. Lists, dicts and other built-in kinds cannot note anything, so all that they hold counts as read. What changes without a
trace, such as an iterator, is noted as such, and a block that depends on it is refused.
"""

from __future__ import annotations

import functools
import gc
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from threading import get_ident
from typing import Any

import torch
from torch import nn

from hexa_fx.capture.calls import SETS_DATA, user_location
from hexa_fx.capture.kept import Kept, Settings
from hexa_fx.capture.ran_code import RanCode, untold
from hexa_fx.capture.read_edges import Edge, ReadEdges
from hexa_fx.capture.recorder import Recorder
from hexa_fx.capture.symint import SYMBOLIC
from hexa_fx.ir import PythonRead
from hexa_fx.isolation.contents import is_result
from hexa_fx.isolation.lookup import MISSING, MODULE_STATE, REGISTRIES, getattr_of, getattr_plain, is_object, lookup
from hexa_fx.isolation.module_tree import modules_of
from hexa_fx.isolation.purity import ATTRIBUTE, DATA, HOOK, LOOK_UP, NUMBER, asking_frame, is_users, logs, module_name
from hexa_fx.isolation.read_values import (
    IsA,
    Keys,
    Names,
    Unreadable,
    is_unreadable,
    keys_inside,
    snapshot,
)

_OF_GRADIENTS = frozenset({"requires_grad", "is_leaf", "grad", "grad_fn", "is_inference"})
_HOOKS = ("register_hook", "register_post_accumulate_grad_hook", "retain_grad")
_CHANGED = {**dict.fromkeys(_HOOKS, HOOK), SETS_DATA: DATA, "requires_grad_": ATTRIBUTE}
"""What is done to a tensor, and no condition."""


_MACHINERY = tuple("torch.nn.modules.module torch.overrides torch.fx torch._ torch.utils hexa_fx. inspect".split())
_TREE = frozenset(
    "parameters named_parameters buffers named_buffers modules named_modules children named_children state_dict".split()
)
_OF_WHOLE = frozenset({"__dict__", "__getstate__", "__deepcopy__"})
_OF_MODE = frozenset({"training", "__dict__"})
_QUIET = MODULE_STATE - {*REGISTRIES, *_OF_MODE}
"""What every call of a module asks torch's dicts of hooks, eight times, and what is never noted."""
_NEVER = (torch.Tensor, torch.autograd.Function, type, BaseException)
"""Whose classes torch and Python look into by themselves."""
_NAMED = (type, types.ModuleType, types.FunctionType)
_IN_CLASSES = (types.FunctionType, property, staticmethod, classmethod, functools.cached_property)
"""Members of classes that run."""


class PythonReads:
    """What one run of a block reads, as its recorder and the classes of what it comes to tell."""

    def __init__(self, block: nn.Module, recorder: Recorder) -> None:
        self._block, self.recorder = block, recorder
        recorder.told = self
        self.before_call: Callable[[str, Any, Any], None]
        self.edges = ReadEdges(block)
        self._met: dict[int, Any] = {}
        self.settings = Settings(recorder.scopes)
        self.objects = Kept(self.settings)
        self.leave = self.objects.leave
        self._patched: dict[type, dict[str, Any]] = {}
        self._busy, self._running, self._thread = False, False, 0
        self.ran = RanCode(self.read, recorder.scopes)
        self._classes: dict[type, None] = {}
        """Those that the code came to, and of the objects that it came to."""
        self._made: set[int] = set()  # an id may come back, but only of another one that is made

    @property
    def _scope(self) -> str:
        """Path of the module whose code runs."""
        return self.recorder.scopes[-1]

    @contextmanager
    def noted(self) -> Iterator[None]:
        """A context in which reads are noted, but for those of the garbage collector's callbacks: it waits until the end."""
        collected = gc.isenabled()
        gc.disable()
        gc.collect(0)  # what is made from now on is younger than all that is there
        self._running, self._thread = True, get_ident()
        for cls in {*map(type, modules_of(self._block))}:
            self._patch(cls)
            self._meet_class(cls)
            for base in cls.__mro__:  # the functions that are called are wrappers, perhaps
                if is_users(base.__module__) and getattr(vars(base).get("forward"), "__closure__", None):
                    self.read(vars(base)["forward"], "__closure__", "")
        try:
            with self.ran.noted():
                if "forward" in vars(self._block):  # a wrapper, which is a part of the block; its caller reads it
                    self.read(self._block, "forward", "")
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
            self._take_back()
        self._anchor()

    def values(self) -> tuple[PythonRead, ...]:
        """Everything that was read, by every way to it from a module or a Python module."""
        hidden = (
            PythonRead(scope, (name,), Unreadable(kind), False, frozenset({scope}), location)
            for scope, (name, kind, location) in self.ran.hidden.items()
        )
        return (*self.edges.values(), *hidden)

    def _take_back(self) -> None:
        """Puts back what the run set by global names to numbers of its own, such as sizes, and notes that no graph shows it."""
        for edge in self.edges:
            holder: Any = edge.holder
            if not (isinstance(holder, _NAMED) or (type(holder) is dict and "__name__" in holder)):
                continue
            held = holder if type(holder) is dict else vars(holder)
            if edge.own or not is_result(held.get(edge.key), SYMBOLIC):
                continue
            self.ran.hidden.update(dict.fromkeys(edge.scopes, (str(edge.key), NUMBER, edge.location)))
            remove: Any = dict.__delitem__ if held is holder else delattr
            put: Any = dict.__setitem__ if held is holder else setattr
            if edge.value is MISSING:
                remove(holder, edge.key)
            else:
                put(holder, edge.key, edge.value)

    # -- noting ---------------------------------------------------------------------------------------------------------

    def read(self, holder: Any, key: Any, scope: str | None = None) -> Any:
        """Notes that ``key`` of ``holder`` is read, and returns what lies there."""
        edge = self._edge(holder, key)
        edge.scopes.add(self._scope if scope is None else scope)
        return edge.value

    def _edge(self, holder: Any, key: Any) -> Edge:
        edges = self.edges.of(holder)
        if key not in edges:
            busy, self._busy = self._busy, True
            try:
                value = lookup(holder, key)
                noted = snapshot(value)
                own = self.settings.has(holder, key) or isinstance(value, SYMBOLIC)  # a number that every call asks for
                edges[key] = Edge(holder, key, value, noted, set(), own=own)
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
        outside = isinstance(value, nn.Module) and id(value) not in self.edges.modules
        self.objects.meet(edge.holder, value, edge.own, outside)
        self._meet_class(value if isinstance(value, type) else type(value))
        for key in keys_inside(value, noted):
            self._edge(value, key).inside = True
        if isinstance(noted, (IsA, Keys)) and (isinstance(value, nn.Module) or is_object(value)):
            self._patch(type(value))

    def _meet_class(self, cls: type) -> None:
        """Sees to it that what is read of a class of the user's is noted, also by way of objects that the run makes."""
        if is_users(cls.__module__) and not issubclass(cls, _NEVER):
            self._classes[cls] = None
            self._patch(cls)

    def _patch(self, cls: type) -> None:
        """Makes a class note reads; an object whose class cannot counts as read as a whole."""
        of_python = cls.__flags__ & 0x300 == 0x200  # Py_TPFLAGS_HEAPTYPE without Py_TPFLAGS_IMMUTABLETYPE
        if not self._running or cls in self._patched or not of_python:
            return
        noting = self._noting(cls.__getattribute__)
        noting.noting = getattr_of(cls)  # type: ignore[attr-defined]
        methods = {"__getattribute__": noting, "__setattr__": self.objects.noting(cls)}
        self._patched[cls] = {name: vars(cls).get(name) for name in methods}
        for name, method in methods.items():
            type.__setattr__(cls, name, method)

    def _noting(self, plain: Callable[..., Any]) -> Callable[[Any, str], Any]:
        def __getattribute__(holder: Any, name: str) -> Any:
            if not self._busy and (not name.startswith("__") or name in _OF_WHOLE) and get_ident() == self._thread:
                if name not in _QUIET:
                    self._note(holder, name, sys._getframe(1))
                elif name.endswith("_hooks") and is_users(module_name(sys._getframe(1).f_globals)):
                    self.read(holder, name)
            return plain(holder, name)

        return __getattribute__

    @untold
    def _note(self, holder: Any, name: str, frame: types.FrameType) -> None:
        reader = _reader(frame)
        if logs(reader):
            return
        of_users = is_users(reader)
        made_meanwhile = id(holder) not in self.edges.modules and id(holder) not in self._met
        if made_meanwhile and of_users and name not in MODULE_STATE and not self._is_new(holder):
            made_meanwhile = False
        if made_meanwhile and name not in _OF_MODE:
            self._note_of_class(type(holder), name, getattr_plain(holder))
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
            self.ran.asks["mode"].add(self._scope)
        if not made_meanwhile:
            self._note_of(holder, name, of_users)

    def _note_of(self, holder: Any, name: str, of_users: bool) -> None:
        if name in _OF_WHOLE:
            if of_users:
                self.ran.hidden[self._scope] = "__dict__", LOOK_UP, user_location()
        elif name in REGISTRIES and isinstance(holder, nn.Module):
            self._names(holder, name)
        elif (name not in MODULE_STATE or name == "training") and not self._is_property(type(holder), name):
            self.read(holder, name)

    def _is_property(self, cls: type, name: str) -> bool:
        """Whether an attribute is what a property computes: that is code that runs, and reads by itself."""
        base = next((base for base in cls.__mro__ if name in vars(base)), object)
        return cls in self._classes and isinstance(vars(base).get(name), property)

    def _is_new(self, holder: Any) -> bool:
        """Whether an object that no read has led to so far is made by the run itself. If it was there before, it is met now: a
        class may keep its only instance, into which code puts losses (pipegoose's ``ExpertContext.get_instance()``)."""
        if id(holder) not in self._made:
            if gc.is_tracked(holder) and not any(other is holder for other in gc.get_objects(generation=0)):
                self._met[id(holder)] = holder
                self.objects.meet(None, holder, False, isinstance(holder, nn.Module))
                return False
            # no garbage is collected meanwhile, so that all that is made is of one generation
            self._made.add(id(holder))
        return True

    def _names(self, module: nn.Module, registry: str) -> None:
        names = Names(frozenset(vars(module)[registry]))
        for name in names.names:
            self.read(module, name)
        edge = Edge(module, registry, names, names)
        self.edges.of(module).setdefault(registry, edge).scopes.add(self._scope)

    # -- what the recorder tells --------------------------------------------------------------------------------------

    def note_write(self, parameter: torch.Tensor) -> None:
        """Notes that code writes to a parameter, as of the module whose code does."""
        name = next(name for name, tensor in self.recorder.parameters.items() if tensor is parameter)
        self.ran.changed[name, self._scope] = user_location()

    def asked(self, tensor: Any, attribute: str) -> None:
        """Notes that the code asks something of a tensor that is no number of it, such as ``requires_grad``."""
        if attribute not in _OF_GRADIENTS | _CHANGED.keys():
            return
        frame = asking_frame(("hexa_fx.", "torch._tensor.", "torch.overrides."))
        if frame is None or not is_users(module_name(frame.f_globals)):
            return
        if attribute in _CHANGED:
            self._note_done(tensor, attribute)
        elif id(tensor) in self._met and attribute != "is_inference":
            self.read(tensor, attribute)
        else:
            self.asked_gradients({self._scope})
            if attribute == "is_inference":
                self.ran.note_state(torch.is_inference_mode_enabled, self._scope)

    def _note_done(self, tensor: Any, attribute: str) -> None:
        """Notes that code sets an attribute of a tensor, or does else what no graph shows."""
        was_there = any(edge.value is tensor and not edge.own for edge in self.edges)
        if attribute == "data" or (attribute.startswith("requires_grad") and not was_there):
            return  # the recorder tells of the first by another name, or as of a write, and records the second
        self.ran.hidden[self._scope] = attribute, _CHANGED.get(attribute, ATTRIBUTE), user_location()

    def asked_gradients(self, scopes: set[str]) -> None:
        """Notes that code asks whether a value that was computed has a gradient: if gradients are on, and by what it is made of.

        They are never on inside an `autograd.Function`. There it asks what holds outside, which is noted once the function is over.
        """
        if self.recorder.functions_running:
            self.recorder.functions_running[-1].update(scopes)
            return
        self.ran.asks["gradient"] |= scopes
        for scope in scopes:
            self.ran.note_state(torch.is_grad_enabled, scope)

    # -- after the run --------------------------------------------------------------------------------------------------

    def _note_of_class(self, cls: type, name: str, own: Mapping[str, Any]) -> None:
        """Of an object that the run made: what its class gives, but for functions, of which it shows whether they run."""
        base = next((base for base in cls.__mro__ if name in vars(base)), object)
        if name not in own and is_users(base.__module__) and not isinstance(vars(base)[name], _IN_CLASSES):
            self.read(base, name)

    def _anchor(self) -> None:
        """Notes what classes gave without being asked by way of an object, and attributes of tensors that code names."""
        for module in modules_of(self._block):
            called = self.edges.of(module).get("forward")
            for scope in called.scopes if called and is_users(type(module).__module__) else ():
                self.read(type(module), "__call__", scope)
        bases = dict.fromkeys(base for cls in self._classes for base in cls.__mro__ if is_users(base.__module__))
        for base in bases:
            for name, member in list(vars(base).items()):
                runs = isinstance(member, _IN_CLASSES)
                for scope in self.ran.scopes_of(member) if runs else self.ran.mention(name):
                    self.read(base, name, scope)
        for tensor in [value for value in self._met.values() if isinstance(value, torch.Tensor)]:
            for name in vars(tensor):
                for scope in self.ran.mention(name):
                    self.read(tensor, name, scope)


def _reader(frame: types.FrameType | None) -> str:
    """The Python module whose code reads. What `copy` reads is read by who makes the copy."""
    while frame is not None and module_name(frame.f_globals) in ("copy", "copyreg"):
        frame = frame.f_back
    return "" if frame is None else module_name(frame.f_globals)
