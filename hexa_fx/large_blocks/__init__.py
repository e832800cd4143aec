"""Blocks too large for a copy in float64: their weights count as float64 where they lie, and their gradients stay products.

The core does not import this package. It asks `hexa_fx.registry.large_blocks` for it where a block is so large.
"""

from hexa_fx.large_blocks.lazy_gradient import compared, lazy_gradients
from hexa_fx.large_blocks.upcast_weight import piece_memory_kept, upcast

__all__ = ["compared", "lazy_gradients", "piece_memory_kept", "upcast"]
