"""Refuses models that cannot be worked on as they are, each with a sentence that says what to do."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from hexa_fx.errors import InputError
from hexa_fx.isolation.module_tree import is_unit_of_fsdp, named_modules, named_tensors
from hexa_fx.runtime.install import is_installed


def check_module(model: object) -> None:
    """Raises `InputError` unless it is an `nn.Module`."""
    if not isinstance(model, nn.Module):
        hint = "; call the class to make a model" if isinstance(model, type) else ""
        raise InputError(f"expected an nn.Module, got {type(model).__name__}{hint}")


def check_model(model: nn.Module) -> None:
    """Raises `InputError` for a model that has to be prepared differently. Looks at types only, never at values."""
    check_module(model)
    if type(model).__name__ == "OptimizedModule" and hasattr(model, "_orig_mod"):
        raise InputError("the model is wrapped by torch.compile; optimize the model first, then compile the result")
    if isinstance(model, torch.jit.ScriptModule):
        raise InputError(
            "the model is TorchScript, whose Python code is gone; optimize the model before torch.jit does its work"
        )
    for path, module in named_modules(model):
        if is_installed(module):
            raise InputError(
                f"the model is already optimized ({path or 'the model itself'} has a rewritten forward); "
                "use it as it is, or call hexa_fx.undo_(model) first"
            )
    for path, parameter in (*named_tensors(model, "_parameters").items(), *named_tensors(model, "_buffers").items()):
        if is_lazy(parameter):
            raise InputError(
                f"{path} belongs to a lazy module and has no shape yet; call the model once on an example first"
            )
        if parameter.is_inference():
            raise InputError(
                f"{path} was made under torch.inference_mode() and cannot have gradients, which the comparison with the original "
                "needs; build or load the model outside of it"
            )


def check_values(model: nn.Module) -> None:
    """Raises `InputError` if a model cannot be run on an example, since weights have no values yet."""
    if any(is_unit_of_fsdp(module) for _, module in named_modules(model)):
        raise InputError(
            "the model is sharded by FSDP2, whose weights are there in its calls only: leave the example out, and it is analysed "
            "in its first call, or optimize it before it is sharded"
        )
    away = {id(p) for _, module in named_modules(model) if is_offloaded(module) for p in module.parameters()}
    for path, parameter in named_tensors(model, "_parameters").items():
        if parameter.is_meta and id(parameter) not in away:
            raise InputError(
                f"{path} is on the meta device and has no values to run an example on: leave the example out, and the model is "
                "analysed in its first call, or load its weights before"
            )


def called_in(model: nn.Module) -> nn.Module:
    """The module whose forward is called with the arguments of ``model``: what torch's data parallel wrappers hold, or itself."""
    inner = model._modules.get("module")
    wraps = isinstance(model, (nn.DataParallel, nn.parallel.DistributedDataParallel))
    return inner if wraps and inner is not None else model


def is_offloaded(module: nn.Module) -> bool:
    """Whether accelerate keeps the module's weights elsewhere and brings them to the device for each call."""
    hook = vars(module).get("_hf_hook")
    return any(bool(getattr(part, "offload", False)) for part in (hook, *getattr(hook, "hooks", ())))


def sharded_units(model: nn.Module) -> list[nn.Module]:
    """Modules that `fully_shard` was applied to, of which the weights are not gathered for a call at present."""
    found, nested = list[nn.Module](), set[int]()
    for module in reversed([module for _, module in named_modules(model)]):  # those inside of others first
        if is_unit_of_fsdp(module):
            own = [p for p in module.parameters() if id(p) not in nested]
            nested |= {id(p) for p in own}
            found += [module] if any(type(p.data).__name__ == "DTensor" for p in own) else []
    return found
