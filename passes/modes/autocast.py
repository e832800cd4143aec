"""Which dtypes a block's results have under autocast, by running its own code there once.

Recorded code names dtypes as they were, and a rewritten region gives its result in the autocast dtype, whereas the original may
add it up in float32. What the original gives depends on the autocast dtype and on the dtypes of the inputs, and of parameters that
it does more with than multiply matrices.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from hexa_fx.capture import CapturedBlock
from hexa_fx.ir import AutocastDtypes, RewrittenBlock
from hexa_fx.isolation.endless import Bounded
from hexa_fx.isolation.random_state import random_state_kept
from hexa_fx.passes.modes.asked_autocast import DTYPES, with_states_alike
from hexa_fx.runtime.attribute_guards import called_in, is_within
from hexa_fx.runtime.autocast import dtypes_of, kind_of, parameters_that_count
from hexa_fx.runtime.results import state_of, values_left
from hexa_fx.runtime.signature import ArgumentNames

log = logging.getLogger(__name__)

_LARGEST = 1 << 29
"""Elements of a parameter of which no 16-bit copy is made for this: a block with a larger one runs its own code under autocast."""


def with_autocast(
    block: nn.Module, captured: CapturedBlock, rewritten: RewrittenBlock, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> RewrittenBlock:
    """The block with the dtypes of its results under autocast, and with the states of autocast in which its code does the same."""
    found = with_dtypes(block, captured, rewritten, args, kwargs)
    return replace(found, reads=with_states_alike(captured, found.reads, args, kwargs))


def with_dtypes(
    block: nn.Module, captured: CapturedBlock, rewritten: RewrittenBlock, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> RewrittenBlock:
    """The block with the dtypes of its results under autocast.

    There are none if the recorded code switches autocast off by itself: nodes do not say where.
    """
    called = called_in(rewritten.graph)
    switched = any(not is_within(scope, called) for scope in captured.in_autocast)
    return replace(
        rewritten, autocast=AutocastDtypes() if switched else _autocast_dtypes(block, rewritten, args, kwargs)
    )


def _autocast_dtypes(
    block: nn.Module, rewritten: RewrittenBlock, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> AutocastDtypes:
    """The dtypes of results by `kind_of` the call, for inputs as given and for floating ones in other dtypes (`_mixtures`).

    Kinds in which the block raises an error are left out.
    """
    if any(parameter.numel() > _LARGEST for parameter in block.parameters()):
        return AutocastDtypes()
    found: dict[Any, tuple[torch.dtype | None, ...]] = {}
    before, parameters = state_of(block, rewritten.stored, rewritten.changed), parameters_that_count(rewritten.graph)
    leaves, structure = pytree.tree_flatten((args, kwargs))
    # a block in 16 bits has its own dtype and the autocast dtype in one
    tried = dict.fromkeys((dtype, mixture) for dtype in DTYPES for mixture in _mixtures(leaves, dtype))
    for dtype, mixture in tried:
        given = pytree.tree_unflatten([_cast(leaf, to) for leaf, to in zip(leaves, mixture)], structure)
        device = next((t.device.type for t in pytree.tree_leaves(given) if isinstance(t, torch.Tensor)), "cpu")
        try:
            with (
                random_state_kept(),
                torch.autocast(device, dtype, cache_enabled=False),
                torch.no_grad(),
                Bounded(),
            ):
                kind = kind_of(rewritten.guards, _named(block, *given), block, parameters)
                result = block.forward(*given[0], **given[1])
                found[kind] = dtypes_of((result, values_left(block, rewritten.stored)))
        except Exception as error:
            log.debug("%s under autocast to %s: %s", rewritten.path or type(block).__name__, dtype, error)
        finally:
            before.restore()
    return AutocastDtypes(found, parameters)


def _mixtures(leaves: list[Any], autocast: torch.dtype) -> Iterator[tuple[torch.dtype | None, ...]]:
    """Dtypes in which the leaves are tried. Under autocast norms give float32 and products the autocast dtype, so that one input
    may come in this and another in that: up to three are tried in both, each."""
    own = [leaf.dtype if isinstance(leaf, torch.Tensor) else None for leaf in leaves]
    floating = [dtype is not None and dtype.is_floating_point for dtype in own]
    yield tuple(own)
    cast = tuple(autocast if wanted else dtype for dtype, wanted in zip(own, floating))
    if sum(floating) > 3 or not {*itertools.compress(own, floating)} <= {torch.float32, autocast}:
        yield cast
        return
    either = [(torch.float32, autocast) if wanted else (dtype,) for dtype, wanted in zip(own, floating)]
    yield from (mixture for mixture in itertools.product(*either) if mixture != tuple(own))


def _cast(leaf: Any, dtype: torch.dtype | None) -> Any:
    return leaf if dtype is None else leaf.to(dtype, copy=True)


def _named(block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    return ArgumentNames.of(block.forward, False).bind(args, kwargs)
