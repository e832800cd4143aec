"""What lists, dicts and objects contain, to see whether code changed them in place and to put it back.

Modules hold them beside their parameters (``self.losses.append(loss)``), and code reaches them by global names.
"""

from __future__ import annotations

import functools
import operator
import types
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import nn

from hexa_fx.isolation.lookup import (
    LITERALS,
    MISSING,
    MODULE_STATE,
    PLAIN,
    attributes,
    filling,
    is_collection,
    is_data,
    is_object,
    plain_kind,
    slots_of,
)
from hexa_fx.isolation.module_tree import modules_of, named_modules
from hexa_fx.isolation.purity import is_users, module_name

_DEEPEST = 6
_INSIDE_ONE = 1 << 10
"""Objects that are looked at inside one global name."""


class Holder(NamedTuple):
    """A list, dict, set, deque, class, object or variable, and the way there in words. ``grows``: whether what is new
    in it may stay."""

    label: str
    value: Any
    grows: bool = False


class Contents:
    """The contents of ``holders`` as they are now."""

    def __init__(self, holders: Iterable[Holder]) -> None:
        # Not as pairs: of all that code reaches by name these are ten thousand and more, which the garbage collector walks.
        self._before = [(holder, *taken(holder.value)) for holder in holders]
        # Dicts all in one row, so that a look at whether one changed is no loop of Python's: those of hooks are nearly all empty.
        # A kind of the user's own is not asked whether it is empty: to answer, one of transformers imports every model's code.
        dicts = [holder.value for holder, *_ in self._before if type(holder.value) in _DICTS]
        self._empty, self._dicts = [held for held in dicts if not held], [*filter(None, dicts)]
        self._keys = [*map(tuple, self._dicts)]
        self._items = [*chain.from_iterable(map(dict.values, self._dicts))]
        self._others = [each for each in self._before if type(each[0].value) not in _DICTS]

    def _changed(self) -> list[tuple[Holder, Sequence[Any], tuple[Any, ...]]]:
        now = chain.from_iterable(map(dict.values, self._dicts))
        as_before = not any(self._empty) and [*map(tuple, self._dicts)] == self._keys
        looked_at = self._others if as_before and all(map(operator.is_, now, self._items)) else self._before
        return [each for each in looked_at if not same(each[0].value, *each[1:])]

    def changed(self) -> list[Holder]:
        """Holders that contain something else now."""
        return [holder for holder, *_ in self._changed()]

    def items(self) -> Iterator[Any]:
        """What the holders contained then, but for data."""
        return chain.from_iterable(values for holder, _, values in self._before if not is_data(holder.value))

    def restore(self, wanted: Callable[[list[Any]], bool] = lambda new: True) -> list[Holder]:
        """Puts back what is not as it was, if what is new in it is to go. Returns what was not."""
        changed = self._changed()
        for holder, keys, values in changed:
            old, now = set(map(id, values)), contents(holder.value)
            if wanted([value for _, value in now if id(value) not in old]):
                new = (item for item in now if holder.grows and item[0] not in keys)
                put_back(holder.value, [*zip(keys, values), *new])
        return [holder for holder, *_ in changed]


def held_by_modules(module: nn.Module) -> Iterator[Holder]:
    """What the module and those in it hold besides tensors and modules, and what is inside it; each once.

    And the attributes of parameters: quantised ones, of other libraries' classes, may be set up in their first use.
    """
    seen: set[int] = set()
    for path, child in named_modules(module):
        for name, value in vars(child).items():
            if name not in MODULE_STATE and is_object(value):
                yield from _inside(f"{path or 'self'}.{name}", value, seen)
        for name, parameter in child._parameters.items():
            if parameter is not None and (is_of_other_library(parameter) or vars(parameter)):
                yield from _inside(f"{path or 'self'}.{name}", vars(parameter), seen)


def is_of_other_library(parameter: Any) -> bool:
    """Whether a parameter's class is neither torch's nor ours."""
    return type(parameter).__module__.partition(".")[0] not in ("torch", "hexa_fx")


def _inside(
    name: str, value: Any, seen: set[int], enters: Callable[[Any], bool] = is_object, most: int = 1 << 12
) -> Iterator[Holder]:
    """The value and what is inside it, as far as ``enters`` says, until ``most`` are ``seen``."""
    left: deque[tuple[int, str, Any]] = deque([(1, name, value)])
    while left and len(seen) < most:
        depth, label, holder = left.popleft()
        if id(holder) in seen:
            continue
        seen.add(id(holder))
        if not isinstance(holder, (tuple, frozenset)):
            yield Holder(label, holder)
        if depth < _DEEPEST and not is_data(holder):
            left.extend((depth + 1, _step(label, key), item) for key, item in contents(holder) if enters(item))


def _step(label: str, key: Any) -> str:
    return f"{label}.{key}" if isinstance(key, str) else f"{label}[{key}]"


def contents(holder: Any) -> list[tuple[Any, Any]]:
    """Keys and values. A class's and an object's are attributes."""
    if isinstance(holder, dict):
        return list(plain_kind(holder).items(holder))
    if isinstance(holder, (list, tuple, deque)):
        return list(enumerate(plain_kind(holder).__iter__(holder)))
    if isinstance(holder, (set, frozenset)):
        return [(id(item), item) for item in plain_kind(holder).__iter__(holder)]
    if isinstance(holder, types.CellType):
        return [("cell_contents", holder.cell_contents)] if holder != _EMPTY else []
    if isinstance(holder, type):
        found = list(vars(holder).items())
        # which copy.copy notes for itself
        return [item for item in found if item[0] != "__slotnames__"] if "__slotnames__" in vars(holder) else found
    return list(attributes(holder).items())


def taken(holder: Any) -> tuple[Sequence[Any], tuple[Any, ...]]:
    """Its keys and its values."""
    named = _by_name(holder)
    if named is not None:
        return tuple(named), tuple(named.values())
    if type(holder) is list:
        return range(len(holder)), tuple(holder)
    found = contents(holder)
    return tuple(key for key, _ in found), tuple(value for _, value in found)


def _by_name(holder: Any) -> Mapping[Any, Any] | None:
    """What `contents` lists of a plain or ordered dict, a class, or an object without slots."""
    if type(holder) in _DICTS:
        return holder  # type: ignore[no-any-return]
    if isinstance(holder, type):
        return vars(holder) if "__slotnames__" not in vars(holder) else None
    return None if is_collection(holder) or slots_of(holder) else getattr(holder, "__dict__", None)


def same(holder: Any, keys: Sequence[Any], values: tuple[Any, ...]) -> bool:
    """Whether it contains what it did, under the same keys. A number or text may be another equal object."""
    named = _by_name(holder)
    if named is not None and len(named) == len(keys):
        in_place = all(map(operator.is_, named, keys))
        if in_place and all(map(operator.is_, named.values(), values)):  # nearly always; a loop in Python takes long
            return True
    if type(holder) is list and len(holder) == len(values) and all(map(operator.is_, holder, values)):
        return True
    now = contents(holder)
    if len(values) != len(now) or not all(is_as(a, b) for a, (_, b) in zip(values, now)):
        return False
    if isinstance(holder, (list, tuple, deque, set, frozenset)):
        return True  # keys are places, or ids of equal items
    return all(a is b for a, (b, _) in zip(keys, now)) or set(keys) == {key for key, _ in now}


def is_as(one: Any, two: Any) -> bool:
    """Whether it is the same object, or an equal plain one, or a tuple of such."""
    if type(one) is tuple and type(two) is tuple:
        return len(one) == len(two) and all(map(is_as, one, two))
    return one is two or (isinstance(one, PLAIN) and type(one) is type(two) and one == two)


def put_back(holder: Any, before: list[tuple[Any, Any]]) -> None:
    """Has it contain again what `contents` gave."""
    if isinstance(holder, list):
        holder[:] = [value for _, value in before]
    elif isinstance(holder, (deque, set)):
        holder.clear()
        (holder.extend if isinstance(holder, deque) else holder.update)(value for _, value in before)
    elif isinstance(holder, type):
        _put_attributes_back(holder, dict(before))
    elif isinstance(holder, dict):
        _put_items_back(holder, dict(before))
    elif isinstance(holder, types.CellType):
        if before:
            holder.cell_contents = before[0][1]
        else:
            del holder.cell_contents
    else:
        _put_slots_back(holder, dict(before))


def _put_items_back(content: dict[Any, Any], before: dict[Any, Any]) -> None:
    kind = plain_kind(content)
    for key in [key for key in dict.keys(content) if key not in before]:
        kind.__delitem__(content, key)
    in_order = dict.__len__(content) == len(before) and all(map(operator.is_, kind.__iter__(content), before))
    for key, value in before.items():
        if not in_order and dict.__contains__(content, key):
            kind.__delitem__(content, key)
        kind.__setitem__(content, key, value)


def _put_slots_back(holder: Any, before: dict[str, Any]) -> None:
    slots = slots_of(holder)
    for name, slot in slots.items():
        if name in before:
            slot.__set__(holder, before[name])
        elif filling(slot, holder) is not MISSING:
            slot.__delete__(holder)
    if hasattr(holder, "__dict__"):
        _put_items_back(vars(holder), {name: value for name, value in before.items() if name not in slots})


def _put_attributes_back(cls: type, before: dict[str, Any]) -> None:
    for name in vars(cls).keys() - before.keys() - {"__slotnames__"}:
        delattr(cls, name)
    for name, value in before.items():
        if vars(cls).get(name) is not value and not isinstance(value, types.GetSetDescriptorType):
            setattr(cls, name, value)


_LISTS = (list, dict, set, deque)
_DICTS = (dict, OrderedDict)
_EMPTY = types.CellType()
_HOOKS = tuple(name for name in vars(nn.Module()) if name.endswith("_hooks"))


class Sandbox:
    """Lists, dicts and objects that modules hold and that lie behind global names of their code, as they are before a run, and all
    that their hooks keep and count in.

    A context, at whose end it puts all of it back. What runs put into globals is taken out if it holds tensors of theirs; caches
    and counters there stay, as after any call.
    """

    def __init__(self, root: nn.Module) -> None:
        held = [*held_by_modules(root)]
        registries = (getattr(module, name, None) or {} for module in modules_of(root) for name in _HOOKS)
        hooks = [hook for registry in registries for hook in registry.values()]
        parts = [*{id(part): part for hook in hooks for part in _parts_of(hook)}.values()]
        modules = [*{id(m): m for part in parts if isinstance(part, nn.Module) for m in modules_of(part)}.values()]
        functions = [part for part in parts if isinstance(part, types.FunctionType)]
        counting = [part for part in parts if is_object(part) or isinstance(part, type)]
        counting += [*map(vars, functions), *chain.from_iterable(map(_cells_of, hooks))]
        inside = (item for each in (*modules, *counting) for item in contents(each) if item[0] not in MODULE_STATE)
        lists = [inner for _, inner in inside if type(inner) in _LISTS]
        of_hooks = (Holder("a hook", value) for value in (*counting, *lists))
        # of modules nothing else: they may be some of the tree, which get rewritten forwards later
        self._numbers = [(vars(module), _numbers_in(vars(module))) for module in modules]
        self._held = Contents([*held, *of_hooks, *_of_outside_modules(root, held)])
        users = [f.__globals__ for f in functions if is_users(module_name(f.__globals__))]
        self._global = Contents(_behind_names({id(each): each for each in (*namespaces_of(root), *users)}.values()))

    def __enter__(self) -> Sandbox:
        return self

    def __exit__(self, *error: object) -> None:
        self.restore()

    def restore(self) -> None:
        """Puts everything back."""
        self._global.restore(lambda new: any(map(is_result, new)))
        self._held.restore()
        for own, before in self._numbers:
            for name in _numbers_in(own).keys() - before.keys():
                del own[name]
            own.update(before)


def namespaces_of(root: nn.Module) -> list[dict[str, Any]]:
    """Globals of the user modules whose functions run inside a module tree."""
    found: dict[int, dict[str, Any]] = {}
    classes = {cls: None for kind in {type(module): None for module in modules_of(root)} for cls in kind.__mro__}
    for member in [member for cls in classes for member in vars(cls).values()]:
        function = getattr(member, "__func__", member)
        for candidate in (function, getattr(function, "__wrapped__", None)):
            namespace = getattr(candidate, "__globals__", None)
            if namespace is not None and module_name(namespace).split(".")[0] not in ("torch", "builtins"):
                found[id(namespace)] = namespace
    return list(found.values())


def _cells_of(hook: Any) -> Sequence[types.CellType]:
    return [*(getattr(getattr(hook, "__func__", hook), "__closure__", None) or ())]


def _parts_of(hook: Any) -> Iterator[Any]:
    """A hook's function or object, and what it goes by: what it is bound to, closes over, has as defaults or in a partial."""
    while isinstance(hook, functools.partial):
        yield from (*hook.args, *hook.keywords.values())
        hook = hook.func
    function = getattr(hook, "__func__", hook)
    yield from (function, getattr(hook, "__self__", None))
    yield from (cell.cell_contents for cell in _cells_of(hook) if cell != _EMPTY)
    yield from (
        *(getattr(function, "__defaults__", None) or ()),
        *(getattr(function, "__kwdefaults__", None) or {}).values(),
    )


def _behind_names(namespaces: Iterable[dict[str, Any]]) -> Iterator[Holder]:
    """The namespaces, the lists, dicts, classes of the user's and their objects in them, and all but classes inside these."""
    seen: set[int] = set()
    for namespace in namespaces:
        yield Holder(f"the globals of {module_name(namespace).rpartition('.')[2]}", namespace)
        for name, value in namespace.copy().items():
            kind = value if isinstance(value, type) else type(value)
            if name.startswith("__") or id(value) in seen or not (kind is value or is_object(value)):
                continue
            if not is_data(value) and (isinstance(value, _LISTS) or is_users(kind.__module__)):
                yield from _inside(name, value, seen, _may_keep_results, len(seen) + _INSIDE_ONE)


def _may_keep_results(value: Any) -> bool:
    return is_object(value) and (type(value) in _LISTS or is_users(type(value).__module__))


def _of_outside_modules(root: nn.Module, held: Iterable[Holder]) -> Iterator[Holder]:
    """What modules hold that the tree knows but does not own, such as a model in a list that hides it from torch."""
    seen = set(map(id, modules_of(root)))
    for holder in held:
        for key, other in () if is_data(holder.value) else contents(holder.value):
            if isinstance(other, nn.Module) and id(other) not in seen:
                seen.add(id(other))
                yield Holder(f"{holder.label}.{key}", vars(other))
                lists = ((name, inner) for name, inner in vars(other).items() if name not in MODULE_STATE)
                yield from (
                    Holder(f"{holder.label}.{key}.{name}", inner) for name, inner in lists if type(inner) in _LISTS
                )


def _numbers_in(own: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in own.items() if isinstance(value, (torch.Tensor, *LITERALS))}


def is_result(value: Any, kinds: tuple[type, ...] = (torch.Tensor,)) -> bool:
    """Whether a value is of one of these kinds and no parameter, or a short list or dict of such."""
    inside = value if isinstance(value, (list, tuple)) else list(value.values()) if type(value) is dict else ()
    of_kind = isinstance(value, kinds) and not isinstance(value, nn.Parameter)
    return of_kind or any(is_result(item, kinds) for item in inside[:16])
