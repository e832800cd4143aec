"""What `hexa::moe_ffn` runs: the graphs of `lower`, taken through the passes of a device, whose order stands here alone."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch.fx import GraphModule

from hexa_fx.ops.program import FfnRequest
from hexa_fx.ops.table_layers import SOURCES_OPERANDS, MoeFfn, MoeFfnBackward, MoeFfnSources, MoeFfnSourcesBackward
from hexa_fx.passes.lowering.fuse import FuseActivation
from hexa_fx.passes.lowering.graph_pass import BindKernels, Pipeline, TakeSaved
from hexa_fx.passes.lowering.lower import buffer_name, lower_backward, lower_forward
from hexa_fx.passes.lowering.tile import TileRows

CUDA = Pipeline((FuseActivation(gradients=True), BindKernels("cuda"), TakeSaved()))
"""One kernel after the other, each over all rows."""

CPU = Pipeline((FuseActivation(), TileRows(), TakeSaved()))
"""All operators of a tile of rows before the next tile, so that rows stay in cache."""

CPU_SOURCES = Pipeline((FuseActivation(gradients=True), BindKernels("cpu"), TakeSaved()))
"""A CPU's for factors and packed weights, which do not run on tiles."""

REFERENCE = Pipeline((FuseActivation(gradients=True), TakeSaved()))
"""Any other device: the operators as torch's dispatcher finds them, which are torch's own where nothing is registered."""


@dataclass(frozen=True)
class CompiledFfn:
    """The programs of one request on one device type (`hexa_fx.ops.program.FfnPrograms`). Each is made when first asked for. It is
    the compiler that ``hexa_fx/__init__.py`` registers.

    Args:
        request: what was asked for.
        device: device type.
    """

    request: FfnRequest
    device: str

    @cached_property
    def forward(self) -> Callable[..., Any]:
        """The forward program, over the operands of `hexa::moe_ffn` or `hexa::moe_ffn_sources`."""
        record = MoeFfnSources if self.request.formats else MoeFfn
        return _over(record._fields, self._pipeline(lower_forward(self.request)))

    @cached_property
    def backward(self) -> Callable[..., Any]:
        """The backward program, over the operands of its operator, of which h is in a list, and buffers."""
        record = MoeFfnSourcesBackward if self.request.formats else MoeFfnBackward
        operands = (*record._fields, *map(buffer_name, SOURCES_OPERANDS[1:]))
        return _over(operands, self._pipeline(lower_backward(self.request)))

    @property
    def _pipeline(self) -> Pipeline:
        """The passes over what `hexa_fx.passes.lowering.lower` makes, of weights that are sources, or not."""
        if self.device == "cpu":
            return CPU_SOURCES if self.request.formats else CPU
        return CUDA if self.device == "cuda" else REFERENCE


def _over(operands: tuple[str, ...], gm: GraphModule) -> Callable[..., Any]:
    """A function over all operands by position that calls gm with those it takes."""
    names = [n.target for n in gm.graph.nodes if n.op == "placeholder"]
    pick = operator.itemgetter(*(operands.index(str(n)) for n in names))
    run = gm.forward

    def picked(*args: Any) -> Any:
        return run(*pick(args))

    return picked
