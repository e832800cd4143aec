"""Which kernel a product takes: what is static in it, and the tile that follows from that, a measured one or the family's rule.
With HEXA_FX_AUTOTUNE=1, tiles are measured where no table has an entry.

Measuring synchronises, so it happens only on request, once per card and bucket of shapes. The result is kept on disk.
"""

from __future__ import annotations

import logging
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import suppress
from math import ceil
from pathlib import Path
from typing import Any, NamedTuple

import torch
from filelock import FileLock

from hexa_fx.codegen.family import get_family, validate
from hexa_fx.codegen.family_gemm_sm80 import row_bucket
from hexa_fx.codegen.spec import KernelSpec, SpecError
from hexa_fx.codegen.tuned import Problem, TileFields, TunedTable, shipped
from hexa_fx.cuda.choosing import Card, cached_choice, card_of, collection, forget_choices
from hexa_fx.cuda.kernel import NotBuilt, is_built
from hexa_fx.errors import InputError, KernelError
from hexa_fx.jit.background import prebuild
from hexa_fx.jit.env import JitSettings
from hexa_fx.progress import progress

FIXED_BUCKET = 9
"""The bucket whose tile every number of rows takes in a fixed order: of many rows, where the tile matters most. A tile sums over K
in one order at all of its rows."""

_BUCKETS = 20
"""More than there are buckets of rows per expert with rules of their own."""

AnyTile = Any
"""A family's tiles have a class of their own."""


class ProductKey(NamedTuple):
    """Everything that decides the kernel of a product but its tile.

    Args:
        tiles: of the kernel's family.
        kernel: all that is static in it. The tile fills in the rest.
        card: that it is for.
        rows, experts: n and E. Only gather_gemm_sm90 knows more of n than its bucket.
        inner, columns: contraction and columns of the weight; of a weight's gradient its rows and columns; for esfk the columns
            of X and of dY.
    """

    tiles: Tiles
    kernel: KernelSpec
    card: Card
    rows: int
    experts: int
    inner: int
    columns: int

    @property
    def bucket(self) -> int:
        """`row_bucket` of the launch."""
        return row_bucket(self.rows, self.experts)

    def at(self, bucket: int) -> ProductKey:
        """The same with another number of rows an expert."""
        return self._replace(rows=(self.experts or 1) << bucket)

    def problem(self) -> Problem:
        """What tuning knows of it."""
        gather = self.kernel.gather or bool(self.kernel.option("gather_b"))
        found = Problem(
            self.kernel.family, self.kernel.op, self.kernel.dtype.name, gather, self.bucket, self.inner, self.columns
        )
        return self.tiles.measured_as(self, found)

    def spec(self, tile: AnyTile) -> KernelSpec:
        """The kernel with this tile."""
        return self.tiles.complete(self, tile)


class Tiles(ABC):
    """The tiles of a family's products. An instance holds what nothing but its rule asks of a product."""

    kind: Callable[..., AnyTile]
    """Makes a tile of its fields. Raises TypeError for those of another version."""

    @abstractmethod
    def rule(self, key: ProductKey) -> AnyTile:
        """The tile that nobody measured."""

    @abstractmethod
    def candidates(self, key: ProductKey) -> Sequence[AnyTile]:
        """Tiles worth measuring."""

    @abstractmethod
    def complete(self, key: ProductKey, tile: AnyTile) -> KernelSpec:
        """The product's kernel with a tile."""

    def measured_as(self, key: ProductKey, problem: Problem) -> Problem:
        """What tuning tells apart, where that is more than fields of the kernel and its bucket."""
        return problem


@cached_choice
def chosen_tile(key: ProductKey) -> AnyTile:
    """The measured tile where a table has one that this kernel can take, else the rule's."""
    found = tuned_tile(key.problem(), key.card.name)
    if found is not None:
        with suppress(SpecError, TypeError):  # measured by another version, or with fewer experts
            tile = key.tiles.kind(**found)
            spec = key.spec(tile)
            validate(get_family(spec.family), spec)
            return tile
    return key.tiles.rule(key)


@cached_choice
def fixed_tile(key: ProductKey) -> AnyTile:
    """The tile that every number of rows takes in a fixed order (`hexa_fx.ops.fixed_order`)."""
    return chosen_tile(key.at(FIXED_BUCKET))


def built_tile(key: ProductKey) -> AnyTile:
    """The chosen tile, or while its kernel is not built that of the nearest bucket whose kernel is.

    Raises:
        NotBuilt: there is none.
    """
    tile = chosen_tile(key)
    if is_built(key.spec(tile)):
        return tile
    here = key.problem().rows
    for bucket in sorted(range(_BUCKETS), key=lambda bucket: abs(bucket - here)):
        tile = chosen_tile(key.at(bucket))
        if is_built(key.spec(tile)):
            return tile
    raise NotBuilt(f"its kernel ({key.problem().family}) is being built")


log = logging.getLogger(__name__)

_WARM_MS, _TIMED_MS, _MOST_RUNS = 60.0, 120.0, 2000
"""How long a tile runs before it is timed and while it is: a card's clock falls under load, by as much as tiles differ."""

_done: set[tuple[Problem, int]] = set()


def autotuning() -> bool:
    """Whether HEXA_FX_AUTOTUNE asks for measuring, and this thread launches kernels."""
    return _asked_for() and collection() is None


@cached_choice
def _asked_for() -> bool:
    return JitSettings.from_env().autotune


@cached_choice
def tuned_tile(problem: Problem, name: str) -> TileFields | None:
    """The tile of this machine's table for the card of this name, else of the shipped one; None where neither has a neighbour."""
    return _read(name).find(problem) or shipped(name).find(problem)


def add_table(text: str, name: str) -> int:
    """Adds what another machine measured on the same kind of card to this machine's table. Returns the number of its tiles.

    Args:
        text: of the other machine's table.
        name: of this machine's card.

    Raises:
        InputError: the text is no table, or one of another card.
    """
    try:
        table = TunedTable.from_json(text)
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(
            f"this is no table of tiles ({error}); give one that `hexa-fx tune --out FILE` wrote"
        ) from error
    if table.card not in name:
        raise InputError(f"these tiles were measured on {table.card}, and the card here is {name}; run `hexa-fx tune`")
    for problem, (tile, ms) in table.entries.items():
        _store(name, problem, tile, ms)
    forget_choices()
    return len(table.entries)


def tune(
    problem: Problem,
    device: int,
    candidates: Sequence[TileFields],
    spec_of: Callable[[TileFields], KernelSpec],
    run: Callable[[TileFields], None],
) -> TileFields | None:
    """Times `candidates` and keeps the best, unless this machine's table has the very problem, or a graph is captured.

    Args:
        problem: the bucket.
        device: current device.
        candidates: tiles to try. One that cannot be generated is passed over.
        spec_of: the kernel of a tile, so that all are built at a time.
        run: launches one tile on the caller's operands.

    Returns:
        The best tile, or None when nothing was measured now.
    """
    if (problem, device) in _done or torch.cuda.is_current_stream_capturing():
        return None
    _done.add((problem, device))
    card = card_of(device).name
    held, _ = _read(card).entries.get(problem, (None, 0.0))
    if held is not None and held.keys() == candidates[0].keys():  # else another version's, which no kernel can take
        return None
    with suppress(KernelError):  # one that does not build is skipped when its turn to run comes
        prebuild([spec_of(tile) for tile in candidates])
    times: dict[int, float] = {}
    with progress(f"measuring tiles of {problem.op}", len(candidates)) as bar:
        for index, tile in enumerate(candidates):
            ms = _milliseconds(tile, run)
            times.update({} if ms is None else {index: ms})
            bar.advance()
    if not times:
        return None
    best = min(times, key=lambda index: times[index])
    log.info("tuned %s: %s, %.4f ms of %d tiles", problem, dict(candidates[best]), times[best], len(times))
    _store(card, problem, candidates[best], times[best])
    forget_choices()
    return candidates[best]


def _milliseconds(tile: TileFields, run: Callable[[TileFields], None]) -> float | None:
    try:
        run(tile)
    except KernelError as error:
        log.debug("passed over %s: %s", dict(tile), error)
        return None
    once = max(_mean_milliseconds(tile, run, 1), _TIMED_MS / _MOST_RUNS)
    _mean_milliseconds(tile, run, ceil(_WARM_MS / once))
    return _mean_milliseconds(tile, run, ceil(_TIMED_MS / once))


def _mean_milliseconds(tile: TileFields, run: Callable[[TileFields], None], times: int) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(times):
        run(tile)
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / times


def table_path(device_name: str) -> Path:
    """The file of this machine's table for a card."""
    safe = "".join(c if c.isalnum() else "_" for c in device_name)
    return JitSettings.from_env().cache_dir / "tuned" / f"{safe}.json"


def _read(device_name: str) -> TunedTable:
    try:
        return TunedTable.from_json(table_path(device_name).read_text())
    except (OSError, ValueError, KeyError, TypeError):  # absent or damaged: as if never tuned
        return TunedTable(device_name)


def _store(device_name: str, problem: Problem, tile: TileFields, ms: float) -> None:
    path = table_path(device_name)
    path.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(path.with_suffix(".lock")):
        table = _read(device_name).with_entry(problem, tile, ms)
        temporary = path.with_suffix(f".{os.getpid()}")
        temporary.write_text(table.to_json())
        os.replace(temporary, path)
