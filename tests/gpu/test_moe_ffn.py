"""hexa::moe_ffn on a device: values and gradients, no host read, CUDA graphs, streams, two devices, the fallback."""

import threading

import pytest
import torch
from torch import Tensor

from hexa_fx.cuda import choosing as cuda_choosing
from hexa_fx.cuda import fallback as cuda_fallback
from hexa_fx.cuda import kernel as cuda_kernel
from hexa_fx.ir import FfnSpec
from hexa_fx.ops.table_layers import PARAMETERS
from tests.gpu.cases import graph_of, make_routing, no_waiting, randn
from tests.ops.reference import in_float64, loop, operands

T, K, E, D, H = 250, 2, 6, 128, 96
TOLERANCE = {torch.bfloat16: 2e-2, torch.float32: 2e-5}


class Expert:
    """Operands of one moe_ffn and its float64 loop."""

    def __init__(self, spec: FfnSpec, dtype: torch.dtype, bias: bool, device: str = "cuda") -> None:
        def random(shape: tuple[int, ...], depth: int) -> Tensor:
            return randn(*shape, dtype=dtype, scale=depth**-0.5).to(device)

        self.index = make_routing("sentinels", T, K, E).index.to(device)
        made = operands(spec, random, self.index, experts=E, model_size=D, inner=H, bias=bias)
        self.record = made._replace(top_k_weights=torch.rand(T, K, device=device))
        self.dy = randn(T, D, dtype=dtype).to(device)
        for t in self.leaves():
            t.requires_grad_()

    @property
    def operands(self) -> dict[str, Tensor]:
        """Those that are given, by name, without routing weights."""
        return {name: t for name in ("x", *PARAMETERS) if (t := getattr(self.record, name)) is not None}

    @property
    def weights(self) -> Tensor:
        """Of the routing."""
        return self.record.top_k_weights  # type: ignore[return-value]

    def leaves(self) -> list[Tensor]:
        return [*self.operands.values(), self.weights]

    def run(self) -> Tensor:
        return torch.ops.hexa.moe_ffn.default(*self.record._replace(top_k_index=self.index))  # type: ignore[no-any-return]

    def step(self) -> list[Tensor]:
        y = self.run()
        return [y, *torch.autograd.grad(y, self.leaves(), self.dy)]

    def reference(self) -> list[Tensor]:
        wide = in_float64(self.record._replace(top_k_index=self.index))
        leaves = [getattr(wide, name).requires_grad_() for name in (*self.operands, "top_k_weights")]
        y = loop(wide)
        return [y, *torch.autograd.grad(y, leaves, self.dy.double())]


def assert_equal_to(results: list[Tensor], references: list[Tensor], tolerance: float) -> None:
    for got, want in zip(results, references, strict=True):
        assert got.shape == want.shape
        error = float((got.detach().double() - want.detach()).norm() / want.detach().norm().clamp_min(1e-30))
        assert error < tolerance


SPECS = [
    FfnSpec("silu", "concat"),
    FfnSpec("silu", "split", "kn", "kn"),
    FfnSpec("swiglu_oai", "interleaved", "kn", "kn"),
    FfnSpec("gelu", "none", "nk", "nk"),
    FfnSpec("relu", "none", "nk", "kn", recompute_h=True),
]


CASES = [(spec, torch.bfloat16, True) for spec in SPECS]
CASES += [(SPECS[0], torch.float32, True), (SPECS[3], torch.float32, True), (SPECS[1], torch.bfloat16, False)]


@pytest.mark.parametrize(("spec", "dtype", "bias"), CASES, ids=str)
def test_values_and_gradients(spec: FfnSpec, dtype: torch.dtype, bias: bool) -> None:
    expert = Expert(spec, dtype, bias)
    assert_equal_to(expert.step(), expert.reference(), TOLERANCE[dtype])


@pytest.mark.parametrize("spec", SPECS[1:4], ids=str)
def test_second_derivatives(spec: FfnSpec) -> None:
    expert, found = Expert(spec, torch.float32, True), []
    wide = in_float64(expert.record._replace(top_k_index=expert.index))
    for o, run in ((expert.record, expert.run), (wide, lambda: loop(wide))):
        leaves = [getattr(o, name).requires_grad_() for name in (*expert.operands, "top_k_weights")]
        first = torch.autograd.grad(run().square().sum(), leaves, create_graph=True)
        found.append(torch.autograd.grad(sum(g.square().sum() for g in first), leaves))
    assert_equal_to(*found, 1e-3)


def test_no_host_synchronisation() -> None:
    expert = Expert(SPECS[0], torch.bfloat16, True)
    expert.step()
    with no_waiting():
        expert.step()


def test_a_training_step_replays_in_a_cuda_graph_with_fresh_inputs_and_routing() -> None:
    torch.utils.deterministic.fill_uninitialized_memory = False
    expert = Expert(SPECS[0], torch.bfloat16, True)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(2):
            expert.step()
    torch.cuda.synchronize()
    graph, captured = graph_of(expert.step)
    for kind in ("random", "all_to_one", "none_routed", "sentinels"):
        with torch.no_grad():
            expert.operands["x"].copy_(torch.randn(T, D, device="cuda"))
            expert.weights.copy_(torch.rand(T, K, device="cuda"))
            expert.index.copy_(make_routing(kind, T, K, E).index)
        graph.replay()
        torch.cuda.synchronize()
        for got, want in zip(captured, expert.step(), strict=True):
            assert torch.equal(got, want)


def test_a_thread_that_never_touched_cuda_can_run_the_operators() -> None:
    torch.utils.deterministic.fill_uninitialized_memory = False
    expert = Expert(SPECS[0], torch.bfloat16, True)
    want = expert.run().detach()
    found: list[Tensor] = []
    with torch.no_grad():
        thread = threading.Thread(target=lambda: found.append(expert.run().detach()))
        thread.start()
        thread.join()
    assert torch.equal(found[0], want)


def test_streams_do_not_meet() -> None:
    experts = [Expert(SPECS[0], torch.bfloat16, True) for _ in range(3)]
    want = [e.step() for e in experts]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in experts]
    got = []
    for _ in range(5):
        got = []
        for expert, stream in zip(experts, streams, strict=True):
            with torch.cuda.stream(stream):
                got.append(expert.step())
    torch.cuda.synchronize()
    for g, w in zip(got, want, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(g, w, strict=True))


@pytest.mark.multigpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two devices")
def test_two_devices_in_one_process() -> None:
    expert = Expert(SPECS[0], torch.bfloat16, True, "cuda:1")
    assert torch.cuda.current_device() == 0
    assert_equal_to(expert.step(), expert.reference(), TOLERANCE[torch.bfloat16])


def test_without_a_compiler_torch_takes_over_and_one_sentence_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: object
) -> None:
    from hexa_fx.jit import kernel

    expert = Expert(SPECS[0], torch.float32, True)
    want = expert.reference()
    monkeypatch.setenv("HEXA_FX_DISABLE_JIT", "1")
    monkeypatch.setenv("HEXA_FX_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(cuda_kernel, "get_kernel", kernel.get_kernel.__wrapped__)
    cuda_choosing.forget_choices()
    expert.step()
    results = expert.step()
    assert_equal_to(results, want, TOLERANCE[torch.float32])
    said = [r.message for r in caplog.records if "falls back" in r.message]
    assert len(said) == len({m.split()[0] for m in said}) > 0
    assert all("HEXA_FX_DISABLE_JIT" in m for m in said)
    cuda_fallback.fallbacks.clear()
    cuda_choosing.forget_choices()
