"""The set of kernels of a layer holds those of every number of tokens, and few."""

from dataclasses import replace

import pytest
import torch

from hexa_fx.cli.model_layers import layer_of
from hexa_fx.codegen import KernelSpec, family_names, get_family, render
from hexa_fx.cuda import choosing as cuda_choosing
from hexa_fx.cuda import kernel_set as cuda_kernel_set
from hexa_fx.cuda.choosing import Card, typical_card
from hexa_fx.cuda.kernel_set import FfnLayer, fp8_kernel_set, kernel_set
from hexa_fx.errors import KernelError
from hexa_fx.ir import FfnSpec
from hexa_fx.ops.fixed_order import fixed_order
from tests.cuda.cards import Cards, arguments

SWIGLU = FfnSpec("silu", "concat")
REAL = {
    "Qwen3-30B": layer_of(SWIGLU, experts=128, top_k=8, hidden=2048, inner=768),
    "Mixtral": layer_of(SWIGLU, experts=8, top_k=2, hidden=4096, inner=14336),
    "DeepSeek-V3": layer_of(SWIGLU, experts=256, top_k=8, hidden=7168, inner=2048),
    "OLMoE": layer_of(SWIGLU, experts=64, top_k=8, hidden=2048, inner=1024),
    "gpt-oss": layer_of(
        FfnSpec("swiglu_oai", "interleaved", "kn", "kn"), experts=32, top_k=4, hidden=2880, inner=2880, biases=True
    ),
}
SMALL = {
    "bf16": layer_of(SWIGLU, experts=4, top_k=2, hidden=64, inner=64),
    "wide": layer_of(SWIGLU, experts=4, top_k=2, hidden=512, inner=512, gates=torch.bfloat16),
    "odd k": layer_of(FfnSpec("gelu", "none"), experts=5, top_k=3, hidden=64, inner=72, biases=True, index=torch.int32),
    "float32": layer_of(SWIGLU, experts=3, top_k=1, hidden=64, inner=64, dtype=torch.float32),
    "float64 split": layer_of(FfnSpec("silu", "split"), experts=3, top_k=1, hidden=64, inner=64, dtype=torch.float64),
    "unaligned": layer_of(SWIGLU, experts=4, top_k=2, hidden=63, inner=65),
    "recomputed": layer_of(replace(SWIGLU, recompute_h=True), experts=4, top_k=2, hidden=64, inner=64),
    "many experts": layer_of(SWIGLU, experts=300, top_k=6, hidden=64, inner=64),
}


def launched(layer: FfnLayer, arch: int, tokens: int) -> set[KernelSpec]:
    return set(cuda_kernel_set.launched(layer, typical_card(arch), tokens))


@pytest.mark.parametrize("arch", [80, 90])
@pytest.mark.parametrize("name", SMALL)
def test_no_number_of_tokens_needs_another_kernel(name: str, arch: int) -> None:
    layer, most = SMALL[name], 700 if name != "many experts" else 4000
    dense, step = (130, 7) if most == 700 else (12, 97)
    numbers = (*range(1, dense), *range(dense, most, step), most)
    every = set.union(*(launched(layer, arch, tokens) for tokens in numbers))
    assert every == set(kernel_set(layer, typical_card(arch), most=most))


@pytest.mark.parametrize("arch", [80, 90])
@pytest.mark.parametrize("name", ["bf16", "wide", "float32", "float64 split"])
def test_in_a_fixed_order_all_numbers_of_tokens_take_the_same_products_and_these_are_built(
    name: str, arch: int
) -> None:
    layer, products = SMALL[name], []
    for tokens in (1, 3, 40, 300, 700):
        with fixed_order():
            specs = cuda_kernel_set.launched(layer, typical_card(arch), tokens, training=False)
        products.append([spec for spec in specs if spec.op.startswith("esmm")])
    assert len(products[0]) >= 2
    assert all(each == products[0] for each in products)
    assert set(products[0]) <= set(kernel_set(layer, typical_card(arch)))


@pytest.mark.parametrize("arch", [80, 86, 89, 90])
@pytest.mark.parametrize("name", REAL)
def test_real_blocks_need_few_kernels(name: str, arch: int) -> None:
    found = kernel_set(REAL[name], typical_card(arch))
    assert len(found) <= 30
    assert len(kernel_set(REAL[name], typical_card(arch), training=False)) <= (16 if arch == 90 else 12)
    for spec in found:
        render(spec)
    for tokens in (1, 2, 100, 4097, 65535, 65536):
        assert launched(REAL[name], arch, tokens) <= set(found)


def test_what_training_does_not_want_is_not_in_the_set() -> None:
    frozen = kernel_set(replace(REAL["Mixtral"], grads=frozenset({"x"})), typical_card(90))
    assert not {"estmm", "esfk"} & {spec.op for spec in frozen}
    added = kernel_set(replace(REAL["Mixtral"], added=dict.fromkeys(("w1", "w2"), torch.float32)), typical_card(90))
    assert {spec.op for spec in added if spec.accumulate} == {"estmm", "esfk"}


BLACKWELL = (Card("B200", 100, 148, 100), Card("NVIDIA GeForce RTX 5090", 120, 170, 120))


@pytest.mark.parametrize("card", BLACKWELL, ids=lambda card: card.name)
@pytest.mark.parametrize("name", REAL)
def test_no_kernel_is_planned_for_a_card_that_none_has_run_on(name: str, card: Card) -> None:
    with pytest.raises(KernelError, match=f"sm_{card.arch}: no kernel has run on"):
        kernel_set(REAL[name], card)
    assert not fp8_kernel_set(REAL[name], card)
    for family in family_names():
        assert get_family(family).why_not_on(card.arch)


@pytest.mark.parametrize("card", BLACKWELL, ids=lambda card: card.name)
def test_there_torchs_operators_run_and_it_is_said_once(
    cards: Cards, card: Card, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(cuda_choosing, "device_card", lambda device: card)
    args = arguments(dtype=torch.float32, gates=torch.float32)
    for _ in range(3):
        torch.testing.assert_close(cards.run(args), torch.ops.hexa.moe_ffn.default(*args), rtol=1e-4, atol=1e-4)
    assert not cards.launches
    (said,) = (r.message for r in caplog.records if r.levelname == "WARNING" and "falls back" in r.message)
    assert f"sm_{card.arch}" in said
