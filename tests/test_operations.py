"""The table of operations has every form of an operation under one name, and asks only what is called."""

import operator

import pytest
import torch
import torch.fx

from hexa_fx import operations as ops


@pytest.mark.parametrize(
    ("form", "name"),
    [
        *[(form, "add") for form in ("add", "add_", "iadd", "__add__", "__iadd__", "__radd__")],
        *[(form, "div") for form in ("truediv", "div_", "__itruediv__", "true_divide")],
        *[(form, "remainder") for form in ("mod", "__mod__", "fmod", "remainder_")],
        *[(form, "and") for form in ("and_", "__and__", "bitwise_and")],
        *[("_grouped_mm", "grouped_mm"), ("clip_", "clamp"), ("__rmatmul__", "matmul"), ("concat", "cat")],
        *[("__int__", "__int__"), ("int", "int"), ("item", "item"), ("__rsub__", "rsub")],
    ],
)
def test_forms_have_one_name(form: str, name: str) -> None:
    assert ops.canonical(form) == name


def test_what_is_asked_of_calls() -> None:
    graph = torch.fx.Graph()
    argument = graph.placeholder("topk")  # its name says nothing
    chosen = graph.call_method("topk", (argument, 2))
    added = graph.call_function(operator.iadd, (chosen, 1))
    assert [ops.chooses(node) for node in (argument, chosen, added)] == [False, True, False]
    assert ops.works_on_each(added)
    assert ops.adds(added)
    assert not ops.moves(added)
