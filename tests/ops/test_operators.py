"""Every operator against the per-expert loop in float64, on the ugly cases, and by torch's own opcheck."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hexa_fx.errors import InputError
from hexa_fx.ir import FfnSpec
from hexa_fx.ops import reindex
from hexa_fx.ops.activations import ACTIVATIONS
from hexa_fx.ops.reindex import reindex_any
from tests.ops.reference import Layer, assert_is_loop, layer

hexa = torch.ops.hexa
T, K, E, D, H = 9, 2, 4, 6, 5


def ids(kind: str, tokens: int = T, k: int = K, experts: int = E) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    if kind == "random":
        return (
            torch.stack([torch.randperm(experts, generator=generator)[:k] for _ in range(tokens)])
            if tokens
            else torch.zeros(0, k).long()
        )
    if kind == "one expert":
        return torch.full((tokens, k), experts - 1)  # the same expert twice in a row, all others empty
    if kind == "sentinels":
        return torch.randint(0, experts + 1, (tokens, k), generator=generator)
    return torch.full((tokens, k), experts)  # nothing is routed


KINDS = ("random", "one expert", "sentinels", "nothing")


def random(*size: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*size, dtype=torch.float64, generator=torch.Generator().manual_seed(sum(size))).to(dtype)


def made(spec: FfnSpec, bias: bool = False, kind: str = "random", **options: Any) -> Layer:
    options = {"tokens": T, **options}
    index = options.pop("index", ids(kind, options["tokens"]))
    return layer(spec, experts=E, model_size=D, inner=H, bias=bias, index=index, **options)


SPECS = [
    FfnSpec("gelu"),
    FfnSpec("relu", layout1="kn", layout2="kn"),
    FfnSpec("silu", "concat"),
    FfnSpec("gelu_tanh", "interleaved", layout1="kn"),
    FfnSpec("silu", "split", layout2="kn"),
    FfnSpec("swiglu_oai", "interleaved", params=(1.702, 7.0)),
    FfnSpec("swiglu_limited", "concat", params=(0.7, 0.5)),
    FfnSpec("silu", "concat", recompute_h=True),
]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("spec", SPECS, ids=lambda s: f"{s.activation}-{s.glu}-{s.layout1}{s.layout2}-{s.recompute_h}")
def test_moe_ffn_is_the_loop(spec, bias, kind):
    assert_is_loop(made(spec, bias, kind))


@pytest.mark.parametrize("activation", [name for name, act in ACTIVATIONS.items() if not act.pair])
def test_every_activation(activation):
    assert_is_loop(made(FfnSpec(activation), True))


@settings(max_examples=25, deadline=None)
@given(tokens=st.integers(0, 12), k=st.integers(1, 4), seed=st.integers(0, 1000))
def test_any_routing(tokens, k, seed):
    index = torch.randint(0, E + 1, (tokens, k), generator=torch.Generator().manual_seed(seed))
    assert_is_loop(made(SPECS[2], True, tokens=tokens, index=index))


def test_no_tokens():
    value = made(SPECS[2], True, tokens=0).run()
    assert value.shape == (0, D)
    value.sum().backward()


def test_operands_that_are_not_contiguous():
    one = made(SPECS[2])
    spread = [None if t is None else torch.stack([t.detach()] * 2, -1)[..., 0].requires_grad_() for t in one.operands]
    assert not spread[0].is_contiguous()
    assert_is_loop(Layer(one.index, tuple(spread), one.spec))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_lower_precision_rounds_but_does_not_drift(dtype):
    exact, rounded = (made(SPECS[2], True, dtype=each).run() for each in (torch.float64, dtype))
    assert rounded.dtype == dtype
    error = (rounded.double() - exact).norm(dim=1) / exact.norm(dim=1)
    assert error.max() < {torch.float32: 1e-5, torch.bfloat16: 5e-2, torch.float16: 1e-2}[dtype]


def test_nan_stays_in_its_token():
    one = made(SPECS[0])
    with torch.no_grad():
        one.operands[0][2] = float("nan")
    value = one.run()
    assert value[2].isnan().all()
    assert not torch.cat([value[:2], value[3:]]).isnan().any()


@pytest.mark.parametrize("tokens", [3, 40, 1500])
@pytest.mark.parametrize("bad", [-1, E + 1, -300])
def test_ids_out_of_range_are_sentinels_unless_checked(bad, tokens, monkeypatch):
    index = torch.randint(0, E, (tokens, 2))
    index[0, 0], index[-1, 1] = bad, E
    sentinels = index.masked_fill((index < 0) | (index > E), E)
    for mine, expected in zip(reindex(index, E), reindex(sentinels, E), strict=True):
        assert torch.equal(mine, expected)
    for mine, expected in zip(reindex_any(index, E), reindex(sentinels, E), strict=True):
        assert torch.equal(mine, expected)
    monkeypatch.setenv("HEXA_FX_CHECKED", "1")
    with pytest.raises(InputError, match="expert ids run from"):
        reindex(index, E)
    reindex(sentinels, E)


@pytest.mark.parametrize("bad", [-1, E + 1])
def test_slots_out_of_range_contribute_nothing(bad):
    index = ids("random")
    index[0, 0] = bad
    values = [made(SPECS[0], index=index.masked_fill(index == bad, n)).run() for n in (bad, E)]
    torch.testing.assert_close(*values)


def test_wrong_shapes_are_named():
    one = made(SPECS[0])
    with pytest.raises(InputError):
        Layer(one.index, (random(T, D + 1), *one.operands[1:]), one.spec).run()


def test_reindex_is_a_stable_sort():
    index = ids("sentinels")
    v, inv, offs = hexa.reindex(index, E)
    assert torch.equal(v.long(), index.flatten().argsort(stable=True))
    assert torch.equal(inv[v.long()], torch.arange(T * K, dtype=torch.int32))
    assert torch.equal(offs.diff().long(), index.flatten().bincount(minlength=E + 1)[:E])
