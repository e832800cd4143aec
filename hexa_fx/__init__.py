"""Rewrites Mixture-of-Experts code in PyTorch models into exact expert-specific operators (HEXA-MoE).

>>> import hexa_fx
>>> opt = hexa_fx.optimize(model, example_inputs)   # doctest: +SKIP
>>> print(opt.report)                               # doctest: +SKIP
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hexa_fx.config import HexaConfig

if TYPE_CHECKING:
    from hexa_fx.api import explain, optimize, optimize_
    from hexa_fx.inspection.debug import debug
    from hexa_fx.runtime.distributed.profile import profile_devices

__version__ = "0.1.0"
__all__ = ["HexaConfig", "debug", "explain", "optimize", "optimize_", "profile_devices"]


def __getattr__(name: str) -> Any:
    """The API is imported on first use, so that ``import hexa_fx`` costs little more than ``import torch``."""
    if name in ("explain", "optimize", "optimize_"):
        from hexa_fx import api

        return getattr(api, name)
    if name == "debug":
        from hexa_fx.inspection.debug import debug

        return debug
    if name == "profile_devices":
        from hexa_fx.runtime.distributed import profile

        return profile.profile_devices
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
