"""Runs part of a recorded graph again with some values replaced: the experiment behind every question of detection.

Only what depends on a replaced node is recomputed. Everything else keeps its recorded value, so host decisions stay as they
were. The arithmetic is in float64, whatever the model's dtype, so that answers are sharp.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.fx
from torch.utils import _pytree as pytree

from hexa_fx import operations as ops
from hexa_fx.capture.captured import CapturedBlock
from hexa_fx.capture.records import memory_of, reached, record_of
from hexa_fx.isolation.outcome import furthest
from hexa_fx.isolation.size import InPieces, is_out_of_memory
from hexa_fx.isolation.torch_state import SEED, random_state_kept
from hexa_fx.isolation.trial_modes import GROUPED, grouped_mm, upcast
from hexa_fx.isolation.written_tensors import WITH_STATISTICS
from hexa_fx.runtime.guards import item

_NEAR = 0.05
"""How far rounding to 16 bits may carry a value, relative to the tensor's scale. What lies further apart was decided otherwise."""


def is_coarse(nodes: Iterable[torch.fx.Node]) -> bool:
    """Whether a 16-bit floating-point tensor was computed. Those of 32 bits are exact enough."""
    return any(
        leaf.is_floating_point() and leaf.element_size() < 4
        for node in nodes
        if node.op.startswith("call")
        for leaf in pytree.tree_leaves(record_of(node).value)
        if isinstance(leaf, torch.Tensor)
    )


def _are_near(pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> bool:
    """Whether all values are near what was recorded, a look at many at a time."""
    values, recorded = ({str(number): pair[side] for number, pair in enumerate(pairs)} for side in (0, 1))
    distance, _, said = furthest(recorded, values)
    return not said and distance <= _NEAR


def _can_wait(value: Any, recorded: Any) -> bool:
    """Whether both are tensors of floating-point numbers, and no weights."""
    both = value, recorded
    return all(isinstance(t, torch.Tensor) and t.is_floating_point() and not isinstance(t, InPieces) for t in both)


def _is_float(value: Any) -> bool:
    """Whether there are tensors of floating-point numbers in it, or it is an object that may hold any."""
    leaves = [value] if isinstance(value, torch.Tensor) else pytree.tree_leaves(value)
    return not all(
        isinstance(leaf, int | str | None) or (isinstance(leaf, torch.Tensor) and not leaf.is_floating_point())
        for leaf in leaves
    )


def with_tensors(change: Callable[[torch.Tensor], Any], value: Any) -> Any:
    """A recorded value with ``change`` of its tensors in their place. Nearly every value is a tensor, at which pytree is slow."""
    return change(value) if isinstance(value, torch.Tensor) else pytree.tree_map_only(torch.Tensor, change, value)


def _copied(value: torch.Tensor) -> torch.Tensor:
    """A copy; an upcast weight is only read, and as large as the block."""
    return value if isinstance(value, InPieces) else value.clone()


def _alike(value: Any, recorded: Any) -> bool:
    if isinstance(value, torch.Tensor) and isinstance(recorded, torch.Tensor):
        return _is_near(value, recorded)
    ours, theirs = pytree.tree_leaves(value), pytree.tree_leaves(recorded)
    return len(ours) == len(theirs) and all(map(_is_near, ours, theirs))


def _is_near(value: Any, recorded: Any) -> bool:
    if isinstance(recorded, (int, float, str)):
        return bool(type(value) is type(recorded) and value == recorded)
    if not isinstance(value, torch.Tensor) or not isinstance(recorded, torch.Tensor):
        return type(value) is type(recorded)  # an object of the user's; its tensors are compared where they are read
    if value.shape != recorded.shape or value.dtype != recorded.dtype:
        return False
    if isinstance(value, InPieces) and isinstance(recorded, InPieces):
        return value.lies_with(recorded)
    return _are_near([(value, recorded)]) if value.is_floating_point() else torch.equal(value, recorded)


_CAST_METHODS = frozenset(("float", "half", "bfloat16", "double"))
_MAY_WRITE = WITH_STATISTICS | {"embedding", "embedding_bag"}
"""Functions that may write to a buffer or a parameter that they are given: running statistics, rows above a largest norm."""


class CannotReplay(Exception):
    """An operation of the graph raises an error on other values: how much it is given, say, depends on them."""

    def __init__(self, node: torch.fx.Node) -> None:
        super().__init__(node.name)
        self.node = node


class Replay:
    """Replays a recorded graph. Float64 copies of parameters and recorded values are made once, when first needed."""

    def __init__(self, captured: CapturedBlock) -> None:
        self._captured = captured
        self._nodes = [node for node in captured.graph.nodes if node.op != "output"]
        self._position = {node: index for index, node in enumerate(self._nodes)}
        self._frozen: dict[torch.fx.Node, Any] = {}
        self._by_storage: dict[int | None, list[torch.fx.Node]] = {}
        for node in self._nodes:
            storage = record_of(node).storage
            if storage is not None:
                self._by_storage.setdefault(storage, []).append(node)
        self._written = {record_of(node).storage for node in self._nodes if record_of(node).writes}
        self._coarse = is_coarse(self._nodes)
        self._parameters = {record_of(node).storage for node in self._nodes if node.op == "get_attr"}
        self._parts: dict[tuple[torch.fx.Node, torch.fx.Node], tuple[torch.Tensor, torch.Tensor | None]] = {}

    def value(self, node: torch.fx.Node) -> Any:
        """The recorded value, floating point as float64, without the rounding of a 16-bit run."""
        if self._coarse:
            self._coarse = False  # what follows asks for recorded values
            self._frozen |= self._sharpened()
        if node not in self._frozen:
            self._frozen[node] = self._recorded(node)
        return self._frozen[node]

    def _sharpened(self) -> dict[torch.fx.Node, Any]:
        """Every computed value, recomputed in float64 from the parameters and inputs.

        Values that come out differently keep what was recorded: choices that hinge on a rounding (top-k), and random numbers. Among
        floating-point ones they are looked for in many at a time, since each look waits for a device; if one is found, everything
        is computed anew and each value looked at before it is read.
        """
        with torch.no_grad():
            with random_state_kept():
                found = self._recomputed(together=True)
            if found is None:
                with random_state_kept():
                    found = self._recomputed(together=False)
        assert found is not None
        return found

    def _recomputed(self, together: bool) -> dict[torch.fx.Node, Any] | None:
        """By node; None if one of those that were looked at together differs."""
        values, found = dict[torch.fx.Node, Any](), dict[torch.fx.Node, Any]()
        unseen: list[tuple[torch.Tensor, torch.Tensor]] = []
        for node in self._nodes:
            if not node.op.startswith("call"):
                continue
            recorded, kept = self._recorded(node), record_of(node).storage not in self._written
            if kept and not _is_float(recorded):  # as it was recorded, whether it comes out so or not
                values[node] = found[node] = recorded
                continue
            values[node] = self._execute(node, values)
            found[node] = values[node] if kept else with_tensors(_copied, values[node])  # before later writes
            if together and _can_wait(found[node], recorded):
                unseen.append((found[node], recorded))
            elif not _alike(found[node], recorded):
                values[node] = with_tensors(_copied, recorded)
                found[node] = values[node] if kept else with_tensors(_copied, recorded)
        return found if _are_near(unseen) else None

    def call(self, node: torch.fx.Node, replace: Mapping[torch.fx.Node, torch.Tensor]) -> torch.Tensor:
        """What the single call of ``node`` returns with some operands replaced."""
        result: torch.Tensor = self._execute(node, dict(replace))
        return result

    def linear_part(self, node: torch.fx.Node, data: torch.fx.Node) -> tuple[torch.Tensor, torch.Tensor | None]:
        """(product, constant) of the call of ``node``: what depends on its operand ``data``, and what it gives of zeros.

        No constant if the call is a product of two operands and nothing else. Both are kept, since each reads a whole weight.
        """
        key = node, data
        if key not in self._parts:
            given = self.value(data)
            constant = None if _is_product(node) else self.call(node, {data: torch.zeros_like(given)})
            product = self.call(node, {data: given})
            self._parts[key] = product if constant is None else product - constant, constant
        return self._parts[key]

    def run(
        self, replace: Mapping[torch.fx.Node, torch.Tensor], wanted: Iterable[torch.fx.Node]
    ) -> dict[torch.fx.Node, Any]:
        """Values of ``wanted`` if the nodes in ``replace`` had the given values (same shapes, float64). Raises `CannotReplay` if an
        operation fails on these. A replaced node keeps its place in the order of writes, but not its memory."""
        targets = list(wanted)
        needed = self._needed(targets, self._stale(replace))
        values: dict[torch.fx.Node, Any] = {node: self._own(node, tensor) for node, tensor in replace.items()}
        answers = {node: self._own(node, replace[node]) for node in targets if node in replace}
        open_targets = set(targets) - set(answers)
        with torch.no_grad(), random_state_kept(SEED):
            for node in needed:
                values[node] = self._attempt(node, values)
                if node in open_targets:  # copied at once: a later write must not change the answer
                    answers[node] = self._own(node, values[node])
        for node in open_targets - set(answers):
            answers[node] = self.value(node)
        return answers

    def _own(self, node: torch.fx.Node, value: Any) -> Any:
        """A node's value for itself: a copy, unless the run writes nothing to the memory that it lies in.

        Of a value that does not lie row after row a view may be a copy in the run, and none here. Large weights are only read.
        """
        record = record_of(node)
        if not isinstance(value, torch.Tensor) or not isinstance(record.value, torch.Tensor):
            return value
        scattered = not (record.value.is_contiguous() or isinstance(value, InPieces))
        return value.clone() if scattered or record.storage in self._written else value

    def _stale(self, replace: Mapping[torch.fx.Node, Any]) -> set[torch.fx.Node]:
        """Nodes whose value may change: downstream of a replacement, or sharing memory with a write that is."""
        unseen = {**self._by_storage}

        def onward(node: torch.fx.Node) -> list[torch.fx.Node]:
            written = record_of(node).writes and node not in replace
            shared = unseen.pop(record_of(node).storage, ()) if written else ()
            return [other for other in (*node.users, *shared) if other not in replace and other.op != "output"]

        found = reached(replace, onward).difference(replace)
        return {node for node in found if node.op not in ("placeholder", "get_attr")}

    def _needed(self, targets: list[torch.fx.Node], stale: set[torch.fx.Node]) -> list[torch.fx.Node]:
        """The stale nodes that ``targets`` depend on, in order. Sharing memory with a write counts as depending on it."""
        unseen = {**self._by_storage}

        def onward(node: torch.fx.Node) -> list[torch.fx.Node]:
            writes = (other for other in unseen.pop(record_of(node).storage, ()) if record_of(other).writes)
            return [other for other in (*node.all_input_nodes, *writes) if other in stale]

        return sorted(reached(stale.intersection(targets), onward), key=self._position.__getitem__)

    def _attempt(self, node: torch.fx.Node, values: dict[torch.fx.Node, Any]) -> Any:
        try:
            return self._execute(node, values)
        except (RuntimeError, IndexError, ValueError) as error:
            if is_out_of_memory(error):
                raise
            raise CannotReplay(node) from error

    def _execute(self, node: torch.fx.Node, values: dict[torch.fx.Node, Any]) -> Any:
        """Runs a node. A cast that is void in float64 returns its operand; if it made a copy in the run, it does so here too."""
        result, storage = self._call(node, values), record_of(node).storage
        if not isinstance(result, torch.Tensor):
            return result
        if result.is_floating_point() and result.dtype != torch.float64:
            return result.double()  # made anew in the default dtype, as torch.zeros does
        same = [operand for operand in node.all_input_nodes if values.get(operand) is result]
        return result.clone() if any(record_of(operand).storage != storage for operand in same) else result

    def _call(self, node: torch.fx.Node, values: dict[torch.fx.Node, Any]) -> Any:
        def load(argument: torch.fx.Node) -> Any:
            if argument not in values:
                values[argument] = self._own(argument, self.value(argument))
            return values[argument]

        if node.target is item:
            return record_of(node).value
        args = upcast(torch.fx.map_arg(node.args, load))
        kwargs = upcast(torch.fx.map_arg(node.kwargs, load))
        if getattr(node.target, "__name__", "") in _MAY_WRITE:
            args, kwargs = with_tensors(torch.clone, (args, kwargs))
        if node.op == "call_method":
            name = "double" if node.target in _CAST_METHODS else str(node.target)
            return getattr(args[0], name)(*args[1:], **kwargs)
        if getattr(node.target, "__name__", "") in GROUPED:
            by_expert = args[1].dim() == 3
            return grouped_mm(*args, **kwargs) if by_expert else _through_float32(node.target, args, kwargs)
        return node.target(*args, **kwargs)  # type: ignore[operator]

    def _recorded(self, node: torch.fx.Node) -> Any:
        """A recorded value, floating point as float64."""
        return with_tensors(self._upcast, record_of(node).value)

    def _upcast(self, value: torch.Tensor) -> torch.Tensor:
        """Weights as `CapturedBlock.in_float64`, and what was computed as a copy; integers as they are."""
        if not value.is_floating_point():
            return value
        limit = self._captured.whole_bytes
        is_weight = limit is not None and (8 * value.numel() > limit or memory_of(value) in self._parameters)
        return self._captured.in_float64(value) if is_weight else value.double()


def _is_product(node: torch.fx.Node) -> bool:
    """Whether a call is a product of two operands and nothing else: of zeros it gives zeros."""
    leaves = pytree.tree_leaves((node.args, dict(node.kwargs)))
    operands = [leaf for leaf in leaves if isinstance(leaf, torch.fx.Node)]
    others = (leaf for leaf in leaves if not isinstance(leaf, torch.fx.Node | str | None))
    return (
        ops.contracts(node) and len(operands) == 2 and operands[0] is not operands[1] and not any(True for _ in others)
    )


def _through_float32(function: Any, args: Any, kwargs: Any) -> Any:
    given = args, kwargs
    args, kwargs = with_tensors(lambda value: value.float() if value.dtype == torch.float64 else value, given)
    return function(*args, **kwargs).double()
