"""Every operator against the per-expert loop in float64, on the ugly cases, and by torch's own opcheck."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hexa_fx import ops
from hexa_fx.errors import InputError
from hexa_fx.ir import FfnSpec
from hexa_fx.ops import fallback, reindex
from hexa_fx.ops.activations import ACTIVATIONS, activation_forward

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


def loop_ffn(x, index, weights, w1, b1, w3, b3, w2, b2, spec: FfnSpec) -> Tensor:
    """The plain definition, differentiable."""
    w1, w2 = (w if layout == "nk" else w.transpose(1, 2) for w, layout in ((w1, spec.layout1), (w2, spec.layout2)))
    w3 = w3 if w3 is None or spec.layout1 == "nk" else w3.transpose(1, 2)
    rows = []
    for t in range(x.shape[0]):
        row = x.new_zeros(w2.shape[1])
        for s, e in enumerate(index[t].tolist()):
            if e >= len(w1):
                continue
            h = x[t] @ w1[e].T + (0 if b1 is None else b1[e])
            if w3 is not None:
                h = torch.cat([h, x[t] @ w3[e].T + (0 if b3 is None else b3[e])])
            glu = "concat" if spec.glu == "split" else spec.glu
            a = activation_forward(h[None], spec.activation, glu, spec.params)[0]
            y = a @ w2[e].T + (0 if b2 is None else b2[e])
            row = row + (y if weights is None else weights[t, s] * y)
        rows.append(row)
    return torch.stack(rows) if rows else x.new_zeros(0, w2.shape[1])


def operands(spec: FfnSpec, bias: bool, tokens: int = T, dtype: torch.dtype = torch.float64) -> list[Tensor | None]:
    width = 2 * H if spec.glu in ("concat", "interleaved") else H

    def weight(n: int, k: int, layout: str) -> Tensor:
        return random(E, n, k, dtype=dtype) if layout == "nk" else random(E, k, n, dtype=dtype)

    split = spec.glu == "split"
    made = [
        random(tokens, D, dtype=dtype),
        torch.rand(tokens, K, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).to(dtype),
        weight(width, D, spec.layout1),
        random(E, width, dtype=dtype) if bias else None,
        weight(width, D, spec.layout1).flip(0) if split else None,
        random(E, width, dtype=dtype).flip(0) if split and bias else None,
        weight(D, H, spec.layout2),
        random(E, D, dtype=dtype) if bias else None,
    ]
    return [t if t is None else t.contiguous().requires_grad_() for t in made]


def ffn(index: Tensor, given: list[Tensor | None], spec: FfnSpec) -> Tensor:
    x, weights, w1, b1, w3, b3, w2, b2 = given
    return ops.moe_ffn(x, index, weights, w1, b1, w3, b3, w2, b2, spec)


def compare(index: Tensor, given: list[Tensor | None], spec: FfnSpec) -> None:
    x, weights, w1, b1, w3, b3, w2, b2 = given
    expected = loop_ffn(x, index, weights, w1, b1, w3, b3, w2, b2, spec)
    value = ffn(index, given, spec)
    torch.testing.assert_close(value, expected, rtol=1e-10, atol=1e-10)
    leaves = [t for t in given if t is not None]
    cotangent = random(*value.shape) if value.numel() else value.detach()
    mine = torch.autograd.grad(value, leaves, cotangent, allow_unused=True)
    theirs = (
        torch.autograd.grad(expected, leaves, cotangent, allow_unused=True)
        if expected.requires_grad
        else [None] * len(leaves)
    )
    for a, b in zip(mine, theirs):
        assert a is not None
        torch.testing.assert_close(a, torch.zeros_like(a) if b is None else b, rtol=1e-9, atol=1e-9)


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
    compare(ids(kind), operands(spec, bias), spec)


@pytest.mark.parametrize("activation", [name for name, act in ACTIVATIONS.items() if not act.pair])
def test_every_activation(activation):
    compare(ids("random"), operands(FfnSpec(activation), True), FfnSpec(activation))


@settings(max_examples=25, deadline=None)
@given(tokens=st.integers(0, 12), k=st.integers(1, 4), seed=st.integers(0, 1000))
def test_any_routing(tokens, k, seed):
    index = torch.randint(0, E + 1, (tokens, k), generator=torch.Generator().manual_seed(seed))
    given_ = operands(SPECS[2], True, tokens)
    given_[1] = torch.rand(tokens, k, dtype=torch.float64).requires_grad_()
    compare(index, given_, SPECS[2])


def test_no_tokens():
    value = ffn(torch.zeros(0, K, dtype=torch.long), operands(SPECS[2], True, 0), SPECS[2])
    assert value.shape == (0, D)
    value.sum().backward()


def test_operands_that_are_not_contiguous():
    spec = SPECS[2]
    given_ = operands(spec, False)
    spread = [None if t is None else torch.stack([t.detach(), t.detach()], -1)[..., 0].requires_grad_() for t in given_]
    assert not spread[0].is_contiguous()
    torch.testing.assert_close(ffn(ids("random"), spread, spec), ffn(ids("random"), given_, spec))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_lower_precision_rounds_but_does_not_drift(dtype):
    spec = SPECS[2]
    exact = ffn(ids("random"), operands(spec, True), spec)
    rounded = ffn(ids("random"), operands(spec, True, dtype=dtype), spec)
    assert rounded.dtype == dtype
    error = (rounded.double() - exact).norm(dim=1) / exact.norm(dim=1)
    assert error.max() < {torch.float32: 1e-5, torch.bfloat16: 5e-2, torch.float16: 1e-2}[dtype]


def test_nan_stays_in_its_token():
    given_ = operands(SPECS[0], False)
    with torch.no_grad():
        given_[0][2] = float("nan")
    value = ffn(ids("random"), given_, SPECS[0])
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
    for mine, expected in zip(fallback.reindex_any(index, E), reindex(sentinels, E), strict=True):
        assert torch.equal(mine, expected)
    monkeypatch.setenv("HEXA_FX_CHECKED", "1")
    with pytest.raises(InputError, match="expert ids run from"):
        reindex(index, E)
    reindex(sentinels, E)


@pytest.mark.parametrize("bad", [-1, E + 1])
def test_slots_out_of_range_contribute_nothing(bad):
    index = ids("random")
    index[0, 0] = bad
    values = [ffn(index.masked_fill(index == bad, n), operands(SPECS[0], False), SPECS[0]) for n in (bad, E)]
    torch.testing.assert_close(*values)


def test_wrong_shapes_are_named():
    given_ = operands(SPECS[0], False)
    given_[0] = random(T, D + 1)
    with pytest.raises(InputError):
        ffn(ids("random"), given_, SPECS[0])


def saved_bytes(spec: FfnSpec) -> int:
    held: dict[int, int] = {}
    given_ = operands(spec, False)
    weights = {t.untyped_storage().data_ptr() for t in given_[2:] if t is not None}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            held[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        ffn(ids("random"), given_, spec)
    return sum(held.values())


def test_only_x_h_and_routing_are_saved():
    x, h, routing = T * D * 8, T * K * 2 * H * 8, T * K * 8 + 2 * T * K * 4 + (E + 1) * 4
    assert saved_bytes(FfnSpec("silu", "concat")) <= x + h + routing + 64
    assert saved_bytes(FfnSpec("silu", "concat", recompute_h=True)) <= x + routing + 64


def test_second_derivative_is_a_clear_error():
    x, *rest = operands(SPECS[0], False)
    (g,) = torch.autograd.grad(ffn(ids("random"), [x, *rest], SPECS[0]).sum(), x, create_graph=True)
    with pytest.raises((InputError, RuntimeError), match=r"second|twice|double"):
        torch.autograd.grad(g.sum(), rest[1])


def rows() -> tuple[Tensor, Tensor, Tensor]:
    return hexa.reindex(ids("sentinels"), E)


def test_reindex_is_a_stable_sort():
    index = ids("sentinels")
    v, inv, offs = hexa.reindex(index, E)
    assert torch.equal(v.long(), index.flatten().argsort(stable=True))
    assert torch.equal(inv[v.long()], torch.arange(T * K, dtype=torch.int32))
    assert torch.equal(offs.diff().long(), index.flatten().bincount(minlength=E + 1)[:E])


SAMPLES = {
    "reindex": lambda: (ids("sentinels"), E),
    "esmm": lambda: (random(T, D), random(E, H, D), random(E, H), rows()[0], rows()[2], K, "nk"),
    "esmm_act": lambda: (random(T, D), random(E, 2 * H, D), None, None, None, rows()[0], rows()[2], K, "nk", "silu", "concat", []),
    "activate": lambda: (random(T * K, 2 * H), "silu", "interleaved", []),
    "activate_backward": lambda: (random(T * K, H), random(T * K, H), random(T, K), rows()[0], rows()[2], "gelu", "none", []),
    "ess": lambda: (random(T, D), rows()[0], rows()[2], K, random(T, K)),
    "estmm": lambda: (random(T, D), random(T * K, H), rows()[0], None, rows()[2], K, "nk"),
    "esfk": lambda: (random(T, D), random(T * K, H), random(E, H, D), rows()[0], rows()[2], K, "nk", True),
    "low_rank_gradients": lambda: (
        random(T, D), random(T * K, 2), random(E, D, 2), random(T, K), rows()[0], rows()[2], K, "kn", torch.bfloat16, 0.5, True
    ),
    "estmm_add": lambda: (random(E, H, D), random(T, D), random(T * K, H), rows()[0], None, rows()[2], K, "nk"),
    "ess_add": lambda: (random(E, D), random(T, D), rows()[0], rows()[2], K, random(T, K)),
    "esfk_add": lambda: (
        random(E, H, D), random(E, H), random(T, D), random(T * K, H), random(E, H, D), rows()[0], rows()[2], K, "nk"
    ),
    "combine": lambda: (random(T * K, D), random(T, K), rows()[1], rows()[2], K),
    "scaled_transpose": lambda: (random(T, D), torch.bfloat16, 0.5),
    "moe_ffn": lambda: (
        random(T, D), ids("sentinels"), random(T, K), random(E, 2 * H, D), None, None, None, random(E, D, H), None,
        "silu", "concat", [], "nk", "nk", False,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SAMPLES)
def test_opcheck(name):
    arguments = tuple(
        a.requires_grad_()
        if isinstance(a, Tensor) and a.is_floating_point() and name in ("esmm", "activate", "combine", "moe_ffn")
        else a
        for a in SAMPLES[name]()
    )
    torch.library.opcheck(getattr(hexa, name).default, arguments)


def test_esfk_is_its_parts():
    x, g, w, v, offs, k, layout, _ = SAMPLES["esfk"]()
    dx, dw, db = hexa.esfk(x, g, w, v, offs, k, layout, True)
    torch.testing.assert_close(dx, hexa.esmm(g, w, None, None, offs, 1, "kn"))
    torch.testing.assert_close(dw, hexa.estmm(x, g, v, None, offs, k, layout))
    torch.testing.assert_close(db, hexa.ess(g, None, offs, 1, None))


def test_autocast_follows_linear():
    given_ = operands(SPECS[2], True, dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        value = ffn(ids("random"), given_, SPECS[2])
    assert value.dtype == torch.bfloat16
    value.float().sum().backward()
    assert given_[2].grad.dtype == torch.float32


def test_compiles_in_one_graph():
    given_ = operands(SPECS[2], True)
    index = ids("random")
    compiled = torch.compile(lambda: ffn(index, given_, SPECS[2]), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(), ffn(index, given_, SPECS[2]))
