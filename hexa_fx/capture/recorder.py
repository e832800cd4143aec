"""Runs unmodified code on real tensors and records what happens as a straight-line `torch.fx.Graph`.

Symbolic tracers fail on real MoE code because its loops run on the host and depend on data. Here the code runs as it is, under
a `TorchFunctionMode`, and every call becomes a node that keeps its value in ``node.meta``. The graph holds one routing, so it
serves to understand the block, never to run in its place.
"""

from __future__ import annotations

import itertools
import operator
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from keyword import iskeyword
from typing import Any

import torch
import torch.fx
from torch.fx.node import map_aggregate
from torch.overrides import TorchFunctionMode

from hexa_fx.capture import functional
from hexa_fx.capture.bytecode import only_raises
from hexa_fx.capture.calls import (
    DECISIONS,
    KEPT,
    METADATA,
    SETS_DATA,
    SETS_GRADIENT,
    TEXTS,
    UnreadableTensor,
    as_constant,
    as_plain,
    check_readable,
    exchanges,
    fx_target,
    is_bookkeeping,
    keeps_memory,
    name_of,
    python_kernels,
    user_location,
    without_numpy,
    written_tensor,
)
from hexa_fx.capture.ran_code import untold
from hexa_fx.capture.records import Listener, ModuleCall, NodeRecord, memory_of, record_of
from hexa_fx.capture.symint import SYMBOLIC, SYMBOLIC_FUNCTIONS, SymbolicSize, noted_text, plain, wrap
from hexa_fx.contexts import items_set
from hexa_fx.isolation.lookup import MISSING, attributes, fields_of, tensors_in
from hexa_fx.isolation.trial_modes import end_after
from hexa_fx.torch_private import DisableTorchFunction

_OWN_SEQUENCE = (
    "the block returns a {}, a list or tuple of a class of its own, which is not followed; plain ones can be returned"
)


@dataclass(repr=False)  # which torch writes into errors, as where a tensor is compared with None
class Recorder(TorchFunctionMode):
    """The recording mode. Use it through `hexa_fx.capture.record.capture`."""

    parameters: dict[str, torch.Tensor]
    graph: torch.fx.Graph = field(default_factory=torch.fx.Graph)
    constants: dict[str, torch.Tensor] = field(default_factory=dict)
    calls: list[ModuleCall] = field(default_factory=list)
    functions: list[ModuleCall] = field(default_factory=list)
    sees_gradients: bool = True  # whether the run is made with gradients, so that the code's own ``no_grad`` shows
    forced: Mapping[int, torch.Tensor] = field(default_factory=dict)  # results of calls, by number of their node
    idle: frozenset[int] = frozenset()  # numbers of the nodes of dropouts that drop nothing
    counts_loops: bool = False  # whether the run holds for as many rows as loops go over
    told: Listener = field(init=False)
    functions_running: list[set[str]] = field(default_factory=list)
    """What is told of each `autograd.Function` that runs once it is over, outermost first."""

    def __post_init__(self) -> None:
        super().__init__()
        self.scopes, self.count = [""], 0
        self.entered: list[int] = []  # numbers of the calls that run, the innermost last
        self._calls = itertools.count()
        self._node_of: dict[int, torch.fx.Node] = {}
        self._index: dict[torch.fx.Node, int] = {}
        self._keep: list[torch.Tensor] = []  # an id() stays unique only while its tensor lives
        self.written: dict[int, tuple[torch.fx.Node, int]] = {}  # by storage: the last write, the id of its tensor
        members_last = sorted(self.parameters.items(), key=lambda item: any(map(str.isdigit, item[0].split("."))))
        self._parameter_name = {id(tensor): name for name, tensor in members_last}  # of two, that of a list's member
        self._lasting = frozenset(map(memory_of, self.parameters.values()))
        # Memory of others goes by numbers: a weight that is moved later, as packed ones are, may come to lie where a recorded value
        # lay that is gone by then, and by its address that would be a part of it.
        self._memory_numbers: dict[int, int] = {}
        self._cast_on = [device for device in ("cuda", "cpu") if torch.is_autocast_enabled(device)]
        self.in_autocast: dict[str, bool] = {}  # by path of the modules whose code switches it, and whether on
        # lists and tuples that calls gave, by id, and their nodes
        self._pieces: dict[int, tuple[Any, torch.fx.Node]] = {}
        self.met: dict[str, torch.Tensor] = {}  # for every constant, the tensor it was read from
        self.asked: dict[str, Any] = {}  # what stands for numbers that every call asks modules for, by dotted name

    # -- nodes ---------------------------------------------------------------------------------------------------------

    @untold
    def add(self, op: str, target: Any, args: Any, kwargs: Any, value: Any) -> torch.fx.Node:
        end_after(self.count)
        snapshot = self._snapshot(value)
        node = self.graph.create_node(op, target, args, kwargs)
        storage = memory_of(value) if isinstance(value, torch.Tensor) else None
        if storage is not None and storage not in self._lasting:
            storage = self._memory_numbers.setdefault(storage, -1 - len(self._memory_numbers))
        gradient = torch.is_grad_enabled() or not self.sees_gradients or bool(self.functions_running)
        off = next((device for device in self._cast_on if not torch.is_autocast_enabled(device)), "")
        at = self.scopes[-1], user_location()
        record = NodeRecord(snapshot, *at, storage=storage, gradient=gradient, autocast_off=off)
        record.calls, record.number = (*self.entered,), self.count
        node.meta["hexa"] = record
        self._index[node], self.count = self.count, self.count + 1
        return node

    @contextmanager
    def call(self) -> Iterator[tuple[int, tuple[int, ...]]]:
        """A context in which nodes lie in a call more. Yields its number, and those of the calls around it."""
        number, around = next(self._calls), (*self.entered,)
        self.entered.append(number)
        try:
            yield number, around
        finally:
            self.entered.pop()

    def record_call(self, function: Any, args: tuple[Any, ...], value: Any) -> torch.fx.Node:  # on symbolic numbers
        return self.add("call_function", function, args, {}, value)

    def note_decision(self, node: torch.fx.Node | None) -> None:
        """Notes that the host reads ``node`` as a plain value, so that the rest of the recording depends on it."""
        if node is not None:
            record_of(node).note_decision(only_raises())

    def placeholder(self, name: str, tensor: torch.Tensor) -> torch.fx.Node:
        node = self._bind(tensor, self.add("placeholder", name, (), {}, tensor))
        record_of(node).wants_gradient = tensor.requires_grad
        return node

    def _snapshot(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        check_readable(value)
        detached = value.detach()
        return detached if memory_of(value) in self._lasting else detached.clone()

    def _bind(self, tensor: torch.Tensor, node: torch.fx.Node) -> torch.fx.Node:
        self._node_of[id(tensor)] = node
        self._keep.append(tensor)
        return node

    def _node_for(self, tensor: torch.Tensor) -> torch.fx.Node:
        node = self._node_of.get(id(tensor)) or self._introduce(tensor)
        written = self.written.get(memory_of(tensor))
        if written is None or self._index[written[0]] <= self._index[node] or written[1] == id(tensor):
            return node
        return self._bind(tensor, self.add("call_function", functional.after, (node, written[0]), {}, tensor))

    def _introduce(self, tensor: torch.Tensor) -> torch.fx.Node:
        """The node of a tensor seen for the first time: a parameter or buffer of the block, else a constant of the code."""
        name = self._parameter_name.get(id(tensor))
        if name is None:
            name = f"_constant_{len(self.constants)}"
            self.constants[name] = tensor.detach().clone()
            self.met[name] = tensor
        return self._bind(tensor, self.add("get_attr", name, (), {}, tensor))

    # -- arguments and results -----------------------------------------------------------------------------------------

    @untold
    def lift(self, value: Any) -> Any:
        """``value`` with tensors and symbolic numbers replaced by their nodes."""
        return map_aggregate(value, self._lift_leaf)

    def _lift_leaf(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return self._node_for(value)
        return value.node.argument() if isinstance(value, SYMBOLIC) else as_constant(value)

    def lift_result(self, result: Any) -> Any:
        """As `lift`. A dataclass or a mapping of a class of its own becomes a node that calls its class, if that is all."""
        if isinstance(result, SymbolicSize):
            return self.record_call(torch.Size, (self.lift(tuple(result)),), torch.Size(map(plain, result)))
        fields = fields_of(result)
        if isinstance(result, dict) and fields is not None and not _are_names(result):
            return self.add("call_function", functional.OfItems(result), (self.lift_result(fields),), {}, result)
        if fields is not None:
            made = attributes(type(result)(**fields))
            if any(made.get(name, MISSING) is not value for name, value in attributes(result).items()):
                return as_constant(result)
            return self.add("call_function", type(result), (), self.lift_result(fields), result)
        if isinstance(result, (list, tuple)) and not (type(result) in (list, tuple) or hasattr(result, "_fields")):
            raise UnreadableTensor(_OWN_SEQUENCE.format(type(result).__qualname__))
        if isinstance(result, (list, tuple)):
            items = map(self.lift_result, result)
            return type(result)(*items) if hasattr(result, "_fields") else type(result)(items)
        if type(result) is dict:
            return {key: self.lift_result(value) for key, value in result.items()}
        if (number := without_numpy(result)) is not result:
            return self.add("call_function", type(result), (number,), {}, result)
        return self.lift(result)

    @untold
    def _wrap_result(self, result: Any, node: torch.fx.Node) -> Any:
        if isinstance(result, torch.Tensor):
            self._bind(result, node)
            return result
        if not isinstance(result, (tuple, list)) or isinstance(result, torch.Size):
            return result
        items = [*result]
        for place, item in enumerate(items):
            if isinstance(item, (torch.Tensor, tuple, list)):
                child = self.add("call_function", operator.getitem, (node, place), {}, item)
                items[place] = self._wrap_result(item, child)
        return self._note_pieces(type(result)(items), node)

    def _wrap_numbers(self, value: Any, node: torch.fx.Node) -> Any:
        """The result of ``item()`` or ``tolist()`` as symbolic numbers."""
        if isinstance(value, list):
            items = (self.add("call_function", operator.getitem, (node, i), {}, item) for i, item in enumerate(value))
            return self._note_pieces([self._wrap_numbers(item, child) for item, child in zip(value, items)], node)
        return value if isinstance(value, (bool, complex)) else wrap(value, node, self)

    def _note_pieces(self, pieces: Any, node: torch.fx.Node) -> Any:
        self._pieces[id(pieces)] = pieces, node
        return pieces

    def giver_of(self, pieces: Any) -> torch.fx.Node | None:
        """The call that gave a list or tuple; None if none did, or it was added to since."""
        known, node = self._pieces.get(id(pieces), ((), None))
        return node if node is not None and known is pieces and len(known) == len(record_of(node).value) else None

    def length_of(self, pieces: Any) -> Any:
        """Of such a list or tuple, a symbolic number: a size that code may decide on. The plain one of others."""
        node = self.giver_of(pieces)
        if node is None:
            return len(pieces)
        if node.target == "tolist":
            size = self.add("call_method", "size", (node.args[0], 0), {}, len(pieces))
        else:
            size = self.record_call(len, (node,), len(pieces))
        return wrap(len(pieces), size, self)

    def record_result(self, function: Any, lifted_args: Any, result: Any) -> None:  # of a call that was made elsewhere
        self._wrap_result(result, self.add("call_function", function, lifted_args, {}, result))

    def record_leaf(self, function: Any, *args: Any, **kwargs: Any) -> Any:
        """Calls ``function`` and records it as one node, whatever it calls itself."""
        with DisableTorchFunction():
            lifted_args, lifted_kwargs = self.lift(args), self.lift(kwargs)
            result = function(*as_plain(args), **as_plain(kwargs))
            return self._wrap_result(result, self.add("call_function", function, lifted_args, lifted_kwargs, result))

    # -- the mode ------------------------------------------------------------------------------------------------------

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, name_of(func)
        if keeps_memory(name, args):
            return func(*args)
        self.told.before_call(name, args, kwargs)
        if name == "__get__":
            return self._read_property(func, args)
        plain_args, plain_kwargs = as_plain(args), as_plain(kwargs)
        if exchanges(name, args) and memory_of(args[0]) not in self._lasting:
            with torch.no_grad():  # the same numbers, by a write that shows
                return self._call(torch.Tensor.copy_, "copy_", args, {}, args, {})
        if is_bookkeeping(name, plain_args, plain_kwargs):
            self._ask(plain_args[0] if plain_args else None, name)
            result = func(*plain_args, **plain_kwargs)
            if name == SETS_GRADIENT and memory_of(args[0]) not in self._lasting:
                self._bind(args[0], self.add("call_method", name, self.lift(args), self.lift(kwargs), args[0]))
            return result
        if name in SYMBOLIC_FUNCTIONS:
            return self._number_function(SYMBOLIC_FUNCTIONS[name], args)
        if name in ("size", "numel", "nelement", "stride", "__len__"):
            return self._read_size(func, name, args, kwargs, plain_args, plain_kwargs)
        if name in DECISIONS:
            return self._decide(func, name, args, plain_args, plain_kwargs)
        if isinstance(out := kwargs.get("out"), torch.Tensor):  # what is computed, and that it is written there
            with self:
                return out.copy_(func(*args, **{key: value for key, value in kwargs.items() if key != "out"}))
        if kernels := python_kernels(func):
            return self._operator(getattr(func, "default", func), kernels, args, kwargs, plain_args, plain_kwargs)
        return self._call(func, name, args, kwargs, plain_args, plain_kwargs)

    def _ask(self, tensor: Any, attribute: str) -> None:
        self.told.asked(tensor, attribute)
        if attribute == SETS_DATA:
            self._node_for(tensor)  # notes what it holds, so that it gets that back
        if id(tensor) in self._node_of:
            record_of(self._node_of[id(tensor)]).asked = True

    def _read_property(self, func: Any, args: Any) -> Any:
        attribute = getattr(getattr(func, "__self__", None), "__name__", "")
        value = func(*args)
        if attribute == "shape":
            return self._size(args[0], value)
        if attribute == "nbytes":
            return self._read_size(torch.Tensor.numel, "numel", args, {}, args, {}) * args[0].itemsize
        if attribute in METADATA or not isinstance(value, torch.Tensor):
            self._ask(args[0], attribute)
            return value
        return self._wrap_result(value, self.add("call_function", getattr, (self.lift(args[0]), attribute), {}, value))

    def _size(self, tensor: torch.Tensor, value: tuple[int, ...], name: str = "size") -> SymbolicSize:
        base = self.lift(tensor)
        return SymbolicSize(wrap(n, self.add("call_method", name, (base, d), {}, n), self) for d, n in enumerate(value))

    def _read_size(self, func: Any, name: str, args: Any, kwargs: Any, plain_args: Any, plain_kwargs: Any) -> Any:
        value = func(*plain_args, **plain_kwargs)
        if isinstance(value, tuple):
            return self._size(args[0], value, name)
        if name == "__len__":
            self.note_decision(self.add("call_method", "size", (self.lift(args[0]), 0), {}, value))
            return value
        return wrap(value, self.add("call_method", name, self.lift(args), self.lift(kwargs), value), self)

    def _number_function(self, function: Any, args: Any) -> Any:
        value, given = function(*map(plain, args)), tuple(map(self.lift, args))
        recorded = any(isinstance(item, torch.fx.Node) for item in given)  # else it is of constants alone
        return wrap(value, self.record_call(function, given, value), self) if recorded else value

    def _decide(self, func: Any, name: str, args: Any, plain_args: Any, plain_kwargs: Any) -> Any:
        value = func(*plain_args, **plain_kwargs)
        given = args if name == "__contains__" else args[:1]
        node = self.add("call_method", name, self.lift(given), {}, value if name in KEPT else None)
        if name in TEXTS:
            return noted_text(value, lambda: self.note_decision(node))
        if not (type(value) in (int, float) if name == "item" else name == "tolist" and args[0].is_floating_point()):
            self.note_decision(node)  # else the host is yet to use it
        return self._wrap_numbers(value, node) if name in ("item", "tolist") else value

    def _call(self, func: Any, name: str, args: Any, kwargs: Any, plain_args: Any, plain_kwargs: Any) -> Any:
        lifted_args, lifted_kwargs = self.lift(tuple(args)), self.lift(kwargs)
        func = functional.row_dropout if self.count in self.idle else func
        result = func(*plain_args, **plain_kwargs)
        if isinstance(result, torch.Size):
            return result
        forced = self.forced.get(self.count)
        if forced is not None and isinstance(result, torch.Tensor) and result.shape == forced.shape:
            result = forced.to(result, copy=True)
        op, target = fx_target(func, name)
        written = written_tensor(name, plain_args, plain_kwargs, result)
        node = self.add(op, target, lifted_args, lifted_kwargs, result if written is None else written)
        if name == "unbind":  # also what iterating over a tensor calls: the host now knows how many rows there are
            self.note_decision(node)
        if written is not None:
            record_of(node).writes = True
            self._bind(written, node)
            self.written[memory_of(written)] = (node, id(written))
            return result
        if isinstance(result, (bool, int, float)):
            self.note_decision(node)
            return result
        if isinstance(result, torch.Tensor) and any(result is item for item in (*plain_args, *plain_kwargs.values())):
            result = result.view_as(result)  # of dropout in eval mode say: who uses which, only identity tells
        return self._wrap_result(result, node)

    def _operator(self, func: Any, kernels: Any, args: Any, kwargs: Any, plain_args: Any, plain_kwargs: Any) -> Any:
        """Calls an operator that is Python code, and records what that computes, if that shows. Its backward is its own."""
        lifted_args, lifted_kwargs = self.lift(tuple(args)), self.lift(kwargs)
        before, written, lists = len(self._index), dict(self.written), (self.functions, self.calls)
        lengths = [*map(len, lists)]
        # Gradients are off inside it, as in a function.
        apart = self.functions_running if torch.is_grad_enabled() else []
        apart.append(asked := set[str]())
        watched = items_set((kernels, kind, self._watched(code)) for kind, code in kernels.items())
        with self.call() as place, watched:
            try:
                result = func(*plain_args, **plain_kwargs)
            finally:
                apart.pop()
        self.told.asked_gradients(asked)
        made = [*itertools.islice(self._index, before, None)]
        if self._shows(result) and not any(map(_leaves_torch, made)):
            self.functions.append(ModuleCall("", *place, lifted_args, lifted_kwargs, self.lift(result), func))
            return result
        for node in reversed(made):
            self.graph.erase_node(node)
            del self._index[node]
        self._node_of = {key: node for key, node in self._node_of.items() if node in self._index}
        self.written = written
        for found, length in zip(lists, lengths):
            del found[length:]
        return self._wrap_result(result, self.add("call_function", func, lifted_args, lifted_kwargs, result))

    @untold
    def _shows(self, result: Any) -> bool:
        """Whether what an operator gives is what recorded calls gave: no code that nobody sees has written there since."""
        nodes = [(tensor, self._node_of.get(id(tensor))) for tensor in tensors_in([result])]
        with DisableTorchFunction():
            same = (
                node is not None and torch.equal(*map(_bytes, (tensor, record_of(node).value)))
                for tensor, node in nodes
            )
            return bool(nodes) and all(same)

    def _watched(self, code: Any) -> Any:
        def kernel(*args: Any, **kwargs: Any) -> Any:
            known = all(id(tensor) in self._node_of for tensor in tensors_in([*args, *kwargs.values()]))
            with self if known else nullcontext():  # else on copies that torch has made, as under autocast
                return code(*args, **kwargs)

        return kernel


def _leaves_torch(node: torch.fx.Node) -> bool:
    """Whether numbers of data become Python's or numpy's there, of which no graph says what comes of them."""
    value = record_of(node.all_input_nodes[0]).value if node.target in DECISIONS else None
    return isinstance(value, torch.Tensor) and (node.target in ("numpy", "__array__") or value.is_floating_point())


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().flatten().contiguous().view(torch.uint8)


def _are_names(mapping: dict[Any, Any]) -> bool:
    """Whether the class of a mapping can be called with its items by name."""
    names = (isinstance(key, str) and key.isidentifier() and not iskeyword(key) for key in mapping)
    return not isinstance(mapping, defaultdict) and all(names)
