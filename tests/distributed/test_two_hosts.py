"""Two torchrun agents on one machine, as on two hosts, in network namespaces with a slow link where the machine permits them.

One model is trained, equal to one process, and links are as slow as the planner is told.
"""

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from two_hosts import Hosts, hosts

HERE = Path(__file__).parent
EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.slow
def test_two_agents_equal_one_process() -> None:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1"]
    meeting = ["--master-addr", "localhost", "--master-port", str(port)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    agents = [
        subprocess.Popen(
            [*launcher, *meeting, "--node-rank", str(host), str(EXAMPLES / "unequal_devices.py")],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for host in range(2)
    ]
    try:
        said = [agent.communicate(timeout=250)[0] for agent in agents]
    finally:
        for agent in agents:
            agent.kill()
    assert [agent.returncode for agent in agents] == [0, 0], said
    assert "of one process" in "".join(said)


@pytest.fixture
def apart() -> Iterator[Hosts]:
    """Two hosts with 100 Mbit/s, 12.5 MB/s, between them."""
    try:
        with hosts(100) as made:
            yield made
    except OSError as error:
        pytest.skip(str(error))


@pytest.mark.slow
def test_hosts_apart_equal_one_process(apart: Hosts) -> None:
    outputs = apart.start(EXAMPLES / "unequal_devices.py", ranks=1)
    assert [apart.wait(place, 250) for place in range(2)] == [0, 0], [output.read_text() for output in outputs]
    assert "of one process" in outputs[0].read_text()


@pytest.mark.slow
def test_links_and_axes(apart: Hosts) -> None:
    """The partition within a host needs less of the slow link than one over both, as `hexa-fx plan` says."""
    first, _ = apart.start(HERE / "host_rank.py", "links")
    assert apart.wait(0, 250) == 0, first.read_text()
    found = dict(line.split() for line in first.read_text().splitlines() if line.startswith(("device", "host")))
    inside, between = float(found["device"]), float(found["host"])
    assert 2e6 < between < 16e6  # of 12.5e6
    assert inside > 4 * between


@pytest.mark.slow
def test_both_axes_are_exact(apart: Hosts) -> None:
    first, _ = apart.start(HERE / "host_rank.py", "axes")
    assert apart.wait(0, 250) == 0, first.read_text()
    assert "over both" in first.read_text()
