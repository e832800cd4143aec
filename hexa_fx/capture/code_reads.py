"""What a code object can read by global names, and whether it decides on dtypes or devices."""

from __future__ import annotations

import functools
import itertools
import types
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from hexa_fx.capture.instructions import Instruction, instructions_of

_DTYPES = frozenset(name for name, value in vars(torch).items() if isinstance(value, torch.dtype))
_WHOLE = frozenset({"globals", "eval", "exec", "dir", "sys.modules"})
_DEVICE = frozenset({"is_cuda", "is_cpu", "get_device", "is_mps", "is_xpu", "device_type"})
_LAYOUT = frozenset("is_contiguous stride storage_offset data_ptr untyped_storage _base _is_view".split())
_HARMLESS = frozenset(
    "AttributeError KeyError ImportError ModuleNotFoundError NameError StopIteration ZeroDivisionError".split()
)
"""Errors that no operation on tensors raises."""

ONLY_IF = {"tensor's dtype": ("dtype",), "caught errors": ("dtype", "device", "layout", "errors")}
"""What code asks if a tensor's dtype is read while it runs, since it compares ``something.dtype``, or if torch is called while it
runs, since it catches errors."""

ITEMS = "[]"
"""What code puts something into if it sets items, or calls what adds or takes some."""

CELL = "cell_contents"

ANYTHING = "*"
"""What code puts something into if it sets attributes by other means than ``holder.name = value``."""

_CHANGES = frozenset(
    "append extend insert remove pop clear sort reverse appendleft extendleft popleft rotate popitem setdefault update add discard "
    "fill move_to_end subtract difference_update intersection_update symmetric_difference_update heapify heappush heappop "
    "heapreplace heappushpop insort insort_left insort_right shuffle copyto put place putmask setitem delitem iadd iconcat ior "
    "imul __setitem__ __delitem__ __iadd__ __ior__ __imul__ __iand__ __isub__ __ixor__".split()
)
_SETS_BY_TEXT = frozenset(
    "setattr delattr vars __dict__ __setattr__ __delattr__ __setstate__ __init__ set_default_dtype set_default_device "
    "requires_grad_ add_module register_module register_buffer register_parameter register_forward_hook "
    "register_forward_pre_hook register_full_backward_hook register_full_backward_pre_hook".split()
)

_KINDS = frozenset({"is_floating_point", "is_complex", "itemsize", "element_size", "nbytes", "finfo", "iinfo"})


@dataclass(frozen=True)
class CodeReads:
    """What one code object mentions.

    Args:
        chains: a global name and the attributes that are taken of it, or set: ``("config", "scales", "first")``. What it sets
            counts as read, so that the same value lying there is a condition: the rewritten block sets none.
        imports: the same of Python modules that the code imports.
        sets: a global name and the attributes up to one that the code sets: ``("torch", "backends", "cudnn", "benchmark")``.
        asks: ``dtype`` if it compares a dtype, or looks something up by it; ``device`` if it asks what kind of device a tensor is
            on; ``layout`` if it asks how a tensor lies in memory; ``identity`` if it asks of two variables whether they hold one
            object; and what it asks only if it comes to that (`ONLY_IF`).
        puts: names of the attributes and globals that it sets; `CELL` if it sets a variable of a function around it, `ITEMS`, and
            `ANYTHING`.
    """

    chains: tuple[tuple[str, ...], ...]
    imports: tuple[tuple[str, ...], ...]
    sets: tuple[tuple[str, ...], ...]
    asks: frozenset[str]
    puts: frozenset[str]

    @property
    def hidden(self) -> str:
        """What the code asks for names that it does not spell out, of globals or Python modules; empty if nothing."""
        asked = (".".join(chain[:length]) for chain in self.chains for length in (1, 2))
        return next((name for name in asked if name in _WHOLE), "")


@functools.lru_cache(maxsize=4096)
def code_reads(code: types.CodeType) -> CodeReads:
    """Reads the instructions of ``code``, without those of functions inside it."""
    instructions, sets = list(instructions_of(code)), list[tuple[str, ...]]()
    chains, imports, imported = dict[tuple[str, ...], None](), dict[tuple[str, ...], None](), dict[str, str]()
    for at, instruction in enumerate(instructions):
        name, following = str(instruction.argval), instructions[at + 1 :]
        if instruction.opname in ("STORE_GLOBAL", "DELETE_GLOBAL"):
            chains[name,] = None
        elif instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            chains[name, *_attributes(following)] = None
            sets += [(name, *found)] if (found := _set_of(following)) else []
        elif instruction.opname == "IMPORT_NAME":
            imports |= {(name, str(i.argval)): None for i in _imported_from(following)}
            if following and following[0].opname == "STORE_FAST":
                imported[str(following[0].argval)] = name
        elif instruction.opname.startswith("LOAD_FAST") and name in imported:
            imports[imported[name], *_attributes(following)] = None
    asks, puts = frozenset(_asked(instructions)), frozenset(_put(instructions))
    return CodeReads(tuple(chains), tuple(imports), tuple(sets), asks, puts)


def _asked(instructions: list[Instruction]) -> Iterator[str]:
    decisions = list(_decisions_on_dtype(instructions))
    if not all(decisions):
        yield "dtype"
    elif decisions:
        yield "tensor's dtype"
    if _catches_errors(instructions):
        yield "caught errors"
    if _asks_for_device(instructions):
        yield "device"
    if any(i.opname in ("LOAD_ATTR", "LOAD_METHOD") and i.argval in _LAYOUT for i in instructions):
        yield "layout"
    if any(
        i.opname == "IS_OP" and _are_variables(instructions[max(at - 2, 0) : at]) for at, i in enumerate(instructions)
    ):
        yield "identity"


def _put(instructions: list[Instruction]) -> Iterator[str]:
    for instruction in instructions:
        name, kind = str(instruction.argval), instruction.opname
        if kind in ("STORE_ATTR", "STORE_GLOBAL", "DELETE_ATTR", "DELETE_GLOBAL"):
            yield name
        elif kind in ("STORE_DEREF", "DELETE_DEREF"):
            yield CELL
        elif kind in ("STORE_SUBSCR", "DELETE_SUBSCR") or name in _CHANGES or _is_in_place(instruction):
            yield ITEMS
        elif name in _SETS_BY_TEXT:
            yield ANYTHING


def _is_in_place(instruction: Instruction) -> bool:
    """Whether it is ``+=`` or the like, whose numbers come after those of ``+`` and the like."""
    return instruction.opname == "BINARY_OP" and instruction.argval in range(13, 26)


def _are_variables(operands: list[Instruction]) -> bool:
    return len(operands) == 2 and all(i.opname.startswith("LOAD_FAST") for i in operands)


def _catches_errors(instructions: list[Instruction]) -> bool:
    """Whether there is an ``except`` for errors that operations on tensors may raise, or for all."""
    for one, after in itertools.pairwise(instructions):
        if one.opname == "PUSH_EXC_INFO" and after.opname == "POP_TOP":
            return True
        if after.opname == "CHECK_EXC_MATCH" and str(one.argval) not in _HARMLESS:
            return True
    return False


def _attributes(following: list[Instruction]) -> Iterator[str]:
    for instruction in following:
        if instruction.opname in ("LOAD_ATTR", "LOAD_METHOD", "STORE_ATTR"):
            yield str(instruction.argval)
        if instruction.opname not in ("LOAD_ATTR", "LOAD_METHOD", "COPY"):  # the last of ``Config.calls += 1``
            return


def _set_of(following: list[Instruction]) -> list[str]:
    """The attributes up to one that is set, also by ``+=``; empty if none is."""
    names: list[str] = []
    for at, instruction in enumerate(following):
        if instruction.opname == "COPY":
            return [*names, str(following[at + 1].argval)]
        if instruction.opname not in ("LOAD_ATTR", "STORE_ATTR"):
            return []
        names.append(str(instruction.argval))
        if instruction.opname == "STORE_ATTR":
            return names
    return []


def _imported_from(following: list[Instruction]) -> Iterator[Instruction]:
    return (i for i in following[:16] if i.opname == "IMPORT_FROM")


def _decisions_on_dtype(instructions: list[Instruction]) -> Iterator[bool]:
    """Where a dtype, or a variable that holds one, is compared or looked up; for each, whether ``something.dtype`` is compared."""
    holds = {
        str(after.argval)
        for one, after in itertools.pairwise(instructions)
        if _is_dtype(one, set()) and after.opname == "STORE_FAST"
    }
    for at, instruction in enumerate(instructions):
        if instruction.opname in ("LOAD_ATTR", "LOAD_METHOD") and instruction.argval in _KINDS:
            yield False
        operands = {"CONTAINS_OP": 8, "COMPARE_OP": 2, "IS_OP": 2, "BINARY_SUBSCR": 1}.get(instruction.opname, 0)
        if any(_is_dtype(i, holds) for i in instructions[max(at - operands, 0) : at]):
            yield operands == 2 and _is_read_there(instructions[max(at - 3, 0) : at])


def _is_read_there(before: list[Instruction]) -> bool:
    """Whether the operands of a comparison are ``x.dtype`` and ``torch.float16``, a variable, or another such."""
    one, two, three = ([None] * 3 + [(i.opname, i.argval) for i in before])[-3:]
    read = ("LOAD_ATTR", "dtype")
    if read in (two, three):
        return True
    named = three is not None and three[0] == "LOAD_ATTR" and three[1] in _DTYPES
    return one == read and named and two is not None and two[0] == "LOAD_GLOBAL"


def _asks_for_device(instructions: list[Instruction]) -> bool:
    return any(
        i.opname in ("LOAD_ATTR", "LOAD_METHOD")
        and (i.argval in _DEVICE or (i.argval == "type" and instructions[at - 1].argval == "device"))
        for at, i in enumerate(instructions)
    )


def _is_dtype(instruction: Instruction, holds: set[str]) -> bool:
    if instruction.opname in ("LOAD_ATTR", "LOAD_GLOBAL"):
        return instruction.argval in _DTYPES or instruction.argval == "dtype"
    return instruction.opname.startswith("LOAD_FAST") and instruction.argval in holds
