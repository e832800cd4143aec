"""Einsums over three tensors become einsums over two, with the same value, and module calls still cover the same nodes."""

import pytest
import torch
from torch import nn

from hexa_fx.capture import capture, record_of
from hexa_fx.capture.records import memory_of, nodes_by_call
from hexa_fx.passes.canonicalize import canonicalize_block
from tests.capture.run import run

T, E, I, D = 5, 3, 4, 6  # noqa: E741


class Fused(nn.Module):
    def __init__(self, equation: str, as_list: bool = False) -> None:
        super().__init__()
        self.weight, self.equation, self.as_list = nn.Parameter(torch.randn(E, D, I)), equation, as_list

    def forward(self, hidden: torch.Tensor, combine: torch.Tensor) -> torch.Tensor:
        given = (hidden, self.weight, combine)
        return torch.einsum(self.equation, list(given)) if self.as_list else torch.einsum(self.equation, *given)


class Around(nn.Module):
    def __init__(self, fused: Fused) -> None:
        super().__init__()
        self.fused, self.first, self.last = fused, nn.Linear(I, I), nn.Linear(D, D)

    def forward(self, hidden: torch.Tensor, combine: torch.Tensor) -> torch.Tensor:
        return self.last(self.fused(self.first(hidden), combine))


def einsums(captured) -> list[str]:
    return [str(n.args[0]) for n in captured.graph.nodes if getattr(n.target, "__name__", "") == "einsum"]


@pytest.mark.parametrize("as_list", [False, True])
def test_weight_meets_its_operand_first(as_list):
    block = Around(Fused("tei, edi, te -> td", as_list))
    inputs = torch.randn(T, E, I), torch.rand(T, E)
    before = capture(block, inputs, {})
    inside = {call.path: _operations(before, call) for call in before.calls}
    after = canonicalize_block(before)
    assert einsums(after) == ["tei,edi->ted", "ted,te->td"]
    torch.testing.assert_close(run(after, *inputs), block(*inputs))
    for call in after.calls:
        expected = ["einsum", "einsum"] if call.path == "fused" else inside[call.path]
        assert _operations(after, call) == expected, call.path


def test_the_new_product_has_memory_of_its_own():
    """It may be computed where a recorded value lay, whose memory is free again: its address tells them not apart."""
    after = canonicalize_block(capture(Fused("tei,edi,te->td"), (torch.randn(T, E, I), torch.rand(T, E)), {}))
    places = {node: record_of(node) for node in after.graph.nodes if node.op.startswith("call")}
    assert len({record.storage for record in places.values()}) == len(places) == 2
    assert all(record.storage != memory_of(record.value) for record in places.values())


@pytest.mark.parametrize(
    ("equation", "why"),
    [
        ("tei,edi,te->tedi", "nothing is summed over"),
        ("...ei,edi,...e->...d", "dimensions that are not spelled out"),
    ],
)
def test_left_alone(equation, why):
    after = canonicalize_block(capture(Fused(equation), (torch.randn(T, E, I), torch.rand(T, E)), {}))
    assert einsums(after) == [equation], why


def _operations(captured, call) -> list[str]:
    nodes = nodes_by_call(captured.graph)[call.number]
    return [getattr(n.target, "__name__", n.target) for n in nodes if n.op not in ("get_attr", "placeholder")]
