"""What the checks before every call of a rewritten block cost on a CPU, for blocks of transformers' models and lists of experts.

    python -m benchmarks.bench_guards [--json FILE]

``attributes``: microseconds in which everything that the recorded run read from Python is compared. ``inputs``: microseconds in
which the arguments of a call are. ``all``: microseconds of these and all other conditions (mode, adapters, classes of weights,
transforms, autocast). The best of many, since a busy machine only adds.
"""

from __future__ import annotations

import json
import logging
import os
import timeit
from collections.abc import Callable, Iterator
from typing import Any

import torch
import transformers
from torch import nn

import hexa_fx
from benchmarks.bench_optimize import StackOfLists, versions
from benchmarks.kept_rows import options_of
from hexa_fx.runtime.forward import HexaForward

_SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
}


def models() -> Iterator[tuple[str, nn.Module, Any]]:
    """Name, model and example."""
    ids = {"input_ids": torch.randint(3, 60, (2, 16), generator=torch.Generator().manual_seed(0))}
    qwen = transformers.Qwen3MoeConfig(
        **_SIZES, moe_intermediate_size=24, num_experts=16, num_experts_per_tok=4, head_dim=8
    )
    for name, config in (
        ("qwen3_moe", qwen),
        ("mixtral, 8 experts", transformers.MixtralConfig(**_SIZES, num_local_experts=8)),
        ("mixtral, 64 experts", transformers.MixtralConfig(**_SIZES, num_local_experts=64)),
    ):
        yield name, transformers.AutoModelForCausalLM.from_config(config).eval(), ids
    x = torch.randn(2, 16, 128, generator=torch.Generator().manual_seed(0))
    for experts in (8, 64):
        yield f"ModuleList, {experts} experts", StackOfLists(1, experts).eval(), x


def cost(name: str, model: nn.Module, example: Any) -> dict[str, Any]:
    opt = hexa_fx.optimize(model, example)
    block = next(module for module in opt.modules() if isinstance(module.__dict__.get("forward"), HexaForward))
    forward, given = block.forward, {}
    handle = block.register_forward_pre_hook(lambda m, args, kwargs: given.update(all=(args, kwargs)), with_kwargs=True)
    with torch.no_grad():
        opt(**example) if isinstance(example, dict) else opt(example)
    handle.remove()
    (made,) = forward.specialisations
    attributes = made.attributes.check
    attributes()
    inputs = _best(lambda: made.inputs_of(forward.arguments, *given["all"]))
    row = {"block": name, "class": type(block).__name__, "reads": len(made.attributes.reads)}
    whole = _best(lambda: made.meet(block, forward.arguments, *given["all"]))
    return {**row, "attributes_us": _best(attributes), "inputs_us": inputs, "all_us": whole}


def _best(call: Callable[[], Any]) -> float:
    return round(min(timeit.repeat(call, number=200, repeat=200)) / 200 * 1e6, 2)


def main() -> None:
    parser = options_of(__doc__)
    options = parser.parse_args()
    torch.set_num_threads(1)
    logging.disable(logging.CRITICAL)
    os.environ["HEXA_FX_OWN_CODE_WHEN_SMALL"] = "0"
    rows = [cost(*model) for model in models()]
    for row in rows:
        print(row)
    if options.json:
        options.json.write_text(json.dumps({"versions": versions(), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
