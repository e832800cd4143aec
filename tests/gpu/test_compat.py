"""The operators on a device under the rest of torch: opcheck, torch.compile, autocast with GradScaler, checkpointing."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from hexa_fx.ir import FfnSpec
from hexa_fx.ops import moe_ffn
from tests.gpu.cases import make_routing, randn

T, K, E, D, H = 120, 2, 4, 64, 48
SPEC = FfnSpec("silu", "concat")


def layer(dtype: torch.dtype = torch.float32) -> tuple[Callable[..., Tensor], list[Tensor], Tensor]:
    """A function of x, the routing weights and the two expert weights; its arguments; the routing."""
    index = make_routing("random", T, K, E).index
    tensors = [randn(T, D, dtype=dtype), torch.rand(T, K, device="cuda")]
    tensors += [randn(E, 2 * H, D, dtype=dtype, scale=D**-0.5), randn(E, D, H, dtype=dtype, scale=H**-0.5)]

    def run(x: Tensor, weights: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
        return moe_ffn(x, index, weights, w1, None, None, None, w2, None, SPEC)

    return run, [t.requires_grad_() for t in tensors], index


def gradients(run: Callable[..., Tensor], tensors: list[Tensor]) -> list[Tensor]:
    y = run(*tensors)
    return [y.detach(), *torch.autograd.grad(y.float().square().sum(), tensors)]


def relative(got: list[Tensor], want: list[Tensor]) -> float:
    pairs = zip(got, want, strict=True)
    return max(float((g.double() - w.double()).norm() / w.double().norm()) for g, w in pairs)


OPCHECKS = {
    "reindex": lambda r, w, x, h: (r.index, E),
    "esmm": lambda r, w, x, h: (x, w, None, r.v, r.offs, K, "nk"),
    "esmm_act": lambda r, w, x, h: (x, w, None, None, None, r.v, r.offs, K, "nk", "silu", "concat", []),
    "activate": lambda r, w, x, h: (h, "gelu", "none", []),
    "ess": lambda r, w, x, h: (h, None, r.offs, 1, None),
    "estmm": lambda r, w, x, h: (x, h, r.v, None, r.offs, K, "nk"),
    "combine": lambda r, w, x, h: (h, torch.rand(T, K, device="cuda"), r.inv, r.offs, K),
}


@pytest.mark.parametrize("name", OPCHECKS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_opcheck(name: str, dtype: torch.dtype) -> None:
    torch.utils.deterministic.fill_uninitialized_memory = False
    r = make_routing("random", T, K, E)
    w, x = randn(E, 2 * H, D, dtype=dtype), randn(T, D, dtype=dtype)
    h = randn(T * K, 2 * H, dtype=dtype)
    for t in (w, x, h):
        t.requires_grad_()
    operator = getattr(torch.ops.hexa, name).default
    torch.library.opcheck(operator, OPCHECKS[name](r, w, x, h), atol=1e-2, rtol=1e-2)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiles_without_a_graph_break(backend: str) -> None:
    torch.utils.deterministic.fill_uninitialized_memory = False
    run, tensors, _ = layer()
    compiled = torch.compile(lambda *args: run(*args).sin(), backend=backend, fullgraph=True)
    got = gradients(compiled, tensors)
    want = gradients(lambda *args: run(*args).sin(), tensors)
    assert relative(got, want) < 1e-5


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_autocast_with_a_grad_scaler(dtype: torch.dtype) -> None:
    run, tensors, _ = layer()
    want = gradients(run, tensors)
    scaler = torch.amp.GradScaler("cuda", init_scale=16.0)
    optimizer = torch.optim.SGD(tensors, lr=0.0)
    with torch.autocast("cuda", dtype):
        y = run(*tensors)
    assert y.dtype == dtype
    scaler.scale(y.float().square().sum()).backward()
    scaler.unscale_(optimizer)
    got = [y.detach(), *(t.grad for t in tensors)]
    assert all(t.grad.dtype == t.dtype for t in tensors)
    assert relative(got, want) < (4e-3 if dtype == torch.float16 else 3e-2)
    scaler.step(optimizer)


@pytest.mark.parametrize("reentrant", [True, False])
def test_activation_checkpointing(reentrant: bool) -> None:
    run, tensors, _ = layer(torch.bfloat16)
    want = gradients(run, tensors)
    got = gradients(lambda *args: checkpoint(run, *args, use_reentrant=reentrant), tensors) if not reentrant else None
    if got is None:
        y = checkpoint(run, *tensors, use_reentrant=True)
        y.float().square().sum().backward()
        got = [y.detach(), *(t.grad for t in tensors)]
    for g, w in zip(got, want, strict=True):
        assert torch.equal(g, w)
