"""What `hexa::moe_ffn` runs: the graphs of `lower`, taken through the passes of a device."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch.fx import GraphModule

from hexa_fx.ops.program import FfnRequest
from hexa_fx.ops.table_layers import OPERANDS
from hexa_fx.passes.lowering.lower import buffer_name, lower_backward, lower_forward
from hexa_fx.passes.lowering.pipelines import pipeline_for

_FORWARD_OPERANDS = ("x", "top_k_index", *OPERANDS[1:])
_BACKWARD_OPERANDS = ("dy", "x", "h", "v", "inv", "offs", *OPERANDS[1:], "top_k", *map(buffer_name, OPERANDS[1:]))


@dataclass(frozen=True)
class CompiledFfn:
    """The programs of one request on one device type (`hexa_fx.ops.program.FfnPrograms`). Each is made when first asked for.

    Args:
        request: what was asked for.
        device: device type.
    """

    request: FfnRequest
    device: str

    @cached_property
    def forward(self) -> Callable[..., Any]:
        """The forward program, over all operands of moe_ffn by position."""
        return _over(_FORWARD_OPERANDS, pipeline_for(self.device)(lower_forward(self.request)))

    @cached_property
    def backward(self) -> Callable[..., Any]:
        """The backward program, over dy, x, [h], v, inv, offs, the other operands, top_k and their buffers by position."""
        return _over(_BACKWARD_OPERANDS, pipeline_for(self.device)(lower_backward(self.request)))


compile_ffn = CompiledFfn
"""The compiler that ``hexa_fx/__init__.py`` registers."""


def _over(operands: tuple[str, ...], gm: GraphModule) -> Callable[..., Any]:
    """A function over all operands by position that calls gm with those it takes."""
    names = [n.target for n in gm.graph.nodes if n.op == "placeholder"]
    pick = operator.itemgetter(*(operands.index(str(n)) for n in names))
    run = gm.forward

    def picked(*args: Any) -> Any:
        return run(*pick(args))

    return picked
