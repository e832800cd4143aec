"""Trains a small language model twice from the same start, on the same batches: experts in bf16, and in FP8. Compares the losses.

    python benchmarks/fp8_training.py [--steps 500] [--device cuda] [--model 256 --inner 256 ...] [--json FILE]

Both run through `hexa_fx.optimize` under autocast to bfloat16, with float32 parameters and AdamW. The text is the source of
Python's standard library, byte by byte, so that nothing is downloaded. On a CPU FP8 is emulated, with the numbers of a GPU. The
loss curves are means over windows of steps; what is compared is their relative difference.
"""

from __future__ import annotations

import argparse
import copy
import json
import platform
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import hexa_fx

BYTES = 256


class Experts(nn.Module):
    """Top-2 of SwiGLU experts with stacked weights."""

    def __init__(self, model: int, inner: int, experts: int) -> None:
        super().__init__()
        self.router = nn.Linear(model, experts, bias=False)
        self.gate_up = nn.Parameter(torch.randn(experts, 2 * inner, model) / model**0.5)
        self.down = nn.Parameter(torch.randn(experts, model, inner) / (4 * inner) ** 0.5)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        weights, index = self.router(rows).float().softmax(-1).topk(2)
        out = torch.zeros_like(rows)
        for number in range(self.down.shape[0]):
            token, slot = torch.where(index == number)
            gate, up = F.linear(rows[token], self.gate_up[number]).chunk(2, -1)
            y = F.linear(F.silu(gate) * up, self.down[number])
            out.index_add_(0, token, (y * weights[token, slot, None]).type_as(out))
        return out.view_as(x)


class Layer(nn.Module):
    """Causal attention, then experts."""

    def __init__(self, o: argparse.Namespace) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(o.model), nn.RMSNorm(o.model)
        self.qkv, self.out = nn.Linear(o.model, 3 * o.model, bias=False), nn.Linear(o.model, o.model, bias=False)
        self.experts = Experts(o.model, o.inner, o.experts)
        self.heads = o.model // 32

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, 32)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(*parts, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.experts(self.norm2(x))


class Model(nn.Module):
    """Logits of the next byte."""

    def __init__(self, o: argparse.Namespace) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(BYTES, o.model), nn.Embedding(o.length, o.model)
        self.layers = nn.Sequential(*(Layer(o) for _ in range(o.layers)))
        self.norm, self.head = nn.RMSNorm(o.model), nn.Linear(o.model, BYTES, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        logits: Tensor = self.head(self.norm(self.layers(self.embed(tokens) + self.place(places))))
        return logits


def batches(o: argparse.Namespace) -> Iterator[Tensor]:
    """(B, length + 1) bytes, the same in every call."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    text = torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in files)), dtype=torch.uint8)
    generator = torch.Generator().manual_seed(o.seed)
    for _ in range(o.steps):
        starts = torch.randint(len(text) - o.length - 1, (o.batch, 1), generator=generator)
        yield text[starts + torch.arange(o.length + 1)].long().to(o.device)


def train(model: nn.Module, o: argparse.Namespace, name: str) -> list[float]:
    """The loss of every step; means over windows are printed."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=o.lr, betas=(0.9, 0.95), weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 50))
    losses = []
    for tokens in batches(o):
        with torch.autocast(o.device, torch.bfloat16):
            logits = model(tokens[:, :-1])
        loss = F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        losses.append(loss.detach())
        if len(losses) % o.window == 0:
            print(f"{name:10} step {len(losses):5}  {torch.stack(losses[-o.window :]).mean():.4f}", flush=True)
    return torch.stack(losses).tolist()


def compared(losses: dict[str, list[float]], window: int) -> dict[str, Any]:
    """Mean losses by window, and the relative differences from the first."""
    means = {n: [fmean(each[i : i + window]) for i in range(0, len(each), window)] for n, each in losses.items()}
    base, *others = means
    differences = {n: [a / b - 1 for a, b in zip(means[n], means[base])] for n in others}
    return {"window": window, "mean_loss": means, "relative_difference": differences}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sizes = {"steps": 500, "layers": 2, "model": 128, "inner": 128, "experts": 8, "batch": 8, "length": 64, "seed": 0}
    for name, default in {**sizes, "window": 50}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", type=Path)
    o = parser.parse_args()
    torch.manual_seed(o.seed)
    start = Model(o).to(o.device)
    example = next(batches(o))[:, :-1]
    losses = {}
    for compute in ("native", "fp8_block"):
        config = hexa_fx.HexaConfig(compute=compute, own_code_when_small=False)
        model = hexa_fx.optimize_(copy.deepcopy(start), example, config)
        assert len(model.report.rewritten) == o.layers, str(model.report)
        losses[compute] = train(model, o, compute)
    found = compared(losses, o.window)
    worst = max(abs(each) for each in found["relative_difference"]["fp8_block"])
    last = found["relative_difference"]["fp8_block"][-1]
    print(
        f"{o.steps} steps: means of {o.window} differ by {100 * worst:.2f} % at most, the last by {100 * last:+.2f} %"
    )
    if o.json:
        device = torch.cuda.get_device_name() if o.device == "cuda" else f"CPU, {platform.machine()}, FP8 emulated"
        options = {name: value for name, value in vars(o).items() if name != "json"}
        about = {"torch": torch.__version__, "device": device, "options": options}
        o.json.write_text(json.dumps({"environment": about, **found, "loss": losses}, indent=1) + "\n")


if __name__ == "__main__":
    main()
