"""The table of operands: schemas stay what they are, and what follows from it is what kernels do and take."""

from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.utils._pytree import tree_map_only

from hexa_fx import ops
from hexa_fx.errors import InputError
from hexa_fx.ops import library
from tests.ops.calls import Call, calls

CALLS: list[Call] = list(calls())
FREE = {
    "activate": "h 0, h 1",
    "activate_backward": "offs 0",
    "combine": "offs 0, y 1",
    "combine_fp8": "offs 0",
    "esmm": "weight 1, weight 2, x 0",
    "esmm_act": "x 0",
    "esmm_act_packed": "x 0",
    "esmm_packed": "x 0",
    "ess": "g 0, g 1, offs 0",
    "ess_add": "g 0",
    "ess_fp8": "offs 0",
    "estmm": "g 1, offs 0, x 1",
    "group_rows_fp8": "offs 0",
    "low_rank_gradients": "offs 0, rows 1, u 1",
    "quantize_columns_fp8": "offs 0, x 0, x 1",
    "quantize_rows_fp8": "x 0, x 1",
    "quantize_weight_fp8": "w 1",
    "reindex": "top_k_index 0, top_k_index 1",
    "scaled_transpose": "x 0, x 1",
}
"""Sizes that no other operand has, in some call of an operator."""


def test_schemas_are_those_of_exported_graphs() -> None:
    known = (Path(__file__).parent / "schemas.txt").read_text().splitlines()
    assert [str(library.overload(name)._schema) for name in library.names()] == known
    assert {name for name, _ in CALLS} == set(library.names())


def described(results: Any) -> list[Any]:
    each = results if isinstance(results, tuple | list) else [results]
    return [t if t is None else (tuple(t.shape), t.dtype, t.stride()) for t in each]


@pytest.mark.parametrize("name", library.names())
@torch.no_grad()
def test_results_are_those_of_kernels(name: str) -> None:
    for args in (args for of, args in CALLS if of == name):
        with FakeTensorMode() as mode:
            fake = library.overload(name)(*tree_map_only(Tensor, mode.from_tensor, args))
        assert described(fake) == described(library.overload(name)(*args))


@pytest.mark.parametrize("name", library.names())
@torch.no_grad()
def test_every_wrong_size_is_refused(name: str) -> None:
    record, accepted = library.record_of(name), set()
    for args in (args for of, args in CALLS if of == name and record.checked):
        record(*args).check(name)
        for field, value in zip(record._fields, args):
            tensors = value if isinstance(value, list) else [value]
            for place, t in ((place, t) for place, t in enumerate(tensors) if isinstance(t, Tensor)):
                for dim in range(t.dim()):
                    wrong: Any = t.new_empty([size + (d == dim) for d, size in enumerate(t.shape)])
                    wrong = [*tensors[:place], wrong, *tensors[place + 1 :]] if isinstance(value, list) else wrong
                    with suppress(InputError):
                        record(*args)._replace(**{field: wrong}).check(name)
                        accepted.add(f"{field} {dim}")
    assert ", ".join(sorted(accepted)) == FREE.get(name, "")


def test_what_is_said_of_an_operand() -> None:
    x, w, offs = torch.randn(6, 8), torch.randn(4, 5, 7), torch.arange(5, dtype=torch.int32)
    v = torch.arange(6, dtype=torch.int32)
    for args, said in (
        (
            (x, w, None, v, offs, 1, "nk"),
            r"weight is torch.float32 \(4, 5, 7\); expected \(4, 5, 8\) beside x torch.float32 \(6, 8\)",
        ),
        ((x, w, None, v, offs, 1, "xy"), "unknown layout 'xy'; expected 'nk' or 'kn'"),
        ((x, w, None, v, offs, 0, "nk"), "top_k is 0; expected 1 or more"),
        ((x, w.half(), None, v, offs, 1, "nk"), "x is torch.float32 but weight is torch.float16; cast one"),
        ((x.int(), w, None, v, offs, 1, "nk"), r"x has dtype torch.int32; expected one of \(torch.float32"),
        ((x, w.to("meta"), None, v, offs, 1, "nk"), "weight is on meta, x on cpu"),
        (
            (x, torch.randn(4, 5, 8), None, v, offs.long(), 1, "nk"),
            r"offs is torch.int64 \(5,\); expected torch.int32 \(5,\)",
        ),
        ((x, torch.randn(4, 5, 8), None, v, offs, 2, "nk"), r"v is torch.int32 \(6,\); expected torch.int32 \(12,\)"),
    ):
        with pytest.raises(InputError, match=said):
            library.record_of("esmm")(*args).check("esmm")


def test_wrappers_are_documented_and_take_names_and_defaults() -> None:
    assert "weight: floating (E, N, K), as layout says" in (ops.esmm.__doc__ or "")
    h = torch.randn(3, 4)
    torch.testing.assert_close(ops.activate(h, glu="concat", activation="silu"), ops.activate(h, "silu", "concat", []))
    with pytest.raises(TypeError, match="missing a required argument: 'glu'"):
        ops.activate(h, "silu")


DIFFERENTIABLE = "activate combine esmm esmm_act ess estmm moe_ffn".split()
OTHERS = "reindex activate_backward esfk low_rank_gradients estmm_add ess_add esfk_add scaled_transpose".split()


@pytest.mark.parametrize("name", DIFFERENTIABLE + OTHERS)
def test_they_pass_the_checks_of_torch(name: str) -> None:
    wanted = name in DIFFERENTIABLE
    for args in [args for of, args in CALLS if of == name][:2]:
        given = tree_map_only(
            Tensor, lambda t: t.detach().clone().requires_grad_(wanted and t.is_floating_point()), args
        )
        torch.library.opcheck(library.overload(name), given)
