"""Runs a module up to a rewritten block's operator, with some ids of its choosing calls forced."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn

from torch import Tensor
from torch.overrides import TorchFunctionMode

from hexa_fx.ir import Choice
from hexa_fx.isolation.choices import ChoiceCounter, choosing_call, with_groups

_LAYERS = {f"hexa::moe_ffn{kind}" for kind in ("", "_fixed", "_fp8", "_sources", "_sources_fixed")}


class Reached(Exception):
    """The block's operator was called. An exception of the kind for which torch runs hooks that are to run always."""

    def __init__(self, index: Tensor, weights: Tensor | None) -> None:
        self.index, self.weights = index, weights


@dataclass(repr=False)
class Trial(TorchFunctionMode):
    """Notes the choosing calls of a run, with ids of some of them forced, until the block's operator is called.

    Operators count from `arrive` on, which is to be called before the block: those before are of other blocks in the same module.

    Args:
        forced: ids (rows, n) by call; for a call among groups the ids of experts.
        groups: which of these are calls among groups of ``experts``.
    """

    forced: Mapping[Choice, Tensor] = field(default_factory=dict)
    groups: frozenset[Choice] = frozenset()
    experts: int = 0
    seen: dict[Choice, Tensor] = field(default_factory=dict)
    reached: Reached | None = None
    arrived: bool = False
    index: Tensor | None = None
    """The ids of a block that runs operator by operator, which gets the gate values only at its end."""

    def __post_init__(self) -> None:
        super().__init__()
        self._counter = ChoiceCounter()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        operator = str(getattr(func, "_schema", "")).partition("(")[0] if self.arrived else ""
        if operator in _LAYERS:
            self._end(args[1], args[2])
        if operator == "hexa::reindex" and self.index is None:
            self.index = args[0]
        if operator == "hexa::combine" and self.index is not None:
            self._end(self.index, args[1])
        if self.reached is not None or self.index is not None:  # what the experts do, and the code around to end
            return func(*args, **kwargs)
        call = choosing_call(func, args, kwargs)
        if call is None:
            return func(*args, **kwargs)
        choice = self._counter.numbered(call)
        if choice in self.forced:
            ids = self.forced[choice]
            return call.forced(with_groups(ids, call, self.experts) if choice in self.groups else ids)
        result = func(*args, **kwargs)
        self.seen[choice] = call.ids(result)
        return result

    def arrive(self) -> None:
        """The block is called now."""
        self.arrived = True

    def _end(self, index: Tensor, weights: Tensor | None) -> NoReturn:
        self.reached = self.reached or Reached(index, weights)  # the first one, where the block's code caught it
        raise self.reached
