"""One rewritten forward of a block, and the conditions under which it was made."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Protocol

import torch
from torch import is_grad_enabled, nn
from torch.compiler import is_compiling

from hexa_fx import registry
from hexa_fx.ir import PackedWeight, RewrittenBlock
from hexa_fx.isolation.module_tree import referenced
from hexa_fx.ops import main_grad
from hexa_fx.ops.sources import TAKE_SOURCES
from hexa_fx.runtime import results
from hexa_fx.runtime.attribute_guards import AttributeGuards
from hexa_fx.runtime.autocast import dtypes_under_autocast, in_dtypes
from hexa_fx.runtime.call_kinds import foreign_weight, is_small, reason_for_own_code
from hexa_fx.runtime.guards import ArgumentNames, GuardMiss, OwnCodeOnly, check_inputs
from hexa_fx.runtime.listed_experts import ListedExperts
from hexa_fx.runtime.program import Program
from hexa_fx.runtime.resolution import inputs_of
from hexa_fx.sources.adapters import Adapters
from hexa_fx.sources.packed_parameters import matrices_of
from hexa_fx.torch_private import _is_any_autocast_enabled


class LayerAdapters(Protocol):
    """What is active around the linear layers whose weights a block reads as one (`hexa_fx.lora`)."""

    weights: Mapping[str, PackedWeight]
    bases: Mapping[int, nn.Module]

    def changed(self, block: nn.Module) -> bool: ...
    def traced(self, block: nn.Module) -> LayerAdapters: ...
    def factors(self) -> Sequence[ListedExperts]: ...
    def seen_from(self, module: Any) -> Any: ...


class Specialisation:
    """A rewritten forward that runs in the calls for which its conditions hold: mode, dtypes, autocast, and what code read. It does
    not keep the module alive. ``own_forward``: that the module's instance had of its own; None if it had the class's."""

    def __init__(self, module: nn.Module, block: RewrittenBlock, own_forward: Callable[..., Any] | None = None) -> None:
        self.packed_names = tuple(weight.name for weight in block.packed)
        self.program = Program.of(block.graph, block.path, self.packed_names)
        self.training, self.autocast, self.guards = block.training, block.autocast, block.guards
        self.stored, self.changed = block.stored, block.changed
        self.origin = id(block.reads)  # all that is made of one analysis has these
        self.small, self.num_experts = block.small, block.num_experts
        self.weights = main_grad.parameters_of(block.graph)
        self._ways = [tuple(path.split(".")) for path in self.weights]
        self._of_lists = tuple(part[0] for weight in block.packed for part in weight.parts)
        self.matrices = matrices_of(block.graph, self.packed_names)
        self.lora: LayerAdapters = registry.lora().LinearLora.of(block)
        self.attributes = AttributeGuards.of(module, block, own_forward)
        self._forms: dict[tuple[Any, ...], Callable[[Any, Any], list[Any] | None]] = {}

    def holds_in(self, training: bool) -> bool:
        """Whether it was made for this mode."""
        return self.training is None or self.training is training

    def prefers_own_code(self, module: weakref.ref[nn.Module], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether the block's own code is faster for inputs as small as these."""
        wanted = is_grad_enabled()
        limit = self.small.with_gradients if wanted else self.small.without_gradients
        return is_small(limit, args, kwargs) and not (wanted and self.has_main_grad(referenced(module)))

    def has_main_grad(self, module: nn.Module) -> bool:
        """Whether gradients go to ``main_grad`` buffers, which the block's own code knows nothing about."""
        return main_grad.has_any(module, (*self.weights, *self._of_lists))

    def takes_adapters(self) -> bool:
        """Whether the program runs an operator that takes weights and their adapters apart."""
        return any(f"_{name}(" in self.program.source for name in TAKE_SOURCES)

    def run(
        self,
        module: nn.Module,
        arguments: ArgumentNames,
        adapters: Adapters,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Runs the rewritten forward on a call. Raises `GuardMiss` if it was not made for one like this."""
        inputs, dtypes, adapted = self.meet(module, arguments, args, kwargs)
        if self.stored:
            results.check(module, self.stored)
        for name in self.packed_names:
            getattr(module, name).refresh()
        for factor in adapted.factors() if adapted else ():
            factor.refresh()
        read = a.seen_from(module) if (a := adapted or adapters) else module
        result = self.program.function(read, *inputs)
        if dtypes is not None:
            result = in_dtypes(result, dtypes)
        if self.stored:
            result, kept = result
            results.leave(module, self.stored, kept)
        return result

    def meet(
        self, module: nn.Module, arguments: ArgumentNames, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[list[Any], tuple[torch.dtype, ...] | None, LayerAdapters | None]:
        """The inputs of the program, the dtypes that autocast asks of its results, and the adapters that are active. Raises
        `GuardMiss` if a condition does not hold in this call; sizes are left to the program."""
        traced = is_compiling()
        if not self.holds_in(bool(module.training)):
            raise GuardMiss(
                f"it was analysed in {'train' if self.training else 'eval'} mode; call it once in the other, untraced"
            )
        adapted = self.follow_adapters(module, traced)  # once: a compiler may trace parts of a call only
        if traced:
            self.attributes.check_in_trace()
        else:
            self.attributes.check()
        if reason := foreign_weight(module, self._ways) or reason_for_own_code(traced):
            raise OwnCodeOnly(reason)
        inputs = self.inputs_of(arguments, args, kwargs, traced)
        known = self.autocast
        if known is None or (known.off and not traced and not _is_any_autocast_enabled()):
            return inputs, None, adapted
        return inputs, dtypes_under_autocast(known, self.guards, arguments.bind(args, kwargs), module), adapted

    def follow_adapters(self, module: nn.Module, traced: bool = False) -> LayerAdapters | None:
        """Sees through modules of PEFT around linear layers. Returns what is active on those of experts, if anything. Raises
        `GuardMiss` if that is no low-rank addition."""
        if traced:
            return self.lora.traced(module) or None
        if self.lora.changed(module):
            for each in (self.attributes, *(getattr(module, name) for name in self.lora.weights)):
                each.see_through(self.lora.bases)
        return self.lora or None

    def inputs_of(
        self, arguments: ArgumentNames, args: tuple[Any, ...], kwargs: dict[str, Any], traced: bool = False
    ) -> list[Any]:
        """The inputs of the program. Raises `GuardMiss` if they are not what was recorded."""
        if not traced:
            form = len(args), *kwargs
            if form not in self._forms:
                self._forms[form] = inputs_of(form, arguments, self.guards, self.program.inputs)
            inputs = self._forms[form](args, kwargs)
            if inputs is not None:
                return inputs
        values = arguments.bind(args, kwargs)
        check_inputs(self.guards, self.program.inputs, values, arguments.defaults)
        return [values[name] for name in self.program.inputs]

    def why_not_now(self, module: nn.Module) -> GuardMiss | None:
        """Why it would not run if the block were called now, whatever its inputs; None if it would."""
        try:
            self.attributes.check()
            for name in self.packed_names:
                getattr(module, name).check()
        except GuardMiss as miss:
            return miss
        return None

    def look_anew(self, module: nn.Module) -> None:
        """Looks at adapters and stacked weights as they are now; what is wrong the first call says."""
        with suppress(GuardMiss):
            self.follow_adapters(module)
        for name in self.packed_names:
            with suppress(GuardMiss):
                getattr(module, name).refresh()
