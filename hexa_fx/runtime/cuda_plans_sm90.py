"""What the Hopper launches share: choice of kernel and tile, tensor maps, the tile queue and the argument struct."""

from __future__ import annotations

from contextlib import suppress
from threading import Lock
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hexa_fx.codegen.families import get_family
from hexa_fx.codegen.family import validate
from hexa_fx.codegen.family_gemm_sm90 import ARGS, TABLES
from hexa_fx.codegen.heuristics import row_bucket
from hexa_fx.codegen.spec import KernelSpec, Layout, Option, SpecError
from hexa_fx.codegen.tiles_sm90 import TileChoice, choose_tile
from hexa_fx.codegen.tuned import Problem
from hexa_fx.jit.tensormap import TENSOR_MAP_BYTES, tensor_map
from hexa_fx.runtime.cuda_launch import DTYPES, Kernel, described, kernel_of, launch, multiprocessors, plan
from hexa_fx.runtime.cuda_operands import address
from hexa_fx.runtime.cuda_tune import tuned_tile

FAMILY = "gather_gemm_sm90"
_NO_MAP = bytes(TENSOR_MAP_BYTES)
_QUEUES = 4096
_rings: dict[int, tuple[int, Tensor]] = {}
_turns: dict[int, int] = {}
_making = Lock()


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
        made: dict[str, Option] = {
            "cluster": tile.cluster,
            "chunks": tile.chunks,
            "lag": tile.lag,
            "experts": self.tables,
        }
        if tile.swapped:
            made["swapped"] = True
        spec = spec.with_options(**made, **dict(self.options))
        return spec.adding() if self.accumulate else spec


class Maps(NamedTuple):
    """Tensor maps of a launch, in the kernel's order; see enum Map of grouped_sm90.cuh."""

    rows: bytes = _NO_MAP
    weight: bytes = _NO_MAP
    up: bytes = _NO_MAP
    p: bytes = _NO_MAP
    q: bytes = _NO_MAP
    h: bytes = _NO_MAP
    out: bytes = _NO_MAP
    act: bytes = _NO_MAP
    grad: bytes = _NO_MAP


def problem(key: SpecKey, rows: int, experts: int, inner: int, columns: int) -> Problem:
    """What tuning knows of a launch."""
    return Problem(FAMILY, key.op, DTYPES[key.dtype].name, key.gather, row_bucket(rows, experts), inner, columns)


@plan
def chosen_tile(key: SpecKey, device: int, rows: int, experts: int, inner: int, columns: int) -> TileChoice:
    """The measured tile where a table has one that this kernel can take, else the rule's."""
    found = tuned_tile(problem(key, rows, experts, inner, columns), device)
    if found is not None:
        with suppress(SpecError, TypeError):  # measured by another version, or with fewer experts
            tile = TileChoice(**found)  # type: ignore[arg-type]
            validate(get_family(FAMILY), key.spec(tile))
            return tile
    return choose_tile(key.op, rows, experts, inner, columns, key.gather)


@plan
def _kernel(key: SpecKey, tile: TileChoice, device: int) -> tuple[Kernel, tuple[int, int, int]]:
    """The kernel and its grid: one block a multiprocessor, in whole clusters."""
    blocks = multiprocessors(device) // tile.cluster * tile.cluster
    return kernel_of(key.spec(tile)), (blocks, 1, 1)


def submit(key: SpecKey, tile: TileChoice, device: int, maps: Maps, args: bytes) -> None:
    """Queues a launch with these tensor maps and this packed argument struct."""
    kernel, grid = _kernel(key, tile, device)
    launch(kernel, device, grid, b"".join(maps), args)


def pack(
    *,
    v: int = 0,
    offs: int = 0,
    queue: int = 0,
    a: int = 0,
    out: int = 0,
    act: int = 0,
    bias: int = 0,
    bias_up: int = 0,
    h: int = 0,
    slot_scale: int = 0,
    row_dot: int = 0,
    p: int = 0,
    dw: int = 0,
    db: int = 0,
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
) -> bytes:
    """Packs hexa::sm90::GroupedParams. Fields that an operator does not use stay zero."""
    pointers = (v, offs, queue, a, out, act, bias, bias_up, h, slot_scale, row_dot, p, dw, db)
    sizes = (a_ld, out_ld, act_ld, h_ld, K, N, bias_ld, p_ld, R, C, group_m)
    return ARGS.pack(*pointers, n, experts, *division, *sizes, *(params or (0.0, 0.0)))


def row_args(
    x: Tensor, weight: Tensor, v: Tensor | None, offs: Tensor, top_k: int, layout: Layout, tile: TileChoice
) -> dict[str, Any]:
    """Arguments of every row product: its rows and the contraction."""
    n = (x if v is None else v).shape[0]
    args = shared_args(v, offs, top_k, n, tile)
    args["K"] = weight.shape[2] if layout == "nk" else weight.shape[1]
    args["a"], args["a_ld"] = x.data_ptr(), x.stride(0)
    return args


def weight_args(p: Tensor, q: Tensor, dw: Tensor, db: Tensor | None = None) -> dict[str, Any]:
    """Arguments of every weight gradient, the product of P and Q over the rows of an expert."""
    stored = {"p": p.data_ptr(), "p_ld": p.stride(0), "dw": dw.data_ptr(), "db": address(db)}
    return {**stored, "R": p.shape[1], "C": q.shape[1]}


def shared_args(v: Tensor | None, offs: Tensor, top_k: int, n: int, tile: TileChoice) -> dict[str, Any]:
    """Arguments of every launch: rows, experts, and the queue of tiles."""
    return {
        "v": address(v),
        "offs": offs.data_ptr(),
        "queue": queue(offs.device),
        "n": n,
        "experts": offs.shape[0] - 1,
        "division": _division(top_k),
        "group_m": tile.group_m,
    }


def row_maps(x: Tensor, weight: Tensor, v: Tensor | None, layout: Layout, tile: TileChoice) -> Maps:
    """The maps that a row product reads through; gathered rows need none."""
    return Maps(
        _NO_MAP if v is not None else rows_map(x, tile.row_box), weight_map(weight, layout, tile.bn // 2, tile.fetch)
    )


def weight_maps(p: Tensor, q: Tensor, v: Tensor | None, dw: Tensor, turned: bool = False) -> dict[str, bytes]:
    """The maps of a weight's gradient: P (unless it is gathered), Q, and dW as it lies in memory: (C, R) if it is `turned`."""
    p_map = _NO_MAP if v is not None else rows_map(p, 64)
    grad = weight_map(dw, "nk", 16) if dw.dtype == p.dtype else added_map(dw, turned)
    return {"p": p_map, "q": rows_map(q, 64), "grad": grad}


def rows_map(x: Tensor, rows: int, columns: int = 64) -> bytes:
    """Boxes of `rows` rows x `columns` columns of a (., C) operand; 64 or 32 columns."""
    if described():
        return _NO_MAP
    return tensor_map(
        x.data_ptr(), DTYPES[x.dtype], (x.shape[1], x.shape[0]), (x.stride(0),), (columns, rows), 2 * columns
    )


def chunk_map(x: Tensor) -> bytes:
    """The boxes that a warp writes, or h's that it reads."""
    return rows_map(x, 16)


def result_map(x: Tensor, tile: TileChoice, halves: int = 1) -> bytes:
    """The boxes that a row product's results leave in. A swapped tile's warpgroup has half of its columns, which are gate and up in
    `halves`.
    """
    return rows_map(x, 32, tile.bn // 2 // halves) if tile.swapped else rows_map(x, 16)


def mixed_map(weight: Tensor, fetch: int) -> bytes:
    """(E, 2 I, K) in boxes of 8 gate columns, their 8 up columns, the next 8 gate columns, ... : 128 x 64."""
    if described():
        return _NO_MAP
    experts, columns, inner = weight.shape
    by_expert, by_row, _ = weight.stride()
    shape, strides = (inner, 8, 2, columns // 16, experts), (by_row, columns // 2 * by_row, 8 * by_row, by_expert)
    return tensor_map(weight.data_ptr(), DTYPES[weight.dtype], shape, strides, (64, 8, 2, 8, 1), promote=fetch)


def weight_map(weight: Tensor, layout: Layout, columns: int, fetch: int = 128) -> bytes:
    """(E, N, K) in boxes of `columns` x 64; (E, K, N) in boxes of 64 x 64. `fetch`: bytes that come to L2 at a time."""
    experts, rows, inner = weight.shape
    by_expert, by_row, _ = weight.stride()
    box = (64, columns, 1) if layout == "nk" else (64, 64, 1)
    if described():
        return _NO_MAP
    return tensor_map(
        weight.data_ptr(), DTYPES[weight.dtype], (inner, rows, experts), (by_row, by_expert), box, promote=fetch
    )


def added_map(dw: Tensor, turned: bool) -> bytes:
    """The boxes of floats that a warp adds to dW: 16 rows x 32 columns of P^T Q."""
    if described():
        return _NO_MAP
    experts, rows, columns = dw.shape
    by_expert, by_row, _ = dw.stride()
    box, swizzle = ((16, 32, 1), 64) if turned else ((32, 16, 1), 128)
    return tensor_map(dw.data_ptr(), DTYPES[dw.dtype], (columns, rows, experts), (by_row, by_expert), box, swizzle)


def queue(device: torch.device) -> int:
    """Address of two zeros, which the kernel leaves zero, so that a ring of them serves all streams.

    A CUDA graph under capture gets zeros of its own, because its replays may overlap anything; their memory is reused only by
    what follows on the stream.
    """
    if described():
        return 0
    if torch.cuda.is_current_stream_capturing():
        return torch.zeros(2, dtype=torch.int32, device=device).data_ptr()
    index = device.index
    if index not in _rings:
        _make_ring(device)
    turn = _turns[index] = (_turns.get(index, 0) + 1) % _QUEUES
    return _rings[index][0] + 8 * turn


def in_ring(device: int, address: int) -> bool:
    """Whether a launch got this address from `queue`."""
    start = _rings[device][0] if device in _rings else 0
    return start <= address < start + 8 * _QUEUES and start > 0


def _make_ring(device: torch.device) -> None:
    with _making:
        if device.index not in _rings:
            ring = torch.zeros(2 * _QUEUES, dtype=torch.int32, device=device)
            torch.cuda.synchronize(device)  # once per process: another stream may use it next
            _rings[device.index] = (ring.data_ptr(), ring)


@plan
def _division(top_k: int) -> tuple[int, int]:
    shift = (top_k - 1).bit_length()
    return -(-(1 << (31 + shift)) // top_k), shift
