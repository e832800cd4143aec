"""The checks of every call as written functions agree with the slow ones and are short; what was read is found again."""

import copy
import gc
import itertools
import sys
import weakref
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

import hexa_fx
from hexa_fx.capture import capture
from hexa_fx.ir import InputGuard, PythonRead
from hexa_fx.isolation.read_values import snapshot
from hexa_fx.runtime import resolution
from hexa_fx.runtime.attribute_guards import AttributeGuards
from hexa_fx.runtime.guards import ArgumentNames, GuardMiss, check_inputs
from hexa_fx.runtime.install import installed_forward
from hexa_fx.runtime.resolution import Resolution, holds, inputs_of
from tests.detect.mixture import D, E, Mixture
from tests.zoo import variant
from tests.zoo.bodies import SharedExpert


class Named(torch.Tensor):
    """A class of tensors that code can tell from others."""


def _forward(x: Any, ids: Any, scale: float = 1.0, mask: Any = None, *, factor: Any = 2) -> None: ...


_ARGUMENTS = ArgumentNames.of(_forward, False)
_GUARDS = (
    InputGuard("x", "tensor", None, torch.float32, 2, exact_dtype=False, device="cpu", contiguous=True),
    InputGuard("ids", "tensor", None, torch.int64, 1, exact_dtype=True, requires_grad=False),
    InputGuard("scale", "constant", 1.0),
    InputGuard("factor", "constant", 2),
)
_X = [
    torch.randn(3, 4),
    torch.randn(3, 4).bfloat16(),
    torch.randn(4, 3).t(),
    torch.randn(3),
    torch.ones(3, 4).long(),
    nn.Parameter(torch.randn(3, 4)),
    torch.randn(3, 4).as_subclass(Named),
    torch.randn(3, 4, device="meta"),
    None,
    1.0,
]
_IDS = [torch.arange(3), torch.arange(3).int(), torch.arange(3).bool(), torch.ones(3)]


def _slowly(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    values = _ARGUMENTS.bind(args, kwargs)
    check_inputs(_GUARDS, ("x", "ids"), values, _ARGUMENTS.defaults)
    return [values["x"], values["ids"]]


_REST: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
    ((), {}),
    ((1.0,), {}),
    ((True,), {}),
    ((torch.ones(()),), {}),
    ((1.0, None), {}),
    ((1.0, torch.ones(3)), {}),
    ((1.0, None, 2), {}),
    ((), {"factor": 2}),
    ((), {"factor": 2.0}),
    ((), {"factor": float("nan")}),
    ((), {"mask": None}),
    ((), {"mask": 0}),
    ((), {"scale": 1.0, "mask": None, "factor": 2}),
    ((), {"other": 1}),
]


@pytest.mark.parametrize("rest", _REST, ids=str)
def test_written_checks_of_inputs_agree_with_the_slow_ones(rest: tuple[tuple[Any, ...], dict[str, Any]]) -> None:
    for x, ids, by_name in itertools.product(_X, _IDS, (False, True)):
        args, kwargs = rest
        if by_name and not args:
            kwargs = {"ids": ids, "x": x, **kwargs}
        else:
            args = (x, ids, *args)
        found = inputs_of((len(args), *kwargs), _ARGUMENTS, _GUARDS, ("x", "ids"))(args, kwargs)
        try:
            expected = _slowly(args, kwargs)
        except GuardMiss:
            assert found is None
        else:
            assert found is not None
            assert all(one is two for one, two in zip(found, expected, strict=True))


def test_what_is_missing_is_left_to_the_slow_checks() -> None:
    assert inputs_of((1,), _ARGUMENTS, _GUARDS, ("x", "ids"))((torch.randn(3, 4),), {}) is None


class Settings:
    """Every kind of place that something is read from."""

    limit = 3.0

    def __init__(self) -> None:
        self.k, self.names, self.table, self.inner = 2, [1, 2], {"a": 1}, SimpleNamespace(on=True)


class Holder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.config, self.linear = Settings(), nn.Linear(2, 2)
        self.top_k = 2


class Blocks(Mixture):
    def __init__(self, copies: int) -> None:
        super().__init__()
        self.experts.extend([e for _ in range(copies) for e in Mixture().experts])
        self.router = nn.Linear(D, len(self.experts))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.mix(x)[2]


_STEPS: list[tuple[Any, ...]] = [
    ("top_k",),
    ("config",),
    ("config", "k"),
    ("config", "limit"),
    ("config", "names"),
    ("config", "table"),
    ("config", "inner"),
    ("config", "inner", "on"),
    ("config", "missing"),
    ("linear",),
    ("training",),
]


def _guards(block: Holder) -> AttributeGuards:
    def value(steps: tuple[Any, ...]) -> Any:
        found: Any = block
        for key in steps:
            found = getattr(found, key, resolution.MISSING)
        return found

    guards = AttributeGuards(block, reads=[PythonRead("", steps, snapshot(value(steps))) for steps in _STEPS])
    for _ in range(3):
        guards.check()
    return guards


def _set(path: str, value: Any) -> Any:
    def change(block: Holder) -> None:
        owner, _, name = f"block.{path}".rpartition(".")
        setattr(eval(owner, {"block": block}), name, value)

    return pytest.param(change, id=path)


@pytest.mark.parametrize(
    "change",
    [
        _set("top_k", 3),
        _set("top_k", 2.0),
        _set("config.k", True),
        _set("config.limit", 4.0),
        _set("config.names", [1]),
        _set("config.table", {}),
        _set("config.inner.on", 1),
        _set("config.missing", None),
        _set("linear", nn.Identity()),
        _set("training", False),
        _set("config", None),
        pytest.param(lambda block: block.config.names.append(3), id="appended"),
        pytest.param(lambda block: block.config.table.update(a=2), id="updated"),
        pytest.param(lambda block: delattr(block, "top_k"), id="deleted"),
        pytest.param(lambda block: block.linear.register_forward_hook(print), id="hooked"),
    ],
)
def test_written_checks_of_attributes_see_every_change(change: Any) -> None:
    block = Holder()
    guards = _guards(block)
    change(block)
    with pytest.raises(GuardMiss):
        guards.check()


@pytest.fixture
def no_collection() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def test_checks_do_not_keep_their_block(no_collection: None) -> None:
    block = Holder()
    block.checks = _guards(block)
    block.checks.bind(block)
    block.checks.check()
    alive = weakref.ref(block.linear)  # the block itself would be gone, its dict not
    del block
    assert alive() is None


def test_an_optimized_model_is_freed_with_its_last_reference(no_collection: None) -> None:
    model, x = SharedExpert(gated=True), torch.randn(2, 6, variant.D)
    hexa_fx.optimize_(model, x, hexa_fx.HexaConfig(own_code_when_small=False))
    for _ in range(3):
        model(x).sum().backward()
    assert model.report.rewritten
    gc.collect()  # what the analysis left
    alive = [weakref.ref(value) for value in (*model.modules(), *model.parameters())]
    del model
    assert not any(value() is not None for value in alive)


def test_the_checks_of_a_call_are_few_python_calls() -> None:
    """However much was read: a bound on what is called in Python, which no busy machine can break."""
    counts = []
    for copies in (0, 2):
        x = torch.randn(6, D)
        opt = hexa_fx.optimize(Blocks(copies).eval(), x, hexa_fx.HexaConfig(own_code_when_small=False, verify=False))
        forward = installed_forward(opt)
        assert forward is not None
        (made,) = forward.specialisations
        called = 0

        def count(frame: object, event: str, argument: object) -> None:
            nonlocal called
            called += event == "call"

        for _ in range(2):
            opt(x)
        sys.setprofile(count)
        try:
            made.attributes.check()
            made.inputs_of(forward.arguments, (x,), {})
        finally:
            sys.setprofile(None)
        counts.append(called)
    assert counts[0] == counts[1]
    assert counts[0] <= 12


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, weight: Tensor) -> Tensor:
        return weight * self.scale


class Experts(nn.Module):
    """Every expert one matrix; a switch beside them."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.doubled = nn.Parameter(torch.randn(E, D, D)), False

    def forward(self, x: Tensor, index: Tensor) -> Tensor:
        rows = torch.bmm(x[:, None], self.weight[index])[:, 0]
        return rows * 2 if self.doubled else rows


def parametrized(experts: Experts) -> Experts:
    parametrize.register_parametrization(experts, "weight", Scaled())
    return experts


Noted = tuple[Experts, tuple[PythonRead, ...]]


@pytest.fixture(params=["before", "after"])
def noted(request: pytest.FixtureRequest) -> Noted:
    """Parametrized experts, and what a run of them read before or after they were parametrized."""
    experts = Experts() if request.param == "before" else parametrized(Experts())
    reads = capture(experts, (torch.randn(10, D), torch.arange(10) % E), {}, "").reads
    assert any(read.steps[-1] == "doubled" for read in reads)
    return (parametrized(experts) if request.param == "before" else experts), reads


def test_holds_while_weights_change(noted: Noted) -> None:
    experts, reads = noted
    assert holds(experts, reads)
    assert holds(copy.deepcopy(experts), reads)
    experts.parametrizations.weight[0].scale.data.fill_(-3.0)
    experts.parametrizations.weight.original.data.zero_()
    assert holds(experts, reads)


def test_another_value_beside_the_weight_is_noticed(noted: Noted) -> None:
    experts, reads = noted
    experts.doubled = True
    assert not holds(experts, reads)
    with pytest.raises(GuardMiss, match="doubled"):
        Resolution(experts, reads)


class SpectralNorm(Mixture):
    """Weights that are computed anew whenever they are asked for, and count that."""

    def __init__(self) -> None:
        super().__init__()
        for expert in self.experts:
            parametrizations.spectral_norm(expert[0])

    def forward(self, x: Tensor) -> Tensor:
        return self.mix(x)[2]


@pytest.mark.parametrize("given", [True, False])
def test_weights_are_computed_for_the_code_alone(given: bool) -> None:
    torch.manual_seed(0)
    model, x = SpectralNorm(), torch.randn(20, 6)
    opt = hexa_fx.optimize(copy.deepcopy(model), *([x] if given else []))
    for _ in range(3):
        torch.testing.assert_close(opt(x), model(x))
    for (name, buffer), (_, wanted) in zip(opt.named_buffers(), model.named_buffers()):
        assert torch.equal(buffer, wanted), name
    assert len(opt.report.blocks[0].calls.own) == 1, "it is analysed once"
