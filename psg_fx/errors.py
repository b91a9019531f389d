"""Every refusal of psg_fx: what is wrong, where, why, and the way out.

Three kinds: *never* (per-sample gradients do not exist), *not yet* (they exist, psg_fx cannot compute them), and
*our bug*.  The first two are `ValueError`s.
"""

from __future__ import annotations


class PsgError(Exception):
    """Base of all errors of psg_fx.  Its text always has the lines `where`, `why` and `fix`."""

    def __init__(self, what: str, *, where: str, why: str, fix: str) -> None:
        self.what, self.where, self.why, self.fix = what, where, why, fix
        super().__init__(f"{what}\n  where  {where}\n  why    {why}\n  fix    {fix}")

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild, (type(self), self.what, self.where, self.why, self.fix))

    def alone(self) -> PsgError:
        """The error without what others have written into its text."""
        return _rebuild(type(self), self.what, self.where, self.why, self.fix)


def _rebuild(kind: type[PsgError], what: str, where: str, why: str, fix: str) -> PsgError:
    return kind(what, where=where, why=why, fix=fix)


class SamplesMixed(PsgError, ValueError):
    """Never: a sample's loss depends on other samples, so per-sample gradients do not exist."""


class NotYetSupported(PsgError, ValueError):
    """Not yet: per-sample gradients exist here, but psg_fx cannot compute them exactly."""


class CaptureFailed(PsgError, ValueError):
    """The model and loss could not be captured as one graph."""


class BadArgument(PsgError, ValueError):
    """An argument of the public interface does not mean anything: unknown name, wrong shape, wrong kind."""


class InternalError(PsgError, RuntimeError):
    """Our bug: a pass left a graph that its stage does not allow."""


def first_line(error: BaseException) -> str:
    """The first line of what an error of another library says, "" for none."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), "")
