"""Puts a rewritten forward on the user's module, and takes it off again.

The module keeps its class, parameters, buffers, submodules, hooks and ``state_dict``. An attribute of the instance merely
shadows ``forward``, so everything that goes through ``Module.__call__`` (hooks, torch.compile, torch.export, checkpointing,
functional_call) works as before.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable
from contextlib import nullcontext, suppress
from types import CodeType
from typing import Any

from torch import is_grad_enabled, nn
from torch.compiler import is_compiling

from hexa_fx.errors import InputError
from hexa_fx.ir import NEVER_SMALL, RewrittenBlock, RoutingSite
from hexa_fx.ops import main_grad
from hexa_fx.ops.sources import TAKE_SOURCES
from hexa_fx.runtime import results
from hexa_fx.runtime.answered_calls import answered
from hexa_fx.runtime.attribute_guards import AttributeGuards
from hexa_fx.runtime.autocast import dtypes_under_autocast, in_dtypes, may_be_on
from hexa_fx.runtime.call_kinds import call_sizes, is_small, reason_for_own_code, saving_is_counted
from hexa_fx.runtime.compiled_checks import inputs_of
from hexa_fx.runtime.guards import GuardMiss, SizeMiss, check_coverage, check_inputs, say_in_trace
from hexa_fx.runtime.linear_lora import LinearLora
from hexa_fx.runtime.program import Program
from hexa_fx.runtime.readers import packed_names, readers
from hexa_fx.runtime.signature import ArgumentNames, NoGlobals, SignatureOfOriginal
from hexa_fx.runtime.traced_lora import TracedLora
from hexa_fx.runtime.written_weights import look_before_backward
from hexa_fx.sources import peft
from hexa_fx.sources.adapters import Adapters
from hexa_fx.sources.packed_parameters import matrices_of

logger = logging.getLogger(__name__)


class HexaForward:
    """A module's rewritten forward, with the signature of the original.

    Runs the generated code of the current mode (train or eval) with the original module as ``self``. Inputs that the block was
    not recorded for run the original forward instead; each reason is logged once.

    Args:
        module: the user's module, referenced weakly (the module owns this object).
        train, eval: what runs while ``module.training``, and otherwise; None runs the original.
        original: the forward that the instance had of its own; None if it had the class's.
    """

    __signature__ = SignatureOfOriginal()
    __globals__ = NoGlobals()

    def __init__(
        self,
        module: nn.Module,
        train: RewrittenBlock | None,
        eval: RewrittenBlock | None,
        original: Callable[..., Any] | None = None,
    ) -> None:
        same = train is eval  # then what is made of it serves both
        self.programs = {True: _program(train)}
        self.programs[False] = self.programs[True] if same else _program(eval)
        self.guards = {True: train.guards if train else (), False: eval.guards if eval else ()}
        self.packed_names = {True: packed_names(train), False: packed_names(eval)}
        self.stored = {True: train.stored if train else (), False: eval.stored if eval else ()}
        self.changed = {True: train.changed if train else (), False: eval.changed if eval else ()}
        self.autocast = {True: train.autocast if train else None, False: eval.autocast if eval else None}
        self.small = {True: train.small if train else NEVER_SMALL, False: eval.small if eval else NEVER_SMALL}
        graphs = {True: train and train.graph, False: eval and eval.graph}
        self.weights = {mode: main_grad.parameters_of(graph) if graph else () for mode, graph in graphs.items()}
        self.matrices = {mode: matrices_of(g, self.packed_names[mode]) if g else {} for mode, g in graphs.items()}
        self.num_experts = {True: train.num_experts if train else None, False: eval.num_experts if eval else None}
        self.sites: dict[bool, RoutingSite | str] = {}
        self.restarted, self.called = list[Callable[[], None]](), list[Callable[[], None]]()
        self.adapters, self.lora = Adapters(), LinearLora.of(train, eval)
        self._own_original = original
        self._logged: set[str] = set()
        self._missed_sizes: tuple[Any, ...] | None = None
        self.why = ""  # ... the original ran when it last did
        self.attributes = {True: AttributeGuards.of(module, train, original)}
        self.attributes[False] = self.attributes[True] if same else AttributeGuards.of(module, eval, original)
        self._bind(module)

    def _bind(self, module: nn.Module) -> None:
        peft.watch()
        self._module = weakref.ref(module)
        for attributes in self.attributes.values():
            attributes.bind(module)
        self.__name__ = "forward"
        self.__doc__ = type(module).forward.__doc__
        self._forms: dict[tuple[Any, ...], Callable[[Any, Any], list[Any] | None]] = {}
        self._arguments = ArgumentNames.of(self._own_original or type(module).forward, self._own_original is None)

    @property
    def module(self) -> nn.Module:
        """The user's module; raises `ReferenceError` once it is gone."""
        module = self._module()
        if module is None:
            raise ReferenceError("the module of this rewritten forward no longer exists; keep a reference to the model")
        return module

    @property
    def __code__(self) -> CodeType:
        """The original's code object, after which torch.export names its trace."""
        code: CodeType = getattr(self._own_original or type(self.module).forward, "__code__", _NO_CODE)
        return code

    def original(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the forward that was there before. ``restarted`` are told, since the rewritten one may have run a part of it."""
        for told in self.restarted:
            told()
        return self._original(*args, **kwargs)

    def _original(self, *args: Any, **kwargs: Any) -> Any:
        with self.adapters.in_place() if self.adapters else nullcontext():
            if self._own_original is not None:
                return self._own_original(*args, **kwargs)
            return type(self.module).forward(self.module, *args, **kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        for told in self.called:
            told()
        training = bool(self.module.training)
        if self.programs[training] is None:
            return self.original(*args, **kwargs)
        limits, wanted = self.small[training], is_grad_enabled()
        limit = limits.with_gradients if wanted else limits.without_gradients
        small = is_small(limit, args, kwargs) and not (wanted and self._has_main_grad(training))
        missed = self._missed_sizes is not None and self._missed_sizes == call_sizes(training, args, kwargs)
        if small or (missed and not saving_is_counted()):
            return self.original(*args, **kwargs)
        try:
            return self.rewritten(*args, **kwargs)
        except GuardMiss as miss:
            reason = miss.args[0]  # torch 2.11's tracer cannot make a text of an exception
            of_sizes, called = (False, ()) if is_compiling() else (isinstance(miss, SizeMiss), miss.called)
        if is_compiling():
            say_in_trace(self._path, reason)
            return self.original(*args, **kwargs)
        self._log(reason)
        self._missed_sizes = call_sizes(training, args, kwargs) if of_sizes else None
        with answered(self.module, called):
            return self._original(*args, **kwargs) if called else self.original(*args, **kwargs)

    def rewritten(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the rewritten forward of the current mode, without falling back.

        Raises:
            GuardMiss: there is none, or it was not made for these inputs.
        """
        module = self.module
        training = bool(module.training)
        program = self.programs[training]
        if program is None:
            raise GuardMiss(f"expected {'eval' if training else 'training'} mode")
        adapted = self.follow_adapters(module)  # once: a compiler may trace parts of a call only
        self.attributes[training].check()
        if reason := reason_for_own_code(module, self.weights[training]):
            raise GuardMiss(reason)
        inputs = self._inputs_of(program, training, args, kwargs)
        dtypes = None
        if (known := self.autocast[training]) is not None and may_be_on():
            values = self._arguments.bind(args, kwargs)
            dtypes = dtypes_under_autocast(known, self.guards[training], values, module)
        results.check(module, self.stored[training])
        read = [getattr(module, name) for name in self.packed_names[training]]
        read += adapted.factors() if adapted else ()
        for reader in read:
            reader.refresh()
        with results.counted(module, self.stored[training]) if self.stored[training] else nullcontext():
            result = program.function(a.seen_from(module) if (a := adapted or self.adapters) else module, *inputs)
        look_before_backward(result, read)
        result = result if dtypes is None else in_dtypes(result, dtypes)
        if self.stored[training]:
            result, kept = result
            results.leave(module, self.stored[training], kept)
        return result

    def follow_adapters(self, module: nn.Module) -> LinearLora | TracedLora | None:
        """Sees through modules of PEFT around linear layers. Returns what is active on those of experts, if anything.

        Raises:
            GuardMiss: it is no low-rank addition.
        """
        if is_compiling():
            return TracedLora(module, self.lora.weights, self.lora.multiplied) or None
        if self.lora.changed(module):
            for each in (*self.attributes.values(), *(getattr(module, name) for name in self.lora.weights)):
                each.see_through(self.lora.bases)
        return self.lora or None

    def _inputs_of(self, program: Program, training: bool, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        """The inputs of the program, checked."""
        if not is_compiling():
            form = training, len(args), *kwargs
            if form not in self._forms:
                self._forms[form] = inputs_of(form[1:], self._arguments, self.guards[training], program.inputs)
            inputs = self._forms[form](args, kwargs)
            if inputs is not None:
                return inputs
        values = self._arguments.bind(args, kwargs)
        check_inputs(self.guards[training], values)
        check_coverage(self.guards[training], program.inputs, values, self._arguments.defaults)
        return [values[name] for name in program.inputs]

    def takes_adapters(self) -> bool:
        """Whether the programs run an operator that takes weights and their adapters apart."""
        made = [program.source for program in self.programs.values() if program is not None]
        return len(made) > 0 and all(any(f"_{name}(" in source for name in TAKE_SOURCES) for source in made)

    @property
    def _path(self) -> str:
        return next((p.path for p in self.programs.values() if p and p.path), type(self.module).__name__)

    def _has_main_grad(self, training: bool) -> bool:
        """Whether gradients go to ``main_grad`` buffers, which the block's own code knows nothing about."""
        return main_grad.has_any(self.module, self.weights[training])

    def _log(self, reason: str) -> None:
        self.why = f": {reason}"
        if self._has_main_grad(bool(self.module.training)):
            reason += "; gradients of its weights go to grad meanwhile, not to main_grad"
        if reason in self._logged:
            return
        self._logged.add(reason)
        logger.warning("%s runs its original forward: %s", self._path, reason)

    def __getstate__(self) -> dict[str, Any]:
        state = {key: value for key, value in self.__dict__.items() if key not in _UNPICKLED}
        return {**state, "module": self.module}

    def __setstate__(self, state: dict[str, Any]) -> None:
        module = state.pop("module")
        self.__dict__.update(state)
        self._logged, self._missed_sizes, self.restarted, self.called = set(), None, [], []
        self._bind(module)


_NO_CODE = HexaForward.__call__.__code__
_UNPICKLED = frozenset("_module _arguments _forms _logged restarted called _missed_sizes __doc__ __name__".split())


def install(block: nn.Module, train: RewrittenBlock | None, eval: RewrittenBlock | None) -> HexaForward:
    """Replaces ``block.forward`` on this instance; the rest of the module is untouched.

    Args:
        block: the original module that the rewritten graphs' targets are relative to.
        train, eval: the rewritten block for each mode, None to leave the mode as it is.

    Raises:
        InputError: the block is installed already, or a packed weight's name is taken.
    """
    if is_installed(block):
        raise InputError(f"{type(block).__name__} already has a rewritten forward; call uninstall() first")
    experts = readers(block, train, eval)
    forward = HexaForward(block, train, eval, block.__dict__.get("forward"))
    block.__dict__.update(experts)
    block.__dict__["forward"] = forward
    with suppress(GuardMiss):  # the first call says it and runs the original
        forward.follow_adapters(block)
    for packed in experts.values():
        with suppress(GuardMiss):
            packed.refresh()
    return forward


def uninstall(block: nn.Module) -> None:
    """Gives ``block`` its own forward back; packed parameters stay where they are. Raises `InputError` if nothing is installed."""
    forward = installed_forward(block)
    if forward is None:
        raise InputError(f"{type(block).__name__} has no rewritten forward to remove")
    for name in {*forward.packed_names[True], *forward.packed_names[False]}:
        del block.__dict__[name]
    del block.__dict__["forward"]
    if forward._own_original is not None:
        block.__dict__["forward"] = forward._own_original


def installed_forward(block: nn.Module) -> HexaForward | None:
    """The rewritten forward that ``block`` itself runs, if any."""
    forward = block.__dict__.get("forward")
    return forward if isinstance(forward, HexaForward) else None


def is_installed(block: nn.Module) -> bool:
    """Whether ``block`` itself runs a rewritten forward."""
    return installed_forward(block) is not None


def _program(rewritten: RewrittenBlock | None) -> Program | None:
    return None if rewritten is None else Program.of(rewritten.graph, rewritten.path)
