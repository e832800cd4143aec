"""Takes a snapshot of a block after each pass, from the recorded run to what a device runs."""

from __future__ import annotations

import linecache
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

import torch
import torch.fx

from hexa_fx.capture import CapturedBlock, NodeRecord, record_of
from hexa_fx.inspection.operators import op_count_difference
from hexa_fx.inspection.roles import mark_captured, mark_operators, mark_rewritten
from hexa_fx.inspection.view import GraphView, NodeView, Role, view_of
from hexa_fx.ir import FfnSpec, RewrittenBlock, SourceLocation
from hexa_fx.observers import heard, muted
from hexa_fx.ops.program import FfnRequest
from hexa_fx.ops.table_layers import OPERANDS
from hexa_fx.passes.detect import MoEMatch
from hexa_fx.passes.example_values import moe_ffn_calls, rewritten_values, values_on_meta
from hexa_fx.passes.lowering.lower import Lowered, lower_backward, lower_forward
from hexa_fx.passes.lowering.pipelines import CPU, CUDA

Direction = Literal["block", "forward", "backward"]
_FUSED = "fuse_activation"


@dataclass(frozen=True)
class Stage:
    """A block's graph after one pass.

    Args:
        name: the pass, e.g. ``rewrite``; with ``_backward`` for the backward graph.
        title: what it shows, in words.
        graph: the graph as plain data.
        difference: operators removed and added since the previous stage, e.g. ``hexa.esmm -1, hexa.esmm_act +1``.
        nodes_before: number of operator nodes of the previous stage; None for the first one.
        direction: whether it is of the block, or of the forward or backward of its operators.
    """

    name: str
    title: str
    graph: GraphView
    difference: str = ""
    nodes_before: int | None = None
    direction: Direction = "block"

    def __str__(self) -> str:
        head = f"# {self.name}: {self.title}; {self.graph.size}"
        if self.nodes_before is not None:
            head += f", before {self.nodes_before}" + (f" ({self.difference})" if self.difference else " (no change)")
        return f"{head}\n{self.graph.readable()}"


@dataclass(frozen=True)
class FfnCase:
    """A call of `hexa::moe_ffn` as the example makes it.

    Args:
        spec: the expert.
        operands: tensors without data, by operand name; absent ones are left out.
    """

    spec: FfnSpec
    operands: Mapping[str, torch.Tensor]

    @property
    def request(self) -> FfnRequest:
        """The request for training with a gradient of every operand."""
        given = frozenset(name for name in OPERANDS if name in self.operands)
        return FfnRequest(self.spec, given, given, True)

    @cached_property
    def stages(self) -> tuple[Stage, ...]:
        """The operators' graphs: lowered, fused as CUDA runs them, and tiled as a CPU does; forward, then backward.

        They follow from the call alone, and are made when first looked at: that takes as long as other parts of the analysis.
        """
        return _lowered_stages(self)

    @cached_property
    def lowered(self) -> Lowered:
        """The operators' graphs, forward and backward, before any pass; made when first asked for, too."""
        with muted():
            return Lowered(lower_forward(self.request), lower_backward(self.request))

    @cached_property
    def work(self) -> tuple[int, int]:
        """FLOPs of the forward, and the bytes that its operators move as CUDA runs them."""
        drawn = next((stage.graph for stage in vars(self).get("stages", ()) if stage.name == _FUSED), None)
        if drawn is None:
            with muted():
                drawn = _operators(_fused(lower_forward(self.request)), dict(self.operands))
        return drawn.flops, drawn.moved

    def resized(self, tokens: int | None = None, dtype: torch.dtype | None = None) -> FfnCase:
        """The same call with another number of tokens, or in another floating dtype."""
        return replace(self, operands={n: _resized(n, t, tokens, dtype) for n, t in self.operands.items()})

    def __getstate__(self) -> dict[str, Any]:
        """Tensors without data do not pickle under every torch."""
        facts = {n: (tuple(t.shape), t.stride(), t.dtype) for n, t in self.operands.items()}
        return {"spec": self.spec, "facts": facts}

    def __setstate__(self, state: dict[str, Any]) -> None:
        operands = {
            name: torch.empty_strided(shape, stride, dtype=dtype, device="meta")
            for name, (shape, stride, dtype) in state["facts"].items()
        }
        self.__dict__.update(spec=state["spec"], operands=operands)


def _resized(name: str, value: torch.Tensor, tokens: int | None, dtype: torch.dtype | None) -> torch.Tensor:
    kind = dtype if dtype is not None and value.is_floating_point() else value.dtype
    if tokens is not None and name in ("x", "top_k_index", "top_k_weights"):
        return torch.empty((tokens, *value.shape[1:]), dtype=kind, device="meta")
    return torch.empty_strided(value.shape, value.stride(), dtype=kind, device="meta")


@dataclass(frozen=True)
class Snapshots:
    """All stages of a block, and the call of `hexa::moe_ffn` in it if there is one.

    Args:
        of_block: the stages of the block's own graph. Those of its operators follow.
        case: the call.
    """

    of_block: tuple[Stage, ...] = ()
    case: FfnCase | None = None

    @cached_property
    def stages(self) -> tuple[Stage, ...]:
        """All of them, in order."""
        with muted():
            return (*self.of_block, *(self.case.stages if self.case is not None else ()))


def snapshots(match: MoEMatch, rewritten: RewrittenBlock) -> Snapshots:
    """The stages of a rewritten block."""
    captured = match.captured
    marks = mark_captured(match, rewritten)
    recorded = _captured_view(captured, captured.graph)
    stages = []
    if captured.as_recorded is not None:
        stages.append(
            Stage("capture", "your code, as it ran on the example", _captured_view(captured, captured.as_recorded))
        )
        stages.append(_next("canonicalize", "fused ways of writing, taken apart", recorded, stages[-1]))
    else:
        stages.append(Stage("capture", "your code, as it ran on the example", recorded))
    stages[-1] = replace(stages[-1], graph=recorded.marked(lambda n: marks.get(n.name, ("other", ()))))
    values = rewritten_values(captured, rewritten)
    new = mark_rewritten(match, rewritten, marks)
    graph = view_of(
        rewritten.graph, values, _code(rewritten.graph), lambda n: _with_code(n.meta.get("location")), _is_view
    )
    graph = graph.marked(lambda n: new.get(n.name, ("other", ())))
    stages.append(_next("rewrite", "the block's new forward", graph, stages[-1]))
    case = next((FfnCase(call.spec, call.operands) for call in moe_ffn_calls(rewritten.graph, values)), None)
    if case is not None:
        if heard():
            _ = case.stages  # listeners see these passes, too
        stages[-1] = replace(stages[-1], graph=_with_costs(stages[-1].graph, case))
    return Snapshots(tuple(stages), case)


def _with_costs(graph: GraphView, case: FfnCase) -> GraphView:
    """The rewritten graph, with the costs of the operators that `hexa::moe_ffn` stands for."""
    flops, moved = case.work
    nodes = (replace(node, flops=flops, moved=moved) if node.op == "hexa.moe_ffn" else node for node in graph.nodes)
    return replace(graph, nodes=tuple(nodes))


def _fused(gm: torch.fx.GraphModule) -> torch.fx.GraphModule:
    return CUDA.until(_FUSED)(gm)


def _lowered_stages(case: FfnCase) -> tuple[Stage, ...]:
    known: dict[str, Any] = dict(case.operands)
    found: list[Stage] = []
    for suffix, lower in (("", lower_forward), ("_backward", lower_backward)):
        direction: Direction = "backward" if suffix else "forward"
        gm = lower(case.request)
        lowered = _operators(gm, known)
        stages = [Stage(f"lower{suffix}", f"{direction} in the expert-specific operators", lowered)]
        fused = _operators(_fused(gm), known, lowered)
        stages.append(_next(f"{_FUSED}{suffix}", f"{direction} as CUDA runs it", fused, stages[0]))
        tiled = _tile(CPU.until("tile_rows")(lower(case.request)))
        stages.append(_next(f"tile_rows{suffix}", f"{direction} as a CPU runs it, for one tile", tiled, stages[0]))
        found += [replace(stage, direction=direction) for stage in stages]
    return tuple(found)


def partition_stage(graph: torch.fx.Graph, before: Stage) -> Stage:
    """A block's graph with this rank's collectives."""
    known = {node.name: node for node in before.graph.nodes}
    exchanges = {node.name for node in graph.nodes if is_exchange(node)}

    def mark(node: NodeView) -> tuple[Role, tuple[str, ...]]:
        if node.name in exchanges:
            return "collective", ()
        old = known.get(node.name)
        return (old.role, old.keys) if old is not None else ("other", ())

    view = view_of(graph, {}, _code(graph), lambda n: _with_code(n.meta.get("location"))).marked(mark)
    return _next("partition", "this rank's part, with its collectives", view, before)


def is_exchange(node: torch.fx.Node) -> bool:
    """Whether a node of a partitioned graph communicates with other ranks or waits for them."""
    home = getattr(node.target, "__module__", "") or ""
    return home.startswith("hexa_fx.distributed") or "c10d" in str(node.target)


def _next(name: str, title: str, graph: GraphView, before: Stage) -> Stage:
    counts = before.graph.counts
    return Stage(name, title, graph, op_count_difference(counts, graph.counts), sum(counts.values()))


def _captured_view(captured: CapturedBlock, graph: torch.fx.Graph) -> GraphView:
    values = {node: record_of(node).value for node in graph.nodes if node.op != "output"}
    code = captured.code if graph is captured.graph else _code(graph)
    return view_of(graph, values, code, lambda n: _with_code(record_of(n).location), _is_view)


def _code(graph: torch.fx.Graph) -> str:
    return graph.python_code("self").src


def _with_code(location: SourceLocation | None) -> SourceLocation | None:
    if location is None or location.code:
        return location
    return replace(location, code=linecache.getline(location.file, location.line).strip())


def _is_view(node: torch.fx.Node) -> bool:
    record = _record(node)
    if record is None or record.writes or not isinstance(record.value, torch.Tensor):
        return False
    return any(found is not None and found.storage == record.storage for found in map(_record, node.all_input_nodes))


def _record(node: torch.fx.Node) -> NodeRecord | None:
    found = node.meta.get("hexa")
    return found if isinstance(found, NodeRecord) else None


# -- the operators' graphs ---------------------------------------------------------------------------------------------


def _operators(gm: torch.fx.GraphModule, known: dict[str, Any], before: GraphView | None = None) -> GraphView:
    """A graph of operators with types. Values of the forward graph are known to the backward graph by name."""
    values = operator_values(gm, known)
    view = view_of(gm.graph, values, _code(gm.graph))
    joined = _replaced(before, view) if before is not None else {}
    return view.marked(lambda node: mark_operators(node, joined))


def operator_values(gm: torch.fx.GraphModule, known: dict[str, Any]) -> dict[torch.fx.Node, Any]:
    """Values of a graph of operators, given those in ``known`` by name, to which the graph's own are added."""
    import hexa_fx.ops  # noqa: F401  (defines torch.ops.hexa)

    inputs = {n: known[str(n.target)] for n in gm.graph.find_nodes(op="placeholder") if str(n.target) in known}
    values = values_on_meta(gm.graph, inputs)
    for node, value in values.items():
        known.setdefault(node.name, value)
    if "y" in known:
        known.setdefault("dy", known["y"])
    return values


def _replaced(before: GraphView, after: GraphView) -> dict[str, tuple[str, ...]]:
    """For nodes made by a fusion: the nodes that they replace, as far as names tell."""
    old, new = {n.name for n in before.nodes}, {n.name for n in after.nodes}
    gone = tuple(n.name for n in before.nodes if n.name not in new)
    found: dict[str, tuple[str, ...]] = {}
    for node in after.nodes:
        if node.op == "hexa.esmm_act":
            found[node.name] = tuple(n for n in ("gate", "up", "h", "a") if n in old)
        elif node.op == "hexa.esmm_act_backward":
            found[node.name] = tuple(n for n in ("da", "activate_backward") if n in gone or n == node.name)
    return found


def _tile(gm: torch.fx.GraphModule) -> GraphView:
    """What runs for every tile on a CPU."""
    body = getattr(gm, "body", gm)
    return view_of(body.graph, {}, _code(body.graph)).marked(lambda node: mark_operators(node, {}))
