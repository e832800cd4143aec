"""What the recorder keeps about every node and every submodule call, for the passes to read.

Under ``node.meta["hexa"]`` as a `NodeRecord`: value snapshot, module scope, source line, whether the node writes in place, the
storage it lives in, and whether the host took a decision on it. Beside them, whom the recorder tells what nodes do not say.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.fx

from hexa_fx.ir import SourceLocation
from hexa_fx.torch_private import OpOverload


def memory_of(tensor: torch.Tensor) -> int:
    """Identity of the memory behind a tensor. Empty tensors have none, so a negative id tells them apart."""
    pointer = tensor.untyped_storage().data_ptr() if tensor.device.type != "meta" else 0
    return pointer or -id(tensor)


def number_of_new(value: torch.Tensor) -> int:
    """The number of memory that came to a recorded run later, for as long as ``value`` is held."""
    return -id(value)


@dataclass
class NodeRecord:
    """What the run shows about a node."""

    value: Any
    scope: str = ""
    location: SourceLocation | None = None
    writes: bool = False
    storage: int | None = None
    decision: bool = False
    only_raises: bool = False
    """Whether all that hangs on the decision is an error of the code's own (`hexa_fx.capture.bytecode`)."""
    gradient: bool = True
    """Whether the code lets gradients through: False under its own ``no_grad``."""
    autocast_off: str = ""
    """The kind of device for which the code has switched off the autocast that it was called under."""
    wants_gradient: bool = False
    """Of an input."""
    asked: bool = False
    """Whether the code asks something of an input that is no number of it, such as its dtype."""
    subscript: bool = False
    """Whether it says that a number that the code takes an item by is what it was."""
    calls: tuple[int, ...] = ()
    """Numbers of the calls inside of which it lies, the innermost last."""
    number: int = -1
    """How many nodes the run had made before it; -1 of one that it did not make."""

    def note_decision(self, only_raises: bool) -> None:
        self.only_raises = only_raises and (self.only_raises or not self.decision)
        self.decision = True


def record_of(node: torch.fx.Node) -> NodeRecord:
    record: NodeRecord = node.meta["hexa"]
    return record


def reached(
    roots: Iterable[torch.fx.Node], onward: Callable[[torch.fx.Node], Iterable[torch.fx.Node]]
) -> set[torch.fx.Node]:
    """The roots and all that one comes to from them, if ``onward`` says what comes after a node."""
    found: set[torch.fx.Node] = set()
    left = list(roots)
    while left:
        node = left.pop()
        if node not in found:
            found.add(node)
            left.extend(onward(node))
    return found


def nodes_by_call(graph: torch.fx.Graph) -> defaultdict[int, list[torch.fx.Node]]:
    """The nodes inside of every call, in order, by its number."""
    found = defaultdict[int, list[torch.fx.Node]](list)
    for node in graph.nodes:
        for number in record_of(node).calls:
            found[number].append(node)
    return found


@dataclass(frozen=True)
class ModuleCall:
    """A submodule's call inside the run: its number, with which nodes say that they lie in it, its arguments and results as nodes.

    Or the call of an `autograd.Function` or an operator, which then is ``function``. ``around``: numbers of the calls inside of
    which it lies. ``prepared``: whether other code sets attributes that its code then reads or sets: a rewritten block sets
    attributes at its end, so it cannot stay a call.
    """

    path: str
    number: int
    around: tuple[int, ...]
    args: Any
    kwargs: Any
    output: Any
    function: Callable[..., Any] | None = None
    prepared: bool = False

    @property
    def is_of_operator(self) -> bool:
        """Whether it is the call of an operator that is Python code."""
        return isinstance(self.function, OpOverload)


class Listener(Protocol):
    """Whom a recorder tells what no node says."""

    def leave(self, scope: str) -> None:
        """That the code of a module, by its path, hands over to another's."""

    def asked(self, tensor: Any, attribute: str) -> None:
        """What else than numbers is asked of a tensor; of None for a call of torch."""

    def asked_gradients(self, scopes: set[str]) -> None:
        """Once an `autograd.Function` is over, the modules whose code asked in it whether values have gradients."""

    def before_call(self, name: str, args: Any, kwargs: Any) -> None:
        """Of every call."""
