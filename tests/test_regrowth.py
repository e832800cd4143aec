"""What the table of operands did away with does not come back: each count may only fall, and falls here when it does."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
WHERE = ("hexa_fx/ops", "hexa_fx/cuda", "hexa_fx/codegen", "passes/lowering")
OPERANDS = re.compile(r".{0,90}?".join(rf"\b{name}\b" for name in ("w1", "b1", "w3", "b3", "w2", "b2")), re.DOTALL)
TUPLES = ("args", "rest", "inputs", "needs_input_grad", "saved_tensors")
"""Names that hold an operator's arguments, or what autograd has for each."""


def files(*folders: str) -> Iterator[Path]:
    for folder in folders:
        yield from (path for path in sorted((ROOT / folder).rglob("*.py")) if "hexa_fx/passes/" not in str(path))


def nodes(*folders: str) -> Iterator[tuple[str, ast.AST]]:
    for path in files(*folders):
        yield from ((str(path.relative_to(ROOT)), node) for node in ast.walk(ast.parse(path.read_text())))


def test_files_that_name_every_operand_of_a_layer_in_order() -> None:
    found = {str(path.relative_to(ROOT)) for path in files("hexa_fx", "passes") if OPERANDS.search(path.read_text())}
    assert len(found) == 4, found


def subscripts() -> Iterator[tuple[str, ast.Subscript]]:
    """Of tuples of arguments."""
    for path, node in nodes("hexa_fx/ops", "hexa_fx/cuda", "passes/lowering"):
        if isinstance(node, ast.Subscript):
            name = getattr(node.value, "id", getattr(node.value, "attr", ""))
            if name in TUPLES:
                yield path, node


def test_no_slice_of_arguments_is_taken() -> None:
    assert not [(path, node.lineno) for path, node in subscripts() if isinstance(node.slice, ast.Slice)]


def test_arguments_are_read_by_name() -> None:
    """What is left asks the first of them, which is a tensor, for its device or type, or places of nodes that are no operators."""
    assert len(found := [(path, node.lineno) for path, node in subscripts()]) == 11, found


def test_functions_of_more_than_eight_parameters() -> None:
    found = [
        (path, node.name)
        for path, node in nodes(*WHERE)
        if isinstance(node, ast.FunctionDef) and len(node.args.args) + len(node.args.kwonlyargs) > 8
    ]
    assert {name for _, name in found} == {"experts", "moe_ffn"}, found  # what users call
