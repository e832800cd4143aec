"""moe_ffn inside training: what is saved, frozen operands, checkpointing, autocast, compile, export."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from hexa_fx import ops
from hexa_fx.errors import InputError
from hexa_fx.ir import FfnSpec
from hexa_fx.ops import library
from tests.ops.reference import GATED, NAMES, Layer, Operators, assert_is_loop, layer, row_error


def frozen(one: Layer, *names: str) -> Layer:
    for name, t in zip(NAMES, one.operands):
        if t is not None:
            t.requires_grad_(name not in names)
    return one


@pytest.mark.parametrize("glu", ["concat", "split"])
@pytest.mark.parametrize(
    "names",
    [
        ("x",),
        ("top_k_weights",),
        ("w1", "b1", "w3", "b3"),
        ("w1", "w3"),
        ("w2", "b2"),
        ("w1", "w3", "w2"),
        NAMES[:7],
        NAMES[1:],
        ("b1", "b2"),
    ],
    ids="-".join,
)  # fmt: skip
@pytest.mark.parametrize("recompute", [False, True])
def test_any_part_may_be_frozen(glu, names, recompute):
    assert_is_loop(frozen(layer(FfnSpec("silu", glu), bias=True).with_spec(recompute_h=recompute), *names))


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.int16, torch.uint8])
def test_any_integer_ids_with_and_without_weights(weighted, bias, dtype):
    for tokens in (5, 60, 3000):  # sorted in Python, by torch, by torch as short integers
        one = layer(tokens=tokens, weighted=weighted, bias=bias, model_size=4, inner=2)
        assert_is_loop(Layer(one.index.to(dtype), one.operands, one.spec), 1e-10)


@pytest.mark.parametrize("experts", [1, 254, 255, 256, 300])
def test_numbers_of_experts_around_a_byte(experts):
    index = torch.randint(0, experts + 1, (1200, 2), generator=torch.Generator().manual_seed(0))
    index[:4] = torch.tensor([0, experts - 1])
    assert_is_loop(layer(tokens=1200, experts=experts, model_size=2, inner=2, index=index), 1e-9)
    index[7, 1] = experts + 1  # a slot without an expert, like every id that is none
    assert_is_loop(layer(tokens=1200, experts=experts, model_size=2, inner=2, index=index), 1e-9)


@pytest.mark.parametrize("weights", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("data", [torch.float32, torch.float64, torch.bfloat16])
def test_routing_weights_in_another_dtype(weights, data):
    one = layer(dtype=data)
    operands = list(one.operands)
    operands[1] = operands[1].detach().to(weights).requires_grad_()
    eps = max(torch.finfo(weights).eps, torch.finfo(data).eps)
    assert_is_loop(Layer(one.index, tuple(operands), GATED), 40 * eps)


def test_gradcheck():
    one = layer(FfnSpec("gelu", "interleaved"), tokens=4, model_size=3, inner=2, bias=True)
    assert torch.autograd.gradcheck(
        lambda *t: Layer(one.index, (*t[:4], None, None, *t[4:]), one.spec).run(), one.leaves()
    )


def test_without_gradients_h_is_not_kept():
    one = layer()
    with Operators() as seen, torch.no_grad():
        one.run()
    assert seen.seen == ["moe_ffn"]
    with Operators() as seen:
        one.run().sum().backward()
    assert seen.seen == ["moe_ffn_forward", "moe_ffn_backward"]
    with torch.inference_mode():
        torch.testing.assert_close(one.run(), one.loop())


def saved(one: Layer) -> tuple[int, int]:
    """Numbers of activations (not operands but x), and bytes of ids and indices, that are kept for backward."""
    mine = {t.untyped_storage().data_ptr() for t in one.operands[1:] if t is not None}
    kept: dict[int, Tensor] = {}

    def pack(t: Tensor) -> Tensor:
        if (place := t.untyped_storage().data_ptr()) not in mine:
            kept[place] = t
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        one.run()
    bytes_of = [(t.is_floating_point(), t.untyped_storage().nbytes()) for t in kept.values()]
    return sum(size for floats, size in bytes_of if floats) // 8, sum(size for floats, size in bytes_of if not floats)


def test_what_is_saved():
    x, h, routing = 13 * 8, 13 * 2 * 24, 2 * 13 * 2 * 4 + 5 * 4
    assert saved(layer()) == (x + h, routing)
    assert saved(layer().with_spec(recompute_h=True)) == (x, routing)
    assert saved(frozen(layer(), "w1")) == (h, routing), "x is read only by the gradient of W1"
    assert saved(frozen(layer(), *NAMES)) == (0, 0)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("recompute", [False, True])
def test_activation_checkpointing(reentrant, recompute):
    one = layer(bias=True).with_spec(recompute_h=recompute)
    plain = one.grads(one.run())
    again = (
        one.grads(checkpoint(lambda *_: one.run(), *one.leaves(), use_reentrant=reentrant)) if not reentrant else None
    )
    if reentrant:  # this mode only works with backward()
        generator = torch.Generator().manual_seed(11)
        value = checkpoint(lambda *_: one.run(), *one.leaves(), use_reentrant=True)
        value.backward(torch.randn(value.shape, generator=generator, dtype=torch.float64))
        again = [t.grad for t in one.leaves()]
    for a, b in zip(plain, again):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_is_that_of_linear(dtype):
    one = layer(dtype=torch.float32, bias=True, tokens=40)
    exact = one.to(torch.float64)
    with torch.autocast("cpu", dtype=dtype):
        value = one.run()
        linear = F.linear(one.operands[0], one.operands[2][0])
    assert value.dtype == linear.dtype == dtype
    assert row_error(value, exact.loop()) < 16 * torch.finfo(dtype).eps
    for leaf, g, e in zip(one.leaves(), one.grads(value), exact.grads(exact.loop())):
        assert g.dtype == leaf.dtype == torch.float32
        assert row_error(g, e) < 40 * torch.finfo(dtype).eps


@pytest.mark.parametrize("by_float32", [False, True])
def test_autocast_casts_nothing_down_that_a_cpu_raises_again(by_float32, monkeypatch):
    one = layer(dtype=torch.float32, bias=True, tokens=40)
    monkeypatch.setattr(library, "multiplies_in_float32", lambda dtype: by_float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        value = one.run()
    assert torch.equal(value, one.run().bfloat16()) is by_float32


def test_autocast_leaves_float64_alone_and_ends_inside_the_operator():
    one = layer(dtype=torch.float64, bias=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        value = one.run()
        grads = one.grads(value)  # backward within autocast
    assert value.dtype == torch.float64
    assert row_error(value, one.loop()) < 1e-12
    for g, e in zip(grads, one.grads(one.loop())):
        assert row_error(g, e) < 1e-11


def test_float32_forward_outside_and_backward_inside_autocast():
    one = layer(dtype=torch.float32, bias=True)
    value = one.run()
    expected = one.grads(one.run())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for g, e in zip(one.grads(value), expected):
            torch.testing.assert_close(g, e)


class Block(nn.Module):
    """A router and the operator."""

    def __init__(self, spec: FfnSpec) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.gate = nn.Linear(8, 4)
        self.w1, self.w2 = nn.Parameter(torch.randn(4, 24, 8)), nn.Parameter(torch.randn(4, 8, 12))
        self.spec = spec

    def forward(self, x: Tensor) -> Tensor:
        weights, index = self.gate(x).softmax(-1).topk(2)
        return ops.moe_ffn(x, index, weights, self.w1, None, None, None, self.w2, None, self.spec)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("recompute", [False, True])
def test_compile_in_one_graph(dynamic, recompute):
    torch._dynamo.reset()
    block = Block(FfnSpec("silu", "concat", recompute_h=recompute)).double()
    compiled = torch.compile(block, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    for tokens in (6, 6, 9):
        x = torch.randn(tokens, 8, dtype=torch.float64, requires_grad=True)
        torch.testing.assert_close(compiled(x), block(x))
        mine = torch.autograd.grad(compiled(x).square().sum(), [x, *block.parameters()])
        theirs = torch.autograd.grad(block(x).square().sum(), [x, *block.parameters()])
        torch.testing.assert_close(mine, theirs)


def test_export_keeps_the_node_for_any_number_of_tokens():
    block = Block(GATED)
    tokens = torch.export.Dim("tokens", min=2)
    program = torch.export.export(block, (torch.randn(6, 8),), dynamic_shapes={"x": {0: tokens}})
    for p in (program, program.run_decompositions()):
        targets = [n.target for n in p.graph.nodes if n.op == "call_function"]
        assert targets.count(torch.ops.hexa.moe_ffn.default) == 1
        x = torch.randn(17, 8)
        torch.testing.assert_close(p.module()(x), block(x))


def test_meta_tensors_have_shapes():
    block = Block(GATED).to("meta")
    y = block(torch.empty(5, 8, device="meta"))
    assert y.shape == (5, 8)
    y.sum().backward()
    assert block.w1.grad.shape == block.w1.shape


@pytest.mark.parametrize("names", [(), ("x", "b1", "b2"), ("w2", "top_k_weights")], ids="-".join)
@pytest.mark.parametrize(
    "spec", [FfnSpec("silu", "concat"), FfnSpec("gelu", "split", "kn"), FfnSpec("tanh", recompute_h=True)], ids=str
)
def test_second_and_third_derivatives_follow_the_loop(spec, names):
    one, found = frozen(layer(spec, bias=True), *names), []
    for run in (one.run, one.loop):
        first = torch.autograd.grad(run().pow(3).sum(), one.leaves(), create_graph=True)
        second = torch.autograd.grad(sum(g.pow(3).sum() for g in first), one.leaves(), create_graph=True)
        found.append((*first, *second, *torch.autograd.grad(sum(g.pow(3).sum() for g in second), one.leaves())))
    torch.testing.assert_close(*found)


def test_a_second_derivative_needs_x():
    """Which nothing else does where the weights that it is multiplied by are frozen."""
    one = layer()
    one.operands[2].requires_grad_(False)
    (g,) = torch.autograd.grad(one.run().square().sum(), one.operands[0], create_graph=True)
    with pytest.raises(InputError, match="x is not kept"):
        torch.autograd.grad(g.sum(), one.operands[0])


def test_a_second_derivative_sees_that_a_bias_was_written():
    one = layer(bias=True)
    y, b1 = one.run(), one.operands[3]
    with torch.no_grad():
        b1.add_(1)
    torch.autograd.grad(y.sum(), one.leaves(), retain_graph=True)  # reads no bias
    with pytest.raises(InputError, match="b1 was written to"):
        torch.autograd.grad(y.sum(), one.leaves(), create_graph=True)


@pytest.mark.parametrize("name", ["moe_ffn_fp8", "moe_ffn_sources"])
def test_its_relatives_refuse_it_too(name):
    """Not a part of it only: the loss's own second derivative is there."""
    x, w1, w2 = torch.randn(4, 8, requires_grad=True), torch.randn(3, 12, 8), torch.randn(3, 8, 12)
    operands = (x, torch.randint(0, 3, (4, 2)), None, w1, None, None, None, w2, None)
    static = ("silu", "none", [], "nk", "nk", False)
    dense = (*[None] * 6, [1.0] * 3, [], [], [], ["dense"] * 3)
    args = (*operands, *static, False) if name == "moe_ffn_fp8" else (*operands, *dense, *static)
    y = getattr(torch.ops.hexa, name)(*args)
    (g,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    with pytest.raises(InputError, match="no second derivative"):
        (g.square().sum() + x.sum()).backward()


def test_expanded_and_transposed_gradients():
    one = layer()
    value = one.run()
    leaves = one.leaves()
    torch.testing.assert_close(
        torch.autograd.grad(value.sum(), leaves, retain_graph=True),
        torch.autograd.grad(value, leaves, torch.ones_like(value), retain_graph=True),
    )
    g = torch.randn(value.shape[::-1], dtype=value.dtype).t()
    torch.testing.assert_close(
        torch.autograd.grad(value, leaves, g, retain_graph=True), torch.autograd.grad(value, leaves, g.contiguous())
    )


def test_a_master_of_another_shape_is_refused():
    one = layer(tokens=40)
    w1 = one.operands[2]
    w1.main_grad = torch.zeros(3)
    with pytest.raises(InputError, match="main_grad"):
        one.run().sum().backward()


@pytest.mark.parametrize("way", ["after accumulation", "on the gradient", "on the node"])
def test_hooks_that_add_to_a_master_by_themselves_see_the_gradient(way: str) -> None:
    """Megatron's, on the node, ask its flag, and drop what they find in grad."""
    expected = layer(tokens=40)
    expected.run().sum().backward()
    one = layer(tokens=40)
    w1 = one.operands[2]
    w1.main_grad, w1.grad_added_to_main_grad = torch.zeros_like(w1), False
    node = torch.autograd.graph.get_gradient_edge(w1).node

    def add(*_: object) -> None:
        if not w1.grad_added_to_main_grad:
            w1.main_grad.add_(w1.grad)
        w1.grad = None

    if way == "after accumulation":
        w1.register_post_accumulate_grad_hook(add)
    elif way == "on the gradient":
        w1.register_hook(w1.main_grad.add_)
    else:
        node.register_hook(add)
    one.run().sum().backward()
    assert w1.grad_added_to_main_grad == (way == "on the node")
    torch.testing.assert_close(w1.main_grad, expected.operands[2].grad)
