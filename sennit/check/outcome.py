"""What one case of the self-test found."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from sennit.check.compare import Comparison

__all__ = ["Outcome"]


@dataclass(frozen=True)
class Outcome:
    """How large an error was.

    Attributes:
        ratio: largest error over the largest allowed; infinite where something is wrong whatever its size.
        text: what was computed, and what is wrong with it.
        seen: how often each thing happened, where a case is made of many.

    >>> Outcome(0.5, "").passed, Outcome.wrong("append wrote to another slot").passed
    (True, False)
    """

    ratio: float
    text: str
    seen: Mapping[str, int] = field(default_factory=dict)

    @property
    def passed(self) -> bool:
        """Whether the error is allowed."""
        return self.ratio <= 1

    @classmethod
    def of(cls, comparisons: Iterable[Comparison]) -> Outcome:
        """The worst of some comparisons."""
        found = [
            cls(max(one.out_error / one.out_allowed, one.lse_error / one.lse_allowed), str(one)) for one in comparisons
        ]
        return max(found, key=lambda outcome: outcome.ratio)

    @classmethod
    def wrong(cls, text: str) -> Outcome:
        """Wrong, whatever the error."""
        return cls(math.inf, text)
