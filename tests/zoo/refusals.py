"""Blocks that look like a Mixture of Experts but break one of its rules: a rewrite would be wrong.

Each class changes one thing of the loop in `common`.
"""

import torch
import torch.nn.functional as F
from torch import nn

from tests.zoo.common import MLP, Mixture, SwiGLU, experts
from tests.zoo.dense import MaskTimesExpert, TokensThenExperts
from tests.zoo.variant import D, E, I, K, variant


class BatchNormExpert(MLP):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(I)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[0] < 2:  # BatchNorm wants two values in train mode
            return self.fc2(F.relu(self.fc1(x)))
        return self.fc2(F.relu(self.norm(self.fc1(x))))


class SelfAttentionExpert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query, self.value = nn.Linear(D, I), nn.Linear(D, D)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q = self.query(x)
        return torch.softmax(q @ q.t() / I**0.5, dim=-1) @ self.value(x)


class ReversedTokens(MLP):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.flip(0))


class RolledTokens(MLP):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(0.5 * x + 0.5 * torch.roll(x, 1, dims=0))


class PositionInQueue(MLP):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x + 0.1 * torch.arange(x.shape[0], dtype=x.dtype).unsqueeze(-1))


class CountScaled(MLP):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) / (1 + x.shape[0])


def alpha_dropout() -> nn.Module:
    """Dropout of a kind that is not drawn expert after expert."""
    return nn.Sequential(nn.Linear(D, I), nn.ReLU(), nn.AlphaDropout(0.3), nn.Linear(I, D))


class MaxCombine(Mixture):
    def mix(self, flat: torch.Tensor, weights: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        out = torch.full_like(flat, -1e4)
        for e in range(E):
            token, slot = torch.where(indices == e)
            y = self.expert(e, flat[token]) * weights[token, slot, None]
            out = out.index_put((token,), torch.maximum(out[token], y))
        return out


class OverwriteCombine(Mixture):
    """With k = 2 the expert of the higher number wins."""

    def mix(self, flat: torch.Tensor, weights: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        out = torch.zeros_like(flat)
        for e in range(E):
            token, slot = torch.where(indices == e)
            out[token] = self.expert(e, flat[token]) * weights[token, slot, None]
        return out


class Chained(Mixture):
    """The buffer that they read is the one that they write."""

    def mix(self, flat: torch.Tensor, weights: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        h = flat.clone()
        for e in range(E):
            token, slot = torch.where(indices == e)
            h = h.index_add(0, token, self.expert(e, h[token]) * weights[token, slot, None])
        return h


class GateOnOutputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts, self.score = experts(MLP), nn.Linear(D, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        outputs = torch.stack([expert(x) for expert in self.experts], dim=-2)
        top, indices = self.score(outputs).squeeze(-1).topk(K, dim=-1)
        gates = torch.zeros(*x.shape[:-1], E, dtype=x.dtype).scatter(-1, indices, top.softmax(-1))
        return (outputs * gates.unsqueeze(-1)).sum(dim=-2)


class ConfidenceWeighted(Mixture):
    def expert(self, e: int, x: torch.Tensor) -> torch.Tensor:
        y = self.experts[e](x)
        return y * y.pow(2).sum().sqrt()


class NonlinearCombine(Mixture):
    def mix(self, flat: torch.Tensor, weights: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        total = torch.zeros_like(flat)
        for e in range(E):
            token, slot = torch.where(indices == e)
            y = self.expert(e, flat[token]) * weights[token, slot, None]
            total = total.index_add(0, token, y.square())
        return torch.sqrt(total + 1e-3)


class DataBranch(Mixture):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.mean() > 0:
            x = x * 2
        return super().forward(x)


class OutputBranch(Mixture):
    def expert(self, e: int, x: torch.Tensor) -> torch.Tensor:
        y = self.experts[e](x)
        if y.numel() and y.abs().max() > 0.3:
            y = y * 0.5
        return y


class SizeBranch(Mixture):
    def mix(self, flat: torch.Tensor, weights: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        if flat.shape[0] <= 20:
            return super().mix(flat, weights, indices)
        out = torch.zeros_like(flat)
        for e in range(E):
            token = torch.where(indices[:, 0] == e)[0]
            out.index_add_(0, token, self.expert(e, flat[token]) * weights[token, 0, None])
        return out


class StepParity(Mixture):
    def __init__(self) -> None:
        super().__init__(MLP)
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return super().forward(x) * (1.0 if self.calls % 2 else 0.5)


class DifferentWidths(Mixture):
    def __init__(self) -> None:
        super().__init__(None)
        self.experts = nn.ModuleList(MLP(hidden=h) for h in (16, 20, 24, 20, 28))


class DifferentActivations(Mixture):
    def __init__(self) -> None:
        super().__init__(MLP)
        self.experts[2].act = nn.ReLU()


class DifferentStructures(Mixture):
    def __init__(self) -> None:
        super().__init__(None)
        self.experts = nn.ModuleList([MLP(), SwiGLU(), MLP(), SwiGLU(), MLP()])


class ScaledByNumber(Mixture):
    def expert(self, e: int, x: torch.Tensor) -> torch.Tensor:
        return self.experts[e](x) * (1.0 + 0.25 * e)


class StraightThrough(Mixture):
    """Forward as top-k, backward as the dense mixture: only the gradients tell."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        probs = F.softmax(self.gate.weight(x), dim=-1)
        top, indices = probs.topk(K, dim=-1)
        hard = torch.zeros_like(probs).scatter(-1, indices, top)
        gates = probs + (hard - probs).detach()
        outputs = torch.stack([expert(x) for expert in self.experts], dim=-2)
        return (outputs * gates.unsqueeze(-1)).sum(dim=-2)


class LeakedHidden(Mixture):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        flat = x.reshape(-1, D)
        weights, indices = self.gate(flat)
        out, penalty = torch.zeros_like(flat), flat.new_zeros(())
        for e, expert in enumerate(self.experts):
            token, slot = torch.where(indices == e)
            hidden = expert.act(expert.fc1(flat[token]))
            penalty = penalty + hidden.abs().sum()
            out.index_add_(0, token, expert.fc2(hidden) * weights[token, slot, None])
        return out.view(x.shape), penalty


class CenteringMatrix(Mixture):
    def expert(self, e: int, x: torch.Tensor) -> torch.Tensor:
        n = x.shape[0]
        centering = torch.eye(n, dtype=x.dtype) - torch.full((n, n), 1.0 / max(1, n), dtype=x.dtype)
        return self.experts[e](centering @ x)


class RolledBetween(TokensThenExperts):
    """Hidden rows (E, T, I) go to the next token, or to the next expert's second product."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.dim = dim

    def second(self, hidden: torch.Tensor) -> torch.Tensor:
        return super().second(hidden.roll(1, self.dim))


class CenteredBetween(TokensThenExperts):
    def second(self, hidden: torch.Tensor) -> torch.Tensor:
        return super().second(hidden - hidden.mean(dim=1, keepdim=True))


class Committee(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.members = experts(MLP)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([member(x) for member in self.members]).mean(dim=0)


class ResidualStack(Committee):
    """Not a mixture at all."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.members:
            x = x + layer(x)
        return x


REFUSED = "refused"
VARIANTS = (
    variant("refuse_batch_norm", Mixture, "BatchNorm over an expert's tokens", REFUSED, make_expert=BatchNormExpert),
    variant("refuse_self_attention", Mixture, "attention inside the expert", REFUSED, make_expert=SelfAttentionExpert),
    variant("refuse_reversed", Mixture, "order of the tokens reversed", REFUSED, make_expert=ReversedTokens),
    variant("refuse_rolled", Mixture, "neighbour in the queue mixed in", REFUSED, make_expert=RolledTokens),
    variant(
        "refuse_rolled_sequences", MaskTimesExpert, "the next sequence mixed in", REFUSED, make_expert=RolledTokens
    ),
    variant("refuse_queue_position", Mixture, "place in the queue added", REFUSED, make_expert=PositionInQueue),
    variant("refuse_count_scaled", Mixture, "divided by the number of tokens", REFUSED, make_expert=CountScaled),
    variant("refuse_centering_matrix", CenteringMatrix, "centred by a matrix product over tokens", REFUSED),
    variant("refuse_rolled_tokens_between", RolledBetween, "hidden rows of another token", REFUSED, dim=1),
    variant("refuse_rolled_experts_between", RolledBetween, "hidden rows of another expert", REFUSED, dim=0),
    variant("refuse_centered_between", CenteredBetween, "mean over tokens between the products", REFUSED),
    variant("refuse_max_combine", MaxCombine, "combine by max", REFUSED),
    variant("refuse_overwrite", OverwriteCombine, "combine by overwriting", REFUSED),
    variant("refuse_chained", Chained, "experts see earlier experts' output", REFUSED),
    variant("refuse_gate_on_outputs", GateOnOutputs, "gate from the experts' outputs", REFUSED),
    variant("refuse_confidence", ConfidenceWeighted, "output scaled by its own norm over tokens", REFUSED),
    variant(
        "refuse_nonlinear_combine",
        NonlinearCombine,
        "root of a sum of squares: exact if the square counts as the body",
        "either",
    ),
    variant("refuse_data_branch", DataBranch, "host branch on the input's mean", REFUSED),
    variant("refuse_output_branch", OutputBranch, "host branch on an expert's output", REFUSED),
    variant("refuse_size_branch", SizeBranch, "other code beyond 20 tokens: guard or refuse", "either"),
    variant("refuse_call_parity", StepParity, "Python counter changes the result: a condition", "rewritten"),
    variant("refuse_different_widths", DifferentWidths, "experts of different widths", "either"),
    variant("refuse_different_activations", DifferentActivations, "one expert with another activation", "either"),
    variant("refuse_different_structures", DifferentStructures, "gated and ungated experts", "either"),
    variant("refuse_scaled_by_number", ScaledByNumber, "a constant per expert", "either"),
    variant("refuse_dropout_active", Mixture, "alpha dropout inside the expert", "either", make_expert=alpha_dropout),
    variant("refuse_straight_through", StraightThrough, "straight-through gates: gradients differ", REFUSED),
    variant("refuse_leaked_hidden", LeakedHidden, "hidden activations used outside", REFUSED, make_expert=MLP),
    variant("refuse_committee", Committee, "an ensemble averaged: dense by nature", "either"),
    variant("refuse_residual_stack", ResidualStack, "a stack of equal layers", REFUSED),
)
