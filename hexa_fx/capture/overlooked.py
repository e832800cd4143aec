"""Modules that hold what looks like experts but whose code chooses none by index: named, each with the reason.

What looks like experts is a list of modules of equal shapes that is called so, or stacked weights beside a router: a matrix with
one row or column for each of them. So the layers and heads of ordinary models are not named.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

import torch
from torch import nn

from hexa_fx.ir import SourceLocation
from hexa_fx.isolation.lookup import MODULE_STATE
from hexa_fx.isolation.module_tree import inside

UNCHOSEN = (
    "nothing in torch chooses among its experts by an index: every token gets a mixture of all of them (a dense or soft mixture), "
    "a comparison decides how many it gets, Python chooses for all tokens alike (by a key, perhaps), or each expert is given slots "
    "or rows by their place; a block is rewritten if topk or argmax chooses as many for every token"
)
INTEGERS = (
    "its experts' weights are integers in buffers ({}), which have no gradient and cannot be read as matrices; a block is "
    "rewritten if its experts are floating-point parameters"
)
HIDDEN = (
    "its experts lie in a plain {} ({}), where torch does not see their parameters, and neither does an optimizer or a checkpoint; "
    "they may be rewritten in an nn.{}"
)
NOT_REACHED = "its experts did not run on the example: give an example that reaches them"

_INTEGERS = (torch.int8, torch.uint8, torch.int16, torch.int32)


def packed_experts(module: nn.Module) -> str:
    """Names and types of buffers of integers that look like experts' weights; empty if there are none."""
    own = [(name, buffer) for name, buffer in module.named_buffers() if buffer.dtype in _INTEGERS]
    if not own:
        return ""
    children = list(module.children())
    stacked = [(name, b) for name, b in own if b.dim() >= 3 and "." not in name]
    listed = [(name, b) for name, b in own if b.dim() >= 2] if _are_alike(children) else []
    return ", ".join(f"{name}: {str(b.dtype).removeprefix('torch.')}" for name, b in (stacked or listed)[:2])


def _are_alike(children: list[nn.Module]) -> bool:
    shapes = {tuple((n, tuple(b.shape)) for n, b in child.named_buffers()) for child in children}
    return len(children) > 1 and len(shapes) == 1 and shapes != {()}


def why_overlooked(
    model: nn.Module, path: str, called: Mapping[str, SourceLocation | None]
) -> tuple[str, str, SourceLocation | None] | None:
    """Path of the block around the experts at ``path``, why it is left, and where, if that is one line; None if they do not look
    like experts. ``called``: modules that ran, and where they were called first."""
    module = model.get_submodule(path)
    members = [inside(path, name) for name, _ in module.named_children()]
    is_list = isinstance(module, (nn.ModuleList, nn.ModuleDict)) or (len(members) > 1 and path not in called)
    owner = block = path.rpartition(".")[0] if is_list and path else path
    integers = packed_experts(module)
    theirs = set(map(id, module.parameters()))
    while is_list and block and not integers and theirs.issuperset(map(id, model.get_submodule(block).parameters())):
        block = block.rpartition(".")[0]  # which holds nothing else: the experts are a part of another block
    if integers:
        return block, INTEGERS.format(integers), None
    ran = next((member for member in members if member in called), "")
    routed = has_router(model.get_submodule(block), module, len(members) if is_list else _stacked(module))
    if not is_list:
        return (block, UNCHOSEN, None) if routed else None
    if "expert" not in path.rpartition(".")[2].lower() or not (ran or routed):
        return None
    return (block if routed else owner), UNCHOSEN if ran else NOT_REACHED, called[ran] if ran else None


def owners_of_shared(model: nn.Module, suspects: Iterable[str]) -> set[str]:
    """Paths of modules that hold, under a second name, what looks like experts, as the heads of several tasks may."""
    shared = {id(model.get_submodule(path)): path for path in suspects if path}
    names = model.named_modules(remove_duplicate=False)
    return {path.rpartition(".")[0] for path, module in names if shared.get(id(module), path) != path} - {""}


def in_plain_lists(model: nn.Module, selecting: Iterable[str] | None = None) -> dict[str, str]:
    """Reasons by the modules that hold modules of one kind in a list or dict, and choose by index, by themselves or by a child: are
    or hold one of those that are ``selecting``, unless that is None."""
    found: dict[str, str] = {}
    known = set(map(id, model.modules()))
    choose = None if selecting is None else {path for each in selecting for path in (each, each.rpartition(".")[0])}
    for path, module in model.named_modules():
        for name, held in vars(module).items() if choose is None or path in choose else ():
            if name in MODULE_STATE or type(held) not in (list, tuple, dict) or len(held) < 2:
                continue
            members = list(held.values()) if type(held) is dict else held
            alike = len(set(map(type, members))) == 1 and isinstance(members[0], nn.Module)
            if alike and known.isdisjoint(map(id, members)) and any(p.dim() > 1 for p in members[0].parameters()):
                kind = "ModuleDict" if type(held) is dict else "ModuleList"
                found[path] = HIDDEN.format(type(held).__name__, name, kind)
    return found


def _stacked(module: nn.Module) -> int:
    """How many experts are stacked in parameters of the module, by their first dimensions."""
    firsts = Counter(p.shape[0] for p in module.parameters(recurse=False) if p.dim() >= 3)
    number, times = max(firsts.items(), key=lambda item: item[1], default=(0, 0))
    return number if times > 1 else 0


def has_router(block: nn.Module, experts: nn.Module, count: int) -> bool:
    """Whether the block holds, beside its experts, a parameter with a dimension that counts them."""
    theirs = {id(p) for p in experts.parameters() if experts is not block or p.dim() > 2}
    own = [p for p in block.parameters() if id(p) not in theirs and p.dim() >= 2]
    return count > 1 and any(count in parameter.shape for parameter in own)
