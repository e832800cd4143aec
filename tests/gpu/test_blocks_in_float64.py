"""Blocks of many forms in float64 on a device, where torch's operators do all: every row they read is one that there is."""

import copy

import pytest
import torch
from torch import nn

import hexa_fx
from tests.detect import test_free_body as free
from tests.detect import test_functions as functions
from tests.detect import test_groups_of_tokens as groups
from tests.detect import test_what_strangers_write as strangers
from tests.detect.test_free_body import Experts, routing
from tests.zoo.compare import compare
from tests.zoo.variant import D

pytestmark = pytest.mark.gpu

BLOCKS = (
    *(strangers.OneDown, strangers.MaxoutMixture, strangers.Nested, strangers.ByDict, strangers.InHeads),
    *(groups.TopOfSequence, groups.FirstToken, groups.Gathered, groups.GateMatrix),
    *(groups.WeightOfSequence, groups.WeightOfToken),
    *(functions.AROUND[place] for place in ("tokens", "weights", "rounded weights", "output")),
)


@pytest.fixture(autouse=True)
def no_fallback(monkeypatch: pytest.MonkeyPatch) -> None:
    """There are no kernels for float64, and nobody waits for those that are asked for."""
    monkeypatch.delenv("HEXA_FX_WAIT_FOR_KERNELS")


def assert_equal(block: nn.Module, *sizes: tuple[torch.Tensor, ...]) -> None:
    optimized = hexa_fx.optimize(copy.deepcopy(block), sizes[0], hexa_fx.HexaConfig(own_code_when_small=False))
    torch.cuda.synchronize()
    assert optimized.report.rewritten, str(optimized.report)
    for inputs in sizes:
        for train in (True, False):
            found = compare(block, optimized, inputs, train=train)
            assert found.within(1e-10), found
    torch.cuda.synchronize()


@pytest.mark.parametrize("kind", BLOCKS, ids=lambda kind: kind.__name__)
def test_blocks(kind: type[nn.Module]) -> None:
    tokens = [(torch.randn(*size, D, dtype=torch.float64, device="cuda"),) for size in ((2, 7), (3, 5), (1, 1))]
    assert_equal(kind().to("cuda", torch.float64), *tokens)


@pytest.mark.parametrize("make", free.FORMS, ids=lambda kind: kind.__name__)
def test_given_ids(make: type[nn.Module]) -> None:
    torch.manual_seed(1)
    calls = [tuple(t.cuda() for t in routing(tokens, 4, seed=tokens)) for tokens in (9, 7)]
    assert_equal(Experts(make).to("cuda", torch.float64), *calls)
