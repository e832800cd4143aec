"""Makes visible, while a block is recorded, what a `TorchFunctionMode` cannot see.

``int(n)``, ``len(t)``, ``range(n)``, ``min(a, b)`` and ``max(a, b)`` strip a symbolic number in C, ``divmod``, ``isinstance`` and
``type`` do not know it; they are shimmed in the globals of the modules that define the block's classes, and of all others whose
functions start meanwhile. einops caches shapes, so its functions are recorded as one call each. Module calls are recorded with
their arguments, so that a router can stay a router in the rewritten graph.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch
import torch.fx
from torch import nn
from torch.utils._pytree import tree_leaves

from hexa_fx.capture.calls import UnreadableTensor, user_location
from hexa_fx.capture.functional import Applied
from hexa_fx.capture.ran_code import RanCode
from hexa_fx.capture.recorder import Recorder
from hexa_fx.capture.records import ModuleCall
from hexa_fx.capture.symint import SYMBOLIC, SymbolicSize, noted_text, plain, wrap
from hexa_fx.contexts import attributes_set, items_set
from hexa_fx.errors import CaptureError
from hexa_fx.isolation.contents import namespaces_of
from hexa_fx.isolation.lookup import MISSING, is_object
from hexa_fx.isolation.module_tree import named_modules
from hexa_fx.isolation.purity import COLLECTIVE
from hexa_fx.isolation.read_values import CONSTANT
from hexa_fx.torch_private import DisableTorchFunction, DispatchMode, is_compiler_at_work


def builtin_shims(recorder: Recorder, kept: Collection[type]) -> dict[str, Any]:
    """The stand-ins by the names that they go by; ``kept``: those of ``int`` and ``float`` that are to stay what they are."""
    numbers = {int: _int_shim(recorder), float: _float_shim()}
    known = {kind: shim for kind, shim in numbers.items() if kind not in kept}
    return {kind.__name__: shim for kind, shim in known.items()} | {
        "len": lambda value: value.shape[0] if isinstance(value, torch.Tensor) else recorder.length_of(value),
        "range": _range_shim(recorder),
        "divmod": _divmod_shim,
        "isinstance": _isinstance_shim,
        "min": _extremum_shim(min, recorder),
        "max": _extremum_shim(max, recorder),
    }


def _int_shim(recorder: Recorder) -> type:
    def made(value: Any = 0, *base: Any) -> Any:
        if isinstance(value, torch.SymInt):
            return value
        if isinstance(value, torch.SymFloat):
            truncated = int(plain(value))
            return wrap(truncated, recorder.record_call(int, (recorder.lift(value),), truncated), recorder)
        if isinstance(value, torch.Tensor) and not value.is_floating_point():
            return value.item()
        return int(value, *base)

    return _number_shim(int, torch.SymInt, made)


def _float_shim() -> type:
    def made(value: Any = 0.0) -> Any:
        number = value.item() if isinstance(value, torch.Tensor) and value.dtype != torch.bool else value
        return torch.sym_float(number) if isinstance(number, SYMBOLIC) else float(number)

    return _number_shim(float, torch.SymFloat, made)


def _number_shim(kind: type, symbolic: type, made: Callable[..., Any]) -> type:
    """A class that equals ``kind``, in dicts and tuples of types that were made before, and makes what ``made`` gives."""

    class NumberMeta(type):
        def __instancecheck__(cls, instance: object) -> bool:
            return isinstance(instance, (kind, symbolic))

        def __subclasscheck__(cls, subclass: type) -> bool:
            return issubclass(subclass, kind)

        def __eq__(cls, other: object) -> bool:
            return other is kind or other is cls

        def __hash__(cls) -> int:
            return hash(kind)

    name = kind.__name__
    return NumberMeta(name, (kind,), {"__new__": lambda cls, *args: made(*args), "__qualname__": name})


def _range_shim(recorder: Recorder) -> type:
    """A loop over rows one by one is what verification sees at other sizes, unless it failed there; of larger steps, the run holds
    for their number."""

    class RangeMeta(type):
        def __instancecheck__(cls, instance: object) -> bool:
            return isinstance(instance, range)

    class Range(metaclass=RangeMeta):
        def __new__(cls, *limits: Any) -> Any:
            found = range(*map(plain, limits))
            symbolic = [limit.node for limit in limits if isinstance(limit, torch.SymInt)]
            start, stop, step = (*((0,) if len(limits) == 1 else ()), *limits, 1)[:3]
            if plain(step) == 1 and not recorder.counts_loops:
                for number in symbolic:
                    recorder.note_decision(number.node)
            elif symbolic:
                bool((stop - start + step - 1) // step == len(found))
            return found

    return Range


def _divmod_shim(value: Any, by: Any) -> Any:
    symbolic = isinstance(value, SYMBOLIC) or isinstance(by, SYMBOLIC)
    return (value // by, value % by) if symbolic else divmod(value, by)


def _isinstance_shim(value: Any, kinds: Any) -> bool:
    number = torch.Size(map(plain, value)) if isinstance(value, SymbolicSize) else plain(value)
    return isinstance(value, kinds) or isinstance(number, kinds)


def _extremum_shim(function: Callable[..., Any], recorder: Recorder) -> Callable[..., Any]:
    def shim(*args: Any, **kwargs: Any) -> Any:
        numbers = len(args) == 2 and not kwargs and all(isinstance(plain(item), (int, float)) for item in args)
        if not numbers or not any(isinstance(item, SYMBOLIC) for item in args):
            return function(*args, **kwargs)
        value = function(*[plain(item) for item in args])
        return wrap(value, recorder.record_call(function, tuple(recorder.lift(item) for item in args), value), recorder)

    return shim


def _function_of_number(name: str) -> Callable[[Any], Any]:
    function = getattr(math, name)
    return lambda number: torch.sym_sqrt(number) if name == "sqrt" else function(number)


METHODS: dict[str, Callable[..., Any]] = {
    "__format__": lambda number, how: noted_text(format(plain(number), how), number.node.compare),
    **{name: _function_of_number(name) for name in "sqrt exp exp2 log log2 log10 log1p cbrt".split()},
}
"""What a text in code asks of a number (``f"{load:.2f}"``), and what numpy calls on an object that is no number of its own, as
in ``np.sqrt(x.shape[-1])``."""


@contextmanager
def scripts_as_python(all_of_them: bool) -> Iterator[None]:
    """A context in which compiled functions run in Python. One of which there is no Python code runs as it is, or its call raises
    `UnreadableTensor` if ``all_of_them`` are to."""
    compiled = torch.jit.ScriptFunction.__call__

    def call(function: Any, *args: Any, **kwargs: Any) -> Any:
        source = getattr(function, "_torchdynamo_inline", None)
        if source is not None:
            return source(*args, **kwargs)
        if all_of_them:
            raise UnreadableTensor(
                f"it calls {function.name}, which torch.jit compiled and of which there is no Python code; call a function that is "
                "written in Python"
            )
        return compiled(function, *args, **kwargs)

    with attributes_set(torch.jit.ScriptFunction, __call__=call):
        yield


@contextmanager
def compiled_as_python() -> Iterator[None]:
    """A context in which functions and modules under torch.compile run in Python, in all threads.

    A compiler that has not been imported has compiled nothing; to import it would take seconds.
    """
    compiled = "torch._dynamo" in sys.modules and not is_compiler_at_work()
    with torch.compiler.set_stance("force_eager") if compiled else nullcontext():
        yield


_EINOPS = ("rearrange", "reduce", "repeat", "einsum")


@contextmanager
def visible_host(
    block: nn.Module, recorder: Recorder, ran: RanCode, kept: Collection[type] = frozenset()
) -> Iterator[None]:
    """A context in which the shims are installed for ``block`` and all functions that ``ran`` hears of, but for ``kept`` types."""
    shims, shimmed = builtin_shims(recorder, kept), set[int]()
    with ExitStack() as stack:

        def shim(namespace: dict[str, Any]) -> None:
            if id(namespace) not in shimmed:
                shimmed.add(id(namespace))
                # but for the user's own definitions
                own = [(name, value) for name, value in shims.items() if name not in namespace]
                found = [*own, *_leaves_of_einops(namespace, recorder)]
                stack.enter_context(items_set((namespace, name, value) for name, value in found))

        for namespace in namespaces_of(block):
            shim(namespace)
        if "einops" in sys.modules:  # called as einops.rearrange(...)
            own = vars(sys.modules["einops"])
            stack.enter_context(items_set((own, name, leaf) for name, leaf in [*_leaves_of_einops(own, recorder)]))
        stack.enter_context(attributes_set(ran, entered=shim))
        stack.enter_context(_recorded_module_calls(block, recorder))
        for kind in (torch.SymInt, torch.SymFloat):
            stack.enter_context(attributes_set(kind, **METHODS))
        stack.enter_context(attributes_set(torch, _assert=_assert, _assert_async=_assert))
        stack.enter_context(attributes_set(torch.autograd.Function, apply=classmethod(_noted_apply(recorder, ran))))
        stack.enter_context(attributes_set(torch.autocast, __enter__=_noted_enter(recorder)))
        if torch.distributed.is_available():
            stack.enter_context(attributes_set(torch.distributed, all_to_all_single=_all_to_all_single))
            group = torch.distributed.ProcessGroup
            there = ((name, getattr(group, name, None)) for name in _EXCHANGES)
            told = {name: _noted_exchange(recorder, ran, call) for name, call in there if call is not None}
            stack.enter_context(attributes_set(group, **told))
        yield


_EXCHANGES = (
    "allreduce allreduce_coalesced allgather allgather_coalesced _allgather_base allgather_into_tensor_coalesced alltoall "
    "alltoall_base barrier monitored_barrier broadcast gather scatter reduce reduce_scatter _reduce_scatter_base "
    "reduce_scatter_tensor_coalesced send recv recv_anysource"
).split()


def _noted_exchange(recorder: Recorder, ran: RanCode, original: Callable[..., Any]) -> Callable[..., Any]:
    """Notes that code exchanges something with other processes, of which torch tells nobody, as of the module whose code does."""

    def exchange(group: Any, *args: Any, **kwargs: Any) -> Any:
        if group.size() > 1:
            ran.hidden.setdefault(recorder.scopes[-1], (original.__name__, COLLECTIVE, user_location()))
        return original(group, *args, **kwargs)

    return exchange


def _leaves_of_einops(namespace: dict[str, Any], recorder: Recorder) -> Iterator[tuple[str, Any]]:
    def leaf(function: Any) -> Any:  # no partial, which would not be taken for ours
        return lambda *args, **kwargs: recorder.record_leaf(function, *args, **kwargs)

    for name, value in list(namespace.items()):
        from_einops = callable(value) and str(getattr(value, "__module__", "")).startswith("einops")
        if from_einops and getattr(value, "__name__", "") in _EINOPS:
            yield name, leaf(value)


def _all_to_all_single(output: torch.Tensor, input: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """A token exchange, which writes its result in C. In a group of one process it is a copy."""
    group = kwargs.get("group", args[2] if len(args) > 2 else None)
    if torch.distributed.get_world_size(group) > 1:
        raise CaptureError(
            "the block exchanges tokens with other processes (all_to_all_single); build the model without expert "
            "parallelism and let hexa_fx partition it (docs/partition.md)"
        )
    output.copy_(input)


def _assert(condition: Any, message: Any = "") -> None:
    """An assertion that torch makes: a decision, as that of ``assert`` is, and no call that gives a result."""
    assert condition, message


def _noted_apply(recorder: Recorder, ran: RanCode) -> Callable[..., Any]:
    """Tells the recorder when an `autograd.Function` runs: gradients are off inside it, whatever the user's code says.

    Its backward is its own. A function that returns a tensor as it was given exists for its backward alone, and is recorded as
    itself: it runs anew in every call, and so does what it asks for its backward. Of others, what they compute is recorded, and
    that they computed it.
    """
    original = torch.autograd.Function.__dict__["apply"]

    def apply(cls: type[torch.autograd.Function], *args: Any, **kwargs: Any) -> Any:
        call, hidden = original.__get__(None, cls), dict(ran.hidden)
        with DisableTorchFunction():
            before, lifted = _versions(args), recorder.lift(args)
        recorder.functions_running.append(set())
        with recorder.call() as place:
            try:
                result = call(*args, **kwargs)
            finally:
                asked = recorder.functions_running.pop()
            with DisableTorchFunction():
                unwritten = not kwargs and before == _versions(args)
                stays = unwritten and isinstance(result, (torch.Tensor, tuple)) and all(map(_is_value, args))
                if stays:  # a call, which exchanges what it does
                    noted = ran.hidden.items()
                    ran.hidden = {s: what for s, what in noted if what[1] != COLLECTIVE or hidden.get(s) is what}
                same = _place_of(result, args) if stays else None
                does_nothing = same is not None and _does_nothing(ran, cls, call, same, args)
                if same is not None and not does_nothing:
                    recorder.record_result(Applied(cls), lifted, result)
                    return result
                recorder.told.asked_gradients(asked)
                if does_nothing:
                    recorder.record_result(torch.Tensor.view_as, (lifted[same], lifted[same]), result)
                elif stays:
                    recorder.functions.append(ModuleCall("", *place, lifted, {}, recorder.lift(result), Applied(cls)))
        return result

    return apply


def _versions(values: tuple[Any, ...]) -> list[int]:
    """How often each tensor among them was written to."""
    return [value._version if isinstance(value, torch.Tensor) else 0 for value in values]


def _noted_enter(recorder: Recorder) -> Callable[[torch.autocast], Any]:
    """Tells the recorder whose code switches autocast on or off."""
    original = torch.autocast.__enter__

    def enter(self: torch.autocast) -> Any:
        scope = recorder.scopes[-1]
        recorder.in_autocast[scope] = self._enabled or recorder.in_autocast.get(scope, False)
        return original(self)

    return enter


def _is_value(argument: Any) -> bool:
    """Whether it can stand in a graph: no code that a function was given to run, such as a checkpointed layer."""
    return argument is None or isinstance(argument, (torch.Tensor, bool, int, float, str, torch.dtype, *SYMBOLIC))


def _place_of(result: Any, given: tuple[Any, ...]) -> int | None:
    """Where ``result`` lies among the given tensors, perhaps by another name; None if it is none of them."""
    tensors = [place for place, item in enumerate(given) if isinstance(item, torch.Tensor)]
    for place in tensors if isinstance(result, torch.Tensor) else ():
        item = given[place]
        if (result.data_ptr(), result.shape, result.stride()) == (item.data_ptr(), item.shape, item.stride()):
            return place
    return None


def _does_nothing(ran: RanCode, cls: Any, call: Callable[..., Any], place: int, args: tuple[Any, ...]) -> bool:
    """Whether a function that returns what it is given as it is does nothing to its gradient either, as where it would add up
    those of several devices and there is one: its backward gives that very tensor without a look at its numbers, by which it may
    limit others, and no gradient of anything else. What that code reads is noted only if so, as it will not run then.
    """
    if not args[place].is_floating_point():
        return False
    for heard in (False, True):
        try:
            with attributes_set(ran, hears=heard), torch.enable_grad(), _Alone():
                leaf = args[place].detach().requires_grad_()
                context = call(*args[:place], leaf, *args[place + 1 :]).grad_fn
                gradient = torch.ones_like(leaf)
                with _Unread():
                    given = cls.backward(context, gradient)
        except Exception:  # it talks to other processes, or wants the state of a real run
            return False
        given = list(given) if isinstance(given, tuple) else [given]
        if given.pop(place) is not gradient or gradient._version or any(isinstance(g, torch.Tensor) for g in given):
            return False
    return True


class _Unread(DispatchMode):
    """A mode in which nothing may be computed."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise CaptureError("a computation")


class _Alone(DispatchMode):
    """A mode in which collectives are errors: other processes may not be where this one is."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "c10d" in func.namespace:
            raise CaptureError("a collective")
        return func(*args, **(kwargs or {}))


_OF_C = torch.Generator, torch.finfo, torch.iinfo


def _held(value: Any, changeable: bool = False) -> Iterator[Any]:
    """What the arguments of a call hold, to see whether it puts something into one; `MISSING` where that would not be seen.

    That is in an object, in a module or a function, which no graph can spell, and in place of a plain value in a list or dict
    (``changeable``).
    """
    if isinstance(value, (dict, list, tuple)):
        yield from value if isinstance(value, dict) else ()
        for item in value.values() if isinstance(value, dict) else value:
            yield from _held(item, not isinstance(value, tuple))
    else:
        plain = changeable and type(value) in (bool, int, float, str)
        unseen = callable(value) or isinstance(value, _OF_C) or (is_object(value) and not isinstance(value, CONSTANT))
        yield MISSING if plain or unseen else id(value)


@contextmanager
def _recorded_module_calls(block: nn.Module, recorder: Recorder) -> Iterator[None]:
    original = nn.Module.__call__
    paths = {id(module): path for path, module in named_modules(block) if path}

    def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        path = paths.get(id(module))
        if path is None:
            return original(module, *args, **kwargs)
        with DisableTorchFunction():
            lifted_args, lifted_kwargs = recorder.lift(args), recorder.lift(kwargs)
            recorder.told.leave(recorder.scopes[-1])
        given = [*_held((args, *kwargs.values()))]
        recorder.scopes.append(path)
        with recorder.call() as place:
            try:
                result = original(module, *args, **kwargs)
            finally:
                with DisableTorchFunction():
                    recorder.told.leave(recorder.scopes.pop())
            with DisableTorchFunction():
                stays = MISSING not in given and [*_held((args, *kwargs.values()))] == given
                computed = (leaf for leaf in tree_leaves(result) if not isinstance(leaf, nn.Parameter))
                is_told = any(isinstance(leaf, torch.Tensor) and vars(leaf) for leaf in computed)  # attributes
                is_read = stays and isinstance(result, (torch.Tensor, tuple, list, dict)) and not is_told
                output = recorder.lift(result) if is_read else None
        recorder.calls.append(ModuleCall(path, *place, lifted_args, lifted_kwargs, output))
        return result

    with attributes_set(nn.Module, __call__=call):
        yield
