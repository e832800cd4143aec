"""What code of a module tree may leave outside of its modules' attributes, saved before trial runs and taken back after them."""

from __future__ import annotations

import functools
import types
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from hexa_fx.isolation.contents import Contents, Holder, contents, held_by_modules, is_of_other_library
from hexa_fx.isolation.held_objects import MODULE_STATE, is_object
from hexa_fx.isolation.module_tree import modules_of, named_tensors
from hexa_fx.isolation.purity import is_users, module_name
from hexa_fx.torch_private import is_traceable_wrapper_subclass

_LISTS = (list, dict, set, deque)
_MOST = 256
_HOOKS = tuple(name for name in vars(nn.Module()) if name.endswith("_hooks"))


class Sandbox:
    """Lists, dicts and objects that modules hold and that lie behind global names of their code, as they are before a run.

    What runs put into globals is taken out if it holds tensors of theirs; caches and counters there stay, as after any call.

    Args:
        root: of the modules that will run.
    """

    def __init__(self, root: nn.Module) -> None:
        held = [*held_by_modules(root)]
        self._held = Contents([*held, *_of_outside_modules(root, held)])
        hooks = [*_hooks_of(root)]
        self._global = Contents([*_behind_names(_all_namespaces(root, hooks)), *_kept_by(hooks)])
        self._codes = [(p, p.data) for p in named_tensors(root, "_parameters").values() if _holds_codes(p)]

    def restore(self) -> None:
        """Puts everything back."""
        self._global.restore(_has_results)
        self._held.restore()
        for parameter, data in self._codes:
            if (parameter.data_ptr(), parameter.shape) != (data.data_ptr(), data.shape):
                parameter.data = data


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


def _hooks_of(root: nn.Module) -> Iterator[Any]:
    """Functions, or objects that are called, that modules have as hooks."""
    for module in modules_of(root):
        for name in _HOOKS:
            for hook in getattr(module, name).values() if getattr(module, name, None) else ():
                while isinstance(hook, functools.partial):
                    hook = hook.func
                yield hook


def _all_namespaces(root: nn.Module, hooks: Iterable[Any]) -> list[dict[str, Any]]:
    functions = [getattr(hook, "__func__", hook) for hook in hooks]
    of_hooks = [function.__globals__ for function in functions if isinstance(function, types.FunctionType)]
    users = [namespace for namespace in of_hooks if is_users(module_name(namespace))]
    return list({id(namespace): namespace for namespace in (*namespaces_of(root), *users)}.values())


def _kept_by(hooks: Iterable[Any]) -> Iterator[Holder]:
    """The objects that hooks are methods of, what is in their closures, and the lists and dicts in these."""
    for hook in hooks:
        cells = [cell.cell_contents for cell in getattr(hook, "__closure__", None) or ()]
        for value in (getattr(hook, "__self__", None), *cells):
            if value is not None and is_object(value):
                yield Holder("a hook", value)
                yield from (Holder("a hook", inner) for _, inner in contents(value) if type(inner) in _LISTS)


def _behind_names(namespaces: Iterable[dict[str, Any]]) -> Iterator[Holder]:
    """The namespaces, the lists, dicts, classes of the user's and their objects in them, and the lists and dicts in these."""
    seen: set[int] = set()
    for namespace in namespaces:
        yield Holder(f"the globals of {module_name(namespace).rpartition('.')[2]}", namespace)
        for name, value in namespace.copy().items():
            kind = value if isinstance(value, type) else type(value)
            if name.startswith("__") or id(value) in seen or not (kind is value or is_object(value)):
                continue
            if not (isinstance(value, _LISTS) or is_users(kind.__module__)):
                continue
            seen.add(id(value))
            yield Holder(name, value)
            held = contents(value)
            inside = [(key, inner) for key, inner in held if type(inner) in _LISTS and id(inner) not in seen]
            for key, inner in inside if len(held) <= _MOST else ():
                seen.add(id(inner))
                yield Holder(f"{name}.{key}", inner)


def _of_outside_modules(root: nn.Module, held: Iterable[Holder]) -> Iterator[Holder]:
    """What modules hold that the tree knows but does not own, such as a model in a list that hides it from torch."""
    seen = set(map(id, modules_of(root)))
    for holder in held:
        for key, other in contents(holder.value):
            if isinstance(other, nn.Module) and id(other) not in seen:
                seen.add(id(other))
                yield Holder(f"{holder.label}.{key}", vars(other))
                lists = ((name, inner) for name, inner in vars(other).items() if name not in MODULE_STATE)
                yield from (
                    Holder(f"{holder.label}.{key}.{name}", inner) for name, inner in lists if type(inner) in _LISTS
                )


def _holds_codes(parameter: torch.Tensor) -> bool:
    """Whether a parameter is of a class of its own on plain memory, which a quantiser may lay out anew in its first use."""
    return is_of_other_library(parameter) and not parameter.is_meta and not is_traceable_wrapper_subclass(parameter)


def _has_results(new: list[Any]) -> bool:
    return any(map(_is_result, new))


def _is_result(value: Any) -> bool:
    """Whether a value is a tensor, or a short list or dict of such."""
    inside = value if isinstance(value, (list, tuple)) else list(value.values()) if type(value) is dict else ()
    return isinstance(value, torch.Tensor) or any(map(_is_result, inside[:16]))
