"""transformers: the experts implementation ``hexa``."""

from __future__ import annotations

from typing import Any

from hexa_fx.errors import InputError


def patch_transformers() -> None:
    """Makes ``experts_implementation="hexa"`` known to transformers 5, for the whole process.

    After it ``from_pretrained(..., experts_implementation="hexa")`` and ``model.set_experts_implementation("hexa")`` run the
    experts of every family that has the choice on `hexa::moe_ffn`, and ``DistributedConfig(ep_implementation="hexa")`` gives each
    rank channels of every expert in place of whole experts. Routers, parameter names and checkpoints stay the
    library's; nothing of the choice is written to config.json. Calling it again changes nothing. It is the library's own registry
    that is written to; the library looks for no entry points, so it has to be called.

    Unlike `hexa_fx.optimize` it verifies nothing: it relies on the library's own contract. Families without the choice (dbrx,
    switch_transformers, ...) need `hexa_fx.optimize`.

    Raises:
        InputError: transformers is missing, or older than 5.
    """
    try:
        from transformers.integrations.moe import ExpertsInterface
    except ImportError as error:
        raise InputError(
            "transformers 5 or later is needed for experts_implementation; pip install '.[hf]', "
            "or call hexa_fx.optimize on the model"
        ) from error
    from hexa_fx.integrations.experts import hexa_experts_forward

    ExpertsInterface.register("hexa", hexa_experts_forward)
    try:
        from transformers.distributed.expert_parallel import EPImplementationInterface
    except ImportError:  # before 5.23
        return
    EPImplementationInterface.register("hexa", _sliced_experts)


def _sliced_experts(experts: Any, ep_mesh: Any, tp_mesh: Any) -> Any:
    from hexa_fx.integrations.expert_parallel import SlicedExperts  # here, since it loads the collectives

    return SlicedExperts(experts, ep_mesh, tp_mesh)
