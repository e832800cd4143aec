"""What a trial run draws, writes and leaves: no random numbers of the user's, copies of tensors, no garbage."""

import copy
import gc
import random
import weakref
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import hexa_fx
from hexa_fx.capture import capture
from hexa_fx.capture.observe import observe
from hexa_fx.isolation.torch_state import random_state_kept
from hexa_fx.isolation.written_tensors import tensors_restored
from hexa_fx.sources import garbage
from hexa_fx.sources.garbage import collect_all, collected_after
from tests.detect.mixture import D, Mixture


class Noisy(Mixture):
    """Draws from the CPU's generator, and from the first GPU's if there is one."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        drawn = torch.rand(()) + sum(torch.rand((), generator=gpu) for gpu in torch.cuda.default_generators[:1])
        self.last = drawn
        return self.mix(x)[2]


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> tuple[torch.Generator, ...]:
    """Generators that stand in for those of two GPUs."""
    generators = torch.Generator().manual_seed(11), torch.Generator().manual_seed(12)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(generators))
    monkeypatch.setattr(torch.cuda, "default_generators", generators)
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda device: generators[device].get_state())
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda state, device: generators[device].set_state(state))
    return generators


def _states(gpus: tuple[torch.Generator, ...]) -> list[list[int]]:
    return [generator.get_state().tolist() for generator in (torch.default_generator, *gpus)]


def test_all_generators_are_seeded_inside_and_put_back(gpus: tuple[torch.Generator, ...]) -> None:
    @random_state_kept(seed=5)
    def draw(divisor: int) -> list[list[float]]:
        return [(torch.rand(3, generator=generator) / (6 // divisor)).tolist() for generator in (None, *gpus)]

    before = _states(gpus)
    assert draw(1) == draw(1)
    with pytest.raises(ZeroDivisionError):
        draw(0)
    assert _states(gpus) == before


@pytest.mark.parametrize("kind", [numpy.random.MT19937, numpy.random.PCG64])
def test_runs_inside_start_alike(kind: Callable[[int], Any]) -> None:
    def draw() -> tuple[float, ...]:
        return random.random(), numpy.random.random(), float(torch.rand(()))

    before = numpy.random.get_bit_generator()
    numpy.random.set_bit_generator(kind(3))
    try:
        states = random.getstate(), torch.get_rng_state().tolist(), str(numpy.random.get_state())
        with random_state_kept():
            one, two = (random_state_kept(seed=5)(draw)() for _ in range(2))
        assert one == two
        assert states == (random.getstate(), torch.get_rng_state().tolist(), str(numpy.random.get_state()))
    finally:
        numpy.random.set_bit_generator(before)


@pytest.mark.parametrize("trial", ["observe", "capture", "explain"])
def test_a_trial_run_leaves_the_streams_of_all_devices(trial: str, gpus: tuple[torch.Generator, ...]) -> None:
    block, x = Noisy(), torch.randn(7, D)
    before = _states(gpus)
    if trial == "explain":
        hexa_fx.explain(block, (x,))
    else:
        (observe if trial == "observe" else capture)(block, (x,), {})
    assert _states(gpus) == before


def test_a_device_that_is_not_in_use_keeps_its_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seeds for CUDA wait in torch until the process first uses it, and the last one counts."""
    waiting: list[int] = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setattr(torch.cuda, "default_generators", ())
    monkeypatch.setattr(torch.cuda, "manual_seed_all", waiting.append)
    block: nn.Module = Noisy()
    assert hexa_fx.explain(block, torch.randn(7, D)).blocks
    assert not waiting


class Seeding(Mixture):
    def __init__(self, seed: Callable[[], torch.Generator | None]) -> None:
        super().__init__()
        self.seed = seed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        generator = self.seed()
        return self.mix(x + torch.rand(x.shape, dtype=x.dtype, generator=generator))[2]


@pytest.mark.parametrize(
    ("seed", "reason"),
    [
        (lambda: torch.manual_seed(0) and None, "random numbers drawn: not what the original has"),
        (lambda: random.seed(0), "the code draws random numbers from seed"),
        (lambda: torch.Generator().manual_seed(0), "the code draws random numbers from a torch.Generator of its own"),
    ],
    ids=["torch", "python", "generator"],
)
def test_code_that_seeds_random_numbers_by_itself(seed: Callable[[], torch.Generator | None], reason: str) -> None:
    """Also with the number that most code seeds with."""
    report = hexa_fx.explain(Seeding(seed).double(), torch.randn(9, D, dtype=torch.float64))
    assert reason in report.blocks[0].reason


class Copies(TorchDispatchMode):
    """Counts numbers that are copied."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.clone.default:
            self.count += result.numel()
        return result


def test_a_parameter_is_not_copied_where_its_numbers_stay() -> None:
    """As where PEFT parametrizes the experts of every layer in a forward: copies of all would be a second model."""
    module = nn.Linear(8, 8)
    at, before = module.weight.data_ptr(), module.weight.detach().clone()
    with Copies() as copies, tensors_restored(module):
        module.weight.requires_grad_(False)
        module.weight.data = torch.ones(4, 8)
    assert copies.count == 0
    assert (module.weight.data_ptr(), module.weight.requires_grad) == (at, True)
    assert torch.equal(module.weight, before)


def test_what_is_written_in_place_is_copied_once() -> None:
    module, kept = nn.Linear(8, 8), torch.ones(3)
    before = module.weight.detach().clone()

    def write(tensor: Tensor) -> None:
        tensor.mul_(2).add_(1)

    with torch.no_grad(), Copies() as copies, tensors_restored(module):
        write(module.weight)
        write(kept)
    assert copies.count == 64 + 3
    assert torch.equal(module.weight, before)
    assert torch.equal(kept, torch.ones(3))


class Normalised(Mixture):
    """Running statistics, of what experts get and give, to which no function writes by its name."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = nn.BatchNorm1d(D), nn.InstanceNorm1d(D, track_running_stats=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.after(self.mix(self.before(x))[2].T[None])[0].T


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("training", [True, False])
def test_running_statistics_are_left_as_they_were(dtype: torch.dtype, training: bool) -> None:
    block = Normalised().to(dtype).train(training)
    before = copy.deepcopy(block.state_dict())
    optimized = hexa_fx.optimize(block, torch.randn(9, D, dtype=dtype))
    assert bool(optimized.report.rewritten) is not training  # batches decide on results in train mode
    assert all(torch.equal(optimized.state_dict()[name], value) for name, value in before.items())


@pytest.mark.parametrize("in_use", [True, False])
@pytest.mark.parametrize("enabled", [True, False])
def test_garbage_is_collected_where_a_device_is_in_use(
    in_use: bool, enabled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    collected: list[bool] = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: in_use)
    monkeypatch.setattr(gc, "isenabled", lambda: enabled)
    monkeypatch.setattr(gc, "collect", lambda: collected.append(True))
    with pytest.raises(ZeroDivisionError), collected_after(torch.nn.Linear(1, 1)):
        _ = 1 / 0
    assert collected == [True] * (in_use and enabled)


def test_a_collection_looks_at_what_an_analysis_made_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    before = gc.get_freeze_count()
    monkeypatch.setattr(garbage._aside, "others", False)  # as tests/conftest.py is
    gc.unfreeze()
    with collected_after(nn.Linear(1, 1)):
        assert gc.get_freeze_count() > 0
        with collected_after(nn.Linear(1, 1)):
            pass
        assert gc.get_freeze_count() > 0, "the outer one ends it"
    assert gc.get_freeze_count() == 0
    gc.freeze()  # the user's
    for _ in range(2):  # of which the second does not ask
        with collected_after(nn.Linear(1, 1)):
            pass
        assert gc.get_freeze_count() > 0
    if not before:
        gc.unfreeze()


@pytest.mark.parametrize("short", [False, True], ids=["called with it", "short of memory"])
def test_earlier_garbage_is_collected_where_that_is_asked_for(short: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """An earlier graph, say, which holds the numbers that are packed now, or the memory that an analysis lacks."""
    before = gc.get_freeze_count()
    monkeypatch.setattr(garbage._aside, "others", False)
    gc.unfreeze()
    ring: list[Any] = [nn.Linear(1, 1)]
    ring.append(ring)
    weight = weakref.ref(ring[0])
    del ring
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    model = nn.Linear(1, 1)
    with collected_after(model):
        pass
    assert weight() is not None, "what was there before takes most of a collection's time"
    with collected_after(model, earlier=not short):
        if short:
            collect_all()
            assert weight() is None
    assert weight() is None
    assert gc.get_freeze_count() == 0
    if before:
        gc.freeze()
