"""FSDP2 around a step whose recording failed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule

from hexa_fx.errors import PlanError

_EVENTS = ("_all_gather_result", "_post_reduce_event", "_all_reduce_state", "_reshard_after_forward_event")


def sharded_groups(model: nn.Module) -> Iterator[Any]:
    """What FSDP2 gathers together."""
    for state in _states(model):
        several = hasattr(state, "_fsdp_param_groups")  # from torch 2.13 on
        yield from filter(None, state._fsdp_param_groups if several else [state._fsdp_param_group])


def _states(model: nn.Module) -> Iterator[Any]:
    yield from (module._get_fsdp_state() for module in model.modules() if isinstance(module, FSDPModule))


def forget_step(model: nn.Module) -> None:
    """Makes FSDP2 forget a step whose recording failed.

    What it would wait for was never launched, so that its events are invalid (`CUDA error: invalid argument`), and what it gathered
    never arrived.

    Raises:
        PlanError: this version of torch cannot.
    """
    roots = [
        module for module in model.modules() if isinstance(module, FSDPModule) and module._get_fsdp_state()._is_root
    ]
    for group in sharded_groups(model):
        for name in _EVENTS:
            setattr(group, name, None)
        group.comm_ctx.all_gather_state = None
        for name in ("reduce_scatter_states", "_last_post_reduce_events"):
            getattr(group.comm_ctx, name, []).clear()
    for root in roots:
        if not hasattr(root, "reset_iter_state"):
            raise PlanError(
                "a step failed while it was recorded, and FSDP2 of this version of torch cannot go on from there: build the model "
                "anew and run the step as it is, or use torch 2.13"
            )
        root.reset_iter_state()
