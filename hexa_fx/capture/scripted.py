"""Runs functions that torch.jit.script compiled as the Python code that they were made of: no mode is told of what they call."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from hexa_fx.capture.calls import UnreadableTensor
from hexa_fx.contexts import attributes_set


@contextmanager
def scripts_as_python(all_of_them: bool) -> Iterator[None]:
    """A context in which compiled functions run in Python.

    ``all_of_them``: to call one of which there is no Python code raises `UnreadableTensor`; else it runs as it is.
    """
    compiled = torch.jit.ScriptFunction.__call__

    def call(function: Any, *args: Any, **kwargs: Any) -> Any:
        source = getattr(function, "_torchdynamo_inline", None)
        if source is not None:
            return source(*args, **kwargs)
        if all_of_them:
            raise UnreadableTensor(
                f"it calls {function.name}, which torch.jit compiled and of which there is no Python code; call a function that is "
                "written in Python"
            )
        return compiled(function, *args, **kwargs)

    with attributes_set(torch.jit.ScriptFunction, __call__=call):
        yield
