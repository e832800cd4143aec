"""Who is told that a function starts, and who is not."""

import sys
from threading import Thread

import pytest

from hexa_fx.capture.ran_code import told_of_starts, untold


def test_functions_that_nobody_wants_to_hear_of_are_told_once() -> None:
    def wanted() -> None: ...
    def unwanted() -> None: ...

    heard: list[str] = []

    def hear(frame: object) -> bool:
        heard.append(frame.f_code.co_name)  # type: ignore[attr-defined]
        return heard[-1] == "wanted"

    before = sys.gettrace()
    with told_of_starts(hear):
        for _ in range(3):
            wanted()
            unwanted()
    wanted()
    assert (heard.count("wanted"), heard.count("unwanted")) == (3, 1)
    assert sys.gettrace() is before


def test_starts_in_other_threads_are_not_told() -> None:
    def called() -> None: ...

    heard: list[str] = []
    with told_of_starts(lambda frame: not heard.append(frame.f_code.co_name)):
        thread = Thread(target=called)
        thread.start()
        thread.join()
        assert "called" not in heard
        called()
    assert heard.count("called") == 1


def test_one_hears_within_another() -> None:
    def called() -> None: ...

    inner: list[str] = []
    outer: list[str] = []
    with told_of_starts(lambda frame: not outer.append(frame.f_code.co_name)):
        with told_of_starts(lambda frame: not inner.append(frame.f_code.co_name)):
            called()
        called()
    assert inner.count("called") == 1
    assert "called" in outer


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="nothing is traced there")
def test_what_is_called_untold_is_told_to_nobody() -> None:
    def called() -> None: ...

    heard: list[str] = []
    before = sys.gettrace()
    with told_of_starts(lambda frame: bool(heard.append(frame.f_code.co_name))):
        untold(called)()
        after = heard.count("called")
        called()
    assert (after, heard.count("called")) == (0, 1)
    assert sys.gettrace() is before
