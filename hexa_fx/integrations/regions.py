"""Finds MoE blocks inside a torch.fx graph, cuts them out as modules, and puts them back rewritten.

torch.compile hands a backend a graph whose parameters are inputs and whose nodes remember the module that they came from. A region
consists of the nodes of one module. Cut out, with parameters as parameters again, it is a block like any other to the passes.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx
from torch import nn

from hexa_fx import operations as ops
from hexa_fx.ir import RewrittenBlock
from hexa_fx.isolation.module_tree import with_ancestors
from hexa_fx.ops.listed import joined
from hexa_fx.passes.detect.tags import expert_groups
from hexa_fx.torch_private import DisableTorchFunction, _assign_attr

_NAMES = re.compile(r"\['([^']+)'\]|\.(\w+)|\[(\d+)\]")
_ARITHMETIC = (operator.add, operator.sub, operator.mul, operator.floordiv)
_LEVELS = 3


@dataclass(frozen=True)
class Region:
    """The nodes of one module in a graph.

    Args:
        path: the module's path in the user's model.
        nodes: in graph order. inputs: values from outside that are not parameters. outputs: nodes that are read outside; sizes
            that other code reads are not among them, they stay in the graph.
        parameters: input nodes of the graph that are parameters, by their name relative to ``path``.
    """

    path: str
    nodes: tuple[torch.fx.Node, ...]
    inputs: tuple[torch.fx.Node, ...]
    outputs: tuple[torch.fx.Node, ...]
    parameters: Mapping[str, torch.fx.Node]


def parameter_names(graph: torch.fx.Graph, values: Sequence[Any]) -> dict[torch.fx.Node, str]:
    """The user's names of the graph's inputs that are parameters."""
    names = {}
    for node, value in zip(graph.find_nodes(op="placeholder"), values):
        if isinstance(value, nn.Parameter):
            names[node] = _name_of(node)
    return names


def _name_of(node: torch.fx.Node) -> str:
    """``L['self']._modules['mlp']._parameters['w']`` as ``mlp.w``."""
    argument = node.meta.get("grapharg")
    source = getattr(getattr(argument, "source", None), "name", node.name)
    text = source() if callable(source) else source
    parts = [next(filter(None, groups)) for groups in _NAMES.findall(str(text).partition("]")[2])]
    return ".".join(part for part in parts if part not in ("_modules", "_parameters", "_buffers")) or node.name


def module_of(node: torch.fx.Node) -> str:
    """Path of the module whose code the node is; empty for the model's own."""
    stack_of = node.meta.get("nn_module_stack") or {}
    path = str(next(reversed(stack_of.values()))[0]) if stack_of else ""
    return re.sub(r"\['?([^\]']*)'?\]", r".\1", path.partition("]")[2]).replace("._modules", "").strip(".")


def candidates(graph: torch.fx.Graph, names: Mapping[torch.fx.Node, str]) -> list[list[Region]]:
    """For every place that may be an MoE block: the innermost region, then the regions around it.

    Putting one back may change the inputs of the others: cut those again.
    """
    places = _places(graph, names)
    innermost = [path for path in places if not any(_inside(other, path) for other in places)]
    found = []
    for path in innermost:
        others = [other for other in innermost if other != path]
        levels = [p for p in with_ancestors(path) if not any(_inside(other, p) for other in others)][:_LEVELS]
        regions = [cut(graph, level, names) for level in levels]
        kept = [region for region in regions if region is not None and _selects(region)]
        if kept:
            found.append(kept)
    return found


def _places(graph: torch.fx.Graph, names: Mapping[torch.fx.Node, str]) -> dict[str, None]:
    """Modules that read stacked parameters, or that hold lists of alike ones."""
    tensors = {name: node.meta["example_value"] for node, name in names.items() if "example_value" in node.meta}
    lists = expert_groups(tensors).members
    found = dict.fromkeys(pattern.partition("{}")[0].rpartition(".")[0] for pattern in lists)
    for node, name in names.items():
        if name in tensors and tensors[name].dim() >= 3:
            found.setdefault(_common([module_of(user) for user in node.users]))
    modules = {module_of(node) for node in graph.nodes}
    return {path: None for path in found if any(m == path or _inside(m, path) for m in modules)}


def _common(paths: Sequence[str]) -> str:
    split = [path.split(".") for path in paths if path]
    shared = []
    for parts in zip(*split):
        if len(set(parts)) > 1:
            break
        shared.append(parts[0])
    return ".".join(shared)


def _inside(path: str, other: str) -> bool:
    return path != other and (not other or path.startswith(f"{other}."))


def _selects(region: Region) -> bool:
    """Whether a region selects by index, or is given indices along with tokens."""
    if any(ops.canonical(getattr(node.target, "__name__", str(node.target))) in ops.BY_INDEX for node in region.nodes):
        return True
    kinds = {node.meta["example_value"].is_floating_point() for node in region.inputs if _is_tensor(node)}
    return len(kinds) == 2


def _is_tensor(node: torch.fx.Node) -> bool:
    return isinstance(node.meta.get("example_value"), torch.Tensor)


def _is_size(node: torch.fx.Node) -> bool:
    return isinstance(node.meta.get("example_value"), (int, torch.SymInt))


def cut(graph: torch.fx.Graph, path: str, names: Mapping[torch.fx.Node, str]) -> Region | None:
    """The region of the module at ``path``; None if it does not run, or runs more than once with other code in between."""
    body = [node for node in graph.nodes if node.op not in ("placeholder", "output", "get_attr")]
    own = [i for i, node in enumerate(body) if _belongs(node, path)]
    if not own:
        return None
    nodes = body[own[0] : own[-1] + 1]
    if any(not _belongs(node, path) and node.meta.get("nn_module_stack") for node in nodes):
        return None
    inside = set(nodes)
    read = dict.fromkeys(source for node in nodes for source in node.all_input_nodes if source not in inside)
    parameters = {_relative(names[node], path): node for node in read if node in names}
    outputs = tuple(node for node in nodes if not _is_size(node) and any(user not in inside for user in node.users))
    inputs = tuple(node for node in read if node not in names)
    return Region(path, tuple(nodes), inputs, outputs, parameters) if outputs else None


def _belongs(node: torch.fx.Node, path: str) -> bool:
    own = module_of(node)
    return own == path or _inside(own, path)


def _relative(name: str, path: str) -> str:
    return name[len(path) + 1 :] if path and name.startswith(f"{path}.") else name


def require_sizes(sizes: Sequence[Sequence[int | None]], *tensors: torch.Tensor) -> None:
    """Raises ValueError for tensors of other sizes than the graph was captured for; None is any size.

    A graph that Dynamo captured with fixed sizes has them in its code, and with others it may run and give nonsense. A
    recording does not see this check, and the rewritten graph does not need it: Dynamo guards the sizes.
    """
    with DisableTorchFunction():
        for expected, tensor in zip(sizes, tensors):
            if any(size not in (None, int(found)) for size, found in zip(expected, tensor.shape)):
                raise ValueError(f"the graph is of sizes {tuple(expected)}, not {tuple(tensor.shape)}")


def has_fixed_rows(region: Region) -> bool:
    """Whether the graph holds for one number of rows only."""
    shapes = [node.meta["example_value"].shape for node in region.inputs if _is_tensor(node)]
    return not any(isinstance(size, torch.SymInt) for shape in shapes for size in shape)


class UnknownSize(Exception):
    """A region reads a size that is none of its own tensors'."""


def as_module(region: Region, values: Mapping[torch.fx.Node, Any]) -> torch.fx.GraphModule:
    """The region as a module of its own: parameters by name, the other inputs as arguments, and one result or a tuple.

    Raises:
        UnknownSize: it depends on a symbolic size that cannot be read off one of its inputs.
    """
    graph = torch.fx.Graph()
    new: dict[torch.fx.Node, torch.fx.Node] = {}
    root = nn.Module()
    tensors = [node for node in region.inputs if not _is_size(node)]
    for number, node in enumerate(tensors):
        new[node] = graph.placeholder(f"input_{number}")
    sizes = [tuple(d if isinstance(d, int) else None for d in node.meta["example_value"].shape) for node in tensors]
    graph.call_function(require_sizes, (sizes, *(new[node] for node in tensors)))
    for node in region.inputs:
        if _is_size(node):
            new[node] = _size(node, tensors, new, graph)
    for name, node in region.parameters.items():
        _assign_attr(values[node], root, name)
        new[node] = graph.get_attr(name)
    for node in region.nodes:  # without the names, so that equal regions have equal code
        args, kwargs = torch.fx.map_arg((node.args, node.kwargs), new.__getitem__)
        new[node] = graph.create_node(node.op, node.target, args, kwargs)
    results = tuple(new[node] for node in region.outputs)
    graph.output(results[0] if len(results) == 1 else results)
    return torch.fx.GraphModule(root, graph, class_name="Region")


def _size(
    wanted: Any, tensors: Sequence[torch.fx.Node], new: Mapping[torch.fx.Node, torch.fx.Node], graph: torch.fx.Graph
) -> Any:
    """A size that was computed outside: read off an input, or computed again from such ones."""
    if not isinstance(wanted, torch.fx.Node):
        return wanted
    expression = str(wanted.meta.get("example_value"))
    for node in tensors:
        for dim, known in enumerate(node.meta["example_value"].shape):
            if str(known) == expression:
                return graph.call_method("size", (new[node], dim))
    if wanted.op != "call_function" or wanted.target not in _ARITHMETIC:
        raise UnknownSize(f"it depends on the size {wanted.name}, which is no size of a tensor it is given")
    return graph.call_function(wanted.target, tuple(_size(item, tensors, new, graph) for item in wanted.args))


def put_back(
    gm: torch.fx.GraphModule, region: Region, rewritten: RewrittenBlock, constants: Mapping[str, Any]
) -> dict[torch.fx.Node, torch.fx.Node]:
    """Replaces the region's nodes by the rewritten graph's. ``gm`` is to be recompiled afterwards.

    Returns:
        The region's outputs and the nodes that stand for them now.
    """
    graph = gm.graph
    tensors = [node for node in region.inputs if _is_tensor(node)]
    new: dict[torch.fx.Node, Any] = dict(zip(rewritten.graph.find_nodes(op="placeholder"), tensors, strict=True))
    packed = {weight.name: weight for weight in rewritten.packed}
    with graph.inserting_before(region.nodes[0]):
        for node in rewritten.graph.nodes:
            if node.op in ("placeholder", "output"):
                continue
            if node.op == "get_attr":
                new[node] = _attribute(gm, region, str(node.target), constants)
            elif node.op == "call_module":
                parts = [[region.parameters[name] for name in part] for part in packed[str(node.target)].parts]
                new[node] = graph.call_function(joined, (parts,))
            else:
                new[node] = graph.node_copy(node, new.__getitem__)
    results = torch.fx.map_arg(next(iter(rewritten.graph.find_nodes(op="output"))).args[0], new.__getitem__)
    replaced = dict(zip(region.outputs, results if len(region.outputs) > 1 else (results,), strict=True))
    for old, result in replaced.items():
        old.replace_all_uses_with(result)
        result.meta.update({key: old.meta[key] for key in ("example_value", "nn_module_stack") if key in old.meta})
    for node in reversed(region.nodes):
        if not node.users:
            graph.erase_node(node)
    return replaced


def _attribute(gm: torch.fx.GraphModule, region: Region, name: str, constants: Mapping[str, Any]) -> torch.fx.Node:
    if name in region.parameters:
        return region.parameters[name]
    target = f"hexa_{len(list(gm.buffers()))}_{name.replace('.', '_')}"
    gm.register_buffer(target, constants[name], persistent=False)
    return gm.graph.get_attr(target)
