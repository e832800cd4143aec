"""Swin-Transformer-MoE as a model file that knows nothing of hexa_fx: plain PyTorch, an eager loop over experts.

Sizes follow Swin-MoE Small and Base: 192 pixels, patches of 4, windows of 12, depths 2-2-18-2, a mixture instead of the MLP in
every other block of the last two stages, experts with biases and GELU, a linear or a cosine router over top-1 to top-8.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class SwinConfig:
    """Sizes of a model.

    Args:
        image, patch, window: edges in pixels, pixels, tokens.
        dim: channels after the patch embedding; they double from stage to stage.
        depths, heads: blocks and attention heads of every stage.
        experts, top_k: of every mixture.
        router: ``linear`` or ``cosine``.
        moe_stages: how many stages, from the last, have mixtures.
    """

    image: int = 192
    patch: int = 4
    window: int = 12
    channels: int = 3
    dim: int = 128
    depths: tuple[int, ...] = (2, 2, 18, 2)
    heads: tuple[int, ...] = (4, 8, 16, 32)
    mlp_ratio: int = 4
    experts: int = 8
    top_k: int = 1
    router: str = "cosine"
    classes: int = 1000
    moe_stages: int = 2


def swin_config(scale: str, **changes: int | str) -> SwinConfig:
    """``small``, ``base``, or ``tiny`` (for tests: 32 pixels, two mixtures)."""
    sizes: dict[str, dict[str, object]] = {
        "base": {"dim": 128, "heads": (4, 8, 16, 32)},
        "small": {"dim": 96, "heads": (3, 6, 12, 24)},
        "tiny": {"image": 32, "window": 4, "dim": 16, "depths": (1, 2, 2), "heads": (1, 2, 2), "classes": 10},
    }
    return SwinConfig(**{**sizes[scale], **changes})  # type: ignore[arg-type]


class Mlp(nn.Module):
    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(dim, hidden), nn.Linear(hidden, dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(F.gelu(self.fc1(x)))


class LinearRouter(nn.Module):
    def __init__(self, dim: int, experts: int) -> None:
        super().__init__()
        self.gate = nn.Linear(dim, experts, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.gate(x)


class CosineRouter(nn.Module):
    """Angle between a token and every expert's embedding, over a learned temperature."""

    def __init__(self, dim: int, experts: int, projected: int = 256) -> None:
        super().__init__()
        self.project = nn.Linear(dim, projected)
        self.embeddings = nn.Parameter(torch.empty(projected, experts).normal_(0, 0.01))
        self.temperature = nn.Parameter(torch.tensor(math.log(1 / 0.5)))

    def forward(self, x: Tensor) -> Tensor:
        tokens = F.normalize(self.project(x), dim=-1)
        logits = tokens @ F.normalize(self.embeddings, dim=0)
        return logits * self.temperature.clamp(max=math.log(1 / 0.01)).exp()


class Experts(nn.Module):
    """E feed-forward networks, one after the other on the tokens that chose them."""

    def __init__(self, experts: int, dim: int, hidden: int) -> None:
        super().__init__()
        self.w1 = nn.Parameter(torch.empty(experts, hidden, dim).normal_(0, dim**-0.5))
        self.b1 = nn.Parameter(torch.empty(experts, hidden).uniform_(-0.02, 0.02))
        self.w2 = nn.Parameter(torch.empty(experts, dim, hidden).normal_(0, hidden**-0.5))
        self.b2 = nn.Parameter(torch.empty(experts, dim).uniform_(-0.02, 0.02))

    def forward(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        y = torch.zeros_like(x)
        for e in range(self.w1.shape[0]):
            token, slot = torch.where(ids == e)
            hidden = F.gelu(F.linear(x[token], self.w1[e], self.b1[e]))
            out = F.linear(hidden, self.w2[e], self.b2[e]) * weights[token, slot, None]
            y.index_add_(0, token, out.to(y.dtype))
        return y


class MoeMlp(nn.Module):
    """Router, top-k, experts. Returns the output and the load-balancing loss."""

    def __init__(self, dim: int, hidden: int, experts: int, top_k: int, router: str) -> None:
        super().__init__()
        self.top_k = top_k
        self.router = CosineRouter(dim, experts) if router == "cosine" else LinearRouter(dim, experts)
        self.experts = Experts(experts, dim, hidden)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        tokens = x.reshape(-1, x.shape[-1])
        scores = torch.softmax(self.router(tokens).float(), dim=-1)
        weights, ids = torch.topk(scores, self.top_k, dim=-1)
        if self.top_k > 1:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        y = self.experts(tokens, ids, weights)
        return y.view(x.shape), balance_loss(scores, ids)


def balance_loss(scores: Tensor, ids: Tensor) -> Tensor:
    """E times the sum over experts of (share of first choices) x (mean score)."""
    share = F.one_hot(ids[:, 0], scores.shape[1]).to(scores.dtype).mean(dim=0)
    return scores.shape[1] * (share * scores.mean(dim=0)).sum()


class WindowAttention(nn.Module):
    """Attention inside windows of w x w tokens, with a learned bias for every relative position."""

    def __init__(self, dim: int, heads: int, window: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.bias = nn.Parameter(torch.empty((2 * window - 1) ** 2, heads).normal_(0, 0.02))
        place = torch.stack(torch.meshgrid(torch.arange(window), torch.arange(window), indexing="ij")).flatten(1)
        apart = place[:, :, None] - place[:, None, :] + window - 1
        self.register_buffer("where", (apart[0] * (2 * window - 1) + apart[1]).flatten(), persistent=False)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """x (windows, N, D); mask (windows of an image, N, N) or None."""
        count, n, dim = x.shape
        q, k, v = self.qkv(x).view(count, n, 3, self.heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
        scores = (q * (dim // self.heads) ** -0.5) @ k.transpose(-2, -1)
        scores = scores + self.bias[self.where].view(n, n, -1).permute(2, 0, 1)
        if mask is not None:
            scores = scores.view(-1, mask.shape[0], self.heads, n, n) + mask[:, None]
            scores = scores.view(count, self.heads, n, n)
        return self.out((torch.softmax(scores, dim=-1).to(v.dtype) @ v).transpose(1, 2).reshape(count, n, dim))


class SwinBlock(nn.Module):
    """Windowed attention, shifted by half a window in every other block, and an MLP or a mixture."""

    def __init__(self, config: SwinConfig, dim: int, heads: int, size: int, shifted: bool, moe: bool) -> None:
        super().__init__()
        self.size, self.window = size, min(config.window, size)
        self.shift = self.window // 2 if shifted and size > self.window else 0
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attention = WindowAttention(dim, heads, self.window)
        hidden = config.mlp_ratio * dim
        self.mlp = MoeMlp(dim, hidden, config.experts, config.top_k, config.router) if moe else Mlp(dim, hidden)
        self.register_buffer("mask", shift_mask(size, self.window, self.shift), persistent=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """x (B, size, size, D)."""
        windows = to_windows(torch.roll(self.norm1(x), (-self.shift, -self.shift), (1, 2)), self.window)
        attended = from_windows(self.attention(windows, self.mask), self.window, self.size)
        x = x + torch.roll(attended, (self.shift, self.shift), (1, 2))
        out = self.mlp(self.norm2(x))
        if isinstance(out, tuple):
            return x + out[0], out[1]
        return x + out, None


def shift_mask(size: int, window: int, shift: int) -> Tensor | None:
    """-100 between tokens of a shifted window that were not neighbours in the image; None without a shift."""
    if shift == 0:
        return None
    edges = torch.zeros(size, dtype=torch.long)
    edges[size - window : size - shift], edges[size - shift :] = 1, 2
    region = to_windows((3 * edges[:, None] + edges[None, :]).view(1, size, size, 1), window).squeeze(-1)
    return torch.where(region[:, :, None] == region[:, None, :], 0.0, -100.0)


def to_windows(x: Tensor, window: int) -> Tensor:
    """(B, H, W, D) -> (windows, w * w, D)."""
    b, h, w, d = x.shape
    x = x.view(b, h // window, window, w // window, window, d)
    return x.transpose(2, 3).reshape(-1, window * window, d)


def from_windows(x: Tensor, window: int, size: int) -> Tensor:
    """The way back, for square maps."""
    count = size // window
    x = x.view(-1, count, count, window, window, x.shape[-1])
    return x.transpose(2, 3).reshape(-1, size, size, x.shape[-1])


class PatchMerging(nn.Module):
    """Two by two neighbours side by side, projected to twice the channels."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm, self.reduce = nn.LayerNorm(4 * dim), nn.Linear(4 * dim, 2 * dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        parts = [x[:, i::2, j::2] for j in (0, 1) for i in (0, 1)]
        return self.reduce(self.norm(torch.cat(parts, dim=-1)))


class SwinMoe(nn.Module):
    """Images (B, C, H, W) -> class scores (B, classes) and the sum of the balancing losses."""

    def __init__(self, config: SwinConfig) -> None:
        super().__init__()
        self.config = config
        self.embed = nn.Conv2d(config.channels, config.dim, config.patch, config.patch)
        self.norm_in = nn.LayerNorm(config.dim)
        self.stages, self.merges = nn.ModuleList(), nn.ModuleList()
        dim, size, last = config.dim, config.image // config.patch, len(config.depths) - 1
        for stage, (depth, heads) in enumerate(zip(config.depths, config.heads)):
            moe = stage > last - config.moe_stages
            blocks = [SwinBlock(config, dim, heads, size, i % 2 == 1, moe and i % 2 == 1) for i in range(depth)]
            self.stages.append(nn.ModuleList(blocks))
            if stage < last:
                self.merges.append(PatchMerging(dim))
                dim, size = 2 * dim, size // 2
        self.norm_out, self.head = nn.LayerNorm(dim), nn.Linear(dim, config.classes)

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        x = self.norm_in(self.embed(images).permute(0, 2, 3, 1))
        balance = x.new_zeros((), dtype=torch.float32)
        for stage, blocks in enumerate(self.stages):
            for block in blocks:
                x, loss = block(x)
                if loss is not None:
                    balance = balance + loss
            if stage < len(self.merges):
                x = self.merges[stage](x)
        return self.head(self.norm_out(x).mean(dim=(1, 2))), balance
