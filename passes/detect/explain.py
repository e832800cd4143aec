"""Says why a block is refused where its parameters and modules tell more than the detection step that gave up."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator, Mapping
from typing import Any, TypeAlias

from torch import nn
from torch.fx import Node

from hexa_fx.capture import CapturedBlock
from hexa_fx.capture.overlooked import UNCHOSEN
from hexa_fx.isolation.module_tree import inside
from hexa_fx.operations import operation
from hexa_fx.passes.detect.combine import APART
from hexa_fx.passes.detect.free import INSIDE
from hexa_fx.passes.detect.graph import is_float
from hexa_fx.passes.detect.projections import MIXED
from hexa_fx.passes.detect.rules import given_inside
from hexa_fx.passes.detect.several import chooses
from hexa_fx.passes.detect.tags import ExpertGroups, Tag, expert_groups, shared_by_some, uneven_experts
from hexa_fx.passes.detect.verdict import NoRouting, Refuse
from hexa_fx.runtime.guards import HOOKS
from hexa_fx.torch_private import _ConvNd

_Kinds: TypeAlias = dict[str, Hashable]
"""What the modules of one expert are, by path in it, and its settings, by path and name."""

_NONE = (
    "no matrix product with the weights of single experts was seen; experts are like modules in a list or a dictionary, or "
    "parameters with the experts as their first dimension, and their layers are matrix products"
)
_ONE = "it has one expert, which is given every token: a plain layer, for which there is nothing to sort"
_CONVOLUTION = (
    "its experts are convolutions ({}); only experts of matrix products are rewritten, as those of nn.Linear on channels that come "
    "last, which a 1x1 convolution is too"
)


def explained(captured: CapturedBlock, refusal: Refuse) -> Refuse:
    """The refusal with a reason that the parameters give, if they do, and the code chooses anything at all."""
    block, parameters, apart = captured.block, captured.named_tensors(), refusal.reason == APART
    groups = expert_groups(parameters)
    stacked = [parameter for parameter in parameters.values() if parameter.dim() > 2]
    if stacked and not groups.members and all(len(parameter) == 1 for parameter in stacked):
        return Refuse(_ONE, refusal.node)
    odd = odd_expert(block) or _in_groups(block)
    if (odd or apart) and not chooses(captured):
        return Refuse(UNCHOSEN, refusal.node)
    if (given := given_inside(captured)) is not None:
        return given
    odd = (odd if refusal.reason != INSIDE else "") or _hooks_on_experts(block, groups)
    uneven = _uneven(captured) if refusal.reason == MIXED else None
    known = shared_by_some(parameters) or uneven or (f"{odd} ({refusal.reason})" if odd else None)
    elsewhere = isinstance(refusal, NoRouting) and not known and not chooses(captured)
    return Refuse(known or refusal.reason, refusal.node, elsewhere)


def _uneven(captured: CapturedBlock) -> str | None:
    in_turn = {path for path, module in captured.block.named_modules() if isinstance(module, nn.Sequential)}
    return uneven_experts(captured.named_tensors(), in_turn)


def _hooks_on_experts(block: nn.Module, groups: ExpertGroups) -> str:
    """A hook may change what an expert is given and gives, so that its own code is not all that was recorded."""
    names = [name for members in groups.members.values() for name in members]
    for path, module in block.named_modules():
        has_experts = path and any(name.startswith(f"{path}.") for name in names)
        if has_experts and any(getattr(module, hooks) for hooks in HOOKS):
            return f"{path!r} has hooks, which only its own code calls; remove them to have the block rewritten"
    return ""


# -- no product --------------------------------------------------------------------------------------------------------


def without_products(captured: CapturedBlock, tags: Mapping[Node, Tag]) -> Refuse:
    """The refusal of a block in which no product reads experts' weights."""
    uneven = _uneven(captured)
    node = next(_readers(captured, tags), None)
    if uneven or node is None:
        return Refuse(uneven or _NONE)
    name = operation(node)
    if name.startswith("conv"):
        return Refuse(_CONVOLUTION.format(name), node)
    return Refuse(f"{_NONE} (here {name} reads them first)", node)


def _readers(captured: CapturedBlock, tags: Mapping[Node, Tag]) -> Iterator[Node]:
    """Operations on experts' weights and something else, in order."""
    for node in captured.graph.nodes:
        if node.op == "output" or tags[node].weight or not is_float(node):
            continue
        read = [tags[n] for n in node.all_input_nodes if tags[n].weight]
        stacked = (captured.tensor_of(base) for each in read for base in each.bases if "{}" not in base)
        if any(each.experts for each in read) or any(parameter.dim() >= 3 for parameter in stacked):
            yield node


# -- an expert unlike the others ---------------------------------------------------------------------------------------


def odd_expert(block: nn.Module) -> str:
    """A sentence about the first expert that is not of the kind of most; empty if all are of one kind."""
    for paths in _experts(block):
        for kinds_of in (_classes, _settings):
            kinds = {path: kinds_of(block.get_submodule(path)) for path in paths}
            said = _odd(kinds, kinds_of is _settings)
            if said:
                return f"{said}; only experts that compute the same are rewritten"
    return ""


def _in_groups(block: nn.Module) -> str:
    """A sentence if experts lie in lists of lists, or in parameters with two dimensions of experts; else empty.

    One such parameter alone may be a router's keys.
    """
    where = ""
    for path, module in block.named_modules():
        lists = isinstance(module, nn.ModuleList) and len(module) > 1
        if lists and all(isinstance(child, nn.ModuleList) for child in module):
            where = f"{path} is a list of lists"
        if not isinstance(module, _ConvNd):
            wide = [(name, p.shape[:2]) for name, p in module.named_parameters(recurse=False) if p.dim() == 4]
            alike = Counter(shape for _, shape in wide)
            several = (inside(path, name) for name, shape in wide if alike[shape] > 1)
            where = next((f"{name} has four dimensions" for name in several), where)
    if not where:
        return ""
    return f"experts lie in groups here ({where}); they are rewritten if each group, with its router, is a module of its own"


def _experts(block: nn.Module) -> Iterator[tuple[str, ...]]:
    """The paths of the modules that hold one expert each; of a list, of all its modules, whatever their parameters are called."""
    found = set()
    for pattern, names in expert_groups(dict(block.named_parameters(remove_duplicate=False))).members.items():
        depth = next(place for place, part in enumerate(pattern.split(".")) if "{}" in part) + 1
        found.add(tuple(".".join(name.split(".")[:depth]) for name in names))
    modules = dict(block.named_modules(remove_duplicate=False))
    for parts in [path.split(".") for paths in found for path in paths]:
        above = [".".join(parts[:depth]) for depth in range(len(parts))]
        lists = (path for path in above if isinstance(modules.get(path), nn.ModuleList))
        found |= {tuple(inside(path, name) for name in modules[path]._modules) for path in lists}
    yield from (paths for paths in sorted(found) if all(path in modules for path in paths))


def _odd(kinds: Mapping[str, _Kinds], if_most_agree: bool) -> str:
    """Where an expert differs. Settings count ``if_most_agree``: one that differs in all of them is a name or a number of each."""
    for key in dict.fromkeys(key for of_one in kinds.values() for key in of_one):
        values = {path: of_one.get(key) for path, of_one in kinds.items()}
        usual, count = Counter(values.values()).most_common(1)[0]
        odd = next((path for path, value in values.items() if value != usual), None)
        most = 2 * count > len(values)
        if odd is not None and (most or not if_most_agree):
            place = f"{odd}.{key}".rstrip(".")
            usually = "nothing" if usual is None else usual
            if values[odd] is None:
                return f"there is no {place}, but {usual} in other experts"
            if most:
                return f"{place} is {values[odd]}, where other experts have {usually}"
            first = next(path for path, value in values.items() if value == usual)
            return f"{place} is {values[odd]}, where {first} has {usually}"
    return ""


def _classes(expert: nn.Module) -> _Kinds:
    return {path: type(module).__name__ for path, module in expert.named_modules()}


def _settings(expert: nn.Module) -> _Kinds:
    return {
        inside(path, name): value.__name__ if _is_function(value) else repr(value)
        for path, module in expert.named_modules()
        for name, value in vars(module).items()
        if name != "training" and (isinstance(value, (bool, int, float, str)) or _is_function(value))
    }


def _is_function(value: Any) -> bool:
    return callable(value) and hasattr(value, "__name__")
