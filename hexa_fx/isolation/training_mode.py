"""Train and eval mode of a module tree, set for a while."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from hexa_fx.isolation.module_tree import named_modules


@contextmanager
def training_mode(root: nn.Module, training: bool) -> Iterator[None]:
    """A context in which a module is in train or eval mode, at whose end every module is in its own again.

    What a module's own ``train`` does besides, such as merging adapters into weights, is taken back by another call of it.
    """
    before = [(module, module.training) for _, module in named_modules(root)]
    root.train(training)
    try:
        yield
    finally:
        for module, mode in before:
            if module.training is not mode and has_own_train(module):
                module.train(mode)
        for module, mode in before:
            if module.training is not mode:
                module.training = mode


def has_own_train(module: nn.Module) -> bool:
    """Whether something else than torch's ``train`` sets the mode of a module."""
    return type(module).train is not nn.Module.train or "train" in vars(module)
