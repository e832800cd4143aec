"""What a block costs as it was written and as it is rewritten: FLOPs, bytes moved, and memory kept for backward.

FLOPs and bytes are those of one forward of the mixture without the router, counted from the graphs: every operator reads its
operands and writes its results once, and views are free. Memory kept for backward is measured: both forms of the block run on the
recorded example, and every tensor that autograd keeps counts once, without parameters. Parameters are
trained or frozen in it as they are in the model.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx
from torch import nn

from hexa_fx.capture import CapturedBlock, record_of
from hexa_fx.cuda.modes import torch_operators
from hexa_fx.errors import kind_and_line
from hexa_fx.formats.quantized_weight import QuantizedWeight
from hexa_fx.inspection.stages import FfnCase, Snapshots
from hexa_fx.inspection.view import GraphView
from hexa_fx.ir import RewrittenBlock
from hexa_fx.isolation.module_state import ModuleState
from hexa_fx.isolation.torch_state import random_state_kept
from hexa_fx.isolation.written_tensors import tensors_restored
from hexa_fx.runtime.program import direct
from hexa_fx.sources import linear4bit
from hexa_fx.torch_private import without_autocast

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Cost:
    """Costs of one forward: FLOPs of matrix products, bytes read and written, bytes kept for backward (None if not measured)."""

    flops: int
    moved: int
    saved: int | None


@dataclass(frozen=True)
class Costs:
    """Before and after the rewrite, for ``tokens`` tokens of the example.

    ``device`` is where memory was measured: small layers on a CPU trade memory for time, which they do not on a GPU. ``not_saved``
    says why what is kept for backward is not known.
    """

    tokens: int
    before: Cost
    after: Cost
    device: str = "cpu"
    not_saved: str = ""


def costs_of(captured: CapturedBlock, rewritten: RewrittenBlock, snapshots: Snapshots) -> Costs:
    """Costs of a block. ``snapshots`` are its stages."""
    stages = {stage.name: stage.graph for stage in snapshots.of_block}
    before = stages["canonicalize"] if "canonicalize" in stages else stages["capture"]
    flops, moved = of_mixture(before)
    new = _Rewritten(captured, rewritten)
    after_flops, after_moved = of_mixture(stages["rewrite"])
    saved: int | None
    after_saved: int | None
    try:
        # of code that is left as it is in the mode that the model is in
        with tensors_restored(captured.block), _state_restored(captured.block):
            saved = _measured(captured, captured.block.forward)  # and sets up what a first call does
            after_saved, why = _measured(captured, new, new.weights), ""
    except Exception as error:  # the block's own: it cannot run with gradients, say
        log.debug("memory of %s was not measured", captured.path, exc_info=error)
        saved = after_saved = None
        why = f"could not be measured ({kind_and_line(error)})"
    return Costs(
        tokens_of(captured, snapshots.case),
        Cost(flops, moved, saved),
        Cost(after_flops, after_moved, after_saved),
        next((p.device.type for p in captured.block.parameters()), "cpu"),
        why,
    )


def of_mixture(graph: GraphView) -> tuple[int, int]:
    """FLOPs and bytes moved of everything in a graph but the router, of which some graphs hold a call and no operators."""
    nodes = [node for node in graph.nodes if node.role != "router"]
    return sum(node.flops for node in nodes), sum(node.moved for node in nodes)


def tokens_of(captured: CapturedBlock, case: FfnCase | None) -> int:
    """Tokens of the recorded run; 0 where no tensor looks like them."""
    if case is not None:
        return int(case.operands["x"].shape[0])
    floats = [record_of(v).value for _, v in captured.arguments if isinstance(v, torch.fx.Node)]
    first = next((t for t in floats if t.is_floating_point()), None)
    return 0 if first is None else first.numel() // max(1, first.shape[-1])


# -- memory kept for backward ------------------------------------------------------------------------------------------


@contextmanager
def _state_restored(block: nn.Module) -> Iterator[None]:
    state = ModuleState(block)
    try:
        yield
    finally:
        state.restore()


def _measured(captured: CapturedBlock, forward: Callable[..., Any], weights: Sequence[torch.Tensor] = ()) -> int:
    """Bytes that autograd keeps besides parameters and ``weights``. Raises whatever the block raises."""
    with random_state_kept(), torch.enable_grad():
        return _kept(captured, forward, weights)


def _stored(parameter: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return (parameter.packed, *parameter.scales) if isinstance(parameter, QuantizedWeight) else (parameter,)


def _kept(captured: CapturedBlock, forward: Callable[..., Any], weights: Sequence[torch.Tensor]) -> int:
    parameters = {t.untyped_storage().data_ptr() for p in (*captured.block.parameters(), *weights) for t in _stored(p)}
    found: dict[int, int] = {}
    alive: list[torch.Tensor] = []  # keeps addresses unique

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            found[storage.data_ptr()] = storage.nbytes()
            alive.append(tensor.detach())
        return tensor.detach()  # the tensor itself would keep alive the graph that holds it

    # by position where possible: a decorated forward may know its arguments by other names
    given = inspect.signature(forward).bind(**{name: _argument(value) for name, value in captured.arguments})
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = forward(*given.args, **given.kwargs)
        del result
    return sum(found.values())


def _argument(value: Any) -> Any:
    if not isinstance(value, torch.fx.Node):
        return value
    tensor = record_of(value).value.clone()
    return tensor.requires_grad_() if tensor.is_floating_point() else tensor


class _Rewritten:
    """The rewritten graph as a function of the block's arguments; packed weights by tensors of their sizes."""

    def __init__(self, captured: CapturedBlock, rewritten: RewrittenBlock) -> None:
        self._captured, self._rewritten = captured, rewritten
        self._packed = {weight.name: _OneExpertStack(captured, weight.parts) for weight in rewritten.packed}
        self.weights = [stand_in.weight for stand_in in self._packed.values()]

    def __call__(self, **arguments: Any) -> Any:
        root: dict[str, Any] = dict(self._packed)
        for node in self._rewritten.graph.nodes:
            target = str(node.target)
            if node.op == "call_module" and target not in self._packed:
                root[target] = self._captured.block.get_submodule(target)
            elif node.op == "get_attr":
                root[target] = self._captured.value_of(target)
        inputs = [arguments[name] for name, _ in self._captured.arguments]
        # kernels read codes that lie contiguously; those of the stand-ins share the memory of one expert
        with torch_operators() if any(isinstance(w, QuantizedWeight) for w in self.weights) else nullcontext():
            return _Run(root, direct(self._rewritten.graph)).run(*inputs, enable_io_processing=False)


class _Run(torch.fx.Interpreter):
    """Runs a graph on what ``root`` has by target. A GraphModule would put tensors into modules of the user's that it calls."""

    def __init__(self, root: dict[str, Any], graph: torch.fx.Graph) -> None:
        super().__init__(nn.Module(), graph=graph)
        self._root = root

    def fetch_attr(self, target: str) -> Any:
        return self._root[target]


class _OneExpertStack(nn.Module):
    """A tensor of a weight's shape in which all experts share the first one's memory."""

    def __init__(self, captured: CapturedBlock, parts: tuple[tuple[str, ...], ...]) -> None:
        super().__init__()
        count, firsts = len(parts[0]), [captured.tensor_of(part[0]) for part in parts]
        if linear4bit.is_four_bit(firsts[0]):
            self.weight: torch.Tensor = linear4bit.repeated(firsts, count)
            return
        with without_autocast():  # to bf16 it refuses to join tensors in float16
            whole = torch.cat([first.detach() for first in firsts])
        self.weight = nn.Parameter(whole.unsqueeze(0).expand(count, *whole.shape))

    def forward(self, top_k_index: torch.Tensor | None = None) -> torch.Tensor:
        return self.weight
