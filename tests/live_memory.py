"""Counts the bytes of tensors made under a mode that are alive at the same time."""

from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hexa_fx.large_blocks.upcast_weight import UpcastWeight


class LiveMemory(TorchDispatchMode):
    """``peak``: the most bytes of storages made in operations under this mode that were alive together, which ``held`` lists."""

    def __init__(self, *known: torch.Tensor) -> None:
        """``known``: tensors whose memory does not count."""
        super().__init__()
        self.peak, self._total = 0, 0
        self.held: list[tuple[int, str]] = []
        self._known = {tensor.untyped_storage()._cdata for tensor in known}
        self._live: dict[int, tuple[StorageWeakRef, int, str]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            leaf = leaf.stored if isinstance(leaf, UpcastWeight) else leaf
            if type(leaf) is torch.Tensor:
                self._count(leaf.untyped_storage(), f"{func} {tuple(leaf.shape)}")
        return result

    def _count(self, storage: torch.UntypedStorage, name: str) -> None:
        if storage._cdata in self._known or (storage._cdata in self._live and not self._gone(storage._cdata)):
            return
        self._live[storage._cdata] = (StorageWeakRef(storage), storage.nbytes(), name)
        self._total += storage.nbytes()
        if self._total <= self.peak:
            return
        self._live = {key: kept for key, kept in self._live.items() if not kept[0].expired()}
        self._total = sum(size for _, size, _ in self._live.values())
        if self._total > self.peak:
            self.peak = self._total
            self.held = sorted(((size, made) for _, size, made in self._live.values()), reverse=True)[:12]

    def _gone(self, key: int) -> bool:
        if not self._live[key][0].expired():
            return False
        self._total -= self._live.pop(key)[1]
        return True
