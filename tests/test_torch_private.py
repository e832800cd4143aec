"""Names of torch that are not public are in one module, which does without them or says which is missing."""

import ast
import importlib
import re
import runpy
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]
FILE = ROOT / "hexa_fx" / "torch_private.py"
ELSEWHERE = {  # these have names of their own
    "hexa_fx/cuda",
    "hexa_fx/distributed",
    "hexa_fx/integrations/expert_parallel.py",
    "hexa_fx/runtime/autocast.py",
    "hexa_fx/runtime/attribute_guards.py",
}
EVERYWHERE = ("torch.utils._pytree", "torch.Tensor._make_wrapper_subclass")


def private_names(tree: ast.Module) -> Iterator[str]:
    """Those that code imports or takes of what it imported. Annotations are texts, and are not among them."""
    texts = {
        id(part)
        for node in ast.walk(tree)
        for field in ("annotation", "returns")
        if (at := getattr(node, field, None))
        for part in ast.walk(at)
    }
    known = {"torch": "torch"}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] in ("torch", "transformers"):
            known |= {name.asname or name.name: f"{node.module}.{name.name}" for name in node.names}
            yield from (f"{node.module}.{name.name}" for name in node.names)
        if isinstance(node, ast.Import):
            known |= {name.asname: name.name for name in node.names if name.asname}
            yield from (name.name for name in node.names)
    for node in ast.walk(tree):
        path, part = [], node
        while isinstance(part, ast.Attribute):
            path, part = [part.attr, *path], part.value
        if path and isinstance(part, ast.Name) and part.id in known and id(node) not in texts:
            yield ".".join([known[part.id], *path])


def test_private_names_of_torch_are_in_one_module() -> None:
    found = {}
    for folder in ("hexa_fx", "passes"):
        for file in (ROOT / folder).rglob("*.py"):
            name = file.relative_to(ROOT).as_posix()
            if file == FILE or any(name.startswith(f"{place}/") or name == place for place in ELSEWHERE):
                continue
            for used in private_names(ast.parse(file.read_text(encoding="utf-8"))):
                parts = used.split(".")
                if (
                    parts[0] in ("torch", "transformers")
                    and not used.startswith(EVERYWHERE)
                    and any(p.startswith("_") and not p.startswith("__") for p in parts)
                ):
                    found.setdefault(name, set()).add(used)
    assert not found


X = torch.ones(4)
REPLACED = {
    "_is_any_autocast_enabled": (),
    "_any_requires_grad": (X, X.clone().requires_grad_()),
    "_get_tracing_state": (),
    "_disable_dynamo": (None,),
    "_foreach_sub": ([X], [X]),
    "_foreach_copy_": ([X.clone()], [X]),
    "_maybe_get_opdef": ("hexa_fx_tests::not_there",),
    "_debug_has_internal_overlap": (X.as_strided((2, 2), (1, 1)),),  # 2: it may overlap
}
FROM_TORCH = {
    name.name: found.module
    for node in ast.parse(FILE.read_text(encoding="utf-8")).body
    if isinstance(node, ast.Try)
    for found in node.body
    for name in found.names
}


def plain(result: object) -> str:
    return re.sub(r"[\[\](),]|<function .*|<torch.*|functools.*", "", str(result))


@pytest.mark.parametrize("name", FROM_TORCH)
def test_without_a_name_there_is_another_or_a_sentence(monkeypatch, name) -> None:
    there = getattr(home := importlib.import_module(FROM_TORCH[name]), name)
    monkeypatch.delattr(home, name)
    if name == "dtype_abbrs":
        assert runpy.run_path(str(FILE))[name] == {}
    elif name == "_will_engine_execute_node":  # which is asked in backward passes only
        assert runpy.run_path(str(FILE))[name](None) is False
    elif name not in REPLACED:
        with pytest.raises(ImportError, match=f"does not work with torch .*: cannot import name '{name}'"):
            runpy.run_path(str(FILE))
    else:
        instead = runpy.run_path(str(FILE))[name]
        monkeypatch.undo()
        assert plain(instead(*REPLACED[name])) == plain(there(*REPLACED[name]))
