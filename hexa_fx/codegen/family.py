"""A kernel family: one template, the checks of the specs it accepts, and how its kernels are launched.

How a kernel is added
    1. The algorithm: a plain header in the folder of its role, ``templates/include/hexa_fx/ROLE/NAME.cuh``. No host
       code, no ``<cuda_runtime.h>``, nothing that NVRTC cannot compile. Kernels' argument structs live there too.
    2. The entry: ``templates/NAME.cu.j2``. It includes the header, states the types and tiles and defines
       ``extern "C" __global__ void hexa_kernel(const __grid_constant__ Params p)``. Names the template sees: ``spec``
       (the KernelSpec), ``launch`` (the LaunchShape), ``args_bytes``, what `Family.values` adds, and the filters ``cxx``
       (CUTLASS's name of a DataType), ``cuda`` (CUDA's own) and ``flag`` (true / false).
    3. A `Family` in a module of its own, ``hexa_fx/codegen/family_NAME.py``, listed in ``families._MODULES``.
    4. Whoever launches it: ``handle = hexa_fx.jit.get_kernel(spec)``, then
       ``handle.launch(device_index, grid, (packed,), stream)``. Several blobs are several kernel
       parameters; a tensor map is one blob of 128 bytes (`hexa_fx.jit.tensormap.tensor_map`).

`args` names the fields of the argument struct, in its order and as it names them (`hexa_fx.codegen.arguments`). Emit
``static_assert(sizeof(Params) == {{ args_bytes }})`` in the template; a test compares the fields.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from hexa_fx.codegen.arguments import Args
from hexa_fx.codegen.cutlass import SharedMemPerCC
from hexa_fx.codegen.spec import KernelSpec, SpecError

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
        name: `KernelSpec.family`.
        template: file name under templates/.
        ops: the operators it serves.
        min_arch, max_arch: compute capabilities it runs on, inclusive.
        args: layout of the (last) by-value argument struct.
        shape: KernelSpec -> LaunchShape.
        values: KernelSpec -> what else the template sees.
        check: KernelSpec -> reasons why it cannot be generated; empty when it can.
        arch_specific: needs the ``a`` target (wgmma, setmaxnreg): sm_90a.
    """

    name: str
    template: str
    ops: tuple[str, ...]
    args: Args
    shape: Callable[[KernelSpec], LaunchShape]
    values: Callable[[KernelSpec], Mapping[str, object]] = lambda spec: {}
    check: Callable[[KernelSpec], Iterable[str]] = lambda spec: ()
    min_arch: int = 80
    max_arch: int = NEWEST_ARCH
    arch_specific: bool = False

    def why_not_on(self, arch: int) -> str:
        """Why its kernels do not run on a compute capability; empty if they do."""
        if arch > NEWEST_ARCH:
            return f"sm_{arch}: no kernel has run on anything newer than an sm_{NEWEST_ARCH}"
        takes = self.min_arch <= arch <= self.max_arch
        return "" if takes else f"sm_{arch}: {self.name} needs sm_{self.min_arch} to sm_{self.max_arch}"

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
