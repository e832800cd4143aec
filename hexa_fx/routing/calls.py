"""The calls of a model: which tokens they have, and which call a recomputation in backward belongs to."""

from __future__ import annotations

import inspect
import sys
from collections import deque
from dataclasses import dataclass, field
from types import CodeType, FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling

from hexa_fx.errors import InputError
from hexa_fx.torch_private import _current_autograd_node, _current_graph_task_id, _get_sequence_nr

_TOKENS = ("input_ids", "inputs_embeds", "hidden_states")


@dataclass
class ModelCall:
    """One call of a model while routing is recorded or replayed.

    Args:
        shape: of its tokens, (B, S), or (T,) for rows without a batch.
        real: (rows,) bool mask of the tokens that are no padding; None: all.
        lengths: tokens that are no padding, of each row of the batch.
        start: where these tokens start in the log.
        first, last: autograd's sequence numbers when the call began and ended.
        in_function: whether it ran in an autograd function's forward, as with a reentrant checkpoint around it.
    """

    shape: tuple[int, ...]
    real: Tensor | None
    lengths: tuple[int, ...]
    start: int = 0
    first: int = field(default_factory=lambda: _get_sequence_nr())
    last: int = 0
    in_function: bool = field(default_factory=lambda: not torch.is_grad_enabled() and _is_below("forward"))

    @property
    def start_of_graph(self) -> int | None:
        """The number of its first node, or of the function's in which it ran; None if it made none: nothing is computed again."""
        return None if self.last == self.first and not self.in_function else self.first - self.in_function

    @property
    def rows(self) -> int:
        """Tokens, padding included."""
        return torch.Size(self.shape).numel()

    @property
    def tokens(self) -> int:
        """Tokens without padding."""
        return sum(self.lengths)


def read_call(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ModelCall:
    """The tokens of a call: those of the argument ``input_ids``, ``inputs_embeds`` or ``hidden_states``, or of the first tensor.

    A two-dimensional ``attention_mask`` says which are padding; of a longer one, as with a cache, the last columns count. Of one
    of queries and keys, as `generate` makes for a static cache, padding are the tokens that do not see themselves. How many keys
    came before, the call's cache says: the one argument with `get_seq_length`, whatever its name.

    Raises:
        InputError: there is no tensor among the arguments, the mask does not fit, or nothing says how many keys came before.
    """
    named = _named(module, args, kwargs)
    tensors = [value for value in named.values() if isinstance(value, Tensor) and value.dim()]
    chosen = [named[name] for name in _TOKENS if isinstance(named.get(name), Tensor)] or tensors
    if not chosen:
        raise InputError(f"{type(module).__name__} was called without a tensor, so that its tokens cannot be counted")
    tokens = chosen[0]
    shape = tuple(tokens.shape[:-1] if tokens.is_floating_point() else tokens.shape)
    shape = (shape[0], torch.Size(shape[1:]).numel()) if len(shape) > 1 else shape
    mask = named.get("attention_mask")
    if isinstance(mask, dict):  # of layers of several kinds
        mask = mask.get("full_attention", next(iter(mask.values()), None))
    if isinstance(mask, Tensor) and mask.dim() == 4 and len(shape) == 2:
        mask = _seen_by_themselves(mask, shape, [*named.values()])
    if not isinstance(mask, Tensor) or mask.dim() != 2 or len(shape) != 2:
        lengths = (shape[1],) * shape[0] if len(shape) == 2 else (torch.Size(shape).numel(),)
        return ModelCall(shape, None, lengths)
    if mask.shape[0] != shape[0] or mask.shape[1] < shape[1]:
        raise InputError(f"the attention mask is {list(mask.shape)}, and the tokens are {list(shape)}")
    real = mask[:, mask.shape[1] - shape[1] :] != 0
    lengths = tuple(real.sum(1).tolist())
    return ModelCall(shape, None if sum(lengths) == real.numel() else real.reshape(-1), lengths)


def _seen_by_themselves(mask: Tensor, shape: tuple[int, ...], arguments: list[Any]) -> Tensor:
    """(B, S) of a mask (B or 1, heads or 1, S, keys), which is bool or is added to scores; ``arguments``: of the call."""
    queries, keys = mask.shape[2:]
    if mask.shape[0] not in (1, shape[0]) or queries != shape[1] or keys < queries:
        raise InputError(f"the attention mask is {list(mask.shape)}, and the tokens are {list(shape)}")
    start = 0 if keys == queries else min(_keys_before(mask, arguments), keys - queries)
    own = mask[..., start : start + queries].diagonal(dim1=2, dim2=3)
    seen = own > torch.finfo(mask.dtype).min / 2 if mask.is_floating_point() else own != 0
    return seen.any(1).expand(shape)


def _keys_before(mask: Tensor, arguments: list[Any]) -> int:
    """How many keys a cache among the arguments holds; behind them, a static one has room for more."""
    lengths = [value.get_seq_length for value in arguments if hasattr(value, "get_seq_length")]
    if len(lengths) != 1:
        raise InputError(
            f"the attention mask is {list(mask.shape)}, and which of its keys belong to this call is unknown: {len(lengths)} "
            "arguments are caches with get_seq_length(), and it takes one; pass an attention mask of (batch, tokens)"
        )
    return int(lengths[0]())


def _named(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    try:
        bound = inspect.signature(module.forward).bind_partial(*args, **kwargs)
    except (TypeError, ValueError):
        return {**{str(place): value for place, value in enumerate(args)}, **kwargs}
    found: dict[str, Any] = {}
    for name, value in bound.arguments.items():
        kind = bound.signature.parameters[name].kind
        if kind is inspect.Parameter.VAR_KEYWORD:
            found |= value
        elif kind is inspect.Parameter.VAR_POSITIONAL:
            found |= {f"{name}{place}": item for place, item in enumerate(value)}
        else:
            found[name] = value
    return found


def in_backward() -> bool:
    """Whether autograd runs a backward here: a forward inside it is a recomputation."""
    return _current_graph_task_id() != -1


class EndedReplay:
    """Raises where backward computes one of some calls again that were replayed, and would be routed otherwise now."""

    def __init__(self) -> None:
        self.calls: deque[tuple[int, int]] = deque(maxlen=64)

    def add(self, calls: list[ModelCall]) -> None:
        """The calls of a context that has ended."""
        starts = [start for call in calls if (start := call.start_of_graph) is not None]
        if starts:
            self.calls.append((min(starts), max(_get_sequence_nr(), *(call.last for call in calls))))

    def __call__(self) -> None:
        """To be called before a block.

        Raises:
            InputError: this is a part of such a call.
        """
        if is_compiling() or not in_backward():
            return
        number = _number()
        if any(first <= number < last for first, last in self.calls):
            raise InputError(
                "backward computes a forward again that ran inside replay_routing, and would route its tokens by itself now; run "
                "backward inside the context in which the forward ran"
            )


def recomputed(calls: list[ModelCall]) -> ModelCall:
    """The call whose forward is computed again: the last one that began before the node was made in which backward is now.

    Raises:
        InputError: there is none.
    """
    number = _number()
    before = [call for call in calls if (start := call.start_of_graph) is not None and start <= number]
    if not before:
        raise InputError(
            "backward computes a forward again that did not run inside this context; run backward inside the context in which "
            "the forward ran"
        )
    return before[-1]


def is_nested() -> bool:
    """Whether what backward computes again is a part of what another function's backward computed again, in a graph of its own."""
    return _is_below("backward", within=torch.autograd.backward.__code__)


def _is_below(method: str, within: CodeType | None = None) -> bool:
    """Whether a method of an autograd function called what runs, by way of ``within``."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        code = frame.f_code
        if within is None and code.co_name == method and code.co_varnames[:1] == ("ctx",):
            return True
        within = None if code is within else within
        frame = frame.f_back
    return False


def _number() -> int:
    """Autograd's sequence number of the node in which backward is."""
    node: Any = _current_autograd_node()
    return int(node._sequence_nr())
