"""Who is told that a function starts, and who is not."""

import sys

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
