"""Feeds every rank its share B_i of each global batch, in the order that one process would see."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map
from torch.utils.data import Sampler

from hexa_fx.allocation import allocate
from hexa_fx.plan import Plan


def shares(plan: Plan, total: int) -> tuple[int, ...]:
    """B_i for a global batch of ``total`` samples: the plan's own, or Eq. 1 applied anew to another size, as of a last batch."""
    if total == sum(plan.batch):
        return plan.batch
    return allocate(plan.capacities or (1.0,) * plan.world, total)


def split_batch(batch: Any, plan: Plan, rank: int) -> Any:
    """This rank's samples of a global batch: every tensor in it is cut along its first dimension, as `shares` says.

    Args:
        batch: nested dicts, lists and tuples of tensors whose first dimension is the batch; other leaves pass through, and so do
            tensors without dimensions.
    """

    def cut(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or leaf.dim() == 0:
            return leaf
        sizes = shares(plan, leaf.shape[0])
        return leaf.narrow(0, sum(sizes[:rank]), sizes[rank])

    return tree_map(cut, batch)


class CapacityBatchSampler(Sampler[list[int]]):
    """A batch sampler that yields this rank's B_i indices of every global batch.

    All ranks draw the same permutation, so that at each step their shares make up the batch that one process would see. A rank
    with an empty share yields an empty list: give the loader a ``collate_fn`` that returns an empty batch for it.

    Args:
        length: number of samples in the data set.
        plan: gives B_i.
        rank: this rank.
        shuffle, seed: draw a new permutation each epoch (`set_epoch`).
        drop_last: leave out the last, smaller batch; otherwise it is split by Eq. 1 too.
    """

    def __init__(
        self, length: int, plan: Plan, rank: int, *, shuffle: bool = True, seed: int = 0, drop_last: bool = False
    ) -> None:
        self.length, self.plan, self.rank = length, plan, rank
        self.shuffle, self.seed, self.drop_last = shuffle, seed, drop_last
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Chooses the permutation of the next iteration. Pass the same epoch on every rank."""
        self.epoch = epoch

    def __len__(self) -> int:
        size = sum(self.plan.batch)
        return self.length // size if self.drop_last else -(-self.length // size)

    def __iter__(self) -> Iterator[list[int]]:
        order = self._order()
        size = sum(self.plan.batch)
        for step in range(len(self)):
            whole = order[step * size : (step + 1) * size]
            sizes = shares(self.plan, len(whole))
            start = sum(sizes[: self.rank])
            yield whole[start : start + sizes[self.rank]]

    def _order(self) -> list[int]:
        if not self.shuffle:
            return list(range(self.length))
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        return list(torch.randperm(self.length, generator=generator, device="cpu").tolist())
