"""Installs a plan: cuts the model's expert parameters to this rank's slices and puts collectives into the blocks' graphs."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any

import torch.fx as fx
from torch import nn

from hexa_fx.distributed.groups import is_axis, mesh_over
from hexa_fx.distributed.plan_agreement import check_same_weights
from hexa_fx.distributed.session import PartitionSession
from hexa_fx.distributed.shards import LayerWeights, ShardedParameter, check_cuttable, check_plain, cut_layer
from hexa_fx.errors import PlanError
from hexa_fx.ir import NEVER_SMALL, RewrittenBlock
from hexa_fx.observers import announced, at_block
from hexa_fx.passes.partition.collectives import Placement, compiled_form, partition_graph
from hexa_fx.passes.partition.layers import Modes, any_mode, follow_cut, modes_of, read_layers, read_local
from hexa_fx.passes.partition.overlap import OverlapReport, Seconds, overlap
from hexa_fx.plan import LayerPlan, Plan
from hexa_fx.runtime.program import Program

log = logging.getLogger(__name__)

Finish = Callable[[RewrittenBlock], RewrittenBlock]
"""A last pass over a partitioned block."""


@dataclass(frozen=True)
class Installed:
    """What `install_plan` gives back.

    Args:
        session: run-time of the plan. Bind every patched block to it (`PartitionSession.bind`) and keep it with the
            model.
        blocks: the rewritten blocks with partitioned graphs, by mode, to be installed like any rewritten block.
        schedules: what the overlap pass did to each graph, in the order of ``blocks`` and modes; empty without prefetch.
        fsdp: paths of the blocks that are left whole and unbound, for `hexa_fx.distributed.fully_sharded.shard_blocks`.
        layers: the expert layers of every block, as they were before the cut.
        traced: what torch.compile traces of every block, by path and by `RewrittenBlock.training`.
    """

    session: PartitionSession
    blocks: tuple[dict[Any, RewrittenBlock], ...]
    schedules: tuple[OverlapReport, ...] = ()
    fsdp: tuple[str, ...] = ()
    layers: tuple[tuple[LayerWeights, ...], ...] = ()
    traced: Mapping[str, Mapping[bool | None, Program]] = field(default_factory=dict)


def install_plan(
    model: nn.Module,
    blocks: Sequence[RewrittenBlock | Modes],
    plan: Plan,
    mesh: Any = None,
    timeout: timedelta | None = None,
    finish: Finish | None = None,
    seconds: Seconds | None = None,
    data_mesh: Any = None,
    known: Sequence[Sequence[LayerWeights]] | None = None,
    unite: Callable[[str], None] | None = None,
) -> Installed:
    """Cuts the model's expert parameters to this rank's slices and puts the plan's collectives into the blocks' graphs.

    A collective call. Changes the parameters in place; call it before building optimizers and before DDP or FSDP2.

    Args:
        timeout: after which a rank that does not join a collective is an error.
        finish: last pass over every partitioned block.
        seconds: estimated time of a node, for the schedule of transfers; see `hexa_fx.passes.partition.overlap.overlap`.
        data_mesh: the data-parallel dimensions beside ``mesh``.
        known: of a model that another plan has cut: its expert layers by block, as they were read when weights were whole.
        unite: likewise, makes the weights of the layer at a path whole again.

    Raises:
        PlanError: ranks hold different plans or weights, the plan is for another model, or a parameter cannot be cut.
        RankError: a rank did not arrive.
    """
    fsdp = _planned_whole(plan, mesh)
    read = known or [_same_in_all_modes(model, block) for block in blocks]
    layers = [layer for found in read for layer in found]
    _check_plan(plan, layers)
    check_plain(model, layers)
    if unite is None:
        check_cuttable(model, [layer for layer in layers if layer.path not in fsdp])
    session = PartitionSession(plan, {layer.path: layer.geometry for layer in layers}, mesh, timeout, data_mesh)
    if unite is None:
        try:
            with session.guard("the comparison of weights"):
                check_same_weights(model, session.everyone)
        except PlanError:
            session.close()
            raise
    session.hold(model, _cut(model, layers, session, mesh, unite))
    placement = Placement.of(session)
    done, schedules, whole, traced = [], [], [], {}
    for block, here in zip(blocks, read):
        forms, path = modes_of(block).items(), any_mode(block).path
        if _is_left_whole(path, here, fsdp):
            whole.append(path)
            done.append({mode: replace(form, small=NEVER_SMALL) for mode, form in forms})
        else:
            done.append({mode: partition_block(form, here, plan, placement) for mode, form in forms})
            if not is_axis(mesh):
                planned = [plan.layer(layer.path) for layer in here]
                given = planned, plan, placement, session.compiled
                traced[path] = {
                    form.training: compiled_form(form, _on_slices(form, here, planned, placement), *given)
                    for _, form in forms
                }
        if plan.prefetch and path not in whole:
            schedules += [overlap(form.graph, plan.slots or len(plan.layers), seconds) for form in done[-1].values()]
        if finish is not None:
            done[-1] = {mode: finish(form) for mode, form in done[-1].items()}
        session.graphs[path] = {str(mode): form.graph for mode, form in done[-1].items()}
        if not here:
            log.info("%r has experts of a form that is not cut: they stay whole on every rank", path)
    session.cache.follows_schedule = any(schedule.held for schedule in schedules)
    return Installed(session, tuple(done), tuple(schedules), tuple(whole), tuple(map(tuple, read)), traced)


def _cut(
    model: nn.Module,
    layers: Sequence[LayerWeights],
    session: PartitionSession,
    mesh: Any,
    unite: Callable[[str], None] | None,
) -> dict[str, list[ShardedParameter]]:
    """Cuts the planned layers to this rank's slices, but for those that FSDP2 keeps. Equal shares become DTensors."""
    shards: dict[str, list[ShardedParameter]] = {}
    rank, over = session.rank, mesh_over(mesh, session.groups, next(model.parameters()).device)
    for layer, planned in zip(layers, session.plan.layers):
        if planned.mode == "fsdp":
            continue
        if unite is not None:
            unite(layer.path)
        lo = sum(planned.shards[:rank])
        equal = len(set(planned.shards)) == 1
        shards[layer.path] = cut_layer(model, layer, lo, lo + planned.shards[rank], over if equal else None)
    return shards


def _planned_whole(plan: Plan, mesh: Any) -> set[str]:
    """Paths of the layers that FSDP2 keeps."""
    fsdp = {layer.path for layer in plan.layers if layer.mode == "fsdp"}
    if fsdp and is_axis(mesh):
        raise PlanError(
            f"{sorted(fsdp)} are planned 'fsdp', which is over all ranks of a mesh and not along one of its axes: plan them "
            "'data' or 'model', or call fully_shard on the other axes"
        )
    return fsdp


def _check_plan(plan: Plan, layers: Sequence[LayerWeights]) -> None:
    if [layer.path for layer in layers] != [layer.path for layer in plan.layers]:
        raise PlanError(
            f"the plan is for layers {[layer.path for layer in plan.layers]}, the model has {[layer.path for layer in layers]}"
        )
    for layer, planned in zip(layers, plan.layers):
        if replace(layer.geometry.shape, top_k=planned.shape.top_k) != planned.shape:  # top_k only enters costs
            raise PlanError(f"the plan has {planned.shape} for {layer.path!r}, the model {layer.geometry.shape}")


def _is_left_whole(path: str, layers: Sequence[LayerWeights], fsdp: set[str]) -> bool:
    left = [layer.path in fsdp for layer in layers]
    if any(left) and not all(left):
        raise PlanError(f"FSDP2 takes a block whole: plan all layers of {path!r} as 'fsdp', or none")
    return any(left)


def _same_in_all_modes(model: nn.Module, block: RewrittenBlock | Modes) -> list[LayerWeights]:
    found = [read_layers(model, form) for form in modes_of(block).values()]
    if any(other != found[0] for other in found[1:]):
        raise PlanError(f"{any_mode(block).path!r} reads other expert weights in training than in evaluation")
    return found[0]


def partition_block(
    block: RewrittenBlock, layers: Sequence[LayerWeights], plan: Plan, placement: Placement
) -> RewrittenBlock:
    """A block on this rank's slices, with collectives."""
    planned = [plan.layer(layer.path) for layer in layers]
    with at_block(block.path), announced("partition", block.graph) as done:
        done.graph = graph = _on_slices(block, layers, planned, placement)
        partition_graph(graph, planned, plan, placement)
    # its own code cannot run on cut weights, however few tokens there are
    return replace(block, graph=graph, small=NEVER_SMALL)


def _on_slices(
    block: RewrittenBlock, layers: Sequence[LayerWeights], planned: list[LayerPlan], placement: Placement
) -> fx.Graph:
    """A copy of the block's graph that reads this rank's slices."""
    graph = deepcopy(block.graph)
    follow_cut(graph, layers, planned, placement.rank)
    read_local(graph)
    return graph
