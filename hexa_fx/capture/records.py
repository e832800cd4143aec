"""What the recorder keeps about every node and every submodule call, for the passes to read.

Under ``node.meta["hexa"]`` as a `NodeRecord`: value snapshot, module scope, source line, whether the node writes in place, the
storage it lives in, and whether the host took a decision on it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch.fx

from hexa_fx.capture.functional import Applied
from hexa_fx.ir import SourceLocation


@dataclass
class NodeRecord:
    """What the run shows about a node."""

    value: Any
    scope: str = ""
    location: SourceLocation | None = None
    writes: bool = False
    storage: int | None = None
    decision: bool = False
    gradient: bool = True
    """Whether the code lets gradients through: False under its own ``no_grad``."""
    asked: bool = False
    """Whether the code asks something of an input that is no number of it, such as its dtype."""
    subscript: bool = False
    """Whether it says that a number that the code takes an item by is what it was."""


def record_of(node: torch.fx.Node) -> NodeRecord:
    record: NodeRecord = node.meta["hexa"]
    return record


@dataclass(frozen=True)
class ModuleCall:
    """A submodule's call inside the run: its arguments and results as graph nodes, and the nodes in between.

    Or the call of an `autograd.Function`, which then is ``function``.
    """

    path: str
    start: int
    end: int
    args: Any
    kwargs: Any
    output: Any
    function: Applied | None = None
