"""What a partitioned block runs, for people."""

from __future__ import annotations

from collections.abc import Mapping

import torch.fx as fx

from hexa_fx.errors import PlanError
from hexa_fx.plan import Plan, describe_layer


def readable(path: str, mode: str, graphs: Mapping[str, Mapping[str, fx.Graph]], plan: Plan, rank: int) -> str:
    """The code of a block in a mode, or in the one that it has, headed by the plan of its layers.

    Raises:
        PlanError: there is no partitioned block at this path.
    """
    if path not in graphs:
        raise PlanError(f"no partitioned block at {path!r}; they are {list(graphs)}")
    forms = graphs[path]
    graph = forms.get(mode) or next(iter(forms.values()))
    here = [layer for layer in plan.layers if layer.path == path or layer.path.startswith(f"{path}.") or not path]
    head = [f"# rank {rank} of {plan.world}", *(f"# {describe_layer(layer).strip()}" for layer in here)]
    return "\n".join([*head, graph.python_code("self").src])
