"""Whole training steps of rewritten models as CUDA graphs (`hexa_fx.graphed`), beside the same steps launched by the host.

    python benchmarks/bench_graphed.py [--models tiny,swin-base,olmoe] [--json FILE]

Models are Qwen3-MoE at tiny widths, Swin-MoE Base (batches of 8 images) and OLMoE with two layers (1024 tokens); a step is
forward in bf16 autocast, loss, backward and AdamW, which is in the graph or outside of it. ``host_ms`` is what a call takes on an
idle device, ``step_ms`` of steps that follow each other. ``same_bits`` says whether two copies of the model, one recorded and one
launched, had the same losses and weights after twelve steps with torch's deterministic algorithms, ``repeats`` whether two launched
ones had; ``replays`` is how many of these were replayed. Rows ``fails`` are of a step that reads its loss back, which no graph can
hold: ``reason`` says so. `--shrink 32 --device cpu` tries the script without a GPU.
"""

from __future__ import annotations

import argparse
import copy
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import Tensor, nn

import hexa_fx
from benchmarks.kept_rows import Row, answer, calls_of, options_of, synchronize, wait_for_kernels

STEPS = 12
PLACES = ("inside", "outside", "fails")
Loss = Callable[[nn.Module, Tensor], Tensor]


def _of_tokens(model: nn.Module, ids: Tensor) -> Tensor:
    """With a mask: without one transformers makes another while a graph is recorded, and torch takes another attention for it."""
    length = ids.shape[1]
    mask = torch.ones(1, 1, length, length, dtype=torch.bool, device=ids.device).tril().expand(len(ids), -1, -1, -1)
    return model(input_ids=ids, attention_mask=mask, labels=ids, use_cache=False).loss  # type: ignore[no-any-return]


def _of_images(model: nn.Module, images: Tensor) -> Tensor:
    scores, balance = model(images)
    return scores.float().logsumexp(-1).mean() + 0.01 * balance  # type: ignore[no-any-return]


def make(name: str, o: argparse.Namespace) -> tuple[nn.Module, list[Tensor], Loss]:
    """A model, batches for it, and what its loss is."""
    from benchmarks import real_blocks
    from benchmarks.swin_moe.model import SwinMoe, swin_config
    from hexa_fx.integrations.tiny_models import tiny_model

    torch.manual_seed(0)
    if name == "tiny":
        model, inputs = tiny_model("qwen3_moe")
        ids = inputs["input_ids"]
        return model, [(ids + number) % int(ids.max()) for number in range(STEPS)], _of_tokens
    if name == "olmoe":
        batches = [
            real_blocks.tokens_of("cpu", 1024 // o.shrink).view(1, -1).roll(number, -1) for number in range(STEPS)
        ]
        return real_blocks.make(name, "cpu", o.shrink, 2).float(), batches, _of_tokens
    config = swin_config("base" if o.shrink == 1 else "tiny", top_k=2)
    return SwinMoe(config), [torch.randn(8, 3, config.image, config.image) for _ in range(STEPS)], _of_images


def rows(name: str, o: argparse.Namespace) -> Iterator[Row]:
    model, batches, loss_of = make(name, o)
    model, batches = model.to(o.device).train(), [batch.to(o.device) for batch in batches]
    hexa_fx.optimize_(model, config=hexa_fx.HexaConfig.from_environment(own_code_when_small=False))
    for mode in (nullcontext, deterministic) * 2:  # other kernels coming in between would give other bits
        with mode():
            step_of(copy.deepcopy(model), loss_of, "inside", o.device)[0](batches[0])
        wait_for_kernels()
    for place in PLACES:
        models = [copy.deepcopy(model) for _ in range(3)]
        (step, own), *plain = (step_of(each, loss_of, place, o.device) for each in models)
        run = hexa_fx.graphed(step, models[0])
        with deterministic():
            losses = [_losses(each, after, batches) for each, after in ((run, own), *plain)]
        same, repeats = (_alike(losses, models, number) for number in (0, 2))
        said = {"same_bits": same, "repeats": repeats, "replays": run.replays, "reason": run.reason}
        run.reset()
        ways = {"graphed": hexa_fx.graphed(step, models[0]), "launched": plain[0][0]}
        for way, each in ways.items():
            for batch in batches:
                each(batch)
            host, in_a_row = _times(each, batches[0], o.rounds)
            row: Row = {"model": name, "optimizer": place, "way": way, "host_ms": host, "step_ms": in_a_row}
            yield row | (said if way == "graphed" else calls_of(models[1]))
        ways["graphed"].reset()


def _losses(step: Callable[[Tensor], Tensor], after: Callable[[], None], batches: list[Tensor]) -> list[Tensor]:
    found = []
    for batch in batches:
        found.append(step(batch))
        after()
    return found


def _alike(losses: list[list[Tensor]], models: list[nn.Module], number: int) -> bool:
    """Whether a copy had the same losses and weights as the one that was launched first."""
    pairs = zip([*losses[number], *models[number].parameters()], [*losses[1], *models[1].parameters()], strict=True)
    return all(torch.equal(one, other) for one, other in pairs)


@contextmanager
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def step_of(
    model: nn.Module, loss_of: Loss, place: str, device: str
) -> tuple[Callable[[Tensor], Tensor], Callable[[], None]]:
    """A step, and what is to be called after each."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, capturable=device == "cuda")

    def step(batch: Tensor) -> Tensor:
        optimizer.zero_grad()
        with torch.autocast(device, torch.bfloat16):
            loss = loss_of(model, batch)
        loss.backward()
        if place != "outside":
            optimizer.step()
        if place == "fails":
            float(loss.detach())
        return loss.detach()

    return step, (optimizer.step if place == "outside" else lambda: None)


def _times(step: Callable[[Tensor], Any], batch: Tensor, rounds: int) -> tuple[float, float]:
    """Milliseconds until a call returns on an idle device, in the median; and of steps in a row."""
    alone = []
    for _ in range(rounds):
        synchronize()
        began = time.perf_counter()
        step(batch)
        alone.append(time.perf_counter() - began)
    synchronize()
    began = time.perf_counter()
    for _ in range(rounds):
        step(batch)
    synchronize()
    return round(1e3 * median(alone), 3), round(1e3 * (time.perf_counter() - began) / rounds, 3)


def main() -> None:
    """Prints a JSON line a row; `--json` keeps them."""
    parser = options_of(__doc__)
    parser.add_argument(
        "--models", dest="questions", type=lambda names: names.split(","), default=["tiny", "swin-base", "olmoe"]
    )
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--shrink", type=int, default=1)
    parser.add_argument("--device", default="cuda")
    options = parser.parse_args()
    asked = {name: (lambda o, name=name: rows(name, o)) for name in options.questions}
    answer(asked, options)


if __name__ == "__main__":
    main()
