"""The walks of docs/architecture.md, tensors of ours on no default device, and what the table of operands did away with."""

import ast
import re
import sys
from collections.abc import Callable, Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import hexa_fx
from hexa_fx.cuda import choosing, register
from hexa_fx.ops import program
from tests.cuda.cards import Cards
from tests.inspect import models

ROOT = Path(__file__).parents[1]
WALKS = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8").split("## Three walks")[1].split("\n## ")[0]
STEP = re.compile(r"^\d+\. `([\w/]+\.py)`(?: `(\w+)`)?", re.MULTILINE)


def steps(title: str) -> list[tuple[str, str]]:
    """(file, function) of a walk."""
    return STEP.findall(WALKS.split(f"### {title}\n")[1].split("\n### ")[0])


def trace(run: Callable[[], object]) -> list[tuple[str, str]]:
    """(file, function) of every function of the package in the order in which they were first called."""
    seen: dict[tuple[str, str], None] = {}
    package = str(ROOT / "hexa_fx") + "/"

    def note(frame, event, _):
        file = frame.f_code.co_filename
        if event == "call" and file.startswith(package):
            seen.setdefault(
                (f"hexa_fx/{file[len(package) :]}".replace("hexa_fx/passes", "passes"), frame.f_code.co_name)
            )

    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(None)
    return list(seen)


def assert_in_order(walk: list[tuple[str, str]], ran: list[tuple[str, str]]) -> None:
    where = {step: number for number, step in enumerate(ran)}
    missing = [step for step in walk if step not in where]
    assert not missing
    places = [where[step] for step in walk]
    late = [after for before, after in pairwise(walk) if where[before] > where[after]]
    assert places == sorted(places), late


@pytest.mark.parametrize("title", ["A model", "A kernel", "A plan"])
def test_every_file_of_a_walk_exists_and_comes_once(title):
    files = [file for file, _ in steps(title)]
    assert len(files) > 10
    assert len(set(files)) == len(files)
    assert [file for file in files if not (ROOT / file).is_file()] == []


def test_a_model_takes_the_walk():
    walk, made = steps("A model"), []
    called = next(
        number for number, (file, _) in enumerate(walk) if file.startswith("hexa_fx/runtime/attribute_guards")
    )
    ran = trace(lambda: made.append(hexa_fx.optimize(*models.factory(), hexa_fx.HexaConfig(verify=False))))
    assert_in_order([step for step in walk[:called] if step[0] != "passes/verify/__init__.py"], ran)
    program.programs.cache_clear()
    with torch.no_grad():
        assert_in_order(walk[called:], trace(lambda: made[0](torch.randn(40, 500, 8))))


def test_a_kernel_takes_the_walk(monkeypatch, tmp_path):
    """On a stand-in for a card, which has built and loaded its kernels (``hexa_fx/jit``) before."""
    cards = Cards()
    cards.stand_in(monkeypatch, tmp_path)
    cards.be_hopper(monkeypatch)
    v, offs = torch.arange(1600, dtype=torch.int32), torch.linspace(0, 1600, 6).to(torch.int32)
    x, weight = torch.zeros(800, 64, dtype=torch.bfloat16), torch.zeros(5, 128, 64, dtype=torch.bfloat16)
    register.kernel.cache_clear()  # of another test, in which this one's would not show
    ran = trace(lambda: register.kernel("esmm")(x, weight, None, v, offs, 2, "nk"))
    choosing.forget_choices()
    assert len(cards.launches) == 1
    assert_in_order([step for step in steps("A kernel") if step[1]], ran)


def test_a_plan_takes_the_walk(tmp_path):
    config = hexa_fx.HexaConfig(verify=False)
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    try:
        ran = trace(lambda: hexa_fx.optimize_(*models.factory(), config, mesh=dist.group.WORLD))
    finally:
        dist.destroy_process_group()
    assert_in_order([step for step in steps("A plan") if step[1]], ran)


MADE_FROM_NOTHING = frozenset(
    "arange empty eye full linspace logspace normal ones rand randint randn randperm scalar_tensor tensor zeros".split()
)
"""Functions of torch that put a tensor on the process's default device unless they are told one."""


def test_no_tensor_of_ours_is_on_the_default_device() -> None:
    """That is the user's to choose: `torch.set_default_device("cuda")` made every analysis fail."""
    files = [*(ROOT / "passes").rglob("*.py"), *(ROOT / "hexa_fx").rglob("*.py")]
    assert len(files) > 200
    unnamed = [
        f"{file.relative_to(ROOT)}:{node.lineno}"
        for file in files
        if file.name != "demo.py"  # where the user's model is made, too
        for node in ast.walk(parsed(file))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
        if isinstance(node.func.value, ast.Name)
        and node.func.value.id == "torch"
        and node.func.attr in MADE_FROM_NOTHING
        if not {"device", None} & {keyword.arg for keyword in node.keywords}
    ]
    assert not unnamed


WHERE = ("hexa_fx/ops", "hexa_fx/cuda", "hexa_fx/codegen", "passes/lowering")
OPERANDS = re.compile(r".{0,90}?".join(rf"\b{name}\b" for name in ("w1", "b1", "w3", "b3", "w2", "b2")), re.DOTALL)
TUPLES = ("args", "rest", "inputs", "needs_input_grad", "saved_tensors")
"""Names that hold an operator's arguments, or what autograd has for each."""


def files(*folders: str) -> Iterator[Path]:
    for folder in folders:
        yield from (path for path in sorted((ROOT / folder).rglob("*.py")) if "hexa_fx/passes/" not in str(path))


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def nodes(*folders: str) -> Iterator[tuple[str, ast.AST]]:
    for path in files(*folders):
        yield from ((str(path.relative_to(ROOT)), node) for node in ast.walk(parsed(path)))


def test_files_that_name_every_operand_of_a_layer_in_order() -> None:
    found = {str(path.relative_to(ROOT)) for path in files("hexa_fx", "passes") if OPERANDS.search(path.read_text())}
    assert found == {"hexa_fx/ops/table_layers.py", "hexa_fx/ops/moe_ffn.py"}


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
