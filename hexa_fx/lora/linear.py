"""PEFT's LoRA on the linear layers of listed experts, without code of the experts' own.

PEFT puts a module in the place of each linear layer, which adds low-rank products to what the layer gives. A rewritten block that
only multiplies by such layers' weights takes the factors instead, whatever is active: nothing of PEFT is imported, and what its
modules say is compared with what was noted in every call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain, repeat
from operator import attrgetter, eq, is_
from typing import Any, NamedTuple

import torch
import torch.fx
from torch import nn

from hexa_fx.contexts import items_set
from hexa_fx.ir import PackedWeight, RewrittenBlock
from hexa_fx.isolation.lookup import MISSING
from hexa_fx.isolation.module_tree import inside
from hexa_fx.isolation.read_values import IsA
from hexa_fx.lora.stacked import AdaptedReader, Addition, Low, additions, is_scale
from hexa_fx.lora.traced import DORA, KINDS, PATCHED, TracedLora, is_peft_s
from hexa_fx.ops.sources import takes_sources
from hexa_fx.runtime.attribute_guards import is_within
from hexa_fx.runtime.guards import ADAPTED, AGAIN, HOOKS, GuardMiss
from hexa_fx.runtime.listed_experts import ListedExperts
from hexa_fx.sources.adapters import View

_BASES = {"peft.tuners": "base_layer", "peft.utils": "original_module"}
_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_MULTIPLIED = (3, 5, 7)
_NOTHING = repeat(MISSING)
_forward_of = attrgetter("forward")


class _Noted:
    """What PEFT's modules say, so that it can be compared quickly."""

    def __init__(self) -> None:
        self.places: dict[tuple[int, Any], tuple[dict[Any, Any], Any, Any]] = {}
        self.lists: list[tuple[Any, Any]] = []
        self.hooks: list[Any] = []
        self.forwards: dict[Any, Any] = {}

    def see(self, where: dict[Any, Any], key: Any) -> Any:
        """What lies at a place, `MISSING` if nothing does."""
        value = where.get(key, MISSING)
        if type(value) is list and (id(where), key) not in self.places:
            self.lists.append((value, list(value)))
        self.places[id(where), key] = where, key, value
        return value

    def still_the_same(self) -> Callable[[], bool]:
        where, keys, values = zip(*self.places.values()) if self.places else ((), (), ())
        lists, copies = zip(*self.lists) if self.lists else ((), ())
        hooks, kinds, forwards = self.hooks, self.forwards.keys(), self.forwards.values()
        none = not (lists or hooks or forwards)

        def are_adapters() -> bool:
            same = all(map(eq, lists, copies)) and all(map(is_, map(_forward_of, kinds), forwards))
            return same and not any(hooks)

        def check() -> bool:
            return all(map(is_, map(dict.get, where, keys, _NOTHING), values)) and (none or are_adapters())

        return check


class LinearLora:
    """What PEFT has around the linear layers whose weights a block reads as one. Copies and pickles look anew.

    Args:
        weights: what the block reads, by name.
        multiplied: names of those that experts only multiply by.
        called: paths of submodules that the block calls, which may come to be under adapters of any kind.
    """

    def __init__(
        self, weights: Mapping[str, PackedWeight], multiplied: frozenset[str], called: frozenset[str] = frozenset()
    ) -> None:
        self.weights, self.multiplied, self.called = dict(weights), multiplied, called
        self.bases: dict[int, nn.Module] = {}
        self._same: Callable[[], bool] | None = None
        self._wrappers: list[nn.Module] = []  # alive as long as `bases` goes by their ids
        self._additions: dict[str, list[Addition]] = {}

    @classmethod
    def of(cls, *blocks: RewrittenBlock | None) -> LinearLora:
        """Of what rewritten forwards of a block read."""
        made = [block for block in blocks if block is not None]
        weights = {weight.name: weight for block in made for weight in block.packed}
        others = {name for block in made for name in _used_otherwise(block.graph, weights)}
        called = {str(node.target) for block in made for node in block.graph.find_nodes(op="call_module", sort=False)}
        reads = [read for block in made for read in block.reads if isinstance(read.value, IsA)]
        under = {str(read) for read in reads if _origin(read.value.kind) in _BASES}  # when they were recorded
        return cls(weights, frozenset(weights) - others, frozenset(called - weights.keys() - under))

    def reaches(self, path: str) -> bool:
        """Whether adapters of the linear layer at ``path`` take effect, whatever is active."""
        owners = {
            name: {part.rpartition(".")[0] for each in w.parts for part in each} for name, w in self.weights.items()
        }
        reading = [
            name
            for name, paths in owners.items()
            if path in paths and self.weights[name].parts[0][0].endswith(".weight")
        ]
        return (bool(reading) and self.multiplied.issuperset(reading)) or is_within(path, self.called)

    def __reduce__(self) -> tuple[type, tuple[Any, ...]]:
        return type(self), (self.weights, self.multiplied, self.called)

    def __bool__(self) -> bool:
        return len(self._additions) > 0

    def changed(self, block: nn.Module) -> bool:
        """Looks whether other layers lie under PEFT's modules than at the last look, and what these say.

        Raises:
            GuardMiss: one of them does something else than add low-rank products.
        """
        if self._same is not None and self._same():
            return False
        self._same, self._additions = None, {}
        noted, bases, wrappers = _Noted(), dict[int, nn.Module](), list[nn.Module]()
        found: dict[str, list[Addition]] = {}
        for path in self.called:
            module = _at(block, path, noted)
            base = None if module is None else module._modules.get(_BASES.get(_origin(type(module)), ""))
            if module is not None and base is not None:
                bases[id(module)] = base
                wrappers.append(module)
        for name, weight in self.weights.items():
            parts = [[_under(block, path, noted) for path in part] for part in weight.parts]
            under = [layer for part in parts for layer in part if layer.base is not None]
            bases |= {id(layer.module): layer.base for layer in under if layer.base is not None}
            wrappers += [layer.module for layer in under]
            if any(layer.low for layer in under) and weight.parts[0][0].endswith(".weight"):
                rows: list[Any] = [(part[0].base or part[0].module).out_features for part in parts]
                if name not in self.multiplied:
                    raise GuardMiss("the block does more with weights under adapters than multiply by them")
                found[name] = list(additions(block, [[layer.low for layer in part] for part in parts], rows))
        changed, self.bases, self._wrappers = bases != self.bases, bases, wrappers
        self._same, self._additions = noted.still_the_same(), found
        return changed

    def factors(self) -> list[ListedExperts]:
        """The readers of stacked factors."""
        both = ((addition.a, addition.b) for addition in chain.from_iterable(self._additions.values()))
        return [factor for factor in chain.from_iterable(both) if isinstance(factor, ListedExperts)]

    def traced(self, block: nn.Module) -> TracedLora:
        """What is active while a compiler traces a call."""
        return TracedLora(block, self.weights, self.multiplied)

    def seen_from(self, module: Any) -> Any:
        """``module`` as a rewritten graph reads it: its stacked weights with what is active on them."""
        return View(
            module, {name: AdaptedReader(getattr(module, name), each) for name, each in self._additions.items()}
        )


@contextmanager
def taken_off(block: nn.Module) -> Iterator[frozenset[str]]:
    """A context in which the linear layers below a block are under no LoRA that could be handed over at run time.

    Yields their paths: none if one of PEFT's modules does more in some mode than add low-rank products.
    """
    found = [
        (inside(path, name), owner._modules, name, child)
        for path, owner in block.named_modules(remove_duplicate=False)
        for name, child in owner._modules.items()
        if child is not None and _is_lora(child)
    ]
    try:
        if any(_under(block, f"{path}.weight", _Noted()).drops for path, *_ in found):
            found = []
    except GuardMiss:
        found = []
    with items_set((listed, name, wrapper._modules["base_layer"]) for _, listed, name, wrapper in found):
        yield frozenset(path for path, *_ in found)


class _Layer(NamedTuple):
    """What lies in the place of a linear layer: the layer, or PEFT's module around ``base`` with adapters that are active."""

    path: str
    module: nn.Module
    base: nn.Module | None = None
    low: Sequence[Low] = ()

    @property
    def drops(self) -> bool:
        """Whether dropouts drop numbers in training."""
        listed: Any = self.module.lora_dropout
        return any(getattr(dropout, "p", 0) for dropout in listed.children())


def _at(block: nn.Module, path: str, noted: _Noted) -> nn.Module | None:
    above, _, key = path.rpartition(".")
    try:
        found = noted.see(block.get_submodule(above)._modules, key)
    except AttributeError:
        return None
    return found if isinstance(found, nn.Module) else None


def _is_lora(module: nn.Module) -> bool:
    return (type(module).__module__, type(module).__name__) in KINDS


def _origin(kind: type) -> str:
    return ".".join(kind.__module__.split(".")[:2])


def _under(block: nn.Module, path: str, noted: _Noted) -> _Layer:
    owner = path.rpartition(".")[0]
    module = _at(block, owner, noted) if owner else block
    if module is None:
        raise GuardMiss(f"there is no longer a submodule {owner!r}; {AGAIN}")
    if not _is_lora(module):
        return _Layer(owner, module)
    kind: Any = type(module)
    noted.forwards[kind] = kind.forward
    if not is_peft_s(kind.__module__, kind.__name__):
        raise GuardMiss(PATCHED)
    base = noted.see(module._modules, "base_layer")
    return _Layer(owner, module, base, _active(module, owner, noted))


def _active(wrapper: Any, path: str, noted: _Noted) -> list[Low]:
    own = vars(wrapper)
    _check_own(wrapper, path, noted)
    names, disabled, merged = (
        noted.see(own, key) for key in ("_active_adapter", "_disable_adapters", "merged_adapters")
    )
    if disabled and merged:
        raise GuardMiss(f"adapters that are merged into {path!r} were disabled; its own code takes them out")
    if disabled or merged:
        return []
    listed, low = wrapper.lora_A._modules, []
    for name in [names] if isinstance(names, str) else names:
        if noted.see(listed, name) is not MISSING:
            low.append(_low(wrapper, path, name, noted))
    return low


def _check_own(module: nn.Module, path: str, noted: _Noted) -> None:
    hooks = [getattr(module, kind) for kind in HOOKS]
    noted.hooks += hooks
    if noted.see(vars(module), "forward") is not MISSING or any(hooks):
        raise GuardMiss(f"PEFT's {path!r} has a forward or hooks of its own, which only the block's own code runs")


def _low(wrapper: Any, path: str, name: str, noted: _Noted) -> Low:
    a, b = wrapper.lora_A._modules[name], noted.see(wrapper.lora_B._modules, name)
    scale, variant = (noted.see(noted.see(vars(wrapper), held), name) for held in ("scaling", "lora_variant"))
    dropout = noted.see(wrapper.lora_dropout._modules, name)
    norms = _norms_of(wrapper, name, variant, noted)
    plain = (variant is MISSING or norms is not None) and type(a) is type(b) is nn.Linear
    plain &= is_scale(scale)
    plain &= noted.see(vars(wrapper), "cast_input_dtype_enabled") is not False and not vars(wrapper).get(
        "fan_in_fan_out"
    )
    for linear in (a, b) if plain else ():
        plain &= noted.see(linear._parameters, "bias") is None and linear.weight.dtype in _DTYPES
    if not plain:
        raise GuardMiss(
            f"adapter {name!r} of {path!r} is no plain LoRA (a bias, another dtype or kind of layer, such as Conv1D); {ADAPTED}"
        )
    for called in (a, b, dropout, *([] if norms is None else [norms])):
        _check_own(called, path, noted)
    if type(dropout) is not nn.Identity:
        idle = type(dropout) is nn.Dropout and not (
            noted.see(vars(dropout), "training") and noted.see(vars(dropout), "p")
        )
        if not idle or (norms is not None and noted.see(vars(wrapper), "training")):
            raise GuardMiss(
                f"adapter {name!r} of {path!r} drops numbers in training, which is no low-rank product: adapters that are there "
                f"when the model is optimized may; {AGAIN}"
            )
    return Low(path, name, a, b, scale, norms)


def _norms_of(wrapper: Any, name: str, variant: Any, noted: _Noted) -> Any:
    """The module of an adapter's norms if it is DoRA."""
    if (type(variant).__module__, type(variant).__name__) != DORA:
        return None
    found = noted.see(wrapper.lora_magnitude_vector._modules, name)
    return None if found is MISSING else found


def _used_otherwise(graph: torch.fx.Graph, weights: Mapping[str, PackedWeight]) -> Iterator[str]:
    """Names of stacked weights that a graph does more with than have experts multiply by them."""
    for node in graph.find_nodes(op="call_module", sort=False):
        if node.target in weights and any(not _multiplies(user, node) for user in node.users):
            yield str(node.target)


def _multiplies(user: torch.fx.Node, weight: torch.fx.Node) -> bool:
    places = [place for place, value in enumerate(user.args) if value is weight]
    return takes_sources(user.target) and all(place in _MULTIPLIED for place in places)
