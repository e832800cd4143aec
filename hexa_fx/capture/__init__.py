"""nn.Module -> `CapturedBlock`: a block's run on example inputs, as a straight-line torch.fx graph."""

from hexa_fx.capture.collect import Access
from hexa_fx.capture.record import UNKNOWN, CapturedBlock, StoredValue, capture
from hexa_fx.capture.records import ModuleCall, NodeRecord, record_of

__all__ = ["UNKNOWN", "Access", "CapturedBlock", "ModuleCall", "NodeRecord", "StoredValue", "capture", "record_of"]
