"""The few functions of the CUDA driver that loading and launching need, through ctypes.

Kernels are loaded as libraries (`cuLibraryLoadData`): one image serves every device of the process.
"""

from __future__ import annotations

import ctypes
from functools import cache

from hexa_fx.jit.errors import DriverError

NO_CONTEXT = 201
"""CUDA_ERROR_INVALID_CONTEXT: the calling thread has not touched CUDA yet, as autograd's own threads at first."""

MAX_DYNAMIC_SHARED_BYTES = 8
"""CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES."""

PREFERRED_SHARED_MEMORY_CARVEOUT = 9
"""CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT, in percent. A multiprocessor has to be idle to change it."""

_CAPTURE_RELAXED = 2


class Driver:
    """libcuda with checked calls.

    Args:
        library: the loaded libcuda; tests pass a stand-in.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        self.library = library
        # No argtypes: converting arguments would cost as much as the call. All four are pointers: bytes, c_void_p, an array, None.
        self.launch_kernel = library.cuLaunchKernelEx

    def check(self, call: str, result: int) -> None:
        """Raises DriverError with the driver's own words unless `result` is 0."""
        if result:
            text = ctypes.c_char_p()
            self.library.cuGetErrorString(result, ctypes.byref(text))
            raise DriverError(f"error {result}, {(text.value or b'unknown').decode()}", call=call)

    def bind(self, device: int) -> None:
        """Makes the primary context of `device`, which is torch's too, current in this thread."""
        context = ctypes.c_void_p()
        self.check("cuDevicePrimaryCtxRetain", self.library.cuDevicePrimaryCtxRetain(ctypes.byref(context), device))
        self.check("cuCtxSetCurrent", self.library.cuCtxSetCurrent(context))

    def load(self, image: bytes) -> ctypes.c_void_p:
        """A CUlibrary of a cubin. `image` is copied by the driver."""
        handle = ctypes.c_void_p()
        result = self.library.cuLibraryLoadData(ctypes.byref(handle), image, None, None, 0, None, None, 0)
        self.check("cuLibraryLoadData", result)
        return handle

    def kernel(self, library: ctypes.c_void_p, name: str) -> ctypes.c_void_p:
        """The CUkernel called `name`."""
        handle = ctypes.c_void_p()
        self.check("cuLibraryGetKernel", self.library.cuLibraryGetKernel(ctypes.byref(handle), library, name.encode()))
        return handle

    def prepare(
        self, kernel: ctypes.c_void_p, device: int, shared_bytes: int, most_shared: bool = False
    ) -> ctypes.c_void_p:
        """Loads `kernel` on `device` and allows it its shared memory. Makes the device's context current.

        Works inside a CUDA graph capture: loading is hidden from it.

        Args:
            kernel: what `kernel` gave.
            device: CUDA device index.
            shared_bytes: dynamic shared memory of a block.
            most_shared: a multiprocessor's memory is to be shared memory as far as possible. A hint.

        Returns:
            The CUfunction to launch there.
        """
        self.bind(device)
        mode = ctypes.c_int(_CAPTURE_RELAXED)
        self.library.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))
        try:
            if shared_bytes > 48 * 1024:
                result = self.library.cuKernelSetAttribute(MAX_DYNAMIC_SHARED_BYTES, shared_bytes, kernel, device)
                self.check("cuKernelSetAttribute", result)
            if most_shared:
                self.library.cuKernelSetAttribute(PREFERRED_SHARED_MEMORY_CARVEOUT, 100, kernel, device)
            function = ctypes.c_void_p()
            self.check("cuKernelGetFunction", self.library.cuKernelGetFunction(ctypes.byref(function), kernel))
        finally:
            self.library.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))
        if not function.value:
            raise DriverError("no function", call="cuKernelGetFunction")
        return function

    def blocks_per_sm(self, function: ctypes.c_void_p, threads: int, shared_bytes: int) -> int:
        """How many blocks of `function` one multiprocessor of the current device holds at a time."""
        count = ctypes.c_int()
        call = self.library.cuOccupancyMaxActiveBlocksPerMultiprocessor
        result = call(ctypes.byref(count), function, threads, ctypes.c_size_t(shared_bytes))
        self.check("cuOccupancyMaxActiveBlocksPerMultiprocessor", result)
        return count.value


@cache
def driver() -> Driver:
    """The process's driver.

    Raises:
        DriverError: there is no libcuda.
    """
    try:
        # PyDLL keeps the GIL during a call: calls are short, and releasing and retaking it would cost more.
        return Driver(ctypes.PyDLL("libcuda.so.1"))
    except OSError as error:
        raise DriverError(str(error), call="loading libcuda.so.1") from None
