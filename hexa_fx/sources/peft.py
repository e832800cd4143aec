"""PEFT's adapters on expert parameters (``target_parameters``), without the sum ``W + dW`` that PEFT makes in every call.

PEFT puts a wrapper around the module of the experts. When it is called, it registers a parametrization for as long as the module
runs. Where that module is a rewritten block, the wrapper hands over the factors instead. Nothing of PEFT is imported, and nothing
but one attribute of each wrapper's instance, and of the tuner's around them all, is changed; what a wrapper says is asked at every
call, so that adapters may be added, switched, disabled and merged at any time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling
from torch.nn.modules.module import register_module_module_registration_hook

from hexa_fx.errors import InputError
from hexa_fx.formats.adapted_weight import say_once
from hexa_fx.formats.quantized_weight import QuantizedWeight
from hexa_fx.sources.adapters import Adapter, Adapters
from hexa_fx.torch_private import without_autocast

_METHOD = "_activate_lora"
_ASKED = "_check_merge_allowed"  # before anything is merged
_NEEDED = (_METHOD, "get_delta_factors", "get_base_layer", "parameter_name", "lora_A", "num_experts")
_SUMMABLE = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


class HandOver:
    """Stands for a wrapper's method that activates its adapters.

    Args:
        wrapper: PEFT's module.
    """

    def __init__(self, wrapper: nn.Module) -> None:
        self.wrapper = wrapper

    def __call__(self, active_adapters: Sequence[str]) -> AbstractContextManager[Any]:
        wrapper: Any = self.wrapper
        names = [name for name in active_adapters or () if name in wrapper.lora_A]
        block, adapters = _adapters_of(wrapper)
        if not names:
            return nullcontext()
        if adapters is None or self._why_not(block):
            return self._own(active_adapters)
        adapter = Adapter(*_factors(wrapper, names), lambda: self._own(active_adapters))
        return adapters.active(wrapper.parameter_name, adapter)

    def _own(self, active_adapters: Sequence[str]) -> AbstractContextManager[Any]:
        """PEFT's own way: the parameter reads as the sum."""
        method = getattr(type(self.wrapper), _METHOD)
        found: AbstractContextManager[Any] = method(self.wrapper, active_adapters)
        return found

    def _why_not(self, block: nn.Module) -> str:
        """Why the factors are not handed over, which is said; empty if they are."""
        wrapper: Any = self.wrapper
        parameter = block._parameters.get(wrapper.parameter_name)
        reason = ""
        if parameter is None:
            reason = f"{wrapper.parameter_name} is parametrized by something else, too"
        elif parameter.dim() != 3 or wrapper.num_experts != parameter.shape[0]:
            reason = f"{wrapper.parameter_name} does not hold one matrix for each expert"
        elif parameter.dtype not in _SUMMABLE:
            reason = f"{wrapper.parameter_name} is {parameter.dtype}"
        if reason:
            say_once(reason)
        return reason


class MergeCheck:
    """Stands for a tuner's method that says whether its adapters may be merged, and asks that first.

    PEFT merges module after module and takes each merged one out, so that an error at a packed weight would leave half a model.

    Args:
        tuner: PEFT's module around a whole model.
    """

    def __init__(self, tuner: nn.Module) -> None:
        self.tuner = tuner

    def __call__(self) -> None:
        getattr(type(self.tuner), _ASKED)(self.tuner)
        for path, layer in self.tuner.named_modules():
            held = layer.get_base_layer() if hasattr(layer, "base_layer") and hasattr(layer, "get_base_layer") else None
            if held is not None and any(isinstance(p, QuantizedWeight) for p in held.parameters(recurse=False)):
                raise InputError(
                    f"the adapter at {path} is on packed weights, into which adapters cannot be merged without rounding off what "
                    "they learnt, and nothing was merged; load the adapters on the dense model, merge, and pack it then"
                )


def hand_over(wrapper: Any) -> bool:
    """Makes a module hand its factors over, if it is such a wrapper around a rewritten block. Returns whether it is."""
    if not isinstance(wrapper, nn.Module) or not all(hasattr(wrapper, name) for name in _NEEDED):
        return False
    if _adapters_of(wrapper)[1] is None:
        return False
    if not isinstance(wrapper.__dict__.get(_METHOD), HandOver):
        wrapper.__dict__[_METHOD] = HandOver(wrapper)
    return True


def hand_over_in(model: nn.Module) -> dict[tuple[int, str], int]:
    """Makes every wrapper of a model hand its factors over.

    Returns the ranks of what is active, by the block's ``id`` and the parameter's name.
    """
    ranks = {}
    for wrapper in model.modules():
        _check_merges(wrapper)
        if hand_over(wrapper):
            made: Any = wrapper
            active = [name for name in made.active_adapters if name in made.lora_A]
            ranks[id(_adapters_of(made)[0]), str(made.parameter_name)] = sum(made.r[name] for name in active)
    return ranks


def adapted_parameters(model: nn.Module) -> set[tuple[int, str]]:
    """What such wrappers are around, active or not: the ``id`` of the module that holds the parameter, and the parameter's name."""
    wrappers: list[Any] = [module for module in model.modules() if all(hasattr(module, name) for name in _NEEDED)]
    return {(id(wrapper.get_base_layer()), str(wrapper.parameter_name)) for wrapper in wrappers}


@cache
def watch() -> None:
    """Makes wrappers that come to be around rewritten blocks hand their factors over from their first call on.

    That call may be under a compiler, where PEFT's own way cannot wrap a packed parameter, and breaks the graph at any.
    """
    register_module_module_registration_hook(_registered)


_told_of_tuners: dict[Callable[[nn.Module], object], None] = {}


def tell_of_tuners(told: Callable[[nn.Module], object]) -> None:
    """Has ``told`` called with every tuner that comes around a model, once its adapters are there."""
    _told_of_tuners[told] = None


def _registered(wrapper: Any, name: str, inner: Any) -> None:
    """Told of every module that becomes a part of another one."""
    if _check_merges(inner):
        for told in _told_of_tuners:
            told(inner)
    if name != "base_layer" or not hasattr(type(wrapper), _METHOD):
        return
    block = inner
    while isinstance(block, nn.Module) and "base_layer" in block._modules:
        block = block._modules["base_layer"]
    if block is not None and _adapters_in(block) is not None:
        wrapper.__dict__[_METHOD] = HandOver(wrapper)


def _check_merges(tuner: Any) -> bool:
    """Has a tuner ask before it merges. Returns whether it is one."""
    if not hasattr(type(tuner), _ASKED):
        return False
    tuner.__dict__.setdefault(_ASKED, MergeCheck(tuner))
    return True


def take_back(module: nn.Module) -> None:
    """Gives a wrapper or tuner its own method back."""
    for name, kind in ((_METHOD, HandOver), (_ASKED, MergeCheck)):
        if isinstance(module.__dict__.get(name), kind):
            del module.__dict__[name]


def _factors(wrapper: Any, names: Sequence[str]) -> tuple[Tensor, Tensor, float]:
    """(E, P, r) and (E, r, Q) of all named adapters, side by side, and what the product is multiplied by."""
    factors = [type(wrapper).get_delta_factors(_Wrapper(wrapper, name), name) for name in names]
    if len(factors) == 1:
        left, right, scale = factors[0]
        return left, right, scale
    with nullcontext() if is_compiling() else without_autocast():  # which refuses the other 16-bit dtype in torch.cat
        left = torch.cat([scale * lhs for lhs, _, scale in factors], 2)
        return left, torch.cat([rhs for _, rhs, _ in factors], 1), 1.0


class _Wrapper:
    """A wrapper as PEFT's method sees it that casts factors to the dtype of the parameter: here, of the adapter, so that these are
    views of the adapter's own weights, and no copy is kept for backward.
    """

    def __init__(self, wrapper: Any, name: str) -> None:
        self._wrapper, self._name = wrapper, name

    def get_param(self) -> Any:
        return self._wrapper.lora_A[self._name].weight

    def __getattr__(self, name: str) -> Any:
        return getattr(self._wrapper, name)


def _adapters_of(wrapper: Any) -> tuple[nn.Module, Adapters | None]:
    block: nn.Module = wrapper.get_base_layer()
    return block, _adapters_in(block)


def _adapters_in(block: nn.Module) -> Adapters | None:
    """Those of a rewritten block that takes them; None of any other module."""
    forward: Any = block.__dict__.get("forward")
    adapters = getattr(forward, "adapters", None)
    return adapters if isinstance(adapters, Adapters) and forward.takes_adapters() else None
