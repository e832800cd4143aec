"""What the Hopper launches share: choice of kernel and tile, the tile queue and the argument struct."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hexa_fx.codegen.families import get_family
from hexa_fx.codegen.family import validate
from hexa_fx.codegen.family_gemm_sm90 import ARGS, TABLES
from hexa_fx.codegen.heuristics import row_bucket
from hexa_fx.codegen.spec import KernelSpec, Layout, Option, SpecError
from hexa_fx.codegen.tiles_sm90 import CANDIDATES, TileChoice, choose_tile
from hexa_fx.codegen.tuned import Problem
from hexa_fx.cuda.arguments import Piece, Pointer, numbers_of
from hexa_fx.cuda.choosing import Card, cached_choice, card_of
from hexa_fx.cuda.launch import Kernel, NotBuilt, is_built, kernel_of, launch, say_provisional
from hexa_fx.cuda.operands import DTYPES
from hexa_fx.cuda.tensor_maps_sm90 import Maps
from hexa_fx.cuda.tile_queue import TileQueue
from hexa_fx.cuda.tune import autotuning, tune, tuned_tile
from hexa_fx.ops.rows import row_count

FAMILY = "gather_gemm_sm90"
_NUMBERS = numbers_of(ARGS)
_BUCKETS = 20
"""More than there are buckets of rows per expert with rules of their own."""


class SpecKey(NamedTuple):
    """Everything but the tile that decides a kernel of the family."""

    op: str
    dtype: torch.dtype
    layout: Layout
    gather: bool
    bias: bool = False
    activation: str = "none"
    glu: str = "none"
    options: tuple[tuple[str, Option], ...] = ()
    tables: int = TABLES[0]
    accumulate: bool = False

    def spec(self, tile: TileChoice) -> KernelSpec:
        """The kernel with this tile."""
        spec = KernelSpec(
            family=FAMILY,
            op=self.op,
            arch=90,
            dtype=DTYPES[self.dtype],
            bm=tile.bm,
            bn=tile.bn,
            bk=64,
            stages=tile.stages,
            schedule=tile.kernel_schedule,
            layout=self.layout,
            gather=self.gather,
            activation=self.activation,
            glu=self.glu,  # type: ignore[arg-type]
            bias=self.bias,
        )
        made: dict[str, Option] = {"cluster": tile.cluster, "experts": self.tables}
        if tile.swapped:
            made["swapped"] = True
        spec = spec.with_options(**made, **dict(self.options))
        return spec.adding() if self.accumulate else spec


def problem(key: SpecKey, rows: int, experts: int, inner: int, columns: int) -> Problem:
    """What tuning knows of a launch."""
    return Problem(FAMILY, key.op, DTYPES[key.dtype].name, key.gather, row_bucket(rows, experts), inner, columns)


@cached_choice
def chosen_tile(key: SpecKey, card: Card, rows: int, experts: int, inner: int, columns: int) -> TileChoice:
    """The measured tile where a table has one that this kernel can take, else the rule's."""
    found = tuned_tile(problem(key, rows, experts, inner, columns), card.name)
    if found is not None:
        with suppress(SpecError, TypeError):  # measured by another version, or with fewer experts
            tile = TileChoice(**found)  # type: ignore[arg-type]
            validate(get_family(FAMILY), key.spec(tile))
            return tile
    return choose_tile(key.op, rows, experts, inner, columns, key.gather)


def run_with_tile(
    key: SpecKey,
    device: int,
    rows: int,
    experts: int,
    inner: int,
    columns: int,
    tile: TileChoice | None,
    run: Callable[[TileChoice], None],
) -> None:
    """Runs with the given tile, else the measured one, else the rule's, or while its kernel is not built the nearest built one.

    Measures first if HEXA_FX_AUTOTUNE asks for it.

    A kernel that adds is not measured, since every timed run would add. It takes the tile of the kernel that stores.
    """
    if tile is None and autotuning() and not key.accumulate:
        tiles = [asdict(choice) for choice in CANDIDATES[key.op]]

        def spec_of(fields: object) -> KernelSpec:
            return key.spec(TileChoice(**fields))  # type: ignore[arg-type]

        bucket = problem(key, rows, experts, inner, columns)
        tune(bucket, device, tiles, spec_of, lambda fields: run(TileChoice(**fields)))  # type: ignore[arg-type]
    if tile is not None:
        run(tile)
        return
    card = card_of(device)
    try:
        run(chosen_tile(key, card, rows, experts, inner, columns))
    except NotBuilt as reason:
        near = _built_tile(key, card, rows, experts, inner, columns)
        if near is None:
            raise
        say_provisional(key.op, "another tile", reason)
        run(near)


def _built_tile(key: SpecKey, card: Card, rows: int, experts: int, inner: int, columns: int) -> TileChoice | None:
    """The tile of the nearest bucket whose kernel is built."""
    here = row_bucket(rows, experts)
    for bucket in sorted(range(_BUCKETS), key=lambda bucket: abs(bucket - here)):
        tile = chosen_tile(key, card, experts << bucket, experts, inner, columns)
        if is_built(key.spec(tile)):
            return tile
    return None


@cached_choice
def _kernel(key: SpecKey, tile: TileChoice, card: Card) -> tuple[Kernel, tuple[int, int, int]]:
    """The kernel and its grid: one block a multiprocessor, in whole clusters."""
    blocks = card.multiprocessors // tile.cluster * tile.cluster
    return kernel_of(key.spec(tile)), (blocks, 1, 1)


def submit(key: SpecKey, tile: TileChoice, device: int, maps: Maps, args: Piece) -> None:
    """Queues a launch with these tensor maps and this argument struct."""
    kernel, grid = _kernel(key, tile, card_of(device))
    launch(kernel, device, grid, (args,), maps)


def pack(
    *,
    v: Pointer | None = None,
    offs: Pointer | None = None,
    queue: Pointer | None = None,
    a: Pointer | None = None,
    out: Pointer | None = None,
    act: Pointer | None = None,
    bias: Pointer | None = None,
    bias_up: Pointer | None = None,
    h: Pointer | None = None,
    slot_scale: Pointer | None = None,
    row_dot: Pointer | None = None,
    p: Pointer | None = None,
    dw: Pointer | None = None,
    db: Pointer | None = None,
    n: int = 0,
    experts: int = 0,
    division: tuple[int, int] = (0, 0),
    a_ld: int = 0,
    out_ld: int = 0,
    act_ld: int = 0,
    h_ld: int = 0,
    K: int = 0,
    N: int = 0,
    bias_ld: int = 0,
    p_ld: int = 0,
    R: int = 0,
    C: int = 0,
    group_m: int = 0,
    params: tuple[float, ...] = (),
) -> Piece:
    """hexa::sm90::GroupedParams. Fields that an operator does not use stay zero."""
    pointers = (v, offs, queue, a, out, act, bias, bias_up, h, slot_scale, row_dot, p, dw, db)
    sizes = (a_ld, out_ld, act_ld, h_ld, K, N, bias_ld, p_ld, R, C, group_m)
    return pointers, _NUMBERS.pack(n, experts, *division, *sizes, *(params or (0.0, 0.0)))


def row_args(
    x: Tensor, weight: Tensor, v: Tensor | None, offs: Tensor, top_k: int, layout: Layout, tile: TileChoice
) -> dict[str, Any]:
    """Arguments of every row product: its rows and the contraction."""
    args = shared_args(v, offs, top_k, row_count(x, v), tile)
    args["K"] = weight.shape[2] if layout == "nk" else weight.shape[1]
    args["a"], args["a_ld"] = x, x.stride(0)
    return args


def weight_args(p: Tensor, q: Tensor, dw: Tensor, db: Tensor | None = None) -> dict[str, Any]:
    """Arguments of every weight gradient, the product of P and Q over the rows of an expert."""
    stored = {"p": p, "p_ld": p.stride(0), "dw": dw, "db": db}
    return {**stored, "R": p.shape[1], "C": q.shape[1]}


def shared_args(v: Tensor | None, offs: Tensor, top_k: int, n: int, tile: TileChoice) -> dict[str, Any]:
    """Arguments of every launch: rows, experts, and the queue of tiles."""
    return {
        "v": v,
        "offs": offs,
        "queue": TileQueue(offs.device),
        "n": n,
        "experts": offs.shape[0] - 1,
        "division": _division(top_k),
        "group_m": tile.group_m,
    }


@cached_choice
def _division(top_k: int) -> tuple[int, int]:
    shift = (top_k - 1).bit_length()
    return -(-(1 << (31 + shift)) // top_k), shift
