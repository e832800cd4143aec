"""The graphs behind an optimized model, one entry a rewritten block, for reading."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
import torch.fx
from torch import nn

from hexa_fx.ir import FfnSpec, RewrittenBlock
from hexa_fx.passes import BlockAnalysis
from hexa_fx.passes.lower import Lowered, lower


@dataclass(frozen=True)
class BlockGraphs:
    """A block's graphs after every stage.

    Args:
        captured: code of the recorded run (one routing, one size).
        rewritten: the block's new forward, with `hexa::moe_ffn` in it.
        lowered: that node as expert-specific operators, forward and backward. None for an unusual expert, which stands in
            ``rewritten`` in these operators already.
    """

    captured: str
    rewritten: torch.fx.GraphModule | str
    lowered: Lowered | tuple[str, str] | None

    @classmethod
    def of(cls, analysis: BlockAnalysis) -> BlockGraphs:
        mode = next(iter(analysis.rewritten))
        rewritten, captured = analysis.rewritten[mode], analysis.captured[mode]
        return cls(captured.graph_module.code, _readable(rewritten, captured.block), _lowered(rewritten))

    def __reduce__(self) -> tuple[object, ...]:
        """Pickled as text: graphs are for reading, and operators do not pickle."""
        return BlockGraphs, (self.captured, self._rewritten_code, self._lowered_code)

    def __str__(self) -> str:
        text = f"# rewritten\n{self._rewritten_code}"
        if self._lowered_code is not None:
            text += "\n# lowered forward\n{}\n# lowered backward\n{}".format(*self._lowered_code)
        return text

    @property
    def _rewritten_code(self) -> str:
        return self.rewritten if isinstance(self.rewritten, str) else self.rewritten.code

    @property
    def _lowered_code(self) -> tuple[str, str] | None:
        if isinstance(self.lowered, Lowered):
            return self.lowered.forward.code, self.lowered.backward.code
        return self.lowered


class Graphs(Mapping[str, BlockGraphs]):
    """`BlockGraphs` by the block's path."""

    def __init__(self, by_path: Mapping[str, BlockGraphs]) -> None:
        self._by_path = dict(by_path)

    def __getitem__(self, path: str) -> BlockGraphs:
        return self._by_path[path]

    def __iter__(self) -> Iterator[str]:
        return iter(self._by_path)

    def __len__(self) -> int:
        return len(self._by_path)

    def __repr__(self) -> str:
        return f"Graphs({', '.join(self._by_path)})"


class PackedWeight(nn.Module):
    """Stands in a readable graph for the per-expert parameters that lie side by side."""

    def __init__(self, experts: int, parts: int) -> None:
        super().__init__()
        self.experts, self.parts = experts, parts

    def extra_repr(self) -> str:
        return f"{self.experts} experts x {self.parts} parameters"


def _readable(rewritten: RewrittenBlock, block: nn.Module) -> torch.fx.GraphModule:
    packed = {weight.name: PackedWeight(len(weight.parts[0]), len(weight.parts)) for weight in rewritten.packed}
    root: dict[str, object] = dict(packed)
    for node in rewritten.graph.nodes:
        target = str(node.target)
        if node.op == "call_module" and target not in packed:
            root[target] = block.get_submodule(target)
        elif node.op == "get_attr":
            owner, _, leaf = target.rpartition(".")
            root[target] = getattr(block.get_submodule(owner), leaf)
    return torch.fx.GraphModule(root, rewritten.graph, class_name=f"Rewritten{type(block).__name__}")  # type: ignore[arg-type]


def _lowered(rewritten: RewrittenBlock) -> Lowered | None:
    node = next((n for n in rewritten.graph.nodes if isinstance(n.meta.get("hexa"), FfnSpec)), None)
    if node is None:
        return None
    _, _, weights, _, b1, _, b3, _, b2 = node.args[:9]
    given = [operand is not None for operand in (weights, b1, b3, b2)]
    return lower(node.meta["hexa"], top_k_weights=given[0], b1=given[1], b3=given[2], b2=given[3])
