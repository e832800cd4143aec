"""Refuses blocks whose weights or code cannot be read where they are: offloaded, spread over devices, quantised, compiled, or
several in one memory.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from hexa_fx.capture.overlooked import INTEGERS, packed_experts
from hexa_fx.isolation.module_tree import inside, modules_of, named_modules, named_tensors
from hexa_fx.runtime.preflight import is_offloaded, is_unit_of_fsdp
from hexa_fx.sources import linear4bit

OFFLOADED = (
    "its weights are offloaded (accelerate brings them to the device for each call), and cannot be read in place; a block is "
    "rewritten if it stays on one device: leave room for it in device_map or max_memory (stacked experts may also be optimized "
    "before the model is dispatched)"
)
SPREAD = (
    "its weights lie on several devices ({}); a block is rewritten if it is on one: keep it together in device_map "
    "(no_split_module_classes)"
)
QUANTISED = (
    "it holds quantised weights, which cannot be read as matrices ({}); a block is rewritten if the quantiser leaves its modules "
    "as they are (llm_int8_skip_modules, modules_to_not_convert); hexa_fx.quantize_experts_ packs dense experts after "
    "hexa_fx.optimize_"
)
UNIT = (
    "{} is a unit of FSDP2 of its own, which cannot be copied to compare it; apply fully_shard to a module around the block, or "
    "optimize the model before it is sharded"
)
SCRIPTED = (
    "{} is compiled by torch.jit, which hides what it computes; a block is rewritten if all of its modules are Python: leave this "
    "one as it is written (functions that torch.jit.script compiled are no hindrance)"
)
NOT_FINITE = "{} holds NaN or infinity, which may be what hides it: give it numbers before the block is analysed"
IN_ONE_MEMORY = (
    "{} lie in the same memory, which experts of a list do not keep when they are laid side by side; a block is rewritten if they "
    "are one nn.Parameter (a.weight = b.weight, without .data)"
)
_NUMBERS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_PACKAGES = frozenset("torchao bitsandbytes auto_gptq gptqmodel awq hqq quanto optimum compressed_tensors".split())
_MODULES = ("torch.ao.nn.quantized", "torch.ao.nn.intrinsic.quantized", "torch.nn.quantized")


def why_unreadable(block: nn.Module) -> str:
    """A sentence if the block's weights are elsewhere, on several devices or quantised, or it holds compiled code; else empty."""
    if hidden := why_hidden(block):
        return hidden
    unit = next((path for path, module in named_modules(block) if is_unit_of_fsdp(module)), None)
    if unit is not None:
        return UNIT.format(repr(unit) if unit else "the block")
    devices = {parameter.device for parameter in named_tensors(block, "_parameters").values()}
    if any(device.type == "meta" for device in devices):
        return OFFLOADED
    if any(map(is_offloaded, modules_of(block))):
        return OFFLOADED
    quantised = next((said for path, module in named_modules(block) for said in _quantised(path, module)), "")
    if quantised:
        return QUANTISED.format(quantised)
    return SPREAD.format(", ".join(sorted(map(str, devices)))) if len(devices) > 1 else ""


def is_elsewhere(block: nn.Module) -> bool:
    """Whether weights of the block come to where it runs for its calls only: sharded, offloaded, or on the meta device."""
    if any("_hf_hook" in vars(module) for module in modules_of(block)):
        return True
    parameters = named_tensors(block, "_parameters").values()
    return any(p.is_meta or type(p.data).__name__ == "DTensor" or _is_freed(p) for p in parameters)


def _is_freed(parameter: torch.Tensor) -> bool:
    plain = type(parameter) is nn.Parameter and parameter.numel() > 0
    return plain and parameter.untyped_storage().size() == 0


def why_not_finite(block: nn.Module) -> str:
    """A sentence on the first parameter that holds NaN or infinity, where what a block computes hardly shows; else empty."""
    for name, parameter in block.named_parameters():
        plain = type(parameter) is nn.Parameter and parameter.dtype in _NUMBERS and parameter.numel() > 0
        if plain and not all(bool(end.isfinite()) for end in parameter.detach().aminmax()):
            return NOT_FINITE.format(name)
    return ""


def why_packed(block: nn.Module) -> str:
    """A sentence if the block's experts hold integers in buffers, as large as weights are; else empty."""
    found = next((names for module in block.modules() if (names := packed_experts(module))), "")
    return INTEGERS.format(found) if found else ""


def why_hidden(block: nn.Module) -> str:
    """A sentence if the block holds a module that torch.jit compiled; else empty."""
    paths = (path for path, module in named_modules(block) if isinstance(module, torch.jit.ScriptModule))
    found = next(paths, None)
    return "" if found is None else SCRIPTED.format(repr(found))


def _quantised(path: str, module: nn.Module) -> list[str]:
    """What about the module itself is quantised, with its path."""
    home = type(module).__module__
    four_bit = linear4bit.is_linear(module)
    if four_bit or home.startswith(_MODULES) or home.split(".")[0] in _PACKAGES:
        why = f", {linear4bit.why_not(module.weight)}" if four_bit else ""
        return [f"{path or 'the block'} is a {home}.{type(module).__name__}{why}"]
    found = []
    for name, parameter in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)):
        homes = {type(value).__module__.split(".")[0] for value in (parameter, parameter.data)}
        where = inside(path, name)
        if parameter.is_quantized or not homes.isdisjoint(_PACKAGES):
            found.append(f"{where} is a {type(parameter).__name__}")
        elif isinstance(parameter, nn.Parameter) and not (parameter.is_floating_point() or parameter.is_complex()):
            found.append(f"{where} is a parameter of dtype {str(parameter.dtype).removeprefix('torch.')}")
        elif _are_packed(parameter):
            found.append(f"{where} is a buffer of dtype {str(parameter.dtype).removeprefix('torch.')}")
    return found


def _are_packed(buffer: torch.Tensor) -> bool:
    """Whether a buffer of integers is as large as weights of experts are, and no table of positions."""
    return buffer.dim() >= 3 and buffer.dtype in (torch.int8, torch.uint8, torch.int32)


def in_same_memory(model: nn.Module) -> dict[int, str]:
    """By the id of every parameter that has memory in common with another one, the names of the two."""
    plain = [
        (name, p)
        for name, p in named_tensors(model, "_parameters").items()
        if type(p) is nn.Parameter and not p.is_meta
    ]
    dense = [(name, p) for name, p in plain if p.layout is torch.strided and p.is_contiguous() and p.numel()]
    found: dict[int, str] = {}
    ends: dict[torch.device, tuple[int, str, nn.Parameter]] = {}
    for name, parameter in sorted(dense, key=lambda item: item[1].data_ptr()):
        start = parameter.data_ptr()
        stop, last, other = ends.get(parameter.device, (0, "", parameter))
        if start < stop:
            found[id(parameter)] = found[id(other)] = f"{last} and {name}"
        end = start + parameter.numel() * parameter.element_size()
        if end > stop:
            ends[parameter.device] = end, name, parameter
    return found


def why_not_parted(block: nn.Module, found: Mapping[int, str]) -> str:
    """A sentence if a block of listed experts has such parameters; else empty. Stacked ones stay where they are."""
    parameters = list(block.parameters()) if found else []
    if any(parameter.dim() > 2 for parameter in parameters):
        return ""
    names = next((found[id(parameter)] for parameter in parameters if id(parameter) in found), "")
    return IN_ONE_MEMORY.format(names) if names else ""
