"""Keeps the analysis of a block within its memory: with fewer tokens, or with a refusal that says what it needs; and makes the
float64 copy of a block that verification runs on.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from itertools import chain
from typing import Any, TypeVar

import torch
import torch.fx
from torch import nn
from torch.utils import _pytree as pytree

from hexa_fx import registry
from hexa_fx.capture import CapturedBlock, record_of
from hexa_fx.capture.copies import deepcopied
from hexa_fx.capture.observe import Observation
from hexa_fx.capture.record import replaced_parameters
from hexa_fx.capture.records import memory_of
from hexa_fx.config import HexaConfig
from hexa_fx.errors import first_line
from hexa_fx.ir import Refusal
from hexa_fx.isolation.contents import held_by_modules
from hexa_fx.isolation.lookup import is_data
from hexa_fx.isolation.module_tree import modules_of, named_tensors
from hexa_fx.isolation.size import (
    FEW_TOKENS,
    is_large,
    is_out_of_memory,
    raises_in_pieces,
    whole_bytes,
)
from hexa_fx.sources.garbage import collect_all

NO_MEMORY = "there is not enough memory"
"""How a refusal begins that may not hold later."""

log = logging.getLogger(__name__)
Result = TypeVar("Result")

_FEWEST = 4
_LEAST_BYTES = 1 << 24
_SHARE = 4
"""Experiments hold the recorded values several times over."""
_SHARE_OF_WRITES = 2
"""What is written to one place is held after every write as recorded and in float64, but an experiment holds the place once."""


class TooManyTokens(Exception):
    """What the block computes of its tokens takes ``times`` the memory that the analysis may hold."""

    def __init__(self, times: float) -> None:
        super().__init__(times)
        self.times = times


def with_few_enough_tokens(
    analyse: Callable[[Observation, HexaConfig], Result], observation: Observation, config: HexaConfig
) -> Result | Refusal:
    """``analyse`` on as many tokens, with as much memory for weights in float64, as there is. `Refusal`: it is not enough."""
    allowed = config.analysis_bytes
    if raises_in_pieces(observation.module, config.analysis_bytes):
        config = replace(config, probe_tokens=min(config.probe_tokens, FEW_TOKENS))
    while True:
        try:
            large = raises_in_pieces(observation.module, config.analysis_bytes)
            with registry.large_blocks().piece_memory_kept() if large else nullcontext():
                return analyse(observation, config)
        except TooManyTokens as found:
            reason, times = "", found.times
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            reason, times = first_line(error), 1.0
            config = replace(config, analysis_bytes=max(config.analysis_bytes // 8, _LEAST_BYTES))
        _released(reason)
        if config.probe_tokens <= _FEWEST:
            return Refusal(observation.path, _sentence(observation, allowed, reason))
        # half as many, as often as it takes: no block takes less for half as many than half the memory
        few = min(config.probe_tokens, FEW_TOKENS) // 2 ** max(1, math.ceil(math.log2(times)))
        config = replace(config, probe_tokens=max(_FEWEST, few))


def check_recorded(captured: CapturedBlock, config: HexaConfig) -> None:
    """Raises `TooManyTokens` if fewer tokens are possible, and the recorded values are too large for experiments on them."""
    if captured.whole_bytes is None or config.probe_tokens <= _FEWEST:
        return
    written = sum(_float64_bytes(captured, writes=True))
    taken = _SHARE * sum(_float64_bytes(captured, writes=False)) + _SHARE_OF_WRITES * written
    if taken > config.analysis_bytes:
        raise TooManyTokens(taken / config.analysis_bytes)


def room(captured: CapturedBlock, config: HexaConfig) -> int:
    """How many times the recorded tokens a block may be compared on at once, if what it computes grows with their square.

    Autograd keeps what is computed, but not what a place held before it is written to again.
    """
    taken = _SHARE * sum(_float64_bytes(captured, writes=False))
    return max(1, math.isqrt(config.analysis_bytes // max(1, taken)))


def _float64_bytes(captured: CapturedBlock, writes: bool) -> Iterator[int]:
    """Of the recorded values, but for weights: of what was written to a place that was there, or of all others."""
    weights = {record_of(node).storage for node in captured.graph.nodes if node.op == "get_attr"}
    values = (record_of(node).value for node in captured.graph.nodes if record_of(node).writes is writes)
    for leaf in pytree.tree_leaves(list(values)):
        if isinstance(leaf, torch.Tensor) and memory_of(leaf) not in weights:
            yield 8 * leaf.numel()


def _released(reason: str) -> None:
    if reason:
        log.info("the analysis ran out of memory and goes on with fewer tokens: %s", reason)
    collect_all()  # graphs refer to themselves
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def _sentence(observation: Observation, allowed: int, reason: str) -> str:
    devices = {parameter.device for parameter in observation.module.parameters()}
    cuda = sorted((device for device in devices if device.type == "cuda"), key=str)
    needed = f"{allowed / 2**30:.1f} GiB"
    asked = re.search(r"allocate ([\d.]+) ?(bytes|[KMG]iB)", reason)
    number, unit = asked.groups() if asked else ("", "")
    amount = f"{float(number) / 2**20:.1f} MiB" if unit == "bytes" else f"{number} {unit}"
    last = f" (the last attempt asked for {amount} more)" if asked else ""
    if not cuda:
        return (
            f"{NO_MEMORY} to analyse it, which takes up to {needed} beside the model{last}: free as much, or set "
            "HexaConfig(analysis_bytes=...) to what is free, and try again"
        )
    free = torch.cuda.mem_get_info(cuda[0])[0] / 2**30
    return (
        f"{NO_MEMORY} on {cuda[0]} to analyse it, which takes up to {needed} beside the model{last}, and "
        f"{free:.1f} GiB are free: free as much, or optimize the model where more is free (on the host, say) and move the result"
    )


def float64_copy_or_none(block: nn.Module, analysis_bytes: int, as_it_is: bool = False) -> nn.Module | None:
    """The float64 copy, or None if the block holds something that cannot be copied, such as a process group or a lock.

    Every parameter wants a gradient. Parameters and buffers of one value, such as biases before training, get random ones: a term
    that is zero on the probe must not hide that it was lost.

    Args:
        block: to copy.
        analysis_bytes: memory that the analysis may hold. Of a block whose copy would take a good part of it, large weights
            are not copied but upcast where they are used (`hexa_fx.large_blocks`).
        as_it_is: keep parameters and buffers of one value.
    """
    tensors = () if as_it_is else chain(named_tensors(block, "_parameters").values(), _others(block))
    constant = {str(number): tensor for number, tensor in enumerate(tensors) if tensor.numel() > 1}
    try:
        with replaced_parameters(constant, {}, (nn.Parameter, torch.Tensor)):
            return _float64_copy(block, raises_in_pieces(block, analysis_bytes), whole_bytes(analysis_bytes))
    except (TypeError, RuntimeError, AttributeError) as error:
        if is_out_of_memory(error):
            raise
        return None


def _float64_copy(block: nn.Module, in_pieces: bool, limit: int) -> nn.Module:
    memo: dict[int, Any] = {}
    for parameter in named_tensors(block, "_parameters").values():
        if parameter.is_floating_point():
            value, large = parameter.detach(), in_pieces and is_large(parameter)
            raised = registry.large_blocks().upcast(value, limit) if large else value.to(torch.float64, copy=True)
            memo[id(parameter)] = nn.Parameter(raised)
            _keep_settings(parameter, memo[id(parameter)])
    for value in _others(block):
        if id(value) not in memo:
            dtype = torch.float64 if value.is_floating_point() else value.dtype
            memo[id(value)] = value.detach().to(dtype, copy=True)
            _keep_settings(value, memo[id(value)])
    memo |= {id(held.value): held.value for held in held_by_modules(block) if is_data(held.value)}
    return deepcopied(block, memo)


def _keep_settings(tensor: torch.Tensor, copied: torch.Tensor) -> None:
    """Gives a copy what was put on a tensor, which the code may ask for."""
    vars(copied).update({name: value for name, value in vars(tensor).items() if not isinstance(value, torch.Tensor)})


def _others(block: nn.Module) -> Iterator[torch.Tensor]:
    """Buffers, and tensors in attributes."""
    for child in modules_of(block):
        for value in (*child._buffers.values(), *child.__dict__.values()):
            if isinstance(value, torch.Tensor):
                yield value
