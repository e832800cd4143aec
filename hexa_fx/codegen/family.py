"""A kernel family: one template, the checks of the specs it accepts, and how its kernels are launched.

How a kernel is added
    1. The algorithm: a plain header in the folder of its role, ``templates/include/hexa_fx/ROLE/NAME.cuh``. No host
       code, no ``<cuda_runtime.h>``, nothing that NVRTC cannot compile. Kernels' argument structs live there too.
    2. The entry: ``templates/NAME.cu.j2``. It includes the header, states the types and tiles and defines
       ``extern "C" __global__ void hexa_kernel(const __grid_constant__ Params p)``. Names the template sees: ``spec``
       (the KernelSpec), ``launch`` (the LaunchShape), ``args_bytes``, what `Family.values` adds, and the filters ``cxx``
       (CUTLASS's name of a DataType), ``cuda`` (CUDA's own) and ``flag`` (true / false). The macro of ``entry.j2`` writes its
       end where a class ``Kernel`` works in dynamic shared memory.
    3. A `Family` in a module of its own, ``hexa_fx/codegen/family_NAME.py``, listed in ``_MODULES``.
    4. Whoever launches it: ``handle = hexa_fx.jit.get_kernel(spec)``, then
       ``handle.launch(device_index, grid, (packed,), stream)``. Several blobs are several kernel
       parameters; a tensor map is one blob of 128 bytes (`hexa_fx.jit.tensormap.tensor_map`).

`args` names the fields of the argument struct, in its order and as it names them. Emit
``static_assert(sizeof(Params) == {{ args_bytes }})`` in the template; a test compares the fields.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from struct import Struct
from typing import Any, NamedTuple

from hexa_fx.codegen.cutlass import SharedMemPerCC
from hexa_fx.codegen.spec import KernelSpec, SpecError
from hexa_fx.errors import KernelError


class Field(NamedTuple):
    """A field, of so many numbers of a type as `struct` names it, or one pointer."""

    name: str
    code: str
    times: int


@dataclass(frozen=True)
class Args:
    """A struct: pointers first.

    Args:
        text: ``P x, y; q stride; i rows, columns; 2f constants``: types as `struct` has them ("P" pointer, "q" int64, "i" int32,
            "I" unsigned, "f" float, "d" double), with a number for fields of several, and fields as device code names them.
    """

    text: str

    def within(self, name: str) -> str:
        """The fields as those of a member of another struct."""
        groups = (group.split(maxsplit=1) for group in self.text.split(";"))
        return "; ".join(
            f"{kind} " + ", ".join(f"{name}.{each.strip()}" for each in names.split(",")) for kind, names in groups
        )

    @cached_property
    def fields(self) -> tuple[Field, ...]:
        """In order."""
        groups = (group.split(maxsplit=1) for group in self.text.split(";"))
        each = ((kind, name.strip()) for kind, names in groups for name in names.split(","))
        return tuple(Field(name, kind[-1], int(kind[:-1] or 1)) for kind, name in each)

    @cached_property
    def layout(self) -> Struct:
        """The whole struct, in native alignment; a C++ struct is padded at its end."""
        return Struct("".join(f.code * f.times for f in self.fields) + "0P")

    @cached_property
    def _numbers(self) -> tuple[Struct, tuple[Field, ...]]:
        fields = tuple(f for f in self.fields if f.code != "P")
        return Struct("".join(f.code * f.times for f in fields) + "0P"), fields

    @property
    def size(self) -> int:
        """Bytes."""
        return self.layout.size

    def piece(self, **given: Any) -> tuple[tuple[Any, ...], bytes]:
        """Pointers, and the numbers that follow them as they lie in memory. Fields that are not given are null or zero."""
        layout, numbers = self._numbers
        unknown = given.keys() - {f.name for f in self.fields}
        assert not unknown, f"no fields of the struct: {sorted(unknown)}"
        values: list[Any] = []
        for name, _, times in numbers:
            value = given.get(name, 0 if times == 1 else (0,) * times)
            values += [value] if times == 1 else value
        return tuple(given.get(f.name) for f in self.fields if f.code == "P"), layout.pack(*values)


PLACES = Args("P own, up; i part")
"""hexa::MatrixPlaces, which follows the argument struct of a kernel with the option ``listed``."""

NEWEST_ARCH = 90
"""The newest compute capability that kernels have run on. On later ones torch's operators run (docs/scope.md)."""


@dataclass(frozen=True)
class LaunchShape:
    """What of a launch the spec fixes.

    Args:
        threads: of a block.
        shared_bytes: dynamic shared memory of a block.
        cluster: blocks of one, along x.
        dependent: it begins while the launch before it still runs; the kernel waits (templates/include/hexa_fx/ptx/dependent.cuh).
        overlaps: it runs beside others, so that all of them want memory split alike: as much of it as can be is shared.
    """

    threads: int
    shared_bytes: int = 0
    cluster: int = 1
    dependent: bool = False
    overlaps: bool = False


@dataclass(frozen=True)
class Family:
    """One template and everything Python must know about it.

    Args:
        name: `KernelSpec.family`; its template is ``templates/NAME.cu.j2``.
        ops: the operators it serves.
        min_arch: the first compute capability that it runs on.
        args: layout of the (last) by-value argument struct.
        shape: KernelSpec -> LaunchShape.
        values: KernelSpec -> what else the template sees.
        check: KernelSpec -> reasons why it cannot be generated; empty when it can.
        arch_specific: needs the ``a`` target (wgmma, setmaxnreg), sm_90a, and runs on no other compute capability.
    """

    name: str
    ops: tuple[str, ...]
    args: Args
    shape: Callable[[KernelSpec], LaunchShape]
    values: Callable[[KernelSpec], Mapping[str, object]] = lambda spec: {}
    check: Callable[[KernelSpec], Iterable[str]] = lambda spec: ()
    min_arch: int = 80
    arch_specific: bool = False

    def why_not_on(self, arch: int) -> str:
        """Why its kernels do not run on a compute capability; empty if they do."""
        if arch > NEWEST_ARCH:
            return f"sm_{arch}: no kernel has run on anything newer than an sm_{NEWEST_ARCH}"
        newest = self.min_arch if self.arch_specific else NEWEST_ARCH
        takes = self.min_arch <= arch <= newest
        return "" if takes else f"sm_{arch}: {self.name} needs sm_{self.min_arch} to sm_{newest}"

    @property
    def template(self) -> str:
        """File name under templates/."""
        return f"{self.name}.cu.j2"

    def target(self, spec: KernelSpec) -> str:
        """The compiler's name of the architecture, e.g. ``sm_90a``."""
        return f"sm_{spec.arch}{'a' if self.arch_specific else ''}"


def shared_limit(arch: int) -> int:
    """Bytes of shared memory one block may ask for on `arch` (CUTLASS's table; 99 KiB where it has no entry)."""
    return int(SharedMemPerCC.get(arch, 99)) * 1024


def validate(family: Family, spec: KernelSpec) -> LaunchShape:
    """Checks `spec` against its family and the hardware's limits.

    Returns:
        The launch shape.

    Raises:
        SpecError: with every reason at once.
    """
    reasons = list(_common(family, spec))
    if not reasons:
        reasons = list(family.check(spec))
    if not reasons:
        reasons = list(_limits(spec, family.shape(spec)))
    if reasons:
        raise SpecError("; ".join(reasons), op=spec.op, family=spec.family, arch=spec.arch)
    return family.shape(spec)


def _common(family: Family, spec: KernelSpec) -> Iterable[str]:
    if spec.op not in family.ops:
        yield f"family {family.name} serves {', '.join(family.ops)}, not {spec.op}"
    if reason := family.why_not_on(spec.arch):
        yield reason


def _limits(spec: KernelSpec, shape: LaunchShape) -> Iterable[str]:
    limit = shared_limit(spec.arch)
    if shape.shared_bytes > limit:
        yield f"{shape.shared_bytes} bytes of shared memory, a block has {limit}: use a smaller tile or fewer stages"
    if shape.threads > 1024 or shape.threads % 32:
        yield f"{shape.threads} threads a block: must be a multiple of 32 up to 1024"


_MODULES = ("rows", "block_sm90", "decode", "gemm_sm80", "gemm_sm90", "low_rank", "packed", "unpack")
"""``family_NAME.py``, each with its families in ``FAMILIES``. Imported on first use, so that they may import this one, and in this
order as far as needed: the last ones import torch, for which a process that only builds a kernel would wait."""


def _families() -> Iterator[Family]:
    for name in _MODULES:
        yield from importlib.import_module(f"hexa_fx.codegen.family_{name}").FAMILIES


@cache
def get_family(name: str) -> Family:
    """The family called `name`; raises `KernelError` if there is none."""
    for family in _families():
        if family.name == name:
            return family
    raise KernelError(f"no kernel family {name!r}; there are {', '.join(family_names())}")


def family_names() -> tuple[str, ...]:
    """Names of all families, sorted."""
    return tuple(sorted(family.name for family in _families()))
