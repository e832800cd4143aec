"""What a recorded run holds of weights, while these are laid elsewhere in memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
import torch.fx
from torch.utils import _pytree as pytree

from hexa_fx.capture import NodeRecord, record_of
from hexa_fx.capture.records import memory_of


@dataclass(frozen=True)
class _ViewOfParameter:
    """Where a view lies in a contiguous parameter that has memory of its own."""

    parameter: torch.Tensor
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    @classmethod
    def of(cls, view: torch.Tensor, parameter: torch.Tensor) -> _ViewOfParameter:
        offset = int(view.storage_offset()) - int(parameter.storage_offset())
        return cls(parameter, tuple(view.size()), view.stride(), offset)

    def view(self) -> torch.Tensor:
        data = self.parameter.data
        return data.as_strided(self.size, self.stride, data.storage_offset() + self.offset)


@contextmanager
def following(graphs: Iterable[torch.fx.Graph], parameters: Iterable[torch.Tensor]) -> Iterator[None]:
    """Lets go of recorded views of ``parameters``, and takes the same views of where these are afterwards.

    One that stayed would keep the memory that its parameter has left: a second copy of the weights in all. Parameters that are not
    contiguous, or share their memory, are left alone: they lie in another way afterwards.
    """
    alone = (p for p in parameters if p.untyped_storage().nbytes() == p.numel() * p.element_size())
    homes = {memory_of(p): p for p in alone if p.is_contiguous()}

    def place(value: torch.Tensor) -> torch.Tensor | _ViewOfParameter:
        parameter = homes.get(memory_of(value))
        return value if parameter is None or value is parameter else _ViewOfParameter.of(value, parameter)

    moved = [node for graph in graphs for node in graph.nodes if _touches(record_of(node), homes)]
    for node in moved:
        record = record_of(node)
        node.meta["hexa"] = replace(record, value=pytree.tree_map_only(torch.Tensor, place, record.value))
    try:
        yield
    finally:
        for node in moved:
            record = record_of(node)
            value = pytree.tree_map_only(_ViewOfParameter, _ViewOfParameter.view, record.value)
            memory = memory_of(homes[record.storage]) if record.storage in homes else record.storage
            node.meta["hexa"] = replace(record, value=value, storage=memory)


def _touches(record: NodeRecord, homes: Mapping[int, torch.Tensor]) -> bool:
    tensors = (leaf for leaf in pytree.tree_leaves(record.value) if isinstance(leaf, torch.Tensor))
    return record.storage in homes or any(memory_of(tensor) in homes for tensor in tensors)
