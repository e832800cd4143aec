"""The graphs behind an optimized model, for people to read: every rewritten block after every pass, as text, picture or page."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from html import escape
from pathlib import Path
from typing import Any

import torch
import torch.fx
from torch import nn

from hexa_fx.errors import InputError
from hexa_fx.inspection.costs import Costs
from hexa_fx.inspection.facts import facts_of
from hexa_fx.inspection.inspector import Inspector
from hexa_fx.inspection.kernels import KernelUse, default_arch, kernels_of
from hexa_fx.inspection.stages import FfnCase, Snapshots, Stage
from hexa_fx.ir import Refusal, RewrittenBlock
from hexa_fx.isolation.lookup import at, step
from hexa_fx.isolation.module_tree import inside
from hexa_fx.passes.block_analysis import BlockAnalysis
from hexa_fx.passes.lowering.lower import Lowered
from hexa_fx.runtime.attribute_guards import called_in, is_within


@dataclass(frozen=True)
class BlockGraphs:
    """A block's graphs after every pass.

    Args:
        captured: code of the recorded run (one routing, one size).
        rewritten: the block's new forward, with `hexa::moe_ffn` in it.
        taken: the snapshots behind `stages`.
        path: the block's path in the model.
        facts: (name, value) pairs that describe the block.
        costs: what it costs before and after; None if that could not be determined.
    """

    captured: str
    rewritten: torch.fx.GraphModule | str
    taken: Snapshots = field(default_factory=Snapshots)
    path: str = ""
    facts: tuple[tuple[str, str], ...] = ()
    costs: Costs | None = None

    @classmethod
    def of(
        cls, analysis: BlockAnalysis, inspector: Inspector | None = None, alike: BlockGraphs | None = None
    ) -> BlockGraphs:
        """The graphs of an analysed block that was rewritten. ``alike``: those of the identical block whose analysis it shares."""
        rewritten, captured = analysis.rewritten, analysis.captured
        assert rewritten is not None
        assert captured is not None
        inspector = inspector or Inspector()
        taken = inspector.snapshots(analysis)
        facts = facts_of(analysis)
        return cls(
            alike.captured if alike else captured.code,
            alike.rewritten if alike else _readable(rewritten, captured.block),
            inspector.with_partition(analysis.path, taken),
            analysis.path,
            facts.pairs() if facts else (),
            inspector.costs(analysis),
        )

    @property
    def stages(self) -> tuple[Stage, ...]:
        """A snapshot after each pass, in order, as plain data."""
        return self.taken.stages

    @property
    def case(self) -> FfnCase | None:
        """The call of `hexa::moe_ffn` with the example's sizes."""
        return self.taken.case

    @property
    def lowered(self) -> Lowered | None:
        """That call as expert-specific operators, forward and backward.

        None for experts of an unusual form, which ``rewritten`` already holds as expert-specific operators.
        """
        return self.case.lowered if self.case is not None else None

    def stage(self, name: str) -> Stage:
        """The snapshot after a pass, such as ``capture``, ``rewrite``, ``lower`` or ``lower_backward``."""
        for stage in self.stages:
            if stage.name == name:
                return stage
        known = ", ".join(stage.name for stage in self.stages)
        raise InputError(f"{self.path or 'the block'} has no stage {name!r}; it has {known}")

    def print_readable(self, name: str | None = None) -> str:
        """Prints and returns the code of one stage, or of all, annotated with value types and the user's source lines."""
        text = "\n\n".join(str(stage) for stage in (self.stages if name is None else [self.stage(name)]))
        print(text)
        return text

    def kernels(self, arch: int | None = None) -> tuple[KernelUse, ...]:
        """The kernels that the block launches on compute capability ``arch`` (default: this machine's GPU, else 90)."""
        return kernels_of(self.case, arch) if self.case is not None else ()

    def to_dot(self, name: str = "rewrite") -> str:
        """One stage in graphviz's dot language."""
        from hexa_fx.inspection.svg import dot_of

        return dot_of(self.stage(name).graph, f"{self.path} {name}")

    def to_svg(self, name: str = "rewrite") -> str:
        """One stage as a self-contained SVG."""
        from hexa_fx.inspection.svg import svg_of

        return svg_of(self.stage(name).graph)

    def to_html(self, path: str | Path, arch: int | None = None) -> Path:
        """Writes an HTML page with all stages side by side; see `Graphs.to_html`."""
        return Graphs({self.path: self}).to_html(path, arch)

    def _repr_html_(self) -> str:
        return Graphs({self.path: self})._repr_html_()

    def __getstate__(self) -> dict[str, Any]:
        """Pickles graphs as text: they are only read, and operators do not pickle."""
        return {**self.__dict__, "rewritten": self._rewritten_code}

    def __deepcopy__(self, memo: dict[int, Any]) -> BlockGraphs:
        """As text too, so that a copied model does not keep the original's modules; what is only read is shared."""
        return BlockGraphs(**self.__getstate__())

    def __repr__(self) -> str:
        stages = ", ".join(stage.name for stage in self.stages)
        return f"<BlockGraphs {self.path or '(model)'}: {stages}>"

    def __str__(self) -> str:
        text = f"# rewritten\n{self._rewritten_code}"
        if self.lowered is not None:
            text += (
                f"\n# lowered forward\n{self.lowered.forward.code}\n# lowered backward\n{self.lowered.backward.code}"
            )
        return text

    @property
    def _rewritten_code(self) -> str:
        return self.rewritten if isinstance(self.rewritten, str) else self.rewritten.code


class Graphs(Mapping[str, BlockGraphs]):
    """`BlockGraphs` by the block's path. ``left``: blocks that were left as they are, each with its reason, for the page."""

    def __init__(self, by_path: Mapping[str, BlockGraphs], left: Sequence[Refusal] = ()) -> None:
        self._by_path, self.left = dict(by_path), tuple(left)

    @classmethod
    def of(
        cls,
        analyses: Iterable[BlockAnalysis],
        inspector: Inspector | None = None,
        first: dict[torch.fx.Graph, BlockGraphs] | None = None,
    ) -> Graphs:
        """The graphs of every rewritten block. Identical blocks share them: ``first``, by graph, are those of other calls."""
        inspector = inspector or Inspector()
        made: dict[str, BlockGraphs] = {}
        left: list[Refusal] = []
        first = {} if first is None else first
        for analysis in analyses:
            if analysis.rewritten is not None:
                graph = analysis.rewritten.graph
                if analysis.captured is None and graph in first:  # analysed in another call
                    made[analysis.path] = replace(first[graph], path=analysis.path)
                    continue
                made[analysis.path] = BlockGraphs.of(analysis, inspector, first.get(graph))
                first.setdefault(graph, made[analysis.path])
            elif analysis.refusal is not None:
                left.append(analysis.refusal)
        return cls(made, left)

    def add(self, others: Graphs, prefix: str) -> None:
        """Adds those of a part of the model, by the part's path."""
        named = {inside(prefix, path): graphs for path, graphs in others.items()}
        self._by_path |= {path: replace(graphs, path=path) for path, graphs in named.items()}
        self.left += tuple(replace(refusal, path=inside(prefix, refusal.path)) for refusal in others.left)

    def __getitem__(self, path: str) -> BlockGraphs:
        try:
            return self._by_path[path]
        except KeyError:
            known = ", ".join(map(repr, self._by_path)) or "none"
            raise KeyError(f"no rewritten block at {path!r}; rewritten blocks: {known}") from None

    def __iter__(self) -> Iterator[str]:
        return iter(self._by_path)

    def __len__(self) -> int:
        return len(self._by_path)

    def __repr__(self) -> str:
        return f"Graphs({', '.join(self._by_path)})"

    def kernels(self, arch: int | None = None) -> tuple[KernelUse, ...]:
        """The kernels of all blocks on compute capability ``arch`` (default: this machine's GPU, else 90), without repetition."""
        found: dict[str, KernelUse] = {}
        for graphs in self._by_path.values():
            for kernel in graphs.kernels(arch):
                found.setdefault(kernel.spec or kernel.name, kernel)
        return tuple(found.values())

    def to_html(self, path: str | Path, arch: int | None = None, title: str = "graphs") -> Path:
        """Writes a self-contained HTML page: every block's graphs side by side, linked to each other and to the CUDA text of
        their kernels. Identical blocks are shown once.

        Args:
            path: the file to write.
            arch: compute capability that kernels are shown for (default: this machine's GPU, else 90).
            title: heading of the page.

        Returns:
            ``path``.

        Raises:
            InputError: no block was rewritten, so there is nothing to show.
        """
        target = Path(path)
        target.write_text(self._page(title, arch), encoding="utf-8")
        return target

    def _repr_html_(self) -> str:
        """For notebooks: the page, in a frame that keeps its styles and keys to itself."""
        if not any(graphs.stages for graphs in self._by_path.values()):
            return "<p>no block was rewritten, so there are no graphs; the report says why</p>"
        text = escape(self._page("graphs", None))
        return (
            f'<iframe srcdoc="{text}" title="graphs" style="width:100%;height:720px;border:1px solid #8884"></iframe>'
        )

    def _page(self, title: str, arch: int | None) -> str:
        from hexa_fx.inspection.page import PageBlock, page  # jinja2, for those who write pages

        drawn = [graphs for graphs in self._by_path.values() if graphs.stages]
        if not drawn:
            raise InputError("there are no graphs to show, since no block was rewritten; the report says why")
        card = f"sm_{arch or default_arch()}"
        groups: dict[int, list[BlockGraphs]] = {}
        for graphs in drawn:
            groups.setdefault(id(graphs.stages[0]), []).append(graphs)
        blocks = [
            PageBlock(
                first.path, first.facts, first.stages, first.kernels(arch), card, [g.path for g in rest], first.costs
            )
            for first, *rest in groups.values()
        ]
        return page(blocks, title, self.left)


class PackedParameters(nn.Module):
    """Stands for per-expert parameters that lie side by side, in a graph that is only read."""

    def __init__(self, experts: int, parts: int) -> None:
        super().__init__()
        self.experts, self.parts = experts, parts

    def extra_repr(self) -> str:
        return f"{self.experts} experts x {self.parts} parameters"


def _readable(rewritten: RewrittenBlock, block: nn.Module) -> torch.fx.GraphModule:
    """The new forward for reading. Nothing is put into a module of the user's: where the graph reads what lies in one that it
    calls, a stand-in holds that.
    """
    packed = {weight.name: PackedParameters(len(weight.parts[0]), len(weight.parts)) for weight in rewritten.packed}
    root: dict[str, object] = dict(packed)
    read = {str(node.target) for node in rewritten.graph.find_nodes(op="get_attr")}
    for target in called_in(rewritten.graph, always=False) - packed.keys():
        around = any(is_within(name, {target}) for name in read)
        root[target] = nn.Identity() if around else block.get_submodule(target)
    for target in read:
        above, _, leaf = target.rpartition(".")
        root[target] = _shape_of(step(at(block, above) if above else block, leaf))
    made = torch.fx.GraphModule(root, rewritten.graph, class_name=f"Rewritten{type(block).__name__}")  # type: ignore[arg-type]
    made.graph.owning_module = None  # else the graph, a cycle, would keep the user's modules until garbage is collected
    return made


def _shape_of(value: Any) -> Any:
    """A tensor without data in a tensor's place: graphs outlive weights that are packed or replaced."""
    if not isinstance(value, torch.Tensor):
        return value
    empty = torch.empty(value.shape, dtype=value.dtype, device="meta")
    return nn.Parameter(empty, value.requires_grad) if isinstance(value, nn.Parameter) else empty
