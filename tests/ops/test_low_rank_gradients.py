"""hexa::low_rank_gradients on a CPU, against float64."""

from __future__ import annotations

import pytest
import torch

from hexa_fx.errors import InputError
from hexa_fx.ops import low_rank_gradients, reindex

E, K, N, R = 5, 3, 24, 4


@pytest.mark.parametrize("gathered", [True, False])
@pytest.mark.parametrize("tokens", [0, 1, 17])
def test_both_gradients(tokens: int, gathered: bool) -> None:
    """Expert 2 has no rows, and some rows have no expert."""
    index = torch.randint(0, E + 1, (tokens, K))
    index[index == 2] = 3
    v, _, offs = reindex(index, E)
    dy, u = torch.randn(tokens if gathered else tokens * K, N), torch.randn(tokens * K, R)
    c = torch.randn(E, N, R)
    du, dc = low_rank_gradients(dy, u, c, v if gathered else None, offs, K if gathered else 1)
    rows = dy[v.long() // K] if gathered else dy
    expected_du, expected_dc = torch.zeros_like(u, dtype=torch.float64), torch.zeros_like(c, dtype=torch.float64)
    for e in range(E):
        at = slice(int(offs[e]), int(offs[e + 1]))
        expected_du[at] = rows[at].double() @ c[e].double()
        expected_dc[e] = rows[at].double().t() @ u[at].double()
    torch.testing.assert_close(du.double(), expected_du, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(dc.double(), expected_dc, rtol=1e-5, atol=1e-5)


def test_operands_that_do_not_fit() -> None:
    v, _, offs = reindex(torch.zeros(4, K, dtype=torch.long), E)
    dy, u, c = torch.randn(4, N), torch.randn(4 * K, R), torch.randn(E, N, R)
    for wrong in ((dy[:, 1:], u, c), (dy, u[1:], c), (dy, u[:, 1:], c), (dy, u, c[1:])):
        with pytest.raises(InputError, match="low_rank_gradients"):
            low_rank_gradients(*wrong, v, offs, K)
