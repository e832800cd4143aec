"""Every refusal tells what helps, and none gets advice that is about something else."""

import ast
from pathlib import Path

import pytest

import hexa_fx
from hexa_fx.inspection.advice import DEFAULT, advice

DETECT = Path(__file__).parents[2] / "passes" / "detect"


def sentences() -> list[str]:
    """Every sentence with which detection refuses, with ``{}`` for what it fills in."""
    found = []
    for file in sorted(DETECT.glob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "Refuse" and node.args:
                found.append(_text(node.args[0]))
    return sorted({sentence for sentence in found if sentence})


def _text(node: ast.expr) -> str:
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(str(v.value) if isinstance(v, ast.Constant) else "{}" for v in node.values)
    return ""


def test_the_sentences_are_found():
    assert len(sentences()) > 40


def test_nearly_every_refusal_has_advice_of_its_own():
    general = [sentence for sentence in sentences() if advice(sentence) == DEFAULT]
    assert len(general) <= len(sentences()) // 10, general


@pytest.mark.parametrize(
    ("reason", "says"),
    [
        ("mean inside the experts does not keep their rows apart", "over the last dimension only"),
        ("the rewritten block differs from the original: on the way the block rounds to fewer bits", "torch.autocast"),
        ("dropout is active inside the experts, and its random numbers", "behind the weighted sum"),
        ("every token is given to every expert with a weight of its own: a dense (soft) mixture", "Only top-k"),
        (
            "no tensor holds the expert ids of every token; routing must be a fixed number of ids a token",
            "topk or argmax",
        ),
        (
            "the code keeps a result on the module (self.loss), which the rewritten block would not update",
            "Return the value",
        ),
        ("the code reads a tensor that is neither a parameter nor a buffer, and may have", "register_buffer"),
        ("the code changes self.losses in place, which the rewritten block would not; results", "Append to a list"),
        (
            "the code adds to LOSSES before gate uses it too, and the rewritten block would add to it last",
            "a list each",
        ),
        ("on the example every row that the experts are given is zero", "more varied example"),
        ("the code takes a host decision (if, while, assert, item()) on what the experts computed", "torch.where"),
        ("no known activation is what experts compute between their projections (cos)", "silu"),
        ("the expert outputs do not enter the result as a weighted sum for each token; they", "Experts that choose"),
        ("experts use their weights in different ways", "one class"),
        ("the code takes a decision that depends on the data and not on the routing", "torch.where"),
        ("hexa_fx itself failed here with KeyError: 1", "report"),
        ("the rewritten block differs from the original: the example: output", "report"),
        ("could not record 'x': RuntimeError", "outside hexa_fx first"),
        ("something entirely new", "docs/patterns.md"),
    ],
)
def test_advice(reason, says):
    assert says in advice(reason)


def test_a_sentence_that_says_it_itself_is_left_alone():
    assert (
        advice("... is not a parameter nor a buffer, and may have another value next time; register it as a buffer")
        == ""
    )


def test_it_is_part_of_every_form_of_the_report(models, tmp_path):
    report = hexa_fx.explain(*models.refused())
    assert "what helps: Normalise and reduce over the last dimension only" in str(report)
    assert "last dimension" in report.as_dict()["blocks"][0]["advice"]
    assert "what helps" in report.to_html(tmp_path / "report.html").read_text(encoding="utf-8")
