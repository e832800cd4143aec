"""What the commands share: their argument, their errors, their JSON."""

from __future__ import annotations

import functools
import json
import logging
import os
import sys
import sysconfig
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, NoReturn, ParamSpec

import typer

import hexa_fx
from hexa_fx.errors import HexaError, InputError

P = ParamSpec("P")

Target = Annotated[
    str,
    typer.Argument(
        help="MODULE:FACTORY or FILE.py:FACTORY, a function that returns (model, example_inputs); the model type of a "
        "transformers architecture, such as mixtral, which is built with tiny widths; or a folder with a config.json, of "
        "which layers and experts are kept."
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]
Arch = Annotated[
    int | None,
    typer.Option("--arch", help="Compute capability: 80, 86, 89 or 90. Default: this machine's GPU, else 90."),
]
Dtype = Annotated[
    str, typer.Option("--dtype", help="Element type of the block: bf16, f16, f32, or as the model has it.")
]
Tokens = Annotated[int | None, typer.Option("--tokens", help="Tokens of a forward. Default: those of the example.")]


MOST_TOKENS = 2**24
"""Of a call: kernels number its rows, some for each token, in 32 bits."""


def check_range(option: str, value: float, least: float, most: float, unit: str = "") -> None:
    """Raises `InputError` unless an option's value is from ``least`` to ``most``; NaN never is."""
    if not least <= value <= most:
        given, low, high = (f"{each:g}" if isinstance(each, float) else str(each) for each in (value, least, most))
        raise InputError(f"--{option} {given}: expected {low} to {high} {unit}".rstrip())


def check_unused(context: typer.Context, names: Sequence[str], why: str) -> None:
    """Raises `InputError` for the first of these options that was given on the command line, which nothing would come of."""
    for name in names:
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            raise InputError(f"--{name} {why}")


def errors_shown(command: Callable[P, None]) -> Callable[P, None]:
    """Makes errors one line on standard error, or an object with ``error`` under --json; exit status 2.

    An architecture without kernels and a file that cannot be written are errors before the model is made.
    """

    @functools.wraps(command)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            _check_early(kwargs)
            command(*args, **kwargs)
        except HexaError as error:
            fail(str(error), bool(kwargs.get("as_json")))
        except typer.Exit:
            raise
        except BrokenPipeError:  # who reads has seen enough, as `head` does
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(1) from None
        except Exception as error:
            if os.environ.get("HEXA_FX_LOGS", "").lower() == "debug":
                raise
            fail(_not_written(error, kwargs) or _foreign(error), bool(kwargs.get("as_json")))

    return wrapped


def _check_early(given: Mapping[str, Any]) -> None:
    if given.get("arch") is not None:
        from hexa_fx.cuda.choosing import typical_card

        typical_card(given["arch"])
    for name in ("html", "svg", "dot"):
        path = given.get(name)
        if path is None:
            continue
        folder = path.absolute().parent
        if path.is_dir() or not folder.is_dir() or not os.access(path if path.exists() else folder, os.W_OK):
            raise InputError(f"--{name} {path}: cannot be written; give a file in a folder that exists")
    if given.get("out") is not None:
        out = given["out"].absolute()
        there = next(path for path in (out, *out.parents) if path.exists())
        if not there.is_dir() or not os.access(there, os.W_OK):
            raise InputError(f"--out {given['out']}: nothing can be written to {there}; give another folder")


def _not_written(error: Exception, given: Mapping[str, Any]) -> str:
    """A sentence if the error is of a file that an option names."""
    if not isinstance(error, OSError) or error.filename is None:
        return ""
    for name in ("html", "svg", "dot", "out"):
        path = given.get(name)
        if path is not None and Path(error.filename).absolute().is_relative_to(path.absolute()):
            return f"--{name} {path}: cannot be written ({error.strerror}); give another place"
    return ""


def _foreign(error: Exception) -> str:
    """An error of the model's own, or of a library, with the place it comes from."""
    places = [f"{f.filename}:{f.lineno}" for f in traceback.extract_tb(error.__traceback__) if _is_users(f.filename)]
    if isinstance(error, SyntaxError) and error.filename is not None:
        places.append(f"{error.filename}:{error.lineno}")
    said = " ".join(str(error).split())[:300]
    raised = f", raised at {places[-1]}" if places else ""
    called = " ".join(getattr(error, "__notes__", ())) or "check the model and the example inputs"
    return f"{type(error).__name__}: {said}{raised}; {called}. HEXA_FX_LOGS=debug shows the whole traceback"


def _is_users(file: str) -> bool:
    """Whether code is neither ours nor of Python or torch."""
    libraries = (str(Path(hexa_fx.__file__).parent), f"{sysconfig.get_path('platlib')}{os.sep}torch{os.sep}", "<frozen")
    standard = sysconfig.get_path("stdlib")
    return not file.startswith(libraries) and ("site-packages" in file or not file.startswith(standard))


def fail(sentence: str, as_json: bool = False) -> NoReturn:
    """Ends with exit status 2."""
    if as_json:
        typer.echo(json.dumps({"error": sentence}))
    else:
        typer.echo(f"hexa-fx: {sentence}", err=True)
    raise typer.Exit(2)


def echo_json(value: Any) -> None:
    """Prints a value as JSON."""
    typer.echo(json.dumps(value, indent=2))


def optimized(target: str) -> Any:
    """A target's model, optimized, with its report and graphs."""
    from hexa_fx.api import optimize
    from hexa_fx.targets import load

    model, inputs = load(target)
    own = logging.getLogger("hexa_fx.optimizing")
    level = own.level
    own.setLevel(logging.ERROR)  # the commands print what its warning says
    try:
        return optimize(model, inputs)
    finally:
        own.setLevel(level)
