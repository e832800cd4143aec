"""`hexa-fx tune` on a device: every product of a layer gets an entry, and calls take the tiles."""

from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from hexa_fx.cli import app, model_layers
from hexa_fx.codegen.tuned import TunedTable
from hexa_fx.cuda import choosing
from hexa_fx.cuda import product as cuda_product

pytestmark = pytest.mark.gpu


def test_a_layer_is_tuned(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    sizes = (8, 2, 256, 128, model_layers.MODELS["OLMoE"][-1])
    monkeypatch.setattr(model_layers, "MODELS", {"Small": sizes})
    monkeypatch.setattr("hexa_fx.cli.tune_layers.MODELS", {"Small": sizes})
    monkeypatch.setattr(
        cuda_product, "table_path", lambda name: tmp_path / "of_this_machine.json"
    )  # other tests read that
    monkeypatch.setenv("HEXA_FX_AUTOTUNE", "1")
    monkeypatch.setenv("HEXA_FX_WAIT_FOR_KERNELS", "1")
    choosing.forget_choices()
    done = CliRunner().invoke(app, ["tune", "--again", "--tokens", "512", "--out", str(tmp_path / "table.json")])
    choosing.forget_choices()
    assert done.exit_code == 0, done.output
    table = TunedTable.from_json((tmp_path / "table.json").read_text())
    assert table.card == torch.cuda.get_device_name()
    if torch.cuda.get_device_capability()[0] == 9:
        assert {problem.op for problem in table.entries} >= {"esmm_act", "esmm", "esmm_act_backward", "estmm"}
    assert all(ms > 0 for _, ms in table.entries.values())
