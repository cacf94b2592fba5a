"""What one case of the self-test found."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from sennit.check.compare import Comparison

__all__ = ["Outcome"]


@dataclass(frozen=True)
class Outcome:
    """How large an error was.

    Attributes:
        ratio: largest error over the largest allowed; infinite where something is wrong whatever its size.
        text: what was computed, and what is wrong with it.

    >>> Outcome(0.5, "").passed, Outcome.wrong("append wrote to another slot").passed
    (True, False)
    """

    ratio: float
    text: str

    @property
    def passed(self) -> bool:
        """Whether the error is allowed."""
        return self.ratio <= 1

    @classmethod
    def of(cls, comparisons: Iterable[Comparison], text: str) -> Outcome:
        """The worst of some comparisons."""
        worst, said = 0.0, ""
        for found in comparisons:
            ratio = max(found.out_error / found.out_allowed, found.lse_error / found.lse_allowed)
            if ratio > worst:
                worst, said = ratio, str(found)
        return cls(worst, f"{text}: {said}" if said else text)

    @classmethod
    def wrong(cls, text: str) -> Outcome:
        """Wrong, whatever the error."""
        return cls(math.inf, text)
