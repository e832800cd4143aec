"""An operator of Python code. It is defined once: mutants of the zoo run the code of its modules anew, and torch frees the operator
that a second definition replaces."""

from typing import Any

import torch


@torch.library.custom_op("hexa_fx_zoo::add_rows", mutates_args=())
def add_rows(onto: torch.Tensor, places: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Adds rows up in the same order in every call, whatever the process asks of other code."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        return onto.index_add(0, places, rows)
    finally:
        torch.use_deterministic_algorithms(before)


def _of_rows(ctx: Any, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
    ctx.save_for_backward(inputs[1])


def _to_rows(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, torch.Tensor]:
    (places,) = ctx.saved_tensors
    return gradient, None, gradient[places]


add_rows.register_autograd(_to_rows, setup_context=_of_rows)
