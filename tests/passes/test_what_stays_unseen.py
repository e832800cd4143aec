"""What a run on the example shows nothing of, and later calls depend on: equal, the block's own code, or refused."""

import copy
import gc
import hashlib
import logging
import math
import operator
import os
import sys
import threading
import time
from array import array
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import hexa_fx
from hexa_fx.capture import capture
from hexa_fx.observers import PassEvent, listening
from tests.detect import sizes_elsewhere
from tests.runtime.handmade import D, E, ListMoE, around, plain
from tests.zoo.compare import operators_run

K = 2


def scaled(x: torch.Tensor) -> torch.Tensor:
    return x * scaled.by


scaled.by = 1.0
LOCAL = threading.local()


log = logging.getLogger(__name__)


class Catching(ListMoE):
    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        try:
            flat = hidden.view(-1, D)
        except RuntimeError:
            flat = 0.5 * hidden.reshape(-1, D)
        return super().forward(flat).view(hidden.shape)


class ByLoad(ListMoE):
    """Scales by a number that the host makes of how many tokens the experts get."""

    def load(self, counts: torch.Tensor) -> Any:
        return max(counts.tolist()) // 400

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        index, _ = self.router(hidden)
        return super().forward(hidden) / (1 + self.load(torch.bincount(index.flatten(), minlength=E)))


class NoiseFirst(ListMoE):
    """Decides once it has drawn random numbers."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        noisy = hidden * torch.rand_like(hidden)
        return super().forward(hidden) * (1.0 if noisy.view(-1, 2, D).shape[0] < 25 else 0.5)


class OneSizeInside(nn.Module):
    """Decides on how many rows what the experts compute has: one for every token and choice."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(D, E)
        self.up, self.down = nn.Parameter(torch.randn(E, D, 20)), nn.Parameter(torch.randn(E, 20, D))

    def asks(self, up: torch.Tensor) -> bool:
        return up.flatten(0, 1).shape[0] == 30

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        weights, index = self.router(hidden).softmax(-1).topk(K)
        up = torch.einsum("td,tkdi->tki", hidden, self.up[index]).relu()
        up = 0.5 * up if self.asks(up) else up
        down = torch.einsum("tki,tkid->tkd", up, self.down[index])
        return (down * weights[..., None]).sum(1)


def asking(asks: Callable[[Any, torch.Tensor], bool]) -> type[OneSizeInside]:
    return type("Asking", (OneSizeInside,), {"asks": asks})


class Hooked(ListMoE):
    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        out = super().forward(hidden)
        if out.requires_grad:
            out.register_hook(lambda gradient: gradient.clamp(-1e6, 1e6))
        return out


TIMED = around(lambda self, x: plain(self, x) * (1.0 if time.time() < 1e12 else 0.5))


class WithArray(ListMoE):
    def __init__(self) -> None:
        super().__init__()
        self.scale = array("d", [1.0])

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return super().forward(hidden) * self.scale[0]


class SetsAGlobal(ListMoE):
    """The same in every call, and read by others only."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        global DIMENSIONS
        DIMENSIONS = hidden.dim()
        return super().forward(hidden)


DIMENSIONS = 0


class SetsAnotherModules(ListMoE):
    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        sizes_elsewhere.DIMENSIONS = 2
        return super().forward(hidden)


def tokens(count: int = 12, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(count, D, dtype=dtype)


def set_function(model: nn.Module) -> None:
    scaled.by = 0.5


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scaled, "by", 1.0)
    monkeypatch.setattr(logging.root, "level", logging.WARNING)
    monkeypatch.setattr(log, "level", logging.NOTSET)
    log.manager._clear_cache()
    torch.manual_seed(0)


def optimized(block: type[nn.Module], *given: Any) -> tuple[nn.Module, nn.Module]:
    model = block().eval()
    example = given or tokens()
    return copy.deepcopy(model), hexa_fx.optimize(
        model, example if isinstance(example, torch.Tensor) else tuple(example)
    )


def strided() -> torch.Tensor:
    return torch.randn(D, 12).t()


def nothing(model: nn.Module) -> None:
    pass


IN_FLOAT32 = around(lambda self, x: plain(self, x).float())
PARTS = {
    "one": lambda x: x.split(9000),  # of the example, and more of more tokens than any that it is tried on
    "more": lambda x: torch.chunk(x, chunks=math.ceil(len(x) / 600), dim=0),
}
GIVES: dict[str, tuple[type[nn.Module], Callable[[Any], Any], Callable[[], torch.Tensor]]] = {
    "function": (around(lambda self, x: scaled(plain(self, x))), set_function, tokens),
    "bfloat16": (IN_FLOAT32, lambda model: model.bfloat16(), lambda: tokens(dtype=torch.bfloat16)),
    "float64": (IN_FLOAT32, lambda model: model.double(), lambda: tokens(dtype=torch.float64)),
    "layout": (around(lambda self, x: plain(self, x if x.is_contiguous() else 0.5 * x)), nothing, strided),
    "seed": (
        around(lambda self, x: plain(self, x) * (1 + torch.initial_seed() % 7)),
        lambda model: torch.manual_seed(torch.initial_seed() + 1) and None,
        tokens,
    ),
    "catching": (Catching, nothing, strided),
    "hooks": (
        around(lambda self, x: plain(self, x) * (2.0 if self._forward_hooks else 1.0)),
        lambda model: model.register_forward_hook(lambda *call: None),
        tokens,
    ),
    "parts": (
        around(lambda self, x: torch.cat([plain(self, part) for part in PARTS["one"](x)])),
        nothing,
        lambda: tokens(9001),
    ),
    "more parts": (
        around(lambda self, x: torch.cat([plain(self, part) for part in PARTS["more"](x)])),
        nothing,
        lambda: tokens(700),
    ),
}


@pytest.mark.parametrize(("block", "wake", "call"), GIVES.values(), ids=GIVES)
def test_what_it_gives_where_it_gives_something_else(
    block: type[nn.Module], wake: Callable[[nn.Module], Any], call: Callable[[], torch.Tensor]
) -> None:
    original, opt = optimized(block)
    assert opt.report.rewritten, opt.report
    for model in (original, opt):
        wake(model)
    given = call()
    expected, found = original(given), opt(given)
    assert found.dtype == expected.dtype
    near = {"rtol": 0.05, "atol": 0.02} if given.dtype == torch.bfloat16 else {}
    torch.testing.assert_close(found, expected, **near)


PLAIN_NUMBERS: dict[str, Callable[[torch.Tensor], float]] = {  # too large for verification to reach their steps
    "floats": lambda x: int(math.log2(x.shape[0] + 5000)),
    "indices": lambda x: 1 + operator.index(x.shape[0]) // 5000,
    "long steps": lambda x: len(range(0, x.shape[0], 5000)),
    "bytes": lambda x: 1 + x.nbytes // (4 * D * 5000),
    "bits": lambda x: 1 + ((x.shape[0] + 2) & 8192),
    "round": lambda x: 1 + round(x.shape[0] / 10000),
}


@pytest.mark.parametrize("number", PLAIN_NUMBERS.values(), ids=PLAIN_NUMBERS)
def test_plain_numbers_made_of_sizes(number: Callable[[torch.Tensor], float]) -> None:
    model = around(lambda self, x: plain(self, x) / number(x))().eval()
    opt = hexa_fx.optimize(model, tokens(), hexa_fx.HexaConfig(verify=False))
    assert opt.report.rewritten
    for count in (12, 8190):
        given = tokens(count)
        torch.testing.assert_close(opt(given), model(given))


def test_whether_its_input_wants_a_gradient_is_asked_in_every_call() -> None:
    original, opt = optimized(around(lambda self, x: plain(self, x).detach() if x.requires_grad else plain(self, x)))
    assert opt.report.rewritten, opt.report
    for wants in (False, True, False, True):
        given = tokens().requires_grad_(wants)
        for mode in (torch.enable_grad, torch.no_grad):
            with mode():
                expected, found = original(given), opt(given)
            torch.testing.assert_close(found, expected)
            assert found.requires_grad == expected.requires_grad == (not wants and mode is torch.enable_grad)


class OnChoices(ListMoE):
    """Scales by what the host makes of the choices."""

    def scale(self, index: torch.Tensor) -> float:
        raise NotImplementedError

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        index, _ = self.router(hidden)
        return super().forward(hidden) * self.scale(index)


def of_a_file(self: nn.Module, index: torch.Tensor) -> float:
    with open(os.devnull) as file:
        return float(file.read() or 1.0)


def on_choices(scale: Callable[[Any, torch.Tensor], float]) -> type[OnChoices]:
    return type("Scaling", (OnChoices,), {"scale": scale})


INSIDE = "a size of what the experts compute"
REFUSED: dict[str, tuple[type[nn.Module], str]] = {
    "digest": (
        on_choices(lambda self, index: 2.0 if hashlib.md5(index.numpy().tobytes()).digest()[0] < 3 else 1.0),
        "a part of the system",
    ),
    "file": (on_choices(of_a_file), "reads open"),
    "dir": (on_choices(lambda self, index: 2.0 if "note" in dir(self) else 1.0), "reads dir"),
    "caller": (
        on_choices(lambda self, index: 1.0 + len(sys._getframe(1).f_code.co_name) * 0.0),
        "reads _getframe",
    ),
    "cut far out": (around(lambda self, x: plain(self, x[:300])), "600 tokens"),
    "load": (ByLoad, "800 tokens"),
    "largest load": (  # another expert's than on the example
        type("ByLargestLoad", (ByLoad,), {"load": lambda self, counts: max(counts) > 60}),
        "experts",
    ),
    "halves first": (
        around(lambda self, x: plain(self, x.mul_(0.5)) * (1.0 if x.view(-1, 2, D).shape[0] < 25 else 0.5)),
        "has written to its input",
    ),
    "noise first": (NoiseFirst, "has drawn random numbers"),
    "size inside": (OneSizeInside, INSIDE),
    "rows of six, thousands": (
        asking(lambda self, up: up.flatten(0, 1).unflatten(0, (-1, 6)).shape[0] > 4000),
        INSIDE,
    ),
    "above a size": (asking(lambda self, up: up.flatten(0, 1).shape[0] > 100 * self.up.shape[2]), INSIDE),
    "hooked": (Hooked, "hooks on gradients"),
    "clock": (TIMED, "a clock"),
    "written to the thread": (
        around(lambda self, x: plain(self, setattr(LOCAL, "last", x.sum()) or x)),
        "the code changes",
    ),
    "array": (WithArray, "without a trace"),
}


@pytest.mark.parametrize(("block", "reason"), REFUSED.values(), ids=REFUSED)
def test_what_nothing_can_check_is_refused(block: type[nn.Module], reason: str) -> None:
    _, opt = optimized(block)
    assert not opt.report.rewritten
    assert reason in opt.report.blocks[0].reason


@pytest.mark.parametrize(
    ("block", "where"), [(SetsAGlobal, sys.modules[__name__]), (SetsAnotherModules, sizes_elsewhere)]
)
def test_a_constant_that_code_leaves_elsewhere(
    block: type[nn.Module], where: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(where, "DIMENSIONS", 0, raising=False)
    _, opt = optimized(block)
    opt(tokens())
    assert operators_run(opt, (tokens(),))
    where.DIMENSIONS = 0  # type: ignore[attr-defined]
    opt(tokens())
    assert where.DIMENSIONS == 2


class Counting(ListMoE):
    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        COUNTED["calls"] += 1
        return super().forward(hidden)


COUNTED = {"calls": 0}


@pytest.mark.parametrize("block", [TIMED, Hooked, Counting])
def test_what_other_inputs_and_outer_modules_would_not_change_is_refused_once(block: type[nn.Module]) -> None:
    """Tokens that are alike have a block recorded on others, and a refused one the modules around it: minutes for many experts."""
    model = nn.Sequential(OrderedDict(embedding=nn.Embedding(4, D), outer=nn.Sequential(nn.Sequential(block())))).eval()
    recorded: list[str] = []

    def see(event: PassEvent) -> None:
        if event.name in ("capture", "verify") and event.when == "before":
            recorded.append(f"{event.name} {event.path}")

    with listening(see):
        opt = hexa_fx.optimize(model, torch.arange(40).reshape(1, -1) % 4)
    assert opt.report.blocks[0].status == "refused"
    assert {*recorded} <= {"capture outer.0.0", "verify outer.0.0"}
    assert len(recorded) <= 4


class Switches(threading.local):
    halved = False


OF_CLASS = Switches()


def test_what_lies_in_the_thread_is_asked_in_every_call_and_thread() -> None:
    scaled = around(lambda self, x: plain(self, x) * getattr(LOCAL, "scale", 1.0) * (0.5 if OF_CLASS.halved else 1))
    original, opt = optimized(scaled)
    given = tokens()
    found: list[tuple[int, torch.Tensor]] = []

    def call() -> None:
        found.append((operators_run(opt, (given,)), opt(given) - original(given)))

    def elsewhere() -> None:
        thread = threading.Thread(target=call)
        thread.start()
        thread.join()

    call()
    elsewhere()
    try:
        LOCAL.scale = 3.0
        call()
        elsewhere()
        OF_CLASS.halved = True
        call()
    finally:
        del LOCAL.scale, OF_CLASS.halved
    call()
    assert all(ran for ran, _ in found), found
    for _, difference in found:
        torch.testing.assert_close(difference, torch.zeros_like(given))


class Collecting(ListMoE):
    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        assert not gc.isenabled()
        return super().forward(hidden)


@pytest.mark.parametrize("enabled", [True, False])
def test_the_garbage_collector_waits_while_a_run_is_recorded(enabled: bool) -> None:
    """Its callbacks would be taken for code of the block."""
    (gc.enable if enabled else gc.disable)()
    try:
        capture(Collecting(), (tokens(),), {})
        assert gc.isenabled() == enabled
    finally:
        gc.enable()
