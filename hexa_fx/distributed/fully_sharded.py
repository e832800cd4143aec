"""Blocks that are planned ``fsdp``: torch's FSDP2 over the ranks of the partition, on rewritten blocks whose weights stay whole.

`sync_gradients`, `clip_grad_norm_` and checkpoints know DTensors, so that these blocks stand beside others whose experts are cut.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard

from hexa_fx.distributed.groups import mesh_over
from hexa_fx.distributed.session import PartitionSession


def shard_blocks(model: nn.Module, session: PartitionSession, paths: Sequence[str], mesh: Any = None) -> None:
    """`fully_shard` of the blocks at these paths, each gathered by itself, once in forward and once in backward.

    With ``data_parallel="sum"`` nobody else is expected to wrap the model, so that it becomes FSDP2's root, which gathers ahead of
    use; its other parameters are left alone. With ``"mean"`` the wrapper around it is the root.

    Args:
        mesh: as of the partition.
    """
    if not paths:
        return
    mean = session.plan.data_parallel == "mean"
    over = mesh_over(mesh, session.groups, next(model.parameters()).device)
    for path in paths:
        _as_planned(fully_shard(model.get_submodule(path), mesh=over, reshard_after_forward=True), mean)
    if mean or "" in paths:
        return
    inside = {id(p) for path in paths for p in model.get_submodule(path).parameters()}
    others = {p for p in model.parameters() if id(p) not in inside}
    _as_planned(fully_shard(model, mesh=over, ignored_params=others), mean)


def _as_planned(module: FSDPModule, mean: bool) -> None:
    """FSDP2 divides gradients by the number of ranks unless it is told not to."""
    if not mean:
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
