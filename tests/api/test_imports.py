"""What the package and an analysis do not import."""

import subprocess
import sys


def test_dynamo_and_dtensor_are_imported_neither_with_the_package_nor_by_optimize() -> None:
    """They take a second each, of every process."""
    assert subprocess.run([sys.executable, "-c", _IMPORTS], check=False).returncode == 0


_IMPORTS = """
import sys, torch, hexa_fx
from hexa_fx.isolation.trial_modes import RaisesOnHost
from benchmarks.real_blocks import ListMixture
hexa_fx.optimize(ListMixture(16, 8, 4, 2), torch.randn(1, 8, 16))
assert sys.modules.keys().isdisjoint({"torch.distributed.tensor", "torch.distributed.fsdp", "networkx"})
from hexa_fx.isolation import size
from hexa_fx.large_blocks import lazy_gradient
for module in (size, lazy_gradient):
    module.LEAST_BYTES = 1
config = hexa_fx.HexaConfig(strict=True, analysis_bytes=1 << 15)
hexa_fx.optimize(ListMixture(16, 8, 4, 2), torch.randn(1, 8, 16), config)
with RaisesOnHost():
    torch.ones(2) + 1
sys.exit("torch._dynamo" in sys.modules)
"""
