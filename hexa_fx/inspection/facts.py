"""Describes what detection found in a block, in the user's terms."""

from __future__ import annotations

from dataclasses import dataclass

from hexa_fx.passes.block_analysis import BlockAnalysis
from hexa_fx.passes.detect.body import ExpertBody
from hexa_fx.passes.detect.steps import FreeBody


@dataclass(frozen=True)
class Facts:
    """A block's mixture: how its experts are run, sizes E, k, D, I, the expert's formula and activation, and its weights."""

    idiom: str
    num_experts: int
    top_k: int
    hidden_size: int
    intermediate_size: int
    expert: str
    activation: str
    weights: str
    layout: str

    def pairs(self) -> tuple[tuple[str, str], ...]:
        """(name, value) pairs for a heading, of what is known."""
        named = (
            ("written as", self.idiom),
            ("E", self.num_experts),
            ("k", self.top_k),
            ("D", self.hidden_size),
            ("I", self.intermediate_size),
            ("expert", self.expert),
            ("weights", f"{self.weights} {self.layout}".strip()),
        )
        return tuple((name, str(value)) for name, value in named if value)


def facts_of(analysis: BlockAnalysis) -> Facts | None:
    """The facts of an analysis; None if no mixture was found."""
    match = analysis.match
    if match is None:
        return None
    body = match.body
    return Facts(
        idiom=match.idiom,
        num_experts=match.num_experts,
        top_k=match.routing.top_k,
        hidden_size=body.hidden_size,
        intermediate_size=body.intermediate_size,
        expert=", ".join(body.operations) if isinstance(body, FreeBody) else formula(body),
        activation="" if isinstance(body, FreeBody) else body.activation,
        weights=body.form,
        layout="" if isinstance(body, FreeBody) else _layout(body),
    )


def formula(body: ExpertBody) -> str:
    """The expert function in one line."""
    gated = body.up is not None
    first = "x Wg" + (" + bg" if body.gate_bias else "") if gated else "x W1" + (" + b1" if body.gate_bias else "")
    inner = f"{body.activation}({first})" if body.activation != "none" else f"({first})"
    if gated:
        inner += " * (x Wu" + (" + bu)" if body.up_bias else ")")
    return f"{inner} " + ("Wd" if gated else "W2") + (" + bias" if body.down_bias else "")


_WORDS = {"nk": "(E, out, in)", "kn": "(E, in, out)"}


def _layout(body: ExpertBody) -> str:
    """``(E, out, in), gate and up concat``; of the second projection too where it differs."""
    layouts = [_WORDS[body.gate.layout]]
    if body.down.layout != body.gate.layout:
        layouts.append(f"and {_WORDS[body.down.layout]}")
    if body.up is None:
        return " ".join(layouts)
    one = body.up.base == body.gate.base
    pairing = _PAIRED.get((body.gate.part, body.up.part), "") if one else "separate"
    return f"{' '.join(layouts)}, gate and up {pairing}"


_PAIRED: dict[tuple[str, str], str] = {
    ("first", "second"): "concat",
    ("even", "odd"): "interleaved",
    ("second", "first"): "concat up first",
    ("odd", "even"): "interleaved up first",
}
