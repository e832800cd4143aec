"""What the arguments of a rewritten block have to be like: as in the recorded run wherever the code depends on it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
import torch.fx

from hexa_fx.capture import CapturedBlock, record_of
from hexa_fx.ir import InputGuard, RewrittenBlock
from hexa_fx.runtime.attribute_guards import called_in, is_within


def input_guards(
    captured: CapturedBlock,
    graph: torch.fx.Graph,
    new: Mapping[torch.fx.Node, torch.fx.Node],
    by_rows: set[torch.fx.Node],
) -> tuple[InputGuard, ...]:
    """A guard for each argument, in order.

    Args:
        new: the nodes of ``graph``, by those of the recorded graph.
        by_rows: inputs of ``graph`` that are read as rows of just as many numbers as their last dimension has.
    """
    literal_dtypes = {
        item for node in graph.nodes for item in (*node.args, *node.kwargs.values()) if isinstance(item, torch.dtype)
    }
    called = called_in(graph)
    asked = {what for what, scopes in captured.asks.items() for scope in scopes if not is_within(scope, called)}
    result = []
    for name, value in captured.arguments:
        if not isinstance(value, torch.fx.Node):
            result.append(InputGuard(name, "constant", value))
            continue
        if not (value.users or record_of(value).asked):  # given to a router alone, say, and here in **kwargs
            result.append(InputGuard(name, "tensor"))
            continue
        tensor = record_of(value).value
        exact = "dtype" in asked or tensor.dtype in literal_dtypes
        device = tensor.device.type if "device" in asked else None
        layout = tensor.is_contiguous() if "layout" in asked else None
        gradient = record_of(value).wants_gradient if "gradient" in asked else None
        last, kind = tensor.shape[-1] if new[value] in by_rows else None, (tensor.dtype, tensor.dim())
        result.append(InputGuard(name, "tensor", None, *kind, exact, device, layout, gradient, last))
    return tuple(result)


def in_own_dtypes(rewritten: RewrittenBlock) -> RewrittenBlock:
    """The block for floating-point inputs and weights in the dtypes that it was recorded with, and no others."""
    floating = {guard.name for guard in rewritten.guards if guard.dtype is not None and guard.dtype.is_floating_point}
    return replace(
        rewritten, guards=tuple(replace(g, exact_dtype=g.exact_dtype or g.name in floating) for g in rewritten.guards)
    )
