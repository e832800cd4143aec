"""Applies a plan of how layers are spread over ranks, and exchanges it for another while the job runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.fx as fx
from torch import nn

from hexa_fx.distributed import slice_states
from hexa_fx.distributed.fully_sharded import shard_blocks
from hexa_fx.distributed.groups import is_axis
from hexa_fx.distributed.moves import check_movable, move_state, unite
from hexa_fx.distributed.session import PartitionSession
from hexa_fx.errors import PlanError
from hexa_fx.ir import RewrittenBlock
from hexa_fx.passes.partition.install import Finish, Installed, install_plan
from hexa_fx.passes.partition.layers import Modes, any_mode, that_spread
from hexa_fx.passes.partition.overlap import Seconds
from hexa_fx.passes.partition.plan import partition_model
from hexa_fx.passes.partition.plan_layers import MODES, PartitionConfig, Strategy
from hexa_fx.plan import Plan
from hexa_fx.runtime.forward import Analyst
from hexa_fx.runtime.install import install, installed_forward


@dataclass(frozen=True)
class Wanted:
    """How experts are to be spread; see `partition_model` and `install_plan`."""

    mesh: Any = None
    strategy: Strategy = "auto"
    capacities: Literal["measure"] | Sequence[float] | None = "measure"
    config: PartitionConfig | None = None
    timeout: timedelta | None = None
    data_mesh: Any = None


@dataclass(frozen=True)
class Caller:
    """What whoever spreads a model does about it.

    Args:
        finish: a last pass over every partitioned block.
        example: runs the model's forward once on the global batch, for the times of ``auto``.
        analyst: makes what analyses calls of other kinds than those that were planned, of what was installed; None if nobody does.
        changed: called with the session that takes the place of another when the running job is planned anew.
    """

    finish: Finish | None = None
    example: Callable[[], object] | None = None
    analyst: Callable[[Installed], Analyst] | None = None
    changed: Callable[[PartitionSession], None] | None = None


def apply_partition(
    model: nn.Module,
    blocks: Sequence[Modes],
    wanted: Wanted | None = None,
    plan: Plan | None = None,
    caller: Caller | None = None,
) -> PartitionSession:
    """Plans (unless ``plan`` is given), cuts, rewrites and patches the model's blocks. What `hexa_fx.optimize` calls.

    Args:
        blocks: the rewritten forms of every block, by mode (``train``, ``eval``), not yet installed.

    Returns:
        The session, which the model must keep.
    """
    blocks, caller, wanted = [that_spread(forms) for forms in blocks], caller or Caller(), wanted or Wanted()
    mesh, config = wanted.mesh, _on_mesh(wanted.config, wanted.mesh)
    if plan is None:
        plan = partition_model(model, blocks, mesh, wanted.strategy, wanted.capacities, config, caller.example)
    installed = install_plan(model, blocks, plan, mesh, wanted.timeout, caller.finish, data_mesh=wanted.data_mesh)
    _put_in(model, installed, caller)
    shard_blocks(model, installed.session, installed.fsdp, mesh)
    wanted = replace(wanted, config=replace(config, batch=sum(plan.batch)))
    # The timed run holds the state that it puts back: whole weights, which FSDP2 has exchanged.
    caller = replace(caller, example=None)
    installed.session.replanner = _Replanner(tuple(blocks), installed.layers, wanted, caller)
    return installed.session


def _on_mesh(config: PartitionConfig | None, mesh: Any) -> PartitionConfig:
    """With what the other axes of a larger mesh ask for: FSDP2 over them takes no empty gradient."""
    config = config or PartitionConfig()
    return replace(config, least_channels=1) if config.least_channels is None and is_axis(mesh) else config


def _put_in(model: nn.Module, installed: Installed, caller: Caller) -> None:
    """Patches the blocks, and binds to the session those that are cut."""
    analyst = caller.analyst(installed) if caller.analyst is not None else None
    for forms in installed.blocks:
        path = any_mode(forms).path
        module = model.get_submodule(path)
        if (forward := installed_forward(module)) is None:
            install(module, *forms.values(), analyst=analyst)
        else:
            forward.exchange([*forms.values()], analyst)
        if path not in installed.fsdp:
            installed.session.bind(module, path, installed.traced.get(path))
    installed.session.follow(model)


@dataclass(frozen=True)
class _Replanner:
    """What `apply_partition` was given, and the layers as they were before the first cut."""

    blocks: tuple[Modes, ...]
    layers: tuple[tuple[Any, ...], ...]
    wanted: Wanted
    caller: Caller

    def __call__(
        self,
        session: PartitionSession,
        optimizers: Sequence[torch.optim.Optimizer] = (),
        *,
        capacities: Literal["measure"] | Sequence[float] | None = "measure",
        strategy: Strategy | None = None,
        partition: PartitionConfig | None = None,
    ) -> PartitionSession:
        """Exchanges the plan of a running model; see `PartitionSession.replan`."""
        model, old, mesh, caller = session.model, session.plan, self.wanted.mesh, self.caller
        session.settle()
        for optimizer in optimizers:
            slice_states.check_optimizer(optimizer)
        check_movable(session.shards, optimizers, session.groups)
        config = _on_mesh(partition or self.wanted.config, mesh)
        config = config if config.batch is not None else replace(config, batch=sum(old.batch))
        strategies = {mode: name for name, mode in MODES.items()}
        strategy = strategy or {layer.path: strategies[layer.mode] for layer in old.layers}
        plan = partition_model(model, self.blocks, mesh, strategy, capacities, config, by_block=self.layers)
        if any((one.mode == "fsdp") != (other.mode == "fsdp") for one, other in zip(old.layers, plan.layers)):
            raise PlanError(
                "FSDP2 keeps what it holds: to change layers to or from 'fsdp', save a checkpoint and load it"
            )
        given = {"timeout": self.wanted.timeout, "finish": caller.finish, "data_mesh": self.wanted.data_mesh}
        given |= {"known": self.layers, "unite": lambda path: unite(session.shards_of(path), session.groups)}
        installed = install_plan(model, self.blocks, plan, mesh, **given)
        for optimizer in optimizers:
            move_state(optimizer, session.shards, installed.session.shards, session.groups)
        session.close()
        for optimizer in optimizers:
            slice_states.mark_optimizer(optimizer)
        _put_in(model, installed, caller)
        installed.session.replanner = replace(self, wanted=replace(self.wanted, config=config))
        if caller.changed is not None:
            caller.changed(installed.session)
        return installed.session


def apply_to_graph_module(
    module: fx.GraphModule, wanted: Wanted | None = None, plan: Plan | None = None, seconds: Seconds | None = None
) -> Installed:
    """As `apply_partition`, for an optimized model as one graph: ``torch.export.export(model, ...).module()``, or make_fx.

    Collectives are scheduled over the whole graph: a gather starts as soon as its slot is free, before the attention and
    router of its layer, whatever module they belong to. Layers are named after the module that owns their weights. Each rank
    exports its own batch size; the order of the nodes is the same.

    Args:
        seconds: estimated time of a node, equal on all ranks, which says what may wait; see `overlap.overlap`.
    """
    block, w = RewrittenBlock("", module.graph), wanted or Wanted()
    plan = plan or partition_model(module, [block], w.mesh, w.strategy, w.capacities, w.config)
    if any(layer.mode == "fsdp" for layer in plan.layers):
        raise PlanError("a model as one graph is cut or left alone: 'fsdp' is for modules, which FSDP2 hooks")
    installed = install_plan(module, [block], plan, w.mesh, w.timeout, seconds=seconds)
    module.graph = any_mode(installed.blocks[0]).graph
    installed.session.bind(module)
    return installed
