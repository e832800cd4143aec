"""What is inactive on the example, and missing in the rewritten block, is found and named."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from hexa_fx.capture import capture
from hexa_fx.ir import InputGuard, RewrittenBlock
from hexa_fx.isolation.outcome import Difference, Outcome, difference
from hexa_fx.passes.inputs.fresh_inputs import FreshInputs
from hexa_fx.passes.verify import verify_block
from hexa_fx.passes.verify.cases import ByRows, VerifySettings, factors_past_limits
from hexa_fx.passes.verify.perturbed_runs import perturbations
from tests.runtime.handmade import D, E, ListMoE, around, list_rewritten, plain


class Masked(ListMoE):
    def forward(self, hidden: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return super().forward(hidden) * mask[..., None]


def bounded(self: ListMoE, hidden: torch.Tensor) -> torch.Tensor:
    """Rows with tiny norms are left as they are, so that division is safe."""
    norm = hidden.norm(dim=-1, keepdim=True)
    return plain(self, hidden) * norm / norm.clamp(min=1e-4)


BOUNDED, CLAMPED_FAR_OUT = around(bounded), around(lambda self, hidden: plain(self, hidden.clamp(-65504, 65504)))
FORGOTTEN: dict[str, tuple[type[nn.Module], str]] = {
    "clamped": (around(lambda self, hidden: plain(self, hidden.clamp(-50, 50))), "tokens of other magnitudes"),
    "clamped far out": (CLAMPED_FAR_OUT, "tokens of other magnitudes"),
    "bounded": (BOUNDED, "tokens of other magnitudes"),
    "no batch of one": (around(lambda self, hidden: plain(self, hidden).squeeze(0)), "batch 1, sequence 7"),
    "no sequence of one": (around(lambda self, hidden: plain(self, hidden).squeeze(1)), "batch 6, sequence 1"),
}


@pytest.mark.parametrize(("block", "said"), FORGOTTEN.values(), ids=FORGOTTEN)
def test_forgotten_features_are_named(block: type[nn.Module], said: str) -> None:
    """The rewritten block is that of the plain class."""
    made = list_rewritten(False)
    assert said in _verified(block(), replace(made, guards=made.guards[:1]), (torch.randn(2, 6, D),))


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.int32])
def test_a_forgotten_mask_of_ones_is_named(dtype: torch.dtype) -> None:
    made = list_rewritten(False)
    guards = (made.guards[0], InputGuard("mask", "tensor", dtype=dtype, ndim=2))
    example = (torch.randn(2, 6, D), torch.ones(2, 6, dtype=dtype))
    assert "'mask' drawn at random" in _verified(Masked(), replace(made, guards=guards), example)


class Strict(ListMoE):
    """Fails for what is not allowed, as an embedding does."""

    def forward(self, hidden: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        torch.zeros(1, device=hidden.device)[ids]
        return super().forward(hidden)


def test_where_the_original_raises_both_must() -> None:
    made = list_rewritten(False)
    guards = (made.guards[0], InputGuard("ids", "tensor", dtype=torch.int64, ndim=2))
    example = (torch.randn(2, 6, D), torch.zeros(2, 6, dtype=torch.long))
    assert "only the original raises IndexError" in _verified(Strict(), replace(made, guards=guards), example)


def test_rows_are_compared_by_their_own_scale() -> None:
    one = torch.tensor([[1e6, 1e6], [1e-6, 1e-6]], dtype=torch.float64)
    two = one.clone()
    two[1, 0] *= 2
    assert _apart(one, two).forward == pytest.approx(1.0)
    gone = torch.tensor([[1e6, torch.nan], [1e-6, 1e-6]], dtype=torch.float64)
    assert "NaN" in _apart(one, gone).reason
    assert _apart(gone, one, finite=False) == Difference(worst_value="")
    assert "NaN" in _apart(gone, one).reason


def _apart(one: torch.Tensor, two: torch.Tensor, finite: bool = True) -> Difference:
    return difference(*ByRows(finite).compared(*(Outcome({"y": value}, {}, {}) for value in (one, two))))


def test_masks_of_floats() -> None:
    """0 and -inf, as they are added to scores, and ones, which are zeros elsewhere."""
    mask = torch.zeros(2, 6)
    mask[0, 0] = float("-inf")
    for given, tried in ((mask, True), (torch.ones(2, 6), True), (torch.full((2, 6), 0.5), False)):
        inputs = FreshInputs((torch.randn(2, 6, D), given), {}, E)
        names = [p.name for p in perturbations(inputs, Masked(), ())]
        assert any("'mask'" in name for name in names) is tried


def _verified(block: nn.Module, rewritten: RewrittenBlock, example: tuple[torch.Tensor, ...]) -> str:
    captured = capture(block.eval(), example, {}, "")
    settings = VerifySettings(factors=factors_past_limits(captured.graph))
    result = verify_block(block, rewritten, example, settings=settings)
    assert not result.ok
    return result.reason
