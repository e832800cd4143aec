"""From a name on the command line to a model and example inputs."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

from torch import nn

from hexa_fx.errors import InputError


def load(target: str) -> tuple[nn.Module, Any]:
    """``module:factory`` or a transformers model type.

    Raises:
        InputError: there is no such thing; says what is expected.
    """
    if ":" in target:
        return _from_factory(target)
    from hexa_fx.integrations.transformers import tiny_model

    return tiny_model(target)


def _from_factory(target: str) -> tuple[nn.Module, Any]:
    module_name, _, name = target.partition(":")
    try:
        factory = getattr(importlib.import_module(module_name), name)
    except (ImportError, AttributeError) as error:
        raise InputError(f"{target!r}: {error}; expected MODULE:FACTORY with an importable module") from error
    made = factory()
    if not (isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], nn.Module)):
        raise InputError(f"{target!r} returned {type(made).__name__}; expected a tuple (model, example_inputs)")
    model, inputs = made
    return model, dict(inputs) if isinstance(inputs, Mapping) else inputs
