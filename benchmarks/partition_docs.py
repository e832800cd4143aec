"""The tables of docs/partition_speed.md, from the recorded results.   python -m benchmarks.partition_docs   writes them."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks import pages
from benchmarks.pages import table
from benchmarks.partition_goals import Record, Runs, goals, graph_of, of, percent

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "partition_speed.md"
RESULTS = ROOT / "benchmarks" / "results"
MODES = ("local", "data", "model", "model-paper", "ep", "fsdp2")
SET_UPS = {
    "zipf": "Zipf {:g}",
    "trained": "trained for {} steps",
    "lora": "LoRA of rank {}",
    "trainer": "Trainer, {} steps",
    "dtype": "{}",
}
PAPER = {"data": "13.2 and 25.3 %", "model": "6.3 and 11.9 %"}


def load(folder: Path) -> Runs:
    paths = {n: folder / f"partition_h200x{n}.json" for n in (2, 4)}
    return {n: json.loads(path.read_text()) for n, path in paths.items() if path.exists()}


def setup(runs: Runs) -> str:
    lines = []
    for run in runs.values():
        nccl = f", NCCL {run['nccl']}" if "nccl" in run else ""
        lines.append(
            f"* {run['ranks']} x {run['device']}, torch {run['torch']}, CUDA {run['cuda']}{nccl}, Python {run['python']}"
        )
        lines += [f"  * failed in {r['section']}: {r['error']}" for r in of(run, "failed")]
        short = [
            f"{r['shape']}, {r['tokens']}, {r.get('mode', r['question'])}" for r in run["records"] if "skipped" in r
        ]
        lines += ["  * out of time: " + "; ".join(short)] if short else []
        said = [
            f"{r['shape']}, {r['tokens']}, {r.get('mode', r['question'])}: {r['error']}"
            for r in run["records"]
            if "error" in r and "shape" in r
        ]
        lines += [f"  * {text}" for text in said]
        found = {op: why for r in of(run, "fallbacks") for op, why in r["found"].items()}
        lines += [f"  * {op} ran another implementation: {why}" for op, why in found.items()]
    return "\n".join(lines)


def steps(runs: Runs) -> str:
    rows = []
    for ranks, run in runs.items():
        cases: dict[tuple[str, int], dict[str, Record]] = {}
        for record in of(run, "step time"):
            cases.setdefault((record["shape"], record["tokens"]), {})[record["mode"]] = record
        for (shape, tokens), by in sorted(cases.items()):
            times = [f"{by[m]['step_ms']:.1f}" if "step_ms" in by.get(m, {}) else "-" for m in MODES]
            auto, kept = by.get("auto", {}), ("data", "model", "ep", "fsdp2")
            picked = (
                f"{auto['picked'].split('_')[0]}, {100 * (auto['over_best'] - 1):.1f} %" if "over_best" in auto else "-"
            )
            memory = " / ".join(f"{by[m]['peak_mib'] / 1024:.1f}" if "peak_mib" in by.get(m, {}) else "-" for m in kept)
            rows.append([ranks, shape, tokens, *times, picked, memory])
    head = ["GPUs", "shape", "global tokens", "local", "data", "model", "model, all-reduce", "EP", "FSDP2", "auto"]
    return table([*head, "GiB: data / model / EP / FSDP2"], rows)


def others(runs: Runs) -> str:
    """Steps of expert parallelism and of FSDP2 over those of the mode that `auto` chose."""
    rows = []
    for shape in dict.fromkeys(r["shape"] for run in runs.values() for r in of(run, "step time")):
        cells = [shape]
        for mode in ("ep", "fsdp2"):
            ratios = [ratio for run in runs.values() for ratio in _over_auto(run, shape, mode)]
            cells.append(f"{min(ratios):.2f} to {max(ratios):.2f}" if ratios else "-")
        rows.append(cells)
    return table(["step over that of `auto`'s choice", "expert parallelism", "FSDP2"], rows)


def _over_auto(run: dict[str, Any], shape: str, mode: str) -> list[float]:
    by = {
        (r["tokens"], r["mode"]): r["step_ms"] for r in of(run, "step time") if r["shape"] == shape and "step_ms" in r
    }
    return [ms / by[tokens, "auto"] for (tokens, name), ms in by.items() if name == mode and (tokens, "auto") in by]


def correctness(runs: Runs) -> str:
    rows = []
    for ranks, run in runs.items():
        for r in of(run, "correctness"):
            kind = r["kind"] + (", all-reduce" if r["reduce"] == "all_reduce" else "")
            shares = f"{_list(r['batch'])}; {_list(r['h'])}"
            output, gradient = (f"{r[key]:.3f} ({r[f'{key}_one_device']:.3f})" for key in ("output", "gradient"))
            rows.append([ranks, kind, shares, output, gradient])
    return table(["GPUs", "mode", "B_i; h_i", "output (one device)", "gradients (one device)"], rows)


def overlap(runs: Runs) -> str:
    rows = []
    for ranks, run in runs.items():
        for r in of(run, "overlap"):
            if not any("AllGather" in rank for rank in r.get("ranks", ())):
                continue
            cells = [_worst(r, kind, "hidden") for kind in ("AllGather", "ReduceScatter")]
            gather = [1e3 * rank["AllGather"]["ms"] / rank["AllGather"]["kernels"] for rank in r["ranks"]]
            layer = [1e3 * rank["layer_forward_ms"] for rank in r["ranks"] if "layer_forward_ms" in rank]
            lasts = f"{min(layer):.0f}" if layer else "-"
            idle = [1 - rank["compute_ms"] / rank["span_ms"] for rank in r["ranks"] if "span_ms" in rank]
            rows.append([
                ranks, f"{r['shape']}, {r['tokens']}, {r['layers']}{graph_of(r)}", f"{min(gather):.0f}-{max(gather):.0f}", lasts,
                cells[0], _worst(r, "AllGather", "hidden_of_shorter"), cells[1], percent(max(idle)) if idle else "-",
            ])  # fmt: skip
    head = ["GPUs", "shape, tokens, layers", "a gather (µs)", "attention + experts forward (µs)", "gathers hidden"]
    return table([*head, "of those that last less", "reduce-scatters hidden", "device without compute"], rows)


def _worst(record: Record, kind: str, key: str) -> str:
    found = [rank[kind].get(key) for rank in record["ranks"] if kind in rank]
    return percent(min(found)) if found and None not in found else "-"


def memory(runs: Runs) -> str:
    rows = [
        [
            ranks,
            r["layers"],
            f"{r['weights_of_a_layer_mib']:.0f}",
            f"{r['gathered_mib']:.0f}",
            f"{r['peak_above_held_mib']:.0f}",
        ]
        for ranks, run in runs.items()
        for r in of(run, "memory")
    ]
    return table(
        ["GPUs", "layers", "weights of a layer (MiB)", "gathered (MiB)", "peak above what is held (MiB)"], rows
    )


def unequal(runs: Runs) -> str:
    rows = []
    for run in runs.values():
        cases: dict[tuple[Any, ...], dict[str, Record]] = {}
        for r in of(run, "unequal devices"):
            if "kind" in r:
                cases.setdefault((_list(r["sms"]), r["shape"], r["kind"].split()[0]), {})[_split(r)] = r
        for (sms, shape, kind), by in cases.items():
            if "weighted" not in by:
                continue
            names = ("uniform", "weighted", "proportional to t_i", "proportional to time alone")
            over = [f"{by[n]['over_ideal']:.2f}" if n in by else "-" for n in names]
            gain = f"{100 * by['weighted']['gain_over_uniform']:.1f} %"
            step = by.get("step weighted")
            whole = f"{100 * step['gain_over_uniform']:.1f} %" if step else "-"
            rows.append([sms, shape, kind, _list(by["weighted"]["sizes"]), *over, gain, whole, PAPER[kind]])
    head = ["multiprocessors", "shape", "centric", "tokens or h_i", "uniform", "weighted", "by t_i", "by time alone"]
    return table([*head, "gain over uniform", "gain of a step", "paper (two devices)"], rows)


def mesh(folder: Path) -> str:
    """Steps of whole models beside each other: a table of even routers in bf16, what other set-ups change, and Trainer's losses."""
    paths = [path for n in (2, 4) if (path := folder / f"mesh_h200x{n}.json").exists()]
    found = [row for path in paths for row in json.loads(path.read_text())["rows"]]
    by: dict[tuple[Any, ...], dict[str, Record]] = {}
    for row in found:
        set_up = _set_up(row)
        by.setdefault((row["gpus"], row["model"], row["tokens"], set_up), {})[row["row"]] = row
    said = [
        f"* {row['model']}, {row['tokens']}, {_set_up(row)}, {row['row']}: {row['reason']}"
        for row in found
        if "reason" in row
    ]
    plain = {case[:3]: rows for case, rows in by.items() if case[3] == "bf16"}
    other = {case: rows for case, rows in by.items() if case[3] != "bf16"}
    parts = [
        _steps(plain, ["GPUs", "model", "tokens"]),
        _steps(other, ["GPUs", "model", "tokens", "set-up"]) if other else "",
        *(_losses(case, rows) for case, rows in other.items()),
    ]
    return "\n\n".join([*filter(None, parts), *(["\n".join(sorted(said))] if said else [])])


def _set_up(row: Record) -> str:
    fullest = f", fullest rank {row['fullest']:.2f}" if "fullest" in row else ""
    for name, said in SET_UPS.items():
        if name in row:
            return said.format(row[name]) + fullest
    return "bf16"


def _losses(case: tuple[Any, ...], by: dict[str, Record]) -> str:
    """How far losses of Trainer's steps lie apart; empty without."""
    found = [row["losses"] for row in by.values() if "losses" in row]
    if len(found) < 2:
        return ""
    apart = max(abs(a / b - 1) for a, b in zip(*found, strict=True))
    ends = " and ".join(f"{losses[-1]:.3f}" for losses in found)
    within = f"losses of all steps within {100 * apart:.2f} % of each other"
    return f"{case[1]}, {case[0]} GPUs, {case[3]}: {within}, {found[0][0]:.3f} at first, {ends} at the end."


def _steps(by: dict[tuple[Any, ...], dict[str, Record]], head: list[str]) -> str:
    kinds = list(dict.fromkeys(kind for rows in by.values() for kind in rows))
    lines = []
    for case, rows in by.items():
        times = {kind: row["ms"] for kind, row in rows.items() if "ms" in row}
        cells = [_cell(rows[kind]) if kind in times else "-" for kind in kinds]
        launched = [ms for kind, ms in times.items() if not kind.endswith("_graphed")]
        over = f"{times['auto'] / min(launched):.2f}" if "auto" in times else "-"
        gain = f"{times['fsdp2_hexa'] / min(times.values()):.2f}" if "fsdp2_hexa" in times else "-"
        lines.append([*case, *cells, over, gain])
    return table([*head, *kinds, "auto over the best that is launched", "FSDP2 with hexa over the best"], lines)


def _cell(row: Record) -> str:
    peak = f", {row['peak_gib']:.1f}" if "peak_gib" in row else ""
    chosen = f" ({row['modes'][0].removesuffix('_centric')})" if row["row"] == "auto" and row.get("modes") else ""
    return f"{row['ms']:.1f}{peak}{chosen}"


def _split(record: Record) -> str:
    """Older records have other names."""
    split = "proportional to time alone" if record["split"] == "weighted by time alone" else record["split"]
    return f"step {split}" if record["kind"].endswith(" step") else str(split)


def _list(values: Sequence[object]) -> str:
    return ", ".join(map(str, values))


SECTIONS: dict[str, Callable[[Runs], str]] = {
    "setup": setup,
    "goals": goals,
    "steps": steps,
    "others": others,
    "correctness": correctness,
    "overlap": overlap,
    "memory": memory,
    "unequal": unequal,
}


def fill(text: str, folder: Path) -> str:
    """The page with every table between its markers made anew."""
    return pages.fill(pages.fill(text, SECTIONS, load(folder)), {"mesh": mesh}, folder)


if __name__ == "__main__":
    PAGE.write_text(fill(PAGE.read_text(), RESULTS))
    print(f"wrote {PAGE}")
