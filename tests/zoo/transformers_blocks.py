"""The MoE block of every family in the installed `transformers`, alone, with random weights and shrunk configurations.

Families are found by their code, not listed: a block is a module with a child ``experts`` that a configuration alone makes.
Whole models of some families are in `tests.zoo.families`. `python -m tests.zoo.transformers_blocks` prints the table,
`--write docs/transformers_blocks.md` puts it there.
"""

import importlib
import inspect
import logging
import os
import pathlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import nn

import hexa_fx
from tests.zoo.agree import own_code_runs
from tests.zoo.compare import relative_error
from tests.zoo.pages import print_or_write

WIDTH = 24
SMALL = {
    **dict.fromkeys("hidden_size d_model hidden_dim".split(), WIDTH),
    **dict.fromkeys("intermediate_size ffn_hidden_size d_ff".split(), 20),
    **dict.fromkeys(
        "moe_intermediate_size expert_ffn_hidden_size moe_hidden_size expert_intermediate_size".split(), 12
    ),
    **dict.fromkeys("routed_expert_intermediate_size expert_dim".split(), 12),
    **dict.fromkeys("num_experts n_routed_experts num_local_experts moe_num_experts".split(), 6),
    **dict.fromkeys("num_experts_per_tok moe_topk moe_k moe_top_k top_k_experts num_selected_experts top_k".split(), 2),
    **dict.fromkeys("n_group topk_group n_shared_experts num_shared_experts moe_num_shared_experts".split(), 1),
    **dict.fromkeys("shared_expert_intermediate_size moe_shared_expert_intermediate_size".split(), 14),
    **dict.fromkeys("shared_intermediate_size router_hidden_size".split(), 14),
    **dict.fromkeys("zero_expert_num num_hidden_layers".split(), 2),
    "moe_latent_size": None,
}
"""Sizes by the names that configurations give them; those without such a setting stay without."""

_FILLED = ("num_experts_per_tok", "n_routed_experts", "n_group", "topk_group", "moe_intermediate_size")
"""Settings that a family's default leaves open."""

_CODE = re.compile(r"class \w*(?:Experts|MoE|Moe|MOE|SparseMLP)\w*\(")
_NO_BLOCK = re.compile(r"Model|ForC|Layer$|PreTrained|Output|Attention|Gate$|Gating$|Experts$|Router$")


@dataclass(frozen=True)
class Found:
    """A family's block, or why there is none."""

    family: str
    name: str
    block: nn.Module | None
    excuse: str = ""


def families() -> list[str]:
    """Families whose code has experts."""
    root = pathlib.Path(transformers.__file__).parent / "models"
    return sorted({path.parent.name for path in root.glob("*/modeling_*.py") if _CODE.search(path.read_text())})


def blocks(family: str) -> list[Found]:
    """Its blocks in float32. One that cannot be made or run on hidden states alone has an excuse."""
    made = [_make(family, kind) for kind in _classes(family)]
    return [found for found in made if found is not None]


def _classes(family: str) -> Iterator[type[nn.Module]]:
    folder = pathlib.Path(transformers.__file__).parent / "models" / family
    for path in sorted(folder.glob("modeling_*.py")):
        module = importlib.import_module(f"transformers.models.{family}.{path.stem}")
        for name, kind in inspect.getmembers(module, inspect.isclass):
            own = kind.__module__ == module.__name__ and issubclass(kind, nn.Module) and not _NO_BLOCK.search(name)
            if own and "self.experts" in inspect.getsource(kind):
                yield kind


def _configurations(family: str) -> Iterator[Any]:
    """Shrunk: every configuration of the family, and those inside it."""
    module = importlib.import_module(f"transformers.models.{family}.configuration_{family}")
    for name, kind in inspect.getmembers(module, inspect.isclass):
        if kind.__module__ == module.__name__ and name.endswith("Config"):
            yield from _nested(kind())


def _nested(config: Any, depth: int = 0) -> Iterator[Any]:
    for name, value in SMALL.items():
        held = getattr(config, name, None) if name in dir(config) else None
        if held is not None or (name in _FILLED and hasattr(config, name)):
            setattr(config, name, [value] * len(held) if isinstance(held, list | tuple) else value)
    config._experts_implementation = "eager"
    yield config
    for value in list(vars(config).values()) if depth < 3 else ():
        if hasattr(value, "to_dict"):
            yield from _nested(value, depth + 1)


def _make(family: str, kind: type[nn.Module]) -> Found | None:
    excuses: list[str] = []
    for config in _of(family, excuses):
        try:
            torch.manual_seed(0)
            wanted = inspect.signature(kind.__init__).parameters
            block = kind(config, **{"layer_idx": 1} if "layer_idx" in wanted else {}).eval()
            for tensor in (*block.parameters(), *block.buffers()):
                if tensor.is_floating_point():
                    nn.init.normal_(tensor, std=0.3 if isinstance(tensor, nn.Parameter) else 0.01)
            with torch.no_grad():
                block(tokens(torch.float32))
        except Exception as error:  # the library's own code decides what it takes
            excuses.append(f"{type(error).__name__}: {error}".splitlines()[0][:90])
            continue
        return Found(family, kind.__name__, block)
    return Found(family, kind.__name__, None, excuses[0] if excuses else "no configuration")


def _of(family: str, excuses: list[str]) -> Iterator[Any]:
    try:
        yield from _configurations(family)
    except Exception as error:
        excuses.append(f"{type(error).__name__}: {error}".splitlines()[0][:90])


def tokens(dtype: torch.dtype, batch: int = 2, length: int = 7) -> torch.Tensor:
    """Hidden states."""
    generator = torch.Generator().manual_seed(batch)
    return torch.randn(batch, length, WIDTH, generator=generator).to(dtype)


@dataclass(frozen=True)
class Outcome:
    """What became of a block in one dtype, and the largest relative errors of outputs and gradients."""

    status: str
    reason: str = ""
    forward: float = 0.0
    gradient: float = 0.0


def judge(block: nn.Module, dtype: torch.dtype) -> Outcome:
    """Optimizes a block and compares it on tokens that were not traced."""
    original = block.to(dtype)
    try:
        theirs = _run(original, dtype)
    except RuntimeError as error:
        return Outcome("not run", f"its own code does not run in {dtype}: {error}".splitlines()[0])
    optimized = hexa_fx.optimize(original, (tokens(dtype),))
    held = optimized.report.blocks
    if not held or any(found.status != "rewritten" for found in held):
        return Outcome("refused", "; ".join(found.reason for found in held) or "no candidate block")
    if own := own_code_runs(optimized, tokens(dtype, 3, 5)):
        return Outcome("own code", ", ".join(own))
    ours = _run(optimized, dtype)
    assert [t.dtype for t in ours] == [t.dtype for t in theirs]
    errors = [relative_error(one, other) for one, other in zip(theirs, ours, strict=True)]
    return Outcome("rewritten", "", errors[0], max(errors[1:]))


def _run(block: nn.Module, dtype: torch.dtype) -> list[torch.Tensor]:
    """The output, and gradients of the tokens and parameters that have one."""
    x = tokens(dtype, 3, 5).requires_grad_()
    result = block(x)
    y = result[0] if isinstance(result, tuple) else result
    leaves = [x, *(p for p in block.parameters() if p.requires_grad)]
    grads = torch.autograd.grad(y.float().sin().sum(), leaves, allow_unused=True)
    return [y.detach(), *(torch.zeros_like(leaf) if g is None else g for leaf, g in zip(leaves, grads))]


def table() -> str:
    """Markdown."""
    lines = ["| family | block | float32 | forward | gradient | bfloat16 | remark |", "|---|---|---|---|---|---|---|"]
    for family in families():
        for found in blocks(family):
            if found.block is None:
                lines.append(f"| {family} | {found.name} | not run |  |  |  | {found.excuse} |")
                continue
            wide, narrow = judge(found.block, torch.float32), judge(found.block, torch.bfloat16)
            numbers = f"{wide.forward:.0e} | {wide.gradient:.0e}" if wide.status == "rewritten" else " | "
            lines.append(
                f"| {family} | {found.name} | {wide.status} | {numbers} | {narrow.status} | {wide.reason or narrow.reason} |"
            )
    return "\n".join(lines)


HEAD = """# MoE blocks of transformers

Every family of transformers {version} whose code has experts, made by `python -m tests.zoo.transformers_blocks --write
docs/transformers_blocks.md`: its block alone, eager experts, random weights, sizes shrunk, optimized on one batch and compared on
another. Errors are relative to the largest value of the tensor. *Not run*: the block cannot be made from a configuration, or
run on hidden states alone; the remark is its own error. Whole models are in [families.md](families.md), other libraries in
[libraries.md](libraries.md).

"""


def page() -> str:
    """With all blocks."""
    logging.getLogger("hexa_fx").setLevel(logging.ERROR)
    os.environ["HEXA_FX_OWN_CODE_WHEN_SMALL"] = "0"  # they would be compared with themselves
    return HEAD.format(version=transformers.__version__) + table() + "\n"


if __name__ == "__main__":
    print_or_write(__doc__, page)
