"""Makes libraries whose every function fails, for the CUDA libraries that a torch wheel links to and this machine lacks.

Wheels of older torch for Linux are built for CUDA and do not load without its libraries, which are gigabytes. With these in
LD_LIBRARY_PATH such a torch loads, finds no device and runs on the CPU. Needs a C compiler and readelf.

    python .ci/cuda_stand_ins.py SITE_PACKAGES/torch FOLDER
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

NO_DEVICE = 100  # cudaErrorNoDevice
GIVES_TEXT = re.compile(r"(cuda|cublas|cudnn|nccl)\w*(Error|Status)(String|Name)|ncclGetLastError")


def main(torch: Path, folder: Path) -> None:
    """Writes the missing libraries of the torch in ``torch`` to ``folder``."""
    libraries = [*(torch / "lib").glob("*.so*"), *torch.glob("_C*.so")]
    there = {path.name for path in libraries}
    needed, home, functions = set[str](), {"": ""}, defaultdict[str, set[str]](set)
    for library in libraries:
        needed |= set(re.findall(r"\(NEEDED\).*\[(.*)\]", _read("-dW", library)))
        file = ""
        for kind, value in re.findall(r"(File|Name): (\S+)", _read("-VW", library)):
            file = value if kind == "File" else file
            home.setdefault(value, file)
        for name, version in re.findall(
            r" UND ((?:cu|nccl|nv|__cu)\w+)(?:@(\S+))?", _read("--dyn-syms", "-W", library)
        ):
            functions[version].add(name)
    missing = sorted(name for name in needed - there if re.match(r"lib(cu|nv|nccl)", name))
    home[""] = missing[0] if missing else ""
    folder.mkdir(parents=True, exist_ok=True)
    for name in missing:
        own = {version: found for version, found in functions.items() if home.get(version) == name}
        _build(folder / name, own)


def _read(*arguments: str | Path) -> str:
    return subprocess.run(["readelf", *arguments], capture_output=True, text=True, check=False).stdout


def _build(library: Path, functions: dict[str, set[str]]) -> None:
    """One library with these functions, by version of their symbols."""
    source, script = library.with_suffix(".c"), library.with_suffix(".map")
    names = sorted({name for found in functions.values() for name in found})
    source.write_text("".join(map(_failing, names)))
    versions = {version: found for version, found in functions.items() if version}
    script.write_text("".join(f"{v} {{ global: {'; '.join(sorted(found))}; }};\n" for v, found in versions.items()))
    command = ["cc", "-w", "-shared", "-fno-builtin", "-o", library, f"-Wl,-soname,{library.name}", source]
    subprocess.run([*command, *([f"-Wl,--version-script={script}"] if versions else [])], check=True)


def _failing(name: str) -> str:
    if GIVES_TEXT.fullmatch(name):
        return f'const char *{name}(void) {{ return "this library is a stand-in: there is no device"; }}\n'
    return f"int {name}(void) {{ return {NO_DEVICE}; }}\n"


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
