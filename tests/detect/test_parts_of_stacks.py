"""Parts of stacked weights are of the experts that lie there; what one product adds up, or lies beside experts' outputs."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hexa_fx
from hexa_fx.capture import capture
from hexa_fx.passes.canonicalize import canonicalize_block
from hexa_fx.passes.detect.tags import expert_groups, tag
from tests.zoo.common import MLP, Mixture, SwiGLU, TopKGate
from tests.zoo.compare import compare, operators_run
from tests.zoo.dense import ChunksOfExperts
from tests.zoo.variant import D, E, I, K, weight

CUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "of_a_slice": lambda stack: stack[1:4][2],
    "last": lambda stack: stack[-2],
    "slice_of_one": lambda stack: stack[3:4],
    "of_a_piece": lambda stack: stack.split([3, 2])[1][0],
    "piece_of_one": lambda stack: stack.split([3, 1, 1])[1],
    "of_a_chunk": lambda stack: stack.chunk(3)[-2][1],
    "of_a_part": lambda stack: stack.narrow(0, 2, 3)[1],
    "unbound": lambda stack: stack[1:].unbind()[2],
    "several": lambda stack: stack[1:4],
    "half_of_each": lambda stack: stack[:, : I // 2],
    "position": lambda stack: stack[:1, :2].expand(E, -1, -1),
}


class Read(nn.Module):
    def __init__(self, cut: Callable[[torch.Tensor], torch.Tensor], experts: int = E) -> None:
        super().__init__()
        self.cut, self.w = cut, weight(experts, I, D)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.cut(self.w).sum() + x


def _experts(block: nn.Module) -> frozenset[int]:
    captured = canonicalize_block(capture(block, (torch.randn(4, D),), {}, ""))
    tags = tag(captured, expert_groups(captured.named_tensors()))
    (total,) = (node for node in captured.graph.nodes if node.target == "sum")
    return tags[total].experts


@pytest.mark.parametrize("name", CUTS)
def test_expert_of_a_part(name: str) -> None:
    expected = {"several": frozenset(), "half_of_each": frozenset(), "position": frozenset({0})}
    assert _experts(Read(CUTS[name])) == expected.get(name, frozenset({3}))


def test_all_of_one_is_no_part() -> None:
    """As of positions (1, length, D), of which as many are taken as there are tokens."""
    assert not _experts(Read(CUTS["position"], experts=1))


class LocalExperts(nn.Module):
    """Each half of the experts by its own numbers, in products with a batch of one; the second half perhaps by others."""

    def __init__(self, off: int = 0) -> None:
        super().__init__()
        self.gate, self.off = TopKGate(), off
        self.w1, self.w2, self.b2 = weight(E, D, I), weight(E, I, D), weight(E, D)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, indices = self.gate(x)
        out = torch.zeros_like(x)
        for start, end in ((0, 3), (3, E)):
            w1, w2, b2 = self.w1[start:end], self.w2[start:end], self.b2[start:end]
            for local in range(end - start):
                token, slot = torch.where(indices == start + local)
                down = (local + self.off) % (end - start)
                h = F.gelu(torch.bmm(x[token][None], w1[local : local + 1]))
                y = torch.bmm(h, w2[down : down + 1])[0] + b2[local]
                out.index_add_(0, token, y * weights[token, slot, None])
        return out


class Halves(nn.Module):
    """Gate and up of an expert lie in one parameter, which the code cuts before it multiplies."""

    def __init__(self, cut: Callable[[torch.Tensor], tuple[torch.Tensor, ...]]) -> None:
        super().__init__()
        self.gate, self.cut, self.gate_up, self.down = TopKGate(), cut, weight(E, 2 * I, D), weight(E, D, I)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, index = self.gate(x)
        out = torch.zeros_like(x)
        for number in range(E):
            token, slot = torch.where(index == number)
            gate, up = self.cut(self.gate_up[number])
            hidden = F.silu(x[token] @ gate.t()) * (x[token] @ up.t())
            out.index_add_(0, token, hidden @ self.down[number].t() * weights[token, slot, None])
        return out


BLOCKS: dict[str, Callable[[], nn.Module]] = {
    "local": LocalExperts,
    "slice": lambda: ChunksOfExperts("slice"),
    "split": lambda: ChunksOfExperts("split"),
    "chunk": lambda: ChunksOfExperts("chunk"),
    "halves": lambda: Halves(lambda both: both.chunk(2)),
    "halves_by_slices": lambda: Halves(lambda both: (both[:I], both[I:])),
    "halves_in_turns": lambda: Halves(lambda both: (both[::2], both[1::2])),
}


@pytest.mark.parametrize("name", BLOCKS)
def test_difficult_cases(name: str) -> None:
    """No tokens, one, all to the same experts, NaN, a tensor that is not contiguous: outputs and all gradients."""
    block = BLOCKS[name]().double().eval()
    x = torch.randn(14, D, dtype=torch.float64)
    optimized = hexa_fx.optimize(block, x)
    assert [found.status for found in optimized.report.blocks] == ["rewritten"]
    nan = x.clone()
    nan[3, 2] = float("nan")
    for given in (x, x[:1], x[:0], x[:1].repeat(14, 1), torch.randn(D, 9, dtype=torch.float64).t()):
        assert compare(block, optimized, (given,), {}).within(1e-10)
        assert operators_run(optimized, (given,), {}) or not len(given)
    with torch.no_grad():
        assert not (optimized(nan).isnan() & ~block(nan).isnan()).any()
        assert optimized(nan)[3].isnan().all()


def test_other_experts_second_matrix() -> None:
    """The parts look alike, but an expert's matrices are those of two."""
    (found,) = hexa_fx.optimize(LocalExperts(off=1), torch.randn(14, D)).report.blocks
    assert found.status == "refused"
    assert found.reason == "an expert's second projection does not read its first"


class GateOfATask(nn.Module):
    """Stacked experts, and a list of gates of which the task's is picked."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.w1, self.w2, self.task = weight(E, D, I), weight(E, I, D), 1
        wide = [nn.Linear(D, D), nn.GELU()] * (layers - 1)
        self.gates = nn.ModuleList(nn.Sequential(*copy.deepcopy(wide), nn.Linear(D, E)) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, ids = self.gates[self.task](x).softmax(-1).topk(2)
        out = torch.zeros_like(x)
        for e in range(E):
            token, slot = torch.where(ids == e)
            out.index_add_(0, token, F.gelu(x[token] @ self.w1[e]) @ self.w2[e] * weights[token, slot, None])
        return out


@pytest.mark.parametrize("layers", [2, 1])
def test_gates_of_tasks_are_no_experts(layers: int) -> None:
    torch.manual_seed(0)
    block, x = GateOfATask(layers).double(), torch.randn(24, D, dtype=torch.float64)
    opt = hexa_fx.optimize(copy.deepcopy(block), x)
    assert opt.report.rewritten, opt.report
    for task in (1, 2):
        block.task = opt.task = task
        assert compare(block, opt, (x,)).within(1e-10)
        assert operators_run(opt, (x,))


class Combined(nn.Module):
    def __init__(self, combine: Callable[[Any, torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.router, self.combine = nn.Linear(D, E), combine
        self.gate, self.up, self.down = (nn.Parameter(torch.randn(E, *size) / 3) for size in ((D, I), (D, I), (I, D)))
        self.bias = nn.Parameter(torch.randn(E, I))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, ids = self.router(x).softmax(-1).topk(K)
        gates = torch.zeros(*x.shape[:-1], E, dtype=x.dtype).scatter(-1, ids, weights)
        hidden = F.silu(torch.einsum("...d,edi->...ei", x, self.gate) + self.bias) * torch.einsum(
            "...d,edi->...ei", x, self.up
        )
        return self.combine(self, hidden * gates[..., None], x)


COMBINES: dict[str, Callable[[Any, torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "einsum": lambda m, h, x: torch.einsum("tei,eid->td", h, m.down),
    "weight first": lambda m, h, x: torch.einsum("eid,tei->td", m.down, h),
    "turned": lambda m, h, x: torch.einsum("tei,edi->td", h, m.down.transpose(1, 2)),
    "sequences": lambda m, h, x: torch.einsum("bsei,eid->bsd", h, m.down),
}


@pytest.mark.parametrize("combine", COMBINES)
def test_outputs_are_told_apart(combine: str) -> None:
    shape = (2, 7, D) if combine == "sequences" else (13, D)
    x = torch.randn(shape, dtype=torch.float64)
    block = Combined(COMBINES[combine]).double()
    opt = hexa_fx.optimize(copy.deepcopy(block), (x,), hexa_fx.HexaConfig(own_code_when_small=False))
    for given in (x, x[..., :5, :], torch.randn(3, *shape[1:], dtype=torch.float64)):
        assert compare(block, opt, (given,)).within(1e-12)
        assert operators_run(opt, (given,))


class Heads(nn.Module):
    """An attention whose heads are in the first dimension of its weights, beside experts in a block."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Parameter(torch.randn(E, D, 3 * I) / 3), nn.Parameter(torch.randn(E, I, D) / 3)
        self.experts = Combined(COMBINES["sequences"])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = torch.einsum("bsd,hdi->bhsi", x, self.qkv).chunk(3, -1)
        x = x + torch.einsum("bhsi,hid->bsd", F.scaled_dot_product_attention(q, k, v), self.out)
        return x + Combined.forward(self.experts, x)


def test_a_product_that_adds_up_over_flattened_experts_is_refused() -> None:
    block = Combined(lambda m, h, x: h.flatten(-2) @ m.down.flatten(0, 1)).double()
    (report,) = hexa_fx.explain(block, torch.randn(2, 7, D, dtype=torch.float64)).blocks
    assert "each expert has a single matrix product, or several side by side" in report.reason


def test_heads_of_an_attention_stay_one_product() -> None:
    from hexa_fx.capture import capture
    from hexa_fx.passes.canonicalize import canonicalize_block

    captured = capture(Heads().double(), (torch.randn(2, 7, D, dtype=torch.float64),), {}, "block")
    before = len(captured.graph.find_nodes(op="call_method", target="sum"))
    assert len(canonicalize_block(captured).graph.find_nodes(op="call_method", target="sum")) == before


class OntoShared(Mixture):
    """Experts' outputs are added onto that of a shared expert."""

    def __init__(self, kind: type[nn.Module], std: float | None) -> None:
        super().__init__(kind)
        self.shared = SwiGLU()
        for parameter in self.parameters() if std else ():
            nn.init.normal_(parameter, std=std)

    def start(self, flat: torch.Tensor) -> torch.Tensor:
        return self.shared(flat)


@pytest.mark.parametrize("kind", [SwiGLU, MLP])
@pytest.mark.parametrize(("std", "size"), [(1e-4, 1e-3), (1e-4, 1.0), (None, 1e4)])
def test_a_shared_expert_of_any_scale(std: float | None, size: float, kind: type[nn.Module]) -> None:
    """Small weights of small tokens give less than any fixed number, and rounding of large ones is more."""
    torch.manual_seed(0)
    block = OntoShared(kind, std).eval()
    optimized = hexa_fx.optimize(block, (size * torch.randn(2, 7, D),))
    assert optimized.report.rewritten, optimized.report
    assert compare(block, optimized, (size * torch.randn(3, 5, D),), {}, train=True, seed=1).within(2e-5)
