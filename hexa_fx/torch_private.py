"""Names of torch that are not public, in one place, with what happens in a version of torch that lacks one.

Those that rewriting and the operators rest on are required: without one, the first use of hexa_fx raises an `ImportError` that says
which name and which version. Those with an equal in public names, if a slower one, are replaced by it. Those that one feature needs
are imported when it is used, whose error says so.

Not here are `torch.utils._pytree`, which all packages around torch import, and what is documented in spite of its name
(`torch.Tensor._make_wrapper_subclass`). `hexa_fx/cuda` and `hexa_fx/distributed` have names of their own.
"""

# ruff: noqa: F401
from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.multiprocessing.reductions import StorageWeakRef

try:
    from torch import _add_batch_dim, _embedding_bag_forward_only, _remove_batch_dim
    from torch._C import (
        DisableTorchFunction,  # what hexa_fx itself computes while modes of the user's or of its own watch
        DispatchKey,  # the operators' kernels, by what called them
        DispatchKeySet,
        TensorBase,  # sets of `data` and `requires_grad`, told from other calls
        _after_ADInplaceOrView_keyset,
        _after_autograd_keyset,
        _are_functorch_transforms_active,  # in what kind of call an operator or a block is
        _AutoDispatchBelowAutograd,
        _current_autograd_node,  # which forward a part of a backward belongs to
        _current_graph_task_id,
        _disabled_torch_function_impl,  # tensors of our own
        _dispatch_has_kernel_for_dispatch_key,
        _ExcludeDispatchKeyGuard,
        _len_torch_dispatch_stack,
        _len_torch_function_stack,
        _vmapmode_decrement_nesting,
        _vmapmode_increment_nesting,
    )
    from torch._C._autograd import _get_sequence_nr, _top_saved_tensors_default_hooks
    from torch._C._functorch import (
        TransformType,
        get_interpreter_stack,
        is_functorch_wrapped_tensor,
        is_legacy_batchedtensor,
        peek_interpreter_stack,
    )
    from torch._ops import OpOverload
    from torch._subclasses.fake_tensor import FakeTensor
    from torch._subclasses.functional_tensor import FunctionalTensor
    from torch.fx.graph_module import _assign_attr
    from torch.nn.modules.conv import _ConvNd
    from torch.overrides import _get_current_function_mode_stack
    from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
except ImportError as error:
    raise ImportError(
        f"hexa_fx does not work with torch {torch.__version__}: {error}. Install a version that it is tested with (docs/guide.md)"
    ) from error


try:
    from torch._C import _is_any_autocast_enabled
except ImportError:

    def _is_any_autocast_enabled() -> bool:
        return any(map(torch.is_autocast_enabled, ("cpu", "cuda")))


try:
    from torch._C import _any_requires_grad
except ImportError:

    def _any_requires_grad(*args: Any, **kwargs: Any) -> bool:
        return any(isinstance(value, Tensor) and value.requires_grad for value in (*args, *kwargs.values()))


try:
    from torch._C import _get_tracing_state
except ImportError:

    def _get_tracing_state() -> Any:  # type: ignore[misc]
        return torch.jit.is_tracing() or None  # type: ignore[attr-defined]


try:
    from torch._compile import _disable_dynamo
except ImportError:
    _disable_dynamo = torch.compiler.disable  # imports a compiler at once

try:
    from torch import _foreach_sub
except ImportError:

    def _foreach_sub(left: Sequence[Tensor], right: Sequence[Tensor]) -> list[Tensor]:  # type: ignore[no-redef, misc]
        return [one - other for one, other in zip(left, right)]


try:
    from torch import _foreach_copy_
except ImportError:

    def _foreach_copy_(into: Sequence[Tensor], values: Sequence[Tensor]) -> list[Tensor]:  # type: ignore[no-redef, misc]
        return [one.copy_(value) for one, value in zip(into, values)]


try:
    from torch._C import _will_engine_execute_node
except ImportError:  # torch adds gradients to `.grad`

    def _will_engine_execute_node(node: torch.autograd.graph.Node) -> bool:
        return False


try:
    from torch import _debug_has_internal_overlap
except ImportError:

    def _debug_has_internal_overlap(tensor: Tensor) -> int:  # type: ignore[no-redef, misc]
        """Always 2: it cannot be ruled out. More is compared and copied then."""
        return 2


try:
    from torch._library.custom_ops import _maybe_get_opdef
except ImportError:  # operators that others write in Python are not looked into

    def _maybe_get_opdef(op: Any) -> None:  # type: ignore[misc]
        return None


try:
    from torch.utils._dtype_abbrs import dtype_abbrs
except ImportError:  # their long names are shown
    dtype_abbrs = {}

grouped_mm = getattr(torch, "_grouped_mm", torch.nn.functional.grouped_mm)
_is_amx_tile_supported: Callable[[], bool] = getattr(
    torch.cpu, "_is_amx_tile_supported", bool
)  # else products run in float32
_is_avx512_bf16_supported: Callable[[], bool] = getattr(torch.cpu, "_is_avx512_bf16_supported", bool)
_is_amx_fp16_supported: Callable[[], bool] = getattr(torch.cpu, "_is_amx_fp16_supported", bool)


_AUTOCAST_KEYS = DispatchKeySet(DispatchKey.AutocastCPU) | DispatchKeySet(DispatchKey.AutocastCUDA)


def without_autocast() -> _ExcludeDispatchKeyGuard:
    """A context in which torch's operators ignore autocast."""
    return _ExcludeDispatchKeyGuard(_AUTOCAST_KEYS)


def is_forward_mode() -> bool:
    """Whether derivatives are taken forward, which operators cannot."""
    return forward_ad._current_level >= 0


# What features import when they are used, since it takes longer than importing hexa_fx.


def is_compiler_at_work() -> bool:
    """Whether a compiler is at work on the code that this is called from, as where it asks its backend."""
    from torch._C._dynamo.eval_frame import get_eval_frame_callback

    return get_eval_frame_callback() not in (None, False)


def untraced(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, which a compiler that is at work where it is called passes over, with all that it calls.

    `torch.compiler.disable` would import all of dynamo, and takes a moment in every call. A torch that lacks the names compiles it.
    """
    try:
        from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy
    except ImportError:
        return function
    set_code_exec_strategy(function.__code__, _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP))
    return function


def lookup_backend(name: str) -> Callable[..., Any]:
    """A backend of torch.compile by its name."""
    from torch._dynamo import lookup_backend

    return lookup_backend(name)


def under_vmap(rule: Callable[..., Any], operator: OpOverload, args: tuple[Any, ...]) -> Any:
    """Calls an operator under `torch.vmap`, whose ``rule`` takes what it says of the batch, the batched dimensions and ``args``."""
    from torch._functorch.autograd_function import custom_function_call_vmap_helper
    from torch._functorch.pyfunctorch import retrieve_current_functorch_interpreter

    interpreter: Any = retrieve_current_functorch_interpreter()
    return custom_function_call_vmap_helper(interpreter, rule, operator, *args)


def is_traced() -> bool:
    """Whether torch writes structured traces, as TORCH_TRACE makes it; a torch without these writes none."""
    try:
        from torch._logging._internal import trace_log
    except ImportError:
        return False
    return bool(trace_log.handlers) and bool(os.environ.get("TORCH_TRACE"))


def write_trace(name: str, text: Callable[[], str]) -> None:
    """Writes an artifact of a structured trace, for tlparse."""
    from torch._logging._internal import trace_structured

    metadata = {"name": name, "encoding": "string"}
    trace_structured("artifact", metadata_fn=lambda: metadata, payload_fn=text, expect_trace_id=False)


def graph_break(message: str) -> None:
    """Ends the graph that dynamo traces, with these words where ``fullgraph`` makes it an error. Only dynamo calls it."""
    torch._dynamo.graph_break(msg=message)


class DispatchMode(TorchDispatchMode):
    """A dispatch mode whose code dynamo need not be kept from: it is never compiled.

    Torch wraps the code of others in `torch._disable_dynamo`, which imports all of dynamo in the first call (a second of a process)
    and takes as long as a small operation in every further one.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


def _kept(device: int, mempool_id: tuple[int, int]) -> None:
    """Where torch cannot give up the memory of a recording that failed."""


_cuda_endAllocateToPool = getattr(torch._C, "_cuda_endAllocateToPool", _kept)
_cuda_releasePool = getattr(torch._C, "_cuda_releasePool", _kept)
