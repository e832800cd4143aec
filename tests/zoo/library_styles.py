"""Blocks in the styles in which libraries and model repositories write them, where that differs from the rest of the zoo."""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from tests.zoo.common import MLP, Mixture, SwiGLU, TopKGate, experts
from tests.zoo.operators import add_rows
from tests.zoo.variant import D, E, I, K, variant, weight


class NoGradInference(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts, self.shared = TopKGate(), experts(SwiGLU), SwiGLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.view(-1, D)
        weights, indices = self.gate(flat)
        chosen = indices.view(-1)
        if self.training:
            repeated = flat.repeat_interleave(K, dim=0)
            y = torch.empty_like(repeated)
            for e, expert in enumerate(self.experts):
                y[chosen == e] = expert(repeated[chosen == e])
            y = (y.view(*weights.shape, -1) * weights.unsqueeze(-1)).sum(dim=1)
        else:
            y = self.infer(flat, chosen, weights.view(-1, 1))
        return y.view(*x.shape) + self.shared(x)

    @torch.no_grad()
    def infer(self, flat: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        cache = torch.zeros_like(flat)
        order = chosen.argsort()
        ends = chosen.bincount().cpu().numpy().cumsum(0)
        for e, end in enumerate(ends):
            start = 0 if e == 0 else ends[e - 1]
            if start == end:
                continue
            mine = order[start:end]
            out = self.experts[e](flat[mine // K])
            out.mul_(weights[mine])
            cache.scatter_reduce_(0, (mine // K).view(-1, 1).repeat(1, D), out, reduce="sum")
        return cache


class FiniteAssert(Mixture):
    def route(self, flat: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        weights, indices = self.gate(flat)
        assert torch.isfinite(weights).all(), "NaN in the router"
        if torch.isnan(flat).any():
            raise ValueError("NaN in the input")
        return weights, indices


class OntoShared(Mixture):
    def __init__(self) -> None:
        super().__init__()
        self.shared = MLP()

    def start(self, flat: torch.Tensor) -> torch.Tensor:
        return self.shared(flat)


class DetachedScaled(nn.Module):
    """Llama-4 reference style: all experts on all tokens times sigmoid scores, cut off from the gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.shared = weight(E, D), SwiGLU()
        self.w_gate, self.w_up, self.w_down = weight(E, D, I), weight(E, D, I), weight(E, I, D)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.reshape(-1, D)
        scores = flat @ self.router.t()
        top, chosen = scores.topk(1, dim=1)
        scores = torch.full_like(scores, float("-inf")).scatter_(1, chosen, top).t().sigmoid()
        rows = torch.arange(len(flat)).view(1, -1).expand(E, -1).reshape(-1, 1).expand(-1, D)
        routed = (torch.gather(flat, 0, rows) * scores.reshape(-1, 1)).detach().view(E, -1, D)
        hidden = F.silu(torch.bmm(routed, self.w_gate)) * torch.bmm(routed, self.w_up)
        out = self.shared(flat)
        out.scatter_add_(0, rows, torch.bmm(hidden, self.w_down).view(-1, D))
        return out.view(x.shape)


_DISTRIBUTIONS: dict[str, torch.distributions.Distribution] = {}


class NoiseFromDistribution(Mixture):
    def route(self, flat: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits = self.gate.weight(flat)
        if self.training:
            if "gumbel" not in _DISTRIBUTIONS:
                zero, one = torch.tensor(0.0), torch.tensor(1.0)
                _DISTRIBUTIONS["gumbel"] = torch.distributions.gumbel.Gumbel(zero, one)
            logits = logits + _DISTRIBUTIONS["gumbel"].rsample(logits.shape).to(logits)
        weights, indices = logits.softmax(-1).topk(K, dim=-1)
        return weights, indices


class StraightThroughDispatch(Mixture):
    def mix(self, flat: torch.Tensor, weights: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        marks = F.one_hot(indices, E).to(flat.dtype)
        positions = (marks.sum(1).cumsum(0) - 1).unsqueeze(1).expand_as(marks)
        slots = F.one_hot((positions * marks).sum(-1).long(), len(flat)).to(flat.dtype)
        combine = torch.einsum("tk,tke,tkc->tec", weights, marks, slots)
        dispatch = (combine > 0).to(flat.dtype)
        dispatch = dispatch + combine - combine.detach()
        given = torch.einsum("tec,td->ecd", dispatch, flat)
        out = torch.stack([expert(rows) for expert, rows in zip(self.experts, given)])
        return torch.einsum("tec,ecd->td", combine, out)


class Result(NamedTuple):
    """What `NamedResult` returns."""

    output: torch.Tensor
    balance: torch.Tensor


class NamedResult(Mixture):
    def forward(self, x: torch.Tensor) -> Result:
        flat = x.reshape(-1, D)
        weights, indices = self.gate(flat)
        out = self.mix(flat, weights, indices)
        return Result(out.view(x.shape), weights.sum(0).square().mean())


class MultiplicativeBias(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.scale, self.down = nn.Linear(D, 2 * I), nn.Parameter(torch.ones(I)), nn.Linear(I, D)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        value, gate = self.up(x).chunk(2, dim=-1)
        return self.down(F.gelu(gate) * value * self.scale)


class _Grouped(nn.Module):
    """A stacked weight applied to sorted tokens."""

    def __init__(self, inner: int, outer: int) -> None:
        super().__init__()
        self.weight = weight(E, inner, outer)

    def forward(self, rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        out = torch.zeros(len(rows), self.weight.shape[-1], dtype=rows.dtype)
        ends = torch.cat([torch.zeros(1, dtype=torch.long), counts.cumsum(0)])
        for e in range(E):
            out[ends[e] : ends[e + 1]] = rows[ends[e] : ends[e + 1]] @ self.weight[e]
        return out


class _GroupedExperts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = _Grouped(D, 2 * I), _Grouped(I, D)

    def forward(self, rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        gate, up = self.fc1(rows, counts).chunk(2, dim=-1)
        return self.fc2(F.silu(gate) * up, counts)


class ProjectionModules(Mixture):
    def __init__(self) -> None:
        super().__init__(None)
        self.experts = _GroupedExperts()

    def mix(self, flat: torch.Tensor, weights: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        order = indices.view(-1).argsort(stable=True)
        out = self.experts(flat[order // K], torch.bincount(indices.view(-1), minlength=E))
        back = torch.zeros_like(out)
        back.index_copy_(0, order, out)
        return (back.view(-1, K, D) * weights.unsqueeze(-1)).sum(1)


class _AddLoss(torch.autograd.Function):
    """DeepSeek's way of adding an auxiliary loss: the output as it is, and a gradient of one for the loss."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, loss: torch.Tensor) -> torch.Tensor:
        ctx.dtype = loss.dtype
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return gradient, torch.ones(1, dtype=ctx.dtype).squeeze(0)


class LossThroughFunction(Mixture):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.reshape(-1, D)
        weights, indices = self.gate(flat)
        out = self.mix(flat, weights, indices)
        return _AddLoss.apply(out, weights.sum(0).square().mean()).view(x.shape)


class AddedByOperator(ProjectionModules):
    """A training library's way: rows sorted by expert, and an operator of its own that adds their outputs up."""

    def mix(self, flat: torch.Tensor, weights: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        order = indices.view(-1).argsort(stable=True)
        out = self.experts(flat[order // K], torch.bincount(indices.view(-1), minlength=E))
        out = out * weights.view(-1)[order].unsqueeze(-1)
        return add_rows(torch.zeros_like(flat), order // K, out)


class _OncePerDevice(torch.autograd.Function):
    """A tensor that every one of several devices adds, so that each takes a part; its gradient is whole."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, devices: int) -> torch.Tensor:
        return x / devices if devices > 1 else x

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient, None


class _GroupedWithBiases(nn.Module):
    """Biases by rows, of which some at the end may belong to no expert."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2, self.b1, self.b2 = _Grouped(D, I), _Grouped(I, D), weight(E, I), weight(E, D)

    def forward(self, rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        rest = (len(rows) - counts.sum()).unsqueeze(0)

        def of_rows(biases: torch.Tensor) -> torch.Tensor:
            padded = torch.cat([biases, biases.new_zeros(1, biases.shape[1])])
            return padded.repeat_interleave(torch.cat([counts, rest]), dim=0)

        hidden = F.gelu(self.fc1(rows, counts) + of_rows(self.b1))
        return self.fc2(hidden, counts) + _OncePerDevice.apply(of_rows(self.b2), 1)


class WeightedInside(Mixture):
    """A training library's way for experts with biases: rows are weighted before the last product, and so is its bias.

    Args:
        bias: whether it is weighted.
    """

    def __init__(self, bias: bool = True) -> None:
        super().__init__(None)
        self.fc1, self.fc2, self.b1, self.b2, self.bias = (
            _Grouped(D, I),
            _Grouped(I, D),
            weight(E, I),
            weight(E, D),
            bias,
        )

    def mix(self, flat: torch.Tensor, weights: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        order = indices.view(-1).argsort(stable=True)
        rows, of_row = flat[order // K], weights.view(-1)[order].unsqueeze(-1)
        counts = torch.bincount(indices.view(-1), minlength=E)
        hidden = F.gelu(self.fc1(rows, counts) + self.b1.repeat_interleave(counts, dim=0)) * of_row
        bias = self.b2.repeat_interleave(counts, dim=0)
        out = self.fc2(hidden, counts) + (bias * of_row if self.bias else bias)
        return torch.zeros_like(flat).index_add(0, order // K, out)


class PaddedBiases(ProjectionModules):
    def __init__(self) -> None:
        super().__init__()
        self.experts = _GroupedWithBiases()


VARIANTS = (
    variant("library_no_grad_inference", NoGradInference, "eval mode under no_grad, other code in train mode"),
    variant("library_finite_assert", FiniteAssert, "asserts that numbers are finite"),
    variant("library_onto_shared", OntoShared, "added onto the shared expert's output in place"),
    variant(
        "library_detached_scaled", DetachedScaled, "all experts on scaled tokens, detached, onto the shared expert"
    ),
    variant("library_distribution", NoiseFromDistribution, "noise of a torch.distributions object kept in a global"),
    variant(
        "library_straight_through_dispatch",
        StraightThroughDispatch,
        "ones of the dispatch carry a gradient",
        make_expert=MLP,
    ),
    variant("library_named_result", NamedResult, "returns a named tuple"),
    variant("library_multiplicative_bias", Mixture, "GEGLU with a multiplicative bias", make_expert=MultiplicativeBias),
    variant("library_projection_modules", ProjectionModules, "a module for each projection of all experts"),
    variant("library_loss_through_function", LossThroughFunction, "auxiliary loss by a custom backward"),
    variant("library_added_by_operator", AddedByOperator, "an operator of its own, written in Python, adds outputs up"),
    variant("library_padded_biases", PaddedBiases, "biases by rows, with a row of zeros for rows of no expert"),
    variant("library_weighted_inside", WeightedInside, "rows and the last bias are weighted inside the experts"),
    variant("library_bias_not_weighted", WeightedInside, "the last bias is added as it is", "refused", bias=False),
)
