"""The page of graphs in a real browser: both graphs are drawn, linked, and one click from the CUDA text."""

from __future__ import annotations

import importlib.util
import re
from html import unescape
from pathlib import Path

import pytest

from hexa_fx.errors import InputError
from hexa_fx.graphs import Graphs

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
    start = text.index(f'<section class="pane" id="{side}"')
    return text[start : text.index("</section>", start)]


def boxes(text: str, marked: str = "") -> set[str]:
    """Names of the boxes in a piece of the page, all or those with a class."""
    found = re.findall(r'<g class="(box[^"]*)"[^>]*data-node="([^"]*)"', text)
    return {unescape(name) for classes, name in found if not marked or marked in classes.split()}


def test_page_reads_nothing_from_the_network(page):
    text = page.read_text(encoding="utf-8").replace("http://www.w3.org/2000/svg", "")
    assert not re.search(r"""(src|href)=|@import|url\((?!["']?#)|https?://""", text.split('id="data"')[0])
    assert text.count("<svg") == len(set(re.findall(r'data-stage="(\w+)"', text)))
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


@needs_chromium
@pytest.mark.parametrize(
    ("place", "side", "lit"),
    [
        ("right=rewrite&node=right:hexa_w1", "left", {"experts_0_up_weight"}),
        ("right=rewrite&node=right:topk", "left", {"topk"}),
        ("right=lower&node=left:relu", "right", {"a"}),
        ("right=lower&node=right:y", "left", {"mul", "index_add_", "view"}),
        ("left=lower&right=fuse_activation&node=left:h", "right", {"h_a"}),
        ("left=lower&right=lower_backward&node=left:h", "right", {"h"}),
    ],
)
def test_a_click_lights_the_counterpart(page, tmp_path, place, side, lit):
    text = browser.dom(page, place, tmp_path)
    assert boxes(pane(text, side), "same") == lit
    assert len(boxes(pane(text, "left" if side == "right" else "right"), "on")) == 1


@needs_chromium
def test_a_click_says_what_a_box_is_and_a_second_shows_its_cuda(page, tmp_path):
    text = browser.dom(page, "right=lower&node=right:h&source=0", tmp_path)
    detail = text[text.index('id="detail"') : text.index("</footer>")]
    assert "hexa.esmm" in detail
    assert "5.4 kFLOP" in detail
    assert "esmm_act · forward" in detail
    assert re.search(r"models\.py:\d+", detail)
    drawer = unescape(re.sub("<[^>]+>", "", text[text.index('<aside id="drawer"') : text.index("</aside>")]))
    assert "__global__" in drawer
    assert "hexa_kernel" in drawer
    assert "hexa_fx/kernels/gemm_sm80.cuh" in drawer
    assert '<aside id="drawer">' in text  # no longer hidden


@needs_chromium
def test_the_picture_is_not_blank(page, tmp_path):
    shot = browser.screenshot(page, "node=right:moe_ffn_default", tmp_path, (800, 600))
    width, height, rows = browser.pixels(shot)
    assert (width, height) == (800, 600)
    step = len(rows[0]) // width
    middle = [rows[y] for y in range(160, 440, 3)]
    for half in (slice(0, width // 2 * step), slice(width // 2 * step, width * step)):
        colours = {row[half][i : i + 3] for row in middle for i in range(0, len(row[half]) - 2, step * 3)}
        assert len(colours) > 30  # boxes in several colours, text, arrows
