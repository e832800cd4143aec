"""``hexa-fx bench TARGET``, ``hexa-fx bench --like NAME``"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from hexa_fx.cli.common import MOST_TOKENS, Json, check_range, check_unused, echo_json, errors_shown
from hexa_fx.cli.timing import block_runs, compared, model_runs, moved
from hexa_fx.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hexa_fx.inspection.block_report import BlockReport
    from hexa_fx.report import OptimizationReport

OptionalTarget = Annotated[str | None, typer.Argument(help="As for the other commands; leave it out with --like.")]
Repeat = Annotated[
    int, typer.Option("--repeat", help="Timed runs of each, taking turns, and more of short ones; medians are printed.")
]
Device = Annotated[str, typer.Option("--device", help="cpu or cuda.")]
Like = Annotated[
    str | None,
    typer.Option("--like", help="A known model at its published widths with random weights, such as Qwen3-30B-A3B."),
]
Layers = Annotated[int, typer.Option("--layers", help="With --like: layers of the model.")]
Tokens = Annotated[int, typer.Option("--tokens", help="With --like: tokens of the batch, in sequences of up to 512.")]
Dtype = Annotated[str, typer.Option("--dtype", help="With --like: bf16 or f32. Default: bf16 on a GPU, else f32.")]


@errors_shown
def bench(
    context: typer.Context,
    target: OptionalTarget = None,
    repeat: Repeat = 9,
    device: Device = "cpu",
    like: Like = None,
    layers: Layers = 2,
    tokens: Tokens = 4096,
    dtype: Dtype = "",
    as_json: Json = False,
) -> None:
    """Time a model against itself rewritten: forward, and forward with backward, of the model and of one MoE block in it."""
    from hexa_fx.api import optimize
    from hexa_fx.attached import attached

    _check_device(device)
    for name, value, most in (("repeat", repeat, 10_000), ("layers", layers, 1000), ("tokens", tokens, MOST_TOKENS)):
        check_range(name, value, 1, most)
    if (target is None) == (like is None):
        raise InputError("give either a TARGET or --like NAME")
    if like is None:
        check_unused(context, ("layers", "tokens", "dtype"), "goes with --like NAME; a TARGET brings its own")
    model, inputs = _target(str(target), device) if like is None else _published(like, layers, tokens, dtype, device)
    rewritten = optimize(model, inputs)
    report = attached(rewritten, "report")
    if not report.rewritten:
        raise InputError(f"no block of {target} was rewritten: nothing to compare; `hexa-fx explain {target}` says why")
    path, rows = report.rewritten[0].path, []
    blocks = (model.get_submodule(path), rewritten.get_submodule(path))
    for number, (what, run) in enumerate(model_runs(inputs)):
        rows.append(
            compared(what, run, (model, rewritten), repeat, device, _is_own_code(report.rewritten, number, device))
        )
    for number, (what, run) in enumerate(block_runs(model, inputs, path)):
        same = _is_own_code(report.rewritten[:1], number, device)
        rows.append(compared(f"{path or 'the model'}: {what}", run, blocks, repeat, device, same))
    if as_json:
        found = {
            "target": target or like,
            "device": device,
            "summary": report.summary(),
            "own_code": _own_code(report, device),
        }
        echo_json({**found, "rows": [row.as_dict() for row in rows]})
        return
    typer.echo(report.summary())
    if _own_code(report, device):
        typer.echo(_own_code(report, device))
    for row in rows:
        typer.echo(str(row))


def _check_device(device: str) -> None:
    """Raises `InputError` unless it is the CPU or a GPU that is here."""
    import torch

    kind, _, number = device.partition(":")
    if kind not in ("cpu", "cuda") or not (number.isdecimal() or device == kind):
        raise InputError(f"--device {device}: expected cpu, cuda or cuda:N")
    if kind == "cuda" and int(number or 0) >= torch.cuda.device_count():
        raise InputError(f"--device {device}: torch sees no such GPU here; leave it out to run on the CPU")


def _is_own_code(blocks: Sequence[BlockReport], gradients: int, device: str) -> bool:
    """Whether all of these blocks run their own code on an example of this size, with or without gradients."""
    small = [b.costs is not None and b.costs.tokens <= b.small_tokens[gradients] for b in blocks]
    return all(small) and not device.startswith("cuda")


def _own_code(report: OptimizationReport, device: str) -> str:
    """A sentence if blocks run their own code because the example is small, so that two times of the same code are compared."""
    from hexa_fx.inspection.text import small_calls
    from hexa_fx.ir import Small

    if device.startswith("cuda"):
        return ""
    small = [b for b in report.rewritten if b.costs is not None and b.costs.tokens <= max(b.small_tokens)]
    if not small:
        return ""
    both = all(b.costs is not None and b.costs.tokens <= min(b.small_tokens) for b in small)
    limits = Small(*map(max, zip(*(b.small_tokens for b in small))))
    without, wanted = limits
    which = "Both times" if both else f"Times with{'' if wanted > without else 'out'} gradients"
    return (
        f"{len(small)} of {len(report.rewritten)} rewritten blocks run their own code on this example, as a CPU is faster so in "
        f"{small_calls(limits)}. {which} are of the same code; "
        "--like Granite-3.0-1B-A400M --layers 1 times a model of real widths"
    )


def _target(target: str, device: str) -> tuple[Any, Any]:
    from hexa_fx.targets import load

    model, inputs = load(target)
    return model.to(device), moved(inputs, device)


def _published(name: str, layers: int, tokens: int, dtype: str, device: str) -> tuple[Any, Any]:
    import torch

    from hexa_fx.integrations.published import bytes_of, like, vocabulary_of

    kinds = {"bf16": torch.bfloat16, "f32": torch.float32, "": torch.bfloat16 if device != "cpu" else torch.float32}
    if dtype not in kinds:
        raise InputError(f"--dtype {dtype}: expected bf16 or f32")
    weights, words = bytes_of(name, layers, kinds[dtype]), vocabulary_of(name)
    _check_room(f"--like {name} --layers {layers} --tokens {tokens}", weights, 8 * tokens * words, device)
    model = like(name, layers, kinds[dtype], device)
    length = min(tokens, 512)
    ids = torch.randint(3, words, (max(1, tokens // length), length), device=device)
    return model, {"input_ids": ids, "use_cache": False}


def _check_room(what: str, weights: int, logits: int, device: str) -> None:
    """Raises `InputError` unless there is room for weights and logits, their gradients, and the analysis of a block."""
    from hexa_fx.config import HexaConfig

    needed, free = 2 * weights + logits + HexaConfig.from_environment().analysis_bytes, _free(device)
    if free is not None and needed > free:
        raise InputError(
            f"{what} takes about {needed / 2**30:.1f} GiB on {device} (weights, logits, their gradients, and the analysis), and "
            f"{free / 2**30:.1f} GiB are free; give fewer --layers or --tokens, --dtype bf16, or a smaller model such as "
            "Granite-3.0-1B-A400M"
        )


def _free(device: str) -> int | None:
    """Bytes that are free on the device; None where nothing says so."""
    import torch

    from hexa_fx.isolation.size import available_bytes

    return available_bytes() if device == "cpu" else torch.cuda.mem_get_info(device)[0]
