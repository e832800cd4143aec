"""Expert ids that are made in numpy, by a hash of token ids say: refused with a sentence and the line where they leave torch."""

from __future__ import annotations

import linecache
from typing import Any

import numpy
import pytest
import torch
from torch import nn

import hexa_fx
from tests.detect.mixture import D, E

torch.set_num_threads(1)


def hashed(ids: torch.Tensor) -> Any:
    return numpy.asarray(ids.flatten()) * 2654435761 % E  # here


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(D, 8), nn.GELU(), nn.Linear(8, D)) for _ in range(E))

    def ids_of(self, given: Any) -> Any:
        return hashed(given)

    def forward(self, x: torch.Tensor, given: Any) -> torch.Tensor:
        flat, ids = x.reshape(-1, D), self.ids_of(given)
        return self.mixed(flat, ids).view(x.shape)

    def mixed(self, flat: torch.Tensor, ids: Any) -> torch.Tensor:
        out = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            (token,) = torch.where(ids == number)
            out = out.index_add(0, token, expert(flat[token]))
        return out


class BackInTorch(Block):
    def ids_of(self, given: torch.Tensor) -> Any:
        return torch.from_numpy(hashed(given))


class ByTable(Block):
    def __init__(self) -> None:
        super().__init__()
        self.table = numpy.arange(50) * 7 % E

    def ids_of(self, given: torch.Tensor) -> Any:
        return torch.as_tensor(self.table[given.flatten().numpy()])  # here


class ByMask(Block):
    def mixed(self, flat: torch.Tensor, ids: Any) -> torch.Tensor:
        out = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            out[ids == number] = expert(flat[ids == number])
        return out


class Sorted(Block):
    def mixed(self, flat: torch.Tensor, ids: Any) -> torch.Tensor:
        order = torch.from_numpy(numpy.argsort(ids, kind="stable"))
        rows = flat[order].split(numpy.bincount(ids, minlength=E).tolist())
        out = torch.cat([expert(part) for expert, part in zip(self.experts, rows)])
        return torch.empty_like(out).index_copy(0, order, out)


class OneByOne(Block):
    def mixed(self, flat: torch.Tensor, ids: Any) -> torch.Tensor:
        return torch.stack([self.experts[int(number)](row) for number, row in zip(ids, flat)])


class Given(Block):
    """Ids come as an array."""

    def ids_of(self, given: Any) -> Any:
        return torch.as_tensor(given)  # here


class InTorch(Block):
    def ids_of(self, given: torch.Tensor) -> Any:
        return given.flatten() * 2654435761 % E


class Model(nn.Module):
    def __init__(self, block: Block) -> None:
        super().__init__()
        self.embedding, self.block = nn.Embedding(50, D), block

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.block(self.embedding(ids), hashed(ids) if isinstance(self.block, Given) else ids)


class Whole(ByMask):
    """The block is the model itself."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, D)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return super().forward(self.embedding(ids), ids)


def model(kind: type[Block]) -> nn.Module:
    torch.manual_seed(0)
    return kind() if kind is Whole else Model(kind())


EXAMPLE = torch.arange(21).reshape(3, 7)


@pytest.mark.parametrize("kind", [BackInTorch, ByTable, ByMask, Sorted, OneByOne, Whole, Given])
def test_refused_where_they_leave_torch(kind: type[Block]) -> None:
    (block,) = hexa_fx.explain(model(kind), EXAMPLE).blocks
    sentence = (
        "gives torch an array of numpy" if kind is Given else "takes numbers out of torch here and goes on with them in"
    )
    assert block.status == "refused"
    assert sentence in block.reason
    assert block.location is not None
    with open(block.location.file) as source:
        assert source.readlines()[block.location.line - 1].endswith("# here\n")


def test_the_same_in_torch_is_rewritten() -> None:
    made = model(InTorch)
    optimized = hexa_fx.optimize(made, EXAMPLE, hexa_fx.HexaConfig(own_code_when_small=False))
    assert optimized.report.blocks[0].status == "rewritten"
    torch.testing.assert_close(optimized(EXAMPLE + 20), made(EXAMPLE + 20))


class Places(Block):
    """Tokens are chosen in torch; which ones an expert gets is looked for in numpy."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(D, E)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, ids = self.router(x).softmax(-1).topk(2, -1)
        out = torch.zeros_like(x)
        chosen = ids.numpy()
        for number, expert in enumerate(self.experts):
            token, slot = map(torch.from_numpy, numpy.where(chosen == number))
            out.index_add_(0, token, expert(x[token]) * weights[token, slot, None])
        return out


def test_places_of_choices_that_come_back_from_numpy_are_refused_where_they_left() -> None:
    (block,) = hexa_fx.explain(Places(), torch.randn(21, D)).blocks
    assert "goes on with them in numpy" in block.reason
    assert block.location is not None
    assert "chosen = ids.numpy()" in linecache.getline(__file__, block.location.line)


class Chooses(Places):
    """Numpy chooses."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        probs = self.router(x).softmax(-1)
        ids = torch.from_numpy(probs.detach().numpy().argsort(-1)[:, -2:].copy())
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            token, slot = torch.where(ids == number)
            out.index_add_(0, token, expert(x[token]) * probs[token, ids[token, slot], None])
        return out


def test_choices_of_numpy_are_refused_where_its_numbers_leave_torch() -> None:
    (block,) = hexa_fx.explain(Chooses(), torch.randn(21, D)).blocks
    assert "takes a host decision (if, while, item()) on the data" in block.reason
    assert block.location is not None
    assert ".numpy()" in linecache.getline(__file__, block.location.line)
