"""What does `hexa_fx.optimize` cost, and what does the rewritten model gain on the CPU?

    python benchmarks/bench_optimize.py                    # all three questions
    python benchmarks/bench_optimize.py optimize zoo       # some of them: optimize, zoo, experts
    python benchmarks/bench_optimize.py --json results.json

`optimize`: seconds of optimize() by number of experts and of layers, and by how much the process grows meanwhile.
`zoo`: forward and backward of the rewritten block against its original for every block of the zoo that is rewritten.
`experts`: the same for one block at 8, 64 and 128 experts, written in the idioms that are most in use.
Inputs want a gradient, as inside a model. ``runs`` says what the rewritten block runs at this size: its new forward, or its
own code where that is the quicker (docs/operators.md).
One line a row; `--json` writes all rows with the versions they were measured on. Times are medians, the two models in turns:
of processor time on one thread, so that other work on the machine counts less, of wall time on several (`--threads`).
"""

from __future__ import annotations

import argparse
import inspect
import json
import logging
import os
import pathlib
import platform
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import is_dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

import hexa_fx
from hexa_fx.runtime.install import HexaForward
from tests.zoo import by_sorting, common, loops
from tests.zoo.registry import VARIANTS

Row = dict[str, Any]


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


# -- optimize ----------------------------------------------------------------------------------------------------------


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
    for layers, experts in ((4, 8), (4, 64), (4, 128), (4, 256), (8, 64), (16, 64), (48, 64)):
        yield _optimize_row("qwen3_moe (stacked)", layers, experts, qwen3(layers, experts), {"input_ids": ids})
    x = torch.randn(2, 64, 128, generator=torch.Generator().manual_seed(0))
    for layers, experts in ((4, 8), (4, 64), (4, 128), (4, 256), (16, 64)):
        torch.manual_seed(0)
        yield _optimize_row("ModuleList", layers, experts, StackOfLists(layers, experts).eval(), x)


class _Resident:
    """By how much the process's resident memory grows inside the block, sampled every 2 ms."""

    grown_mb = 0.0

    def __enter__(self) -> _Resident:
        self._before, self._done = self._now(), threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._done.wait(0.002):
            self.grown_mb = max(self.grown_mb, self._now() - self._before)

    @staticmethod
    def _now() -> float:
        pages = int(pathlib.Path("/proc/self/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def _optimize_row(name: str, layers: int, experts: int, model: nn.Module, example: Any) -> Row:
    seconds, grown = {}, {}
    for verify in (True, False):
        with _Resident() as resident:
            started = time.process_time()
            opt = hexa_fx.optimize(model, example, hexa_fx.HexaConfig(verify=verify))
            seconds[verify] = time.process_time() - started
        grown[verify] = resident.grown_mb
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


# -- forward and backward ----------------------------------------------------------------------------------------------


def bench_zoo(batch: int = 4, seq: int = 64) -> Iterator[Row]:
    for v in VARIANTS:
        if v.expect == "refused":
            continue
        model = v.make(0).eval()
        args, kwargs = _wanting_gradients(*v.inputs(batch, seq, torch.float32, 0))
        opt = _optimized(model, v.inputs(2, 7, torch.float32, 0), verify=False)  # the tests of the zoo verify
        if any(b.status == "rewritten" for b in opt.report.blocks):
            row = {"question": "zoo", "block": v.name, "tokens": batch * seq, "runs": _runs(opt, args, kwargs)}
            yield {**row, **_compared(model, opt, args, kwargs)}


class ListMixture(nn.Module):
    """transformers 4 style: ModuleList, one-hot mask, index_add_."""

    def __init__(self, num_experts: int, dim: int, hidden: int, top_k: int = 4) -> None:
        super().__init__()
        self.gate = common.TopKGate(dim, num_experts, top_k)
        self.experts = common.experts(common.SwiGLU, num_experts, dim=dim, hidden=hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.reshape(-1, x.shape[-1])
        weights, indices = self.gate(flat)
        out = torch.zeros_like(flat)
        for e, expert in enumerate(self.experts):
            token, slot = torch.where(indices == e)
            out.index_add_(0, token, expert(flat[token]) * weights[token, slot, None])
        return out.view(x.shape)


def bench_experts(dim: int = 128, hidden: int = 64, batch: int = 4, seq: int = 64) -> Iterator[Row]:
    """One block of growing E, in four idioms."""
    for num_experts in (8, 64, 128):
        for name, block in _idioms(num_experts, dim, hidden):
            x = torch.randn(batch, seq, dim, generator=torch.Generator().manual_seed(0))
            opt = _optimized(block.eval(), ((x[:2, :7].contiguous(),), {}))
            x.requires_grad_()
            yield {
                "question": "experts",
                "block": name,
                "experts": num_experts,
                "tokens": batch * seq,
                "runs": _runs(opt, (x,), {}),
                **_compared(block, opt, (x,), {}),
            }


def _idioms(num_experts: int, dim: int, hidden: int) -> Iterator[tuple[str, nn.Module]]:
    torch.manual_seed(0)
    yield "list, index_add_", ListMixture(num_experts, dim, hidden)
    for name, module, cls in (
        ("stacked gate_up, hit experts", loops, loops.StackedGateUp),
        ("sort, split, cat", by_sorting, by_sorting.SplitByCounts),
        ("gathered einsum", by_sorting, by_sorting.GatheredEinsum),
    ):
        with _sizes(module, D=dim, I=hidden, E=num_experts, K=4):
            block = cls()
            if isinstance(block, loops.StackedGateUp):
                block.gate = common.TopKGate(dim, num_experts, 4)
            yield name, block


class _sizes:
    """Sets a zoo module's size constants, which its blocks read when they are made and in forward."""

    def __init__(self, module: Any, **values: int) -> None:
        self.module, self.values = module, values

    def __enter__(self) -> None:
        self.before = {name: getattr(self.module, name) for name in self.values if hasattr(self.module, name)}
        self._set(self.values)

    def __exit__(self, *_: object) -> None:
        self._set(self.before)

    def _set(self, values: dict[str, int]) -> None:
        for name in self.before:
            setattr(self.module, name, values[name])


def _optimized(model: nn.Module, call: tuple[tuple[Any, ...], dict[str, Any]], verify: bool = True) -> nn.Module:
    args, kwargs = call
    example = {**dict(zip(inspect.signature(model.forward).parameters, args)), **kwargs} if kwargs else args
    return hexa_fx.optimize(model, example, hexa_fx.HexaConfig(verify=verify))


def _wanting_gradients(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)]
    for tensor in tensors:
        tensor.requires_grad_(tensor.is_floating_point())
    return args, kwargs


def _runs(opt: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """``rewritten`` or ``own code``: what a call runs in every block."""
    seen: set[str] = set()
    forwards = [f for m in opt.modules() if isinstance(f := m.__dict__.get("forward"), HexaForward)]
    for forward in forwards:
        plain = forward.original
        forward.original = lambda *a, p=plain, **k: (seen.add("own code"), p(*a, **k))[1]  # type: ignore[method-assign]
    _forward(opt, args, kwargs)
    for forward in forwards:
        del forward.original
    return next(iter(seen), "rewritten")


def _compared(model: nn.Module, opt: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Row:
    """Milliseconds of forward (eval mode, no gradients) and of forward plus backward, original and rewritten."""
    row: Row = {}
    inputs = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)]
    wanting = [t for t in (*model.parameters(), *opt.parameters(), *inputs) if t.requires_grad]
    for name, step in (("forward", _forward), ("step", partial(_step, wanting=wanting))):
        calls = (lambda s=step: s(model, args, kwargs), lambda s=step: s(opt, args, kwargs))
        original, rewritten, speedup = _interleaved(*calls)
        row |= {
            f"{name}_ms": round(1e3 * original, 3),
            f"{name}_rewritten_ms": round(1e3 * rewritten, 3),
            f"{name}_speedup": round(speedup, 2),
        }
    return row


def _forward(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    with torch.no_grad():
        model(*args, **kwargs)


def _step(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], wanting: Sequence[torch.Tensor] = ()
) -> None:
    """Forward and backward. The gradients of ``wanting`` are dropped at the end."""
    output = model(*args, **kwargs)
    leaves = torch.utils._pytree.tree_leaves(vars(output) if is_dataclass(output) else output)
    sum(t.sum() for t in leaves if isinstance(t, torch.Tensor) and t.requires_grad).backward()
    for tensor in wanting:
        tensor.grad = None


def _interleaved(
    first: Callable[[], None], second: Callable[[], None], budget: float = 0.5
) -> tuple[float, float, float]:
    """Medians of both, and of first over second in pairs that follow each other: a machine whose speed drifts hits both alike.

    Every other pair runs in the opposite order.
    """
    for call in (first, second, first, second):
        call()
    times: dict[Callable[[], None], list[float]] = {first: [], second: []}
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    started, order = clock(), (first, second)
    while clock() - started < budget or len(times[first]) < 6:
        for call in order:
            before = clock()
            call()
            times[call].append(clock() - before)
        order = order[::-1]
    ratio = statistics.median(a / b for a, b in zip(times[first], times[second], strict=True))
    return statistics.median(times[first]), statistics.median(times[second]), ratio


QUESTIONS: dict[str, Callable[[], Iterator[Row]]] = {
    "optimize": bench_optimize,
    "zoo": bench_zoo,
    "experts": bench_experts,
}


PAGE = """# What `optimize` costs

Seconds of processor time of one `hexa_fx.optimize`, one thread, by number of experts and of layers (hidden size 128, experts of
64, 4 experts a token), made by `python benchmarks/bench_optimize.py optimize --json FILE --page FILE`. Capture, detection and
rewriting grow with the experts of a block; identical blocks of a model are analysed once, so that layers cost little. Tracing
copies no weights (`tests/capture/test_stir.py`); detection holds one block's weights in float64, and verification a float64
copy of one block and its gradients, however many blocks the model has. Memory is by how much the process grew, which also holds
what the allocator did not give back.

| model | layers | experts | rewritten | seconds | unverified | weights (MiB) | grown by (MiB) | unverified |
|---|---|---|---|---|---|---|---|---|
"""


def page(rows: list[Row], measured_on: dict[str, str]) -> str:
    """docs/optimize_time.md."""
    keys = "model layers experts rewritten seconds seconds_without_verify weights_mb grown_mb grown_mb_without_verify"
    lines = [
        f"| {' | '.join(str(row[key]) for key in keys.split())} |" for row in rows if row["question"] == "optimize"
    ]
    versions_used = ", ".join(f"{key} {value}" for key, value in measured_on.items())
    return PAGE + "\n".join(lines) + f"\n\nMeasured with {versions_used}.\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("questions", nargs="*", help=f"any of {', '.join(QUESTIONS)}; all by default")
    parser.add_argument("--json", type=pathlib.Path, help="where to write the rows and versions")
    parser.add_argument("--page", type=pathlib.Path, help="where to write the table of `optimize`")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    unknown = set(options.questions) - set(QUESTIONS)
    if unknown:
        parser.error(f"no such question: {', '.join(sorted(unknown))}; choose from {', '.join(QUESTIONS)}")
    torch.set_num_threads(options.threads)
    logging.getLogger("hexa_fx").setLevel(logging.ERROR)
    rows = []
    for question in options.questions or QUESTIONS:
        for row in QUESTIONS[question]():
            rows.append(row)
            print("  ".join(f"{key}={value}" for key, value in row.items()), flush=True)
    if options.page:
        options.page.write_text(page(rows, versions()))
    if options.json:
        options.json.write_text(json.dumps({"versions": versions(), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
