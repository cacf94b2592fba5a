"""Times launches on a GPU by the events before and after them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

__all__ = ["Span", "launch_between_events"]


@dataclass(frozen=True)
class Span:
    """Launches of the current stream, between two events.

    Attributes:
        start, end: the events.
        launches: how many there are between them.
    """

    start: torch.cuda.Event
    end: torch.cuda.Event
    launches: int

    @property
    def seconds(self) -> float:
        """Seconds a launch, once they are all over."""
        self.end.synchronize()
        return float(self.start.elapsed_time(self.end)) * 1e-3 / self.launches


def launch_between_events(launch: Callable[[], object], launches: int = 1) -> Span:
    """Launch something so many times, one right after the other; nothing waits for it here."""
    span = Span(_event(), _event(), launches)
    span.start.record()
    for _ in range(launches):
        launch()
    span.end.record()
    return span


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
