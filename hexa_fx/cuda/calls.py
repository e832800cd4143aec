"""Runs operators on CUDA tensors: plans a call when one of its kind comes first, keeps the plan, and runs it from then on.

Two calls are of a kind if their operands have the same types, shapes, strides and alignment, and their other arguments are equal.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any, TypeVar

import torch
from torch import Tensor

from hexa_fx.cuda.choosing import Card, card_of, collection, described_card, on_forget
from hexa_fx.cuda.fallback import falls_back_for_good, record_fallback
from hexa_fx.cuda.kernel import NotBuilt, say_provisional
from hexa_fx.cuda.plan import CallPlan
from hexa_fx.cuda.planning import Operand, Planning
from hexa_fx.cuda.product import AnyTile, ProductKey, autotuning, built_tile, chosen_tile, fixed_tile, tune
from hexa_fx.errors import KernelError
from hexa_fx.ops import library
from hexa_fx.ops.fixed_order import is_fixed
from hexa_fx.ops.listed import Listed, dense
from hexa_fx.ops.table_fp8 import Replaced

R = TypeVar("R")
TileOf = Callable[[ProductKey], AnyTile]
Given = tuple[ProductKey | None, AnyTile | None]
Kind = tuple[Any, ...]

_CONSTANTS = frozenset({type(None), str, bool, int, float, tuple, torch.dtype, Replaced})
_MOST = 4096
"""Most plans to keep."""
_plans: dict[Kind, CallPlan] = {}
on_forget(_plans.clear)


def float32_math(dtype: torch.dtype) -> str:
    """How float32 is multiplied at present: on tensor cores, or as three products of TF32. For a call that begins with it."""
    if dtype != torch.float32:
        return ""
    return "tensor" if torch.backends.cuda.matmul.fp32_precision == "tf32" else "fast_f32"


def kind_of(args: Sequence[Any]) -> tuple[list[Any], list[Tensor], list[int]]:
    """Everything that a call's launches depend on except addresses, and its tensors with their addresses."""
    kind: list[Any] = []
    tensors, addresses, low = [], [], 0
    for a in args:
        if type(a) in _CONSTANTS:
            kind.append(a)
        elif type(a) is list and not _CONSTANTS.issuperset(map(type, a)):
            of_list, some, places = kind_of(a)
            kind.append(tuple(of_list))
            tensors += some
            addresses += places
        elif isinstance(a, Tensor):
            at = a.data_ptr()
            low |= at
            tensors.append(a)
            addresses.append(at)
            kind.append((a.dtype, a.shape, a.stride()))
        elif type(a) is Listed:
            assert a.places is not None, "see hexa_fx.cuda.places"
            address, table, step = a.places
            tensors += (a.tensors[0] if a.tensors else table, table)
            addresses += (address, table.data_ptr())
            kind.append((a.dtype, a.shape, a.turned, step, table.shape))
        else:
            kind.append(tuple(a) if isinstance(a, list) else a)
    kind.append(tuple([at & 15 for at in addresses]) if low & 15 else 0)
    return kind, tensors, addresses


def planned(function: Callable[..., Any], args: Sequence[Any], card: Card, tile_of: TileOf) -> CallPlan:
    """The plan of a call, of which the first argument is a tensor. Needs no device; its tensors need no data.

    Raises:
        KernelError: we have no kernel for these operands.
    """
    planning = Planning(card, float32_math(args[0].dtype), tile_of)
    given: list[Operand] = []

    def stand_in(a: Any) -> Any:
        if isinstance(a, Tensor):
            given.append(planning.operand(a.dtype, a.shape, a.stride(), a.data_ptr() & 15))
            return given[-1]
        if type(a) is Listed:
            made = planning.listed(a)
            given.extend(one for one in (made, made.table) if one is not None)
            return made
        return [*map(stand_in, a)] if isinstance(a, list) else a

    operands = [stand_in(a) for a in args]
    return CallPlan(planning, function(*operands), len(given))


def chosen() -> TileOf:
    """What chooses the tiles of this thread's products."""
    return fixed_tile if is_fixed() else chosen_tile


KERNELS: dict[str, Callable[..., Any]] = {}
"""The kernels of operators on CUDA, by name."""


def cuda_kernel(*names: str) -> Callable[[Callable[[Any], R]], Callable[..., R]]:
    """Decorates the code of ``hexa::<name>`` on CUDA, of the operator's record, which plans on `Operand`; of several operators,
    that of each of their records.

    It then takes the first operator's arguments, and runs on tensors too. There it falls back to the generic implementation when
    there is no compiler, when a kernel does not build, or when there is no kernel for the operands, and while a kernel is being
    built. The reason is logged once per operator.
    """

    def decorate(function: Callable[[Any], R]) -> Callable[..., R]:
        first, *_ = made = [_kernel(name, function) for name in names]
        KERNELS.update(zip(names, made))
        return first

    return decorate


def _kernel(name: str, function: Callable[[Any], R]) -> Callable[..., R]:
    record = library.record_of(name)

    def plan(*args: Any) -> R:
        return function(record(*args))

    @functools.wraps(function)
    def kernel(*args: Any) -> R:
        first, *_ = args
        if isinstance(first, Operand):
            return plan(*args)
        if described_card() is not None:
            return _run(name, plan, args)  # type: ignore[no-any-return]
        if not falls_back_for_good(name):
            try:
                return _run(name, plan, args)  # type: ignore[no-any-return]
            except NotBuilt as error:
                say_provisional(name, "torch's own operators", error)
            except KernelError as error:
                record_fallback(name, error)
        return library.kernel_for(name, "any")(*map(dense, args))  # type: ignore[no-any-return]

    kernel.__name__ = name
    return kernel


def _run(name: Any, function: Callable[..., Any], args: Sequence[Any], given: Given = (None, None)) -> Any:
    """Runs a call.

    Args:
        name: of the operator, or what else tells the function.
        function: its code.
        args: its arguments, of which the first is a tensor.
        given: a product and the tile to take for it. No product is the first.
    """
    device, found, fixed = args[0].device, collection(), is_fixed()
    kind, tensors, addresses = kind_of(args)
    where = device.index if found is None or found.card is None else found.card
    key = (name, given, where, fixed, float32_math(args[0].dtype), *kind)
    plan = _plans.get(key)
    if plan is None:
        plan = _first(name, function, args, given)
        if len(_plans) >= _MOST:
            _plans.clear()
        if not (autotuning() and torch.cuda.is_current_stream_capturing()):  # else tiles are measured another time
            _plans[key] = plan
    if found is not None:
        return plan.collected(tensors, found)
    try:
        plan.load()
    except NotBuilt as reason:
        if fixed or given[1] is not None:
            raise
        plan = planned(function, args, card_of(device.index), built_tile)
        plan.load()
        say_provisional(getattr(name, "__name__", name), "another tile", reason)
    return on_device(plan, tensors, addresses, device)


def on_device(plan: CallPlan, tensors: Sequence[Tensor], addresses: Sequence[int], device: torch.device) -> Any:
    """Runs a loaded plan on a device, current or not."""
    if device.index == torch._C._cuda_getDevice():
        return plan(tensors, addresses, device)
    with torch.cuda.device(device.index):
        return plan(tensors, addresses, device)


def _first(name: Any, function: Callable[..., Any], args: Sequence[Any], given: Given) -> CallPlan:
    """The plan of a call with the given tile or the chosen ones, which are measured first if HEXA_FX_AUTOTUNE asks for it.

    A kernel that adds is not measured, since every timed run would add. It takes the tile of the kernel that stores.
    """
    device, keys, otherwise = args[0].device.index, list[ProductKey](), chosen()

    def tile_of(key: ProductKey) -> AnyTile:
        keys.append(key)
        product, tile = given
        return tile if tile is not None and key == (product or keys[0]) else otherwise(key)

    plan = planned(function, args, card_of(device), tile_of)
    if given[1] is not None or not autotuning() or is_fixed():
        return plan
    for key in keys:
        if not key.kernel.accumulate and _measured(name, function, args, key):
            return _first(name, function, args, given)
    return plan


def _measured(name: Any, function: Callable[..., Any], args: Sequence[Any], key: ProductKey) -> bool:
    """Whether the tiles of a product of a call were measured now."""
    tiles, tile_of = [asdict(tile) for tile in key.tiles.candidates(key)], key.tiles.kind
    best = tune(
        key.problem(),
        args[0].device.index,
        tiles,
        lambda tile: key.spec(tile_of(**tile)),
        lambda tile: _run(name, function, args, (key, tile_of(**tile))),
    )
    return best is not None
