"""A plain mixture; tests keep something of it beside its output."""

import torch
import torch.nn.functional as F
from torch import nn

from tests.zoo.common import looped

D, E, K = 6, 4, 2


class Mixture(nn.Module):
    """A router and a loop over experts."""

    skip = False
    """Whether experts without tokens are left out."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(D, E)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(D, 8), nn.GELU(), nn.Linear(8, D)) for _ in range(E))

    def inside(self, probs: torch.Tensor, number: int, last: torch.Tensor) -> None:
        """What is done besides for each expert, whose output ``last`` is."""

    def mix(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Probabilities, the weights of the chosen experts, the output, and the last expert's."""
        probs = F.softmax(self.router(x), -1)
        weights, ids = probs.topk(K, -1)
        out = last = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            token, slot = torch.where(ids == number)
            if self.skip and token.numel() == 0:
                continue
            last = expert(x[token])
            out.index_add_(0, token, last * weights[token, slot, None])
            self.inside(probs, number, last)
        return probs, weights, out, last

    def chosen(self, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """The output for a choice that was made otherwise."""
        return looped(x, weights, ids, self.experts)
