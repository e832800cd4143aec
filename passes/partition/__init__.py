"""Plans how a model's MoE layers are spread over ranks, applies a plan, and exchanges it for another while the job runs.

`partition_model` (plan.py) decides and returns a `Plan` that is equal on all ranks. `install_plan` (install.py)
cuts the parameters, rewrites the blocks' graphs and returns the session that runs them. `apply_partition` (apply.py) does both.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hexa_fx.passes.partition.apply import apply_partition, apply_to_graph_module
    from hexa_fx.passes.partition.install import Installed, install_plan
    from hexa_fx.passes.partition.plan import partition_model

__all__ = ["Installed", "apply_partition", "apply_to_graph_module", "install_plan", "partition_model"]

_HOMES = {
    "Installed": "install",
    "apply_partition": "apply",
    "apply_to_graph_module": "apply",
    "install_plan": "install",
    "partition_model": "plan",
}


def __getattr__(name: str) -> Any:
    """Imports on first use: DTensor, FSDP and networkx take most of the time of the import of `hexa_fx.optimize`."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
