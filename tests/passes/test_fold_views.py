"""Views of views are folded where rewriting put them in, and only where nothing can be written in between."""

import pytest
import torch
import torch.fx

import hexa_fx
from hexa_fx.capture.functional import set_item
from hexa_fx.passes.rewrite import fold_rows, fold_views


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


def test_sorted_tokens_read_their_routing_as_it_is_given():
    """The routing of transformers' grouped experts is flattened by their code, which takes any number of ids a token."""
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_local_experts": 4, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 64}
    model = transformers.AutoModelForCausalLM.from_config(transformers.MixtralConfig(**sizes, **heads))
    opt = hexa_fx.optimize(model, {"input_ids": torch.randint(0, 64, (2, 16))})
    (graphs,) = opt.graphs.values()
    assert "reshape" not in graphs.stage("rewrite").graph.counts
    x = torch.randn(10, 32)
    for width in (2, 3, 1):
        ids, weights = torch.rand(10, 4).topk(width).indices, torch.rand(10, width)
        experts, original = (m.model.layers[0].mlp.experts for m in (opt, model))
        torch.testing.assert_close(experts(x, ids, weights), original(x, ids, weights))
    assert opt.report.blocks[0].calls == (3, 0, {}, 3)


def test_rows_that_inputs_already_are():
    graph = graph_of(("reshape", -1, 2), theirs=0)
    (x,) = graph.find_nodes(op="placeholder")
    assert not fold_rows(graph, {x: torch.ones(3, 2)}, {4})
    assert not fold_rows(graph, {x: torch.ones(2, 4)}, {2})
    assert fold_rows(graph, {x: torch.ones(5, 3, 2)}, {2}) == {x}
    assert len(graph.nodes) == 3
    assert fold_rows(graph, {x: torch.ones(3, 2)}, {2}) == {x}
    assert len(graph.nodes) == 2


class Given(torch.nn.Module):
    """Experts whose routing is made elsewhere, with as many of them as that says; the weights become a column."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = (torch.nn.Parameter(torch.randn(4, 8, 8)) for _ in range(2))

    def forward(self, x, ids, weights):
        h = torch.einsum("td,tkdi->tki", x, self.up[ids]).relu()
        return (torch.einsum("tki,tkid->tkd", h, self.down[ids]) * weights[..., None]).sum(1)


def test_another_number_of_experts_than_was_recorded_with():
    x = torch.randn(12, 8)
    given = {k: (x, torch.rand(12, 4).topk(k).indices, torch.rand(12, k)) for k in (2, 3, 1)}
    original = Given()
    opt = hexa_fx.optimize(original, given[2])
    assert opt.report.rewritten, opt.report
    for inputs in given.values():
        torch.testing.assert_close(opt(*inputs), original(*inputs))
    assert opt.report.blocks[0].calls.rewritten >= 2
