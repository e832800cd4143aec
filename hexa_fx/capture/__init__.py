"""nn.Module -> `CapturedBlock`: a block's run on example inputs, as a straight-line torch.fx graph."""

from hexa_fx.capture.captured import CapturedBlock
from hexa_fx.capture.kept import UNKNOWN, ChangedInPlace, StoredValue
from hexa_fx.capture.record import capture
from hexa_fx.capture.records import ModuleCall, NodeRecord, record_of

__all__ = [
    "UNKNOWN",
    "CapturedBlock",
    "ChangedInPlace",
    "ModuleCall",
    "NodeRecord",
    "StoredValue",
    "capture",
    "record_of",
]
