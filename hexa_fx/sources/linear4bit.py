"""bitsandbytes' 4-bit parameters (`Params4bit`, the weights of `Linear4bit`), read without importing bitsandbytes.

Such a parameter holds the codes of a matrix, in a tensor of any dtype, and a ``quant_state`` with the scales. Scales that are
quantised themselves are read in float32, in which bitsandbytes multiplies by them.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hexa_fx.contexts import items_set
from hexa_fx.formats.four_bit import NF4
from hexa_fx.formats.quantized_weight import QuantizedWeight
from hexa_fx.ir import PythonRead, RewrittenBlock
from hexa_fx.isolation.lookup import lookup
from hexa_fx.isolation.read_values import IsA
from hexa_fx.isolation.torch_state import autocast_off
from hexa_fx.torch_private import _is_any_autocast_enabled

_STATE = ("absmax", "shape", "code", "blocksize", "quant_type", "dtype", "offset", "state2")
_PROBES = 8
"""Inputs with a single one, of which the results are columns of the weight."""


class OtherNumbers(Exception):
    """A module's own forward gives something else than the numbers that we read."""


def is_four_bit(parameter: Any) -> bool:
    """Whether a parameter is, or is to become, one of codes."""
    return isinstance(parameter, Tensor) and "quant_state" in getattr(parameter, "__dict__", ())


def is_linear(module: Any) -> bool:
    """Whether a module is an `nn.Linear` whose weight is one of codes."""
    return isinstance(module, nn.Linear) and is_four_bit(module._parameters.get("weight"))


def why_not(parameter: Any) -> str:
    """Why the codes of a parameter are not read; empty if they are."""
    state = parameter.quant_state
    if state is None:
        return "not quantised yet: move the model to its device first"
    if missing := [name for name in _STATE if not hasattr(state, name)]:
        return f"of a version whose quant_state has no {missing[0]}"
    if state.quant_type != "nf4" or state.blocksize != NF4.block:
        return f"{state.quant_type} in blocks of {state.blocksize}; read is nf4 in blocks of {NF4.block}"
    return NF4.why_not((1, *state.shape)) if len(state.shape) == 2 else f"of shape {tuple(state.shape)}"


def codes_of(parameter: Any) -> Tensor:
    """(N, K / 2), uint8, in the parameter's own memory."""
    rows, columns = parameter.quant_state.shape
    codes: Tensor = parameter.data.detach().reshape(-1).view(torch.uint8)
    return codes.view(rows, columns // 2)


def scales_of(state: Any) -> Tensor:
    """One in float32 for every block, in order."""
    if state.state2 is None:
        return state.absmax.float().reshape(-1)  # type: ignore[no-any-return]
    codes, nested = state.absmax.reshape(-1), state.state2
    of_each = nested.absmax.float().repeat_interleave(nested.blocksize)[: codes.numel()]
    return nested.code.float()[codes.int()] * of_each + state.offset  # type: ignore[no-any-return]


def read(parameter: Any) -> QuantizedWeight:
    """A matrix as a packed weight of one expert, (1, N, K)."""
    state = parameter.quant_state
    return QuantizedWeight(codes_of(parameter)[None], [scales_of(state)[None]], NF4.name, state.dtype)


def repeated(parameters: Sequence[Any], experts: int) -> QuantizedWeight:
    """The rows of some matrices as the weight of each of so many experts, (E, N, K), in the memory of one."""
    each = [read(parameter) for parameter in parameters]
    codes = torch.cat([weight.packed for weight in each], 1)
    scales = torch.cat([weight.scales[0] for weight in each], 1)
    made = codes.expand(experts, -1, -1), [scales.expand(experts, -1)]
    return QuantizedWeight(*made, NF4.name, each[0].dtype)


@contextmanager
def as_dense(block: nn.Module, dtype: torch.dtype | None) -> Iterator[int]:
    """A context in which the modules below a block whose codes are read are `nn.Linear` with the numbers that these stand for.

    Yields how many these are.

    Args:
        dtype: of the rows that these modules are given, whatever their codes were made of; None: of that.

    Raises:
        OtherNumbers: a module's own forward does not give what follows from these.
    """
    places = [
        (owner, name, child)
        for owner in block.modules()
        for name, child in owner._modules.items()
        if child is not None and is_linear(child) and not why_not(child.weight)
    ]
    made = {id(linear): _dense(linear, dtype) for _, _, linear in places}
    with items_set((owner._modules, name, made[id(linear)]) for owner, name, linear in places):
        yield len(places)


def why_not_in(block: nn.Module, form: RewrittenBlock, reads: Sequence[PythonRead]) -> str:
    """Why a rewritten block cannot run with codes in place of the numbers that it was made with; empty if it can.

    Args:
        reads: what the recorded run read.
    """
    named = dict(block.named_parameters(remove_duplicate=False))
    for names in ([name for part in weight.parts for name in part] for weight in form.packed):
        codes = [name for name in names if is_four_bit(named.get(name))]
        dense = next((name for name in names if name not in codes), "")
        if codes and dense:
            return (
                f"{codes[0]} is a 4-bit weight and {dense}, which is read together with it, a dense one; experts are rewritten "
                "if both are quantised, or neither"
            )
    got = (str(node.target) for node in form.graph.nodes if node.op == "get_attr")
    alone = next((name for name in got if is_four_bit(named.get(name))), "")
    if alone:
        return f"{alone} is a 4-bit weight, which is read as one of a list of experts only"
    by_others = (str(read) for read in reads if read.steps == ("weight",) and read.scopes - {read.root})
    asked = next((name for name in by_others if is_four_bit(named.get(name))), "")
    return f"code asks for {asked}, which holds codes and not the numbers that they stand for" if asked else ""


def with_kinds(block: nn.Module, reads: Sequence[PythonRead]) -> tuple[PythonRead, ...]:
    """What runs in `as_dense` read, with the modules' own class and forward."""
    return tuple(_of_own(block, read) if read.value in _OF_LINEAR and not read.is_global else read for read in reads)


class _InItsOwnDtype(nn.Linear):
    """Gives the dtype that it is given, under autocast too, as modules of codes do."""

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(rows, self.weight, self.bias).to(rows.dtype)


_OF_LINEAR = tuple(of for kind in (nn.Linear, _InItsOwnDtype) for of in (kind, IsA(kind), kind.forward))


def _of_own(block: nn.Module, read: PythonRead) -> PythonRead:
    is_itself = isinstance(read.value, IsA)
    found = functools.reduce(lookup, read.steps if is_itself else read.steps[:-1], block.get_submodule(read.root))
    if not is_linear(found):
        return read
    kind = type(found)
    return dataclasses.replace(read, value=(kind, IsA(kind), kind.forward)[_OF_LINEAR.index(read.value) % 3])


def of_numbers(tensor: Tensor) -> Tensor:
    """A tensor; of codes one without data of the matrix that they stand for."""
    state: Any = tensor.__dict__["quant_state"] if is_four_bit(tensor) else None
    return tensor if state is None else torch.empty(shape_of(tensor), dtype=state.dtype, device="meta")


def shape_of(tensor: Any) -> tuple[int, ...]:
    """Of a tensor, or of the matrix that codes stand for."""
    return tuple(getattr(tensor.quant_state, "shape", tensor.shape) if is_four_bit(tensor) else tensor.shape)


def in_rows(module: Any) -> None:
    """Takes back what bitsandbytes does to weights where a CPU has its own instructions for them: it does so to save them."""
    if getattr(module.weight.quant_state, "packing_format_for_cpu", False):
        module.state_dict()


@contextmanager
def trained(block: nn.Module) -> Iterator[None]:
    """A context in which modules of codes below a block are in train mode: in eval mode bitsandbytes may move codes on a CPU."""
    moved = [module for module in block.modules() if is_linear(module) and not module.training]
    with items_set((vars(module), "training", True) for module in moved):
        yield


def _dense(linear: Any, dtype: torch.dtype | None) -> nn.Linear:
    in_rows(linear)
    codes, bias = read(linear.weight), linear.bias
    weight = QuantizedWeight(codes.packed, codes.scales, codes.format, dtype or codes.dtype).expert(0)
    kind = _InItsOwnDtype if _is_any_autocast_enabled() else nn.Linear
    made = kind(weight.shape[1], weight.shape[0], bias is not None, device="meta")
    made._parameters["weight"] = nn.Parameter(weight, requires_grad=False)
    made._parameters["bias"] = bias
    made.train(linear.training)
    _compare(linear, made)
    return made


def _compare(linear: Any, made: nn.Linear) -> None:
    """Compares some columns with what the module itself gives."""
    dtype = linear.compute_dtype or made.weight.dtype
    places = torch.linspace(0, made.in_features - 1, _PROBES, device=made.weight.device).long()
    rows = F.one_hot(places, made.in_features).to(dtype).requires_grad_()  # no forward for inference, which moves codes
    decided = linear.compute_dtype, linear.compute_type_is_set
    with autocast_off():
        found = linear(rows).detach()
    linear.compute_dtype, linear.compute_type_is_set = decided
    bias = None if made.bias is None else made.bias.to(dtype)
    with autocast_off():
        expected = F.linear(rows, made.weight.to(dtype), bias).detach()
    kinds = dtype, made.weight.dtype, linear.weight.quant_state.dtype  # the module may unpack to any of these
    eps = max(torch.finfo(kind).eps for kind in kinds)
    limit = 8 * eps * float(expected.abs().max()) if expected.numel() else 0.0
    if not torch.allclose(found, expected, rtol=0, atol=limit):
        raise OtherNumbers(
            f"a {type(linear).__name__} gives other numbers than hexa_fx reads from its weight; please report this, with the "
            "version of bitsandbytes"
        )
