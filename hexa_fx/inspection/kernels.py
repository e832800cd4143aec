"""Lists the kernels that a block's operators launch on a GPU, and whether they are built. Needs neither a GPU nor a compiler.

The operators' CUDA implementations run on tensors without data while kernels are only collected
(`hexa_fx.cuda.choosing.collect`), so the list is what they would launch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.fx

from hexa_fx.errors import HexaError, InputError
from hexa_fx.inspection.operators import op_name
from hexa_fx.inspection.stages import FfnCase, operator_values
from hexa_fx.observers import muted
from hexa_fx.passes.lowering.lower import lower_backward, lower_forward
from hexa_fx.passes.lowering.pipelines import CUDA

DEFAULT_ARCH = 90
ARCHS = (80, 86, 89, 90)
"""Compute capabilities that there are kernels for."""


@dataclass(frozen=True)
class KernelUse:
    """One kernel that a block launches.

    Args:
        node: the graph node that launches it.
        direction: ``forward`` or ``backward``.
        operator: such as ``hexa.esmm_act``.
        spec: the kernel as JSON (`hexa_fx.codegen.KernelSpec`); empty if there is none.
        fallback: why torch's own operators run instead.
    """

    node: str
    direction: str
    operator: str
    spec: str = ""
    fallback: str = ""

    @property
    def name(self) -> str:
        """Readable identity: operator, family, tile."""
        if not self.spec:
            return f"{self.operator} on torch's operators"
        spec = self._spec()
        tile = f" {spec.bm}x{spec.bn}x{spec.bk} stages {spec.stages}" if spec.bn else ""
        return f"{spec.op} [{spec.family} sm_{spec.arch} {spec.dtype.name}{tile}] {spec.key}"

    @property
    def source(self) -> str:
        """The generated CUDA text; empty for a fallback."""
        from hexa_fx.codegen import render

        return render(self._spec(), self.node).text if self.spec else ""

    @property
    def cached(self) -> bool | None:
        """Whether the kernel is built on this machine; None if there is no compiler, without which its cache key is unknown."""
        return is_cached(self.spec) if self.spec else None

    def _spec(self) -> Any:
        from hexa_fx.codegen import KernelSpec

        return KernelSpec.from_json(self.spec)


def kernels_of(case: FfnCase, arch: int | None = None) -> tuple[KernelUse, ...]:
    """Every kernel that forward and backward of a block launch, in order. A kernel launched by two nodes is listed twice.

    Args:
        case: the call, with its sizes and dtype.
        arch: compute capability, 80, 86, 89 or 90. Default: this machine's GPU, else 90.

    Raises:
        KernelError: there are no kernels for ``arch``. InputError: ``arch`` is no whole number.
    """
    if arch is not None and type(arch) is not int:
        raise InputError(f"arch={arch!r}: expected a compute capability as a whole number, such as 90")
    from hexa_fx.cuda.choosing import collect, device_card, typical_card

    arch = arch or default_arch()
    card = device_card(0)._replace(family_arch=arch) if arch == local_arch() else typical_card(arch)
    known_values: dict[str, Any] = dict(case.operands)
    found: list[KernelUse] = []
    with muted(), collect(card) as specs:
        for direction, lower in (("forward", lower_forward), ("backward", lower_backward)):
            operator_values(CUDA.until("fuse_activation")(lower(case.request)), known_values)
            found += _Collector(direction, known_values, specs).run(CUDA.until("bind_kernels")(lower(case.request)))
    return tuple(found)


def default_arch() -> int:
    """Compute capability of this machine's GPU, else HEXA_FX_CUDA_ARCH, else 90."""
    from hexa_fx.jit import JitSettings

    return local_arch() or JitSettings.from_env().cuda_arch or DEFAULT_ARCH


def local_arch() -> int | None:
    """Compute capability of this machine's first GPU, if there are kernels for it."""
    if not torch.cuda.is_available():
        return None
    from hexa_fx.jit.kernel import device_arch

    arch = device_arch(torch.cuda.current_device())
    return arch if arch in ARCHS else None


class _Collector:
    """Runs a bound graph node by node, on values known by name, and notes what each kernel would launch."""

    def __init__(self, direction: str, known: dict[str, Any], specs: list[Any]) -> None:
        self._direction, self._known, self._specs = direction, known, specs

    def run(self, gm: torch.fx.GraphModule) -> list[KernelUse]:
        operators = [(node, op) for node, op in ((n, _operator(n)) for n in gm.graph.nodes) if op]
        return [use for node, operator in operators for use in self._node(node, operator)]

    def _node(self, node: torch.fx.Node, operator: str) -> list[KernelUse]:
        first = len(self._specs)
        if any(n.name not in self._known for n in node.all_input_nodes):
            return [KernelUse(node.name, self._direction, operator, fallback="the sizes of its operands are not known")]
        args = torch.fx.map_arg(node.args, lambda n: self._known[n.name])
        try:
            node.target(*args)  # type: ignore[operator]
        except HexaError as error:
            return [KernelUse(node.name, self._direction, operator, fallback=str(error))]
        return [KernelUse(node.name, self._direction, operator, spec.to_json()) for spec in self._specs[first:]]


def _operator(node: torch.fx.Node) -> str:
    """The operator that a bound node stands for; empty for views and sizes."""
    if node.op != "call_function" or not getattr(node.target, "__module__", "").startswith("hexa_fx.cuda."):
        return ""
    return f"hexa.{op_name(node)}"


def is_cached(spec: str) -> bool | None:
    """Whether a kernel, given as JSON, is in this machine's cache or in a kernel pack; None if neither and there is no compiler."""
    from hexa_fx.codegen import KernelSpec, render
    from hexa_fx.jit import JitSettings, ToolchainError
    from hexa_fx.jit.build import find_built

    try:
        return find_built(render(KernelSpec.from_json(spec)), JitSettings.from_env()) is not None
    except ToolchainError:
        return None
