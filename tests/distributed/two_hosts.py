"""Two hosts on one machine: network namespaces, a slow link between them, a torchrun agent in each."""

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PORT = 29719


class Hosts:
    """Namespaces A and B. Raises `OSError` where the machine does not permit them."""

    def __init__(self, megabits: int) -> None:
        self.names = [f"hexa{os.getpid()}{side}" for side in "ab"]
        self.links = [f"hx{os.getpid() % 10**6}{side}" for side in "ab"]
        self._agents: list[subprocess.Popen[str]] = []
        try:
            self._make(megabits)
        except (OSError, subprocess.CalledProcessError) as error:
            self.close()
            said = getattr(error, "stderr", "") or str(error)
            raise OSError(f"no network namespaces here: {said.strip()}") from error

    def _make(self, megabits: int) -> None:
        for name in self.names:
            _run("ip", "netns", "add", name)
        _run("ip", "link", "add", self.links[0], "type", "veth", "peer", "name", self.links[1])
        for place, (name, link) in enumerate(zip(self.names, self.links)):
            _run("ip", "link", "set", link, "netns", name)
            _run("ip", "-n", name, "addr", "add", f"10.77.0.{place + 1}/24", "dev", link)
            for device in (link, "lo"):
                _run("ip", "-n", name, "link", "set", device, "up")
            limit = ["rate", f"{megabits}mbit", "burst", "128kb", "latency", "400ms"]
            _run("ip", "netns", "exec", name, "tc", "qdisc", "add", "dev", link, "root", "tbf", *limit)

    def start(self, script: Path, *arguments: str, ranks: int = 2) -> list[Path]:
        """Starts the script with so many ranks on each host; returns where each host's output goes."""
        launcher = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", str(ranks)]
        meeting = ["--master-addr", "10.77.0.1", "--master-port", str(PORT), "--max-restarts", "0"]
        outputs = []
        for place, (name, link) in enumerate(zip(self.names, self.links)):
            command = [*launcher, *meeting, "--node-rank", str(place), str(script), *arguments]
            output = Path(tempfile.mkdtemp()) / "output"
            with output.open("w") as file:
                self._agents.append(
                    subprocess.Popen(
                        ["ip", "netns", "exec", name, *command],
                        env=os.environ
                        | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "GLOO_SOCKET_IFNAME": link},
                        stdout=file,
                        stderr=subprocess.STDOUT,
                        text=True,
                        start_new_session=True,
                    )
                )
            outputs.append(output)
        return outputs

    def wait(self, place: int, seconds: float) -> int:
        """The exit status of a host's agent."""
        return self._agents[place].wait(seconds)

    def close(self) -> None:
        for name in self.names:
            for process in _run("ip", "netns", "pids", name, check=False).split():
                os.kill(int(process), signal.SIGKILL)
            _run("ip", "netns", "del", name, check=False)


@contextmanager
def hosts(megabits: int) -> Iterator[Hosts]:
    made = Hosts(megabits)
    try:
        yield made
    finally:
        made.close()


def _run(*command: str, check: bool = True) -> str:
    return subprocess.run(command, check=check, capture_output=True, text=True).stdout
