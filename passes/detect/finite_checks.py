"""Host decisions that ask whether numbers are finite, as assertions do."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.fx

from hexa_fx.capture import CapturedBlock, record_of
from hexa_fx.passes.detect.graph import ancestors, descendants, draws, effects, is_float, operation
from hexa_fx.passes.detect.operations import MOVES, SUMS
from hexa_fx.passes.detect.verdict import Refuse

_CHECKS = frozenset(("isfinite", "isnan", "isinf"))
_REPLACING = frozenset(
    "nan_to_num nan_to_num_ where masked_fill masked_fill_ set_item nansum nanmean fmax fmin".split()
)


def is_check_of_numbers(node: torch.fx.Node) -> bool:
    """Whether all that a decision asks about float tensors is if they are finite."""
    asked = ancestors([node], stop=is_check)
    checks = {n for n in asked if is_check(n)}
    return bool(checks) and not any(is_float(n) for n in asked - checks)


def is_check(node: torch.fx.Node) -> bool:
    """Whether a node is ``isfinite`` or the like, or compares a tensor with itself, which detects NaN."""
    return _compares_with_itself(node) or operation(node) in _CHECKS


def _compares_with_itself(node: torch.fx.Node) -> bool:
    return node.op.startswith("call") and operation(node) in ("eq", "__eq__", "ne") and len(set(node.args)) == 1


def refuse_unless_of_outputs(
    captured: CapturedBlock, decision: torch.fx.Node, of_experts: set[torch.fx.Node], ends: Sequence[torch.fx.Node]
) -> None:
    """Lets a check pass that follows from what the experts give: what is not finite there makes the combined result not finite.

    That is known only after the experts have run, when the block's own code runs from its beginning.

    Args:
        captured: the block.
        decision: the check.
        of_experts: values that depend on experts, among which are those that it asks about.
        ends: what the experts give.

    Raises:
        Refuse: it asks about something else; or the code draws random numbers or writes, which must not happen twice.
    """
    checks = [n for n in ancestors([decision], stop=is_check) if is_check(n)]
    for check in checks:
        for value in (n for n in check.all_input_nodes if n in of_experts):
            of_nan = _compares_with_itself(check) or operation(check) == "isnan"
            if not _is_moved(value, ends) and not (of_nan and _reaches_the_end(value)):
                raise Refuse(
                    "the code takes a host decision on whether numbers inside the experts are finite", decision
                )
            if not bool(record_of(value).value.isfinite().all()):
                raise Refuse(
                    "on the example some numbers inside the experts are not finite, which the code asks about", decision
                )
    if effects(captured.graph) or any(map(draws, captured.graph.nodes)):
        raise Refuse(
            "the code asks whether what experts give is finite, and draws random numbers or writes to buffers: if it is not, the "
            "block would have to start again",
            decision,
        )


def _reaches_the_end(value: torch.fx.Node) -> bool:
    """Whether NaN in ``value`` makes whatever is computed from it NaN."""
    return not any(operation(n) in _REPLACING and n.all_input_nodes for n in descendants([value]))


def _is_moved(value: torch.fx.Node, ends: Sequence[torch.fx.Node]) -> bool:
    """Whether ``value`` is made of the experts' outputs by moves and sums alone."""
    if value in ends:
        return True
    if not value.op.startswith("call") or operation(value) not in MOVES | SUMS:
        return False
    inside = [n for n in value.all_input_nodes if any(end in ancestors([n]) for end in ends)]
    return bool(inside) and all(_is_moved(n, ends) for n in inside)
