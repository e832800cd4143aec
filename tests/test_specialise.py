"""Calls are analysed in the middle of a forward, once for each kind, without disturbing it."""

import copy
import gc
import math
import random
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.modules.module import register_module_forward_hook
from torch.utils.checkpoint import checkpoint

import hexa_fx
from hexa_fx.runtime import attribute_guards
from hexa_fx.runtime.forward import HexaForward
from hexa_fx.specialise import undisturbed
from tests.detect.mixture import D, Mixture

CONFIG = hexa_fx.HexaConfig(own_code_when_small=False)


class Block(Mixture):
    """Biases are zero, as new ones are; ``top_k`` is a setting."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = 1.0
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.mix(x * self.factor)[2]


class Cooled(Block):
    """Makes another plain number of its setting, which no graph follows."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.mix(x * math.exp(-self.factor))[2]


class Model(nn.Module):
    def __init__(self, layers: int = 2, kind: type[Block] = Block) -> None:
        super().__init__()
        self.layers = nn.ModuleList(kind() for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


def made(layers: int = 2) -> tuple[Model, Model]:
    torch.manual_seed(0)
    model = Model(layers)
    return model, hexa_fx.optimize(model, config=CONFIG)


def tokens(rows: int = 24) -> torch.Tensor:
    return torch.randn(rows, D, generator=torch.Generator().manual_seed(rows))


def analyses(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Fills with the paths of blocks that go through the passes from now on."""
    import hexa_fx.analysis as analysis

    seen: list[str] = []
    plain = analysis.analyse
    monkeypatch.setattr(analysis, "analyse", lambda o, c: (seen.append(o.path), plain(o, c))[1])
    return seen


def test_identical_layers_are_analysed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    seen, (model, opt) = analyses(monkeypatch), made(3)
    for _ in range(2):
        torch.testing.assert_close(opt(tokens()), model(tokens()))
    assert seen == ["layers.0"]
    for layer in (*model.layers, *opt.layers):
        layer.factor = 0.5
    torch.testing.assert_close(opt(tokens()), model(tokens()))
    assert seen == ["layers.0", "layers.0"]
    assert all(block.calls == (3, 0, {}, 2) for block in opt.report.blocks)


def test_a_first_call_leaves_the_user_s_state_as_it_is() -> None:
    model, opt = made()
    outcomes = []
    for each in (model, opt):
        torch.manual_seed(3)
        each.zero_grad()
        x = tokens().requires_grad_()
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t):
            y = each(x)
        y.square().sum().backward()
        outcomes.append([y, x.grad, torch.rand(3), *(p.grad for p in each.parameters())])
        assert torch.is_grad_enabled()
        assert not torch.is_inference_mode_enabled()
    for one, other in zip(*outcomes):
        torch.testing.assert_close(other, one)


def test_an_analysis_keeps_no_weights_by_what_functions_save_of_their_own_results() -> None:
    """Weights of gpt-oss were never freed after a trial whose backward did not run."""
    weight = nn.Parameter(torch.ones(3))
    with undisturbed():
        kept = (weight * 2).sigmoid()
    (gradient,) = torch.autograd.grad(kept.sum(), weight, retain_graph=True)
    torch.testing.assert_close(gradient, torch.full((3,), 2 * 0.104994))
    gone = weakref.ref(weight)
    del kept, weight
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_first_call_without_gradients_holds_with_them(mode: Any) -> None:
    model, opt = made()
    with mode():
        torch.testing.assert_close(opt(tokens()), model(tokens()))
    opt(tokens()).sum().backward()
    assert all(block.calls == (2, 0, {}, 1) for block in opt.report.blocks)


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpoint_takes_the_same_way_twice(reentrant: bool) -> None:
    model, opt = made(1)
    found = []
    for each in (model, opt.train()):
        x = tokens().requires_grad_()
        y = checkpoint(each.layers[0], x, use_reentrant=reentrant)
        y.square().sum().backward()
        found.append((y, x.grad))
    torch.testing.assert_close(*found)


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(D, 8), nn.Linear(8, D)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x).relu())


def test_a_tracer_sees_the_operators_of_experts_that_are_modules() -> None:
    """It puts a ``__call__`` of its own in the place of torch's; NLLB and Switch Transformers were traced as loops."""
    block = Block()
    block.experts = nn.ModuleList(Expert() for _ in block.experts)
    opt = hexa_fx.optimize(block, None, CONFIG)
    opt(tokens())
    traced = make_fx(opt, tracing_mode="fake", _allow_non_fake_inputs=True)(tokens())
    assert any("hexa" in str(node.target) for node in traced.graph.nodes)
    torch.testing.assert_close(traced(tokens()), block(tokens()))


def test_nothing_is_analysed_under_a_mode_that_sees_operations_and_then_it_is(caplog: pytest.LogCaptureFixture) -> None:
    from torch.utils._python_dispatch import TorchDispatchMode

    class Seeing(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*args, **(kwargs or {}))

    model, opt = made()
    with Seeing():
        torch.testing.assert_close(opt(tokens()), model(tokens()))
    assert "is analysed in its next call" in caplog.text
    torch.testing.assert_close(opt(tokens()), model(tokens()))
    assert all(block.calls.rewritten == 1 for block in opt.report.blocks)


def test_past_the_limit_it_runs_its_own_code_and_says_once_what_changed(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Model(1, Cooled)
    opt = hexa_fx.optimize(
        copy.deepcopy(model), config=hexa_fx.HexaConfig(own_code_when_small=False, specialisations=2)
    )
    for number in range(5):
        model.layers[0].factor = opt.layers[0].factor = 1.0 + number
        torch.testing.assert_close(opt(tokens()), model(tokens()))
    said = [r.getMessage() for r in caplog.records if "it was analysed for 2 kinds of calls" in r.getMessage()]
    assert len(said) == 1
    assert "factor" in said[0]
    (block,) = opt.report.blocks
    assert (block.calls.rewritten, sum(block.calls.own.values())) == (2, 3)
    monkeypatch.setattr(attribute_guards, "Resolution", None)  # is not needed to see that a number differs still
    model.layers[0].factor = opt.layers[0].factor = 0.5
    torch.testing.assert_close(opt(tokens()), model(tokens()))


@pytest.mark.parametrize("copied", [False, True])
def test_hooks_that_are_taken_off_again(copied: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kind of call that is left stays one while modules inside have hooks, and no longer if those are why."""
    (_, opt), seen = made(1), analyses(monkeypatch)
    opt = copy.deepcopy(opt) if copied else opt
    layer: Any = opt.layers[0]
    everywhere = register_module_forward_hook(lambda *_: None)
    handles = [everywhere, *(m.register_forward_hook(lambda *_: None) for m in (layer.router, layer.experts[1]))]
    for _ in range(12):
        opt(tokens())
    assert len(seen) == 1
    assert "has hooks" in str(opt.report)
    for handle in handles:
        handle.remove()
    for _ in range(3):
        opt(tokens())
    assert (layer.forward.ran, sum(layer.forward.own.values())) == (3, 12), str(opt.report)


@pytest.mark.parametrize("why", ["a hook", "another setting", "a refusal"])
def test_a_call_that_does_not_run_rewritten_keeps_nothing(why: str) -> None:
    """Until Python next looks for circles, which who trains may have it do rarely: what it was given lies on a GPU."""
    _, opt = made(1)
    opt(tokens())
    layer: Any = opt.layers[0]
    if why == "a hook":
        layer.experts[1].register_forward_hook(lambda *_: None)
    elif why == "a refusal":
        layer.experts[1][1] = nn.Dropout(0.5)
        opt(tokens())
    was_enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        for call in range(3):
            layer.factor = 1.0 + call * (why == "another setting")
            given = tokens().requires_grad_() * 1.0
            kept = weakref.ref(given)
            opt(given).sum().backward()
            del given
            assert kept() is None
    finally:
        if was_enabled:
            gc.enable()


def test_a_block_that_mostly_runs_its_own_code_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    opt = hexa_fx.optimize(Model(1), tokens(), CONFIG)
    opt.layers[0].experts[0].register_forward_hook(lambda *call: None)
    for _ in range(120):
        opt(tokens(4))
    said = [r.getMessage() for r in caplog.records if "ran its own code in 100 of 100 calls" in r.getMessage()]
    assert len(said) == 1
    assert "model.report" in said[0]


@pytest.mark.parametrize("again", [lambda m: m, copy.deepcopy])
def test_first_calls_of_several_threads(again: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    seen, (model, opt) = analyses(monkeypatch), made()
    opt = again(opt)
    inputs = list(torch.randn(6, 24, D, generator=torch.Generator().manual_seed(1)))
    expected, start = [model(x) for x in inputs], threading.Barrier(len(inputs))

    def call(x: torch.Tensor) -> torch.Tensor:
        start.wait()
        return opt(x)

    for number in range(3):
        with ThreadPoolExecutor(len(inputs)) as pool:
            for found, wanted in zip(pool.map(call, inputs), expected):
                torch.testing.assert_close(found, wanted)
        for layer in (*model.layers, *opt.layers):
            layer.factor = 0.5 + number
        expected = [model(x) for x in inputs]
    assert len(seen) == 2  # a number that has changed is asked for from then on


def test_a_replica_runs_its_own_weights() -> None:
    from torch.nn.parallel.replicate import _replicatable_module

    _, opt = made(1)
    opt(tokens())
    block = opt.layers[0]
    assert _replicatable_module(block)
    replica = block._replicate_for_data_parallel()
    assert "forward" not in vars(replica)
    assert "_replicate_for_data_parallel" not in vars(replica)
    assert isinstance(block.forward, HexaForward)


def test_wrong_arguments_of_a_call_say_nothing_of_later_ones() -> None:
    """Its own code cannot run them either: the kind of the call is not left to that code."""
    _, opt = made(1)
    opt(tokens())
    with pytest.raises(RuntimeError, match="dtype"):
        opt(tokens().bfloat16())
    opt.bfloat16()
    opt(tokens().bfloat16())
    assert opt.report.blocks[0].calls.rewritten == 2


class Switched(Block):
    """Does what no graph shows while a setting is on."""

    def __init__(self) -> None:
        super().__init__()
        self.on = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.mix(x * random.random() if self.on else x)[2]


@pytest.mark.parametrize("given", [True, False])
def test_what_is_refused_whatever_the_inputs_are_hinges_on_settings_too(given: bool) -> None:
    opt = hexa_fx.optimize(Model(1, Switched), *([tokens()] if given else []), config=CONFIG)
    for on in (True, True, False, False, True):
        opt.layers[0].on = on
        opt(tokens())
    calls = opt.report.blocks[0].calls
    assert (calls.rewritten, [*calls.own.values()]) == (2, [3])


def test_an_error_in_one_layer_says_nothing_of_another() -> None:
    _, opt = made()
    opt(tokens())
    opt.layers[0].factor = None
    with pytest.raises(TypeError):
        opt.layers[0](tokens())
    opt.layers[1].factor = 2.0
    opt.layers[1](tokens())
    assert (opt.layers[1].forward.ran, dict(opt.layers[1].forward.own)) == (2, {})


def test_code_that_always_raises_is_not_analysed_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    _, opt = made(1)
    opt(tokens())
    analysed = []
    analyst = opt.layers[0].forward.analyst
    monkeypatch.setattr(
        analyst, "specialise", lambda *call, own=analyst.specialise: analysed.append(call) or own(*call)
    )
    for _ in range(8):
        with pytest.raises(RuntimeError):
            opt(tokens().bfloat16())
    assert len(analysed) == 4


def test_undo_and_a_report_that_was_kept() -> None:
    model, opt = made()
    opt(tokens())
    report = opt.report
    hexa_fx.undo_(opt.layers[0])
    assert "2 of 2 MoE blocks rewritten in" in report.summary()
    assert report.summary().endswith("; 1 of them runs its own code now")
    hexa_fx.undo_(opt)
    assert "layers.0: runs its own code now: undo_ gave it its own forward back" in str(report)
    torch.testing.assert_close(opt(tokens()), model(tokens()))


def test_blocks_that_are_left_out_and_everything_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    one = hexa_fx.optimize(Model(), tokens(), hexa_fx.HexaConfig(own_code_when_small=False, skip="layers.1"))
    assert [block.status for block in one.report.blocks] == ["rewritten", "refused"]
    monkeypatch.setenv("HEXA_FX_SKIP", "*")
    for off in (hexa_fx.optimize(Model(), tokens()), hexa_fx.optimize(Model())):
        off(tokens())
        assert "switched off" in str(off.report)
        assert not off.graphs
        assert not any("forward" in vars(module) for module in off.modules())


def test_what_is_around_blocks_is_left_out_by_its_path(caplog: pytest.LogCaptureFixture) -> None:
    config = hexa_fx.HexaConfig.from_environment({"HEXA_FX_SKIP": "Layers, layers.*, *.Mlp"})
    assert all(map(config.skips, ("Layers.0.mlp", "layers.1", "a.Mlp.experts")))
    assert not any(map(config.skips, ("layers", "a.mlp", "")))
    hexa_fx.explain(Model(), tokens(), hexa_fx.HexaConfig(skip="layers,layer.0"))
    assert "skip='layer.0': named_modules() of the model lists no such path" in caplog.text
    assert "skip='layers'" not in caplog.text


def test_experts_that_are_exchanged_again_and_again_are_read_anew() -> None:
    """More often than there may be specialisations: those that read what is gone make room."""
    model, opt = made(1)
    opt(tokens())
    for seed in range(CONFIG.specialisations + 2):
        for each in (model, opt):
            torch.manual_seed(seed)
            experts = each.layers[0].experts
            other = copy.deepcopy(experts[0])
            with torch.no_grad():
                for parameter in other.parameters():
                    parameter.normal_()
            experts[seed % len(experts)] = other
        torch.testing.assert_close(opt(tokens()), model(tokens()))
    calls = opt.report.blocks[0].calls
    assert (calls.rewritten, calls.kinds, calls.own) == (CONFIG.specialisations + 3, 1, {})


class Converts(Mixture):
    """Routes in float32, whatever the model was cast to."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.router = self.router.float()
        weights, ids = self.router(x.float()).softmax(-1).topk(2)
        return self.chosen(x, weights.to(x.dtype), ids)


def test_a_router_that_the_code_converts_in_its_first_call() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Converts(), Converts())  # the second takes over the first one's analysis
    x = torch.randn(24, D)
    optimized = hexa_fx.optimize(copy.deepcopy(model), x, config=CONFIG)
    optimized(x)
    for each in (model, optimized):
        each.bfloat16()
    for _ in range(2):
        torch.testing.assert_close(optimized(x.bfloat16()), model(x.bfloat16()), rtol=0.05, atol=0.02)
    assert [block.forward.ran for block in optimized.report.blocks] == [2, 2], optimized.report
    assert optimized[0].router.weight.dtype == torch.float32
