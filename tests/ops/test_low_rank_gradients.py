"""hexa::low_rank_gradients on a CPU, against float64."""

import pytest
import torch
from torch import Tensor

from hexa_fx.errors import InputError
from hexa_fx.ops import low_rank_gradients, reindex

E, K, N, R = 9, 3, 24, 3


def routed(tokens: int) -> tuple[Tensor, Tensor]:
    """v and offs. Expert 2 has no rows, and some rows have no expert."""
    index = torch.randint(0, E + 1, (tokens, K))
    index[index == 2] = 3
    v, _, offs = reindex(index, E)
    return v, offs


@pytest.mark.parametrize("gathered", [True, False])
@pytest.mark.parametrize("tokens", [0, 1, 17])
@pytest.mark.parametrize(("layout", "last"), [("nk", False), ("kn", False), ("kn", True)])
@pytest.mark.parametrize("wanted", [True, False])
@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("rank", [1, R])
def test_both_gradients(
    tokens: int, gathered: bool, layout: str, last: bool, wanted: bool, weighted: bool, rank: int
) -> None:
    """Of rows of u that torch's grouped products have padded, too, which a CPU takes where eight experts have rows."""
    if weighted and not gathered:
        return
    v, offs = routed(tokens)
    rows, u = torch.randn(tokens if gathered else tokens * K, N), torch.randn(tokens * K, 4)[:, :rank]
    factor = torch.randn((E, N, rank) if layout == "kn" else (E, rank, N))
    index = (v, offs, K) if gathered else (None, offs, 1)
    weights = torch.rand(tokens, K) if weighted else None
    du, df = low_rank_gradients(rows, u, factor if wanted else None, weights, *index, layout, torch.float64, 0.5, last)
    each = rows[v.long() // K] if gathered else rows
    scaled = u if weights is None else u * weights.view(-1, 1)[v.long()]
    expected_du, expected = torch.zeros_like(u, dtype=torch.float64), torch.zeros(E, N, rank, dtype=torch.float64)
    for e in range(E):
        at, matrix = slice(int(offs[e]), int(offs[e + 1])), factor[e] if layout == "kn" else factor[e].t()
        expected_du[at] = each[at].double() @ matrix.double()
        expected[e] = each[at].double().t() @ scaled[at].double() / 2
    torch.testing.assert_close(du.double(), expected_du if wanted else torch.zeros(0).double(), rtol=1e-5, atol=1e-5)
    expected = expected.permute(1, 2, 0) if last else expected if layout == "kn" else expected.transpose(1, 2)
    torch.testing.assert_close(df, expected, rtol=1e-5, atol=1e-5)


def test_operands_that_do_not_fit() -> None:
    v, offs = routed(4)
    rows, u, factor = torch.randn(4, N), torch.randn(4 * K, R), torch.randn(E, N, R)
    form = ("kn", torch.float32, 1.0, False)
    for wrong in ((rows[:, 1:], u, factor), (rows, u[1:], factor), (rows, u[:, 1:], factor), (rows, u, factor[1:])):
        with pytest.raises(InputError, match="low_rank_gradients"):
            low_rank_gradients(*wrong, None, v, offs, K, *form)
    for form in (("kn", torch.int32, 1.0, False), ("nk", torch.float32, 1.0, True), ("??", torch.float32, 1.0, False)):
        with pytest.raises(InputError, match="low_rank_gradients"):
            low_rank_gradients(rows, u, None, None, v, offs, K, *form)
    with pytest.raises(InputError, match="top_k_weights"):
        low_rank_gradients(rows, u, None, torch.rand(3, K), v, offs, K, "kn", torch.float32)
    with pytest.raises(InputError, match="top_k_weights"):
        low_rank_gradients(torch.randn(4 * K, N), u, None, torch.rand(4, K), None, offs, 1, "kn", torch.float32)
