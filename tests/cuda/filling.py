"""A stand-in for a card whose launches leave numbers: what a launch writes is all the same number, made of what it reads.

It is no product, but it depends on the beginning of every operand. So results of a whole step are equal exactly if every launch
found what it should: a stale weight, or memory that was given away too early, changes them.
"""

import ctypes
import struct
from collections.abc import Sequence
from typing import Any
from zlib import crc32

import pytest

from hexa_fx.cuda import layer as cuda_layer
from hexa_fx.ops import moe_ffn_autograd
from tests.cuda.cards import Card, Cards, Launch

READ = 16
"""Bytes of an operand that count; every operand of a test has as many."""

Write = tuple[int, int, str]
"""Address, elements, type."""


def fill(place: Write, number: int) -> None:
    address, count, dtype = place
    one = struct.pack("<i", number) if dtype == "int" else struct.pack("<f", number / 64)
    one = one[2:] if dtype == "bf16" else one
    ctypes.memmove(address, one * count, len(one) * count)


def reads_and_writes(launch: Launch) -> tuple[Sequence[int], list[Write]]:
    """The addresses that a kernel reads from, and what it writes."""
    op, values, blocks = launch.spec.op, launch.values, launch.blocks[0]
    dtype = launch.spec.dtype.name if launch.spec.dtype else ""
    assert launch.spec.family.startswith("reindex") or dtype in ("bf16", "f32")
    if op in ("reindex_place", "reindex_count"):
        ids, counts, v, inv, offs, n, experts, *_ = values
        if op == "reindex_count":
            return (ids,), [(counts, blocks * (experts + 1), "int")]
        return (ids, counts), [(a, m, "int") for a, m in ((v, n), (inv, n), (offs, experts + 1))]
    if op == "combine":
        y, weights, inv, _, out, _, _, width, _ = values
        return (y, weights, inv), [(out, blocks * width, dtype)]
    if launch.spec.family == "gemm_sm80" and op == "esmm":
        a, b, b2, bias, bias2, d, act, a_index, b_index, offs, *sizes = values
        assert not act
        return (a, b, b2, bias, bias2, a_index, b_index, offs), [(d, sizes[6] * sizes[3], dtype)]
    if op == "ess_partial":
        return values[:4], [(values[4], launch.blocks[1] * values[8], "f32")]
    if op == "ess_finish":
        return values[:5], [(values[5], values[7] * values[8], dtype)]
    assert launch.spec.family == "gather_gemm_sm90", launch.spec
    v, offs, _, a, out, act, bias, up, h, scale, dot, p, dw, db, n, experts, _, _, _, out_ld, act_ld = values[:21]
    columns, rows, width = values[23], values[26], values[27]
    parts = -(-columns // launch.spec.bn)
    maps = [int.from_bytes(m[:8], "little") for m in launch.maps[:6]]
    written = [(out, n * out_ld, dtype), (act, n * act_ld, dtype), (dot, parts * n, "f32")]
    written += [(dw, experts * rows * width, dtype), (db, experts * width, dtype)]
    return (v, offs, a, bias, up, h, scale, p, *maps), written


class FillingCard(Card):
    def launch(self, *args: Any) -> None:
        super().launch(*args)
        launch = self.launches[-1]
        read, written = reads_and_writes(launch)
        places = [place for place in written if place[0]]
        for place in places:  # a kernel that wrote where it reads would find this
            fill(place, -1)
        found = crc32(launch.spec.op.encode())
        for address in read:
            found = crc32(ctypes.string_at(address, READ) if address else b"", found)
        for i, place in enumerate(places):
            fill(place, crc32(bytes([i]), found) % 97 + 1)


class Filling(Cards):
    """The card, on which `hexa::moe_ffn` runs on CPU tensors as on its own.

    Attributes:
        replaying: whether calls may be played again.
    """

    card = FillingCard
    replaying = True

    def take_over(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Makes `hexa::moe_ffn` on CPU tensors run here."""
        monkeypatch.setattr(moe_ffn_autograd, "run", self._run)

    def _run(self, name: str, *args: Any) -> Any:
        general = {
            "moe_ffn": self.run_general,
            "moe_ffn_forward": self.run_general_forward,
            "moe_ffn_backward": self.run_general_backward,
        }[name]
        return cuda_layer.LAYERS[name](general, *args) if self.replaying else general(*args)
