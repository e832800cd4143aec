"""Refusals of what a rewritten block could not notice at run time: hooks, values that leave no trace, autocast of its own."""

from __future__ import annotations

from collections.abc import Collection

from torch import nn
from torch.utils._pytree import tree_leaves

from hexa_fx.capture import CapturedBlock
from hexa_fx.capture.records import memory_of
from hexa_fx.ir import Refusal, RewrittenBlock
from hexa_fx.isolation.module_tree import named_modules
from hexa_fx.isolation.purity import ATTRIBUTE, DATA, HOOK, PAST, RANDOM, SWITCH, WEIGHT
from hexa_fx.isolation.read_values import Unreadable
from hexa_fx.isolation.torch_state import has_own_train
from hexa_fx.runtime.attribute_guards import called_in, hooked, is_within

_HOOKED = (
    "{!r} has hooks, which only its own code calls; a block is rewritten if only itself and its router have hooks: remove "
    "the others"
)
_UNREADABLE = (
    "the code reads {}, a {} that may change without a trace; a plain value or an object of a Python class in its place can be "
    "checked"
)
_DRAWS = (
    "the code draws random numbers from {}, of which a graph holds one draw; those of torch's default generator (torch.rand) are "
    "drawn anew in every call"
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
_PAST = (
    "the code asks what was done with a tensor before ({}), which no graph shows; what it asks of shapes, dtypes and requires_grad "
    "is checked in every call, and in the router's module it can stay"
)
_DATA = (
    "the code puts other memory behind a tensor (tensor.data = ..., tensor.set_), which no graph shows; what is written in place "
    "(tensor.copy_ under torch.no_grad) is seen, and in the router's module it can stay"
)
_WEIGHT = (
    "the code writes to a parameter ({}), so that no two of its runs start from the same weights; a buffer that it writes to is "
    "followed, and in the router's module it can stay"
)
_WEIGHT_TOO = (
    "the code reads a parameter ({}) that a submodule writes to in its call, so that it matters which comes first; a block is "
    "rewritten if that submodule alone reads it"
)
_SWITCHED = (
    "the code switches what holds for all code after it ({}), which the rewritten block would not; around the block, or for a part "
    "of it in a context (with torch.no_grad():), it can stay"
)
_IDENTITY = (
    "the code compares two of its variables by `is`, and which of the arguments, or of what a submodule gives, are one tensor no "
    "graph shows; an argument that is None, or a flag, can be asked for"
)

_SAID = {
    RANDOM: _DRAWS,
    HOOK: _TENSOR_HOOKS,
    DATA: _DATA,
    ATTRIBUTE: _ATTRIBUTE,
    WEIGHT: _WEIGHT,
    PAST: _PAST,
    SWITCH: _SWITCHED,
}
"""By the kind of what leaves no trace."""


def refusal_of_host(block: nn.Module, captured: CapturedBlock, rewritten: RewrittenBlock) -> Refusal | None:
    """A refusal if code that the rewritten graph replaces depends on what no guard can check; else None.

    Around the block it would be replaced just as well, so that these are settled, but for what depends on the arguments.
    """
    inside = hooked(block, rewritten.graph)
    if inside:
        return Refusal(captured.path, _HOOKED.format(inside), settled=True)
    for read in rewritten.reads:
        if isinstance(read.value, Unreadable):
            sentence = _SAID.get(read.value.kind, _UNREADABLE)
            name = read.steps[0] if read.value.kind == WEIGHT else read
            return Refusal(captured.path, sentence.format(name, read.value.kind), read.location, settled=True)
    if captured.changed_parameters and (written := _read_and_written(captured, rewritten)):
        return Refusal(captured.path, _WEIGHT_TOO.format(written), settled=True)
    called = called_in(rewritten.graph)
    given = [tree_leaves(call.output) for call in captured.calls if call.path in called]
    given.append(captured.graph.find_nodes(op="placeholder", sort=False))
    several = any(len(tensors) > 1 for tensors in given)
    if several and any(not is_within(scope, called) for scope in captured.asks.get("identity", ())):
        return Refusal(captured.path, _IDENTITY)
    if any(on and not is_within(scope, called) for scope, on in captured.in_autocast.items()):
        return Refusal(captured.path, _AUTOCAST, settled=True)
    return None


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


def _read_and_written(captured: CapturedBlock, rewritten: RewrittenBlock) -> str:
    """Name of a parameter that a called submodule writes to and the rewritten graph reads; empty if there is none."""
    read = {str(node.target) for node in rewritten.graph.find_nodes(op="get_attr", sort=False)}
    read |= {path for weight in rewritten.packed for part in weight.parts for path in part}
    named = captured.named_tensors()
    memory = {memory_of(named[name]) for name in read if name in named}
    return next((name for name in captured.changed_parameters if memory_of(named[name]) in memory), "")
