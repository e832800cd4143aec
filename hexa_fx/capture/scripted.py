"""Runs what torch.jit.script and torch.compile compiled as its Python code: no mode is told of what a compiled function calls."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

from hexa_fx.capture.calls import UnreadableTensor
from hexa_fx.contexts import attributes_set
from hexa_fx.torch_private import is_compiler_at_work


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


@contextmanager
def compiled_as_python() -> Iterator[None]:
    """A context in which functions and modules under torch.compile run in Python, in all threads.

    A compiler that has not been imported has compiled nothing; to import it would take seconds.
    """
    compiled = "torch._dynamo" in sys.modules and not is_compiler_at_work()
    with torch.compiler.set_stance("force_eager") if compiled else nullcontext():
        yield
