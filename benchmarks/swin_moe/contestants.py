"""Every implementation that the tables compare, by name: how it takes over a model, and how one training step runs."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import hexa_fx
from benchmarks.launching import prebuild
from benchmarks.swin_moe.baselines import DroplessExperts, NoExperts, PaddedExperts
from benchmarks.swin_moe.libraries import MegablocksExperts, TutelExperts
from benchmarks.swin_moe.model import Experts, MoeMlp, SwinConfig, SwinMoe
from hexa_fx.distributed.gradients import ignore_in_ddp
from hexa_fx.passes.partition.plan_layers import PartitionConfig

CAPACITY_FACTOR = 1.25
"""Of Swin-MoE's own configuration."""

MakeExperts = Callable[[Experts, Any], nn.Module]

BASELINES: dict[str, MakeExperts] = {
    "padded": functools.partial(PaddedExperts, factor=CAPACITY_FACTOR),
    "padded-cf1": functools.partial(PaddedExperts, factor=1.0),
    "grouped": functools.partial(DroplessExperts, compute="grouped"),
    "loop": functools.partial(DroplessExperts, compute="loop"),
    "tutel": functools.partial(TutelExperts, factor=CAPACITY_FACTOR),
    "megablocks-moe": functools.partial(MegablocksExperts, dropless=False),
    "megablocks-dmoe": functools.partial(MegablocksExperts, dropless=True),
    "none": NoExperts,
}
OURS = ("data", "model")
"""hexa_fx, data-centric and model-centric."""

RECOMPUTED = ("data-recompute", "model-recompute")
"""The same, computing pre-activations again in backward (`HexaConfig.recompute_h`)."""

TITLES = {
    "data": "hexa_fx (data-centric)",
    "model": "hexa_fx (model-centric)",
    "data-recompute": "hexa_fx (data-centric, recompute_h)",
    "model-recompute": "hexa_fx (model-centric, recompute_h)",
    "padded": "padded capacity 1.25 (Tutel's formulation)",
    "padded-cf1": "padded capacity 1.0 (MegaBlocks MoE's)",
    "grouped": "torch grouped_mm, dropless (dMoE's)",
    "loop": "loop over experts, dropless",
    "tutel": "Tutel",
    "megablocks-moe": "MegaBlocks (MoE)",
    "megablocks-dmoe": "MegaBlocks (dMoE)",
    "none": "the model without what its experts compute",
}


@dataclass(frozen=True)
class Setting:
    """One contestant on one model.

    Args:
        name: one of `OURS`, `RECOMPUTED` or `BASELINES`, or ``eager``: the model as it is, on one rank.
        model: sizes.
        batch: images a rank (of an even split).
        seconds: capacities t_i handed to the plan, None for equal ranks.
        config: switches of hexa_fx.
        amp: the autocast dtype, None for float32.
    """

    name: str
    model: SwinConfig
    batch: int
    seconds: tuple[float, ...] | None = None
    config: hexa_fx.HexaConfig = field(default_factory=lambda: hexa_fx.HexaConfig.from_environment(strict=True))
    amp: torch.dtype | None = torch.bfloat16
    lr: float = 1e-4


class Contestant:
    """A model that trains: `step` does forward, backward and the optimizer's step on one batch."""

    def __init__(self, setting: Setting, device: torch.device, group: Any = None, mesh: Any = None) -> None:
        self.setting, self.device, self.group = setting, device, group
        self.world = dist.get_world_size(group) if group is not None else 1
        torch.manual_seed(0)
        with device:
            self.model = SwinMoe(setting.model)
        self.session: Any = None
        own = self._take_over(mesh)
        self.experts: list[nn.Parameter] = own
        self.run: nn.Module = self.model
        if self.world > 1:
            devices = [device] if device.type == "cuda" else None
            with warnings.catch_warnings():  # newer torch has another name for broadcast_buffers
                warnings.simplefilter("ignore", FutureWarning)
                self.run = DistributedDataParallel(
                    self.model, devices, gradient_as_bucket_view=True, broadcast_buffers=False
                )
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=setting.lr, weight_decay=0.05, fused=device.type == "cuda"
        )

    def _take_over(self, mesh: Any) -> list[nn.Parameter]:
        """Puts the implementation in; returns the parameters whose gradients are sums over the ranks."""
        name = self.setting.name
        if name == "eager":
            return []
        if name in (*OURS, *RECOMPUTED):
            return self._optimize(mesh)
        names = []
        for path, module in list(self.model.named_modules()):
            if isinstance(module, MoeMlp):
                module.experts = BASELINES[name](module.experts, self.group)  # type: ignore[assignment]
                names += [f"{path}.experts.{n}" for n, _ in module.experts.named_parameters()]
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(self.model, names)
        return [p for n, p in self.model.named_parameters() if n in set(names)]

    def _optimize(self, mesh: Any) -> list[nn.Parameter]:
        images, setting = self.images(2), self.setting
        config = replace(setting.config, recompute_h=setting.config.recompute_h or setting.name in RECOMPUTED)
        if mesh is None:
            hexa_fx.optimize_(self.model, images, config)
            return []
        partition = PartitionConfig(batch=setting.batch * self.world, data_parallel="mean", grad_dtype="compute")
        with self.autocast():
            hexa_fx.optimize_(
                self.model,
                images,
                config,
                mesh=mesh,
                strategy="data" if setting.name.startswith("data") else "model",
                capacities=setting.seconds,
                partition=partition,
            )
        self.session = self.model.partition
        ignore_in_ddp(self.model, self.session)
        return []  # the plan scales them

    def autocast(self) -> torch.autocast:
        amp = self.setting.amp
        return torch.autocast(self.device.type, amp or torch.bfloat16, enabled=amp is not None)

    def images(self, count: int) -> Tensor:
        config = self.setting.model
        size = (count, config.channels, config.image, config.image)
        return torch.randn(size, device=self.device, generator=self._random())

    def labels(self, count: int) -> Tensor:
        return torch.randint(0, self.setting.model.classes, (count,), device=self.device, generator=self._random())

    def _random(self) -> torch.Generator:
        """The same data for every contestant, other data on every rank."""
        rank = dist.get_rank(self.group) if self.world > 1 else 0
        return torch.Generator(self.device).manual_seed(1 + rank)

    def step(self, images: Tensor, labels: Tensor, share: float = 1.0) -> Tensor:
        """One training step; ``share``: this rank's part of the global batch times the number of ranks. Returns the loss."""
        with self.autocast():
            scores, balance = self.run(images)
            loss = nn.functional.cross_entropy(scores.float(), labels) + 0.01 * balance
        (loss * share).backward()
        if self.experts and self.world > 1:
            torch._foreach_div_([p.grad for p in self.experts if p.grad is not None], float(self.world))
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    def prepare(self, images: Tensor, labels: Tensor) -> None:
        """Builds all GPU kernels that a step needs, several at a time. Changes nothing."""
        if self.device.type != "cuda" or self.setting.name not in (*OURS, *RECOMPUTED):
            return

        def run() -> None:
            with self.autocast():
                scores, balance = self.run(images)
                loss = nn.functional.cross_entropy(scores.float(), labels) + balance
            loss.backward()

        prebuild(run)
        self.optimizer.zero_grad(set_to_none=True)

    def close(self) -> None:
        """Before the next contestant: a model and its patched forward refer to each other."""
        if self.session is not None:
            self.session.close()
        self.__dict__.clear()


def with_switches(setting: Setting, off: Sequence[str]) -> Setting:
    """The setting with some of `HexaConfig`'s techniques switched off."""
    return replace(setting, config=replace(setting.config, **dict.fromkeys(off, False)))
