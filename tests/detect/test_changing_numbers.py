"""What modules keep and others change between calls: numbers of schedules, and what `functools.cached_property` computed."""

import copy
import dataclasses
import functools
import types
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hexa_fx
from hexa_fx.runtime.forward import HexaForward
from tests.detect.mixture import D, K, Mixture
from tests.zoo.compare import compare, operators_run

CALLS = 12


class Scheduled(Mixture):
    """A mixture with a number; ``use``: what its forward does with it."""

    def __init__(self, use: Callable[[Any, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.use, self.number, self.aux_loss = use, 1.0, torch.zeros(())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.use(self, x)


def routed(m: Any, x: torch.Tensor, probs: torch.Tensor) -> torch.Tensor:
    out: torch.Tensor = m.chosen(x, *probs.topk(K, -1))
    return out


def temperature(m: Any, x: torch.Tensor) -> torch.Tensor:
    return routed(m, x, (m.router(x) / m.number).softmax(-1))


def gumbel(m: Any, x: torch.Tensor) -> torch.Tensor:
    logits = m.router(x)
    return routed(m, x, F.gumbel_softmax(logits, tau=m.number) if m.training else logits.softmax(-1))


def noise(m: Any, x: torch.Tensor) -> torch.Tensor:
    logits = m.router(x)
    return routed(m, x, (logits + torch.randn_like(logits) * m.number if m.training else logits).softmax(-1))


def jitter(m: Any, x: torch.Tensor) -> torch.Tensor:
    shaken = x * torch.empty_like(x).uniform_(1 - m.number, 1 + m.number) if m.training and m.number > 0 else x
    return routed(m, x, m.router(shaken).softmax(-1))


def threshold(m: Any, x: torch.Tensor) -> torch.Tensor:
    probs = m.router(x).softmax(-1)
    return routed(m, x, torch.where(probs > 0.1 * m.number, probs, 0.0))


def exponent(m: Any, x: torch.Tensor) -> torch.Tensor:
    probs = m.router(x).softmax(-1) ** m.number
    return routed(m, x, probs / probs.sum(-1, keepdim=True))


def coefficient(m: Any, x: torch.Tensor) -> torch.Tensor:
    probs, _, out, _ = m.mix(x)
    m.aux_loss = probs.mean(0).square().sum() * m.number
    return out


def warm_up(m: Any, x: torch.Tensor) -> torch.Tensor:
    out: torch.Tensor = m.mix(x)[2]
    return out * min(1.0, 0.1 + m.number / 6) if m.number < 6 else out


def falling(call: int) -> float:
    return 1.0 - 0.05 * call


SCHEDULES = [(use, falling) for use in (temperature, gumbel, noise, jitter, threshold, exponent, coefficient)]
SCHEDULES += [(warm_up, lambda call: call), (temperature, lambda call: 2 if call % 3 else 0.75)]
SCHEDULES += [(temperature, lambda call: falling(call) if call < 6 else torch.tensor(0.6))]


@pytest.mark.parametrize(("use", "schedule"), SCHEDULES, ids=lambda item: item.__name__)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.bfloat16, 0.05)])
def test_every_call_asks_for_them(
    use: Any, schedule: Callable[[int], float], dtype: torch.dtype, tolerance: float
) -> None:
    torch.manual_seed(0)
    block = Scheduled(use).to(dtype)
    opt = hexa_fx.optimize(copy.deepcopy(block), config=hexa_fx.HexaConfig(own_code_when_small=False))
    for call in range(CALLS):
        x, found = torch.randn(9 + call, D, dtype=dtype), []
        for model in (block, opt):
            model.number = schedule(call)
            model.train(call % 4 != 3).zero_grad()
            given = x.clone().requires_grad_()
            torch.manual_seed(call)
            y = model(given)
            (y.square().sum() + model.aux_loss).backward()
            found.append([y, given.grad, *(p.grad for p in model.parameters() if p.grad is not None)])
        for wanted, value in zip(*found, strict=True):
            torch.testing.assert_close(
                value, wanted, rtol=tolerance, atol=tolerance * float(wanted.detach().abs().max())
            )
        assert opt.number == schedule(call)
        assert type(opt.number) is type(schedule(call))
    forward = vars(opt)["forward"]
    assert isinstance(forward, HexaForward)
    assert not forward.own, forward.own
    assert len(forward.specialisations) <= 3  # the first value, any other, and another mode at most


def ends(m: Any, x: torch.Tensor) -> torch.Tensor:
    logits = m.router(x)
    return routed(m, x, (logits + torch.randn_like(logits) * m.number if m.number > 0 else logits).softmax(-1))


def cools(m: Any, x: torch.Tensor) -> torch.Tensor:
    logits = m.router(x)
    return routed(m, x, (logits if m.number > 0.7 else logits / m.number).softmax(-1))


@pytest.mark.parametrize("use", [ends, cools])
def test_a_branch_on_one_is_taken_anew(use: Any) -> None:
    """What was made of values on the other side does not take the call, though all else in it is as it was."""
    block = Scheduled(use).double()
    opt = hexa_fx.optimize(copy.deepcopy(block), config=hexa_fx.HexaConfig(own_code_when_small=False))
    for call in range(2 * CALLS):
        x = torch.randn(11, D, dtype=torch.float64)
        block.number = opt.number = max(0.0, falling(call)) if use is ends else 1.0 / (1 + 0.1 * call)
        found = []
        for model in (block, opt):
            torch.manual_seed(call)
            found.append(model(x))
        torch.testing.assert_close(found[1], found[0])
    forward = vars(opt)["forward"]
    assert not forward.own, forward.own
    assert (
        len(forward.specialisations) <= 4
    )  # the first value, any other, and those on the other side: one, and any other


@dataclasses.dataclass(frozen=True)
class Frozen:
    temperature: float = 1.0
    coefficient: float = 0.01
    top_k: int = K


class Configured(Mixture):
    """Reads its numbers from what ``held`` gives."""

    def __init__(self, config: Any, held: Callable[[Any], Any]) -> None:
        super().__init__()
        self.config, self.held, self.aux_loss = config, held, torch.zeros(())

    def number(self, name: str) -> Any:
        return getattr(self.held(self.config), name)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        probs = (self.router(x) / self.number("temperature")).softmax(-1)
        self.aux_loss = probs.mean(0).square().sum() * self.number("coefficient")
        return x + self.chosen(x, *probs.topk(self.number("top_k"), -1))


def set_number(model: nn.Sequential, name: str, number: float) -> None:
    for block in model:
        if isinstance(block.config, Frozen):
            block.config = dataclasses.replace(block.config, **{name: number})
        else:
            setattr(block.held(block.config), name, number)


NUMBERS = dataclasses.asdict(Frozen())
CONFIGS: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "namespace": (lambda: SimpleNamespace(**NUMBERS), lambda config: config),
    "nested": (lambda: SimpleNamespace(router=SimpleNamespace(**NUMBERS)), lambda config: config.router),
    "exchanged": (Frozen, lambda config: config),
}


@pytest.mark.parametrize("config", CONFIGS)
def test_numbers_of_configs_are_asked_for_too(config: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that code chooses by (``top_k``) is one more kind. Other threads find the numbers in the user's objects meanwhile."""
    import hexa_fx.analysis as analysis

    seen, plain = [], analysis.analyse
    make, held = CONFIGS[config]
    shared = make()

    def analyse(observation: Any, config: Any) -> Any:
        seen.append(observation.path)
        assert not observation.numbers or held(observation.module.config) is not held(opt[0].config)
        return plain(observation, config)

    monkeypatch.setattr(analysis, "analyse", analyse)
    model = nn.Sequential(*(Configured(shared, held) for _ in range(2))).double()
    opt = hexa_fx.optimize(copy.deepcopy(model), config=hexa_fx.HexaConfig(own_code_when_small=False))
    for call in range(CALLS):
        now = {"temperature": falling(call), "coefficient": 0.1 * call, "top_k": 1 if call in (7, 8) else K}
        x, found = torch.randn(9 + call, D, dtype=torch.float64), []
        for each in (model, opt):
            for name, number in now.items():
                set_number(each, name, number)
            each.zero_grad()
            given = x.clone().requires_grad_()
            y = each(given)
            (y.square().sum() + sum(block.aux_loss for block in each)).backward()
            found.append([y, given.grad, *(p.grad for p in each.parameters() if p.grad is not None)])
            numbers = {name: block.number(name) for block in each for name in now}
            assert numbers == now
            assert [type(number) for number in numbers.values()] == [float, float, int]
        for wanted, value in zip(*found, strict=True):
            torch.testing.assert_close(value, wanted, rtol=1e-12, atol=1e-12)
    assert seen == ["0"] * 3
    assert not any(vars(block)["forward"].own for block in opt)


def test_each_value_of_a_number_in_a_dict_is_a_kind_of_call() -> None:
    block = Scheduled(lambda m, x: routed(m, x, (m.router(x) / m.config["temperature"]).softmax(-1))).double()
    block.config = {"temperature": 1.0}
    config = hexa_fx.HexaConfig(own_code_when_small=False, specialisations=3)
    opt = hexa_fx.optimize(copy.deepcopy(block), config=config)
    for call in range(5):
        x = torch.randn(9 + call, D, dtype=torch.float64)
        block.config["temperature"] = opt.config["temperature"] = falling(call)
        torch.testing.assert_close(opt(x), block(x))
    forward = vars(opt)["forward"]
    assert len(forward.specialisations) == 3
    assert sum(forward.own.values()) == 2


class Leaky(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.slope = 0.1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.leaky_relu(x, self.slope)


def test_a_number_of_an_activation_stays_a_condition() -> None:
    """Operators take it as a constant: each value is another kind of call, analysed once."""
    block, activation = Scheduled(lambda m, x: m.mix(x)[2]).double(), Leaky()
    for expert in block.experts:
        expert[1] = activation
    opt = hexa_fx.optimize(copy.deepcopy(block), config=hexa_fx.HexaConfig(own_code_when_small=False))
    for slope in (0.1, 0.2, 0.1, 0.2, 0.3):
        activation.slope = opt.experts[0][1].slope = slope
        x = torch.randn(11, D, dtype=torch.float64)
        torch.testing.assert_close(opt(x), block(x))
    forward = vars(opt)["forward"]
    assert not forward.own, forward.own
    assert len(forward.specialisations) == 3


CONFIG = hexa_fx.HexaConfig(own_code_when_small=False)


class Settings:
    def __init__(self) -> None:
        self.factor = 3.0

    @functools.cached_property
    def scale(self) -> float:
        return self.factor / 2

    @functools.cached_property
    def inner(self) -> Any:
        return types.SimpleNamespace(scale=self.factor)


class Cached(Mixture):
    def __init__(self, use: Callable[[Any, torch.Tensor], torch.Tensor], settings: Settings) -> None:
        super().__init__()
        self.use, self.settings, self.factor = use, settings, 2.0
        self.register_buffer("per_column", torch.rand(D))

    @functools.cached_property
    def number(self) -> float:
        return self.factor / 4

    @functools.cached_property
    def nothing(self) -> None:
        return None

    @functools.cached_property
    def buffer(self) -> torch.Tensor:
        return self.per_column

    @functools.cached_property
    def tensor(self) -> torch.Tensor:
        return self.per_column * 2

    @functools.cached_property
    def modules_in_order(self) -> list[nn.Module]:
        return [*self.experts]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.use(self, x)


def plain(m: Any, x: torch.Tensor) -> torch.Tensor:
    out: torch.Tensor = m.mix(x)[2]
    return out


USES: dict[str, Callable[[Any, torch.Tensor], torch.Tensor]] = {
    "number": lambda m, x: plain(m, x) * m.number,
    "nothing": lambda m, x: plain(m, x) if m.nothing is None else x,
    "buffer": lambda m, x: plain(m, x) * m.buffer,
    "tensor": lambda m, x: plain(m, x) * m.tensor,
    "modules": lambda m, x: plain(m, x) * len(m.modules_in_order),
    "settings": lambda m, x: plain(m, x) * m.settings.scale * m.settings.inner.scale,
}


def layers(use: str) -> nn.Sequential:
    torch.manual_seed(0)
    settings = Settings()
    return nn.Sequential(*(Cached(USES[use], settings) for _ in range(2))).double()


def tokens(rows: int = 9) -> torch.Tensor:
    return torch.randn(rows, D, dtype=torch.float64, generator=torch.Generator().manual_seed(rows))


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("given", [True, False])
def test_calls_are_rewritten_once_one_has_asked(use: str, given: bool) -> None:
    model = layers(use)
    opt = hexa_fx.optimize(copy.deepcopy(model), (tokens(),) if given else None, config=CONFIG)
    assert not any(vars(layer).keys() & vars(Cached).keys() - {"forward"} for layer in opt)  # nobody has asked so far
    assert not given or use == "settings" or "no call has asked for" in opt.report.blocks[0].reason
    for each in (model, opt):  # what they are computed from changes before that
        each[1].factor = each[0].settings.factor = 5.0
        each[0].per_column.mul_(0.5)
    for _ in range(2):
        assert compare(model, opt, (tokens(),)).within(1e-12)
    assert operators_run(opt, (tokens(11),))


def test_another_value_is_noticed() -> None:
    model = layers("settings")
    model[0].use = model[1].use = lambda m, x: plain(m, x) * m.tensor * m.number * m.settings.scale
    opt = hexa_fx.optimize(copy.deepcopy(model), config=CONFIG)
    compare(model, opt, (tokens(),))
    changes: list[Callable[[Any], object]] = [
        lambda m: setattr(m[0], "number", 7.0),
        lambda m: setattr(m[0].settings, "scale", 0.3),
        lambda m: setattr(m[1], "tensor", torch.linspace(-1, 1, D, dtype=torch.float64)),
    ]
    for change in changes:
        for each in (model, opt):
            change(each)
        assert compare(model, opt, (tokens(),)).within(1e-12)
        assert operators_run(opt, (tokens(),))


SEEN = 0


class Counters:
    rows = 0


def count(rows: int) -> None:
    global SEEN
    SEEN += rows


def seen_in_globals(m: Any, x: torch.Tensor) -> torch.Tensor:
    count(x.shape[0])
    return routed(m, x, F.softmax(m.router(x), -1))


def last_in_globals(m: Any, x: torch.Tensor) -> torch.Tensor:
    global LAST
    LAST = [x.shape[0]]
    return routed(m, x, F.softmax(m.router(x), -1))


def counted_in_a_class(m: Any, x: torch.Tensor) -> torch.Tensor:
    Counters.rows += x.shape[0]
    return routed(m, x, F.softmax(m.router(x), -1))


@pytest.mark.parametrize(
    ("use", "name"), [(seen_in_globals, "SEEN"), (last_in_globals, "LAST"), (counted_in_a_class, "rows")]
)
def test_sizes_that_are_set_by_global_names(use: Callable[[Any, torch.Tensor], torch.Tensor], name: str) -> None:
    """The rewritten block would not set them, and what a recording had set remained."""
    optimized = hexa_fx.optimize(Scheduled(use), torch.randn(20, D))
    (block,) = optimized.report.blocks
    assert block.reason.startswith(f"the code sets {name} to a number of its run")
    before, rows = (SEEN, Counters.rows), 7
    optimized(torch.randn(rows, D))
    added = {SEEN - before[0], Counters.rows - before[1]}
    assert {type(SEEN), type(Counters.rows)} == {int}
    assert added <= {0, rows}
    if use is last_in_globals:
        assert globals().pop("LAST") == [rows]
