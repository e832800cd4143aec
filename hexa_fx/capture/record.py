"""Records one block on given inputs."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx
from torch import nn

from hexa_fx.capture.host import visible_host
from hexa_fx.capture.recorder import ModuleCall, NodeRecord, Recorder, record_of
from hexa_fx.errors import CaptureError


@dataclass(frozen=True)
class CapturedBlock:
    """A block's run as a straight-line graph. Holds one routing: it is read, never executed in the block's place.

    Args:
        block: the recorded module; ``get_attr`` targets of the graph are relative to it.
        path: where it stands in the model.
        graph: nodes carry a `hexa_fx.capture.recorder.NodeRecord` in ``meta["hexa"]``.
        constants: tensors that the code created outside torch's sight, by ``get_attr`` target.
        calls: every submodule call, with its arguments and results as nodes.
        arguments: name and value of every argument of the run in signature order; tensors are given as their placeholder.
        output: the result, with nodes for tensors.
    """

    block: nn.Module
    path: str
    graph: torch.fx.Graph
    constants: dict[str, torch.Tensor]
    calls: tuple[ModuleCall, ...]
    arguments: tuple[tuple[str, Any], ...]
    output: Any

    def tensor_of(self, name: str) -> torch.Tensor:
        """The parameter, buffer or constant behind a ``get_attr`` target."""
        if name in self.constants:
            return self.constants[name]
        owner, _, leaf = name.rpartition(".")
        tensor: torch.Tensor = getattr(self.block.get_submodule(owner), leaf)
        return tensor

    @property
    def graph_module(self) -> torch.fx.GraphModule:
        """The recorded run as a printable module."""
        root = nn.Module()
        for node in self.graph.find_nodes(op="get_attr"):
            torch.fx.graph_module._assign_attr(self.tensor_of(str(node.target)).detach(), root, str(node.target))
        return torch.fx.GraphModule(root, self.graph, class_name=f"Captured{type(self.block).__name__}")


def capture(block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], path: str = "", seed: int = 0) -> CapturedBlock:
    """Runs ``block`` once, without gradients, and returns what it did.

    Neither parameters nor buffers of the block are changed by the run, and the global random state is put back.

    Raises:
        CaptureError: the block does not run on these inputs; the message carries its own error.
    """
    parameters = dict(block.named_parameters(remove_duplicate=False)) | dict(block.named_buffers(remove_duplicate=False))
    recorder = Recorder(parameters)
    arguments = _bind_arguments(block, args, kwargs)
    saved = {name: buffer.detach().clone() for name, buffer in block.named_buffers()}
    try:
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(seed)
            result, bound = _run(block, recorder, arguments)
    except CaptureError:
        raise
    except Exception as error:
        raise CaptureError(f"{type(error).__name__}: {error}", path=path or type(block).__name__) from error
    finally:
        with torch.no_grad():
            for name, buffer in block.named_buffers():
                if name in saved:
                    buffer.copy_(saved[name])
    output = recorder.lift(result)
    recorder.graph.output(output).meta["hexa"] = NodeRecord(None)
    return CapturedBlock(block, path, recorder.graph, recorder.constants, tuple(recorder.calls), bound, output)


def _bind_arguments(block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[tuple[str, Any]]:
    """(name, value) in signature order, for the arguments that were given."""
    try:
        bound = inspect.signature(type(block).forward).bind(block, *args, **kwargs)
    except (TypeError, ValueError) as error:
        raise CaptureError(str(error), path=type(block).__name__) from error
    named: list[tuple[str, Any]] = []
    for name, value in list(bound.arguments.items())[1:]:
        kind = bound.signature.parameters[name].kind
        if kind is inspect.Parameter.VAR_POSITIONAL:
            named += [(f"*{index}", item) for index, item in enumerate(value)]
        elif kind is inspect.Parameter.VAR_KEYWORD:
            named += [(f"**{key}", item) for key, item in value.items()]
        else:
            named.append((name, value))
    return named


def _run(block: nn.Module, recorder: Recorder, arguments: list[tuple[str, Any]]) -> tuple[Any, tuple[tuple[str, Any], ...]]:
    bound: list[tuple[str, Any]] = []
    positional: list[Any] = []
    keywords: dict[str, Any] = {}
    for name, value in arguments:
        given = value
        if isinstance(value, torch.Tensor):
            given = value.detach().clone()
            bound.append((name, recorder.placeholder(name.lstrip("*"), given)))
        else:
            bound.append((name, value))
        if name.startswith("*") and not name.startswith("**"):
            positional.append(given)
        elif positional or name.startswith("**"):
            keywords[name.lstrip("*")] = given
        else:
            keywords[name] = given
    forward = type(block).forward
    with visible_host(block, recorder), recorder:
        return forward(block, *positional, **keywords), tuple(bound)


__all__ = ["CapturedBlock", "capture", "record_of"]
