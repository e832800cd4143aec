"""One running plan: process groups, shared cache, and the modules bound to it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any
from weakref import WeakSet, WeakValueDictionary, ref

import torch
import torch.distributed as dist
import torch.fx as fx
from torch import Tensor, nn
from torch.compiler import is_compiling

from hexa_fx.distributed.bindings import Bindings
from hexa_fx.distributed.collectives import all_reduce_
from hexa_fx.distributed.compiled_layers import CompiledLayers
from hexa_fx.distributed.geometry import Geometry
from hexa_fx.distributed.groups import Groups, check_there, data_axes, make_groups
from hexa_fx.distributed.lockstep import (
    NotedCounts,
    Place,
    guarded,
    in_backward_of,
    is_capturing,
    join,
    kind_of_forward,
    meet,
)
from hexa_fx.distributed.pace import Pace, timed
from hexa_fx.distributed.plan_agreement import check_same_plan
from hexa_fx.distributed.reductions import GradientReductions
from hexa_fx.distributed.shards import ShardedParameter, parameters_here
from hexa_fx.distributed.shared_cache import CachedLayer, SavedTensors, SharedCache, in_backward
from hexa_fx.distributed.wrappers import Wrappers
from hexa_fx.errors import PlanError
from hexa_fx.isolation.module_tree import with_ancestors
from hexa_fx.plan import AttachedPartition, Plan, describe_layer
from hexa_fx.runtime.program import Program
from hexa_fx.steps.fully_sharded import forget_step
from hexa_fx.steps.graphed import GraphedStep

_numbers = itertools.count()
open_sessions: WeakValueDictionary[str, PartitionSession] = WeakValueDictionary()


class PartitionSession(AttachedPartition):
    """What partitioned graphs need while they run. Keep it alive as long as the model, and `close` it before the job ends.

    All ranks of the mesh create it at the same point, where it raises if a rank is missing or holds another plan.

    Args:
        plan: the same on every rank.
        geometries: layout of every planned layer, by path.
        mesh: a 1-d DeviceMesh, which may be an axis of a larger one, a process group, or None for all ranks.
        timeout: how long a collective of this session waits for a rank before it is an error.
        data_mesh: the data-parallel dimensions beside ``mesh``, if the session is to know them; see `hexa_fx.optimize_`.
    """

    def __init__(
        self,
        plan: Plan,
        geometries: Mapping[str, Geometry],
        mesh: Any = None,
        timeout: timedelta | None = None,
        data_mesh: Any = None,
    ) -> None:
        self.plan = plan
        self.groups: Groups = make_groups(mesh, timeout)
        check_same_plan(plan, self.groups)
        self.data = data_axes(data_mesh, self.groups)
        self.name = f"hexa{next(_numbers)}"
        self._geometries = dict(geometries)
        centric = [layer for layer in plan.layers if layer.mode == "data_centric"]
        layers = [CachedLayer(layer.path, self._geometries[layer.path], layer.shards) for layer in centric]
        self.reductions = GradientReductions(self.groups)
        self.cache = SharedCache(layers, plan.slots, self.groups, plan.prefetch, self._parameters_of, self._kind)
        self.saved_tensors = SavedTensors(self.cache)
        self._wrappers = Wrappers(
            self.groups, dist.get_process_group_ranks(self.everyone) if plan.data_parallel == "sum" else ()
        )
        self.shards: tuple[ShardedParameter, ...] = ()
        self._of_layer: dict[str, tuple[ShardedParameter, ...]] = {}
        self._model: Callable[[], nn.Module | None] = lambda: None
        self._graphed: WeakSet[GraphedStep] = WeakSet()
        self._counts = NotedCounts()
        self.following = self._counts.following
        self.graphs: dict[str, Mapping[str, fx.Graph]] = {}
        self._begin_guard = self.guard("the first gathers of a forward")
        self._bindings = Bindings(self.saved_tensors, self.guard)
        self.compiled = CompiledLayers(self.name, self.saved_tensors, self.guard)
        self.replanner: Callable[..., PartitionSession] | None = None
        open_sessions[self.name] = self

    @property
    def rank(self) -> int:
        return self.groups.rank

    @property
    def everyone(self) -> Any:
        """A Gloo group of the partition's ranks and those of the data-parallel axes that the session knows."""
        return self.data.everyone or self.groups.host

    def geometry(self, layer: str) -> Geometry:
        """Layout of a planned layer's experts."""
        return self._geometries[layer]

    def hold(self, model: nn.Module, shards: Mapping[str, Sequence[ShardedParameter]]) -> None:
        """Notes what was cut, by layer."""
        self._of_layer = {path: tuple(found) for path, found in shards.items()}
        self.shards = tuple(shard for found in self._of_layer.values() for shard in found)
        self._model = ref(model)
        self._wrappers.watch(self._model, self._of_layer, self.plan)

    @property
    def model(self) -> nn.Module:
        """The model whose experts this session spreads; raises `PlanError` if it is gone."""
        if (model := self._model()) is None:
            raise PlanError("the model of this session is gone: keep it as long as the session")
        return model

    def shards_of(self, layer: str) -> tuple[ShardedParameter, ...]:
        """What was cut of a planned layer."""
        return self._of_layer.get(layer, ())

    def _kind(self) -> int:
        return kind_of_forward(self.model, self.shards[0].parameter) if self.shards else 0

    def _parameters_of(self, layer: str) -> tuple[Tensor, ...]:
        return parameters_here(self.shards_of(layer), self._model())

    def readable(self, path: str, mode: str = "train") -> str:
        """The code that a block runs, with its collectives, headed by the plan of its layers.

        Args:
            path: the block's path in the model; one of ``graphs``.
            mode: ``train`` or ``eval``; a block without that mode shows the one that it has.

        Raises:
            PlanError: there is no partitioned block at this path.
        """
        if path not in self.graphs:
            raise PlanError(f"no partitioned block at {path!r}; they are {list(self.graphs)}")
        forms, plan = self.graphs[path], self.plan
        graph = forms.get(mode) or next(iter(forms.values()))
        here = [layer for layer in plan.layers if path in with_ancestors(layer.path)]
        head = [f"# rank {self.rank} of {plan.world}", *(f"# {describe_layer(layer).strip()}" for layer in here)]
        return "\n".join([*head, graph.python_code("self").src])

    def bind(
        self, module: nn.Module, where: str = "", traced: Mapping[bool | None, Program] | None = None
    ) -> nn.Module:
        """Wraps the forward of a module that runs a partitioned graph, and returns the module.

        Within that forward, autograd saves no gathered weight, and a failing collective raises a `RankError` that says where it
        failed. Binding both an outer and an inner module is harmless.

        Args:
            traced: what torch.compile traces instead, by the mode that a form holds in; without it, its graphs break here.
        """
        self._bindings.bind(module, where, traced or {}, self.shards)
        return module

    def follow(self, model: nn.Module) -> None:
        """Hooks the whole model: its forward, so that the first layers' weights start to travel when it begins, and state dicts."""
        self._bindings.before_forward(model, self.begin)
        self._bindings.around_states(self.shards)

    def begin(self, *_: Any) -> None:
        """Called when a forward of the whole model begins."""
        if is_compiling() or in_backward():  # recomputation of a checkpointed model
            return
        check_there(self.groups)
        self._wrappers.check()
        self.reductions.forget()
        with self._begin_guard:
            self.cache.begin()

    def guard(self, where: str, barrier: bool = False) -> AbstractContextManager[None]:
        """A context that turns the error of a failed collective into a `RankError` that says where it failed.

        Bound forwards and our own backward collectives run in it. Put it around ``loss.backward()`` to cover torch's collectives.

        Args:
            barrier: hosts wait for each other first, so that ranks that do not come are named.
        """
        return guarded(where, self.groups if barrier else None)

    def exchange_counts(self, rows: int) -> list[int]:
        """Every rank's ``rows`` of a layer, exchanged over the host group.

        Raises:
            PlanError: a CUDA graph is being captured of a step that was not noted before.
            RankError: other ranks are elsewhere.
        """
        in_backward_of(self.groups.main_name)
        return self._counts.exchange(self.groups, rows)

    def total(self, count: int) -> int:
        """The sum of ``count`` over the ranks of the partition and of the data-parallel dimensions that it knows.

        Raises:
            PlanError: a CUDA graph is being captured, which would hold the counts of this step for ever.
        """
        if is_capturing():
            raise PlanError(
                "counts of samples are exchanged between hosts, which a CUDA graph cannot repeat: weight the loss by a number that "
                "is known"
            )
        total = torch.tensor([sum(meet(self.groups, Place.COUNT, count))], device="cpu")
        with self.guard("the exchange of counts"):
            for host in self.data.hosts:
                dist.all_reduce(total, group=host)
        return int(total)

    def invalidate(self) -> None:
        """Drops gathered weights. Call it on all ranks after changing expert weights by other means than an optimizer."""
        self.cache.invalidate()

    def settle(self) -> None:
        """Waits for gathers and sums of gradients under way, so that the next step depends on none of them."""
        self.cache.drain()
        self.reductions.finish()

    def abandon(self) -> None:
        """Forgets gathers and sums of a step that was broken off; so does FSDP2 around the experts."""
        self.reductions.forget()
        self.cache.abandon()
        forget_step(self.model)

    def gathered(self, mine: Sequence[int]) -> list[list[int]]:
        """These numbers of every rank of the partition and of the data-parallel axes that it knows."""
        out = [
            torch.empty(len(mine), dtype=torch.int64, device="cpu") for _ in range(dist.get_world_size(self.everyone))
        ]
        with self.guard("the agreement on a recorded step"):
            dist.all_gather(out, torch.tensor(mine, device="cpu"), group=self.everyone)
        return [part.tolist() for part in out]

    def held(self) -> list[Any]:
        """Memory that a recorded step uses and the cache might give up."""
        return [slot.buffer for slot in self.cache.slots]

    def graphed(self, step: Callable[..., Any], warmup: int = 3) -> GraphedStep:
        """The training step ``step(*tensors)`` as a CUDA graph with its collectives, by the rules of docs/training.md.

        Args:
            step: forward and backward, and what else of the step is to be in the graph.
            warmup: how often a kind of call runs as it is before it is recorded.
        """
        self._graphed.add(made := GraphedStep(self, step, warmup))
        return made

    def pace(self, min_seconds: float | None = None) -> Pace:
        """Times the devices between two steps, as the plan's were; `Pace.gain` says whether to `replan`. A collective call.

        Args:
            min_seconds: how long one of the four timed runs lasts at least. Default: 0.05; 0.1 on CUDA.
        """
        self.settle()
        with self.guard("the timing of the devices"):
            meet(self.groups, Place.PACE)
            layer, held = self._geometries[self.plan.layers[0].path], next(self.model.parameters())
            return Pace.of(self.plan, timed(layer, held, self.groups, min_seconds))

    def replan(self, optimizers: Sequence[torch.optim.Optimizer] = (), **changes: Any) -> PartitionSession:
        """Plans anew and moves the experts to their new slices, between two steps. A collective call; returns the new session.

        Gradients are dropped, and parameters are new objects where shares turn from equal to unequal or back. For another number of
        ranks save a checkpoint and load it.

        Args:
            optimizers: those that hold state of the experts, which moves along.
            changes: ``capacities``, ``strategy`` and ``partition`` as of `hexa_fx.optimize_`. Default: measured, and as before.

        Raises:
            PlanError: the experts are under FSDP2; or the plan is impossible. The old session then goes on.
        """
        if self.replanner is None:
            raise PlanError("this session was installed by hand: only that of hexa_fx.optimize_ can plan anew")
        with self.guard("the exchange of plans"):
            meet(self.groups, Place.PLAN)
            return self.replanner(self, optimizers, **changes)

    def join(self, when: str = "at a barrier", timeout: timedelta | None = None) -> None:
        """A barrier between hosts. Raises `RankError` with the ranks that do not arrive."""
        join(self.groups, when, timeout)

    def sum(self, x: Tensor) -> Tensor:
        """The sum of a tensor over the ranks, and over the data-parallel dimensions that the session knows, on all ranks."""
        with self.guard("a sum over the ranks"):
            total = x.clone()
            for group in (self.groups.main, *self.data.groups):
                total = all_reduce_(total, str(group.group_name))
        return total

    def close(self) -> None:
        """Waits for collectives under way, and gives bound modules their forward back."""
        for step in self._graphed:
            step.end()
        self.cache.drain()
        open_sessions.pop(self.name, None)
        self._bindings.undo()


def find_session(name: str) -> PartitionSession:
    """The session of this name, which graphs hold instead of it; raises `PlanError` if it is gone."""
    if (session := open_sessions.get(name)) is None:
        raise PlanError(
            f"the graph belongs to partition session {name!r}, which is closed or gone: keep it open as long as the model runs, or "
            "save a checkpoint and load it into a new model"
        )
    return session
