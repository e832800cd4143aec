"""What people give by mistake, and the one sentence they get."""

import copy
import importlib
import inspect
import pickle
import re
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

import hexa_fx
from hexa_fx import optimizing
from hexa_fx.config import OTHER_VARIABLES
from hexa_fx.errors import InputError, NothingRewritten, PlanError, VerificationError
from hexa_fx.jit.errors import BuildError
from hexa_fx.runtime.install import is_installed
from tests.inspect.models import INPUT, Model


@pytest.fixture
def model() -> Model:
    torch.manual_seed(0)
    return Model()


def sentence(call) -> str:
    with pytest.raises(InputError) as error:
        call()
    return str(error.value)


@torch.inference_mode()
def made_in_inference_mode() -> Model:
    return Model()


NO_EXAMPLES = {
    "a generator": ((x for x in [INPUT]), "next(iter(loader))"),
    "a loader": (torch.utils.data.DataLoader([INPUT]), "next(iter(loader))"),
    "text": ("hello", "expected a tensor"),
}
NO_MODELS = {
    "a lazy model": (lambda: nn.Sequential(nn.LazyLinear(4)), "0.weight belongs to a lazy module"),
    "a class": (lambda: Model, "call the class"),
    "TorchScript": (lambda: torch.jit.script(nn.Sequential(nn.Linear(8, 8))), "is TorchScript"),
    "made in inference mode": (made_in_inference_mode, "was made under torch.inference_mode()"),
}
CALLS = (hexa_fx.optimize, hexa_fx.optimize_, hexa_fx.explain)


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize("case", [*NO_EXAMPLES, *NO_MODELS, "a configuration"])
def test_what_is_no(case, model):
    example, expected = NO_EXAMPLES.get(case, (INPUT, "expected a hexa_fx.HexaConfig"))
    if case in NO_MODELS:
        make, expected = NO_MODELS[case]
        model = make()
    rest = [{"verify": False}] if case == "a configuration" else []
    for call in CALLS:
        assert expected in sentence(lambda call=call: call(model, example, *rest))


def test_the_models_own_error_tells_what_was_called(model):
    with pytest.raises(RuntimeError) as error:
        hexa_fx.optimize(model, torch.randn(4, 7))
    assert error.value.__notes__ == ["hexa_fx called the model on the example inputs: Model(float32[4, 7] on cpu)"]


@pytest.mark.parametrize(
    "given", [{"verify": "no"}, {"strict": 1}, {"probe_tokens": 8.0}, {"probe_tokens": 0}, {"analysis_bytes": -5}]
)
def test_configurations_with_values_that_mean_nothing(given):
    (name,) = given
    assert f"HexaConfig({name}=" in sentence(lambda: hexa_fx.HexaConfig(**given))


@pytest.mark.parametrize(
    "given", [{"strategy": "data"}, {"capacities": [1.0, 2.0]}, {"partition": hexa_fx.PartitionConfig()}]
)
def test_a_partition_without_a_mesh(model, given):
    assert "give mesh= too" in sentence(lambda: hexa_fx.optimize_(model, INPUT, **given))
    assert not hasattr(model, "report")


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_an_optimized_model_is_not_scripted(model):
    with pytest.raises(
        AttributeError, match=r"torch.jit.script; call hexa_fx.undo_ on the model first, or use torch.jit.trace"
    ):
        torch.jit.script(hexa_fx.optimize(model, INPUT))


def test_optimize_called_in_inference_mode(model):
    with torch.inference_mode():
        optimized = hexa_fx.optimize(model, INPUT + 0)
        torch.testing.assert_close(optimized(INPUT), model(INPUT))
    assert optimized.report.rewritten
    optimized(INPUT).sum().backward()


def test_attributes_of_the_model_stay_its_own(caplog):
    class Reporting(Model):
        def report(self) -> str:
            return "mine"

    torch.manual_seed(0)
    optimized = hexa_fx.optimize(Reporting(), INPUT)
    assert optimized.report() == "mine"
    assert optimized.hexa_report.rewritten
    assert optimized.graphs
    assert "attribute 'report' of its own" in caplog.text
    assert "hexa_report" not in vars(hexa_fx.undo_(optimized))


@pytest.mark.parametrize(
    "error",
    [
        InputError("no model"),
        NothingRewritten("no MoE block was found"),
        VerificationError("output differs", path="layers.0"),
        BuildError("error: {", key="k", compiler="nvcc", source="a.cu", command="nvcc a.cu"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_errors_reach_other_processes_as_they_are(error):
    error.add_note("from a worker")
    for again in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert type(again) is type(error)
        assert (str(again), again.args, again.__notes__) == (str(error), error.args, error.__notes__)


@pytest.mark.parametrize("where", ["install", "find_sites"])
@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_whole_or_not_at_all(model, where, error, monkeypatch):
    """Ctrl-C, or an error of ours, between the first block and the last leaves the model as it was."""
    calls, own = [], getattr(optimizing, where)

    def ends(*args, **kwargs):
        calls.append(args)
        if len(calls) > (where == "install"):
            raise error
        return own(*args, **kwargs)

    expected, places = model(INPUT), [p.data_ptr() for p in model.parameters()]
    with monkeypatch.context() as patch:
        patch.setattr(optimizing, where, ends)
        with pytest.raises(error):
            hexa_fx.optimize_(model, INPUT)
    assert not any("forward" in vars(module) or "report" in vars(module) for module in model.modules())
    assert torch.equal(model(INPUT), expected)
    assert len({p.untyped_storage().data_ptr() for p in model.parameters()}) == len(places)
    assert len(hexa_fx.optimize_(model, INPUT).report.rewritten) == 2


def test_undo(model):
    before = dict(vars(model))
    expected = model(INPUT)
    assert hexa_fx.undo_(hexa_fx.optimize_(model, INPUT)) is model
    assert not any(is_installed(module) for module in model.modules())
    assert vars(model).keys() == before.keys()
    torch.testing.assert_close(model(INPUT), expected)
    assert hexa_fx.optimize_(model, INPUT).report.rewritten


def test_what_a_prompt_shows_is_short(model):
    optimized = hexa_fx.optimize(model, INPUT)
    for value in (optimized.report, optimized.report.blocks[0], optimized.graphs, optimized.graphs["layers.0"]):
        assert len(repr(value)) < 200
    assert "2 of 2 MoE blocks rewritten" in repr(optimized.report)
    assert "layers.0: rewritten, " in repr(optimized.report.blocks[0])


def test_every_public_name_is_there_and_documented():
    for name in hexa_fx.__all__:
        assert getattr(hexa_fx, name).__doc__
        assert name in dir(hexa_fx)


def test_a_strategy_that_is_none_is_said_before_the_model_runs():
    for strategy in ("modle", {"0": "modle"}):
        with pytest.raises(PlanError, match="strategy 'modle'"):
            hexa_fx.optimize_(never_runs(), INPUT, mesh=object(), strategy=strategy)


def never_runs() -> nn.Module:
    model = nn.Linear(4, 4)
    model.register_forward_pre_hook(lambda *call: pytest.fail("the model was run"))
    return model


def test_ctrl_c_in_the_first_use_breaks_nothing():
    code = """
import os, signal, torch, hexa_fx

signal.signal(signal.SIGINT, signal.default_int_handler)  # which a shell that runs this in the background switches off

define = torch.library.Library.define

def interrupted(*args, **options):
    torch.library.Library.define = define
    found = define(*args, **options)
    os.kill(os.getpid(), signal.SIGINT)
    return found

torch.library.Library.define = interrupted
try:
    hexa_fx.optimize
except KeyboardInterrupt:
    print("interrupted")
print(hexa_fx.optimize(torch.nn.Linear(2, 2), torch.ones(1, 2)).report)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.startswith("interrupted\n"), done.stderr
    assert done.returncode == 0, done.stderr


def test_what_is_no_model_is_no_model_to_any_function():
    quantized, recorded = (
        partial(hexa_fx.quantize_experts_, format="nf4"),
        lambda model: hexa_fx.record_routing(model).__enter__(),
    )
    for call in (hexa_fx.undo_, quantized, recorded):
        assert sentence(lambda call=call: call(None)) == "expected an nn.Module, got NoneType"


def test_a_folder_that_cannot_be_written_to(model, monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("HEXA_FX_DUMP_DIR", str(tmp_path / "file"))
    assert sentence(lambda: hexa_fx.optimize(model, INPUT)).endswith("File exists; expected a folder to write to")


def test_variables_that_are_misspelt_are_said_once(caplog):
    for _ in range(2):
        hexa_fx.HexaConfig.from_environment({"HEXA_FX_VERFY": "0", "HEXA_FX_XQZ": "1", "HEXA_FX_NVCC": "nvcc"})
    said = [record.getMessage() for record in caplog.records]
    assert said == [
        "HEXA_FX_VERFY is set, and hexa_fx reads no such variable: did you mean HEXA_FX_VERIFY?",
        "HEXA_FX_XQZ is set, and hexa_fx reads no such variable: docs/environment.md lists those that there are",
    ]


def test_variables_that_are_read_are_known():
    root = Path(hexa_fx.__file__).parent
    text = "".join(file.read_text() for folder in (root, root / "passes") for file in folder.rglob("*.py"))
    fields = {name.upper() for name in hexa_fx.HexaConfig.__dataclass_fields__}
    assert set(re.findall(r"HEXA_FX_([A-Z_]*[A-Z])", text)) - {"VERFY"} <= fields | {*OTHER_VARIABLES}


def test_a_file_that_is_edited_while_it_runs(tmp_path, monkeypatch):
    file = tmp_path / "edited_since.py"
    file.write_text(Path(inspect.getsourcefile(Model)).read_text())
    monkeypatch.syspath_prepend(tmp_path)
    model = importlib.import_module("edited_since").Model()
    file.write_text("def forward(\n" * 30)
    assert f"Block at {file}:" in str(hexa_fx.optimize(model, INPUT).report)


def test_a_capability_is_a_number(model):
    optimized = hexa_fx.optimize(model, INPUT)
    for listed in (optimized.report.blocks[0].kernels_on, optimized.graphs.kernels):
        assert "arch='90': expected a compute capability as a whole number" in sentence(partial(listed, "90"))


def test_a_warning_of_torch_appears_where_the_user_s_code_is():
    """And not at lines of ours, from which that code is run anew."""
    code = """
import torch, hexa_fx
from tests.inspect.models import INPUT, Model

model = Model()
kind = type(model.layers[0])
own = kind.forward

def forward(self, x):
    x[:1, :1].std(1)
    return own(self, x)

kind.forward = forward
hexa_fx.optimize(model, INPUT)
"""
    root = Path(hexa_fx.__file__).parents[1]
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=root)
    assert done.returncode == 0, done.stderr
    assert not re.search(r"hexa_fx/.*UserWarning", done.stderr)
