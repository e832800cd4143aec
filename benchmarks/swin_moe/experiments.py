"""The paper's tables and figures. Every function is called on all ranks and records its cases."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import Any

import torch

from benchmarks.swin_moe.bench import Bench, Effort
from benchmarks.swin_moe.capacity import limited_stream, matmul_seconds
from benchmarks.swin_moe.contestants import OURS, RECOMPUTED, Setting, with_switches
from benchmarks.swin_moe.convergence import VARIANTS as VARIANTS_TRAINED
from benchmarks.swin_moe.convergence import convergence
from benchmarks.swin_moe.model import swin_config
from hexa_fx.distributed.groups import make_groups
from hexa_fx.distributed.profile import profile_devices
from hexa_fx.plan import ExpertShape

EVERYONE = (*OURS, "padded", "padded-cf1", "grouped", "loop", "tutel", "megablocks-moe", "megablocks-dmoe")
FAST = tuple(name for name in (*EVERYONE, "none") if name != "loop")
PAPER_BATCH = {
    "base": {1: 110, 2: 100, 3: 90, 4: 80},
    "small": {1: 140, 2: 130, 3: 120, 4: 110},
    "tiny": {2: 4},
}
BUDGET_GIB = 24.0
"""Of the paper's cards, for the largest batch."""


def memory(bench: Bench, scales: Iterable[str], names: Iterable[str] = FAST) -> None:
    """Table: memory a device; 8 experts, batch 40, top-1 to top-8."""
    batch, counts = (4, (2,)) if bench.tiny else (40, (2, 4, 1, 8, 3, 6, 5, 7))
    for scale in scales:
        for top_k in counts:
            for name in names:
                setting = Setting(name, swin_config(scale, experts=4 if bench.tiny else 8, top_k=top_k), batch)
                _measured(
                    bench, "memory", setting, {"scale": scale}, effort=Effort(1, 1) if bench.tiny else Effort(2, 2)
                )


def memory_of(bench: Bench, scale: str) -> None:
    """The memory table of one scale; rows that trade time for memory last."""
    for names in (FAST, RECOMPUTED):
        memory(bench, (scale,), names)


def latency_of(bench: Bench, scale: str) -> None:
    """The latency table of one scale; what recomputation costs last."""
    latency(bench, (scale,))
    latency(bench, (scale,), RECOMPUTED, (4, 2))


def latency(
    bench: Bench, scales: Iterable[str], names: Iterable[str] = EVERYONE, counts: Iterable[int] = (4, 3, 2, 1)
) -> None:
    """Table: seconds a step; 4 experts, the paper's batch for every k. Peaks at two batches give the largest in `BUDGET_GIB`."""
    for scale in scales:
        for top_k in sorted(set(PAPER_BATCH[scale]) & set(counts), reverse=True):
            batch = PAPER_BATCH[scale][top_k]
            for name in names:
                setting = Setting(name, swin_config(scale, experts=4, top_k=top_k), batch)
                _measured(bench, "latency", setting, {"scale": scale}, half=bench.cuda)


def saturated(bench: Bench, scale: str, names: Iterable[str] = EVERYONE) -> None:
    """Not in the paper: the latency table at a batch that fills these GPUs, top-4."""
    batch = 4 if bench.tiny else 256
    for name in names:
        model = swin_config(scale, experts=4, top_k=2 if bench.tiny else 4)
        _measured(bench, "saturated", Setting(name, model, batch), {"scale": scale}, effort=Effort(2, 3))


def crossover_tokens(shape: ExpertShape) -> float:
    """Global tokens at which both modes move the same bytes (routing left out), where all that travels has one dtype: 3/4 n E H."""
    return 3 / 4 * shape.weight_numel / shape.hidden_size


def crossover(bench: Bench, scale: str, batches: tuple[int, ...] = ()) -> None:
    """Figure: data- against model-centric over the batch of a device, and where the bytes predict the two to meet."""
    batches = batches or ((2, 4) if bench.tiny else (4, 8, 16, 32, 64, 128, 256))
    model = swin_config(scale, experts=4, top_k=1)
    dim = model.dim * 2 ** (len(model.depths) - model.moe_stages)
    tokens = crossover_tokens(ExpertShape(4, dim, model.mlp_ratio * dim, 2, 1))
    per_image = (model.image // model.patch // 2 ** (len(model.depths) - model.moe_stages)) ** 2
    predicted = tokens / per_image / bench.world
    for name in OURS:

        def sweep(name: str = name) -> dict[str, Any]:
            with bench.contestant(Setting(name, model, batches[0])) as entrant:
                runs = [
                    bench.measure(entrant, batch, Effort(1, 1) if bench.tiny else Effort(2, 4)) for batch in batches
                ]
            return {"runs": runs, "predicted_batch": round(predicted, 1)}

        bench.case("crossover", {"name": name, "scale": scale, "top_k": 1, "experts": 4}, sweep)


MULTIPROCESSORS = ((72, 132), (132, 132), (132, 40))
"""Of the two devices. Speeds relate about as 0.40 : 0.60, 0.50 : 0.50, 0.74 : 0.26, as in the paper's table of capacities."""


def heterogeneity(bench: Bench, scale: str, names: Iterable[str] = OURS, cases: Iterable[int] = (0, 1, 2)) -> None:
    """Figure: seconds a step over the share of the first device, for unequal devices; 4 experts, top-2."""
    if bench.world != 2:
        raise ValueError(f"two devices are compared, got {bench.world}")
    for index in cases:
        limits = MULTIPROCESSORS[index]
        stream, got = limited_stream(bench.device, limits[bench.rank]) if bench.cuda else (None, 0)
        with torch.cuda.stream(stream):
            sms = [round(bench.reduce(got if bench.rank == r else 0, "max")) for r in range(2)]
            about = {"case": index, "scale": scale, "multiprocessors": sms, "emulated": bench.cuda}
            known = bench.case("heterogeneity", {"name": "capacity", **about}, lambda: _capacities(bench, scale))
            for name in names:
                _divisions(bench, name, scale, about, known)


def _capacities(bench: Bench, scale: str) -> dict[str, Any]:
    """t_i by the layer's own operator, which hexa_fx measures, and by the paper's proxy task."""
    model = swin_config(scale, experts=4, top_k=2)
    dim = model.dim * 2 ** (len(model.depths) - model.moe_stages)
    shape = ExpertShape(4, dim, model.mlp_ratio * dim, 2, 2)
    options = {"tokens": 256} if bench.tiny else {"tokens": 65536}
    times = profile_devices(
        shape, gated=False, dtype=torch.bfloat16 if bench.cuda else torch.float32, device=bench.device,
        groups=make_groups(bench.mesh), **options,
    )  # fmt: skip
    mine = matmul_seconds(bench.device)
    proxy = [bench.reduce(mine if bench.rank == r else 0.0, "max") for r in range(2)]
    return {"seconds": times, "proxy_seconds": proxy, "share": _share(times), "proxy_share": _share(proxy)}


def _share(times: Iterable[float]) -> float:
    """Eq. 1 and 2: the first device's part."""
    first, second = times
    return round((1 / first) / (1 / first + 1 / second), 4)


def _divisions(bench: Bench, name: str, scale: str, about: dict[str, Any], known: dict[str, Any]) -> None:
    batch = 8 if bench.tiny else 512
    shares = (0.3, 0.7) if bench.tiny else tuple(round(0.1 * i, 1) for i in range(1, 10))
    predicted = known.get("share", 0.5)
    near = [s for s in shares if abs(s - predicted) < 0.25 or s == 0.5] or list(shares)
    effort = Effort(1, 1) if bench.tiny else Effort(2, 2)
    model = swin_config(scale, experts=4, top_k=2)

    def run() -> dict[str, Any]:
        runs = []
        for share in sorted(near):
            seconds = (1 / share, 1 / (1 - share))
            with bench.contestant(Setting(name, model, batch // 2, seconds)) as entrant:
                plan = entrant.session.plan
                own = plan.batch[bench.rank] if name == "data" else batch // 2
                measured = bench.measure(entrant, own, effort)
                runs.append({"share": share, "batch": plan.batch, "shards": plan.layers[0].shards} | measured)
        return {"runs": runs, "predicted_share": predicted, "proxy_share": known.get("proxy_share")}

    bench.case("heterogeneity", {"name": name, **about}, run)


VARIANTS: dict[str, tuple[str, tuple[str, ...]]] = {
    "data": ("data", ()),
    "data, no overlap": ("data", ("overlap",)),
    "data, no shared cache": ("data", ("shared_cache",)),
    "data, no fused kernel": ("data", ("fused_kernel",)),
    "data, no top-k memory optimisation": ("data", ("topk_memory",)),
    "data, no expert-specific operators": ("data", ("expert_operators",)),
    "model": ("model", ()),
    "model, no overlap": ("model", ("overlap",)),
    "model, no fused kernel": ("model", ("fused_kernel",)),
    "model, no top-k memory optimisation": ("model", ("topk_memory",)),
    "model, no expert-specific operators": ("model", ("expert_operators",)),
}


def ablation(bench: Bench, metric: str, scale: str, names: Iterable[str] = tuple(VARIANTS)) -> None:
    """Figures: memory (8 experts, batch 40) and latency (4 experts, batch 80), top-4, one technique off at a time."""
    experts, batch = (8, 40) if metric == "memory" else (4, 80)
    model = swin_config(scale, experts=4 if bench.tiny else experts, top_k=2 if bench.tiny else 4)
    for variant in names:
        name, off = VARIANTS[variant]
        setting = with_switches(Setting(name, model, 4 if bench.tiny else batch), off)
        _measured(bench, f"ablation_{metric}", setting, {"variant": variant, "scale": scale})
    base = Setting("padded", model, 4 if bench.tiny else batch)
    _measured(bench, f"ablation_{metric}", base, {"variant": "padded capacity", "scale": scale})


def _measured(
    bench: Bench,
    experiment: str,
    setting: Setting,
    about: dict[str, Any],
    effort: Effort | None = None,
    half: bool = False,
) -> None:
    """One case of a table: a contestant at one batch, and at half of it for the slope of its memory."""
    model = setting.model
    about = {"name": setting.name, **about, "experts": model.experts, "top_k": model.top_k, "batch": setting.batch}

    def run() -> dict[str, Any]:
        with bench.contestant(setting) as entrant:
            record = bench.measure(entrant, setting.batch, effort)
            if half:
                torch.cuda.empty_cache()
                small = bench.measure(entrant, setting.batch // 2, Effort(1, 1))
                record |= {"half_peak_gib": small["peak_gib"], "largest_batch": _largest(record, small)}
        return record

    bench.case(experiment, about, run)


def _largest(record: dict[str, Any], small: dict[str, Any]) -> int:
    """Images a device whose peak is `BUDGET_GIB`, on the line through two measured peaks."""
    slope = (record["peak_gib"] - small["peak_gib"]) / (record["batch"] - small["batch"])
    return int(record["batch"] + (BUDGET_GIB - record["peak_gib"]) / max(slope, 1e-9))


Experiment = Callable[[Bench], None]


def experiments(tiny: bool, variant: int | None = None) -> dict[str, tuple[int, Experiment]]:
    """By name: how many ranks, and what runs on them. ``variant``: of `convergence`, by number."""
    scales = ("tiny",) if tiny else ("base", "small")
    base, small = ("tiny", "tiny") if tiny else ("base", "small")
    few = (*OURS, "padded", "grouped") if tiny else EVERYONE
    trained = tuple(VARIANTS_TRAINED)[slice(None) if variant is None else slice(variant, variant + 1)]
    return {
        "memory": (2, lambda b: memory(b, scales, few)),
        "memory_base": (2, lambda b: memory_of(b, base)),
        "memory_small": (2, lambda b: memory_of(b, small)),
        "latency": (4, lambda b: latency(b, scales, few)),
        "latency_base": (4, lambda b: latency_of(b, base)),
        "latency_small": (4, lambda b: latency_of(b, small)),
        "saturated": (4, lambda b: saturated(b, base, few)),
        "crossover": (4, lambda b: crossover(b, base)),
        "heterogeneity": (2, lambda b: heterogeneity(b, small, cases=(0,) if tiny else (0, 1, 2))),
        "heterogeneity_data": (2, lambda b: heterogeneity(b, small, ("data",))),
        "heterogeneity_model": (2, lambda b: heterogeneity(b, small, ("model",))),
        "ablation_memory": (2, lambda b: ablation(b, "memory", base)),
        "ablation_latency": (4, lambda b: ablation(b, "latency", base)),
        "convergence": (min(4, len(trained)), lambda b: convergence(b, trained)),
        "smoke": (2, smoke),
    }


def smoke(bench: Bench) -> None:
    """A case or two of everything, tiny: what CI runs so that no script rots."""
    os.environ.setdefault("HEXA_FX_VERIFY", "0")  # of the same two blocks again and again; other tests do
    latency(bench, ("tiny",), ("padded",))
    memory(bench, ("tiny",), ("data", "model", "grouped", "tutel"))
    crossover(bench, "tiny", (2,))
    heterogeneity(bench, "tiny", ("model",), (1,))
    ablation(bench, "memory", "tiny", ("data, no shared cache", "model, no expert-specific operators"))
    ablation(bench, "latency", "tiny", ("data, no overlap", "model, no top-k memory optimisation"))
    convergence(bench, ("eager", "padded, capacity 1.0"))


SMOKE = ("latency", "memory", "crossover", "heterogeneity", "ablation_memory", "ablation_latency", "convergence")
RECORDED = {
    **{name: (name,) for name in (*SMOKE, "saturated")},
    **{f"{name}_{part}": (name,) for name in ("memory", "latency") for part in ("base", "small")},
    **{f"heterogeneity_{part}": ("heterogeneity",) for part in OURS},
    "smoke": SMOKE,
}
"""Which files an experiment writes."""

ALL = (
    "latency",
    "memory",
    "ablation_latency",
    "ablation_memory",
    "heterogeneity",
    "crossover",
    "saturated",
    "convergence",
)
