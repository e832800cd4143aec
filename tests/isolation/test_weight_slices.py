"""Leaves in place of parts of stacked weights give the same gradients, with work that grows with the experts alone."""

import pytest
import torch
from torch import nn
from torch.autograd.graph import Node
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from hexa_fx.isolation.module_state import ModuleState
from hexa_fx.isolation.outcome import Difference, Outcome, difference, observe
from hexa_fx.isolation.trial_modes import WeightSlices

E, D, WIDTH = 5, 4, 6


class Stacked(nn.Module):
    """One stacked weight, of which `take` reads."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.weight = nn.Parameter(torch.randn(E, WIDTH, D, dtype=torch.float64, generator=generator))
        self.take = by_number

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.take(self.weight, x)


def by_number(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return sum(F.linear(x, w[e]).cos() for e in range(E))


def by_tensor(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return sum(F.linear(x, w[e]).cos() for e in torch.tensor([3, 1, 3]))


def by_select_and_narrow(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return F.linear(x, w.select(0, 1)) * F.linear(x, w.narrow(0, 2, 1)[0]) + F.linear(x, torch.select(w, 0, -1))


def by_slices(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return F.linear(x, w[1:3].flatten(0, 1))[..., :WIDTH] + x[:, :2] @ w[4, :, ::2].T + F.linear(x, w[0, ...])


def part_and_whole(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return F.linear(x, w[2]) * w.sum() + F.linear(x, w.transpose(1, 2)[3].T)


def partly_without_gradient(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        off = F.linear(x, w[0])
    return off * F.linear(x, w[1]) + F.linear(x, w.detach()[2]) + F.linear(x, w[3].detach())


def no_part_at_all(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return x.sum() + 0 * w.detach()[0, 0, 0]


def copies(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return F.linear(x, w[torch.tensor([0, 2, 2])].sum(0)) + F.linear(x, w[w > 0].sum() * w[[1]][0])


def empty(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return F.linear(x, w[1]) + w[2:2].sum()


def mapped(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return torch.func.vmap(lambda row: F.linear(x, w[1]) * row.sum())(x.T)


def checkpointed(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return torch.utils.checkpoint.checkpoint(by_number, w, x, use_reentrant=False)


WAYS = (
    by_number,
    by_tensor,
    by_select_and_narrow,
    by_slices,
    part_and_whole,
    partly_without_gradient,
    no_part_at_all,
    copies,
    empty,
    mapped,
    checkpointed,
)


def gradients(model: Stacked, slices: WeightSlices | None, tokens: int = 3) -> dict[str, torch.Tensor | None]:
    x = torch.randn(tokens, D, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    outcome = observe(model, ModuleState(model), ((x,), {}), slices=slices)
    assert not outcome.backward_error
    return dict(outcome.gradients)


@pytest.mark.parametrize("tokens", [3, 0])
@pytest.mark.parametrize("take", WAYS, ids=lambda take: take.__name__)
def test_gradients_as_autograd_has_them(take, tokens):
    model = Stacked()
    model.take = take
    expected = gradients(model, None, tokens)
    with WeightSlices(model.parameters()) as slices:
        found = gradients(model, slices, tokens)
    assert {name: g is None for name, g in found.items()} == {name: g is None for name, g in expected.items()}
    for name, gradient in expected.items():
        if gradient is not None:
            torch.testing.assert_close(found[name], gradient, rtol=1e-12, atol=1e-12)


def test_weights_that_are_not_contiguous():
    model = Stacked()
    storage = torch.randn(2 * E * WIDTH * D + 7, dtype=torch.float64)
    model.weight = nn.Parameter(storage.as_strided((E, WIDTH, D), (2 * WIDTH * D, 1, WIDTH), 5))
    expected = gradients(model, None)
    with WeightSlices(model.parameters()) as slices:
        found = gradients(model, slices)
    assert len(slices.parts) == E
    torch.testing.assert_close(found["weight"], expected["weight"])


def test_no_tensor_of_the_whole_weight_is_made_for_an_expert():
    model = Stacked()
    with WeightSlices(model.parameters()) as slices:
        y = model(torch.randn(3, D, dtype=torch.float64))
    assert len(slices.parts) == E
    assert not {"SelectBackward0", "SliceBackward0"} & names_behind(y.grad_fn)
    assert "SelectBackward0" in names_behind(model(torch.randn(3, D, dtype=torch.float64)).grad_fn)


def names_behind(node: Node | None) -> set[str]:
    seen, left = set(), [node]
    while left:
        here = left.pop()
        if here is not None:
            seen.add(type(here).__name__)
            left.extend(parent for parent, _ in here.next_functions)
    return seen


def test_left_alone_where_it_could_be_seen():
    hooked, frozen = Stacked(), Stacked()
    hooked.weight.register_hook(lambda gradient: 2 * gradient)
    frozen.weight.requires_grad_(False)
    for model in (hooked, frozen):
        with WeightSlices(model.parameters()) as slices:
            found = gradients(model, slices)
        assert slices.parts == []
        assert found.keys() == gradients(model, None).keys()
    with WeightSlices(Stacked().parameters()) as slices:
        gradients(hooked, slices)
    assert slices.parts == [], "of other weights"


def test_writing_to_a_part_is_the_error_it_was():
    def write(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, w[1].mul_(2))

    model = Stacked()
    model.take = write
    with pytest.raises(RuntimeError, match="in-place"):
        gradients(model, None)
    with WeightSlices(model.parameters()) as slices, pytest.raises(RuntimeError, match="in-place"):
        gradients(model, slices)


class Counting(TorchFunctionMode):
    """Counts what goes through it."""

    calls = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.calls += 1
        return func(*args, **(kwargs or {}))


def test_what_is_only_read_of_parameters_does_not_go_through_modes():
    counts = []
    for unused in (0, 50):
        model = nn.Sequential(nn.Linear(D, D))
        model.others = nn.ParameterList(torch.zeros(2) for _ in range(unused))
        with Counting() as mode:
            observe(model[0], ModuleState(model), ((torch.ones(1, D),), {}))
        counts.append(mode.calls)
    assert counts[0] == counts[1]


@pytest.mark.parametrize("size", [3, 300_000])
def test_outcomes_are_compared_in_pieces_with_their_oddities(size: int):
    """Tensors that are larger than a piece, with a difference in the last one, and NaN and infinity in both or in one."""
    one = torch.randn(size, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    one[1] = torch.nan

    def found(**changed: float) -> Difference:
        two = one.clone()
        for place, value in changed.items():
            two[int(place[2:])] = value
        return difference(Outcome({"output": one}, {}, {}), Outcome({"output": two}, {}, {}))

    last = f"at{size - 1}"
    assert found() == Difference()
    assert found(**{last: float(one[-1]) + 1}).forward == pytest.approx(1 / float(one.nan_to_num(0.0).abs().max()))
    assert found(**{last: torch.nan}).reason == "output: NaN or inf in other places"
    assert found(**{last: -torch.inf}).reason == "output: NaN or inf in other places"
    assert found(at1=0.0).reason == "output: NaN or inf in other places"
    assert found(at1=torch.inf).reason == "output: NaN or inf in other places"
