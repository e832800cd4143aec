"""torchtitan: its routed experts on our operators, as an override of `GroupedExperts`.

Name it where torchtitan takes overrides: ``--override.imports hexa_fx.integrations.torchtitan.hexa_grouped_experts``.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from torch.distributed.tensor import DTensor
from torchtitan.config import derive, override
from torchtitan.models.common.moe import GroupedExperts

from hexa_fx import ops
from hexa_fx.ir import FfnSpec

_SPEC = FfnSpec("silu", "split")


class HexaGroupedExperts(GroupedExperts):  # type: ignore[misc]
    """Parameters, initialization, sharding and checkpoints are torchtitan's own; what is computed, and in which dtype, too."""

    @dataclass(kw_only=True, slots=True)
    class Config(GroupedExperts.Config):  # type: ignore[misc]
        pass

    def forward(self, x_RD: Tensor, num_tokens_per_expert_E: Tensor) -> Tensor:
        """The experts on rows that a dispatcher of torchtitan's brought.

        Args:
            x_RD: (R, D), by expert; rows after the last one counted give zeros.
            num_tokens_per_expert_E: (E,) integer, of the experts that are here.
        """
        w1, w3, w2 = (_here(w).bfloat16() for w in (self.w1_EFD, self.w3_EFD, self.w2_EDF))
        y = ops.experts(x_RD.bfloat16(), num_tokens_per_expert_E, None, w1, None, w3, None, w2, None, _SPEC)
        return y.type_as(x_RD)


def _here(weight: Tensor) -> Tensor:
    return weight.to_local() if isinstance(weight, DTensor) else weight


@override(target=GroupedExperts.Config, description="Routed experts on hexa_fx's operators.", exact=True)  # type: ignore[untyped-decorator]
def hexa_grouped_experts(cfg: GroupedExperts.Config) -> GroupedExperts.Config:
    """The configuration of experts of ours in place of torchtitan's. Its subclasses (gpt-oss, quantised) stay as they are."""
    return derive(cfg, HexaGroupedExperts.Config)
