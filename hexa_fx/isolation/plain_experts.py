"""Experts of transformers in the form that their class spells, where the implementation that is set for them cannot be read.

The implementations compute the same; each sorts and multiplies in its own way. What lies behind grouped products, such as a norm of
every row, is read from the loop of ``experts_implementation="eager"``.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from torch import nn

from hexa_fx.ir import PythonRead

_KEPT = "_experts_implementation_internal"
EXPERTS_SET = frozenset({_KEPT, "_experts_implementation"})
"""Attributes of configurations under which transformers keeps and reads which implementation is set."""

SAME = frozenset({"grouped_mm", "batched_mm"})
"""Implementations of transformers' own that do what the class does, so that one may be set for the other, as `generate` does while
it decodes. Others, which users register, may do something else."""


@contextmanager
def in_plain_form(block: nn.Module) -> Iterator[str]:
    """A context in which the experts of a block run the code of their class. Gives what is set for them otherwise, "" for none."""
    configs = ((module, vars(module).get("config")) for module in block.modules())
    held = [(module, config) for module, config in configs if _set_for(config) in SAME]
    for module, config in held:
        plain = copy.copy(config)
        vars(plain)[_KEPT] = "eager"
        module.config = plain  # type: ignore[assignment]
    try:
        yield next((_set_for(config) for _, config in held), "")
    finally:
        for module, config in held:
            module.config = config  # type: ignore[assignment]


def as_set(reads: Iterable[PythonRead], implementation: str) -> tuple[PythonRead, ...]:
    """What was read in the context, as it is outside of it."""
    return tuple(replace(read, value=implementation) if read.steps[-1] in EXPERTS_SET else read for read in reads)


def _set_for(config: Any) -> str:
    return str(vars(config).get(_KEPT) or "") if hasattr(config, "__dict__") else ""
