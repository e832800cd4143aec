"""`optimize`, `optimize_` and `explain`: observe the model, take every candidate block through the passes, install."""

from __future__ import annotations

import copy
import logging
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import torch
from torch import nn

from hexa_fx.capture.observe import Candidate, Observation, observe
from hexa_fx.config import HexaConfig
from hexa_fx.errors import NothingRewritten, VerificationError
from hexa_fx.graphs import BlockGraphs, Graphs
from hexa_fx.passes import BlockAnalysis, analyse
from hexa_fx.passes.partition import Strategy, apply_partition
from hexa_fx.passes.structure import StructureCache, moved_to
from hexa_fx.report import OptimizationReport, describe
from hexa_fx.runtime.cuda_warmup import Example, prebuild_blocks
from hexa_fx.runtime.install import install
from hexa_fx.runtime.preflight import check_model

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

log = logging.getLogger(__name__)
Model = TypeVar("Model", bound=nn.Module)
ExampleInputs = torch.Tensor | tuple[Any, ...] | list[Any] | Mapping[str, Any]


def optimize(model: Model, example_inputs: ExampleInputs, config: HexaConfig | None = None) -> Model:
    """A new model whose MoE blocks run on expert-specific operators; ``model`` keeps its code.

    The two share parameters and buffers. To partition the experts over devices, which cuts parameters, use `optimize_`. The
    result is of the same class, with the same state_dict and parameter names, and has ``.report`` (`OptimizationReport`) and
    ``.graphs`` (`hexa_fx.graphs.Graphs`).

    Args:
        model: any module with MoE blocks in it, on its device, in any floating point type.
        example_inputs: what to call it with once: a tensor, a tuple of positional arguments, or a mapping of keywords.
        config: see `HexaConfig`; by default from the environment.

    Raises:
        InputError: the model cannot be worked on as it is (meta device, wrapped, quantised, already optimized).
        NothingRewritten: under ``strict`` when no block was rewritten.
        Exception: the model's own, when it rejects the inputs.
    """
    check_model(model)
    return optimize_(_sharing_copy(model), example_inputs, config)


def optimize_(
    model: Model,
    example_inputs: ExampleInputs,
    config: HexaConfig | None = None,
    *,
    mesh: DeviceMesh | None = None,
    strategy: Strategy = "auto",
    capacities: Literal["measure"] | Sequence[float] | None = "measure",
) -> Model:
    """As `optimize`, in place: returns ``model`` itself.

    With a mesh every rank calls it with the same model, before optimizers, DDP or FSDP2 are built. The expert weights are cut into
    device-weighted shards, and the blocks exchange tokens or weights (docs/partition.md). The session with the plan is
    ``model.partition``.

    Args:
        mesh: one-dimensional device mesh over which MoE blocks are partitioned.
        strategy: ``data``, ``model``, ``auto``, or one of the first two by block path.
        capacities: relative speed of every device, ``"measure"`` to run the operator on each, or None for equal ones.

    Raises:
        PlanError: the blocks cannot be partitioned as asked.
    """
    check_model(model)
    config = config or HexaConfig.from_environment()
    analyses, report, examples = _analyse_model(model, example_inputs, config)
    rewritten = [analysis for analysis in analyses if analysis.rewritten]
    if mesh is not None and rewritten:
        by_mode = [analysis.rewritten for analysis in rewritten]
        model.__dict__["partition"] = apply_partition(model, by_mode, mesh, strategy, capacities)
    else:
        for analysis in rewritten:
            block = model.get_submodule(analysis.path)
            install(block, analysis.rewritten.get("train"), analysis.rewritten.get("eval"))
        prebuild_blocks(model, examples)
    _announce(report, config)
    model.__dict__["report"] = report
    model.__dict__["graphs"] = Graphs({a.path: BlockGraphs.of(a) for a in analyses if a.rewritten})
    return model


def explain(model: nn.Module, example_inputs: ExampleInputs, config: HexaConfig | None = None) -> OptimizationReport:
    """What `optimize` would do. The model is not changed."""
    check_model(model)
    return _analyse_model(model, example_inputs, config or HexaConfig.from_environment())[1]


def _sharing_copy(model: Model) -> Model:
    shared = [*model.parameters(), *model.buffers()]
    return copy.deepcopy(model, {id(tensor): tensor for tensor in shared})


def _analyse_model(
    model: nn.Module, example_inputs: ExampleInputs, config: HexaConfig
) -> tuple[list[BlockAnalysis], OptimizationReport, dict[str, Example]]:
    """Every block's analysis, the report, and an example call of every rewritten block that is unlike those before it."""
    started = time.perf_counter()
    args, kwargs = _call_arguments(example_inputs)
    cache = StructureCache()
    analyses, reports = [], []
    examples: dict[str, Example] = {}
    for candidate in observe(model, args, kwargs):
        analysis, same_as = _analyse_candidate(candidate, config, cache)
        analyses.append(analysis)
        reports.append(describe(analysis, same_as))
        if analysis.rewritten and same_as is None:
            examples |= {seen.path: (seen.args, seen.kwargs) for seen in candidate.levels if seen.path == analysis.path}
    return analyses, OptimizationReport(tuple(reports), time.perf_counter() - started), examples


def _analyse_candidate(
    candidate: Candidate, config: HexaConfig, cache: StructureCache
) -> tuple[BlockAnalysis, str | None]:
    """The innermost level that can be rewritten; if none can, the first refusal."""
    first: tuple[BlockAnalysis, str | None] | None = None
    for observation in candidate.levels:
        found = _analyse_level(observation, config, cache)
        if found[0].rewritten:
            return found
        first = first or found
    assert first is not None
    return first


def _analyse_level(
    observation: Observation, config: HexaConfig, cache: StructureCache
) -> tuple[BlockAnalysis, str | None]:
    known = cache.find(observation)
    if known is not None:
        return moved_to(known, observation.path), known.path
    analysis = analyse(observation, config)
    cache.add(observation, analysis)
    return analysis, None


def _call_arguments(example_inputs: ExampleInputs) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(example_inputs, Mapping):
        return (), dict(example_inputs)
    if isinstance(example_inputs, (tuple, list)):
        return tuple(example_inputs), {}
    return (example_inputs,), {}


def _announce(report: OptimizationReport, config: HexaConfig) -> None:
    for block in report.refused:
        if config.strict and "differs from the original" in block.reason:
            raise VerificationError(block.reason, path=block.path)
    if report.rewritten:
        log.info("%s", report.summary())
        return
    if config.strict:
        raise NothingRewritten(f"{report}")
    log.warning("hexa_fx rewrote nothing: %s", report)
