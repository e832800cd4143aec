"""Training steps of whole models on several GPUs of one host: FSDP2, hexa_fx's partition, expert parallelism, beside each other.

    torchrun --nproc_per_node 4 benchmarks/bench_mesh.py [--models qwen3-30b,...] [--tokens 8192,65536] [--zipf 1] [--json FILE]

Models of `benchmarks/real_blocks.py`: published widths, ``--layers`` layers, bf16, random weights, a vocabulary of 1024. Tokens are
those of all GPUs together, in sequences of at most 2048, as many on each. A step is forward, loss, backward and what combines
gradients, without an optimizer. A row is made from nothing: the model, its sharding, five steps untimed, ``--rounds`` timed ones;
the slowest rank's median in milliseconds, and the largest allocation of any rank from the first timed step on, in GiB.

    fsdp2_grouped_mm   `fully_shard` of every layer, experts by transformers' grouped_mm
    fsdp2_hexa         the same on the rewritten model
    data, model, fsdp, auto  the partition over all GPUs, everything else under FSDP2; fsdp is FSDP2 as a plan has it
    data_graphed, model_graphed  the same steps by ``model.partition.graphed``; how many were replays is said, and no peak: what a
                       graph holds is not counted among allocations
    mesh_data, mesh_model   the partition over pairs (of two GPUs, the only one), FSDP2 over these and, but for experts, over all
    ep_grouped_mm, ep_hexa  transformers' expert parallelism by all-to-all, everything else under FSDP2

Set-ups, one a launch: ``--zipf`` has routers choose by Zipf's law with this exponent, the popular experts anywhere; ``--trained``
is the model after so many steps on text. Of both, ``fullest`` is what the fullest rank has to compute under expert parallelism,
over the mean. ``--dtype float32`` is float32 weights under bf16 autocast. ``--lora`` is adapters of this rank on experts and
queries, all else frozen. ``--trainer`` is so many steps of transformers' Trainer with DDP, and their losses, of the rows
fsdp2_hexa and fsdp2_grouped_mm.

A row that fails has the reason, and so has one that would begin later than ``--seconds`` after the start. What a rank does alone
ends the job after a minute. Rows before it are kept; another start with the same FILE goes on behind it, and takes rows that were
too late.
`--shrink 32 --tokens 64` tries the script over Gloo without a GPU.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import pathlib
import statistics
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh  # noqa: E402
from torch.distributed.fsdp import fully_shard  # noqa: E402

import hexa_fx  # noqa: E402
from benchmarks.kept_rows import Row, keep, options_of, synchronize, wait_for_kernels  # noqa: E402
from benchmarks.mesh_set_ups import adapt, by_trainer, fullest, skew, text, train_on_text  # noqa: E402
from benchmarks.real_blocks import make, tokens_of  # noqa: E402
from hexa_fx.distributed.gradients import expert_parameters, sync_gradients  # noqa: E402
from hexa_fx.errors import kind_and_line  # noqa: E402

ROWS = "fsdp2_hexa auto fsdp2_grouped_mm data_graphed model_graphed ep_grouped_mm data model ep_hexa mesh_data mesh_model fsdp"
SET_UP = ("zipf", "trained", "lora", "trainer", "dtype")
LATE = "not begun"
SEQUENCE = 2048
GIB = 2.0**30


def shard(model: nn.Module, mesh: DeviceMesh, ignored: set[nn.Parameter] | None = None) -> None:
    """FSDP2 of every layer and of the rest."""
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, ignored_params=ignored)
    fully_shard(model, mesh=mesh, ignored_params=ignored)


def implement(model: nn.Module, ids: Tensor, implementation: str) -> None:
    if implementation == "hexa":
        hexa_fx.optimize_(model, {"input_ids": ids[:1, :64]})
    else:
        model.set_experts_implementation(implementation)


def fsdp2(model: nn.Module, ids: Tensor, implementation: str, device: str) -> Callable[[], None]:
    implement(model, ids, implementation)
    shard(model, init_device_mesh(device, (dist.get_world_size(),)))
    return lambda: None


def partitioned(model: nn.Module, ids: Tensor, strategy: str, device: str) -> Callable[[], None]:
    """Over all ranks; the example is the global batch, by whose size ``auto`` chooses."""
    world = dist.get_world_size()
    mesh = init_device_mesh(device, (world,))
    config = hexa_fx.PartitionConfig(batch=len(ids) * world, tokens=ids.numel() * world, data_parallel="mean")
    chosen = {"mesh": mesh, "strategy": strategy, "capacities": None, "partition": config}
    hexa_fx.optimize_(model, {"input_ids": ids[:1]}, **chosen)
    shard(model, mesh, expert_parameters(model.partition))
    return lambda: None


def on_an_axis(model: nn.Module, ids: Tensor, strategy: str, device: str) -> Callable[[], None]:
    world = dist.get_world_size()
    mesh = init_device_mesh(device, (world // 2, 2), mesh_dim_names=("data", "hexa"))
    dense = mesh["data", "hexa"]._flatten("dense")
    config = hexa_fx.PartitionConfig(batch=len(ids) * 2, tokens=ids.numel() * 2, data_parallel="mean")
    axes = {"mesh": mesh["hexa"], "data_mesh": mesh["data"]}
    chosen = {"strategy": strategy, "capacities": None, "partition": config}
    hexa_fx.optimize_(model, {"input_ids": ids[:1]}, **axes, **chosen)
    for path in model.partition.graphs:
        fully_shard(model.get_submodule(path), mesh=mesh["data"])
    shard(model, dense)
    return lambda: sync_gradients(model, model.partition)


def expert_parallel(model: nn.Module, ids: Tensor, implementation: str, device: str) -> Callable[[], None]:
    from transformers.distributed.expert_parallel import apply_expert_parallelism

    hexa_fx.patch_transformers()
    model.set_experts_implementation(implementation)
    mesh = init_device_mesh(device, (dist.get_world_size(), 1), mesh_dim_names=("ep", "tp"))
    plan: dict[str, str] = {}
    for name, module in model.named_modules():
        if hasattr(module, "gate_up_proj") and hasattr(module, "down_proj") and hasattr(module, "num_experts"):
            if not isinstance(module.gate_up_proj, nn.Parameter):
                continue
            plan |= {f"{name}.{weight}": "grouped_gemm" for weight in ("gate_up_proj", "down_proj")}
            plan[name] = "ep_dispatch_experts"
    apply_expert_parallelism(model, mesh["ep"], mesh["tp"], plan, "all_to_all")
    cut = {name for name, style in plan.items() if style == "grouped_gemm"}
    shard(model, mesh["ep"], {p for name, p in model.named_parameters() if name in cut})
    return lambda: None


KINDS: dict[str, tuple[Callable[..., Callable[[], None]], str]] = {
    "fsdp2_grouped_mm": (fsdp2, "grouped_mm"),
    "fsdp2_hexa": (fsdp2, "hexa"),
    "data": (partitioned, "data"),
    "model": (partitioned, "model"),
    "fsdp": (partitioned, "fsdp"),
    "auto": (partitioned, "auto"),
    "data_graphed": (partitioned, "data"),
    "model_graphed": (partitioned, "model"),
    "mesh_data": (on_an_axis, "data"),
    "mesh_model": (on_an_axis, "model"),
    "ep_grouped_mm": (expert_parallel, "grouped_mm"),
    "ep_hexa": (expert_parallel, "hexa"),
}


def measured(name: str, tokens: int, row: str, o: argparse.Namespace) -> Row:
    """One row. Weights are bf16, as they would be gathered."""
    began = time.perf_counter()
    per_rank = tokens // dist.get_world_size()
    ids = tokens_of(o.device, per_rank).view(-1, min(SEQUENCE, per_rank))
    model = make(name, o.device, o.shrink, o.layers).to(o.dtype).train()
    said: Row = {}
    if o.zipf:
        skew(model, o.zipf)
    if o.trained:
        train_on_text(model, name, o.trained)
        ids = text(per_rank, 1, seed=1 + dist.get_rank())[0].to(o.device).view_as(ids)
    if o.zipf or o.trained:
        said["fullest"] = fullest(model, ids)
    if o.lora:
        adapt(model, o.lora)
    prepare, how = KINDS[row]
    if o.trainer:
        implement(model, ids, how)
        return by_trainer(model, tokens, o.trainer, o.device)

    combine = prepare(model, ids, how, o.device)

    def step(ids: Tensor) -> None:
        with torch.autocast(o.device, torch.bfloat16, enabled=o.dtype == torch.float32):
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        combine()

    for _ in range(2):
        step(ids)
    wait_for_kernels()
    session = vars(model).get("partition")
    run = session.graphed(step) if row.endswith("_graphed") else step
    for _ in range(6 if row.endswith("_graphed") else 3):
        run(ids)
    milliseconds, peak = timed(lambda: run(ids), o.rounds)
    if row.endswith("_graphed"):
        said |= {"replays": run.replays, "reason_not_graphed": run.reason}
    else:
        said["peak_gib"] = peak
    if session is not None:
        said["modes"] = sorted({layer.mode for layer in session.plan.layers})
        session.close()
    return {"ms": milliseconds, **said, "row_seconds": round(time.perf_counter() - began, 1)}


def timed(step: Callable[[], None], rounds: int) -> tuple[float, float]:
    """Median of the slowest rank, and the largest peak."""
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    found = []
    for _ in range(rounds):
        dist.barrier()
        synchronize()
        begin = time.perf_counter()
        step()
        synchronize()
        found.append(time.perf_counter() - begin)
    peak = torch.cuda.max_memory_allocated() / GIB if torch.cuda.is_available() else 0.0
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, (statistics.median(found) * 1e3, peak))
    return round(max(ms for ms, _ in everywhere), 2), round(max(gib for _, gib in everywhere), 2)


def attempt(name: str, tokens: int, row: str, o: argparse.Namespace) -> Row:
    if is_late(o):
        return {"reason": f"{LATE} within {o.seconds} s"}
    try:
        return measured(name, tokens, row, o)
    except Exception as error:  # the same on every rank, or the job hangs until its limit
        return {"reason": kind_and_line(error)}
    finally:
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def note(found: list[Row], o: argparse.Namespace) -> None:
    """Keeps these rows, from the first rank."""
    if dist.get_rank() == 0:
        keep(found, o.json, o.device)


def is_late(o: argparse.Namespace) -> bool:
    """Whether the time is over, by the first rank's clock."""
    said = [time.perf_counter() - o.began > o.seconds]
    dist.broadcast_object_list(said, src=0)
    return said[0]


def main() -> None:
    """Prints a JSON line a row, from rank 0; `--json` keeps them."""
    parser = options_of(__doc__)
    parser.add_argument("--models", default="qwen3-30b,mixtral-8x7b,olmoe")
    parser.add_argument("--tokens", default="8192,65536")
    parser.add_argument("--rows", default=ROWS.replace(" ", ","))
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--shrink", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=3600.0)
    parser.add_argument("--zipf", type=float, default=0.0)
    for name in ("trained", "lora", "trainer"):
        parser.add_argument(f"--{name}", type=int, default=0)
    parser.add_argument("--dtype", default="bfloat16", type=lambda name: getattr(torch, name))
    o = parser.parse_args()
    o.began = time.perf_counter()
    o.device = "cuda" if torch.cuda.is_available() else "cpu"
    if o.device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if o.device == "cuda" else "gloo", timeout=timedelta(seconds=60))
    cases = [(name, int(tokens)) for name in o.models.split(",") for tokens in o.tokens.split(",")]
    found: list[Row] = json.loads(o.json.read_text())["rows"] if o.json and o.json.exists() else []
    found = [row for row in found if not row.get("reason", "").startswith(LATE)]
    given = {name: value for name in SET_UP[:-1] if (value := getattr(o, name))}
    given |= {"dtype": "float32, autocast"} if o.dtype == torch.float32 else {}
    alike = (row for row in found if {key: row[key] for key in SET_UP if key in row} == given)
    done = {(row["model"], row["tokens"], row["row"]) for row in alike}
    dist.barrier()  # everyone has read it
    for row in o.rows.split(","):  # of every case, before the next: what matters most comes first, should time be short
        for name, tokens in cases:
            if (name, tokens, row) in done:
                continue
            head = {
                "gpus": dist.get_world_size(),
                "model": name,
                "layers": o.layers,
                "tokens": tokens,
                "row": row,
            } | given
            note([*found, head | {"reason": "ended the job"}], o)
            found.append(head | attempt(name, tokens, row, o))
            note(found, o)
            if dist.get_rank() == 0:
                print(json.dumps(found[-1]), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
