"""The figures, PNG and SVG, from the recorded results.   python -m benchmarks.swin_moe plot"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.swin_moe.contestants import TITLES
from benchmarks.swin_moe.results import load

FIGURES = Path(__file__).parents[2] / "docs" / "figures"
COLOURS = {
    "data": "tab:blue",
    "model": "tab:green",
    "data-recompute": "tab:cyan",
    "model-recompute": "tab:olive",
    "none": "lightgray",
    "padded": "tab:red",
    "padded-cf1": "tab:orange",
    "grouped": "tab:purple",
    "loop": "tab:gray",
}


def _axes(count: int, title: str, unit: str) -> tuple[Any, list[Any]]:
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "hexa_fx"  # equal results give equal files
    inks = (
        "text.color",
        "axes.edgecolor",
        "axes.labelcolor",
        "xtick.color",
        "ytick.color",
    )  # seen on white and on black paper
    matplotlib.rcParams.update(dict.fromkeys(inks, "#7d8794") | {"savefig.transparent": True, "legend.framealpha": 0})
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, count, figsize=(5.2 * count, 3.6), squeeze=False, layout="constrained")
    figure.suptitle(title)
    axes[0][0].set_ylabel(unit)
    return figure, list(axes[0])


def _by_k(folder: Path, experiment: str, value: Callable[[dict[str, Any]], float], title: str, unit: str) -> Any:
    records = [r for r in load(folder, experiment) if "step_s" in r]
    scales = list(dict.fromkeys(r["scale"] for r in records))
    figure, axes = _axes(max(1, len(scales)), title, unit)
    for axis, scale in zip(axes, scales):
        for name in dict.fromkeys(r["name"] for r in records):
            points = sorted((r["top_k"], value(r)) for r in records if r["name"] == name and r["scale"] == scale)
            axis.plot(*zip(*points), "o-", color=COLOURS.get(name), label=TITLES[name])
        axis.set(xlabel="top-k", title=scale, ylim=(0, None))
    axes[0].legend(fontsize=7)
    return figure


def memory(folder: Path) -> Any:
    return _by_k(folder, "memory", lambda r: r.get("peak_gib", r.get("saved_mib")), "Memory a device", "GiB")


def latency(folder: Path) -> Any:
    return _by_k(folder, "latency", lambda r: 1e3 * r["step_s"], "Training step, the paper's batches", "ms")


def crossover(folder: Path) -> Any:
    figure, (axis,) = _axes(1, "Data- against model-centric", "ms a step")
    for r in load(folder, "crossover"):
        if "runs" in r:
            points = [(run["batch"], 1e3 * run["step_s"]) for run in r["runs"]]
            axis.plot(*zip(*points), "o-", color=COLOURS[r["name"]], label=TITLES[r["name"]])
            axis.axvline(r["predicted_batch"], color="gray", ls=":")
    axis.set(xlabel="batch a device (dotted: equal bytes)", xscale="log", yscale="log")
    axis.legend(fontsize=8)
    return figure


def heterogeneity(folder: Path) -> Any:
    records = [r for r in load(folder, "heterogeneity") if "runs" in r]
    cases = sorted({r["case"] for r in records})
    figure, axes = _axes(max(1, len(cases)), "Unequal devices: step time over the first device's share", "ms a step")
    for axis, case in zip(axes, cases):
        for r in (r for r in records if r["case"] == case):
            points = [(run["share"], 1e3 * run["step_s"]) for run in r["runs"]]
            axis.plot(*zip(*points), "o-", color=COLOURS[r["name"]], label=TITLES[r["name"]])
            axis.axvline(r["predicted_share"], color=COLOURS[r["name"]], ls="--", lw=1)
        sms = " : ".join(str(n) for n in next(r for r in records if r["case"] == case)["multiprocessors"])
        axis.set(xlabel="share of the first device (dashed: Eq. 1 and 2)", title=f"multiprocessors {sms}")
    axes[0].legend(fontsize=8)
    return figure


def ablation(folder: Path) -> Any:
    figure, axes = _axes(2, "One technique off at a time (top-4, Base)", "")
    for axis, (metric, key, unit) in zip(axes, (("memory", "peak_gib", 1.0), ("latency", "step_s", 1e3))):
        found = load(folder, f"ablation_{metric}") or load(folder, "ablation_memory")  # steps are timed there too
        records = [r for r in found if key in r]
        names = [r["variant"] for r in records]
        axis.barh(names, [unit * r[key] for r in records], color=[COLOURS.get(r["name"], "gray") for r in records])
        axis.invert_yaxis()
        axis.tick_params(axis="y", labelsize=7)
        axis.set_xlabel("GiB" if metric == "memory" else "ms a step")
    return figure


def convergence(folder: Path) -> Any:
    records = [r for r in load(folder, "convergence") if "losses" in r]
    figure, axes = _axes(2, "Training on digits", "loss")
    for r in records:
        style = "-" if "float32" not in r["name"] else ":"
        axes[0].plot(_smooth(r["losses"]), style, lw=1, label=r["name"])
    axes[0].set(xlabel="step (mean of 10)", yscale="log")
    axes[0].legend(fontsize=7)
    whole = {r["name"]: r["losses"] for r in records}
    for name in whole:
        if name == "eager" or "eager" not in whole:
            continue
        beside = whole["eager, float32"] if name == "hexa_fx, float32" else whole["eager"]
        apart = [abs(a - b) for a, b in zip(whole[name], beside)]
        axes[1].plot([max(value, 1e-7) for value in apart], lw=1, label=name)
    axes[1].set(xlabel="step", yscale="log", ylabel="distance to the eager loss of the same type")
    axes[1].legend(fontsize=7)
    return figure


def _smooth(values: list[float], width: int = 10) -> list[float]:
    return [sum(values[max(0, i - width + 1) : i + 1]) / min(i + 1, width) for i in range(len(values))]


DRAW = {f.__name__: f for f in (memory, latency, crossover, heterogeneity, ablation, convergence)}


def main(folder: Path, figures: Path = FIGURES) -> None:
    figures.mkdir(parents=True, exist_ok=True)
    for name, draw in DRAW.items():
        if not any(load(folder, experiment) for experiment in (name, f"{name}_memory", f"{name}_latency")):
            continue
        figure = draw(folder)
        for kind in ("png", "svg"):
            figure.savefig(figures / f"swin_{name}.{kind}", dpi=110, metadata={"Date": None} if kind == "svg" else None)
        print(f"wrote {figures}/swin_{name}.png and .svg")
