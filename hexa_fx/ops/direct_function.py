"""Autograd functions that are entered without what torch prepares for torch.func, which is a dozen Python calls each time."""

from __future__ import annotations

from typing import Any

import torch

from hexa_fx.errors import InputError
from hexa_fx.torch_private import _are_functorch_transforms_active


class DirectFunction(torch.autograd.Function):
    """`torch.autograd.Function` for functions that transforms cannot pass through anyway, as they define no ``setup_context``.

    Torch first unwraps arguments that are left over from a transform which has ended. Its operators do that too.

    Raises:
        InputError: a transform is active.
    """

    @classmethod
    def apply(cls, *args: Any) -> Any:
        if _are_functorch_transforms_active():
            raise InputError(
                "torch.func (grad, jacrev, vjp) does not go through operators of hexa_fx: use backward() or torch.autograd.grad, "
                "or the original module"
            )
        return super(torch.autograd.Function, cls).apply(*args)  # type: ignore[misc]
