"""Plain values that code around a submodule's call gets of it: the recorded graph holds these as they were."""

from __future__ import annotations

from typing import Any

import torch.fx
from torch.utils import _pytree as pytree

from hexa_fx.capture import CapturedBlock, ModuleCall
from hexa_fx.runtime.attribute_guards import is_within


def gives_plain(call: ModuleCall) -> bool:
    """Whether a call gives plain values, beside tensors and None."""
    leaves: list[Any] = pytree.tree_leaves(call.output, is_leaf=lambda item: item is None)
    return any(leaf is not None and not isinstance(leaf, torch.fx.Node) for leaf in leaves)


def leaves_plain(captured: CapturedBlock, path: str) -> bool:
    """Whether the code of the submodule at ``path`` leaves plain values on modules that other code reads."""
    return any(is_within(by, {path}) and not is_within(to, {path}) for by, to in captured.handed)


def may_be_caught(captured: CapturedBlock, path: str) -> bool:
    """Whether code around the submodule at ``path`` may catch an error that it raises on other tokens, and go on."""
    return any(not is_within(scope, {path}) for scope in captured.asks.get("errors", ()))
