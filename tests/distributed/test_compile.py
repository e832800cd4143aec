"""torch.compile of partitioned models: in one graph, equal to what runs without it."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import run
from test_mesh import CONFIG, build, data
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import hexa_fx
from hexa_fx.distributed.data import split_batch
from hexa_fx.passes.partition.plan_layers import PartitionConfig


def outcome(run: Any, model: nn.Module, x: Tensor, dtype: torch.dtype | None = None) -> list[Tensor]:
    """Loss and all gradients, with autocast to ``dtype``."""
    model.zero_grad()
    with torch.autocast("cpu", dtype=dtype or torch.bfloat16, enabled=dtype is not None):
        loss = (run(x) ** 2).sum()  # of no tokens it is 0, where a mean is NaN
    loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


def compiled(rank: int, world: int, kind: str, backend: str, capacities: Any, more: bool) -> Any:
    torch._dynamo.reset()
    model, x = build(kind, torch.float32), data(9, torch.float32)
    given = {"strategy": {"0": "data", "1": "model"}, "capacities": capacities, "partition": PartitionConfig(tile=1)}
    hexa_fx.optimize_(model, x, CONFIG, mesh=dist.group.WORLD, **given)
    session = model.partition
    whole = torch.compile(model, backend=backend, fullgraph=True)
    parts = [split_batch(x, session.plan, rank), split_batch(data(14, torch.float32), session.plan, rank)]
    pairs = []
    calls = [(parts[0], None), (parts[1], None)]
    if kind == "listed":  # the others' own code cannot run under autocast
        calls.append((parts[0], torch.bfloat16))
    for part, dtype in calls if more else calls[:1]:
        pairs.append((outcome(whole, model, part, dtype), outcome(model, model, part, dtype)))
    if more:
        with torch.no_grad():
            pairs.append(([whole(parts[0])], [model(parts[0])]))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.step()
    pairs.append((outcome(whole, model, parts[0]), outcome(model, model, parts[0])))
    if more and kind == "stacked":
        model[0].moe.down.requires_grad_(False)
        pairs.append((outcome(whole, model, parts[0]), outcome(model, model, parts[0])))
    session.close()
    sizes = [len(one) == len(other) for one, other in pairs]
    return sizes, [max((float((a - b).abs().max()) for a, b in zip(*pair) if a.numel()), default=0.0) for pair in pairs]


@pytest.mark.parametrize(
    ("kind", "backend", "capacities", "more"),
    [
        ("stacked", "aot_eager", (1.0, 2.0), False),
        pytest.param("stacked", "aot_eager", (1.0, 1e9), True, marks=pytest.mark.slow),
        pytest.param("listed", "aot_eager", (1.0, 2.0), True, marks=pytest.mark.slow),
        pytest.param("separate", "inductor", None, True, marks=pytest.mark.slow),
    ],
)
def test_one_graph_equals_no_graph(kind: str, backend: str, capacities: Any, more: bool) -> None:
    for sizes, worst in run(2, compiled, kind, backend, capacities, more, timeout=200):
        assert all(sizes)
        assert max(worst) < 1e-5, worst


def along_an_axis(rank: int, world: int) -> float:
    """Experts that are DTensors are not traced: the graph breaks around their block."""
    torch._dynamo.reset()
    model, x = build("stacked"), data(8)
    mesh = init_device_mesh("cpu", (1, world), mesh_dim_names=("data", "hexa"))["hexa"]
    hexa_fx.optimize_(model, x, CONFIG, mesh=mesh, strategy="data", capacities=None)
    part = split_batch(x, model.partition.plan, rank)
    broken = torch.compile(model, backend="aot_eager")
    pairs = zip(outcome(broken, model, part), outcome(model, model, part))
    worst = max(float((getattr(a, "_local_tensor", a) - getattr(b, "_local_tensor", b)).abs().max()) for a, b in pairs)
    model.partition.close()
    return worst


@pytest.mark.slow
def test_graphs_break_along_an_axis() -> None:
    assert max(run(2, along_an_axis, timeout=200)) < 1e-12
