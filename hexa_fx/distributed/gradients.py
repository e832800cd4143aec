"""Keeps the gradient that of the global batch, whatever the split.

The gradient of the global mean loss is the sum over ranks of the gradients of ``sum of local losses / global count``. The
experts of a rank already receive the sum over all ranks. The gradients of all other parameters have to be summed, either by
`sync_gradients` or by a wrapper that averages (DDP, FSDP2). For the latter, make the plan with ``data_parallel="mean"``;
`loss_weight` is then larger by the number of ranks. Averaging local means as if batches were equal is wrong by tens of percent.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from hexa_fx.distributed.collectives import all_reduce_
from hexa_fx.distributed.session import PartitionSession


def loss_weight(session: PartitionSession, count: int) -> float:
    """Factor that turns the mean loss over this rank's ``count`` items into its part of the global mean loss.

    Hosts exchange the counts (of samples, or of tokens that are not ignored).
    """
    total = sum(session.exchange_counts(count))
    return _averaged_over(session) * count / total if total else 0.0


def _averaged_over(session: PartitionSession) -> int:
    """By how much a wrapper that averages gradients divides their sum; 1 where they are summed."""
    return session.groups.world if session.plan.grad_scale != 1.0 else 1


def weighted_loss(session: PartitionSession, loss: Tensor, count: int) -> Tensor:
    """A rank's part of the global mean loss, from its local mean loss.

    A rank without items has a mean of 0/0; it contributes zero and still takes part in backward's collectives.
    """
    if count == 0:
        loss = torch.nan_to_num(loss, nan=0.0)
    return loss * loss_weight(session, count)


def load_balancing_loss(session: PartitionSession, probabilities: Tensor, top_k_index: Tensor) -> Tensor:
    """A rank's part of the load-balancing loss of the global batch (Switch Transformers, eq. 4), for one layer.

    ``E * sum over e of (share of routed slots that go to e) * (mean probability of e)`` is a product of two means, so it is
    not the mean of what the ranks compute alone. Here the counts are those of all ranks; the parts of all ranks sum to the
    global loss, and so do their gradients. Add it to what `weighted_loss` returned.

    Args:
        probabilities: router probabilities of this rank's tokens, (T, E).
        top_k_index: the experts chosen, (T, k).
    """
    experts = probabilities.shape[-1]
    chosen = top_k_index.flatten()
    counts = torch.bincount(chosen[chosen < experts], minlength=experts).to(probabilities.dtype)
    totals = session.sum(torch.cat([counts, counts.new_tensor([probabilities.shape[0]])]))
    share = totals[:-1] / totals[-1].clamp(min=1)
    return _averaged_over(session) * experts * (share * probabilities.sum(0)).sum() / totals[-1].clamp(min=1)


def expert_names(session: PartitionSession) -> list[str]:
    """Names of the parameters that the plan cut; the same on all ranks."""
    return [shard.name for shard in session.shards]


def ignore_in_ddp(model: nn.Module, session: PartitionSession) -> None:
    """Excludes the experts from DDP. Call it before wrapping ``model`` in DistributedDataParallel."""
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, expert_names(session))


def expert_parameters(session: PartitionSession) -> set[nn.Parameter]:
    """The parameters that the plan cut, for ``fully_shard(..., ignored_params=...)``."""
    return {shard.parameter for shard in session.shards if isinstance(shard.parameter, nn.Parameter)}


def sync_gradients(model: nn.Module, session: PartitionSession) -> None:
    """Sums the gradients of all parameters except the experts over ranks. Call it after the last backward of a step.

    A gradient that is missing on every rank stays missing; one that is missing on some counts as zero there.
    """
    experts = {id(shard.parameter) for shard in session.shards}
    wanted = [p for p in model.parameters() if p.requires_grad and id(p) not in experts]
    if not wanted or session.groups.world == 1:
        return
    with session.guard("the sum of replicated gradients"):
        present = torch.tensor([p.grad is not None for p in wanted], dtype=torch.int32)
        dist.all_reduce(present, dist.ReduceOp.MAX, group=session.groups.host)  # on a device the host would wait for it
        live = [p for p, there in zip(wanted, present.tolist()) if there]
        for same_kind in _by_kind(live):
            _sum_flat(same_kind, session)


def _by_kind(parameters: Iterable[nn.Parameter]) -> list[list[nn.Parameter]]:
    kinds: dict[tuple[torch.dtype, torch.device], list[nn.Parameter]] = {}
    for parameter in parameters:
        kinds.setdefault((parameter.dtype, parameter.device), []).append(parameter)
    return list(kinds.values())


def _sum_flat(parameters: list[nn.Parameter], session: PartitionSession) -> None:
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    flat = torch.cat([p.grad.reshape(-1) for p in parameters if p.grad is not None])
    all_reduce_(flat, session.groups.main_name)
    for parameter, part in zip(parameters, flat.split([p.numel() for p in parameters])):
        assert parameter.grad is not None
        parameter.grad.copy_(part.view_as(parameter))


def clip_grad_norm_(model: nn.Module, session: PartitionSession, max_norm: float, norm_type: float = 2.0) -> Tensor:
    """`torch.nn.utils.clip_grad_norm_` over the whole model, in which every parameter and every expert slice counts once.

    Call it after `sync_gradients`, or under DDP or FSDP2. Returns the norm before clipping, the same on all ranks.
    """
    experts = {id(shard.parameter) for shard in session.shards}
    with_grad = [p for p in model.parameters() if p.grad is not None]
    shared = [p.grad for p in with_grad if id(p) not in experts and p.grad is not None]
    cut = [p.grad for p in with_grad if id(p) in experts and p.grad is not None]
    device = next(model.parameters()).device
    norms = [_norm(grad, norm_type, device) for grad in shared]
    norms.append(_summed_norm([_norm(grad, norm_type, device) for grad in cut], norm_type, session, device))
    total: Tensor = torch.linalg.vector_norm(torch.stack(norms), norm_type)
    factor = torch.clamp(max_norm / (total + 1e-6), max=1.0)
    for grad in (*shared, *cut):
        grad.mul_(factor.to(grad.dtype))
    return total


def _norm(grad: Tensor, norm_type: float, device: torch.device) -> Tensor:
    if grad.numel() == 0:
        return torch.zeros((), device=device, dtype=_norm_dtype(grad))
    norm = torch.linalg.vector_norm(grad.to(_norm_dtype(grad)), norm_type)
    whole: Tensor = norm.full_tensor() if isinstance(norm, DTensor) else norm
    return whole


def _norm_dtype(grad: Tensor) -> torch.dtype:
    return torch.float64 if grad.dtype == torch.float64 else torch.float32


def _summed_norm(norms: list[Tensor], norm_type: float, session: PartitionSession, device: torch.device) -> Tensor:
    dtype = norms[0].dtype if norms else torch.float32
    local = torch.stack(norms) if norms else torch.zeros(1, device=device, dtype=dtype)
    if math.isinf(norm_type):
        value, op = local.max(), dist.ReduceOp.MAX
    else:
        value, op = local.pow(norm_type).sum(), dist.ReduceOp.SUM
    with session.guard("the norm of the gradients"):
        all_reduce_(value, session.groups.main_name, op)
    return value if math.isinf(norm_type) else value.pow(1.0 / norm_type)


def unscale_(scaler: Any, optimizer: torch.optim.Optimizer, session: PartitionSession) -> None:
    """`torch.amp.GradScaler.unscale_`, after which all ranks agree on whether a gradient overflowed.

    Each rank sees only its own experts' gradients, so that otherwise a rank could skip a step that the others take.
    """
    scaler.unscale_(optimizer)
    for found in scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"].values():
        with session.guard("the search for overflowed gradients"):
            all_reduce_(found, session.groups.main_name, dist.ReduceOp.MAX)
