"""Shapes and dtypes of a graph's nodes without computing anything."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.fx

log = logging.getLogger(__name__)


def like_meta(value: Any) -> Any:
    """Tensors replaced by ones without data but with the same strides, in any structure of tuples, lists and dicts."""
    if isinstance(value, torch.Tensor):
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
    if isinstance(value, (tuple, list)):
        return tuple(like_meta(item) for item in value)
    if isinstance(value, dict):
        return {key: like_meta(item) for key, item in value.items()}
    return value


class _Values(torch.fx.Interpreter):
    """Keeps what every node gives. A node that cannot run without data, and what depends on it, has no value."""

    def __init__(self, module: torch.fx.GraphModule, known: Mapping[torch.fx.Node, Any]) -> None:
        super().__init__(module, garbage_collect_values=False)
        self.found: dict[torch.fx.Node, Any] = {}
        self._known = known
        self.before: Callable[[torch.fx.Node], None] = lambda node: None

    def run_node(self, n: torch.fx.Node) -> Any:
        self.before(n)
        if n in self._known:
            self.found[n] = self._known[n]
            return self._known[n]
        if n.op in ("placeholder", "call_module") or any(i not in self.found for i in n.all_input_nodes):
            return None
        try:
            value = super().run_node(n)
        except Exception as error:
            log.debug("no shape for %s: %s", n.name, error)
            return None
        self.found[n] = value
        return value


def values_on_meta(
    module: torch.fx.GraphModule,
    known: Mapping[torch.fx.Node, Any],
    before: Callable[[torch.fx.Node], None] | None = None,
) -> dict[torch.fx.Node, Any]:
    """What the nodes of a graph give, as tensors without data.

    Args:
        module: the graph. Its own modules are not run.
        known: values of inputs, parameters and module calls, on the meta device.
        before: sees every node before it is run.
    """
    interpreter = _Values(module, known)
    if before is not None:
        interpreter.before = before
    inputs = [None] * len(module.graph.find_nodes(op="placeholder"))
    with torch.no_grad():
        interpreter.run(*inputs, enable_io_processing=False)
    return interpreter.found
