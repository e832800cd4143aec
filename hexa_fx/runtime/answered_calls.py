"""Lets a block's own code go on with what its submodules gave already, where a rewritten forward has called them."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

_COMPILED = "_compiled_call_impl"
"""What a module calls in place of its hooks and its forward, if it has one."""


@contextmanager
def answered(block: nn.Module, called: Sequence[tuple[str, Any]]) -> Iterator[None]:
    """A context in which submodules of ``block`` give, once for each call of ``called``, what they gave there.

    They draw and count nothing again, and their hooks do not run again. It holds for this thread.

    Args:
        called: path and result, in order.
    """
    found: dict[nn.Module, deque[Any]] = {}
    for path, result in called:
        found.setdefault(block.get_submodule(path), deque()).append(result)
    before = {module: module.__dict__.get(_COMPILED) for module in found}
    thread = threading.get_ident()
    for module, results in found.items():
        module.__dict__[_COMPILED] = _answering(results, thread, before[module] or module._call_impl)
    try:
        yield
    finally:
        for module, own in before.items():
            module.__dict__.pop(_COMPILED, None)
            if own is not None:
                module.__dict__[_COMPILED] = own


def _answering(results: deque[Any], thread: int, call: Callable[..., Any]) -> Callable[..., Any]:
    def answer(*args: Any, **kwargs: Any) -> Any:
        if not results or threading.get_ident() != thread:
            return call(*args, **kwargs)
        result = results.popleft()
        return result if torch.is_grad_enabled() else pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, result)

    return answer
