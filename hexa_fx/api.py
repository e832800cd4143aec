"""`optimize`, `optimize_` and `explain`: analyse a model's MoE blocks and install the rewritten ones."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Literal, TypeVar

import torch
from torch import nn

from hexa_fx.analysis import analyse_model
from hexa_fx.attached import attach
from hexa_fx.capture.copies import sharing_copy
from hexa_fx.capture.host import compiled_as_python
from hexa_fx.config import HexaConfig
from hexa_fx.errors import InputError
from hexa_fx.example_inputs import ExampleInputs
from hexa_fx.example_tokens import example_tokens
from hexa_fx.first_call import let_go, put_on
from hexa_fx.graphs import Graphs
from hexa_fx.inspection.inspector import Inspector
from hexa_fx.optimizing import Part, analyse_and_install, as_finished, at_first_call
from hexa_fx.passes.partition.plan_layers import PartitionConfig, Strategy
from hexa_fx.report import OFF, WAITS, OptimizationReport
from hexa_fx.runtime.preflight import called_in, check_model, check_values
from hexa_fx.sources.garbage import collecting
from hexa_fx.spread import Spread
from hexa_fx.tracing import tracing

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

Model = TypeVar("Model", bound=nn.Module)


def optimize(model: Model, example_inputs: ExampleInputs | None = None, config: HexaConfig | None = None) -> Model:
    """Returns a new model whose MoE blocks run on expert-specific operators; ``model`` itself keeps its code.

    The new model has the same class, parameter names and ``state_dict``, and shares parameters and buffers with ``model``. It
    carries ``.report`` (`hexa_fx.report.OptimizationReport`) and ``.graphs`` (`hexa_fx.graphs.Graphs`), or ``.hexa_report`` and
    ``.hexa_graphs`` where the model already has attributes of those names. A block that cannot be rewritten keeps running its
    own code; if that is true of all blocks, a warning says why. To spread experts over devices, which cuts parameters, use
    `optimize_`.

    Args:
        model: any module that contains MoE blocks.
        example_inputs: arguments of one call: a tensor, a tuple or list of positional arguments, or a mapping of keyword
            arguments, on the model's device. Any size will do. Without an example the model is analysed when it is first called;
            with one it is analysed at once, so that there is a report before. Either way calls of another kind (mode, dtypes,
            autocast, settings) are analysed when they come.
        config: options; by default `HexaConfig.from_environment()`.

    Raises:
        InputError: an argument is of no use, or the model has to be prepared differently (it is compiled, scripted or already
            optimized).
        NothingRewritten: with ``strict``, no block was rewritten.
        VerificationError: with ``strict``, a rewritten block differs from its original.
        Exception: whatever the model raises on the example inputs.
    """
    check_model(model)
    return optimize_(sharing_copy(model), example_inputs, config)


@collecting
@compiled_as_python()
def optimize_(
    model: Model,
    example_inputs: ExampleInputs | None = None,
    config: HexaConfig | None = None,
    *,
    mesh: DeviceMesh | None = None,
    strategy: Strategy = "auto",
    capacities: Literal["measure"] | Sequence[float] | None = "measure",
    partition: PartitionConfig | None = None,
    data_mesh: DeviceMesh | None = None,
) -> Model:
    """Does what `optimize` does, but in place, and returns ``model`` itself. With a mesh it also spreads the experts over devices.

    With a mesh, every rank calls it with the same model and inputs, before any optimizer, DDP or FSDP2 is built. Expert weights
    are then cut into shards by device speed, and the blocks exchange tokens or weights (docs/partition.md). The running session
    is ``model.partition`` (``.hexa_partition`` where that name is taken); ``model.report`` shows its plan. The example inputs
    stand for the global batch: unless ``partition`` says otherwise, their first dimension is the batch that is shared out.

    Args:
        model, example_inputs, config: as for `optimize`. With a mesh the model is analysed at once; without an example on tokens
            that are made by a transformers model's configuration.
        mesh: one-dimensional device mesh to spread the MoE blocks over, or one axis of a larger mesh, ``mesh["hexa"]``, whose
            equal shares are then DTensors; None for one device.
        strategy: ``"data"`` (weights travel), ``"model"`` (tokens travel), ``"fsdp"`` (weights travel, by torch's FSDP2 on the
            rewritten blocks), ``"auto"`` (whichever is cheapest for a layer), or a mapping from block path to one of these.
        capacities: seconds that each device takes for the same task, ``"measure"`` to time the experts on each, or None if
            all devices are alike.
        partition: everything else about the partition, such as the global batch, cache slots and who averages gradients.
        data_mesh: the data-parallel axes of that larger mesh. Given, counts, sums and checkpoints of the session are over these
            too; else they are left to FSDP2, which averages over them.

    Raises:
        InputError: as for `optimize`; or an argument about the partition was given without a mesh.
        PlanError: the blocks cannot be partitioned as asked, or no block was rewritten.
        NothingRewritten, VerificationError: as for `optimize`.
        Exception: as for `optimize`. Whatever ends the call, ctrl-C too, the model then runs its own code as before; cut over
            devices it may be left in parts.
    """
    check_model(model)
    config = _checked(config, model)
    if example_inputs is not None:
        check_values(model)
    let_go(model)  # of what an earlier call left, if the model was not called since
    spread = Spread(mesh, strategy, capacities, partition, data_mesh)
    spread.check(example_inputs)
    if config.off and mesh is None:
        attach(model, "report", OptimizationReport((), unseen=OFF))
        attach(model, "graphs", Graphs({}))
        return model
    if example_inputs is not None or mesh is not None:
        example = example_tokens(model) if example_inputs is None else example_inputs
        report, graphs = analyse_and_install(model, example, config, spread)
        attach(model, "report", report)
        attach(model, "graphs", graphs)
        return model
    whole, graphs, called = Part(), Graphs({}), called_in(model)
    around = () if called is model else (model,)
    put_on(called, partial(at_first_call, config=config, model=whole, graphs=graphs, around=around))
    attach(model, "report", OptimizationReport((), later=whole.later, unseen=WAITS))
    attach(model, "graphs", graphs)
    return model


@collecting
@compiled_as_python()
def explain(
    model: nn.Module, example_inputs: ExampleInputs | None = None, config: HexaConfig | None = None
) -> OptimizationReport:
    """Reports what `optimize` would rewrite, and why it would leave the rest alone. The model is not changed.

    Args:
        model, example_inputs, config: as for `optimize`; ``strict`` has no effect. Without an example tokens are made by a
            transformers model's configuration.

    Raises:
        InputError: as for `optimize`.
        Exception: whatever the model raises on the example inputs.
    """
    check_model(model)
    config = _checked(config, model)
    example_inputs = example_tokens(model) if example_inputs is None else example_inputs
    with torch.inference_mode(False), tracing() as trace:
        report = as_finished(analyse_model(model, example_inputs, config, Inspector()), config)
        trace.finish(report)
    return report


def _checked(config: HexaConfig | None, model: nn.Module) -> HexaConfig:
    if not isinstance(config, HexaConfig | None):
        raise InputError(f"config is a {type(config).__name__}; expected a hexa_fx.HexaConfig")
    config = config or HexaConfig.from_environment()
    if config.skip:
        config.say_unknown([path for path, _ in model.named_modules()])
    return config
