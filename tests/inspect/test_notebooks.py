"""What notebooks show of graphs and plans, and the gallery."""

import re
from html import unescape

from typer.testing import CliRunner

from hexa_fx.cli import app
from hexa_fx.graphs import Graphs
from hexa_fx.passes.partition.plan_layers import plan_layers
from hexa_fx.plan import ExpertShape


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
