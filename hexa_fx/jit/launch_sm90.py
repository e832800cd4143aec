"""Tensors in, tensors out: the row and weight operators of docs/operators.md on the sm_90a family.

Shapes: T tokens, n rows in expert order, E experts. Every function needs CUDA tensors of one device, bf16 or f16, 16-byte
aligned, and says so by `unsupported` before anything is launched. Nothing here reads the device.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache

import torch
from cutlass_library import DataType
from torch import Tensor

from hexa_fx.codegen.family_gemm_sm90 import ARGS, MAX_EXPERTS
from hexa_fx.codegen.spec import KernelSpec
from hexa_fx.codegen.tiles_sm90 import TileChoice, choose_tile
from hexa_fx.jit.kernel import get_kernel
from hexa_fx.jit.tensormap import TENSOR_MAP_BYTES, tensor_map

DTYPES = {torch.bfloat16: DataType.bf16, torch.float16: DataType.f16}
_NO_MAP = bytes(TENSOR_MAP_BYTES)
_QUEUES = 4096


def unsupported(*tensors: Tensor | None, experts: int) -> str:
    """Why this family cannot take these operands; empty if it can. The inner dimension must be contiguous."""
    if experts > MAX_EXPERTS:
        return f"{experts} experts; the tile tables hold {MAX_EXPERTS}"
    for t in tensors:
        if t is None:
            continue
        if t.dtype not in DTYPES:
            return f"{t.dtype} operand; wgmma here multiplies bf16 and f16"
        if t.stride(-1) != 1 or t.data_ptr() % 16 or any(s * t.element_size() % 16 for s in t.stride()[:-1]):
            return f"operand of shape {tuple(t.shape)} and strides {t.stride()} is not 16-byte aligned along its rows"
    return ""


@dataclass
class _Launch:
    """Arguments of one launch, collected by name. Pointers and sizes that an operator does not use stay zero."""

    spec: KernelSpec
    device: int
    values: dict[str, int | float] = field(default_factory=dict)
    maps: list[bytes] = field(default_factory=lambda: [_NO_MAP] * 5)

    def __call__(self) -> None:
        queue = _queue(self.device)
        pointers = (
            "v",
            "offs",
            "queue",
            "a",
            "out",
            "act",
            "bias",
            "bias_up",
            "h",
            "slot_scale",
            "row_dot",
            "p",
            "dw",
            "db",
        )
        sizes = (
            "n",
            "experts",
            "div_mul",
            "div_shift",
            "a_ld",
            "out_ld",
            "act_ld",
            "h_ld",
            "K",
            "N",
            "bias_ld",
            "p_ld",
            "R",
            "C",
        )
        names = (*pointers, *sizes, "group_m", "act_a", "act_b")
        values = {**self.values, "queue": queue.data_ptr()}
        args = ARGS.pack(*(values.get(name, 0) for name in names))
        stream = torch._C._cuda_getCurrentRawStream(self.device)
        cluster = int(self.spec.option("cluster", 1))
        grid = (_multiprocessors(self.device) // cluster * cluster, 1, 1)
        get_kernel(self.spec).launch(self.device, grid, (b"".join(self.maps), args), stream)


@cache
def _multiprocessors(device: int) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


_rings: dict[int, tuple[Tensor, list[int]]] = {}


def _queue(device: int) -> Tensor:
    """Two zeros on the device. The kernel leaves them zero, so a ring of them serves all streams; a CUDA graph under capture
    gets its own, because replays may overlap anything."""
    if torch.cuda.is_current_stream_capturing():
        return torch.zeros(2, dtype=torch.int32, device=f"cuda:{device}")
    if device not in _rings:
        _rings[device] = (torch.zeros(_QUEUES, 2, dtype=torch.int32, device=f"cuda:{device}"), [0])
        torch.cuda.synchronize(device)  # once a process: other streams may use it next
    ring, at = _rings[device]
    at[0] = (at[0] + 1) % _QUEUES
    return ring[at[0]]


def _division(top_k: int) -> dict[str, int]:
    shift = (top_k - 1).bit_length()
    return {"div_mul": -(-(1 << (31 + shift)) // top_k), "div_shift": shift}


def _rows_map(x: Tensor, rows: int) -> bytes:
    """Boxes of `rows` rows x 64 columns of a (., C) operand."""
    return tensor_map(x.data_ptr(), DTYPES[x.dtype], (x.shape[1], x.shape[0]), (x.stride(0),), (64, rows))


def _weight_map(w: Tensor, layout: str, box_n: int) -> bytes:
    """(E, N, K) in boxes of box_n x 64; (E, K, N) in boxes of 64 x 64."""
    box = (64, box_n, 1) if layout == "nk" else (64, 64, 1)
    return tensor_map(
        w.data_ptr(), DTYPES[w.dtype], (w.shape[2], w.shape[1], w.shape[0]), (w.stride(1), w.stride(0)), box
    )


def _ptr(t: Tensor | None) -> int:
    return 0 if t is None else t.data_ptr()


def _row_spec(op: str, x: Tensor, layout: str, gather: bool, tile: TileChoice, **more: object) -> KernelSpec:
    spec = KernelSpec(
        family="gather_gemm_sm90", op=op, arch=90, dtype=DTYPES[x.dtype], bm=tile.bm, bn=tile.bn, bk=64, stages=tile.stages,
        schedule=tile.kernel_schedule, layout=layout, gather=gather, **more,  # type: ignore[arg-type]
    )  # fmt: skip
    return spec.with_options(cluster=tile.cluster)


def _row_launch(
    spec: KernelSpec, x: Tensor, w: Tensor, v: Tensor | None, offs: Tensor, top_k: int, n: int, tile: TileChoice
) -> _Launch:
    launch = _Launch(spec, x.device.index)
    K = w.shape[2] if spec.layout == "nk" else w.shape[1]
    launch.values |= {
        "v": _ptr(v), "offs": offs.data_ptr(), "n": n, "experts": w.shape[0], "group_m": tile.group_m, "K": K,
        "a": x.data_ptr(), "a_ld": x.stride(0), **_division(top_k),
    }  # fmt: skip
    if not spec.gather:
        launch.maps[0] = _rows_map(x, spec.bm)
    launch.maps[1] = _weight_map(w, spec.layout, spec.bn // 2)
    return launch


def _columns(w: Tensor, layout: str) -> int:
    return w.shape[1] if layout == "nk" else w.shape[2]


def _packed(bias: Tensor | None) -> Tensor | None:
    """A bias whose rows follow each other, as the kernels read it."""
    return None if bias is None else bias.contiguous()


def _count(x: Tensor, v: Tensor | None) -> int:
    return x.shape[0] if v is None else v.shape[0]


def esmm(
    x: Tensor, weight: Tensor, bias: Tensor | None, v: Tensor | None, offs: Tensor, top_k: int, layout: str,
    tile: TileChoice | None = None,
) -> Tensor:  # fmt: skip
    """``y[p] = x[row(p)] @ W[e(p)] + b[e(p)]``, (n, N)."""
    n, N, bias = _count(x, v), _columns(weight, layout), _packed(bias)
    y = x.new_empty(n, N)
    tile = tile or choose_tile("esmm", n, weight.shape[0], x.shape[1], N, gather=v is not None)
    spec = _row_spec("esmm", x, layout, v is not None, tile, bias=bias is not None)
    launch = _row_launch(spec, x, weight, v, offs, top_k, n, tile)
    launch.values |= {"out": y.data_ptr(), "out_ld": N, "N": N, "bias": _ptr(bias), "bias_ld": N}
    if n:
        launch()
    return y


def esmm_act(
    x: Tensor, w1: Tensor, b1: Tensor | None, w3: Tensor | None, b3: Tensor | None, v: Tensor | None, offs: Tensor, top_k: int,
    layout: str, activation: str, glu: str, params: tuple[float, ...] = (), store_h: bool = True, tile: TileChoice | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """``h = esmm`` and ``a = act(h)``: (n, I) or (n, 2I), and (n, I). Without `store_h` (inference) h is empty."""
    n, columns, b1, b3 = _count(x, v), _columns(w1, layout), _packed(b1), _packed(b3)
    inner = columns // 2 if glu in ("concat", "interleaved") else columns
    width = inner if glu == "none" else 2 * inner
    h, a = x.new_empty((n, width) if store_h else (0, width)), x.new_empty(n, inner)
    tile = tile or choose_tile("esmm_act", n, w1.shape[0], x.shape[1], width, gather=v is not None)
    spec = _row_spec("esmm_act", x, layout, v is not None, tile, bias=b1 is not None, activation=activation, glu=glu)
    launch = _row_launch(spec.with_options(store_h=store_h), x, w1, v, offs, top_k, n, tile)
    if w3 is not None:
        launch.maps[2] = _weight_map(w3, layout, tile.bn // 2)
    launch.values |= {
        "out": h.data_ptr() if store_h else 0, "out_ld": width, "act": a.data_ptr(), "act_ld": inner, "N": inner,
        "bias": _ptr(b1), "bias_up": _ptr(b3), "bias_ld": columns, **_act_params(params),
    }  # fmt: skip
    if n:
        launch()
    return h, a


def esmm_act_backward(
    dy: Tensor, w2: Tensor, h: Tensor, weights: Tensor | None, v: Tensor, offs: Tensor, top_k: int, layout: str, activation: str,
    glu: str, params: tuple[float, ...] = (), tile: TileChoice | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """``da = esmm(dy, w2, v)`` and activate_backward in its epilogue; da itself is never stored.

    Args:
        dy: (T, D).
        w2: the down projection as the product reads it: ``kn`` is (E, D, I), ``nk`` is (E, I, D).
        h: (n, I) or (n, 2I).
        weights: float32 routing weight of every slot, or None for 1.

    Returns:
        dh like h, a_scaled (n, I), and d(weights) by slot (n,) in float32: <da, a>.
    """
    n, inner = v.shape[0], _columns(w2, layout)
    dh, a = torch.empty_like(h), h.new_empty(n, inner)
    tile = tile or choose_tile("esmm_act_backward", n, w2.shape[0], dy.shape[1], inner, gather=True)
    spec = _row_spec(
        "esmm_act_backward", dy, layout, True, tile, activation=activation, glu="concat" if glu == "split" else glu
    )
    launch = _row_launch(spec, dy, w2, v, offs, top_k, n, tile)
    dots = torch.empty(-(-inner // tile.bn), n, dtype=torch.float32, device=h.device)
    launch.values |= {
        "out": dh.data_ptr(), "out_ld": dh.stride(0), "act": a.data_ptr(), "act_ld": inner, "N": inner, "h": h.data_ptr(),
        "h_ld": h.stride(0), "slot_scale": _ptr(weights), "row_dot": dots.data_ptr(), **_act_params(params),
    }  # fmt: skip
    if n:
        launch()
    return dh, a, dots.sum(0) if dots.shape[0] > 1 else dots[0]


def estmm(
    x: Tensor, g: Tensor, x_index: Tensor | None, g_index: Tensor | None, offs: Tensor, top_k: int, layout: str,
    tile: TileChoice | None = None,
) -> Tensor:  # fmt: skip
    """``dW[e] = sum over rows of x[row]^T g[row]``, (E, N, K) for ``nk``, (E, K, N) for ``kn``. At most one index."""
    experts = offs.shape[0] - 1
    if g_index is not None:  # the gathered operand is P, dW's rows unless transposed
        p, q, transpose = g, x, layout == "kn"
    else:
        p, q, transpose = x, g, layout == "nk"
    v = x_index if g_index is None else g_index
    if v is None and transpose:
        p, q, transpose = q, p, False
    R, C = p.shape[1], q.shape[1]
    dw = x.new_empty((experts, C, R) if transpose else (experts, R, C))
    n = q.shape[0]
    if n == 0:
        return dw.zero_()
    tile = tile or choose_tile("estmm", n, experts, R, C, gather=v is not None)
    spec = _row_spec("estmm", x, "nk", v is not None, tile).with_options(transpose=transpose)
    launch = _weight_launch(_Launch(spec, x.device.index), p, q, v, dw, None, R, C, tile)
    launch.values |= {"offs": offs.data_ptr(), "n": n, "experts": experts, "group_m": tile.group_m, **_division(top_k)}
    if dw.numel():
        launch()
    return dw


def esfk(
    x: Tensor, g: Tensor, weight: Tensor, x_index: Tensor | None, offs: Tensor, top_k: int, layout: str, has_bias: bool,
    tile: TileChoice | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:  # fmt: skip
    """The paper's fused backward: ``dx = g W^T`` (n, K), ``dW``, ``db`` (E, N) of one projection in one launch."""
    flipped = "kn" if layout == "nk" else "nk"
    experts, n = weight.shape[0], g.shape[0]
    R, C = x.shape[1], g.shape[1]
    dx, dw = g.new_empty(n, R), torch.empty_like(weight, memory_format=torch.contiguous_format)
    db = g.new_empty(experts, C) if has_bias else None
    if n == 0:
        return dx, dw.zero_(), None if db is None else db.zero_()
    tile = tile or choose_tile("esfk", n, experts, R, C, gather=x_index is not None)
    spec = _row_spec("esfk", x, flipped, x_index is not None, tile).with_options(transpose=layout == "nk")
    launch = _Launch(spec, x.device.index)
    launch.maps[0] = _rows_map(g, tile.bm)
    launch.maps[1] = _weight_map(weight, flipped, tile.bn // 2)
    launch = _weight_launch(launch, x, g, x_index, dw, db, R, C, tile)
    launch.values |= {
        "offs": offs.data_ptr(), "n": n, "experts": experts, "group_m": tile.group_m, "K": C, "N": R, "out": dx.data_ptr(),
        "out_ld": R, **_division(top_k),
    }  # fmt: skip
    launch()
    return dx, dw, db


def _weight_launch(
    launch: _Launch,
    p: Tensor,
    q: Tensor,
    v: Tensor | None,
    dw: Tensor,
    db: Tensor | None,
    R: int,
    C: int,
    tile: TileChoice,
) -> _Launch:
    launch.values |= {
        "v": _ptr(v), "p": p.data_ptr(), "p_ld": p.stride(0), "dw": dw.data_ptr(), "db": _ptr(db), "R": R, "C": C,
    }  # fmt: skip
    if v is None:
        launch.maps[3] = _rows_map(p, 64)
    launch.maps[4] = _rows_map(q, 64)
    return launch


def _act_params(params: tuple[float, ...]) -> dict[str, float]:
    return dict(zip(("act_a", "act_b"), params))
