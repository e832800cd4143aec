"""Graphs for people, and what is measured for them, put nothing into the user's modules."""

import torch
from torch import nn

import hexa_fx
from tests.detect.mixture import D, Mixture


class Act(nn.Module):
    """Its call stays a call, and its buffer is asked before that."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.zeros((), dtype=torch.long), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2 if self.steps < 5 else x * 3


class Stepping(Mixture):
    def __init__(self) -> None:
        super().__init__()
        self.scale = Act()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.mix(self.scale(x) if self.scale.steps < 7 else x)[2]


def test_a_buffer_in_a_module_that_is_called_stays_what_it_is() -> None:
    block, x = Stepping(), torch.randn(12, D)
    saved, buffer = list(block.state_dict()), block.scale.steps
    opt = hexa_fx.optimize(block, x, hexa_fx.HexaConfig(own_code_when_small=False))
    assert opt.report.blocks[0].status == "rewritten"
    rewritten = opt.graphs[""].rewritten.graph
    read, called = ({str(n.target) for n in rewritten.find_nodes(op=op)} for op in ("get_attr", "call_module"))
    assert "scale.steps" in read
    assert "scale" in called
    for model in (block, opt):
        assert model.scale.steps is buffer
        assert list(model.state_dict()) == saved
    for steps in (0, 5, 7):
        buffer.fill_(steps)
        torch.testing.assert_close(opt(x), block(x))
