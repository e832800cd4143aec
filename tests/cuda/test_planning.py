"""Plans of calls: what is asked for on stand-ins is done on tensors, whatever lies between the launches."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from hexa_fx.codegen.spec import KernelSpec
from hexa_fx.cuda.calls import planned
from hexa_fx.cuda.choosing import collect, collection
from hexa_fx.cuda.kernel import kernel_of
from hexa_fx.cuda.plan import CallPlan
from hexa_fx.cuda.planning import CannotPlan, Operand, planning_of
from hexa_fx.cuda.product import chosen_tile
from hexa_fx.ops import projection
from tests.cuda.cards import AMPERE, Cards

ACTIVATE = KernelSpec("activate", "activate", 80, activation="silu").with_options(weights="f32", warps_per_row=1)


def launch(*pointers: Tensor) -> None:
    """Asks for a launch with these pointers; what it computes is no concern here."""
    eight = (*pointers, *[None] * (8 - len(pointers)))
    planning_of(pointers[0]).launch(kernel_of(ACTIVATE), (1, 1, 1), ((eight, bytes(32)),))


def plan(code: Callable[..., Any], *args: Any) -> CallPlan:
    return planned(code, args, AMPERE, chosen_tile)


def run(made: CallPlan, *tensors: Tensor) -> Any:
    made.load()
    return made(tensors, [t.data_ptr() for t in tensors], tensors[0].device)


def pointers(cards: Cards) -> list[tuple[int, ...]]:
    found = [one.values[:8] for one in cards.launches]
    cards.launches.clear()
    return found


def test_functions_of_torch_run_between_launches_on_what_lies_there(cards: Cards) -> None:
    def code(x: Tensor) -> list[Tensor]:
        double = x.reshape(-1).double()  # what a kernel would read
        sums = x.new_empty((3, 4))
        launch(double, sums)
        total = torch.add(sums, sums)
        launch(total, total[1], sums)
        return [sums.sum(0).view(2, 2), total, x]

    made = plan(code, torch.arange(6.0))
    other = torch.full((6,), 7.0)
    small, total, x = run(made, other)
    first, second = pointers(cards)
    assert x is other
    assert (small.shape, total.shape) == ((2, 2), (3, 4))
    assert second[:3] == (total.data_ptr(), total.data_ptr() + 16, first[1])
    assert first[0] not in (0, other.data_ptr())
    assert made.workspace == 0  # torch reads the sums, so they are a tensor


@pytest.mark.parametrize("layout", ["nk", "kn"])
def test_scaled_factors_of_adapters_are_steps_of_a_plan(cards: Cards, layout: str) -> None:
    u, c = torch.randn(5, 4), torch.randn(3, 6, 4)
    made = plan(lambda u, c: projection.left.on("cuda")(u, c, 0.5, layout), u, c)
    assert torch.equal(run(made, u, c), projection.left(u, c, 0.5, layout))


def test_a_function_that_nobody_needs_is_left_out_with_what_it_reads(cards: Cards) -> None:
    ran: list[int] = []

    def code(x: Tensor) -> Tensor:
        sums = x.new_empty((3, 4))
        planning_of(x).torch(lambda t: (ran.append(1), t + 1)[1], sums)
        launch(x, sums)
        return x.new_empty((2,))

    made = plan(code, torch.arange(6.0))
    ran.clear()
    assert run(made, torch.arange(6.0)).shape == (2,)
    assert not ran
    assert made.workspace == 256


def test_the_same_tensor_twice_is_two_operands(cards: Cards) -> None:
    def code(x: Tensor, y: Tensor) -> None:
        launch(x, y)

    one, other = torch.ones(4), torch.ones(4)
    made = plan(code, one, one)
    run(made, one, other)
    assert pointers(cards)[0][:2] == (one.data_ptr(), other.data_ptr())


def test_parts_of_operands_lie_where_they_do_in_the_tensor(cards: Cards) -> None:
    def code(x: Tensor) -> Tensor:
        gate, up = torch.ops.aten.chunk.default(x, 2, 1)
        launch(gate, up, x[-1:], x.transpose(0, 1))
        return up

    x = torch.arange(24.0)[8:].view(2, 8)
    up = run(plan(code, torch.zeros(2, 8)), x)
    assert pointers(cards)[0][:4] == tuple(x.data_ptr() + 4 * at for at in (0, 4, 8, 0))
    assert torch.equal(up, x[:, 4:])


def test_empty_results_have_no_address(cards: Cards) -> None:
    def code(x: Tensor) -> None:
        launch(x, x.new_empty((0, 3)))

    run(plan(code, torch.ones(2)), torch.ones(2))
    assert pointers(cards)[0][1] == 0


@pytest.mark.parametrize(
    "code", [lambda x: x.mul_(1), lambda x: torch.ops.aten.add_.Tensor(x, 1)], ids=["method", "operator"]
)
def test_a_function_that_writes_to_an_operand_is_refused(code: Callable[[Tensor], Tensor]) -> None:
    with pytest.raises(CannotPlan, match="it also runs"):
        plan(code, torch.ones(3))


def test_what_is_collected_has_the_shapes_and_runs_nothing(cards: Cards) -> None:
    def code(x: Tensor) -> tuple[Tensor, Tensor]:
        ids = x.new_empty((3,), dtype=torch.int32)
        launch(x, ids)
        planning_of(x).run(Tensor.add_, x, x)
        return ids, x.sum(0)

    x = torch.ones(3, 2)
    with collect() as specs:
        ids, sums = plan(code, x).collected([x], collection())  # type: ignore[arg-type]
    assert (specs, cards.launches) == ([ACTIVATE], [])
    assert torch.equal(ids, torch.zeros(3, dtype=torch.int32))
    assert sums.shape == (2,)
    assert (x == 1).all()


def test_stand_ins_know_shapes_strides_and_alignment_alone() -> None:
    found: list[Operand] = []

    def code(x: Any) -> None:
        found.append(x)

    plan(code, torch.ones(9)[1:].view(2, 4).t())
    (x,) = found
    assert (x.shape, x.stride(), x.data_ptr(), x.is_contiguous()) == ((4, 2), (1, 4), 4, False)
    assert (x.contiguous().is_contiguous(), x.transpose(0, 1).is_contiguous()) == (True, True)
    with pytest.raises(AttributeError):
        _ = x.no_such_method
