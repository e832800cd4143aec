"""Device memory of one range of addresses that gets its pages piece by piece, through the driver's virtual memory calls.

torch's allocator gives a tensor all of its memory at once, so moving tensors into one takes twice their memory for a while. Here
pages are added as tensors move in, and what they leave can be given back in between.
Source: CUDA driver API, "Virtual Memory Management".
"""

from __future__ import annotations

import ctypes
import sys
from ctypes import byref, c_int, c_size_t, c_ubyte, c_uint64, c_void_p
from typing import Any

import torch
from torch import Tensor

from hexa_fx.jit.driver import Driver, driver

_PINNED, _ON_DEVICE, _READ_WRITE = 1, 1, 3
"""CU_MEM_ALLOCATION_TYPE_PINNED, CU_MEM_LOCATION_TYPE_DEVICE, CU_MEM_ACCESS_FLAGS_PROT_READWRITE."""


class _Location(ctypes.Structure):
    """CUmemLocation."""

    _fields_ = (("type", c_int), ("id", c_int))


class _Properties(ctypes.Structure):
    """CUmemAllocationProp."""

    _fields_ = (
        ("type", c_int),
        ("handles", c_int),
        ("location", _Location),
        ("windows", c_void_p),
        ("flags", c_ubyte * 8),
    )


class _Access(ctypes.Structure):
    """CUmemAccessDesc."""

    _fields_ = (("location", _Location), ("flags", c_int))


class MappedMemory:
    """Addresses for ``nbytes``, without memory behind them at first. All of it is given back when the last tensor on it goes.

    Args:
        nbytes: size of the range; rounded up to whole pages.
        device: index of the device.

    Raises:
        DriverError: the driver refuses, for want of addresses or because it does not know these calls.
    """

    def __init__(self, nbytes: int, device: int, library: Driver | None = None) -> None:
        self._pieces: list[tuple[int, int, c_uint64]] = []
        self._location, self.mapped, self._base = _Location(_ON_DEVICE, device), 0, c_uint64()
        self._driver = library or driver()
        self._properties = _Properties(_PINNED, 0, self._location)
        self._driver.bind(device)
        page = c_size_t()
        self._call("cuMemGetAllocationGranularity", byref(page), byref(self._properties), 0)
        self.page, self.reserved = page.value, _rounded(nbytes, page.value)
        self._call(
            "cuMemAddressReserve", byref(self._base), c_size_t(self.reserved), c_size_t(0), c_uint64(0), c_uint64(0)
        )

    def extend(self, nbytes: int) -> None:
        """Puts memory behind the first ``nbytes``, as far as there is none yet.

        Raises:
            DriverError: there is not that much.
        """
        start, size = self.mapped, _rounded(nbytes, self.page) - self.mapped
        if size <= 0:
            return
        handle = c_uint64()
        self._call("cuMemCreate", byref(handle), c_size_t(size), byref(self._properties), c_uint64(0))
        place = c_uint64(self._base.value + start)
        self._call("cuMemMap", place, c_size_t(size), c_size_t(0), handle, c_uint64(0))
        self._pieces.append((place.value, size, handle))
        self.mapped += size
        access = _Access(self._location, _READ_WRITE)
        self._call("cuMemSetAccess", place, c_size_t(size), byref(access), c_size_t(1))

    def tensor(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A contiguous tensor on the range's beginning, which has memory already."""
        nbytes = torch.Size(shape).numel() * dtype.itemsize
        flat = torch.as_tensor(_Bytes(self, self._base.value, nbytes), device=torch.device("cuda", self._location.id))
        return flat.view(dtype).view(shape)

    def _call(self, name: str, *arguments: Any) -> None:
        self._driver.check(name, getattr(self._driver.library, name)(*arguments))

    def __del__(self) -> None:
        if sys.is_finalizing():
            return
        library = self._driver.library  # whatever happens here, nobody can be told
        library.cuCtxSynchronize()  # kernels that are queued may read it; torch's allocator knows nothing of this memory
        for place, size, handle in self._pieces:
            library.cuMemUnmap(c_uint64(place), c_size_t(size))
            library.cuMemRelease(handle)
        if self._base.value:
            library.cuMemAddressFree(self._base, c_size_t(self.reserved))


class _Bytes:
    """What torch makes a tensor of without a copy, and keeps for as long."""

    def __init__(self, memory: MappedMemory, address: int, nbytes: int) -> None:
        self.memory = memory
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }


def _rounded(nbytes: int, page: int) -> int:
    return -(-nbytes // page) * page
