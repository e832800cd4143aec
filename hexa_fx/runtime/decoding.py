"""What transformers' `generate` changes in a model for the time it decodes, and what is no reason to leave a rewritten block.

On a GPU, models with grouped products compute with batched ones meanwhile, by another value of ``experts_implementation``: the same
function of the same weights, faster than grouped ones at few tokens. The rewritten block is faster than both. A value that the
user sets is another matter: then the code asked for runs.
"""

from __future__ import annotations

import sys
from types import FrameType

_READ = frozenset({"_experts_implementation_internal", "_experts_implementation"})
_MODULE = "transformers.generation.utils"


def is_switch_of_generate(key: object, before: object, now: object) -> bool:
    """Whether `generate` runs, and put ``now`` in place of ``before`` under the attribute ``key``."""
    if key not in _READ or (before, now) != ("grouped_mm", "batched_mm") or _MODULE not in sys.modules:
        return False
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_globals.get("__name__") == _MODULE:
            return True
        frame = frame.f_back
    return False
