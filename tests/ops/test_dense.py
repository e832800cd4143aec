"""Every expert on every token: the same numbers as by expert order, also where some are not finite."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hexa_fx.errors import InputError
from hexa_fx.ir import FfnSpec
from hexa_fx.ops import dense, direct_rows
from hexa_fx.ops.activations import ACTIVATIONS
from tests.ops.reference import GATED, Layer, Operators, assert_is_loop, layer


@pytest.fixture
def calls(monkeypatch) -> list[bool]:
    """Makes every layer dense, and notes of every forward and backward whether it gave a result."""
    noted: list[bool] = []
    monkeypatch.setattr(dense, "SPARE_WORK", 1 << 62)
    for name in ("forward", "backward"):
        plain = getattr(dense, name)

        def watched(*args, plain=plain):
            found = plain(*args)
            noted.append(found is not None)
            return found

        monkeypatch.setattr(dense, name, watched)
    return noted


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("layout1", "layout2"), [("nk", "nk"), ("kn", "nk"), ("nk", "kn"), ("kn", "kn")])
@pytest.mark.parametrize("glu", ["none", "concat", "interleaved", "split"])
def test_layouts(calls, glu, layout1, layout2, bias):
    assert_is_loop(layer(FfnSpec("silu", glu, layout1, layout2), bias=bias))
    assert calls == [True, True]


@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize("glu", ["none", "concat"])
def test_activations(calls, name, glu):
    if ACTIVATIONS[name].pair and glu == "none":
        return
    assert_is_loop(layer(FfnSpec(name, glu), bias=True))
    assert all(calls)


@pytest.mark.parametrize("weighted", [False, True])
def test_routings(calls, weighted):
    twice, nothing = torch.full((5, 2), 3), torch.full((5, 2), 4)
    for index in (twice, nothing, torch.tensor([[0, 4]])):
        assert_is_loop(layer(tokens=len(index), index=index, weighted=weighted, bias=True))
    assert_is_loop(layer(top_k=4, weighted=weighted))
    assert_is_loop(layer(experts=1, top_k=1, weighted=weighted))
    assert all(calls)


def test_no_tokens_and_ids_out_of_range(calls):
    assert layer(tokens=0).run().shape == (0, 8)
    assert calls == []
    for other in (-1, 5):
        assert_is_loop(layer(tokens=1, index=torch.tensor([[0, other]])))
    assert not any(calls)


def poisoned(place: str, value: float) -> tuple[Layer, Tensor]:
    """A layer of tokens that choose two of experts 0, 1 and 2, and a gradient of its value; one holds ``value``."""
    index = torch.randint(0, 3, (9, 2), generator=torch.Generator().manual_seed(1))
    index[4] = torch.tensor([1, 2])
    one, gradient = layer(FfnSpec("relu", "none"), tokens=9, index=index, bias=True), torch.ones(9, 8).double()
    spots = {"x": (4, 1), "w1": (3, 0, 0), "w2": (3, 0, 0), "top_k_weights": (4, 1)}
    target = dict(zip(("x", "top_k_weights", "w1", "b1", "w3", "b3", "w2"), one.operands)).get(place, gradient)
    with torch.no_grad():
        target[spots.get(place, (4, 0))] = value
    return one, gradient


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf"), 1e200])
@pytest.mark.parametrize("place", ["x", "w1", "w2", "top_k_weights", "gradient"])
def test_what_is_not_finite_stays_with_its_tokens_and_experts(calls, place, value, monkeypatch):
    """Expert 3 is chosen by nobody, token 4 chooses experts 1 and 2."""
    one, gradient = poisoned(place, value)
    y = one.run()
    found = (y, *torch.autograd.grad(y, one.leaves(), gradient))
    monkeypatch.setattr(dense, "SPARE_WORK", -(1 << 62))
    y = one.run()
    for mine, exact in zip(found, (y, *torch.autograd.grad(y, one.leaves(), gradient)), strict=True):
        torch.testing.assert_close(mine, exact, equal_nan=True)
    assert value == 1e200 or not all(calls)


def test_a_second_derivative_is_refused_in_words(calls):
    one = layer()
    (g,) = torch.autograd.grad(one.run().sum(), one.operands[0], create_graph=True)
    with pytest.raises(InputError, match="no second derivative"):
        torch.autograd.grad(g.sum(), one.operands[2])


def test_backward_under_a_mode_is_by_expert_order(calls):
    one = layer(bias=True)
    expected = one.grads(one.run())
    value = one.run()
    with Operators() as operators:
        found = one.grads(value)
    assert "moe_ffn_backward" in operators.seen
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b)


def test_which_layers_are_dense():
    def takes(tokens: int, experts: int, size: int, dtype: torch.dtype = torch.float32) -> bool:
        x, index = torch.empty(tokens, size, dtype=dtype), torch.zeros(tokens, 2).long()
        w1, w2 = torch.empty(experts, 2 * size, size, dtype=dtype), torch.empty(experts, size, size, dtype=dtype)
        return dense.takes(x, index, w1, None, w2)

    assert takes(256, 8, 16)
    assert takes(4, 8, 64)
    assert not takes(256, 64, 64)
    assert not takes(1, 256, 128), "few experts of many: reading all weights is what takes time"
    assert not takes(256, 8, 16, torch.bfloat16)
    assert not takes(0, 8, 16)


def test_outputs_do_not_share_memory_with_what_is_kept(calls):
    one = layer(GATED)
    y = one.run()
    expected = one.grads(one.run())
    with torch.no_grad():
        y.fill_(float("nan"))
    for a, b in zip(one.grads(y), expected, strict=True):
        assert torch.equal(a, b)


def test_few_rows_of_wide_experts_are_not_picked() -> None:
    """One row of eight experts of real width would read all their weights."""
    x, offs = torch.randn(1, 192), torch.tensor([0, 1, 2, 2, 2, 2, 2, 2, 2], dtype=torch.int32)
    v = torch.arange(2, dtype=torch.int32)
    assert not direct_rows._picks(x, torch.randn(8, 768, 192), v, offs)
    assert direct_rows._picks(x[:, :32], torch.randn(8, 64, 32), v, offs)
