"""A kernel family: one template, the specs that it accepts, and how its kernels are launched.

docs/writing_a_kernel_template.md says how one is added: a module ``family_NAME.py``, listed in ``_MODULES``. `args` names the
fields of the argument struct, in its order and as it names them; the template compares the size, and a test the fields.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache, cached_property
from struct import Struct
from typing import Any, NamedTuple

from hexa_fx.codegen.cutlass import DataType, SharedMemPerCC
from hexa_fx.codegen.spec import KernelSpec, SpecError
from hexa_fx.errors import KernelError

FLOATS = (DataType.bf16, DataType.f16, DataType.f32, DataType.f64)
HALVES = FLOATS[:2]
FLOAT_NAMES = tuple(dtype.name for dtype in FLOATS)
PAIRS = ("swiglu_oai", "swiglu_limited")
"""Activations that are functions of gate and up."""
ACTIVATIONS = ("none", "relu", "relu2", "gelu", "gelu_tanh", "silu", "quick_gelu", "sigmoid", "tanh", *PAIRS)
"""Names that templates/include/hexa_fx/epilogue/activations.cuh knows: those of hexa_fx.ops.activations."""


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
        takes: what fields and options of a spec may be; those that are not named may be anything. Without ``out``, results have the
            operands' type, or that of the accumulators where they are added.
        adds: operators whose results may be added to what is there.
        adds_narrow: to what has the operands' type, too.
        check: KernelSpec -> other reasons why it cannot be generated; empty when it can.
        arch_specific: needs the ``a`` target (wgmma, setmaxnreg), sm_90a, and runs on no other compute capability.
    """

    name: str
    ops: tuple[str, ...]
    args: Args
    shape: Callable[[KernelSpec], LaunchShape]
    values: Callable[[KernelSpec], Mapping[str, object]] = lambda spec: {}
    takes: Mapping[str, Collection[object]] = field(default_factory=dict)
    adds: tuple[str, ...] = ()
    adds_narrow: bool = False
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
    for name, values in family.takes.items():
        value = spec.option(name, getattr(spec, name, 0))
        if value not in values:
            yield f"{name} is {_said(value)}; expected {_choices(values)}"
    if spec.activation not in ACTIVATIONS:
        yield f"activation {spec.activation!r}; expected one of {', '.join(ACTIVATIONS)}"
    if spec.activation in PAIRS and spec.glu == "none":
        yield f"{spec.activation} is a function of gate and up, so glu cannot be none"
    if spec.accumulate and spec.op not in family.adds:
        yield f"{spec.op} adds to nothing"
    stored = spec.dtype if not spec.accumulate or (family.adds_narrow and not spec.adds_floats) else spec.wide
    if "out" not in family.takes and spec.out is not stored:
        yield f"{spec.dtype.name} -> {spec.out.name}; results have the operands' type, sums of launches {spec.wide.name}"


def _said(value: object) -> str:
    return str(getattr(value, "name", value))


def _choices(values: Collection[object]) -> str:
    if isinstance(values, range):
        return f"{values[0]} to {values[-1]}"
    *most, last = map(_said, values)
    return f"{', '.join(most)} or {last}" if most else last


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
