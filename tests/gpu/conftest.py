"""GPU tests: skipped without a device, outputs poisoned, and no operator may quietly run something else."""

import os
from collections.abc import Iterator

import pytest
import torch

os.environ.setdefault("HEXA_FX_WAIT_FOR_KERNELS", "1")  # tests of kernels want them, not what runs until they are built
gpus = int(os.environ.get("TEST_GPUS", "0"))  # as benchmarks/gpu.sh counts them
if gpus:  # each worker has one of them, before torch looks
    os.environ["CUDA_VISIBLE_DEVICES"] = str(int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:]) % gpus)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "tests/gpu" in item.path.as_posix():
            item.add_marker(pytest.mark.gpu)
            if not torch.cuda.is_available():
                item.add_marker(pytest.mark.skip(reason="no CUDA device"))


@pytest.fixture(autouse=True)
def poisoned() -> Iterator[None]:
    """torch.empty gives NaN (and the largest integer): what a kernel leaves unwritten is seen."""
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(autouse=True)
def no_fallback(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    from hexa_fx.cuda import fallback as cuda_fallback

    monkeypatch.setattr(
        cuda_fallback, "_permanent", set()
    )  # a test without a compiler must not turn off plans for the next ones
    cuda_fallback.fallbacks.clear()
    yield
    assert not cuda_fallback.fallbacks


@pytest.fixture
def hopper() -> None:
    """Of kernels for sm_90."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs an sm_90 device")


@pytest.fixture
def four_multiprocessors(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As far as grids know: there are a few persistent blocks, each of which takes several tiles."""
    from hexa_fx.cuda import choosing as cuda_choosing

    card = cuda_choosing.device_card(0)
    monkeypatch.setattr(cuda_choosing, "device_card", lambda device: card._replace(multiprocessors=4))
    cuda_choosing.forget_choices()
    yield
    cuda_choosing.forget_choices()
