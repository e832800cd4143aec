"""What a block's modules say about experts that cannot be rewritten: one is built otherwise, or they lie in several lists."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator, Mapping
from typing import Any, TypeAlias

from torch import nn

from hexa_fx.passes.detect.tags import expert_groups
from hexa_fx.torch_private import _ConvNd

_Kinds: TypeAlias = dict[str, Hashable]
"""What the modules of one expert are, by path in it, and its settings, by path and name."""


def odd_expert(block: nn.Module) -> str:
    """A sentence about the first expert that is not of the kind of most; empty if all are of one kind."""
    for paths in _experts(block):
        for kinds_of in (_classes, _settings):
            kinds = {path: kinds_of(block.get_submodule(path)) for path in paths}
            said = _odd(kinds, kinds_of is _settings)
            if said:
                return f"{said}; only experts that compute the same are rewritten"
    return ""


def experts_in_groups(block: nn.Module) -> str:
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
            several = (f"{path}.{name}".lstrip(".") for name, shape in wide if alike[shape] > 1)
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
        found |= {tuple(f"{path}.{name}".lstrip(".") for name in modules[path]._modules) for path in lists}
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
        f"{path}.{name}".lstrip("."): _shown(value)
        for path, module in expert.named_modules()
        for name, value in vars(module).items()
        if name != "training" and (isinstance(value, (bool, int, float, str)) or _is_function(value))
    }


def _is_function(value: Any) -> bool:
    return callable(value) and hasattr(value, "__name__")


def _shown(value: Any) -> str:
    return value.__name__ if _is_function(value) else repr(value)
