"""Records one block on given inputs, and puts everything back as it was."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.fx
from torch import nn
from torch.utils._pytree import tree_any, tree_leaves

from hexa_fx.capture.calls import why_not_recorded
from hexa_fx.capture.captured import CapturedBlock
from hexa_fx.capture.copies import copied
from hexa_fx.capture.host import scripts_as_python, visible_host
from hexa_fx.capture.kept import UNKNOWN, ChangedInPlace, stored_values
from hexa_fx.capture.python_reads import PythonReads
from hexa_fx.capture.ran_code import RanCode
from hexa_fx.capture.recorder import Recorder
from hexa_fx.capture.records import NodeRecord, reached, record_of
from hexa_fx.capture.symint import wrap
from hexa_fx.errors import CaptureError
from hexa_fx.ir import ModuleAttribute
from hexa_fx.isolation.contents import Contents, Holder
from hexa_fx.isolation.lookup import is_data, is_object, number_at, put_number, tensors_in
from hexa_fx.isolation.module_state import ModuleSnapshot, restored
from hexa_fx.isolation.module_tree import inside, kept_tensors, tensors_by_name
from hexa_fx.isolation.size import is_out_of_memory, of_one_number
from hexa_fx.isolation.torch_state import SEED, random_state_kept
from hexa_fx.isolation.trial_modes import no_device_asserts
from hexa_fx.isolation.written_tensors import parameters_restored, put_back
from hexa_fx.runtime import guards
from hexa_fx.runtime.attribute_guards import is_within


@dataclass(frozen=True)
class Replacements:
    """Other values for what has no effect on the example, so that the recorded run shows what it does.

    Args:
        arguments: by name.
        held: of parameters and buffers, by name.
        results: of recorded calls, by the number of their node.
        idle: numbers of dropouts that drop nothing.
        numbers: attributes of modules, by dotted name, whose numbers are asked for in every call, as tensors are.
        counts_loops: whether the run holds for as many rows as loops go over.
    """

    arguments: Mapping[str, torch.Tensor] = field(default_factory=dict)
    held: Mapping[str, torch.Tensor] = field(default_factory=dict)
    results: Mapping[int, torch.Tensor] = field(default_factory=dict)
    idle: frozenset[int] = frozenset()
    numbers: frozenset[str] = frozenset()
    counts_loops: bool = False

    def __len__(self) -> int:
        return len(self.arguments) + len(self.held) + len(self.results)


AS_IT_IS = Replacements()


@contextmanager
def replaced_parameters(
    parameters: Mapping[str, torch.Tensor],
    given: Mapping[str, torch.Tensor],
    kinds: tuple[type[torch.Tensor], ...] = (nn.Parameter,),
) -> Iterator[dict[str, torch.Tensor]]:
    """A context that yields the new values by name, of tensors of these kinds whose elements are all equal and of what is
    ``given``, buffers too. Each keeps its identity, and gets its own memory back at the end."""
    generator = torch.Generator().manual_seed(2)
    chosen = {id(parameters[name]): value for name, value in given.items()}
    alike = of_one_number(p for p in parameters.values() if type(p) in kinds and not p.is_meta)
    # a single number other than 0 and 1 has an effect
    hide = {id(p) for p in parameters.values() if id(p) in alike and (p.numel() > 1 or float(p.detach()) in (0.0, 1.0))}
    plain = {id(p): p for p in parameters.values() if id(p) in chosen or id(p) in hide}
    before = {key: parameter.data for key, parameter in plain.items()}
    try:
        for key, parameter in plain.items():
            noise = torch.randn(parameter.shape, generator=generator, device="cpu")
            new = chosen[key] if key in chosen else parameter.data + noise.to(parameter.data) / 8
            parameter.data = new.to(parameter.data, copy=True)
        yield {name: p.data for name, p in parameters.items() if id(p) in plain}
    finally:
        for key, parameter in plain.items():
            parameter.data = before[key]


def decided_alone(block: nn.Module, graph: torch.fx.Graph, names: Collection[str]) -> dict[str, torch.Tensor]:
    """Of the named parameters, those on which alone the host decided in a recorded run, with their own values.

    What the code does with these shows only with the values that they have.
    """
    found: set[str] = set()
    for decision in (node for node in graph.nodes if node.op != "output" and record_of(node).decision):
        behind = reached([decision], lambda node: node.all_input_nodes)
        if not any(node.op == "placeholder" for node in behind):
            found |= {str(node.target) for node in behind if node.op == "get_attr"}
    return {name: block.get_parameter(name).detach() for name in sorted(found.intersection(names))}


_CONDITIONS: tuple[tuple[bool, frozenset[type]], ...] = (
    (False, frozenset()),
    (False, frozenset({float})),
    (False, frozenset({int, float})),
    (True, frozenset()),
)
"""Whether a run is made without random parameters and gradients, and which types of numbers are what they are, as ``x.to(int)``
needs them. The first that a block runs under counts."""


def capture(
    block: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    path: str = "",
    analysis_bytes: int = 2 << 30,
    replacements: Replacements = AS_IT_IS,
    gradients: bool = True,
) -> CapturedBlock:
    """What one run of ``block`` did.

    Parameters, buffers and the global random state are left unchanged. With ``gradients`` these are on, so that the code's own
    ``no_grad`` shows. Parameters of equal elements, such as new biases, get random numbers if the code does not decide on them
    alone: adding zero would leave no trace. Code that fails under these conditions is run again without them.

    Raises `CaptureError`, which quotes the block's own error, if it does not run on these inputs.
    """
    for conditions in _CONDITIONS:
        try:
            found = _capture(block, args, kwargs, path, replacements, gradients, *conditions)
            break
        except Exception as error:
            if is_out_of_memory(error) or (isinstance(error, CaptureError) and conditions == _CONDITIONS[-1]):
                raise
            if conditions == _CONDITIONS[-1]:
                raise CaptureError(why_not_recorded(error), path=path or type(block).__name__) from error
    if own := decided_alone(block, found.graph, found.replaced.keys() - replacements.held.keys()):
        return capture(
            block, args, kwargs, path, analysis_bytes, replace(replacements, held=own | {**replacements.held})
        )
    return replace(found, analysis_bytes=analysis_bytes)


def _capture(
    block: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    path: str,
    replacements: Replacements,
    gradients: bool,
    as_it_is: bool,
    kept: Collection[type],
) -> CapturedBlock:
    try:
        bound = inspect.signature(block.forward).bind(*args, **kwargs)
    except (TypeError, ValueError) as error:
        raise CaptureError(str(error), path=type(block).__name__) from error
    with _trial(block, replacements, as_it_is, gradients and not as_it_is) as (reads, snapshot, replaced):
        recorder = reads.recorder
        with reads.noted():
            _ask_for_numbers(block, recorder, replacements.numbers)
            result, arguments, given = _run(block, recorder, reads.ran, kept, bound, replacements.arguments)
        reads.leave("")
        dtypes = {name: tensor.dtype for name, tensor in tensors_by_name(block).items()}
        output = recorder.lift_result(result)
        of_modules = [*stored_values(block, snapshot, reads.settings, recorder, reads.edges.hold)]
        of_objects = [*reads.objects.stored(reads.edges, reads.settings, recorder)]
        # what was put into lists and dicts first: an attribute may be the list itself
        stored = (*reads.objects.added(reads.edges, reads.ran, recorder), *of_modules, *of_objects)
        kept_before = {
            *map(id, tree_leaves(list(snapshot.values()), is_leaf=is_data)),
            *(id(edge.value) for edge in reads.edges),
        }
        changed = [*reads.objects.changed(reads.edges)]
        changed += [ChangedInPlace(holder.label, frozenset({""})) for holder in given.changed()]
    given_to = {*reads.edges.handed(reads.settings.scopes, tensors=True), *reads.settings.again}
    results = [item.value for item in stored if item.value is not UNKNOWN]
    recorder.graph.output((output, results) if results else output).meta["hexa"] = NodeRecord(None)
    return CapturedBlock(
        block,
        path,
        recorder.graph,
        recorder.constants,
        tuple(replace(call, prepared=_is_prepared(call.path, given_to)) for call in recorder.calls),
        arguments,
        output,
        stored,
        tuple(changed),
        tuple(recorder.functions),
        _met_among(kept_before, recorder),
        _met_among({*map(id, tensors_in([*bound.args, *bound.kwargs.values()]))}, recorder),
        reads=reads.values(),
        handed=frozenset(reads.edges.handed(reads.settings.scopes)),
        in_autocast=recorder.in_autocast,
        asks={asked: frozenset(scopes) for asked, scopes in reads.ran.asks.items()},
        held=tuple((tensor, recorder.constants[name]) for name, tensor in recorder.met.items()),
        written=frozenset(recorder.written),
        changed_parameters=reads.ran.changed,
        replaced=replaced,
        numbers={name: recorder.parameters[name] for name in replacements.numbers},
        dtypes=dtypes,
    )


@contextmanager
def _trial(
    block: nn.Module, replacements: Replacements, as_it_is: bool, gradients: bool
) -> Iterator[tuple[PythonReads, ModuleSnapshot, dict[str, torch.Tensor]]]:
    """A context for one run, at whose end all is as it was. Gives the reader of what the code comes to, which the recorder tells,
    what the modules held before, and what stands in for parameters."""
    parameters: dict[str, torch.Tensor] = dict(block.named_parameters(remove_duplicate=False))
    parameters |= {**dict(block.named_buffers(remove_duplicate=False)), **kept_tensors(block)}
    found = {name: number_at(block, name) for name in replacements.numbers}
    numbers = {name: torch.tensor(value, dtype=_DTYPES[type(value)], device="cpu") for name, value in found.items()}
    with (
        restored(block) as snapshot,
        other_numbers(block, found),
        replaced_parameters({} if as_it_is else parameters, {} if as_it_is else replacements.held) as replaced,
        random_state_kept(SEED),
        no_device_asserts(block) if replacements else nullcontext(),
        torch.set_grad_enabled(gradients),
    ):
        recorder = Recorder(
            parameters | numbers,
            sees_gradients=gradients,
            forced=replacements.results,
            idle=replacements.idle,
            counts_loops=replacements.counts_loops,
        )
        reads = PythonReads(block, recorder)
        try:
            with reads.objects.restored(), parameters_restored(block, reads.note_write) as reads.before_call:
                yield reads, snapshot, replaced
        finally:
            put_back(((tensor, recorder.constants[name]) for name, tensor in recorder.met.items()), recorder.written)


def _is_prepared(path: str, given_to: Collection[tuple[str, str]]) -> bool:
    """Whether a module around the one at ``path`` sets what code inside goes by: paths of who does, and of whom it is for."""
    around = {by for by, to in given_to if is_within(to, {path}) and by != path}
    return "" in around or is_within(path, around)


def _met_among(tensors: set[int], recorder: Recorder) -> frozenset[str]:
    """Names of the constants that were read from these tensors, by id."""
    return frozenset(name for name, tensor in recorder.met.items() if id(tensor) in tensors)


def _ask_for_numbers(block: nn.Module, recorder: Recorder, names: Collection[str]) -> None:
    """Puts numbers that stand for what the block finds there in every call in place of those that its modules keep."""
    for name in sorted(names):
        path, _, _ = name.rpartition(".")
        tensor = recorder.parameters[name]
        number = recorder.add("call_function", guards.item, (recorder.lift(tensor),), {}, tensor.item())
        recorder.scopes.append(path)
        recorder.asked[name] = wrap(tensor.item(), number, recorder)
        put_number(block, name, recorder.asked[name])
        recorder.scopes.pop()


_DTYPES = {int: torch.int64, float: torch.float64}


def counted(captured: CapturedBlock) -> dict[str, float]:
    """Attributes of modules, by dotted name, that the run found a number in and set; and another number of each."""
    read = {(each.root, *each.steps): each.value for each in captured.reads if type(each.value) in (int, float)}
    places = (each.place for each in captured.stored)
    found = (place for place in places if isinstance(place, ModuleAttribute) and (place.path, place.name) in read)
    return {inside(place.path, place.name): read[place.path, place.name] + 1 for place in found}


@contextmanager
def other_numbers(block: nn.Module, numbers: Mapping[str, float]) -> Iterator[None]:
    """A context in which modules keep these numbers, by dotted name."""
    before = {name: number_at(block, name) for name in numbers}
    for name, number in numbers.items():
        put_number(block, name, number)
    try:
        yield
    finally:
        for name, number in before.items():
            put_number(block, name, number)


def _run(
    block: nn.Module,
    recorder: Recorder,
    ran: RanCode,
    kept: Collection[type],
    bound: inspect.BoundArguments,
    replaced: Mapping[str, torch.Tensor],
) -> tuple[Any, tuple[tuple[str, Any], ...], Contents]:
    """The result of a call with copies of tensors, the named arguments, and what lists, dicts and objects among them contained."""
    named: list[tuple[str, Any]] = []
    holders: list[Holder] = []

    def given(name: str, value: Any) -> Any:
        if parts := guards.parts_of(name, value):
            named.append((name, guards.Form.of(value)))
            items = {key: given(part, item) for part, (key, item) in parts.items()}
            kind = type(value)
            held: Any = (
                items if kind is dict else kind(*items.values()) if hasattr(value, "_fields") else kind(items.values())
            )
            holders.append(Holder(f"the argument {name!r}", held))
            return held
        fresh = copied(replaced.get(name, value))
        if fresh is not value and is_object(fresh):
            holders.append(Holder(f"the argument {name!r}", fresh))
        named.append((name, recorder.placeholder(name, fresh) if isinstance(value, torch.Tensor) else value))
        return fresh

    for name, value in bound.arguments.items():
        kind = bound.signature.parameters[name].kind
        if kind is inspect.Parameter.VAR_POSITIONAL:
            bound.arguments[name] = tuple(given(f"{name}_{index}", item) for index, item in enumerate(value))
        elif kind is inspect.Parameter.VAR_KEYWORD:
            bound.arguments[name] = {key: given(key, item) for key, item in value.items()}
        else:
            bound.arguments[name] = given(name, value)
    if len(dict(named)) < len(named):
        raise ValueError("arguments, and what lies in them, have names that cannot be told apart")
    contents = Contents(holders)
    with visible_host(block, recorder, ran, kept), scripts_as_python(all_of_them=True), recorder:
        result = block.forward(*bound.args, **bound.kwargs)
    lists = [holder.value for holder in holders if type(holder.value) in (list, dict)]

    def is_given(value: Any) -> bool:
        return any(value is each for each in lists)

    if lists and tree_any(is_given, (result, [vars(module) for module in block.modules()]), is_leaf=is_given):
        raise ValueError(
            "the code gives back or keeps a list or dict that it was given, which a rewritten block would copy"
        )
    return result, tuple(named), contents
