"""What our dispatch modes have in common."""

from __future__ import annotations

from hexa_fx.torch_private import TorchDispatchMode


class DispatchMode(TorchDispatchMode):
    """A dispatch mode whose code dynamo need not be kept from: it is never compiled.

    Torch wraps the code of others in `torch._disable_dynamo`, which imports all of dynamo in the first call (a second of a process)
    and takes as long as a small operation in every further one.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False
