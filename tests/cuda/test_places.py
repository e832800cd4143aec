"""Weights of listed experts in plans: which kernels read them where they lie, and what refuses them. Needs no device."""

import pytest
import torch
from torch import Tensor

from hexa_fx.codegen.spec import KernelSpec
from hexa_fx.cuda.calls import planned
from hexa_fx.cuda.choosing import Card
from hexa_fx.cuda.fallback import Unsupported
from hexa_fx.cuda.kernel_set import FfnLayer, fp8_kernel_set, kernel_set, listed_without_data, without_data
from hexa_fx.cuda.places import MOST, listed, part_of, parts_of, steps_of
from hexa_fx.cuda.product import chosen_tile
from hexa_fx.ir import FfnSpec
from hexa_fx.ops.table_layers import MoeFfn, static_of
from tests.cuda.cards import AMPERE, HOPPER

BF16 = torch.bfloat16
GLUS = {"concat": 2, "none": 1, "split": 1}


def layer(glu: str, inner: int = 256, lists: bool = True, layout: str = "nk") -> FfnLayer:
    """By lists, gate and up of ``concat`` are matrices of their own."""
    experts, model = 8, 512

    def weight(rows: int, columns: int, parts: int = 1) -> Tensor:
        shape = (rows, columns) if layout == "nk" else (columns, rows)
        whole = without_data((experts, *shape), BF16)
        return listed_without_data(whole, parts) if lists else whole  # type: ignore[return-value]

    first = weight(2 * inner if glu == "concat" else inner, model, GLUS[glu])
    up = weight(inner, model) if glu == "split" else None
    tokens = without_data((8, model), BF16), without_data((8, 2), torch.int64), without_data((8, 2), BF16)
    spec = FfnSpec("silu" if glu != "none" else "gelu", glu, layout, layout)  # type: ignore[arg-type]
    return FfnLayer(MoeFfn(*tokens, first, None, up, None, weight(model, inner), None, *static_of(spec)))


def without_option(spec: KernelSpec) -> KernelSpec:
    return spec.with_options(listed=False)


@pytest.mark.parametrize("layout", ["nk", "kn"])
@pytest.mark.parametrize("glu", ["concat", "none", "split"])
@pytest.mark.parametrize("card", [HOPPER, AMPERE], ids=["sm_90", "sm_80"])
def test_a_list_takes_the_kernels_of_a_stack(card: Card, glu: str, layout: str) -> None:
    """With the same tiles, and the option where weights are read."""
    if (glu, layout) == ("concat", "kn"):
        pytest.skip("gate and up of (in, out) matrices do not lie below each other")
    lists, stacks = (kernel_set(layer(glu, lists=by_lists, layout=layout), card) for by_lists in (True, False))
    assert [spec.key for spec in map(without_option, lists)] == [spec.key for spec in map(without_option, stacks)]
    reads = [
        spec.op in ("esmm", "esmm_act", "esmm_act_backward", "esfk") or spec.family == "decode_down" for spec in lists
    ]
    assert [bool(spec.option("listed")) for spec in lists] == reads


def test_a_box_of_the_copy_engine_holds_lines_of_one_matrix() -> None:
    """Else gemm_sm80 multiplies, which asks for lines one by one."""
    families = {(spec.family, spec.op) for spec in kernel_set(layer("concat", inner=40), HOPPER) if spec.layout == "kn"}
    assert ("esfk_sm80", "esfk") in families
    assert ("gather_gemm_sm90", "esfk") not in families


def test_fp8_quantises_them_where_they_lie() -> None:
    specs = fp8_kernel_set(layer("concat"), HOPPER)
    assert {bool(spec.option("listed")) for spec in specs if spec.op == "quantize_weight"} == {True}


def test_what_does_not_know_of_places_refuses() -> None:
    weight = listed_without_data(without_data((4, 64, 32), BF16), 2)

    def run(x: Tensor, w: Tensor) -> Tensor:
        assert (parts_of(w), part_of(w), listed(w)) == (2, 32, (("listed", True),))
        assert listed(w.transpose(1, 2)) == listed(w)
        assert not listed(x)
        return w.contiguous()

    with pytest.raises(Unsupported, match="would run on a weight of listed experts"):
        planned(run, (without_data((3, 32), BF16), weight), HOPPER, chosen_tile)


def test_only_one_of_gate_and_up_in_a_list() -> None:
    given = layer("split")
    mixed = FfnLayer(given.call._replace(w3=without_data(given.call.w3.shape, BF16)))  # type: ignore[union-attr]
    with pytest.raises(Unsupported, match="listed experts"):
        kernel_set(mixed, HOPPER)


def test_steps() -> None:
    """As long as torch's allocations, as short as the copy engine reads, none at odd addresses or too far apart."""
    assert steps_of([4096, 512, 1024]) == (512, [7, 0, 1])
    assert steps_of([16, 48, 32]) == (16, [0, 2, 1])
    assert steps_of([8, 24]) is None
    assert steps_of([16, 25]) is None
    assert steps_of([0, 512 * (MOST - 1)]) == (512, [0, MOST - 1])
    assert steps_of([0, 512 * MOST]) is None
