"""Has the kernels of a rewritten block built in the background from the moment it is known, so that nobody waits for them later.

They build while the block is verified. The set holds those of any number of tokens (`hexa_fx.cuda.kernel_set`).
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch.fx import Node

from hexa_fx.capture import CapturedBlock
from hexa_fx.contexts import set_to
from hexa_fx.errors import KernelError
from hexa_fx.ir import RewrittenBlock
from hexa_fx.isolation.module_tree import device_of
from hexa_fx.observers import muted
from hexa_fx.ops.main_grad import NAME
from hexa_fx.ops.rows import accumulate_dtype
from hexa_fx.ops.table_layers import OPERANDS, MoeFfn, static_of
from hexa_fx.passes.example_values import MOE_FFN, FfnCall, moe_ffn_calls, rewritten_values

if TYPE_CHECKING:
    from hexa_fx.cuda.kernel_set import FfnLayer

log = logging.getLogger(__name__)

_wanted: ContextVar[str] = ContextVar("kernels_wanted", default="")
"""`hexa_fx.HexaConfig.compute` of the blocks whose kernels are requested; empty where none are."""

_cast: ContextVar[torch.dtype | None] = ContextVar("kernels_cast", default=None)
"""The dtype that autocast has on GPUs where they will run: blocks are analysed without it."""


@contextmanager
def kernels_requested(compute: str) -> Iterator[None]:
    """A context in which the kernels of blocks that are rewritten are requested: they will run, not only be reported.

    Args:
        compute: `hexa_fx.HexaConfig.compute`. Blocks that multiply in FP8 get the kernels of their exact form too, which is what
            calls that FP8 cannot take run. Empty: none, since a block is analysed in another form than it will run in.
    """
    cast = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else _cast.get()
    with set_to(_wanted, compute), set_to(_cast, cast):
        yield


def request_kernels(captured: CapturedBlock, rewritten: RewrittenBlock, training: bool) -> None:
    """Requests what a block on a CUDA device launches, for ``training`` too, if `kernels_requested`. Returns at once."""
    device, compute = device_of(captured.block), _wanted.get()
    in_fp8 = compute == "fp8_block"
    if device is None or not compute:
        return
    from hexa_fx import jit
    from hexa_fx.cuda.choosing import card_of  # imports CUTLASS's Python
    from hexa_fx.cuda.kernel_set import fp8_kernel_set, kernel_set

    with muted():
        for call in moe_ffn_calls(rewritten.graph, rewritten_values(captured, rewritten)):
            try:
                layer, card = _layer(call, captured, rewritten), card_of(device.index or 0)
                found = kernel_set(layer, card, training)
                if in_fp8:
                    layer = _layer(call, captured, rewritten, cast_weights=False)
                    found = fp8_kernel_set(layer, card, training) + found
                if training:  # what adds to gradients of earlier micro-batches comes last
                    further = replace(layer, added=layer.summed)
                    found += fp8_kernel_set(further, card) if in_fp8 else kernel_set(further, card)
            except KernelError as error:  # the operators fall back and say so
                log.debug("no kernels are built ahead for %s: %s", rewritten.path, error)
                continue
            jit.builder().request(found)


def _layer(call: FfnCall, captured: CapturedBlock, rewritten: RewrittenBlock, cast_weights: bool = True) -> FfnLayer:
    """cast_weights: under autocast, which casts no weights that are quantised."""
    from hexa_fx.cuda.kernel_set import FfnLayer, listed_without_data

    given: dict[str, Any] = dict(call.operands)
    cast = _cast.get()
    weights = given.keys() - {"x", "top_k_index", "top_k_weights"}
    parts = {weight.name: len(weight.parts) for weight in rewritten.packed}
    listed = set()
    for name in ("x", *weights):
        if cast is not None and given[name].dtype not in (torch.float64, cast) and (cast_weights or name == "x"):
            given[name] = given[name].to(cast)  # of lists a stack
        elif given[name].dim() == 3 and (source := _read_by(call, name)) in parts:
            given[name] = listed_without_data(given[name], parts[source])
            listed.add(name)
    trained = {name: _parameters(call, name, captured, rewritten) for name in weights}
    stacked = {name: p for name, found in trained.items() for p in found[:1] if name not in listed and p.requires_grad}
    wide = accumulate_dtype(given["x"].dtype)
    added = {name: wide for name, p in stacked.items() if isinstance(getattr(p, NAME, None), torch.Tensor)}
    sums = {name: p.dtype for name, p in stacked.items() if p.dtype in (wide, given[name].dtype)}
    return FfnLayer(
        MoeFfn(*map(given.get, MOE_FFN), *static_of(call.spec)),  # type: ignore[arg-type]
        grads=frozenset(n for n in OPERANDS if any(p.requires_grad for p in trained.get(n, ())) or n not in trained),
        added=added,
        summed=sums | added,
    )


def _read_by(call: FfnCall, operand: str) -> str:
    """The name of a weight that an operand is, if it is one as it is read."""
    node = call.node.args[MOE_FFN.index(operand)]
    return str(node.target) if isinstance(node, Node) and node.op == "call_module" else ""


def _parameters(call: FfnCall, operand: str, captured: CapturedBlock, rewritten: RewrittenBlock) -> list[torch.Tensor]:
    """What an operand is made of."""
    packed = {weight.name: [path for part in weight.parts for path in part] for weight in rewritten.packed}
    open_, found = [call.node.args[MOE_FFN.index(operand)]], []
    while open_:
        node = open_.pop()
        if not isinstance(node, Node):
            continue
        open_ += node.all_input_nodes
        paths = [str(node.target)] if node.op == "get_attr" else packed.get(str(node.target), [])
        found += [captured.tensor_of(path) for path in paths]
    return found
