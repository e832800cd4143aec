"""`hexa::moe_ffn_sources` against `hexa::moe_ffn` on the sum W + s C A, in float64; and what it keeps and computes.

`tests/gpu/test_moe_ffn_sources.py` runs the same cases on a device, in 16 bits.
"""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import hexa_fx.ops  # noqa: F401  (defines the operators)
from hexa_fx.errors import InputError
from hexa_fx.formats import FORMATS, format_of
from hexa_fx.ir import FfnSpec
from tests.ops.reference import ROUTINGS, rerouted

E, D, H, R = 5, 24, 17, 3
RAGGED = D, H, R
ADAPTED, PLAIN = torch.ops.hexa.moe_ffn_sources, torch.ops.hexa.moe_ffn
SPECS = [
    FfnSpec("silu", "concat", "nk", "nk"),
    FfnSpec("gelu", "none", "kn", "kn"),
    FfnSpec("swiglu_oai", "interleaved", "kn", "nk"),
    FfnSpec("silu", "split", "nk", "kn"),
    FfnSpec("silu", "concat", "nk", "nk", (), True),
]
NAMES = ("w1", "b1", "w3", "b3", "w2", "b2")
FACTORS = ("a1", "c1", "a3", "c3", "a2", "c2")
OPERANDS = ("x", "top_k_index", "top_k_weights", *NAMES, *FACTORS)
PACKABLE = D_PACKED, H_PACKED, _ = 64, 32, 3
"""Sizes that every format takes."""


def static(spec):
    return spec.activation, spec.glu, list(spec.params), spec.layout1, spec.layout2, spec.recompute_h


def layer(spec, adapted="123", bias=True, dtype=torch.float64, tokens=30, device="cpu", sizes=RAGGED, experts=E):
    torch.manual_seed(0)
    model, inner, rank = sizes
    width = 2 * inner if spec.glu in ("concat", "interleaved") else inner
    sizes = {"1": (width, model, spec.layout1), "3": (width, model, spec.layout1), "2": (model, inner, spec.layout2)}
    found = dict.fromkeys((*NAMES, *FACTORS))
    for number, (n, k, layout) in sizes.items():
        if number == "3" and spec.glu != "split":
            continue
        found[f"w{number}"] = torch.randn(experts, *((n, k) if layout == "nk" else (k, n)), dtype=dtype) / k**0.5
        found[f"b{number}"] = torch.randn(experts, n, dtype=dtype) if bias else None
        if number in adapted:
            found[f"a{number}"] = torch.randn(experts, rank, k, dtype=dtype) / k**0.5
            found[f"c{number}"] = torch.randn(n, rank, experts, dtype=dtype).permute(2, 0, 1)  # as PEFT stores it
    x, weights = torch.randn(tokens, model, dtype=dtype), torch.rand(tokens, 2, dtype=dtype)
    index = torch.rand(tokens, experts).argsort(1)[:, :2]
    given = {"x": x, "top_k_index": index, "top_k_weights": weights, **found}
    return {name: t if t is None else t.to(device) for name, t in given.items()}


SCALES = [0.5, 2.0, 0.25]


def run(given, spec):
    packed = [tuple(given.get(f"s{number}") or ()) for number in "132"]
    formats = [given.get(f"format{number}", "dense") for number in "132"]
    return ADAPTED(*(given[name] for name in OPERANDS), SCALES, *packed, formats, *static(spec))


def reference(given, spec):
    """The same with weights that hold their additions."""
    summed = {}
    for number, scale, layout in zip("132", SCALES, (spec.layout1, spec.layout1, spec.layout2)):
        weight, a, c = (given[f"{letter}{number}"] for letter in "wac")
        if a is not None:
            delta = scale * c @ a
            weight = weight + (delta if layout == "nk" else delta.transpose(1, 2))
        summed[f"w{number}"] = weight
    weights = [summed.get(name, given[name]) for name in NAMES]
    return PLAIN(given["x"], given["top_k_index"], given["top_k_weights"], *weights, *static(spec))


def compare(given, spec, frozen=()):
    """Result and gradients against those of the sums on the CPU in float64: exactly, or to the rounding of 16 bits."""
    exact = {n: exactly(n, given) for n in OPERANDS}
    frozen = (*frozen, *(f"w{n}" for n in "123" if f"format{n}" in given))
    direction = torch.randn_like(exact["x"])
    outcomes = []
    for function, operands in ((run, given), (reference, exact)):
        leaves = [operands[n] for n in OPERANDS if n not in frozen and operands[n] is not None]
        leaves = [t.requires_grad_() for t in leaves if t.is_floating_point()]
        y = function(operands, spec)
        outcomes.append((y, *torch.autograd.grad(y, leaves, direction.to(y))))
    # a value that is rounded across the limit of a clamp has a gradient or none
    bound = 0.1 if spec.activation == "swiglu_oai" else 4e-2
    for found, expected in zip(*outcomes, strict=True):
        assert_alike(found, expected, bound)


def exactly(name, given):
    """An operand on the CPU in float64, unpacked."""
    t = given[name]
    if t is not None and f"format{name[1:]}" in given and name[0] == "w":
        t = format_of(given[f"format{name[1:]}"]).dense(t, given[f"s{name[1:]}"], given["x"].dtype)
    if t is None:
        return t
    return (t.detach().double() if t.is_floating_point() else t).cpu()


def pack(given, format, numbers="123"):
    """The same with weights that are packed."""
    given = dict(given)
    for number in numbers:
        if given[f"w{number}"] is not None:
            given[f"w{number}"], *given[f"s{number}"] = format_of(format).pack_all(given[f"w{number}"])
            given[f"format{number}"] = format
    return given


def assert_alike(found, expected, bound=4e-2):
    if found.dtype == torch.float64:
        torch.testing.assert_close(found, expected)
        return
    assert found.shape == expected.shape
    error = (found.detach().double().cpu() - expected.detach()).norm()
    assert error <= bound * expected.detach().norm(), f"relative error {error / expected.detach().norm():.1e}"


ADAPTED_PROJECTIONS = ["12", "1", "2", "123", "3"]
FROZEN = [NAMES, (*NAMES, "x"), (*NAMES, "x", "a1", "a3", "a2"), (*NAMES, "c1", "c2", "c3")]


@pytest.mark.parametrize("spec", SPECS, ids=str)
@pytest.mark.parametrize("adapted", ADAPTED_PROJECTIONS)
def test_result_and_all_gradients(spec, adapted):
    compare(layer(spec, adapted), spec)


@pytest.mark.parametrize("spec", SPECS, ids=str)
@pytest.mark.parametrize("frozen", FROZEN)
def test_gradients_with_frozen_bases(spec, frozen):
    compare(layer(spec), spec, frozen)


def route(given, routing):
    names = OPERANDS[:3]
    return given | dict(zip(names, rerouted(routing, *(given[name] for name in names), len(given["w1"]))))


@pytest.mark.parametrize("routing", ROUTINGS)
def test_ugly_routings(routing):
    compare(route(layer(SPECS[0]), routing), SPECS[0])
    compare(pack(route(layer(SPECS[0], sizes=PACKABLE), routing), "mxfp4"), SPECS[0])


@pytest.mark.parametrize("operator", ["moe_ffn_sources", "moe_ffn_sources_forward"])
@pytest.mark.parametrize("spec", [SPECS[0], SPECS[3], SPECS[4]], ids=str)
def test_opcheck(operator, spec):
    given = layer(spec, dtype=torch.float32, tokens=9)
    if operator == "moe_ffn_sources":
        given["x"].requires_grad_()
        given["a1"].requires_grad_()
    sources = (SCALES, (), (), (), ["dense"] * 3)
    torch.library.opcheck(getattr(torch.ops.hexa, operator).default, (*given.values(), *sources, *static(spec)))


@pytest.mark.parametrize("packed", [False, True])
def test_compiled(packed):
    given = layer(SPECS[0], dtype=torch.float32, sizes=PACKABLE)
    given = pack(given, "nf4") if packed else given
    given["a1"].requires_grad_()
    compiled = torch.compile(lambda **operands: run(operands, SPECS[0]), backend="aot_eager", fullgraph=True)
    outcomes = []
    for function in (compiled, lambda **operands: run(operands, SPECS[0])):
        y = function(**given)
        outcomes.append((y, *torch.autograd.grad(y.sum(), given["a1"])))
    for found, expected in zip(*outcomes, strict=True):
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("spec", SPECS, ids=str)
@pytest.mark.parametrize("adapted", ["", "123"], ids=["no adapters", "adapters"])
def test_packed_weights(format, spec, adapted):
    compare(pack(layer(spec, adapted, sizes=PACKABLE), format), spec, NAMES if adapted else ())


@pytest.mark.parametrize("numbers", ["1", "2"])
def test_packed_and_dense_weights_side_by_side(numbers):
    compare(pack(layer(SPECS[3], sizes=PACKABLE), "nf4", numbers), SPECS[3])


@pytest.mark.parametrize("format", ["nf4_double", "int8_rows"])
def test_opcheck_with_packed_weights(format):
    given = pack(layer(SPECS[3], dtype=torch.float32, tokens=9, sizes=PACKABLE), format)
    given["x"].requires_grad_()
    given["a1"].requires_grad_()
    sources = (SCALES, given["s1"], given["s3"], given["s2"], [format] * 3)
    args = (*(given[name] for name in OPERANDS), *sources, *static(SPECS[3]))
    torch.library.opcheck(ADAPTED.default, args)
    _, _, offs = torch.ops.hexa.reindex(given["top_k_index"], E)
    x = torch.randn(18, D_PACKED, requires_grad=True)
    rows = (given["w1"], given["s1"], format, given["b1"], None, offs, 1, "nk")
    torch.library.opcheck(torch.ops.hexa.esmm_packed.default, (x, *rows))


def test_packed_weights_under_autocast():
    given = pack(layer(SPECS[0], "", dtype=torch.float32, sizes=PACKABLE), "fp8_block")
    with torch.autocast("cpu", torch.bfloat16):
        y = run(given, SPECS[0])
    assert y.dtype == torch.bfloat16
    low = {
        name: t.bfloat16() if name in OPERANDS and t is not None and t.dtype == torch.float32 else t
        for name, t in given.items()
    }
    assert torch.equal(y, run(low | {"top_k_weights": given["top_k_weights"]}, SPECS[0]))


def test_factors_of_another_dtype_are_kept_as_they_are_and_have_gradients_of_it():
    spec, outcomes = SPECS[3], []
    saved = []
    for dtype in (torch.float32, torch.float64):
        given = layer(spec, dtype=torch.float32)
        factors = {name: given[name].to(dtype).requires_grad_() for name in FACTORS}
        with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
            y = run(given | factors, spec)
        assert {t.data_ptr() for t in factors.values()} < {t.data_ptr() for t in saved if t is not None}
        found = torch.autograd.grad(y.sum(), list(factors.values()))
        assert {t.dtype for t in found} == {dtype}
        outcomes.append((y, *(t.float() for t in found)))
    for found, expected in zip(*outcomes, strict=True):
        torch.testing.assert_close(found, expected)


class Launches(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.sizes, self.largest = {}, 0

    def names_seen(self):
        return set(self.sizes)

    def size_of(self, name):
        return self.sizes.get(name, 0)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        self.sizes.setdefault(func._schema.name, 0)
        for t in found if isinstance(found, (tuple, list)) else (found,):
            if isinstance(t, torch.Tensor):
                self.largest = max(self.largest, t.numel())
                self.sizes[func._schema.name] = max(self.sizes[func._schema.name], t.numel())
        return found


def test_nothing_is_computed_or_kept_for_frozen_bases():
    """No tensor as large as a weight is made, no product gives its gradient, and x is kept for A's gradient only."""
    spec = SPECS[0]
    given = layer(spec, adapted="2", tokens=4)
    for name in ("x", "top_k_weights", "a2", "c2"):
        given[name].requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        saved = []
        y = run(given, spec)
    own = {given[name].data_ptr() for name in (*NAMES, *FACTORS, "top_k_weights") if given[name] is not None}
    kept = [t for t in saved if t is not None and t.data_ptr() not in own and t.is_floating_point()]
    assert sorted(t.numel() for t in kept if t.numel()) == [4 * 2 * R, 4 * 2 * 2 * H], "h, and the products with A"
    with Launches() as launches, torch._C._IncludeDispatchKeyGuard(torch._C.DispatchKey.Python):
        torch.autograd.grad(y.sum(), [given[name] for name in ("x", "top_k_weights", "a2", "c2")])
    assert launches.largest < min(given["w1"].numel(), given["w2"].numel())


def test_one_expert_s_matrix_exists_at_a_time():
    """Nothing as large as all experts' weights is made, forward or backward, and x is not kept."""
    spec = SPECS[0]
    given = pack(layer(spec, "", tokens=4, sizes=PACKABLE), "nf4")
    given["x"].requires_grad_()
    with Launches() as launches:
        y = run(given, spec)
        torch.autograd.grad(y.sum(), given["x"])
    assert launches.largest <= 2 * H_PACKED * D_PACKED


def test_arguments_that_do_not_fit():
    spec = SPECS[0]
    for change, message in (
        ({"a1": None}, "both of its factors"),
        ({"a3": torch.zeros(E, R, D).double(), "c3": torch.zeros(E, H, R).double()}, "and a weight"),
        ({"c1": torch.zeros(E, D, R).double()}, "expected"),
    ):
        with pytest.raises(InputError, match=message):
            run({**layer(spec), **change}, spec)
    packed = pack(layer(spec, sizes=PACKABLE), "nf4")
    for change, message in (
        ({"format1": "nf5"}, "there is no format"),
        ({"format1": "mxfp4"}, "exponents of w1"),
        ({"s2": packed["s2"] * 2}, "scale tensors"),
    ):
        with pytest.raises(InputError, match=message):
            run({**packed, **change}, spec)
    with pytest.raises(InputError, match="has no gradient; freeze it"):
        run({**packed, "s1": [packed["s1"][0].requires_grad_()]}, spec)


@pytest.mark.parametrize("spec", SPECS[:4:3], ids=lambda spec: spec.glu)
def test_gradients_of_dense_weights_are_added_to_main_grad(spec):
    given = layer(spec, adapted="2", dtype=torch.float32)
    names = [name for name in NAMES if given[name] is not None]
    plain = {name: given[name].clone().requires_grad_() for name in names}
    expected = torch.autograd.grad(reference({**given, **plain}, spec).sum(), [plain[name] for name in names])
    trained = {name: torch.nn.Parameter(given[name]) for name in names}
    for parameter in trained.values():
        parameter.main_grad = torch.ones_like(parameter)
    run({**given, **trained}, spec).sum().backward()
    assert all(parameter.grad is None for parameter in trained.values())
    found = [trained[name].main_grad - 1 for name in names]
    torch.testing.assert_close(found, list(expected), rtol=1e-3, atol=1e-3)
