"""Packed weights of listed experts, each expert's by itself, read as one.

The core does not import this package. It asks `hexa_fx.registry.packed` for a reader where experts' parameters are packed.
"""

from hexa_fx.packed.reader import packed_weights
from hexa_fx.packed.stacked_codes import StackedCodes
from hexa_fx.packed.stacked_parts import StackedParts

__all__ = ["StackedCodes", "StackedParts", "packed_weights"]
