"""Loading and launching, against a driver that only takes notes."""

import ctypes
from pathlib import Path
from typing import Any

import pytest
import torch
from cutlass_library import DataType

from hexa_fx.codegen import KernelSpec, render
from hexa_fx.jit import BuiltKernel, DriverError, KernelHandle, tensormap
from hexa_fx.jit.driver import Driver

SPEC = KernelSpec("gemm_sm80", "esmm", 80, bm=128, bn=128, bk=32, stages=4).with_options(warps_m=2, warps_n=2)


class LaunchConfig(ctypes.Structure):
    """CUlaunchConfig as cuda.h has it."""

    _fields_ = (
        *((name, ctypes.c_uint) for name in ("gx", "gy", "gz", "bx", "by", "bz", "shared")),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("count", ctypes.c_uint),
    )

    def values(self) -> list[Any]:
        return [getattr(self, name) for name, _ in self._fields_]


class FakeLibrary:
    """libcuda's functions by name; each call is kept, and fails when its name is in `fail`."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple[Any, ...]]] = []
        self.fail: set[str] = set()
        self.bound = True

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any) -> int:
            self.calls.append((name, args))
            if name == "cuCtxSetCurrent":
                self.bound = True
            elif name in ("cuLaunchKernelEx", "cuTensorMapEncodeTiled") and not self.bound:
                return 201
            if name == "cuGetErrorString":
                args[1]._obj.value = b"out of luck"
            elif name in ("cuLibraryLoadData", "cuLibraryGetKernel", "cuKernelGetFunction"):
                args[0]._obj.value = 0x7F00_0000_1000 + len(self.calls)
            elif name == "cuTensorMapEncodeTiled":
                ctypes.memset(args[0].value, 7, 128)
            return 9 if name in self.fail else 0

        return call

    def named(self, name: str) -> list[tuple[Any, ...]]:
        return [args for called, args in self.calls if called == name]


@pytest.fixture
def library() -> FakeLibrary:
    return FakeLibrary()


@pytest.fixture
def handle(library: FakeLibrary) -> KernelHandle:
    return KernelHandle(render(SPEC), BuiltKernel("k", Path(), b"cubin"), Driver(library))  # type: ignore[arg-type]


def test_a_launch_hands_over_grid_threads_shared_memory_stream_and_arguments(
    library: FakeLibrary, handle: KernelHandle
) -> None:
    handle.launch(0, (7, 2, 1), (b"first", b"second"), 0x55)
    (args,) = library.named("cuLaunchKernelEx")
    config, function, parameters, extra = args
    assert function.value > 2**32
    assert LaunchConfig.from_buffer_copy(config).values() == [7, 2, 1, 128, 1, 1, 65536, 0x55, None, 0]
    assert ([bytes(p) for p in parameters], extra) == ([b"first", b"second"], None)


def test_an_empty_grid_launches_nothing(library: FakeLibrary, handle: KernelHandle) -> None:
    handle.launch(0, (0, 1, 1), (b"",), 0)
    assert not library.named("cuLaunchKernelEx")


def test_each_device_is_prepared_once_outside_of_any_capture(library: FakeLibrary, handle: KernelHandle) -> None:
    for device in (0, 1, 0, 1, 1):
        handle.launch(device, (1, 1, 1), (b"x",), 0)
    assert len(library.named("cuLibraryLoadData")) == 1
    assert [args[1:] for args in library.named("cuKernelSetAttribute")] == [
        (65536, library.named("cuKernelSetAttribute")[0][2], device) for device in (0, 1)
    ]
    assert len(library.named("cuKernelGetFunction")) == 2
    assert len(library.named("cuThreadExchangeStreamCaptureMode")) == 4


def test_a_refused_launch_says_what_and_in_the_drivers_words(library: FakeLibrary, handle: KernelHandle) -> None:
    library.fail.add("cuLaunchKernelEx")
    with pytest.raises(DriverError, match=r"launch of esmm with grid \(3, 1, 1\) failed: error 9, out of luck"):
        handle.launch(0, (3, 1, 1), (b"x",), 0)


def test_a_thread_that_never_touched_cuda_is_given_the_devices_context(
    library: FakeLibrary, handle: KernelHandle, monkeypatch: pytest.MonkeyPatch
) -> None:
    handle.launch(1, (1, 1, 1), (b"x",), 0)
    library.bound = False
    handle.launch(1, (1, 1, 1), (b"x",), 0)
    assert library.named("cuDevicePrimaryCtxRetain")[-1][1] == 1
    library.bound = False
    monkeypatch.setattr(tensormap, "driver", lambda: Driver(library))  # type: ignore[arg-type]
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    assert tensormap.tensor_map(0x2000, DataType.bf16, (256, 64), (256,), (64, 64))
    assert library.named("cuDevicePrimaryCtxRetain")[-1][1] == 3


def test_a_refused_image_is_an_error(library: FakeLibrary) -> None:
    library.fail.add("cuLibraryLoadData")
    with pytest.raises(DriverError, match="cuLibraryLoadData failed: error 9, out of luck"):
        KernelHandle(render(SPEC), BuiltKernel("k", Path(), b"cubin"), Driver(library))  # type: ignore[arg-type]


def test_tensor_maps_are_encoded(library: FakeLibrary, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensormap, "driver", lambda: Driver(library))  # type: ignore[arg-type]
    first = tensormap.tensor_map(0x1000, DataType.bf16, (256, 64, 8), (256, 256 * 64), (64, 128, 1))
    assert first == b"\x07" * 128
    (args,) = library.named("cuTensorMapEncodeTiled")
    assert args[0].value % 64 == 0
    assert (args[1], args[2], args[3].value) == (9, 3, 0x1000)
    assert [list(args[i]) for i in (4, 5, 6, 7)] == [[256, 64, 8], [512, 32768], [64, 128, 1], [1, 1, 1]]
    assert args[8:] == (0, 3, 2, 0)


def test_a_refused_tensor_map_shows_its_arguments(library: FakeLibrary, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensormap, "driver", lambda: Driver(library))  # type: ignore[arg-type]
    library.fail.add("cuTensorMapEncodeTiled")
    with pytest.raises(DriverError, match=r"bf16 shape \(100, 3\) strides \(101,\).*multiples of 16 bytes"):
        tensormap.tensor_map(0x1002, DataType.bf16, (100, 3), (101,), (64, 3))
