"""The table of supported patterns, made from what `hexa_fx.optimize` does with every block of the zoo.

`python -m tests.zoo.pattern_table` prints it, `--write docs/patterns.md` puts it there.
"""

import argparse
import inspect
import logging
import pathlib
from dataclasses import dataclass

import torch
from torch import nn

import hexa_fx
from tests.zoo.registry import VARIANTS
from tests.zoo.variant import Variant

PREAMBLE = """# Supported patterns

What `hexa_fx.optimize` does with every block of the test zoo (`tests/zoo`), made by
`python -m tests.zoo.pattern_table --write docs/patterns.md`. A rewritten block equals its original in float64 to 1e-10 in the
outputs and in the gradients of all inputs and parameters, at other sizes than the traced one, in train and in eval mode
(`tests/test_zoo.py`). A refused one runs the original code. Real libraries are in [libraries.md](libraries.md), transformers
families in [families.md](families.md).

"""

MUTANTS = {
    "changed": pathlib.Path(__file__).with_name("mutants.txt"),
    "dormant": pathlib.Path(__file__).with_name("dormant.txt"),
}
"""The last tallies of `tests.zoo.judge`, which writes them with --record."""

SECTIONS = (
    ("loop_", "Loops over experts"),
    ("sorted_", "Sorted tokens, grouped and gathered products"),
    ("dense_", "Every expert on every token"),
    ("capacity_", "Capacity, dropping, expert choice"),
    ("truncated_", "Capacity, by cutting lists of tokens"),
    ("one_token_", "One token at a time"),
    ("router_", "Routers and other outputs"),
    ("shape_", "Sizes"),
    ("body_", "Expert networks"),
    ("around_", "Around the experts"),
    ("weight_", "Where the routing weight goes"),
    ("tied_", "Shared weights"),
    ("library_", "In the style of libraries"),
    ("refuse_", "Looks like a mixture, but is not one that can be rewritten"),
)


@dataclass(frozen=True)
class Line:
    """One block: what it is, what became of it, and the expert function or the reason."""

    variant: Variant
    outcome: str
    detail: str


def judge(v: Variant) -> Line:
    """Optimize the block on its traced size."""
    dtype = torch.float64 if torch.float64 in v.dtypes else torch.float32
    model = v.make(0).to(dtype).eval()
    opt = optimized(model, *v.inputs(2, 7, dtype, 0))
    blocks = opt.report.blocks
    rewritten = [b for b in blocks if b.status == "rewritten"]
    if not rewritten:
        return Line(
            v, "refused", "; ".join(dict.fromkeys(b.reason for b in blocks)) or "holds nothing that looks like experts"
        )
    details = [f"{b.idiom}, `{b.expert}`" if b.expert else b.idiom for b in rewritten]
    return Line(v, "rewritten", "; ".join(dict.fromkeys(details)))


def optimized(model: nn.Module, args: tuple, kwargs: dict, config: hexa_fx.HexaConfig | None = None) -> nn.Module:
    """`hexa_fx.optimize` on a call with positional and keyword arguments."""
    if not kwargs:
        return hexa_fx.optimize(model, args, config)
    names = list(inspect.signature(model.forward).parameters)
    return hexa_fx.optimize(model, {**dict(zip(names, args)), **kwargs}, config)


def render(lines: list[Line]) -> str:
    """Sections of Markdown tables."""
    done = sum(line.outcome == "rewritten" for line in lines)
    parts = [f"{done} of {len(lines)} blocks are rewritten, {len(lines) - done} refused."]
    if MUTANTS["changed"].exists():
        parts.append(
            "Blocks with one random change each, such as another operator, a wrong index, a dropped statement or one expert with "
            "another activation (`tests/zoo/mutate.py`, judged by `python -m tests.zoo.judge`): "
            + MUTANTS["changed"].read_text().strip()
            + "."
        )
    if MUTANTS["dormant"].exists():
        parts.append(
            "Blocks with a feature that does nothing on the example, such as a clamp in range, a scale of 1, a mask of ones, an "
            "attribute that is None or a branch on a size (`tests/zoo/dormant.py`), judged with the feature awake: "
            + MUTANTS["dormant"].read_text().strip()
            + "."
        )
    for prefix, title in SECTIONS:
        inside = [line for line in lines if line.variant.name.startswith(prefix)]
        parts.append(f"## {title}\n\n| block | what is special | outcome | as |\n|---|---|---|---|")
        parts[-1] += "".join(f"\n{_row(line)}" for line in inside)
    return "\n\n".join(parts)


def _row(line: Line) -> str:
    note = f" (a gap: {line.variant.gap})" if line.variant.gap and line.outcome == "refused" else ""
    detail = line.detail.replace(f"{pathlib.Path(__file__).parents[2]}/", "")
    cells = (line.variant.name, line.variant.why, line.outcome, detail + note)
    return "| " + " | ".join(cell.replace("|", "\\|").replace("](", "]\\(") for cell in cells) + " |"


def summary(page: str) -> str:
    """The page of all blocks in short, one line a section, for docs/supported.md."""
    lines = ["| idiom | blocks | rewritten | for example |", "|---|---|---|---|"]
    for part in page.split("\n## ")[1:]:
        title, *rest = part.splitlines()
        rows = [line.split(" | ") for line in rest if line.startswith("| ") and not line.startswith("| block ")]
        done = sum(row[2] == "rewritten" for row in rows)
        shown = "refused" if 2 * done < len(rows) else "rewritten"
        examples = list(dict.fromkeys(row[1] for row in rows if row[2] == shown))[:3]
        lines.append(f"| {title} | {len(rows)} | {done} | {'; '.join(examples)} |")
    return "\n".join(lines)


def put_in_overview(table: str, overview: pathlib.Path) -> None:
    """Between the page's markers, so that the two pages cannot differ."""
    start, end = "<!-- patterns -->\n", "<!-- /patterns -->"
    before, rest = overview.read_text().split(start)
    overview.write_text(before + start + table + "\n" + end + rest.split(end)[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", type=pathlib.Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    logging.getLogger("hexa_fx").setLevel(logging.ERROR)
    text = render([judge(v) for v in VARIANTS])
    print(text)
    if options.write:
        options.write.write_text(PREAMBLE + text + "\n")
        put_in_overview(summary(text), pathlib.Path("docs/supported.md"))


if __name__ == "__main__":
    main()
