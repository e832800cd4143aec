"""``main_grad``: a buffer on a parameter that its gradient is added to, in place of ``.grad``.

If the buffer has the accumulators' type, the backward program adds to it directly (`hexa_fx.ops.products`). Otherwise torch
adds the finished gradient. A parameter without a buffer may hold a ``.grad`` that the program adds to (`hexa_fx.ops.grad_sums`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import cache
from itertools import zip_longest
from typing import Any

import torch
import torch.fx
from torch import Tensor, is_grad_enabled, nn

from hexa_fx.errors import InputError
from hexa_fx.ops import grad_sums
from hexa_fx.ops.grad_sums import ONLY_TENSORS, Node, owner_of
from hexa_fx.ops.listed import Gradients, Listed, in_parts, shares_of
from hexa_fx.ops.rows import accumulate_dtype
from hexa_fx.ops.table_layers import OPERANDS, SOURCES_OPERANDS, parameters
from hexa_fx.torch_private import _AutoDispatchBelowAutograd

NAME = "main_grad"
ADDED = "grad_added_to_main_grad"
Buffers = tuple[Tensor | None, ...]
"""By operand, in the order of `SOURCES_OPERANDS` from the second on. Empty where there is none at all."""

logger = logging.getLogger(__name__)


@cache
def _say_once(why: str) -> None:
    logger.warning("hexa::moe_ffn: torch adds a gradient to main_grad, rounded to the operands' type: %s", why)


def gradients(
    backward: Callable[..., Sequence[Tensor]],
    operands: Sequence[Tensor | None],
    nodes: Sequence[Node | None],
    needs: Sequence[bool],
    plain: bool,
) -> list[Tensor | None]:
    """What autograd is given for each differentiable operand: None where no gradient is needed, or where something else took it.

    Args:
        backward: takes tensors to add to, if there are any, and gives all other gradients that are needed, in order.
        operands: the differentiable ones of a layer, without x.
        nodes: where autograd takes the gradient of each of these.
        needs: of each differentiable operand.
        plain: whether nothing but autograd sees the call; see `library.is_plain_tensor`.

    Raises:
        InputError: a buffer has another shape than its operand.
    """
    _, *wanted = needs
    each = zip(nodes, operands, wanted, strict=True)
    owners = [owner_of(node, operand) if need else None for node, operand, need in each]
    buffers = _of(owners)
    taken = _direct(operands, buffers) if plain and buffers else ()
    if plain and not is_grad_enabled():
        taken = grad_sums.beside(taken, owners, operands, nodes)
    with _AutoDispatchBelowAutograd() if plain else nullcontext():  # else autograd refuses second derivatives
        left = iter(backward(*taken))
    added = (None, *taken)
    found = [next(left) if need and buffer is None else None for need, buffer in zip_longest(needs, added)]
    _add(buffers, found, plain)
    for place, (owner, buffer) in enumerate(zip(owners, buffers, strict=False), 1):
        if buffer is not None and owner is not None:
            found[place] = _flagged(owner)
    return found


def _flagged(operand: Tensor) -> Tensor | None:
    """What autograd is given for an operand whose gradient was added to its buffer."""
    if not hasattr(operand, ADDED):
        return None
    setattr(operand, ADDED, True)  # Megatron's hooks ask for it, and drop what they find in grad
    return torch.zeros((), dtype=operand.dtype, device=operand.device).expand_as(operand)


class ListedGradients:
    """The gradient of a listed weight, which kernels take where they take a buffer.

    Args:
        wanted: of every tensor, whether it wants a gradient.

    Raises:
        InputError: a buffer has another shape than its parameter.
    """

    def __init__(self, name: str, weight: Listed, wanted: Sequence[bool]) -> None:
        self.shape, self.ndim, self.sizes, experts = weight.shape, weight.ndim, weight.sizes, weight.shape[0]
        needs = [wanted[start : start + experts] for start in range(0, len(wanted), experts)]
        self.pieces = [_Buffered(name, piece, need) for piece, need in zip(weight.pieces(), needs, strict=True)]

    def results(self) -> list[Tensor | None]:
        """What autograd is given for every tensor."""
        return [result for piece in self.pieces for result in piece.results()]


def zeros_for(weight: Listed, wanted: Sequence[bool]) -> Tensor | None:
    """What kernels that make one gradient of a listed weight add it to in the accumulators' type, so that it is not rounded on its
    way to buffers; None if no tensor that wants a gradient has one of that type.
    """
    each = (t for t, need in zip(weight.tensors, wanted) if need and NAME in t.__dict__)
    if not any(isinstance(buffer := _buffer_of(t), Tensor) and _fits(t, buffer) for t in each):
        return None
    return torch.zeros(weight.shape, dtype=accumulate_dtype(weight.dtype), device=weight.device)


def shares(name: str, weight: Listed | None, wanted: Sequence[bool], whole: Tensor | None) -> list[Tensor | None]:
    """What autograd is given for every tensor of a listed operand of which kernels made one gradient, if it was asked for."""
    if weight is None or whole is None:
        return [None] * len(wanted)
    found = shares_of(whole, weight.sizes, wanted)
    if not any(NAME in tensor.__dict__ for tensor in weight.tensors):
        return found
    taken = ListedGradients(name, weight, wanted)
    for piece, gradients in zip(taken.pieces, in_parts(found, weight.shape[0]), strict=True):
        for expert, gradient in enumerate(gradients):
            if gradient is not None:
                piece.add(expert, gradient)
    return taken.results()


class _Buffered(Gradients):
    """Of which some tensors may have buffers."""

    def __init__(self, name: str, weight: Listed, wanted: Sequence[bool]) -> None:
        each = enumerate(zip(weight.tensors, wanted))  # none where only the shape was kept: none has a buffer
        own = {expert: _buffer_of(t) for expert, (t, need) in each if need and NAME in t.__dict__}
        self._own = {expert: buffer for expert, buffer in own.items() if isinstance(buffer, Tensor)}
        for expert, buffer in self._own.items():
            _check_shape(name, weight.tensors[expert], buffer)
        direct = {expert: b for expert, b in self._own.items() if _fits(weight.tensors[expert], b)}
        torch.autograd.graph.increment_version([*direct.values()])
        super().__init__(weight, wanted, [direct.get(e) for e in range(len(wanted))] if direct else ())

    def results(self) -> list[Tensor | None]:
        """With what Megatron's hooks ask for where there is a buffer."""
        found = super().results()
        for expert, buffer in self._own.items():
            gradient = found[expert]
            if gradient is not None:
                buffer.add_(gradient)
            found[expert] = _flagged(self.weight.tensors[expert])
        return found


def shapes_only(needs: Any, recompute_h: bool) -> list[str]:
    """The biases that backward needs the shape of, but not the numbers. needs: whether a gradient of each is needed, by name."""
    read = {"b1": recompute_h, "b3": recompute_h, "b2": needs.top_k_weights}
    return [name for name, is_read in read.items() if not is_read]


def shape_only(bias: Any) -> Any:
    """Such a bias as backward keeps it. It counts its versions anew: it may be written, as by the original."""
    if type(bias) is Listed:
        return bias if any(hasattr(tensor, NAME) for tensor in bias.tensors) else bias.of([])
    return bias.data if type(bias) in ONLY_TENSORS else bias


def _of(owners: Sequence[Tensor | None]) -> Buffers:
    """The buffers of operands that need a gradient, which others do not own."""
    if not any(hasattr(owner, NAME) for owner in owners):
        return ()
    found = tuple([_buffer_of(owner) for owner in owners])
    if found.count(None) == len(found):
        return ()
    found = tuple(buffer if isinstance(buffer, Tensor) else None for buffer in found)
    for name, owner, buffer in zip(SOURCES_OPERANDS[1:], owners, found):
        if buffer is not None and owner is not None:
            _check_shape(name, owner, buffer)
    return found


def _check_shape(name: str, operand: Tensor, buffer: Tensor) -> None:
    if buffer.shape != operand.shape:
        shapes = f"main_grad is {tuple(buffer.shape)}, {name} {tuple(operand.shape)}"
        raise InputError(f"hexa::moe_ffn: {shapes}; a main_grad has its parameter's shape")


def _buffer_of(owner: Tensor | None) -> Any:
    """The buffer of a tensor; None if hooks are to see the gradient, which then may add it to the buffer."""
    buffer = getattr(owner, NAME, None)
    if buffer is None or owner is None:
        return None
    if not grad_sums.has_hooks(owner):
        return buffer
    _say_hooked()
    return None


@cache
def _say_hooked() -> None:
    logger.warning(
        "hexa::moe_ffn: a weight with a main_grad has hooks; they see its gradient in grad, and main_grad is theirs"
    )


def _direct(operands: Sequence[Tensor | None], buffers: Buffers) -> Buffers:
    """The buffers that the backward program adds to directly, of weights and biases."""
    found = [
        buffer if 0 < i < len(OPERANDS) - 1 and _fits(operand, buffer) else None
        for i, (operand, buffer) in enumerate(zip(operands, buffers))
    ]
    taken = [buffer for buffer in found if buffer is not None]
    torch.autograd.graph.increment_version(taken)  # kernels write to memory behind autograd's back
    return tuple(found) if taken else ()


def _fits(operand: Tensor | None, buffer: Tensor | None) -> bool:
    if operand is None or buffer is None:
        return False
    wide = accumulate_dtype(operand.dtype)
    if buffer.dtype != wide:
        _say_once(f"it is {buffer.dtype}; gradients of {operand.dtype} add up in {wide}")
    elif type(buffer) not in ONLY_TENSORS or buffer.layout is not torch.strided or buffer.device != operand.device:
        _say_once(f"it is a {type(buffer).__name__} on {buffer.device}, its parameter is on {operand.device}")
    else:
        return True
    return False


def _add(buffers: Buffers, grads: list[Tensor | None], plain: bool) -> None:
    """Moves finished gradients to their buffers."""
    for i, buffer in enumerate(buffers, 1):
        gradient = grads[i]
        if buffer is None or gradient is None:
            continue
        if not plain:
            _say_once("something else than autograd looks on (a mode, a second derivative, a tensor subclass)")
        with torch.no_grad():
            buffer.add_(gradient)
        grads[i] = None


def parameters_of(graph: torch.fx.Graph) -> tuple[str, ...]:
    """Paths of the parameters whose buffers a rewritten graph adds to: those passed to `hexa::moe_ffn` unchanged."""
    ops = torch.ops.hexa
    targets = (ops.moe_ffn.default, ops.moe_ffn_fixed.default, ops.moe_ffn_fp8.default)
    nodes = [node for target in targets for node in graph.find_nodes(op="call_function", target=target)]
    operands = (operand for node in nodes for operand in parameters(node.args))
    weights = (node for node in operands if isinstance(node, torch.fx.Node) and node.op == "get_attr")
    return tuple(dict.fromkeys(str(node.target) for node in weights))


def has_any(module: nn.Module, paths: Sequence[str]) -> bool:
    """Whether one of these parameters of ``module`` has a buffer."""
    for path in paths:
        *owners, name = path.split(".")
        owner: nn.Module | None = module
        for child in owners:
            owner = owner._modules.get(child) if owner is not None else None
        if owner is not None and hasattr(owner._parameters.get(name), NAME):
            return True
    return False
