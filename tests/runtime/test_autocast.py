"""Under autocast a block runs what was made of it there, and gives the dtypes that its original gives."""

import copy
import logging

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hexa_fx
from tests.zoo.compare import operators_run

D, E, K = 8, 4, 2
DTYPES = [torch.bfloat16, torch.float16]


class Block(nn.Module):
    """Adds up in the dtype of its input, which stays float32 under autocast."""

    def __init__(self):
        super().__init__()
        self.gate, self.shared = nn.Linear(D, E), nn.Linear(D, D)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(D, 12), nn.GELU(), nn.Linear(12, D)) for _ in range(E))

    def logits(self, x):
        return self.gate(x)

    def start(self, x):
        return torch.zeros_like(x)

    def end(self, out, logits):
        return out

    def forward(self, x):
        logits = self.logits(x)
        w, i = logits.softmax(-1).topk(K)
        out = self.start(x)
        for e in range(E):
            t, k = torch.where(i == e)
            out[t] += (w[t, k, None] * self.experts[e](x[t])).to(out.dtype)
        return self.end(out, logits)


class WithLogits(Block):
    def end(self, out, logits):
        return {"hidden": out, "logits": logits}


class WithLoss(Block):
    def end(self, out, logits):
        self.loss = logits.logsumexp(-1).square().mean()
        return out, self.loss


class WithShared(Block):
    def end(self, out, logits):
        return out + self.shared(out)


class InInputsDtype(Block):
    def end(self, out, logits):
        return out.to(logits.dtype)


KINDS = [Block, WithLogits, WithLoss, WithShared, InInputsDtype]


def x(rows=24):
    return torch.randn(rows, D, generator=torch.Generator().manual_seed(1))


def pair(kind):
    torch.manual_seed(0)
    model = kind()
    return model, hexa_fx.optimize(copy.deepcopy(model), x())


def tensors(result):
    return [leaf for leaf in torch.utils._pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_dtypes_of_results_and_gradients(kind, dtype):
    found = []
    for model in pair(kind):
        given = x(15).requires_grad_()
        with torch.autocast("cpu", dtype):
            results = tensors(model(given))
        sum(result.float().square().sum() for result in results).backward()
        found.append((results, [given.grad, *(p.grad for p in model.parameters())]))
    (results, grads), (other, others) = found
    assert [r.dtype for r in results] == [r.dtype for r in other]
    assert [g.dtype for g in grads if g is not None] == [g.dtype for g in others if g is not None]
    for one, two in zip(results, other):
        torch.testing.assert_close(two, one, rtol=0.1, atol=0.1)


class RouterInFloat32(Block):
    def logits(self, x):
        with torch.autocast("cpu", enabled=False):
            return F.linear(x.float(), self.gate.weight.float())


class LossOfRouterInFloat32(RouterInFloat32):
    """As nanoMoE's, which keeps its losses in a list."""

    def logits(self, x):
        with torch.autocast("cpu", enabled=False):
            logits = x.float() @ self.gate.weight.float().t()
            self.losses = [logits.logsumexp(-1).square().mean()]
        return logits


@pytest.mark.parametrize("kind", [RouterInFloat32, LossOfRouterInFloat32], ids=lambda kind: kind.__name__)
def test_what_code_computes_with_autocast_off_is_computed_so(kind):
    model, optimized = pair(kind)
    assert operators_run(optimized, (x(),))
    with torch.autocast("cpu", torch.bfloat16):
        assert operators_run(optimized, (x(),))
        for each in (model, optimized):
            each(x()).sum().backward()
    torch.testing.assert_close(optimized.gate.weight.grad, model.gate.weight.grad, rtol=0.05, atol=0.02)
    if kind is LossOfRouterInFloat32:
        assert torch.equal(optimized.losses[0], model.losses[0])  # in bfloat16 they would differ


class LossesInLists(Block):
    """Appended in float32 and in the autocast dtype, between attributes, and put into a dict."""

    def __init__(self):
        super().__init__()
        self.losses, self.last = [], {}

    def end(self, out, logits):
        self.mean = logits.mean()
        self.losses.append(logits.float().logsumexp(-1).square().mean())
        self.losses.append(logits.mean())
        self.last["z"] = logits.max()
        self.largest = logits.float().max()
        return out


def test_dtypes_of_what_is_put_into_lists_and_dicts():
    found = []
    for each in pair(LossesInLists):
        with torch.autocast("cpu", torch.bfloat16):
            each(x())
            each(x())
        found.append([each.mean, *each.losses, each.last["z"], each.largest])
    torch.testing.assert_close(*found)
    assert [each.dtype for each in found[1][:3]] == [torch.bfloat16, torch.float32, torch.bfloat16]
    assert [str(block.calls) for block in each.report.blocks] == ["calls: 2 rewritten"]


class ExpertsInFloat32(Block):
    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList(InFloat32() for _ in range(E))


class InFloat32(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(D, 12), nn.Linear(12, D)

    def forward(self, rows):
        with torch.autocast("cpu", enabled=False):
            return self.down(F.gelu(self.up(rows.float())))


def test_experts_that_switch_it_off_are_their_own_under_autocast(caplog):
    model, optimized = pair(ExpertsInFloat32)
    assert operators_run(optimized, (x(),))
    with caplog.at_level(logging.WARNING), torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(optimized(x()), model(x()), rtol=0, atol=0)
    assert "switches autocast off for what its experts compute" in caplog.text


class SwitchedAround(WithLogits):
    """Around a router that draws, which stays a call."""

    def __init__(self):
        super().__init__()
        self.router = Drawing()

    def logits(self, x):
        with torch.autocast("cpu", enabled=False):
            return self.router(x.float())


class Drawing(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(D, E)

    def forward(self, x):
        return self.gate(x) + 1e-3 * torch.rand(len(x), E)


def test_switched_off_around_a_router():
    model, optimized = pair(SwitchedAround)
    with torch.autocast("cpu", torch.bfloat16):
        assert operators_run(optimized, (x(),))
        results = []
        for each in (model, optimized):
            torch.manual_seed(3)
            results.append(each(x()))
    torch.testing.assert_close(results[1]["hidden"], results[0]["hidden"], rtol=0.05, atol=0.01)
    assert torch.equal(results[1]["logits"], results[0]["logits"])


class Switch(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(D, E)

    def forward(self, x):
        with torch.autocast("cpu", enabled=False):
            return self.gate(x.float())


class RouterOfItsOwn(Block):
    def __init__(self):
        super().__init__()
        self.router = Switch()

    def logits(self, x):
        return self.router(x)


def test_a_router_that_switches_it_off_stays_a_call():
    model, optimized = pair(RouterOfItsOwn)
    with torch.autocast("cpu", torch.bfloat16):
        assert operators_run(optimized, (x(),))
        torch.testing.assert_close(optimized(x()), model(x()), rtol=0.05, atol=0.05)


class Enabling(Block):
    def logits(self, x):
        with torch.autocast("cpu", torch.bfloat16):
            return self.gate(x).float()


def test_code_that_switches_it_on_is_refused():
    (block,) = hexa_fx.explain(Enabling(), x()).blocks
    assert "switches autocast on by itself" in block.reason


def test_inputs_of_a_dtype_that_was_not_tried(caplog):
    model, optimized = pair(Block)
    given = x().double()
    with caplog.at_level(logging.WARNING), torch.autocast("cpu", torch.bfloat16):
        for one in (model, optimized):
            with pytest.raises(RuntimeError):
                one(given)
    assert "runs its original forward" in caplog.text


class Asking(Block):
    def end(self, out, logits):
        return out * 2 if torch.is_autocast_enabled("cpu") else out


class WrittenTo(Block):
    """Rows of float32 are written into the result, as those of tokens that experts had no room for."""

    def end(self, out, logits):
        out[logits[:, 0] < 0] = self.gate.weight[0]
        return out


@pytest.mark.parametrize("kind", [Block, Asking, WrittenTo])
@pytest.mark.parametrize("dtype", DTYPES)
def test_optimized_under_autocast(kind, dtype):
    model = kind()
    with torch.autocast("cpu", dtype):
        optimized = hexa_fx.optimize(copy.deepcopy(model), x())
        assert torch.is_autocast_enabled("cpu")
        expected, found = model(x()), optimized(x())
        assert operators_run(optimized, (x(),))
    torch.testing.assert_close(found, expected, rtol=0.1, atol=0.1)
    assert operators_run(optimized, (x(),))
    torch.testing.assert_close(optimized(x()), model(x()))


def test_inputs_that_only_run_under_autocast():
    model = Block()
    with torch.autocast("cpu", torch.bfloat16):
        optimized = hexa_fx.optimize(copy.deepcopy(model), x().bfloat16())
        torch.testing.assert_close(optimized(x().bfloat16()), model(x().bfloat16()), rtol=0.1, atol=0.1)
        assert operators_run(optimized, (x().bfloat16(),))


def test_weights_in_the_other_16_bits():
    """torch.stack would refuse them under autocast; products cast them."""
    model, optimized = (m.bfloat16() for m in pair(Block))
    found = []
    for one in (model, optimized):
        with torch.autocast("cpu", torch.float16):
            y = one(x())
        y.float().square().sum().backward()
        found.append([y, *(p.grad for p in one.parameters())])
    for one, two in zip(*found):
        torch.testing.assert_close(two, one, rtol=0.1, atol=0.1)


class WithPosition(Block):
    """A parameter that is added decides on the dtype of the result."""

    def __init__(self):
        super().__init__()
        self.position = nn.Parameter(torch.randn(D))

    def end(self, out, logits):
        return out + self.position


def test_parameters_in_another_dtype_than_they_were_recorded_in(caplog):
    model, optimized = (m.bfloat16() for m in pair(WithPosition))
    with caplog.at_level(logging.WARNING), torch.autocast("cpu", torch.bfloat16):
        assert optimized(x().bfloat16()).dtype == model(x().bfloat16()).dtype == torch.bfloat16
        assert optimized.float()(x()).dtype == model.float()(x()).dtype
        assert operators_run(optimized, (x(),))
    assert "original" not in caplog.text


class LossIfWanted(Block):
    """Other dtypes where a gradient is wanted of the input, as in github.com/Fsoft-AIC/CompeteSMoE's sigmoid gates."""

    def forward(self, x):
        out = super().forward(x)
        return out, self.gate(x).mean() if self.asks(x) else out.new_zeros(())

    def asks(self, x):
        return x.requires_grad


class LossIfOn(LossIfWanted):
    def asks(self, x):
        return torch.is_grad_enabled()


@pytest.mark.parametrize("kind", [LossIfWanted, LossIfOn])
def test_code_that_asks_for_gradients(kind):
    model, optimized = pair(kind)
    optimized = hexa_fx.optimize(copy.deepcopy(model))
    for wanted in (False, True, True, False):
        given = x().requires_grad_(wanted)
        with torch.autocast("cpu", torch.bfloat16):
            found, expected = tensors(optimized(given)), tensors(model(given))
        assert [one.dtype for one in found] == [one.dtype for one in expected]
        for one, two in zip(found, expected):
            torch.testing.assert_close(one, two, rtol=0.1, atol=0.1)
    (block,) = optimized.report.rewritten
    assert (block.calls.rewritten, block.calls.own) == (4, {})
