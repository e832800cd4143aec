"""Every script in examples/ runs, and is in its README."""

import runpy
import sys
from pathlib import Path
from types import ModuleType

import pytest

pytest.importorskip("transformers", minversion="5")

FOLDER = Path(__file__).parents[1] / "examples"
SAYS = {
    "transformers_inference": "calls: 2 rewritten",
    "fine_tuning": "calls: 40 rewritten",
    "lora_experts": "loaded by plain PEFT: the same logits",
    "qlora_one_gpu": "the adapters alone were saved",
    "grpo_replay": "on the sampler's routing",
    "grpo_trl": "trained by TRL on the sampler's routing",
    "handwritten_moe": "calls: 10 rewritten",
    "train_small_moe": "'own_calls': 0}",
    "inspect_graph": "# The first block's calls: 1 rewritten\n",
    "unequal_devices": "of one process",
    "all_to_all_experts": "equal to one device",
    "trainer_on_a_mesh": "as of one process",
}
OF_SEVERAL = ("unequal_devices", "all_to_all_experts", "trainer_on_a_mesh")
"""Run by tests/distributed/test_functions.py."""


def test_all_are_tested_and_listed() -> None:
    scripts = {path.stem for path in FOLDER.glob("*.py")}
    assert scripts == set(SAYS)
    assert all(f"examples/{name}.py" in (FOLDER / "README.md").read_text() for name in scripts)


@pytest.mark.parametrize("name", [name for name in SAYS if name not in OF_SEVERAL])
@pytest.mark.usefixtures("own_code_when_small")
def test_example_runs(name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    needed = {"fine_tuning": "accelerate", "lora_experts": "peft", "qlora_one_gpu": "peft", "grpo_trl": "trl"}
    if name in needed:
        pytest.importorskip(needed[name])
    monkeypatch.setattr(sys, "argv", [name])
    runpy.run_path(str(FOLDER / f"{name}.py"), run_name="__main__")
    assert SAYS[name] in capsys.readouterr().out


@pytest.mark.parametrize("missing", ["trl", "datasets"])
def test_what_has_to_be_installed_is_named(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", ModuleType("datasets"))
    vars(sys.modules["datasets"])["Dataset"] = None
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(SystemExit, match=f"{missing}.*: pip install trl datasets"):
        runpy.run_path(str(FOLDER / "grpo_trl.py"))


@pytest.mark.parametrize("name", OF_SEVERAL)
def test_several_processes_are_asked_for(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(FOLDER)
    with pytest.raises(SystemExit) as stopped:
        runpy.run_path(str(FOLDER / f"{name}.py"), run_name="__main__")
    assert stopped.value.code == f"several processes are needed: torchrun --nproc-per-node 2 examples/{name}.py"
