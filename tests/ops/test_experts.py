"""`hexa_fx.ops.experts`: rows that somebody else dispatched, against a loop over experts."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from hexa_fx import ops
from hexa_fx.errors import InputError
from hexa_fx.ir import FfnSpec
from hexa_fx.ops.table_layers import MoeFfn, static_of
from tests.ops.reference import loop

E, D, I = 4, 6, 10  # noqa: E741
GATED = FfnSpec("silu", "split")


def operands(rows: int, requires_grad: bool = True) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
    """Rows, a weight for each, and w1, b1, w3, b3, w2, b2, in float64."""
    g = torch.Generator().manual_seed(0)
    sizes = ((rows, D), (rows,), (E, I, D), (E, I), (E, I, D), (E, I), (E, D, I), (E, D))
    x, gate, *weights = (torch.randn(s, generator=g, dtype=torch.float64).requires_grad_(requires_grad) for s in sizes)
    return x, gate, tuple(weights)


def by_hand(x: Tensor, ids: list[int], gate: Tensor | None, w: tuple[Tensor, ...]) -> Tensor:
    """Expert ``ids[r]`` of every row; nothing where there is no such expert."""
    return loop(
        MoeFfn(x, torch.tensor(ids).view(-1, 1), None if gate is None else gate[:, None], *w, *static_of(GATED))
    )


def ids_of(counts: Any, rows: int) -> list[int]:
    flat = torch.tensor(counts).reshape(-1).tolist()
    ids = [place % E for place, count in enumerate(flat) for _ in range(count)][:rows]
    return ids + [E] * (rows - len(ids))


CASES = [
    ([3, 0, 4, 2], 9),  # exactly as many as were counted
    ([3, 0, 4, 2], 16),  # over-allocated
    ([0, 0, 0, 7], 8),
    ([0, 0, 0, 0], 5),  # nothing arrived
    ([0, 0, 0, 0], 0),
    ([5, 5, 5, 5], 12),  # more counted than allocated: what there is
    ([[1, 2, 0, 1], [0, 0, 0, 0], [2, 0, 3, 0]], 11),  # three senders
]


@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize(("counts", "rows"), CASES)
def test_values_and_all_gradients(counts: Any, rows: int, weighted: bool) -> None:
    x, gate, weights = operands(rows)
    row_weights = gate if weighted else None
    y = ops.experts(x, torch.tensor(counts), row_weights, *weights, GATED)
    expected = by_hand(x, ids_of(counts, rows), row_weights, weights)
    torch.testing.assert_close(y, expected)
    wanted = (x, *weights, *([gate] if weighted else []))
    dy = torch.randn_like(y)
    ours = torch.autograd.grad(y, wanted, dy, allow_unused=True)
    theirs = torch.autograd.grad(expected, wanted, dy, allow_unused=True) if expected.requires_grad else [None] * 9
    for name, a, b in zip(("x", "w1", "b1", "w3", "b3", "w2", "b2", "weights"), ours, theirs):
        torch.testing.assert_close(a, torch.zeros_like(a) if b is None else b, msg=lambda m, name=name: f"{name}: {m}")


def test_what_lies_behind_the_last_row_is_never_read() -> None:
    x, gate, weights = operands(12, requires_grad=False)
    clean = ops.experts(x, torch.tensor([2, 1, 0, 4]), gate, *weights, GATED)
    x[7:], gate[7:] = float("nan"), float("inf")
    leaves = [t.requires_grad_() for t in (x, gate, *weights)]
    y = ops.experts(x, torch.tensor([2, 1, 0, 4]), gate, *weights, GATED)
    assert torch.equal(y[:7], clean[:7])
    assert not y[7:].any()
    grads = torch.autograd.grad(y.sum(), leaves)
    assert all(bool(grad.isfinite().all()) for grad in grads)
    assert not grads[0][7:].any()
    assert not grads[1][7:].any()


def test_blocks_of_senders_with_room_of_their_own() -> None:
    counts, rows = [[1, 2, 0, 1], [0, 0, 0, 0], [2, 0, 3, 0]], 6
    x, gate, weights = operands(3 * rows)
    blocks, block_weights = x.view(3, rows, D), gate.view(3, rows)
    y = ops.experts(blocks, torch.tensor(counts), block_weights, *weights, GATED)
    ids = [e for sender in counts for e in ids_of(sender, rows)]
    expected = by_hand(x, ids, gate, weights)
    torch.testing.assert_close(y.view(-1, D), expected)
    leaves = (x, gate, *weights)
    for a, b in zip(
        torch.autograd.grad(y.square().sum(), leaves), torch.autograd.grad(expected.square().sum(), leaves)
    ):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_compiles_without_breaks_for_any_counts(dtype: torch.dtype) -> None:
    x, gate, weights = operands(10)

    def step(x: Tensor, counts: Tensor) -> Tensor:
        return ops.experts(x, counts, gate, *weights, GATED).square().sum()

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager", dynamic=True)
    for counts in ([3, 0, 4, 2], [0, 9, 0, 0]):
        given = torch.tensor(counts, dtype=dtype)
        ours, theirs = compiled(x, given), step(x, given)
        torch.testing.assert_close(ours, theirs)
        for a, b in zip(torch.autograd.grad(ours, (x, *weights)), torch.autograd.grad(theirs, (x, *weights))):
            torch.testing.assert_close(a, b)


def test_counts_below_zero_count_as_none_where_nobody_looks() -> None:
    x, gate, weights = operands(6, requires_grad=False)
    traced = make_fx(lambda counts: ops.experts(x, counts, gate, *weights, GATED))(torch.tensor([3, 0, 1, 2]))
    torch.testing.assert_close(
        traced(torch.tensor([3, -2, 1, 2])), ops.experts(x, torch.tensor([3, 0, 1, 2]), gate, *weights, GATED)
    )


def test_counts_never_reach_the_host() -> None:
    x, gate, weights = operands(10, requires_grad=False)
    with torch.device("meta"):
        counts = torch.empty(E, dtype=torch.int64)
    y = ops.experts(x.to("meta"), counts, gate.to("meta"), *(w.to("meta") for w in weights), GATED)
    assert y.shape == (10, D)


def test_what_does_not_fit_is_named() -> None:
    x, gate, weights = operands(6)
    wrong: tuple[Any, ...] = (
        torch.zeros(E + 1, dtype=torch.int64),
        torch.zeros(E),
        torch.zeros(2, 2, E, dtype=torch.int64),
    )
    for counts in (*wrong, [0] * E, torch.zeros(E, dtype=torch.int64, device="meta")):
        with pytest.raises(InputError, match="counts is"):
            ops.experts(x, counts, None, *weights, GATED)
    for counts in (torch.zeros(E, dtype=torch.int64), torch.zeros(3, E, dtype=torch.int64)):
        with pytest.raises(InputError, match="each sender's block"):
            ops.experts(x.view(2, 3, D), counts, None, *weights, GATED)
    with pytest.raises(InputError, match="rows is"):
        ops.experts(x[0], torch.zeros(E, dtype=torch.int64), None, *weights, GATED)
    with pytest.raises(InputError, match="row_weights is"):
        ops.experts(x, torch.zeros(E, dtype=torch.int64), gate[:3], *weights, GATED)
    with pytest.raises(InputError, match=r"row_weights is torch\.int64"):
        ops.experts(x, torch.zeros(E, dtype=torch.int64), gate.long(), *weights, GATED)
    with pytest.raises(InputError, match=r"counts has -2; .* 0 or more"):
        ops.experts(x, torch.tensor([3, -2, 0, 4]), None, *weights, GATED)
    with pytest.raises(InputError, match="spec is a str"):
        ops.experts(x, torch.zeros(E, dtype=torch.int64), gate, *weights, "silu")


def test_a_rank_that_has_no_experts() -> None:
    x, gate, weights = operands(6)
    y = ops.experts(x, torch.zeros(0, dtype=torch.int64), gate, *(w[:0] for w in weights), GATED)
    y.sum().backward()
    assert not y.any()
    assert x.grad is None or not x.grad.any()
