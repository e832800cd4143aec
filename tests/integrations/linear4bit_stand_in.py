"""`Linear4bit` and `Params4bit` for where bitsandbytes is not installed: the attributes that it documents, and a slow forward."""

import copy
from types import SimpleNamespace

import torch
from torch import nn

from hexa_fx.formats import NF4, NF4_DOUBLE


class Params4bit(nn.Parameter):
    """Codes in one column, and a ``quant_state``."""

    def __new__(cls, data, state):
        made = torch.Tensor._make_subclass(cls, data, False)
        made.quant_state = state
        return made

    def __deepcopy__(self, memo):  # copies storages whole, each time, as bitsandbytes does
        return type(self)(copy.deepcopy(self.data), copy.deepcopy(self.quant_state))


def quantized(matrix, double):
    packed, scales, *nested = (NF4_DOUBLE if double else NF4).pack(matrix)
    code = torch.tensor(NF4.values, dtype=torch.float32, device=matrix.device)
    state = SimpleNamespace(
        absmax=scales, shape=matrix.shape, code=code, blocksize=64, quant_type="nf4", dtype=matrix.dtype, offset=None
    )
    state.state2 = None
    if double:
        absmax, state.offset, values = nested
        state.state2 = SimpleNamespace(absmax=absmax, code=values, blocksize=256)
    return Params4bit(packed.reshape(-1, 1), state)


def dequantized(parameter):
    state = parameter.quant_state
    halves = torch.stack((parameter.data >> 4, parameter.data & 15), 1).view(-1).int()
    scales = state.absmax
    if state.state2 is not None:
        scales = state.state2.code[scales.int()] * state.state2.absmax.repeat_interleave(256)[: len(scales)]
        scales = scales + state.offset
    return (state.code[halves] * scales.repeat_interleave(64)).view(state.shape).to(state.dtype)


class Linear4bit(nn.Linear):
    """Quantised when it is moved."""

    def __init__(self, inputs, outputs, bias=True, compute_dtype=None, compress_statistics=True, quant_type="nf4"):
        super().__init__(inputs, outputs, bias)
        self.compute_dtype, self.compute_type_is_set, self.double = compute_dtype, True, compress_statistics
        self.weight = quantized(self.weight.detach(), self.double)
        self.weight.quant_state.quant_type = quant_type

    def forward(self, x):
        rows = x if self.compute_dtype is None else x.to(self.compute_dtype)
        bias = None if self.bias is None else self.bias.to(rows.dtype)
        return nn.functional.linear(rows, dequantized(self.weight).to(rows.dtype), bias).to(x.dtype)
