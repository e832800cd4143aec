"""Makes the Mixture-of-Experts layers of PyTorch models fast, without padding and without dropping tokens (HEXA-MoE).

>>> import hexa_fx
>>> opt = hexa_fx.optimize(model)                   # doctest: +SKIP
>>> opt(**inputs)                                   # doctest: +SKIP
>>> print(opt.report)                               # doctest: +SKIP

`optimize` returns a model that is analysed when it is first called, or at once if there is an example. `optimize_` rewrites in
place and can spread experts over devices, `explain` only reports, and `undo_` restores. `patch_transformers` makes
``experts_implementation="hexa"`` known to transformers.
`quantize_experts_` packs the experts of an optimized model into 4 or 8 bits. `record_routing` and `replay_routing` note and repeat
which experts tokens go to. `graphed` makes a CUDA graph of a training step. Their options are `HexaConfig` and `PartitionConfig`.
`debug` shows the graphs between passes, and `profile_devices` measures how fast each device is.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from hexa_fx import registry
from hexa_fx.config import HexaConfig

if TYPE_CHECKING:
    from hexa_fx.api import explain, optimize, optimize_
    from hexa_fx.distributed.profile import profile_devices
    from hexa_fx.inspection.debug import debug
    from hexa_fx.integrations.transformers import patch_transformers
    from hexa_fx.passes.partition.plan_layers import PartitionConfig
    from hexa_fx.quantize import quantize_experts_
    from hexa_fx.routing.log import RoutingLog
    from hexa_fx.routing.session import record_routing, replay_routing
    from hexa_fx.steps.graphed import graphed
    from hexa_fx.undo import undo_

__version__ = "0.1.0"
__all__ = [
    "HexaConfig",
    "PartitionConfig",
    "RoutingLog",
    "debug",
    "explain",
    "graphed",
    "optimize",
    "optimize_",
    "patch_transformers",
    "profile_devices",
    "quantize_experts_",
    "record_routing",
    "replay_routing",
    "undo_",
]

_HOMES = {
    "PartitionConfig": "hexa_fx.passes.partition.plan_layers",
    "RoutingLog": "hexa_fx.routing.log",
    "debug": "hexa_fx.inspection.debug",
    "explain": "hexa_fx.api",
    "graphed": "hexa_fx.steps.graphed",
    "optimize": "hexa_fx.api",
    "optimize_": "hexa_fx.api",
    "patch_transformers": "hexa_fx.integrations.transformers",
    "profile_devices": "hexa_fx.distributed.profile",
    "quantize_experts_": "hexa_fx.quantize",
    "record_routing": "hexa_fx.routing.session",
    "replay_routing": "hexa_fx.routing.session",
    "undo_": "hexa_fx.undo",
}


def __getattr__(name: str) -> Any:
    """Imports the API on first use, so that ``import hexa_fx`` costs little more than ``import torch``."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    with registry.interrupts_after():
        return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])


def _compiler() -> Callable[[Any, str], Any]:
    from hexa_fx.passes.lowering.pipelines import CompiledFfn

    return CompiledFfn


def _cuda_kernels() -> Callable[[], None]:
    from hexa_fx.cuda.register import register

    return register


def _large_blocks() -> Any:
    from hexa_fx import large_blocks

    return large_blocks


def _lora() -> Any:
    from hexa_fx import lora

    return lora


def _packed() -> Any:
    from hexa_fx import packed

    return packed


# Warnings of C++ name the line of Python that called it: ours, in each of the places that run the user's code anew. Theirs stay.
warnings.filterwarnings("ignore", module=r"hexa_fx\.")

registry.compiler.register(_compiler)
registry.cuda_kernels.register(_cuda_kernels)
registry.large_blocks.register(_large_blocks)
registry.lora.register(_lora)
registry.packed.register(_packed)
