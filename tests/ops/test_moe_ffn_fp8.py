"""`hexa::moe_ffn_fp8` against `hexa::moe_ffn` in float64: results and all gradients by their direction; what it keeps and when it
quantises."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import hexa_fx.ops  # noqa: F401  (defines the operators)
from hexa_fx.cuda import choosing
from hexa_fx.ir import FfnSpec
from hexa_fx.ops import direct, fp8_weights, library, moe_ffn_fp8
from hexa_fx.ops.listed import Listed
from tests.ops.reference import ROUTINGS
from tests.ops.test_moe_ffn_sources import NAMES, route, static
from tests.ops.test_moe_ffn_sources import layer as layer_with_factors

E, D, INNER, TOKENS, K = 4, 136, 72, 96, 2
OPERANDS = ("x", "top_k_index", "top_k_weights", *NAMES)
SPECS = [
    FfnSpec("silu", "concat", "nk", "nk"),
    FfnSpec("gelu", "none", "kn", "kn"),
    FfnSpec("swiglu_oai", "interleaved", "kn", "nk"),
    FfnSpec("silu", "interleaved", "nk", "kn"),
    FfnSpec("silu", "split", "kn", "kn"),
    FfnSpec("silu", "concat", "kn", "nk", (), True),
]


@pytest.fixture(autouse=True)
def no_copies():
    yield
    fp8_weights.clear()


def layer(spec, bias=True, dtype=torch.float32, tokens=TOKENS, sizes=(D, INNER)):
    given = layer_with_factors(spec, "", bias, dtype, tokens, sizes=(*sizes, 0), experts=E)
    return {name: given[name] for name in OPERANDS}


def fp8(given, spec, cached=True):
    return torch.ops.hexa.moe_ffn_fp8(*(given[name] for name in OPERANDS), *static(spec), cached)


def exact(given, spec):
    return torch.ops.hexa.moe_ffn(*(given[name] for name in OPERANDS), *static(spec))


def results(run, given, spec, seed=1):
    """The result and gradients, by name."""
    floating = {n: t.detach().requires_grad_() for n, t in given.items() if t is not None and t.is_floating_point()}
    y = run({**given, **floating}, spec)
    torch.manual_seed(seed)
    grads = torch.autograd.grad(y, list(floating.values()), torch.randn(y.shape).to(y))
    return {"y": y.detach(), **dict(zip(floating, grads, strict=True))}


def compare(given, spec, cosine=0.997):
    """Of routing weights the direction is a little less exact: their gradients have errors of the forward in both factors."""
    wide = {n: t.double() if t is not None and t.is_floating_point() else t for n, t in given.items()}
    found, expected = results(fp8, given, spec), results(exact, wide, spec)
    for name, value in expected.items():
        other = found[name]
        assert (other.shape, other.dtype) == (value.shape, given.get(name, given["x"]).dtype)
        a, b = other.double().flatten(), value.flatten()
        if b.numel() == K:  # one token's routing weights: too few for a direction; each is dy times a row as large as y
            assert (a - b).abs().max() <= 0.2 * expected["y"].norm(), name
            continue
        least = cosine - 0.001 if name == "top_k_weights" else cosine
        assert torch.nn.functional.cosine_similarity(a, b, 0) >= least or b.norm() == 0 == a.norm(), name
        assert (a - b).norm() <= 0.09 * b.norm(), name


@pytest.mark.parametrize("spec", SPECS, ids=str)
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
def test_result_and_gradients(spec, bias):
    compare(layer(spec, bias), spec)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_of_16_bits(dtype):
    compare(layer(SPECS[0], dtype=dtype), SPECS[0], 0.996)


@pytest.mark.parametrize("routing", ROUTINGS)
def test_ugly_routings(routing):
    compare(route(layer(SPECS[0]), routing), SPECS[0], 0.99 if routing == "one token" else 0.997)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_what_is_not_finite_stays_in_its_token(value):
    given = layer(SPECS[0])
    expected = fp8(given, SPECS[0])
    given["x"] = given["x"].clone()
    given["x"][3, 5] = value
    y = fp8(given, SPECS[0])
    assert not y[3].isfinite().any()
    others = torch.arange(TOKENS) != 3
    torch.testing.assert_close(y[others], expected[others])


@pytest.mark.parametrize("scale", [2.0**-40, 2.0**40])
def test_tokens_of_any_magnitude(scale):
    given = layer(SPECS[1], bias=False)  # of an activation that grows as its input does
    given["w1"] = given["w1"] / scale
    y = fp8(given | {"x": given["x"] * scale}, SPECS[1])
    torch.testing.assert_close(
        y, fp8(given | {"x": given["x"], "w1": given["w1"] * scale}, SPECS[1]), rtol=0.01, atol=0.01
    )


def test_without_routing_weights_and_of_other_strides():
    given = layer(SPECS[0])
    given |= {
        "top_k_weights": None,
        "x": given["x"].t().contiguous().t(),
        "w2": given["w2"].transpose(1, 2).clone().transpose(1, 2),
    }
    compare(given, SPECS[0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=["FP8", "of another dtype"])
def test_past_the_dispatcher_the_same(dtype):
    given = layer(SPECS[0], dtype=dtype)

    def run(given, spec):
        return direct.moe_ffn_fp8(*(given[name] for name in OPERANDS), *static(spec), True)

    expected = results(fp8, given, SPECS[0])
    for name, value in results(run, given, SPECS[0]).items():
        assert torch.equal(value, expected[name]), name
    with torch.no_grad():
        assert torch.equal(run(given, SPECS[0]), expected["y"])


@pytest.mark.parametrize("operator", ["moe_ffn_fp8", "moe_ffn_fp8_forward"])
@pytest.mark.parametrize("spec", [SPECS[0], SPECS[4]], ids=str)
def test_opcheck(operator, spec):
    given = layer(spec, tokens=9)
    if operator == "moe_ffn_fp8":
        given["x"].requires_grad_()
        given["w1"].requires_grad_()
    parts = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    arguments = (*(given[name] for name in OPERANDS), *static(spec), True)
    torch.library.opcheck(getattr(torch.ops.hexa, operator).default, arguments, test_utils=parts)


@pytest.mark.parametrize("spec", [SPECS[0], SPECS[5]], ids=["h kept", "h again"])
def test_compiled_and_checkpointed_calls_give_the_same(spec):
    given = layer(spec)
    compiled = torch.compile(lambda tensors, spec: fp8(tensors, spec), backend="aot_eager", fullgraph=True)
    expected = results(fp8, given, spec)
    for run in (compiled, lambda tensors, spec: checkpoint(fp8, tensors, spec, use_reentrant=False)):
        for name, value in results(run, given, spec).items():
            torch.testing.assert_close(value, expected[name], msg=name)


def test_only_what_is_needed_is_kept_and_computed():
    given = layer(SPECS[0])
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        given["x"].requires_grad_()
        y = fp8(given, SPECS[0])
    assert not any(t is given["x"] for t in kept)  # weights are frozen
    assert sum(t.nbytes for t in kept if t.dtype == torch.float8_e4m3fn) == TOKENS * K * 2 * 128
    assert not any(t.shape == (TOKENS * K, 2 * INNER) for t in kept)
    (dx,) = torch.autograd.grad(y.sum(), given["x"])
    assert dx.shape == given["x"].shape


def test_of_inputs_and_weights_in_two_dtypes_under_autocast():
    given = layer(SPECS[0])
    with torch.autocast("cpu", torch.bfloat16):
        found = results(fp8, given, SPECS[0])
    assert found["y"].dtype == torch.bfloat16
    assert all(found[name].dtype == torch.float32 for name in ("x", "w1", "b1", "w2", "b2"))
    rounded = {**given, "x": given["x"].bfloat16()}
    torch.testing.assert_close(found["w1"], results(fp8, rounded, SPECS[0])["w1"])


@pytest.mark.parametrize("spec", [SPECS[0], SPECS[2], SPECS[4]], ids=str)
def test_gradients_go_to_main_grad(spec):
    check_main_grad(layer(spec), spec)


def check_main_grad(given, spec):
    """Gradients that are added to float32 buffers are those that are returned."""
    expected = results(fp8, given, spec)
    parameters = {name: torch.nn.Parameter(given[name]) for name in NAMES if given[name] is not None}
    for parameter in parameters.values():
        parameter.main_grad = torch.ones_like(parameter)
    torch.manual_seed(1)
    y = fp8({**given, **parameters}, spec)
    y.backward(torch.randn(y.shape).to(y))
    for name, parameter in parameters.items():
        assert parameter.grad is None
        torch.testing.assert_close(parameter.main_grad, expected[name] + 1, msg=name)


@pytest.fixture
def quantizations(monkeypatch):
    """The weights that were quantised."""
    made, kernel = [], library._KERNELS["quantize_weight_fp8", "cpu"]

    def counted(*args):
        made.append(args[4])
        kernel(*args)

    monkeypatch.setitem(library._KERNELS, ("quantize_weight_fp8", "cpu"), counted)
    return made


def step(given, optimizer=None):
    y = fp8(given, SPECS[0])
    if y.requires_grad:
        y.sum().backward()
    if optimizer is not None:
        optimizer.step()
    return y.detach()


def test_weights_are_quantised_once_a_step(quantizations):
    given = layer(SPECS[0])
    given |= {name: torch.nn.Parameter(given[name]) for name in ("w1", "w2")}
    optimizer = torch.optim.SGD([given["w1"], given["w2"]], lr=0.1)
    for _ in range(2):  # micro-batches
        step(given)
    assert len(quantizations) == 2
    before = step(given, optimizer)
    assert len(quantizations) == 2
    after = step(given)
    assert len(quantizations) == 4
    assert not torch.equal(before, after)
    with torch.no_grad():
        torch.testing.assert_close(step(given), after)
    assert len(quantizations) == 4


@pytest.mark.parametrize("kind", ["in place", "by a fused optimizer", "other memory", "the memory of one that is gone"])
def test_weights_that_changed_are_quantised_again(kind):
    given = layer(SPECS[0])
    weight = given["w2"] = torch.nn.Parameter(given["w2"])
    with torch.no_grad():
        before = step(given)
        if kind == "in place":
            weight.mul_(2)
        elif kind == "by a fused optimizer":
            weight.grad = -weight / 0.5
            torch.optim.SGD([weight], lr=0.5, fused=True).step()
        elif kind == "other memory":
            weight.data = weight.data * 2
        else:
            place, given["w2"] = weight.data_ptr(), None
            twice = [weight.detach() * 2]
            del weight
            candidates = [torch.empty_like(twice[0]) for _ in range(8)]
            found = next((t for t in candidates if t.data_ptr() == place), candidates[0])
            given["w2"] = found.copy_(twice[0])
        after = step(given)
    assert not torch.equal(after, before)
    fp8_weights.clear()
    torch.testing.assert_close(after, step(given).detach())


def test_copies_of_weights_that_are_gone_are_forgotten():
    for _ in range(3):
        step(layer(SPECS[0]))
    assert len(fp8_weights._copies) <= 4  # two a layer, and those before went when these were made


def test_weights_that_take_turns_in_one_memory_are_not_kept(quantizations):
    given = layer(SPECS[0])
    for _ in range(2):
        fp8(given, SPECS[0], cached=False)
    assert len(quantizations) == 4
    assert not fp8_weights._copies


def test_nothing_is_kept_while_kernels_are_only_listed():
    with choosing.collect():
        step(layer(SPECS[0]))
    assert not fp8_weights._copies


def test_in_inference_mode():
    given = layer(SPECS[0])
    expected = fp8(given, SPECS[0])
    with torch.inference_mode():
        torch.testing.assert_close(fp8(given, SPECS[0]), expected)
        fp8({**given, "w1": given["w1"].clone()}, SPECS[0])  # an inference tensor has no version


@pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad, torch.inference_mode])
def test_what_fp8_cannot_take_runs_in_its_dtype_and_says_so(mode, caplog):
    moe_ffn_fp8._log_once.cache_clear()
    given = layer(SPECS[0], dtype=torch.float64)
    with mode():
        found, expected = fp8(given, SPECS[0]), exact(given, SPECS[0])
    torch.testing.assert_close(found, expected)
    assert "compute='fp8_block' runs in torch.float64: x is torch.float64" in caplog.text


def test_weights_of_a_class_of_their_own_run_in_their_dtype(caplog):
    class Own(torch.Tensor):
        pass

    moe_ffn_fp8._log_once.cache_clear()
    given = layer(SPECS[0])
    given["w1"] = given["w1"].as_subclass(Own)
    found = fp8(given, SPECS[0])
    torch.testing.assert_close(found.as_subclass(torch.Tensor), exact(given, SPECS[0]).as_subclass(torch.Tensor))
    assert "w1 is of class Own" in caplog.text


def test_a_list_that_is_turned_has_a_copy_of_its_own():
    weight = Listed([[torch.randn(128, 128) for _ in range(2)]])
    copies = [fp8_weights.quantized(w, None, "nk", "none", False, True) for w in (weight, weight.transpose(1, 2))]
    plain, turned = (copy.q.float() for copy in copies)
    assert torch.equal(plain, turned.transpose(1, 2))
