"""Refuses models that cannot be worked on as they are, each with a sentence that says what to do."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from hexa_fx.errors import InputError
from hexa_fx.isolation.module_tree import named_modules, named_tensors
from hexa_fx.runtime.install import is_installed

_PARALLEL = {
    "DistributedDataParallel": "DistributedDataParallel",
    "DataParallel": "DataParallel",
    "FullyShardedDataParallel": "FullyShardedDataParallel (FSDP)",
    "FSDPModule": "fully_shard (FSDP2)",
}


def check_module(model: object) -> None:
    """Raises `InputError` unless it is an `nn.Module`."""
    if not isinstance(model, nn.Module):
        hint = "; call the class to make a model" if isinstance(model, type) else ""
        raise InputError(f"expected an nn.Module, got {type(model).__name__}{hint}")


def check_model(model: nn.Module) -> None:
    """Raises `InputError` for a model that has to be prepared differently. Looks at types only, never at values.

    Raises:
        InputError: the object is no model, or it is already optimized, compiled, scripted, wrapped for data parallelism, sharded,
            on the meta device, lazy, or made in inference mode.
    """
    check_module(model)
    _check_compiled(model)
    if isinstance(model, torch.jit.ScriptModule):
        raise InputError(
            "the model is TorchScript, whose Python code is gone; optimize the model before torch.jit does its work"
        )
    for path, module in named_modules(model):
        _check_optimized(path, module)
        _check_parallel(path, module)
    _check_parameters(model)


def _check_compiled(model: nn.Module) -> None:
    if type(model).__name__ == "OptimizedModule" and hasattr(model, "_orig_mod"):
        raise InputError("the model is wrapped by torch.compile; optimize the model first, then compile the result")


def _check_optimized(path: str, module: nn.Module) -> None:
    if is_installed(module):
        raise InputError(
            f"the model is already optimized ({path or 'the model itself'} has a rewritten forward); "
            "use it as it is, or call hexa_fx.undo_(model) first"
        )


def _check_parallel(path: str, module: nn.Module) -> None:
    for base in type(module).__mro__:
        name = _PARALLEL.get(base.__name__)
        if name and base.__module__.startswith("torch."):
            raise InputError(
                f"{path or 'the model'} is already wrapped by {name}; optimize the model first, then wrap the result "
                "(or, of what is wrapped, set transformers' experts_implementation='hexa', or torch.compile it with backend='hexa')"
            )


def is_offloaded(module: nn.Module) -> bool:
    """Whether accelerate keeps the module's weights elsewhere and brings them to the device for each call."""
    hook = vars(module).get("_hf_hook")
    return any(bool(getattr(part, "offload", False)) for part in (hook, *getattr(hook, "hooks", ())))


def _check_parameters(model: nn.Module) -> None:
    away = {id(p) for _, module in named_modules(model) if is_offloaded(module) for p in module.parameters()}
    for path, parameter in (*named_tensors(model, "_parameters").items(), *named_tensors(model, "_buffers").items()):
        if id(parameter) in away:  # its block is left as it is; the others can be rewritten
            continue
        if is_lazy(parameter):
            raise InputError(
                f"{path} belongs to a lazy module and has no shape yet; call the model once on an example first"
            )
        if type(parameter.data).__name__ == "DTensor":
            raise InputError(f"{path} is a distributed tensor; optimize the model before sharding it (fully_shard, TP)")
        if parameter.device.type == "meta":
            raise InputError(
                f"{path} is on the meta device and has no values to run on; materialise the model first "
                "(model.to_empty(device=...) and load its weights)"
            )
        if parameter.is_inference():
            raise InputError(
                f"{path} was made under torch.inference_mode() and cannot have gradients, which the comparison with the original "
                "needs; build or load the model outside of it"
            )
