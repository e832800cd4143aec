"""No call waits for a compiler: until a kernel is built, another tile's or torch's own operators run, which is said once."""

import gc
import weakref
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hexa_fx.cli.model_layers import layer_of
from hexa_fx.codegen import KernelSpec
from hexa_fx.cuda import choosing, fallback, gemm, layer, modes
from hexa_fx.cuda.kernel_set import kernel_set
from hexa_fx.ir import FfnSpec
from hexa_fx.jit import BuildError, background
from hexa_fx.jit.env import JitSettings
from hexa_fx.ops import library, moe_ffn_autograd
from tests.cuda import cards as cards_module
from tests.cuda.cards import AMPERE, HOPPER, Cards, D, E, H, K, arguments, copied
from tests.jit.conftest import FakeCompiler, compiler  # noqa: F401  (a fixture)


class SlowBuilder:
    """A builder that is never done before `finish`."""

    def __init__(self) -> None:
        self.requested: dict[KernelSpec, None] = {}
        self.built: set[KernelSpec] = set()
        self.errors: dict[KernelSpec, Exception] = {}

    def request(self, specs: Iterable[KernelSpec], first: bool = False) -> None:
        self.requested.update(dict.fromkeys(specs))

    def ready(self, spec: KernelSpec) -> object:
        return "cubin" if spec in self.built else None

    def check(self, spec: KernelSpec) -> None:
        if spec in self.errors:
            raise self.errors[spec]

    def left(self) -> int:
        return len(self.requested) - len(self.built)

    def finish(self, specs: Iterable[KernelSpec] | None = None) -> None:
        self.request(specs or ())
        self.built.update(self.requested if specs is None else specs)


@pytest.fixture
def slow(cards: Cards, monkeypatch: pytest.MonkeyPatch) -> SlowBuilder:
    own = SlowBuilder()
    for module in (background, cards_module):
        monkeypatch.setattr(module, "builder", lambda: own)
    cards.build_in_the_background(monkeypatch)
    return own


def reference(args: Sequence[Any]) -> Tensor:
    """By the operators of a CPU, which the stand-ins' tensors are on."""
    y: Tensor = torch.ops.hexa.moe_ffn.default(*args)
    return y


def ops(cards: Cards) -> list[str]:
    found = [one.spec.op for one in cards.launches]
    cards.launches.clear()
    return found


def test_a_call_runs_torchs_operators_until_its_kernels_are_there(
    cards: Cards, slow: SlowBuilder, caplog: pytest.LogCaptureFixture
) -> None:
    args = arguments(dtype=torch.float32, gates=torch.float32)
    for _ in range(4):  # a fourth would be a replay
        torch.testing.assert_close(cards.run(args), reference(args), rtol=1e-4, atol=1e-4)
    assert not cards.launches
    assert not fallback.fallbacks
    said = [r.message for r in caplog.records if "for the moment" in r.message]
    assert len(said) == len({m.split()[0] for m in said}) == 4
    assert all("is being built" in m for m in said)
    slow.finish()
    for _ in range(4):
        cards.run(copied(args))
        assert ops(cards) == ["reindex_place", "esmm", "esmm", "combine"]
    assert cards.general == 4  # once its kernels are there, it is planned as a whole


def test_a_compiler_that_takes_its_time(
    cards: Cards,
    compiler: FakeCompiler,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The same with the true builder."""
    cards.build_in_the_background(monkeypatch)
    compiler.hold()
    args = arguments()
    cards.run(args)
    assert not cards.launches
    compiler.release()
    assert background.builder().wait(timeout=60)
    cards.run(args)
    assert ops(cards) == ["reindex_place", "esmm", "esmm", "combine"]
    assert compiler.runs == 4


def test_another_tile_of_the_family_runs_meanwhile(
    cards: Cards, slow: SlowBuilder, caplog: pytest.LogCaptureFixture
) -> None:
    x, w = torch.randn(4000, D, dtype=torch.bfloat16), torch.randn(E, 128, D, dtype=torch.bfloat16)
    offs = torch.linspace(0, 4000, E + 1).to(torch.int32)
    with choosing.collect(AMPERE) as few:
        gemm.esmm(x[:5], w, None, None, offs, 1, "nk")
    with choosing.collect(AMPERE) as many:
        gemm.esmm(x, w, None, None, offs, 1, "nk")
    assert few != many
    slow.finish(few)
    gemm.esmm(x, w, None, None, offs, 1, "nk")
    assert [one.spec for one in cards.launches] == few
    assert cards.launches[0].blocks[0] * few[0].bm * few[0].bn >= 4000 * 128
    assert sum("another tile" in r.message for r in caplog.records) == 1
    slow.finish(many)
    cards.launches.clear()
    gemm.esmm(x, w, None, None, offs, 1, "nk")
    assert [one.spec for one in cards.launches] == many


def test_another_hopper_tile_runs_meanwhile(hopper: Cards, slow: SlowBuilder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEXA_FX_FEW_TOKENS", "0")
    choosing.forget_choices()
    args = arguments(tokens=200)
    with choosing.collect(HOPPER) as specs:
        hopper.run(arguments(tokens=4000))
        hopper.run(arguments(tokens=20))
    slow.finish(specs)
    chosen = kernel_set(
        layer_of(FfnSpec("silu", "concat"), experts=E, top_k=K, hidden=D, inner=H, gates=torch.bfloat16), HOPPER
    )
    assert set(specs) <= set(chosen)
    hopper.run(args)
    assert {one.spec for one in hopper.launches} <= set(specs)
    assert "gather_gemm_sm90" in {one.spec.family for one in hopper.launches}


def test_a_call_whose_kernels_are_not_all_built_is_not_planned_as_a_whole(cards: Cards, slow: SlowBuilder) -> None:
    args = arguments()
    cards.run(args)
    slow.finish()
    missing = next(spec for spec in slow.built if spec.op == "reindex_place")
    slow.built.remove(missing)
    choosing.forget_choices()
    for _ in range(4):
        cards.run(args)
    assert not any(layer._known.values())
    slow.finish([missing])
    for _ in range(2):
        cards.run(args)
    assert all(layer._known.values())


def test_gradients_are_added_once_whichever_runs(cards: Cards, slow: SlowBuilder) -> None:
    rows = 64
    x, g = torch.randn(rows // K, D), torch.randn(rows, H)
    v, offs = torch.arange(rows, dtype=torch.int32), torch.linspace(0, rows, E + 1).to(torch.int32)
    into, into_bias, w = torch.zeros(E, H, D), torch.zeros(E, H), torch.randn(E, H, D)
    expected = torch.ops.hexa.estmm(x, g, v, None, offs, K, "nk")
    gemm.esfk_add(into, into_bias, x, g, w, v, offs, K, "nk")
    torch.testing.assert_close(into, expected)
    torch.testing.assert_close(into_bias, torch.ops.hexa.ess(g, None, offs, 1, None))
    assert not cards.launches


def test_a_kernel_that_does_not_build_falls_back_for_good(
    cards: Cards, slow: SlowBuilder, caplog: pytest.LogCaptureFixture
) -> None:
    args = arguments(dtype=torch.float32, gates=torch.float32)
    cards.run(args)
    error = BuildError("this is the reason", key="k", compiler="c", source="s", command="c")
    slow.errors = dict.fromkeys(slow.requested, error)
    for _ in range(2):
        torch.testing.assert_close(cards.run(args), reference(args), rtol=1e-4, atol=1e-4)
    assert fallback.some_fall_back_for_good()
    assert "this is the reason" in fallback.fallbacks["combine"]
    assert not cards.launches


@pytest.mark.parametrize("fails", [False, True])
def test_who_called_for_a_missing_kernel_is_not_kept_alive(
    fails: bool, cards: Cards, slow: SlowBuilder, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A step's gradients, say, in the frames of the callers; no garbage is collected meanwhile."""
    if fails:
        never = background.Builder(JitSettings(cache_dir=tmp_path, disable_jit=True))
        for module in (background, cards_module):
            monkeypatch.setattr(module, "builder", lambda: never)

    def call() -> weakref.ref[Tensor]:
        mine = torch.zeros(3)
        cards.run(arguments(dtype=torch.float32, gates=torch.float32))
        return weakref.ref(mine)

    gc.collect()
    gc.disable()
    try:
        assert call()() is None
    finally:
        gc.enable()


def test_a_thread_can_wait_for_its_kernels(cards: Cards, slow: SlowBuilder) -> None:
    with modes.kernels_awaited():
        cards.run(arguments())
    assert len(ops(cards)) == 4
    assert modes.awaits_kernels() is False


def test_torchs_operators_can_be_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("reindex", "esmm", "combine", "esmm_act_backward"):
        kernel = library.kernel_for(name, "cuda")
        monkeypatch.setitem(library._KERNELS, (name, "any"), lambda *args: args)
        with modes.torch_operators():
            assert kernel(1, 2) == (1, 2)
    with modes.torch_operators():
        assert moe_ffn_autograd._on_cuda["moe_ffn"](lambda *args: args, 3, 4) == (3, 4)
