"""A rank's slice of an expert weight that is a DTensor, as a differentiable function of it."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor

from hexa_fx.ops.library import DirectFunction


class LocalWeight(DirectFunction):
    """As `DTensor.to_local`, for less of the host's time. A gradient that does not arrive (`reductions`) stays missing."""

    @staticmethod
    def forward(ctx: Any, weight: DTensor) -> Tensor:
        ctx.parameter = weight
        ctx.set_materialize_grads(False)
        return weight._local_tensor.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> DTensor | None:
        return None if grads[0] is None else as_gradients(ctx.parameter, grads[0])[0]


def as_gradients(parameter: Any, local: Tensor) -> tuple[DTensor]:
    """The gradient of a rank's slice, complete for its channels, as one of the parameter."""
    return (DTensor(local, parameter._spec, requires_grad=False),)  # what from_local makes, after a dozen checks
