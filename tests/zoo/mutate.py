"""Random mutations of the zoo's own source code and of its instances, for "rewritten implies equal".

A mutation changes one place in the syntax tree of a class that the block is made of (an operator, a constant, an index, a
statement, a call wrapped around an expression), or one thing in the made instance (one expert's activation, a tied, frozen
or zeroed parameter, a hook). Most results are still some mixture of experts, few are the one that was written.
"""

import ast
import copy
import linecache
import random
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import nn

from tests.zoo.registry import VARIANTS
from tests.zoo.variant import Variant

COMMON = "tests.zoo.common"
_IMPORTABLE: list[types.ModuleType] = []


@dataclass(frozen=True)
class Mutant:
    """A mutated variant and what was done to it."""

    variant: Variant
    what: str


def mutant(seed: int) -> Mutant | None:
    """The mutant of that number, or None when the dice find nothing to mutate. The same seed gives the same mutant."""
    return mutant_of(random.Random(seed))


def mutant_of(dice: random.Random) -> Mutant | None:
    """A mutant by dice, which may be hypothesis's."""
    base = dice.choice([v for v in VARIANTS if v.expect != "refused" or dice.random() < 0.1])
    if dice.random() < 0.2:
        return _mutated_instance(base, dice)
    return _mutated_source(base, dice)


# -- source ------------------------------------------------------------------------------------------------------------


def _mutated_source(base: Variant, dice: random.Random) -> Mutant | None:
    home = _home(base)
    classes = _classes_of(base, home)
    module_name = dice.choice(sorted({module for module, _ in classes}))
    tree = ast.parse(Path(sys.modules[module_name].__file__ or "").read_text())
    names = {name for module, name in classes if module == module_name}
    functions = [
        function
        for node in tree.body
        if isinstance(node, ast.ClassDef) and node.name in names
        for function in node.body
        if isinstance(function, ast.FunctionDef) and function.name != "__init__"
    ]
    if not functions:
        return None
    function = dice.choice(functions)
    before = ast.unparse(function)
    for mutation in dice.sample(MUTATIONS, len(MUTATIONS)):
        what = mutation(function, dice)
        if what and ast.unparse(function) != before:
            made = _rebuilt(base, home, module_name, ast.fix_missing_locations(tree))
            return made and Mutant(made, f"{base.name}: {function.name}: {what}")
    return None


def _home(base: Variant) -> str:
    return next(
        m for m in sys.modules if m.startswith("tests.zoo.") and base in getattr(sys.modules[m], "VARIANTS", ())
        and not m.endswith("registry")
    )  # fmt: skip


def _classes_of(base: Variant, home: str) -> set[tuple[str, str]]:
    """(module, class) of everything in the block that the zoo wrote."""
    found = set()
    for part in base.make(0).modules():
        for cls in type(part).__mro__:
            if cls.__module__ in (home, COMMON):
                found.add((cls.__module__, cls.__name__))
    return found


def _rebuilt(base: Variant, home: str, changed: str, tree: ast.Module) -> Variant | None:
    """The variant of the same name from its module with `changed` replaced by `tree`."""
    with _replaced_module(changed, tree) as module:
        if changed == home:
            fresh = module
        else:
            source = Path(sys.modules[home].__file__ or "").read_text()
            with _replaced_module(home, ast.parse(source)) as rebuilt:
                fresh = rebuilt
    return next((v for v in fresh.VARIANTS if v.name == base.name), None)


@contextmanager
def _replaced_module(name: str, tree: ast.Module) -> Iterator[types.ModuleType]:
    """A module made of `tree`, importable under `name` inside the block only."""
    text = ast.unparse(tree)
    filename = f"<mutant of {name} {abs(hash(text)):x}>"
    linecache.cache[filename] = (len(text), None, text.splitlines(keepends=True), filename)
    module = types.ModuleType(f"{name}_mutant_{abs(hash(text)):x}")
    module.__file__ = filename
    _stay_importable(module)
    original = sys.modules[name]
    sys.modules[name] = module
    try:
        exec(compile(text, filename, "exec"), module.__dict__)
        yield module
    finally:
        sys.modules[name] = original


def _stay_importable(module: types.ModuleType) -> None:
    """Puts it into sys.modules, where globals of a block's code are looked up at every call; takes the oldest ones out."""
    sys.modules[module.__name__] = module
    _IMPORTABLE.append(module)
    while len(_IMPORTABLE) > 8:
        old = _IMPORTABLE.pop(0)
        if sys.modules.get(old.__name__) is old:  # not a newer one of the same text
            del sys.modules[old.__name__]
        linecache.cache.pop(old.__file__ or "", None)


def _places(function: ast.FunctionDef, kind: type | tuple[type, ...]) -> list[ast.AST]:
    return [node for statement in function.body for node in ast.walk(statement) if isinstance(node, kind)]


def _pick(function: ast.FunctionDef, kind: type | tuple[type, ...], dice: random.Random) -> ast.AST | None:
    places = _places(function, kind)
    return dice.choice(places) if places else None


OPERATORS = [ast.Add, ast.Sub, ast.Mult, ast.Div]
COMPARISONS = [ast.Eq, ast.NotEq, ast.Lt, ast.LtE, ast.Gt, ast.GtE]


def change_operator(function: ast.FunctionDef, dice: random.Random) -> str:
    node = _pick(function, (ast.BinOp, ast.AugAssign), dice)
    if node is None:
        return ""
    node.op = dice.choice(OPERATORS)()
    return f"operator -> {ast.unparse(node)}"


def change_comparison(function: ast.FunctionDef, dice: random.Random) -> str:
    node = _pick(function, ast.Compare, dice)
    if node is None:
        return ""
    node.ops = [dice.choice(COMPARISONS)()]
    return f"comparison -> {ast.unparse(node)}"


def drop_operand(function: ast.FunctionDef, dice: random.Random) -> str:
    """`a * b` becomes `a` or `b`: a routing weight, a gate or a mask is lost."""
    node = _pick(function, ast.BinOp, dice)
    if node is None:
        return ""
    kept = copy.deepcopy(dice.choice([node.left, node.right]))
    text = ast.unparse(node)
    _become(function, node, kept)
    return f"{text} -> {ast.unparse(kept)}"


def assign_instead_of_add(function: ast.FunctionDef, dice: random.Random) -> str:
    for node in _places(function, ast.AugAssign):
        _become(function, node, ast.Assign(targets=[node.target], value=node.value, lineno=node.lineno))
        return f"+= -> = in {ast.unparse(node)}"
    for node in _places(function, ast.Attribute):
        if node.attr in ("index_add_", "index_add"):
            node.attr = node.attr.replace("add", "copy")
            return "index_add -> index_copy"
    return ""


def change_constant(function: ast.FunctionDef, dice: random.Random) -> str:
    places = [n for n in _places(function, ast.Constant) if isinstance(n.value, (int, float)) and n.value is not True]
    if not places:
        return ""
    node = dice.choice(places)
    before = node.value
    node.value = dice.choice([0, 1, 2, 0.5]) if isinstance(before, bool) else dice.choice([0, 1, 2, before + 1])
    return f"constant {before} -> {node.value}"


def change_name(function: ast.FunctionDef, dice: random.Random) -> str:
    """One use of a local name becomes another local name: indices swapped, wrong tensor."""
    names = sorted({n.id for n in _places(function, ast.Name) if isinstance(n.ctx, ast.Store)})
    names += [a.arg for a in function.args.args if a.arg != "self"]
    uses = [n for n in _places(function, ast.Name) if isinstance(n.ctx, ast.Load) and n.id in names]
    if not uses or len(set(names)) < 2:
        return ""
    node = dice.choice(uses)
    before = node.id
    node.id = dice.choice([name for name in names if name != before])
    return f"{before} -> {node.id}"


WRAPPERS = (
    "({}).flip(0)",
    "({}).roll(1, 0)",
    "({}).cumsum(0)",
    "(({0}) - ({0}).mean(0, keepdim=True))",
    "({}).softmax(0)",
    "({}).detach()",
    "(({}) * 2.0)",
    "({}).abs()",
    "({}).clamp(min=0.0)",
    "({}).tanh()",
    "(({0}) + ({0}).mean())",
    "(({0}) / (1 + ({0}).shape[0]))",
    "(({0}) * ({0}).shape[0] ** 0.5)",
    "(({0}) * (({0}).sum() > 0))",
    "(({0}) + torch.arange(({0}).shape[0]).unsqueeze(-1))",
    "(({0}) * torch.rand_like({0}))",
    "({}).sort(-1).values",
    "({}).float().to(torch.float32)",
    "({}).clone()",
    "({}).contiguous()",
    "(({0}) + 0.0 * ({0}).sum(0))",
    "(({0}) - ({0}).max())",
    "torch.nn.functional.normalize({}, dim=-1)",
    "torch.nn.functional.dropout({}, 0.1, self.training)",
)


def wrap(function: ast.FunctionDef, dice: random.Random) -> str:
    """Put an operation around an expression: means over tokens, reordering, activations, detach, noise."""
    node = _pick(function, (ast.Call, ast.BinOp, ast.Subscript), dice)
    if node is None or isinstance(getattr(node, "ctx", None), ast.Store):
        return ""
    text = ast.unparse(node)
    wrapped = dice.choice(WRAPPERS).format(text)
    _become(function, node, ast.parse(wrapped, mode="eval").body)
    return f"{text} -> {wrapped}"


RENAMES = {
    "silu": ("relu", "gelu", "tanh"),
    "gelu": ("relu", "silu"),
    "relu": ("gelu", "silu"),
    "softmax": ("sigmoid_", "log_softmax", "softmin"),
    "topk": ("sort",),
    "sum": ("mean", "prod", "amax"),
    "argsort": ("argmax",),
    "cat": ("stack",),
    "any": ("all",),
    "argmax": ("argmin",),
    "max": ("min",),
    "index_add_": ("index_copy_",),
    "scatter_add_": ("scatter_",),
    "zeros_like": ("ones_like", "empty_like"),
    "empty_like": ("zeros_like",),
    "new_zeros": ("new_ones",),
    "zeros": ("ones",),
    "cumsum": ("cummax",),
    "sigmoid": ("tanh", "exp"),
}


def rename_call(function: ast.FunctionDef, dice: random.Random) -> str:
    places = [n for n in _places(function, ast.Attribute) if n.attr in RENAMES]
    if not places:
        return ""
    node = dice.choice(places)
    before = node.attr
    node.attr = dice.choice(RENAMES[before]).rstrip("_")
    return f".{before} -> .{node.attr}"


def _blocks(function: ast.FunctionDef) -> list[list[ast.stmt]]:
    bodies = [function.body]
    for node in _places(function, (ast.For, ast.If)):
        bodies += [node.body, node.orelse]
    return [body for body in bodies if len(body) > 1]


def drop_statement(function: ast.FunctionDef, dice: random.Random) -> str:
    bodies = _blocks(function)
    if not bodies:
        return ""
    body = dice.choice(bodies)
    dropped = body.pop(dice.randrange(len(body)))
    return f"dropped {ast.unparse(dropped)}"


def repeat_statement(function: ast.FunctionDef, dice: random.Random) -> str:
    bodies = _blocks(function)
    if not bodies:
        return ""
    body = dice.choice(bodies)
    at = dice.randrange(len(body))
    body.insert(at, copy.deepcopy(body[at]))
    return f"repeated {ast.unparse(body[at])}"


def swap_statements(function: ast.FunctionDef, dice: random.Random) -> str:
    bodies = _blocks(function)
    if not bodies:
        return ""
    body = dice.choice(bodies)
    at = dice.randrange(len(body) - 1)
    body[at], body[at + 1] = body[at + 1], body[at]
    return f"swapped with the next: {ast.unparse(body[at])}"


def swap_arguments(function: ast.FunctionDef, dice: random.Random) -> str:
    places = [
        n for n in _places(function, (ast.Call, ast.Tuple)) if len(getattr(n, "args", getattr(n, "elts", ()))) > 1
    ]
    if not places:
        return ""
    node = dice.choice(places)
    items = node.args if isinstance(node, ast.Call) else node.elts
    i, j = dice.sample(range(len(items)), 2)
    items[i], items[j] = items[j], items[i]
    return f"swapped -> {ast.unparse(node)}"


def _become(function: ast.FunctionDef, old: ast.AST, new: ast.AST) -> None:
    class Replace(ast.NodeTransformer):
        def visit(self, node: ast.AST) -> ast.AST:
            return new if node is old else self.generic_visit(node)

    function.body = [Replace().visit(statement) for statement in function.body]


MUTATIONS: list[Callable[[ast.FunctionDef, random.Random], str]] = [
    change_operator,
    change_comparison,
    drop_operand,
    assign_instead_of_add,
    change_constant,
    change_name,
    wrap,
    wrap,
    wrap,
    rename_call,
    drop_statement,
    repeat_statement,
    swap_statements,
    swap_arguments,
]


# -- instances ---------------------------------------------------------------------------------------------------------


def other_activation(block: nn.Module, dice: random.Random) -> str:
    names = [n for n, m in block.named_modules() if isinstance(m, (nn.GELU, nn.ReLU, nn.SiLU, nn.Tanh))]
    if not names:
        return ""
    name = dice.choice(names)
    block.set_submodule(name, dice.choice([nn.GELU("tanh"), nn.ReLU6(), nn.Softplus(), nn.Mish(), nn.ELU(), nn.SiLU()]))
    return f"another activation at {name}"


def _some_parameter(block: nn.Module, dice: random.Random) -> tuple[str, nn.Parameter] | None:
    named = [(n, p) for n, p in block.named_parameters() if p.requires_grad]
    return dice.choice(named) if named else None


def tie_parameters(block: nn.Module, dice: random.Random) -> str:
    found = _some_parameter(block, dice)
    alike = [n for n, p in block.named_parameters() if found and p.shape == found[1].shape and n != found[0]]
    if not found or not alike:
        return ""
    other = dice.choice(alike)
    _set(block, other, found[1])
    return f"{other} is {found[0]}"


def freeze(block: nn.Module, dice: random.Random) -> str:
    found = _some_parameter(block, dice)
    if not found:
        return ""
    found[1].requires_grad_(False)
    return f"{found[0]} frozen"


def zero(block: nn.Module, dice: random.Random) -> str:
    found = _some_parameter(block, dice)
    if not found:
        return ""
    with torch.no_grad():
        found[1].zero_()
    return f"{found[0]} is zero"


def copy_values(block: nn.Module, dice: random.Random) -> str:
    """Two parameters hold equal numbers without being one."""
    found = _some_parameter(block, dice)
    alike = [(n, p) for n, p in block.named_parameters() if found and p.shape == found[1].shape and n != found[0]]
    if not found or not alike:
        return ""
    name, other = dice.choice(alike)
    with torch.no_grad():
        other.copy_(found[1])
    return f"{name} equals {found[0]}"


def no_bias(block: nn.Module, dice: random.Random) -> str:
    names = [n for n, m in block.named_modules() if isinstance(m, nn.Linear) and m.bias is not None]
    if not names:
        return ""
    name = dice.choice(names)
    block.get_submodule(name).bias = None
    return f"{name} without bias"


def output_hook(block: nn.Module, dice: random.Random) -> str:
    """A forward hook on one linear layer changes its output: invisible in the code of the block."""
    names = [n for n, m in block.named_modules() if isinstance(m, nn.Linear)]
    if not names:
        return ""
    name = dice.choice(names)
    block.get_submodule(name).register_forward_hook(_halve)
    return f"hook on {name}"


def _halve(module: nn.Module, args: object, output: torch.Tensor) -> torch.Tensor:
    return output * 0.5


def swap_experts(block: nn.Module, dice: random.Random) -> str:
    lists = [m for m in block.modules() if isinstance(m, nn.ModuleList) and len(m) > 1]
    if not lists:
        return ""
    chosen = dice.choice(lists)
    i, j = dice.sample(range(len(chosen)), 2)
    chosen[i], chosen[j] = chosen[j], chosen[i]
    return f"members {i} and {j} swapped"


def one_in_train_mode_dropout(block: nn.Module, dice: random.Random) -> str:
    places = [m for m in block.modules() if isinstance(m, nn.Dropout)]
    if not places:
        return ""
    dice.choice(places).p = 0.5
    return "one dropout with p = 0.5"


def _set(block: nn.Module, path: str, value: nn.Parameter) -> None:
    owner, _, name = path.rpartition(".")
    setattr(block.get_submodule(owner) if owner else block, name, value) if not name.isdigit() else block.get_submodule(
        owner
    ).__setitem__(int(name), value)


INSTANCE_MUTATIONS = [
    other_activation,
    tie_parameters,
    freeze,
    zero,
    copy_values,
    no_bias,
    output_hook,
    swap_experts,
    one_in_train_mode_dropout,
]


def _mutated_instance(base: Variant, dice: random.Random) -> Mutant | None:
    block = base.make(dice.randrange(1000))
    for mutation in dice.sample(INSTANCE_MUTATIONS, len(INSTANCE_MUTATIONS)):
        what = mutation(block, dice)
        if what:
            return Mutant(replace(base, make=lambda seed: copy.deepcopy(block)), f"{base.name}: {what}")
    return None
