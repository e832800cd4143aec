"""Memory that is put behind addresses piece by piece, against a driver that takes notes."""

import ctypes
from typing import Any

import pytest

from hexa_fx.jit import DriverError
from hexa_fx.jit.driver import Driver
from hexa_fx.jit.mapped_memory import MappedMemory

PAGE, BASE = 1 << 21, 0x7_0000_0000


class Notes:
    """libcuda's memory calls. Sizes are by value, as the driver gets them."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, list[int]]] = []
        self.fail = ""

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any) -> int:
            if name == "cuMemGetAllocationGranularity":
                args[0]._obj.value = PAGE
                assert ctypes.sizeof(args[1]._obj) == 32
            elif name == "cuMemAddressReserve":
                args[0]._obj.value = BASE
            elif name == "cuMemCreate":
                args[0]._obj.value = 100 + len(self.named("cuMemCreate"))
            self.calls.append((name, [arg.value for arg in args if hasattr(arg, "value")]))
            return 2 if name == self.fail else 0

        return call

    def named(self, name: str) -> list[list[int]]:
        return [args for called, args in self.calls if called == name]


def test_pages_come_as_they_are_needed_and_go_together() -> None:
    notes = Notes()
    memory = MappedMemory(3 * PAGE + 5, 1, Driver(notes))  # type: ignore[arg-type]
    assert notes.named("cuMemAddressReserve")[0][0] == 4 * PAGE
    for nbytes in (PAGE - 1, PAGE, 2 * PAGE + 1, 3 * PAGE + 5):
        memory.extend(nbytes)
    assert [args[0] for args in notes.named("cuMemCreate")] == [PAGE, 2 * PAGE, PAGE]
    assert [args[:2] for args in notes.named("cuMemMap")] == [
        [BASE, PAGE],
        [BASE + PAGE, 2 * PAGE],
        [BASE + 3 * PAGE, PAGE],
    ]
    assert [args[:2] for args in notes.named("cuMemSetAccess")] == [args[:2] for args in notes.named("cuMemMap")]
    del memory
    assert notes.named("cuMemUnmap") == [[BASE, PAGE], [BASE + PAGE, 2 * PAGE], [BASE + 3 * PAGE, PAGE]]
    assert notes.named("cuMemRelease") == [[100], [101], [102]]
    assert notes.named("cuMemAddressFree") == [[BASE, 4 * PAGE]]
    names = [name for name, _ in notes.calls]
    assert names.index("cuCtxSynchronize") < names.index("cuMemUnmap")


def test_no_memory_left() -> None:
    notes = Notes()
    memory = MappedMemory(2 * PAGE, 0, Driver(notes))  # type: ignore[arg-type]
    memory.extend(PAGE)
    notes.fail = "cuMemCreate"
    with pytest.raises(DriverError, match="cuMemCreate"):
        memory.extend(2 * PAGE)
    del memory
    assert notes.named("cuMemUnmap") == [[BASE, PAGE]]
