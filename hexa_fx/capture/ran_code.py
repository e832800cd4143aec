"""Which of the user's functions run during a recording, and what they read by the names that they spell."""

from __future__ import annotations

import builtins
import functools
import os
import re
import sys
import types
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from threading import get_ident
from typing import Any, ParamSpec, TypeAlias, TypeVar

from hexa_fx.capture.bytecode import code_reads, only_adds
from hexa_fx.contexts import items_set
from hexa_fx.ir import SourceLocation
from hexa_fx.isolation import torch_state
from hexa_fx.isolation.lookup import CALLED, is_object
from hexa_fx.isolation.purity import LOOK_UP, hidden_source, is_of_users, is_stream, is_users, module_name
from hexa_fx.isolation.read_values import CACHED

Wanted: TypeAlias = Callable[[types.FrameType], bool]
"""Called with the frame of a function that starts; whether it wants to hear of the same code again."""


Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


def untold(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """A function of ours of which a trace function is told nothing, nor of what it calls, since that takes as long as the call."""

    @functools.wraps(function)
    def silent(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        trace = sys.gettrace()
        if trace is None:
            return function(*args, **kwargs)
        sys.settrace(None)
        try:
            return function(*args, **kwargs)
        finally:
            sys.settrace(trace)

    return silent


@contextmanager
def told_of_starts(wanted: Wanted) -> Iterator[None]:
    """A context in which ``wanted`` is called for every function that starts in this thread."""
    with ExitStack() as ended:
        if not _monitor(wanted, ended):
            _trace(wanted, ended)
        yield


def _trace(wanted: Wanted, ended: ExitStack) -> None:
    left: dict[int, types.CodeType] = {}  # by id: hashing code reads all of it

    def started(frame: types.FrameType, event: str, argument: Any) -> None:
        code = frame.f_code
        if id(code) not in left and not wanted(frame):
            left[id(code)] = code

    ended.callback(sys.settrace, sys.gettrace())
    sys.settrace(started)


def _monitor(wanted: Wanted, ended: ExitStack) -> bool:
    """Has Python tell of starts from 3.12 on, and returns whether it does: nothing is told of code that is left, and debuggers are
    left alone, while every `sys.settrace` there goes through all frames of the stack.
    """
    if sys.version_info < (3, 12):
        return False
    monitoring = sys.monitoring
    # numbers that Python gives to no kind of tool
    tool = next((number for number in (3, 4) if monitoring.get_tool(number) is None), None)
    if tool is None:
        return False
    monitoring.use_tool_id(tool, __name__)
    thread, events = get_ident(), monitoring.events.PY_START | monitoring.events.PY_RESUME

    def started(code: types.CodeType, offset: int) -> Any:
        return None if get_ident() != thread or wanted(sys._getframe(1)) else monitoring.DISABLE

    ended.callback(monitoring.free_tool_id, tool)
    for event in (monitoring.events.PY_START, monitoring.events.PY_RESUME):
        monitoring.register_callback(tool, event, started)
        ended.callback(monitoring.register_callback, tool, event, None)
    ended.callback(monitoring.set_events, tool, monitoring.events.NO_EVENTS)
    monitoring.set_events(tool, events)
    monitoring.restart_events()
    return True


_GENERATED = "<eval_with_key>"
_WORD = re.compile(r"[^\W\d]\w*")
_ENVIRONMENT = (os.environ, os.getenv)
_FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType)
_OF_FRAMES = frozenset({"sys", "inspect", "traceback"})
"""Whose functions ask who calls them."""


class RanCode:
    """Code of the user's that ran, by the modules whose code called it. ``read`` notes that a key of an object is read, and returns
    the value; ``scopes`` are paths of the modules whose code runs, the innermost last."""

    def __init__(self, read: Callable[..., Any], scopes: list[str]) -> None:
        self._read, self._scopes = read, scopes
        self.entered: Callable[[dict[str, Any]], None] = lambda namespace: None
        """Told the globals of every function that starts."""
        self.hears = True
        # By id: hashing reads all of the code.
        self._ran: dict[int, tuple[types.CodeType, set[str], frozenset[str]]] = {}
        self._names: dict[str, set[str]] = {}
        self._location: SourceLocation | None = None
        self.asks: defaultdict[str, set[str]] = defaultdict(set)
        """Scopes by what their code asks of tensors: see `CodeReads.asks`. ``gradient`` if it asks whether they have one, ``mode``
        if it asks modules for theirs."""
        self.hidden: dict[str, tuple[str, str, SourceLocation | None]] = {}
        """Scopes whose code reads what leaves no trace, or does what no graph shows: by which function, what that is, and where."""
        self._told = ExitStack()
        """Ends that something tells of calls of functions in their place."""
        self.changed: dict[tuple[str, str], SourceLocation | None] = {}
        """Parameters that it writes to, by name and scope, and where it does so last."""

    @contextmanager
    def noted(self) -> Iterator[None]:
        """A context in which functions that are called are noted."""
        with self._told, told_of_starts(self._starts):
            yield

    def scopes_of(self, member: Any) -> set[str]:
        """Of a member of a class, the modules whose code ran it; empty if it did not run."""
        function = getattr(member, "fget", None) or getattr(member, "func", None) or getattr(member, "__func__", member)
        return self._ran.get(id(getattr(function, "__code__", None)), (None, set(), frozenset()))[1]

    def only_adds(self, scope: str, name: str) -> bool:
        """Whether the code of a module only adds to what goes by a name."""
        codes = [code for code, by, names in self._ran.values() if scope in by and name in names]
        return any(name in code.co_names for code in codes) and all(only_adds(code, name) for code in codes)

    def mention(self, name: str) -> set[str]:
        """Of an attribute, the modules whose code has its name in it, once the run is over."""
        if not self._names:
            for _, scopes, names in self._ran.values():
                for mentioned in names:
                    self._names.setdefault(mentioned, set()).update(scopes)
        return set() if name.startswith("__") else self._names.get(name, set())

    def _starts(self, frame: types.FrameType) -> bool:
        if not self.hears:
            return True
        if is_users(module_name(frame.f_globals)):
            self.entered(frame.f_globals)
        return self._runs(frame.f_code, frame.f_globals, self._scopes[-1])

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

    def _note(self, code: types.CodeType, namespace: dict[str, Any], scope: str) -> None:
        found = code_reads(code)
        home = sys.modules.get(module_name(namespace))
        for asked in found.asks:
            self.asks[asked].add(scope)
        self._location = SourceLocation(code.co_filename, code.co_firstlineno)
        if found.hidden:
            self.hidden[scope] = found.hidden, LOOK_UP, self._location
        for first, *rest in found.chains:
            if not rest and self._tell_of_calls(namespace, first):
                continue
            if first not in namespace or is_ours(namespace[first]):
                self.note_state(namespace.get(first, vars(builtins).get(first)), scope)
            else:
                at_home = home is not None and vars(home) is namespace
                self._follow(home if at_home else namespace, [first, *rest], scope)
        for module, *rest in found.imports:
            if module in sys.modules and rest:
                self._follow(sys.modules[module], rest, scope)

    def _follow(self, holder: Any, names: list[str], scope: str) -> None:
        """Notes attributes of Python modules and classes; other objects note theirs by themselves."""
        for name in names:
            if isinstance(holder, types.ModuleType) and not is_users(holder.__name__):  # which is constant
                if self._tell_of_calls(vars(holder), name):
                    return
                value = getattr(holder, name, None)
            else:
                value = self._read(holder, name, scope)
            self.note_state(value, scope)
            if isinstance(value, CACHED) and isinstance(value.__wrapped__, types.FunctionType):
                self._runs(value.__wrapped__.__code__, value.__wrapped__.__globals__, scope)  # perhaps not in this run
            holder = value
            if isinstance(holder, types.ModuleType):
                continue
            is_function = isinstance(holder, types.FunctionType) and is_of_users(holder)
            if not (is_function or (isinstance(holder, type) and is_users(holder.__module__))):
                return
        if isinstance(holder, types.ModuleType) and is_users(holder.__name__):
            self.hidden[scope] = holder.__name__, LOOK_UP, self._location

    def _tell_of_calls(self, namespace: dict[str, Any], name: str) -> bool:
        """Whether a function that is no source unless it is called lies there, as a clock behind a switch that is off."""
        function: Any = namespace.get(name, vars(builtins).get(name))
        is_function = isinstance(function, _FUNCTIONS) or is_stream(getattr(function, "__self__", None))
        kind = hidden_source(function) if is_function and function.__module__ not in _OF_FRAMES else ""
        if not kind:
            return False

        thread = get_ident()

        def told(*args: Any, **kwargs: Any) -> Any:
            frame = sys._getframe(1)
            if is_users(module_name(frame.f_globals)):
                note(SourceLocation(frame.f_code.co_filename, frame.f_lineno))
            return function(*args, **kwargs)

        def note(place: SourceLocation) -> None:
            if get_ident() == thread:
                self.hidden[self._scopes[-1]] = function.__name__, kind, place

        self._told.enter_context(items_set([(namespace, name, told)]))
        return True

    def note_state(self, value: Any, scope: str) -> None:
        """Notes a function that asks torch or the system for a state, and what it says."""
        if any(value is each for each in _ENVIRONMENT):
            self._read(os.environ, "_data", scope)
            return
        name = "" if is_object(value) else str(getattr(value, "__name__", ""))  # objects may compute what they have not
        if kind := hidden_source(value):
            self.hidden[scope] = value.__name__, kind, self._location
        name = torch_state.STANDS_FOR.get(name, name)
        if name in torch_state.STATE and str(getattr(value, "__module__", "torch") or "torch").startswith("torch"):
            self._read(torch_state.STATE[name], CALLED, scope)


def words(values: Iterable[Any]) -> Iterator[str]:
    """What may be names of attributes in the texts among ``values``."""
    for value in values:
        yield from _WORD.findall(value) if isinstance(value, str) else ()


def is_ours(value: Any) -> bool:
    """Whether a name stands for something else while the block is recorded (`hexa_fx.capture.host`)."""
    function = value.__func__ if isinstance(value, types.MethodType) else value
    return str(getattr(function, "__module__", "")).startswith("hexa_fx.capture")
