"""`HexaConfig(compute="fp8_block")` through `optimize`: what is rewritten, reported and refused, and how it trains."""

import copy
import logging

import pytest
import torch
from torch import nn

import hexa_fx
from hexa_fx import HexaConfig
from hexa_fx.errors import InputError
from hexa_fx.integrations.dynamo import BackendOptions
from hexa_fx.ops import fp8_weights, library, moe_ffn_fp8

FP8 = HexaConfig(compute="fp8_block")
D, INNER, E = 32, 48, 4


@pytest.fixture(autouse=True)
def no_copies():
    yield
    fp8_weights.clear()


class Expert(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.up = nn.Linear(D, INNER, bias=False), nn.Linear(D, INNER, bias=False)
        self.down = nn.Linear(INNER, D, bias=False)

    def forward(self, x):
        return self.down(nn.functional.silu(self.gate(x)) * self.up(x))


class Listed(nn.Module):
    """A loop over experts of their own, whose parameters are laid side by side."""

    def __init__(self):
        super().__init__()
        self.router = nn.Linear(D, E, bias=False)
        self.experts = nn.ModuleList(Expert() for _ in range(E))

    def forward(self, x):
        weights, index = self.router(x).softmax(-1).topk(2)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            token, slot = torch.where(index == number)
            out.index_add_(0, token, (expert(x[token]) * weights[token, slot, None]).type_as(out))
        return out


class Stacked(nn.Module):
    """Stacked experts, by batched products over all of them."""

    def __init__(self):
        super().__init__()
        self.router = nn.Linear(D, E, bias=False)
        self.w1 = nn.Parameter(torch.randn(E, D, 2 * INNER) / D**0.5)
        self.w2 = nn.Parameter(torch.randn(E, INNER, D) / INNER**0.5)

    def forward(self, x):
        weights, index = self.router(x).softmax(-1).topk(2)
        share = torch.zeros(x.shape[0], E, dtype=x.dtype).scatter_(1, index, weights.to(x.dtype))
        gate, up = torch.matmul(x, self.w1).chunk(2, -1)
        return (torch.matmul(nn.functional.silu(gate) * up, self.w2) * share.t()[..., None]).sum(0)


def made(kind, config=FP8, mode="train"):
    torch.manual_seed(0)
    block, x = kind(), torch.randn(40, D)
    getattr(block, mode)()
    return block, hexa_fx.optimize(copy.deepcopy(block), x, config), x


@pytest.mark.parametrize("kind", [Listed, Stacked])
@pytest.mark.parametrize("mode", ["train", "eval"])
def test_blocks_run_in_fp8_and_the_report_says_by_how_much_that_differs(kind, mode):
    block, fast, x = made(kind, mode=mode)
    assert [b.status for b in fast.report.blocks] == ["rewritten"]
    y, expected = fast(x), block(x)
    error = (y - expected).norm() / expected.norm()
    assert 0.005 < error < 0.1
    (line,) = [b.compute for b in fast.report.blocks]
    assert f"outputs differ by {100 * error:.1f} % of their norm" in line
    assert line in str(fast.report)
    assert fast.report.blocks[0].check.forward_error < 1e-6  # the rewrite itself was checked exactly
    y.sum().backward()
    block(x).sum().backward()
    for (name, parameter), (_, other) in zip(fast.named_parameters(), block.named_parameters(), strict=True):
        cosine = nn.functional.cosine_similarity(parameter.grad.flatten(), other.grad.flatten(), 0)
        assert cosine > 0.99, name


def test_what_fp8_adds_is_measured_where_few_tokens_run_in_their_dtype(monkeypatch):
    monkeypatch.setitem(moe_ffn_fp8.is_few_on, "cpu", lambda o, captured: True)
    _, fast, x = made(Stacked, mode="eval")
    assert "multiplies in FP8: outputs differ by" in str(fast.report)
    assert not fp8_weights._copies  # adapters may come, with which none is read
    with torch.no_grad():
        torch.testing.assert_close(fast(x), made(Stacked, HexaConfig(), "eval")[1](x), rtol=0, atol=0)


def test_adapters_on_listed_experts_run_on_the_operators():
    """Beside weights in their own dtype, as without FP8; the block's own code ran."""
    peft = pytest.importorskip("peft")
    found = []
    for compute in ("native", "fp8_block"):
        torch.manual_seed(0)
        model, x = nn.Sequential(Listed()), torch.randn(40, D)
        hexa_fx.optimize_(model, x, HexaConfig(compute=compute, own_code_when_small=False))
        adapted = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["gate", "up", "down"]))
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                nn.init.normal_(parameter, std=0.1)
        found.append(adapted(x))
        (calls,) = [block.calls for block in model.report.blocks]
        assert (calls.rewritten, dict(calls.own)) == (1, {})
    assert torch.equal(*found)


@pytest.mark.parametrize("kind", [Listed, Stacked])
@pytest.mark.parametrize("change", ["an optimizer", "a fused optimizer", "in place", "load_state_dict"])
def test_weights_that_change_count(kind, change):
    _, fast, x = made(kind)
    parameters = [p for name, p in fast.named_parameters() if "router" not in name]
    with torch.no_grad():
        before = fast(x)
    if "optimizer" in change:
        optimizer = torch.optim.SGD(parameters, lr=1.0, fused="fused" in change)
        for parameter in parameters:
            parameter.grad = parameter.detach() / 2
        optimizer.step()
    elif change == "in place":
        with torch.no_grad():
            for parameter in parameters:
                parameter.mul_(0.5)
    else:
        fast.load_state_dict({name: t if "router" in name else t / 2 for name, t in fast.state_dict().items()})
    with torch.no_grad():
        after = fast(x)
    fp8_weights.clear()
    assert not torch.equal(before, after)
    assert torch.equal(fast(x), after)


@pytest.mark.parametrize("kind", [Listed, Stacked])
def test_weights_are_quantised_once_a_step(kind, monkeypatch):
    made_of, kernel = [], library._KERNELS["quantize_weight_fp8", "cpu"]
    monkeypatch.setitem(
        library._KERNELS, ("quantize_weight_fp8", "cpu"), lambda *args: (made_of.append(args[4]), kernel(*args))
    )
    _, fast, x = made(kind)
    optimizer = torch.optim.AdamW(fast.parameters(), lr=0.1)
    losses = []
    for _ in range(3):
        made_of.clear()
        for _ in range(2):  # micro-batches
            loss = fast(x).square().sum()
            loss.backward()
        optimizer.step()
        losses.append(loss.item())
        assert len(made_of) == 2
    assert len(set(losses)) == 3


def test_it_trains_as_the_original_does():
    """On average: the last loss of so few tokens hangs on roundings, in either."""
    block, fast, x = made(Stacked)
    target = torch.randn(40, D)
    losses = []
    for module in (block, fast):
        optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
        total = 0.0
        for _ in range(20):
            loss = nn.functional.mse_loss(module(x), target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.item()
        losses.append(total)
    assert losses[1] == pytest.approx(losses[0], rel=0.03)


def test_compiled():
    _, fast, x = made(Stacked)
    compiled = torch.compile(fast, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), fast(x))


def test_under_autocast_and_in_16_bits(caplog):
    block, fast, x = made(Listed)
    expected = block(x)
    with torch.autocast("cpu", torch.bfloat16):
        found = [fast(x)]
    found.append(fast.bfloat16()(x.bfloat16()))
    assert all((y - expected).norm() < 0.1 * expected.norm() for y in found)
    assert "original" not in caplog.text


def test_in_float64_it_runs_exactly(caplog):
    block, fast, x = made(Listed)
    moe_ffn_fp8._log_once.cache_clear()
    torch.testing.assert_close(fast.double()(x.double()), block.double()(x.double()))
    assert "compute='fp8_block' runs in torch.float64" in caplog.text


def test_an_unusual_error_is_said(caplog, monkeypatch):
    monkeypatch.setattr(hexa_fx.passes.options, "UNUSUAL", 0.001)
    with caplog.at_level(logging.WARNING):
        made(Stacked)
    assert "FP8 changes its outputs by" in caplog.text


LOGITS = []
"""A global that a block adds to."""


class Noting(Listed):
    def forward(self, x):
        logits = self.router(x)
        LOGITS.append(logits)
        return super().forward(x), logits


def test_measuring_leaves_nothing_behind():
    _, fast, x = made(Noting)
    (block,) = fast.report.blocks
    assert block.status == "rewritten"
    assert "outputs differ by" in block.compute
    assert "0.0 %" not in block.compute  # of the output that differs most
    assert len(LOGITS) == 0
    fast(x)
    assert len(LOGITS) == 1
    LOGITS.clear()


def test_a_device_without_fp8_is_said(monkeypatch):
    monkeypatch.setitem(moe_ffn_fp8.why_not_on, "cpu", lambda o: "it has none")
    _, fast, _ = made(Stacked)
    assert "asked to multiply in FP8; on the example it gives what its exact rewrite gives" in str(fast.report)


def test_options_that_do_not_go_together_are_refused():
    for other in ({"batch_invariant": True}, {"expert_operators": False}, {"topk_memory": False}):
        with pytest.raises(InputError, match="goes with neither"):
            HexaConfig(compute="fp8_block", **other)
    with pytest.raises(InputError, match="expected one of native, fp8_block"):
        HexaConfig(compute="fp8")
    assert HexaConfig.from_environment({"HEXA_FX_COMPUTE": "fp8_block"}) == FP8
    with pytest.raises(InputError, match="use hexa_fx"):
        BackendOptions.of({"compute": "fp8_block"})
