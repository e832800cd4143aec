"""What lists, dicts and objects contain is noticed when it changes, and put back as it was."""

import copy
import pathlib
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from hexa_fx.isolation.contents import Contents, Holder


class Lru(OrderedDict[str, int]):
    def __setitem__(self, key: str, value: int) -> None:
        raise AssertionError("a method of the user's was called")


@dataclass(frozen=True, slots=True)
class Slotted:
    last: int = 1


class Unset:
    """Has a slot that is empty at first, and attributes beside it; what it lacks it asks another object for."""

    __slots__ = ("__dict__", "last")

    def __init__(self) -> None:
        self.first = 1

    def __getattr__(self, name: str) -> Any:
        return getattr(1, name)


def rename(held: dict[str, int]) -> None:
    held["c"] = held.pop("b")


def take_first(held: dict[str, int]) -> None:
    del held["a"]


CHANGES: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "list": (lambda: [1, 2], lambda held: held.append(3)),
    "deque": (lambda: deque([1, 2], maxlen=2), lambda held: held.append(3)),
    "set": (lambda: {1, 2}, lambda held: held.add(3)),
    "dict": (lambda: {"a": 1, "b": 2}, lambda held: held.update(c=3)),
    "key of a dict": (lambda: {"a": 1, "b": 2}, rename),
    "order of a dict": (lambda: {"a": 1, "b": 2}, take_first),
    "counter": (lambda: Counter("ab"), lambda held: held.update("c")),
    "dict with defaults": (lambda: defaultdict(list, a=[]), lambda held: held["b"]),
    "ordered dict": (lambda: OrderedDict(a=1, b=2), lambda held: held.update(c=3)),
    "ordered dict, an item less": (lambda: OrderedDict(a=1, b=2), take_first),
    "ordered dict, another order": (lambda: OrderedDict(a=1, b=2), lambda held: held.move_to_end("a")),
    "ordered dict of the user's": (lambda: Lru(), lambda held: OrderedDict.__setitem__(held, "a", 1)),
    "slot": (Slotted, lambda held: object.__setattr__(held, "last", 2)),
    "empty slot": (Unset, lambda held: setattr(held, "last", 2)),
    "attribute beside slots": (Unset, lambda held: setattr(held, "first", 2)),
}


def seen(held: Any) -> Any:
    """As the user sees it, order included."""
    if isinstance(held, Unset):
        return vars(held).copy(), _is_filled(held)
    return repr(held)


def _is_filled(held: Unset) -> bool:
    try:
        Unset.last.__get__(held)
    except AttributeError:
        return False
    return True


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_is_noticed_and_undone(name: str) -> None:
    make, change = CHANGES[name]
    held = make()
    before = Contents([Holder("held", held)])
    was = copy.deepcopy(seen(held))
    assert not before.changed()
    change(held)
    assert [holder.value for holder in before.changed()] == [held]
    before.restore()
    assert seen(held) == was
    assert not before.changed()


@pytest.mark.parametrize(
    ("make", "use"),
    [
        (lambda: {"a": 10**6}, lambda held: held.update(a=10**3 * 10**3)),
        (lambda: {"text"}, lambda held: (held.clear(), held.add("".join(["te", "xt"])))),
        (lambda: {(0, 1): None}, lambda held: (held.clear(), held.update({tuple(range(2)): None}))),
        (lambda: pathlib.PurePath("a", "b"), str),
    ],
)
def test_equal_contents_are_no_change(make: Callable[[], Any], use: Callable[[Any], Any]) -> None:
    held = make()
    before = Contents([Holder("held", held)])
    use(held)
    assert not before.changed()
