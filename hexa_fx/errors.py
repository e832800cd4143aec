"""The errors hexa_fx raises: each says what was seen, what was expected and what to do."""

from __future__ import annotations


class HexaError(Exception):
    """Base of every error of this package.

    A subclass states its sentence once as ``message``; the fields are given when it is raised.
    """

    message = "{detail}"

    def __init__(self, detail: str = "", **fields: object) -> None:
        super().__init__(self.message.format(detail=detail, **fields))


class CaptureError(HexaError):
    """The block could not be recorded on the given inputs."""

    message = "could not record {path!r}: {detail}"


class InputError(HexaError, ValueError):
    """A model or an argument that hexa_fx cannot work on."""


class NothingRewritten(HexaError):
    """Raised instead of a warning when ``HexaConfig(strict=True)``."""

    message = "strict=True and {detail}"


class VerificationError(HexaError):
    """A rewritten block differs from its original. Raised only under ``strict=True``."""

    message = "the rewritten {path!r} is not equal to the original: {detail}"


class KernelError(HexaError):
    """A kernel could not be specified, built, loaded or launched."""


class PlanError(HexaError):
    """A partition plan that cannot work, or that differs between ranks."""


class RankError(HexaError, RuntimeError):
    """A collective failed: a rank is lost, hangs, or issued something else."""
