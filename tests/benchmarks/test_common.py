"""How benchmarks take times, what their tables say, and that they run, or say why not, without a GPU."""

import argparse
import json
import math
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks import common, results_plot, speed_plots
from benchmarks import kernel_docs as docs
from benchmarks.bench_whole_models import rows
from benchmarks.fine_tuning_memory import MODELS, memory, packed_bytes, table
from benchmarks.pages import fill
from benchmarks.peer_products import Product, deepgemm, humming
from benchmarks.rank_failure import NAMED, measure
from benchmarks.real_blocks import REAL_BLOCKS, make, tokens_of
from hexa_fx.formats.fp8_scaling import BLOCK, ELEMENT
from hexa_fx.formats.quantized_weight import QuantizedWeight

MS, SWING, PERIOD = 7.0, 0.05, 0.8


class Card:
    """Calls take MS milliseconds, more or less as the clock swings; the host waits for them."""

    def __init__(self, phase: float) -> None:
        self.now, self.phase = 0.0, phase
        self.order: list[str] = []

    def call(self, name: str, ms: float = MS) -> Callable[[], None]:
        def run() -> None:
            self.order.append(name)
            self.now += ms / 1000 * (1 + SWING * math.sin(2 * math.pi * (self.now / PERIOD + self.phase)))

        return run


@pytest.fixture(params=[0.0, 0.3, 0.55, 0.8])
def card(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Card:
    card = Card(request.param)

    class Event:
        def __init__(self, enable_timing: bool = False) -> None:
            assert enable_timing

        def record(self) -> None:
            self.at = card.now

        def synchronize(self) -> None: ...

        def elapsed_time(self, other: Any) -> float:
            return float((other.at - self.at) * 1000)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(common.time, "perf_counter", lambda: card.now)
    return card


def test_a_clock_that_swings_does_not_show_in_steady_times(card: Card) -> None:
    found = common.steady({"a": card.call("a"), "b": card.call("b", 2 * MS), "c": card.call("c")})
    assert found["a"] == pytest.approx(MS, rel=0.01)
    assert found["b"] == pytest.approx(2 * MS, rel=0.01)
    assert found["c"] / found["a"] == pytest.approx(1, rel=0.01)


def test_every_other_turn_is_in_the_opposite_order(card: Card) -> None:
    common.steady({"a": card.call("a"), "b": card.call("b")}, turns=3)
    changes = [name for name, before in zip(card.order, ["", *card.order]) if name != before]
    assert changes == ["a", "b", "a", "b", "a", "b"]  # once each; then a b, b a, a b


def test_a_call_that_takes_longer_than_the_time_is_made_once(card: Card) -> None:
    found = common.steady({"a": card.call("a", 5000.0)}, turns=1)
    assert card.order == ["a"] * 3
    assert found["a"] == pytest.approx(5000, rel=SWING)


def test_medians_are_of_the_calls_behind_the_warm_up(card: Card) -> None:
    found = common.medians({"a": card.call("a"), "b": card.call("b", 2 * MS)}, rounds=4, turns=2)
    assert found["a"] == pytest.approx(MS, rel=2 * SWING)
    assert found["b"] == pytest.approx(2 * MS, rel=2 * SWING)


@pytest.mark.parametrize("page", docs.PAGES, ids=lambda page: page.name)
def test_tables_are_those_of_the_records(page: Path) -> None:
    text, sections = page.read_text(encoding="utf-8"), docs.PAGES[page]
    assert text == fill(text, sections, docs.RESULTS), "run python -m benchmarks.kernel_docs"
    assert all(f"<!-- {name} -->" in text for name in sections)


def test_what_misses_its_goal_is_bold(tmp_path: Path) -> None:
    record = json.loads((docs.RESULTS / docs.LAYERS).read_text())
    for row in record["rows"]:
        if row["impl"] == "hexa" and row["shape"] == "olmoe":
            row["train_ratio"], row["forward_ratio"] = 1.26, 1.204
            row["forward_ms"] = 2.0 if row["routing"] == "balanced" else 2.11
    (tmp_path / docs.LAYERS).write_text(json.dumps(record))
    line = next(line for line in docs.layers(tmp_path).splitlines() if line.startswith("| olmoe"))
    assert "**1.26**" in line
    assert "1.20" in line
    assert "**1.20**" not in line
    assert "**+5.5 %**" in line


def test_the_plots_are_those_of_the_records() -> None:
    for place, text in (results_plot.drawn(docs.RESULTS) | speed_plots.drawn(docs.RESULTS)).items():
        assert place.read_text(encoding="utf-8") == text


PAGE = Path(__file__).parents[2] / "docs" / "fine_tuning.md"


def test_the_page_has_the_table():
    assert table() in PAGE.read_text(encoding="utf-8"), "run python -m benchmarks.fine_tuning_memory"


@pytest.mark.parametrize("format", ["nf4", "nf4_double", "mxfp4", "fp8_block", "int8_rows"])
def test_packed_bytes_are_those_of_packed_weights(format):
    shape = (3, 256, 320)
    assert packed_bytes(shape, format) == QuantizedWeight.of(torch.zeros(shape), format).stored_bytes


@pytest.mark.parametrize(
    ("name", "billions"),
    [("Qwen3-30B-A3B", 30.5), ("gpt-oss-20b", 20.9), ("gpt-oss-120b", 116.8), ("Mixtral 8x7B", 46.7)],
)
def test_parameters_of_the_models(name, billions):
    (shape,) = [m for m in MODELS if m.name == name]
    dense = memory(shape, "bf16")
    assert (dense.experts + dense.rest) / 2e9 == pytest.approx(billions, rel=5e-3)


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ("[Rank 0]: Rank 1 failed to pass monitoredBarrier in 10000 ms", True),
        ("  rank      : 1 (local_rank: 1)", True),
        ("failed (exitcode: 17) local_rank: 1 (pid: 7) of binary: python", True),
        ("[Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=10)", False),
        ("Connection closed by peer [127.0.0.1]:5000", False),
        ("Rank 10 failed to pass monitoredBarrier in 10000 ms", False),
    ],
)
def test_what_names_rank_1(words, named):
    assert bool(NAMED.search(words)) is named


def test_a_rank_that_ends_is_named_over_gloo():
    record = measure("gloo", "barrier", "exit", 20.0)
    assert record["named"] is not None, record
    assert record["ended"] is not None, record


@pytest.mark.parametrize("name", REAL_BLOCKS)
def test_the_small_form_runs(name: str) -> None:
    with torch.no_grad():
        result = make(name, "cpu", 64)(input_ids=tokens_of("cpu", 4))
    assert getattr(result, "logits", result).isfinite().all()


def test_every_implementation_has_a_row() -> None:
    pytest.importorskip("transformers")
    sizes = {"device": "cpu", "shrink": 32, "layers": 1, "tokens": 64, "batch": 2, "new": 2, "rounds": 1}
    found = list(rows("mixtral-8x7b", argparse.Namespace(**sizes, impls="hexa,grouped_mm,missing")))
    assert [row["impl"] for row in found] == ["hexa", "grouped_mm", "missing"]
    assert all(row["train_tokens_s"] > 0 and row["decode_tokens_s"] > 0 for row in found[:2])
    assert "missing" in found[2]["reason"]


EXPERTS, ROWS = 2, 2 * BLOCK


def _wide(scales: Tensor, dim: int) -> Tensor:
    return scales.repeat_interleave(BLOCK, dim)


def _package(error: float) -> Any:
    """What DeepGEMM's two functions compute, as its interface says, off by a factor."""

    def rows(x: Any, w: Any, out: Tensor, layout: Tensor) -> None:
        for e in range(EXPERTS):
            weight = w[0][e].float() * _wide(_wide(w[1][e], 0), 1)
            out[layout == e] = ((x[0].float() * _wide(x[1], 1))[layout == e] @ weight.t() * error).to(out.dtype)

    def weights(x: Any, w: Any, out: Tensor, ks: list[int], sizes: Tensor, add: Tensor) -> None:
        assert ks == sizes.tolist()
        done = 0
        for e, count in enumerate(ks):
            operands = []
            for (flat, scales), width in zip((x, w), out.shape[1:]):
                part = flat[done * width : (done + count) * width].view(width, count).float()
                operands.append(part * _wide(scales[:, done // BLOCK : (done + count) // BLOCK], 1))
            out[e] = add[e] + operands[0] @ operands[1].t() * error
            done += count

    return SimpleNamespace(
        get_mk_alignment_for_contiguous_layout=lambda: BLOCK,
        get_mn_major_tma_aligned_tensor=lambda scales: scales,
        m_grouped_fp8_gemm_nt_contiguous=rows,
        k_grouped_fp8_gemm_nt_contiguous=weights,
    )


def _elements(*shape: int) -> Tensor:
    return torch.randn(shape).clamp_(-4, 4).to(ELEMENT)


def _products() -> list[Product]:
    n, k, columns = EXPERTS * ROWS, BLOCK, 2 * BLOCK
    groups = n // BLOCK + EXPERTS
    x, w = _elements(n, k), _elements(EXPERTS, columns, k)
    return [
        Product("rows", x, torch.rand(n, k // BLOCK) + 0.5, w, torch.rand(EXPERTS, columns // BLOCK, k // BLOCK) + 0.5),
        Product(
            "weights",
            _elements(groups, k, BLOCK),
            torch.rand(groups, k) + 0.5,
            _elements(groups, columns, BLOCK),
            torch.rand(groups, columns) + 0.5,
            EXPERTS,
        ),
    ]


@pytest.mark.parametrize("number", [0, 1])
def test_the_peer_gets_the_same_operands(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    monkeypatch.setitem(sys.modules, "deep_gemm", _package(1.0))
    deepgemm(_products()[number])()


@pytest.mark.parametrize("number", [0, 1])
def test_a_peer_that_computes_something_else_is_left_out(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    monkeypatch.setitem(sys.modules, "deep_gemm", _package(1.05))
    with pytest.raises(ValueError, match="differ by"):
        deepgemm(_products()[number])


class _Humming:
    """The interface of Humming's layer of packed experts, which are not packed here, off by a factor."""

    def __init__(self, error: float) -> None:
        self.error = error
        self.weight_schema = SimpleNamespace(
            quant_tensor=lambda weight, schema, dtype: {"weight": weight},
            dequant_tensors=lambda packed: packed["weight"],
        )
        self.load_from_tensors, self.transform = vars(self).update, lambda: None

    def to(self, device: torch.device) -> Any:
        return self

    def __call__(self, x: Tensor, expert_layout: Tensor, compute_config: dict[str, str]) -> Tensor:
        assert compute_config == {"gemm_type": "grouped_contiguous"}
        parts = x.split(expert_layout.diff().tolist())
        return torch.cat([part @ weight.t() for part, weight in zip(parts, vars(self)["weight"])]) * self.error


@pytest.mark.parametrize("error", [1.0, 1.05])
def test_a_product_with_packed_weights_is_compared_with_its_numbers(
    monkeypatch: pytest.MonkeyPatch, error: float
) -> None:
    made = SimpleNamespace(HummingLayer=lambda columns, depth, config, **options: _Humming(error))
    monkeypatch.setitem(sys.modules, "humming.layer", made)
    x, offs = torch.randn(9, 2 * BLOCK, dtype=torch.bfloat16), torch.tensor([0, 2, 2, 9], dtype=torch.int32)
    with pytest.raises(ValueError, match="differ by") if error != 1 else nullcontext():
        humming("fp8_block", BLOCK, x, offs)()
