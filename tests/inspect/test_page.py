"""The page of graphs in a real browser: both graphs are drawn, linked, and one click from the CUDA text."""

import importlib.util
import json
import re
from html import unescape
from pathlib import Path

import pytest
import torch
from PIL import Image
from torch import nn

import hexa_fx
from hexa_fx.errors import InputError
from hexa_fx.graphs import Graphs
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
    (refused,) = (variant for variant in VARIANTS if variant.name == "refuse_cumsum_tokens")
    (x,), _ = refused.inputs(2, 7, torch.float32, 0)
    both = nn.Sequential(refused.make(0), nn.Linear(x.shape[-1], INPUT.shape[-1]), Model())
    place = hexa_fx.optimize(both, x).graphs.to_html(tmp_path / "left.html")
    script = """
        const widths = data[block].stages.map(stage => { show("right", stage.name); return document.documentElement.scrollWidth; });
        return [Math.max(...widths), document.getElementById("left-alone").textContent];"""
    width, said = browser.evaluate(place, script, tmp_path, (390, 844))
    assert width == 390
    assert "1 block left as it is" in said
    assert "cumsum inside the experts mixes rows of different tokens" in said


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
