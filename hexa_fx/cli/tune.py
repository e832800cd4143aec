"""``hexa-fx tune``"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from hexa_fx.cli.common import MOST_TOKENS, Json, echo_json, errors_shown
from hexa_fx.errors import InputError

_DTYPES = {"bf16": "bfloat16", "f16": "float16"}


@errors_shown
def tune(
    models: Annotated[
        list[str] | None,
        typer.Argument(
            help="Names of models, such as Qwen3-30B-A3B, whose layers are measured. Default: all known ones."
        ),
    ] = None,
    tokens: Annotated[str, typer.Option("--tokens", help="Tokens of a call, separated by commas.")] = "256,4096,16384",
    dtype: Annotated[str, typer.Option("--dtype", help="Element type: bf16 or f16.")] = "bf16",
    again: Annotated[bool, typer.Option("--again", help="Forget what was measured on this machine first.")] = False,
    out: Annotated[Path | None, typer.Option("--out", help="Also write the table to a file, to share it.")] = None,
    add: Annotated[Path | None, typer.Option("--add", help="Measure nothing: take over such a file.")] = None,
    as_json: Json = False,
) -> None:
    """Measure which tiles are fastest on this machine's GPU, for layers of known models, and keep the table."""
    import torch

    from hexa_fx.cuda.product import add_table, table_path

    if not torch.cuda.is_available():
        raise InputError("no GPU is here; run it on the machine whose tiles are wanted")
    card = torch.cuda.get_device_name()
    path = table_path(card)
    if add is not None:
        count = add_table(_text(add), card)
    else:
        count = _measure(models or [], _numbers(tokens), dtype, again)
    if out is not None and path.exists():
        out.write_text(path.read_text())
    if as_json:
        echo_json({"card": card, "path": str(path), "tiles": count})
        return
    typer.echo(f"{count} tiles for {card} in {path}")


def _text(file: Path) -> str:
    try:
        return file.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"--add {file}: {error}; give a file that `hexa-fx tune --out` wrote") from error


def _numbers(tokens: str) -> list[int]:
    try:
        numbers = [int(each) for each in tokens.split(",")]
    except ValueError:
        numbers = [0]
    if min(numbers) < 1 or max(numbers) > MOST_TOKENS:
        raise InputError(f"--tokens {tokens!r}: expected numbers from 1 to {MOST_TOKENS}, separated by commas")
    return numbers


def _measure(models: list[str], tokens: list[int], dtype: str, again: bool) -> int:
    """Runs the layers with autotuning; returns how many tiles this machine's table has then."""
    import torch

    from hexa_fx.cli.model_layers import MODELS
    from hexa_fx.cli.tune_layers import run_layer, sizes_of
    from hexa_fx.codegen.tuned import TunedTable
    from hexa_fx.cuda.product import table_path

    if dtype not in _DTYPES:
        raise InputError(f"--dtype {dtype!r}: expected one of {', '.join(_DTYPES)}")
    layers = [(name, sizes_of(name, count)) for name in models or MODELS for count in tokens]
    path = table_path(torch.cuda.get_device_name())
    if again:
        path.unlink(missing_ok=True)
    os.environ.update(HEXA_FX_AUTOTUNE="1", HEXA_FX_WAIT_FOR_KERNELS="1")
    device, element = torch.device("cuda", torch.cuda.current_device()), getattr(torch, _DTYPES[dtype])
    for name, sizes in layers:
        torch.cuda.empty_cache()
        fitting = sizes.fitting(torch.cuda.mem_get_info(device)[0] * 3 // 4, element)
        typer.echo(f"{name}, {fitting.tokens} tokens, {fitting.experts} of {sizes.experts} experts", err=True)
        run_layer(fitting, element, device)
    return len(TunedTable.from_json(path.read_text()).entries) if path.exists() else 0
