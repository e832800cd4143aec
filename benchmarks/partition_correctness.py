"""Relative error of a partitioned model's outputs and gradients to float32 on one device, beside that of one device alone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.partition_layers import Stack, partition
from benchmarks.partition_shapes import Options, Record
from hexa_fx.distributed.groups import local_part
from hexa_fx.passes.partition.plan_layers import PartitionConfig, plan_layers
from hexa_fx.plan import ExpertShape, Plan


def own(sizes: tuple[int, ...], rank: int) -> slice:
    return slice(sum(sizes[:rank]), sum(sizes[: rank + 1]))


def correctness(o: Options) -> Iterator[Record]:
    world, rank = dist.get_world_size(), dist.get_rank()
    shape, length, sequences = ExpertShape(8, 256, 512, 3, 2), 64, 4 * world
    speeds = {"even": [1.0] * world, "uneven": [1.0 + r for r in range(world)], "h0": [1.0] * (world - 1) + [1e6]}
    for name, seconds in speeds.items():
        for kind, reduce in (("model", "reduce_scatter"), ("model", "all_reduce"), ("data", "reduce_scatter")):
            config = PartitionConfig(batch=sequences, tile=64, reduce=reduce, slots=2)
            plan = plan_layers({f"layers.{i}.moe": shape for i in range(3)}, seconds, kind, config)
            case = {"split": name, "kind": kind, "reduce": reduce, "h": plan.layers[0].shards, "batch": plan.batch}
            yield {"question": "correctness"} | case | _error(plan, shape, length, o, rank)


def _error(plan: Plan, shape: ExpertShape, length: int, o: Options, rank: int) -> Record:
    device, dtype = o.device, o.dtype
    torch.manual_seed(1)
    x = torch.randn(sum(plan.batch) * length, shape.hidden_size, device=device)
    exact = Stack(3, shape, length, device, torch.float32)
    alone, model = (Stack(3, shape, length, device, torch.float32).to(dtype) for _ in range(2))
    with torch.no_grad():
        for p, q in zip(exact.parameters(), alone.parameters()):
            p.copy_(q.float())  # the same weights, so that only arithmetic differs
    installed = partition(model, plan)
    mine = own(tuple(b * length for b in plan.batch), rank)
    outputs = []
    for net, rows in ((exact, x.to(dtype).float()), (alone, x.to(dtype)), (model, x.to(dtype)[mine])):
        y = net(rows)
        (y.float() ** 2).sum().div(x.shape[0]).backward()
        outputs.append(y.detach().float())
    errors = [_relative(outputs[2], outputs[0][mine]), _relative(outputs[1], outputs[0])]
    errors += [max(pair) for pair in zip(*_gradient_errors(model, exact, alone, installed))]
    worst = torch.tensor(errors, device=device)
    dist.all_reduce(worst, op=dist.ReduceOp.MAX)
    installed.session.close()
    names = ("output", "output_one_device", "gradient", "gradient_one_device")
    return dict(zip(names, (round(float(v), 6) for v in worst)))


def _gradient_errors(model: Stack, exact: Stack, alone: Stack, installed: Any) -> Iterator[tuple[float, float]]:
    cuts = {shard.name: shard.chunks for shard in installed.session.shards}
    for (name, p), q, a in zip(model.named_parameters(), exact.parameters(), alone.parameters()):
        ours, theirs, single = local_part(p.grad).float(), q.grad, a.grad.float()
        if name in cuts:
            theirs, single = (
                torch.cat([t.narrow(c.dim, c.start, c.length) for c in cuts[name]], cuts[name][0].dim)
                for t in (theirs, single)
            )
        else:
            dist.all_reduce(ours)
        if theirs.numel():
            yield _relative(ours, theirs), _relative(single, theirs)


def _relative(a: Tensor, b: Tensor) -> float:
    return float((a - b).norm() / b.norm().clamp(min=1e-12)) if b.numel() else 0.0
