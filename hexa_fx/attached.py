"""What `optimize` leaves on a model: its report, its graphs, and the session of one that is spread over devices."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, Literal

from torch import nn

from hexa_fx.graphs import Graphs
from hexa_fx.plan import AttachedPartition
from hexa_fx.report import OptimizationReport, with_plan

if TYPE_CHECKING:
    from hexa_fx.distributed.session import PartitionSession

log = logging.getLogger(__name__)
Name = Literal["report", "graphs", "partition"]
_KINDS: dict[Name, type] = {"report": OptimizationReport, "graphs": Graphs, "partition": AttachedPartition}


def attach(model: nn.Module, name: Name, value: Any) -> None:
    """Sets an attribute on this instance, under a name of ours where the model already has one of its own."""
    if hasattr(model, name) and not isinstance(vars(model).get(name), _KINDS[name]):
        log.warning("%s has an attribute %r of its own; hexa_fx's is .hexa_%s", type(model).__name__, name, name)
        model.__dict__[f"hexa_{name}"] = value
        return
    model.__dict__[name] = value


def attached(model: nn.Module, name: Name) -> Any:
    """The report, graphs or session that `optimize` left on a model, under whichever name."""
    return vars(model).get(f"hexa_{name}") or vars(model)[name]


def has_session(module: nn.Module) -> bool:
    """Whether it is spread over devices."""
    return any(isinstance(vars(module).get(name), AttachedPartition) for name in ("partition", "hexa_partition"))


def detach(module: nn.Module) -> None:
    """Takes off all that was left on a module."""
    for name, kind in _KINDS.items():
        for key in (name, f"hexa_{name}"):
            if isinstance(vars(module).get(key), kind):
                del module.__dict__[key]


def note_session(session: PartitionSession) -> None:
    """Leaves on a model what it runs now that its plan was exchanged."""
    model = session.model
    graphs = {path: next(iter(forms.values())) for path, forms in session.graphs.items()}
    report = with_plan(attached(model, "report"), session.plan, graphs)
    for name, value in {"partition": session, "report": report}.items():
        model.__dict__[f"hexa_{name}" if f"hexa_{name}" in vars(model) else name] = value
