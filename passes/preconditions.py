"""What must hold before a block's run can be relied on: refusals of blocks whose weights or code cannot be read where they are
(offloaded, spread over devices, quantised, compiled, several in one memory), and of what a rewritten block could not notice at run
time (hooks, values that leave no trace, autocast of its own).
"""

from __future__ import annotations

import functools
from collections.abc import Collection

import torch
from torch import nn

from hexa_fx.capture import CapturedBlock
from hexa_fx.capture.overlooked import INTEGERS, packed_experts
from hexa_fx.capture.records import memory_of
from hexa_fx.ir import Refusal, RewrittenBlock
from hexa_fx.isolation.module_tree import inside, is_unit_of_fsdp, modules_of, named_modules, named_tensors
from hexa_fx.isolation.purity import ATTRIBUTE, COLLECTIVE, DATA, HOOK, NUMBER, RANDOM
from hexa_fx.isolation.read_values import Unreadable, values_of
from hexa_fx.isolation.torch_state import has_own_train
from hexa_fx.runtime.attribute_guards import called_in, hooked, is_within
from hexa_fx.runtime.preflight import is_offloaded
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
    "{!r} is a unit of FSDP2 inside of the block, whose weights are not there when the block is called; apply fully_shard to the "
    "block or around it"
)
SCRIPTED = (
    "{} is compiled by torch.jit, which hides what it computes; a block is rewritten if all of its modules are Python: leave this "
    "one as it is written (functions that torch.jit.script compiled are no hindrance)"
)
PARTITIONED = (
    "DeepSpeed's ZeRO-3 partitions its parameters, and keeps a record of every call of a module, which an analysis would add to: "
    "give hexa_fx.optimize_ an example before deepspeed.initialize"
)
NOT_FINITE = "{} holds NaN or infinity, which may be what hides it: give it numbers before the block is analysed"
_NUMBERS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_PACKAGES = frozenset("torchao bitsandbytes auto_gptq gptqmodel awq hqq quanto optimum compressed_tensors".split())
_MODULES = ("torch.ao.nn.quantized", "torch.ao.nn.intrinsic.quantized", "torch.nn.quantized")


def why_unreadable(block: nn.Module) -> str:
    """A sentence if the block's weights are elsewhere, on several devices or quantised, or it holds compiled code; else empty."""
    if hidden := why_hidden(block):
        return hidden
    unit = next((path for path, module in named_modules(block) if path and is_unit_of_fsdp(module)), None)
    if unit is not None:
        return UNIT.format(unit)
    devices = {parameter.device for parameter in named_tensors(block, "_parameters").values()}
    if any(device.type == "meta" for device in devices) or any(map(is_offloaded, modules_of(block))):
        return OFFLOADED
    quantised = next((said for path, module in named_modules(block) for said in _quantised(path, module)), "")
    if quantised:
        return QUANTISED.format(quantised)
    return SPREAD.format(", ".join(sorted(map(str, devices)))) if len(devices) > 1 else ""


def why_partitioned(model: nn.Module) -> str:
    """A sentence if ZeRO-3 has a model's parameters; else empty."""
    return PARTITIONED if any(hasattr(parameter, "ds_status") for parameter in model.parameters()) else ""


def is_elsewhere(block: nn.Module) -> bool:
    """Whether weights of the block come to where it runs for its calls only: sharded, offloaded, or on the meta device."""
    if any("_hf_hook" in vars(module) for module in modules_of(block)):
        return True
    parameters = named_tensors(block, "_parameters").values()
    # FSDP1 leaves a storage without bytes, DeepSpeed's ZeRO-3 a tensor without elements.
    freed = (type(p) is nn.Parameter and p.untyped_storage().size() == 0 for p in parameters)
    return any(p.is_meta or type(p.data).__name__ == "DTensor" for p in parameters) or any(freed)


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
    return found


# -- host code ----------------------------------------------------------------------------------------------------------

_HOOKED = (
    "{!r} has hooks, which only its own code calls; a block is rewritten if only itself and a router, for which it "
    "sets no attributes, have hooks: remove the others"
)
_UNREADABLE = (
    "the code reads {}, a {} that may change without a trace; a plain value or an object of a Python class in its place can be "
    "checked"
)
_DRAWS = (
    "the code draws random numbers from {}, of which a graph holds one draw; those of torch's default generator (torch.rand) are "
    "drawn anew in every call"
)
ASKED_FIRST = (
    "the code asks for a functools.cached_property that no call has asked for before; once one has, it is an attribute, and calls "
    "are rewritten"
)
_AUTOCAST = "the code switches autocast on by itself; around the block, or in a submodule of its own, it can stay"
_ATTRIBUTE = (
    "the code sets an attribute of a tensor ({}), which the rewritten block would not; a result that it returns or sets on its "
    "module (self.loss = loss) is kept"
)
_TENSOR_HOOKS = (
    "the code puts hooks on gradients ({}), which one run does not show at work; an autograd.Function around the "
    "experts can stay"
)
_DATA = (
    "the code puts other memory behind a tensor (tensor.data = ...), which no graph shows; what is written in place "
    "(tensor.copy_ under torch.no_grad) is seen, and in the router's module it can stay"
)
_COLLECTIVE = (
    "the code exchanges tensors with other processes ({}), which no graph shows; in the router's module, or in an "
    "autograd.Function, it can stay"
)
_NUMBER = (
    "the code sets {} to a number of its run, such as a size, which the rewritten block would not; set on its module "
    "(self.seen = x.shape[0]) it is kept"
)
_WEIGHT = (
    "the code writes to a parameter of its experts ({}), so that no two of its runs start from the same weights; other parameters "
    "that it writes to are followed, and buffers"
)
_WEIGHT_TOO = (
    "the code reads a parameter ({}) that a submodule writes to in its call, so that it matters which comes first; a block is "
    "rewritten if that submodule alone reads it"
)

_SAID = {
    RANDOM: _DRAWS,
    HOOK: _TENSOR_HOOKS,
    DATA: _DATA,
    ATTRIBUTE: _ATTRIBUTE,
    COLLECTIVE: _COLLECTIVE,
    NUMBER: _NUMBER,
}
"""By the kind of what leaves no trace."""


def refusal_of_host(block: nn.Module, captured: CapturedBlock, rewritten: RewrittenBlock) -> Refusal | None:
    """A refusal if code that the rewritten graph replaces depends on what no guard can check; else None.

    Around the block it would be replaced just as well, so that these are settled.
    """
    inside = hooked(block, rewritten.graph)
    if inside:
        return Refusal(captured.path, _HOOKED.format(inside), settled=True)
    for read in rewritten.reads:
        if isinstance(read.value, Unreadable):
            sentence = _SAID.get(read.value.kind, _UNREADABLE)
            return Refusal(captured.path, sentence.format(read, read.value.kind), read.location, settled=True)
    if captured.changed_parameters and (refusal := _of_written(captured, rewritten)):
        return refusal
    called = called_in(rewritten.graph)
    if any(on and not is_within(scope, called) for scope, on in captured.in_autocast.items()):
        return Refusal(captured.path, _AUTOCAST, settled=True)
    return None


def asks_first(captured: CapturedBlock) -> bool:
    """Whether the code asks for a cached property that nobody has asked for before."""
    values = (value for read in captured.reads for value in values_of(read))
    return any(isinstance(value, functools.cached_property) for value in values)


def depends_on_mode(captured: CapturedBlock, called: Collection[str] = ()) -> bool:
    """Whether the recorded code may do something else in train mode than in eval mode, but for that of the modules ``called``."""
    asked = any(not is_within(scope, called) for scope in captured.asks.get("mode", ()))
    modules = (module for path, module in named_modules(captured.block) if not is_within(path, called))
    return asked or any(map(_may_hide_mode, modules))


def _may_hide_mode(module: nn.Module) -> bool:
    """Whether its mode is read by code that nobody sees (TorchScript, compiled or generated code), or set by code of its own."""
    home = type(module).__module__
    generated = home.startswith("torch.") and not home.startswith("torch.nn.")
    return generated or has_own_train(module) or module._compiled_call_impl is not None


def _of_written(captured: CapturedBlock, rewritten: RewrittenBlock) -> Refusal | None:
    """Of experts' parameters that the code writes to, and of parameters that a called submodule does and the graph reads."""
    named, called = captured.named_tensors(), called_in(rewritten.graph)
    packed = {path for weight in rewritten.packed for part in weight.parts for path in part}
    read = packed | {str(node.target) for node in rewritten.graph.find_nodes(op="get_attr", sort=False)}
    memory = {memory_of(named[name]): name in packed or named[name].dim() > 2 for name in read if name in named}
    for (name, scope), place in captured.changed_parameters.items():
        of_experts, in_call = memory.get(memory_of(named[name])), is_within(scope, called)
        if of_experts or (in_call and of_experts is not None):
            return Refusal(captured.path, (_WEIGHT_TOO if in_call else _WEIGHT).format(name), place, settled=True)
    return None
