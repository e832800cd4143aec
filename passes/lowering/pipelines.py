"""The passes of the operator's compiler, in order, for every kind of device. The order stands here and nowhere else."""

from __future__ import annotations

from hexa_fx.passes.lowering.fuse import FuseActivation
from hexa_fx.passes.lowering.graph_pass import BindKernels, Pipeline, TakeSaved
from hexa_fx.passes.lowering.tile import TileRows

CUDA = Pipeline((FuseActivation(gradients=True), BindKernels("cuda"), TakeSaved()))
"""One kernel after the other, each over all rows."""

CPU = Pipeline((FuseActivation(), TileRows(), TakeSaved()))
"""All operators of a tile of rows before the next tile, so that rows stay in cache."""

CPU_SOURCES = Pipeline((FuseActivation(gradients=True), BindKernels("cpu"), TakeSaved()))
"""A CPU's for factors and packed weights, which do not run on tiles."""

REFERENCE = Pipeline((FuseActivation(gradients=True), TakeSaved()))
"""Any other device: the operators as torch's dispatcher finds them, which are torch's own where nothing is registered."""

PIPELINES = {"cuda": CUDA, "cpu": CPU}


def pipeline_for(device: str) -> Pipeline:
    """The passes for a device type, over what `hexa_fx.passes.lowering.lower` makes."""
    return PIPELINES.get(device, REFERENCE)
