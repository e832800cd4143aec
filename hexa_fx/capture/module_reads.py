"""Notes what the user's code takes of Python modules as objects: ``importlib.import_module(name).scale``, ``vars(settings)``.

Code shows only what it spells out (`hexa_fx.capture.code_reads`). A module's class may be exchanged, and then tells of the rest.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from hexa_fx.isolation.users_code import is_users, module_name


@contextmanager
def modules_noted(read: Callable[[Any, str], Any]) -> Iterator[None]:
    """A context in which ``read`` is told of attributes that the user's code takes of Python modules of the user's."""
    users = {id(module): module for name, module in list(sys.modules.items()) if is_users(name)}  # some have two names
    before = [(module, type(module)) for module in users.values() if isinstance(module, types.ModuleType)]
    kinds = {kind for _, kind in before}
    noting = {kind: types.new_class(kind.__name__, (kind,), {}, _noting(kind, read)) for kind in kinds}
    for module, kind in before:
        with suppress(TypeError):  # of a kind of module in C code
            module.__class__ = noting[kind]
    try:
        yield
    finally:
        for module, kind in before:
            module.__class__ = kind


def _noting(kind: type, read: Callable[[Any, str], Any]) -> Callable[[dict[str, Any]], None]:
    plain: Any = kind.__getattribute__

    def __getattribute__(module: Any, name: str) -> Any:
        is_told = not name.startswith("__") or name == "__dict__"
        if is_told and is_users(module_name(sys._getframe(1).f_globals)):
            read(module, name)
        return plain(module, name)

    return lambda namespace: namespace.update(__getattribute__=__getattribute__, __module__=kind.__module__)
