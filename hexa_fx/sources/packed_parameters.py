"""Packed weights as parameters of a module, and as plain tensors in its ``state_dict``.

A parameter ``W`` packed as nf4 is saved as ``nf4_W_packed`` and ``nf4_W_absmax``, which any file format takes, and loaded from
these; from a dense ``W`` it is packed anew. The names do not begin with that of the parameter, since transformers splits weights
of experts by such names when it saves them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.fx
from torch import Tensor, nn

from hexa_fx.contexts import items_set
from hexa_fx.formats import FORMATS, format_of
from hexa_fx.formats.quantized_weight import QuantizedWeight
from hexa_fx.ops.sources import takes_sources


def set_packed(owner: nn.Module, name: str, weight: nn.Parameter) -> None:
    """Makes a `QuantizedWeight` the parameter ``name`` of ``owner``, in place of the one that is there."""
    owner._parameters[name] = weight
    if _save not in owner._state_dict_hooks.values():
        owner.register_state_dict_post_hook(_save)
        owner.register_load_state_dict_pre_hook(_load)


def matrices_of(graph: torch.fx.Graph, stacked: Collection[str] = ()) -> dict[str, str]:
    """What a rewritten graph's experts multiply by, with layouts: paths of weights, and names of ``stacked`` ones.

    Empty if one of them is not read as it is.
    """
    found: dict[str, str] = {}
    for node in (node for node in graph.nodes if takes_sources(node.target)):
        for operand, layout in ((3, 12), (5, 12), (7, 13)):
            weight = node.args[operand]
            if weight is None:
                continue
            if not isinstance(weight, torch.fx.Node) or (weight.op != "get_attr" and weight.target not in stacked):
                return {}
            found[str(weight.target)] = str(node.args[layout])
    return found


@contextmanager
def unpacked(module: nn.Module) -> Iterator[int]:
    """A context in which the packed parameters of a module and those below it are dense ones. Yields how many these are."""
    held = [(owner, name, weight) for owner in module.modules() for name, weight in _own(owner).items()]
    made = {id(weight): nn.Parameter(weight.dense(), requires_grad=False) for _, _, weight in held}
    with items_set((owner._parameters, name, made[id(weight)]) for owner, name, weight in held):
        yield len(held)


def packed_parameters(module: nn.Module) -> dict[str, QuantizedWeight]:
    """The packed parameters of a module and those below it, by path."""
    return {name: p for name, p in module.named_parameters() if isinstance(p, QuantizedWeight)}


def _own(module: nn.Module) -> dict[str, QuantizedWeight]:
    return {name: p for name, p in module.named_parameters(recurse=False) if isinstance(p, QuantizedWeight)}


def _keys(prefix: str, name: str, format: str) -> list[str]:
    """Of the packed tensor and its scales."""
    return [f"{prefix}{format}_{name}_{part}" for part in ("packed", *format_of(format).scales)]


def _save(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    for name, weight in _own(module).items():
        if state.pop(prefix + name, None) is not None:
            state.update(zip(_keys(prefix, name, weight.format), weight.held, strict=True))


def _load(module: nn.Module, state: dict[str, Any], prefix: str, *about: Any) -> None:
    for name, weight in _own(module).items():
        keys = _keys(prefix, name, weight.format)
        if all(key in state for key in keys):
            packed, *scales = (_plain(state.pop(key)) for key in keys)
            state[prefix + name] = QuantizedWeight(packed, scales, weight.format, weight.dtype, weight.transposed)
        elif found := [format for format in FORMATS if any(key in state for key in _keys(prefix, name, format))]:
            errors: list[str] = about[-1]
            errors.append(
                f"{prefix}{name} is packed as {weight.format}, which takes {' and '.join(keys)}; these are not all there, but some "
                f"of {' and '.join(found)}: load what was saved as {weight.format}, or pack a dense model as it was saved"
            )


def _plain(value: Tensor) -> Tensor:
    return value.detach() if isinstance(value, nn.Parameter) else value
