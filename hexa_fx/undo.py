"""`undo_`: rewritten blocks are taken off a model again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

from torch import nn

from hexa_fx.attached import detach, has_session
from hexa_fx.errors import InputError
from hexa_fx.first_call import let_go
from hexa_fx.runtime.install import is_installed, uninstall
from hexa_fx.runtime.preflight import check_module
from hexa_fx.sources import peft

Model = TypeVar("Model", bound=nn.Module)


def undo_(model: Model) -> Model:
    """Gives every block of ``model`` its own forward back, in place, and returns ``model``. Parameters keep their values.

    Afterwards `optimize_` may be called again, with other inputs or after a block was edited.

    Raises:
        InputError: it is no model, or it is spread over devices: its expert weights are cut, so its own code can no longer run.
    """
    check_module(model)
    for module in model.modules():
        if has_session(module):
            raise InputError(
                "the model's expert weights are cut over devices; save it (docs/partition.md) and load it into a new model"
            )
    let_go(model)
    for module in model.modules():
        peft.take_back(module)
        if is_installed(module):
            uninstall(module)
        detach(module)
    return model


@contextmanager
def whole_or_not_at_all(model: nn.Module, waits: bool) -> Iterator[None]:
    """Takes what was installed off again if an error, or the user, ends the work before all of it is.

    ``waits``: the model waits for its first call, and goes on with it and with its report.
    """
    before = {id(module) for module in model.modules() if is_installed(module)}
    try:
        yield
    except BaseException:
        if before or waits:
            for module in model.modules():
                if is_installed(module) and id(module) not in before:
                    uninstall(module)
        elif not any(map(has_session, model.modules())):
            undo_(model)
        raise
