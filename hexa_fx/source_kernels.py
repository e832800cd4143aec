"""Has the kernels of packed weights and of adapters built in the background, from the moment that an installed block reads such.

Those of dense weights are requested while a block is analysed (`hexa_fx.passes.kernel_requests`).
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping

from hexa_fx.errors import KernelError
from hexa_fx.inspection.block_report import BlockReport
from hexa_fx.passes.kernel_requests import device_of
from hexa_fx.runtime.forward import HexaForward
from hexa_fx.runtime.packed_reader import packed_weights

log = logging.getLogger(__name__)

Ranks = Mapping[tuple[int, str], int]


def request_kernels_of_sources(blocks: Iterable[BlockReport], ranks: Ranks) -> None:
    """Requests what blocks on a CUDA device launch for weights that are no plain tensors, at any number of tokens.

    Args:
        blocks: of a report of an installed model.
        ranks: of adapters, by the block's ``id`` and the parameter's name.
    """
    seen: set[tuple[object, ...]] = set()
    for block in blocks:
        if block.forward is not None and block.case is not None:
            _request(block, block.forward, ranks, seen)


def _request(block: BlockReport, forward: HexaForward, ranks: Ranks, seen: set[tuple[object, ...]]) -> None:
    module = forward.module
    device, packed, added = device_of(module), packed_weights(module), _added(forward, ranks)
    if device is None or block.case is None or not (packed or added):
        return
    from hexa_fx import jit
    from hexa_fx.cuda.choosing import card_of  # imports CUTLASS's Python
    from hexa_fx.cuda.kernel_set import frozen, kernel_set, sources_layer_of

    layer = sources_layer_of(block.case.spec, block.case.operands, packed, added)
    kind = device.index, *layer.kind
    if kind in seen:  # blocks of a kind launch the same
        return
    seen.add(kind)
    try:
        found = kernel_set(frozen(layer), card_of(device.index or 0))
    except KernelError as error:  # the operators fall back and say so
        log.debug("no kernels are built ahead for %s: %s", block.name, error)
        return
    jit.builder().request(found)


def _added(forward: HexaForward, ranks: Ranks) -> dict[str, int]:
    """Ranks by operand."""
    paths = list(next((each.matrices for each in forward.specialisations if each.matrices), {}))
    operands = ("w1", "w3", "w2") if len(paths) == 3 else ("w1", "w2")
    found = {name: ranks.get((id(forward.module), path)) for name, path in zip(operands, paths)}
    return {name: rank for name, rank in found.items() if rank}
