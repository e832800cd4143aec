"""Random inputs of the same kinds as an example call, at other sizes and under given routings."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch.nn.functional import pad
from torch.utils import _pytree as pytree

from hexa_fx.contexts import attributes_set
from hexa_fx.isolation.outcome import ALL_WANTED
from hexa_fx.passes.inputs.routing_override import ForcedRouting, raised

Size = tuple[int | None, int | None]
"""(batch, sequence); None: as in the example."""


@dataclass(frozen=True)
class ExampleSizes:
    """The sizes of an example call.

    Args:
        batch, sequence: batch times sequence is its number of tokens, as far as that can be told.
        flat: whether the first matrix of floats is (T, D).
        channels: of images (batch, ...), the dimension that is as wide as a token; None if that cannot be told.
        grid: of images, the sizes that count pixels, in order; empty as long as the channels are not known.
        image: whether the first tensor of floats has four dimensions or more.
    """

    batch: int
    sequence: int
    flat: bool
    image: bool = False
    channels: int | None = None
    grid: tuple[int, ...] = ()

    @classmethod
    def of(cls, leaves: Sequence[Any], widths: Collection[int] = ()) -> ExampleSizes:
        """Those of the tensors among ``leaves``. ``widths``: what a token may be wide."""
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.dim() > 0]
        floating = [leaf for leaf in tensors if leaf.is_floating_point()] or tensors
        first = next((leaf for leaf in floating if leaf.dim() >= 2), None)
        flat = first is not None and first.is_floating_point() and first.dim() == 2
        if first is not None and first.dim() > 3:
            wide = [dim for dim, size in enumerate(first.shape) if dim and size in widths]
            grid = tuple(size for dim, size in enumerate(first.shape) if dim and dim not in wide)
            if len(wide) != 1:
                return cls(first.shape[0], 1, flat, True)
            return cls(first.shape[0], torch.Size(grid).numel(), flat, True, wide[0], grid)
        for leaf in floating:
            if leaf.dim() == 3:
                return cls(leaf.shape[0], leaf.shape[1], flat)
        return cls(floating[0].shape[0] if floating else 1, 1, flat)

    @property
    def tokens(self) -> int:
        """Number of tokens."""
        return self.batch * self.sequence

    def one_each(self, leaf: torch.Tensor) -> bool:
        """Whether the tensor holds one number for each token: its dimensions count tokens, or batch and sequence."""
        return leaf.dim() < 2 or (tuple(leaf.shape) == (self.batch, self.sequence) and self.sequence != 1)

    def resized(self, leaf: torch.Tensor, size: Size) -> tuple[int, ...]:
        """The shape of a tensor at another size. Of images, all pixels lie in the first dimension of the grid then.

        Of a single token, sizes of 1 count tokens where tokens are rows; else those of a mask count batch and sequence.
        """
        old = self.batch, self.sequence
        new = tuple(was if now is None else now for was, now in zip(old, size))
        if self.image:
            return self._resized_image(leaf.shape, new)
        if old == (1, 1) and self.flat and leaf.dim() and leaf.shape[0] == 1:
            return (new[0] * new[1], *leaf.shape[1:])
        if old == (1, 1) and not self.flat and leaf.dtype == torch.bool and leaf.shape == (1, 1):
            return new
        return _resized(leaf.shape, old, new)

    def _resized_image(self, shape: torch.Size, new: tuple[int, ...]) -> tuple[int, ...]:
        if not shape or shape[0] != self.batch:
            return tuple(shape)
        rest = tuple(shape[1:])
        if self.grid and new[1] != self.sequence:
            grid = (new[1], *[1] * (len(self.grid) - 1))
            for place in range(len(rest) - len(self.grid) + 1):
                if rest[place : place + len(grid)] == self.grid:
                    rest = (*rest[:place], *grid, *rest[place + len(grid) :])
                    break
            else:
                if self.channels is not None and len(shape) == len(self.grid) + 2:
                    rest = (*grid[: self.channels - 1], rest[self.channels - 1], *grid[self.channels - 1 :])
                elif rest and rest[0] == self.sequence:
                    rest = (new[1], *rest[1:])
        return new[0], *rest


def _resized(shape: torch.Size, old: tuple[int, int], new: tuple[int, ...]) -> tuple[int, ...]:
    """Leading sizes that are the example's batch, sequence or number of tokens, exchanged."""
    if len(shape) >= 2 and tuple(shape[:2]) == old and old[1] != 1:
        return (*new, *shape[2:])
    exchanged = {old[1]: new[1], old[0]: new[0], old[0] * old[1]: new[0] * new[1]}
    if len(shape) <= 2 and shape and shape[0] in exchanged:
        return (exchanged[shape[0]], *shape[1:])
    if len(shape) == 3 and tuple(shape[:2]) == old:
        return (*new, *shape[2:])
    of_sequences = len(shape) > 2 and shape[0] == old[0] != 1  # a condition (batch, 1, D), say
    return (new[0], *shape[1:]) if of_sequences else tuple(shape)


Kind = Literal["signed", "unsigned", "scores", "integer", "bool", "ids", "marks", "counts", "ends", "other"]
"""What a tensor of the example looks like. ``scores`` are (..., E) logits; ``ids`` are (..., k) experts of every token;
``marks`` are (..., E), non-zero at the experts of every token (one-hot or sparse weights; no one where it was dropped); ``counts``
(E,) say how many of the rows are each expert's, and ``ends`` (E,) where they end."""

_ROUTING = frozenset({"ids", "marks", "scores", "counts", "ends"})


@dataclass
class _Draw:
    """One set of random inputs in the making.

    Args:
        generator: of its random numbers.
        routing: the routing to force, if any.
        rows: how many there are in the matrix of tokens.
        known: the experts chosen so far, by (tokens, experts, k), so that all tensors of a call describe the same choice.
    """

    generator: torch.Generator
    routing: ForcedRouting | None = None
    rows: int = 0
    known: dict[tuple[int, int, int], torch.Tensor] = field(default_factory=dict)

    def chosen(self, tokens: int, experts: int, k: int) -> torch.Tensor:
        """The experts (tokens, k) of so many tokens, of so many experts, and so many a token."""
        key = tokens, experts, k
        if key not in self.known:
            random = torch.rand(tokens, experts, generator=self.generator, device="cpu").argsort(-1)[:, :k]
            self.known[key] = random if self.routing is None else self.routing.choose(*key)
        return self.known[key]


class FreshInputs:
    """Random inputs for verification.

    Args:
        args, kwargs: the example call.
        num_experts: if known.
        widths: what a token may be wide, which tells channels of images from pixels.
        seed: for the random values; equal calls of a method give equal inputs.
    """

    def __init__(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        num_experts: int | None,
        widths: Collection[int] = (),
        seed: int = 0,
    ) -> None:
        self._leaves, self._spec = pytree.tree_flatten((args, kwargs))
        self._seed = seed
        self.sizes = ExampleSizes.of(self._leaves, widths)
        self._made: dict[tuple[tuple[tuple[int, ...], ...], str, bool], list[Any]] = {}  # the same every time
        self._keeps = False
        self.num_experts = num_experts
        self.kinds = _with_tokens([self._kind(leaf) for leaf in self._leaves], self._leaves)
        rows = self._rows(_shapes(self._leaves))
        self.kinds = [_of_rows(leaf, rows, num_experts) or kind for leaf, kind in zip(self._leaves, self.kinds)]
        place = self.tokens_at()
        if place is not None and bool(self._leaves[place].min() == self._leaves[place].max()):
            self.kinds[place] = "signed"  # ones or zeros have no range of their own
        self.given_routing = not _ROUTING.isdisjoint(self.kinds)
        self.asked = ALL_WANTED

    @property
    def given_top_k(self) -> int:
        """Experts a token in the routing that the inputs contain, the fewest if they say several; 0 without one."""
        counts = [self._experts_a_token(leaf, kind) for leaf, kind in zip(self._leaves, self.kinds) if kind in _ROUTING]
        return min(counts, default=0)

    def example(self, dtype: torch.dtype) -> tuple[Any, Any]:
        """(args, kwargs) of the example itself; floating tensors in ``dtype``."""
        args, kwargs = pytree.tree_unflatten([_cast(leaf, leaf, dtype) for leaf in self._leaves], self._spec)
        return args, kwargs

    def like_example(self, dtype: torch.dtype, routing: ForcedRouting | None = None) -> tuple[Any, Any]:
        """(args, kwargs) of the example's shapes; floating tensors in ``dtype``."""
        return self._make(_shapes(self._leaves), dtype, routing)

    def kept(self) -> AbstractContextManager[None]:
        """A context in which all but tokens, a routing and its weights is as in the example, repeated to other sizes."""
        return attributes_set(self, _keeps=True)

    def sized_like_example(self, inputs: tuple[Any, Any]) -> bool:
        """Whether (args, kwargs) have the example's shapes."""
        return _shapes(pytree.tree_leaves(inputs)) == _shapes(self._leaves)

    def at(
        self, batch: int | None, sequence: int | None, dtype: torch.dtype, routing: ForcedRouting | None = None
    ) -> tuple[Any, Any]:
        """As `like_example`, with the dimensions that count batch, sequence or tokens set to the given sizes, if not None."""
        return self._make(self._resized((batch, sequence)), dtype, routing)

    def _resized(self, size: Size) -> list[tuple[int, ...]]:
        return [self.sizes.resized(leaf, size) if isinstance(leaf, torch.Tensor) else () for leaf in self._leaves]

    def with_fresh_tokens(self, size: tuple[int, int] | None, vocabulary: int | None) -> tuple[Any, Any] | None:
        """(args, kwargs) of the example with other tokens and another routing, everything else as it is.

        None without tokens, and where they come with what may be a routing of unknown range, the same for all.

        Args:
            size: (batch, sequence); what is not drawn anew is repeated to it. None: the example's.
            vocabulary: where the block is given no floats, its integers are drawn below this.
        """
        shapes, place = _shapes(self._leaves) if size is None else self._resized(size), self.tokens_at()
        if place is None:
            return None if vocabulary is None else self._with_random_ids(shapes, vocabulary)
        if self._may_route_alike(place):
            return None
        with self.kept():
            return self._make(shapes, None)

    def _with_random_ids(self, shapes: Sequence[tuple[int, ...]], vocabulary: int) -> tuple[Any, Any]:
        generator, made = torch.Generator().manual_seed(self._seed), []
        for leaf, shape in zip(self._leaves, shapes):
            is_tensor = isinstance(leaf, torch.Tensor)
            made.append(_cast(_random_ids(leaf, shape, vocabulary, generator), leaf) if is_tensor else leaf)
        args, kwargs = pytree.tree_unflatten(made, self._spec)
        return args, kwargs

    def tokens_at(self) -> int | None:
        """Which argument holds the tokens: the first matrix of floats that is no routing."""
        for number, (leaf, kind) in enumerate(zip(self._leaves, self.kinds)):
            if isinstance(leaf, torch.Tensor) and leaf.dim() >= 2 and kind in ("signed", "unsigned"):
                return number
        return None

    def _is_tokens(self, leaf: torch.Tensor) -> bool:
        place = self.tokens_at()
        return place is not None and leaf is self._leaves[place]

    def _rows(self, shapes: Sequence[tuple[int, ...]]) -> int:
        place = self.tokens_at()
        return 0 if place is None else torch.Size(shapes[place][:-1]).numel()

    def _may_route_alike(self, place: int) -> bool:
        if self.num_experts is not None:  # a routing shows by its range
            return False
        tokens = self._leaves[place].numel() // self._leaves[place].shape[-1]
        numbers = [leaf for leaf, kind in zip(self._leaves, self.kinds) if kind == "integer" and leaf.dim()]
        rows = [leaf.reshape(tokens, -1) for leaf in numbers if tokens and leaf.numel() % tokens == 0]
        return any(bool((r == r[:1]).all()) for r in rows)

    def _weighs_tokens(self, leaf: torch.Tensor) -> bool:
        """Whether it can be the weights of given ids: positive, of the ids' size, and not all ones, as a mask is."""
        sizes = {other.numel() for other, kind in zip(self._leaves, self.kinds) if kind == "ids"}
        if not leaf.is_floating_point() or leaf.numel() not in sizes:
            return False
        return bool((leaf > 0).all()) and not bool((leaf == 1).all())

    def _kind(self, leaf: Any) -> Kind:
        if not isinstance(leaf, torch.Tensor) or leaf.numel() == 0 or leaf.is_complex():
            return "other"
        if self._marked(leaf):
            return "marks"
        if leaf.dtype == torch.bool:
            return "bool"
        if leaf.is_floating_point() and leaf.dim() >= 2 and leaf.shape[-1] == self.num_experts:
            return "scores"
        if leaf.is_floating_point():
            return "unsigned" if leaf.min() >= 0 and leaf.max() <= 1 else "signed"
        return "ids" if self._looks_like_ids(leaf) else "integer"

    def _marked(self, leaf: torch.Tensor) -> bool:
        if leaf.dim() < 2 or leaf.shape[-1] != self.num_experts:
            return False
        counts = leaf.ne(0).sum(-1)
        if int(counts.max()) == 1 and not leaf.is_floating_point() and bool(((leaf == 0) | (leaf == 1)).all()):
            return True  # slots without a mark were dropped
        return bool((counts == counts.flatten()[0]).all()) and 0 < int(counts.flatten()[0]) < leaf.shape[-1]

    def _looks_like_ids(self, leaf: torch.Tensor) -> bool:
        if self.num_experts is None or leaf.min() < 0:
            return False
        if leaf.dim() > 1 and self.sizes.one_each(leaf) and (leaf.max() <= 1 or leaf.min() == leaf.max()):
            return False  # a mask of batch and sequence
        return self._experts_a_token(leaf, "ids") <= self.num_experts and int(leaf.max()) < 2 * self.num_experts

    def _make(
        self, shapes: Sequence[tuple[int, ...]], dtype: torch.dtype | None, routing: ForcedRouting | None = None
    ) -> tuple[Any, Any]:
        key = tuple(shapes), "" if routing is None else routing.name, self._keeps
        if key not in self._made:
            draw = _Draw(torch.Generator().manual_seed(self._seed), routing, self._rows(shapes))
            self._made[key] = [
                leaf if kind == "other" else self._fill(leaf, kind, shape, draw)
                for leaf, kind, shape in zip(self._leaves, self.kinds, shapes)
            ]
        fresh = [_cast(new, leaf, dtype) for new, leaf in zip(self._made[key], self._leaves)]
        args, kwargs = pytree.tree_unflatten(fresh, self._spec)
        return args, kwargs

    def _fill(self, leaf: torch.Tensor, kind: Kind, shape: tuple[int, ...], draw: _Draw) -> torch.Tensor:
        generator, numbers = draw.generator, torch.empty(shape, dtype=torch.float64, device="cpu")
        if self._keeps and not (kind in _ROUTING or self._is_tokens(leaf) or self._weighs_tokens(leaf)):
            return _repeated_to(leaf, shape)
        if kind == "scores":
            scores = numbers.normal_(generator=generator)
            return scores if draw.routing is None else raised(scores, draw.routing, self._experts_a_token(scores, kind))
        if kind == "signed":
            example = leaf.double()
            spread = float(example.detach().std()) if leaf.numel() > 1 else 1.0
            spread = spread if 0 < spread < float("inf") else 1.0
            return numbers.normal_(generator=generator) * spread + _finite(example.mean())
        if kind == "unsigned":
            return numbers.uniform_(generator=generator) * _finite(leaf.max()) + 1e-3
        if kind == "bool":
            return torch.rand(shape, generator=generator, device="cpu") < float(leaf.double().mean())
        if kind == "integer":
            return torch.randint(int(leaf.min()), int(leaf.max()) + 1, shape, generator=generator, device="cpu")
        if kind in ("counts", "ends"):
            experts = self.num_experts or 1
            counts = draw.chosen(draw.rows, experts, 1).flatten().bincount(minlength=experts)
            return counts if kind == "counts" else pad(counts.cumsum(0), (shape[0] - experts, 0))
        return self._routed(leaf, kind, shape, draw)

    def _routed(self, leaf: torch.Tensor, kind: Kind, shape: tuple[int, ...], draw: _Draw) -> torch.Tensor:
        """Random ids or marks. Tensors of a call that describe the same tokens describe the same choice."""
        experts, generator = self.num_experts or 1, draw.generator
        rows = shape if kind == "ids" and self.sizes.one_each(leaf) else shape[:-1]
        k = self._experts_a_token(leaf, kind)
        if kind == "ids":
            experts = max(experts, int(leaf.max()) + 1)
        count = torch.Size(rows).numel()
        chosen = draw.chosen(count, experts, k)
        if kind == "ids":
            return chosen.reshape(shape)
        values = torch.ones(count, k, dtype=torch.float64, device="cpu")
        if leaf.is_floating_point() and leaf[leaf != 0].unique().numel() > 1:
            values = torch.rand(count, k, dtype=torch.float64, generator=generator, device="cpu") + 0.1
        elif leaf.dtype != torch.bool:
            values = values * leaf[leaf != 0].flatten()[0].double().cpu()
        if draw.routing is None and bool((leaf == 0).all(-1).any()):
            values = values * (torch.rand(count, 1, generator=generator, device="cpu") < 0.75)
        return torch.zeros(count, experts, dtype=torch.float64, device="cpu").scatter(1, chosen, values).reshape(shape)

    def _experts_a_token(self, leaf: torch.Tensor, kind: Kind) -> int:
        """How many experts ``ids``, ``marks`` or ``scores`` choose for a token; of scores, how many are made to stand out."""
        if kind == "scores":
            return min(2, leaf.shape[-1])
        if kind == "marks":
            return int(leaf.ne(0).sum(-1).max())
        return 1 if kind in ("counts", "ends") or self.sizes.one_each(leaf) else leaf.shape[-1]


def _of_rows(leaf: Any, rows: int, experts: int | None) -> Kind | None:
    """What a list of integers says of sorted rows, if it may say how many each expert has; some begin the ends with 0."""
    integers = isinstance(leaf, torch.Tensor) and not leaf.is_floating_point() and leaf.dtype != torch.bool
    if not integers or experts is None or leaf.dim() != 1 or rows in (0, len(leaf)) or int(leaf.min()) < 0:
        return None
    if len(leaf) == experts and int(leaf.sum()) == rows:
        return "counts"
    starts = len(leaf) == experts + 1 and int(leaf[0]) == 0
    ends = (starts or len(leaf) == experts) and int(leaf[-1]) == rows and bool((leaf.diff() >= 0).all())
    return "ends" if ends else None


def _with_tokens(kinds: list[Kind], leaves: Sequence[Any]) -> list[Kind]:
    """Where every matrix of floats has the width of scores, the first one is the tokens: the hidden size is E as well."""
    matrices = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor) and leaf.dim() >= 2]
    floats = [i for i in matrices if leaves[i].is_floating_point() and kinds[i] != "marks"]
    if floats and all(kinds[i] == "scores" for i in floats):
        kinds[floats[0]] = "signed"
    return kinds


def _cast(new: Any, leaf: Any, dtype: torch.dtype | None = None) -> Any:
    """A copy that lies in memory as the example does, which views may hinge on, and wants a gradient if that does. Of floats in
    ``dtype``, if there is one."""
    if not isinstance(leaf, torch.Tensor):
        return new
    order = sorted(range(leaf.dim()), key=leaf.stride, reverse=True)
    wanted = dtype if dtype is not None and leaf.is_floating_point() else leaf.dtype
    made = torch.empty_permuted(new.shape, order, dtype=wanted, device=leaf.device)
    return made.copy_(new.detach()).requires_grad_(leaf.requires_grad)


def _random_ids(
    leaf: torch.Tensor, shape: tuple[int, ...], vocabulary: int, generator: torch.Generator
) -> torch.Tensor:
    """All different while there are enough of them."""
    if leaf.dtype == torch.bool or leaf.is_floating_point() or leaf.dim() == 0:
        return _repeated_to(leaf, shape)
    wanted = torch.Size(shape).numel()
    orders = [torch.randperm(vocabulary, generator=generator, device="cpu") for _ in range(-(-wanted // vocabulary))]
    return torch.cat(orders)[:wanted].reshape(shape)


def _repeated_to(leaf: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    for dim, size in enumerate(shape):
        if size != leaf.shape[dim]:
            leaf = leaf.index_select(dim, torch.arange(size, device=leaf.device) % leaf.shape[dim])
    return leaf


def _finite(value: torch.Tensor) -> float:
    return float(value.detach()) if bool(value.isfinite()) else 0.0


def _shapes(leaves: list[Any]) -> list[tuple[int, ...]]:
    return [tuple(leaf.shape) if isinstance(leaf, torch.Tensor) else () for leaf in leaves]
