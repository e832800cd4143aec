"""Expert weights that are written between forward and backward raise torch's error there, as they do in the original.

Torch compares the version of what an operator saved. Listed experts' parameters count their own versions, and operators save the
tensor that they lie in, which knows nothing of them until its reader looks. So readers look again right before a backward pass
enters a rewritten block.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor, is_grad_enabled
from torch.compiler import is_compiling
from torch.utils import _pytree as pytree

from hexa_fx.runtime.paths import WeightReader

_DEEPEST = 4


def look_before_backward(result: Any, readers: Sequence[WeightReader]) -> None:
    """Has ``readers`` look when a gradient arrives at a tensor in what a block returns and keeps."""
    if is_compiling() or not is_grad_enabled() or not any(reader.stands_in for reader in readers):
        return

    def look(_: Any) -> None:
        for reader in readers:
            reader.note_writes()

    for node in {tensor.grad_fn for tensor in _tensors(result)}:
        if node is not None:
            node.register_prehook(look)


def _tensors(value: Any, depth: int = 0) -> Iterator[Tensor]:
    """The tensors in containers and in attributes of objects."""
    if isinstance(value, Tensor):
        yield value
        return
    for leaf in pytree.tree_leaves(value):
        inside = [leaf] if isinstance(leaf, Tensor) else [*vars(leaf).values()] if hasattr(leaf, "__dict__") else []
        for each in inside if depth < _DEEPEST else ():
            yield from _tensors(each, depth + 1)
