"""KernelSource -> cubin: from the disk cache, or built once under a lock."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

from hexa_fx.codegen.render import FLAGS, KernelSource
from hexa_fx.jit import nvrtc, packs, processes
from hexa_fx.jit.cache import BuiltKernel, KernelCache, cache_key
from hexa_fx.jit.env import JitSettings
from hexa_fx.jit.errors import BuildDisabledError, BuildError
from hexa_fx.jit.toolchain import Compiler, find_compiler
from hexa_fx.templates import INCLUDE_DIR

log = logging.getLogger(__name__)

_LOG_TAIL = 4000


def build(source: KernelSource, settings: JitSettings | None = None) -> BuiltKernel:
    """The cubin of `source`, built if the cache has none.

    Raises:
        ToolchainError: no compiler, or HEXA_FX_DISABLE_JIT is set and the cache has no such kernel.
        BuildError: the compiler refused it.
    """
    settings = settings or JitSettings.from_env()
    entry = find_built(source, settings) or build_missing(source, settings, wait=True)
    assert entry is not None
    return entry


def find_built(source: KernelSource, settings: JitSettings) -> BuiltKernel | None:
    """The cubin of `source` if a kernel pack or the cache has it.

    Raises:
        ToolchainError: no pack has it, and there is no compiler, whose version the cache's key needs.
    """
    packed = packs.find(source, settings)
    if packed is not None:
        return packed
    return KernelCache(settings.cache_dir).get(build_key(source, find_compiler(settings)))


def being_built(source: KernelSource, settings: JitSettings) -> bool:
    """Whether some process builds the kernel at this moment."""
    with KernelCache(settings.cache_dir).lock(build_key(source, find_compiler(settings)), wait=False) as free:
        return not free


def build_missing(source: KernelSource, settings: JitSettings, wait: bool) -> BuiltKernel | None:
    """Builds a kernel that the cache had not a moment ago.

    Args:
        source: what to build.
        settings: where, and with which compiler.
        wait: for another process that builds it already; else the result is None then.

    Raises:
        ToolchainError, BuildError: as `build`.
    """
    compiler = find_compiler(settings)
    cache = KernelCache(settings.cache_dir)
    key = build_key(source, compiler)
    if settings.disable_jit:
        raise BuildDisabledError(key)
    with cache.lock(key, wait) as held:
        return (cache.get(key) or _build(source, key, compiler, cache, settings)) if held else None


def build_key(source: KernelSource, compiler: Compiler) -> str:
    """The cache key of `source` under `compiler`."""
    return cache_key(source.key, compiler.identity, " ".join(_flags(compiler)), source.target)


def _flags(compiler: Compiler) -> tuple[str, ...]:
    return FLAGS if compiler.kind == "nvcc" else nvrtc.NVRTC_FLAGS


def _build(
    source: KernelSource, key: str, compiler: Compiler, cache: KernelCache, settings: JitSettings
) -> BuiltKernel:
    workspace = cache.workspace(key)
    text = workspace / "kernel.cu"
    text.write_text(source.text)
    command = _command(source, compiler, workspace, settings)
    try:
        output = _compile(source, compiler, command, workspace)
    except BaseException:
        shutil.rmtree(workspace, ignore_errors=True)
        raise
    if "are serialized" in output:  # ptxas could not keep several wgmma in flight: still correct, but a third slower
        log.warning("kernel %s (%s): ptxas serialised its wgmma instructions; see %s", key, source.spec.op, text)
    if settings.verbose_build:
        log.info("%s\n%s", " ".join(command), output.strip())
    meta: dict[str, object] = {
        "spec": source.spec.to_json(),
        "compiler": compiler.identity,
        "target": source.target,
        "log": output,
    }
    entry = cache.publish(key, workspace, meta)
    log.debug("built kernel %s (%s, %s)", key, source.spec.op, source.target)
    return entry


def _command(source: KernelSource, compiler: Compiler, workspace: Path, settings: JitSettings) -> list[str]:
    includes = [f"-I{folder}" for folder in (INCLUDE_DIR, *compiler.includes)]
    if compiler.kind == "nvrtc":
        return [str(compiler.path), f"--gpu-architecture={source.target}", *nvrtc.NVRTC_FLAGS, *includes]
    code = f"-gencode=arch={source.target.replace('sm_', 'compute_')},code={source.target}"
    extra = ["--keep", f"--keep-dir={workspace}"] if settings.keep else []
    output = ["-cubin", str(workspace / "kernel.cu"), "-o", str(workspace / "kernel.cubin")]
    return [str(compiler.path), *FLAGS, code, "-Xptxas=-v", *extra, *includes, *output]


def _compile(source: KernelSource, compiler: Compiler, command: list[str], workspace: Path) -> str:
    """Writes ``kernel.cubin``; returns the compiler's output."""
    try:
        if compiler.kind == "nvrtc":
            cubin, output = nvrtc.compile_cubin(compiler.path, source.text, command[1:])
            (workspace / "kernel.cubin").write_bytes(cubin)
            return output
        code, output = processes.run(command)
        if code:
            raise nvrtc.NvrtcError(output)
        return output
    except nvrtc.NvrtcError as error:
        raise BuildError(
            str(error)[-_LOG_TAIL:],
            key=source.key,
            compiler=compiler.identity,
            source=_keep_failed(workspace, source),
            command=" ".join(command),
        ) from None


def _keep_failed(workspace: Path, source: KernelSource) -> Path:
    """Moves the source of a failed build to where the next build of the same key will not remove it."""
    folder = workspace.parent.parent / "failed"
    folder.mkdir(parents=True, exist_ok=True)
    kept = folder / f"{source.key}.cu"
    shutil.move(workspace / "kernel.cu", kept)
    return kept
