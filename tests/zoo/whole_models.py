"""Whole transformers models as one graph: with their blocks rewritten, and as they are.

`python -m tests.zoo.whole_models` prints the table, `--write docs/whole_models.md` puts it there.
"""

import argparse
import logging
import pathlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

import hexa_fx
from tests.zoo import families
from tests.zoo.families import FAMILIES

FORWARD_ONLY = {
    "qwen3_next": "torch compiles the backward of its linear attention to views that fail, whatever the experts are"
}
"""Families whose compiled backward fails outside the blocks, in the original under ``batched_mm`` too."""

PREAMBLE = """# Whole models as one graph

Once the blocks are rewritten, nothing in the model depends on the routing's values any more, and the whole model can be captured:
by `torch.export` (one `torch.fx` graph, `hexa::moe_ffn` a node in it) and by `torch.compile(fullgraph=True)`. Loops over experts,
the code of most families under `experts_implementation="eager"`, allow neither.

Made by `python -m tests.zoo.whole_models --write docs/whole_models.md`: tiny models of the real classes, blocks optimized, then
captured with `use_cache=False` and called again. *export*: nodes in the exported graph and how many of them are `hexa` operators;
its logits equal the original's. *compiled step*: forward and backward under `fullgraph=True, backend="aot_eager"` in train mode;
its loss and gradients equal the original's. The last columns are the unmodified model.

"""


@dataclass(frozen=True)
class Verdict:
    """Whether it worked, and how or why not."""

    ok: bool
    text: str


@dataclass(frozen=True)
class Row:
    """One family. The original's verdicts are of the model as its authors wrote it."""

    family: str
    blocks: int
    export: Verdict
    compiled: Verdict
    original_export: Verdict
    original_compiled: Verdict


def batch_of(family: str) -> dict[str, Any]:
    """Inputs of a call. Encoder-decoder models make no masks of their own while they are compiled."""
    batch: dict[str, Any] = {**families.inputs(3, 5), "use_cache": False}
    if FAMILIES[family].kind == "seq2seq":
        ones = torch.ones(3, 5, dtype=torch.int64)
        return {**batch, "attention_mask": ones, "decoder_attention_mask": ones}
    return batch


def judge(family: str) -> Row:
    """Captures the optimized model and the original in both ways."""
    torch._dynamo.reset()
    model = families.make(family)
    optimized = hexa_fx.optimize(model, families.inputs(2, 7))
    batch = batch_of(family)
    return Row(
        family,
        len(optimized.report.rewritten),
        _attempt(lambda: exported(optimized, model, batch)),
        _attempt(lambda: (compiled_forward if family in FORWARD_ONLY else compiled_step)(optimized, model, batch)),
        _attempt(lambda: exported(model, model, batch)),
        _attempt(lambda: compiled_step(model, model, batch)),
    )


def exported(model: nn.Module, original: nn.Module, batch: dict[str, Any]) -> str:
    """Exports the model in eval mode, and compares what the graph gives. Returns its size in words."""
    model.eval(), original.eval()
    with torch.no_grad():
        expected = original(**batch).logits
        model(**batch)  # transformers sets itself up in a first call
        try:
            program = torch.export.export(model, (), batch, strict=False)
        except RuntimeError as error:
            if "swap" not in str(error):
                raise
            return f"{_traced(model, expected, batch)}, by make_fx (torch.export: {_reason(error)})"
        _same(program.module()(**batch).logits, expected)
    return _size(program.graph)


def _traced(model: nn.Module, expected: torch.Tensor, batch: dict[str, Any]) -> str:
    """By make_fx on fake tensors, which takes a module that casts its own parameters in forward. Tried on other tokens too."""
    tensors = {name: value for name, value in batch.items() if isinstance(value, torch.Tensor)}
    rest = {name: value for name, value in batch.items() if name not in tensors}

    def call(*values: torch.Tensor) -> torch.Tensor:
        return model(**dict(zip(tensors, values)), **rest).logits

    traced = make_fx(call, tracing_mode="fake", _allow_non_fake_inputs=True)(*tensors.values())
    _same(traced(*tensors.values()), expected)
    others = [value.flip(0) for value in tensors.values()]
    _same(traced(*others), call(*others))
    return _size(traced.graph)


def _size(graph: torch.fx.Graph) -> str:
    return f"{len(graph.nodes)} nodes, {sum('hexa' in str(node.target) for node in graph.nodes)} hexa"


def compiled_step(model: nn.Module, original: nn.Module, batch: dict[str, Any]) -> str:
    """One training step of the compiled model, as one graph, against the original's. Random numbers of routers are drawn alike."""
    outcomes = []
    for called in (original, model):
        called.train()
        families.logits_and_gradients(called, families.inputs(2, 7), train=True)  # transformers sets itself up
        run: Callable[..., Any] = called
        if called is model:
            run = torch.compile(called, backend="aot_eager", fullgraph=True)
        torch.manual_seed(0)
        output = run(**batch)
        parameters = [p for p in called.parameters() if p.requires_grad]
        outcomes.append((output.loss.detach(), torch.autograd.grad(output.loss, parameters, allow_unused=True)))
    called.eval()
    _same(outcomes[1][0], outcomes[0][0])
    scale = max(float(g.abs().max()) for g in outcomes[0][1] if g is not None)
    for a, b in zip(*(gradients for _, gradients in outcomes)):
        if a is not None or b is not None:
            a, b = torch.zeros_like(b) if a is None else a, torch.zeros_like(a) if b is None else b
            _same(b, a, scale)
    return "equal"


def compiled_forward(model: nn.Module, original: nn.Module, batch: dict[str, Any]) -> str:
    """Logits of the compiled model, as one graph, against the original's."""
    with torch.no_grad():
        expected = original.eval()(**batch).logits
        model.eval()(**batch)
        _same(torch.compile(model, backend="aot_eager", fullgraph=True)(**batch).logits, expected)
    return "forward equal, no backward"


def _same(value: torch.Tensor, expected: torch.Tensor, scale: float | None = None) -> None:
    scale = scale or float(expected.abs().max())
    worst = float((value - expected).abs().max()) / max(scale, 1e-12) if value.numel() else 0.0
    assert worst <= 2e-3, f"off by {worst:.1e} of its scale"


def _attempt(act: Callable[[], str]) -> Verdict:
    try:
        return Verdict(True, act())
    except Exception as error:
        return Verdict(False, _reason(error))


def _reason(error: Exception) -> str:
    """One line, without addresses and symbols."""
    text = str(error)
    if "data-dependent" in text:
        return "depends on data"
    return f"{type(error).__name__}: {text.strip().splitlines()[0][:90]}" if text.strip() else type(error).__name__


def render(rows: list[Row]) -> str:
    """The table in Markdown."""
    lines = [
        "| family | blocks | export | compiled step | original's export | original's compiled step |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        verdicts = (row.export, row.compiled, row.original_export, row.original_compiled)
        cells = [("yes: " if v.ok else "no: ") + v.text.replace("|", "\\|") for v in verdicts]
        lines.append(f"| {row.family} | {row.blocks} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("families", nargs="*", default=list(FAMILIES))
    parser.add_argument("--write", type=pathlib.Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    logging.disable(logging.CRITICAL)
    rows = []
    for family in options.families:
        rows.append(judge(family))
        print(render(rows[-1:]).splitlines()[-1], flush=True)
    if options.write:
        write(rows, options.write)


def write(rows: list[Row], page: pathlib.Path) -> None:
    """The page with these rows, and the rows that it has of other families."""
    known = page.read_text().splitlines() if page.exists() else []
    lines = {line.split(" | ")[0].removeprefix("| "): line for line in known if line.startswith("| ")}
    header, *new = render(rows).splitlines()
    lines.update({row.family: line for row, line in zip(rows, new[1:])})
    table = [header, new[0], *(lines[family] for family in FAMILIES if family in lines)]
    notes = [f"* {family}: {why}." for family, why in FORWARD_ONLY.items()]
    page.write_text(PREAMBLE + "\n".join([*table, "", *notes]) + "\n")


if __name__ == "__main__":
    main()
