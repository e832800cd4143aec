"""``hexa-fx kernels list | show | build | pack``"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from hexa_fx.cli.common import (
    MOST_TOKENS,
    Arch,
    Dtype,
    Json,
    Target,
    Tokens,
    check_range,
    echo_json,
    errors_shown,
    fail,
    optimized,
)
from hexa_fx.errors import InputError

app = typer.Typer(no_args_is_help=True, help="The CUDA kernels of a model. Nothing here needs a GPU.")

_DTYPES = {"bf16": "bfloat16", "f16": "float16", "f32": "float32", "f64": "float64"}


@app.command("list")
@errors_shown
def list_(target: Target, arch: Arch = None, dtype: Dtype = "", tokens: Tokens = None, as_json: Json = False) -> None:
    """The kernels that a model's MoE blocks launch, and whether they are built on this machine."""
    found = _kernels(target, arch, dtype, tokens)
    if as_json:
        echo_json([_as_dict(kernel) for kernel in found])
        return
    typer.echo(f"{'':11}  {'in':8}  {'node':18}  operator [family target dtype tile] key")
    for kernel in found:
        state = {True: "built", False: "not built", None: "no compiler"}[kernel.cached] if kernel.spec else "fallback"
        typer.echo(f"{state:11}  {kernel.direction:8}  {kernel.node:18}  {kernel.name}  {kernel.fallback}".rstrip())


@app.command()
@errors_shown
def show(
    key: Annotated[str, typer.Argument(help="Key of a kernel, as `kernels list` prints it last, or the start of one.")],
    target: Target,
    arch: Arch = None,
    dtype: Dtype = "",
    tokens: Tokens = None,
    as_json: Json = False,
) -> None:
    """Print the CUDA text of one kernel of a model."""
    from hexa_fx.codegen import KernelSpec

    found = _kernels(target, arch, dtype, tokens)
    keys = {kernel: KernelSpec.from_json(kernel.spec).key for kernel in found if kernel.spec}
    chosen = next((kernel for kernel, own in keys.items() if own.startswith(key)), None)
    if chosen is None:
        fail(f"{target} launches no kernel {key!r}; it launches {', '.join(sorted(set(keys.values())))}", as_json)
    if as_json:
        echo_json({**_as_dict(chosen), "source": chosen.source})
        return
    typer.echo(chosen.source)


@app.command()
@errors_shown
def build(target: Target, arch: Arch = None, dtype: Dtype = "", tokens: Tokens = None, as_json: Json = False) -> None:
    """Build the kernels of a model into the cache, so that its first step need not."""
    from hexa_fx.codegen import KernelSpec
    from hexa_fx.jit import prebuild

    kernels = [k for k in dict.fromkeys(_kernels(target, arch, dtype, tokens)) if k.spec]
    specs = list(dict.fromkeys(KernelSpec.from_json(kernel.spec) for kernel in kernels))
    before = sum(bool(kernel.cached) for kernel in {k.spec: k for k in kernels}.values())
    entries = prebuild(specs)
    if as_json:
        echo_json([{"key": entry.key, "path": str(entry.path), "bytes": len(entry.cubin)} for entry in entries])
        return
    typer.echo(
        f"{len(entries)} kernels, {len(entries) - before} built now, in {entries[0].path.parent if entries else '-'}"
    )


@app.command()
@errors_shown
def pack(
    arch: Annotated[int, typer.Option("--arch", help="Compute capability: 80, 86, 89 or 90.")],
    out: Annotated[Path, typer.Option("--out", help="Folder for the pack and its wheel.")],
    dtype: Annotated[str, typer.Option("--dtype", help="Element types, separated by commas.")] = "bf16,f16",
    as_json: Json = False,
) -> None:
    """Build all kernels of the common models into a folder and a wheel, for machines without a compiler."""
    import torch

    from hexa_fx.cli.model_layers import pack_kernels
    from hexa_fx.codegen.render import package_version, render
    from hexa_fx.jit import JitSettings, find_compiler, packs, prebuild
    from hexa_fx.jit.wheel import write_wheel

    names = dtype.split(",")
    if not set(names) <= set(_DTYPES):
        raise InputError(f"--dtype {dtype!r}: expected some of {', '.join(_DTYPES)}, separated by commas")
    out.mkdir(parents=True, exist_ok=True)  # before minutes of building
    specs = pack_kernels(arch, [getattr(torch, _DTYPES[name]) for name in names])
    settings = replace(JitSettings.from_env(), kernel_pack="")
    kernels = list(zip(map(render, specs), prebuild(specs, settings), strict=True))
    made = packs.write(out / packs.module_name(arch), arch, find_compiler(settings).identity, kernels)
    summary = f"Kernels of hexa-fx for compute capability {arch / 10}"
    wheel = write_wheel(made.path, out, package_version(), summary)
    size = wheel.stat().st_size
    if as_json:
        echo_json({"path": str(made.path), "wheel": str(wheel), "kernels": len(kernels), "bytes": size})
        return
    typer.echo(f"{len(kernels)} kernels in {made.path}; {wheel.name}, {size / 1e6:.1f} MB")


def _kernels(target: str, arch: int | None, dtype: str, tokens: int | None) -> list[Any]:
    """Of all rewritten blocks, each kernel at each node once."""
    import torch

    from hexa_fx.attached import attached
    from hexa_fx.inspection.kernels import kernels_of

    if dtype and dtype not in _DTYPES:
        raise InputError(f"--dtype {dtype!r}: expected one of {', '.join(_DTYPES)}")
    check_range("tokens", 1 if tokens is None else tokens, 1, MOST_TOKENS)
    cases = {id(b.stages): b.case for b in attached(optimized(target), "graphs").values() if b.case is not None}
    if not cases:
        raise InputError(f"no block of {target} runs as hexa::moe_ffn; `hexa-fx explain {target}` says why")
    wanted = getattr(torch, _DTYPES[dtype]) if dtype else None
    found = [kernel for case in cases.values() for kernel in kernels_of(case.resized(tokens, wanted), arch)]
    return list(dict.fromkeys(found))


def _as_dict(kernel: Any) -> dict[str, Any]:
    from dataclasses import asdict

    return {**asdict(kernel), "name": kernel.name, "cached": kernel.cached}
