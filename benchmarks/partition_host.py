"""What a partitioned layer costs the host, which launches kernels: microseconds a layer.

    python benchmarks/partition_host.py --out host.json

One process on a CPU, tiny tensors, collectives that do nothing. Nothing is computed and nothing travels to speak of, so the time is
the host's; *local* is the same model without a partition, and what a mode takes longer is its own. Forward and backward apart, CPU
time; the lower quartile of many steps, modes in turn.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.testing._internal.distributed import fake_pg  # noqa: F401  (registers the backend)

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

from benchmarks.partition_layers import Stack, partition
from benchmarks.partition_shapes import Record
from hexa_fx.passes.partition.plan_layers import PartitionConfig, plan_layers
from hexa_fx.plan import ExpertShape

TINY = ExpertShape(2, 8, 8, 2, 2)
TOKENS, LAYERS, STEPS = 8, 6, 300


def host() -> Iterator[Record]:
    """Microseconds a layer on the host."""
    x = torch.randn(TOKENS, TINY.hidden_size)
    models = {mode: _model(mode) for mode in ("local", "data", "model", "model, counts exchanged")}
    times: dict[str, list[tuple[float, float]]] = {mode: [] for mode in models}
    for _ in range(STEPS):
        for mode, (model, _) in models.items():
            times[mode].append(_step(model, x))
    for mode, samples in times.items():
        forward, backward = (sorted(part)[STEPS // 4] / LAYERS * 1e6 for part in zip(*samples))
        yield {"question": "host time", "mode": mode, "forward_us": round(forward), "backward_us": round(backward)}


def _model(mode: str) -> tuple[Stack, Any]:
    model = Stack(LAYERS, TINY, TOKENS // 2, "cpu", torch.float32)
    if mode == "local":
        return model, None
    config = PartitionConfig(batch=2, tokens=TOKENS, static_tokens="counts" not in mode)
    plan = plan_layers({f"layers.{i}.moe": TINY for i in range(LAYERS)}, [1.0], mode.split(",")[0], config)
    return model, partition(model, plan)


def _step(model: Stack, x: torch.Tensor) -> tuple[float, float]:
    model.zero_grad(set_to_none=True)
    start = time.process_time()
    loss = model(x).float().sum().mul(1e-3)
    middle = time.process_time()
    loss.backward()
    return middle - start, time.process_time() - middle


def record(path: str) -> None:
    """Measures, and writes what is known so far after each case."""
    records = []
    for found in host():
        records.append(found)
        print(json.dumps(found), flush=True)
        with open(path, "w") as file:
            json.dump({"device": "cpu", "torch": torch.__version__, "ranks": 1, "records": records}, file, indent=1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default="partition_host.json")
    path = parser.parse_args().out
    torch.set_num_threads(1)
    dist.init_process_group("fake", store=dist.HashStore(), rank=0, world_size=1)
    record(path)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
