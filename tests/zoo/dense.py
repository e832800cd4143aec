"""Blocks that run every expert on every token and pick afterwards, with zeros or by gathering."""

import torch
import torch.nn.functional as F
from torch import nn

from tests.zoo.bodies import PreNormExpert
from tests.zoo.common import MLP, Mixture, TopKGate, experts
from tests.zoo.variant import D, E, I, K, variant, weight


class ChosenAtRandom(Mixture):
    """As many ids are drawn as the experts' outputs have rows, as github.com/jingjing12110/MixPHM and AdaMix do in eval mode."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = torch.stack([expert(x) for expert in self.experts])
        chosen = torch.randint(0, E, size=(out.size(1), out.size(2)))
        for e in range(E):
            out[e] *= chosen.eq(e).unsqueeze(-1)
        return out.sum(0)


class StackEinsum(nn.Module):
    def __init__(self, threshold: bool = True) -> None:
        super().__init__()
        self.threshold = threshold
        self.router = nn.Linear(D, E)
        self.experts = experts(MLP)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits = self.router(x)
        top, indices = logits.topk(K, dim=-1)
        if self.threshold:
            masked = logits.masked_fill(logits < top[..., -1:], float("-inf"))
        else:
            masked = torch.full_like(logits, float("-inf")).scatter(-1, indices, top)
        gates = masked.softmax(dim=-1)
        outputs = torch.stack([expert(x) for expert in self.experts], dim=-2)
        return torch.einsum("bse,bsed->bsd", gates, outputs)


class ComputeAllGather(Mixture):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, indices = self.gate(x)
        outputs = torch.stack([expert(x) for expert in self.experts], dim=2)
        picked = torch.gather(outputs, 2, indices.unsqueeze(-1).expand(-1, -1, -1, D))
        return (picked * weights.unsqueeze(-1)).sum(dim=2)


class StackedEinsum(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = TopKGate()
        self.w_in, self.w_out = weight(E, D, I), weight(E, I, D)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, indices = self.gate(x)
        combine = (F.one_hot(indices, E).to(x.dtype) * weights.unsqueeze(-1)).sum(dim=-2)
        hidden = F.gelu(torch.einsum("bsd,edi->bsei", x, self.w_in))
        outputs = torch.einsum("bsei,eid->bsed", hidden, self.w_out)
        return torch.einsum("bsed,bse->bsd", outputs, combine)


class SharedByScore(StackedEinsum):
    """The first expert is every token's, with its score, and so are two of the others (spsanps/build-nano-moe)."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(D, E)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = self.gate(x).softmax(dim=-1)
        top, indices = scores[..., 1:].topk(K, dim=-1)
        others = torch.zeros_like(scores[..., 1:]).scatter(-1, indices, top)
        gates = torch.cat([scores[..., :1], others], dim=-1)
        hidden = F.gelu(torch.einsum("bsd,edi->bsei", x, self.w_in))
        outputs = torch.einsum("bsei,eid->bsed", hidden, self.w_out)
        return (outputs * (gates / gates.sum(dim=-1, keepdim=True)).unsqueeze(-1)).sum(dim=-2)


class StackedEinsumFused(Mixture):
    def __init__(self) -> None:
        super().__init__(None)
        self.w_gate, self.w_up, self.w_down = weight(E, I, D), weight(E, I, D), weight(E, D, I)

    def mix(self, flat: torch.Tensor, weights: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        combine = torch.zeros(flat.shape[0], E, dtype=flat.dtype).scatter(1, indices, weights)
        hidden = F.silu(torch.einsum("td,eid->tei", flat, self.w_gate)) * torch.einsum("td,eid->tei", flat, self.w_up)
        return torch.einsum("tei,edi,te->td", hidden, self.w_down, combine)


class ScaledInputBmm(nn.Module):
    """Llama 4: tokens repeated for every expert, scaled by a sigmoid score that is 0 where not chosen, bmm, sum."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(D, E, bias=False)
        self.gate_up_proj, self.down_proj = weight(E, D, 2 * I), weight(E, I, D)

    def forward(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden_states = hidden_states.reshape(-1, D)
        router_logits = self.router(hidden_states)
        top_value, indices = torch.topk(router_logits, K, dim=1)
        scores = torch.full_like(router_logits, float("-inf")).scatter_(1, indices, top_value)
        scores = torch.sigmoid(scores.float()).to(scores.dtype)
        routed_in = hidden_states.repeat(E, 1) * scores.transpose(0, 1).reshape(-1, 1)
        gate, up = torch.bmm(routed_in.view(E, -1, D), self.gate_up_proj).chunk(2, dim=-1)
        routed_out = torch.bmm(up * F.silu(gate), self.down_proj)
        return routed_out.sum(dim=0), router_logits


class MaskTimesExpert(Mixture):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, indices = self.gate(x)
        out = torch.zeros_like(x)
        for i in range(E):
            share = (weights * (indices == i).to(x.dtype)).sum(-1, keepdim=True)
            out = out + self.experts[i](x) * share
        return out


class HardPickTop1(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(D, E)
        self.experts = experts(MLP)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        choice = self.router(x).argmax(dim=-1, keepdim=True)
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            out = torch.where(choice == e, expert(x), out)
        return out


class RepeatBmmDenseWeights(nn.Module):
    """gpt-oss of transformers 4 in eval: tokens repeated for all experts, baddbmm-like biases, dense (T, E) weights."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(D, E)
        self.gate_up_proj, self.gate_up_proj_bias = weight(E, D, 2 * I), weight(E, 2 * I)
        self.down_proj, self.down_proj_bias = weight(E, I, D), weight(E, D)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        batch_size = hidden_states.shape[0]
        flat = hidden_states.reshape(-1, D)
        top_value, indices = torch.topk(self.router(flat), K, dim=-1)
        top_value = F.softmax(top_value, dim=1, dtype=top_value.dtype)
        scores = torch.zeros(flat.shape[0], E, dtype=flat.dtype).scatter_(1, indices, top_value)
        repeated = flat.repeat(E, 1).view(E, -1, D)
        gate_up = torch.bmm(repeated, self.gate_up_proj) + self.gate_up_proj_bias[..., None, :]
        gate, up = gate_up[..., ::2], gate_up[..., 1::2]
        gate, up = gate.clamp(max=7.0), up.clamp(min=-7.0, max=7.0)
        glu = gate * torch.sigmoid(gate * 1.702)
        next_states = torch.bmm((up + 1) * glu, self.down_proj) + self.down_proj_bias[..., None, :]
        next_states = next_states.view(E, batch_size, -1, D)
        next_states = next_states * scores.transpose(0, 1).view(E, batch_size, -1)[..., None]
        return next_states.sum(dim=0)


class AllExpertsSoftmax(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(D, E)
        self.experts = experts(MLP, act=nn.Tanh)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gates = self.gate(x).softmax(dim=-1)
        outputs = torch.stack([expert(x) for expert in self.experts], dim=-1)
        return (outputs * gates.unsqueeze(-2)).sum(dim=-1)


class ChunksOfExperts(nn.Module):
    """All tokens through some experts after others, to save memory; the last chunk is smaller."""

    def __init__(self, cut: str) -> None:
        super().__init__()
        self.cut = cut
        self.gate = TopKGate()
        self.w1, self.w2 = weight(E, D, I), weight(E, I, D)
        self.b1, self.b2 = weight(E, I), weight(E, D)

    def chunks(self, stack: torch.Tensor) -> list[torch.Tensor]:
        if self.cut in ("split", "chunk"):
            return list(stack.split(2) if self.cut == "split" else stack.chunk(3))
        sizes = [(start, min(2, E - start)) for start in range(0, E, 2)]
        if self.cut == "narrow":
            return [stack.narrow(0, start, size) for start, size in sizes]
        return [stack[start : start + size] for start, size in sizes]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.reshape(-1, D)
        weights, indices = self.gate(flat)
        gates = torch.zeros(len(flat), E, dtype=x.dtype).scatter_(1, indices, weights)
        out = torch.zeros_like(flat)
        parts = map(self.chunks, (self.w1, self.b1, self.w2, self.b2, gates.t()))
        for w1, b1, w2, b2, gate in zip(*parts, strict=True):
            h = F.gelu(torch.einsum("td,edi->eti", flat, w1) + b1[:, None])
            out = out + ((torch.bmm(h, w2) + b2[:, None]) * gate[..., None]).sum(0)
        return out.view(x.shape)


class TokensThenExperts(Mixture):
    """All experts' hidden rows lie token by token, while the second product wants them expert by expert."""

    def __init__(self) -> None:
        super().__init__(None)
        self.w_in, self.b_in, self.w_out = weight(E, D, I), weight(E, I), weight(E, I, D)

    def mix(self, flat: torch.Tensor, weights: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        combine = torch.zeros(flat.shape[0], E, dtype=flat.dtype).scatter(1, indices, weights)
        return self.outputs(F.gelu(torch.einsum("td,edi->tei", flat, self.w_in) + self.b_in), combine)

    def outputs(self, hidden: torch.Tensor, combine: torch.Tensor) -> torch.Tensor:
        """(T, D) of hidden rows (T, E, I) and weights (T, E)."""
        return (self.second(hidden.transpose(0, 1)) * combine.t().unsqueeze(-1)).sum(0)

    def second(self, hidden: torch.Tensor) -> torch.Tensor:
        """(E, T, D) of hidden rows (E, T, I)."""
        return torch.bmm(hidden, self.w_out)


class TurnedByProduct(TokensThenExperts):
    def outputs(self, hidden: torch.Tensor, combine: torch.Tensor) -> torch.Tensor:
        return torch.einsum("etd,te->td", torch.einsum("tei,eid->etd", hidden, self.w_out), combine)


class TurnedGate(Mixture):
    def __init__(self) -> None:
        super().__init__(None)
        self.w_gate, self.w_up, self.w_down = weight(E, D, I), weight(E, D, I), weight(E, I, D)

    def mix(self, flat: torch.Tensor, weights: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        combine = torch.zeros(flat.shape[0], E, dtype=flat.dtype).scatter(1, indices, weights)
        gate = F.silu(torch.einsum("td,edi->tei", flat, self.w_gate)).transpose(0, 1)
        hidden = gate * torch.einsum("td,edi->eti", flat, self.w_up)
        return torch.einsum("etd,te->td", torch.bmm(hidden, self.w_down), combine)


class ChosenBetween(TokensThenExperts):
    def mix(self, flat: torch.Tensor, weights: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        hidden = F.gelu(torch.einsum("td,edi->tei", flat, self.w_in) + self.b_in)
        hidden = hidden.gather(1, indices.unsqueeze(-1).expand(-1, -1, I))
        return (torch.einsum("tki,tkid->tkd", hidden, self.w_out[indices]) * weights.unsqueeze(-1)).sum(1)


VARIANTS = (
    variant("dense_stack_einsum", StackEinsum, "stack and einsum, a threshold keeps more than k on ties", "either"),
    variant("dense_stack_einsum_scatter", StackEinsum, "stack and einsum with a masked softmax", threshold=False),
    variant(
        "dense_compute_all_gather", ComputeAllGather, "compute all, gather the top k", make_expert=MLP, act=nn.ReLU
    ),
    variant("dense_stacked_einsum", StackedEinsum, "einsum with stacked weights, one-hot combine"),
    variant("dense_shared_by_score", SharedByScore, "a shared expert in the stack, weighted by its score"),
    variant("dense_stacked_einsum_fused", StackedEinsumFused, "combine folded into a three-operand einsum"),
    variant("dense_scaled_input_bmm", ScaledInputBmm, "bmm over all experts of scaled inputs (llama 4)"),
    variant("dense_mask_times_expert", MaskTimesExpert, "output times (indices == e)", make_expert=MLP, bias=False),
    variant(
        "dense_linear_on_sequences",
        ComputeAllGather,
        "one matrix an expert, on (B, S, D)",
        make_expert=nn.Linear,
        in_features=D,
        out_features=D,
    ),
    variant("dense_norm_on_sequences", MaskTimesExpert, "experts with norms, on (B, S, D)", make_expert=PreNormExpert),
    variant("dense_hard_pick_top1", HardPickTop1, "torch.where over the experts, no routing weight"),
    variant("dense_repeat_bmm_interleaved", RepeatBmmDenseWeights, "repeat, bmm, interleaved gate and up, biases"),
    variant(
        "dense_chunks_sliced", ChunksOfExperts, "two experts at a time, slices of stacks, the last of one", cut="slice"
    ),
    variant("dense_chunks_split", ChunksOfExperts, "the same by split", cut="split"),
    variant("dense_chunks_narrow", ChunksOfExperts, "the same by narrow", cut="narrow"),
    variant("dense_tokens_then_experts", TokensThenExperts, "hidden rows (T, E, I) are turned into (E, T, I)"),
    variant("dense_turned_by_product", TurnedByProduct, "the second product turns its rows itself"),
    variant("dense_turned_gate", TurnedGate, "gate (T, E, I) and up (E, T, I): only one is turned"),
    variant("dense_chosen_between", ChosenBetween, "all experts' first product, the second of the chosen ones"),
    variant("dense_softmax_all", AllExpertsSoftmax, "no top-k: dense by nature, the same as k = E", "either"),
    variant("dense_chosen_at_random", ChosenAtRandom, "random ids, as many as experts give rows"),
)
