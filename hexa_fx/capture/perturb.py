"""Puts random numbers in place of parameters whose elements are all equal, for the time of a recorded run.

New biases are zeros and new norm weights are ones. With them ``x + b`` and ``x * w`` equal ``x``, and the run would not show
them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
import torch.fx
from torch import nn

from hexa_fx.capture.records import record_of
from hexa_fx.isolation.size import of_one_number


@dataclass(frozen=True)
class Replacements:
    """Other values for what has no effect on the example, so that the recorded run shows what it does.

    Args:
        arguments: by name.
        held: of parameters and buffers, by name.
        results: of recorded calls, by the number of their node.
        idle: numbers of dropouts that drop nothing.
    """

    arguments: Mapping[str, torch.Tensor] = field(default_factory=dict)
    held: Mapping[str, torch.Tensor] = field(default_factory=dict)
    results: Mapping[int, torch.Tensor] = field(default_factory=dict)
    idle: frozenset[int] = frozenset()

    def __len__(self) -> int:
        return len(self.arguments) + len(self.held) + len(self.results)


AS_IT_IS = Replacements()


@contextmanager
def replaced_parameters(
    parameters: Mapping[str, torch.Tensor], given: Mapping[str, torch.Tensor]
) -> Iterator[dict[str, torch.Tensor]]:
    """A context that yields the new values by name. Parameters keep their identity, and get their own memory back at the end.

    ``given``: values of others, buffers too, by name.
    """
    generator = torch.Generator().manual_seed(2)
    chosen = {id(parameters[name]): value for name, value in given.items()}
    alike = of_one_number(p for p in parameters.values() if type(p) is nn.Parameter and not p.is_meta)
    plain = {id(p): p for p in parameters.values() if id(p) in chosen or (id(p) in alike and _hides(p))}
    before = {key: parameter.data for key, parameter in plain.items()}
    try:
        for key, parameter in plain.items():
            noise = torch.randn(parameter.shape, generator=generator, device="cpu")
            new = chosen[key] if key in chosen else parameter.data + noise.to(parameter.data) / 8
            parameter.data = new.to(parameter.data, copy=True)
        yield {name: p.data for name, p in parameters.items() if id(p) in plain}
    finally:
        for key, parameter in plain.items():
            parameter.data = before[key]


def decided_alone(block: nn.Module, graph: torch.fx.Graph, names: Collection[str]) -> dict[str, torch.Tensor]:
    """Of the named parameters, those on which alone the host decided in a recorded run, with their own values.

    What the code does with these shows only with the values that they have.
    """
    found: set[str] = set()
    for decision in (node for node in graph.nodes if node.op != "output" and record_of(node).decision):
        behind, frontier = set(), [decision]
        while frontier:
            node = frontier.pop()
            if node not in behind:
                behind.add(node)
                frontier.extend(node.all_input_nodes)
        if not any(node.op == "placeholder" for node in behind):
            found |= {str(node.target) for node in behind if node.op == "get_attr"}
    return {name: block.get_parameter(name).detach() for name in sorted(found.intersection(names))}


def _hides(value: torch.Tensor) -> bool:
    """Whether one that is of one number may have no effect: a single number other than 0 and 1 has one."""
    return value.numel() > 1 or float(value.detach().flatten()[0]) in (0.0, 1.0)
