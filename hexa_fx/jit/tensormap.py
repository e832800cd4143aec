"""Tensor maps for the bulk tensor copy engine (TMA), encoded from Python."""

from __future__ import annotations

import ctypes
from functools import cache

from hexa_fx.codegen.cutlass import DataType
from hexa_fx.jit.driver import NO_CONTEXT, driver
from hexa_fx.jit.errors import DriverError

TENSOR_MAP_BYTES = 128
_ALIGNMENT = 64

_TYPE = {
    DataType.u8: 0,
    DataType.e4m3: 0,
    DataType.f16: 6,
    DataType.f32: 7,
    DataType.f64: 8,
    DataType.bf16: 9,
    DataType.tf32: 11,
}
_SIZE = {
    DataType.u8: 1,
    DataType.e4m3: 1,
    DataType.f16: 2,
    DataType.bf16: 2,
    DataType.f32: 4,
    DataType.tf32: 4,
    DataType.f64: 8,
}
_SWIZZLE = {0: 0, 32: 1, 64: 2, 128: 3}
_PROMOTE = {0: 0, 64: 1, 128: 2, 256: 3}


def tensor_map(
    pointer: int,
    dtype: DataType,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    box: tuple[int, ...],
    swizzle: int = 128,
    promote: int = 128,
) -> bytes:
    """A CUtensorMap as bytes, ready to be one parameter of a launch. Out-of-bounds elements read as zero.

    Args:
        pointer: device address, a multiple of 16.
        dtype: element type.
        shape: innermost dimension first, up to 5.
        strides: of ``shape[1:]``, in elements; multiples of 16 bytes. The innermost stride is 1.
        box: extent of one copy, as `shape`. Each up to 256; the innermost no wider than the swizzle.
        swizzle: bytes of the shared-memory swizzle: 0, 32, 64, 128.
        promote: bytes that a fetch is widened to in L2: 0, 64, 128, 256.

    Raises:
        DriverError: the driver refuses the arguments, which are shown.
    """
    rank = len(shape)
    size = _SIZE[dtype]
    raw = ctypes.create_string_buffer(TENSOR_MAP_BYTES + _ALIGNMENT)
    address = -(-ctypes.addressof(raw) // _ALIGNMENT) * _ALIGNMENT
    arguments = (
        ctypes.c_void_p(address),
        _TYPE[dtype],
        rank,
        ctypes.c_void_p(pointer),
        (ctypes.c_uint64 * rank)(*shape),
        (ctypes.c_uint64 * max(rank - 1, 1))(*(stride * size for stride in strides)),
        (ctypes.c_uint32 * rank)(*box),
        (ctypes.c_uint32 * rank)(*(1,) * rank),
        0,
        _SWIZZLE[swizzle],
        _PROMOTE[promote],
        0,
    )
    api = driver()
    result = api.library.cuTensorMapEncodeTiled(*arguments)
    if result == NO_CONTEXT:
        import torch  # as in `hexa_fx.jit.kernel`

        api.bind(torch.cuda.current_device())
        result = api.library.cuTensorMapEncodeTiled(*arguments)
    if result:
        what = f"error {result} for {dtype.name} shape {shape} strides {strides} box {box} at {pointer:#x}"
        raise DriverError(f"{what}: address and strides must be multiples of 16 bytes", call="cuTensorMapEncodeTiled")
    return ctypes.string_at(address, TENSOR_MAP_BYTES)


@cache
def address_offset() -> int | None:
    """Where the bytes of a tensor map hold its address, which may then be exchanged for another. The driver does not say: found by
    encoding two that differ in nothing else.

    Returns:
        Bytes from the start; None where the address is not held as eight bytes, the lowest first.
    """
    first, second = 0x7F12_3456_7800, 0x7E98_7654_3200
    try:
        one, other = (tensor_map(address, DataType.bf16, (64, 64), (64,), (64, 16)) for address in (first, second))
    except DriverError:
        return None
    at = one.find(first.to_bytes(8, "little"))
    fits = at >= 0 and other == one[:at] + second.to_bytes(8, "little") + one[at + 8 :]
    return at if fits else None
