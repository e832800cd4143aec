"""``hexa-fx cache info | clear``"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import typer

from hexa_fx.cli.common import Json, echo_json, errors_shown

app = typer.Typer(no_args_is_help=True, help="Built kernels and measured tiles on this machine.")


@app.command()
@errors_shown
def info(as_json: Json = False) -> None:
    """Where the cache is, how large, and what is in it; --json lists every kernel."""
    from hexa_fx.jit import JitSettings, KernelCache

    root = JitSettings.from_env().cache_dir
    cache = KernelCache(root)
    entries = [_entry(root / "kernels" / key) for key in cache.keys()]  # noqa: SIM118 (a method of its own)
    tables = sorted(path.stem for path in (root / "tuned").glob("*.json"))
    size = sum(entry["bytes"] for entry in entries)
    if as_json:
        echo_json({"path": str(root), "kernels": entries, "bytes": size, "tuned": tables})
        return
    typer.echo(
        f"{root}\n{len(entries)} kernels, {size / 1e6:.1f} MB; measured tiles for {', '.join(tables) or 'no card'}"
    )
    for (target, op), count in sorted(Counter((entry["target"], entry["op"]) for entry in entries).items()):
        typer.echo(f"  {target:7}  {count:5} {op}")


@app.command()
@errors_shown
def clear(as_json: Json = False) -> None:
    """Remove every built kernel. Measured tiles stay."""
    from hexa_fx.jit import JitSettings, KernelCache

    root = JitSettings.from_env().cache_dir
    count = KernelCache(root).clear()
    if as_json:
        echo_json({"path": str(root), "removed": count})
        return
    typer.echo(f"removed {count} kernels from {root}")


def _entry(folder: Path) -> dict[str, Any]:
    try:
        meta = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
        op = json.loads(meta["spec"])["op"]
    except (OSError, ValueError, KeyError):
        meta, op = {}, "damaged; it is built anew when it is needed"
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    return {"key": folder.name, "op": op, "target": meta.get("target", "?"), "bytes": size}
