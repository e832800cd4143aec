"""Layers in FP8 that are played again: what they launch is what their operators launch, on the same operands."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from hexa_fx.cuda import choosing as cuda_choosing
from hexa_fx.cuda import fallback as cuda_fallback
from hexa_fx.cuda import fp8 as cuda_fp8
from hexa_fx.cuda import layer as cuda_layer
from hexa_fx.cuda.calls import kind_of
from hexa_fx.errors import InputError
from hexa_fx.ops import fp8_weights, moe_ffn_autograd, moe_ffn_fp8
from hexa_fx.ops.listed import Listed
from hexa_fx.ops.moe_ffn_fp8 import plain
from hexa_fx.ops.table_fp8 import QuantizedFfn, QuantizedFfnBackward
from tests.cuda.cards import Cards, Kept, copied, seen
from tests.ops import test_moe_ffn_fp8 as layers

INFERENCE, TRAINING, BACKWARD = NAMES = ("quantized_ffn", "quantized_ffn_forward", "quantized_ffn_backward")
GATED, PLAIN, INTERLEAVED, _, SPLIT, AGAIN = layers.SPECS
Given = dict[str, Any]
Run = Callable[..., Any]


class Programs:
    """The programs of a layer in FP8 by their operands, which calls on a CPU leave here, and then on a card.

    Attributes:
        operands: of the last call of each.
        general: how often the general path ran.
    """

    def __init__(self) -> None:
        self.operands: dict[str, tuple[Any, ...]] = {}
        self.general = 0

    def on_device(self, name: str, general: Run, *args: Any) -> Any:
        """In place of `moe_ffn_autograd.on_device`."""
        if name in NAMES:
            self.operands[name] = tuple(map(fresh, args))
        return general(*args)

    def by_operators(self, name: str, args: Sequence[Any]) -> Any:
        self.general += 1
        with torch._C._AutoDispatchBelowAutograd():
            return cuda_layer.PROGRAMS[name](*map(fresh, args))

    def run(self, name: str, args: Sequence[Any]) -> Any:
        """As on the card."""
        return cuda_layer.LAYERS[name](lambda *args: self.by_operators(name, args), *map(fresh, args))


@pytest.fixture
def programs(monkeypatch: pytest.MonkeyPatch) -> Iterator[Programs]:
    found = Programs()
    monkeypatch.setattr(moe_ffn_autograd, "on_device", found.on_device)
    yield found
    fp8_weights.clear()


def fresh(value: Any) -> Any:
    """A list of its own: that of h is emptied."""
    return [*value] if isinstance(value, list) else value


def flat(args: Sequence[Any]) -> list[Any]:
    """h without its list."""
    return [a[0] if isinstance(a, list) and a and isinstance(a[0], Tensor) else a for a in args]


def elsewhere(args: Sequence[Any]) -> list[Any]:
    """The same call on tensors that lie elsewhere."""
    return [copied(a) if isinstance(a, list) else copied([a])[0] for a in args]


def layer(spec: Any, bias: bool = True, dtype: torch.dtype = torch.bfloat16, **sizes: Any) -> Given:
    given: Given = layers.layer(spec, bias, dtype, **sizes)
    return given | {"top_k_index": given["top_k_index"].contiguous()}


def call(given: Given, spec: Any) -> None:
    """A step, and a call without gradients."""
    layers.results(layers.fp8, given, spec)
    with torch.no_grad():
        layers.fp8(given, spec)


def described(results: Any) -> list[Any]:
    return [(t.shape, t.dtype, t.stride()) for t in ([results] if isinstance(results, Tensor) else results)]


def changed(**more: Any) -> Callable[[Given], Given]:
    return lambda given: given | more


CASES: dict[str, tuple[Any, bool, Callable[[Given], Given]]] = {
    **{
        f"{spec.glu} {spec.layout1} {spec.layout2}{' bias' * bias}": (spec, bias, changed())
        for spec in layers.SPECS[:5]
        for bias in (False, True)
    },
    "h again": (AGAIN, True, changed()),
    "no gates": (GATED, True, changed(top_k_weights=None)),
    "one bias of two": (SPLIT, True, changed(b1=None)),
    "gates in 16 bits": (GATED, False, lambda given: given | {"top_k_weights": given["top_k_weights"].bfloat16()}),
    "ids of 32 bits": (GATED, False, lambda given: given | {"top_k_index": given["top_k_index"].int()}),
    "tokens in 32 bits": (GATED, True, lambda given: given | {"x": given["x"].float()}),
    "columns of tokens": (GATED, False, lambda given: given | {"x": given["x"].t().contiguous().t()}),
}


@pytest.mark.usefixtures("apart")
@pytest.mark.parametrize("case", CASES)
def test_what_is_played_again_is_what_the_general_path_launches(hopper: Cards, programs: Programs, case: str) -> None:
    spec, bias, change = CASES[case]
    call(change(layer(spec, bias)), spec)
    for name, args in programs.operands.items():
        want, results, _ = seen(hopper, flat(args), lambda name=name, args=args: programs.by_operators(name, args))
        for _ in range(2):
            programs.run(name, args)
        programs.general = 0
        for again in (args, elsewhere(args), elsewhere(args)):
            got, found, _ = seen(hopper, flat(again), lambda name=name, again=again: programs.run(name, again))
            assert got == want
            assert described(found) == described(results)
        assert programs.general == 0
    assert not cuda_fallback.fallbacks
    assert False not in cuda_layer._known.values()


def launches(cards: Cards, run: Callable[[], Any]) -> list[str]:
    cards.launches.clear()
    run()
    return [launch.spec.op for launch in cards.launches]


FORWARD = ["reindex_place", "quantize_rows_binary", "esmm_act", "esmm", "combine"]


@pytest.mark.parametrize("planned", [False, True])
def test_launches_in_their_order(hopper: Cards, programs: Programs, planned: bool) -> None:
    call(layer(AGAIN), AGAIN)
    found = {}
    for name, args in programs.operands.items():
        for _ in range(2 * planned):
            programs.run(name, args)
        run = programs.run if planned else programs.by_operators
        found[name] = launches(hopper, lambda name=name, args=args, run=run: run(name, args))
    assert found[INFERENCE] == found[TRAINING] == FORWARD
    assert found[BACKWARD] == [
        *("esmm_act", "quantize_rows", "esmm", "activate_backward"),
        *("quantize_columns", "estmm", "ess_partial", "ess_finish"),
        *("group_rows", "estmm", "estmm", "ess"),
        *("esmm", "combine", "esmm"),
    ]


@pytest.mark.usefixtures("programs")
def test_calls_past_the_dispatcher_are_checked_where_their_kind_is_new() -> None:
    given, run = layer(GATED, False), moe_ffn_autograd._on_cuda["moe_ffn_fp8"]
    args = *(given[name] for name in layers.OPERANDS), *layers.static(GATED), True
    torch.testing.assert_close(run(None, *args), torch.ops.hexa.moe_ffn_fp8(*args), rtol=0, atol=0)
    x, index, weights, *others = args
    with pytest.raises(InputError, match="hexa::moe_ffn_fp8: "):
        run(None, x, index, weights[:-1], *others)


def test_few_tokens_run_in_their_dtype(programs: Programs, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a host is waited for; with gradients, or 32 bits, nothing is few."""
    monkeypatch.setitem(moe_ffn_fp8.is_few_on, "cpu", cuda_fp8.is_few)
    monkeypatch.setattr(cuda_fp8, "_SAVED", 0)

    def run(most: int, dtype: torch.dtype = torch.bfloat16, grad: bool = False) -> str:
        given = layer(GATED, dtype=dtype)
        given["x"].requires_grad_(grad)
        monkeypatch.setattr(cuda_fp8, "_WORK", most)
        args = *(given[name] for name in layers.OPERANDS), *layers.static(GATED), True
        for call in (plain, torch.ops.hexa.moe_ffn_fp8):
            programs.operands.clear()
            assert call(*args).dtype == dtype
        return " ".join(programs.operands)

    a_slot = 3 * layers.D * layers.INNER
    slots = layers.TOKENS * layers.K
    assert run(slots * a_slot) == INFERENCE
    assert run(slots * a_slot + 1) == ""
    assert run(slots * a_slot + 1, grad=True) == TRAINING
    assert run(slots * a_slot + 1, torch.float32) == INFERENCE


@pytest.mark.usefixtures("programs")
@pytest.mark.parametrize(("saved", "copies"), [(0, 2), (1 << 40, 0)], ids=["read in a graph", "not in a graph either"])
def test_few_tokens_make_what_a_graph_would_read(saved: int, copies: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(moe_ffn_fp8.is_few_on, "cpu", cuda_fp8.is_few)
    monkeypatch.setattr(cuda_fp8, "_SAVED", saved)
    given = layer(GATED)
    plain(*(given[name] for name in layers.OPERANDS), *layers.static(GATED), True)
    assert len(fp8_weights._copies) == copies


@pytest.mark.usefixtures("apart")
@pytest.mark.parametrize("wanted", [("x",), ("w1",), ("w2", "b2"), ("top_k_weights", "b1")], ids=" ".join)
def test_only_what_is_wanted(hopper: Cards, programs: Programs, wanted: tuple[str, ...]) -> None:
    given = layer(GATED)
    leaves = [given[name].requires_grad_() for name in wanted]
    torch.autograd.grad(layers.fp8(given, GATED).sum(), leaves)
    args = programs.operands[BACKWARD]
    o = QuantizedFfnBackward._make(args)
    assert (o.q1 is None, o.s1 is None) == (True, True)
    assert (o.q1_t is None, o.s1_t is None) == ("x" not in wanted,) * 2
    want, *_ = seen(hopper, flat(args), lambda: programs.by_operators(BACKWARD, args))
    for _ in range(3):
        got, results, _ = seen(hopper, flat(args), lambda: programs.run(BACKWARD, args))
    assert (got, len(results), programs.general) == (want, len(wanted), 2)


@pytest.mark.usefixtures("apart")
@pytest.mark.parametrize("spec", [GATED, INTERLEAVED, SPLIT], ids=str)
def test_gradients_are_added_to_buffers(hopper: Cards, programs: Programs, spec: Any) -> None:
    layers.check_main_grad(layer(spec, dtype=torch.float32), spec)
    args = programs.operands[BACKWARD]
    _, buffers = QuantizedFfnBackward.split(args)
    assert [b is not None for b in buffers[1:]] == [spec.glu == "split" or i not in (2, 3) for i in range(6)]
    want, *_ = seen(hopper, flat(args), lambda: programs.by_operators(BACKWARD, args))
    for _ in range(3):
        got, results, _ = seen(hopper, flat(args), lambda: programs.run(BACKWARD, args))
    assert (got, len(results), programs.general) == (want, 0, 2)


@pytest.mark.usefixtures("apart")
def test_weights_that_are_quantised_already(hopper: Cards, programs: Programs) -> None:
    given = layer(GATED, False, sizes=(256, 128))
    w1, s1, *_ = fp8_weights.quantized(given["w1"], None, "nk", "concat", transposed=False, cached=False)
    w2, s2, *_ = fp8_weights.quantized(given["w2"], None, "nk", "none", transposed=False, cached=False)
    operands = ({**given, "w1": w1, "w2": w2}[name] for name in layers.OPERANDS)
    torch.ops.hexa.moe_ffn_fp8(*operands, *layers.static(GATED), True, s1, s2)
    args = programs.operands[INFERENCE]
    o = QuantizedFfn._make(args)
    assert [t.data_ptr() for t in (o.q1, o.s1, o.q2, o.s2)] == [t.data_ptr() for t in (w1, s1, w2, s2)]
    want, *_ = seen(hopper, flat(args), lambda: programs.by_operators(INFERENCE, args))
    for _ in range(3):
        got, *_ = seen(hopper, flat(args), lambda: programs.run(INFERENCE, args))
    assert (got, programs.general) == (want, 2)


def test_a_list_of_experts_is_planned_as_a_stack_is(programs: Programs) -> None:
    """Quantised where they lie, both are the same kind of call, but for the shape of what lies in two matrices an expert."""
    given = layer(GATED, False)
    gate, up = given["w1"].chunk(2, 1)
    lists = {"w1": Listed([[*gate.contiguous()], [*up.contiguous()]]), "w2": Listed([[*given["w2"].clone()]])}
    kinds = []
    for weights in ({}, lists):
        with torch.no_grad():
            plain(*((given | weights)[name] for name in layers.OPERANDS), *layers.static(GATED), True)
        kinds.append(kind_of(programs.operands[INFERENCE])[0])
    assert kinds[0] == kinds[1]


def test_a_step_of_an_optimizer_is_no_other_kind_of_call(programs: Programs) -> None:
    """Weights are quantised anew where their copies lie."""
    given = layer(GATED)
    given |= {name: torch.nn.Parameter(given[name]) for name in ("w1", "w2")}
    optimizer = torch.optim.SGD([given["w1"], given["w2"]], lr=0.1)
    found = []
    for _ in range(2):
        layers.step(given, optimizer)
        found.append([kind_of(flat(args))[0] for args in programs.operands.values()])
    assert found[0] == found[1]
    before = QuantizedFfn._make(programs.operands[TRAINING])
    layers.step(given, optimizer)
    after = QuantizedFfn._make(programs.operands[TRAINING])
    assert before.q1.data_ptr() == after.q1.data_ptr()


def test_the_list_that_held_h_is_empty_afterwards(hopper: Cards, programs: Programs) -> None:
    call(layer(GATED, False), GATED)
    args = programs.operands[BACKWARD]
    for _ in range(3):
        given = [*map(fresh, args)]
        cuda_layer.LAYERS[BACKWARD](lambda *args: programs.by_operators(BACKWARD, args), *given)
        assert given[QuantizedFfnBackward._fields.index("h")] == []


def test_what_a_plan_allocates(hopper: Cards, programs: Programs) -> None:
    """Results, and one workspace."""
    call(layer(GATED, False), GATED)
    for name, count in ((INFERENCE, 2), (TRAINING, 8 + 1)):
        args = programs.operands[name]
        for _ in range(2):
            programs.run(name, args)
        with Kept() as kept:
            programs.run(name, args)
        assert len(kept.tensors) == count


REFUSED: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "it is large": lambda patch: patch.setattr(cuda_layer, "MOST_BYTES", 8000),
    "it would hold much": lambda patch: patch.setattr(cuda_layer, "MOST_WORKSPACE", 6000),
    "it is checked": lambda patch: patch.setenv("HEXA_FX_CHECKED", "1"),
}


@pytest.mark.parametrize("why", REFUSED)
def test_what_is_not_played_again(hopper: Cards, programs: Programs, monkeypatch: pytest.MonkeyPatch, why: str) -> None:
    call(layer(GATED, False), GATED)
    REFUSED[why](monkeypatch)
    cuda_choosing.forget_choices()
    for calls in range(1, 4):
        programs.run(INFERENCE, programs.operands[INFERENCE])
        assert programs.general == calls
    assert not cuda_fallback.fallbacks


def test_no_tokens(hopper: Cards, programs: Programs) -> None:
    call(layer(GATED, tokens=0), GATED)
    assert programs.operands.keys() == set(NAMES)
    for name, args in programs.operands.items():
        programs.general = 0
        for calls in range(1, 4):
            programs.run(name, args)
            assert programs.general == calls


def test_a_wrong_call_is_refused_before_weights_are_quantised(programs: Programs) -> None:
    given = layer(SPLIT, False)
    for _ in range(3):
        with torch.no_grad(), pytest.raises(InputError, match=r"w3 is torch\.bfloat16"):
            layers.fp8({**given, "w3": given["w3"][:, :, 1:]}, SPLIT)
        assert not fp8_weights._copies
    assert not programs.operands
