"""The layers that kernel packs are made for: those of the models that are served most, at their real sizes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial

import torch
from torch import Tensor

from hexa_fx.codegen.spec import KernelSpec
from hexa_fx.cuda.choosing import typical_card
from hexa_fx.cuda.kernel_set import FfnLayer, fp8_kernel_set, kernel_set, without_data
from hexa_fx.ir import FfnSpec
from hexa_fx.ops.table_layers import MoeFfn, static_of

_SWIGLU = (FfnSpec("silu", "concat"), FfnSpec("silu", "split"))
_GPT_OSS = (FfnSpec("swiglu_oai", "interleaved", "kn", "kn", params=(1.702, 7.0)),)

MODELS = {  # E, k, D, I, and the forms of an expert: stacked with gate and up in one tensor, or in two
    "Mixtral 8x7B": (8, 2, 4096, 14336, _SWIGLU),
    "Mixtral 8x22B": (8, 2, 6144, 16384, _SWIGLU),
    "Qwen3-30B-A3B": (128, 8, 2048, 768, _SWIGLU),
    "Qwen3-235B-A22B": (128, 8, 4096, 1536, _SWIGLU),
    "OLMoE": (64, 8, 2048, 1024, _SWIGLU),
    "gpt-oss-20b": (32, 4, 2880, 2880, _GPT_OSS),
    "gpt-oss-120b": (128, 4, 2880, 2880, _GPT_OSS),
    "DeepSeek-V3": (256, 8, 7168, 2048, _SWIGLU),
    "Kimi-K2": (384, 8, 7168, 2048, _SWIGLU),
    "GLM-4.5": (160, 8, 5120, 1536, _SWIGLU),
}


def layer_of(
    spec: FfnSpec,
    *,
    experts: int,
    top_k: int,
    hidden: int,
    inner: int,
    dtype: torch.dtype = torch.bfloat16,
    biases: bool = False,
    index: torch.dtype = torch.int64,
    gates: torch.dtype | None = torch.float32,
) -> FfnLayer:
    """A layer with contiguous weights of these sizes: E experts, D = `hidden`, I = `inner`."""
    columns, split = 2 * inner if spec.glu in ("concat", "interleaved") else inner, spec.glu == "split"

    def weight(layout: str, inputs: int, outputs: int) -> Tensor:
        return without_data((experts, *((outputs, inputs) if layout == "nk" else (inputs, outputs))), dtype)

    def bias(width: int) -> Tensor | None:
        return without_data((experts, width), dtype) if biases else None

    call = MoeFfn(
        without_data((1, hidden), dtype),
        without_data((1, top_k), index),
        None if gates is None else without_data((1, top_k), gates),
        weight(spec.layout1, hidden, columns),
        bias(columns),
        weight(spec.layout1, hidden, inner) if split else None,
        bias(inner) if split else None,
        weight(spec.layout2, inner, hidden),
        bias(hidden),
        *static_of(spec),
    )
    return FfnLayer(call)


def pack_kernels(arch: int, dtypes: Iterable[torch.dtype]) -> tuple[KernelSpec, ...]:
    """Every kernel that layers of these models launch on a compute capability, in forward and backward, at any number of tokens,
    and on an sm_90 those of FP8 block compute.

    Tiles are those of the card that has a shipped table, and those that other cards of the architecture take by rule.

    Raises:
        KernelError: there are no kernels for the architecture.
    """
    card = typical_card(arch)
    cards = (card, card._replace(name="another"))
    layers = [layer for dtype in dtypes for layer in _layers(dtype)]
    found = [spec for card in cards for layer in layers for spec in kernel_set(layer, card)]
    return tuple(dict.fromkeys(found + [spec for layer in layers for spec in fp8_kernel_set(layer, card)]))


def _layers(dtype: torch.dtype) -> Iterator[FfnLayer]:
    for experts, top_k, hidden, inner, forms in MODELS.values():
        sized = partial(layer_of, experts=experts, top_k=top_k, hidden=hidden, inner=inner, dtype=dtype)
        for spec in forms:
            for gates in (torch.float32, dtype):
                yield sized(spec, biases=spec.glu == "interleaved", gates=gates)
