"""Judges `hexa_fx.optimize` on every family of `tests.zoo.families`, one row a family and experts implementation.

`python -m tests.zoo.family_table` prints the table, `--write docs/families.md` puts it there.
"""

import argparse
import functools
import os
import pathlib
from dataclasses import dataclass

import torch
from torch import nn

import hexa_fx
from tests.zoo import families
from tests.zoo.agree import own_code_runs
from tests.zoo.compare import relative_error
from tests.zoo.families import FAMILIES, Outcome

TRACED, SIZES = (2, 7), ((2, 7), (3, 5))


@dataclass(frozen=True)
class Errors:
    """Largest relative errors over sizes and modes, and the tensors they belong to."""

    forward: float = 0.0
    gradient: float = 0.0
    forward_of: str = ""
    gradient_of: str = ""
    none_gradients: int = 0


@dataclass(frozen=True)
class Row:
    """One line of the table. `errors` is by dtype, without those that the original cannot run in.

    `own_code` are the blocks, and modes, that run their own code at another size than the traced one: the original was compared
    with itself.
    """

    family: str
    implementation: str
    found: int
    rewritten: int
    refused: int
    errors: dict[torch.dtype, Errors]
    reasons: tuple[str, ...]
    own_code: tuple[str, ...]


@functools.cache
def judge(family: str, implementation: str) -> Row:
    """Optimize the tiny model in float32 and float64 and compare it with its original."""
    errors: dict[torch.dtype, Errors] = {}
    blocks: tuple = ()
    own_code: list[str] = []
    for dtype in (torch.float32, torch.float64):
        if families.runs(family, implementation, dtype):
            continue
        model = families.make(family, implementation, dtype)
        optimized = hexa_fx.optimize(model, families.inputs(*TRACED))
        blocks = blocks or optimized.report.blocks
        errors[dtype] = measure(model, optimized)
        own_code += own_code_runs(optimized, **families.inputs(*SIZES[1]))
    rewritten = sum(b.status == "rewritten" for b in blocks)
    reasons = [b.reason for b in blocks if b.status == "refused"]
    return Row(
        family,
        implementation,
        len(blocks),
        rewritten,
        len(blocks) - rewritten,
        errors,
        tuple(dict.fromkeys(reasons)),
        tuple(own_code),
    )


def measure(model: nn.Module, optimized: nn.Module) -> Errors:
    """Compare in eval and train mode over `SIZES`."""
    worst = Errors()
    for size in SIZES:
        for train in (False, True):
            batch = families.inputs(*size, seed=1)
            reference = families.logits_and_gradients(model, batch, train)
            value = families.logits_and_gradients(optimized, batch, train)
            worst = _larger(worst, errors_of(reference, value))
    model.eval()
    return worst


def errors_of(reference: Outcome, value: Outcome) -> Errors:
    """Largest relative errors of one call."""
    forward = {"logits": relative_error(reference.logits, value.logits)}
    forward["loss"] = relative_error(reference.loss, value.loss)
    if len(reference.router_logits) != len(value.router_logits):
        forward["router logits"] = float("inf")
    for a, b in zip(reference.router_logits, value.router_logits):
        forward["router logits"] = max(forward.get("router logits", 0.0), relative_error(a, b))
    gradient, nones = {"": 0.0}, 0
    for name, a in reference.gradients.items():
        b = value.gradients[name]
        nones += (a is None) != (b is None)
        if a is not None or b is not None:
            a, b = torch.zeros_like(b) if a is None else a, torch.zeros_like(a) if b is None else b
            gradient[name] = _gradient_error(a, b, reference)
    worst_forward, worst_gradient = max(forward, key=forward.__getitem__), max(gradient, key=gradient.__getitem__)
    return Errors(forward[worst_forward], gradient[worst_gradient], worst_forward, worst_gradient, nones)


def _gradient_error(a: torch.Tensor, b: torch.Tensor, reference: Outcome) -> float:
    """Relative to the tensor's own size, or to a thousandth of the largest gradient where that is more.

    A gradient that is zero but for rounding has no relative error of its own.
    """
    largest = max(g.abs().max().item() for g in reference.gradients.values() if g is not None)
    if not (torch.isfinite(a).all() and torch.isfinite(b).all()):
        return relative_error(a, b)
    return (a - b).abs().max().item() / max(a.abs().max().item(), 1e-3 * largest)


def _larger(a: Errors, b: Errors) -> Errors:
    forward, gradient = (a if a.forward >= b.forward else b), (a if a.gradient >= b.gradient else b)
    nones = max(a.none_gradients, b.none_gradients)
    return Errors(forward.forward, gradient.gradient, forward.forward_of, gradient.gradient_of, nones)


HEADER = (
    "| family | experts | found | rewritten | refused | float32 forward | float32 gradient | float64 forward "
    "| float64 gradient | remark |\n|---|---|---|---|---|---|---|---|---|---|"
)


def render(rows: list[Row]) -> str:
    """The table in Markdown."""
    return "\n".join([HEADER, *map(_line, rows)])


def _line(row: Row) -> str:
    cells = [row.family, row.implementation, str(row.found), str(row.rewritten), str(row.refused)]
    for dtype in (torch.float32, torch.float64):
        found = row.errors.get(dtype)
        cells += [f"{found.forward:.0e}", f"{found.gradient:.0e}"] if found else ["-", "-"]
    remarks = list(row.reasons)
    nones = max((e.none_gradients for e in row.errors.values()), default=0)
    if nones:
        remarks.append(f"{nones} gradients are zero where the original's are None")
    return f"| {' | '.join(cells)} | {'; '.join(remarks)} |"


def cases() -> list[tuple[str, str]]:
    """Every family with every experts implementation it has."""
    return [(name, implementation) for name, family in FAMILIES.items() for implementation in family.implementations]


PREAMBLE = """# Model families

Tiny models of the real transformers classes, made by `python -m tests.zoo.family_table --write docs/families.md`. Whole
models: logits, loss, router logits and every parameter's gradient against the original's, in eval and train mode, over two
batch sizes of which one was not traced. An error is relative to the largest value of the tensor; the largest is shown.
`experts` is transformers' `experts_implementation`, of which `grouped_mm` takes no float64.

"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", type=pathlib.Path)
    options = parser.parse_args()
    os.environ["HEXA_FX_OWN_CODE_WHEN_SMALL"] = "0"
    rows = [judge(*case) for case in cases()]
    own = [row.family for row in rows if row.own_code]
    assert not own, f"compared with themselves: {own}"
    table = render(rows)
    print(table)
    if options.write:
        options.write.write_text(PREAMBLE + table + "\n")


if __name__ == "__main__":
    main()
