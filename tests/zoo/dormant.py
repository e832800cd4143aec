"""Mutants of a second family: features that do nothing on the example, put at random places of the zoo's source code.

A clamp that the example stays within, a scale of 1, a mask of ones, a branch on a size, a submodule in eval mode: one run shows
nothing of them. Each comes with the way to wake it, and mutants are judged awake.
"""

import ast
import os
import random
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from tests.zoo import mutate
from tests.zoo.registry import VARIANTS
from tests.zoo.variant import Variant

_VARIABLE = "HEXA_FX_TESTS_DORMANT"
SETTINGS = types.SimpleNamespace(scale=1.0)
"""A global that mutants read."""


@dataclass(frozen=True)
class Feature:
    """Something that does nothing until it is woken.

    Args:
        code: in place of an expression, whose value is ``v``.
        prepare: gives a module what the code reads.
        wake: of such a module.
        scale: factor on the inputs that wakes it.
        kind: of values to which it applies: floats, or lists of places.
        poison: what to put into a token or an expert's weight.
        outside: wakes (True) and undoes (False) what lies outside of the model.
        dtype: in which the whole model wakes.
    """

    code: str
    prepare: Callable[[nn.Module], None] = lambda module: None
    wake: Callable[[nn.Module], None] = lambda module: None
    scale: float = 1.0
    kind: str = "float"
    poison: float = 0.0
    outside: Callable[[bool], None] = lambda awake: None
    dtype: torch.dtype | None = None


@dataclass(frozen=True)
class Dormant:
    """A variant with a feature, by what was changed."""

    variant: Variant
    feature: Feature
    owner: str
    masked: str
    what: str


def _set(name: str, make: Callable[[nn.Module], Any]) -> Callable[[nn.Module], None]:
    return lambda module: setattr(module, name, make(module))


def _buffer(value: Any, persistent: bool = True) -> Callable[[nn.Module], None]:
    def prepare(module: nn.Module) -> None:
        module.register_buffer("dormant", value if value is None else torch.tensor(value), persistent=persistent)

    return prepare


def _fill(value: Any) -> Callable[[nn.Module], None]:
    return lambda module: module.dormant.fill_(value) and None


def _give(value: Any) -> Callable[[nn.Module], None]:
    def wake(module: nn.Module) -> None:
        like = next(module.parameters(), torch.zeros(()))
        module.dormant = torch.tensor(value, dtype=like.dtype)

    return wake


def _environment(awake: bool) -> None:
    os.environ[_VARIABLE] = "0.5" if awake else "1"


def _global(awake: bool) -> None:
    SETTINGS.scale = 0.5 if awake else 1.0


def _default_dtype(awake: bool) -> None:
    torch.set_default_dtype(torch.float64 if awake else torch.float32)


_environment(False)

FEATURES: dict[str, Feature] = {
    "clamp": Feature("v.clamp(-70, 70)", scale=1e3),
    "cap": Feature("torch.minimum(v, torch.full_like(v, 70.0))", scale=1e3),
    "hardtanh": Feature("F.hardtanh(v, -70.0, 70.0)", scale=1e3),
    "threshold": Feature("F.threshold(v, -70.0, -70.0)", scale=1e3),
    "where": Feature("torch.where(v.abs() > 70, v.sign() * 70, v)", scale=1e3),
    "norm bound": Feature("v * (70 / v.norm(dim=-1, keepdim=True).clamp(min=70))", scale=1e3),
    "far clamp": Feature("v.clamp(-65504, 65504)", scale=1e7),
    "small to zero": Feature("F.hardshrink(v, 1e-9)", scale=1e-9),
    "buffer": Feature("v * self.dormant", _buffer(1.0), _fill(0.5)),
    "buffer of zero": Feature("v + self.dormant", _buffer(0.0), _fill(0.5)),
    "buffer beside the state": Feature("v * self.dormant", _buffer(1.0, False), _fill(0.5)),
    "switch": Feature("torch.where(self.dormant, v, 0.5 * v)", _buffer(True), _fill(False)),
    "step": Feature("v if self.dormant < 5 else 0.5 * v", _buffer(0), _fill(7)),
    "soft step": Feature("v * torch.where(self.dormant < 5, 1.0, 0.5)", _buffer(0), _fill(7)),
    "no buffer": Feature("v if self.dormant is None else v * self.dormant", _buffer(None), _give(0.5)),
    "plain tensor": Feature("v * self.dormant", _set("dormant", lambda m: torch.ones(())), _fill(0.5)),
    "other tensor": Feature("v * self.dormant", _set("dormant", lambda m: torch.ones(())), _give(0.5)),
    "None": Feature("v if self.dormant is None else v * self.dormant", _set("dormant", lambda m: None), _give(0.5)),
    "getattr": Feature("v * getattr(self, 'dormant', 1.0)", wake=_set("dormant", lambda m: 0.5)),
    "hasattr": Feature("v * self.dormant if hasattr(self, 'dormant') else v", wake=_set("dormant", lambda m: 0.5)),
    "number": Feature("v * self.dormant", _set("dormant", lambda m: 1.0), _set("dormant", lambda m: 0.5)),
    "in a list": Feature(
        "v * self.dormant[0]", _set("dormant", lambda m: [1.0]), lambda m: m.dormant.__setitem__(0, 0.5)
    ),
    "in a dict": Feature(
        "v * self.dormant.get('scale', 1.0)", _set("dormant", lambda m: {}), lambda m: m.dormant.update(scale=0.5)
    ),
    "config": Feature(
        "v * self.dormant.scale",
        _set("dormant", lambda m: types.SimpleNamespace(scale=1.0)),
        lambda m: setattr(m.dormant, "scale", 0.5),
    ),
    "numpy": Feature(
        "v * float(self.dormant[0])", _set("dormant", lambda m: np.ones(1)), lambda m: m.dormant.fill(0.5)
    ),
    "numpy scalar": Feature(
        "v * self.dormant", _set("dormant", lambda m: np.float64(1)), _set("dormant", lambda m: np.float64(0.5))
    ),
    "function": Feature("self.dormant(v)", _set("dormant", lambda m: _same), _set("dormant", lambda m: _half)),
    "dropout": Feature(
        "self.dormant(v)", _set("dormant", lambda m: nn.Dropout(0.5)), lambda m: m.dormant.train() and None
    ),
    "identity": Feature(
        "self.dormant(v)", _set("dormant", lambda m: nn.Identity()), _set("dormant", lambda m: nn.Tanh())
    ),
    "environment": Feature(f"v * float(os.environ.get({_VARIABLE!r}, '1'))", outside=_environment),
    "global": Feature("v * SETTINGS.scale", outside=_global),
    "default dtype": Feature("v if torch.get_default_dtype() == torch.float32 else v * 0.5", outside=_default_dtype),
    "large": Feature("v if v.shape[0] < 25 else 0.5 * v"),
    "one size": Feature("0.5 * v if v.shape[0] == 15 else v"),
    "odd": Feature("0.5 * v if v.numel() % 2 else v"),
    "one token": Feature("0.5 * v if v.shape[0] == 1 else v"),
    "float32": Feature("0.5 * v if v.dtype == torch.float32 else v", dtype=torch.float32),
    "nan_to_num": Feature("torch.nan_to_num(v)", poison=float("nan")),
    "isnan": Feature("v.masked_fill(v.isnan(), 0.25)", poison=float("nan")),
    "if isnan": Feature("torch.nan_to_num(v) if torch.isnan(v).any() else v", poison=float("nan")),
    "infinite": Feature("torch.nan_to_num(v, posinf=9.0, neginf=-9.0)", poison=float("inf")),
    "capacity": Feature("v[:24]", kind="places"),
    "places in range": Feature("v[v < 20]", kind="places"),
    "mask": Feature("v * dormant.to(v.dtype).view(*v.shape[:-1], 1)", kind="masked"),
    "filled": Feature("v.masked_fill(~dormant.bool().view(*v.shape[:-1], 1), 0.25)", kind="masked"),
    "no id": Feature("v.masked_fill(~dormant.bool().view(*v.shape[:-1], 1), -1)", kind="masked ids"),
}

_APPLIES = {
    "float": "v.is_floating_point()",
    "places": "v.dtype == torch.long and v.dim() == 1",
    "masked": "v.is_floating_point() and v.dim() > 1 and v.numel() // v.shape[-1] == dormant.numel()",
    "masked ids": "v.dtype == torch.long and v.dim() > 1 and v.numel() // v.shape[-1] == dormant.numel()",
}


def _same(v: torch.Tensor) -> torch.Tensor:
    return v


def _half(v: torch.Tensor) -> torch.Tensor:
    return 0.5 * v


def dormant(seed: int) -> Dormant | None:
    """The mutant of that number, or None when the dice find no place for it."""
    dice = random.Random(f"dormant {seed}")
    base = dice.choice([v for v in VARIANTS if v.expect == "rewritten" and not v.gap])
    name = dice.choice(list(FEATURES))
    home = mutate._home(base)
    classes = sorted((module, cls) for module, cls in mutate._classes_of(base, home))
    top = type(base.make(0)).__name__
    if FEATURES[name].kind.startswith("masked"):
        classes = [(module, cls) for module, cls in classes if cls == top]
    if not classes:
        return None
    module_name, owner = dice.choice(classes)
    tree = ast.parse(Path(sys.modules[module_name].__file__ or "").read_text())
    what = _insert(tree, owner, FEATURES[name], dice)
    try:
        made = what and mutate._rebuilt(base, home, module_name, ast.fix_missing_locations(tree))
    except SyntaxError:  # := is not allowed everywhere
        return None
    if not made:
        return None
    masked = dice.choice(["bool", "int64", "float32"]) if FEATURES[name].kind.startswith("masked") else ""
    return Dormant(
        _prepared(made, owner, FEATURES[name]), FEATURES[name], owner, masked, f"{base.name}: {name}: {what}"
    )


def _insert(tree: ast.Module, owner: str, feature: Feature, dice: random.Random) -> str:
    """Puts the feature around an expression of one of the class's methods."""
    cls = next((node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == owner), None)
    methods = [f for f in (cls.body if cls else []) if isinstance(f, ast.FunctionDef) and f.name != "__init__"]
    masked = feature.kind.startswith("masked")
    methods = [
        f for f in methods if f.args.args and f.args.args[0].arg == "self" and (f.name == "forward" or not masked)
    ]
    if not methods:
        return ""
    function = dice.choice(methods)
    place = mutate._pick(function, (ast.Call, ast.BinOp, ast.Subscript), dice)
    if place is None or isinstance(getattr(place, "ctx", None), ast.Store):
        return ""
    text = ast.unparse(place)
    code = f"(({feature.code}) if torch.is_tensor(v := ({text})) and {_APPLIES[feature.kind]} else v)"
    mutate._become(function, place, ast.parse(code, mode="eval").body)
    if masked:
        function.args.kwonlyargs.append(ast.arg("dormant"))
        function.args.kw_defaults.append(None)
    ahead = [i for i, n in enumerate(tree.body) if isinstance(n, ast.ImportFrom) and n.module == "__future__"]
    after = max(ahead, default=-1)
    needed = "import os\nimport torch\nimport torch.nn.functional as F\nfrom tests.zoo.dormant import SETTINGS"
    tree.body[after + 1 : after + 1] = ast.parse(needed).body
    return f"{function.name}: {text}"


def _prepared(base: Variant, owner: str, feature: Feature) -> Variant:
    def make(seed: int) -> nn.Module:
        block = base.make(seed)
        for module in owners(block, owner):
            feature.prepare(module)
        return block

    return replace(base, make=make)


def owners(block: nn.Module, owner: str) -> list[nn.Module]:
    """The modules that have the feature."""
    return [module for module in block.modules() if any(cls.__name__ == owner for cls in type(module).__mro__)]
