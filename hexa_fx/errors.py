"""The errors that hexa_fx raises. Each says what was seen, what was expected, and what to do. How sentences name a module."""

from __future__ import annotations


class HexaError(Exception):
    """Base class of all errors of this package.

    Args:
        detail: what was seen and what to do.
        fields: values for the other placeholders of the class's ``message``.
    """

    message = "{detail}"

    def __init__(self, detail: str = "", **fields: object) -> None:
        super().__init__(self.message.format(detail=detail, **fields))

    def __reduce__(self) -> tuple[object, ...]:
        """Pickled with the finished message: the fields that it was made of are gone."""
        return _restored, (type(self), str(self), self.__dict__)


def _restored(kind: type[HexaError], text: str, state: dict[str, object]) -> HexaError:
    error = kind.__new__(kind, text)
    error.__dict__.update(state)
    return error


class CaptureError(HexaError):
    """A block could not be recorded on the given inputs."""

    message = "could not record {path!r}: {detail}"


class InputError(HexaError, ValueError):
    """A model or an argument that hexa_fx cannot work with."""


class NothingRewritten(HexaError):
    """No block was rewritten. Raised only with ``HexaConfig(strict=True)``, in place of a warning."""

    message = "strict=True and {detail}"


class VerificationError(HexaError):
    """A rewritten block differs from its original. Raised only with ``HexaConfig(strict=True)``."""

    message = "the rewritten {path!r} is not equal to the original: {detail}"


class KernelError(HexaError):
    """A kernel could not be specified, built, loaded or launched."""


class PlanError(HexaError):
    """A partition that is impossible, or a plan that differs between ranks."""


class RankError(HexaError, RuntimeError):
    """A collective failed: a rank is lost, hangs, or issued another collective."""


def named(path: str) -> str:
    """The path of a module in words, also of the model itself, whose path is empty."""
    return path or "(the model itself)"


def first_line(error: BaseException) -> str:
    """The first line of an error's text, or its kind where it says nothing; torch appends a C++ stack to it."""
    return (str(error).splitlines() or [type(error).__name__])[0]


def kind_and_line(error: BaseException) -> str:
    """An error's kind and the first line of its text, in at most 200 characters of it."""
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}"


class DiffersInUse(HexaError):
    """A sampled check (``HexaConfig(check_every=N, strict=True)``) found other results than the original's."""
