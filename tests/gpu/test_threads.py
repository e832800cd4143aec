"""While one thread collects kernels, forward and backward in another launch theirs."""

import threading

import torch
from torch import Tensor

from hexa_fx.cuda import choosing
from hexa_fx.ir import FfnSpec
from hexa_fx.ops.moe_ffn import moe_ffn


def step(x: Tensor, index: Tensor, w1: Tensor, w2: Tensor) -> list[Tensor]:
    y = moe_ffn(x, index, None, w1, None, None, None, w2, None, FfnSpec("silu", "concat", "nk", "nk"))
    return [y, *torch.autograd.grad(y.float().square().sum(), (x, w1, w2))]


def test_a_training_step_beside_one_that_collects() -> None:
    shapes = ((64, 32), (4, 64, 32), (4, 32, 32))
    operands = [torch.randn(*s, device="cuda", dtype=torch.bfloat16, requires_grad=True) for s in shapes]
    index = torch.randint(0, 4, (64, 2), device="cuda")
    expected = step(operands[0], index, *operands[1:])
    found: list[list[Tensor]] = []
    with choosing.collect() as specs:
        step(operands[0], index, *operands[1:])
        collected = len(specs)
        thread = threading.Thread(target=lambda: found.append(step(operands[0], index, *operands[1:])))
        thread.start()
        thread.join()
        assert len(specs) == collected > 4
    for got, want in zip(found[0], expected, strict=True):
        assert (got - want).float().norm() < 0.01 * want.float().norm()
