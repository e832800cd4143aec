"""Forward and backward of rewritten blocks against their originals, on the CPU (for bench_optimize.py)."""

from __future__ import annotations

import inspect
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import is_dataclass
from functools import partial
from itertools import cycle
from typing import Any

import torch
from torch import nn

import hexa_fx
from hexa_fx.runtime.forward import HexaForward
from tests.zoo import by_sorting, common, loops
from tests.zoo.registry import VARIANTS

Row = dict[str, Any]


def bench_zoo(batch: int = 4, seq: int = 64) -> Iterator[Row]:
    for v in VARIANTS:
        if v.expect == "refused":
            continue
        model = v.make(0).eval()
        args, kwargs = _wanting_gradients(*v.inputs(batch, seq, torch.float32, 0))
        opt = _optimized(model, v.inputs(2, 7, torch.float32, 0), verify=False)  # the tests of the zoo verify
        if any(b.status == "rewritten" for b in opt.report.blocks):
            row = {"question": "zoo", "block": v.name, "tokens": batch * seq, "runs": _runs(opt, args, kwargs)}
            yield {**row, **_compared(model, opt, (args, kwargs))}


class ListMixture(nn.Module):
    """transformers 4 style: ModuleList, one-hot mask, index_add_."""

    def __init__(self, num_experts: int, dim: int, hidden: int, top_k: int = 4) -> None:
        super().__init__()
        self.gate = common.TopKGate(dim, num_experts, top_k)
        self.experts = common.experts(common.SwiGLU, num_experts, dim=dim, hidden=hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.reshape(-1, x.shape[-1])
        weights, indices = self.gate(flat)
        out = torch.zeros_like(flat)
        for e, expert in enumerate(self.experts):
            token, slot = torch.where(indices == e)
            out.index_add_(0, token, expert(flat[token]) * weights[token, slot, None])
        return out.view(x.shape)


def bench_experts(dim: int = 128, hidden: int = 64, batch: int = 4, seq: int = 64) -> Iterator[Row]:
    """One block of growing E, in four idioms."""
    for num_experts in (8, 64, 128):
        for name, block in _idioms(num_experts, dim, hidden):
            x = torch.randn(batch, seq, dim, generator=torch.Generator().manual_seed(0))
            opt = _optimized(block.eval(), ((x[:2, :7].contiguous(),), {}))
            x.requires_grad_()
            yield {
                "question": "experts",
                "block": name,
                "experts": num_experts,
                "tokens": batch * seq,
                "runs": _runs(opt, (x,), {}),
                **_compared(block, opt, ((x,), {})),
            }


def bench_grouped_mm() -> Iterator[Row]:
    """The experts of transformers' OLMoE with ``grouped_mm``, whose products are torch's already. Every call has other tokens."""
    from transformers import OlmoeConfig
    from transformers.models.olmoe.modeling_olmoe import OlmoeSparseMoeBlock

    for experts, top_k, dim, hidden, tokens in (
        (8, 2, 256, 512, 1024),
        (64, 8, 256, 128, 1024),
        (64, 4, 512, 256, 4096),
    ):
        for dtype in (torch.float32, torch.bfloat16):
            sizes = {
                "hidden_size": dim,
                "intermediate_size": hidden,
                "num_experts": experts,
                "num_experts_per_tok": top_k,
            }
            config = OlmoeConfig(**sizes)
            config._experts_implementation = "grouped_mm"
            torch.manual_seed(0)
            block = OlmoeSparseMoeBlock(config).to(dtype).eval()
            for parameter in block.parameters():
                nn.init.normal_(parameter, std=0.02)
            inputs = [torch.randn(1, tokens, dim, dtype=dtype, requires_grad=True) for _ in range(8)]
            opt = _optimized(block, ((inputs[0][:, :64].detach(),), {}))
            row = {
                "question": "grouped_mm",
                "experts": experts,
                "top_k": top_k,
                "dim": dim,
                "hidden": hidden,
                "tokens": tokens,
            }
            yield {
                **row,
                "dtype": str(dtype),
                "runs": _runs(opt, (inputs[0],), {}),
                **_compared(block, opt, *(((x,), {}) for x in inputs)),
            }


def _idioms(num_experts: int, dim: int, hidden: int) -> Iterator[tuple[str, nn.Module]]:
    torch.manual_seed(0)
    yield "list, index_add_", ListMixture(num_experts, dim, hidden)
    for name, module, cls in (
        ("stacked gate_up, hit experts", loops, loops.StackedGateUp),
        ("sort, split, cat", by_sorting, by_sorting.SplitByCounts),
        ("gathered einsum", by_sorting, by_sorting.GatheredEinsum),
    ):
        with _sizes(module, D=dim, I=hidden, E=num_experts, K=4):
            block = cls()
            if isinstance(block, loops.StackedGateUp):
                block.gate = common.TopKGate(dim, num_experts, 4)
            yield name, block


class _sizes:
    """Sets a zoo module's size constants, which its blocks read when they are made and in forward."""

    def __init__(self, module: Any, **values: int) -> None:
        self.module, self.values = module, values

    def __enter__(self) -> None:
        self.before = {name: getattr(self.module, name) for name in self.values if hasattr(self.module, name)}
        self._set(self.values)

    def __exit__(self, *_: object) -> None:
        self._set(self.before)

    def _set(self, values: dict[str, int]) -> None:
        for name in self.before:
            setattr(self.module, name, values[name])


def _optimized(model: nn.Module, call: tuple[tuple[Any, ...], dict[str, Any]], verify: bool = True) -> nn.Module:
    args, kwargs = call
    example = {**dict(zip(inspect.signature(model.forward).parameters, args)), **kwargs} if kwargs else args
    return hexa_fx.optimize(model, example, hexa_fx.HexaConfig(verify=verify))


def _wanting_gradients(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)]
    for tensor in tensors:
        tensor.requires_grad_(tensor.is_floating_point())
    return args, kwargs


def _runs(opt: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """``rewritten`` or ``own code``: what a call runs in every block."""
    seen: set[str] = set()
    forwards = [f for m in opt.modules() if isinstance(f := m.__dict__.get("forward"), HexaForward)]
    for forward in forwards:
        plain = forward.original
        forward.original = lambda *a, p=plain, **k: (seen.add("own code"), p(*a, **k))[1]  # type: ignore[method-assign]
    _forward(opt, args, kwargs)
    for forward in forwards:
        del forward.original
    return next(iter(seen), "rewritten")


def _compared(model: nn.Module, opt: nn.Module, *calls: tuple[tuple[Any, ...], dict[str, Any]]) -> Row:
    """Milliseconds of forward (eval mode, no gradients) and of forward plus backward, in turns over ``calls``."""
    row: Row = {}
    inputs = [value for args, kwargs in calls for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)]
    wanting = [t for t in (*model.parameters(), *opt.parameters(), *inputs) if t.requires_grad]
    for name, step in (("forward", _forward), ("step", partial(_step, wanting=wanting))):
        turns = [partial(lambda m, s, given: s(m, *next(given)), m, step, cycle(calls)) for m in (model, opt)]
        original, rewritten, speedup = _interleaved(*turns)
        row |= {
            f"{name}_ms": round(1e3 * original, 3),
            f"{name}_rewritten_ms": round(1e3 * rewritten, 3),
            f"{name}_speedup": round(speedup, 2),
        }
    return row


def _forward(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    with torch.no_grad():
        model(*args, **kwargs)


def _step(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], wanting: Sequence[torch.Tensor] = ()
) -> None:
    """Forward and backward. The gradients of ``wanting`` are dropped at the end."""
    output = model(*args, **kwargs)
    leaves = torch.utils._pytree.tree_leaves(vars(output) if is_dataclass(output) else output)
    sum(t.sum() for t in leaves if isinstance(t, torch.Tensor) and t.requires_grad).backward()
    for tensor in wanting:
        tensor.grad = None


def _interleaved(
    first: Callable[[], None], second: Callable[[], None], budget: float = 0.5
) -> tuple[float, float, float]:
    """Medians of both, and of first over second in pairs that follow each other: a machine whose speed drifts hits both alike.

    Every other pair runs in the opposite order.
    """
    for call in (first, second, first, second):
        call()
    times: dict[Callable[[], None], list[float]] = {first: [], second: []}
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    started, order = clock(), (first, second)
    while clock() - started < budget or len(times[first]) < 6:
        for call in order:
            before = clock()
            call()
            times[call].append(clock() - before)
        order = order[::-1]
    ratio = statistics.median(a / b for a, b in zip(times[first], times[second], strict=True))
    return statistics.median(times[first]), statistics.median(times[second]), ratio
