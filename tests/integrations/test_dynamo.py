"""``torch.compile(backend="hexa")``: blocks rewritten in Dynamo's graphs, the rest left to another backend."""

import logging
import os
import subprocess
import sys
import tomllib
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
import torch
from torch import nn
from torch._dynamo.exc import BackendCompilerFailed

from hexa_fx.errors import InputError, NothingRewritten
from hexa_fx.integrations import dynamo
from hexa_fx.integrations.dynamo import hexa
from hexa_fx.report import OptimizationReport

ROOT = Path(__file__).parents[2]
D, H, E, K = 10, 12, 4, 2


@pytest.fixture(autouse=True)
def _fresh() -> None:
    torch._dynamo.reset()
    dynamo._said.clear()


class Router(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(D, E, bias=False)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        weights, index = self.gate(x).softmax(-1).topk(K)
        return weights / weights.sum(-1, keepdim=True), index


class Gathered(nn.Module):
    """Stacked weights gathered for every token; Dynamo captures it."""

    def __init__(self) -> None:
        super().__init__()
        self.router = Router()
        self.w1, self.w2 = nn.Parameter(torch.randn(E, 2 * H, D) / 3), nn.Parameter(torch.randn(E, D, H) / 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.reshape(-1, D)
        weights, index = self.router(flat)
        gate, up = torch.einsum("td,tkfd->tkf", flat, self.w1[index]).chunk(2, dim=-1)
        y = torch.einsum("tkf,tkdf->tkd", nn.functional.silu(gate) * up, self.w2[index])
        return (y * weights.unsqueeze(-1)).sum(1).reshape(x.shape)


class Listed(nn.Module):
    """Every expert of a list on every token; Dynamo captures it."""

    def __init__(self) -> None:
        super().__init__()
        self.router = Router()
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(D, H), nn.GELU(), nn.Linear(H, D)) for _ in range(E))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, index = self.router(x)
        dense = torch.zeros(*x.shape[:-1], E, dtype=x.dtype).scatter(-1, index, weights)
        return torch.stack([expert(x) for expert in self.experts], -1).mul(dense.unsqueeze(-2)).sum(-1)


class Looped(Listed):
    """The usual loop, which Dynamo breaks at."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.reshape(-1, D)
        weights, index = self.router(flat)
        out = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            token, slot = torch.where(index == number)
            if token.numel() == 0:
                continue
            out.index_add_(0, token, expert(flat[token]) * weights[token, slot, None])
        return out.reshape(x.shape)


class Cumulative(Gathered):
    """Looks like a mixture, but experts see the tokens before."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.reshape(-1, D)
        weights, index = self.router(flat)
        h = torch.einsum("td,tkfd->tkf", flat, self.w1[index]).cumsum(0)[..., :H].relu()
        y = torch.einsum("tkf,tkdf->tkd", h, self.w2[index])
        return (y * weights.unsqueeze(-1)).sum(1).reshape(x.shape)


class Layers(nn.Module):
    def __init__(self, block: type[nn.Module], depth: int = 2) -> None:
        super().__init__()
        self.embed = nn.Linear(D, D)
        self.blocks = nn.ModuleList(block() for _ in range(depth))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = x + block(nn.functional.layer_norm(x, (D,)))
        return x


def make(block: type[nn.Module]) -> Layers:
    torch.manual_seed(0)
    return Layers(block).double()


def outcome(call: nn.Module, model: nn.Module, batch: int) -> list[torch.Tensor]:
    x = torch.randn(
        batch, 5, D, dtype=torch.float64, generator=torch.Generator().manual_seed(batch), requires_grad=True
    )
    y = call(x)
    return [y, *torch.autograd.grad(y.square().sum(), [x, *model.parameters()])]


@pytest.mark.parametrize(("block", "rest"), [(Gathered, "aot_eager"), (Listed, "eager")])
def test_blocks_are_rewritten_and_equal(block: type[nn.Module], rest: str) -> None:
    """At the first size, and at others, which Dynamo compiles with symbolic sizes."""
    model = make(block)
    reports: list[OptimizationReport] = []
    compiled = torch.compile(model, backend=hexa, fullgraph=True, options={"rest": rest, "on_report": reports.append})
    for batch in (3, 2, 4):
        for a, b in zip(outcome(model, model, batch), outcome(compiled, model, batch)):
            torch.testing.assert_close(b, a, rtol=1e-9, atol=1e-9)
    assert [len(report.rewritten) for report in reports] == [2, 2], "static, then symbolic sizes"
    assert [block.path for block in reports[0].blocks] == ["blocks.0", "blocks.1"]
    assert reports[0].blocks[1].same_as == "blocks.0"
    assert "the block is rewritten to" in str(reports[0])  # its code is torch's, and has no place of the user's


def test_more_tokens_than_a_block_is_usually_tried_on() -> None:
    """With fixed sizes the graph holds for all 300 only; with symbolic ones fewer will do."""
    model, x = make(Gathered), torch.randn(60, 5, D).double()
    for dynamic in (False, True):
        torch._dynamo.reset()
        reports: list[OptimizationReport] = []
        options = {"rest": "eager", "on_report": reports.append}
        compiled = torch.compile(model, backend=hexa, dynamic=dynamic, options=options)
        torch.testing.assert_close(compiled(x), model(x), rtol=1e-9, atol=1e-9)
        assert len(reports[0].rewritten) == 2


def test_the_operator_is_in_the_graph_that_the_rest_gets() -> None:
    model, seen = make(Gathered), []

    def rest(gm: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> object:
        seen.extend(str(node.target) for node in gm.graph.nodes)
        return gm

    torch._dynamo.register_backend(rest, name="hexa_test_rest")
    with torch.no_grad():
        torch.compile(model, backend=hexa, options={"rest": "hexa_test_rest"})(torch.randn(2, 5, D).double())
    assert seen.count("hexa.moe_ffn.default") == 2
    assert not any("einsum" in target for target in seen)


def test_random_numbers_and_buffers_of_the_run_are_put_back() -> None:
    class Noisy(Gathered):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls.add_(1)
            return super().forward(nn.functional.dropout(x, 0.5, training=True))

    model = make(Noisy)
    x = torch.randn(2, 5, D).double()
    torch.manual_seed(7)
    expected = model(x)
    torch._dynamo.reset()
    torch.manual_seed(7)
    value = torch.compile(model, backend=hexa, options={"rest": "eager"})(x)
    torch.testing.assert_close(value, expected)
    assert model.blocks[0].calls == 2


def test_a_broken_graph_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    model = make(Looped)
    compiled = torch.compile(model, backend=hexa, options={"rest": "eager"})
    with caplog.at_level(logging.WARNING, "hexa_fx"):
        for batch in (2, 3):
            torch.testing.assert_close(outcome(compiled, model, batch), outcome(model, model, batch))
    said = [record.message for record in caplog.records if "hexa_fx.optimize" in record.message]
    assert len(said) == 1


def test_what_only_looks_like_a_mixture_is_left_alone() -> None:
    model, reports = make(Cumulative), []
    compiled = torch.compile(model, backend=hexa, options={"rest": "eager", "on_report": reports.append})
    torch.testing.assert_close(outcome(compiled, model, 3), outcome(model, model, 3))
    assert not reports[0].rewritten
    assert reports[0].refused[0].reason
    torch._dynamo.reset()
    strict = torch.compile(model, backend=hexa, options={"rest": "eager", "strict": True})
    with pytest.raises(BackendCompilerFailed, match=f"{NothingRewritten.__name__}: strict=True"):
        strict(torch.randn(2, 5, D).double())


def test_a_model_without_experts_goes_through() -> None:
    model = nn.Sequential(nn.Linear(D, D), nn.ReLU(), nn.Linear(D, D))
    x = torch.randn(3, D)
    torch.testing.assert_close(torch.compile(model, backend=hexa, options={"rest": "eager"})(x), model(x))


def test_a_failure_of_ours_leaves_the_graph(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def broken(gm: torch.fx.GraphModule, region: object, *_: object) -> None:
        gm.graph.erase_node(next(iter(gm.graph.find_nodes(op="output"))))
        raise RuntimeError("half done")

    monkeypatch.setattr(dynamo.regions, "put_back", broken)
    model = make(Gathered)
    compiled = torch.compile(model, backend=hexa, options={"rest": "aot_eager"})
    torch.testing.assert_close(outcome(compiled, model, 3), outcome(model, model, 3))
    assert "please report this" in caplog.text


def test_unknown_options_are_named() -> None:
    with pytest.raises(InputError, match=r"\['verfy'\].*'verify'"):
        hexa(torch.fx.GraphModule({}, torch.fx.Graph()), [], options={"verfy": False})


def test_optimized_model_compiles_with_the_backend_too() -> None:
    """Nothing is left to rewrite; the operators go to the rest as they are."""
    import hexa_fx

    model = make(Looped)
    optimized = hexa_fx.optimize(model, torch.randn(2, 5, D).double())
    compiled = torch.compile(optimized, backend=hexa, fullgraph=True, options={"rest": "aot_eager"})
    torch.testing.assert_close(outcome(compiled, optimized, 3), outcome(model, model, 3))


def test_entry_point() -> None:
    """What pyproject names is the backend."""
    points = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]["torch_dynamo_backends"]
    assert points.keys() == {"hexa"}
    assert EntryPoint("hexa", points["hexa"], "torch_dynamo_backends").load() is hexa


@pytest.mark.slow
def test_entry_point_in_another_process(tmp_path: Path) -> None:
    """torch finds the backend by its name once the package is installed."""
    points = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]["torch_dynamo_backends"]
    installed = tmp_path / "entry_of_hexa-0.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: entry-of-hexa\nVersion: 0\n")
    (installed / "entry_points.txt").write_text(f"[torch_dynamo_backends]\nhexa = {points['hexa']}\n")
    code = (
        "import torch\nassert 'hexa' in torch.compiler.list_backends()\n"
        "print(torch.compile(torch.nn.Linear(2, 2), backend='hexa', options={'rest': 'eager'})(torch.ones(1, 2)).shape)"
    )
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "torch.Size([1, 2])" in done.stdout
