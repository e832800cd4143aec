"""PEFT's LoRA on listed experts while a compiler traces a call: what is active, by plain access that a tracer follows."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from torch import nn

from hexa_fx.ir import PackedWeight
from hexa_fx.lora.stacked import AdaptedReader, Addition, Low, additions, is_scale
from hexa_fx.runtime.guards import ADAPTED, AGAIN, GuardMiss
from hexa_fx.runtime.paths import base_of
from hexa_fx.sources.adapters import View

KINDS = (("peft.tuners.lora.layer", "Linear"), ("peft.tuners.lora.bnb", "Linear4bit"))
"""Where PEFT has the classes of linear layers with LoRA, and their names."""
DORA = ("peft.tuners.lora.variants", "DoraLinearVariant")
"""Likewise the class of what DoRA does besides."""


def is_peft_s(module: str, name: str) -> bool:
    """Whether a class of PEFT's still has the forward of its own module; a tracer calls this while it traces."""
    home = vars(sys.modules[module])
    return getattr(home[name].forward, "__globals__", None) is home


is_peft_s._dynamo_marked_constant = True  # type: ignore[attr-defined]  # as torch.compiler does it, which imports dynamo
PATCHED = "the forward of PEFT's class was replaced, and other code may do something else than add low-rank products"


class TracedLora:
    """The additions to stacked weights, for one trace.

    Raises:
        GuardMiss: an adapter is no low-rank product.
    """

    def __init__(self, block: nn.Module, weights: Mapping[str, PackedWeight], multiplied: frozenset[str]) -> None:
        self.additions: dict[str, list[Addition]] = {}
        known: dict[str, Any] = {"": block}
        for name, weight in weights.items():
            if not weight.parts[0][0].endswith(".weight"):
                continue
            paths = [[path.rpartition(".")[0] for path in part] for part in weight.parts]
            layers = [[_at(known, path) for path in part] for part in paths]
            low = [[_active(*each) for each in zip(*both)] for both in zip(layers, paths)]
            if any(any(part) for part in low):
                if name not in multiplied:
                    raise GuardMiss("the block does more with weights under adapters than multiply by them")
                rows = [base_of(part[0]).out_features for part in layers]
                self.additions[name] = list(additions(block, low, rows))

    def __bool__(self) -> bool:
        return len(self.additions) > 0

    def factors(self) -> tuple[()]:
        """No readers: factors are stacked in the trace."""
        return ()

    def seen_from(self, module: Any) -> Any:
        """See `hexa_fx.lora.linear.LinearLora.seen_from`."""
        return View(module, {name: AdaptedReader(getattr(module, name), each) for name, each in self.additions.items()})


def _at(known: dict[str, Any], path: str) -> Any:
    if path not in known:
        above, _, key = path.rpartition(".")
        known[path] = getattr(_at(known, above), key)
    return known[path]


def _active(layer: Any, path: str) -> list[Low]:
    if "base_layer" not in layer._modules:
        return []
    kind = type(layer).__module__, type(layer).__name__
    if kind in KINDS and not is_peft_s(*kind):
        raise GuardMiss(PATCHED)
    if kind not in KINDS or _is_changed(layer):
        raise GuardMiss(f"PEFT's {path!r} is no LoRA on a plain linear layer, or has hooks or a forward of its own")
    if layer._disable_adapters and layer.merged_adapters:
        raise GuardMiss(f"adapters that are merged into {path!r} were disabled; its own code takes them out")
    if layer._disable_adapters or layer.merged_adapters:
        return []
    names, known = layer._active_adapter, layer._modules["lora_A"]._modules
    return [_low(layer, path, name) for name in ([names] if isinstance(names, str) else names) if name in known]


def _low(layer: Any, path: str, name: str) -> Low:
    a, b, dropout = (layer._modules[kind]._modules[name] for kind in ("lora_A", "lora_B", "lora_dropout"))
    scale = layer.scaling[name]
    variant = layer.lora_variant.get(name)
    if (type(variant).__module__, type(variant).__name__) == DORA:
        raise GuardMiss(
            f"adapter {name!r} of {path!r} is DoRA, of which the norms are not traced; it runs rewritten in eager mode"
        )
    plain = name not in layer.lora_variant and type(a) is type(b) is nn.Linear and is_scale(scale)
    plain = plain and getattr(layer, "cast_input_dtype_enabled", True) and not getattr(layer, "fan_in_fan_out", False)
    if not plain or a.bias is not None or b.bias is not None or _is_changed(a) or _is_changed(b):
        raise GuardMiss(f"adapter {name!r} of {path!r} is no plain LoRA (a bias or another kind of layer); {ADAPTED}")
    idle = type(dropout) is nn.Dropout and not (dropout.training and dropout.p)
    if type(dropout) is not nn.Identity and (not idle or _is_changed(dropout)):
        raise GuardMiss(f"adapter {name!r} of {path!r} drops numbers in training; {AGAIN}")
    return Low(path, name, a, b, scale)


def _is_changed(module: Any) -> bool:
    """Whether a module has hooks or a forward of its own, as it is traced; guards of torch.compile skip them later."""
    if "forward" in module.__dict__ or module._forward_hooks or module._forward_pre_hooks:  # a tracer walks into any()
        return True
    return bool(module._backward_hooks or module._backward_pre_hooks)
