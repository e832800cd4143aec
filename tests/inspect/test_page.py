"""Pages of graphs in a browser, what is drawn where, what notebooks show, and models that are spread over devices."""

import importlib.util
import json
import re
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from html import unescape
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from PIL import Image
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from typer.testing import CliRunner

import hexa_fx
from hexa_fx.cli import app
from hexa_fx.errors import InputError
from hexa_fx.graphs import Graphs
from hexa_fx.inspection.labels import place_labels
from hexa_fx.inspection.layout import BOX_HEIGHT, lay_out
from hexa_fx.inspection.picture import picture_of
from hexa_fx.inspection.view import GraphView, NodeView, TensorType
from hexa_fx.inspection.work import flops_of, moved_bytes
from hexa_fx.ir import SourceLocation
from hexa_fx.passes.partition.plan_layers import plan_layers
from hexa_fx.plan import ExpertShape, LayerPlan, Plan
from hexa_fx.report import with_plan
from tests.inspect.models import INPUT, Model
from tests.zoo.registry import VARIANTS

_spec = importlib.util.spec_from_file_location("inspect_browser", Path(__file__).with_name("browser.py"))
browser = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(browser)

needs_chromium = pytest.mark.skipif(
    browser.find() is None, reason="no Chromium on this machine: apt-get install chromium"
)


@pytest.fixture(scope="module")
def page(optimized, tmp_path_factory) -> Path:
    return optimized.graphs.to_html(tmp_path_factory.mktemp("page") / "graphs.html", 90, "tiny")


def pane(text: str, side: str) -> str:
    """What one side shows."""
    start = re.search(rf'<section class="pane[^"]*" id="{side}"', text).start()
    return text[start : text.index("</section>", start)]


def boxes(text: str, marked: str = "") -> set[str]:
    """Names of the boxes in a piece of the page, all or those with a class."""
    found = re.findall(r'<g class="(box[^"]*)"[^>]*data-node="([^"]*)"', text)
    return {unescape(name) for classes, name in found if not marked or marked in classes.split()}


def test_page_reads_nothing_from_the_network(page):
    text = page.read_text(encoding="utf-8").replace("http://www.w3.org/2000/svg", "")
    assert not re.search(r"""(src|href)=|@import|url\((?!["']?#)|https?://""", text.split('id="data"')[0])
    assert text.count("<svg xmlns") == len(set(re.findall(r'data-stage="(\w+)"', text)))
    assert "</script>" not in text.split('id="data">')[1].split("</script>")[0]


def test_nothing_to_show_is_said(tmp_path):
    with pytest.raises(InputError, match="no block was rewritten"):
        Graphs({}).to_html(tmp_path / "page.html")


@needs_chromium
def test_both_graphs_are_there(page, tmp_path):
    text = browser.dom(page, "", tmp_path)
    assert 'data-ready="yes"' in text
    assert {"linear_1", "relu", "index_add_", "topk"} <= boxes(pane(text, "left"))
    assert "moe_ffn_default" in boxes(pane(text, "right"))
    assert "relu" not in boxes(pane(text, "right"))
    assert "f32[14, 8]" in pane(text, "left")
    assert "f32[4, 12, 8]" in pane(text, "right")
    assert "×4" in pane(text, "left")
    passes = re.findall(r'<button data-stage="(\w+)"', text)
    assert passes[:4] == ["capture", "rewrite", "lower", "fuse_activation"]
    assert "layers.0 and 1 alike" in text
    assert re.findall(r'<div class="group"><small>([^<]*)', text) == ["the block", "forward ↓", "backward ↑"]
    totals = re.findall(r"([\d.]+ kFLOP|[\d.]+ kB)", text[text.index('<div id="score">') : text.index("</section>")])
    assert totals[0] == "10.8 kFLOP"  # 14 tokens, two experts each, 8 x 12 both ways; without the router
    assert f"<b>{totals[0]}</b>" in pane(text, "left")
    assert f"<b>{totals[1]}</b>" in pane(text, "left")
    assert "10.8 kFLOP" in pane(text, "right")  # where the router is a module
    assert 'class="tok-k">def<' in pane(text, "left")


CLICKS = [  # what the sides show, where the click is, what lights up on the other side
    ("capture", "rewrite", "right", "hexa_w1", {"experts_0_up_weight"}),
    ("capture", "rewrite", "right", "topk", {"topk"}),
    ("capture", "lower", "left", "relu", {"a"}),
    ("capture", "lower", "right", "y", {"mul", "index_add_", "view"}),
    ("lower", "fuse_activation", "left", "h", {"h_a"}),
    ("lower", "lower_backward", "left", "h", {"h"}),
]


@needs_chromium
def test_a_click_lights_the_counterpart(page, tmp_path):
    script = f"""
        return {json.dumps([click[:4] for click in CLICKS])}.map(([left, right, side, node]) => {{
            show("left", left);
            show("right", right);
            boxOf(side, node).dispatchEvent(new MouseEvent("click", {{bubbles: true}}));
            const marked = (s, mark) => boxes(s).filter(b => b.classList.contains(mark)).map(b => b.dataset.node);
            return [marked(other(side), "same"), marked(side, "on")];
        }});"""
    found = browser.evaluate(page, script, tmp_path)
    for (*_, clicked, lit), (same, on) in zip(CLICKS, found, strict=True):
        assert set(same) == lit
        assert on == [clicked]


@needs_chromium
def test_a_click_says_what_a_box_is_and_a_second_shows_its_cuda(page, tmp_path):
    text = browser.dom(page, "right=lower&node=right:h&source=0", tmp_path)
    detail = text[text.index('id="detail"') : text.index("</footer>")]
    assert "hexa.esmm" in detail
    assert "5.4 kFLOP" in detail
    assert "esmm_act · forward" in detail
    assert re.search(r"models\.py:\d+", detail)
    under = re.findall(r'<div class="(\w+)"><h3>[^<]*<small>[^<]*(capture|lower)', detail)
    assert under == [
        ("other", "capture"),
        ("chosen", "lower"),
    ]  # each below its own graph, though the click was on the right
    drawer = unescape(re.sub("<[^>]+>", "", text[text.index('<aside id="drawer"') : text.index("</aside>")]))
    assert "__global__" in drawer
    assert "hexa_kernel" in drawer
    assert "hexa_fx/kernels/gemm_sm80.cuh" in drawer
    assert not re.search(r'<aside id="drawer"[^>]*hidden', text)


@needs_chromium
@pytest.mark.parametrize("size", [(1440, 900), (390, 844)])
def test_fit_shows_all_of_a_graph_and_nothing_is_cut_off(page, tmp_path, size):
    script = """
        const found = {};
        for (const side in panes) {
            activate(side);
            for (const stage of data[block].stages) {
                show(side, stage.name);
                const view = panes[side].querySelector(".view");
                const size = parseFloat(getComputedStyle(boxes(side)[0].querySelector("text")).fontSize) * scales[side];
                fit(side);
                const over = view.scrollWidth > view.clientWidth || view.scrollHeight > view.clientHeight;
                found[`${side} ${stage.name}`] = [over, size];
            }
        }
        return [found, document.documentElement.scrollWidth, innerWidth];"""
    found, width, window = browser.evaluate(page, script, tmp_path, size)
    assert width <= window == size[0]
    for name, (over, text) in found.items():
        assert not over, name
        assert text >= 7.5, name
        assert text >= 10 or size[0] < 500, name


@needs_chromium
def test_blocks_that_are_left_are_named_and_nothing_is_wider_than_a_telephone(tmp_path):
    (refused,) = (variant for variant in VARIANTS if variant.name == "refuse_rolled")
    (x,), _ = refused.inputs(2, 7, torch.float32, 0)
    both = nn.Sequential(refused.make(0), nn.Linear(x.shape[-1], INPUT.shape[-1]), Model())
    place = hexa_fx.optimize(both, x).graphs.to_html(tmp_path / "left.html")
    script = """
        const widths = data[block].stages.map(stage => { show("right", stage.name); return document.documentElement.scrollWidth; });
        return [Math.max(...widths), document.getElementById("left-alone").textContent];"""
    width, said = browser.evaluate(place, script, tmp_path, (390, 844))
    assert width == 390
    assert "1 block left as it is" in said
    assert "roll inside the experts mixes rows of different tokens" in said


@needs_chromium
def test_keys_lead_through_the_graphs(page, tmp_path):
    script = """
        const press = key => document.activeElement.dispatchEvent(new KeyboardEvent("keydown", {key, bubbles: true}));
        const at = () => `${active}:${document.activeElement.dataset.node}`;
        const stops = [...document.querySelectorAll("#left .box")].filter(b => b.tabIndex === 0).length;
        focusBox("left", boxOf("left", "softmax"));
        const trail = [at()];
        for (const key of ["ArrowDown", "ArrowUp", "x", "ArrowRight"]) { press(key); trail.push(at()); }
        press("Enter");
        const pinned = [kept, detail.hidden];
        keep("right", boxOf("right", "moe_ffn_default"));
        detail.querySelector(".kernels button").click();
        const inside = drawer.contains(document.activeElement) && document.querySelector("main").inert;
        press("Escape");
        const outside = drawer.hidden && !document.querySelector("main").inert;
        press("Escape");
        press("]");
        return {stops, trail, pinned, inside, outside, released: detail.hidden, right: shown.right,
                names: boxes("left").every(b => b.getAttribute("aria-label"))};"""
    found = browser.evaluate(page, script, tmp_path)
    assert found["stops"] == 1
    assert found["trail"][:4] == ["left:softmax", "left:topk", "left:softmax", "right:softmax"]
    assert found["trail"][4].startswith("right:")
    assert found["pinned"][1] is False
    assert found["inside"]
    assert found["outside"]
    assert found["released"] is True
    assert found["right"] == "lower"
    assert found["names"]


@needs_chromium
def test_dark_is_dark_and_legible(page, tmp_path):
    script = """
        const light = c => { const [r, g, b] = c.match(/[0-9.]+/g).map(Number); return (0.3 * r + 0.6 * g + 0.1 * b) / 255; };
        const seen = theme => {
            themes.choose(theme);
            const fills = boxes("left").map(b => light(getComputedStyle(b.querySelector("rect")).fill));
            return [light(getComputedStyle(document.body).backgroundColor), Math.min(...fills), Math.max(...fills),
                    light(getComputedStyle(boxes("left")[0].querySelector("text")).fill),
                    light(getComputedStyle(document.querySelector("#left .code")).color)];
        };
        return [seen("light"), seen("dark")];"""
    bright, dark = browser.evaluate(page, script, tmp_path)
    assert bright[0] > 0.9
    assert bright[1] > 0.8
    assert max(bright[3:]) < 0.2
    assert dark[0] < 0.1
    assert dark[2] < 0.25
    assert min(dark[3:]) > 0.8


@needs_chromium
def test_the_picture_is_not_blank(page, tmp_path):
    shot = browser.screenshot(page, "node=right:moe_ffn_default", tmp_path, (800, 600))
    with Image.open(shot) as picture:
        assert picture.size == (800, 600)
        for left in (0, 400):
            colours = picture.convert("RGB").crop((left, 160, left + 400, 440)).getcolors(2**17)
            assert len(colours) > 30  # boxes in several colours, text, arrows


def test_a_kernel_s_key_is_in_its_text(optimized):
    for kernel in optimized.graphs.kernels(90):
        assert not kernel.source or f"// key      {kernel.name.split()[-1]};" in kernel.source


@pytest.fixture
def graphs(optimized):
    return optimized.graphs["layers.0"]


def test_a_loop_is_drawn_once_and_says_how_often_it_ran(graphs):
    picture = picture_of(graphs.stage("capture").graph)
    times = {box.title: box.times for box in picture.boxes}
    assert times["relu"] == times["index_add_"] == times["where"] == 4
    assert times["softmax"] == 1
    assert sum(box.title == "linear" for box in picture.boxes) == 3  # the router's, up, down
    assert times["experts.0.up.weight"] == 4
    assert not any("experts.1." in box.title for box in picture.boxes)
    (relu,) = (box for box in picture.boxes if box.title == "relu")
    assert set(relu.members) == {"relu", "relu_1", "relu_2", "relu_3"}


def test_sizes_are_left_out_and_tuples_are_several_arrows(graphs):
    picture = picture_of(graphs.stage("lower").graph)
    assert {"size", "getitem"}.isdisjoint(box.title for box in picture.boxes)
    labels = {(a.source, a.target): a.label for a in picture.arrows if a.source == "reindex"}
    assert labels["reindex", "h"] in ("v i32[28]", "offs i32[5]")
    assert {a.name for a in picture.arrows if a.source == "reindex"} == {"v", "inv", "offs"}


def chain(*ops: str) -> GraphView:
    """x -> op -> op ..., each of one value."""
    kind = TensorType("f32", (2,), 8)
    nodes = [NodeView("x", "input", "x", types=(kind,))]
    for i, op in enumerate(ops):
        nodes.append(NodeView(f"n{i}", "call", op, inputs=(nodes[-1].name,), types=(kind,)))
    return GraphView(tuple(nodes))


@pytest.mark.parametrize(
    ("ops", "drawn"),
    [
        ("a b c", [("a", 1), ("b", 1), ("c", 1)]),
        ("a a b", [("a", 1), ("a", 1), ("b", 1)]),
        ("a a a b", [("a", 3), ("b", 1)]),
        ("r a b a b a b z", [("r", 1), ("a", 3), ("b", 3), ("z", 1)]),
        ("a b c d a b c d", [("a", 2), ("b", 2), ("c", 2), ("d", 2)]),
        (
            "e b c d e b d e b c d z",
            [("e", 3), ("b", 3), ("c", 2), ("d", 3), ("z", 1)],
        ),  # one run leaves out what an if does
        ("", []),
    ],
)
def test_what_counts_as_a_loop(ops, drawn):
    picture = picture_of(chain(*ops.split()))
    assert [(box.title, box.times) for box in picture.boxes if box.kind == "call"] == drawn


def test_a_first_run_with_another_role_is_of_the_loop():
    """Where ``out[token] += y`` reads, the first run reads zeros, and the others what was summed."""
    runs = chain(*"take add take add take add".split())
    nodes = [replace(node, where=SourceLocation("moe.py", 1), role="combine") for node in runs.nodes]
    nodes[1] = replace(nodes[1], role="dispatch")
    assert [box.times for box in picture_of(GraphView(tuple(nodes))).boxes if box.kind == "call"] == [3, 3]


def test_checks_are_neither_drawn_nor_counted():
    """They compute nothing: ids go through one as they are."""
    checked = chain("require_experts", "hexa.moe_ffn")
    assert [(arrow.source, arrow.target) for arrow in picture_of(checked).arrows] == [("x", "n1")]
    assert (checked.counts, checked.size) == ({"hexa.moe_ffn": 1}, "1 operator")


def test_boxes_do_not_overlap_and_arrows_point_down(graphs):
    for stage in graphs.stages:
        picture = picture_of(stage.graph)
        layout = lay_out(picture, lambda name: 90.0)
        places = list(layout.places.items())
        for i, (_, a) in enumerate(places):
            assert a.width / 2 <= a.x <= layout.width
            assert BOX_HEIGHT / 2 <= a.y <= layout.height
            for _, b in places[i + 1 :]:
                assert abs(a.x - b.x) >= (a.width + b.width) / 2 or abs(a.y - b.y) >= (a.height + b.height) / 2
        for route in layout.routes:
            assert all(above[1] < below[1] for above, below in zip(route.points, route.points[1:]))


def test_names_on_arrows_cover_nothing(graphs):
    for stage in graphs.stages:
        layout = lay_out(picture_of(stage.graph), lambda name: 90.0)
        labels = place_labels(layout)
        for i, label in enumerate(labels):
            for other in (*labels[i + 1 :], *layout.places.values()):
                assert not label.covers(other.x, other.y, other.width, other.height), (stage.name, label.arrow)
    lowered = lay_out(picture_of(graphs.stage("lower").graph), lambda name: 90.0)
    assert {label.arrow.name for label in place_labels(lowered)} == {"v", "inv", "offs"}


def test_every_box_has_an_arrow(graphs):
    """`tile_rows` returns nothing: its results are written in place."""
    for stage in graphs.stages:
        picture = picture_of(stage.graph)
        touched = {end for arrow in picture.arrows for end in (arrow.source, arrow.target)}
        assert {box.name for box in picture.boxes} <= touched, stage.name
    assert "output" not in {box.name for box in picture_of(graphs.stage("tile_rows").graph).boxes}


def test_svg_is_well_formed_and_stands_alone(graphs):
    for stage in graphs.stages:
        text = graphs.to_svg(stage.name)
        root = ElementTree.fromstring(text)
        assert root.tag.endswith("svg")
        assert "<style>" in text
        assert "http" not in text.replace("http://www.w3.org/2000/svg", "")
        drawn = {g.get("data-node") for g in root.iter() if g.get("class") == "box"}
        for arrow in (g for g in root.iter() if g.get("class") == "arrow"):
            assert {arrow.get("data-from"), arrow.get("data-to")} <= drawn


def test_dot_names_every_box_once(graphs):
    text = graphs.to_dot("lower")
    assert text.startswith('digraph "layers.0 lower" {')
    assert text.endswith("}")
    assert len(re.findall(r'^  "h" \[', text, re.MULTILINE)) == 1
    assert '"reindex" -> "h"' in text
    assert text.count("{") == text.count("}")


def test_special_characters_survive():
    odd = GraphView((NodeView("x", "input", "x"), NodeView("y", "call", "f", detail="<a & 'b'>\n", inputs=("x",))))
    from hexa_fx.inspection.svg import dot_of, svg_of

    ElementTree.fromstring(svg_of(odd))
    assert "\\n" in dot_of(odd, 'say "hi"')
    assert 'digraph "say \\"hi\\""' in dot_of(odd, 'say "hi"')


def test_flops_and_bytes_by_hand():
    import torch

    x, w, y = torch.randn(5, 3), torch.randn(4, 3), torch.randn(5, 4)
    index = torch.tensor([0, 2])
    assert flops_of("linear", (), [x, w], [y]) == 2 * 5 * 3 * 4
    assert flops_of("einsum", ("tk,nk->tn",), [x, w], [y]) == 2 * 5 * 3 * 4
    assert flops_of("mul", (), [x, x], [x]) == 0
    assert moved_bytes("linear", [x, w], [y]) == 4 * (15 + 12 + 20)
    assert moved_bytes("reshape", [x], [x]) == 0
    assert moved_bytes("getitem", [x, index], [x[index]]) == 2 * 24 + 16
    assert moved_bytes("index_add_", [x, index, x[index]], [x]) == 2 * 24 + 16 + 24


def test_graphs_come_in_a_frame_of_their_own(optimized):
    for shown in (optimized.graphs, optimized.graphs["layers.0"]):
        (inside,) = re.findall(r'^<iframe srcdoc="([^"]*)"', shown._repr_html_())
        assert 'data-stage="rewrite"' in unescape(inside)
    assert "no block was rewritten" in Graphs({})._repr_html_()


def test_a_plan_is_a_table():
    plan = plan_layers({"a<b": ExpertShape(4, 8, 12)}, [1.0, 2.0], "model")
    text = plan._repr_html_()
    assert plan.fingerprint in text
    assert f"<td>a&lt;b</td><td>model-centric</td><td>{list(plan.layers[0].shards)}</td>" in text


def test_the_gallery_leads_to_every_page(tmp_path):
    done = CliRunner().invoke(app, ["gallery", "--out", str(tmp_path / "pages"), "--types", "mixtral"])
    assert done.exit_code == 0, done.output
    index = (tmp_path / "pages" / "index.html").read_text(encoding="utf-8")
    links = re.findall(r'href="([^"]*)"', index)
    assert links == ["mixtral.html", "mixtral_report.html"]
    assert all((tmp_path / "pages" / link).stat().st_size > 1000 for link in links)
    assert CliRunner().invoke(app, ["gallery", "--out", str(tmp_path), "--types", ","]).exit_code == 2


@pytest.fixture
def spread(models, tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        yield hexa_fx.optimize_(models.make(), models.INPUT, mesh=mesh, strategy="model", capacities=None)
    finally:
        dist.destroy_process_group()


def test_plan_exchanges_and_graph(spread, tmp_path):
    report = spread.report
    assert report.plan == spread.partition.plan
    for block in report.blocks:
        assert block.collectives
    assert "exchanges: " in str(report)
    assert report.plan.fingerprint in str(report)
    assert "own code" not in str(report)  # which needs whole weights
    graphs = spread.graphs["layers.1"]
    names = [stage.name for stage in graphs.stages]
    assert names[:3] == ["capture", "rewrite", "partition"]
    roles = {node.op: node.role for node in graphs.stage("partition").graph.nodes}
    assert all(roles[op] == "collective" for op in report.blocks[1].collectives)
    assert 'data-role="collective"' in graphs.to_svg("partition")
    text = spread.graphs.to_html(tmp_path / "graphs.html", 90).read_text(encoding="utf-8")
    assert text.count('<template data-block="0"') == len(names)
    assert '<template data-block="1"' not in text  # identical blocks once


def test_costs_are_said_to_be_of_the_whole_block(models, tmp_path):
    model = hexa_fx.optimize(models.make(), models.INPUT)
    cut = ("all_gather_v", "all_gather_v", "wait", "reduce_scatter_v")
    shape = ExpertShape(4, 8, 12)
    plan = Plan(2, (LayerPlan("layers.0", "model_centric", shape, (8, 4)),), batch=(2, 1))
    report = with_plan(model.report, plan, {})
    report = replace(report, found=(replace(report.blocks[0], collectives=cut), *report.blocks[1:]))
    page = report.to_html(tmp_path / "report.html").read_text(encoding="utf-8")
    for text in (str(report), page):
        assert "(before it was spread over 2 devices)" in text
        assert "exchanges: 2 times all_gather_v, reduce_scatter_v" in text
        assert (
            "layers.0: model-centric (tokens travel, reduce_scatter), channels of every expert by rank h_i [8, 4]"
            in text
        )
    assert [block.devices for block in report.blocks] == [2, 1]
