"""Which code ran: its instructions, who is told that a function starts, and what it decides on a dtype."""

import copy
import sys
from threading import Thread

import pytest
import torch

import hexa_fx
from hexa_fx.capture import capture
from hexa_fx.capture.bytecode import code_reads, instructions_of, plain
from hexa_fx.capture.ran_code import told_of_starts, untold
from tests.inspect.models import Block


def _compared(x: torch.Tensor) -> bool:
    return x.dtype == torch.bfloat16


def _caught(x: torch.Tensor) -> bool:
    try:
        x.view(torch.int32)
    except Exception:
        return True
    return False


class _Doubling(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 2


def _caught_of_an_autograd_function(x: torch.Tensor) -> bool:
    try:
        _Doubling.apply(x)
    except Exception:
        return True
    return False


def _asked_whether_it_iterates(x: torch.Tensor) -> bool:
    """As transformers' `ModelOutput` does with what it is given."""
    try:
        iter(x)
    except TypeError:
        return False
    return True


def test_how_tensors_lie_in_memory_counts_where_what_views_raise_is_caught(monkeypatch):
    monkeypatch.setenv("HEXA_FX_OWN_CODE_WHEN_SMALL", "0")
    for asks, expected in ((_asked_whether_it_iterates, True), (_caught, False)):

        class Inside(Block):
            def forward(self, x, asks=asks):
                return super().forward(x * (2 if asks(x) else 1))

        optimized = hexa_fx.optimize(Inside().eval(), torch.randn(24, 8))
        optimized(torch.randn(24, 9)[:, :8])
        (block,) = optimized.report.blocks
        assert bool(block.calls.rewritten) is expected, block.calls


@pytest.mark.parametrize("asks", [_compared, _caught, _caught_of_an_autograd_function], ids=lambda f: f.__name__)
def test_code_that_compares_a_dtype_or_catches_errors_asks_for_the_dtype(asks, monkeypatch):
    monkeypatch.setenv("HEXA_FX_OWN_CODE_WHEN_SMALL", "0")

    class Inside(Block):
        def forward(self, x):
            return super().forward(x * (2 if asks(x) else 1))

    torch.manual_seed(0)
    model = Inside().eval()
    optimized = hexa_fx.optimize(copy.deepcopy(model), torch.randn(24, 8))
    assert len(optimized.report.rewritten) == 1, optimized.report
    assert capture(model, (torch.randn(24, 8),), {}).asks["dtype"]
    x = torch.randn(24, 8).bfloat16()
    result, expected = optimized.bfloat16()(x), model.bfloat16()(x)
    torch.testing.assert_close(result, expected, rtol=0.05, atol=0.05)
    (block,) = optimized.report.blocks
    assert block.calls.kinds == 2 or block.calls.own, "another dtype is another kind of call"


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


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (("LOAD_ATTR", "dtype", "dtype"), [("LOAD_ATTR", "dtype")]),
        (("STORE_FAST_LOAD_FAST", ("a", "b"), "a, b"), [("STORE_FAST", "a"), ("LOAD_FAST", "b")]),
        (("LOAD_FAST_LOAD_FAST", ("a", "b"), "a, b"), [("LOAD_FAST", "a"), ("LOAD_FAST", "b")]),
        (("STORE_FAST_STORE_FAST", ("a", "b"), "a, b"), [("STORE_FAST", "a"), ("STORE_FAST", "b")]),
        (("LOAD_FAST_BORROW", "a", "a"), [("LOAD_FAST", "a")]),
        (("LOAD_FAST_BORROW_LOAD_FAST_BORROW", ("a", "b"), "a, b"), [("LOAD_FAST", "a"), ("LOAD_FAST", "b")]),
        (("BINARY_OP", 26, "[]"), [("BINARY_SUBSCR", 26)]),
        (("BINARY_OP", 0, "+"), [("BINARY_OP", 0)]),
    ],
)
def test_names(given, expected):
    assert [found[:2] for found in plain(*given, 8)] == expected


def test_a_dtype_in_a_variable_is_followed():
    def kept(x):
        kind = x.dtype
        return x * 2 if kind == torch.float16 else x

    def looked_up(x, table):
        kind = x.dtype
        return table[kind]

    def plain_code(x, table):
        kind = x.shape
        return table[kind]

    assert "dtype" in code_reads(kept.__code__).asks
    assert "dtype" in code_reads(looked_up.__code__).asks
    assert "dtype" not in code_reads(plain_code.__code__).asks


def test_a_module_imported_in_a_function_is_followed():
    def imports(x):
        import math as mathematics

        return x * mathematics.pi

    assert ("math", "pi") in code_reads(imports.__code__).imports


def test_subscripts_are_called_so():
    def subscripts(x, i):
        return x[i] + x[i:]

    names = [found.opname for found in instructions_of(subscripts.__code__)]
    assert any(name.startswith("BINARY_S") for name in names)
