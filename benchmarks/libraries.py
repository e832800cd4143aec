"""What does `hexa_fx.optimize` do with the MoE blocks of libraries that pip installs?

    pip install --no-deps -r benchmarks/libraries.txt      # in an environment that has hexa_fx; --no-deps keeps its torch
    python benchmarks/libraries.py [name ...] [--write docs/libraries.md]

Every block of `library_blocks_*.py` is made twice from the same seed, one of the two is optimized, and both are compared in eval
and train mode, also at another size and after all parameters were moved (`tests/test_libraries.py`).
A library that is not installed or does not run on the
CPU is listed with its reason.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import logging
import pathlib
import sys
import warnings
from dataclasses import dataclass

import torch
from torch import nn

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

import hexa_fx
from benchmarks import library_blocks_parallel, library_blocks_single  # noqa: F401, add to BLOCKS
from benchmarks.library_registry import BLOCKS, LibraryBlock, stand_ins
from tests.zoo.agree import own_code_runs
from tests.zoo.compare import compare, perturb

PREAMBLE = """# MoE blocks of libraries

What `hexa_fx.optimize` does with the code of installable libraries as it is, made by
`python benchmarks/libraries.py --write docs/libraries.md` (its docstring says how to install them). Errors are the largest
over eval and train mode, the traced batch and half of it, and moved parameters, relative to the tensor's scale; they are those
of the first floating point type that the library's own code runs in, and 0 where nothing differs by more than rounding.

"""
APPENDIX = """
Looked at and not in the table: megablocks builds only where there is a GPU; tutel, fastmoe, scattermoe and gpt-oss have no package
on the index for this Python; nanotron and torchtune hold no MoE code in their packages; mlora and moe_peft want a whole training
setup around their blocks and were not tried; densemixer replaces the forward of transformers' own blocks. ai2-olmo-core's own MoE
and megatron-core's other token dispatchers and grouped experts run on CUDA alone, so that only what runs on a CPU is in the table.
torchtitan's whole models (DeepSeek-V3's, Qwen3's, gpt-oss') are rewritten too, with their activation checkpoints and under FSDP2,
where the first steps run their own code.

The refusals: a soft mixture gives every expert an average of all tokens, and expert choice has no fixed number of experts a
token, so neither is a mixture of routed tokens. Two levels of routing, product keys and convolutional experts are of another
kind. `SwitchMoE` of three libraries asks on the host whether any expert gave a NaN. mixlora keeps its experts in a plain
dictionary, so they are no parameters of the module.
"""
HEADER = "| library | version | block | outcome | in | forward | gradient | as, or why not |\n|---|---|---|---|---|---|---|---|"


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    block: LibraryBlock
    outcome: str
    detail: str
    dtype: str = ""
    forward: float | None = None
    gradient: float | None = None

    def render(self) -> str:
        errors = ["" if value is None else f"{value:.0e}" for value in (self.forward, self.gradient)]
        cells = (self.block.distribution, _version(self.block.distribution), self.block.what, self.outcome, self.dtype)
        return "| " + " | ".join((*cells, *errors, self.detail)) + " |"


def judge(block: LibraryBlock) -> Row:
    """Makes, optimizes and compares one block."""
    try:
        original, other = _made(block), _made(block)
        for mine, theirs in zip(other.parameters(), original.parameters()):  # some libraries leave memory as it comes
            mine.data.copy_(theirs.data)
    except Exception as error:
        return Row(block, "not installed" if isinstance(error, ImportError) else "not run", _sentence(error))
    found = _first_dtype(block, original)
    if isinstance(found, Exception):
        return Row(block, "not run", f"its own code does not run here: {_sentence(found)}")
    other.to(found).eval()
    args = _inputs(block, found)
    optimized = hexa_fx.optimize_(other, args, hexa_fx.HexaConfig(own_code_when_small=False))
    blocks = optimized.report.blocks
    if not any(b.status == "rewritten" for b in blocks):
        reasons = [f"{b.reason}{f' ({_place(b.location)})' if b.location else ''}" for b in blocks]
        text = "; ".join(dict.fromkeys(reasons)) or "holds nothing that looks like experts among its parameters"
        return Row(block, "refused", text, _name(found))
    if runs := own_code_runs(optimized, *args):
        return Row(block, "own code", f"reported as rewritten, runs its own code: {', '.join(runs)}", _name(found))
    forward, gradient = _errors(original, optimized, args)
    as_what = "; ".join(f"`{b.expert}`" for b in blocks if b.status == "rewritten")
    return Row(block, "rewritten", as_what, _name(found), forward, gradient)


def _made(block: LibraryBlock) -> nn.Module:
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True, warn_only=True)  # what is left as it comes is NaN, not what was in memory
    try:
        with stand_ins(block.stand_ins):
            module = block.make()
    finally:
        torch.use_deterministic_algorithms(False)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in module.parameters():
            usable = bool(parameter.isfinite().all()) and 1e-3 < float(parameter.abs().max()) < 1e3
            if parameter.is_floating_point() and not usable:
                parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
    return module


def _first_dtype(block: LibraryBlock, module: nn.Module) -> torch.dtype | Exception:
    failure: Exception = RuntimeError("no dtype to try")
    for dtype in block.dtypes:
        try:
            module.to(dtype).eval()(*_inputs(block, dtype))
        except Exception as error:
            failure = error
        else:
            return dtype
    return failure


def _inputs(block: LibraryBlock, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    return tuple(value.to(dtype) for value in block.inputs())


def _errors(original: nn.Module, optimized: nn.Module, args: tuple[torch.Tensor, ...]) -> tuple[float, float]:
    worst = (0.0, 0.0)
    for moved in (False, True):
        if moved:
            perturb(original, optimized)
        for tokens in (args, (args[0][: len(args[0]) // 2], *args[1:])):
            for train in (False, True):
                try:
                    compare(original, original, tokens, train=train)
                except Exception:
                    continue  # sizes that the library itself rejects
                found = compare(original, optimized, tokens, train=train)
                worst = max(worst[0], found.forward), max(worst[1], found.gradient)
    return worst


def _place(location: object) -> str:
    return f"{pathlib.Path(location.file).name}:{location.line}"  # type: ignore[attr-defined]


def _sentence(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:150]}"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "-"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="distributions; all by default")
    parser.add_argument("--write", type=pathlib.Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable(logging.ERROR)
    lines = [HEADER]
    for block in BLOCKS:
        if not options.names or block.distribution in options.names:
            lines.append(judge(block).render())
            print(lines[-1], flush=True)
    if options.write:
        options.write.write_text(PREAMBLE + "\n".join(lines) + "\n" + APPENDIX)


if __name__ == "__main__":
    main()
