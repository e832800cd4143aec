"""Registration: once, and nothing heavy before the first CUDA tensor."""

from __future__ import annotations

import inspect
import subprocess
import sys
from typing import Any, get_type_hints

import pytest

from hexa_fx.cuda.register import KERNELS, kernel, register
from hexa_fx.ops import fp8, fp8_quantizing, library, operands
from hexa_fx.ops.esmm_packed import EsmmPacked
from hexa_fx.ops.low_rank import EsmmActBackwardLowRank, EsmmActLowRank, EsmmLowRank
from hexa_fx.ops.low_rank_gradients import LowRankGradients
from hexa_fx.ops.packed_products import EsmmActBackwardPacked, EsmmActPacked, EsmmPackedLowRank
from hexa_fx.ops.sources_arguments import MoeFfnSources

LIGHT = """
import sys
import {first}
import hexa_fx.ops
from hexa_fx.ops import library
assert library.kernel_for("esmm", "cuda").__name__ == "esmm"
assert not any(name.startswith(("cutlass_library", "hexa_fx.jit", "hexa_fx.codegen")) for name in sys.modules)
"""


@pytest.mark.parametrize("first", ["hexa_fx.ops", "hexa_fx.cuda.register"])
def test_importing_the_operators_registers_kernels_and_imports_none(first: str) -> None:
    subprocess.run([sys.executable, "-c", LIGHT.format(first=first)], check=True, timeout=120)


RECORDS = {
    "activate_backward": operands.ActivateBackward,
    "esmm": operands.Esmm,
    "esmm_act": operands.EsmmAct,
    "esmm_act_backward": operands.EsmmActBackward,
    "esmm_low_rank": EsmmLowRank,
    "esmm_act_low_rank": EsmmActLowRank,
    "esmm_act_backward_low_rank": EsmmActBackwardLowRank,
    "low_rank_gradients": LowRankGradients,
    "esmm_packed": EsmmPacked,
    "esmm_packed_low_rank": EsmmPackedLowRank,
    "esmm_act_packed": EsmmActPacked,
    "esmm_act_backward_packed": EsmmActBackwardPacked,
    "estmm": operands.Estmm,
    "esfk": operands.Esfk,
    "quantize_rows_fp8": fp8_quantizing.QuantizeRowsFp8,
    "quantize_columns_fp8": fp8_quantizing.QuantizeColumnsFp8,
    "group_rows_fp8": fp8_quantizing.GroupRowsFp8,
    "quantize_weight_fp8": fp8_quantizing.QuantizeWeightFp8,
    "esmm_act_fp8": fp8.EsmmActFp8,
    "esmm_fp8": fp8.EsmmFp8,
    "combine_fp8": fp8.CombineFp8,
    "esmm_act_backward_fp8": fp8.EsmmActBackwardFp8,
    "estmm_fp8": fp8.EstmmFp8,
    "ess_fp8": fp8.EssFp8,
    "moe_ffn_sources": MoeFfnSources,
    "moe_ffn_sources_forward": MoeFfnSources,
}


def fields(record: Any) -> list[str]:
    """Those of the record that it begins with are its own."""
    base = [] if record._fields[0] != "base" else fields(get_type_hints(record)["base"])
    return [*base, *record._fields[bool(base) :]]


@pytest.mark.parametrize("name", RECORDS)
def test_a_record_has_the_fields_and_defaults_of_its_schema(name: str) -> None:
    arguments, record = library.overload(name)._schema.arguments, RECORDS[name]
    assert fields(record) == [argument.name for argument in arguments]
    defaults = {argument.name: argument.default_value for argument in arguments if argument.has_default_value()}
    assert defaults.items() <= record._field_defaults.items()


def test_every_kernel_takes_its_schemas_arguments() -> None:
    """By name, or the operands of a product as ``*args``, which it makes a record of."""
    register()
    for name in KERNELS:
        names = [argument.name for argument in library.overload(name)._schema.arguments]
        taken = list(inspect.signature(kernel(name)).parameters)
        if taken[-1] == "args":
            own, rest = taken[:-1], fields(RECORDS[name.removesuffix("_add")])
            assert names in ([*own, *rest], [*own, *rest[:-1]]), name
        else:
            assert taken == names, name
