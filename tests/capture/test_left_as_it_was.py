"""Whichever trial run a model goes through, its buffers, attributes, hooks and modules are afterwards as they were."""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import hexa_fx
from hexa_fx.capture import capture
from hexa_fx.capture.observe import observe
from hexa_fx.isolation.module_state import ModuleState
from hexa_fx.isolation.module_tree import named_modules, named_tensors
from hexa_fx.isolation.torch_state import training_mode
from tests.detect.mixture import D, E, Mixture
from tests.zoo.compare import operators_run


class Block(Mixture):
    """``keep`` says what the forward does to the module besides."""

    def __init__(self, keep: Callable[[Any, torch.Tensor], Any]) -> None:
        super().__init__()
        self.keep = keep
        self.register_buffer("counts", torch.zeros(E))
        self.register_buffer("later", None)
        self.hooked, self.norm, self.held = False, None, torch.zeros(E)
        self.router.calls, self.router.load = 0, torch.zeros(E)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        probs, _, out, _ = self.mix(x)
        self.keep(self, probs.detach().sum(0))
        return out


def hook_once(block: Any, load: torch.Tensor) -> None:
    if not block.hooked:
        block.hooked = True
        block.router.register_forward_hook(lambda *_: None)


CHANGES: dict[str, Callable[[Any, torch.Tensor], Any]] = {
    "a buffer in place": lambda m, load: m.counts.add_(load),
    "a buffer by assignment": lambda m, load: setattr(m, "counts", m.counts + load),
    "a buffer of another size": lambda m, load: setattr(m, "counts", load[:2]),
    "a buffer of another type": lambda m, load: setattr(m, "counts", load.double()),
    "a buffer resized in place": lambda m, load: m.counts.resize_(E + 1).fill_(1.0),
    "a buffer's data": lambda m, load: setattr(m.counts, "data", load.double()),
    "a buffer that was None": lambda m, load: setattr(m, "later", load),
    "a buffer that is deleted": lambda m, load: m._buffers.pop("counts", None),
    "an attribute": lambda m, load: setattr(m, "held", load),
    "an attribute in place": lambda m, load: m.held.add_(load),
    "an attribute in place, with a graph": lambda m, load: m.held.add_(m.router.weight.sum(1)),
    "a buffer in place, with a graph": lambda m, load: m.counts.add_(m.router.weight.sum(1)),
    "a result in place": lambda m, load: m.losses.add_(load),
    "an array": lambda m, load: np.add(m.array, 1.0, out=m.array),
    "draws of its own generator": lambda m, load: torch.rand(1, generator=m.draws),
    "an attribute of a layer of torch's in place": lambda m, load: m.router.load.add_(load),
    "a new attribute": lambda m, load: setattr(m, "load", load),
    "an attribute of a layer of torch's": lambda m, load: setattr(m.router, "calls", m.router.calls + 1),
    "a new attribute of a layer of torch's": lambda m, load: setattr(m.router, "last", load),
    "a hook, and that it is there": hook_once,
    "a hook in every call": lambda m, load: m.router.register_forward_hook(lambda *_: None),
    "a module where None was": lambda m, load: setattr(m, "norm", m.norm or nn.LayerNorm(D)),
    "a parameter where None was": lambda m, load: setattr(m, "norm", nn.Parameter(load)),
    "another module": lambda m, load: setattr(m.experts[0], "1", nn.GELU()),
}


def run_and_restore(block: nn.Module, x: torch.Tensor) -> None:
    state = ModuleState(block)
    block(x)
    state.restore()


TRIALS: dict[str, Callable[[nn.Module, torch.Tensor], Any]] = {
    "observe": lambda block, x: observe(block, (x,), {}),
    "capture": lambda block, x: capture(block, (x,), {}),
    "ModuleState": run_and_restore,
    "explain": lambda block, x: hexa_fx.explain(block, (x,)),
}


def everything(block: nn.Module) -> dict[str, Any]:
    """By dotted name: what modules keep, as identity, and for tensors the values too."""
    found: dict[str, Any] = {}
    for path, module in block.named_modules():
        for name, value in vars(module).items():
            inside = value if isinstance(value, dict) else {"": value}
            found |= {f"{path}.{name}.{key}": _value(item) for key, item in inside.items()}
    return found


def _value(value: Any) -> Any:
    if isinstance(value, (np.ndarray, torch.Generator)):
        return id(value), (value if isinstance(value, np.ndarray) else value.get_state()).tolist()
    return (id(value), value.dtype, value.requires_grad, value.tolist()) if isinstance(value, torch.Tensor) else value


def _marked(trial: str, number: int, change: str) -> Any:
    """All changes for one kind of run; the others share its code, and most of their changes are slow tests."""
    slow = trial != next(iter(TRIALS)) and number % 4
    return pytest.param(trial, change, marks=pytest.mark.slow if slow else ())


@pytest.mark.parametrize(("trial", "change"), [_marked(trial, *one) for trial in TRIALS for one in enumerate(CHANGES)])
def test_what_a_run_changes_is_put_back(trial: str, change: str) -> None:
    block, x = Block(CHANGES[change]), torch.randn(7, D)
    block.losses = torch.ones(E, requires_grad=True) * 2
    block.array, block.draws = np.zeros(E), torch.Generator()
    before = everything(block)
    TRIALS[trial](block, x)
    assert everything(block) == before


@pytest.mark.parametrize("trial", TRIALS)
def test_a_buffer_that_nobody_can_write_into(trial: str) -> None:
    """Its elements share memory, so that values cannot be copied back."""
    block, x = Block(lambda m, load: m.spread + load), torch.randn(7, D)
    block.register_buffer("spread", torch.ones(1).expand(E))
    before = everything(block)
    TRIALS[trial](block, x)
    assert everything(block) == before


FACTS: dict[str, tuple[Callable[[Any], None], bool]] = {
    "another number": (lambda m: setattr(m, "calls", 1 << 20), True),
    "an equal number": (lambda m: setattr(m, "calls", float(str(m.calls))), False),
    "an equal number of another kind": (lambda m: setattr(m, "calls", int(m.calls)), True),
    "nothing in place of a number": (lambda m: setattr(m, "calls", None), True),
    "no number any more": (lambda m: delattr(m, "calls"), True),
    "a tensor in place": (lambda m: m.load.add_(1), True),
    "a tensor gone": (lambda m: delattr(m, "load"), True),
    "a number in a list": (lambda m: m.seen.append(1), True),
    "an attribute deleted and set again": (lambda m: (delattr(m, "calls"), setattr(m, "calls", 1e9)), False),
    "a buffer": (lambda m: m.register_buffer("count", torch.ones(1)), True),
    "a tensor on a layer of torch's": (lambda m: setattr(m.router, "last", torch.ones(1)), True),
    "a number on a layer of torch's": (lambda m: setattr(m.router, "calls", 3), True),
    "a module's own buffer": (lambda m: m.router.register_buffer("count", torch.ones(1)), True),
}


@pytest.mark.parametrize("fact", FACTS)
def test_verification_sees_every_change_and_no_more(fact: str) -> None:
    """Modules that nothing was done to are not looked at one by one; of the others everything shows."""
    change, shows = FACTS[fact]
    block = Block(lambda m, load: None)
    block.calls, block.load, block.seen = 1e9, torch.zeros(3), []
    state = ModuleState(block)
    before = state.now()
    change(block)
    now = state.now()
    same = now.facts == before.facts and now.tensors.keys() == before.tensors.keys()
    assert shows != (same and all(torch.equal(value, before.tensors[name]) for name, value in now.tensors.items()))
    state.restore()
    assert state.parameters.keys() == dict(block.named_parameters()).keys()


def test_modules_and_tensors_by_name_are_torchs() -> None:
    block = Block(lambda m, load: None)
    block.again, block.router.twin, block.none = block.experts[0], block.router, None
    block.tied = block.experts[1][0].weight
    assert named_modules(block) == list(block.named_modules())
    assert named_tensors(block, "_parameters") == dict(block.named_parameters())
    assert list(named_tensors(block, "_buffers")) == list(dict(block.named_buffers()))


class Codes(nn.Parameter):
    """As quantisers have them: what stands for the weight hangs on the parameter until the first use."""


class LaidOut(nn.Module):
    """In its first call codes are laid out anew, and scales move from the parameter to an object."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = Codes(torch.randint(-8, 8, (D, D), dtype=torch.int8), requires_grad=False)
        self.weight.scale = torch.rand(D, 1)  # type: ignore[attr-defined]
        self.state = SimpleNamespace(scale=None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight: Any = self.weight
        if weight.scale is not None:
            self.state.scale, weight.scale = weight.scale, None
            weight.data = weight.data.t().contiguous()
        return x + x @ (weight * self.state.scale.t())


def _made() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(LaidOut(), Block(lambda block, load: None))


@pytest.mark.parametrize("called_before", [False, True])
def test_weights_that_their_first_use_lays_out_anew(called_before: bool) -> None:
    model, x = _made(), torch.randn(20, D)
    expected = _made()(x)
    if called_before:
        model(x)
    hexa_fx.optimize_(model, x)
    for _ in range(2):
        torch.testing.assert_close(model(x), expected)
    original = _made()
    for each in (
        hexa_fx.optimize(original, x),
        original,
    ):  # they share the weight, and the first call sets it up for both
        torch.testing.assert_close(each(x), expected)


class Folding(nn.Module):
    """Its first call, or ``train(False)``, folds a factor into the weight: in place, through data, or as another tensor."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way, self.folded = way, False
        self.weight, self.factor = nn.Parameter(torch.randn(D, D) / 4), 1.5

    def fold(self, factor: float) -> None:
        with torch.no_grad():
            if self.way == "another":
                self.weight.data = self.weight.data * factor
            else:
                (self.weight.data if self.way == "data" else self.weight).mul_(factor)
        self.folded = not self.folded

    def train(self, mode: bool = True) -> Folding:
        super().train(mode)
        if self.way == "train" and self.folded == mode:
            self.fold(1 / self.factor if mode else self.factor)
        return self

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.way != "train" and not self.folded:
            self.fold(self.factor)
        return x + x @ (self.weight if self.folded else self.weight * self.factor)


class InBlock(Block):
    def __init__(self, way: str) -> None:
        super().__init__(lambda block, load: None)
        self.last = Folding(way)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(super().forward(x))


@pytest.mark.parametrize("way", ["in place", "data", "another", "train"])
def test_weights_that_a_first_call_or_a_mode_folds_factors_into(way: str) -> None:
    model = nn.Sequential(Folding(way), InBlock("train")).double()
    x, other = torch.randn(20, D, dtype=torch.float64), copy.deepcopy(model)
    with training_mode(model, False):
        pass
    torch.testing.assert_close(dict(model.named_parameters()), dict(other.named_parameters()))
    hexa_fx.optimize_(model, x)
    for mode in (True, False, True):
        torch.testing.assert_close(model.train(mode)(x), other.train(mode)(x))
    torch.testing.assert_close(dict(model.named_parameters()), dict(other.named_parameters()))


class Counts:
    """What a forward counts in."""

    def __init__(self) -> None:
        self.load, self.array, self.number = torch.zeros(E), np.zeros(E), 0


COUNTS, LOSSES = Counts(), {"load": torch.zeros(E), "losses": []}
OUTSIDE: dict[str, tuple[Callable[[Any, torch.Tensor], Any], Callable[[Any], Any]]] = {
    "an object's tensor": (lambda m, load: m.kept.load.add_(load), lambda m: m.kept.load),
    "its size": (lambda m, load: m.kept.load.resize_(E + 1).fill_(1.0), lambda m: m.kept.load),
    "a global object's": (lambda m, load: COUNTS.load.add_(load), lambda m: COUNTS.load),
    "a global dict's": (lambda m, load: LOSSES["load"].add_(load), lambda m: LOSSES["load"]),
    "a global list": (lambda m, load: LOSSES["losses"].append(load), lambda m: LOSSES["losses"]),
    "a number": (lambda m, load: setattr(m.kept, "number", m.kept.number + 1), lambda m: m.kept.number),
    "a parameter's attribute": (
        lambda m, load: setattr(m.router.weight, "calls", m.router.weight.calls + 1),
        lambda m: m.router.weight.calls,
    ),
}


@pytest.mark.parametrize("change", OUTSIDE)
def test_what_lies_outside_of_modules_is_as_it_was_where_a_block_is_refused(change: str) -> None:
    keep, kept = OUTSIDE[change]
    block = Block(lambda m, load: (keep(m, load), bool(load.sum() > 1e9)))
    block.kept, block.router.weight.calls = Counts(), 0
    before = copy.deepcopy(kept(block))
    assert not hexa_fx.explain(block.train(), torch.randn(24, D)).rewritten
    assert str(kept(block)) == str(before)


def test_memory_that_a_tensor_of_an_object_gets_is_no_lost_result() -> None:
    block = Block(lambda m, load: setattr(m.kept.load, "data", load))
    block.kept = Counts()
    optimized, x = hexa_fx.optimize(copy.deepcopy(block), torch.randn(24, D)), torch.randn(5, D)
    block(x), optimized(x)
    torch.testing.assert_close(optimized.kept.load, block.kept.load)


class Centroids(Block):
    """Keeps the mean of its tokens in a frozen parameter: by every call, or by those in train mode; or a module of it does so."""

    def __init__(self, when: str) -> None:
        super().__init__(lambda block, load: None)
        self.when, self.mean = when, nn.Parameter(torch.zeros(D), requires_grad=False)
        self.last = Folding("in place") if when == "in a call" else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.last(super().forward(x - self.mean))
        if self.when == "always" or (self.when == "in train mode" and self.training):
            self.mean.data.copy_(0.9 * self.mean + 0.1 * x.detach().mean(0))
        return out


@pytest.mark.parametrize("when", ["always", "in train mode", "in a call"])
def test_parameters_that_a_forward_writes(when: str) -> None:
    model, x = Centroids(when).double(), torch.randn(20, D, dtype=torch.float64)
    _agrees_in_every_call(model, x)
    assert operators_run(model, (x,))


def _agrees_in_every_call(model: nn.Module, x: torch.Tensor) -> None:
    """With a copy that is not optimized: each call starts from the parameters that the one before left."""
    other = copy.deepcopy(model)
    hexa_fx.optimize_(model, x)
    for mode in (True, False, True):
        results = [each.train(mode)(x) for each in (model, other)]
        torch.testing.assert_close(*results)
        sum(result.square().sum() for result in results).backward()
        gradients = [{n: p.grad for n, p in each.named_parameters() if p.grad is not None} for each in (model, other)]
        torch.testing.assert_close(*gradients)
    torch.testing.assert_close(dict(model.named_parameters()), dict(other.named_parameters()))


def _without_gradients(
    write: Callable[[torch.Tensor, torch.Tensor], Any],
) -> Callable[[torch.Tensor, torch.Tensor], Any]:
    return torch.no_grad()(write)


BALANCED: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "data": lambda bias, load: bias.data.sub_(0.01 * load),
    "without gradients": _without_gradients(lambda bias, load: bias.sub_(0.01 * load)),
    "detached": lambda bias, load: bias.detach().sub_(0.01 * load),
    "by elements": _without_gradients(lambda bias, load: bias.__setitem__(load > load.mean(), -0.1)),
}


@pytest.mark.parametrize("read_later", [False, True])
@pytest.mark.parametrize("way", BALANCED)
def test_biases_of_a_router_that_are_parameters_and_balanced_in_the_forward(way: str, read_later: bool) -> None:
    """As many write DeepSeek's blocks anew, with the bias as an nn.Parameter of the block, which may want gradients."""

    class Balanced(Mixture):
        def __init__(self) -> None:
            super().__init__()
            self.bias = nn.Parameter(torch.zeros(E))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            weights, ids = (self.router(x) + self.bias).softmax(-1).topk(2)
            BALANCED[way](self.bias, torch.bincount(ids.flatten(), minlength=E).to(x.dtype))
            out = self.chosen(x, weights, ids)
            return out * self.bias.sum().exp() if read_later else out

    model, x = Balanced().double(), torch.randn(20, D, dtype=torch.float64)
    _agrees_in_every_call(model, x)
    assert operators_run(model, (x,))


def test_weights_of_experts_that_a_forward_writes() -> None:
    block = Block(lambda block, load: block.experts[1][0].weight.data.clamp_(-1.0, 1.0))
    (report,) = hexa_fx.explain(block, torch.randn(20, D)).blocks
    assert "the code writes to a parameter of its experts (experts.1.0.weight)" in report.reason
    assert report.location is not None


class FollowingRouter(nn.Module):
    """Stays a call of the rewritten block, and keeps the mean of its tokens in a frozen parameter.

    The xmoe gates of torchscale write to theirs in every call, too (``self.wg.mul_(1.5 / wg_norm)``).
    """

    def __init__(self, router: nn.Module, way: str) -> None:
        super().__init__()
        self.router, self.way = router, way
        self.mean = nn.Parameter(torch.zeros(D), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits = self.router(x - self.mean)
        mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        with torch.no_grad():
            if self.way == "another memory":
                self.mean.data = mean
            elif self.way == "data":
                self.mean.data.copy_(mean)
            elif self.way == "in place" or self.training:
                self.mean.copy_(mean)
        return logits


@pytest.mark.parametrize("way", ["in place", "in train mode", "data", "another memory"])
def test_a_router_that_stays_a_call_may_write_to_its_parameters(way: str) -> None:
    """Every call starts from what the one before left; runs of the analysis leave nothing, not even memory."""
    block, x = Block(lambda block, load: None).double(), torch.randn(20, D, dtype=torch.float64)
    block.router = FollowingRouter(block.router, way).double()
    other, memory = copy.deepcopy(block), block.router.mean.data_ptr()
    optimized = hexa_fx.optimize_(block, x)
    assert optimized.report.rewritten[0].status == "rewritten"
    assert block.router.mean.data_ptr() == memory
    torch.testing.assert_close(dict(block.named_parameters()), dict(other.named_parameters()), rtol=0, atol=0)
    for mode in (True, False, True):
        results = [each.train(mode)(x) for each in (block, other)]
        torch.testing.assert_close(*results)
    torch.testing.assert_close(dict(block.named_parameters()), dict(other.named_parameters()))
    assert operators_run(block, (x,))


@pytest.mark.parametrize("first", [True, False])
def test_what_a_router_writes_to_and_the_code_around_it_reads(first: bool) -> None:
    """The router does not stay a call where what it writes to is read once it has done so."""

    class Centred(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x + self.router.mean) if first else super().forward(x) + self.router.mean

    torch.manual_seed(0)
    block, x = Centred(lambda block, load: None).double(), torch.randn(20, D, dtype=torch.float64)
    block.router = FollowingRouter(block.router, "in place").double()
    (report,) = hexa_fx.explain(block, x).blocks
    assert not block.router.mean.any()
    _agrees_in_every_call(block, x)
    if first:
        assert "the code reads a parameter (router.mean) that a submod" in report.reason
        assert report.location is not None
    else:
        assert operators_run(block, (x,))


class MovedRouter(nn.Module):
    """Sees to its dtype in every call, which sets the weight's memory anew, perhaps to the same."""

    def __init__(self, router: nn.Module, dtype: torch.dtype) -> None:
        super().__init__()
        self.router, self.dtype = router, dtype

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.router = self.router.to(self.dtype)
        return self.router(x.to(self.dtype)).to(x.dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["as it is", "wider"])
def test_a_module_that_sees_to_its_dtype_writes_to_no_parameter(dtype: torch.dtype) -> None:
    block, x = Block(lambda block, load: None), torch.randn(20, D)
    block.router = MovedRouter(block.router, dtype)
    other = copy.deepcopy(block)
    assert hexa_fx.optimize_(block, x).report.rewritten
    for _ in range(2):
        torch.testing.assert_close(block(x), other(x))


TABLE: dict[str, float] = {}


class Scaled(Block):
    """Reads a number that its first call leaves behind a global name."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if "scale" not in TABLE:
            TABLE["scale"] = 2.0
        return super().forward(x * TABLE["scale"])


def test_a_cache_that_a_rewritten_block_reads_stays() -> None:
    TABLE.clear()
    block, x = Scaled(lambda m, load: None), torch.randn(24, D)
    optimized = hexa_fx.optimize_(block, x)
    assert TABLE == {"scale": 2.0}
    assert operators_run(optimized, (x,))


@pytest.mark.parametrize("whole", [False, True])
def test_what_a_hook_of_another_file_collects_there(whole: bool) -> None:
    """As hooks in a notebook do on a library's block: only calls of the user's are collected, in a global or a closure."""
    elsewhere: dict[str, Any] = {"__name__": "elsewhere", "heard": []}
    exec("def hear(module, args, result):\n    heard.append(result)", elsewhere)
    kept: list[Any] = []
    block_of_closure = Block(lambda m, load: None)
    block_of_closure.router.register_forward_hook(lambda module, args, result: kept.append(result))
    hexa_fx.optimize_(block_of_closure, torch.randn(24, D))
    assert not kept
    block, x = Block(lambda m, load: None), torch.randn(24, D)
    optimized = hexa_fx.optimize_(block)
    (block if whole else block.router).register_forward_hook(elsewhere["hear"])
    for calls in (1, 2):
        optimized(x)
        assert len(elsewhere["heard"]) == calls
    assert optimized.report.blocks[0].calls == (2, 0, {}, 1)


def gives_a_gradient(weight: nn.Parameter) -> None:
    weight.grad = torch.ones_like(weight)


@pytest.mark.parametrize("way", [gives_a_gradient, nn.Parameter.requires_grad_, nn.init.ones_])
def test_gradients_and_flags_that_a_router_sets(way: Callable[[nn.Parameter], Any]) -> None:
    class Setting(nn.Module):
        def __init__(self, router: nn.Module) -> None:
            super().__init__()
            self.router, self.weight = router, nn.Parameter(torch.randn(E), requires_grad=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            way(self.weight)
            return self.router(x)

    block = Block(lambda m, load: None)
    block.router = Setting(block.router)
    before = block.router.weight.clone()
    hexa_fx.optimize_(block, torch.randn(24, D))
    assert (block.router.weight.grad, block.router.weight.requires_grad) == (None, False)
    assert torch.equal(block.router.weight, before)
