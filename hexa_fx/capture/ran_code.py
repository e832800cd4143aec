"""Which of the user's functions run during a recording, and what they read by global names."""

from __future__ import annotations

import builtins
import re
import sys
import types
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from hexa_fx.capture.calls import user_location
from hexa_fx.capture.code_reads import ONLY_IF, code_reads
from hexa_fx.capture.output import LOGS, noted_output, say_left_out, writer
from hexa_fx.capture.started_functions import of_this_thread, told_of_starts
from hexa_fx.ir import SourceLocation
from hexa_fx.isolation import torch_state
from hexa_fx.isolation.held_objects import MISSING, is_object
from hexa_fx.isolation.hidden_sources import DIGEST, OUTPUT, SWITCH, hidden_source
from hexa_fx.isolation.lookup import CALLED
from hexa_fx.isolation.read_values import CACHED
from hexa_fx.isolation.users_code import is_users, module_name
from hexa_fx.torch_private import _is_torch_function_mode_enabled

_GENERATED = "<eval_with_key>"
_OF_ALL = frozenset({"vars", "__dict__"})
_BY_TEXT = _OF_ALL | {"getattr", "hasattr", "attrgetter"}
"""What takes names of attributes as texts, after what gives all of them."""
_WORD = re.compile(r"[^\W\d]\w*")
_FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType)
_OF_FRAMES = frozenset({"sys", "inspect", "traceback"})
"""Whose functions ask who calls them."""


class RanCode:
    """Code of the user's that ran, by the modules whose code called it.

    Args:
        read: notes that a key of an object is read, and returns the value.
        scope: path of the module whose code runs.
    """

    def __init__(self, read: Callable[..., Any], scope: Callable[[], str]) -> None:
        self._read, self._scope = read, scope
        self.entered: Callable[[dict[str, Any]], None] = lambda namespace: None
        """Told the globals of every function that starts."""
        self._ran: dict[
            int, tuple[types.CodeType, set[str], frozenset[str]]
        ] = {}  # by id: hashing code reads all of it
        self._settled: dict[tuple[int, str], bool] = {}
        """By the id of code and what is `ONLY_IF` asked, whether it came to that."""
        self._location: SourceLocation | None = None
        self.asks: defaultdict[str, set[str]] = defaultdict(set)
        """Scopes by what their code asks of tensors: see `CodeReads.asks`. ``gradient`` if it asks whether they have one, ``mode``
        if it asks modules for theirs."""
        self.hidden: dict[str, tuple[str, str, SourceLocation | None]] = {}
        """Scopes whose code reads what leaves no trace, or does what no graph shows: by which function, what that is, and where."""
        self._told: list[tuple[dict[str, Any], str, Any]] = []
        """Functions in whose place something tells of their calls while the run lasts: where, by which name, and what they are."""
        self.changed: dict[str, None] = {}
        """Names of parameters that it writes to."""
        self.texts: set[str] = set()
        """Names of attributes that code may have by way of texts that it reads."""

    @contextmanager
    def noted(self) -> Iterator[None]:
        """A context in which functions that are called are noted."""
        gradients = torch.is_grad_enabled()
        try:
            with told_of_starts(self._starts), noted_output(self._writes):
                yield
        finally:
            while self._told:
                namespace, name, before = self._told.pop()
                namespace[name] = before
                if before is MISSING:  # a name of Python's own
                    del namespace[name]
        if torch.is_grad_enabled() != gradients:
            self.hidden[""] = "set_grad_enabled", SWITCH, None

    def scopes_of(self, member: Any) -> set[str]:
        """Of a member of a class, the modules whose code ran it; empty if it did not run."""
        function = getattr(member, "fget", None) or getattr(member, "func", None) or getattr(member, "__func__", member)
        return self._ran.get(id(getattr(function, "__code__", None)), (None, set(), frozenset()))[1]

    def codes(self) -> list[types.CodeType]:
        """All that ran."""
        return [code for code, _, _ in self._ran.values()]

    def putting(self, name: str) -> set[str]:
        """The modules whose code sets something of that name (`CodeReads.puts`)."""
        return {scope for code, scopes, _ in self._ran.values() if name in code_reads(code).puts for scope in scopes}

    def mention(self, name: str, of_all: bool = True) -> set[str]:
        """Of an attribute, the modules whose code has its name in it, perhaps as a text, or may make it.

        Args:
            of_all: whether code counts that takes all attributes of something.
        """
        if name.startswith("__"):
            return set()
        wanted = {name} | (_BY_TEXT if name in self.texts else _OF_ALL if of_all else set())
        return {scope for _, scopes, names in self._ran.values() if not wanted.isdisjoint(names) for scope in scopes}

    def switches(self, name: str) -> None:
        """Notes that it sets something that holds for all code."""
        self.hidden[self._scope()] = name, SWITCH, user_location()

    def _writes(self, name: str, frame: types.FrameType) -> None:
        self.hidden[self._scope()] = name, OUTPUT, _place(frame)

    def _starts(self, frame: types.FrameType) -> bool:
        if frame.f_code is LOGS:
            if found := writer(frame):
                say_left_out(_place(found[1]))
            return True
        if is_users(module_name(frame.f_globals)):
            self.entered(frame.f_globals)
        noted = self._runs(frame.f_code, frame.f_globals, self._scope())
        if noted and not _is_torch_function_mode_enabled():  # what it asks of tensors is not seen
            self.settle(frame, *ONLY_IF)
        return noted

    def _runs(self, code: types.CodeType, namespace: dict[str, Any], scope: str) -> bool:
        if id(code) in self._ran and scope in self._ran[id(code)][1]:
            return True
        if not is_users(module_name(namespace)) or code.co_filename.startswith(_GENERATED):
            return False
        if id(code) not in self._ran:
            self._ran[id(code)] = code, set(), frozenset((*code.co_names, *words(code.co_consts)))
        self._ran[id(code)][1].add(scope)
        self._note(code, namespace, scope)
        return True

    def settle(self, frame: types.FrameType | None, *came_to: str) -> None:
        """Notes that a tensor's dtype is read in ``frame``, or torch is called: whatever code led there asks what it may ask."""
        while frame is not None and not all(self._settled.values()):
            self._settle(frame.f_code, *came_to)
            frame = frame.f_back

    def _settle(self, code: types.CodeType, *came_to: str) -> None:
        for what in came_to:
            if self._settled.get((id(code), what)) is False:
                self._settled[id(code), what] = True
                for asked in ONLY_IF[what]:
                    self.asks[asked] |= self._ran[id(code)][1]

    def _note(self, code: types.CodeType, namespace: dict[str, Any], scope: str) -> None:
        found = code_reads(code)
        home = sys.modules.get(module_name(namespace))
        for asked in found.asks:
            for what in (asked,) if asked not in ONLY_IF else ONLY_IF[asked] * self._came_to(code, asked):
                self.asks[what].add(scope)
        self._location = SourceLocation(code.co_filename, code.co_firstlineno)
        if found.hidden:
            self.hidden[scope] = found.hidden, "look-up of names", self._location
        if "tobytes" in code.co_names:
            self.hidden[scope] = "tobytes", DIGEST, self._location
        for names in found.sets:
            if _is_of_library(namespace.get(names[0]), names[1:-1]):
                self.hidden[scope] = ".".join(names), SWITCH, self._location
        for first, *rest in found.chains:
            if not rest and self._tell_of_calls(namespace, first):
                continue
            if first not in namespace or is_ours(namespace[first]):
                self.note_state(namespace.get(first, vars(builtins).get(first)), scope)
                continue
            if home is not None and vars(home) is namespace:
                self._follow(home, [first, *rest], scope)
            elif not isinstance(namespace[first], (types.ModuleType, type, *_FUNCTIONS)):
                self.hidden[scope] = first, "global of a Python module that is not in sys.modules", self._location
        for module, *rest in found.imports:
            if module in sys.modules and rest:
                self._follow(sys.modules[module], rest, scope)

    def _came_to(self, code: types.CodeType, asked: str) -> bool:
        return self._settled.setdefault((id(code), asked), False)

    def _follow(self, holder: Any, names: list[str], scope: str) -> None:
        """Notes attributes of Python modules and classes; other objects note theirs by themselves."""
        for name in names:
            if isinstance(holder, types.ModuleType) and not is_users(holder.__name__):
                if self._tell_of_calls(vars(holder), name):
                    return
                value = getattr(holder, name, MISSING)
                if _may_be_set(holder.__name__, value):
                    self._read(holder, name, scope)
            else:
                value = self._read(holder, name, scope)
            self.note_state(value, scope)
            if isinstance(value, CACHED) and isinstance(value.__wrapped__, types.FunctionType):
                self._runs(value.__wrapped__.__code__, value.__wrapped__.__globals__, scope)  # perhaps not in this run
                self._settle(value.__wrapped__.__code__, "tensor's dtype")
            holder = value
            if isinstance(holder, types.ModuleType) or _is_backend(holder):
                continue
            if not isinstance(holder, (type, types.FunctionType)) or not is_users(holder.__module__ or ""):
                return

    def _tell_of_calls(self, namespace: dict[str, Any], name: str) -> bool:
        """Whether a function that is no source unless it is called lies there, as a clock behind a switch that is off."""
        function: Any = namespace.get(name, vars(builtins).get(name))
        kind = (
            hidden_source(function)
            if isinstance(function, _FUNCTIONS) and function.__module__ not in _OF_FRAMES
            else ""
        )
        if not kind:
            return False

        def told(*args: Any, **kwargs: Any) -> Any:
            frame = sys._getframe(1)
            if is_users(module_name(frame.f_globals)):
                note(_place(frame))
            return function(*args, **kwargs)

        @of_this_thread
        def note(place: SourceLocation) -> None:
            self.hidden[self._scope()] = function.__name__, kind, place

        self._told.append((namespace, name, namespace.get(name, MISSING)))
        namespace[name] = told
        return True

    def note_state(self, value: Any, scope: str) -> None:
        """Notes a function that asks torch for a state, and what it says."""
        name = "" if is_object(value) else str(getattr(value, "__name__", ""))  # objects may compute what they have not
        if kind := hidden_source(value):
            self.hidden[scope] = value.__name__, kind, self._location
        name = torch_state.STANDS_FOR.get(name, name)
        if name in torch_state.STATE and str(getattr(value, "__module__", "torch") or "torch").startswith("torch"):
            self._read(torch_state, "STATE", scope)
            self._read(torch_state.STATE, name, scope)
            self._read(torch_state.STATE[name], CALLED, scope)


def _place(frame: types.FrameType) -> SourceLocation:
    return SourceLocation(frame.f_code.co_filename, frame.f_lineno)


def words(values: Iterable[Any]) -> Iterator[str]:
    """What may be names of attributes in the texts among ``values``."""
    for value in values:
        yield from _WORD.findall(value) if isinstance(value, str) else ()


def _may_be_set(module: str, value: Any) -> bool:
    """Whether what a Python module of torch holds is a switch, or a function that others may put their own in place of; or what
    `sys` lists."""
    if module == "sys" and isinstance(value, (list, dict)):
        return True
    return module.startswith("torch") and (isinstance(value, (*_FUNCTIONS, bool)) or _is_backend(value))


def _is_backend(value: Any) -> bool:
    """Whether it holds switches of a library that torch calls."""
    return type(value).__module__.startswith("torch.backends") and not isinstance(value, types.ModuleType)


def _is_of_library(holder: Any, names: Iterable[str]) -> bool:
    """Whether what lies there is a Python module that is not the user's, or holds switches of torch's."""
    for name in names:
        holder = getattr(holder, name, None)
    is_module = isinstance(holder, types.ModuleType) and not is_users(holder.__name__)
    return is_module or _is_backend(holder)


def is_ours(value: Any) -> bool:
    """Whether a name stands for something else while the block is recorded (`hexa_fx.capture.host`)."""
    function = value.__func__ if isinstance(value, types.MethodType) else value
    return str(getattr(function, "__module__", "")).startswith("hexa_fx.capture")
