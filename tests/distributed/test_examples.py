"""The scripts of examples/ for several processes, on two ranks that are told what torchrun tells its own."""

import io
import os
import runpy
import sys
from contextlib import redirect_stdout

import pytest
import torch.distributed as dist
from harness import start

from tests.test_examples import FOLDER, OF_SEVERAL, SAYS


def example(rank: int, world: int, name: str) -> str:
    """What the script prints. The ranks have met already."""
    given = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": world,
        "LOCAL_WORLD_SIZE": world,
        "TORCHELASTIC_RUN_ID": "test",
    }
    given |= {"MASTER_ADDR": "localhost", "MASTER_PORT": 1}  # accelerate asks whether they are there
    os.environ |= {key: str(value) for key, value in given.items()}
    sys.path.insert(0, str(FOLDER))
    dist.init_process_group = lambda *_: None  # in this process, which ends with the script
    with redirect_stdout(io.StringIO()) as said:
        runpy.run_path(str(FOLDER / f"{name}.py"), run_name="__main__")
    return said.getvalue()


@pytest.mark.parametrize("name", OF_SEVERAL)
def test_two_processes(name: str) -> None:
    if name == "trainer_on_a_mesh":
        pytest.importorskip("accelerate")
    outcomes = start(2, example, name)
    assert [kind for kind, _ in outcomes] == ["ok", "ok"], outcomes
    assert SAYS[name] in "".join(said for _, said in outcomes)
