"""Tensors on a part of larger memory whose storage is that part alone."""

from __future__ import annotations

import torch
from torch import Tensor, UntypedStorage

from hexa_fx.torch_private import DisableTorchFunction


def with_own_storage(value: Tensor) -> Tensor:
    """A tensor on the same memory, which it keeps alive, that has a storage for itself; on the meta device a view.

    Whatever looks at storages takes tensors of one storage for one tensor under several names: accelerate saves the first of them
    only, safetensors' ``save_model`` refuses them, and `torch.save` of one writes all.
    """
    if value.is_meta:
        return value
    start = value.storage_offset() * value.element_size()
    with torch.inference_mode(False), torch.no_grad(), DisableTorchFunction():
        part: UntypedStorage = value.untyped_storage()[start : start + value.numel() * value.element_size()]
        return torch.empty(0, dtype=value.dtype, device=value.device).set_(part, 0, value.shape, value.stride())
