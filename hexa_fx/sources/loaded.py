"""Expert weights that other libraries loaded packed, made packed parameters that operators and the modules' own code read.

What is read is compared with what the library itself makes of it, for one expert of each weight.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from hexa_fx.errors import InputError
from hexa_fx.formats.blocks import FP8_BLOCK
from hexa_fx.formats.four_bit import MXFP4, NF4, NF4_DOUBLE
from hexa_fx.formats.quantized_weight import QuantizedWeight
from hexa_fx.isolation.module_tree import inside
from hexa_fx.sources import linear4bit
from hexa_fx.sources.packed_parameters import set_packed

log = logging.getLogger(__name__)

_MXFP4 = "transformers.integrations.mxfp4"
_GPT_OSS = "transformers.models.gpt_oss.modeling_gpt_oss"
_OTHERS = (
    "stands for other numbers by its library's own dequantisation than hexa_fx reads; please report this, with the version of "
    "the library"
)
_PROJECTIONS = ("gate_up_proj", "down_proj")


def adopt_loaded(model: nn.Module) -> None:
    """Makes packed parameters of what transformers and bitsandbytes load packed: FP8 blocks, 4-bit stacks, MXFP4.

    Raises:
        InputError: scales are of blocks that no format has, or transformers gives other numbers of MXFP4 than we read.
    """
    dtypes = (p.dtype for p in model.parameters() if p.dtype in (torch.bfloat16, torch.float16))
    dtype = next(dtypes, torch.get_default_dtype())
    for path, owner in list(model.named_modules()):
        _adopt_fp8(path, owner, dtype)
        _adopt_stacks(path, owner)
        if type(owner).__module__ == _MXFP4 and hasattr(owner, f"{_PROJECTIONS[0]}_precision_config"):
            _adopt_mxfp4(model, path, owner, dtype)
            _release(model, path)


def _adopt_fp8(path: str, owner: nn.Module, dtype: torch.dtype) -> None:
    """Weights of transformers' `finegrained_fp8`: (E, N, K) in E4M3, another of its name and ``_scale_inv`` for each 128 x 128.

    Such a module's own forward multiplies dense weights with rows as they are, and needs a GPU and a kernel for packed ones.
    """
    parameters = dict(owner.named_parameters(recurse=False, remove_duplicate=False))
    for name, weight in parameters.items():
        scales = parameters.get(f"{name}_scale_inv")
        if scales is None or weight.dtype != FP8_BLOCK.dtype or weight.dim() != 3:
            continue
        wanted = FP8_BLOCK.scale_shapes(weight.shape)[0]
        if tuple(scales.shape) != wanted:
            raise InputError(
                f"{path}.{name} has scales {tuple(scales.shape)}, of other blocks than 128 x 128: load the model dequantised "
                "(FineGrainedFP8Config(dequantize=True)), and hexa_fx.quantize_experts_ packs its experts again"
            )
        _set(owner, name, QuantizedWeight(weight.detach(), [scales.detach().float()], FP8_BLOCK.name, dtype))


def _set(owner: nn.Module, name: str, weight: QuantizedWeight) -> None:
    set_packed(owner, name, nn.Parameter(weight, requires_grad=False))


# -- bitsandbytes: a stack of matrices as one parameter --------------------------------------------------------------------


def _adopt_stacks(path: str, owner: nn.Module) -> None:
    """Parameters (E, ., .) that bitsandbytes dequantises whole whenever they are read (`replace_parameter_4bit`)."""
    if not parametrize.is_parametrized(owner):
        return
    for name, made in list(owner.parametrizations.items()):  # type: ignore[union-attr,operator]
        state = getattr(made[0], "quant_state", None) if len(made) == 1 else None
        if state is None or len(state.shape) != 3 or _why_not_stack(state):
            continue
        where = inside(path, name)
        with torch.no_grad():
            weight = _stack(made.original.detach(), state)
            if not _same(weight.expert(0), getattr(owner, name)[0]):
                log.warning("%s %s; it is unpacked as a whole", where, _OTHERS)
                continue
        _remove(owner, name)
        _set(owner, name, weight)


def _remove(owner: nn.Module, name: str) -> None:
    """Takes a parametrization off this module only: torch would change the class, which copies of the module share."""
    kind, made = type(owner), owner._modules["parametrizations"]
    assert made is not None
    del made._modules[name]
    if made._modules:
        own = {key: value for key, value in vars(kind).items() if key not in (name, "__dict__", "__weakref__")}
        owner.__class__ = type(kind.__name__, kind.__bases__, own)
    else:
        del owner._modules["parametrizations"]
        owner.__class__ = kind.__bases__[0]


def _why_not_stack(state: Any) -> str:
    """Why a stack's codes are not read expert by expert, so that its own dequantisation stays; empty if they are."""
    if state.quant_type != "nf4" or state.blocksize != NF4.block:
        return f"{state.quant_type} in blocks of {state.blocksize}"
    return NF4.why_not(state.shape)


def _stack(codes: Tensor, state: Any) -> QuantizedWeight:
    experts, rows, columns = state.shape
    packed = codes.reshape(-1).view(torch.uint8).view(experts, rows, columns // 2)
    blocks = rows * columns // NF4.block
    if state.state2 is None or blocks % state.state2.blocksize or state.state2.blocksize != 256:
        return QuantizedWeight(packed, [linear4bit.scales_of(state).view(experts, blocks)], NF4.name, state.dtype)
    nested = state.state2
    offset = state.offset.float().reshape(1).expand(experts).contiguous()
    values = nested.code.float().expand(experts, -1).contiguous()
    scales = state.absmax.view(experts, blocks), nested.absmax.float().view(experts, -1), offset, values
    return QuantizedWeight(packed, scales, NF4_DOUBLE.name, state.dtype)


# -- transformers: gpt-oss in MXFP4 ----------------------------------------------------------------------------------------


def _adopt_mxfp4(model: nn.Module, path: str, experts: Any, dtype: torch.dtype) -> None:
    """Replaces experts whose forward is a Triton kernel by those that transformers dequantises to, with the codes as they are.

    The module around them runs the router in that kernel, too, and is replaced with them. Codes lie as the kernel wants them, and
    the kernel's own layouts take them back.
    """
    mxfp4, gpt_oss = importlib.import_module(_MXFP4), importlib.import_module(_GPT_OSS)
    above, _, last = path.rpartition(".")
    owner, config = model.get_submodule(above), _config_of(model, path)
    with torch.device("meta"):
        dense = gpt_oss.GptOssExperts(config)
    dense.alpha, dense.limit = experts.alpha, experts.limit
    for name in _PROJECTIONS:
        bias = getattr(experts, f"{name}_bias").detach().to(dtype)
        columns = experts.hidden_size if name == _PROJECTIONS[0] else experts.intermediate_size
        shape = *bias.shape, columns // MXFP4.block
        held = getattr(experts, name), getattr(experts, f"{name}_precision_config").weight_scale
        codes, scales = (_in_rows(path, name, of, shape, width) for of, width in zip(held, (MXFP4.block // 2, 1)))
        weight = QuantizedWeight(codes, [scales], MXFP4.name, dtype, transposed=True)
        blocks = codes[:1].unflatten(2, (-1, MXFP4.block // 2))
        if not _same(weight.expert(0), mxfp4.convert_moe_packed_tensors(blocks, scales[:1], dtype=dtype)[0]):
            raise InputError(f"{path}.{name} {_OTHERS}")
        _set(dense, name, weight)
        dense._parameters[f"{name}_bias"] = nn.Parameter(bias, requires_grad=False)
    dense.train(experts.training)
    if type(owner) is not getattr(mxfp4, "Mxfp4GptOssMLP", None):
        owner._modules[last] = dense
        if getattr(vars(owner).get("forward"), "__module__", "") == _MXFP4:  # transformers 4 puts it on the instance
            del owner.__dict__["forward"]
        return
    with torch.device("meta"):
        around = gpt_oss.GptOssMLP(config)
    around.router, around.experts = owner.router, dense
    around.train(owner.training)
    outside, _, name = above.rpartition(".")
    model.get_submodule(outside)._modules[name] = around


def _release(model: nn.Module, path: str) -> None:
    """Takes the quantiser off the model around some experts, which nothing of it is left in: with it, Trainer refuses to train the
    model, and it would be saved in transformers' format.
    """
    parts = path.split(".")
    for owner in (model.get_submodule(".".join(parts[:n])) for n in range(len(parts))):
        held: Any = vars(owner)
        if type(held.get("hf_quantizer")).__name__ != "Mxfp4HfQuantizer":
            continue
        for name in ("hf_quantizer", "quantization_method", "is_quantized"):
            held.pop(name, None)
        vars(owner.config).pop("quantization_config", None)


def _in_rows(path: str, name: str, held: Any, shape: tuple[int, ...], width: int) -> Tensor:
    """(E, N, K / 32 * width) bytes of what a Triton kernel's tensor holds as (E, ., N), in an order and with padding of its own.

    Args:
        held: the tensor, whose layout knows the order: that of a Hopper or Blackwell card, or none.
        shape: E, N and K / 32.
        width: bytes of a block.
    """
    take_back = getattr(held.storage.layout, "unswizzle_data", None)
    found = None if take_back is None else take_back(held.storage.data).transpose(-1, -2)
    experts, rows, blocks = shape
    if (
        found is None
        or found.dim() != 3
        or any(have < want for have, want in zip(found.shape, (*shape[:2], blocks * width)))
    ):
        raise InputError(
            f"{path}.{name} lies in the layout {type(held.storage.layout).__name__}, which hexa_fx does not read: load the model "
            'dequantised (Mxfp4Config(dequantize=True)), and hexa_fx.quantize_experts_(model, "mxfp4") gives the codes back'
        )
    return found[:experts, :rows, : blocks * width].contiguous()  # type: ignore[no-any-return]


def _config_of(model: nn.Module, path: str) -> Any:
    """That of the innermost module around a place that has one."""
    parts = path.split(".")
    owners: Sequence[nn.Module] = [model.get_submodule(".".join(parts[:n])) for n in range(len(parts) - 1, -1, -1)]
    return next(config for owner in owners if (config := getattr(owner, "config", None)) is not None)


def _same(found: Tensor, expected: Tensor) -> bool:
    close = found.shape == expected.shape and torch.allclose(found, expected.to(found), 2**-7, 0, equal_nan=True)
    return bool(close)
