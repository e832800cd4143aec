"""Weights upcast where they are used, and gradients kept as products, give the numbers of a float64 copy."""

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from hexa_fx.ir import FfnSpec
from hexa_fx.isolation import outcome, size
from hexa_fx.isolation.trial_modes import InFloat64
from hexa_fx.large_blocks import lazy_gradient, upcast_weight
from hexa_fx.large_blocks.lazy_gradient import LazyGradient, LazyGradients, compared
from hexa_fx.large_blocks.listed_stack import ListedStack
from hexa_fx.large_blocks.outer_products import PLAIN, NotAPlace, Term, filled, reshaped, sketch_of_dense
from hexa_fx.large_blocks.upcast_weight import TooLarge, UpcastWeight, piece_memory_kept, upcast_piece
from hexa_fx.ops.moe_ffn import moe_ffn

E, N, K, T = 4, 24, 40, 3
Use = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def loop(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return sum(F.linear(x, w[e], x[0, :N]).cos() for e in range(E))


def iterated(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return sum(F.linear(x, matrix).cos() for matrix in w.unbind(0)[1:])


def halves(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    gate, up = w.chunk(2, 1)
    return sum(F.linear(x, gate[e]) * (x @ up[e].T) for e in (1, 2))


def one_half(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return F.linear(x, w.chunk(2, 1)[0][2]).cos()


def interleaved(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return sum(F.linear(x, w[e, ::2]) * (x @ w[e, 1::2].T) for e in (1, 2))


def all_experts_at_once(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return torch.bmm(x.expand(E, T, K), w.mT).cos() + torch.baddbmm(x[:1, :1, None], x.expand(E, T, K), w.mT).sin()


def broadcast(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return (x @ w.transpose(1, 2)).cos()


def einsum_over_tokens(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return torch.einsum("tk,enk->etn", x, w).cos()


def einsum_by_expert(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return torch.einsum("etk,enk->etn", x.expand(E, T, K).cos(), w).cos()


def as_one_matrix(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return F.linear(x, w.view(E * N, K)).cos()


def cut_from_one_matrix(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return sum(F.linear(x, part).cos() for part in w.view(E * N, K).chunk(E))


def gathered(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return torch.bmm(x[:, None], w[torch.tensor([1, 3, 1])].mT).cos()


def selected(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return torch.bmm(x[:, None], w.index_select(0, torch.tensor([1, 3, 1])).mT).cos()


def grouped(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    with InFloat64(torch.bfloat16):
        return torch._grouped_mm(x, w.mT, torch.tensor([1, 1, 2, 3], dtype=torch.int32)).cos()


def stacked_again(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return F.linear(x, torch.stack([w[1].detach(), w[2], w[3]])[1]).cos()


def our_operator(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    down = torch.randn(E, K, N // 2, dtype=torch.float64, generator=generator)
    weights = torch.rand(T, 2, dtype=torch.float64, generator=generator)
    ids = torch.tensor([[0, 1], [3, 1], [2, 0]])
    return moe_ffn(x, ids, weights, w, None, None, None, down, None, FfnSpec("silu", "concat"))


IN_PIECES = (
    loop,
    iterated,
    halves,
    one_half,
    interleaved,
    all_experts_at_once,
    broadcast,
    einsum_over_tokens,
    einsum_by_expert,
    as_one_matrix,
    cut_from_one_matrix,
    gathered,
    selected,
    grouped,
    stacked_again,
    our_operator,
)


@pytest.fixture(autouse=True)
def everything_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lazy_gradient, "LEAST_BYTES", 8)


def stored() -> torch.Tensor:
    return torch.randn(E, N, K, generator=torch.Generator().manual_seed(0)).bfloat16()


def tokens() -> torch.Tensor:
    x = torch.randn(T, K, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    return x.requires_grad_()


@pytest.mark.parametrize("use", IN_PIECES, ids=lambda use: use.__name__)
def test_no_whole_weight_or_gradient_is_made(use: Use):
    upcast, copied = nn.Parameter(UpcastWeight(stored(), limit=8 * N * K - 1)), nn.Parameter(stored().double())
    x = tokens()
    expected, found = use(copied, x), use(upcast, x)
    torch.testing.assert_close(found, expected)
    dw, dx = torch.autograd.grad(expected, [copied, x], torch.ones_like(expected))
    with LazyGradients([upcast]):
        lazy, same = torch.autograd.grad(found, [upcast, x], torch.ones_like(found))
    assert isinstance(lazy, LazyGradient)
    torch.testing.assert_close(same, dx)
    torch.testing.assert_close(*compared([lazy], [upcast]), sketch_of_dense(dw))
    torch.testing.assert_close(filled(lazy.terms, lazy.shape, lazy.device, 1 << 20), dw)


@pytest.mark.parametrize("use", [lambda w, x: F.linear(x, (w * 2)[1]), lambda w, x: F.linear(x, w.sum(0)).cos()])
def test_other_operations_get_a_copy_if_it_is_small_enough(use: Use):
    copied, x = nn.Parameter(stored().double()), tokens()
    upcast = nn.Parameter(UpcastWeight(stored(), limit=1 << 20))
    expected, found = use(copied, x), use(upcast, x)
    torch.testing.assert_close(found, expected)
    (dw,) = torch.autograd.grad(expected, [copied], torch.ones_like(expected))
    with LazyGradients([upcast]):
        (lazy,) = torch.autograd.grad(found, [upcast], torch.ones_like(found))
    torch.testing.assert_close(*compared([lazy], [upcast]), sketch_of_dense(dw))
    with pytest.raises(TooLarge, match="as a whole"):
        use(nn.Parameter(UpcastWeight(stored(), limit=1000)), x)


def test_a_wrong_gradient_of_one_element_shows():
    weight = UpcastWeight(stored(), limit=1)
    gradient = torch.randn(E, N, K, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    other = gradient.clone()
    other[2, 5, 7] += 1e-6
    one, two = compared([gradient, other], [weight, weight])
    assert float((one - two).abs().max()) > 1e-8
    assert bool(((one - two).abs().amax(-1) > 0).nonzero().eq(torch.tensor([[2, 5]])).all())


def test_products_with_weights_are_raised_by_columns(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(upcast_weight, "PIECE_BYTES", 8 * K * 5)
    weight, x = UpcastWeight(stored(), limit=1), tokens().detach()
    torch.testing.assert_close(x @ weight[1].T, x @ stored()[1].double().T)
    torch.testing.assert_close(weight[1] @ x.T, stored()[1].double() @ x.T)
    torch.testing.assert_close(torch.bmm(weight, x.T.expand(E, K, T)), stored().double() @ x.T)


def test_weights_are_stacked_without_a_copy():
    whole = stored()
    parts = [UpcastWeight(part, limit=1) for part in whole]
    joined = torch.stack(parts)
    assert [row.data_ptr() for row in joined.rows()] == [row.data_ptr() for row in whole]
    assert joined.shape == whole.shape
    torch.testing.assert_close(torch.stack(parts[::-1]).source, whole.flip(0))


APART: tuple[Use, ...] = (loop, iterated, halves, one_half, interleaved, all_experts_at_once)


@pytest.mark.parametrize("use", APART)
def test_weights_that_lie_apart_are_read_as_a_stack(use: Use, monkeypatch: pytest.MonkeyPatch):
    parts = tuple(part.clone() for part in stored())
    expected = use(stored().double(), tokens().detach())
    monkeypatch.setattr(torch, "stack", None)  # no copy of them all
    torch.testing.assert_close(use(UpcastWeight(ListedStack(parts), limit=1), tokens().detach()), expected)


def test_weights_that_lie_apart_are_read_where_they_lie_now():
    parts = tuple(nn.Parameter(part.clone()) for part in stored())
    weight = UpcastWeight(ListedStack(parts), limit=1)
    turned, half = weight.transpose(1, 2), weight[1:, : N // 2]
    for part in parts:
        part.data = part.data + 1
    torch.testing.assert_close(weight[2] @ tokens()[0], (stored() + 1)[2].double() @ tokens()[0])
    torch.testing.assert_close(turned.source, (stored() + 1).transpose(1, 2))
    torch.testing.assert_close(half.source, (stored() + 1)[1:, : N // 2])
    torch.testing.assert_close(weight.transpose(0, 1).source, (stored() + 1).transpose(0, 1))
    torch.testing.assert_close(weight[2:2].source, stored()[2:2])


def test_conversions_to_what_it_counts_as_are_free():
    weight = UpcastWeight(stored(), limit=1)
    for converted in (weight.double(), weight.to(torch.float64), weight.to(tokens()), weight.contiguous()):
        assert converted.source.data_ptr() == weight.source.data_ptr()


def test_it_is_only_read():
    with pytest.raises(TypeError, match="only read"):
        UpcastWeight(stored(), limit=1 << 20).mul_(2)


def test_a_product_is_cut_where_a_new_shape_ends_its_rows():
    x, g = torch.randn(7, 2, dtype=torch.float64), torch.randn(2, 3, dtype=torch.float64)
    term = Term(x, g, (1, 0), ((1, 0), (0, 1)))
    dense = filled([term], (8, 3), x.device, 1 << 20)
    for shape in ((2, 4, 3), (4, 2, 3), (8, 3, 1), (24,), (2, 12)):
        try:
            terms = list(reshaped(term, (8, 3), shape))
        except NotAPlace:
            continue
        torch.testing.assert_close(filled(terms, shape, x.device, 1 << 20), dense.view(shape))


def test_rows_that_are_as_many_as_a_weight_has_stay_rows():
    x = tokens().detach()
    with LazyGradients([UpcastWeight(stored()[0], limit=1 << 20)]):
        rows = x.new_zeros(N, K)
        torch.mm(torch.ones(N, T, dtype=torch.float64), x, out=rows)
    torch.testing.assert_close(rows, x.sum(0).expand(N, K))


def test_nothing_writes_to_a_gradient_that_is_kept_as_products():
    x = tokens().detach()
    with LazyGradients([UpcastWeight(stored(), limit=1 << 20)]):
        gradient = x.new_zeros(E, N, K)
        assert isinstance(gradient, LazyGradient)
        with pytest.raises(NotImplementedError, match="kept as products"):
            torch.mul(gradient, 2, out=gradient)


@pytest.mark.parametrize("turned", [False, True])
def test_pieces_take_one_memory_in_turn(turned: bool) -> None:
    stored = torch.randn(7, 12).bfloat16()
    pieces = [part.t() if turned else part for part in (stored[:, :8], stored[:, 8:], stored[:3, 2:9])]
    with piece_memory_kept():
        for piece in pieces:
            upcast = upcast_piece(piece)
            torch.testing.assert_close(upcast, piece.double(), rtol=0, atol=0)
            assert upcast.data_ptr() == upcast_piece(pieces[0]).data_ptr()
            assert (upcast.stride(0) > upcast.stride(1)) == (piece.stride(0) > piece.stride(1))


def test_parts_of_a_gradient_are_found_without_looking_at_all_products():
    generator = torch.Generator().manual_seed(3)
    rows = [int(start) for start in torch.randint(0, 30, (20,), generator=generator)]
    terms = [
        Term(torch.randn(height, 2, generator=generator).double(), torch.ones(2, K).double(), (start, 0), PLAIN)
        for start, height in zip(rows, [1, 2, 5, 9] * 5)
    ]
    gradient = LazyGradient((40, K), terms[:-1], torch.device("cpu"), 1 << 20)
    for _ in range(2):
        whole = gradient.filled()
        for part, expected in zip(gradient.split([7, 1, 20, 12]), whole.split([7, 1, 20, 12])):
            torch.testing.assert_close(part.filled(), expected)
        gradient.terms.append(terms[-1])  # as backward formulas do
    backwards = LazyGradient((40, K), [Term(terms[0].left, terms[0].right, (0, 0), ((-1, 0), (0, 1)))], whole.device, 1)
    with pytest.raises(NotAPlace):
        backwards.between(0, 0, 1)


def test_a_weight_of_one_number_is_told_from_one_that_differs_anywhere():
    for shape in ((), (7,), (9, 11), (5, 4, 3)):
        weight = torch.full(shape, 2.0, dtype=torch.bfloat16)
        assert size.is_of_one_number(weight)
        if shape:
            weight[(-1,) * len(shape)] = 3
            assert not size.is_of_one_number(weight)
    assert not size.is_of_one_number(torch.full((9, 11), float("nan")))
    assert not size.is_of_one_number(torch.ones(3, 0))
    assert not size.is_of_one_number(torch.ones(3, dtype=torch.int))
    late = torch.ones(3, 40).index_fill_(1, torch.tensor([39]), 2.0)
    several = [torch.ones(9, 11), torch.ones(9, 11, dtype=torch.bfloat16), torch.tensor(2.0), torch.ones(7), late]
    several += [torch.arange(7.0), torch.ones(3, 0), torch.ones(3, dtype=torch.int)]
    assert size.of_one_number(several) == {id(value) for value in several if size.is_of_one_number(value)}


def test_gradients_of_several_matrices_are_sketched_as_each_is_alone():
    """Products of no rows, transposed ones and two sums of products among them."""
    generator = torch.Generator().manual_seed(4)
    weights = [UpcastWeight(torch.randn(N, K), 1 << 20) for _ in range(5)]

    def product(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        return tuple(torch.randn(rows, size, generator=generator, dtype=torch.float64) for size in (N, K))

    given = [product(rows) for rows in (3, 0, 2, 1)]
    terms = [[Term(g.t(), x, (0, 0), PLAIN)] for g, x in given]
    terms[2] = [Term(given[2][1].t(), given[2][0], (0, 0), (PLAIN[1], PLAIN[0]))]
    terms.append([*terms[0], *terms[3]])
    lazy = [LazyGradient((N, K), each, torch.device("cpu"), 1 << 20) for each in terms]
    dense = [g.t() @ x for g, x in given]
    dense.append(dense[0] + dense[3])
    for found, expected in zip(compared(lazy, weights), dense, strict=True):
        torch.testing.assert_close(found, sketch_of_dense(expected))


def test_largest_magnitudes_of_several_tensors_are_those_of_each():
    """Images in channels_last, which side by side are no rows, among single numbers and some that are NaN, none and infinite."""
    images = [torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last) for _ in range(3)]
    others = [
        torch.tensor([float("nan"), 1.0]),
        torch.zeros(0),
        torch.tensor([-float("inf"), 1.0]),
        torch.randn(70, 70),
        *torch.randn(3).unbind(),
    ]
    found, expected = outcome.largest_of([*images, *others]), [*map(outcome.largest, [*images, *others])]
    assert str(found) == str(expected)
