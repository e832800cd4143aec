"""Whether an optimizer does the same to a slice of a weight as to the whole, found by trying it on small weights.

AdamW does: each element goes its own way. Muon, Adafactor, LAMB or LBFGS look at norms, moments of rows, or products of whole
matrices, and would make other steps on every rank's slices than one device makes.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

log = logging.getLogger(__name__)

_SIZES = (2, 256, 160)  # some factor moments only from 128 on
_HOW_NOT_WHAT = {"foreach", "fused", "capturable", "differentiable"}


def works_on_elements(optimizer: Optimizer, group: Mapping[str, Any], cuts: Iterable[tuple[int, int]]) -> bool | None:
    """Whether two steps of a new optimizer of this kind and these settings are the same on two halves as on the whole.

    Args:
        group: the parameter group with the settings.
        cuts: how weights are cut, as their number of dimensions and the one that is cut.

    Returns:
        None if that cannot be said: it cannot be made or run in this way, or two runs of it differ.
    """
    taken = inspect.signature(type(optimizer)).parameters.values()
    every = any(parameter.kind is parameter.VAR_KEYWORD for parameter in taken)
    names = {parameter.name for parameter in taken}
    kept = [key for key in optimizer.defaults if key in group and (every or key in names) and key not in _HOW_NOT_WHAT]
    settings = {key: group[key] for key in kept}
    if settings.get("lr") is not None:
        settings["lr"] = 1e-2  # schedules begin at zero
    try:
        with torch.random.fork_rng(devices=()), torch.device("cpu"), torch.enable_grad():
            found = [_same(type(optimizer), settings, ndim, dim) for ndim, dim in sorted(set(cuts))]
    except Exception as error:  # whatever somebody's optimizer raises
        log.debug("%s could not be tried on small weights: %s", type(optimizer).__name__, error)
        return None
    return None if None in found else all(found)


def _same(kind: type[Optimizer], settings: dict[str, Any], ndim: int, dim: int) -> bool | None:
    generator = torch.Generator("cpu").manual_seed(0)
    start, *gradients = torch.randn((3, *_SIZES[-ndim:]), generator=generator, device="cpu")
    whole = _stepped(kind, settings, start, gradients)
    again = _stepped(kind, settings, start, gradients)
    parts = zip(*(tensor.chunk(2, dim) for tensor in (start, *gradients)))
    halves = torch.cat([_stepped(kind, settings, part, others) for part, *others in parts], dim)
    near = 1e-3 * (whole - start).abs().max()
    if (again - whole).abs().max() > near:
        return None
    return bool((halves - whole).abs().max() <= near)


def _stepped(kind: type[Optimizer], settings: dict[str, Any], start: Tensor, gradients: list[Tensor]) -> Tensor:
    weight = nn.Parameter(start.clone())
    made = kind([weight], **settings)
    for gradient in gradients:
        weight.grad = gradient.clone()
        made.step(float)
    return weight.detach()
