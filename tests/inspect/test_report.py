"""The report and its snapshots: numbers that can be worked out by hand, every form of it, one snapshot a pass."""

import copy
import json
import logging
import pickle
import re
import sys
from collections import Counter
from dataclasses import replace

import pytest
import torch
from rich.console import Console
from torch import nn

import hexa_fx
import hexa_fx.errors
from hexa_fx.errors import InputError
from hexa_fx.graphs import Graphs
from hexa_fx.inspection import inspector, stages
from hexa_fx.inspection.kernels import kernels_of
from hexa_fx.inspection.operators import op_name
from hexa_fx.inspection.stages import FfnCase
from hexa_fx.ir import FfnSpec
from hexa_fx.observers import listening
from hexa_fx.passes.partition.plan_layers import plan_layers
from hexa_fx.plan import ExpertShape
from hexa_fx.report import OptimizationReport
from tests.zoo.registry import by_name

T, K, E, D, I = 14, 2, 4, 8, 12  # noqa: E741


def test_costs_are_those_of_the_sizes(optimized):
    costs = optimized.report.blocks[0].costs
    assert costs.tokens == T
    assert costs.before.flops == costs.after.flops == 2 * T * K * D * I * 2
    assert costs.after.saved < costs.before.saved
    assert costs.after.moved < costs.before.moved


def test_memory_kept_for_backward_is_that_of_the_operators(models):
    experts, tokens, width = 16, 200, 16
    block = models.make(models.Block(width, experts)).layers[0]
    (report,) = hexa_fx.explain(block, torch.randn(tokens, width)).rewritten
    rows = tokens * K
    kept = 4 * (tokens * width + rows * I) + 4 * (2 * rows + experts + 1)  # x and h, and the re-index vectors
    router = 4 * (tokens * experts + tokens * K) + 8 * tokens * K  # softmax, weights, ids
    assert report.costs.after.saved == kept + router
    assert report.costs.after.saved < 0.65 * report.costs.before.saved


def test_dense_experts_cost_less_afterwards():
    class Dense(nn.Module):
        """All experts on all tokens."""

        def __init__(self) -> None:
            super().__init__()
            self.router = nn.Linear(D, E)
            self.w1, self.w2 = nn.Parameter(torch.randn(E, I, D)), nn.Parameter(torch.randn(E, D, I))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            weights, chosen = torch.softmax(self.router(x), -1).topk(K, -1)
            gates = torch.zeros(x.shape[0], E).scatter(1, chosen, weights)
            a = torch.relu(torch.einsum("td,eid->tei", x, self.w1))
            return torch.einsum("tei,edi,te->td", a, self.w2, gates)

    torch.manual_seed(0)
    report = hexa_fx.explain(Dense(), torch.randn(T, D))
    (block,) = report.rewritten
    assert block.costs.before.flops == pytest.approx(E / K * block.costs.after.flops, rel=0.5)
    assert block.costs.before.flops > 1.9 * block.costs.after.flops


def test_where_the_code_is_and_what_it_became(optimized, models):
    block = optimized.report.blocks[0]
    assert (block.activation, block.weights, block.layout) == ("relu", "listed", "(E, out, in)")
    assert block.rewritten_to == "hexa::moe_ffn"
    assert block.code.code == "Block"
    with open(block.code.file, encoding="utf-8") as file:
        assert "def forward" in file.readlines()[block.code.line - 1]


def test_text_gathers_identical_blocks(optimized):
    text = str(optimized.report)
    assert "2 of 2 MoE blocks rewritten" in text
    assert text.count("loop over experts") == 1
    assert "the same in 1 more: layers.1" in text
    assert "kept for backward" in text


def test_a_refusal_says_why_and_where(models):
    report = hexa_fx.explain(*models.refused())
    (block,) = report.refused
    line = next(line for line in str(report).splitlines() if "left as it is" in line)
    assert "mean" in line
    assert f"{block.location.file}:{block.location.line}" in line


def test_json_has_everything(optimized):
    found = json.loads(optimized.report.to_json())
    block = found["blocks"][0]
    assert block["costs"]["after"]["flops"] == 2 * T * K * D * I * 2
    assert block["path"] == "layers.0"
    assert block["code"]["code"] == "Block"
    assert found["plan"] is None
    assert found["blocks"][1]["same_as"] == "layers.0"


def test_html_stands_alone(optimized, models, tmp_path):
    text = optimized.report.to_html(tmp_path / "report.html").read_text(encoding="utf-8")
    assert "layers.0" in text
    assert "and 1 alike" in text
    assert "kept for backward" in text
    assert "http" not in text
    assert "src=" not in text
    text = hexa_fx.explain(*models.refused()).to_html(tmp_path / "refused.html").read_text(encoding="utf-8")
    assert "super().forward(x - x.mean(0))" in text


def test_more_is_shown_as_more(optimized, tmp_path):
    from dataclasses import replace

    first = optimized.report.blocks[0]
    worse = replace(first.costs, after=replace(first.costs.after, moved=3 * first.costs.before.moved // 2))
    text = OptimizationReport((replace(first, costs=worse),)).to_html(tmp_path / "r.html").read_text(encoding="utf-8")
    assert "+50 %" in text
    assert '<div class="more"><i style="width:100.0%">' in text


def test_a_notebook_shows_the_report_without_touching_its_page(optimized):
    text = optimized.report._repr_html_()
    assert "layers.0" in text
    assert "<body" not in text
    sheet = text[text.index("<style>") + 7 : text.index("</style>")]
    selectors = re.findall(r"([^{}]+)\{", sheet)
    assert len(selectors) > 30
    assert not [name for name in selectors if ".hexa" not in name and not name.strip().startswith("@media")]


def test_plan_is_part_of_the_report(optimized, tmp_path):
    plan = plan_layers({"layers.0": ExpertShape(E, D, I)}, [1.0, 2.0], "model")
    report = OptimizationReport(optimized.report.blocks, 0.1, plan)
    assert plan.fingerprint in str(report)
    assert json.loads(report.to_json())["plan"]["capacities"] == [1.0, 2.0]
    assert plan.fingerprint in report.to_html(tmp_path / "r.html").read_text(encoding="utf-8")


def test_a_table_on_a_wide_terminal_and_lines_elsewhere(optimized, monkeypatch, capsys):
    console = Console(width=200, file=open("/dev/null", "w"), record=True)  # noqa: SIM115
    console.print(optimized.report.table())
    assert "layers.0" in console.export_text()
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    for columns, drawn in ((200, True), (100, False)):
        monkeypatch.setenv("COLUMNS", str(columns))
        optimized.report.print()
        text = capsys.readouterr().out
        assert "MoE blocks rewritten in" in text
        assert ("┃" in text) == drawn


# -- kernels -----------------------------------------------------------------------------------------------------------


def case(dtype: torch.dtype = torch.bfloat16, tokens: int = 4096, width: int = 1024, bias: bool = False) -> FfnCase:
    """A gated layer of 16 experts."""

    def empty(*shape: int, kind: torch.dtype = dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=kind, device="meta")

    operands = {
        "x": empty(tokens, width),
        "top_k_index": empty(tokens, 2, kind=torch.int64),
        "top_k_weights": empty(tokens, 2),
        "w1": empty(16, 1024, width),
        "w2": empty(16, width, 512),
    }
    biases = {"b1": empty(16, 1024), "b2": empty(16, width)} if bias else {}
    return FfnCase(FfnSpec("silu", "concat"), operands | biases)


@pytest.mark.parametrize(
    ("arch", "dtype", "family"),
    [(90, torch.bfloat16, "gather_gemm_sm90"), (80, torch.bfloat16, "gemm_sm80"), (90, torch.float32, "gemm_sm80")],
)
def test_kernels_are_chosen_without_a_gpu(arch, dtype, family):
    found = kernels_of(case(dtype), arch)
    by_node = {(kernel.direction, kernel.node): json.loads(kernel.spec) for kernel in found}
    up = by_node["forward", "h_a"]
    assert (up["family"], up["arch"], up["activation"]) == (family, arch, "silu")
    assert {kernel.operator for kernel in found} >= {
        "hexa.reindex",
        "hexa.esmm_act",
        "hexa.combine",
        "hexa.estmm",
        "hexa.esfk",
    }
    for kernel in found:
        assert kernel.fallback == ""
        assert f"// node     {kernel.node}" in kernel.source
        assert "hexa_kernel" in kernel.source


def test_few_rows_take_other_kernels():
    def up(tokens: int) -> dict:
        return next(json.loads(k.spec) for k in kernels_of(case(tokens=tokens), 90) if k.node == "h_a")

    assert dict(up(4)["options"])["swapped"]
    assert "swapped" not in dict(up(65536)["options"])


def test_operands_without_a_kernel_fall_back_with_a_reason():
    huge = case()
    huge.operands["w1"] = torch.empty(60000, 1024, 1024, dtype=torch.bfloat16, device="meta")
    huge.operands["w2"] = torch.empty(60000, 1024, 512, dtype=torch.bfloat16, device="meta")
    kernel = next(k for k in kernels_of(huge, 90) if k.operator == "hexa.reindex")
    assert "60000 experts" in kernel.fallback
    assert kernel.source == ""
    assert kernel.cached is None
    assert kernel.name == "hexa.reindex on torch's operators"


def test_biases_are_summed_by_a_kernel_of_their_own():
    assert any(k.operator == "hexa.ess" for k in kernels_of(case(bias=True), 80))


def test_collecting_leaves_nothing_behind():
    from hexa_fx.cuda import choosing as cuda_choosing
    from hexa_fx.cuda import fallback as cuda_fallback

    kernels_of(case(), 90)
    assert cuda_choosing.described_card() is None
    assert not cuda_fallback.fallbacks


def test_other_cards_are_refused_with_those_there_are():
    with pytest.raises(hexa_fx.errors.KernelError, match="75; give one of 80, 86, 89, 90"):
        kernels_of(case(), 75)


def test_cached_follows_the_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("HEXA_FX_CACHE_DIR", str(tmp_path))
    kernel = kernels_of(case(), 80)[0]
    if kernel.cached is None:
        pytest.skip("no compiler, so that nothing can be in the cache")
    assert kernel.cached is False
    from hexa_fx.codegen import KernelSpec, render
    from hexa_fx.jit import JitSettings, KernelCache, find_compiler
    from hexa_fx.jit.build import build_key

    source = render(KernelSpec.from_json(kernel.spec))
    cache, key = KernelCache(tmp_path), build_key(source, find_compiler(JitSettings.from_env()))
    with cache.lock(key):
        workspace = cache.workspace(key)
        (workspace / "kernel.cubin").write_bytes(b"cubin")
        cache.publish(key, workspace, {})
    assert kernel.cached is True


def test_kernels_are_those_of_some_tokens(optimized) -> None:
    with pytest.raises(InputError, match="tokens=-3: expected a whole number of at least 1"):
        optimized.report.blocks[0].kernels_on(90, tokens=-3)


def op_counts(graph: torch.fx.Graph) -> Counter[str]:
    return Counter(op_name(n) for n in graph.nodes if n.op not in ("placeholder", "output"))


STAGES = ("capture", "rewrite", "lower", "fuse_activation", "tile_rows")
BACKWARD = ("lower_backward", "fuse_activation_backward", "tile_rows_backward")


@pytest.fixture
def graphs(optimized):
    return optimized.graphs["layers.0"]


def test_one_snapshot_a_pass_with_what_changed(graphs):
    assert tuple(stage.name for stage in graphs.stages) == (*STAGES, *BACKWARD)
    assert graphs.stage("rewrite").graph.counts["hexa.moe_ffn"] == 1
    assert "hexa.moe_ffn +1" in graphs.stage("rewrite").difference
    assert graphs.stage("fuse_activation").difference == "getitem +2, hexa.activate -1, hexa.esmm -1, hexa.esmm_act +1"
    assert graphs.stage("rewrite").graph.counts == op_counts(graphs.rewritten.graph)
    assert graphs.stage("lower").graph.counts == op_counts(graphs.lowered.forward.graph)


def test_each_direction_is_lowered_once_for_a_gpu_and_once_for_a_cpu_where_somebody_listens(optimized, monkeypatch):
    """Costs are read off what was drawn for the listener, and are what they are without one."""
    case = optimized.graphs["layers.0"].taken.case
    alone, lowered = replace(case).work, Counter()
    for name in ("lower_forward", "lower_backward"):
        made = getattr(stages, name)
        monkeypatch.setattr(stages, name, lambda request, made=made, name=name: lowered.update([name]) or made(request))
    listened, seen = replace(case), Counter()
    with listening(lambda event: seen.update([event.name] if event.when == "after" else [])):
        assert listened.stages
        assert listened.work == alone
    assert lowered == {"lower_forward": 2, "lower_backward": 2}
    assert seen["fuse_activation"] == 4


def test_every_value_has_its_type(graphs):
    for stage in graphs.stages:
        if stage.name.startswith("tile_rows"):
            continue
        untyped = [node.name for node in stage.graph.nodes if node.kind != "output" and not node.types]
        assert not untyped, stage.name
    types = {node.name: str(node.type) for node in graphs.stage("lower").graph.nodes}
    assert (types["x"], types["h"], types["offs"], types["y"]) == ("f32[14, 8]", "f32[28, 12]", "i32[5]", "f32[14, 8]")
    backward = {node.name: str(node.type) for node in graphs.stage("fuse_activation_backward").graph.nodes}
    assert (backward["dx"], backward["dw1"], backward["db2"]) == ("f32[14, 8]", "f32[4, 12, 8]", "f32[4, 8]")


def test_roles_follow_the_mixture(graphs):
    captured = {role: [] for role in ("router", "dispatch", "up", "act", "down", "combine", "weight")}
    for node in graphs.stage("capture").graph.nodes:
        captured.setdefault(node.role, []).append(node.op)
    assert captured["up"] == captured["down"] == ["linear"] * 4
    assert captured["act"] == ["relu"] * 4
    assert set(captured["combine"]) == {"mul", "index_add_", "view"}
    assert {"softmax", "topk"} <= set(captured["router"])
    assert {"where", "eq"} <= set(captured["dispatch"])
    assert len(captured["weight"]) == 16
    lowered = {node.name: node.role for node in graphs.stage("lower").graph.nodes}
    assert [lowered[n] for n in ("reindex", "h", "a", "y_rows", "y")] == ["dispatch", "up", "act", "down", "combine"]


def test_links_lead_from_the_users_code_to_the_operators(graphs):
    def names(stage, *keys):
        return {n.name for n in graphs.stage(stage).graph.nodes if set(keys) & set(n.keys)}

    assert names("lower", "w:w1") == {"w1"}
    assert names("rewrite", "w:w1") == {"hexa_w1"}
    assert len(names("capture", "w:w1")) == 4
    assert names("rewrite", "t:top_k_index") == {"getitem_1"}
    assert names("lower", "t:top_k_index") == {"top_k_index"}
    assert names("rewrite", "n:softmax") == names("capture", "n:softmax") == {"softmax"}
    assert names("fuse_activation", "l:h", "l:a") == {"h_a", "h", "a"}
    assert "moe_ffn_default" in names("rewrite", "r:down")


def test_readable_code_shows_types_and_the_users_lines(graphs, capsys):
    text = graphs.print_readable("capture")
    assert capsys.readouterr().out.strip() == text.strip()
    line = next(line for line in text.splitlines() if "index_add_(0" in line)
    assert "# f32[14, 8]  models.py:" in line
    assert "= None" not in text


def test_an_unknown_block_is_named_with_those_there_are(optimized):
    with pytest.raises(KeyError, match=r"no rewritten block at 'layer\.0'; rewritten blocks: 'layers\.0', 'layers\.1'"):
        optimized.graphs["layer.0"]


def test_identical_blocks_share_their_snapshots_and_graphs(optimized):
    one, two = optimized.graphs["layers.0"], optimized.graphs["layers.1"]
    assert one.stages is two.stages
    assert one.rewritten is two.rewritten
    assert one.lowered is two.lowered
    assert [one.path, two.path] == ["layers.0", "layers.1"]


def test_operators_are_drawn_when_somebody_looks_or_listens(models):
    unseen = hexa_fx.optimize(models.make(), models.INPUT).graphs["layers.0"]
    with listening(lambda event: None):
        heard = hexa_fx.optimize(models.make(), models.INPUT).graphs["layers.0"]
    assert ["stages" in vars(graphs.case) for graphs in (unseen, heard)] == [False, True]
    assert unseen.stages == heard.stages


def test_graphs_copy_and_pickle(optimized):
    for other in (copy.deepcopy(optimized).graphs, pickle.loads(pickle.dumps(optimized.graphs))):
        assert isinstance(other, Graphs)
        assert other["layers.0"].stages == optimized.graphs["layers.0"].stages
        assert [k.spec for k in other["layers.0"].kernels(90)] == [
            k.spec for k in optimized.graphs["layers.0"].kernels(90)
        ]


def test_nothing_of_the_block_changes_by_looking(models):
    model = models.make()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    wanted = [parameter.requires_grad_(i % 2 == 0).requires_grad for i, parameter in enumerate(model.parameters())]
    state = torch.random.get_rng_state()
    hexa_fx.explain(model, models.INPUT)
    assert torch.equal(state, torch.random.get_rng_state())
    assert [parameter.requires_grad for parameter in model.parameters()] == wanted
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_failure_to_draw_keeps_no_block_from_being_rewritten(models, monkeypatch, caplog):
    def broken(*_):
        raise RuntimeError("no pencil")

    monkeypatch.setattr(inspector, "snapshots", broken)
    with caplog.at_level(logging.ERROR, logger="hexa_fx"):
        opt = hexa_fx.optimize(models.make(), models.INPUT)
    assert len(opt.report.rewritten) == 2
    assert opt.report.blocks[0].costs is None
    assert opt.graphs["layers.0"].stages == ()
    assert "no pencil" in caplog.text


ZOO = {
    "dense_stacked_einsum_fused": {"canonicalize"},
    "capacity_gshard_top2": set(),
    "body_pre_layernorm": {"no case"},
    "body_wider_output": set(),
    "shape_many_experts": set(),
    "loop_packed_side_by_side": set(),
}


@pytest.mark.parametrize("name", ZOO)
def test_other_idioms(name):
    variant = by_name(name)
    args, kwargs = variant.inputs(2, 7, torch.float32, 0)
    config = hexa_fx.HexaConfig(verify=False)
    opt = hexa_fx.optimize(variant.make(0).eval(), args or kwargs, config)
    (graphs,) = opt.graphs.values()
    names = [stage.name for stage in graphs.stages]
    assert ("canonicalize" in names) == ("canonicalize" in ZOO[name])
    if "no case" in ZOO[name]:
        assert names == ["capture", "rewrite"]
        assert graphs.case is None
        assert graphs.kernels(90) == ()
    else:
        assert isinstance(graphs.case.spec, FfnSpec)
    written = graphs.stage("canonicalize" if "canonicalize" in names else "capture").graph
    assert {"up", "act", "down", "combine"} <= {node.role for node in written.nodes}
    for stage in graphs.stages:
        assert graphs.to_svg(stage.name).count('class="box"') >= 3
    costs = opt.report.blocks[0].costs
    assert costs.before.flops >= costs.after.flops > 0
    assert costs.after.saved is not None
