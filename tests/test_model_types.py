"""What `hexa-fx explain TYPE` gives for every type of transformers that has experts is what docs/model_types.md says."""

import subprocess
import sys
from pathlib import Path

import pytest

transformers = pytest.importorskip("transformers")

PAGE = Path(__file__).parent.parent / "docs" / "model_types.md"


@pytest.mark.parametrize("model_type", ["kimi_linear", "vitpose", "muse_spark", "inkling2"])
def test_a_type_is_on_the_page(model_type: str) -> None:
    from tests.zoo.explained import explained, page

    row = explained(model_type)
    last = page([row]).strip().splitlines()[-1] if row.not_built else f"{model_type},"
    text = PAGE.read_text(encoding="utf-8")
    assert row.rewritten == row.found
    assert (last.split("|")[-2].strip() if row.not_built else last) in text


@pytest.mark.more
@pytest.mark.timeout(1200)
def test_every_type_within_a_gibibyte() -> None:
    """`python -m tests.zoo.explained --write docs/model_types.md` writes the page; a type that takes more memory ends it."""
    if f"transformers {transformers.__version__} " not in PAGE.read_text(encoding="utf-8"):
        pytest.skip(f"the page is of another version than {transformers.__version__}")
    command = [sys.executable, "-m", "tests.zoo.explained"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=PAGE.parent.parent, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.strip().endswith(PAGE.read_text(encoding="utf-8").strip())


def test_experts_in_their_plain_form_train_as_they_are_set() -> None:
    """A norm behind grouped products is read from the loop; configurations stay as they were, and all calls run the operators."""
    import copy

    import torch

    import hexa_fx
    from hexa_fx.targets import load

    torch.manual_seed(0)
    model, inputs = load("inkling2_text")
    inputs = inputs if isinstance(inputs, dict) else {"input_ids": inputs[0]}
    opt = hexa_fx.optimize(copy.deepcopy(model), config=hexa_fx.HexaConfig(own_code_when_small=False))
    for _ in range(2):
        found = []
        for each in (model, opt):
            each.zero_grad()
            y = each(**inputs)[0]
            y.square().mean().backward()
            found.append([y, *(p.grad for p in each.parameters() if p.grad is not None)])
        for wanted, value in zip(*found, strict=True):
            torch.testing.assert_close(value, wanted, rtol=1e-4, atol=1e-4 * float(wanted.detach().abs().max()))
    assert not any(block.calls.own for block in opt.report.blocks), str(opt.report)
    settings = {each.config.get_text_config()._experts_implementation for each in (model, opt)}
    assert len(settings) == 1
    assert settings != {"eager"}
