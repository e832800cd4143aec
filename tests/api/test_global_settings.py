"""`optimize` and what it makes do not depend on settings of the whole process, nor change them."""

import copy
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest
import torch

import hexa_fx
from tests.zoo.by_sorting import GatheredEinsum
from tests.zoo.common import Mixture
from tests.zoo.variant import D

BLOCKS = [Mixture, GatheredEinsum]


@contextmanager
def put_back(change: Callable[[Any], Any], now: Any, then: Any) -> Iterator[None]:
    change(now)
    try:
        yield
    finally:
        change(then)


@contextmanager
def warnings_are_errors() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


SETTINGS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "another default device": lambda: put_back(torch.set_default_device, "meta", None),
    "a device as context": lambda: torch.device("meta"),
    "float64 by default": lambda: put_back(torch.set_default_dtype, torch.float64, torch.float32),
    "bfloat16 by default": lambda: put_back(torch.set_default_dtype, torch.bfloat16, torch.float32),
    "deterministic algorithms": lambda: put_back(torch.use_deterministic_algorithms, True, False),
    "no gradients": torch.no_grad,
    "inference mode": torch.inference_mode,
    "anomalies": torch.autograd.detect_anomaly,
    "lower precision": lambda: put_back(torch.set_float32_matmul_precision, "medium", "highest"),
    "warnings are errors": warnings_are_errors,
}


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("name", SETTINGS)
def test_rewritten_and_equal(name: str, block: Callable[[], torch.nn.Module]) -> None:
    original = block()
    optimized, x = copy.deepcopy(original), torch.randn(2, 7, D)
    dtype = torch.get_default_dtype()
    with SETTINGS[name]():
        hexa_fx.optimize_(optimized, x, hexa_fx.HexaConfig(own_code_when_small=False))
        assert optimized.report.rewritten, optimized.report
        found = []
        for model in (original, optimized):
            leaf = x.detach().clone().requires_grad_(name != "inference mode")
            y = model(leaf)
            if y.requires_grad:
                y.float().square().sum().backward()
            found.append([y.detach(), leaf.grad, *(p.grad for p in model.parameters())])
    for want, got in zip(*found, strict=True):
        assert (want is None) == (got is None)
        if want is not None:
            assert got.dtype == want.dtype
            if name == "lower precision":  # some CPUs multiply in bfloat16 then, each product in its own order
                assert (got - want).norm() <= 0.02 * want.norm()
            else:
                torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    assert torch.get_default_dtype() == dtype
    assert torch.empty(0).device.type == "cpu"
