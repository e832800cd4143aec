"""A block beside the user's one, on the same weights, that may be analysed while others run the original.

Trial runs set attributes, write to buffers, and put random numbers in place of constant parameters. In a shadow all of that happens
to other modules, and to copies of small tensors; large weights are shared, and are read only.
"""

from __future__ import annotations

import copy
import functools
import inspect
import operator
import types
import weakref
from collections.abc import Callable, Iterable, Mapping
from itertools import islice
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from hexa_fx.isolation.lookup import getattr_plain, is_collection, is_data, is_object, step
from hexa_fx.isolation.module_tree import named_modules, referenced

_OWN_DICTS = tuple(name for name, value in vars(nn.Module()).items() if isinstance(value, dict))
"""Hooks, parameters, buffers and modules."""
_COPIED_BYTES = 1 << 20
"""Of a single tensor that is copied."""
_REFERRING = (nn.Module, list, tuple, dict, types.MethodType)
"""Attributes by which an object may refer to modules without another object in between."""
FORWARD, REPLICATE = "forward", "_replicate_for_data_parallel"
INSIDE_HOOK = "_old_forward"
"""Where accelerate keeps the forward that it calls once it has brought the weights, or the inputs, to where they are needed."""

PUT_ON = (FORWARD, INSIDE_HOOK, REPLICATE)
"""Names of attributes of a module's instance under which a rewritten forward may lie."""
_OF_OTHERS = ("_hf_hook", INSIDE_HOOK)
"""What accelerate puts on a module whose weights it brings for a call: they are there while the block runs."""


def take_off(block: nn.Module, forward: Any, original: Any) -> None:
    """Puts ``original`` in the place of ``forward``: what the instance had of its own before, if anything."""
    own = block.__dict__
    own.pop(REPLICATE, None)
    for slot in (FORWARD, INSIDE_HOOK):
        if own.get(slot) is forward:
            del own[slot]
            if slot == INSIDE_HOOK:
                own[slot] = type(block).forward.__get__(block)
            elif original is not None:
                own[slot] = original


class SignatureOfOriginal:
    """Descriptor that gives a `HexaForward` the ``inspect.signature`` of the forward it stands for."""

    def __get__(self, instance: Any, owner: type) -> inspect.Signature | None:
        if instance is None:
            return None
        return inspect.signature(instance.own_forward or type(instance.module).forward.__get__(instance.module))


class NoGlobals:
    """``__globals__`` of a rewritten forward: `torch.jit.script` asks for it before it compiles a function's code."""

    def __get__(self, forward: object, owner: type) -> NoReturn:
        raise AttributeError(
            "a forward that hexa_fx rewrote has no Python code of its own for torch.jit.script; call hexa_fx.undo_ on the model "
            "first, or use torch.jit.trace, torch.export or torch.compile, which take it"
        )


class InPlace:
    """What stands in place of a module's forward, of which a shadow has what was there before.

    It refers to the module weakly, which owns it, and keeps the forward that the instance had of its own.
    """

    own_forward: Callable[..., Any] | None
    """The forward that the instance had of its own; None if it had the class's."""
    _module: weakref.ref[nn.Module]
    __signature__ = SignatureOfOriginal()
    __globals__ = NoGlobals()

    @property
    def module(self) -> nn.Module:
        """The user's module; raises `ReferenceError` once it is gone."""
        return referenced(self._module)

    def is_copied(self, memo: Mapping[int, Any]) -> bool:
        """Whether the module is among the objects, by id, that were copied so far."""
        return id(self._module()) in memo

    def replica(self) -> nn.Module:
        """What `torch.nn.DataParallel` makes of the module for another device: it runs its own code, on its own weights."""
        module: Any = self.module
        made: nn.Module = type(module)._replicate_for_data_parallel(module)
        take_off(made, self, self.own_forward)
        return made

    def reads_under(self) -> set[str]:
        """Names of attributes of the module that are there for this alone."""
        return set()

    @property
    def __code__(self) -> types.CodeType:
        """The original's code object, after which torch.export names its trace."""
        code: types.CodeType = getattr(self.own_forward or type(self.module).forward, "__code__", _NO_CODE)
        return code


_NO_CODE = InPlace.module.fget.__code__  # type: ignore[attr-defined]


def shadow_of(block: nn.Module, left: frozenset[str], forward: Any = None) -> nn.Module:
    """A tree of modules of the same classes, which hold what the modules of ``block`` hold.

    Args:
        left: names of attributes of ``block`` that are left out: what `hexa_fx` put there.
        forward: that of the instance, if it has one of its own.
    """
    modules = [module for _, module in named_modules(block)]
    shadows: dict[int, Any] = {
        id(m): m if isinstance(m, torch.jit.ScriptModule) else object.__new__(type(m)) for m in modules
    }
    tensors: dict[int, Tensor] = {}
    for module in modules:
        if (shadow := shadows[id(module)]) is module:
            continue
        held = dict(vars(module))
        for name in _OWN_DICTS:
            held[name] = type(held[name])(held[name])
        held["_modules"] = type(held["_modules"])((k, shadows.get(id(v), v)) for k, v in held["_modules"].items())
        for name in held["_parameters"].keys() & held.keys():  # FSDP1 lays what a call reads over parameters
            held["_parameters"][name] = held.pop(name)
        for registry in ("_parameters", "_buffers"):
            for name, tensor in held[registry].items():
                if tensor is not None and id(tensor) not in tensors:
                    beside = _beside(tensor)
                    if registry == "_parameters" and type(beside) is Tensor:
                        beside = nn.Parameter(beside.detach(), tensor.requires_grad)
                    tensors[id(tensor)] = beside
                held[registry][name] = None if tensor is None else tensors[id(tensor)]
        hooked = FORWARD if INSIDE_HOOK in held else ""
        without = {*_OF_OTHERS, hooked, *(left if module is block else ())}
        without.update(*(value.reads_under() for value in held.values() if isinstance(value, InPlace)))
        if isinstance(in_place := held.get("forward"), InPlace):
            held["forward"] = in_place.own_forward
            without |= {REPLICATE, "forward" if in_place.own_forward is None else ""}
        for name in held.keys() - without:
            shadow.__dict__[name] = held[name] if name in _OWN_DICTS else rebound(held[name], shadows)
        if module is block and forward is not None:
            shadow.__dict__["forward"] = rebound(forward, shadows)
    found: nn.Module = shadows[id(block)]
    return found


def put_apart(shadow: nn.Module, numbers: Iterable[str]) -> None:
    """Gives a shadow copies of the user's objects that hold these numbers, by dotted name: an analysis puts others there."""
    copies: dict[int, Any] = {}
    for steps in (name.split(".")[:-1] for name in numbers):
        holder: Any = shadow
        for key in steps:
            value = step(holder, key)
            if not isinstance(value, nn.Module):
                value = vars(holder)[key] = copies.setdefault(id(value), copy.copy(value))
                copies[id(value)] = value
            holder = value
    for own in map(vars, shadow.modules() if copies else ()):
        own.update((key, copies[id(value)]) for key, value in [*own.items()] if id(value) in copies)


def _beside(tensor: Tensor) -> Tensor:
    """A small tensor's copy; a large one itself."""
    if type(tensor) not in (Tensor, nn.Parameter) or tensor.numel() * tensor.element_size() > _COPIED_BYTES:
        return tensor
    copied = tensor.detach().clone(memory_format=torch.preserve_format)
    made = nn.Parameter(copied, tensor.requires_grad) if type(tensor) is nn.Parameter else copied
    made.__dict__.update(vars(tensor))
    return made


def rebound(value: Any, shadows: dict[int, Any]) -> Any:
    """An attribute of a shadow: modules of the tree, in lists, in functions and as what methods are bound to, are their
    ``shadows``, by id."""
    if isinstance(value, nn.Module):
        return shadows.get(id(value), value)
    if is_data(value):
        return value
    if type(value) in (list, tuple) and any(isinstance(item, nn.Module) for item in value):
        return type(value)(rebound(item, shadows) for item in value)
    if type(value) is dict and any(isinstance(item, nn.Module) for item in value.values()):
        return {key: rebound(item, shadows) for key, item in value.items()}
    if isinstance(value, types.MethodType) and id(value.__self__) in shadows:
        return types.MethodType(value.__func__, shadows[id(value.__self__)])
    if isinstance(value, InPlace):
        own = value.own_forward or types.MethodType(type(value.module).forward, value.module)
        return rebound(own, shadows)
    if type(value) is functools.partial:
        func, *given = now = [rebound(each, shadows) for each in (value.func, *value.args)]
        same = all(map(operator.is_, now, (value.func, *value.args)))
        return value if same else functools.partial(func, *given, **value.keywords)
    if isinstance(value, types.FunctionType):
        return _wrapper_rebound(value, shadows)
    return _object_rebound(value, shadows) if is_object(value) and not is_collection(value) else value


def _object_rebound(holder: Any, shadows: dict[int, Any]) -> Any:
    """An object that a module holds, such as one that runs its experts: a copy of it if it refers to modules of the tree itself."""
    if id(holder) in shadows:
        return shadows[id(holder)]
    shadows[id(holder)] = holder
    own = getattr_plain(holder)
    direct = {name: item for name, item in own.items() if isinstance(item, _REFERRING)}
    now = {name: rebound(item, shadows) for name, item in direct.items()}
    if any(now[name] is not item for name, item in direct.items()):
        shadows[id(holder)] = copy.copy(holder)
        getattr_plain(shadows[id(holder)]).update(now)
    return shadows[id(holder)]


def _wrapper_rebound(wrapper: types.FunctionType, shadows: dict[int, Any]) -> Any:
    """A function that a module's attribute holds, such as one put around its forward, with what it closes over rebound."""
    if id(wrapper) in shadows:  # it closes over itself
        return shadows[id(wrapper)]
    shadows[id(wrapper)] = wrapper
    cells, defaults, named = wrapper.__closure__ or (), wrapper.__defaults__ or (), wrapper.__kwdefaults__ or {}
    held = [*(cell.cell_contents for cell in cells if cell != _EMPTY), *defaults, *named.values()]
    now = [rebound(each, shadows) for each in held]
    if all(map(operator.is_, now, held)):
        return wrapper
    left = iter(now)
    closure = tuple(cell if cell == _EMPTY else types.CellType(next(left)) for cell in cells) or None
    made = types.FunctionType(wrapper.__code__, wrapper.__globals__, wrapper.__name__, None, closure)
    made.__defaults__ = tuple(islice(left, len(defaults))) or None
    made.__kwdefaults__ = dict(zip(named, left)) or None
    functools.update_wrapper(made, wrapper)
    made.__dict__ = dict(vars(wrapper))  # `__wrapped__` would say that it is another function
    shadows[id(wrapper)] = made
    return made


_EMPTY = types.CellType()
