"""What a rewritten block does under autocast: which dtypes its results have, and what it computes without it, as its code does.

A rewritten region gives its result in the autocast dtype, whereas the original may add it up in float32. What the original gives
depends on the autocast dtype and on the dtypes of the inputs, and of parameters that it does more with than multiply matrices. A
block holds for the autocast that it was recorded under. One that is spread over devices has no other code to fall back to, so that
several kinds of autocast are tried for it at once.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.fx
from torch import nn
from torch.fx import Node
from torch.utils import _pytree as pytree

from hexa_fx import operations as ops
from hexa_fx.capture import CapturedBlock, record_of
from hexa_fx.capture.copies import copied
from hexa_fx.ir import AutocastDtypes, RewrittenBlock
from hexa_fx.isolation.read_values import gradients_asked
from hexa_fx.isolation.torch_state import random_state_kept
from hexa_fx.isolation.trial_modes import Bounded
from hexa_fx.passes.detect.graph import ancestors, descendants, is_float
from hexa_fx.passes.detect.match import MoEMatch
from hexa_fx.passes.detect.verdict import Refuse
from hexa_fx.runtime.attribute_guards import called_in, is_within
from hexa_fx.runtime.autocast import WITHOUT_AUTOCAST, dtypes_of, kind_of, parameters_that_count
from hexa_fx.runtime.guards import ArgumentNames
from hexa_fx.runtime.results import state_of, values_left

log = logging.getLogger(__name__)

_DTYPES = (torch.bfloat16, torch.float16)
_Call = tuple[tuple[Any, ...], dict[str, Any]]


def under_this_autocast(
    block: nn.Module, rewritten: RewrittenBlock, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> RewrittenBlock:
    """The block for the autocast that is on now, or for none if none is."""
    device = _device_of((args, kwargs))
    if not torch.is_autocast_enabled(device):
        return replace(rewritten, autocast=AutocastDtypes())
    cast = torch.get_autocast_dtype(device)
    return replace(rewritten, autocast=replace(_dtypes(block, rewritten, [(cast, (args, kwargs))]), off=False))


def under_any_autocast(
    block: nn.Module, captured: CapturedBlock, rewritten: RewrittenBlock, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> RewrittenBlock:
    """The block, recorded without autocast, for each dtype of autocast, too: for inputs as given and in other floating dtypes.

    For none if the recorded code switches autocast off by itself: nodes do not say where.
    """
    called = called_in(rewritten.graph)
    if any(not is_within(scope, called) for scope in captured.in_autocast):
        return replace(rewritten, autocast=AutocastDtypes())
    leaves, structure = pytree.tree_flatten((args, kwargs))
    # a block in 16 bits has its own dtype and the autocast dtype in one
    tried = dict.fromkeys((dtype, mixture) for dtype in _DTYPES for mixture in _mixtures(leaves, dtype))
    calls = [
        (dtype, pytree.tree_unflatten([_cast(leaf, to) for leaf, to in zip(leaves, mixture)], structure))
        for dtype, mixture in tried
    ]
    return replace(rewritten, autocast=_dtypes(block, rewritten, calls))


def _device_of(given: Any) -> str:
    return next((t.device.type for t in pytree.tree_leaves(given) if isinstance(t, torch.Tensor)), "cpu")


def _dtypes(block: nn.Module, rewritten: RewrittenBlock, calls: Sequence[tuple[torch.dtype, _Call]]) -> AutocastDtypes:
    """The dtypes of results by `kind_of` the call. Kinds in which the block raises an error are left out."""
    found: dict[Any, tuple[torch.dtype, ...]] = {}
    before, parameters = state_of(block, rewritten.stored, rewritten.changed), parameters_that_count(rewritten.graph)
    asked = gradients_asked(rewritten.reads)
    for dtype, (args, kwargs) in calls:
        given = copied((args, kwargs))
        try:
            with (
                random_state_kept(),
                torch.autocast(_device_of(given), dtype, cache_enabled=False),
                torch.set_grad_enabled(bool(asked and asked[0])),
                Bounded(),
            ):
                named = ArgumentNames.of(block.forward, False).bind(args, kwargs)
                kind = kind_of(rewritten.guards, named, block, parameters)
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


_LEFT = (ops.moves, ops.makes, ops.picks_best, ops.selects, ops.is_random, ops.of("add sub mul div"))
"""What autocast leaves as it is: moves, new tensors, choices, and arithmetic element by element."""
_INSIDE = (
    "the code switches autocast off for what its experts compute; around its router, or around the block, it can stay"
)
_AROUND = (
    "the code switches autocast off around some calls of a submodule, or around one that switches it, too; around the block, or "
    "inside of the submodule, it can stay"
)


def mark_without_autocast(
    graph: torch.fx.Graph, new: Mapping[Node, Node], captured: CapturedBlock, regions: Sequence[MoEMatch]
) -> None:
    """Marks the nodes of ``graph`` that compute with autocast off, for `hexa_fx.runtime.program`.

    ``new``: these nodes, by those of the recorded graph.
    """
    called = called_in(graph)
    off = {node: record_of(node).autocast_off for node in captured.graph.nodes if record_of(node).autocast_off}
    if not off or all(is_within(scope, called) for scope in captured.in_autocast):
        return
    inside = _inside(captured, new, [match.output for match in regions], called)
    for node, device in off.items():
        if node in inside:
            raise Refuse(_INSIDE, node)
        copy = new.get(node, node)
        copied = copy.meta.get("from") == node.name and copy.op in ("call_function", "call_method")
        if copied and is_float(node) and not any(leaves(node) for leaves in _LEFT):
            copy.meta[WITHOUT_AUTOCAST] = device
    for call in graph.find_nodes(op="call_module"):
        _mark_call(call, captured, off)


def _mark_call(call: Node, captured: CapturedBlock, off: Mapping[Node, str]) -> None:
    path = {str(call.target)}
    nodes = [node for node in captured.graph.nodes if is_within(record_of(node).scope, path) and is_float(node)]
    devices = {off.get(node, "") for node in nodes} or {""}
    if len(devices) > 1 or (devices != {""} and any(is_within(scope, path) for scope in captured.in_autocast)):
        raise Refuse(_AROUND, next(node for node in nodes if node in off))
    call.meta[WITHOUT_AUTOCAST] = devices.pop()


def _inside(
    captured: CapturedBlock, new: Mapping[Node, Node], outputs: Sequence[Node], called: Collection[str]
) -> set[Node]:
    """What is computed with parameters that the new graph reads no more, which are experts', up to ``outputs``."""
    read = (node for node in captured.graph.nodes if node.op == "get_attr" and node not in new and is_float(node))
    weights = [node for node in read if not is_within(record_of(node).scope, called)]
    return descendants(weights) & (ancestors(outputs) | {*outputs})
