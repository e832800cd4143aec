"""Rows of benchmarks that are printed as they come, and kept with what they depend on; and the device that they wait for.

Nothing here makes calls wait for kernels, unlike `benchmarks.common`: what is measured may be what runs until they are built.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import os
import platform
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

Row = dict[str, Any]


def in_memory() -> tempfile.TemporaryDirectory[str]:
    """A folder for a checkpoint, in memory where there is /dev/shm."""
    return tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None)


def synchronize() -> None:
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


def wait_for_kernels() -> None:
    """Until the kernels that are being built are there."""
    if not torch.cuda.is_initialized():
        return
    from hexa_fx.jit.background import builder

    builder().wait()


def calls_of(model: torch.nn.Module) -> dict[str, int]:
    """How many calls of its blocks ran rewritten so far, and how many the own code; of a model that has no report none."""
    blocks = vars(model)["report"].blocks if "report" in vars(model) else ()
    return {
        "rewritten": sum(block.calls.rewritten for block in blocks),
        "own": sum(sum(block.calls.own.values()) for block in blocks),
    }


def environment(device: str = "cuda") -> dict[str, str]:
    """What a row depends on: command, versions, device."""
    import hexa_fx

    installed = importlib.util.find_spec("transformers") is not None
    return {
        "command": " ".join(sys.argv),
        "hexa_fx": hexa_fx.__version__,
        "torch": torch.__version__,
        "cuda": str(torch.version.cuda),
        **({"transformers": importlib.metadata.version("transformers")} if installed else {}),
        "python": platform.python_version(),
        "cores": str(os.cpu_count()),
        "device": torch.cuda.get_device_name() if device != "cpu" else platform.machine(),
    }


def options_of(doc: str | None) -> argparse.ArgumentParser:
    """The options of a script, of which all have ``--json``; ``--help`` shows its docstring as it is."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="where to write the rows, and what they depend on")
    return parser


def keep(rows: list[Row], path: Path | None, device: str = "cuda", **about: Any) -> None:
    """Writes what was measured so far, with what it depends on, to the file that `--json` names; to none if it names none."""
    if path is not None:
        found = {"environment": environment(device), **about, "rows": rows}
        path.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def answer(questions: Mapping[str, Callable[[argparse.Namespace], Iterable[Row]]], options: argparse.Namespace) -> None:
    """Prints and keeps the rows that answer ``options.questions``, by the name of each."""
    found: list[Row] = []
    for question in options.questions:
        for row in questions[question](options):
            print(json.dumps(row), flush=True)
            found.append(row)
            keep(found, options.json, options.device)
