"""Makes this folder's helpers importable by name, also in the processes that tests start."""

import os
import sys

os.environ.setdefault("HEXA_FX_WAIT_FOR_KERNELS", "1")
_here = os.path.dirname(__file__)
if _here not in sys.path:
    sys.path.insert(0, _here)
_root = os.path.dirname(os.path.dirname(_here))
os.environ["PYTHONPATH"] = os.pathsep.join(
    [_here, _root, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
)
