"""The kernels of packed weights and of adapters: which a layer may need, and when they are requested."""

import copy
from collections.abc import Mapping
from threading import Thread

import pytest
import torch
from torch import Tensor

import hexa_fx
from hexa_fx.codegen import KernelSpec, render
from hexa_fx.cuda import choosing
from hexa_fx.cuda import kernel_set as kernel_sets
from hexa_fx.cuda import layer as cuda_layer
from hexa_fx.cuda.choosing import typical_card
from hexa_fx.cuda.kernel_set import frozen, kernel_set, launched
from hexa_fx.formats.quantized_weight import QuantizedWeight
from hexa_fx.ir import FfnSpec
from hexa_fx.ops.listed import Listed, Places
from hexa_fx.ops.table_layers import MoeFfnSources
from hexa_fx.source_kernels import layer_of as sources_layer_of
from tests.api.test_quantize import D, Model

MOST = 300
ADAPTED = ("low_rank_gradients", "low_rank_parts", "estmm")
"""Operators of kernels that only gradients of adapters launch."""
GPT_OSS = FfnSpec("swiglu_oai", "interleaved", "kn", "kn", params=(1.702, 7.0))


def layer(spec: FfnSpec, format: str, ranks: Mapping[str, int], hidden: int = 64, inner: int = 128) -> MoeFfnSources:
    """Four experts, two a token."""
    first, second = (4, 2 * inner, hidden), (4, hidden, inner)
    dense = [torch.randn(shape).bfloat16() for shape in (first, second)]
    if spec.layout1 == "kn":
        dense = [weight.transpose(1, 2) for weight in dense]
    packed = [QuantizedWeight.of(weight, format, spec.layout1 == "kn") for weight in dense] if format else []
    operands: dict[str, Tensor] = {
        "x": torch.empty(5, hidden, dtype=torch.bfloat16),
        "top_k_index": torch.empty(5, 2, dtype=torch.int64),
        "top_k_weights": torch.empty(5, 2),
        "w1": dense[0],
        "w2": dense[1],
    }
    if spec.glu == "interleaved":
        operands |= {"b1": torch.empty(4, 2 * inner).bfloat16(), "b2": torch.empty(4, hidden).bfloat16()}
    return sources_layer_of(spec, operands, packed, ranks)


@pytest.mark.parametrize("arch", [80, 90])
@pytest.mark.parametrize(
    ("spec", "format", "ranks"),
    [
        (FfnSpec("silu", "concat"), "nf4", {}),
        (FfnSpec("silu", "concat"), "nf4_double", {"w1": 8, "w2": 8}),
        (GPT_OSS, "mxfp4", {"w1": 4}),
        (FfnSpec("silu", "concat"), "", {"w2": 8}),
    ],
)
def test_no_number_of_tokens_needs_another_kernel(spec: FfnSpec, format: str, ranks: dict[str, int], arch: int) -> None:
    made, card = layer(spec, format, ranks), typical_card(arch)
    found = kernel_set(frozen(made), card, most=MOST)
    every = set.union(*(set(launched(frozen(made), card, tokens)) for tokens in (*range(1, MOST, 13), MOST)))
    assert every <= set(found)
    assert set(kernel_set(frozen(made), card, False, MOST)) < set(found)
    families = {spec.family for spec in found}
    assert "unpack" in families or not format
    assert "packed_gemm" in families or format in ("", "nf4_double")
    assert ("scaled_transpose" in families) == bool(ranks)
    assert len(found) < 40
    for spec_ in found:
        render(spec_)


@pytest.mark.parametrize("tokens", [1, 40, 4000])
def test_a_low_rank_addition_is_added_in_the_launch_of_its_product(tokens: int) -> None:
    made = layer(FfnSpec("silu", "concat"), "", {"w1": 16, "w2": 16}, hidden=128)
    ops = [spec.op for spec in launched(frozen(made), typical_card(90), tokens, training=False)]
    around = ["esmm", "scaled_transpose"]
    assert [op for op in ops if not op.startswith("reindex")] == [*around, "esmm_act", *around, "esmm", "combine"]


def test_they_are_requested_when_weights_are_packed_and_no_dense_ones_for_packed_models(
    requested: list[KernelSpec],
) -> None:
    x = torch.randn(20, D).bfloat16()
    model = hexa_fx.optimize_(Model().bfloat16(), x)
    dense = set(requested)
    assert {"estmm", "esfk"} & {spec.op for spec in dense}
    requested.clear()
    hexa_fx.quantize_experts_(model, "nf4")
    packed = set(requested)
    assert {"unpack", "packed_gemm"} <= {spec.family for spec in packed}
    # Only what adapters launch, which comes last, has gradients of weights.
    assert [spec.op for spec in requested].index("estmm") > [spec.family for spec in requested].index("low_rank")
    requested.clear()
    hexa_fx.optimize_(hexa_fx.undo_(model), x)
    assert set(requested) == packed


@pytest.mark.parametrize("format", ["nf4", ""])
def test_the_first_call_of_a_layer_requests_them_and_no_later_one(
    format: str, requested: list[KernelSpec], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a model that was packed on the host and moved, or adapted afterwards, with experts in a list."""
    threads: list[Thread] = []
    find = kernel_sets.request
    monkeypatch.setattr(kernel_sets, "request", lambda *args: threads.append(find(*args)))
    general = {name: lambda *args: None for name in ("moe_ffn_sources", "moe_ffn_sources_forward")}
    made = layer(FfnSpec("silu", "concat"), format, {"w1": 8, "w2": 8})
    choosing.forget_choices()
    for tokens, (name, run) in zip((5, 7), general.items()):
        o = made._replace(x=torch.empty(tokens, 64).bfloat16(), top_k_index=torch.zeros(tokens, 2, dtype=torch.int64))
        o = o._replace(top_k_weights=torch.zeros(tokens, 2))
        weights = {name: getattr(o, name) for name in MoeFfnSources._fields[3:15]}
        o = o._replace(
            **{name: None if t is None else torch.zeros_like(t, device="cpu") for name, t in weights.items()}
        )
        o = o._replace(**{name: [torch.zeros_like(t, device="cpu") for t in getattr(o, name)] for name in ("s1", "s2")})
        o = o if format else o._replace(w1=listed(o.w1), w2=listed(o.w2))
        cuda_layer.LAYERS[name](run, *o)
    assert len(threads) == 1
    threads[0].join()
    if not format:
        made = made._replace(**{name: kernel_sets.listed_without_data(getattr(made, name), 1) for name in ("w1", "w2")})
    assert set(requested) == set(kernel_set(frozen(made), typical_card(90)))


def listed(weight: Tensor) -> Listed:
    """A weight of listed experts, as kernels on CUDA are told where they lie."""
    made = Listed([weight.unbind()])
    made.places = Places(0, torch.zeros(1, len(weight), dtype=torch.int32), 512 // weight.element_size())
    return made


def test_those_of_adapters_are_requested_as_soon_as_these_are_put_on(requested: list[KernelSpec]) -> None:
    torch.manual_seed(0)
    model = hexa_fx.optimize_(Model().bfloat16(), torch.randn(20, D).bfloat16())
    requested.clear()
    adapt(model, 8)
    assert any(spec.option("low_rank") for spec in requested if spec.family == "gather_gemm_sm90")
    assert any(spec.op == "low_rank_gradients" for spec in requested)


def adapt(model: torch.nn.Module, rank: int) -> None:
    peft = pytest.importorskip("peft")
    peft.get_peft_model(model, peft.LoraConfig(r=rank, target_parameters=["blocks.0.first", "blocks.0.second"]))


@pytest.mark.parametrize(("rank", "new"), [(8, False), (16, False), (64, True)])
def test_those_of_adapters_of_a_usual_rank_are_requested_with_packed_weights(
    rank: int, new: bool, requested: list[KernelSpec]
) -> None:
    """Last: the first calls need others."""
    model = hexa_fx.optimize_(Model().bfloat16(), torch.randn(20, D).bfloat16())
    requested.clear()
    hexa_fx.quantize_experts_(model, "nf4")
    before = [*requested]
    assert before[-1].op in ADAPTED
    assert before[0].op not in ADAPTED
    adapt(model, rank)
    assert (set(requested) > set(before)) == new


def test_those_of_adapters_that_are_there_are_requested(requested: list[KernelSpec]) -> None:
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    x = torch.randn(20, D).bfloat16()
    model = Model().bfloat16()
    lora = peft.LoraConfig(r=8, target_parameters=["blocks.0.first", "blocks.0.second"])
    adapted = peft.get_peft_model(copy.deepcopy(model), lora)
    hexa_fx.optimize_(adapted, x)
    assert any(spec.option("low_rank") for spec in requested if spec.family == "gather_gemm_sm90")
    requested.clear()
    hexa_fx.quantize_experts_(adapted, "mxfp4")
    assert {"unpack", "packed_gemm"} <= {spec.family for spec in requested}
    assert any(spec.op == "estmm" for spec in requested), "gradients of factors"
