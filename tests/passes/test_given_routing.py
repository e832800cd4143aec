"""Routing that a block is given is read as it is, and other code runs where it has another number of ids a token."""

import pytest
import torch

import hexa_fx


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
