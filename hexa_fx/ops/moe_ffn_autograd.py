"""How autograd runs `hexa::moe_ffn`: through operators, or by their kernels directly.

A compiler, a dispatch mode or a tensor subclass sees ``moe_ffn_forward`` and ``moe_ffn_backward`` as operators. On plain
tensors with nothing of that kind active, kernels are called directly, because torch's dispatcher takes as long to reach a
Python kernel as a small layer takes to run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, is_grad_enabled

from hexa_fx.errors import InputError
from hexa_fx.ops import library, main_grad
from hexa_fx.ops.direct_function import DirectFunction
from hexa_fx.ops.moe_ffn import run, run_backward, run_forward
from hexa_fx.torch_private import DispatchKeySet, _any_requires_grad, _AutoDispatchBelowAutograd, is_forward_mode

_OPS = torch.ops.hexa
_on_cuda: dict[str, Callable[..., Any]] = {}
Grads = tuple[Tensor | None, ...]


class ByExpertOrder(DirectFunction):
    """The autograd function over the operators."""

    @staticmethod
    def forward(ctx: Any, plain: bool, *args: Any) -> Tensor:
        with _AutoDispatchBelowAutograd():
            found = _run("moe_ffn_forward", run_forward, args) if plain else _OPS.moe_ffn_forward.default(*args)
        return ByExpertOrder.kept(ctx, args, *found)

    @staticmethod
    def kept(ctx: Any, args: tuple[Any, ...], y: Tensor, h: Tensor, v: Tensor, inv: Tensor, offs: Tensor) -> Tensor:
        """y, with what backward needs saved."""
        needs = ctx.needs_input_grad[1:]
        x, top_k_index, recompute_h = args[0], args[1], args[14]
        keep_x = x if needs[3] or needs[5] or recompute_h else None
        operands = main_grad.kept_operands(args[:9], recompute_h, ctx.needs_input_grad[1:])
        ctx.save_for_backward(keep_x, None if recompute_h else h, v, inv, offs, *operands)
        ctx.static = (top_k_index.shape[1], *args[9:], [needs[0], *needs[2:9]])
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Grads:
        dy, plain = grads[0], library.is_plain_tensor(grads[0])
        x, h, *saved = ctx.saved_tensors
        if plain and h is not None:
            h = [h]  # the backward program pops it and frees it after its last use
            ctx.maybe_clear_saved_tensors()  # unless the graph is retained
        run = _backward if plain else _OPS.moe_ffn_backward.default
        found = partial(run, dy, x, h, *saved, *ctx.static)
        return _by_argument(main_grad.gradients(found, saved[3:], ctx.static[-1], plain))


def _backward(*args: Any) -> list[Tensor]:
    return _run("moe_ffn_backward", run_backward, args)  # type: ignore[no-any-return]


def _by_argument(grads: Iterable[Tensor | None]) -> Grads:
    """Gradients by `OPERANDS`, spread over the arguments of forward: a flag first, the ids third, constants last."""
    dx, *others = grads
    return None, dx, None, *others, *(None,) * 6


def autograd(keyset: DispatchKeySet, *args: Any) -> Any:
    """``hexa::moe_ffn`` on the Autograd key."""
    if is_forward_mode():
        raise InputError(
            "hexa::moe_ffn has no forward-mode derivative (torch.func.jvp, torch.autograd.forward_ad); use backward, or the "
            "original module"
        )
    if library.is_plain(keyset):
        return plain(*args)
    if is_grad_enabled() and _any_requires_grad(*args):
        return ByExpertOrder.apply(False, *args)
    return library.below_autograd(_OPS.moe_ffn.default, keyset, args)


def plain(*args: Any) -> Any:
    """``hexa::moe_ffn`` with autograd, where nothing but autograd has to see it."""
    if is_grad_enabled() and _any_requires_grad(*args):
        return ByExpertOrder.apply(True, *args)
    return _run("moe_ffn", _inference, args)


def _inference(*args: Any) -> Tensor:
    with _AutoDispatchBelowAutograd():
        return run(*args)  # type: ignore[no-any-return]


def _run(name: str, general: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """Runs an operator of the layer on plain tensors."""
    return _on_cuda[name](general, *args) if name in _on_cuda and args[0].is_cuda else general(*args)


def register_on_cuda(name: str, kernel: Callable[..., Any]) -> None:
    """Registers what runs ``hexa::<name>`` on plain CUDA tensors.

    Args:
        name: ``moe_ffn``, ``moe_ffn_forward`` or ``moe_ffn_backward``.
        kernel: takes the general implementation, then the operator's arguments, unchecked.
    """
    _on_cuda[name] = kernel


library.register_autograd_kernel("moe_ffn", autograd)
