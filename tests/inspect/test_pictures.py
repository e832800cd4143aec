"""What is drawn, and where: loops once, nothing over anything else, every arrow between boxes that are there."""

import re
import xml.etree.ElementTree as ElementTree
from dataclasses import replace

import pytest

from hexa_fx.inspection.labels import place_labels
from hexa_fx.inspection.layout import BOX_HEIGHT, lay_out
from hexa_fx.inspection.picture import picture_of
from hexa_fx.inspection.view import GraphView, NodeView, TensorType
from hexa_fx.inspection.work import flops_of, moved_bytes
from hexa_fx.ir import SourceLocation


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
