"""Training on scikit-learn's digits, scaled up: does a rewritten model follow its original, and what do dropped tokens do?

One device a variant, the same seeds and batches for all. The original in float32, and another exact way to run its experts
(torch's grouped matmul), say how far rounding alone moves a loss: routing is by top-k, so rounding can send a token to another
expert, and from there on two roundings of the same model part. What hexa_fx may do is part as slowly.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from benchmarks.swin_moe.bench import Bench
from benchmarks.swin_moe.contestants import Contestant, Setting
from benchmarks.swin_moe.model import SwinConfig, swin_config

VARIANTS: dict[str, tuple[str, torch.dtype | None]] = {
    "eager": ("eager", torch.bfloat16),
    "hexa_fx": ("data", torch.bfloat16),
    "grouped_mm": ("grouped", torch.bfloat16),
    "eager, float32": ("eager", None),
    "hexa_fx, float32": ("data", None),
    "padded, capacity 1.25": ("padded", torch.bfloat16),
    "padded, capacity 1.0": ("padded-cf1", torch.bfloat16),
}


def convergence(bench: Bench, names: tuple[str, ...] = tuple(VARIANTS)) -> None:
    """Records the loss of every step and the accuracy on held-out digits; every rank trains some of the variants."""
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    mine = {name: _attempt(bench, name) for name in names[bench.rank :: bench.world]}
    shares = [mine]
    if bench.world > 1:
        shares = [{} for _ in range(bench.world)]
        dist.all_gather_object(shares, mine, group=bench.host)
    found = {name: record for share in shares for name, record in share.items()}
    for name in names:
        bench.case("convergence", {"name": name}, lambda name=name: found[name])  # type: ignore[misc]


def _attempt(bench: Bench, variant: str) -> dict[str, Any]:
    try:
        return _train(bench, *VARIANTS[variant])
    except Exception as error:  # the others still count
        return {"error": f"{type(error).__name__}: {str(error)[:300]}"}


def digits(size: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """1797 images (3, size, size) around zero, and their labels."""
    from sklearn.datasets import load_digits

    bunch = load_digits()
    images = torch.tensor(bunch.images, dtype=torch.float32)[:, None] / 8 - 1
    images = F.interpolate(images, size=(size, size), mode="bilinear").repeat(1, 3, 1, 1)
    return images.to(device), torch.tensor(bunch.target, device=device)


def _train(bench: Bench, name: str, amp: torch.dtype | None) -> dict[str, Any]:
    model = swin_config("tiny", experts=4, top_k=2, router="linear")
    if not bench.tiny:
        model = SwinConfig(32, 2, 8, 3, 48, (2, 2, 4), (2, 4, 8), experts=8, top_k=2, router="linear", classes=10)
    steps, batch = (6, 16) if bench.tiny else (250, 64)
    images, labels = digits(model.image, bench.device)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0)).to(bench.device)
    held, rest = order[:297], order[297:]
    entrant = Contestant(Setting(name, model, batch, amp=amp, lr=3e-4), bench.device)
    entrant.prepare(images[:batch], labels[:batch])
    picks, losses = torch.Generator().manual_seed(1), []
    for _ in range(steps):
        chosen = rest[torch.randperm(len(rest), generator=picks)[:batch].to(bench.device)]
        losses.append(entrant.step(images[chosen], labels[chosen]))
    entrant.model.eval()
    with torch.no_grad(), entrant.autocast():
        guesses = entrant.model(images[held])[0].argmax(-1)
    accuracy = float((guesses == labels[held]).float().mean())
    about = {"experts": model.experts, "top_k": model.top_k, "batch": batch, "accuracy": round(accuracy, 4)}
    return {**about, "losses": [round(float(loss), 6) for loss in losses]}
