"""Stand-ins for a card: what a layer's calls launch, seen where the driver would be called. On CPU tensors; nothing is computed."""

import ctypes
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from hexa_fx.codegen import KernelSpec, get_family, render
from hexa_fx.cuda import choosing as cuda_choosing
from hexa_fx.cuda import decode as cuda_decode
from hexa_fx.cuda import fallback as cuda_fallback
from hexa_fx.cuda import kernel as cuda_kernel
from hexa_fx.cuda import layer as cuda_layer
from hexa_fx.cuda import plan as cuda_plan
from hexa_fx.ir import FfnSpec
from hexa_fx.jit import BuiltKernel, KernelHandle, builder
from hexa_fx.jit.driver import Driver
from hexa_fx.ops.moe_ffn import backward_on, forward_on
from hexa_fx.ops.table_layers import MoeFfn, MoeFfnBackward
from tests.ops.reference import operands

T, K, E, D, H = 3, 2, 5, 16, 24
MAP = 128
"""Bytes of a tensor map."""
AMPERE, HOPPER = cuda_choosing.Card("a card", 90, 4, 80), cuda_choosing.Card("a card", 90, 4, 90)
"""Stand-ins: kernels are chosen as for an sm_80, or as for an sm_90."""


def without_a_device(patch: pytest.MonkeyPatch, folder: Path, card: cuda_choosing.Card, get_kernel: Any) -> None:
    """Launches on CPU tensors go to what ``get_kernel`` gives, chosen as for ``card``. ``folder`` is for the cache."""
    patch.setattr(cuda_kernel, "get_kernel", get_kernel)
    patch.setenv("HEXA_FX_WAIT_FOR_KERNELS", "1")
    patch.setenv("HEXA_FX_CACHE_DIR", str(folder))
    patch.setattr(cuda_fallback, "fallbacks", {})
    patch.setattr(cuda_fallback, "_permanent", set())
    patch.setattr(torch._C, "_cuda_getDevice", lambda: None, raising=False)
    patch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 0, raising=False)
    patch.setattr(cuda_choosing, "device_card", lambda device: card)
    patch.setattr(cuda_plan, "_empty_strided", None)
    cuda_choosing.forget_choices()


@dataclass(frozen=True)
class Launch:
    """One driver call, with the arguments as they lay in memory when it came."""

    spec: KernelSpec
    config: bytes
    values: tuple[Any, ...]
    maps: tuple[bytes, ...] = ()

    @property
    def blocks(self) -> tuple[int, ...]:
        """The grid."""
        return struct.unpack("3I", self.config[:12])

    @property
    def named(self) -> dict[str, Any]:
        """Arguments by the names of their fields; a tuple of a field of several numbers."""
        left = iter(self.values)
        each = ((f.name, [next(left) for _ in range(f.times)]) for f in get_family(self.spec.family).args.fields)
        return {name: numbers[0] if len(numbers) == 1 else tuple(numbers) for name, numbers in each}

    @property
    def mapped(self) -> list[bool]:
        """Which tensor maps are there."""
        return [any(one) for one in self.maps]


@dataclass
class Card:
    """Stands where libcuda would be, one for each kernel; all share `launches`."""

    spec: KernelSpec
    launches: list[Launch]
    during: list[Callable[[], object]]
    fail: set[str] = field(default_factory=set)

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any) -> int:
            if name == "cuLaunchKernelEx":
                self.launch(*args)
            elif name == "cuGetErrorString":
                args[1]._obj.value = b"out of luck"
            elif name.startswith(("cuLibrary", "cuKernelGet")):
                args[0]._obj.value = 0x1000
            return 9 if name in self.fail else 0

        return call

    def launch(self, config: bytes, function: Any, parameters: Any, extra: None) -> None:
        if self.during:
            self.during.pop()()
        layout = get_family(self.spec.family).args.layout
        starts = ctypes.cast(parameters, ctypes.POINTER(ctypes.c_void_p))
        hopper = self.spec.family.endswith("_gemm_sm90")
        maps = ctypes.string_at(starts[0], 9 * MAP) if hopper else b""
        values = layout.unpack(ctypes.string_at(starts[int(hopper)], layout.size))
        each = tuple(maps[at : at + MAP] for at in range(0, len(maps), MAP))
        self.launches.append(Launch(self.spec, config, values, each))
        if hopper and self.spec.op == "esmm_act_backward" and (at := (given := self.launches[-1].named)["row_dot"]):
            numbers = [float(n % 7) for n in range(-(-given["N"] // self.spec.bn) * given["n"])]
            ctypes.memmove(at, (ctypes.c_float * len(numbers))(*numbers), 4 * len(numbers))


class Cards:
    """What was launched, and how often the general path ran."""

    card = Card

    def __init__(self) -> None:
        self.launches: list[Launch] = []
        self.during: list[Callable[[], object]] = []
        self.fail: set[str] = set()
        self.general = 0
        self.stream = 0x55
        self.encoded: dict[tuple[Any, ...], int] = {}

    @property
    def last(self) -> Launch:
        """The last launch."""
        return self.launches[-1]

    @property
    def drawn(self) -> dict[int, tuple[Any, ...]]:
        """By address, how the last tensor map there was encoded."""
        kinds = {number: args for args, number in self.encoded.items()}
        maps = (struct.unpack_from("QQ", one) for launch in self.launches for one in launch.maps if any(one))
        return {address: kinds[number] for address, number in maps}

    def stand_in(self, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
        """Takes the place of a card of the Ampere family. ``folder`` is for the cache."""
        without_a_device(monkeypatch, folder, AMPERE, self.get_kernel)
        monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: self.stream)
        monkeypatch.setattr(cuda_plan, "_empty_strided", torch._C._dynamo.guards._empty_strided_cpu)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)

    def be_hopper(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Of the Hopper family from now on: tensor maps are their address and a number of `encoded`, queues lie in a ring."""
        turns = cycle(range(0x10000, 0x10000 + 8 * 4096, 8))
        monkeypatch.setattr(cuda_choosing, "device_card", lambda device: HOPPER)
        monkeypatch.setattr(cuda_plan, "next_queue", lambda device: next(turns))
        monkeypatch.setattr(cuda_plan, "address_offset", lambda: 0)

        def tensor_map(pointer: int, *args: object) -> bytes:
            return struct.pack("QQ112x", pointer, self.encoded.setdefault(args, len(self.encoded) + 1))

        monkeypatch.setattr(cuda_plan, "tensor_map", tensor_map)

    def get_kernel(self, spec: KernelSpec, node: str = "") -> KernelHandle:
        card = self.card(spec, self.launches, self.during, self.fail)
        return KernelHandle(render(spec), BuiltKernel("k", Path(), b"cubin"), Driver(card))  # type: ignore[arg-type]

    def build_in_the_background(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """From now on kernels are launched when the builder has built them, and no call waits."""

        def loaded_kernel(spec: KernelSpec) -> KernelHandle | None:
            builder().check(spec)
            return self.get_kernel(spec) if builder().ready(spec) else None

        monkeypatch.delenv("HEXA_FX_WAIT_FOR_KERNELS")
        monkeypatch.setattr(cuda_kernel, "loaded_kernel", loaded_kernel)
        monkeypatch.setattr(cuda_kernel, "_said", set())

    def run_general(self, *args: Any) -> Any:
        self.general += 1
        o = MoeFfn._make(args)
        o.check("moe_ffn")
        with torch._C._AutoDispatchBelowAutograd():
            return forward_on("cuda", False, o)

    def run_general_forward(self, *args: Any) -> Any:
        self.general += 1
        with torch._C._AutoDispatchBelowAutograd():
            return forward_on("cuda", True, MoeFfn._make(args))

    def run_general_backward(self, *args: Any) -> Any:
        self.general += 1
        with torch._C._AutoDispatchBelowAutograd():
            return backward_on("cuda", MoeFfnBackward, args)

    def run(self, args: Sequence[Any]) -> Tensor:
        return cuda_layer.LAYERS["moe_ffn"](self.run_general, *args)  # type: ignore[no-any-return]


def arguments(
    glu: str = "concat",
    layouts: str = "nk nk",
    bias: bool = False,
    dtype: torch.dtype = torch.bfloat16,
    ids: torch.dtype = torch.int64,
    gates: torch.dtype | None = torch.bfloat16,
    top_k: int = K,
    tokens: int = T,
) -> list[Any]:
    def random(shape: tuple[int, ...], _: int) -> Tensor:
        return torch.randn(*shape).to(dtype)

    index = torch.randint(0, E, (tokens, top_k)).to(ids)
    spec = FfnSpec("silu", glu, *layouts.split())  # type: ignore[arg-type]
    made = operands(spec, random, index, experts=E, model_size=D, inner=H, bias=bias)
    return [*made._replace(top_k_weights=None if gates is None else torch.rand(tokens, top_k).to(gates))]


def copied(args: Sequence[Any]) -> list[Any]:
    """The same call on tensors that lie elsewhere."""
    return [t.clone(memory_format=torch.preserve_format) if isinstance(t, Tensor) else t for t in args]


class Kept(TorchDispatchMode):
    """Keeps what is allocated, so that no address comes twice; counts."""

    def __init__(self) -> None:
        super().__init__()
        self.tensors: list[Tensor] = []
        self._allocate: Any = None

    def __enter__(self) -> Any:
        self._allocate, cuda_plan._empty_strided = cuda_plan._empty_strided, None  # so that a mode sees it
        return super().__enter__()

    def __exit__(self, *args: Any) -> None:
        super().__exit__(*args)
        cuda_plan._empty_strided = self._allocate

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.tensors.append(out)
        return out


def seen(cards: Cards, operands: Sequence[Any], run: Callable[[], Any]) -> tuple[list[Any], list[Tensor], list[int]]:
    """What a call launches, addresses by what lies there: an operand, a result, a queue, else the how-manieth other one.

    Returns:
        (spec, config, values, maps) of every launch; the results; the other addresses.
    """
    cards.launches.clear()
    with Kept():
        found = run()
    results = [found] if isinstance(found, Tensor) else [t for t in found if t is not None]
    named: list[tuple[Any, Tensor]] = [(f"operand {i}", t) for i, t in enumerate(operands) if isinstance(t, Tensor)]
    named += [(f"result {i}", t) for i, t in enumerate(results)]
    others: dict[int, str] = {}

    def name(at: int) -> Any:
        if at == 0:
            return None
        if 0x10000 <= at < 0x18000:
            return "queue"
        for what, t in named:
            last = sum((size - 1) * stride for size, stride in zip(t.shape, t.stride(), strict=True))
            if t.numel() and 0 <= at - t.data_ptr() < (last + 1) * t.element_size():
                return what, at - t.data_ptr()
        return others.setdefault(at, f"other {len(others)}")

    launched: list[Any] = []
    for launch in cards.launches:
        kinds = [field.code for field in get_family(launch.spec.family).args.fields for _ in range(field.times)]
        values = [name(v) if kind == "P" else v for v, kind in zip(launch.values, kinds, strict=True)]
        maps = [(name(int.from_bytes(m[:8], "little")), m[8:]) for m in launch.maps if any(m)]
        launched.append((launch.spec, launch.config, values, maps))
    return launched, results, [*others]


@pytest.fixture
def any_number_of_rows(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Few tokens take three launches, with many rows an expert too."""
    monkeypatch.setattr(cuda_decode.family, "very_few", lambda slots, experts: True)
    monkeypatch.setattr(cuda_decode.family, "MOST_SHORT_BUCKET", 5)
    monkeypatch.setattr(cuda_decode.family, "choose_summed", lambda *sizes: None)
    cuda_choosing.forget_choices()
    yield
    cuda_choosing.forget_choices()
