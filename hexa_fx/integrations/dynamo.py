"""``torch.compile(model, backend="hexa")``: MoE blocks rewritten in the graphs that Dynamo captures, the rest to another backend.

Dynamo breaks the graph at code whose control flow depends on data, as most loops over experts do, so that no backend gets to
see the experts. `hexa_fx.optimize` reads such code and has to be called before ``torch.compile``; this backend says so once.
Blocks that Dynamo does capture (batched and grouped products, one-hot einsums, sorted slices without host reads, every expert
on every token) are analysed, verified and rewritten here as `hexa_fx.optimize` would.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.fx
from torch import nn

from hexa_fx.capture.observe import Observation
from hexa_fx.config import HexaConfig
from hexa_fx.describe import describe
from hexa_fx.errors import InputError, NothingRewritten
from hexa_fx.integrations import regions
from hexa_fx.integrations.regions import Region, UnknownSize
from hexa_fx.ir import Refusal, RewrittenBlock
from hexa_fx.isolation.torch_state import random_state_kept
from hexa_fx.passes import analyse
from hexa_fx.passes.block_analysis import BlockAnalysis, moved_to, refused
from hexa_fx.report import OFF, OptimizationReport
from hexa_fx.runtime.guards import require, require_finite
from hexa_fx.torch_private import FakeTensor, lookup_backend

log = logging.getLogger(__name__)
_OWN = {"rest", "rest_options", "on_report"}
_said: set[str] = set()


@dataclasses.dataclass(frozen=True)
class BackendOptions:
    """``options`` of ``torch.compile(model, backend="hexa", options={...})``.

    Args:
        config: fields of `HexaConfig` by their names, all but ``compute``. With ``strict`` a block that is found and cannot be
            rewritten raises.
        rest: the backend that compiles the rewritten graph: ``inductor``, ``aot_eager``, ``eager`` or any other registered one.
        rest_options: its own options.
        on_report: called with an `OptimizationReport` for every graph in which something looked like MoE.
    """

    config: HexaConfig
    rest: str = "inductor"
    rest_options: Mapping[str, Any] | None = None
    on_report: Callable[[OptimizationReport], None] | None = None

    @classmethod
    def of(cls, options: Mapping[str, Any] | None) -> BackendOptions:
        """Raises InputError for an unknown option, and for compute, which is one of `hexa_fx.optimize` only."""
        given = dict(options or {})
        known = {field.name for field in dataclasses.fields(HexaConfig)}
        unknown = sorted(given.keys() - known - _OWN)
        if unknown:
            raise InputError(
                f"unknown options {unknown} of torch.compile(backend='hexa'); expected some of {sorted(known | _OWN)}"
            )
        own = {name: given.pop(name) for name in _OWN & given.keys()}
        config = HexaConfig.from_environment(**given)
        if config.compute != "native":
            raise InputError(
                f"torch.compile(backend='hexa') has no compute={config.compute!r}; use hexa_fx.optimize, then torch.compile"
            )
        return cls(config, **own)


def hexa(
    gm: torch.fx.GraphModule, example_inputs: Sequence[Any], options: Mapping[str, Any] | None = None, **rest: Any
) -> Callable[..., Any]:
    """The backend, which Dynamo calls with every graph that it captures. See `BackendOptions`.

    Raises:
        InputError: an option is unknown.
        NothingRewritten: with ``strict``, a block that looks like MoE was refused.
    """
    chosen = BackendOptions.of(options)
    report = _rewrite_or_leave(gm, example_inputs, chosen.config)
    if chosen.on_report is not None and report.blocks:
        chosen.on_report(report)
    if chosen.config.strict and report.refused:
        raise NothingRewritten(f"{report}")
    following = lookup_backend(chosen.rest)
    if chosen.rest_options is not None:
        rest["options"] = dict(chosen.rest_options)
    compiled: Callable[..., Any] = following(gm, list(example_inputs), **rest)
    return compiled


def _rewrite_or_leave(
    gm: torch.fx.GraphModule, example_inputs: Sequence[Any], config: HexaConfig
) -> OptimizationReport:
    """Rewrites the graph, or leaves it as Dynamo made it: a failure of ours must not keep the user from compiling."""
    if config.off:
        return OptimizationReport((), unseen=OFF)
    backup = _copy(gm.graph)
    try:
        return rewrite_graph(gm, example_inputs, config)
    except Exception:
        log.exception("hexa_fx failed on a graph of %d nodes and leaves it; please report this", len(backup.nodes))
        gm.graph = backup
        return OptimizationReport(())


def _copy(graph: torch.fx.Graph) -> torch.fx.Graph:
    """A copy of the graph with the attributes that Dynamo keeps on nodes."""
    copied = torch.fx.Graph()
    new: dict[torch.fx.Node, torch.fx.Node] = {}
    copied.output(copied.graph_copy(graph, val_map=new))
    copied.set_codegen(graph._codegen)
    for node, twin in new.items():
        if hasattr(node, "_dynamo_source"):
            twin._dynamo_source = node._dynamo_source  # type: ignore[attr-defined]
    return copied


def rewrite_graph(gm: torch.fx.GraphModule, example_inputs: Sequence[Any], config: HexaConfig) -> OptimizationReport:
    """Rewrites the MoE blocks of a graph that Dynamo captured, in place.

    Args:
        gm: parameters are placeholders; nodes carry ``nn_module_stack`` and ``example_value``.
        example_inputs: what the graph is about to be called with, in placeholder order. It is run once on copies.
    """
    started = time.perf_counter()
    names = regions.parameter_names(gm.graph, example_inputs)
    places = regions.candidates(gm.graph, names)
    _say_if_broken(gm, places)
    if not places or any(isinstance(value, FakeTensor) for value in example_inputs):
        return OptimizationReport((), time.perf_counter() - started)
    wanted = {node for levels in places for region in levels for node in (*region.inputs, *region.outputs)}
    values = _run(gm, example_inputs, wanted)
    known: dict[Any, BlockAnalysis] = {}
    reports = []
    for levels in places:
        again = [regions.cut(gm.graph, region.path, names) for region in levels]
        analysis, same_as = _rewrite_first(gm, [region for region in again if region], values, config, known)
        reports.append(describe(analysis, same_as))
    gm.graph.lint()
    gm.recompile()
    report = OptimizationReport(tuple(reports), time.perf_counter() - started)
    log.info("%s", report)
    return report


def _rewrite_first(
    gm: torch.fx.GraphModule,
    levels: Sequence[Region],
    values: dict[torch.fx.Node, Any],
    config: HexaConfig,
    known: dict[Any, BlockAnalysis],
) -> tuple[BlockAnalysis, str | None]:
    """Puts the innermost level that can be rewritten back into the graph. If none can, returns the first refusal."""
    first: tuple[BlockAnalysis, str | None] | None = None
    for region in levels:
        analysis, same_as = _analyse(region, values, config, known)
        rewritten = _usable(analysis)
        if rewritten is not None and analysis.captured is not None:
            replaced = regions.put_back(gm, region, rewritten, analysis.captured.constants)
            values.update({new: values[old] for old, new in replaced.items()})
            return analysis, same_as
        first = first or (analysis, same_as)
    assert first is not None
    return first


def _usable(analysis: BlockAnalysis) -> RewrittenBlock | None:
    """The rewritten block, if it can do without falling back to the original, which a graph does not have."""
    block = analysis.rewritten
    if block is None:
        return None
    guarded = any(node.target in (require, require_finite) for node in block.graph.nodes)
    return None if guarded or block.stored else block


def _analyse(
    region: Region, values: Mapping[torch.fx.Node, Any], config: HexaConfig, known: dict[Any, BlockAnalysis]
) -> tuple[BlockAnalysis, str | None]:
    try:
        module = regions.as_module(region, values)
    except UnknownSize as error:
        return refused(Refusal(region.path, str(error))), None
    args = tuple(values[node] for node in region.inputs if isinstance(values[node], torch.Tensor))
    key = (
        module.code,
        tuple((n, p.shape, p.dtype) for n, p in module.named_parameters()),
        tuple(a.shape for a in args),
    )
    if key in known:
        return moved_to(known[key], region.path), known[key].path
    if regions.has_fixed_rows(region):  # it cannot be tried on fewer rows
        rows = max(arg.numel() for arg in args) if args else 0
        config = dataclasses.replace(config, probe_tokens=max(config.probe_tokens, rows))
    known[key] = _without_places(analyse(Observation(region.path, module, args, {}), config))
    return known[key], None


def _without_places(analysis: BlockAnalysis) -> BlockAnalysis:
    """Drops the source line of a refusal, since it refers to the graph's generated code."""
    refusal = analysis.refusal and dataclasses.replace(analysis.refusal, location=None)
    return dataclasses.replace(analysis, refusal=refusal)


class _Noting(torch.fx.Interpreter):
    """Runs a graph and keeps the values of some nodes."""

    def __init__(self, gm: torch.fx.GraphModule, wanted: set[torch.fx.Node]) -> None:
        super().__init__(gm)
        self.wanted = wanted
        self.noted: dict[torch.fx.Node, Any] = {}

    def run_node(self, n: torch.fx.Node) -> Any:
        value = super().run_node(n)
        if n in self.wanted or n.op == "placeholder":
            self.noted[n] = value.clone() if _is_plain(value) else value
        return value


def _is_plain(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and not isinstance(value, nn.Parameter)


def _run(
    gm: torch.fx.GraphModule, example_inputs: Sequence[Any], wanted: set[torch.fx.Node]
) -> dict[torch.fx.Node, Any]:
    """Values of parameters and of ``wanted`` nodes. Buffers and other inputs are copied first, so nothing is changed."""
    runner = _Noting(gm, wanted)
    copies = [value.detach().clone() if _is_plain(value) else _concrete(value) for value in example_inputs]
    enabled = torch.is_grad_enabled()
    try:
        with random_state_kept(), torch.no_grad():
            runner.run(*copies)
    finally:
        torch.set_grad_enabled(enabled)  # the graph may hold set_grad_enabled calls of its own
    return runner.noted


def _concrete(value: Any) -> Any:
    """The example's size behind a symbolic one. ``int()`` would bind the graph to it."""
    return value.node.hint if isinstance(value, torch.SymInt) else value


def _say_if_broken(gm: torch.fx.GraphModule, places: Sequence[Any]) -> None:
    """Logs that a graph selects by index but holds no experts, so that it is most likely the first half of a broken block."""
    if places:
        return
    for node in gm.graph.nodes:
        name = getattr(node.target, "__name__", node.target)
        if name in ("topk", "one_hot") and "moe" not in _said:
            _said.add("moe")
            log.warning(
                "torch.compile(backend='hexa'): %s selects by %s, but the graph holds no experts; Dynamo broke it before them. "
                "Call hexa_fx.optimize(model, inputs) first and compile its result: it reads loops that depend on data.",
                regions.module_of(node) or "the model",
                name,
            )
