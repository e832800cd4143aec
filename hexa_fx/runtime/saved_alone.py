"""What ``state_dict`` gives of parameters that lie side by side: tensors with storages of their own, on the same memory.

Libraries take tensors of one storage for one tensor under several names: accelerate saves the first of them only, safetensors'
``save_model`` refuses them, and `torch.save` of one writes all. Writing to what ``state_dict`` gives still writes to the parameter.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, UntypedStorage, nn

from hexa_fx.isolation.size import owns_its_storage
from hexa_fx.torch_private import DisableTorchFunction


def save_alone(owners: Iterable[nn.Module]) -> None:
    """Lets ``state_dict`` of each module give its parameters so, from now on."""
    for owner in owners:
        if not _is_asked(owner):
            owner.register_state_dict_post_hook(_alone_in)


def follow(model: nn.Module, other: nn.Module) -> None:
    """The same for the modules of ``model`` that `save_alone` was called for in ``other``, which shares its parameters."""
    modules = dict(model.named_modules())
    save_alone(modules[path] for path, owner in other.named_modules() if _is_asked(owner))


@contextmanager
def as_before(model: nn.Module) -> Iterator[None]:
    """Ends at its exit what was begun inside."""
    asked = any(map(_is_asked, model.modules()))
    try:
        yield
    finally:
        if not asked:
            give_back(model)


def give_back(model: nn.Module) -> None:
    """Ends it for all modules of a model: their parameters stay where they are, with storages of their own."""
    for owner in filter(_is_asked, model.modules()):
        for key in [key for key, hook in owner._state_dict_hooks.items() if hook is _alone_in]:
            del owner._state_dict_hooks[key]
        for parameter in filter(_is_part, owner.parameters(recurse=False)):
            parameter.data = with_own_storage(parameter.detach())


def _is_asked(owner: nn.Module) -> bool:
    return _alone_in in owner._state_dict_hooks.values()


def _alone_in(owner: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    for name in owner._parameters:
        value = state.get(prefix + name)
        if type(value) is Tensor and _is_part(value):
            state[prefix + name] = alone = value.detach()
            alone.data = with_own_storage(value)  # which keeps the version that it shares with the parameter


def _is_part(value: Any) -> bool:
    """Whether it is a plain tensor, one part of a storage that this process has for itself."""
    if type(value) not in (Tensor, nn.Parameter) or value.device.type not in ("cpu", "cuda"):
        return False
    in_shared_memory = value.device.type == "cpu" and value.is_shared()
    return value.numel() > 0 and value.is_contiguous() and not owns_its_storage(value) and not in_shared_memory


def with_own_storage(value: Tensor) -> Tensor:
    """A tensor on the same memory, which it keeps alive, that has a storage for itself; on the meta device a view."""
    if value.is_meta:
        return value
    start = value.storage_offset() * value.element_size()
    with torch.inference_mode(False), torch.no_grad(), DisableTorchFunction():
        part: UntypedStorage = value.untyped_storage()[start : start + value.numel() * value.element_size()]
        return torch.empty(0, dtype=value.dtype, device=value.device).set_(part, 0, value.shape, value.stride())
