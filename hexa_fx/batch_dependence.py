"""Says where what a block gives to a token depends on the other tokens of its batch, before the batch is shared out over ranks."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from hexa_fx.capture.observe import Observation
from hexa_fx.isolation.module_state import ModuleState
from hexa_fx.isolation.torch_state import random_state_kept, random_states
from hexa_fx.isolation.written_tensors import tensors_restored

log = logging.getLogger(__name__)

_APART, _ROWS = 0.1, 0.02
"""How far a sample must be from what it was, of an average sample, and of how many: in 16 bits a choice may flip by rounding."""


def say_what_batches_decide(around: Iterable[Sequence[Observation]]) -> None:
    """Logs a warning for every kind of block that does so. Runs the model's own code, on halves of the example.

    Args:
        around: calls of every block and of the modules around it that select something, innermost first.
    """
    kinds = {type(calls[0].module): calls for calls in reversed([*around]) if calls}
    for calls in kinds.values():
        if _depends_on_batch(calls[:2][-1]):  # the router may be in the module around it
            log.warning(
                "what %r gives to a token depends on the others of its batch (a capacity, a mean over tokens): each rank goes by "
                "its own tokens, so losses are not those of one device with the global batch. With room for every token they are",
                calls[0].path or "the model",
            )


def _depends_on_batch(call: Observation) -> bool:
    leaves, structure = pytree.tree_flatten((call.args, call.kwargs))
    size = next((leaf.shape[0] for leaf in leaves if isinstance(leaf, Tensor) and leaf.dim() > 1), 0)
    if size < 2:
        return False

    def rows_of(part: slice) -> Tensor:
        cut = [leaf[part].clone() if _is_of(leaf, size) else leaf for leaf in leaves]
        args, kwargs = pytree.tree_unflatten(cut, structure)
        length = len(range(size)[part])
        found = pytree.tree_leaves(call.module.forward(*args, **kwargs))
        rows: Tensor = next(t for t in found if _is_of(t, length))
        return rows.reshape(length, -1).double()

    before = ModuleState(call.module)
    try:
        with torch.no_grad(), random_state_kept(), tensors_restored(call.module):
            states = random_states()
            whole, again = rows_of(slice(size)), rows_of(slice(size))
            draws = not all(map(torch.equal, states, random_states()))
            halves = torch.cat([rows_of(slice(size // 2)), rows_of(slice(size // 2, size))])
    except Exception as error:
        log.debug("%s on half of its example: %s", call.path, error)
        return False
    finally:
        before.restore()
    if draws or not torch.equal(whole, again):  # two draws may choose alike, and a third not
        return False
    far = (whole - halves).norm(dim=-1) > _APART * whole.norm(dim=-1).mean()
    return bool(far.double().mean() > _ROWS)


def _is_of(value: Any, size: int) -> bool:
    return isinstance(value, Tensor) and value.dim() > 1 and value.shape[0] == size
