"""Compares a model with its optimized form: outputs, every gradient, buffers, random state, state_dict.

Written without any code of the product, so that it can judge it.
"""

import copy
import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode


@dataclass(frozen=True)
class Run:
    """What one forward and backward left behind."""

    outputs: dict[str, torch.Tensor]
    constants: dict[str, object]
    gradients: dict[str, torch.Tensor | None]
    buffers: dict[str, torch.Tensor]
    rng: torch.Tensor


@dataclass(frozen=True)
class Difference:
    """How far the optimized model is from its original.

    Args:
        forward, gradient: largest absolute difference of a tensor, relative to the largest absolute value of the original
            tensor; infinite where NaN or infinite values stand in other places, or shapes or dtypes differ.
        forward_of, gradient_of: the tensor that had it.
        none_gradients: parameters that have a gradient in one model and None in the other (counted as zero above).
        buffers: buffers that differ after the call.
        structure: outputs that only one has, or Python values among the outputs that differ.
        rng: whether the global generator was left in the same state.
    """

    forward: float
    gradient: float
    forward_of: str = ""
    gradient_of: str = ""
    none_gradients: tuple[str, ...] = ()
    buffers: tuple[str, ...] = ()
    structure: tuple[str, ...] = ()
    rng: bool = True

    def within(self, tolerance: float) -> bool:
        """Whether everything but None gradients agrees."""
        errors_fit = self.forward <= tolerance and self.gradient <= 10 * tolerance
        return errors_fit and not self.buffers and not self.structure and self.rng


def compare(
    original: nn.Module,
    optimized: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None = None,
    *,
    train: bool = False,
    seed: int = 0,
    backward: bool = True,
) -> Difference:
    """Run both models on the same inputs, random state and buffers, and compare all that a caller can see.

    Args:
        original, optimized: the two models; they may share parameters and buffers. Buffers are restored afterwards.
        args, kwargs: inputs; floating point tensors also get a gradient.
        train: mode of both models.
        seed: of the global generator and of the random projection that gradients are taken of.
    """
    kwargs = kwargs or {}
    before = {name: buffer.detach().clone() for name, buffer in original.named_buffers()}
    first = _run(original, args, kwargs, train, seed, backward)
    _restore(original, before)
    _restore(optimized, before)
    second = _run(optimized, args, kwargs, train, seed, backward)
    _restore(original, before)
    _restore(optimized, before)
    return difference(first, second)


def is_finite(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None = None,
    *,
    train: bool = False,
    seed: int = 0,
) -> bool:
    """Whether all that the model gives is finite. If not, its gradients are NaN or infinite by the order of products."""
    before = {name: buffer.detach().clone() for name, buffer in model.named_buffers()}
    run = _run(model, args, kwargs or {}, train, seed, False)
    _restore(model, before)
    return all(bool(value.isfinite().all()) for value in run.outputs.values())


def difference(first: Run, second: Run) -> Difference:
    """Compare two runs; the first is the reference."""
    forward, forward_of = _largest(first.outputs, second.outputs)
    gradient, gradient_of = _largest(*_none_as_zero(first.gradients, second.gradients))
    return Difference(
        forward,
        gradient,
        forward_of,
        gradient_of,
        tuple(n for n, g in first.gradients.items() if (g is None) != (second.gradients.get(n) is None)),
        tuple(n for n, b in first.buffers.items() if not _same_bits(b, second.buffers.get(n))),
        _structure(first, second),
        torch.equal(first.rng, second.rng),
    )


def operators_run(
    model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None = None, *, gradients: bool = False
) -> int:
    """How many hexa operators one call dispatches after another of its kind, on a copy of the model.

    Zero means that the original code ran, and a comparison says nothing.
    """
    return Counted(model).run(args, kwargs, gradients=gradients)


class Counted:
    """A copy of a model, of which several calls are counted: most of the time of `operators_run` goes into the copy."""

    def __init__(self, model: nn.Module) -> None:
        with _SharedResults():
            self.copied = copy.deepcopy(model)

    def run(self, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None = None, *, gradients: bool = False) -> int:
        """As `operators_run`, in the mode that the copy is in."""
        count = _CountHexa()
        with torch.set_grad_enabled(gradients), torch.random.fork_rng():
            self.copied(*args, **(kwargs or {}))
            with count:
                self.copied(*args, **(kwargs or {}))
        return count.calls


class _SharedResults(TorchFunctionMode):
    """Copies share what autograd computed, such as a loss that a module keeps: torch refuses to copy it."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.__deepcopy__ and not args[0].is_leaf:
            return args[0]
        return func(*args, **(kwargs or {}))


class _CountHexa(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += func.namespace == "hexa"
        return func(*args, **(kwargs or {}))


def perturb(original: nn.Module, optimized: nn.Module, seed: int = 0) -> None:
    """Move every floating parameter and buffer of both models alike, in place, as training does.

    What is zero or one when a model is new (biases, norm weights, correction biases) hides which of two equal numbers the
    code reads; a rewrite that read the wrong one shows now. Also finds weights that were copied instead of shared.
    """
    generator = torch.Generator().manual_seed(seed)
    named = dict([*optimized.named_parameters(), *optimized.named_buffers()])
    with torch.no_grad():
        for name, tensor in [*original.named_parameters(), *original.named_buffers()]:
            if tensor.is_floating_point():
                tensor.add_(0.2 * torch.randn(tensor.shape, generator=generator).to(tensor))
                if named[name].data_ptr() != tensor.data_ptr():
                    named[name].copy_(tensor)


def state_dict_problems(original: nn.Module, optimized: nn.Module) -> list[str]:
    """Sentences on how the two state_dicts differ in keys, order, dtype or bits; empty if they do not."""
    ours, theirs = original.state_dict(), optimized.state_dict()
    if list(ours) != list(theirs):
        return [f"keys or their order differ: {sorted(set(ours) ^ set(theirs)) or 'same keys, other order'}"]
    problems = [f"{key} differs" for key in ours if not _same_bits(ours[key], theirs[key])]
    names, other = [n for n, _ in original.named_parameters()], [n for n, _ in optimized.named_parameters()]
    return problems if names == other else [*problems, f"named_parameters differ: {sorted(set(names) ^ set(other))}"]


def relative_error(reference: torch.Tensor, value: torch.Tensor) -> float:
    """max |reference - value| / max |reference|, infinite if shape, dtype or non-finite places differ."""
    if reference.shape != value.shape or reference.dtype != value.dtype:
        return float("inf")
    if reference.numel() == 0:
        return 0.0
    if not reference.is_floating_point():
        return 0.0 if torch.equal(reference, value) else float("inf")
    finite = torch.isfinite(reference)
    if not torch.equal(finite, torch.isfinite(value)):
        return float("inf")
    if not torch.equal(torch.nan_to_num(reference[~finite]), torch.nan_to_num(value[~finite])):
        return float("inf")
    if not finite.any():
        return 0.0
    largest = (reference[finite] - value[finite]).abs().max().item()
    return largest / max(reference[finite].abs().max().item(), 1e-6)


def _run(
    model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], train: bool, seed: int, backward: bool
) -> Run:
    model.train(train)
    model.zero_grad(set_to_none=True)
    args, kwargs = torch.utils._pytree.tree_map(_fresh_leaf, (args, dict(kwargs)))
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        # A product, so that the model gets no leaf: many models multiply their input in place.
        inputs, keywords = torch.utils._pytree.tree_map(_times_one, (args, kwargs))
        result = model(*inputs, **keywords)
        leaves = dict(_named_leaves(result))
        rng = torch.get_rng_state()
        tensors = {name: leaf for name, leaf in leaves.items() if isinstance(leaf, torch.Tensor)}
        if backward:
            _backward(tensors, seed)
    gradients = {name: p.grad for name, p in model.named_parameters()}
    gradients |= {
        f"input{name}": leaf.grad
        for name, leaf in _named_leaves((args, kwargs))
        if isinstance(leaf, torch.Tensor) and leaf.requires_grad
    }
    model.zero_grad(set_to_none=True)
    return Run(
        {name: tensor.detach() for name, tensor in tensors.items()},
        {name: leaf for name, leaf in leaves.items() if not isinstance(leaf, torch.Tensor)},
        gradients,
        {name: buffer.detach().clone() for name, buffer in model.named_buffers()},
        rng,
    )


def _backward(tensors: Mapping[str, torch.Tensor], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed + 1)
    terms = []
    for tensor in tensors.values():
        if tensor.requires_grad:
            direction = torch.randn(tensor.shape, generator=generator).to(tensor)
            terms.append((tensor * direction).sum())
    if terms:
        torch.stack([term.to(torch.float64) for term in terms]).sum().backward()


def _named_leaves(value: Any, prefix: str = "") -> list[tuple[str, Any]]:
    if isinstance(value, Mapping):
        return [leaf for key, item in value.items() for leaf in _named_leaves(item, f"{prefix}[{key}]")]
    if isinstance(value, (tuple, list)):
        return [leaf for i, item in enumerate(value) for leaf in _named_leaves(item, f"{prefix}[{i}]")]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = [(f.name, getattr(value, f.name)) for f in dataclasses.fields(value)]
        return [leaf for name, item in fields for leaf in _named_leaves(item, f"{prefix}.{name}")]
    return [(prefix or "output", value)]


def _fresh_leaf(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        copied = value.detach().clone()
        return copied.requires_grad_() if copied.is_floating_point() else copied
    return value


def _times_one(value: Any) -> Any:
    return value * 1 if isinstance(value, torch.Tensor) and value.is_floating_point() else value


def _restore(model: nn.Module, buffers: Mapping[str, torch.Tensor]) -> None:
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            buffer.copy_(buffers[name])


def _none_as_zero(
    first: Mapping[str, torch.Tensor | None], second: Mapping[str, torch.Tensor | None]
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Both, with a zero for a None where the other has a gradient; names that only one has are kept."""
    ours, theirs = {}, {}
    for name in dict.fromkeys([*first, *second]):
        a, b = first.get(name), second.get(name)
        if a is None and b is None:
            continue
        ours[name] = torch.zeros_like(b) if a is None and b is not None else a
        theirs[name] = torch.zeros_like(a) if b is None and a is not None else b
    return ours, theirs


def _largest(first: Mapping[str, torch.Tensor], second: Mapping[str, torch.Tensor]) -> tuple[float, str]:
    scale = max((t.abs().max().item() for t in first.values() if t.numel() and t.is_floating_point()), default=0.0)
    worst, where = 0.0, ""
    for name, reference in first.items():
        if name not in second:
            return float("inf"), name
        error = relative_error(reference, second[name])
        if error > worst and not _is_dust(reference, second[name], scale):
            worst, where = error, name
    return worst, where


def _is_dust(reference: torch.Tensor, value: torch.Tensor, scale: float) -> bool:
    """A tensor that is zero but for rounding (a gradient that cancels) has no relative error of its own."""
    if reference.shape != value.shape or not torch.isfinite(reference).all() or not torch.isfinite(value).all():
        return False
    if not reference.is_floating_point():
        return False
    limit = 64 * torch.finfo(reference.dtype).eps * max(scale, 1e-30)
    return (reference - value).abs().max().item() <= limit


def _structure(first: Run, second: Run) -> tuple[str, ...]:
    names = (set(first.outputs) | set(first.constants)) ^ (set(second.outputs) | set(second.constants))
    changed = {n for n, value in first.constants.items() if n in second.constants and second.constants[n] != value}
    return tuple(sorted(names | changed))


def _same_bits(first: torch.Tensor, second: torch.Tensor | None) -> bool:
    if second is None or first.shape != second.shape or first.dtype != second.dtype:
        return False
    return bool(torch.equal(torch.nan_to_num(first), torch.nan_to_num(second)))
