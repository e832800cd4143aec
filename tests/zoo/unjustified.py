"""Blocks that were refused for how they spell something, not for what they do."""

from collections import defaultdict

import torch
import torch.nn.functional as F
from torch import nn

from tests.zoo.common import MLP, Mixture, TopKGate
from tests.zoo.variant import D, E, I, K, flat_tokens, hidden_states, variant, weight


class IndexSelect(Mixture):
    def __init__(self) -> None:
        super().__init__(None)
        self.up, self.down = weight(E, I, D), weight(E, D, I)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, index = self.gate(x)
        ids = index.reshape(-1)
        rows = x.repeat_interleave(K, 0).unsqueeze(-1)
        hidden = F.silu(torch.bmm(self.up.index_select(0, ids), rows))
        y = torch.bmm(torch.index_select(self.down, 0, ids), hidden).squeeze(-1)
        return (y.view(len(x), K, D) * weights.unsqueeze(-1)).sum(1)


class Looped(Mixture):
    """A plain loop, of which the others change one step each."""

    def __init__(self) -> None:
        super().__init__(MLP)
        self.gate = nn.Linear(D, E, bias=False)

    def route(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        weights, index = self.gate(x).softmax(-1).topk(K)
        return weights, index

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = torch.zeros_like(x)
        weights, index = self.route(x)
        for number, expert in enumerate(self.experts):
            token, slot = torch.where(index == number)
            out.index_add_(0, token, self.weighted(expert(x[token]), weights[token, slot, None]))
        return out

    def weighted(self, y: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
        return y * factor


class AtMostAsManyAsTokens(Looped):
    def route(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        weights, index = self.gate(x).softmax(-1).topk(min(K, len(x)))
        return weights, index


class TwoHeads(Looped):
    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Linear(D, E, bias=False)

    def route(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scores = torch.stack((self.gate(x), self.other(x)), 1).softmax(-1)
        weights, index = scores.max(-1)
        return weights, index


class RanksAsIds(Looped):
    """One weight for every expert, most of them zero, beside ids that repeat, as transformers' nllb_moe gives them."""

    def route(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scores = self.gate(x).softmax(-1)
        chosen = F.one_hot(scores.argmax(-1), E)
        return scores * (scores >= scores.topk(K)[0][:, -1:]), chosen


class ConstantFactor(Looped):
    def weighted(self, y: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
        return y * factor * 2.5


class AddsToItsInput(Looped):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x.add_(super().forward(x.clone()))
        return x


class AddsUpInItsInput(Looped):
    """Every expert adds to the rows of the input; tokens are read from a copy."""

    def start(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out, tokens = x.view(-1, D), x.reshape(-1, D).clone()
        weights, index = self.route(tokens)
        out = self.start(out)
        for number, expert in enumerate(self.experts):
            token, slot = torch.where(index == number)
            out.index_add_(0, token, expert(tokens[token]) * weights[token, slot, None])
        return x


class AddsUpInZeroedInput(AddsUpInItsInput):
    def start(self, x: torch.Tensor) -> torch.Tensor:
        return x.zero_()


class AddsUpInScaledInput(AddsUpInItsInput):
    def start(self, x: torch.Tensor) -> torch.Tensor:
        return x.mul_(0.5)


class Addcmul(Looped):
    """All experts on all tokens, added up by fused products, as public blocks of vision models do."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, index = self.route(x)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            out.addcmul_(expert(x), (weights * (index == number)).sum(-1, keepdim=True))
        return out


class EmbeddingBag(Looped):
    """Rows are looked up and added up in one call, as github.com/RobertCsordas/moe does with its values."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, index = self.route(x)
        rows = torch.stack([expert(x) for expert in self.experts], 1).flatten(0, 1)
        places = index + E * torch.arange(len(x)).unsqueeze(1)
        return F.embedding_bag(places, rows, per_sample_weights=weights, mode="sum")


class Inner(nn.Module):
    """Other names of the product with a matrix: ``inner`` of rows, ``mv`` of one row."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(D, E, bias=False)
        self.up, self.down = weight(E, I, D), weight(E, D, I)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, index = self.gate(x).softmax(-1).topk(K)
        out = torch.zeros_like(x)
        for number in range(E):
            token, slot = torch.where(index == number)
            y = torch.inner(F.gelu(torch.inner(x[token], self.up[number])), self.down[number])
            out.index_add_(0, token, y * weights[token, slot, None])
        return out


class MatrixVector(Inner):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, index = self.gate(x).softmax(-1).topk(K)
        rows = []
        for row, of_row, chosen in zip(x, weights, index):
            given = (self.down[e].mv(F.gelu(torch.mv(self.up[e], row))) for e in chosen)
            rows.append(sum(weight * y for weight, y in zip(of_row, given)))
        return torch.stack(rows)


class CountedInData(Looped):
    """Biases that balance the choices are written through ``.data``, as github.com/joey00072/ohara does."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("bias", torch.zeros(E))

    def route(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scores = self.gate(x).softmax(-1)
        index = (scores + self.bias).topk(K).indices
        if self.training:
            loads = torch.bincount(index.flatten(), minlength=E)
            self.bias.data += 0.1 * torch.sign(loads.float().mean() - loads)
        return scores.gather(1, index), index


class AddsToWeightedRows(Looped):
    """Experts add to rows that are weighted with what they add, as in github.com/wuhy68/Parameter-Efficient-MoE."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits, index = self.gate(x).topk(K, -1)
        given, rows = x.repeat_interleave(K, 0), x.cos().repeat_interleave(K, 0)
        for number, expert in enumerate(self.experts):
            mask = index.flatten() == number
            rows[mask] += expert(given[mask])
        return (rows.view(len(x), K, -1) * logits.softmax(-1).unsqueeze(-1)).sum(1)


class ByExpert(Looped):
    """Gives its tokens by number of the expert, in a mapping that makes lists, as github.com/k7srivatsan/MoE does."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, dict[int, list[torch.Tensor]]]:
        index = self.route(x)[1]
        chosen = defaultdict(list)
        for number in range(E):
            chosen[number].append((index == number).sum(1))
        return super().forward(x), chosen


class DividesOutputs(Looped):
    """Weights are normalised only where experts' outputs have been multiplied by them."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = torch.zeros_like(x)
        weights, index = self.route(x)
        total = weights.sum(1) + 1e-6
        for number, expert in enumerate(self.experts):
            token, slot = torch.where(index == number)
            y = self.weighted(expert(x[token]), weights[token, slot, None])
            y /= total[token, None]
            out.index_add_(0, token, y)
        return out


class TwoFactors(Looped):
    """All experts' outputs, of which the chosen ones are multiplied by their weight and by a number of their token's."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Linear(D, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, index = self.route(x)
        outputs = torch.stack([expert(x) for expert in self.experts], 1)
        chosen = outputs[torch.arange(len(x))[:, None], index] * weights[..., None]
        return (chosen * self.scale(x).sigmoid()[:, None]).sum(1)


class InSlices(nn.Module):
    """Products with a weight's slices one after another, as ``pretraining_tp`` of github.com/feizc/DiT-MoE has them."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(D, I, bias=False), nn.Linear(D, I, bias=False)
        self.down_proj = nn.Linear(I, D, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = (
            torch.cat([F.linear(x, piece) for piece in layer.weight.split(I // 4, dim=0)], dim=-1)
            for layer in (self.gate_proj, self.up_proj)
        )
        hidden = (F.silu(gate) * up).split(I // 4, dim=2 if x.dim() == 3 else -1)
        pieces = self.down_proj.weight.split(I // 4, dim=1)
        return sum(F.linear(rows, piece) for rows, piece in zip(hidden, pieces))


class ExpertsInSlices(Looped):
    def __init__(self) -> None:
        super().__init__()
        self.experts, self.shared = nn.ModuleList(InSlices() for _ in range(E)), InSlices()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + self.shared(x)


class InFloat32(Looped):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = torch.zeros(x.shape, dtype=torch.float32)
        weights, index = self.route(x)
        for number, expert in enumerate(self.experts):
            token, slot = torch.where(index == number)
            out.index_add_(0, token, (expert(x[token]) * weights[token, slot, None]).float())
        return out.to(x.dtype)


class LimitedSwiGLU(nn.Module):
    """Stacked experts on gathered rows, whose gate and up are limited before the activation."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.gate_up, self.down = TopKGate(), weight(E, D, 2 * I), weight(E, I, D)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, index = self.router(x)
        ids = index.reshape(-1)
        gate, up = torch.bmm(x.repeat_interleave(K, 0).unsqueeze(1), self.gate_up[ids]).chunk(2, -1)
        y = torch.bmm(F.silu(gate.clamp(max=0.8)) * up.clamp(-0.6, 0.6), self.down[ids]).squeeze(1)
        return (y.view(len(x), K, D) * weights.unsqueeze(-1)).sum(1)


class Windows(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(D, E, bias=False), weight(E, D, I), weight(E, I, D)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        windows = x.reshape(-1, 7, D)
        weights, index = self.gate(windows).softmax(-1).topk(K)
        gates = torch.zeros(*windows.shape[:-1], E, dtype=x.dtype).scatter(-1, index, weights).view(-1, 7, E)
        hidden = F.gelu(torch.einsum("gsd,edi->gsei", windows, self.up))
        y = torch.einsum("gsei,eid,gse->gsd", hidden, self.down, gates)
        return y.cumsum(1).reshape(x.shape)


def of_sevens(batch: int, seq: int, dtype: torch.dtype, seed: int) -> tuple[tuple, dict]:
    """Two sentences of seven tokens, or one of fourteen and more."""
    return hidden_states(batch, seq, dtype, seed) if (batch, seq) == (2, 7) else hidden_states(1, 14 * seq, dtype, seed)


class OneNumberEach(Inner):
    """Products with columns; an expert gives its token one number."""

    def __init__(self) -> None:
        super().__init__()
        self.down = weight(E, 1, I)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        number = self.gate(x).argmax(-1)
        hidden = torch.bmm(self.up[number], x.unsqueeze(-1)).relu()
        return x + torch.bmm(self.down[number], hidden).squeeze(-1)


VARIANTS = (
    variant("sorted_index_select", IndexSelect, "weights of single rows by index_select", inputs=flat_tokens),
    variant("dense_addcmul", Addcmul, "added up by addcmul_", inputs=flat_tokens),
    variant("dense_embedding_bag", EmbeddingBag, "rows of all experts, added up by embedding_bag", inputs=flat_tokens),
    variant("sorted_columns_of_one", OneNumberEach, "columns of one number each", inputs=flat_tokens),
    variant("loop_inner", Inner, "products by torch.inner", inputs=flat_tokens),
    variant("one_token_mv", MatrixVector, "products by mv", inputs=flat_tokens),
    variant("router_topk_of_tokens", AtMostAsManyAsTokens, "topk(min(k, number of tokens))", inputs=flat_tokens),
    variant("router_two_heads", TwoHeads, "two gates that may choose the same expert", inputs=flat_tokens),
    variant("router_bias_in_data", CountedInData, "writes its biases through .data", inputs=flat_tokens),
    variant(
        "around_weighted_rows", AddsToWeightedRows, "experts add to rows that are weighted too", inputs=flat_tokens
    ),
    variant("around_results_by_expert", ByExpert, "results in a defaultdict by expert", inputs=flat_tokens),
    variant("body_weights_in_slices", ExpertsInSlices, "products with slices of each weight", inputs=flat_tokens),
    variant("router_repeated_ids", RanksAsIds, "an expert is given a token several times", inputs=flat_tokens),
    variant("weight_constant_factor", ConstantFactor, "a constant beside the routing weight", inputs=flat_tokens),
    variant("weight_divided_outputs", DividesOutputs, "outputs are divided by the sum of weights", inputs=flat_tokens),
    variant("weight_two_factors", TwoFactors, "gathered outputs times a weight and a scale", inputs=flat_tokens),
    variant("body_limited_swiglu", LimitedSwiGLU, "gate and up within limits", inputs=flat_tokens),
    variant("shape_windows", Windows, "windows of tokens, as long as the sentences were", inputs=of_sevens),
    variant("around_adds_to_its_input", AddsToItsInput, "the residual is added into the input", inputs=flat_tokens),
    variant("around_adds_up_in_its_input", AddsUpInItsInput, "every expert adds to the input"),
    variant("around_adds_up_in_zeroed_input", AddsUpInZeroedInput, "the input's memory is used for the output"),
    variant("around_adds_up_in_scaled_input", AddsUpInScaledInput, "experts add to the input times a half"),
    variant(
        "loop_float32_accumulator",
        InFloat32,
        "adds up in float32 whatever the dtype",
        inputs=flat_tokens,
        dtypes=(torch.float32,),
    ),
)
