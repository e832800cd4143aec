"""Views of views are folded where rewriting put them in, and only where nothing can be written in between."""

from __future__ import annotations

import pytest
import torch
import torch.fx

import hexa_fx
from hexa_fx.capture.functional import set_item
from hexa_fx.passes.fold_views import fold_views


def graph_of(*steps: tuple[object, ...], theirs: int = 1) -> torch.fx.Graph:
    """x, then one call after the other; the first ``theirs`` are the user's."""
    graph = torch.fx.Graph()
    node = graph.placeholder("x")
    for number, (target, *args) in enumerate(steps):
        node = (graph.call_function if callable(target) else graph.call_method)(target, (node, *args))
        if number < theirs:
            node.meta["from"] = "recorded"
    graph.output(node)
    return graph


def run(graph: torch.fx.Graph, x: torch.Tensor) -> torch.Tensor:
    return torch.fx.GraphModule({}, graph)(x)


@pytest.mark.parametrize("first", [("reshape", -1), ("flatten",), ("contiguous",), ("view", -1)])
@pytest.mark.parametrize("transposed", [False, True])
def test_a_view_of_a_view_reads_the_source(first, transposed):
    x = torch.arange(6).reshape(3, 2)
    if transposed and first[0] != "view":
        x = torch.arange(6).reshape(2, 3).t()
    graph = graph_of(first, ("reshape", -1, 2))
    expected = run(graph, x)
    fold_views(graph)
    graph.eliminate_dead_code()
    assert [node.target for node in graph.find_nodes(op="call_method", target="reshape")] == ["reshape"]
    assert torch.equal(run(graph, x), expected)


@pytest.mark.parametrize("write", [("add_", 1), (set_item, 0, 7)])
def test_what_was_written_to_is_read_where_it_was(write):
    graph = graph_of(("reshape", -1), write, ("reshape", -1, 2), theirs=2)
    expected = run(graph, torch.arange(6).reshape(2, 3).t())  # the first reshape copies
    fold_views(graph)
    assert torch.equal(run(graph, torch.arange(6).reshape(2, 3).t()), expected)
    assert len(graph.find_nodes(op="call_method", target="reshape")) == 2


def test_the_users_own_views_stay():
    graph = graph_of(("reshape", -1), ("reshape", -1, 2), theirs=2)
    fold_views(graph)
    assert graph.find_nodes(op="call_method", target="reshape")[1].args[0].target == "reshape"


def test_sorted_tokens_read_their_routing_once():
    """The routing of transformers' grouped experts is flattened by their code."""
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_local_experts": 4, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 64}
    model = transformers.AutoModelForCausalLM.from_config(transformers.MixtralConfig(**sizes, **heads))
    opt = hexa_fx.optimize(model, {"input_ids": torch.randint(0, 64, (2, 16))})
    (graphs,) = opt.graphs.values()
    assert graphs.stage("rewrite").graph.counts["reshape"] == 2  # ids and weights
