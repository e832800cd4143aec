"""Functions that ask for sizes, in a module that defines no class of a block."""

import torch


def is_long(x: torch.Tensor) -> bool:
    return isinstance(x.shape, torch.Size) and isinstance(x.shape[0], int) and x.shape[0] > 5000


def is_long_by_length(x: torch.Tensor) -> bool:
    return len(x) > 5000
