"""Tiny models of the real `transformers` classes, one a family, for whole-model checks.

Built from a config (`tests.zoo.family_configs`) with fixed seeds (nothing is downloaded): two layers or so, tiny widths, four
experts or more.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from tests.zoo.family_configs import FAMILIES, VOCAB, Family

__all__ = ["FAMILIES", "Family", "Outcome", "inputs", "logits_and_gradients", "make", "runs"]


def runs(family: str, experts_implementation: str, dtype: torch.dtype) -> str:
    """Why the unmodified model cannot run so, or an empty string."""
    if experts_implementation not in FAMILIES[family].implementations:
        return f"{family} has no choice of experts implementation"
    if experts_implementation == "grouped_mm" and dtype == torch.float64:
        return "torch.nn.functional.grouped_mm takes no float64"
    return ""


def make(
    family: str, experts_implementation: str = "eager", dtype: torch.dtype = torch.float32, seed: int = 0
) -> nn.Module:
    """Build the tiny model of `family` on the CPU, in eval mode.

    Args:
        family: a key of `FAMILIES`.
        experts_implementation: ``eager``, ``batched_mm`` or ``grouped_mm``; a family without the choice is ``eager``.
        dtype: dtype of parameters and floating-point buffers.
        seed: of the weights.

    Raises:
        ValueError: the family has no such experts implementation.
    """
    import transformers

    spec = FAMILIES[family]
    if experts_implementation not in spec.implementations:
        raise ValueError(
            f"{family} has no experts implementation {experts_implementation!r}, only {spec.implementations}"
        )
    config = transformers.AutoConfig.for_model(spec.model_type, **spec.config)
    auto = transformers.AutoModelForSeq2SeqLM if spec.kind == "seq2seq" else transformers.AutoModelForCausalLM
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = auto.from_config(config, attn_implementation="eager")
    if len(spec.implementations) > 1 and hasattr(model, "set_experts_implementation"):  # transformers 4 has loops only
        model.set_experts_implementation(experts_implementation)
    _spread_weights(model, seed)
    for router in (m for m in model.modules() if type(m).__name__.endswith(("Top1Router", "Top2Router"))):
        router.dtype = dtype  # these cast their own weight to `dtype` in forward; the config allows no float64
    return model.to(dtype).eval()


def inputs(batch: int, seq: int, seed: int = 0) -> dict[str, torch.Tensor]:
    """Token ids and labels (batch, seq) for any family; no padding token among them."""
    generator = torch.Generator().manual_seed(1000 * seed + 10 * batch + seq)
    ids = torch.randint(3, VOCAB, (batch, seq), generator=generator)
    return {"input_ids": ids, "labels": torch.randint(3, VOCAB, (batch, seq), generator=generator)}


@dataclass(frozen=True)
class Outcome:
    """What one forward and backward of a model gives.

    Args:
        logits: (batch, seq, vocabulary).
        loss: scalar, router losses included where the config has them.
        gradients: of every parameter by name; None where autograd gave none.
        router_logits: what the model reports of its routers, if anything.
    """

    logits: torch.Tensor
    loss: torch.Tensor
    gradients: dict[str, torch.Tensor | None]
    router_logits: tuple[torch.Tensor, ...] = ()


def logits_and_gradients(
    model: nn.Module, batch: dict[str, torch.Tensor], train: bool = False, seed: int = 0
) -> Outcome:
    """Forward and backward of `model` on `batch` from a fixed random state. Leaves no gradients behind.

    Args:
        model: a model of `make`, or the optimized form of one.
        batch: the keyword arguments, as `inputs` makes them.
        train: train mode or eval mode; the model is left in it.
        seed: of the global generator, so that jitter and dropout agree between two calls.
    """
    model.train(train)
    model.zero_grad(set_to_none=True)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        output = model(**batch, **_options(model))
        output.loss.backward()
    gradients = {name: _detached(p.grad) for name, p in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    return Outcome(output.logits.detach(), output.loss.detach(), gradients, _router_logits(output))


def _options(model: nn.Module) -> dict[str, bool]:
    """No cache, and router losses where the config asks for them (encoder-decoder models want it said in the call)."""
    return {"use_cache": False, "output_router_logits": bool(getattr(model.config, "output_router_logits", False))}


def _detached(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return None if tensor is None else tensor.detach().clone()


def _router_logits(output: Any) -> tuple[torch.Tensor, ...]:
    found = []
    for name in ("router_logits", "encoder_router_logits", "decoder_router_logits"):
        value = getattr(output, name, None) or ()
        found += [leaf.detach() for leaf in torch.utils._pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]
    return tuple(found)


def _spread_weights(model: nn.Module, seed: int) -> None:
    """Draw weights that make every path visible: the library's own start (std 0.02, ones, zeros) hides errors."""
    generator = torch.Generator().manual_seed(seed)

    def noise(like: torch.Tensor) -> torch.Tensor:
        return torch.randn(like.shape, generator=generator).to(like)

    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim >= 2 and "A_log" not in name:
                parameter.copy_(noise(parameter) * 1.5 / parameter.shape[-1] ** 0.5)
            elif "A_log" not in name and "dt" not in name and name.rsplit(".", 1)[-1] != "D":
                parameter.add_(0.1 * noise(parameter))
        for name, buffer in model.named_buffers():
            if name.endswith(("e_score_correction_bias", "expert_bias")):
                buffer.add_(0.2 * noise(buffer))
