"""Whether something of this backend is built, or could be, and for how long a failure holds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from time import monotonic

from sennit import jit
from sennit.backends.base import Support
from sennit.env import cpu_isa
from sennit.errors import BuildFailed, BuildUnavailable

__all__ = ["built"]

YES = Support.yes()
HOLD = 10.0  # times as long as it took to fail, a failure to build holds


@dataclass(frozen=True)
class _Failure:
    """Why something could not be built, in which surroundings, and for how long that holds."""

    support: Support
    surroundings: tuple[str | None, ...]
    until: float

    def holds(self) -> bool:
        return monotonic() < self.until and self.surroundings == _surroundings()


_failures: dict[tuple[object, ...], _Failure] = {}


def _surroundings() -> tuple[str | None, ...]:
    return *jit.surroundings(), cpu_isa()


def built(build: Callable[..., object], *what: object) -> Support:
    """Whether something is built, or could be.

    What failed is tried again: at once where its surroundings have changed, and else after a pause, since a disk may
    have room again, but trying may take a minute.
    """
    known = build, *what
    if _failures and (failure := _failures.get(known)) and failure.holds():
        return failure.support
    start = monotonic()
    try:
        build(*what)
    except (BuildUnavailable, BuildFailed) as error:
        now = monotonic()
        failure = _Failure(Support.not_yet(str(error)), _surroundings(), now + HOLD * (now - start))
        _failures[known] = failure
        return failure.support
    if _failures:
        _failures.pop(known, None)
    return YES
