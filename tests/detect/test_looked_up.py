"""Experts that are rows of tables, as PEER's: what the refusal says helps has to be so."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import hexa_fx

torch.set_num_threads(1)

D, KEYS, HEADS, K, WIDTH = 6, 3, 2, 2, 4
E = KEYS * KEYS


class ProductKeys(nn.Module):
    """Chooses by pairs of keys, of which each head has its own."""

    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Linear(D, 2 * HEADS * 5, bias=False)
        self.keys = nn.Parameter(torch.randn(HEADS, KEYS, 2, 5))

    def route(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        query = self.query(x).unflatten(-1, (2, HEADS, 5))
        scores, ids = torch.einsum("bnphd,hkpd->pbnhk", query, self.keys).topk(K, -1)
        return self.pairs(scores, ids)

    def pairs(self, scores: torch.Tensor, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        best, place = (scores[0][..., :, None] + scores[1][..., None, :]).flatten(-2).topk(K, -1)
        return best.softmax(-1), (ids[0][..., :, None] * KEYS + ids[1][..., None, :]).flatten(-2).gather(-1, place)


class Peer(ProductKeys):
    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = nn.Embedding(E, D), nn.Embedding(E, D)

    def vectors_of(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.down(ids), self.up(ids)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, ids = self.route(x)
        first, second = self.vectors_of(ids)
        hidden = torch.einsum("bnd,bnhkd->bnhk", x, first).relu() * weights
        return torch.einsum("bnhk,bnhkd->bnd", hidden, second)


class Bare(Peer):
    """The same in parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = self.down.weight, self.up.weight
        del self.down, self.up

    def vectors_of(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.first[ids], self.second[ids]


class Rows(nn.Module):
    """Rows of tables are matrices of experts, of a router of one matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(D, E)
        self.down, self.up = nn.Embedding(E, D * WIDTH), nn.Embedding(E, D * WIDTH)

    def route(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        weights, ids = self.router(x).topk(K, -1)
        return weights.softmax(-1), ids

    def weights_of(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.down(ids).unflatten(-1, (D, WIDTH)), self.up(ids).unflatten(-1, (WIDTH, D))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, ids = self.route(x)
        first, second = self.weights_of(ids)
        hidden = nn.functional.silu(torch.einsum("bnd,bnkdi->bnki", x, first))
        return torch.einsum("bnki,bnkid,bnk->bnd", hidden, second, weights)


class Stacked(Rows):
    """What the sentence names."""

    def __init__(self) -> None:
        super().__init__()
        del self.down, self.up
        self.first, self.second = nn.Parameter(torch.randn(E, D, WIDTH)), nn.Parameter(torch.randn(E, WIDTH, D))

    def weights_of(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.first[ids], self.second[ids]


class StackedByPairs(Stacked):
    """Product keys in matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(D, KEYS), nn.Linear(D, KEYS)
        del self.router

    def route(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        found = [layer(x).topk(K, -1) for layer in (self.one, self.two)]
        return ProductKeys.pairs(self, torch.stack([f[0] for f in found]), torch.stack([f[1] for f in found]))


class StackedByKeys(Stacked, ProductKeys):
    """Product keys in one parameter of four dimensions."""

    def __init__(self) -> None:
        super().__init__()
        del self.router

    def route(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        weights, ids = ProductKeys.route(self, x)
        return weights.flatten(-2), ids.flatten(-2)


class LoopByKeys(StackedByKeys):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, (weights, ids) = x.reshape(-1, D), self.route(x)
        out = torch.zeros_like(rows)
        for number in range(E):
            token, slot = torch.where(ids.reshape(len(rows), -1) == number)
            hidden = (rows[token] @ self.first[number]).relu() @ self.second[number]
            out.index_add_(0, token, hidden * weights.reshape(len(rows), -1)[token, slot, None])
        return out.view(x.shape)


class Scaled(Stacked):
    """Tables beside experts: there is something else to say about it."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.bias = nn.Embedding(E, D), nn.Embedding(E, D)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        _, ids = self.route(x)
        scale, bias = self.scale(ids).mean(-2), self.bias(ids).mean(-2)
        return super().forward(x).cumsum(-2) * scale + bias + self.first.sum()


TOKENS = torch.randn(3, 7, D, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def report(kind: type[nn.Module]) -> hexa_fx.OptimizationReport:
    torch.manual_seed(0)
    return hexa_fx.explain(kind().double(), TOKENS)


@pytest.mark.parametrize(
    ("kind", "where"),
    [(Peer, "nn.Embedding (down, up)"), (Bare, "parameters (first, second)"), (Rows, "nn.Embedding (down, up)")],
)
def test_the_tables_are_named_and_not_the_keys(kind: type[nn.Module], where: str) -> None:
    (block,) = report(kind).blocks
    assert block.reason.startswith(f"the chosen ids look rows up in {where}")
    assert "are parameters (experts, in, out) and its router's are matrices" in block.reason


@pytest.mark.parametrize("kind", [Stacked, StackedByPairs, StackedByKeys, LoopByKeys])
def test_what_it_says_is_rewritten_is(kind: type[nn.Module]) -> None:
    assert [block.status for block in report(kind).blocks] == ["rewritten"]


def test_tables_beside_experts_are_not_the_reason() -> None:
    assert not any("look rows up" in block.reason for block in report(Scaled).blocks)


def test_a_routers_keys_are_no_experts() -> None:
    class OneByOne(Peer):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            weights, ids = self.route(x)
            out = torch.zeros_like(x)
            for number in range(E):
                share = (weights * (ids == number)).sum((-2, -1))
                hidden = (x @ self.down.weight[number]).relu() * share
                out = out + hidden[..., None] * self.up.weight[number]
            return out

    (block,) = report(OneByOne).blocks
    assert "these are a router's scores" in block.reason
    assert "one expert at a time" not in block.reason
