"""Keeps the gradient that of the global batch, whatever the split.

The gradient of the global mean loss is the sum over ranks of the gradients of ``sum of local losses / global count``. The
experts of a rank already receive the sum over all ranks. The gradients of all other parameters have to be summed, either by
`sync_gradients` or by a wrapper that averages (DDP, FSDP2). For the latter, make the plan with ``data_parallel="mean"``;
`loss_weight` is then larger by the number of ranks. Averaging local means as if batches were equal is wrong by tens of percent.

*Everywhere* here means the ranks of the partition and those of the data-parallel axes that the session was told of (``data_mesh``).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.experimental import implicit_replication
from torch.nn.parallel import DistributedDataParallel

from hexa_fx.distributed.collectives import all_reduce_
from hexa_fx.distributed.groups import local_part, summed_elsewhere
from hexa_fx.distributed.lockstep import Place, meet
from hexa_fx.distributed.session import PartitionSession, open_sessions
from hexa_fx.errors import InputError


def loss_weight(session: PartitionSession, count: int) -> float:
    """Factor that turns the mean loss over this rank's ``count`` items into its part of the global mean loss.

    Hosts exchange the counts (of samples, or of tokens that are not ignored), everywhere.
    """
    if count < 0 or count != int(count):
        raise InputError(f"count is a number of samples or tokens, got {count!r}")
    total = session.total(int(count))
    return _averaged_over(session) * count / total if total else 0.0


def _averaged_over(session: PartitionSession) -> int:
    """By how much a wrapper that averages gradients divides their sum; 1 where they are summed."""
    return session.groups.world * session.data.size if session.plan.data_parallel == "mean" else 1


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
    """Excludes the experts, and what FSDP2 holds, from DDP. Call it before wrapping ``model`` in DistributedDataParallel."""
    sharded = [name for name, p in model.named_parameters() if summed_elsewhere(p, session.groups.main)]
    names = dict.fromkeys([*expert_names(session), *sharded])
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, list(names))


def expert_parameters(session: PartitionSession) -> set[nn.Parameter]:
    """The parameters that the plan cut, for ``fully_shard(..., ignored_params=...)``."""
    return {shard.parameter for shard in session.shards if isinstance(shard.parameter, nn.Parameter)}


def sync_gradients(model: nn.Module, session: PartitionSession, *, only_experts: bool = False) -> None:
    """Combines the gradients that nobody has combined yet. Call it after the last backward of a step.

    Of all parameters but the experts over the ranks of the partition; of all parameters over the data-parallel axes that the
    session knows. They are summed, or with ``data_parallel="mean"`` averaged. What FSDP2 has combined over the same ranks is left
    alone. A gradient that is missing on every rank stays missing; one that is missing on some counts as zero there.

    Args:
        only_experts: where DDP combines the others, everywhere.
    """
    cut, others = _experts_and_others(model, session)
    meet(session.groups, Place.SYNC)
    others = [] if only_experts else others
    mean = session.plan.data_parallel == "mean"
    with session.guard("the sum of replicated gradients"):
        _combine(others, session.groups.main, session.groups.host, mean)
        for group, host in zip(session.data.groups, session.data.hosts):
            _combine([*others, *cut], group, host, mean)


def _experts_and_others(model: nn.Module, session: PartitionSession) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """The parameters with gradients that the plan cut, and all others.

    Raises:
        InputError: the model is another than the session's, or holds experts that another session cut.
    """
    experts = {id(shard.parameter) for shard in session.shards}
    foreign = {
        id(shard.parameter) for other in open_sessions.values() if other is not session for shard in other.shards
    }
    held = list(model.parameters())
    if not experts <= set(map(id, held)) or foreign & set(map(id, held)):
        raise InputError(
            "the session did not cut the experts of this model, or not all of them: give the module that optimize_ was called on "
            "(a wrapper around it will do), and its own session"
        )
    wanted = [p for p in held if p.requires_grad]
    return [p for p in wanted if id(p) in experts], [p for p in wanted if id(p) not in experts]


def _combine(parameters: Sequence[nn.Parameter], group: Any, host: Any, mean: bool) -> None:
    world = dist.get_world_size(group)
    wanted = [p for p in parameters if not summed_elsewhere(p, group)]
    if not wanted or world == 1:
        return
    present = torch.tensor([p.grad is not None for p in wanted], dtype=torch.int32, device="cpu")
    dist.all_reduce(present, dist.ReduceOp.MAX, group=host)  # on a device the host would wait for it
    live = [p for p, there in zip(wanted, present.tolist()) if there]
    for same_kind in _by_kind(live):
        _sum_flat(same_kind, str(group.group_name), 1.0 / world if mean else 1.0)


def _by_kind(parameters: Iterable[nn.Parameter]) -> list[list[nn.Parameter]]:
    kinds: dict[tuple[torch.dtype, torch.device], list[nn.Parameter]] = {}
    for parameter in parameters:
        kinds.setdefault((parameter.dtype, parameter.device), []).append(parameter)
    return list(kinds.values())


def _sum_flat(parameters: list[nn.Parameter], group: str, factor: float) -> None:
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    grads = [local_part(p.grad) for p in parameters if p.grad is not None]
    flat = torch.cat([grad.reshape(-1) for grad in grads])
    all_reduce_(flat, group)
    if factor != 1.0:
        flat.mul_(factor)
    for grad, part in zip(grads, flat.split([grad.numel() for grad in grads])):
        grad.copy_(part.view_as(grad))


def clip_grad_norm_(model: nn.Module, session: PartitionSession, max_norm: float, norm_type: float = 2.0) -> Tensor:
    """`torch.nn.utils.clip_grad_norm_` over the whole model, in which every element of every parameter counts once.

    Call it after `sync_gradients`, or under DDP or FSDP2; parameters may be DTensors over different meshes. Returns the norm before
    clipping, the same on all ranks.
    """
    experts = set(map(id, _experts_and_others(model, session)[0]))
    # Groups come from all parameters, since every rank has to take part, also one on which a gradient is missing. They are told
    # apart by their ranks: of equal meshes, torch may give a parameter the one or the other, and another on another rank.
    wanted = [p for p in model.parameters() if p.requires_grad]
    parts: dict[tuple[Any, ...], tuple[tuple[Any, ...], list[Tensor]]] = {(): ((), [])}
    for parameter in wanted:
        groups = _spread_over(parameter, session.groups.main if id(parameter) in experts else None)
        _, held = parts.setdefault(tuple(tuple(dist.get_process_group_ranks(g)) for g in groups), (groups, []))
        held += [] if parameter.grad is None else [local_part(parameter.grad)]
    zero = local_part(wanted[0]).new_zeros(1, dtype=_norm_dtype(p.dtype for p in wanted))
    meet(session.groups, Place.NORM)
    with session.guard("the norm of the gradients"):
        norms = [_norm(grads, norm_type, groups, zero) for groups, grads in parts.values()]
    total: Tensor = torch.linalg.vector_norm(torch.stack(norms), norm_type)
    factor = torch.clamp(max_norm / (total + 1e-6), max=1.0)
    for grad in (grad for _, grads in parts.values() for grad in grads):
        grad.mul_(factor.to(grad.dtype))
    return total


def _spread_over(parameter: Tensor, partition: Any) -> tuple[Any, ...]:
    """The groups over whose ranks different elements of a parameter lie; of one that is cut, ``partition`` is among them."""
    if not isinstance(parameter, DTensor):
        return () if partition is None else (partition,)
    mesh = parameter.device_mesh
    held = [mesh.get_group(i) for i, placement in enumerate(parameter.placements) if not placement.is_replicate()]
    apart = partition is not None and not summed_elsewhere(parameter, partition)
    return (*held, partition) if apart else tuple(held)


def _norm(grads: Sequence[Tensor], norm_type: float, groups: Sequence[Any], zero: Tensor) -> Tensor:
    """The norm of all of these on all ranks of the groups."""
    found = [
        torch.linalg.vector_norm(g.to(_norm_dtype([g.dtype])), norm_type).to(zero.dtype) for g in grads if g.numel()
    ]
    local = torch.stack(found) if found else zero
    if math.isinf(norm_type):
        value, op = local.max(), dist.ReduceOp.MAX
    else:
        value, op = local.pow(norm_type).sum(), dist.ReduceOp.SUM
    for group in groups:
        all_reduce_(value, str(group.group_name), op)
    return value if math.isinf(norm_type) else value.pow(1.0 / norm_type)


def _norm_dtype(dtypes: Iterable[torch.dtype]) -> torch.dtype:
    return torch.float64 if torch.float64 in dtypes else torch.float32


def unscale_(scaler: Any, optimizer: torch.optim.Optimizer, session: PartitionSession) -> None:
    """`torch.amp.GradScaler.unscale_`, after which all ranks agree on whether a gradient overflowed.

    Each rank sees only its own experts' gradients, so that otherwise a rank could skip a step that the others take.
    """
    with implicit_replication():  # gradients of DTensors beside others
        scaler.unscale_(optimizer)
    for found in scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"].values():
        with session.guard("the search for overflowed gradients"):
            for group in (session.groups.main, *session.data.groups):
                all_reduce_(found, str(group.group_name), dist.ReduceOp.MAX)
