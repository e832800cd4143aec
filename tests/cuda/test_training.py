"""Forward and backward that are played again launch what the general path launches, whichever family's kernels they are."""

import gc
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from hexa_fx.cuda import fallback as cuda_fallback
from hexa_fx.cuda import gemm
from hexa_fx.cuda import layer as cuda_layer
from hexa_fx.cuda import plan as cuda_plan
from tests.cuda.cards import Cards, arguments, copied, seen

TOKENS = 200
NEEDS = (True, True, True, True, True, True, True, True)

CASES: dict[str, dict[str, Any]] = {
    "concat": {},
    "split bias": {"glu": "split", "bias": True},
    "none bias": {"glu": "none", "bias": True},
    "interleaved": {"glu": "interleaved"},
    "kn": {"layouts": "kn kn", "glu": "split"},
    "no gates": {"gates": None},
    "float gates": {"gates": torch.float32},
    "few rows": {"tokens": 9},
    "many slots": {"tokens": 3000},
    "float32": {"dtype": torch.float32, "gates": torch.float32, "bias": True},
}


def forward(cards: Cards, args: Sequence[Any], general: bool = False) -> Any:
    if general:
        return cards.run_general_forward(*args)
    return cuda_layer.LAYERS["moe_ffn_forward"](cards.run_general_forward, *args)


def backward(cards: Cards, dy: Tensor, saved: Sequence[Any], args: Sequence[Any], general: bool = False) -> Any:
    _, h, v, inv, offs = saved
    needs = [need and t is not None for need, t in zip(NEEDS, (args[0], *args[2:9]), strict=True)]
    every = (dy, args[0], [h], v, inv, offs, *args[2:9], args[1].shape[1], *args[9:], needs)
    if general:
        return cards.run_general_backward(*every)
    return cuda_layer.LAYERS["moe_ffn_backward"](cards.run_general_backward, *every)


def described(results: Sequence[Tensor]) -> list[Any]:
    return [(t.shape, t.dtype, t.stride()) for t in results]


@pytest.mark.usefixtures("apart")
@pytest.mark.parametrize("family", ["hopper", "cards"])
@pytest.mark.usefixtures("apart")
@pytest.mark.parametrize("case", CASES)
def test_what_is_played_again_is_what_the_general_path_launches(
    case: str, family: str, request: pytest.FixtureRequest
) -> None:
    cards: Cards = request.getfixturevalue(family)
    args = arguments(**({"tokens": TOKENS} | CASES[case]))
    if args[2] is not None:
        args[2].fill_(0.5)
    saved = forward(cards, args, general=True)
    dy = torch.randn_like(saved[0])
    there, *_ = seen(cards, args[:9], lambda: forward(cards, args, general=True))
    back, gradients, _ = seen(
        cards, (dy, *args[:9], *saved[1:]), lambda: backward(cards, dy, saved, args, general=True)
    )
    assert not cuda_fallback.fallbacks
    if family == "hopper" and case not in ("few rows", "float32"):
        assert {launch[0].family for launch in there + back} >= {"gather_gemm_sm90"}
    for _ in range(2):
        backward(cards, dy, forward(cards, args), args)
    cards.general = 0
    for again in (args, copied(args), copied(args)):
        got, kept, _ = seen(cards, again[:9], lambda again=again: forward(cards, again))
        assert got == there
        assert described(kept) == described(saved)
        dy = dy.clone()
        got, results, _ = seen(
            cards,
            (dy, *again[:9], *kept[1:]),
            lambda again=again, kept=kept, dy=dy: backward(cards, dy, kept, again),
        )
        assert got == back
        assert described(results) == described(gradients)
        if case in ("concat", "interleaved", "float gates", "many slots") and family == "hopper":
            assert torch.equal(results[1], gradients[1])  # sums of numbers that stand-ins write
    assert cards.general == 0


@pytest.mark.usefixtures("apart")
def test_gradients_are_added_to_buffers(hopper: Cards) -> None:
    """What is not wanted on the way, the routing weights' gradient, is not made again."""
    args = arguments(tokens=TOKENS, bias=True)
    saved = forward(hopper, args, general=True)
    dy, (h, v, inv, offs) = torch.randn_like(saved[0]), saved[1:]
    needs = [False, False, *(t is not None for t in args[3:9])]
    buffers = [None, *(None if t is None else torch.zeros(t.shape) for t in args[3:9])]

    def step(run: Callable[..., Any]) -> Any:
        every = (dy, args[0], [h], v, inv, offs, *args[2:9], 2, *args[9:], needs, *buffers)
        return seen(hopper, (dy, args[0], h, v, inv, offs, *args[2:9], *buffers), lambda: run(*every))[:2]

    want = step(hopper.run_general_backward)
    hopper.general = 0
    for _ in range(4):
        got = step(lambda *every: cuda_layer.LAYERS["moe_ffn_backward"](hopper.run_general_backward, *every))
        assert got == want
    assert hopper.general == 1
    places = [name for launch in got[0] for name in (*launch[2], *(m[0] for m in launch[3]))]
    written = {name[0] for name in places if isinstance(name, tuple)}
    assert {f"operand {7 + 7 + i}" for i in (0, 1, 4, 5)} <= written  # w1, b1, w2 and b2, behind the thirteen and None


def test_the_list_that_held_h_is_empty_afterwards(hopper: Cards) -> None:
    args = arguments(tokens=TOKENS)
    for _ in range(3):
        y, h, *rest = forward(hopper, args)
        kept = [h]
        needs = [True] * 3 + [False] * 3 + [True, False]
        every = (torch.randn_like(y), args[0], kept, *rest, *args[2:9], 2, *args[9:], needs)
        cuda_layer.LAYERS["moe_ffn_backward"](hopper.run_general_backward, *every)
        assert not kept


def test_the_h_of_a_large_layer_is_freed_while_backward_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_layer, "MOST_BYTES", 0)
    given = arguments(tokens=TOKENS)
    freed: list[bool] = []

    def general(*args: Any) -> list[Tensor]:
        seen = weakref.ref(args[2][0])
        args[2].pop()
        freed.append(seen() is None)
        return []

    v = inv = offs = torch.zeros(1, dtype=torch.int32)
    needs = [True] * 8
    cuda_layer.LAYERS["moe_ffn_backward"](
        general, given[0], given[0], [torch.randn(4, 4)], v, inv, offs, *given[2:9], 2, *given[9:], needs
    )
    assert freed == [True]


def test_other_gradients_are_another_kind_of_call(hopper: Cards) -> None:
    args = arguments(tokens=TOKENS)
    saved = forward(hopper, args)
    dy = torch.randn_like(saved[0])
    for _ in range(3):
        backward(hopper, dy, saved, args)
    hopper.general = 0
    h, v, inv, offs = saved[1:]
    every = (dy, args[0], [h], v, inv, offs, *args[2:9], 2, *args[9:], [True] + [False] * 7)
    found = cuda_layer.LAYERS["moe_ffn_backward"](hopper.run_general_backward, *every)
    assert (hopper.general, len(found)) == (1, 1)


def test_without_knowing_where_maps_hold_addresses_torchs_operators_run(
    hopper: Cards, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda_plan, "address_offset", lambda: None)
    x, w, offs = torch.randn(200, 16).bfloat16(), torch.randn(2, 16, 16).bfloat16(), torch.tensor([0, 80, 200]).int()
    got = gemm.esmm(x, w, None, None, offs, 1, "nk")
    torch.testing.assert_close(got, torch.ops.hexa.esmm(x, w, None, None, offs, 1, "nk"))
    assert not hopper.launches
    assert "do not hold the address" in cuda_fallback.fallbacks["esmm"]


@pytest.mark.parametrize("glu", ["none", "split"])
def test_biases_in_a_slot_do_not_keep_a_layer_from_hoppers_kernels(hopper: Cards, glu: str) -> None:
    """Channel by channel in memory, as the shared cache holds them. They are copied for the kernel, in replays too."""
    args = arguments(glu=glu, bias=True, tokens=TOKENS)
    for i in (4, 6):
        if args[i] is not None:
            args[i] = args[i].t().contiguous().t()
    for _ in range(3):
        hopper.launches.clear()
        forward(hopper, copied(args))
    assert hopper.general == 1
    products = [launch for launch in hopper.launches if launch.spec.op.startswith("esmm")]
    assert [launch.spec.op for launch in products] == ["esmm_act", "esmm"]
    assert {launch.spec.family for launch in products} == {"gather_gemm_sm90"}
    assert all(launch.spec.bias for launch in products)


@pytest.mark.parametrize("case", ["concat", "none bias", "float gates", "interleaved"])
def test_recordings_hold_no_tensors(case: str, hopper: Cards) -> None:
    """They live as long as the process; a layer's gradients alone may be gigabytes."""
    args = arguments(**({"tokens": TOKENS} | CASES[case]))
    alive = [weakref.ref(t) for t in args if isinstance(t, Tensor)]
    for _ in range(2):
        saved = forward(hopper, args)
        dy = torch.randn_like(saved[0])
        gradients = backward(hopper, dy, saved, args)
        alive += [weakref.ref(t) for t in (*saved, dy, *gradients) if t is not None]
    assert any(cuda_layer._known.values())
    del args, saved, dy, gradients
    gc.collect()
    assert not [tuple(t.shape) for ref in alive if (t := ref()) is not None]
