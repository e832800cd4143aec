"""Analyses calls of another kind on blocks whose experts are spread over devices, on all ranks together.

Weights are put together for the analysis, each rank makes it of its own call, and what is found counts if it is the same on all of
them. A rank that comes alone is an error on all of them, since hosts meet before anything is exchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from hexa_fx.config import HexaConfig
from hexa_fx.distributed.bindings import unbind
from hexa_fx.distributed.groups import local_part
from hexa_fx.distributed.lockstep import Place, meet
from hexa_fx.distributed.moves import put_together
from hexa_fx.distributed.plan_agreement import check_same_request
from hexa_fx.distributed.session import PartitionSession
from hexa_fx.distributed.shards import LayerWeights
from hexa_fx.errors import PlanError, RankError
from hexa_fx.inspection.block_report import BlockReport
from hexa_fx.ir import RewrittenBlock
from hexa_fx.passes.block_analysis import BlockAnalysis, StructureCache
from hexa_fx.passes.partition.collectives import Placement
from hexa_fx.passes.partition.install import Installed, partition_block
from hexa_fx.passes.partition.layers import read_layers
from hexa_fx.passes.partition.overlap import overlap
from hexa_fx.runtime.forward import HexaForward
from hexa_fx.specialise import Specialiser


class SpreadSpecialiser(Specialiser):
    """What the blocks of a model are analysed with whose experts are spread.

    Args:
        installed: what was installed by the plan.
        config, finish, cache, reports, written: see `Specialiser`.
    """

    def __init__(
        self,
        installed: Installed,
        config: HexaConfig,
        finish: Callable[[RewrittenBlock, HexaConfig], RewrittenBlock],
        cache: StructureCache,
        reports: dict[str, BlockReport],
        written: frozenset[str],
    ) -> None:
        super().__init__(config, finish, cache, reports, written)
        self._session = installed.session
        self._layers = {layer.root: layers for layers in installed.layers for layer in layers}
        self._whole: nn.Module | None = None

    def _shadow(self, forward: HexaForward, module: nn.Module) -> nn.Module:
        """With whole weights. A collective call."""
        shadow, session = super()._shadow(forward, module), self._session
        unbind(shadow)
        for layer in self._layers.get(forward.path, ()):
            for shard in session.shards_of(layer.path):
                whole = put_together(local_part(shard.parameter).detach(), shard, session.groups)
                path, _, key = shard.name.removeprefix(f"{forward.path}.").rpartition(".")
                shadow.get_submodule(path)._parameters[key] = nn.Parameter(whole, shard.parameter.requires_grad)
        self._whole = shadow
        return shadow

    def _analyse(self, forward: HexaForward, *call: Any) -> tuple[BlockAnalysis, str | None]:
        session, found = self._session, None
        with session.guard("the analysis of a call of another kind"):
            meet(session.groups, Place.ANALYSIS)
            try:
                found = super()._analyse(forward, *call)
                form, refusal = found[0].rewritten, found[0].refusal
                said = form.graph.python_code("self").src if form is not None else str(refusal and refusal.reason)
            except RankError:
                raise
            except Exception as error:
                said, failed = f"{type(error).__name__}: {error}", error
            check_same_request({f"what a call of another kind makes of {forward.path!r}": said}, session.groups)
        if found is None:
            raise failed
        return found

    def _try_around(self, forward: HexaForward) -> None:
        """Nothing: what is around a block of which every rank has slices runs its own code."""

    def _add(self, forward: HexaForward, rewritten: RewrittenBlock) -> None:
        layers, whole, self._whole = self._layers.get(forward.path, ()), self._whole, None
        if whole is not None and any(self._session.shards_of(layer.path) for layer in layers):  # else FSDP2 has them
            rewritten = _partitioned(rewritten, whole, self._session, layers)
        super()._add(forward, rewritten)


def _partitioned(
    form: RewrittenBlock, whole: nn.Module, session: PartitionSession, layers: Sequence[LayerWeights]
) -> RewrittenBlock:
    """A block that was made of ``whole``, on this rank's slices of the layers that were planned.

    Raises:
        PlanError: it does not read these layers' weights as they were cut.
    """
    read = read_layers(whole, replace(form, path=""))
    if [(layer.geometry, layer.sources) for layer in read] != [(layer.geometry, layer.sources) for layer in layers]:
        raise PlanError("in such a call it reads other expert weights than those that are cut")
    done = partition_block(form, layers, session.plan, Placement.of(session))
    if session.plan.prefetch:
        overlap(done.graph, session.plan.slots or len(session.plan.layers))
    return done
