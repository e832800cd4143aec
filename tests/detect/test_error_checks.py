"""What the code asserts, or raises an error for, is no reason to refuse it: no call in earnest gets there.

PYTEST_DONT_REWRITE: the blocks' own assertions are to be what Python makes of them.
"""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hexa_fx
from tests.detect.mixture import D, K, Mixture
from tests.zoo.compare import compare, operators_run


class Checks(Mixture):
    """Checks something in one of several ways: shapes inside the experts, tokens, what was chosen, sizes of the input."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.way == "tokens":
            assert x.abs().max() < 100, "tokens are too large"
        if self.way == "raise" and x.abs().max() >= 100:
            raise ValueError(f"tokens are too large: {x.shape}")
        if self.way == "size after noise":
            x = F.conv1d(x.T + torch.randn_like(x.T), torch.eye(D).to(x)[..., None]).T
        if self.way in ("size", "size after noise"):
            assert x.shape[0] != 5
        if self.way == "caught":
            try:
                assert x.abs().max() < 100
            except AssertionError:
                return x
        weights, ids = self.router(x).topk(K, -1)
        if self.way == "count":
            assert ids.unique().numel() != 77
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            token, slot = torch.where(ids == number)
            result = expert(x[token])
            if self.way == "inside":
                assert result.shape == x[token].shape
            out.index_add_(0, token, result * weights[token, slot, None])
        return out


def _made(way: str) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    block = Checks(way).double()
    return block, hexa_fx.optimize(copy.deepcopy(block), torch.randn(9, D, dtype=torch.float64))


@pytest.mark.parametrize("way", ["tokens", "raise", "size", "size after noise", "count", "inside"])
def test_checks_are_no_reason_to_refuse(way: str) -> None:
    block, opt = _made(way)
    assert opt.report.rewritten, opt.report
    args = (torch.randn(7, D, dtype=torch.float64),)
    assert operators_run(opt, args)
    assert compare(block, opt, args).within(1e-12)


def test_a_check_of_the_inputs_sizes_is_made_in_every_call() -> None:
    _, opt = _made("size")
    with pytest.raises(AssertionError):
        opt(torch.randn(5, D, dtype=torch.float64))


def test_an_error_that_is_caught_is_a_decision() -> None:
    _, opt = _made("caught")
    assert not opt.report.rewritten
    assert "host decision" in opt.report.blocks[0].reason
