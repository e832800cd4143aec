"""Where a layer's time goes: every launch of forward and backward alone, against plain matmuls of the same FLOPs, on one GPU.

    python benchmarks/bench_breakdown.py [--shapes mixtral,...] [--json FILE]

Each runs alone at its own sustained clock, and its time is the mean over a period of that clock's swing (`common.steady`). Beside
it stand clock and power meanwhile (NVML), which tell a launch that leaves the tensor cores idle (high clock) from one that meets
the power limit. `excess` is its time beyond the matmul's, as a share of the dense layer's forward + backward. "in a row" are all
launches of a step one behind the other, with nothing of autograd between them.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from common import LARGE, SHAPES, MoeShape, routing, steady
from kept_rows import keep, options_of
from launching import prebuild

import hexa_fx.ops  # noqa: F401  (defines torch.ops.hexa)

Run = Callable[[], object]
PRODUCTS = ("up", "down", "dA", "dW2", "dX", "dW1")
WARM_S, TIMED_S = 0.4, 0.8
LAYER = ("reindex", "up", "down", "combine", "dA", "dW2", "dX + dW1", "combine dX")


class Meter:
    """Samples clock (MHz) and power (W) while a function runs. Without NVML it reads nothing.

    NVML's power is a mean over the past second: too low where the card rested just before (the first launch, `reindex` and its
    successor).
    """

    def __init__(self) -> None:
        try:
            import pynvml

            pynvml.nvmlInit()
            self._nvml, self._card = pynvml, pynvml.nvmlDeviceGetHandleByIndex(torch.cuda.current_device())
        except Exception as error:
            print(f"no clocks: {error}", flush=True)
            self._nvml = None

    def measure(self, run: Run) -> tuple[float, float, float]:
        """Milliseconds of a call where it is called without end (`common.steady`); means of clock and power over the timed part."""
        samples: list[tuple[float, float]] = []
        stop = threading.Event()
        thread = threading.Thread(target=self._sample, args=(stop, samples))
        thread.start()
        milliseconds = steady({"": run}, turns=1, warm_s=WARM_S, timed_s=TIMED_S)[""]
        stop.set()
        thread.join()
        timed = samples[-int(len(samples) * TIMED_S / (WARM_S + TIMED_S)) :] or [(0.0, 0.0)]
        clock, power = (sum(values) / len(timed) for values in zip(*timed))
        return milliseconds, clock, power

    def _sample(self, stop: threading.Event, samples: list[tuple[float, float]]) -> None:
        while not stop.is_set() and self._nvml is not None:
            clock = self._nvml.nvmlDeviceGetClockInfo(self._card, self._nvml.NVML_CLOCK_SM)
            samples.append((float(clock), self._nvml.nvmlDeviceGetPowerUsage(self._card) / 1000))
            time.sleep(0.01)


def launches(shape: MoeShape) -> dict[str, tuple[Run, str]]:
    """Name -> the launch, and the name of the dense product of its FLOPs ('' for none)."""
    ops, tokens, k, experts, d, i = torch.ops.hexa, shape.tokens, shape.top_k, shape.experts, shape.model, shape.inner
    n, bf16 = shape.rows, {"dtype": torch.bfloat16, "device": "cuda"}
    ids = routing("balanced", shape)
    v, inv, offs = ops.reindex(ids, experts)
    gates = torch.rand(tokens, k, device="cuda").to(torch.bfloat16)
    x, dy, wide = torch.randn(tokens, d, **bf16), torch.randn(tokens, d, **bf16), torch.randn(n, d, **bf16)
    h, a = torch.randn(n, 2 * i, **bf16), torch.randn(n, i, **bf16)
    w1, w2 = torch.randn(experts, 2 * i, d, **bf16) / d**0.5, torch.randn(experts, d, i, **bf16) / i**0.5
    static = ("silu", "concat", [])
    found: dict[str, tuple[Run, str]] = {
        "dense up": (lambda: wide @ w1[0].t(), ""),
        "dense down": (lambda: a @ w2[0].t(), ""),
        "dense dA": (lambda: wide @ w2[0], ""),
        "dense dW2": (lambda: wide.t() @ a, ""),
        "dense dX": (lambda: h @ w1[0], ""),
        "dense dW1": (lambda: h.t() @ wide, ""),
        "reindex": (lambda: ops.reindex(ids, experts), ""),
        "up": (lambda: ops.esmm_act(x, w1, None, None, None, v, offs, k, "nk", *static, True), "up"),
        "down": (lambda: ops.esmm(a, w2, None, None, offs, 1, "nk"), "down"),
        "combine": (lambda: ops.combine(wide, gates, inv, offs, k), ""),
        "dA": (lambda: ops.esmm_act_backward(dy, w2, h, gates, v, offs, k, "kn", *static), "dA"),
        "dW2": (lambda: ops.estmm(a, dy, None, v, offs, k, "nk"), "dW2"),
        "dX + dW1": (lambda: ops.esfk(x, h, w1, v, offs, k, "nk", False), "dX + dW1"),
        "combine dX": (lambda: ops.combine(wide, None, inv, offs, k), ""),
        # not part of the layer: what the parts of a launch cost
        "(up, rows in order)": (
            lambda: ops.esmm_act(wide, w1, None, None, None, None, offs, 1, "nk", *static, True),
            "up",
        ),
        "(up, no activation)": (lambda: ops.esmm(x, w1, None, v, offs, k, "nk"), "up"),
        "(up, neither)": (lambda: ops.esmm(wide, w1, None, None, offs, 1, "nk"), "up"),
        "(dA, no gradient)": (lambda: ops.esmm(dy, w2, None, v, offs, k, "kn"), "dA"),
        "(dX)": (lambda: ops.esmm(h, w1, None, None, offs, 1, "kn"), "dX"),
        "(dW1)": (lambda: ops.estmm(x, h, v, None, offs, k, "nk"), "dW1"),
    }
    found["dense in a row"] = in_a_row(found, [f"dense {part}" for part in PRODUCTS]), ""
    found["(in a row)"] = in_a_row(found, LAYER), "in a row"
    return found


def in_a_row(found: dict[str, tuple[Run, str]], names: Sequence[str]) -> Run:
    runs = [found[name][0] for name in names]

    def step() -> None:
        for run in runs:
            run()

    return step


def main() -> None:
    """Prints the table, writes the JSON."""
    parser = options_of(__doc__)
    parser.add_argument("--shapes", default=",".join(LARGE))
    options = parser.parse_args()
    meter, rows = Meter(), []
    for name in options.shapes.split(","):
        torch.manual_seed(0)
        found = launches(SHAPES[name])
        prebuild(lambda f=found: [run() for each, (run, _) in f.items() if not each.startswith("dense")])
        measured = {each: meter.measure(run) for each, (run, _) in found.items()}
        times = {each: milliseconds for each, (milliseconds, _, _) in measured.items()}
        times["dense dX + dW1"] = times["dense dX"] + times["dense dW1"]
        total = sum(times[f"dense {part}"] for part in PRODUCTS)
        print(f"-- {name}, dense forward + backward {total:.3f} ms", flush=True)
        for each, (_, dense) in found.items():
            _, clock, power = measured[each]
            floor = times[f"dense {dense}"] if dense else 0.0
            row: dict[str, Any] = {"shape": name, "launch": each, "ms": times[each], "dense_ms": floor}
            row |= {"clock_mhz": clock, "power_w": power, "excess": (times[each] - floor) / total}
            ratio = f"x{times[each] / floor:.2f}" if floor else "     "
            excess = "" if each.startswith("dense") else f"excess {100 * row['excess']:5.1f} %"
            print(f"   {each:20s} {times[each]:8.3f} ms {ratio}  {clock:5.0f} MHz {power:4.0f} W  {excess}", flush=True)
            rows.append(row)
        torch.cuda.empty_cache()
        keep(rows, options.json)


if __name__ == "__main__":
    main()
