"""Routing as data: which experts every token went to, recorded in one run and replayed in another (docs/routing_replay.md)."""

from hexa_fx.routing.log import RoutingLog
from hexa_fx.routing.session import record_routing, replay_routing

__all__ = ["RoutingLog", "record_routing", "replay_routing"]
