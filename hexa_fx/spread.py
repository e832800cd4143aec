"""What `optimize_` is told of several devices: checked, and done."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn

from hexa_fx.analysis import ModelAnalysis
from hexa_fx.attached import note_session
from hexa_fx.batch_dependence import say_what_batches_decide
from hexa_fx.config import HexaConfig
from hexa_fx.errors import InputError, PlanError
from hexa_fx.example_inputs import ExampleInputs, call_arguments
from hexa_fx.ir import RewrittenBlock
from hexa_fx.isolation.module_state import ModuleState
from hexa_fx.isolation.module_tree import inside
from hexa_fx.isolation.torch_state import random_state_kept
from hexa_fx.passes.partition.plan_layers import PartitionConfig, Strategy, wanted_modes

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from hexa_fx.distributed.session import PartitionSession
    from hexa_fx.passes.partition.install import Installed
    from hexa_fx.runtime.forward import Analyst


@dataclass(frozen=True)
class Spread:
    """The arguments of `hexa_fx.optimize_` that say how a model's experts are spread over devices."""

    mesh: DeviceMesh | None
    strategy: Strategy
    capacities: Literal["measure"] | Sequence[float] | None
    partition: PartitionConfig | None
    data_mesh: DeviceMesh | None

    def check(self, example_inputs: ExampleInputs | None) -> None:
        """Raises `InputError` for what is of no use without a mesh, of another type, or missing; `PlanError` for unknown modes."""
        asked = self.strategy != "auto" or self.capacities != "measure" or self.partition or self.data_mesh is not None
        if self.mesh is None and asked:
            raise InputError(
                "strategy, capacities, partition and data_mesh say how to spread the model over devices; give mesh= too"
            )
        if not isinstance(self.partition, PartitionConfig | None):
            raise InputError(f"partition is a {type(self.partition).__name__}; expected a hexa_fx.PartitionConfig")
        wanted_modes(self.strategy, {})
        known = self.partition is not None and self.partition.batch is not None
        if self.mesh is not None and example_inputs is None and not known:
            raise InputError("the example inputs stand for the global batch: give them, or PartitionConfig(batch=...)")

    def apply(
        self,
        model: nn.Module,
        found: ModelAnalysis,
        example_inputs: ExampleInputs,
        config: HexaConfig,
        finish: Callable[[RewrittenBlock], RewrittenBlock],
        analyst: Callable[[Installed], Analyst],
    ) -> PartitionSession:
        """Spreads what was found rewritable over the devices, and installs it.

        Args:
            finish, analyst: see `hexa_fx.passes.partition.apply.Caller`.

        Raises:
            PlanError: that is nothing, or it cannot be spread as asked.
        """
        # here, since it loads torch's DTensor and networkx, which only those need who have a mesh
        from hexa_fx.passes.partition.apply import Caller, Wanted, apply_partition

        if not found.rewritten:
            raise PlanError(f"there is nothing to spread over devices: {found.report}")
        say_what_batches_decide(found.around.values())
        args, kwargs = call_arguments(example_inputs)
        wanted = Wanted(
            self.mesh,
            self.strategy,
            self.capacities,
            self._config((*args, *kwargs.values()), config),
            data_mesh=self.data_mesh,
        )
        caller = Caller(finish, _timed(model, found, args, kwargs), analyst, note_session)
        blocks = [found.forms[analysis.path] for analysis in found.rewritten]
        return apply_partition(model, blocks, wanted, caller=caller)

    def _config(self, example: tuple[Any, ...], config: HexaConfig) -> PartitionConfig:
        """Without what ``config`` switches off. The global batch defaults to that of the example inputs."""
        given = self.partition or PartitionConfig()
        first = next((value for value in example if isinstance(value, torch.Tensor) and value.dim()), None)
        batch = first.shape[0] if given.batch is None and first is not None else given.batch
        slots = given.slots if config.shared_cache else 0
        return replace(given, batch=batch, slots=slots, prefetch=given.prefetch and config.overlap)


def _timed(model: nn.Module, found: ModelAnalysis, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[], None]:
    """Runs the model on the example to see how long it takes, after which all is as it was: counts, buffers, random numbers."""
    forms = ((path, form) for path, forms in found.forms.items() for form in forms.values())
    changed = dict.fromkeys(inside(path, name) for path, form in forms for name in form.changed)
    state = cache(lambda: ModuleState(model, changed=[*changed]))  # made before the first run, which is not timed

    def run() -> None:
        before = state()
        try:
            with random_state_kept():
                model(*args, **kwargs)
        finally:
            before.restore()
            found.effects.restore()

    return run
