"""Has the kernels of installed blocks built that only a run shows: those of experts that are no `hexa::moe_ffn`."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from hexa_fx.isolation.lookup import tensors_in
from hexa_fx.isolation.module_tree import named_tensors
from hexa_fx.isolation.torch_state import random_state_kept
from hexa_fx.isolation.trial_modes import no_device_asserts
from hexa_fx.ops import main_grad
from hexa_fx.runtime.forward import HexaForward
from hexa_fx.runtime.results import state_of

log = logging.getLogger(__name__)

Example = tuple[tuple[Any, ...], Mapping[str, Any]]


def request_kernels_of_steps(model: nn.Module, examples: Mapping[str, Example]) -> int:
    """Requests the kernels that forward and backward of the blocks at these paths launch. They build in the background.

    Every block runs once on its example without launching anything. Buffers, attributes and the random state are restored,
    results are thrown away, and no gradients are accumulated. Kernels depend on the number of tokens only through the power of
    two of the rows per expert, so the example should be about as large as a step. A failure is logged, and the kernels are
    then requested when they are first launched.

    Args:
        model: with installed blocks.
        examples: arguments of a call, by the block's path.

    Returns:
        How many kernels the blocks launch; 0 if none of them is on a CUDA device.
    """
    blocks = [(model.get_submodule(path), example) for path, example in examples.items()]
    blocks = [(block, example) for block, example in blocks if device_of(block) is not None]
    if not blocks:
        return 0
    from hexa_fx import jit
    from hexa_fx.cuda import choosing  # needs CUTLASS's Python

    try:
        with choosing.collect() as specs:
            _steps(blocks)
    except Exception as error:  # an error of the block's own code on meaningless results
        log.warning("kernels are built when they are needed: %s: %s", type(error).__name__, error)
        return 0
    jit.builder().request(specs)
    return len(set(specs))


def device_of(block: nn.Module) -> torch.device | None:
    """The CUDA device of a module's parameters; None if none is on one."""
    return next((p.device for p in named_tensors(block, "_parameters").values() if p.is_cuda), None)


def _steps(blocks: Sequence[tuple[nn.Module, Example]]) -> None:
    for block, (args, kwargs) in blocks:
        _step(block, args, kwargs)


def _step(block: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Runs forward, and backward if the block is in train mode."""
    forward = block.forward
    made = forward.in_mode(block.training) if isinstance(forward, HexaForward) else None
    of_results = ((), ()) if made is None else (made.stored, made.changed)
    state = state_of(block, *of_results)
    with ExitStack() as stack:
        stack.enter_context(random_state_kept())
        if isinstance(forward, HexaForward):
            stack.enter_context(forward.on_trial())
        stack.callback(state.restore)
        stack.enter_context(main_grad.stand_ins(block))
        # what operators leave uninitialised may be made into indices
        stack.enter_context(no_device_asserts(block))
        stack.enter_context(torch.set_grad_enabled(block.training))
        given = block(*(_leaf(a) for a in args), **{name: _leaf(a) for name, a in kwargs.items()})
        results = [tensor for tensor in tensors_in([given]) if tensor.requires_grad]
        wanted = [p for p in block.parameters() if p.requires_grad]
        if block.training and results and wanted:
            torch.autograd.grad(results, wanted, [torch.ones_like(r) for r in results], allow_unused=True)


def _leaf(value: Any) -> Any:
    """The tensor with gradients on, since a layer inside a model has to give its input's gradient too."""
    if isinstance(value, Tensor) and value.is_floating_point() and torch.is_grad_enabled():
        return value.detach().requires_grad_()
    return value
