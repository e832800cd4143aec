"""Functions and operators with a backward of their own: kept around the experts with it, read or refused inside them."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import hexa_fx
from hexa_fx.torch_private import DisableTorchFunction
from tests.zoo.agree import agree, tokens
from tests.zoo.common import MLP, experts
from tests.zoo.compare import compare, operators_run
from tests.zoo.library_styles import AddedByOperator
from tests.zoo.variant import D, E, K


class Scaled(torch.autograd.Function):
    """The tensor itself; its gradient times a number."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, factor: float) -> torch.Tensor:
        ctx.factor = factor
        return x

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient * ctx.factor, None


class WithLoss(torch.autograd.Function):
    """The tensor, as a view; the loss's gradient is one, whatever is done with the result."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, loss: torch.Tensor) -> torch.Tensor:
        ctx.loss = loss
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return gradient, torch.ones_like(ctx.loss)


class WithLossIfAny(torch.autograd.Function):
    """The tensor; the loss's gradient is one, if it takes part in gradients."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, loss: torch.Tensor) -> torch.Tensor:
        ctx.wanted = loss.requires_grad
        return x

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        return gradient, gradient.new_ones(()) if ctx.wanted else None


class Rounded(torch.autograd.Function):
    """Rounds; gradients pass straight through."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return (x * 8).round() / 8

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


class OfDevices(torch.autograd.Function):
    """The tensor itself; its gradient is added up over devices, of which there may be one."""

    devices = 1

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient if OfDevices.devices == 1 else gradient * OfDevices.devices


class Limited(torch.autograd.Function):
    """The tensor itself; its gradient is limited where it is long, which that of an example is not."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient if gradient.norm() < 1e3 else gradient * (1e3 / gradient.norm())


class Plain(nn.Module):
    """Functions around the experts, at places that subclasses choose."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(D, E, bias=False), experts(MLP)

    def tokens(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def weights(self, weights: torch.Tensor) -> torch.Tensor:
        return weights

    def one_output(self, y: torch.Tensor) -> torch.Tensor:
        return y

    def output(self, y: torch.Tensor, loss: torch.Tensor) -> torch.Tensor:
        return y

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = self.tokens(x.reshape(-1, D))
        weights, index = self.gate(flat).softmax(-1).topk(K, -1)
        weights = self.weights(weights)
        out = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            token, slot = torch.where(index == number)
            out.index_add_(0, token, self.one_output(expert(flat[token])) * weights[token, slot, None])
        return self.output(out, weights.square().mean()).view(x.shape)


class OnOutput(Plain):
    def output(self, y: torch.Tensor, loss: torch.Tensor) -> torch.Tensor:
        return WithLoss.apply(y, loss)


def around(**steps: Callable[..., torch.Tensor]) -> type[Plain]:
    return type("Around", (Plain,), steps)


WITH_OWN_LOSS = around(output=lambda self, y, loss: WithLossIfAny.apply(y, loss))
AROUND = {
    "tokens": around(tokens=lambda self, x: Scaled.apply(x, 0.5)),
    "weights": around(weights=lambda self, weights: Scaled.apply(weights, -2.0)),
    "rounded weights": around(weights=lambda self, weights: Rounded.apply(weights)),
    "output": OnOutput,
    "own loss": WITH_OWN_LOSS,
}


def _optimized(kind: type[nn.Module], dtype: torch.dtype = torch.float64) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    block = kind().to(dtype)
    return block, hexa_fx.optimize(block, tokens(2, 7).to(dtype), hexa_fx.HexaConfig(own_code_when_small=False))


@pytest.mark.parametrize("kind", AROUND.values(), ids=AROUND)
def test_around_the_experts_their_backward_stays(kind: type[nn.Module]) -> None:
    block, optimized = _optimized(kind)
    agree(block, optimized, tokens(2, 7), tokens(3, 5))
    plain = Plain().double()
    plain.load_state_dict(block.state_dict())
    assert not compare(plain, optimized, (tokens(2, 7),)).within(1e-6), "the backward of its own makes no difference"


def test_inside_the_experts_it_is_refused() -> None:
    report = _optimized(around(one_output=lambda self, y: Scaled.apply(y, 0.5)))[1].report
    assert not report.rewritten
    assert "Scaled, an autograd.Function with a backward of its own" in report.blocks[0].reason


@pytest.mark.parametrize("place", ["one_output", "tokens", "output"])
def test_one_that_does_nothing_is_seen_through_for_as_long_as_it_does_nothing(
    place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def through(self: nn.Module, x: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
        return OfDevices.apply(x)

    block, optimized = _optimized(around(**{place: through}))
    agree(block, optimized, tokens(3, 5))
    assert operators_run(optimized.train(), (tokens(3, 5),))
    monkeypatch.setattr(OfDevices, "devices", 2)  # inside the experts the block's own code runs now
    assert compare(block, optimized, (tokens(3, 5),)).within(1e-10)


@pytest.mark.parametrize(
    "kind",
    [
        around(tokens=lambda self, x: Limited.apply(x)),
        around(weights=lambda self, weights: Limited.apply(weights)),
        around(one_output=lambda self, y: Limited.apply(y)),
        around(output=lambda self, y, loss: Limited.apply(y)),
    ],
    ids=["tokens", "weights", "one output", "output"],
)
def test_a_backward_that_looks_at_the_gradient_stays(kind: type[nn.Module]) -> None:
    """What it does to others than that of an example, nobody knows; on single experts' outputs it is refused."""
    block, optimized = _optimized(kind)
    for scale in (1.0, 1e7):
        found = []
        for model in (block, optimized):
            own = tokens(3, 5).requires_grad_()
            (scale * model(own)).sum().backward()
            found.append(own.grad)
        torch.testing.assert_close(*found)


def operator(name: str, code: Callable[..., torch.Tensor], backward: Callable[..., Any] | None, **options: Any) -> Any:
    """An operator of one tensor."""

    def compute(x: torch.Tensor) -> torch.Tensor:
        return code(x)

    made = torch.library.custom_op(f"hexa_fx_tests::{name}", compute, mutates_args=(), **options)
    if backward is not None:
        made.register_autograd(backward)
    return made


DOUBLE = operator("double", lambda x: 2 * x, lambda ctx, gradient: 2 * gradient)
TRIPLED = operator("tripled_backward", lambda x: 2 * x, lambda ctx, gradient: 3 * gradient)
STRAIGHT = operator("straight", lambda x: (x * 8).round() / 8, lambda ctx, gradient: gradient)
WITHOUT = operator("without_backward", lambda x: 2 * x, None)
BY_NUMPY = operator("by_numpy", lambda x: torch.from_numpy(2 * x.numpy()), lambda ctx, gradient: 2 * gradient)
ON_CPU = operator("on_cpu", lambda x: 2 * x, lambda ctx, gradient: 2 * gradient, device_types="cpu")


def _unseen(x: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(x)
    with DisableTorchFunction():  # as a kernel that is launched
        out.copy_(2 * x)
    return out


DECIDES = operator("decides", lambda x: 2 * x if bool((x > 0).any()) else x + x, lambda ctx, gradient: 2 * gradient)
UNSEEN = operator("unseen", _unseen, lambda ctx, gradient: 2 * gradient)


@torch.library.custom_op("hexa_fx_tests::halve_", mutates_args={"x"})
def halve_(x: torch.Tensor) -> None:
    x.mul_(0.5)


@torch.library.custom_op("hexa_fx_tests::parts", mutates_args=())
def parts(x: torch.Tensor, by: float = 0.25, *, also: bool = True) -> list[torch.Tensor]:
    return [x * by, x * (1 - by) if also else torch.zeros_like(x)]


def _of_parts(ctx: Any, inputs: Any, keyword_only_inputs: Any, output: Any) -> None:
    ctx.by = inputs[1], 1 - inputs[1] if keyword_only_inputs["also"] else 0.0


def _from_parts(ctx: Any, gradients: Any) -> Any:
    return gradients[0] * ctx.by[0] + gradients[1] * ctx.by[1], None


parts.register_autograd(_from_parts, setup_context=_of_parts)


READ = {
    "its code is read": around(one_output=lambda self, y: DOUBLE(y)),
    "by its packet": around(one_output=lambda self, y: torch.ops.hexa_fx_tests.double(y)),
    "of one kind of device": around(one_output=lambda self, y: ON_CPU(y)),
    "several results": around(one_output=lambda self, y: sum(parts(y, 0.75, also=True))),
    "in the weights": around(weights=lambda self, weights: DOUBLE(weights)),
    "in the weights, straight": around(weights=lambda self, weights: STRAIGHT(weights)),
    "on tokens, its own backward": around(tokens=lambda self, x: TRIPLED(x)),
    "on the output, its own backward": around(output=lambda self, y, loss: TRIPLED(y)),
    "on one expert's output, what nobody reads": around(one_output=lambda self, y: BY_NUMPY(y)),
    "on the output, what nobody reads": around(output=lambda self, y, loss: BY_NUMPY(y)),
    "on the output, which it decides on": around(output=lambda self, y, loss: DECIDES(y)),
    "written where nobody sees it": around(tokens=lambda self, x: UNSEEN(x)),
}


@pytest.mark.parametrize("kind", READ.values(), ids=READ)
def test_operators_are_rewritten_and_equal(kind: type[nn.Module]) -> None:
    block, optimized = _optimized(kind)
    assert optimized.report.rewritten, optimized.report
    agree(block, optimized, tokens(2, 7), tokens(3, 5))
    agree(block, copy.deepcopy(optimized), tokens(3, 5))
    assert optimized.report.blocks[0].calls.rewritten


REFUSED = {
    "another backward than its code's": (around(one_output=lambda self, y: TRIPLED(y)), "differs"),
    "a backward straight through": (around(one_output=lambda self, y: STRAIGHT(y)), "differs"),
}


@pytest.mark.parametrize(("kind", "sentence"), REFUSED.values(), ids=REFUSED)
def test_refused(kind: type[nn.Module], sentence: str) -> None:
    report = _optimized(kind)[1].report
    assert not report.rewritten
    assert sentence in str(report), report


def test_where_its_backward_is_missing_results_are_equal() -> None:
    block, optimized = _optimized(around(one_output=lambda self, y: WITHOUT(y)))
    with torch.no_grad():
        torch.testing.assert_close(optimized(tokens(3, 5)), block(tokens(3, 5)))


def test_writing_operators() -> None:
    def halved(self: nn.Module, y: torch.Tensor) -> torch.Tensor:
        y = y.clone()
        halve_(y)
        return y

    block, optimized = _optimized(around(output=lambda self, y, loss: halved(self, y)))
    with torch.no_grad():
        torch.testing.assert_close(optimized(tokens(3, 5)), block(tokens(3, 5)))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_in_other_types_and_under_autocast(dtype: torch.dtype) -> None:
    block, optimized = _optimized(AddedByOperator, dtype)
    assert optimized.report.rewritten, optimized.report
    bound = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2}[dtype]
    for x in (torch.randn(3, 5, D).to(dtype), torch.randn(1, 1, D).to(dtype)):
        results = []
        for model in (block, optimized):
            own = x.clone().requires_grad_()
            loss = model(own).double().square().sum()
            results.append([loss.detach(), *torch.autograd.grad(loss, [own, *model.parameters()], allow_unused=True)])
        for one, other in zip(*results):
            assert (one is None) == (other is None)
            if one is not None:
                torch.testing.assert_close(
                    other.double(), one.double(), rtol=bound, atol=bound * float(one.abs().max())
                )
    assert optimized.report.blocks[0].calls.rewritten == 2
