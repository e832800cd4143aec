"""`quantize_experts_`: packs the expert weights of rewritten blocks, which the operators then read as they are."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple, TypeVar

import torch
from torch import nn

from hexa_fx.attached import has_session
from hexa_fx.errors import InputError
from hexa_fx.formats import FORMATS, format_of
from hexa_fx.formats.quantized_weight import QuantizedWeight
from hexa_fx.isolation.module_tree import inside
from hexa_fx.optimizing import request_kernels_in
from hexa_fx.runtime.forward import HexaForward
from hexa_fx.runtime.guards import AGAIN
from hexa_fx.runtime.install import installed_forward
from hexa_fx.runtime.listed_experts import reader_of
from hexa_fx.runtime.paths import base_of
from hexa_fx.runtime.preflight import check_module
from hexa_fx.sources.garbage import collecting
from hexa_fx.sources.packed_parameters import set_packed

Model = TypeVar("Model", bound=nn.Module)
FormatName = Literal["nf4", "nf4_double", "mxfp4", "fp8_block", "int8_rows"]


class _OwnedParameter(NamedTuple):
    """A parameter, by the module that owns it, and whether it holds (K, N) matrices, which are packed transposed."""

    owner: nn.Module
    name: str
    transposed: bool


@collecting
def quantize_experts_(model: Model, format: FormatName) -> Model:
    """Packs the expert weights of every rewritten block of an optimized model in place, and returns ``model``.

    Weights are packed one expert at a time and the dense ones given up, so that nothing beyond a packed copy of one weight is
    needed besides the model. Packed weights are frozen. They keep their names and shapes as parameters; ``state_dict`` holds their
    packed tensors, and a model that was packed the same way loads them.

    Args:
        model: optimized by `hexa_fx.optimize` or `hexa_fx.optimize_`, before optimizers are built. Adapters may be there already.
        format: ``nf4`` (4.5 bits a weight), ``nf4_double`` (4.13), ``mxfp4`` (4.25), ``fp8_block`` (8), ``int8_rows`` (8).

    Raises:
        InputError: there is no such format; no block is rewritten; the model is spread over devices; or the weights of a rewritten
            block cannot be packed. The model is then unchanged.
    """
    check_module(model)
    format_of(format)
    if any(map(has_session, model.modules())):
        raise InputError(
            "the model's expert weights are cut over devices, where they stay dense: call optimize_ without mesh= to pack them"
        )
    blocks = {path: forward for path, module in model.named_modules() if (forward := installed_forward(module))}
    if not blocks:
        raise InputError(
            "quantize_experts_ packs what rewritten blocks read, and no block of this model is rewritten: call hexa_fx.optimize_ "
            "before, and the model once if it got no example"
        )
    places = [place for path, forward in blocks.items() for place in _places_of(path, forward, format)]
    by_weight: dict[int, list[_OwnedParameter]] = {}
    for place in places:
        by_weight.setdefault(id(place.owner._parameters[place.name]), []).append(place)
    for alike in by_weight.values():
        _pack(alike, format)
    for forward in blocks.values():
        _read_anew(forward)
        forward.never_small()  # its own code would unpack
    request_kernels_in(model)
    return model


def _places_of(path: str, forward: HexaForward, format: FormatName) -> list[_OwnedParameter]:
    """The parameters that hold the block's expert weights: stacked ones, and those of listed experts.

    Raises:
        InputError: they cannot be packed.
    """
    if not forward.specialisations and forward.takes_adapters():
        raise InputError(
            f"{path or 'the block'} has not been analysed yet, or not since it was loaded: call the model once"
        )
    if not forward.takes_adapters():
        raise InputError(
            f"{path or 'the block'} does not run hexa::moe_ffn as it is (compute, an ablation, experts of an unusual form, "
            "adapters that drop numbers or are no LoRA, which may be added after packing), and that alone reads packed weights"
        )
    made = forward.specialisations
    if not all(each.matrices for each in made):
        raise InputError(
            f"{path or 'the block'} reads its experts' weights through other operations (a slice, a cast, a factor); "
            "quantize_experts_ packs weights that are multiplied as they are"
        )
    layouts = {name: layout for each in made for name, layout in each.matrices.items()}
    parts = {name: weight.parts for each in made for name, weight in each.lora.weights.items() if name in layouts}
    named = [(name, layout) for name, layout in layouts.items() if name not in parts]
    for name, listed in parts.items():
        named += [(matrix, layouts[name]) for part in listed for matrix in part]
    places = [_place(path, forward.module, name, layout == "kn") for name, layout in named]
    beside = [[part[0] for part in listed] for listed in parts.values()]
    reasons = {each: next(_reasons(path, forward.module, named, beside, each), "") for each in FORMATS}
    if reasons[format]:
        raise InputError(
            f"{reasons[format]}; {', '.join(n for n, reason in reasons.items() if not reason) or 'none'} can"
        )
    return places


def _reasons(
    path: str, block: nn.Module, named: Sequence[tuple[str, str]], beside: Sequence[Sequence[str]], format: str
) -> Iterator[str]:
    """Why a format does not take the weights of a block, or not those ``beside`` each other that are read as one."""
    for name, layout in named:
        weight = block.get_parameter(_under_adapters(block, name))
        matrices = weight if weight.dim() == 3 else weight[None]
        if why := format_of(format).why_not((matrices.transpose(1, 2) if layout == "kn" else matrices).shape):
            yield f"{inside(path, name)} of shape {tuple(weight.shape)} cannot be packed as {format}: {why}"
    for *above, last in beside:
        for name in above:
            rows, columns = block.get_parameter(_under_adapters(block, name)).shape
            together = format_of(format).rows_together(columns)
            if not together or rows % together:
                why = f"{together} rows share scales, and it has {rows}" if together else "each has scales of its own"
                both = f"{inside(path, name)} and {last}"
                yield f"{both} are read as one matrix, and cannot be packed as {format} beside each other: {why}"


def _under_adapters(block: nn.Module, name: str) -> str:
    """Where a parameter is, which may have come to be under an adapter."""
    owner, _, last = name.rpartition(".")
    try:
        found = block.get_submodule(owner)
    except AttributeError:
        raise InputError(f"there is no longer a submodule {owner!r} with weights of experts; {AGAIN}") from None
    return name if base_of(found) is found else f"{owner}.base_layer.{last}"


def _place(path: str, block: nn.Module, name: str, transposed: bool) -> _OwnedParameter:
    *modules, last = _under_adapters(block, name).split(".")
    owner = block.get_submodule(".".join(modules))
    weight = owner._parameters.get(last)
    where = inside(path, name)
    if weight is None:
        raise InputError(
            f"{where} is no parameter any more (parametrized or exchanged, perhaps): undo that first, or {AGAIN}"
        )
    if isinstance(weight, QuantizedWeight):
        raise InputError(
            f"{where} is packed as {weight.format} already; another format packs the dense weights, of the model loaded anew"
        )
    if not weight.is_floating_point():
        raise InputError(
            f"{where} is {weight.dtype}, packed already by what loaded the model; hexa_fx.optimize_ reads it as it is"
        )
    if weight.is_meta:
        raise InputError(
            f"{where} is on the meta device and has no values to pack; pack the model where its weights are loaded"
        )
    matrices = weight if weight.dim() == 3 else weight[None]
    broken = next((number for number, matrix in enumerate(matrices) if not matrix.float().isfinite().all()), None)
    if broken is not None:
        expert = f" in expert {broken}" if weight.dim() == 3 else ""
        raise InputError(
            f"{where} holds NaN, infinity or what float32 cannot hold{expert}, which scales would spread or hide"
        )
    return _OwnedParameter(owner, last, transposed)


def _pack(places: list[_OwnedParameter], format: FormatName) -> None:
    """Packs a weight, which several modules may share."""
    weight = places[0].owner._parameters[places[0].name]
    assert weight is not None
    with torch.inference_mode(False), torch.no_grad():
        made = nn.Parameter(QuantizedWeight.of(weight, format, places[0].transposed), requires_grad=False)
    for owner, name, _ in places:
        set_packed(owner, name, made)


def _read_anew(forward: HexaForward) -> None:
    """Has a block read the matrices of listed experts as they are now."""
    module = forward.module
    for each in forward.specialisations:
        for name, weight in each.lora.weights.items():
            module.__dict__[name] = reader = reader_of(module, weight)
            reader.see_through(each.lora.bases)
