"""transformers: slices of every expert in place of expert parallelism, as ``DistributedConfig(ep_implementation="hexa")``.

Expert parallelism gives each rank whole experts and sends tokens to them, so that the busiest expert sets the pace. Here every rank
has some channels of every expert's intermediate size, and the same work under any routing. Parameters are DTensors when
`from_pretrained` loads them, so it reads each rank's channels only; FSDP2 over copies of the experts, saving and configurations are
the library's.

T tokens of a rank, k experts per token, E experts, D model size, I intermediate size, N ranks.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard
from transformers.distributed.expert_parallel import EPImplementation
from transformers.distributed.parallel_utils import _AllReduceBackward, _AllReduceForward

from hexa_fx import ops
from hexa_fx.distributed.collectives import all_gather_v, reduce_scatter_v, wait
from hexa_fx.integrations.experts import Gate, identify_gate, weights_of
from hexa_fx.ir import FfnSpec, Layout


class SlicedExperts(EPImplementation):  # type: ignore[misc]
    """The experts of one block, of which this rank has I / N channels each.

    Where the group shares one batch (``ep_size == tp_size``), partial outputs are summed by an all-reduce. Where each rank has a
    batch of its own (``tp_size == 1``), tokens are gathered and partial outputs reduce-scattered; hosts wait for the numbers of
    tokens, as in the library's all-to-all.

    Args:
        experts: the experts module, with stacked weights as transformers' `use_experts_implementation` describes them.
        ep_mesh: 1-d, the ranks that share the experts. tp_mesh: 1-d, the ranks that share a batch.

    Raises:
        ValueError: the experts cannot be sliced, or the meshes are of another kind.
    """

    def __init__(self, experts: Any, ep_mesh: DeviceMesh, tp_mesh: DeviceMesh) -> None:
        super().__init__(experts, ep_mesh, tp_mesh)
        if not self.shares_batch and tp_mesh.size() > 1:
            raise ValueError('ep_implementation="hexa" needs ep_size == tp_size, or tp_size == 1')
        self._experts = experts
        self._gate = _gate_of(experts)
        self._group = ep_mesh.get_group()
        self._layout: Layout = "kn" if experts.is_transposed else "nk"
        experts.num_experts = _slice(experts, self._gate, ep_mesh)
        experts._is_expert_parallel = False  # no ids of other ranks' experts

    def __call__(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """(T, D), (T, k) global ids, (T, k) -> (T, D), for the tokens of this rank."""
        if self.shares_batch:
            x, weights = (_AllReduceBackward.apply(t, self._group) for t in (hidden_states, top_k_weights))
            summed: Tensor = _AllReduceForward.apply(self._partial(x, top_k_index, weights), self._group)
            return summed
        sizes, name = self._tokens(hidden_states), str(self._group.group_name)
        moved = [all_gather_v(t, sizes, name) for t in (hidden_states, top_k_index, top_k_weights)]
        return wait(reduce_scatter_v(self._partial(*map(wait, moved)), sizes, name))

    def _partial(self, x: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """What this rank's channels contribute to the outputs. One rank adds the output bias."""
        w1, b1, w2, b2 = weights_of(self._experts)
        if b2 is not None:
            b2 = _AllReduceBackward.apply(b2, self._group) * float(dist.get_rank(self._group) == 0)
        gate = self._gate
        spec = FfnSpec(gate.activation, gate.glu, self._layout, self._layout, gate.params)
        return ops.moe_ffn(x.to(w1.dtype), top_k_index, top_k_weights, w1, b1, None, None, w2, b2, spec)

    def _tokens(self, x: Tensor) -> list[int]:
        """T of every rank."""
        counts = torch.empty(self.ep_mesh.size(), dtype=torch.int64, device=x.device)
        dist.all_gather_into_tensor(counts, counts.new_tensor([x.shape[0]]), group=self._group)
        return list(counts.tolist())


def _gate_of(experts: Any) -> Gate:
    gate = None if experts.has_post_expert_norm else identify_gate(experts)
    if gate is None:
        raise ValueError(
            f'ep_implementation="hexa" slices the channels of every expert, and what {type(experts).__name__} computes between or '
            'after its products is none of hexa_fx\'s activations, so it may need all of them: use ep_implementation="auto"'
        )
    return gate


def _slice(experts: Any, gate: Gate, mesh: DeviceMesh) -> int:
    """Makes placeholders of slices out of those of whole experts, before weights are loaded. Returns E."""
    first, second = (2, 1) if experts.is_transposed else (1, 2)
    joined: Any = _StridedShard(first, split_factor=2) if gate.glu == "concat" else Shard(first)
    bias: Any = _StridedShard(1, split_factor=2) if gate.glu == "concat" else Shard(1)
    name = "gate_up_proj" if experts.has_gate else "up_proj"
    placements = {name: joined, f"{name}_bias": bias, "down_proj": Shard(second), "down_proj_bias": Replicate()}
    channels = experts.down_proj.shape[second]
    if channels % mesh.size():
        raise ValueError(
            f'ep_implementation="hexa": {channels} channels of an expert do not divide by {mesh.size()} ranks'
        )
    for key, parameter in experts._parameters.items():
        experts._parameters[key] = _placeholder(key, parameter, placements[key], mesh)
    return int(experts.down_proj.shape[0])


def _placeholder(key: str, parameter: Any, placement: Any, mesh: DeviceMesh) -> nn.Parameter:
    if parameter.device.type != "meta":
        raise ValueError(
            f'ep_implementation="hexa" slices what from_pretrained is going to load, and {key} is there already'
        )
    size = list(parameter.shape)
    if isinstance(placement, (Shard, _StridedShard)):
        size[placement.dim] //= mesh.size()
    local = torch.empty(size, dtype=parameter.dtype, device="meta")
    whole = torch.empty(parameter.shape, device="meta")
    spread = DTensor.from_local(local, mesh, [placement], run_check=False, shape=whole.shape, stride=whole.stride())
    return nn.Parameter(spread, requires_grad=parameter.requires_grad)
