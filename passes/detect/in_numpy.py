"""What the code does in numpy with numbers that it takes out of tensors: no graph shows it, and what comes back is of one run."""

from __future__ import annotations

import sys
from typing import Any

import torch.fx

from hexa_fx.passes.detect.graph import ancestors, is_chosen, operation
from hexa_fx.passes.detect.verdict import Refuse

TAKEN = (
    "the code takes numbers out of torch here and goes on with them in numpy, of which a graph holds what came of one example; the "
    "same on tensors (ids * 2654435761 % experts, torch.where(ids == expert)) can be followed"
)
GIVEN = (
    "the code gives torch an array of numpy, of which a graph holds one example's numbers; it can be followed as a tensor, which a "
    "module registers as a buffer, or is given as an argument"
)
_TAKES = frozenset({"numpy", "__array__"})


def refuse_numpy(graph: torch.fx.Graph, before: torch.fx.Node | None = None, chosen: bool = False) -> None:
    """Refuses code that makes expert ids in numpy: hashes of token ids, say.

    Numbers of what was chosen in tensors, such as how many tokens an expert gets, say nothing that these do not say, unless what
    numpy makes of them (``chosen``) comes back as a tensor.

    Raises:
        Refuse: numbers of an argument are taken to numpy in a graph, ``before`` a node of it.
    """
    for node in graph.nodes:
        if node is before:
            return
        of_argument = operation(node) in _TAKES and any(n.op == "placeholder" for n in ancestors([node]))
        if of_argument and (chosen or not is_chosen(node)):
            raise Refuse(TAKEN, node)


def refuse_array(node: torch.fx.Node) -> None:
    """Refuses a call that is given an array, which no program can contain.

    Raises:
        Refuse: it is, or numbers were taken to numpy before.
    """
    if "numpy" not in sys.modules or not _holds_array([node.args, node.kwargs], sys.modules["numpy"].ndarray):
        return
    refuse_numpy(node.graph, before=node)
    raise Refuse(GIVEN, node)


def _holds_array(value: Any, array: type) -> bool:
    if isinstance(value, (list, tuple)):
        return any(_holds_array(item, array) for item in value)
    if isinstance(value, dict):
        return any(_holds_array(item, array) for item in value.values())
    return isinstance(value, array)
