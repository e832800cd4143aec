"""The scripts of examples/ for several processes, on two ranks that find each other as torchrun tells them to."""

from __future__ import annotations

import io
import os
import runpy
import socket
import sys
from contextlib import redirect_stdout

import pytest
import torch.distributed as dist
from harness import start

from tests.test_examples import FOLDER, OF_SEVERAL, SAYS


def example(rank: int, world: int, name: str, port: int) -> str:
    """What the script prints."""
    dist.destroy_process_group()
    given = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "MASTER_ADDR": "localhost", "MASTER_PORT": port}
    os.environ |= {key: str(value) for key, value in given.items()} | {"TORCHELASTIC_RUN_ID": "test"}
    sys.path.insert(0, str(FOLDER))
    with redirect_stdout(io.StringIO()) as said:
        runpy.run_path(str(FOLDER / f"{name}.py"), run_name="__main__")
    return said.getvalue()


@pytest.mark.parametrize("name", OF_SEVERAL)
def test_two_processes(name: str) -> None:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    outcomes = start(2, example, name, port)
    assert [kind for kind, _ in outcomes] == ["ok", "ok"], outcomes
    assert SAYS[name] in "".join(said for _, said in outcomes)
