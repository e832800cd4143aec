"""Calls of a layer that are played again: what they launch is what the general path launches, and when they are not."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from hexa_fx.cuda import choosing as cuda_choosing
from hexa_fx.cuda import fallback as cuda_fallback
from hexa_fx.cuda import layer as cuda_layer
from hexa_fx.errors import InputError
from hexa_fx.ops import library
from tests.cuda.cards import Cards, D, E, H, Kept, T, arguments, copied, seen


def launched(cards: Cards, args: Sequence[Any], run: Callable[[], Tensor]) -> tuple[list[Any], list[tuple[int, int]]]:
    """What a call launches, and start and size of the workspace's parts: v, inv, offs, a, y."""
    found, _, (v, inv, offs, a, rows, end) = seen(cards, args[:9], run)
    assert end == offs + 4 * E
    n, size = args[1].numel(), args[0].element_size()
    sizes = (4 * n, 4 * n, 4 * (E + 1), n * H * size, n * D * size)
    return found, list(zip((v, inv, offs, a, rows), sizes, strict=True))


CASES: dict[str, dict[str, Any]] = {
    **{f"{glu}{' bias' * bias}": {"glu": glu, "bias": bias} for glu in ("concat", "split") for bias in (False, True)},
    "none": {"glu": "none", "bias": True},
    "interleaved": {"glu": "interleaved"},
    **{layouts: {"layouts": layouts, "glu": "split"} for layouts in ("nk kn", "kn nk", "kn kn")},
    "int32": {"ids": torch.int32},
    "no gates": {"gates": None},
    "float gates": {"gates": torch.float32},
    "all experts": {"top_k": E},
    "one token": {"tokens": 1},
    "float32": {"dtype": torch.float32, "bias": True},
    "float64": {"dtype": torch.float64, "gates": torch.float64},
}


@pytest.mark.usefixtures("apart")
@pytest.mark.parametrize("case", CASES)
def test_what_is_played_again_is_what_the_general_path_launches(cards: Cards, case: str) -> None:
    args = arguments(**CASES[case])
    want, _ = launched(cards, args, lambda: cards.run_general(*args))
    assert [spec.op for spec, *_ in want] == ["reindex_place", "esmm", "esmm", "combine"]
    for _ in range(2):
        cards.run(args)
    ran = cards.general
    for again in (args, copied(args), copied(args)):
        got, parts = launched(cards, again, lambda again=again: cards.run(again))
        assert got == want
        ends = sorted((start, start + size) for start, size in parts)
        assert all(end <= start for (_, end), (start, _) in pairwise(ends))
        assert all(start % 16 == 0 for start, _ in ends)
    assert cards.general == ran
    assert not cuda_fallback.fallbacks


@pytest.mark.usefixtures("apart")
def test_the_workspace_is_as_large_as_what_lies_in_it_and_is_the_only_allocation_beside_the_result(
    cards: Cards,
) -> None:
    args = arguments()
    for _ in range(2):
        cards.run(args)
    with Kept() as kept:
        y = cards.run(args)
    assert len(kept.tensors) == 2
    (workspace,) = (t for t in kept.tensors if t is not y)
    _, parts = launched(cards, args, lambda: cards.run(args))
    first = min(start for start, _ in parts)
    assert max(start + size for start, size in parts) - first <= workspace.numel() * workspace.element_size()
    assert (y.shape, y.dtype, y.is_contiguous()) == ((T, D), torch.bfloat16, True)


def misaligned(t: Tensor) -> Tensor:
    flat = torch.empty(t.numel() + 1, dtype=t.dtype)[1:]
    return flat.view(t.shape).copy_(t)


def spread(t: Tensor) -> Tensor:
    """The same rows, farther apart."""
    return torch.cat((t, t), dim=-1)[..., : t.shape[-1]]


CHANGES: dict[str, Callable[[list[Any]], None]] = {
    "tokens": lambda args: args.__setitem__(slice(0, 3), arguments(tokens=T + 1)[:3]),
    "experts per token": lambda args: args.__setitem__(slice(1, 3), arguments(top_k=1)[1:3]),
    "ids": lambda args: args.__setitem__(1, args[1].int()),
    "gates": lambda args: args.__setitem__(2, args[2].float()),
    "no gates": lambda args: args.__setitem__(2, None),
    "row stride": lambda args: args.__setitem__(0, spread(args[0])),
    "weight stride": lambda args: args.__setitem__(3, spread(args[3])),
    "transposed weight": lambda args: args.__setitem__(7, args[7].transpose(1, 2).contiguous().transpose(1, 2)),
    "alignment of x": lambda args: args.__setitem__(0, misaligned(args[0])),
    "alignment of w2": lambda args: args.__setitem__(7, misaligned(args[7])),
    "bias": lambda args: args.__setitem__(8, torch.zeros(E, D, dtype=torch.bfloat16)),
    "dtype": lambda args: args.__setitem__(slice(0, 9), arguments(dtype=torch.float16)[:9]),
    "activation": lambda args: args.__setitem__(9, "gelu"),
    "parameters": lambda args: args.__setitem__(slice(9, 12), ["swiglu_oai", "interleaved", [1.5, 6.0]]),
}


@pytest.mark.usefixtures("apart")
@pytest.mark.parametrize("change", CHANGES)
def test_a_call_of_another_kind_is_written_down_for_itself(cards: Cards, change: str) -> None:
    args = arguments()
    for _ in range(3):
        cards.run(args)
    ran = cards.general
    CHANGES[change](args)
    want, _ = launched(cards, args, lambda: cards.run_general(*args))
    for _ in range(3):
        cards.run(args)
    assert cards.general == ran + 2
    assert launched(cards, args, lambda: cards.run(args))[0] == want


def test_other_products_of_float32_are_other_kernels(cards: Cards) -> None:
    args, matmul = arguments(dtype=torch.float32), torch.backends.cuda.matmul
    before = matmul.fp32_precision
    try:
        for matmul.fp32_precision in ("ieee", "tf32"):
            for _ in range(3):
                cards.run(args)
    finally:
        matmul.fp32_precision = before
    assert cards.general == 2
    assert len({launch.spec for launch in cards.launches if launch.spec.op == "esmm"}) == 4


def column(t: Tensor) -> Tensor:
    """The same numbers, a column after the other."""
    return t.t().contiguous().t()


COPIED: dict[str, Callable[[list[Any]], None]] = {
    "ids": lambda args: args.__setitem__(1, column(args[1])),
    "gates": lambda args: args.__setitem__(2, column(args[2])),
    "rows": lambda args: args.__setitem__(0, column(args[0])),
    "a bias is made": lambda args: args.__setitem__(4, torch.ones(E, H, dtype=torch.bfloat16)),
}


@pytest.mark.parametrize("what", COPIED)
def test_what_is_made_of_operands_is_made_again(cards: Cards, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    args = arguments(glu="split")
    COPIED[what](args)
    for _ in range(2):
        cards.run(args)
    with Kept() as kept:
        cards.run(copied(args))
    assert cards.general == 1
    first, last = cards.launches[4:8], cards.launches[8:]
    assert [launch.spec for launch in first] == [launch.spec for launch in last]
    made = {t.data_ptr(): t for t in kept.tensors if isinstance(t, Tensor)}
    used = [t for launch in last for at in launch.values if (t := made.get(at)) is not None]
    want = {"ids": args[1], "gates": args[2], "rows": args[0], "a bias is made": torch.zeros(E, H).bfloat16()}[what]
    assert any(t.shape == want.shape and torch.equal(t, want) for t in used)


REFUSED: dict[str, Callable[[list[Any]], None]] = {
    "no tokens": lambda args: args.__setitem__(slice(0, 3), arguments(tokens=0)[:3]),
    "it is large": lambda args: args.__setitem__(slice(0, 3), arguments(tokens=60)[:3]),
    "it would hold much": lambda args: args.__setitem__(slice(0, 3), arguments(tokens=45)[:3]),
}


@pytest.mark.parametrize("why", REFUSED)
def test_what_is_not_played_again(cards: Cards, monkeypatch: pytest.MonkeyPatch, why: str) -> None:
    monkeypatch.setattr(cuda_layer, "MOST_BYTES", 8000)
    monkeypatch.setattr(cuda_layer, "MOST_WORKSPACE", 6000)
    args = arguments(glu="split")
    REFUSED[why](args)
    for calls in range(1, 5):
        assert cards.run(args).shape == args[0].shape
        assert cards.general == calls
    assert not cuda_fallback.fallbacks


@pytest.mark.parametrize("variable", ["HEXA_FX_CHECKED", "HEXA_FX_AUTOTUNE"])
def test_settings_that_do_more_than_launch_are_obeyed(
    cards: Cards, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    monkeypatch.setenv(variable, "1")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: variable == "HEXA_FX_AUTOTUNE")
    cuda_choosing.forget_choices()
    args = arguments()
    for _ in range(4):
        cards.run(args)
    assert cards.general == 4
    if variable == "HEXA_FX_CHECKED":
        args[1][0, 0] = E + 1
        with pytest.raises(InputError, match="expert ids run from"):
            cards.run(args)


def test_a_wrong_call_is_refused_with_the_same_sentence_before_and_after(cards: Cards) -> None:
    args = arguments()
    for _ in range(3):
        for wrong, sentence in (
            ({7: args[7][:, :, :-8]}, "w2 is torch.bfloat16"),
            ({3: args[3].float()}, "x is torch.bfloat16 but w1 is torch.float32"),
            ({2: args[2][:1]}, "top_k_weights is"),
            ({1: args[1].float()}, "expected integer"),
            ({7: args[7].to("meta")}, "w2 is on meta"),
            ({9: "unheard"}, "unheard"),
        ):
            with pytest.raises(InputError, match=sentence):
                cards.run([wrong.get(i, a) for i, a in enumerate(args)])
        ran = cards.general
        cards.run(args)
    assert cards.general == ran
    with pytest.raises(InputError, match="w1"):
        cards.run([a.to_sparse() if i == 3 else a for i, a in enumerate([*args[:3], args[3][0], *args[4:]])])


def test_forgotten_plans_are_made_anew(cards: Cards) -> None:
    args = arguments()
    for forget in (cuda_choosing.forget_choices, lambda: library.__setattr__("kernel_generation", -1)):
        for _ in range(4):
            cards.run(args)
        assert cards.general == 1
        cards.general = 0
        generation = library.kernel_generation
        forget()
        cards.run(args)
        assert cards.general == 1
        library.kernel_generation = generation
        cuda_choosing.forget_choices()
        cards.general = 0


def test_kinds_of_call_are_not_kept_without_end(cards: Cards, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_layer, "_MOST", 3)
    for tokens in range(1, 9):
        for _ in range(2):
            cards.run(arguments(tokens=tokens))
    assert 0 < len(cuda_layer._known) <= 3


def test_nothing_is_kept_of_calls_that_only_collect_kernels(cards: Cards) -> None:
    args = arguments()
    with cuda_choosing.collect() as specs:
        for _ in range(3):
            cards.run(args)
    assert (cards.general, len(specs), cards.launches) == (3, 12, [])
    for _ in range(3):
        cards.run(args)
    assert (cards.general, len(cards.launches)) == (4, 12)


def test_on_another_device_than_the_current_one_the_plan_runs_there(
    cards: Cards, monkeypatch: pytest.MonkeyPatch
) -> None:
    args = arguments()
    for _ in range(3):
        cards.run(args)
    switched = []
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 1)
    monkeypatch.setattr(torch.cuda, "device", lambda index: nullcontext(switched.append(index)))
    cards.run(args)
    assert (cards.general, len(switched)) == (1, 1)


def test_every_call_launches_on_the_stream_that_is_current(cards: Cards) -> None:
    args = arguments()
    for _ in range(3):
        cards.run(args)
    for stream in (0x77, 0x55, 0x77):
        cards.launches.clear()
        cards.stream = stream
        cards.run(args)
        assert [int.from_bytes(one.config[32:40], "little") for one in cards.launches] == [stream] * 4


def test_a_call_in_the_midst_of_another_has_arguments_of_its_own(cards: Cards) -> None:
    """As another thread's would be."""
    args = arguments()
    other = copied(args)
    for _ in range(3):
        cards.run(args)
    cards.launches.clear()
    cards.during.append(lambda: cards.run(other))
    cards.run(args)
    first = [launch.values[0] for launch in cards.launches]
    assert [first[0], first[4]] == [other[1].data_ptr(), args[1].data_ptr()]
    assert cards.launches[1].values[1] == other[3].data_ptr()
    assert cards.launches[5].values[1] == args[3].data_ptr()
    assert cards.general == 1


def test_a_refused_launch_goes_back_to_the_general_path_which_says_so(
    cards: Cards, caplog: pytest.LogCaptureFixture
) -> None:
    args = arguments(dtype=torch.float32, gates=torch.float32)
    for _ in range(3):
        cards.run(args)
    cards.fail.add("cuLaunchKernelEx")
    got = cards.run(args)
    assert cards.general == 2
    assert "out of luck" in cuda_fallback.fallbacks["reindex"]
    said = [r.message.partition(": ")[2] for r in caplog.records if "falls back" in r.message]
    assert len(said) == len(set(said)) > 1
    want = torch.ops.hexa.moe_ffn.default(*args)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    cards.fail.clear()
    cards.run(args)
    assert cards.general == 3  # for good


def test_memory_is_filled_where_torch_fills_it(cards: Cards) -> None:
    args = arguments()
    for _ in range(2):
        cards.run(args)
    torch.use_deterministic_algorithms(True)
    try:
        assert cards.run(args).isnan().all()  # these kernels write nothing
    finally:
        torch.use_deterministic_algorithms(False)
    assert cards.general == 1
