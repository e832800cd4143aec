"""The rewritten blocks of a model as routing sees them, and whether a log is of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn

from hexa_fx.errors import InputError
from hexa_fx.ir import RoutingSite
from hexa_fx.routing.log import RoutingLog
from hexa_fx.routing.sites import modules_around
from hexa_fx.runtime.forward import HexaForward
from hexa_fx.runtime.install import installed_forward
from hexa_fx.runtime.preflight import check_module


@dataclass(frozen=True)
class Layer:
    """A rewritten block, and the module that holds its router."""

    path: str
    forward: HexaForward
    router: nn.Module
    sites: dict[bool, RoutingSite]

    @property
    def site(self) -> RoutingSite:
        return next(iter(self.sites.values()))

    @property
    def candidates(self) -> int:
        """Number of experts that the router chooses from, those without weights included."""
        return self.site.columns[0][0].size


def layers_of(model: nn.Module) -> list[Layer]:
    """The rewritten blocks of a model, in order.

    Raises:
        InputError: there is none, or it is not known where the experts of one are chosen.
    """
    check_module(model)
    found, reasons = [], []
    for path, module in model.named_modules():
        forward = installed_forward(module)
        if forward is None:
            continue
        known = {mode: site for mode, site in forward.sites.items() if isinstance(site, RoutingSite)}
        reasons += [f"{path or 'the model'}: {site}" for site in forward.sites.values() if isinstance(site, str)]
        if not known:
            reasons += (
                [] if forward.sites else [f"{path or 'the model'}: only hexa_fx.optimize_ notes where it chooses"]
            )
            continue
        site = next(iter(known.values()))
        above = modules_around(model, path)
        if site.above >= len(above):
            reasons.append(f"{path or 'the model'}: the module that holds its router is not in this model")
            continue
        found.append(Layer(path, forward, model.get_submodule(above[site.above]), known))
    if reasons:
        raise InputError(
            "the routing of some blocks cannot be separated from the rest: " + "; ".join(dict.fromkeys(reasons))
        )
    if not found:
        raise InputError(
            "the model has no block that hexa_fx rewrote; call hexa_fx.optimize before, and the model once if it got no example"
        )
    return found


def check_fit(layers: list[Layer], routing: RoutingLog) -> None:
    """Whether a log is of these layers.

    Raises:
        InputError: it is of others, of other experts or k, or holds ids that no router gives, or that no two layers get of one.
    """
    if not isinstance(routing, RoutingLog):
        raise InputError(
            f"expected a RoutingLog, got {type(routing).__name__}; RoutingLog(ids) makes one of an array, RoutingLog.load(path) "
            "reads one"
        )
    if routing.ids.shape[1] != len(layers):
        raise InputError(
            f"the log holds {routing.ids.shape[1]} layers, and the model has {len(layers)} rewritten blocks"
        )
    largest = routing.ids.amax((0, 2)).tolist() if routing.ids.numel() else [0] * len(layers)
    for number, layer in enumerate(layers):
        if routing.top_k[number] != layer.site.top_k:
            raise InputError(
                f"{layer.path} takes {layer.site.top_k} experts a token, and the log has {routing.top_k[number]}"
            )
        known = None if routing.num_experts is None else routing.num_experts[number]
        if known not in (None, layer.candidates) or largest[number] >= layer.candidates:
            seen = (
                f"is of {known} experts" if known not in (None, layer.candidates) else f"names expert {largest[number]}"
            )
            raise InputError(f"{layer.path} has {layer.candidates} experts, and the log {seen}")
        token = _repeating(layer.site, routing, number)
        if token is not None:
            expert = int(routing.ids[token, number, : layer.site.top_k].mode()[0])
            raise InputError(
                f"the log sends token {token} to expert {expert} of {layer.path} more than once, "
                "which its router never does; mark tokens whose ids are not known, such as those of a cached prefix, with live="
            )
    for number, other in _of_one_choice(layers):
        if not torch.equal(routing.ids[:, number], routing.ids[:, other]):
            raise InputError(
                f"{layers[number].path} and {layers[other].path} get the experts of one choice, and the log holds others for one "
                "of them"
            )


def _of_one_choice(layers: list[Layer]) -> Iterator[tuple[int, int]]:
    """Pairs of layers whose router chooses once for both."""
    known: dict[tuple[nn.Module, object], int] = {}
    for number, layer in enumerate(layers):
        first = known.setdefault((layer.router, layer.site.columns), number)
        if first != number:
            yield first, number


def _repeating(site: RoutingSite, routing: RoutingLog, number: int) -> int | None:
    """The first token with the same id twice, as an array has that was not filled, of a router that gives none twice."""
    if len(site.columns) > 1 or site.columns[0][0].name == "multinomial" or site.top_k < 2:
        return None
    ids = routing.ids[:, number, : site.top_k].sort(1)[0]
    repeated = (ids[:, 1:] == ids[:, :-1]).any(1)
    if routing.live is not None:
        repeated &= ~routing.live
    return int(repeated.nonzero()[0]) if bool(repeated.any()) else None
