"""What every experiment uses: ranks, clocks, memory, records that reach the disk as they are made."""

from __future__ import annotations

import gc
import itertools
import json
import platform
import re
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from benchmarks.swin_moe.contestants import Contestant, Setting
from benchmarks.swin_moe.journal import GIVE_UP, Journal, write_document
from benchmarks.swin_moe.libraries import NotInstalled
from hexa_fx.distributed.groups import local_part

GIB = 2.0**30


@dataclass(frozen=True)
class Effort:
    """How long to measure: steps that are not counted, and steps that are."""

    warm: int = 3
    steps: int = 5


@dataclass
class Bench:
    """One rank of a run.

    Args:
        out: folder of the JSON files.
        tiny: sizes for tests.
        deadline: by `time.time`; cases that would start later are recorded as skipped.
        journal: cases that earlier ranks of the same run have had, and the one under way; then an error ends these ranks, as a CUDA
            error leaves no rank usable, and the launcher starts others for the cases that are left. None: errors are recorded.
        only_top_k: other cases are passed over, unrecorded; empty for all.
    """

    rank: int
    world: int
    device: torch.device
    out: Path
    tiny: bool = False
    effort: Effort = field(default_factory=Effort)
    deadline: float = float("inf")
    tag: str = ""
    journal: Journal | None = None
    only_top_k: frozenset[int] = frozenset()
    group: Any = None
    mesh: DeviceMesh | None = None
    host: Any = None
    stream: Any = None
    records: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    base: int = 0

    def __post_init__(self) -> None:
        if self.world > 1:
            self.mesh = init_device_mesh(self.device.type, (self.world,))
            self.group = self.mesh.get_group()
            self.host = dist.new_group(backend="gloo")
        if self.journal is not None:
            self.records = self.journal.records()

    @property
    def cuda(self) -> bool:
        return self.device.type == "cuda"

    # --- cases -----------------------------------------------------------------------------------------------------

    def case(self, experiment: str, about: Mapping[str, Any], run: Callable[[], Mapping[str, Any]]) -> dict[str, Any]:
        """Runs one case and records what it gives; an error or a passed deadline is recorded instead.

        Returns:
            The record, on every rank; of one that is passed over, ``about``.
        """
        if self.only_top_k and about.get("top_k") not in self.only_top_k:
            return dict(about)
        before = [r for r in self.records.get(experiment, []) if about.items() <= r.items()]
        if before:
            return before[0]
        record = dict(about)
        started = time.time()
        broken = self.journal is not None and self.journal.failures(about) >= GIVE_UP
        if self.agree(started > self.deadline):
            record["skipped"] = "out of time"
        elif broken:
            record["skipped"] = f"failed {GIVE_UP} times in other cases"
        else:
            self._begin(experiment, about)
            self.base = torch.cuda.memory_allocated() if self.cuda else 0
            try:
                record |= run()
            except NotInstalled as error:
                record["skipped"] = str(error)
            except Exception as error:  # out of memory, say: the other cases still count
                if self.journal is not None:
                    raise
                record["error"] = f"{type(error).__name__}: {str(error)[:300]}"
                if self.rank == 0:
                    traceback.print_exc()
        gc.collect()
        if self.cuda:
            torch.cuda.empty_cache()
            record["left_gib"] = round((torch.cuda.memory_allocated() - self.base) / GIB, 4)
        record["case_s"] = round(time.time() - started, 2)
        self._save(experiment, record)
        return record

    def _begin(self, experiment: str, about: Mapping[str, Any]) -> None:
        if self.journal is not None and self.rank == 0:
            self.journal.begin(experiment, about)

    def agree(self, mine: bool) -> bool:
        """What rank 0 says, on every rank."""
        if self.world == 1:
            return mine
        said = torch.tensor([mine])
        dist.broadcast(said, 0, group=self.host)
        return bool(said)

    def reduce(self, value: float, how: str) -> float:
        """``max`` or ``mean`` of the ranks' values."""
        if self.world == 1:
            return value
        total = torch.tensor([value], dtype=torch.float64)
        dist.all_reduce(total, dist.ReduceOp.MAX if how == "max" else dist.ReduceOp.SUM, group=self.host)
        return float(total) / (1 if how == "max" else self.world)

    def _save(self, experiment: str, record: dict[str, Any]) -> None:
        self.records.setdefault(experiment, []).append(record)
        if self.rank:
            return
        print(f"[{experiment}] {json.dumps(record)}", flush=True)
        self.out.mkdir(parents=True, exist_ok=True)
        document = {"environment": environment(self.device, self.world), "records": self.records[experiment]}
        write_document(self.out / f"swin_{experiment}{self.tag}.json", document)
        if self.journal is not None:
            self.journal.end()

    # --- measuring -------------------------------------------------------------------------------------------------

    @contextmanager
    def contestant(self, setting: Setting) -> Iterator[Contestant]:
        """A contestant, and its memory back afterwards."""
        made = Contestant(setting, self.device, self.group, self.mesh)
        try:
            yield made
        finally:
            self.synchronize()
            made.close()

    def measure(self, entrant: Contestant, batch: int, effort: Effort | None = None) -> dict[str, Any]:
        """Seconds a step (median over steps, slowest rank) and memory of a steady training loop.

        ``peak_gib`` is the most that tensors held in a step, ``reserved_gib`` what the allocator took for it, both averaged
        over devices; parameters, gradients and optimizer state included, CUDA context and NCCL not. On a CPU, ``saved_mib`` are
        the bytes that one forward keeps for backward. ``loss`` is that of the last warm-up step: equal data and seeds, so those
        who drop nothing agree.
        """
        effort = effort or self.effort
        images, labels = entrant.images(batch), entrant.labels(batch)
        entrant.prepare(images, labels)
        share = batch * self.world / max(1, round(self.reduce(batch, "mean") * self.world))
        loss = torch.zeros(())
        for _ in range(effort.warm):
            loss = entrant.step(images, labels, share)
        self.synchronize()
        if self.world > 1:
            dist.barrier(group=self.host)
        if self.cuda:
            torch.cuda.reset_peak_memory_stats()
        seconds = self._timed(lambda: entrant.step(images, labels, share), effort.steps)
        record: dict[str, Any] = {"step_s": round(self.reduce(seconds, "max"), 5), "batch": batch}
        record["loss"] = round(self.reduce(float(loss), "mean"), 5)
        if self.cuda:
            peaks = {
                "peak_gib": torch.cuda.max_memory_allocated() - self.base,
                "reserved_gib": torch.cuda.max_memory_reserved(),
                "before_gib": self.base,
            }
            record |= {name: round(self.reduce(value / GIB, "mean"), 4) for name, value in peaks.items()}
        else:
            record["saved_mib"] = round(self.reduce(saved_bytes(entrant, images) / 2**20, "mean"), 4)
        return record

    def _timed(self, run: Callable[[], Any], steps: int) -> float:
        marks = [self._mark()]
        for _ in range(steps):
            run()
            marks.append(self._mark())
        self.synchronize()
        apart = [b - a if isinstance(a, float) else a.elapsed_time(b) / 1e3 for a, b in itertools.pairwise(marks)]
        return statistics.median(apart)

    def _mark(self) -> Any:
        if not self.cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def synchronize(self) -> None:
        if self.cuda:
            torch.cuda.synchronize()


def saved_bytes(entrant: Contestant, images: Tensor) -> int:
    """Bytes of distinct storages that a forward keeps for backward, parameters left out."""
    known = {local_part(p).untyped_storage().data_ptr() for p in entrant.model.parameters()}
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t), entrant.autocast():
        scores, balance = entrant.run(images)
        (scores.float().sum() + balance).backward()
    entrant.optimizer.zero_grad(set_to_none=True)
    return sum(kept.values())


def environment(device: torch.device, world: int) -> dict[str, Any]:
    """What a result depends on: command, versions, device."""
    name = torch.cuda.get_device_name() if device.type == "cuda" else platform.processor() or platform.machine()
    return {
        "command": re.sub(r" --out \S+", "", " ".join(["python -m benchmarks.swin_moe", *sys.argv[1:]])),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": str(torch.version.cuda),
        "device": name,
        "ranks": world,
    }
