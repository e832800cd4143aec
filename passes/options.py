"""What `HexaConfig` asks of finished blocks: their `hexa::moe_ffn` nodes become other operators or take other arguments.

Results that do not depend on the batch, and FP8; and techniques of the paper are taken back out, as the yardstick for what they
save: values stay the same. It runs last, on blocks that were compared with their originals in float64, with exact operators, and
on graphs whose canonical nodes may have collectives around them. Shared cache and overlap belong to the partition.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable, Mapping
from copy import deepcopy
from itertools import pairwise
from typing import Any, TypeVar

import torch
import torch.fx as fx
from torch import Tensor, nn

from hexa_fx.config import HexaConfig
from hexa_fx.ir import NEVER_SMALL, RewrittenBlock
from hexa_fx.isolation.outcome import observe
from hexa_fx.ops import fp8_weights, moe_ffn_fp8
from hexa_fx.ops.moe_ffn import backward_on
from hexa_fx.ops.moe_ffn_autograd import LAYERS, LayerFunction
from hexa_fx.ops.products import takes_grouped_mm
from hexa_fx.ops.reindex import reindex_any
from hexa_fx.ops.rows import expert_rows, gather_rows, routed_rows
from hexa_fx.ops.table_layers import PARAMETERS, MoeFfn, MoeFfnBackward
from hexa_fx.runtime.guards import GuardMiss
from hexa_fx.runtime.install import install, uninstall
from hexa_fx.runtime.results import state_of
from hexa_fx.torch_private import _disable_dynamo, grouped_mm, without_autocast

T = TypeVar("T", Tensor, Tensor | None)


def dispatch_combine(*args: Any) -> Tensor:
    """Has the arguments and value of `hexa::moe_ffn`; ``recompute_h`` has no meaning here.

    Reads the offsets on the host, except for bfloat16 on Hopper, where torch's grouped matmul takes them.
    """
    o = MoeFfn(*args)
    top_k = o.top_k_index.shape[1]
    v, _, offs = reindex_any(o.top_k_index, o.w1.shape[0])
    routed = routed_rows(offs, v.shape[0])
    rows = torch.where(routed, gather_rows(in_compute_dtype(o.x), v, top_k), 0)
    h = _project(rows, o.w1, o.b1, offs, o.layout1)
    if o.w3 is not None:
        h = torch.cat((h, _project(rows, o.w3, o.b3, offs, o.layout1)), dim=1)
    a = torch.ops.hexa.activate(h, o.activation, o.glu, o.params)
    y = torch.where(routed, _project(a, o.w2, o.b2, offs, o.layout2), 0)
    if o.top_k_weights is not None:
        y = y * o.top_k_weights.reshape(-1).index_select(0, v).unsqueeze(1).to(y.dtype)
    token = torch.div(v, top_k, rounding_mode="floor")
    return y.new_zeros((o.x.shape[0], y.shape[1])).index_add(0, token, y)


def in_compute_dtype(t: T) -> T:
    """``t`` in autocast's dtype where autocast is on, as `hexa::moe_ffn` casts its operands; None stays None."""
    if t is None or t.dtype == torch.float64 or not torch.is_autocast_enabled(t.device.type):
        return t
    return t.to(torch.get_autocast_dtype(t.device.type))


def _project(x: Tensor, weight: Tensor, bias: Tensor | None, offs: Tensor, layout: str) -> Tensor:
    weight, bias = in_compute_dtype(weight.transpose(1, 2) if layout == "nk" else weight), in_compute_dtype(bias)
    if takes_grouped_mm(x, weight):
        y = grouped_mm(x, weight, offs=offs[1:].contiguous())
    else:
        bounds = offs.tolist()
        parts = [x[start:end] @ weight[e] for e, (start, end) in enumerate(pairwise(bounds))]
        y = torch.cat((*parts, x.new_zeros((x.shape[0] - bounds[-1], weight.shape[2]))))
    return y if bias is None else y + expert_rows(bias, offs, y.shape[0])


@_disable_dynamo  # torch.compiler.disable would import all of dynamo now, a second of every process
def moe_ffn_without_esfk(*args: Any) -> Tensor:
    """Has the arguments and value of `hexa::moe_ffn`."""
    o = MoeFfn._make(args)
    cast = {name: in_compute_dtype(getattr(o, name)) for name in ("x", *PARAMETERS)}
    y: Tensor = LayerFunction.apply(_WITHOUT_ESFK, True, *o._replace(**cast))
    return y


def _backward(*args: Any) -> list[Tensor]:
    with without_autocast():
        return backward_on(args[0].device.type, MoeFfnBackward, args, fused=False)


_WITHOUT_ESFK = dataclasses.replace(LAYERS["moe_ffn"], backward=_backward)


def switch_off(block: RewrittenBlock, config: HexaConfig) -> RewrittenBlock:
    """The block without what ``config`` switches off; the block itself if that is nothing."""
    if config.topk_memory and config.expert_operators and config.fused_kernel:
        return block

    def change(node: fx.Node) -> None:
        if not config.topk_memory:
            _one_row_a_slot(node.graph, node)
        if not config.expert_operators:
            node.target = dispatch_combine
        elif not config.fused_kernel:
            node.target = moe_ffn_without_esfk

    return with_changed_nodes(block, change) or block


def with_changed_nodes(block: RewrittenBlock, change: Callable[[fx.Node], None]) -> RewrittenBlock | None:
    """The block with every node changed in a graph of its own, which it runs on small inputs too; None if it has no such node."""
    graph = deepcopy(block.graph)  # identical blocks share theirs
    nodes = graph.find_nodes(op="call_function", target=torch.ops.hexa.moe_ffn.default)
    for node in nodes:
        change(node)
    graph.lint()
    return dataclasses.replace(block, graph=graph, small=NEVER_SMALL) if nodes else None


def _one_row_a_slot(graph: fx.Graph, node: fx.Node) -> None:
    """Copies tokens k times, and keeps the experts' T·k·D outputs until they are weighted and summed.

    Without the memory optimisation of the paper's section 3.2, inputs, outputs and their gradients grow with k.
    """
    x, index, weights, *rest = node.args
    assert isinstance(index, fx.Node)
    with graph.inserting_before(node):
        top_k = graph.call_method("size", (index, 1))
        rows = graph.call_method("repeat_interleave", (x, top_k), {"dim": 0})
        slots = graph.call_method("reshape", (index, -1, 1))
    node.args = (rows, slots, None, *rest)
    with graph.inserting_after(node):
        out = graph.call_function(weighted_sum, (node, weights, top_k))
    node.replace_all_uses_with(out, delete_user_cb=lambda user: user is not out)


def weighted_sum(rows: torch.Tensor, weights: torch.Tensor | None, top_k: int) -> torch.Tensor:
    """(T·k, D) rows, summed over the k of a token, each times its (T, k) weight: (T, D)."""
    slots = rows.unflatten(0, (-1, top_k)) if rows.shape[0] else rows.view(0, top_k, rows.shape[1])
    if weights is not None:
        slots = slots * weights.to(slots.dtype).unsqueeze(-1)
    return slots.sum(dim=1)


log = logging.getLogger(__name__)

SAID = "a token's result has the same bits in any batch"
NOT_FIXED = "is not batch invariant: its experts are run step by step"
_NOT_FP8 = "does not multiply in FP8: its experts are run step by step"


def _changed_or_said(block: RewrittenBlock, change: Callable[[fx.Node], None], said: str) -> RewrittenBlock:
    changed = with_changed_nodes(block, change)
    if changed is None:
        log.warning("%s %s", block_name(block), said)
    return changed or block


def fix_order(block: RewrittenBlock, config: HexaConfig) -> RewrittenBlock:
    """The block with `hexa::moe_ffn_fixed` in place of `hexa::moe_ffn`; the block itself unless ``config`` asks for it.

    It runs last, and the block no longer runs its own code on small inputs. A block whose experts are no `hexa::moe_ffn` stays as
    it is, which is said.
    """
    return _changed_or_said(block, _fix, NOT_FIXED) if config.batch_invariant else block


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
    return _changed_or_said(block, functools.partial(_change, packed=packed), _NOT_FP8)


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
        with moe_ffn_fp8.always(), fp8_weights.nothing_kept():
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
