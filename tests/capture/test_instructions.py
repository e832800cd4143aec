"""Instructions have the names of Python 3.11 under every interpreter, so that what code asks for is seen under each."""

import pytest
import torch

from hexa_fx.capture.bytecode import code_reads, instructions_of, plain


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
