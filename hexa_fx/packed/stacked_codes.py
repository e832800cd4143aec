"""Reads the 4-bit weights of listed experts (bitsandbytes' `Linear4bit`) as one packed weight, without a second copy of codes.

The user's parameters stay the same objects, and only their memory moves: into one tensor of
all experts' codes. Each parameter keeps a storage of its own over its part, since bitsandbytes copies storages whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.dlpack import from_dlpack

from hexa_fx.formats.formed import PackedStack
from hexa_fx.formats.four_bit import NF4
from hexa_fx.formats.quantized_weight import QuantizedWeight
from hexa_fx.packed.reader import PackedReader
from hexa_fx.runtime.guards import GuardMiss
from hexa_fx.sources import linear4bit
from hexa_fx.torch_private import DisableTorchFunction


class StackedCodes(PackedReader):
    """A weight that is read as a `QuantizedWeight` (E, N, K)."""

    def _bind(self, block: nn.Module) -> None:
        super()._bind(block)
        self._lies: list[tuple[Any, int, Tensor]] = []

    def _kind(self, first: Any) -> tuple[str, torch.dtype, bool]:
        return NF4.name, first.quant_state.dtype, False

    def _still_in_place(self, parameters: Sequence[Any]) -> bool:
        return len(parameters) == len(self._lies) and all(
            parameter is known and parameter.quant_state.absmax is absmax
            for parameter, (known, _, absmax) in zip(parameters, self._lies)
        )

    def _copied(self, parameters: Sequence[Any]) -> PackedStack:
        parts = self.in_parts(parameters)
        codes = [torch.cat([linear4bit.codes_of(p) for p in alike]) for alike in zip(*parts)]
        scales = [torch.cat([linear4bit.scales_of(p.quant_state) for p in alike]) for alike in zip(*parts)]
        return PackedStack(torch.stack(codes), (torch.stack(scales),), NF4.name, parameters[0].quant_state.dtype)

    def _check_in_trace(self) -> None:
        self._seen_in_trace()

    def _seen_in_trace(self) -> list[Any]:
        parameters: list[Any] = self.tensors_in_trace()
        for path, parameter in zip(self.paths, parameters):
            state = getattr(parameter, "quant_state", None)
            if state is None or linear4bit.why_not(parameter) or getattr(state, "packing_format_for_cpu", False):
                raise GuardMiss(f"{'.'.join(path)} is no 4-bit weight that is read as it is now")
        return parameters

    def _in_place(self, parameters: Sequence[Tensor]) -> bool:
        return len(parameters) == len(self._lies) and all(
            parameter is known and parameter.data_ptr() == place and parameter.quant_state.absmax is absmax  # type: ignore[attr-defined]
            for parameter, (known, place, absmax) in zip(parameters, self._lies)
        )

    def _pack(self, parameters: Sequence[Any]) -> QuantizedWeight:
        for path, parameter in zip(self.paths, parameters):
            if not linear4bit.is_four_bit(parameter):
                raise GuardMiss(f"{'.'.join(path)} is no longer a 4-bit weight")
            linear4bit.in_rows(self.owner_of(path))
            if reason := linear4bit.why_not(parameter):
                raise GuardMiss(f"{'.'.join(path)} is {reason}")
        parts, first = self.in_parts(parameters), parameters[0]
        count = len(parts[0])
        rows, columns = sum(part[0].quant_state.shape[0] for part in parts), first.quant_state.shape[1]
        shapes = {(part[0].quant_state.shape[0], columns, first.device) for part in parts}
        if {(*p.quant_state.shape, p.device) for p in parameters} != shapes or len(set(map(id, parameters))) < len(
            parameters
        ):
            raise GuardMiss("the experts' 4-bit weights differ in shape or device, or are shared")
        with torch.inference_mode(False), torch.no_grad(), DisableTorchFunction():
            codes = torch.empty((count, rows, columns // 2), dtype=torch.uint8, device=first.device)
            scales = torch.empty((count, rows * columns // NF4.block), dtype=torch.float32, device=first.device)
            begin = 0
            for part in parts:
                end = begin + part[0].quant_state.shape[0]
                blocks = slice(begin * columns // NF4.block, end * columns // NF4.block)
                for expert, parameter in enumerate(part):
                    _place(parameter, codes[expert, begin:end], scales[expert, blocks])
                begin = end
        if first.is_cuda:
            torch.cuda.empty_cache()  # what the experts have left lies in blocks of their own
        self._lies = [(p, p.data_ptr(), p.quant_state.absmax) for p in parameters]
        return QuantizedWeight(codes, [scales], NF4.name, first.quant_state.dtype)


def _place(parameter: Any, codes: Tensor, scales: Tensor) -> None:
    """Moves a parameter's codes, and its scales if they are as they are read."""
    state = parameter.quant_state
    codes.copy_(linear4bit.codes_of(parameter))
    scales.copy_(linear4bit.scales_of(state))
    flat = from_dlpack(codes.view(-1))
    parameter.data = flat.view(parameter.dtype).view(parameter.shape)
    if state.state2 is None and state.absmax.dtype == scales.dtype:
        state.absmax = from_dlpack(scales).view(state.absmax.shape)
