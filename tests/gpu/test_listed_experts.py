"""Experts in lists on a device: kernels read every matrix where it lies, and give what they give of stacks, bit for bit."""

import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hexa_fx
from hexa_fx.cuda import fallback, places
from hexa_fx.ir import FfnSpec
from hexa_fx.ops import direct, fp8_weights, moe_ffn_fp8
from hexa_fx.ops.listed import Listed
from hexa_fx.ops.table_layers import static_of
from tests.gpu.cases import graph_of, make_routing, randn

pytestmark = pytest.mark.gpu

SIZES = {  # tokens, k, experts, D, I
    "decode": (3, 2, 8, 256, 512),
    "few tokens, long lines": (4, 2, 8, 256, 4096),
    "one token": (1, 4, 64, 512, 128),
    "some": (200, 2, 8, 128, 192),
    "odd rows": (333, 2, 6, 128, 64),
    "no whole boxes": (300, 2, 4, 64, 40),
    "swapped": (1200, 2, 16, 256, 128),
    "clusters": (4096, 2, 8, 1024, 256),
    "clusters, experts of 128 rows": (1024, 2, 16, 1024, 512),
    "many experts": (2000, 8, 300, 128, 64),
    "no tokens": (0, 2, 4, 64, 64),
}


class Layer:
    """A layer's operands, of which weights and biases are one tensor an expert."""

    def __init__(
        self,
        size: str,
        glu: str,
        dtype: torch.dtype,
        layout: str = "nk",
        bias: bool = False,
        parts: int = 2,
        fp8: bool = False,
    ) -> None:
        tokens, k, experts, model, inner = SIZES[size]
        routing = (
            make_routing("sentinels" if tokens > 2 * experts else "random", tokens, k, experts) if tokens else None
        )
        self.index = torch.zeros(0, k, dtype=torch.int64, device="cuda") if routing is None else routing.index.cuda()
        self.x, self.gates = (
            self._leaf(tokens, model, dtype=dtype),
            torch.rand(tokens, k, device="cuda").requires_grad_(),
        )
        self.dy = randn(tokens, model, dtype=dtype).cuda()
        self.spec = FfnSpec("silu" if glu != "none" else "gelu", glu, layout, layout)  # type: ignore[arg-type]
        self.experts, self.dtype, self.layout, self.fp8 = experts, dtype, layout, fp8
        wide = inner // (parts if glu == "concat" else 1) * (2 if glu == "concat" else 1)
        first = [self._weight(wide, model) for _ in range(parts if glu == "concat" else 1)]
        up = [self._weight(inner, model)] if glu == "split" else None
        self.biases = (
            [[self._leaf(inner if glu != "concat" else wide, dtype=dtype) for _ in range(experts)] for _ in first]
            if bias
            else None
        )
        self.lists: dict[str, list[list[Tensor]]] = {"w1": first, "w2": [self._weight(model, inner)]}
        if up is not None:
            self.lists["w3"] = up
        if self.biases is not None:
            self.lists["b1"] = self.biases

    def _leaf(self, *shape: int, dtype: torch.dtype, scale: float = 1.0) -> Tensor:
        return randn(*shape, dtype=dtype, scale=scale).cuda().requires_grad_()

    def _weight(self, rows: int, columns: int) -> list[Tensor]:
        shape = (rows, columns) if self.layout == "nk" else (columns, rows)
        return [self._leaf(*shape, dtype=self.dtype, scale=columns**-0.5) for _ in range(self.experts)]

    @property
    def leaves(self) -> list[Tensor]:
        weights = [tensor for name in sorted(self.lists) for part in self.lists[name] for tensor in part]
        return [self.x, self.gates, *weights]

    def run(self, of_list: Callable[[list[list[Tensor]]], Any]) -> Tensor:
        given = {name: of_list(parts) for name, parts in self.lists.items()}
        weights = [given.get(name) for name in ("w1", "b1", "w3", "b3", "w2", "b2")]
        operator = direct.moe_ffn_fp8 if self.fp8 else direct.moe_ffn
        more = (True,) if self.fp8 else ()
        return operator(self.x, self.index, self.gates, *weights, *static_of(self.spec), *more)  # type: ignore[no-any-return]

    def step(self, of_list: Callable[[list[list[Tensor]]], Any]) -> list[Tensor]:
        y = self.run(of_list)
        return [y, *torch.autograd.grad(y, self.leaves, self.dy)]


def stacked(parts: list[list[Tensor]]) -> Tensor:
    return Listed(parts, eager=False).stack()


CASES = [
    *((size, "concat", torch.bfloat16, "nk", False, 2) for size in SIZES),
    *((size, "concat", torch.bfloat16, "nk", False, 1) for size in ("decode", "some", "swapped", "clusters")),
    *(
        (size, "none", torch.float16, layout, True, 1)
        for size in ("decode", "some", "clusters")
        for layout in ("nk", "kn")
    ),
    *(
        (size, "split", torch.bfloat16, layout, False, 1)
        for size in ("decode", "some", "clusters")
        for layout in ("nk", "kn")
    ),
    *((size, "concat", torch.float32, "nk", True, 2) for size in ("decode", "some", "odd rows")),
    *((size, "none", torch.float64, "kn", False, 1) for size in ("some", "odd rows")),
]


def ids(case: Sequence[Any]) -> str:
    size, glu, dtype, layout, bias, parts = case
    return f"{size}, {glu} {layout}, {str(dtype).removeprefix('torch.')}, {parts} part(s){', bias' if bias else ''}"


@pytest.mark.parametrize("case", CASES, ids=ids)
def test_bits_are_those_of_stacks(case: Sequence[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward with and without gradients, and every gradient. Nothing is copied but biases, and nothing falls back."""
    layer, copied = Layer(*case), []
    stack = Listed.stack
    monkeypatch.setattr(Listed, "stack", lambda self, *args: (copied.append(self.ndim), stack(self, *args))[1])
    fallback.fallbacks.clear()
    before = [tensor.data_ptr() for tensor in layer.leaves]
    expected = layer.step(stacked)
    copied.clear()
    found = layer.step(Listed)
    near = 2**-6 if case[0] == "no whole boxes" else 0  # another family of kernels multiplies stacks
    for number, (one, other) in enumerate(zip(found, expected, strict=True)):
        torch.testing.assert_close(
            one, other, rtol=near, atol=near, equal_nan=True, msg=lambda text, number=number: f"{number}: {text}"
        )
    with torch.no_grad():
        y = layer.run(Listed)
        assert not copied or max(copied) < 3, "a weight was copied"
        torch.testing.assert_close(y, layer.run(stacked), rtol=near, atol=near)
    assert [tensor.data_ptr() for tensor in layer.leaves] == before
    assert not fallback.fallbacks


@pytest.mark.parametrize(("glu", "parts"), [("concat", 2), ("concat", 1), ("none", 1), ("split", 1)])
def test_fp8(glu: str, parts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same bits; weights are quantised once, and again once one was written to."""
    monkeypatch.setitem(moe_ffn_fp8.is_few_on, "cuda", lambda o, captured: False)
    layer = Layer("clusters, experts of 128 rows", glu, torch.bfloat16, parts=parts, fp8=True)
    expected = layer.step(stacked)
    monkeypatch.setattr(Listed, "stack", lambda self, *args: pytest.fail("a weight was copied"))
    for one, other in zip(layer.step(Listed), expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)
    written: list[int] = []
    write = fp8_weights._written
    monkeypatch.setattr(fp8_weights, "_written", lambda *args: (written.append(1), write(*args))[1])
    with torch.no_grad():
        before = layer.run(Listed)
        layer.lists["w2"][0][3].mul_(2)
        assert not written
        assert not torch.equal(layer.run(Listed), before)
    assert len(written) == 1


@pytest.mark.parametrize("bytes_apart", [0, 1 << 30])
@pytest.mark.parametrize("step", [512, 16])
def test_matrices_lie_anywhere(bytes_apart: int, step: int) -> None:
    """Far apart, in any order, at multiples of 16 bytes only. Between them are no numbers."""
    layer = Layer("clusters", "concat", torch.bfloat16)
    expected, between = layer.step(stacked), []
    for part in (part for parts in layer.lists.values() for part in parts):
        for number in reversed(range(len(part))):
            between.append(torch.empty(bytes_apart, dtype=torch.uint8, device="cuda"))
            room = torch.full(
                (part[number].numel() + 3 * step // 2,), float("nan"), dtype=torch.bfloat16, device="cuda"
            )
            own = room[step // 2 * (number % 3) :][: part[number].numel()].view_as(part[number])
            part[number] = own.copy_(part[number].detach()).requires_grad_()
    found = layer.step(Listed)
    del between
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


def test_what_cannot_be_read_so_is_copied() -> None:
    """Matrices at odd addresses, transposed ones."""
    layer = Layer("some", "concat", torch.bfloat16)
    expected = layer.step(stacked)
    for number, tensor in enumerate(layer.lists["w2"][0]):
        room = torch.empty(tensor.numel() + 8, dtype=torch.bfloat16, device="cuda")
        odd = room[1 : 1 + tensor.numel()].view_as(tensor) if number % 2 else torch.empty_like(tensor.t()).t()
        layer.lists["w2"][0][number] = odd.copy_(tensor.detach()).requires_grad_()
    for one, other in zip(layer.step(Listed), expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


def test_a_graph_reads_them() -> None:
    layer = Layer("some", "concat", torch.bfloat16)
    with torch.no_grad():
        expected = layer.run(Listed)  # also builds kernels, and tells where experts lie
        graph, y = graph_of(lambda: layer.run(Listed))
        y.fill_(float("nan"))
        graph.replay()
        torch.testing.assert_close(y, expected, rtol=0, atol=0)


class Block(nn.Module):
    """A loop over a list, as models had it before weights were stacked."""

    def __init__(self, experts: int = 8, model: int = 128, inner: int = 192) -> None:
        super().__init__()
        self.gate = nn.Linear(model, experts, bias=False)
        self.experts = nn.ModuleList(self._expert(model, inner) for _ in range(experts))

    @staticmethod
    def _expert(model: int, inner: int) -> nn.ModuleDict:
        sizes = {"w1": (model, inner), "w3": (model, inner), "w2": (inner, model)}
        return nn.ModuleDict({name: nn.Linear(*size, bias=False) for name, size in sizes.items()})

    def forward(self, x: Tensor) -> Tensor:
        weights, index = self.gate(x).softmax(-1).topk(2)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            token, slot = torch.where(index == number)
            h = nn.functional.silu(expert["w1"](x[token])) * expert["w3"](x[token])
            out.index_add_(0, token, expert["w2"](h) * weights[token, slot, None].to(x.dtype))
        return out


def of_model(model: nn.Module, x: Tensor) -> list[Tensor]:
    """Result and gradients, of every parameter."""
    model.zero_grad()
    y = model(x)
    y.float().square().sum().backward()
    return [y.detach(), *(p.grad for p in model.parameters())]  # type: ignore[misc]


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("frozen", [False, True])
def test_a_block(autocast: bool, frozen: bool) -> None:
    """Through the public API: no parameter moves, gradients are those of the original, operators ran."""
    torch.manual_seed(0)
    block = Block().cuda() if autocast else Block().cuda().bfloat16()
    for number, expert in enumerate(block.experts):
        expert.requires_grad_(not frozen or number == 3)
    x = torch.randn(300, 128, device="cuda", dtype=next(block.parameters()).dtype)
    with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
        y = block(x)
        y.float().square().sum().backward()
        expected = [y.detach(), *(None if p.grad is None else p.grad.clone() for p in block.parameters())]
        before = [p.data_ptr() for p in block.parameters()]
        optimized = hexa_fx.optimize_(block)
        optimized.zero_grad()
        y = optimized(x)
        y.float().square().sum().backward()
    found = [y.detach(), *(p.grad for p in block.parameters())]
    assert [p.data_ptr() for p in block.parameters()] == before
    for one, other in zip(found, expected, strict=True):
        if one is None or other is None:
            assert one is other is None
            continue
        assert float((one.float() - other.float()).norm() / other.float().norm()) < 2e-2
    assert "1 of 1" in str(optimized.report) or optimized.report.rewritten


def test_main_grad() -> None:
    """Each parameter's own buffer takes its gradient, which is not rounded on its way."""
    torch.manual_seed(0)
    block = Block().cuda().bfloat16()
    x = torch.randn(300, 128, device="cuda", dtype=torch.bfloat16)
    hexa_fx.optimize_(block)
    expected = of_model(block, x)
    for p in block.experts.parameters():
        p.main_grad = torch.ones_like(p, dtype=torch.float32)
    block.zero_grad()
    block(x).float().square().sum().backward()
    for p, gradient in zip(block.parameters(), expected[1:], strict=True):
        if hasattr(p, "main_grad"):
            assert p.grad is None
            change = p.main_grad - 1
            torch.testing.assert_close(change, gradient.float(), rtol=2e-2, atol=2e-2)
            large = change[change.abs() > change.abs().max() / 8]
            assert float((large == large.bfloat16().float()).double().mean()) < 0.2


def test_threads_and_streams() -> None:
    """Each thread on a stream of its own; tables are written on the stream that reads them."""
    layer = Layer("some", "concat", torch.bfloat16)
    with torch.no_grad():
        expected = layer.run(stacked)
    wrong: list[int] = []

    def run() -> None:
        with torch.no_grad(), torch.cuda.stream(torch.cuda.Stream()):
            for number in range(50):
                if number % 10 == 0:
                    places._table.cache_clear()
                y = layer.run(Listed)
                torch.cuda.current_stream().synchronize()
                wrong.extend([number] if not torch.equal(y, expected) else [])

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
