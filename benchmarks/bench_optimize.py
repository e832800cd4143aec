"""What does `hexa_fx.optimize` cost, and what does the rewritten model gain on the CPU?

    python benchmarks/bench_optimize.py                    # all four questions
    python benchmarks/bench_optimize.py optimize zoo       # some of them: optimize, zoo, experts, grouped_mm
    python benchmarks/bench_optimize.py --json results.json

`optimize`: seconds of optimize() by number of experts and of layers, the best of two, and by how much the process grows meanwhile;
`--before FILE` puts the seconds that an earlier version wrote beside them.
`zoo`: forward and backward of the rewritten block against its original for every block of the zoo that is rewritten.
`grouped_mm`: the same for transformers' OLMoE, whose products are torch's grouped ones already.
`experts`: the same for one block at 8, 64 and 128 experts, written in the idioms that are most in use.
Inputs want a gradient, as inside a model. ``runs`` says what the rewritten block runs at this size: its new forward, or its
own code where that is the quicker (docs/operators.md).
One line a row; `--json` writes all rows with the versions they were measured on. Times are medians, the two models in turns:
of processor time on one thread, so that other work on the machine counts less, of wall time on several (`--threads`).
"""

from __future__ import annotations

import json
import logging
import math
import os
import pathlib
import platform
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

import hexa_fx
from benchmarks.host_memory import HostPeak
from benchmarks.kept_rows import options_of
from benchmarks.optimize_speed import ListMixture, Row, bench_experts, bench_grouped_mm, bench_zoo


def versions() -> dict[str, str]:
    """What the numbers depend on."""
    import transformers

    return {
        "hexa_fx": hexa_fx.__version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "threads": str(torch.get_num_threads()),
        "cores": str(os.cpu_count()),
    }


def qwen3(layers: int, experts: int) -> nn.Module:
    """A small Qwen3-MoE in transformers' eager experts implementation."""
    import transformers

    config = transformers.AutoConfig.for_model(
        "qwen3_moe",
        vocab_size=256,
        hidden_size=128,
        intermediate_size=256,
        moe_intermediate_size=64,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        num_experts=experts,
        num_experts_per_tok=4,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config)
    model.set_experts_implementation("eager")
    return model.eval()


class StackOfLists(nn.Module):
    """Layers of a mixture whose experts are a ModuleList, as before transformers 5."""

    def __init__(self, layers: int, experts: int, dim: int = 128, hidden: int = 64) -> None:
        super().__init__()
        self.layers = nn.ModuleList(ListMixture(experts, dim, hidden) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


def bench_optimize() -> Iterator[Row]:
    ids = torch.randint(3, 256, (2, 64), generator=torch.Generator().manual_seed(0))
    for layers, experts in ((4, 8), (4, 64), (4, 128), (16, 64), (48, 64)):
        yield _optimize_row("qwen3_moe (stacked)", layers, experts, qwen3(layers, experts), {"input_ids": ids})
    x = torch.randn(2, 64, 128, generator=torch.Generator().manual_seed(0))
    for layers, experts in ((4, 8), (4, 64), (4, 128), (16, 64), (1, 256)):
        torch.manual_seed(0)
        yield _optimize_row("ModuleList", layers, experts, StackOfLists(layers, experts).eval(), x)


def _optimize_row(name: str, layers: int, experts: int, model: nn.Module, example: Any) -> Row:
    seconds: dict[bool, float] = {}
    grown: dict[bool, float] = {}
    for verify in (True, True, False, False):
        with HostPeak() as host:
            started = time.process_time()
            opt = hexa_fx.optimize(model, example, hexa_fx.HexaConfig(verify=verify))
            seconds[verify] = min(time.process_time() - started, seconds.get(verify, math.inf))
        grown[verify] = max(host.grown / 2**20, grown.get(verify, 0.0))
    return {
        "question": "optimize",
        "model": name,
        "layers": layers,
        "experts": experts,
        "rewritten": sum(b.status == "rewritten" for b in opt.report.blocks),
        "seconds": round(seconds[True], 3),
        "seconds_without_verify": round(seconds[False], 3),
        "weights_mb": round(sum(p.numel() * p.element_size() for p in model.parameters()) / 2**20, 1),
        "grown_mb": round(grown[True], 1),
        "grown_mb_without_verify": round(grown[False], 1),
    }


QUESTIONS: dict[str, Callable[[], Iterator[Row]]] = {
    "optimize": bench_optimize,
    "zoo": bench_zoo,
    "experts": bench_experts,
    "grouped_mm": bench_grouped_mm,
}


def main() -> None:
    parser = options_of(__doc__)
    parser.add_argument("questions", nargs="*", help=f"any of {', '.join(QUESTIONS)}; all by default")
    parser.add_argument("--before", type=pathlib.Path, help="rows of `optimize` that an earlier version wrote")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    unknown = set(options.questions) - set(QUESTIONS)
    if unknown:
        parser.error(f"no such question: {', '.join(sorted(unknown))}; choose from {', '.join(QUESTIONS)}")
    torch.set_num_threads(options.threads)
    logging.getLogger("hexa_fx").setLevel(logging.ERROR)
    rows = []
    earlier = json.loads(options.before.read_text())["rows"] if options.before else []
    before = {(row["model"], row["layers"], row["experts"]): row["seconds"] for row in earlier}
    for question in options.questions or QUESTIONS:
        for row in QUESTIONS[question]():
            if (seconds := before.get((row.get("model"), row.get("layers"), row.get("experts")))) is not None:
                row["seconds_before"] = seconds
            rows.append(row)
            print("  ".join(f"{key}={value}" for key, value in row.items()), flush=True)
    if options.json:
        options.json.write_text(json.dumps({"versions": versions(), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
