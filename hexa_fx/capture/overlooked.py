"""Modules that hold what looks like experts but whose code chooses none by index: named, each with the reason.

What looks like experts is a list of modules of equal shapes, or stacked weights, beside a router: a matrix with one row or
column for each of them. Members of a list are called experts or were given rows of the same tokens, or a module that is called
a mixture scores several slots for each. So the layers and heads of ordinary models are not named.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.compiler import is_compiling

from hexa_fx.capture.calls import user_location
from hexa_fx.ir import SourceLocation
from hexa_fx.isolation.lookup import MODULE_STATE
from hexa_fx.isolation.module_tree import inside

SOFT = (
    "nothing is chosen here: every token gets a mixture of all experts, of their outputs or of their weights (a dense or soft "
    "mixture), so there is no work to leave out"
)
THRESHOLD = (
    "no fixed number of experts is chosen for every token: a comparison decides, so that one token may get more experts than "
    "another; it is rewritten if it chooses with topk or argmax"
)
SLOTS = (
    "experts run on no tokens that chose them: each gets mixtures of all tokens (a soft mixture with slots) or rows of its own, so "
    "there is nothing to choose"
)
INTEGERS = (
    "its experts' weights are integers in buffers ({}), which have no gradient and cannot be read as matrices; a block is "
    "rewritten if its experts are floating-point parameters"
)
LOOKED_UP = (
    "the chosen ids look rows up in {} ({}): experts that are vectors make no matrix products to save, and are left as they are; "
    "where a row is all of an expert's matrices, a block is rewritten if they are parameters (experts, in, out) and its router's "
    "are matrices"
)
UNCHOSEN = (
    "nothing in torch chooses among its experts on the example: each gets a part of the rows or features by its place, or Python "
    "chooses; a block is rewritten if every token chooses, by ids in a tensor"
)
HIDDEN = (
    "its experts lie in a plain {} ({}), where torch does not see their parameters, and neither does an optimizer or a checkpoint; "
    "they may be rewritten in an nn.{}"
)
NOT_REACHED = "its experts did not run on the example: give an example that reaches them"

_MIXTURE = re.compile("expert|moe|mixture", re.IGNORECASE)
_INTEGERS = (torch.int8, torch.uint8, torch.int16, torch.int32)


@dataclass
class Runs:
    """What the run on the example showed of modules: rows that they were given, how many, which compared numbers, and where they
    were called and did so; and the first of the experts of modules that are named.
    """

    rows: dict[str, int] = field(default_factory=dict)
    some: dict[str, torch.Tensor] = field(default_factory=dict)
    comparing: dict[str, SourceLocation | None] = field(default_factory=dict)
    called: dict[str, SourceLocation | None] = field(default_factory=dict)
    experts: dict[str, str] = field(default_factory=dict)
    chosen: list[torch.Tensor] = field(default_factory=list)
    """Ids that were chosen; what is kept here keeps its memory to itself."""
    looked_up: dict[tuple[str, int], list[str]] = field(default_factory=dict)
    """Embeddings that chosen ids were looked up in, by the module around them and the ids' memory."""

    def compare(self, path: str) -> None:
        """Notes the first line at which the code of the module at ``path`` compares numbers."""
        if path not in self.comparing:
            self.comparing[path] = user_location()

    def place_of(self, path: str, reason: str) -> SourceLocation | None:
        """The line that is the reason for leaving the block at ``path``; None if there is not one."""
        if reason in (SOFT, SLOTS):
            return self.called[self.experts[path]] if path in self.experts else None
        places = self.comparing.items() if reason == THRESHOLD else ()
        return next((place for other, place in places if _inside(path, [other])), None)

    def choose(self, result: object) -> None:
        """Notes ids among the results of a choice."""
        parts = result if isinstance(result, tuple) else (result,)
        self.chosen += [part for part in parts if isinstance(part, torch.Tensor) and part.dtype == torch.int64]

    def look_up(self, path: str, ids: object) -> None:
        """Notes a look-up in the embedding at ``path``."""
        memory = {part.untyped_storage().data_ptr() for part in self.chosen}
        if isinstance(ids, torch.Tensor) and ids.untyped_storage().data_ptr() in memory:
            owner, _, name = path.rpartition(".")
            found = self.looked_up.setdefault((owner, ids.untyped_storage().data_ptr()), [])
            found += [name] * (name not in found)

    def tables(self) -> dict[str, str]:
        """Reasons by the modules in which the same chosen ids were looked up in several embeddings: one alone is a codebook."""
        several = {owner: names for (owner, _), names in self.looked_up.items() if len(names) > 1}
        return {owner: LOOKED_UP.format("nn.Embedding", ", ".join(names)) for owner, names in several.items()}

    def see(self, path: str, args: Iterable[object]) -> None:
        """Notes the first call of the module at ``path``."""
        first = next((value for value in args if isinstance(value, torch.Tensor) and value.dim() > 0), None)
        if first is None or path in self.rows:
            return
        self.called[path] = None if is_compiling() else user_location()  # as torch.cond() does
        self.rows[path] = first.numel() // max(1, first.shape[-1])
        self.some[path] = first.detach().reshape(self.rows[path], first.shape[-1])[:256, :4].clone()

    def of_same_tokens(self, paths: list[str]) -> bool:
        """Whether two of the modules were given the same row, other than one of zeros, say, as activations give to any layer."""
        some = [self.some[path] for path in paths if path in self.some and self.some[path].is_floating_point()]
        seen: set[tuple[float, ...]] = set()
        for rows in some:
            theirs = {tuple(row) for row in rows.tolist() if len(set(row)) > 1}
            if seen & theirs:
                return True
            seen |= theirs
        return False


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


def why_overlooked(model: nn.Module, path: str, runs: Runs) -> tuple[str, str] | None:
    """Path of the block around the experts at ``path`` and why it is left; None if they do not look like experts."""
    module = model.get_submodule(path)
    members = [inside(path, name) for name, _ in module.named_children()]
    is_list = isinstance(module, (nn.ModuleList, nn.ModuleDict)) or (len(members) > 1 and not runs.rows.get(path))
    owner = block = path.rpartition(".")[0] if is_list and path else path
    integers = packed_experts(module)
    while is_list and block and not integers and _holds_only(model.get_submodule(block), module):
        block = block.rpartition(".")[0]
    if integers:
        return block, INTEGERS.format(integers)
    around, count = model.get_submodule(block), len(members) if is_list else _stacked(module)
    given = [runs.rows[member] for member in members if member in runs.rows]
    if is_list and given:
        runs.experts[block] = next(member for member in members if member in runs.rows)
    slots = given[0] if is_list and len(set(given)) == 1 else 0
    is_named = not is_list or "expert" in path.rpartition(".")[2].lower()
    is_mixture = is_named or runs.of_same_tokens(members)
    if not (is_mixture and has_router(around, module, count)):
        if count < 2 or not ((is_list and is_named) or _MIXTURE.search(type(around).__name__)):
            return None
        own = 0 if slots == runs.rows.get(block) else slots
        has = has_slots(around, module, count, slots) or has_slots_of_their_own(around, module, count, own)
        if not has:
            return (owner, UNCHOSEN) if is_list and is_named and given else None
        return block, SOFT if runs.of_same_tokens(members) else SLOTS
    if not is_list:
        return block, THRESHOLD if _inside(block, runs.comparing) else SOFT
    if not given:
        return block, NOT_REACHED
    if set(given) == {runs.rows.get(block)}:
        return block, SOFT  # whatever is compared, be it inside the experts
    if len(set(given)) > 1 or _inside(block, runs.comparing):
        return block, THRESHOLD
    return block, SOFT if runs.of_same_tokens(members) else SLOTS


def owners_of_shared(model: nn.Module, suspects: Iterable[str]) -> set[str]:
    """Paths of modules that hold, under a second name, what looks like experts, as the heads of several tasks may."""
    shared = {id(model.get_submodule(path)): path for path in suspects if path}
    names = model.named_modules(remove_duplicate=False)
    return {path.rpartition(".")[0] for path, module in names if shared.get(id(module), path) != path} - {""}


def in_plain_lists(model: nn.Module, selecting: Iterable[str] | None = None) -> dict[str, str]:
    """Reasons by the modules that choose by index, by themselves or by a child, and hold modules of one kind in a list or dict.

    ``selecting``: modules whose code chooses; None for all.
    """
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


def has_slots(block: nn.Module, experts: nn.Module, count: int, rows: int) -> bool:
    """Whether the block or one of its projections scores several slots for each expert; a list's get ``rows``, a stack's 0."""
    projections = [child for child in block.children() if child is not experts and isinstance(child, nn.Linear)]
    for parameter in (p for each in (block, *projections) for p in each.parameters(recurse=False) if p.dim() >= 2):
        if parameter.dim() > 2 and parameter.shape[0] != count and count in parameter.shape:
            return True
        each = [size // count for size in parameter.shape if size > count and size % count == 0]
        if parameter.dim() == 2 and any(rows % number == 0 and (rows > 0 or experts is block) for number in each):
            return True
    return False


def has_slots_of_their_own(block: nn.Module, experts: nn.Module, count: int, rows: int) -> bool:
    """Whether the block holds vectors of slots for each of the listed experts, which get ``rows``, or makes them of tokens."""
    theirs = set(map(id, experts.parameters()))
    others = [parameter for parameter in block.parameters() if id(parameter) not in theirs]
    given = any(p.dim() == 3 and p.shape[0] == count and rows % p.shape[1] == 0 for p in others)
    return rows > 0 and (given or any(p.dim() == 2 and p.shape[0] == count * p.shape[1] for p in others))


def _holds_only(around: nn.Module, experts: nn.Module) -> bool:
    """Whether all parameters of a module around experts are theirs: the module is a part of the block."""
    theirs = set(map(id, experts.parameters()))
    return all(id(parameter) in theirs for parameter in around.parameters())


def _inside(path: str, paths: Iterable[str]) -> bool:
    return any(other == path or other.startswith(f"{path}." if path else "") for other in paths)


def innermost(found: Mapping[str, str]) -> dict[str, str]:
    """Of blocks and their reasons, those that hold no other such block."""
    return {path: why for path, why in found.items() if not any(p != path and _inside(path, [p]) for p in found)}
