"""Past torch's dispatcher: the same numbers as through it, and not where something would want to see the operator."""

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from hexa_fx.errors import InputError
from hexa_fx.ops import direct, library
from hexa_fx.ops.direct import DIRECT
from hexa_fx.ops.reindex import reindex_any
from hexa_fx.ops.rows import flip
from tests.ops.reference import Operators

hexa = torch.ops.hexa
T, K, E, C, N = 9, 2, 4, 6, 5


def random(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, generator=generator, dtype=torch.float64).requires_grad_()


def routing(kind: str) -> tuple[Tensor, Tensor, Tensor]:
    index = torch.randint(0, E + (kind == "sentinels"), (T, K), generator=torch.Generator().manual_seed(5))
    if kind == "nothing":
        index.fill_(E)
    if kind == "twice":
        index.fill_(2)
    return direct.reindex(index, E)


KINDS = ("all routed", "sentinels", "nothing", "twice")


def assert_same(run, op, *args) -> None:
    """Value and gradients of the two for the same arguments."""
    leaves = [a for a in args if isinstance(a, Tensor) and a.requires_grad]
    values = [run(*args), op(*args)]
    torch.testing.assert_close(*values, equal_nan=True)
    gradient = torch.randn(values[0].shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(*(torch.autograd.grad(v, leaves, gradient) for v in values), equal_nan=True)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layout", ["nk", "kn"])
@pytest.mark.parametrize("gathered", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_esmm(kind, layout, gathered, bias):
    v, _, offs = routing(kind)
    weight = random(E, N, C) if layout == "nk" else random(E, C, N)
    x = random(T, C) if gathered else random(T * K, C)
    b = random(E, N) if bias else None
    assert_same(
        direct.esmm, hexa.esmm.default, x, weight, b, v if gathered else None, offs, K if gathered else 1, layout
    )


@pytest.mark.parametrize("frozen", [0, 1, 2])
def test_esmm_with_one_operand_frozen(frozen):
    v, _, offs = routing("sentinels")
    operands = [random(T, C), random(E, N, C), random(E, N)]
    operands[frozen].requires_grad_(False)
    assert_same(direct.esmm, hexa.esmm.default, *operands, v, offs, K, "nk")


@pytest.mark.parametrize("place", ["x", "weight"])
def test_esmm_keeps_nan_where_it_belongs(place):
    v, _, offs = routing("sentinels")
    x, weight = random(T, C), random(E, N, C)
    with torch.no_grad():
        (x if place == "x" else weight)[3].fill_(float("nan"))
    assert_same(direct.esmm, hexa.esmm.default, x, weight, None, v, offs, K, "nk")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("weighted", [False, True])
def test_combine(kind, weighted):
    _, inv, offs = routing(kind)
    y, weights = random(T * K, C), random(T, K) if weighted else None
    with torch.no_grad():
        y[int(offs[-1]) :] = float("nan")  # rows without an expert are nobody's
    assert_same(direct.combine, hexa.combine.default, y, weights, inv, offs, K)


def test_float32_weights_of_float64_rows():
    _, inv, offs = routing("sentinels")
    weights = random(T, K).detach().float().requires_grad_()
    assert_same(direct.combine, hexa.combine.default, random(T * K, C), weights, inv, offs, K)


def test_reindex_and_its_errors():
    index = torch.randint(0, E + 1, (T, K))
    for mine, theirs in zip(direct.reindex(index, E), hexa.reindex(index, E), strict=True):
        assert torch.equal(mine, theirs)
    for mine, theirs in zip(direct.reindex(index - 1, E), reindex_any(index - 1, E), strict=True):
        assert torch.equal(mine, theirs)
    with pytest.raises(InputError, match="hexa::esmm"):
        direct.esmm(random(T, C + 1), random(E, N, C), None, *routing("twice")[::2], K, "nk")


def test_second_derivatives():
    v, inv, offs = routing("all routed")
    operands = random(T, C), random(E, N, C), random(E, N), random(T, K)

    def run(x, weight, bias, factor):
        return direct.combine(direct.esmm(x, weight, bias, v, offs, K, "nk"), factor, inv, offs, K).square()

    assert torch.autograd.gradgradcheck(run, operands)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints(reentrant):
    """One that is not reentrant recomputes what was saved when a backward asks for it."""
    v, inv, offs = routing("all routed")
    x, weight, factor = random(T, C), random(E, N, C), random(T, K)

    def run(x: Tensor) -> Tensor:
        return direct.combine(direct.esmm(x.sin(), weight, None, v, offs, K, "nk").sin(), factor, inv, offs, K)

    leaves = (x, weight, factor)
    expected = torch.autograd.grad(run(x).square().sum(), leaves)
    checkpoint(run, x, use_reentrant=reentrant).square().sum().backward()
    torch.testing.assert_close([leaf.grad for leaf in leaves], [*expected])


class Subclass(Tensor):
    pass


def test_who_wants_to_see_the_operators_does():
    x, weight = random(T, C), random(E, N, C)
    v, _, offs = routing("sentinels")
    assert library.is_eager((x, weight, None))
    with Operators() as modes:
        direct.esmm(x, weight, None, v, offs, K, "nk")
    assert modes.seen == ["esmm"]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert not library.is_eager((x,))
        assert direct.esmm(x.float(), weight.float(), None, v, offs, K, "nk").dtype == torch.bfloat16
    with TorchFunctionMode():
        assert not library.is_eager((x,))
    assert not library.is_eager((x.as_subclass(Subclass),))
    assert not library.is_eager((x.to("meta"),))
    assert torch.func.vmap(lambda t: t + library.is_eager((t,)))(x).equal(x)
    with torch.inference_mode():
        assert library.is_eager((x,))


def test_they_compile_to_the_operators():
    x, weight, weights = random(T, C), random(E, N, C), random(T, K)
    index = torch.randint(0, E + 1, (T, K))
    graphs: list[torch.fx.GraphModule] = []

    def run(x: Tensor, weight: Tensor, weights: Tensor) -> Tensor:
        v, inv, offs = direct.reindex(index, E)
        rows = direct.esmm(x, weight, None, v, offs, K, "nk")
        return direct.combine(direct.esmm(rows, weight, None, None, offs, 1, flip("nk")), weights, inv, offs, K)

    def backend(gm, example):
        graphs.append(gm)
        return gm.forward

    torch._dynamo.reset()
    compiled = torch.compile(run, fullgraph=True, backend=backend)(x, weight, weights)
    torch.testing.assert_close(compiled, run(x, weight, weights))
    targets = [str(node.target) for node in graphs[0].graph.nodes]
    assert sum("esmm" in target for target in targets) == 2
    assert {op._opname for op in DIRECT} == {"moe_ffn", "moe_ffn_fixed", "moe_ffn_fp8", "reindex", "esmm", "combine"}


@pytest.mark.parametrize("size", [8, 96], ids=["picked", "by expert"])
@pytest.mark.parametrize("through_torch", [False, True])
def test_esmm_keeps_no_input_for_a_frozen_weight(size, through_torch):
    x, weight = torch.randn(300, size, requires_grad=True), torch.randn(4, size, size)
    v, _, offs = torch.ops.hexa.reindex(torch.randint(0, 4, (300, 2)), 4)
    esmm = torch.ops.hexa.esmm if through_torch else direct.esmm
    expected = torch.autograd.grad(esmm(x, weight.clone().requires_grad_(), None, v, offs, 2, "nk").square().sum(), x)[
        0
    ]
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.data_ptr()) or t, lambda t: t):
        y = esmm(x, weight, None, v, offs, 2, "nk")
    assert weight.data_ptr() in saved
    assert x.data_ptr() not in saved
    torch.testing.assert_close(torch.autograd.grad(y.square().sum(), x)[0], expected)
