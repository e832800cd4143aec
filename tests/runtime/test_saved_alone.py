"""Experts of a list that lie side by side are saved one by one, by whatever looks at storages."""

from __future__ import annotations

import io
import pickle
from pathlib import Path

import pytest
import torch
from torch import nn

import hexa_fx
from hexa_fx import HexaConfig
from hexa_fx.isolation.size import owns_its_storage
from hexa_fx.runtime.install import uninstall
from tests.inspect import models

QUICK = HexaConfig(verify=False, own_code_when_small=False)


def made(in_place: bool = True) -> tuple[nn.Module, nn.Module]:
    """The model that was given, and the optimized one."""
    torch.manual_seed(0)
    model = models.make()
    rewritten = (hexa_fx.optimize_ if in_place else hexa_fx.optimize)(model, models.INPUT, QUICK)
    assert not all(map(owns_its_storage, rewritten.parameters()))
    return model, rewritten


def clones(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], value) for name, value in expected.items())


@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.filterwarnings("error")
def test_accelerate_saves_every_expert(in_place: bool, tmp_path: Path) -> None:
    """The model that was given too, whose parameters the optimized one shares."""
    accelerate = pytest.importorskip("accelerate")
    load_file = pytest.importorskip("safetensors.torch").load_file
    for number, model in enumerate(made(in_place)):
        accelerate.Accelerator(cpu=True).save_model(model, tmp_path / str(number))
        assert_same(load_file(tmp_path / str(number) / "model.safetensors"), clones(model))


def test_safetensors_saves_and_loads_a_model(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    _, model = made()
    safetensors.save_model(model, tmp_path / "model")
    expected = clones(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    safetensors.load_model(model, tmp_path / "model")
    assert_same(clones(model), expected)


def test_an_expert_alone_takes_the_bytes_of_one() -> None:
    _, model = made()
    file = io.BytesIO()
    torch.save(model.layers[0].experts[1].state_dict(), file)
    plain = io.BytesIO()
    torch.save(models.make().layers[0].experts[1].state_dict(), plain)
    assert len(file.getvalue()) <= len(plain.getvalue())


def test_what_is_written_to_the_state_is_in_the_model() -> None:
    """As averages of weights are copied; and where backward looks for changes it sees them."""
    _, model = made()
    versions = [parameter._version for parameter in model.parameters()]
    for value in model.state_dict().values():
        value.mul_(2)
    assert [parameter._version for parameter in model.parameters()] == [version + 1 for version in versions]
    torch.manual_seed(0)
    assert_same(clones(model), {name: 2 * value for name, value in clones(models.make()).items()})
    assert all(value is p for value, p in zip(model.state_dict(keep_vars=True).values(), model.parameters()))


def test_a_state_outlives_the_model() -> None:
    _, model = made()
    expected, state = clones(model), model.state_dict()
    del model
    assert_same(state, expected)


def test_parameters_in_shared_memory_are_given_as_they_are() -> None:
    _, model = made()
    model.share_memory()
    assert all(value.is_shared() for value in model.state_dict().values())


@pytest.mark.parametrize("in_place", [True, False])
def test_undone_nothing_is_left_of_it(in_place: bool) -> None:
    """Neither on the model that was given, where another was made of it."""
    given, model = made(in_place)
    expected = model(models.INPUT)
    for each in (given, model):
        hexa_fx.undo_(each)
        assert all(map(owns_its_storage, each.parameters()))
        assert b"hexa_fx" not in pickle.dumps([m.__dict__["_state_dict_hooks"] for m in each.modules()])
        torch.testing.assert_close(each(models.INPUT), expected)


def test_a_block_that_is_tried_keeps_its_place() -> None:
    """What was laid side by side is not moved again by the next installation."""
    _, model = made()
    block = model.layers[0]
    forward, before = block.forward, [p.untyped_storage().data_ptr() for p in block.parameters()]
    assert forward.reads_under()
    uninstall(block)
    assert [p.untyped_storage().data_ptr() for p in block.parameters()] == before
