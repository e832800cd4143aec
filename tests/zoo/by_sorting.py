"""Blocks that bring the tokens into expert order first, or gather each token's weights."""

import torch
import torch.nn.functional as F
from torch import nn

from tests.zoo.common import MLP, Mixture, TopKGate, experts
from tests.zoo.variant import D, E, I, K, variant, weight


class SplitByCounts(nn.Module):
    """Granite of transformers 4: sort, `split(counts.tolist())`, one linear per expert, cat; twice."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(D, E, bias=False)
        self.input_linear, self.output_linear = weight(E, 2 * I, D), weight(E, D, I)

    def parallel_linear(self, inputs: torch.Tensor, weights: torch.Tensor, sizes: list[int]) -> torch.Tensor:
        pieces = inputs.split(sizes, dim=0)
        return torch.cat([F.linear(piece, weights[i]) for i, piece in enumerate(pieces)], dim=0)

    def forward(self, layer_input: torch.Tensor) -> torch.Tensor:
        bsz, length, emb_size = layer_input.size()
        layer_input = layer_input.reshape(-1, emb_size)
        logits = self.router(layer_input)
        top_k_logits, top_k_indices = logits.topk(K, dim=1)
        top_k_gates = torch.softmax(top_k_logits, dim=1).type_as(layer_input)
        gates = torch.zeros([top_k_gates.size(0), E], dtype=torch.long).scatter(1, top_k_indices, 1)
        expert_size = gates.sum(0).tolist()
        _, index_sorted_experts = top_k_indices.flatten().sort(0)
        batch_index = index_sorted_experts.div(K, rounding_mode="trunc")
        batch_gates = top_k_gates.flatten()[index_sorted_experts]
        hidden = self.parallel_linear(layer_input[batch_index], self.input_linear, expert_size)
        gate, up = hidden.chunk(2, dim=-1)
        outputs = self.parallel_linear(F.silu(gate) * up, self.output_linear, expert_size)
        outputs = outputs * batch_gates[:, None]
        zeros = torch.zeros((bsz * length, emb_size), dtype=outputs.dtype, device=outputs.device)
        return zeros.index_add(0, batch_index, outputs).view(bsz, length, emb_size)


class SplitOfChosen(SplitByCounts):
    """A list of the weights of those experts alone that have rows, as in the axolotl fork's grouped experts."""

    def parallel_linear(self, inputs: torch.Tensor, weights: torch.Tensor, sizes: list[int]) -> torch.Tensor:
        chosen = torch.tensor(sizes).nonzero().flatten()
        counts = torch.tensor(sizes).index_select(0, chosen).tolist()
        pieces = zip(inputs.split(counts), weights.index_select(0, chosen), strict=True)
        return torch.cat([piece @ matrix.T for piece, matrix in pieces])


class ArgsortSplitUnsort(Mixture):
    def mix(self, flat: torch.Tensor, weights: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        order = torch.argsort(indices.reshape(-1), stable=True)
        counts = torch.bincount(indices.reshape(-1), minlength=E)
        permuted = flat[order // K]
        chunks = permuted.split(counts.tolist())
        out = torch.cat([expert(chunk) for expert, chunk in zip(self.experts, chunks, strict=True)])
        unsorted = out[torch.argsort(order)].view(-1, K, D)
        return (unsorted * weights.unsqueeze(-1)).sum(1)


class NumpyCounts(Mixture):
    """DeepSeek remote code, `moe_infer`: counts as numpy, outputs concatenated, `new_x[idxs] = outs`."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        orig_shape = x.shape
        x = x.view(-1, x.shape[-1])
        topk_weight, topk_ids = self.gate(x)
        cnts = topk_ids.new_zeros((topk_ids.shape[0], len(self.experts)))
        cnts.scatter_(1, topk_ids, 1)
        tokens_per_expert = cnts.sum(dim=0)
        idxs = topk_ids.view(-1).argsort()
        sorted_tokens = x[idxs // topk_ids.shape[1]]
        tokens_per_expert = tokens_per_expert.cpu().numpy()
        outputs = []
        start_idx = 0
        for i, num_tokens in enumerate(tokens_per_expert):
            end_idx = start_idx + num_tokens
            if num_tokens == 0:
                continue
            outputs.append(self.experts[i](sorted_tokens[start_idx:end_idx]))
            start_idx = end_idx
        outs = torch.cat(outputs, dim=0) if len(outputs) else sorted_tokens.new_empty(0)
        new_x = torch.empty_like(outs)
        new_x[idxs] = outs
        y = new_x.view(*topk_ids.shape, -1).type(topk_weight.dtype).mul_(topk_weight.unsqueeze(dim=-1)).sum(dim=1)
        return y.type(new_x.dtype).view(*orig_shape)


class GroupedMM(Mixture):
    """Sort, offsets by histogram and cumsum, `grouped_mm` on stacked weights, inverse permutation."""

    def __init__(self, function: str = "torch._grouped_mm") -> None:
        super().__init__(None)
        self.grouped_mm = torch._grouped_mm if function == "torch._grouped_mm" else F.grouped_mm
        self.w1, self.w2 = weight(E, 2 * I, D), weight(E, D, I)

    def mix(self, flat: torch.Tensor, weights: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        ids = indices.reshape(-1)
        order = torch.argsort(ids)
        counts = torch.histc(ids.float(), bins=E, min=0, max=E - 1)
        offs = torch.cumsum(counts, dim=0, dtype=torch.int32)
        gate, up = self.grouped_mm(flat[order // K], self.w1.transpose(-2, -1), offs=offs).chunk(2, dim=-1)
        y = self.grouped_mm(F.silu(gate) * up, self.w2.transpose(-2, -1), offs=offs)
        y = y * weights.reshape(-1)[order].unsqueeze(-1)
        inverse = torch.empty_like(order)
        inverse[order] = torch.arange(order.numel())
        return y[inverse].view(-1, K, D).sum(dim=1)


class GatheredBmm(Mixture):
    def __init__(self) -> None:
        super().__init__(None)
        self.up, self.down = weight(E, D, I), weight(E, I, D)
        self.up_bias, self.down_bias = weight(E, I), weight(E, D)

    def mix(self, flat: torch.Tensor, weights: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        ids = indices.reshape(-1)
        rows = flat.repeat_interleave(K, dim=0).unsqueeze(1)
        h = F.gelu(torch.bmm(rows, self.up[ids]).squeeze(1) + self.up_bias[ids])
        y = torch.bmm(h.unsqueeze(1), self.down[ids]).squeeze(1) + self.down_bias[ids]
        return (y * weights.reshape(-1, 1)).view(-1, K, D).sum(1)


class GatheredEinsum(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(D, E, bias=False)
        self.w1, self.w2, self.w3 = weight(E, I, D), weight(E, D, I), weight(E, I, D)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.view(-1, D)
        expert_weights, expert_indices = torch.topk(F.softmax(self.gate(flat), dim=-1), K, dim=-1)
        expert_weights = expert_weights / expert_weights.sum(dim=-1, keepdim=True)
        w1, w2, w3 = self.w1[expert_indices], self.w2[expert_indices], self.w3[expert_indices]
        x1 = F.silu(torch.einsum("ti,taoi->tao", flat, w1))
        x3 = torch.einsum("ti,taoi->tao", flat, w3)
        expert_outs = torch.einsum("tao,taio->tai", x1 * x3, w2)
        return torch.einsum("tai,ta->ti", expert_outs, expert_weights).view(x.shape)


class SortedIndexAdd(Mixture):
    def mix(self, flat: torch.Tensor, weights: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        sorted_experts, order = torch.sort(indices.flatten())
        token = torch.div(order, K, rounding_mode="floor")
        sorted_weights = weights.flatten()[order]
        boundaries = torch.searchsorted(sorted_experts, torch.arange(E + 1)).tolist()
        out = torch.zeros_like(flat)
        for e in range(E):
            begin, end = boundaries[e], boundaries[e + 1]
            if begin == end:
                continue
            rows = token[begin:end]
            out.index_add_(0, rows, self.experts[e](flat[rows]) * sorted_weights[begin:end, None])
        return out


class SliceWrites(nn.Module):
    """Aria of transformers 4: one linear helper that writes `output[start:end]`, with 0-d tensor bounds."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = TopKGate()
        self.fc1, self.fc2 = weight(E, D, 2 * I), weight(E, I, D)

    @staticmethod
    def sequential_experts_gemm(tokens: torch.Tensor, weights: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        output = torch.zeros(tokens.shape[0], weights.shape[-1], dtype=tokens.dtype, device=tokens.device)
        cumsum = torch.cumsum(counts, dim=0)
        cumsum = torch.cat((torch.zeros(1, dtype=torch.long), cumsum))
        for expert_num in range(weights.shape[0]):
            start, end = cumsum[expert_num], cumsum[expert_num + 1]
            output[start:end] = torch.matmul(tokens[start:end], weights[expert_num])
        return output

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        flat = hidden_states.view(-1, D)
        scores, top_indices = self.gate(flat)
        counts = torch.histc(top_indices.flatten().to(torch.float32), bins=E, min=0, max=E - 1).to(torch.long)
        sorted_indices = torch.argsort(top_indices.flatten())
        permuted = flat.index_select(0, sorted_indices // K)
        gate, up = torch.chunk(self.sequential_experts_gemm(permuted, self.fc1, counts), 2, dim=-1)
        expert_output = self.sequential_experts_gemm(F.silu(gate) * up, self.fc2, counts)
        unpermuted = torch.zeros((scores.numel(), D), dtype=expert_output.dtype)
        unpermuted.index_copy_(0, sorted_indices, expert_output)
        unpermuted = unpermuted.view(-1, K, D) * scores.unsqueeze(-1)
        return unpermuted.sum(dim=1).to(hidden_states.dtype).view(hidden_states.shape)


class SparseDispatcher:
    """Tensor2tensor's helper object: splits the inputs by expert and puts the outputs together."""

    def __init__(self, num_experts: int, gates: torch.Tensor) -> None:
        self.gates, self.num_experts = gates, num_experts
        sorted_experts, index_sorted_experts = torch.nonzero(gates).sort(0)
        _, self.expert_index = sorted_experts.split(1, dim=1)
        self.batch_index = torch.nonzero(gates)[index_sorted_experts[:, 1], 0]
        self.part_sizes = (gates > 0).sum(0).tolist()
        gates_exp = gates[self.batch_index.flatten()]
        self.nonzero_gates = torch.gather(gates_exp, 1, self.expert_index)

    def dispatch(self, inp: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return torch.split(inp[self.batch_index], self.part_sizes, dim=0)

    def combine(self, expert_out: list[torch.Tensor]) -> torch.Tensor:
        stitched = torch.cat(expert_out, 0).mul(self.nonzero_gates)
        zeros = torch.zeros(self.gates.size(0), expert_out[-1].size(1), dtype=stitched.dtype)
        return zeros.index_add(0, self.batch_index, stitched)


class WithSparseDispatcher(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w_gate = weight(D, E)
        self.experts = experts(MLP, act=nn.ReLU)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.reshape(-1, D)
        logits = flat @ self.w_gate
        top_logits, top_indices = logits.topk(K, dim=1)
        gates = torch.zeros_like(logits).scatter(1, top_indices, top_logits.softmax(1))
        dispatcher = SparseDispatcher(E, gates)
        outputs = [self.experts[i](part) for i, part in enumerate(dispatcher.dispatch(flat))]
        return dispatcher.combine(outputs).view(x.shape)


class TwoProjectionsPerLoop(Mixture):
    def __init__(self) -> None:
        super().__init__(None)
        self.w1, self.w2 = weight(E, D, I), weight(E, I, D)

    def mix(self, flat: torch.Tensor, weights: torch.Tensor, top_experts: torch.Tensor) -> torch.Tensor:
        bin_ids, indices = torch.sort(top_experts.flatten(), stable=True)
        bins = torch.bincount(bin_ids, minlength=E).cumsum(0)
        rows = flat[indices // K]
        starts = [0, *bins[:-1].tolist()]
        hidden = [rows[s:e] @ self.w1[i] for i, (s, e) in enumerate(zip(starts, bins.tolist(), strict=True))]
        hidden = F.gelu(torch.cat(hidden))
        out = [hidden[s:e] @ self.w2[i] for i, (s, e) in enumerate(zip(starts, bins.tolist(), strict=True))]
        out = torch.cat(out) * weights.flatten()[indices, None]
        return torch.zeros_like(flat).index_add_(0, indices // K, out)


GROUPED = (torch.float32,)

VARIANTS = (
    variant("sorted_split_counts", SplitByCounts, "split(counts.tolist()) twice, shared elementwise code between"),
    variant("sorted_split_of_chosen", SplitOfChosen, "the same with the weights of those experts alone that have rows"),
    variant("sorted_argsort_unsort", ArgsortSplitUnsort, "argsort, split, cat, inverse permutation", make_expert=MLP),
    variant("sorted_numpy_counts", NumpyCounts, "counts as a numpy array (moe_infer)"),
    variant("sorted_torch_grouped_mm", GroupedMM, "torch._grouped_mm (no float64)", dtypes=GROUPED),
    variant("sorted_f_grouped_mm", GroupedMM, "nn.functional.grouped_mm", dtypes=GROUPED, function="F.grouped_mm"),
    variant("sorted_gathered_bmm", GatheredBmm, "bmm over gathered per-token weights and biases"),
    variant("sorted_gathered_einsum", GatheredEinsum, "einsum over gathered per-token weights (gpt-fast)"),
    variant(
        "sorted_index_add",
        SortedIndexAdd,
        "searchsorted bounds, index_add_ of sorted outputs",
        make_expert=MLP,
        act=nn.SiLU,
    ),
    variant("sorted_slice_writes", SliceWrites, "0-d tensor bounds, writes into slices of a zero buffer"),
    variant("sorted_sparse_dispatcher", WithSparseDispatcher, "the SparseDispatcher helper object of Shazeer ports"),
    variant("sorted_two_loops", TwoProjectionsPerLoop, "up projections in one loop, down projections in another"),
)
