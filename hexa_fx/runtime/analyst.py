"""What a rewritten forward asks for an analysis of a call."""

from __future__ import annotations

from typing import Any, Protocol

from hexa_fx.runtime.guards import GuardMiss


class Analyst(Protocol):
    """Analyses calls of a kind that a block was not rewritten for (`hexa_fx.specialise`)."""

    def specialise(
        self, forward: Any, args: tuple[Any, ...], kwargs: dict[str, Any], miss: GuardMiss | None, tried: int
    ) -> str:
        """Adds a specialisation, or a kind that is refused, to ``forward``, of which the first ``tried`` do not take the call.

        Returns why there is none; empty if there is.
        """
