"""Where the values that a recorded run read lie now, and the checks of every call that compare them again.

These are written as Python functions: one comparison after the other, without loops and look-ups around them.

A function that says no only says that something may differ. What differs, and whether it matters, is then found out slowly.
"""

from __future__ import annotations

import keyword
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, reduce
from types import CodeType, FunctionType, MappingProxyType
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.nn.utils.parametrize import is_parametrized

from hexa_fx.ir import InputGuard, PythonRead
from hexa_fx.isolation.lookup import (
    MISSING,
    Place,
    getattr_plain,
    is_collection,
    lookup,
    place,
)
from hexa_fx.isolation.module_tree import class_of, has_parametrizations, inside, named_modules, rebuilds
from hexa_fx.isolation.plain_experts import EXPERTS_SET, SAME
from hexa_fx.isolation.purity import is_of_users
from hexa_fx.isolation.read_values import Code, IsA, Keys, Names, alike
from hexa_fx.isolation.shadow import InPlace
from hexa_fx.runtime.guards import (
    AGAIN,
    ASKED_OF_INPUTS,
    ON_A_STACK,
    ArgumentNames,
    Form,
    GuardMiss,
    ReadMiss,
    check_input,
    dtype_class,
    equal,
    is_plain,
)

_COPIES = (list, set, dict, deque, bytearray)


@dataclass(frozen=True)
class StandIn:
    """In place of the block, which keeps the checks and would never be freed if these kept it; ``name``: that of it in them."""

    name: str


BLOCK, OWN_DICT = StandIn("block"), StandIn("own")

_OF_CLASS, _OF_LENGTH, _OF_DTYPE = "type({}) is {}", "len({}) == {}", "{}[{}].dtype is {}"
_OF_NAMES = "len({}.__dict__) == {}"
_IS_A = "isinstance({}[{}], {})"
_EQUAL = "equal({}, {})"
_LOOKED_UP, _ALIKE, _ONE_OF = "lookup({}, {}) is {}", "alike(lookup({}, {}), {})", "{}[{}] in {}"


Check: TypeAlias = tuple[Any, ...]
"""Text, with places for the objects that come after it."""


def lies_in(where: dict[Any, Any], key: Any, value: Any) -> Check:
    """That a value, or nothing, lies under a key of a dict."""
    if type(where) is not dict or type(key) is not str:
        return "get({}, {}, MISSING) is {}", where, key, value
    said = repr(key).replace("{", "{{").replace("}", "}}")
    return (f"{said} not in {{}}", where) if value is MISSING else (f"{{}}[{said}] is {{}}", where, value)


def _is_given_by(owner: Any, key: str, value: Any) -> Check:
    if value is MISSING or not key.isidentifier() or keyword.iskeyword(key):
        return "same_object(getattr({}, {}, MISSING), {})", owner, key, value
    is_one = getattr(owner, key, MISSING) is value
    return f"{{}}.{key} is {{}}" if is_one else f"same_object({{}}.{key}, {{}})", owner, value


class Resolution:
    """Where the values of ``reads`` lie in ``block`` now; ``bases[id(module)]`` counts in place of a module.

    Tensors have to be of the kind that was noted, and one of the ``other_names`` to stay the same object. The block itself and its
    ``__dict__`` are `BLOCK` and `OWN_DICT`. Raises `GuardMiss` if one of them is not what was noted.
    """

    def __init__(
        self,
        block: nn.Module,
        reads: Sequence[PythonRead],
        packed: frozenset[str] = frozenset(),
        own_forward: Callable[..., Any] | None = None,
        dtypes: Mapping[str, torch.dtype] = MappingProxyType({}),
        bases: Mapping[int, nn.Module] = MappingProxyType({}),
        other_names: frozenset[str] = frozenset(),
    ) -> None:
        self._checks: dict[tuple[Any, ...], Check] = {}  # by text and ids
        self._check(_OF_CLASS, block, type(block))
        self._bases, self._packed, self._other_names = bases, packed, other_names
        self._modules = {name: self._seen_through(m) for name, m in named_modules(block, every=True)}
        self._holders: dict[tuple[str, tuple[Any, ...]], Any] = {}
        if own_forward is not None:  # in its place there is a rewritten one now
            self._holders["", ("forward",)] = own_forward
        self._seen: dict[tuple[int, Any], Any] = {}
        self._through = {(read.root, read.steps[:-1]) for read in reads}
        for read in sorted(reads, key=lambda read: len(read.steps)):
            if isinstance(read.value, Code):
                self._add_code(read.value)
            else:
                self._add(read)
        for path, dtype in dtypes.items():
            self._add_dtype(path, dtype)
        stand_ins = {id(block): BLOCK, id(getattr_plain(block)): OWN_DICT}
        found = self._checks.values()
        self.checks: list[Check] = [tuple(stand_ins.get(id(item), item) for item in check) for check in found]
        # what stays keeps no module alive that is in no place itself
        del self._modules, self._holders, self._seen, self._bases, self._checks

    def _add_code(self, code: Code) -> None:
        """What names lead to outside of the block, by the very objects on the way."""
        for bound in code.bounds:
            holder, key = bound.holder, bound.key
            found = place(holder, key)
            if not (bound.is_as(found.value) or (bound.value is None and alike(found.value, bound.noted))):
                raise ReadMiss(str(bound))
            self._watch(holder, key, found, bound.noted)
            self._add_inside(bound.noted, found.value)

    def _add(self, read: PythonRead) -> None:
        holder, key = self._at(read.root, read.steps[:-1]), read.steps[-1]
        if isinstance(read.value, Names):
            now = frozenset(vars(holder)[key])
            if now != read.value.names:
                raise _miss(read, now)
            self._enter_registry(holder)
            self._check(_OF_LENGTH, vars(holder)[key], len(now))
            return
        if (id(holder), key) in self._seen:
            if not _is_like(self._seen[id(holder), key], read.value):
                raise GuardMiss(f"{str(read)!r} changes from call to call")
            return
        if key == "__class__" and (own := class_of(holder)) is not type(holder) and alike(own, read.value):
            # What was read of the class is looked up in this one.
            self._holders[read.root, read.steps] = own
            return
        # Of a weight of a parametrized module (PEFT's adapters on parameters, say) the rewritten forward gets what is computed now.
        if has_parametrizations(holder) and read.value == IsA(torch.Tensor) and is_parametrized(holder, key):
            return
        found = place(holder, key)
        if isinstance(found.value, InPlace):  # on a module inside, for other calls: as its class has it
            found = Place(getattr(type(holder), key), found.dicts, type(holder))
        value = self._seen_through(found.value)
        self._seen[id(holder), key] = value
        if key in EXPERTS_SET and found.dicts and {str(value), str(read.value)} <= SAME:
            self._check(_ONE_OF, found.dicts[0][0], key, SAME)
            return
        if not _is_like(value, read.value):
            raise _miss(read, value)
        through = (read.root, read.steps) in self._through
        path = inside(read.root, key)
        if isinstance(found.value, torch.Tensor) and not through and path not in self._other_names:
            self._watch_kind(key, found)
            return
        if isinstance(found.value, nn.Module) and path in self._packed:
            return
        if key == "__class__":
            self._check(_OF_CLASS, holder, found.value)
        self._enter_registry(holder)
        self._watch(holder, key, found, read.value)
        self._add_inside(read.value, value)

    def _watch(self, holder: Any, key: Any, found: Place, noted: Any) -> None:
        """Enters the place itself; an object has to lie there itself."""
        for where, value in found.dicts:
            self._check(*lies_in(where, key, value))
        if found.owner is not None:
            self._check(*_is_given_by(found.owner, key, found.value))
        if found.slow and isinstance(noted, (IsA, Keys)):
            self._check(_LOOKED_UP, holder, key, found.value)
        elif found.slow:
            self._check(_ALIKE, holder, key, noted)

    def _watch_kind(self, key: Any, found: Place) -> None:
        """A tensor beside the parameters may be another in every call, as counts are, but not None, from which code counts anew."""
        for where, value in found.dicts:
            if value is found.value and not isinstance(value, nn.Parameter):
                self._check(_IS_A, where, key, torch.Tensor)

    def _seen_through(self, value: Any) -> Any:
        return self._bases.get(id(value), value) if self._bases else value

    def _add_inside(self, noted: Any, value: Any) -> None:
        """What the object at a place contains, or is."""
        if isinstance(value, nn.Module):
            self._check(_OF_CLASS, value, type(value))
        elif isinstance(noted, Keys) and not isinstance(value, tuple):
            has_items = is_collection(value)
            self._check(_OF_LENGTH if has_items else _OF_NAMES, value, len(value if has_items else vars(value)))
        elif type(value) in _COPIES:
            self._check(_EQUAL, value, noted)

    def _add_dtype(self, path: str, dtype: torch.dtype) -> None:
        """Of a parameter or buffer; nothing if it is no longer there, as under an adapter."""
        path_of_owner, _, name = path.rpartition(".")
        owner = self._modules.get(path_of_owner)
        registries = () if owner is None else (owner._parameters, owner._buffers, vars(owner))
        registry, now = next(((held, held[name]) for held in registries if held.get(name) is not None), ({}, None))
        if not isinstance(now, torch.Tensor):
            return
        if now.dtype != dtype:
            raise GuardMiss(
                f"{path!r} is {now.dtype}; the block was recorded with {dtype}, which its code asks for; {AGAIN}"
            )
        self._check(_OF_DTYPE, registry, name, dtype)

    def _enter_registry(self, holder: Any) -> None:
        if isinstance(holder, nn.Module) and rebuilds(holder):
            self._check(*lies_in(getattr_plain(holder), "_modules", holder._modules))

    def _check(self, text: str, *objects: Any) -> None:
        self._checks[(text, *map(id, objects))] = (text, *objects)

    def _at(self, root: str, steps: tuple[Any, ...]) -> Any:
        """The object at the end of ``steps``."""
        place_of = (root, steps)
        if place_of not in self._holders:
            if steps:
                holder = self._at(root, steps[:-1])
                found = self._seen_through(lookup(holder, steps[-1]))
                found = getattr(type(holder), steps[-1]) if isinstance(found, InPlace) else found
            else:
                found = submodule(self._modules, root)
            self._holders[place_of] = found
        return self._holders[place_of]


def _is_like(now: Any, noted: Any) -> bool:
    """Whether ``now`` is what was noted, or a function that the same ``def`` or ``lambda`` made, as one makes wrappers of several
    modules. What functions of the user's code keep is among the reads (`hexa_fx.isolation.read_values.keys_inside`), if anything.
    """
    if not (isinstance(now, FunctionType) and isinstance(noted, FunctionType) and is_of_users(noted)):
        return alike(now, noted)
    alike_made = now.__code__ == noted.__code__ and now.__globals__ is noted.__globals__
    return alike_made and all(bool(getattr(now, name)) == bool(getattr(noted, name)) for name in _KEPT)


_KEPT = ("__defaults__", "__kwdefaults__", "__dict__")


def holds(block: nn.Module, reads: Sequence[PythonRead]) -> bool:
    """Whether ``block`` gives everything that was read as it was."""
    try:
        Resolution(block, reads)
    except GuardMiss:
        return False
    return True


def is_another_number(block: nn.Module, read: PythonRead) -> bool:
    """Whether a number that differed differs still, which takes a tenth of what a `Resolution` does. No where only that can say."""
    if read.is_global or type(read.value) not in _NUMBERS:
        return False
    try:
        now: Any = reduce(lookup, read.steps, block.get_submodule(read.root))
    except AttributeError:
        return False
    return type(now) in _NUMBERS and not alike(now, read.value)


def _miss(read: PythonRead, now: Any) -> GuardMiss:
    if isinstance(read.value, IsA) and issubclass(read.value.kind, nn.Module):
        if not isinstance(now, nn.Module):
            return GuardMiss(f"there is no longer a submodule {str(read)!r}; {AGAIN}")
        kinds = f"a {_name(read.value.kind)} for a {_name(type(now))}"
        on_a_stack = hasattr(now, "parameter_name") and getattr(now, "num_experts", 1) > 1
        return GuardMiss(f"{str(read)!r} was exchanged: {kinds}; {ON_A_STACK if on_a_stack else AGAIN}")
    return ReadMiss(str(read))


def submodule(modules: Mapping[str, nn.Module], path: str) -> nn.Module:
    """The module at ``path``, of those by name."""
    if path not in modules:
        raise GuardMiss(f"there is no longer a submodule {path!r}; {AGAIN}")
    return modules[path]


def _name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


_DTYPES = [value for value in vars(torch).values() if isinstance(value, torch.dtype)]
_NUMBERS = (bool, int, float)
_SIMPLE = (*_NUMBERS, str)


@lru_cache(256)
def _compiled(source: str) -> CodeType:
    """Once for identical layers, and for the copies on which a block is verified: it takes longer than all else about a check."""
    return compile(source, "<hexa_fx checks>", "exec")


class _Names:
    """Names for the objects that a written function compares with."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {"MISSING": MISSING, "get": dict.get, "same_object": same_object}
        self._known: dict[int, str] = {}

    def of(self, value: Any) -> str:
        if type(value) is StandIn:
            return value.name
        name = self._known.setdefault(id(value), f"_{len(self._known)}")
        self.values[name] = value
        return name

    def function(self, arguments: str, *lines: str) -> Callable[..., Any]:
        exec(_compiled("\n    ".join((f"def check({arguments}):", *lines))), self.values)
        function: Callable[..., Any] = self.values.pop("check")
        return function


def still_the_same(found: Resolution) -> Callable[[Any], bool]:
    """A function of the block that says whether everything lies where it was found; it does not keep the block alive."""
    names = _Names()
    names.values |= {"equal": equal, "lookup": lookup, "alike": alike}
    clauses = [text.format(*map(names.of, objects)) for text, *objects in found.checks]
    check = f"return {' and '.join(clauses) or True}"
    return names.function(
        "block",
        "try:",
        "    own = block.__dict__",
        f"    {check}",
        "except (KeyError, AttributeError):",
        "    return False",
    )


def inputs_of(
    form: tuple[Any, ...], arguments: ArgumentNames, guards: Sequence[InputGuard], inputs: Sequence[str]
) -> Callable[[Any, Any], list[Any] | None]:
    """A function of (args, kwargs) that gives the inputs of a program, or None if they are not what was recorded.

    ``form``: how many arguments come by position, and the names of the others. ``inputs``: names of those that the program takes.
    """
    names = _Names()
    names.values |= {"Tensor": torch.Tensor, "is_plain": is_plain}
    given = [_Given(f"args[{place}]") for place in range(form[0])]
    try:
        values = arguments.bind(tuple(given), {name: _Given(f"kwargs[{name!r}]") for name in form[1:]})
        forms = {guard.name: guard.value for guard in guards if isinstance(guard.value, Form)}
        first = [_entered(values, name, form, names) for name, form in forms.items()]
        guards = [guard for guard in guards if guard.name not in forms]
        covered = {*inputs, *(guard.name for guard in guards)}
        if not covered <= values.keys():
            raise GuardMiss("an input is missing")
        places = {name: f"x{place}" for place, name in enumerate(values)}
        lines = [
            f"{places[name]} = {value if type(value) is _Given else names.of(value)}" for name, value in values.items()
        ]
        clauses = [clause for guard in guards for clause in _of_guard(guard, places, values[guard.name], names)]
        for name in values.keys() - covered:
            default = arguments.defaults.get(name, MISSING)  # nothing is
            clauses.append(f"{places[name]} is {names.of(default)}")
    except GuardMiss:  # of a form of call that the block was not recorded with
        return lambda args, kwargs: None
    result = f"[{', '.join(places[name] for name in inputs)}]"
    return names.function(
        "args, kwargs", *first, *lines, f"return {result} if {' and '.join(clauses) or True} else None"
    )


def _entered(values: dict[str, Any], name: str, form: Form, names: _Names) -> str:
    """Puts what lies in a tuple, list or dict in place of it, once a call is seen to have one of this form."""
    given = values.pop(name, None)
    if type(given) is not _Given:
        raise GuardMiss(f"{name!r} is a default")
    values |= {f"{name}__{key}": _Given(f"{given}[{key!r}]") for key in form.keys}
    found = f"tuple({given})" if form.kind is dict else f"len({given})"
    expected = names.of(form.keys) if form.kind is dict else len(form.keys)
    return f"if type({given}) is not {names.of(form.kind)} or {found} != {expected}: return None"


class _Given(str):
    """Stands for an argument that is given: the expression that reads it."""

    __slots__ = ()


def _of_guard(guard: InputGuard, places: dict[str, str], value: Any, names: _Names) -> list[str]:
    x = places[guard.name]
    if type(value) is not _Given:
        check_input(guard, value)  # a default, which is what it is
        return []
    if guard.kind == "constant":
        constant = names.of(guard.value)
        simple = f" or (type({x}) is type({constant}) and {x} == {constant})" * (type(guard.value) in _SIMPLE)
        return [f"({x} is {constant}{simple})"]
    clauses = [f"(type({x}) is Tensor or is_plain({x}))"]
    for name, (code, _) in ASKED_OF_INPUTS.items():
        wanted = getattr(guard, name)
        if name == "dtype" and wanted is not None and not guard.exact_dtype:
            alike = frozenset(dtype for dtype in _DTYPES if dtype_class(dtype) == dtype_class(wanted))
            clauses.append(f"{x}.dtype in {names.of(alike)}")
        elif name == "device" and wanted in ("cpu", "cuda"):  # in a quarter of the time
            clauses.append(f"{x}.is_{wanted}")
        elif wanted is not None:
            clauses.append(f"{x}{code.removeprefix('x')} == {names.of(wanted)}")
    return clauses + ([f"{x}.numel() != 0"] if guard.filled else [])


def same_object(one: Any, two: Any) -> bool:
    """Whether both are one object; class methods are bound anew each time."""
    return one is two or (type(one) is type(two) and bool(one == two))
