"""What the instructions of a code object say: what it reads by global names, what it asks of tensors, what it adds to, and which of
its decisions only raise an error.

Instructions go by the names of Python 3.11, whatever interpreter runs. Later ones merge and rename some: 3.13 loads and stores two
local variables at once, 3.14 borrows what it loads and subscripts by ``BINARY_OP``.
"""

from __future__ import annotations

import dis
import functools
import itertools
import operator
import types
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import CodeType
from typing import Any, NamedTuple

import torch

from hexa_fx.isolation.purity import asking_frame

_SILENT = frozenset("CACHE PRECALL EXTENDED_ARG PUSH_NULL NOT_TAKEN TO_BOOL".split())


class Instruction(NamedTuple):
    """One operation, what it is about, and where in the code it lies."""

    opname: str
    argval: Any
    offset: int


def instructions_of(code: types.CodeType) -> Iterator[Instruction]:
    """The instructions of ``code``, without those of functions inside it and those that do nothing of their own."""
    for found in dis.get_instructions(code):
        if found.opname not in _SILENT:
            yield from plain(found.opname, found.argval, found.argrepr, found.offset)


def plain(opname: str, argval: Any, argrepr: str, offset: int) -> Iterator[Instruction]:
    """One instruction of any interpreter as those of 3.11."""
    if opname == "BINARY_OP" and argrepr == "[]":
        yield Instruction("BINARY_SUBSCR", argval, offset)
        return
    parts = (
        opname.replace("_BORROW", "").replace("_FAST_LOAD", "_FAST LOAD").replace("_FAST_STORE", "_FAST STORE").split()
    )
    values = argval if len(parts) == 2 and isinstance(argval, tuple) else [argval] * len(parts)
    for part, value in zip(parts, values):
        yield Instruction(part, value, offset)


_TAKES = ("LOAD_ATTR", "LOAD_METHOD")
_DTYPES = frozenset(name for name, value in vars(torch).items() if isinstance(value, torch.dtype))
_WHOLE = frozenset("globals locals eval exec dir sys.modules __import__ importlib.import_module import_module".split())
_DEVICE = frozenset({"is_cuda", "is_cpu", "get_device", "is_mps", "is_xpu", "device_type"})
_LAYOUT = frozenset("is_contiguous stride storage_offset data_ptr untyped_storage _base _is_view".split())
_HARMLESS = frozenset(
    "AttributeError KeyError ImportError ModuleNotFoundError NameError StopIteration ZeroDivisionError".split()
)
"""Errors that no operation on tensors raises."""

BY_TEXT = frozenset({"vars", "__dict__", "getattr", "hasattr", "attrgetter"})
"""What takes names of attributes as texts."""

_KINDS = frozenset({"is_floating_point", "is_complex", "itemsize", "element_size", "nbytes", "finfo", "iinfo"})


@dataclass(frozen=True)
class CodeReads:
    """What one code object mentions.

    Args:
        chains: a global name and the attributes that are taken of it, or set: ``("config", "scales", "first")``. What it sets
            counts as read, so that the same value lying there is a condition: the rewritten block sets none.
        imports: the same of Python modules that the code imports.
        asks: ``dtype`` if it compares a dtype, or looks something up by it; ``device`` if it asks what kind of device a tensor is
            on; ``layout`` if it asks how a tensor lies in memory; all of these if it catches errors of operations, but only the
            first two if these are `TypeError`.
    """

    chains: tuple[tuple[str, ...], ...]
    imports: tuple[tuple[str, ...], ...]
    asks: frozenset[str]

    @property
    def hidden(self) -> str:
        """What the code asks for names that it does not spell out, of globals or Python modules; empty if nothing."""
        asked = (".".join(chain[:length]) for chain in self.chains for length in (1, 2))
        return next((name for name in asked if name in _WHOLE), "")


@functools.lru_cache(maxsize=4096)
def code_reads(code: types.CodeType) -> CodeReads:
    """Reads the instructions of ``code``, without those of functions inside it."""
    instructions = list(instructions_of(code))
    chains, imports, imported = dict[tuple[str, ...], None](), dict[tuple[str, ...], None](), dict[str, str]()
    for at, instruction in enumerate(instructions):
        name, following = str(instruction.argval), instructions[at + 1 :]
        if instruction.opname in ("STORE_GLOBAL", "DELETE_GLOBAL"):
            chains[name,] = None
        elif instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            chains[name, *_attributes(following)] = None
        elif instruction.opname == "IMPORT_NAME":
            imports |= {(name, str(i.argval)): None for i in following[:16] if i.opname == "IMPORT_FROM"}
            if following and following[0].opname == "STORE_FAST":
                imported[str(following[0].argval)] = name
        elif instruction.opname.startswith("LOAD_FAST") and name in imported:
            imports[imported[name], *_attributes(following)] = None
    return CodeReads(tuple(chains), tuple(imports), frozenset(_asked(instructions)))


def _asked(instructions: list[Instruction]) -> Iterator[str]:
    if _decides_on_dtype(instructions):
        yield "dtype"
    if caught := set(_caught(instructions)):
        yield from ("dtype", "device")
        yield from ("layout",) if caught != {"TypeError"} else ()  # which views do not raise
    taken = [(before.argval, i.argval) for before, i in itertools.pairwise(instructions) if i.opname in _TAKES]
    if any(name in _DEVICE or (of, name) == ("device", "type") for of, name in taken):
        yield "device"
    if any(name in _LAYOUT for _, name in taken):
        yield "layout"


def _caught(instructions: list[Instruction]) -> Iterator[str]:
    """What there is an ``except`` for: errors that operations on tensors may raise, by name, or all."""
    for one, after in itertools.pairwise(instructions):
        if one.opname == "PUSH_EXC_INFO" and after.opname == "POP_TOP":
            yield "all"
        if after.opname == "CHECK_EXC_MATCH" and str(one.argval) not in _HARMLESS:
            yield str(one.argval)


def _attributes(following: list[Instruction]) -> Iterator[str]:
    for instruction in following:
        if instruction.opname in ("LOAD_ATTR", "LOAD_METHOD", "STORE_ATTR"):
            yield str(instruction.argval)
        if instruction.opname not in ("LOAD_ATTR", "LOAD_METHOD", "COPY"):  # the last of ``Config.calls += 1``
            return


def _decides_on_dtype(instructions: list[Instruction]) -> bool:
    """Whether a dtype, or a variable that holds one, is compared or looked up."""
    holds = {
        str(after.argval)
        for one, after in itertools.pairwise(instructions)
        if _is_dtype(one, set()) and after.opname == "STORE_FAST"
    }
    for at, instruction in enumerate(instructions):
        if instruction.opname in _TAKES and instruction.argval in _KINDS:
            return True
        operands = {"CONTAINS_OP": 8, "COMPARE_OP": 2, "IS_OP": 2, "BINARY_SUBSCR": 1}.get(instruction.opname, 0)
        if any(_is_dtype(i, holds) for i in instructions[max(at - operands, 0) : at]):
            return True
    return False


def _is_dtype(instruction: Instruction, holds: set[str]) -> bool:
    if instruction.opname in ("LOAD_ATTR", "LOAD_GLOBAL"):
        return instruction.argval in _DTYPES or instruction.argval == "dtype"
    return instruction.opname.startswith("LOAD_FAST") and instruction.argval in holds


_ADDS = frozenset({"append", "extend", "update"})


@functools.lru_cache(maxsize=4096)
def only_adds(code: types.CodeType, name: str) -> bool:
    """Whether all that ``code`` does with what goes by a name is to add to it, set items in it, or ask whether it is None."""
    if name not in code.co_names:
        return BY_TEXT.isdisjoint(code.co_names)
    found = list(instructions_of(code))
    return all(
        _adds(found, at, name)
        for at, i in enumerate(found)
        if i.argval == name and i.opname in ("LOAD_ATTR", "LOAD_GLOBAL", "LOAD_NAME", "LOAD_METHOD")
    )


def _adds(found: list[Instruction], at: int, name: str) -> bool:
    """Whether ``losses.append``, ``losses += ...``, ``losses[key] = ...`` or ``losses is None`` begins with an instruction."""
    if at + 1 >= len(found):
        return False
    after = found[at + 1]
    if after.opname in _TAKES:
        return after.argval in _ADDS
    if "IF_NONE" in after.opname or "IF_NOT_NONE" in after.opname or (after.argval is None and "CONST" in after.opname):
        return True
    if at and (found[at - 1].opname == "COPY" or found[at].opname != "LOAD_ATTR"):  # ``+=`` of an attribute or a global
        stores = (i.opname in ("STORE_ATTR", "STORE_GLOBAL") and i.argval == name for i in found[at:])
        if any(stores):
            return True
    key = itertools.takewhile(
        lambda i: i.opname.startswith(("LOAD_", "FORMAT_", "BUILD_STRING", "CONVERT_")), found[at + 1 :]
    )
    end = at + 1 + len(list(key))
    return end < len(found) and found[end].opname == "STORE_SUBSCR"


_offset = operator.attrgetter("offset")
_ENDS = ("STORE", "POP_TOP", "RETURN", "YIELD", "FOR_ITER", "RAISE")


def only_raises() -> bool:
    """Whether the code asks for a value right now in a condition, of which one side is nothing but a ``raise``."""
    frame = asking_frame(("torch.", "hexa_fx."))
    if frame is None:
        return False
    code, errors = _conditions(frame.f_code)
    for found in code[bisect_left(code, frame.f_lasti, key=_offset) :]:
        if _is_condition(found):
            return found.offset in errors
        if found.opname.startswith(_ENDS):
            return False
    return False


@functools.lru_cache(maxsize=256)
def _conditions(code: CodeType) -> tuple[Sequence[Instruction], frozenset[int]]:
    """The instructions, and where among them the conditions lie that only say whether an error is raised, which none may catch."""
    found = list(instructions_of(code))
    caught = dis.Bytecode(code).exception_entries  # type: ignore[attr-defined]
    errors = set()
    for place, jump in enumerate(found):
        if _is_condition(jump) and not any(entry.start <= jump.offset < entry.end for entry in caught):
            ways = found[place + 1 :], found[bisect_left(found, jump.argval, key=_offset) :]
            errors |= {jump.offset} if any(map(_raises, ways)) else set()
    return found, frozenset(errors)


def _is_condition(found: Instruction) -> bool:
    return "JUMP" in found.opname and "IF" in found.opname


def _raises(way: Sequence[Instruction]) -> bool:
    end = next(
        (i.opname for i in way if "JUMP" in i.opname or i.opname.startswith(("RAISE", "RETURN", "FOR_ITER"))), ""
    )
    return end == "RAISE_VARARGS"
