"""An experiment that finds out whether steps of experts mix the rows of different tokens."""

from __future__ import annotations

import torch

from hexa_fx.operations import operation
from hexa_fx.passes.detect.free_body import Copy, Product, TokenRows
from hexa_fx.passes.detect.graph import is_float
from hexa_fx.passes.detect.steps import StepReader
from hexa_fx.passes.detect.verdict import Refuse


def refuse_mixing(reader: StepReader) -> None:
    """Other rows' tokens are changed; a row that answers to that is mixed with others.

    Raises:
        Refuse: names the first operation whose rows depend on each other.
    """
    steps = [node for node, role in reader.roles.items() if isinstance(role, (Copy, Product)) and is_float(node)]
    order = {node: place for place, node in enumerate(reader.captured.graph.nodes)}
    given = [reader.columns[node] for node, role in reader.roles.items() if isinstance(role, TokenRows)]
    generator = torch.Generator().manual_seed(17)
    for parity in (0, 1):
        replace: dict[torch.fx.Node, torch.Tensor] = {}
        for node in {n for column in given for n in column}:
            value = reader.replay.value(node).clone()
            noise = torch.randn(value.shape, generator=generator, dtype=torch.float64, device="cpu").to(value.device)
            value[parity::2] = noise[parity::2]
            replace[node] = value
        wanted = [n for node in steps for n in reader.columns[node]]
        answers = reader.replay.run(replace, wanted)
        expected = reader.replay.run({n: reader.replay.value(n) for n in replace}, wanted)
        for node in sorted(steps, key=order.__getitem__):
            for member in reader.columns[node]:
                before, after = expected[member], answers[member]
                if before.dim() and not _same(before[1 - parity :: 2], after[1 - parity :: 2]):
                    raise Refuse(f"{operation(node)} inside the experts mixes rows of different tokens", node)


def _same(before: torch.Tensor, after: torch.Tensor) -> bool:
    return torch.allclose(before.double(), after.double(), rtol=1e-9, atol=1e-9, equal_nan=True)  # some are in 8 bits
