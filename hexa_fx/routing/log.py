"""Which experts every token of some sequences went to, in every MoE layer: recorded here, or written by a sampler."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from itertools import chain
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import torch
from torch import Tensor

from hexa_fx.errors import InputError

_SMALLEST = ((256, torch.uint8), (1 << 15, torch.int16), (1 << 31, torch.int32))


class RoutingLog:
    """Expert ids of N tokens in L MoE layers, k for each; padding is not among the tokens.

    Args:
        ids: (N, L, k) integers. Where layers have different k, k is the largest and the rest of a row is 0.
        lengths: tokens of each sequence, in order; their sum is N. None: one sequence.
        num_experts: E of each layer, or of all; None if it is not known.
        top_k: k of each layer; None: that of ``ids``.
        layers: the layers' paths, for people.
        live: (N,) bool, the tokens that are not known and are routed by the router itself, whatever their ids say; None: all are
            known.

    Raises:
        InputError: these are no integers, shapes do not fit together, or an id is negative or not below E.
    """

    def __init__(
        self,
        ids: Tensor | Any,
        lengths: Sequence[int] | None = None,
        num_experts: int | Sequence[int] | None = None,
        top_k: Sequence[int] | None = None,
        layers: Sequence[str] = (),
        live: Tensor | Any | None = None,
    ) -> None:
        found = _integers(ids)
        if found.dim() != 3:
            raise InputError(f"a routing log holds ids (tokens, layers, k); got {list(found.shape)}")
        count = found.shape[1]
        self._added = list[tuple[Tensor, Sequence[int]]]()  # what calls left since it was last read
        self._lengths = (found.shape[0],) if lengths is None else _numbers("lengths", lengths)
        if sum(self.lengths) != found.shape[0] or min(self.lengths, default=0) < 0:
            raise InputError(
                f"the log holds {found.shape[0]} tokens, and its sequences are {list(self.lengths[:9])} long: {sum(self.lengths)}"
            )
        self.num_experts = None if num_experts is None else _numbers("num_experts", num_experts, count)
        self.top_k = (found.shape[2],) * count if top_k is None else _numbers("top_k", top_k, count)
        self.layers = tuple(layers)
        self._left = set[int]()  # how many sequences the recorded calls left
        self.live = _marks(live, found)
        if self.live is not None:
            found = found.masked_fill(self.live[:, None, None], 0)
        self._check(found)
        most = max(self.num_experts or (int(found.max()) + 1 if found.numel() else 1,))
        self._ids = found.to(smallest_dtype(most), copy=True)  # what checked it holds, whatever becomes of the array

    def _check(self, ids: Tensor) -> None:
        count = ids.shape[1]
        for name, given in (("num_experts", self.num_experts), ("top_k", self.top_k), ("layers", self.layers or None)):
            if given is not None and len(given) != count:
                raise InputError(f"the log holds {count} layers, and {name} is of {len(given)}")
        if max(self.top_k, default=0) > ids.shape[2]:
            raise InputError(f"the log holds {ids.shape[2]} ids a token, and top_k says {max(self.top_k)}")
        if not ids.numel():
            return
        largest = ids.amax((0, 2)).tolist()
        if int(ids.min()) < 0:
            raise InputError("the log holds a negative expert id; mark tokens that are not known with live=")
        for layer, (most, experts) in enumerate(zip(largest, self.num_experts or largest)):
            if self.num_experts is not None and most >= experts:
                raise InputError(f"the log holds expert {most} in layer {layer}, which has {experts} experts")

    @classmethod
    def of_sequences(
        cls, sequences: Sequence[Tensor | Any], lengths: Sequence[int] | None = None, **options: Any
    ) -> RoutingLog:
        """A log of one (tokens, layers, k) array for every sequence, as vLLM and SGLang return them.

        Args:
            sequences: samplers give no ids for a sequence's last token, which never entered the model.
            lengths: tokens of each sequence as it will be replayed; those past the end of its array are routed live. None: as
                many as the array has.
            options: ``num_experts``, ``top_k`` and ``layers``, as for `RoutingLog`.

        Raises:
            InputError: an array is longer than its sequence, or they differ in layers or k.
        """
        arrays = [_integers(sequence) for sequence in sequences]
        wanted = tuple(len(array) for array in arrays) if lengths is None else _numbers("lengths", lengths)
        if len({array.shape[1:] for array in arrays}) != 1 or len(wanted) != len(arrays):
            raise InputError("expected one (tokens, layers, k) array for every sequence, all of the same layers and k")
        pieces, live = [], []
        for array, length in zip(arrays, wanted):
            if len(array) > length:
                raise InputError(f"a sequence of {length} tokens has ids of {len(array)}")
            rest = length - len(array)
            pieces += [array, array.new_zeros(rest, *array.shape[1:])]
            live += [torch.arange(len(array) + rest, device="cpu") >= len(array)]
        return cls(torch.cat(pieces), wanted, live=torch.cat(live), **options)

    @property
    def ids(self) -> Tensor:
        """(N, L, k) ids in the smallest dtype that holds them."""
        self._settle()
        return self._ids

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of each sequence."""
        self._settle()
        return self._lengths

    def _settle(self) -> None:
        """Puts what calls left behind what is there; a copy in every call would be quadratic in their number."""
        if self._added:
            (ids, lengths), self._added = zip(*self._added), []
            self._ids, self._lengths = torch.cat([self._ids, *ids]), (*self._lengths, *chain.from_iterable(lengths))

    def __len__(self) -> int:
        """Number of sequences."""
        return len(self.lengths)

    @property
    def tokens(self) -> int:
        """Number of tokens of all sequences."""
        return int(self.ids.shape[0])

    @property
    def nbytes(self) -> int:
        """Bytes that the ids take."""
        return self.ids.numel() * self.ids.element_size()

    def select(self, sequences: Sequence[int]) -> RoutingLog:
        """A log of these sequences, by number and in this order, such as those of a shuffled minibatch.

        Raises:
            InputError: there is no sequence of such a number.
        """
        rows, numbers = self._rows(), [*map(int, sequences)]
        if missing := [number for number in numbers if not -len(rows) <= number < len(rows)]:
            raise InputError(f"the log has no sequence {missing[0]}; it holds {len(rows)}")
        return self._of([rows[number] for number in numbers], [self.lengths[number] for number in numbers])

    def joined(self, batch: int) -> RoutingLog:
        """A log of ``batch`` sequences, from one in which every call left a piece of each: ``generate`` runs the prompts, then one
        token of each sequence at a time.

        Raises:
            InputError: the number of pieces is no multiple of ``batch``, or calls were recorded that left more or fewer.
        """
        if batch < 1 or len(self) % batch or self._left - {batch}:
            left = f"; calls left {', '.join(map(str, sorted(self._left)))} each" if self._left else ""
            raise InputError(f"{len(self)} pieces are not those of {batch} sequences{left}")
        rows, lengths = self._rows(), [sum(self.lengths[row::batch]) for row in range(batch)]
        return self._of([piece for row in range(batch) for piece in rows[row::batch]], lengths)

    def truncated(self, lengths: Sequence[int]) -> RoutingLog:
        """A log of the first ``lengths[i]`` tokens of every sequence, such as those before the end-of-text token."""
        wanted = _numbers("lengths", lengths)
        if len(wanted) != len(self) or min(wanted, default=0) < 0:
            raise InputError(f"{len(self)} sequences are cut to as many lengths, none negative; got {list(wanted)}")
        pieces = [rows[:length] for rows, length in zip(self._rows(), wanted)]
        return self._of(pieces, [*map(len, pieces)])

    def save(self, path: str | Path) -> None:
        """Writes the log as a NumPy archive (``.npz``), whose entries docs/routing_replay.md lists."""
        import numpy

        entries: dict[str, Any] = {
            "routed_experts": self.ids.cpu().numpy(),
            "lengths": numpy.asarray(self.lengths, dtype=numpy.int64),
            "top_k": numpy.asarray(self.top_k, dtype=numpy.int64),
        }
        if self.num_experts is not None:
            entries["num_experts"] = numpy.asarray(self.num_experts, dtype=numpy.int64)
        if self.layers:
            entries["layers"] = numpy.asarray(self.layers, dtype=numpy.str_)
        if self.live is not None:
            entries["live"] = self.live.cpu().numpy()
        with Path(path).open("wb") as file:
            numpy.savez(file, **entries)

    @classmethod
    def load(cls, path: str | Path) -> RoutingLog:
        """Reads what `save` or a sampler wrote; only ``routed_experts`` has to be there.

        Raises:
            InputError: it is missing, or the entries do not fit together.
        """
        import numpy

        try:
            with numpy.load(Path(path), allow_pickle=False) as archive:
                found = {name: archive[name] for name in archive.files}
        except (ValueError, TypeError, EOFError, BadZipFile) as error:  # TypeError: the array of an .npy file
            raise InputError(f"{path} is no NumPy archive (.npz) of numbers and text: {error}") from error
        if "routed_experts" not in found:
            raise InputError(
                f"{path} has no entry 'routed_experts' with ids (tokens, layers, k); it has {sorted(found)}"
            )
        ids = found["routed_experts"]
        listed = {name: found[name].tolist() for name in ("lengths", "num_experts", "top_k") if name in found}
        layers = tuple(map(str, found["layers"].astype(str))) if "layers" in found else ()
        return cls(ids, **listed, layers=layers, live=found.get("live"))

    def extend(self, ids: Tensor, lengths: Sequence[int]) -> None:
        """Adds the sequences of a call: (n, L, k) ids and their lengths."""
        self._added.append((ids.to(self._ids.dtype).cpu(), lengths))
        self._left.add(len(lengths))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, RoutingLog):
            return NotImplemented
        same = self.lengths == other.lengths and self.top_k == other.top_k and self.ids.shape == other.ids.shape
        return same and bool((self.ids == other.ids).all()) and _alike(self.live, other.live)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        layers, k = self.ids.shape[1:]
        return f"RoutingLog({len(self)} sequences, {self.tokens} tokens, {layers} layers, k={k}, {self.nbytes} bytes)"

    def _rows(self) -> Sequence[Tensor]:
        """The numbers of each sequence's tokens."""
        return torch.arange(self.tokens, device="cpu").split(list(self.lengths)) if self.lengths else ()

    def _of(self, pieces: Sequence[Tensor], lengths: Sequence[int]) -> RoutingLog:
        """A log of tokens by their numbers."""
        rows = torch.cat([torch.empty(0, dtype=torch.long, device="cpu"), *pieces])
        live = None if self.live is None else self.live[rows]
        return RoutingLog(self.ids[rows], lengths, self.num_experts, self.top_k, self.layers, live)


def smallest_dtype(experts: int) -> torch.dtype:
    """The smallest integer dtype that holds ids below ``experts``.

    Raises:
        InputError: they need more than 32 bits.
    """
    found = next((dtype for limit, dtype in _SMALLEST if experts <= limit), None)
    if found is None:
        raise InputError(f"an expert id of {experts - 1} needs more than 32 bits; are these ids of experts?")
    return found


def _integers(values: Any) -> Tensor:
    """Integers of any kind of array, in a dtype that torch computes with.

    Raises:
        InputError: they are none.
    """
    if not isinstance(values, Tensor):
        import numpy

        array = numpy.asarray(values)
        if array.dtype.kind not in "iu" and array.size:
            raise InputError(f"a routing log holds integer ids; got {array.dtype} {list(array.shape)}")
        native = array.dtype.newbyteorder("=") if array.dtype.kind in "iu" else numpy.int64
        values = torch.from_numpy(numpy.ascontiguousarray(array, dtype=native))
    if values.is_floating_point() or values.is_complex() or values.dtype == torch.bool:
        raise InputError(f"a routing log holds integer ids; got {values.dtype} {list(values.shape)}")
    unsigned = {torch.uint16: torch.int32, torch.uint32: torch.int64, torch.uint64: torch.int64}
    return values.to(unsigned.get(values.dtype, values.dtype))  # type: ignore[no-any-return]


def _numbers(name: str, given: int | Iterable[Any], count: int | None = None) -> tuple[int, ...]:
    """Whole numbers, of which a single one stands for ``count``.

    Raises:
        InputError: some are none.
    """
    try:
        if isinstance(given, int):
            return (given,) * (1 if count is None else count)
        return tuple(map(operator.index, given))
    except TypeError as error:
        raise InputError(f"{name} are whole numbers in a row; got {given!r}") from error


def _marks(live: Tensor | Any | None, ids: Tensor) -> Tensor | None:
    """(N,) bool; None if nothing is marked."""
    if live is None:
        return None
    marks = torch.as_tensor(live, dtype=torch.bool, device=ids.device)
    if marks.shape != ids.shape[:1]:
        raise InputError(f"live is {list(marks.shape)}; expected [{len(ids)}], one for every token")
    return marks if bool(marks.any()) else None


def _alike(one: Tensor | None, other: Tensor | None) -> bool:
    return one is other if one is None or other is None else torch.equal(one, other)
