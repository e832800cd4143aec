"""Token dispatchers and blocks that keep on them, during a call, what the call needs later: each in another way."""

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import nn

D, E, K = 6, 4, 2


class Dispatcher:
    """Keeps what `combine` needs from `dispatch`, as those of Megatron-core do, and on one device that of rhymes-ai/Aria."""

    def __init__(self) -> None:
        self.shape: torch.Size | None = None
        self.order = self.probs = self.counts = None

    def dispatch(self, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        self.shape = x.shape
        self.order = ids.flatten().argsort(stable=True)
        self.probs = weights.flatten()[self.order]
        self.counts = torch.bincount(ids.flatten(), minlength=E).tolist()
        self.rows = self.order // K
        return x.reshape(-1, D)[self.rows]

    def combine(self, out: torch.Tensor) -> torch.Tensor:
        flat = out.new_zeros(self.shape.numel() // D, D)
        return flat.index_add_(0, self.rows, out * self.probs[:, None]).reshape(self.shape)


class Block(nn.Module):
    """`held` makes what the module holds, `get` says how its code comes to the dispatcher."""

    held: ClassVar[Callable[[], Any]] = Dispatcher

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(D, E)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(D, 8), nn.GELU(), nn.Linear(8, D)) for _ in range(E))
        self.dispatcher = type(self).held()

    def get(self) -> Any:
        return self.dispatcher

    def run(self, dispatcher: Any, x: torch.Tensor) -> torch.Tensor:
        weights, ids = self.router(x.reshape(-1, D)).softmax(-1).topk(K)
        rows = dispatcher.dispatch(x, weights, ids).split(dispatcher.counts)
        return dispatcher.combine(torch.cat([expert(part) for expert, part in zip(self.experts, rows)]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.run(self.get(), x)


@dataclasses.dataclass(slots=True)
class InSlots:
    shape: Any = None
    order: Any = None
    probs: Any = None
    counts: Any = None
    rows: Any = None
    dispatch = Dispatcher.dispatch
    combine = Dispatcher.combine


class Inner:
    def __init__(self) -> None:
        self.inner, self.counts = Dispatcher(), []

    def dispatch(self, *given: torch.Tensor) -> torch.Tensor:
        rows = self.inner.dispatch(*given)
        self.counts = self.inner.counts
        return rows

    def combine(self, out: torch.Tensor) -> torch.Tensor:
        return self.inner.combine(out)


class Tidy(Dispatcher):
    """Leaves nothing, and removes what it set."""

    def combine(self, out: torch.Tensor) -> torch.Tensor:
        result = super().combine(out)
        self.order = self.probs = None
        del self.rows
        return result


class WithProperty(Dispatcher):
    @property
    def order(self) -> Any:
        return self._order

    @order.setter
    def order(self, value: Any) -> None:
        self._order = value


class Listed(Block):
    held = staticmethod(lambda: [Dispatcher()])

    def get(self) -> Any:
        return self.dispatcher[0]


class OfTheClass(Block):
    held = staticmethod(lambda: None)
    of_all = Dispatcher()

    def get(self) -> Any:
        return self.of_all


class Bound(Block):
    """Holds a method of it alone."""

    held = staticmethod(lambda: Dispatcher().dispatch)

    def get(self) -> Any:
        return self.dispatcher.__self__
