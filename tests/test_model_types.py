"""What `hexa-fx explain TYPE` gives for every type of transformers that has experts is what docs/model_types.md says."""

import subprocess
import sys
from pathlib import Path

import pytest

transformers = pytest.importorskip("transformers")

PAGE = Path(__file__).parent.parent / "docs" / "model_types.md"


@pytest.mark.parametrize("model_type", ["kimi_linear", "vitpose"])
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
