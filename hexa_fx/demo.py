"""``hexa-fx demo``: rewrites a real model and compares it with the original."""

from __future__ import annotations

import json

import torch
from torch import nn

from hexa_fx.api import optimize
from hexa_fx.attached import attached
from hexa_fx.integrations.tiny_models import tiny_model


def run(as_json: bool = False) -> None:
    """Prints the report of a small Mixtral, one of its graphs, and its largest differences from the original."""
    model, inputs = example()
    optimized = optimize(model, inputs)
    output, gradient = differences(model, optimized, inputs)
    if as_json:
        found = {"report": attached(optimized, "report").as_dict(), "logits_difference": output}
        print(json.dumps({**found, "gradient_difference": gradient}, indent=2))
        return
    path, graphs = next(iter(attached(optimized, "graphs").items()))
    print(f"{path}, rewritten:\n\n{graphs.rewritten.code.strip()}\n")
    attached(optimized, "report").print()
    print(f"largest relative difference: logits {output:.1e}, gradients of {_count(model)} parameters {gradient:.1e}")


def example() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """A small Mixtral, and a batch large enough for the operators to be faster on a CPU than its own code."""
    model, _ = tiny_model("mixtral")
    return model, {"input_ids": torch.randint(0, 128, (8, 64))}


def differences(original: nn.Module, optimized: nn.Module, inputs: dict[str, torch.Tensor]) -> tuple[float, float]:
    """Largest relative difference of the logits, and of all parameters' gradients."""
    results = [_logits_and_gradients(model, inputs) for model in (original, optimized)]
    gradients = max(_relative(a, b) for a, b in zip(results[0][1], results[1][1]))
    return _relative(results[0][0], results[1][0]), gradients


def _logits_and_gradients(model: nn.Module, inputs: dict[str, torch.Tensor]) -> tuple[torch.Tensor, list[torch.Tensor]]:
    output = model(**inputs, labels=inputs["input_ids"])
    return output.logits.detach(), list(torch.autograd.grad(output.loss, list(model.parameters())))


def _relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).abs().max() / a.abs().max().clamp(min=1e-12))


def _count(model: nn.Module) -> int:
    return sum(1 for _ in model.parameters())
