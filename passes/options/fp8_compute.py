"""Other operators in place of `hexa::moe_ffn`, where `HexaConfig` asks for them: results that do not depend on the batch, and FP8.

They come last, on blocks that were compared with their originals in float64, with exact operators.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping
from typing import Any

import torch
import torch.fx as fx
from torch import nn

from hexa_fx.config import HexaConfig
from hexa_fx.ir import RewrittenBlock
from hexa_fx.isolation.outcome import observe
from hexa_fx.passes.options.ablations import with_changed_nodes
from hexa_fx.runtime.guards import GuardMiss
from hexa_fx.runtime.install import install, uninstall
from hexa_fx.runtime.results import state_of

log = logging.getLogger(__name__)

SAID = "a token's result has the same bits in any batch"
NOT_FIXED = "is not batch invariant: its experts are run step by step"


def fix_order(block: RewrittenBlock, config: HexaConfig) -> RewrittenBlock:
    """The block with `hexa::moe_ffn_fixed` in place of `hexa::moe_ffn`; the block itself unless ``config`` asks for it.

    It runs last, and the block no longer runs its own code on small inputs. A block whose experts are no `hexa::moe_ffn` stays as
    it is, which is said.
    """
    if not config.batch_invariant:
        return block
    changed = with_changed_nodes(block, _fix)
    if changed is None:
        log.warning("%s %s", block.path or "the model", NOT_FIXED)
    return changed or block


def is_fixed(block: RewrittenBlock) -> bool:
    """Whether `fix_order` changed the block."""
    return bool(block.graph.find_nodes(op="call_function", target=torch.ops.hexa.moe_ffn_fixed.default))


def _fix(node: fx.Node) -> None:
    node.target = torch.ops.hexa.moe_ffn_fixed.default


_WEIGHTS = (3, 5, 7)
"""Operands of `hexa::moe_ffn` that are quantised."""

UNUSUAL = 0.15
"""Of an output's norm. Errors of single numbers are about 2.5 % of their size; a layer's are 4 to 8 %."""


def in_fp8(block: RewrittenBlock, config: HexaConfig) -> RewrittenBlock:
    """The block with `hexa::moe_ffn_fp8` in place of `hexa::moe_ffn`; the block itself unless ``config`` asks for it.

    The block no longer runs its own code on small inputs. A block whose experts are no `hexa::moe_ffn` stays as it is, which is
    said.
    """
    if config.compute != "fp8_block":
        return block
    packed = frozenset(weight.name for weight in block.packed)
    changed = with_changed_nodes(block, functools.partial(_change, packed=packed))
    if changed is None:
        log.warning("%s does not multiply in FP8: its experts are run step by step", block.path or "the model")
    return changed or block


def _change(node: fx.Node, packed: frozenset[str]) -> None:
    """Quantised weights are kept where weights are read as they are; what a collective gathers lies where others lay before."""
    kept = all(_is_own_weight(node.args[i], packed) for i in _WEIGHTS if node.args[i] is not None)
    node.target, node.args = torch.ops.hexa.moe_ffn_fp8.default, (*node.args, kept)


def _is_own_weight(value: Any, packed: frozenset[str]) -> bool:
    """Whether a node is a weight of the block, a stack of them (of these names), or a view of this rank's slice of one."""
    from hexa_fx.distributed import nodes  # which loads torch's DTensor

    while isinstance(value, fx.Node) and value.target in (nodes.local_weight, nodes.in_dtype_of, nodes.scale_gradient):
        value = value.args[0]
    if not isinstance(value, fx.Node):
        return False
    return value.op == "get_attr" or (value.op == "call_module" and value.target in packed)


def computes_in_fp8(block: RewrittenBlock) -> bool:
    """Whether `in_fp8` changed the block."""
    return bool(block.graph.find_nodes(op="call_function", target=torch.ops.hexa.moe_ffn_fp8.default))


def added_error(
    block: nn.Module,
    exact: RewrittenBlock,
    finished: RewrittenBlock,
    example: tuple[tuple[Any, ...], Mapping[str, Any]],
) -> str:
    """By how much the block's outputs on the example differ from those of its exact rewrite, as a sentence.

    Args:
        block: the module, in the mode that both were made for.
        exact: before `in_fp8`.
        finished: after it.
        example: arguments of a call.
    """
    try:
        expected, found = (_outputs(block, form, example) for form in (exact, finished))
    except (GuardMiss, RuntimeError) as error:
        log.warning("%s: the error of FP8 could not be measured: %s", block_name(exact), error)
        return f"multiplies in FP8; the error that this adds could not be measured ({error})"
    added = max((_difference(*pair) for pair in zip(found, expected, strict=True)), default=0.0)
    if added == 0:
        return "asked to multiply in FP8; on the example it gives what its exact rewrite gives, for a reason that was logged"
    if not added <= UNUSUAL:
        log.warning("%s: FP8 changes its outputs by %.0f %% of their norm", block_name(exact), 100 * added)
    return f"multiplies in FP8: outputs differ by {100 * added:.1f} % of their norm from the exact rewrite's on the example"


def _difference(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Of the expected output's norm."""
    floor = torch.finfo(torch.float32).tiny
    return float((found - expected).norm()) / max(float(expected.norm()), floor)


def block_name(block: RewrittenBlock) -> str:
    """The path, in words where it is empty."""
    return block.path or "the model"


def _outputs(
    block: nn.Module, form: RewrittenBlock, example: tuple[tuple[Any, ...], Mapping[str, Any]]
) -> list[torch.Tensor]:
    """All floating-point outputs in float32. The module keeps what it had, and so do globals that it adds to."""
    forward = install(block, form)
    state = state_of(block, form.stored, form.changed)
    try:
        outcome = observe(forward.rewritten, state, (example[0], dict(example[1])), gradients=False)
    finally:
        state.restore()
        uninstall(block)
    outputs = (value for name, value in outcome.values.items() if name.startswith("output"))
    return [value.float() for value in outputs if value.is_floating_point()]
