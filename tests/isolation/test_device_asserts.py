"""What a GPU could only assert is raised before the operator runs."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from hexa_fx.isolation.trial_modes import RaisesOnHost, no_device_asserts

ROWS = torch.arange(12.0).reshape(4, 3)
IDS = torch.tensor([0, 3, 1])


class Ran(TorchDispatchMode):
    """Counts the operators that get to run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.overloadpacket._qualified_op_name)
        return func(*args, **kwargs or {})


CASES: dict[str, tuple[Callable[[Tensor], object], Tensor, Tensor]] = {
    "index": (lambda i: ROWS[i], IDS, torch.tensor([0, 4])),
    "index from the end": (lambda i: ROWS[i], IDS - 4, torch.tensor([-5])),
    "index behind a mask": (
        lambda i: ROWS[None][torch.ones(1, 4, dtype=torch.bool).nonzero()[:, 0], i],
        IDS[[0] * 4],
        IDS + 2,
    ),
    "index_put": (lambda i: ROWS.clone().index_put((i,), torch.zeros(3)), IDS, IDS + 1),
    "index_select": (lambda i: ROWS.index_select(0, i), IDS, IDS - 1),
    "index_add": (lambda i: torch.zeros(4, 3).index_add(0, i, ROWS[:3]), IDS, IDS - 1),
    "index_add_": (lambda i: torch.zeros(4, 3).index_add_(0, i, ROWS[:3]), IDS, IDS + 4),
    "gather": (lambda i: ROWS.gather(1, i[:2, None]), IDS - IDS, IDS + 3),
    "scatter": (lambda i: torch.zeros(4).scatter(0, i, 1.0), IDS, IDS - 1),
    "scatter_add_": (lambda i: torch.zeros(4).scatter_add_(0, i, torch.ones(3)), IDS, IDS - 1),
    "take": (lambda i: ROWS.take(i), IDS, IDS + 12),
    "embedding": (lambda i: F.embedding(i, ROWS), IDS, IDS + 1),
    "one_hot": (lambda i: F.one_hot(i, 4), IDS, IDS + 1),
    "cross_entropy": (lambda i: F.cross_entropy(ROWS[:2], i[:2]), torch.tensor([1, -100]), IDS + 3),
    "repeat_interleave": (lambda i: torch.arange(3).repeat_interleave(i), IDS, IDS - 1),
    "multinomial": (lambda p: torch.multinomial(p, 1), ROWS + 1, ROWS * torch.nan),
    "bernoulli": (lambda p: torch.bernoulli(p), ROWS / 12, ROWS),
    "assert": (lambda c: torch._assert_async(c), torch.ones(1), torch.zeros(1)),
}


@pytest.mark.parametrize("name", CASES)
def test_raised_before_the_operator_runs(name: str) -> None:
    run, usual, unusual = CASES[name]
    torch.manual_seed(0)
    expected = run(usual)
    with RaisesOnHost():
        torch.manual_seed(0)
        torch.testing.assert_close(run(usual), expected)
    with Ran() as all_of_it:
        run(usual)
    with Ran() as ran, RaisesOnHost(), pytest.raises((IndexError, RuntimeError)):
        run(unusual)
    assert all_of_it.names[-1] not in ran.names


def test_groups_that_end_past_the_rows() -> None:
    with RaisesOnHost(), pytest.raises(IndexError, match="groups end"):
        torch._grouped_mm(torch.ones(16, 16), torch.ones(2, 16, 16), torch.tensor([8, 32], dtype=torch.int32))


def test_operators_of_other_libraries_get_no_unusual_integers() -> None:
    library = torch.library.Library("hexa_test_other", "FRAGMENT")
    library.define("picked(Tensor x, Tensor ids) -> Tensor")
    library.impl("picked", lambda x, ids: x[ids], "CPU")
    with RaisesOnHost(), pytest.raises(IndexError, match=r"hexa_test_other\.picked"):
        torch.ops.hexa_test_other.picked(ROWS, IDS)


def test_only_on_a_gpu() -> None:
    with no_device_asserts(nn.Linear(2, 2)) as mode:
        assert mode is None
