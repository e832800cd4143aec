"""Runs unmodified code on real tensors and writes down what happened as a straight-line `torch.fx.Graph`.

Symbolic tracers fail on real MoE code because its loops are host-side and depend on data. Here the code runs as it is, under a
`TorchFunctionMode`; every call becomes a node that keeps the value it had in ``node.meta``. The graph holds one routing, so it
is for understanding the block, never for running it in its place.

Node metadata (all under ``node.meta["hexa"]`` as a `NodeRecord`): value snapshot, module scope, source line, whether the node
writes in place, the storage it lives in, and whether the host took a decision on it.
"""

from __future__ import annotations

import dataclasses
import operator
import sys
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.fx
from torch.overrides import TorchFunctionMode

from hexa_fx.capture import functional
from hexa_fx.capture.symint import SYMBOLIC, SymbolicSize, plain, wrap
from hexa_fx.ir import SourceLocation


@dataclass
class NodeRecord:
    """What the run knew about a node."""

    value: Any
    scope: str = ""
    location: SourceLocation | None = None
    writes: bool = False
    storage: int | None = None
    decision: bool = False
    gradient: bool = True
    """Whether the code lets gradients through: False under its own ``no_grad``."""


def record_of(node: torch.fx.Node) -> NodeRecord:
    record: NodeRecord = node.meta["hexa"]
    return record


@dataclass(frozen=True)
class ModuleCall:
    """A submodule's forward inside the run: its arguments and results as graph nodes, and the nodes it covers."""

    path: str
    start: int
    end: int
    args: Any
    kwargs: Any
    output: Any


_METADATA = frozenset(
    "dtype device layout is_cuda requires_grad ndim is_cpu is_leaf grad_fn is_sparse is_quantized is_meta names "
    "is_mps itemsize is_xpu is_mkldnn grad _base _version output_nr is_nested nbytes".split()
)
_UNRECORDED = frozenset(
    "is_grad_enabled dim is_floating_point is_contiguous data_ptr stride element_size get_device __repr__ "
    "__format__ __hash__ is_complex storage_offset untyped_storage is_autocast_enabled get_autocast_dtype "
    "requires_grad_ finfo is_inference ndimension are_deterministic_algorithms_enabled is_signed is_same_size "
    "_is_view is_pinned __set__ __delete__ register_hook".split()
)
_DECISIONS = frozenset("__bool__ __int__ __float__ __index__ __contains__ item tolist numpy __array__".split())
_OPERATORS = {
    "__getitem__": operator.getitem,
    "__setitem__": functional.set_item,
    "__add__": operator.add,
    "__sub__": operator.sub,
    "__mul__": operator.mul,
    "__truediv__": operator.truediv,
    "__floordiv__": operator.floordiv,
    "__matmul__": operator.matmul,
    "__neg__": operator.neg,
    "__and__": operator.and_,
    "__or__": operator.or_,
    "__invert__": operator.invert,
    "__eq__": operator.eq,
    "__ne__": operator.ne,
    "__lt__": operator.lt,
    "__le__": operator.le,
    "__gt__": operator.gt,
    "__ge__": operator.ge,
    "__iadd__": operator.iadd,
    "__isub__": operator.isub,
    "__imul__": operator.imul,
    "__itruediv__": operator.itruediv,
    "__ior__": operator.ior,
    "__iand__": operator.iand,
}


@dataclass
class Recorder(TorchFunctionMode):
    """The recording mode. `hexa_fx.capture.record.capture` is the way in."""

    parameters: dict[str, torch.Tensor]
    graph: torch.fx.Graph = field(default_factory=torch.fx.Graph)
    constants: dict[str, torch.Tensor] = field(default_factory=dict)
    calls: list[ModuleCall] = field(default_factory=list)
    sees_gradients: bool = True
    """Whether the run is made with gradients, so that the code's own ``no_grad`` shows."""

    def __post_init__(self) -> None:
        super().__init__()
        self.scopes = [""]
        self.count = 0
        self._node_of: dict[int, torch.fx.Node] = {}
        self._index: dict[torch.fx.Node, int] = {}
        self._keep: list[torch.Tensor] = []  # an id() stays unique only while its tensor lives
        self._written: dict[
            int, tuple[torch.fx.Node, int]
        ] = {}  # storage -> last write, id of the tensor written through
        self._parameter_name = {id(tensor): name for name, tensor in self.parameters.items()}
        self._parameter_storages = {_storage(tensor) for tensor in self.parameters.values()}
        self.inside_function = 0
        """Depth in the forward of an `autograd.Function`, where torch turns gradients off."""
        self.met: dict[str, int] = {}
        """For every constant, the id of the tensor it was read from."""

    # -- nodes ---------------------------------------------------------------------------------------------------------

    def add(self, op: str, target: Any, args: Any, kwargs: Any, value: Any, name: str | None = None) -> torch.fx.Node:
        node = self.graph.create_node(op, target, args, kwargs, name)
        storage = _storage(value) if isinstance(value, torch.Tensor) else None
        gradient = torch.is_grad_enabled() or not self.sees_gradients or self.inside_function > 0
        node.meta["hexa"] = NodeRecord(
            self._snapshot(value), self.scopes[-1], _user_location(), storage=storage, gradient=gradient
        )
        self._index[node] = self.count
        self.count += 1
        return node

    def record_call(self, function: Any, args: tuple[Any, ...], value: Any) -> torch.fx.Node:
        """A call on symbolic numbers."""
        return self.add("call_function", function, args, {}, value)

    def note_decision(self, node: torch.fx.Node | None, value: Any) -> None:
        """The host reads ``node`` as a plain value, so the rest of the trace depends on it."""
        if node is not None:
            record_of(node).decision = True

    def placeholder(self, name: str, tensor: torch.Tensor) -> torch.fx.Node:
        node = self.add("placeholder", name, (), {}, tensor)
        self._bind(tensor, node)
        return node

    def _snapshot(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        detached = value.detach()
        return detached if _storage(value) in self._parameter_storages else detached.clone()

    def _bind(self, tensor: torch.Tensor, node: torch.fx.Node) -> None:
        self._node_of[id(tensor)] = node
        self._keep.append(tensor)

    def _node_for(self, tensor: torch.Tensor) -> torch.fx.Node:
        node = self._node_of.get(id(tensor))
        if node is None:
            node = self._introduce(tensor)
        written = self._written.get(_storage(tensor))
        if written is None or self._index[written[0]] <= self._index[node] or written[1] == id(tensor):
            return node
        read = self.add("call_function", functional.after, (node, written[0]), {}, tensor)
        self._bind(tensor, read)
        return read

    def _introduce(self, tensor: torch.Tensor) -> torch.fx.Node:
        """A tensor met for the first time: a parameter or buffer of the block, else a constant of the code."""
        name = self._parameter_name.get(id(tensor))
        if name is None:
            name = f"_constant_{len(self.constants)}"
            self.constants[name] = tensor.detach().clone()
            self.met[name] = id(tensor)
        node = self.add("get_attr", name, (), {}, tensor)
        self._bind(tensor, node)
        return node

    # -- arguments and results -----------------------------------------------------------------------------------------

    def lift(self, value: Any) -> Any:
        """``value`` with tensors and symbolic numbers replaced by their nodes."""
        if isinstance(value, torch.Tensor):
            return self._node_for(value)
        if isinstance(value, SYMBOLIC):
            return value.node.argument()
        if isinstance(value, slice):
            return slice(self.lift(value.start), self.lift(value.stop), self.lift(value.step))
        if isinstance(value, dict):
            return {key: self.lift(item) for key, item in value.items()}
        if isinstance(value, list):
            return [self.lift(item) for item in value]
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return type(value)(*(self.lift(item) for item in value))
        if isinstance(value, tuple):
            return tuple(self.lift(item) for item in value)
        return _TYPE_AS_DTYPE.get(value, value) if isinstance(value, type) else value

    def lift_result(self, result: Any) -> Any:
        """As `lift`; a dataclass, or a mapping with a class of its own, is made by a node that calls its class."""
        if dataclasses.is_dataclass(result) and not isinstance(result, type):
            fields = {field.name: getattr(result, field.name) for field in dataclasses.fields(result) if field.init}
        elif isinstance(result, dict) and type(result) is not dict:
            fields = dict(result)
        else:
            return self.lift(result)
        return self.add("call_function", type(result), (), self.lift(fields), result)

    def _wrap_result(self, result: Any, node: torch.fx.Node) -> Any:
        if isinstance(result, torch.Tensor):
            self._bind(result, node)
            return result
        if isinstance(result, (tuple, list)) and not isinstance(result, torch.Size):
            items = [self._wrap_item(item, node, index) for index, item in enumerate(result)]
            return type(result)(items)
        return result

    def _wrap_item(self, item: Any, node: torch.fx.Node, index: int) -> Any:
        if not isinstance(item, (torch.Tensor, tuple, list)):
            return item
        return self._wrap_result(item, self.add("call_function", operator.getitem, (node, index), {}, item))

    def _wrap_numbers(self, value: Any, node: torch.fx.Node) -> Any:
        """The result of ``item()`` or ``tolist()`` as symbolic numbers."""
        if isinstance(value, list):
            items = (self.add("call_function", operator.getitem, (node, i), {}, item) for i, item in enumerate(value))
            return [self._wrap_numbers(item, child) for item, child in zip(value, items)]
        return value if isinstance(value, (bool, complex)) else wrap(value, node, self)

    def record_leaf(self, function: Any, args: Any, kwargs: Any) -> Any:
        """Calls ``function`` and records it as one node, whatever it calls itself."""
        with torch._C.DisableTorchFunction():
            lifted_args, lifted_kwargs = self.lift(tuple(args)), self.lift(kwargs)
            result = function(*_strip(tuple(args)), **_strip(kwargs))
            return self._wrap_result(result, self.add("call_function", function, lifted_args, lifted_kwargs, result))

    # -- the mode ------------------------------------------------------------------------------------------------------

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name == "__get__":
            return self._read_property(func, args)
        plain_args, plain_kwargs = _strip(args), _strip(kwargs)
        if _is_bookkeeping(func, name, plain_args, plain_kwargs):
            return func(*plain_args, **plain_kwargs)
        if name in _SYMBOLIC_FUNCTIONS:
            return self._number_function(_SYMBOLIC_FUNCTIONS[name], args)
        if name in ("size", "numel", "nelement", "__len__"):
            return self._read_size(func, name, args, kwargs, plain_args, plain_kwargs)
        if name in _DECISIONS:
            return self._decide(func, name, args, plain_args, plain_kwargs)
        return self._call(func, name, args, kwargs, plain_args, plain_kwargs)

    def _read_property(self, func: Any, args: Any) -> Any:
        attribute = getattr(getattr(func, "__self__", None), "__name__", "")
        value = func(*args)
        if attribute == "shape":
            return self._size(args[0], value)
        if attribute in _METADATA or not isinstance(value, torch.Tensor):
            return value
        node = self.add("call_function", getattr, (self.lift(args[0]), attribute), {}, value)
        return self._wrap_result(value, node)

    def _size(self, tensor: torch.Tensor, value: torch.Size) -> SymbolicSize:
        base = self.lift(tensor)
        return SymbolicSize(
            wrap(n, self.add("call_method", "size", (base, d), {}, n), self) for d, n in enumerate(value)
        )

    def _read_size(self, func: Any, name: str, args: Any, kwargs: Any, plain_args: Any, plain_kwargs: Any) -> Any:
        value = func(*plain_args, **plain_kwargs)
        if isinstance(value, torch.Size):
            return self._size(args[0], value)
        if name == "__len__":
            node = self.add("call_method", "size", (self.lift(args[0]), 0), {}, value)
            self.note_decision(node, value)
            return value
        node = self.add("call_method", name, self.lift(args), self.lift(kwargs), value)
        return wrap(value, node, self)

    def _number_function(self, function: Any, args: Any) -> Any:
        value = function(*[plain(item) for item in args])
        return wrap(value, self.record_call(function, tuple(self.lift(item) for item in args), value), self)

    def _decide(self, func: Any, name: str, args: Any, plain_args: Any, plain_kwargs: Any) -> Any:
        value = func(*plain_args, **plain_kwargs)
        kept = value if name in ("item", "tolist", "__bool__") else None
        node = self.add("call_method", name, self.lift(args[:1]), {}, kept)
        if name != "item":  # an item stays symbolic; what the host does with it is noted when it does it
            self.note_decision(node, value)
        return self._wrap_numbers(value, node) if name in ("item", "tolist") else value

    def _call(self, func: Any, name: str, args: Any, kwargs: Any, plain_args: Any, plain_kwargs: Any) -> Any:
        lifted_args, lifted_kwargs = self.lift(tuple(args)), self.lift(kwargs)
        result = func(*plain_args, **plain_kwargs)
        if isinstance(result, torch.Size):
            return result
        op, target = _fx_target(func, name)
        written = _written_tensor(name, plain_args, plain_kwargs, result)
        node = self.add(op, target, lifted_args, lifted_kwargs, result if written is None else written)
        if name == "unbind":  # also what iterating over a tensor calls: the host now knows how many rows there are
            self.note_decision(node, len(result))
        if written is not None:
            return self._note_write(written, node, result)
        if isinstance(result, (bool, int, float)):
            self.note_decision(node, result)
            return result
        return self._wrap_result(result, node)

    def _note_write(self, written: torch.Tensor, node: torch.fx.Node, result: Any) -> Any:
        record_of(node).writes = True
        self._bind(written, node)
        self._written[_storage(written)] = (node, id(written))
        return result


_SYMBOLIC_FUNCTIONS = {"sym_float": float, "sym_int": int, "sym_max": max, "sym_min": min, "sym_not": operator.not_}
# Weak: a stand-in belongs to one recording and holds it, and with it the block's parameters.
_TYPE_AS_DTYPE: WeakKeyDictionary[type, torch.dtype] = WeakKeyDictionary(
    {bool: torch.bool, float: torch.float64, int: torch.int64}
)


def register_type_alias(alias: type, dtype: torch.dtype) -> None:
    """Lets a stand-in for a Python type be given as ``dtype=``."""
    _TYPE_AS_DTYPE[alias] = dtype


def _storage(tensor: torch.Tensor) -> int:
    """Identity of the memory. An empty tensor has none of its own; a negative id keeps it apart."""
    pointer = tensor.untyped_storage().data_ptr() if tensor.device.type != "meta" else 0
    return pointer or -id(tensor)


def _strip(value: Any) -> Any:
    """Symbolic numbers back to plain ones, for the call that is really made."""
    if isinstance(value, SYMBOLIC):
        return value.node.value
    if isinstance(value, slice):
        return slice(_strip(value.start), _strip(value.stop), _strip(value.step))
    if isinstance(value, dict):
        return {key: _strip(item) for key, item in value.items()}
    if isinstance(value, SymbolicSize):
        return tuple(_strip(item) for item in value)
    if type(value) in (tuple, list, torch.Size):
        return type(value)(_strip(item) for item in value)
    return value


def _is_bookkeeping(func: Any, name: str, args: Any, kwargs: Any) -> bool:
    """Calls that neither compute a tensor nor decide anything."""
    if name in _UNRECORDED or "set_grad" in name or "autocast" in name:
        return True
    if _holds_tensor(args) or _holds_tensor(kwargs):
        return False
    return not hasattr(torch, name) and not hasattr(torch.nn.functional, name)


def _holds_tensor(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return True
    if isinstance(value, dict):
        return any(_holds_tensor(item) for item in value.values())
    return isinstance(value, (tuple, list)) and any(_holds_tensor(item) for item in value)


def _fx_target(func: Any, name: str) -> tuple[str, Any]:
    if name in _OPERATORS:
        return "call_function", _OPERATORS[name]
    if getattr(torch.Tensor, name, None) is func:
        return "call_method", name
    return "call_function", func


def _written_tensor(name: str, args: Any, kwargs: Any, result: Any) -> torch.Tensor | None:
    """The tensor a call wrote into, if it is one of the in-place forms."""
    if isinstance(kwargs.get("out"), torch.Tensor):
        return kwargs["out"]  # type: ignore[no-any-return]
    if not args or not isinstance(args[0], torch.Tensor):
        return None
    target: torch.Tensor = args[0]
    in_place_name = name.endswith("_") and not name.endswith("__")
    in_place_operator = name.startswith("__i") and name not in ("__invert__", "__index__", "__int__")
    returns_target = result is target and (in_place_name or in_place_operator or bool(kwargs.get("inplace")))
    return target if name == "__setitem__" or returns_target else None


_OWN_PACKAGES = ("torch.", "hexa_fx.capture", "contextlib")


def _user_location() -> SourceLocation | None:
    """The innermost line of code that belongs neither to torch nor to this package."""
    frame = sys._getframe(2)
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if module != "torch" and not module.startswith(_OWN_PACKAGES):
            return SourceLocation(frame.f_code.co_filename, frame.f_lineno)
        frame = frame.f_back  # type: ignore[assignment]
    return None
