"""Takes the snapshots and costs of every analysed block once; identical blocks share them."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field, replace

import torch.fx

from hexa_fx.inspection.costs import Costs, costs_of
from hexa_fx.inspection.stages import Snapshots, partition_stage, snapshots
from hexa_fx.isolation.size import is_out_of_memory
from hexa_fx.observers import PassEvent, at_block, muted
from hexa_fx.passes.block_analysis import BlockAnalysis, mode_of

log = logging.getLogger(__name__)


@dataclass
class Inspector:
    """Use it before rewritten blocks are installed, since costs are measured on the original's own forward."""

    _known: dict[torch.fx.Graph, tuple[Snapshots, Costs | None]] = field(default_factory=dict)

    partitioned: dict[str, torch.fx.Graph] = field(default_factory=dict)
    """Graphs with collectives by block path, of blocks that are spread over devices."""

    def see(self, event: PassEvent) -> None:
        """A listener for the partition pass, which runs after the snapshots were taken."""
        if event.name == "partition" and event.when == "after":
            self.partitioned[event.path] = event.graph

    def with_partition(self, path: str, taken: Snapshots) -> Snapshots:
        """The snapshots, with this rank's collectives after the rewrite if the block is partitioned."""
        if path not in self.partitioned or not taken.of_block:
            return taken
        added = partition_stage(self.partitioned[path], taken.of_block[-1])
        return replace(taken, of_block=(*taken.of_block, added))

    def snapshots(self, analysis: BlockAnalysis) -> Snapshots:
        """The stages of a rewritten block."""
        return self._look(analysis)[0]

    def costs(self, analysis: BlockAnalysis) -> Costs | None:
        """Costs of a block before and after; None if they could not be determined."""
        return self._look(analysis)[1]

    def _look(self, analysis: BlockAnalysis) -> tuple[Snapshots, Costs | None]:
        assert analysis.rewritten is not None
        graph = analysis.rewritten.graph
        if graph not in self._known:
            self._known[graph] = _inspected(analysis)
        return self._known[graph]


def _inspected(analysis: BlockAnalysis) -> tuple[Snapshots, Costs | None]:
    """Runs an inspection, logging its errors: they must not keep a block from being rewritten."""
    taken, captured, rewritten = Snapshots(), analysis.captured, analysis.rewritten
    assert analysis.match is not None
    assert captured is not None
    assert rewritten is not None
    try:
        with at_block(analysis.path, mode_of(captured.block)):
            taken = snapshots(analysis.match, rewritten)
        with muted():
            return taken, costs_of(captured, rewritten, taken)
    except Exception as error:
        if is_out_of_memory(error):
            log.warning(
                "%s: there was no memory left to measure what it costs; the block itself is fine", analysis.path
            )
            return taken, None
        log.exception("hexa_fx could not draw %s; the block itself is fine. Please report this", analysis.path)
        return taken, None
