"""Blocks that make few calls run their own code on small CPU inputs, and only there."""

import importlib
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import hexa_fx
from hexa_fx.passes.rewrite.own_code import own_code_limit
from hexa_fx.runtime import install
from hexa_fx.runtime.guards import OwnCodeOnly
from hexa_fx.runtime.specialisation import Specialisation
from tests.zoo.registry import by_name

FEW_CALLS = (
    "dense_stacked_einsum",
    "dense_repeat_bmm_interleaved",
    "shape_two_experts",
    "body_prelu",
    "sorted_torch_grouped_mm",
)
MANY_CALLS = ("loop_where_plus_assign", "router_softmax", "sorted_gathered_bmm", "loop_stacked_gate_up")


@pytest.fixture(autouse=True)
def switched_on(monkeypatch):
    monkeypatch.setattr(importlib.import_module("hexa_fx.passes.rewrite"), "own_code_limit", own_code_limit)


def optimized(name: str) -> tuple[nn.Module, install.HexaForward]:
    variant = by_name(name)
    (x,), _ = variant.inputs(2, 7, torch.float32, 0)
    model = hexa_fx.optimize(variant.make(0).eval(), x, hexa_fx.HexaConfig(verify=False))
    return model, next(f for m in model.modules() if isinstance(f := m.__dict__.get("forward"), install.HexaForward))


def ran(forward: install.HexaForward, monkeypatch) -> list[str]:
    """Fills with what the calls from now on ran."""
    seen: list[str] = []
    original, run = forward.original, Specialisation.run
    monkeypatch.setattr(forward, "original", lambda *a, **k: (seen.append("original"), original(*a, **k))[1])
    monkeypatch.setattr(Specialisation, "run", lambda *a, **k: (seen.append("rewritten"), run(*a, **k))[1])
    return seen


def inputs(name: str, tokens: int) -> torch.Tensor:
    (x,), _ = by_name(name).inputs(1, tokens, torch.float32, 0)
    return x


@pytest.mark.parametrize("name", FEW_CALLS)
def test_few_calls_and_a_small_input(name, monkeypatch):
    model, forward = optimized(name)
    seen = ran(forward, monkeypatch)
    for training in (False, True):
        small = model.train(training)(inputs(name, 256))
        large = model(inputs(name, 4096))
        assert seen == ["original", "rewritten"]
        seen.clear()
        torch.testing.assert_close(forward.rewritten(inputs(name, 256)), small, rtol=1e-4, atol=1e-5)
        assert seen == ["rewritten"]
        seen.clear()
        assert large is not None


def test_the_configuration_switches_it_off():
    variant = by_name(FEW_CALLS[0])
    (x,), _ = variant.inputs(2, 7, torch.float32, 0)
    off = hexa_fx.HexaConfig(verify=False, own_code_when_small=False)
    assert all(block.small_tokens == (0, 0) for block in hexa_fx.explain(variant.make(0).eval(), x, off).blocks)
    assert any(
        min(block.small_tokens) > 0
        for block in hexa_fx.explain(variant.make(0).eval(), x, replace(off, own_code_when_small=True)).blocks
    )


@pytest.mark.parametrize("name", MANY_CALLS)
def test_what_saves_calls_or_much_memory_is_always_rewritten(name, monkeypatch):
    model, forward = optimized(name)
    seen = ran(forward, monkeypatch)
    for tokens in (1, 256, 1024):
        model(inputs(name, tokens))
    assert set(seen) <= {"rewritten"} or max(forward.specialisations[0].small) < inputs(name, 256).numel()
    assert seen[1:] == ["rewritten", "rewritten"]


def test_a_compiler_and_a_mode_see_the_rewritten_code(monkeypatch):
    model, forward = optimized("dense_stacked_einsum")
    x, seen = inputs("dense_stacked_einsum", 8), ran(forward, monkeypatch)

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    with Mode():
        model(x)
    assert seen == ["rewritten"]
    monkeypatch.undo()
    program = torch.export.export(model, (x,))
    assert any(node.target is torch.ops.hexa.moe_ffn.default for node in program.graph.nodes)


def small_with_buffers() -> tuple[nn.Module, install.HexaForward, dict[str, nn.Parameter]]:
    model, forward = optimized("dense_stacked_einsum")
    weights = {name: p for name, p in model.named_parameters() if p.dim() == 3}
    for weight in weights.values():
        weight.main_grad = torch.ones_like(weight)
    return model, forward, weights


@pytest.mark.parametrize("training", [False, True])
def test_weights_with_a_main_grad_get_their_gradients_there(training, monkeypatch):
    model, forward, weights = small_with_buffers()
    x, seen = inputs("dense_stacked_einsum", 8), ran(forward, monkeypatch)
    parameters = dict(model.named_parameters())
    own = torch.func.functional_call(
        model.train(training), {n: p.detach().clone() for n, p in parameters.items()}, (x,)
    )
    assert seen == ["original"], "copies have no buffer"
    seen.clear()
    model(x).square().sum().backward()
    assert seen == ["rewritten"]
    seen.clear()
    with torch.no_grad():
        torch.testing.assert_close(model(x), own)
    assert seen == ["original"], "nothing is added without gradients"
    into = {name: weight.main_grad - 1 for name, weight in weights.items()}
    for weight in weights.values():
        assert weight.grad is None
        del weight.main_grad
    model(x).square().sum().backward()
    for name, weight in weights.items():
        torch.testing.assert_close(into[name], weight.grad, rtol=1e-4, atol=1e-5)


def test_own_code_for_another_reason_says_where_gradients_go(caplog):
    model, forward, weights = small_with_buffers()
    forward.specialisations[0].attributes.check = _missed
    model(inputs("dense_stacked_einsum", 8)).sum().backward()
    assert all(weight.grad is not None and (weight.main_grad == 1).all() for weight in weights.values())
    (said,) = (record.getMessage() for record in caplog.records if record.levelname == "WARNING")
    assert "a reason; gradients of its weights go to grad meanwhile, not to main_grad" in said


def _missed() -> None:
    raise OwnCodeOnly("a reason")


class Coded(torch.Tensor):
    """As a quantiser's tensor: it can be taken apart and multiplied, and knows neither torch.cat nor other libraries' operators."""

    codes: torch.Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, codes):
        made = torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32)
        made.codes = codes
        return made

    def __tensor_flatten__(self):
        return ["codes"], None

    @staticmethod
    def __tensor_unflatten__(inner, about, size, stride):
        return Coded(inner["codes"])

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if name in ("detach", "select", "t", "transpose"):
            return Coded(func(args[0].codes, *args[1:]))
        if name not in ("mm", "addmm"):
            raise NotImplementedError(name)
        return func(*(arg.codes.float() / 64 if isinstance(arg, Coded) else arg for arg in args))


@pytest.mark.parametrize("name", ["loop_where_plus_assign", "loop_stacked_gate_up"])
def test_weights_that_another_library_packs_afterwards(name, caplog):
    original = by_name(name).make(0).requires_grad_(False)
    model = hexa_fx.optimize(original, inputs(name, 30), hexa_fx.HexaConfig(verify=False, own_code_when_small=False))
    for each in (original, model):
        for module in each.modules():
            for key, weight in module.named_parameters(recurse=False):
                if weight.dim() == 3 or (isinstance(module, nn.Linear) and key == "weight"):
                    codes = (weight * 64).round().to(torch.int8)
                    module._parameters[key] = nn.Parameter(Coded(codes), requires_grad=False)
    expected = original(inputs(name, 40))
    for call in (model, torch.compile(model, backend="eager")):
        torch.testing.assert_close(call(inputs(name, 40)), expected)
    assert "is now a tests.passes.test_own_code.Coded, which only the block's own code reads" in caplog.text


class Listed(nn.Module):
    """A list of gated experts, one after the other."""

    def __init__(self, experts: int, skips: bool) -> None:
        super().__init__()
        self.skips, self.router = skips, nn.Linear(8, experts)
        self.experts = nn.ModuleList(
            nn.ModuleDict({"gate": nn.Linear(8, 16), "up": nn.Linear(8, 16), "down": nn.Linear(16, 8)})
            for _ in range(experts)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, chosen = self.router(x).softmax(-1).topk(2)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            token, slot = torch.where(chosen == number)
            if self.skips and token.numel() == 0:
                continue
            rows = x[token]
            hidden = nn.functional.silu(expert["gate"](rows)) * expert["up"](rows)
            out.index_add_(0, token, expert["down"](hidden) * weights[token, slot, None])
        return out


def limits(experts: int, skips: bool) -> list[float]:
    """Tokens up to which a list runs its own code, without and with gradients."""
    torch.manual_seed(0)
    model = hexa_fx.optimize(Listed(experts, skips), torch.randn(40, 8), hexa_fx.HexaConfig(verify=False))
    (made,) = model.forward.specialisations
    return [limit / 8 for limit in made.small]


def test_a_list_of_few_experts_runs_its_own_code():
    """Its rewrite takes longer than four experts, and not than ten."""
    assert all(100 < limit < 10_000 for limit in limits(4, skips=False))
    assert limits(10, skips=False) == [0, 0]


def test_a_loop_that_leaves_experts_out_does_so_on_few_tokens(monkeypatch):
    without, wanted = limits(16, skips=True)
    assert 1 <= without < wanted < 32
    model = hexa_fx.optimize(Listed(16, True).eval(), torch.randn(40, 8), hexa_fx.HexaConfig(verify=False))
    seen, x = ran(model.forward, monkeypatch), torch.randn(40, 8)
    with torch.no_grad():
        for tokens in (1, 40):
            model(x[:tokens])
    for tokens in (1, int(wanted), 40):
        model(x[:tokens]).sum().backward()
    assert seen == ["original", "rewritten", "original", "original", "rewritten"]
