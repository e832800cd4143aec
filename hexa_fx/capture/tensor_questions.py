"""What code asks of tensors beside their numbers, or does to them, that no graph shows."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from typing import Any

import torch

from hexa_fx.capture.calls import SETS_DATA, user_location
from hexa_fx.capture.ran_code import RanCode
from hexa_fx.capture.read_edges import ReadEdges
from hexa_fx.isolation.purity import ATTRIBUTE, DATA, HOOK, OF_PAST
from hexa_fx.isolation.users_code import is_users, module_name

_OF_GRADIENTS = frozenset({"requires_grad", "is_leaf", "grad", "grad_fn", "is_inference"})
_HOOKS = ("register_hook", "register_post_accumulate_grad_hook", "retain_grad")
_CHANGED = {**dict.fromkeys(_HOOKS, HOOK), SETS_DATA: DATA, "requires_grad_": ATTRIBUTE, **OF_PAST}
"""What is done to a tensor, or asked of it, and no condition."""
_PASSED_THROUGH = ("hexa_fx.", "torch._tensor", "torch.overrides")


class TensorQuestions:
    """Notes them among the reads of a run.

    Args:
        ran: the code that ran.
        edges: what was read.
        read: notes that an attribute is read.
        has_met: whether the code came to an object.
        scope: path of the module whose code runs.
    """

    def __init__(
        self,
        ran: RanCode,
        edges: ReadEdges,
        read: Callable[[Any, Any], Any],
        has_met: Callable[[Any], bool],
        scope: Callable[[], str],
    ) -> None:
        self._ran, self._edges, self._read, self._has_met, self._scope = ran, edges, read, has_met, scope
        self.in_functions: list[set[str]] = []

    def note(self, tensor: Any, attribute: str) -> None:
        """Notes that the code calls torch, or asks something of a tensor that is no number of it, such as ``requires_grad``."""
        frame: types.FrameType | None = sys._getframe(1)
        self._ran.settle(frame, "tensor's dtype" if attribute == "dtype" else "caught errors")
        while frame is not None and module_name(frame.f_globals).startswith(_PASSED_THROUGH):
            frame = frame.f_back
        if (
            frame is None
            or attribute not in _OF_GRADIENTS | _CHANGED.keys()
            or not is_users(module_name(frame.f_globals))
        ):
            return
        if attribute in _CHANGED:
            self._note_done(tensor, attribute)
        elif self._has_met(tensor) and attribute != "is_inference":
            self._read(tensor, attribute)
        else:
            self.note_of_gradients({self._scope()})
            if attribute == "is_inference":
                self._ran.note_state(torch.is_inference_mode_enabled, self._scope())

    def _note_done(self, tensor: Any, attribute: str) -> None:
        """Notes that code sets an attribute of a tensor, or does else what no graph shows."""
        if attribute == "data" or (attribute.startswith("requires_grad") and not self._edges.is_held(tensor)):
            return  # the recorder tells of the first by another name, or as of a write, and records the second
        self._ran.hidden[self._scope()] = attribute, _CHANGED.get(attribute, ATTRIBUTE), user_location()

    def note_of_gradients(self, scopes: set[str]) -> None:
        """Notes that code asks whether a value that was computed has a gradient: if gradients are on, and by what it is made of.

        They are never on inside an `autograd.Function`. There it asks what holds outside, which is noted once the function is over.
        """
        if self.in_functions:
            self.in_functions[-1].update(scopes)
            return
        self._ran.asks["gradient"] |= scopes
        for scope in scopes:
            self._ran.note_state(torch.is_grad_enabled, scope)
