"""Turns a request of `hexa::moe_ffn` into what runs: lowers, fuses, and binds to the kernels of a device."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch.fx import GraphModule

from hexa_fx.ops import library
from hexa_fx.ops.program import OPERANDS, FfnRequest
from hexa_fx.passes.lowering.base import Contract, GraphPass, Pipeline
from hexa_fx.passes.lowering.fuse import FuseActivation
from hexa_fx.passes.lowering.lower import LOWERED, Lowered, buffer_name, lower_backward, lower_forward
from hexa_fx.passes.lowering.tile import TileRows

_FORWARD_OPERANDS = ("x", "top_k_index", *OPERANDS[1:])
_BACKWARD_OPERANDS = ("dy", "x", "h", "v", "inv", "offs", *OPERANDS[1:], "top_k", *map(buffer_name, OPERANDS[1:]))


@dataclass(frozen=True)
class BindKernels(GraphPass):
    """Replaces calls to ``torch.ops.hexa.*`` by calls to the kernels themselves, past torch's dispatcher.

    Args:
        device: device type, ``cpu`` or ``cuda``.
    """

    device: str = "cpu"
    name: ClassVar[str] = "bind_kernels"
    contract: ClassVar[Contract] = Contract(
        requires=frozenset({LOWERED}), provides=frozenset({"bound"}), removes=frozenset({LOWERED})
    )

    def apply(self, gm: GraphModule) -> int:
        """Replaces the target of every hexa node for which the device has a kernel in Python."""
        bound = 0
        for node in gm.graph.nodes:
            target = node.target
            if isinstance(target, torch._ops.OpOverload) and target.namespace == library.NAMESPACE:
                node.target = library.kernel_for(target._opname, self.device)
                bound += node.target is not target
        return bound


@dataclass(frozen=True)
class TakeSaved(GraphPass):
    """Takes h, which forward saved for a single use, out of a list.

    A call's frames hold its arguments until it returns, and h is as large as everything that backward computes from it. Popped
    from a list, its memory is free as soon as the last operator has read it.
    """

    name: ClassVar[str] = "take_saved"
    contract: ClassVar[Contract] = Contract()

    def apply(self, gm: GraphModule) -> int:
        """Puts a pop behind every placeholder of `SAVED`."""
        saved = [n for n in gm.graph.nodes if n.op == "placeholder" and n.target in SAVED]
        for box in saved:
            with gm.graph.inserting_after(box):
                taken = gm.graph.call_method("pop", (box,))
            box.replace_all_uses_with(taken, delete_user_cb=lambda user, taken=taken: user is not taken)
        return len(saved)


SAVED = ("h",)
"""Operands of the backward program that come in a list."""


@dataclass(frozen=True)
class Program:
    """The programs of one request on one device type, and the graphs they come from. Made when first asked for.

    Args:
        request: what was asked for.
        device: device type.
    """

    request: FfnRequest
    device: str

    @cached_property
    def forward(self) -> Callable[..., Any]:
        """The forward program, over all operands of moe_ffn by position."""
        return _pick(self.bound(lower_forward(self.request)), _FORWARD_OPERANDS)

    @cached_property
    def backward(self) -> Callable[..., Any]:
        """The backward program, over dy, x, [h], v, inv, offs, the other operands, top_k and their buffers by position."""
        return _pick(self.bound(lower_backward(self.request)), _BACKWARD_OPERANDS)

    def bound(self, gm: GraphModule) -> GraphModule:
        """A lowered graph made ready for the device."""
        bind = TileRows() if self.device == "cpu" else BindKernels(self.device)
        passes = (FuseActivation(gradients=self.device == "cuda"), bind, TakeSaved())
        Pipeline(passes, given=frozenset({LOWERED}))(gm)
        return gm


def fused(lowered: Lowered) -> Lowered:
    """Fuses the graphs in place. They are then what every device runs, in terms of ``torch.ops.hexa``."""
    for gm in (lowered.forward, lowered.backward):
        FuseActivation()(gm)
    return lowered


provide = Program
"""The provider of `hexa_fx.ops.program`."""


def _pick(gm: GraphModule, operands: tuple[str, ...]) -> Callable[..., Any]:
    """A function over all operands by position that calls gm with those it takes."""
    names = [n.target for n in gm.graph.nodes if n.op == "placeholder"]
    pick = operator.itemgetter(*(operands.index(str(n)) for n in names))
    run = gm.forward

    def picked(*args: Any) -> Any:
        return run(*pick(args))

    return picked
