"""Blocks that look like a Mixture of Experts but break one of its rules: a rewrite would be wrong.

The base is the same loop as in `bodies`; each class changes one thing.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from tests.zoo.bodies import Mixture
from tests.zoo.common import MLP, SwiGLU, TopKGate, experts
from tests.zoo.variant import D, E, I, K, variant, weight


class BatchNormExpert(nn.Module):
    """BatchNorm over the expert's tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.norm, self.fc2 = nn.Linear(D, I), nn.BatchNorm1d(I), nn.Linear(I, D)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[0] < 2:  # BatchNorm wants two values in train mode
            return self.fc2(F.relu(self.fc1(x)))
        return self.fc2(F.relu(self.norm(self.fc1(x))))


class SoftmaxOverTokens(nn.Module):
    """Softmax over dimension 0, the tokens of the expert."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(D, I), nn.Linear(I, D)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc2(torch.softmax(self.fc1(x), dim=0))


class CumsumOverTokens(nn.Module):
    """A running sum over the expert's tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = MLP()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.mlp(x.cumsum(dim=0))


class CenteredTokens(nn.Module):
    """The mean over the expert's tokens is subtracted."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = SwiGLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.mlp(x)
        return h - h.sum(dim=0, keepdim=True) / max(1, h.shape[0])


class SelfAttentionExpert(nn.Module):
    """The expert's tokens attend to one another."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.value = nn.Linear(D, I), nn.Linear(D, D)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q = self.query(x)
        return torch.softmax(q @ q.t() / I**0.5, dim=-1) @ self.value(x)


class ReversedTokens(nn.Module):
    """The order of the expert's tokens is reversed on the way."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = MLP(act=nn.ReLU)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.mlp(x.flip(0))


class RolledTokens(nn.Module):
    """Each token also sees its neighbour in the expert's queue (a token shift)."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = MLP()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.mlp(0.5 * x + 0.5 * torch.roll(x, 1, dims=0))


class PositionInQueue(nn.Module):
    """The expert adds the token's place in its queue."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = MLP()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.mlp(x + 0.1 * torch.arange(x.shape[0], dtype=x.dtype).unsqueeze(-1))


class CountScaled(nn.Module):
    """The output is divided by how many tokens the expert got."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = MLP()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.mlp(x) / (1 + x.shape[0])


class DropoutExpert(nn.Module):
    """Active dropout inside the expert, of a kind that is not drawn expert after expert."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(D, I), nn.ReLU(), nn.AlphaDropout(0.3), nn.Linear(I, D))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x)


class MaxCombine(Mixture):
    """A token gets the elementwise maximum over its experts."""

    def mix(self, flat: torch.Tensor) -> torch.Tensor:
        weights, indices = self.gate(flat)
        out = torch.full_like(flat, -1e4)
        for e in range(E):
            token, slot = torch.where(indices == e)
            y = self.expert(e, flat[token]) * weights[token, slot, None]
            out = out.index_put((token,), torch.maximum(out[token], y))
        return out


class OverwriteCombine(Mixture):
    """`out[token] = y`: with k = 2 the expert of the higher number wins."""

    def mix(self, flat: torch.Tensor) -> torch.Tensor:
        weights, indices = self.gate(flat)
        out = torch.zeros_like(flat)
        for e in range(E):
            token, slot = torch.where(indices == e)
            out[token] = self.expert(e, flat[token]) * weights[token, slot, None]
        return out


class Chained(Mixture):
    """Experts see the output of earlier experts: the buffer they read is the one they write."""

    def mix(self, flat: torch.Tensor) -> torch.Tensor:
        weights, indices = self.gate(flat)
        h = flat.clone()
        for e in range(E):
            token, slot = torch.where(indices == e)
            h = h.index_add(0, token, self.expert(e, h[token]) * weights[token, slot, None])
        return h


class GateOnOutputs(nn.Module):
    """The gate is computed from the experts' own outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.experts, self.score = experts(MLP), nn.Linear(D, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        outputs = torch.stack([expert(x) for expert in self.experts], dim=-2)
        top, indices = self.score(outputs).squeeze(-1).topk(K, dim=-1)
        gates = torch.zeros(*x.shape[:-1], E, dtype=x.dtype).scatter(-1, indices, top.softmax(-1))
        return (outputs * gates.unsqueeze(-1)).sum(dim=-2)


class ConfidenceWeighted(Mixture):
    """The routing weight is multiplied by a norm of the expert's output."""

    def expert(self, e: int, x: torch.Tensor) -> torch.Tensor:
        y = self.experts[e](x)
        return y * y.pow(2).sum().sqrt()


class NonlinearCombine(Mixture):
    """Squares are summed and the root is taken."""

    def mix(self, flat: torch.Tensor) -> torch.Tensor:
        weights, indices = self.gate(flat)
        total = torch.zeros_like(flat)
        for e in range(E):
            token, slot = torch.where(indices == e)
            y = self.expert(e, flat[token]) * weights[token, slot, None]
            total = total.index_add(0, token, y.square())
        return torch.sqrt(total + 1e-3)


class DataBranch(Mixture):
    """A host branch on the mean of the input."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.mean() > 0:
            x = x * 2
        return super().forward(x)


class OutputBranch(Mixture):
    """A host branch on the size of an expert's output."""

    def expert(self, e: int, x: torch.Tensor) -> torch.Tensor:
        y = self.experts[e](x)
        if y.numel() and y.abs().max() > 0.3:
            y = y * 0.5
        return y


class SizeBranch(Mixture):
    """Beyond 20 tokens only the first expert of a token counts."""

    def mix(self, flat: torch.Tensor) -> torch.Tensor:
        if flat.shape[0] <= 20:
            return super().mix(flat)
        weights, indices = self.gate(flat)
        out = torch.zeros_like(flat)
        for e in range(E):
            token = torch.where(indices[:, 0] == e)[0]
            out.index_add_(0, token, self.expert(e, flat[token]) * weights[token, 0, None])
        return out


class StepParity(Mixture):
    """Every second call in a row routes with other weights."""

    def __init__(self) -> None:
        super().__init__(MLP)
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return super().forward(x) * (1.0 if self.calls % 2 else 0.5)


class DifferentWidths(nn.Module):
    """Experts of different widths."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = TopKGate()
        self.experts = nn.ModuleList(MLP(hidden=h) for h in (16, 20, 24, 20, 28))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.reshape(-1, D)
        weights, indices = self.gate(flat)
        out = torch.zeros_like(flat)
        for e, expert in enumerate(self.experts):
            token, slot = torch.where(indices == e)
            out.index_add_(0, token, expert(flat[token]) * weights[token, slot, None])
        return out.view(x.shape)


class DifferentActivations(DifferentWidths):
    """One expert of five has another activation."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = experts(MLP)
        self.experts[2].act = nn.ReLU()


class DifferentStructures(DifferentWidths):
    """Gated and ungated experts side by side."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList([MLP(), SwiGLU(), MLP(), SwiGLU(), MLP()])


class ScaledByNumber(Mixture):
    """The expert's number multiplies its output: same parameters, another constant each."""

    def expert(self, e: int, x: torch.Tensor) -> torch.Tensor:
        return self.experts[e](x) * (1.0 + 0.25 * e)


class SoftMoE(nn.Module):
    """Soft MoE: every slot is a weighted average of all tokens."""

    def __init__(self, slots: int = 2) -> None:
        super().__init__()
        self.slots = slots
        self.phi = weight(E * slots, D)
        self.experts = experts(MLP)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits = x @ self.phi.t()
        dispatch, combine = logits.softmax(dim=1), logits.softmax(dim=2)
        slots = (dispatch.transpose(1, 2) @ x).unflatten(1, (E, self.slots))
        outputs = torch.stack([expert(slots[:, e]) for e, expert in enumerate(self.experts)], dim=1)
        return combine @ outputs.flatten(1, 2)


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
    """The activations inside the experts are also used for a sparsity loss."""

    def __init__(self) -> None:
        super().__init__(MLP)

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


class ProductOfExperts(nn.Module):
    """log-sum-exp over the experts with the gates as log weights."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(D, E), experts(MLP)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        log_gates = self.gate(x).log_softmax(dim=-1)
        outputs = torch.stack([expert(x) for expert in self.experts], dim=-1)
        return torch.logsumexp(outputs + log_gates.unsqueeze(-2), dim=-1)


class CenteringMatrix(Mixture):
    """Tokens are centred over the batch by each expert after gathering, written as a matrix product."""

    def expert(self, e: int, x: torch.Tensor) -> torch.Tensor:
        n = x.shape[0]
        centering = torch.eye(n, dtype=x.dtype) - torch.full((n, n), 1.0 / max(1, n), dtype=x.dtype)
        return self.experts[e](centering @ x)


class Committee(nn.Module):
    """An ensemble, not a mixture: all members on all tokens, averaged."""

    def __init__(self) -> None:
        super().__init__()
        self.members = experts(MLP)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([member(x) for member in self.members]).mean(dim=0)


class ResidualStack(nn.Module):
    """A plain stack of equal layers: not a mixture at all."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = experts(MLP)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


REFUSED = "refused"
VARIANTS = (
    variant("refuse_batch_norm", Mixture, "BatchNorm over an expert's tokens", REFUSED, make_expert=BatchNormExpert),
    variant("refuse_softmax_tokens", Mixture, "softmax over tokens", REFUSED, make_expert=SoftmaxOverTokens),
    variant("refuse_cumsum_tokens", Mixture, "cumsum over tokens", REFUSED, make_expert=CumsumOverTokens),
    variant("refuse_mean_subtraction", Mixture, "mean over tokens subtracted", REFUSED, make_expert=CenteredTokens),
    variant("refuse_self_attention", Mixture, "attention inside the expert", REFUSED, make_expert=SelfAttentionExpert),
    variant("refuse_reversed", Mixture, "order of the tokens reversed", REFUSED, make_expert=ReversedTokens),
    variant("refuse_rolled", Mixture, "neighbour in the queue mixed in", REFUSED, make_expert=RolledTokens),
    variant("refuse_queue_position", Mixture, "place in the queue added", REFUSED, make_expert=PositionInQueue),
    variant("refuse_count_scaled", Mixture, "divided by the number of tokens", REFUSED, make_expert=CountScaled),
    variant("refuse_centering_matrix", CenteringMatrix, "centred by a matrix product over tokens", REFUSED),
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
    variant("refuse_dropout_active", Mixture, "alpha dropout inside the expert", "either", make_expert=DropoutExpert),
    variant("refuse_soft_moe", SoftMoE, "slots are averages of all tokens", REFUSED),
    variant("refuse_straight_through", StraightThrough, "straight-through gates: gradients differ", REFUSED),
    variant("refuse_leaked_hidden", LeakedHidden, "hidden activations used outside", REFUSED),
    variant("refuse_product_of_experts", ProductOfExperts, "log-sum-exp over experts", REFUSED),
    variant("refuse_committee", Committee, "an ensemble averaged: dense by nature", "either"),
    variant("refuse_residual_stack", ResidualStack, "a stack of equal layers", REFUSED),
)
