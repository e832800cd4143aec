"""Times two models, or two blocks, against each other, taking turns."""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from hexa_fx.errors import InputError

Run = Callable[[Any], Any]
SHORTEST = 0.5  # seconds: medians of a few runs of a millisecond say nothing on a machine that does other things too


@dataclass(frozen=True)
class Timed:
    """Medians in milliseconds of the original and the rewritten one, and peak memory in bytes of one run on a GPU.

    same_code: the rewritten one runs its own code at this size, so that the two times differ by chance.
    """

    what: str
    original_ms: float
    rewritten_ms: float
    original_peak: int | None = None
    rewritten_peak: int | None = None
    same_code: bool = False

    def as_dict(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)

    def __str__(self) -> str:
        ratio = "the same code" if self.same_code else f"{self.original_ms / self.rewritten_ms:.2f} times as fast"
        line = f"{self.what:40} {self.original_ms:9.2f} -> {self.rewritten_ms:9.2f} ms, {ratio}"
        if self.original_peak is None or self.rewritten_peak is None:
            return line
        return f"{line}; peak {self.original_peak / 2**30:.2f} -> {self.rewritten_peak / 2**30:.2f} GiB"


def compared(what: str, run: Run, modules: Sequence[Any], repeat: int, device: str, same_code: bool = False) -> Timed:
    """``run`` of both modules in turns, after one run of each: ``repeat`` times, and for `SHORTEST` seconds at least."""
    runs = [partial(run, module) for module in modules]
    peaks = [_peak(each, device) for each in runs]
    times: list[list[float]] = [[] for _ in runs]
    while len(times[0]) < repeat or (sum(map(sum, times)) < SHORTEST and len(times[0]) < 50 * repeat):
        for each, found in zip(runs, times):
            found.append(_timed(each, device))
    before, after = (1e3 * statistics.median(found) for found in times)
    return Timed(what, before, after, peaks[0], peaks[1], same_code)


def model_runs(inputs: Any) -> list[tuple[str, Run]]:
    """Forward, and forward with backward, of a model on its inputs."""
    from hexa_fx.example_inputs import call_arguments

    args, kwargs = call_arguments(inputs)
    return _both(lambda model: model(*args, **kwargs))


def block_runs(model: Any, inputs: Any, path: str) -> list[tuple[str, Run]]:
    """The same of the block at ``path``, on what the model gives it, with gradients of that too."""
    import torch
    from torch.utils import _pytree as pytree

    given: list[tuple[Any, Any]] = []
    hook = model.get_submodule(path).register_forward_pre_hook(
        lambda _, args, kwargs: given.append((args, kwargs)), with_kwargs=True
    )
    with torch.no_grad():
        model_runs(inputs)[0][1](model)
    hook.remove()
    args, kwargs = given[0]
    floats = [v for v in pytree.tree_leaves((args, kwargs)) if isinstance(v, torch.Tensor) and v.is_floating_point()]
    for value in floats:
        value.requires_grad_()
    return _both(lambda block: block(*args, **kwargs), floats)


def _both(call: Run, inputs: Sequence[Any] = ()) -> list[tuple[str, Run]]:
    return [("forward", partial(_forward, call)), ("forward and backward", partial(_step, call, inputs))]


def _forward(call: Run, module: Any) -> None:
    import torch

    with torch.no_grad():
        call(module)


def _step(call: Run, inputs: Sequence[Any], module: Any) -> None:
    import torch
    from torch.utils import _pytree as pytree

    output = call(module)
    values = pytree.tree_leaves(dict(output) if hasattr(output, "keys") else output)
    floats = [v for v in values if isinstance(v, torch.Tensor) and v.requires_grad]
    if not floats:
        raise InputError("the model's output has no tensor that wants a gradient, so there is no backward to time")
    wanted = [*inputs, *(p for p in module.parameters() if p.requires_grad)]
    torch.autograd.grad(sum(v.float().mean() for v in floats), wanted, allow_unused=True)  # type: ignore[arg-type]


def _peak(run: Callable[[], Any], device: str) -> int | None:
    """Bytes of the GPU at the peak of the run; None on a CPU."""
    import torch

    if not device.startswith("cuda"):
        run()
        return None
    run()
    torch.cuda.reset_peak_memory_stats()
    run()
    return torch.cuda.max_memory_allocated()


def _timed(run: Callable[[], Any], device: str) -> float:
    import torch

    if device.startswith("cuda"):
        torch.cuda.synchronize()
    started = time.perf_counter()
    run()
    if device.startswith("cuda"):
        torch.cuda.synchronize()
    return time.perf_counter() - started


def moved(inputs: Any, device: str) -> Any:
    """The inputs with their tensors on ``device``."""
    import torch
    from torch.utils import _pytree as pytree

    return pytree.tree_map(lambda v: v.to(device) if isinstance(v, torch.Tensor) else v, copy.copy(inputs))
