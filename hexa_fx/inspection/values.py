"""Finds shapes and dtypes of a graph's nodes without computing anything."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch
import torch.fx

log = logging.getLogger(__name__)


def like_meta(value: Any) -> Any:
    """The value with tensors replaced by ones on the meta device of the same strides, in any tuples, lists and dicts."""
    if isinstance(value, torch.Tensor):
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
    if isinstance(value, (tuple, list)):
        return tuple(like_meta(item) for item in value)
    if isinstance(value, dict):
        return {key: like_meta(item) for key, item in value.items()}
    return value


class _Values(torch.fx.Interpreter):
    """Keeps the value of every node. A node that cannot run without data, and what depends on it, has none."""

    def __init__(
        self, module: torch.fx.GraphModule, known: Mapping[torch.fx.Node, Any], otherwise: Mapping[torch.fx.Node, Any]
    ) -> None:
        super().__init__(module, garbage_collect_values=False)
        self.found: dict[torch.fx.Node, Any] = {}
        self._known, self._otherwise = known, otherwise

    def run_node(self, n: torch.fx.Node) -> Any:
        if n in self._known:
            self.found[n] = self._known[n]
            return self._known[n]
        try:
            value = self._run(n)
        except Exception as error:
            if n not in self._otherwise:
                log.debug("no shape for %s: %s", n.name, error)
                return None
            value = self._otherwise[n]
        self.found[n] = value
        return value

    def _run(self, n: torch.fx.Node) -> Any:
        missing = [i.name for i in n.all_input_nodes if i not in self.found]
        if missing or n.op in ("placeholder", "call_module"):
            raise LookupError(f"nothing is known of {missing or n.op}")
        return super().run_node(n)


def values_on_meta(
    module: torch.fx.GraphModule,
    known: Mapping[torch.fx.Node, Any],
    otherwise: Mapping[torch.fx.Node, Any] | None = None,
) -> dict[torch.fx.Node, Any]:
    """The values of a graph's nodes, as tensors without data.

    Args:
        module: the graph. Its own modules are not run.
        known: values of inputs, parameters and module calls, on the meta device.
        otherwise: values of nodes that cannot run without data.
    """
    interpreter = _Values(module, known, otherwise or {})
    inputs = [None] * len(module.graph.find_nodes(op="placeholder"))
    with torch.no_grad():
        interpreter.run(*inputs, enable_io_processing=False)
    return interpreter.found
