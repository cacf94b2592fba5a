"""Times several things in turn, round after round, so that a machine that drifts drifts for all of them."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from sennit.errors import InvalidInput

__all__ = ["Times", "format_rate", "format_time", "no_garbage_collection", "take_turns"]


@dataclass(frozen=True)
class Times:
    """Times of one thing, in microseconds.

    Attributes:
        median, minimum, lower_quartile, upper_quartile: of the samples.
        samples: in the order in which they were taken.
    """

    median: float
    minimum: float
    lower_quartile: float
    upper_quartile: float
    samples: tuple[float, ...]

    @classmethod
    def of(cls, samples: list[float]) -> Times:
        """The statistics of samples in microseconds.

        >>> Times.of([3.0, 1.0, 2.0]).median
        2.0
        """
        lower, median, upper = np.percentile(samples, (25, 50, 75)).tolist()
        return cls(median, min(samples), lower, upper, tuple(samples))


def take_turns(
    subjects: Mapping[str, Callable[[], float]], rounds: int, *, before: Callable[[str], None] = lambda name: None
) -> dict[str, Times]:
    """Time every subject once a round.

    A round before the first one is not counted: it fills caches of compiled code and memory that is used again.

    Args:
        subjects: what to time, by name; each does its work when it is called and returns the seconds that it took.
        rounds: samples of each.
        before: told a subject's name before every turn, outside the time.

    Raises:
        InvalidInput: ``rounds`` is not positive.

    >>> take_turns({"nothing": lambda: 2e-6}, 3)["nothing"].samples
    (2.0, 2.0, 2.0)
    """
    if rounds < 1:
        raise InvalidInput("repeat", expected="a positive number of rounds", got=rounds)
    samples: dict[str, list[float]] = {name: [] for name in subjects}
    with no_garbage_collection():
        for turn in range(rounds + 1):
            for name, subject in subjects.items():
                before(name)
                seconds = subject()
                if turn:
                    samples[name].append(seconds * 1e6)
    return {name: Times.of(taken) for name, taken in samples.items()}


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Python collects no garbage meanwhile."""
    enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def format_time(microseconds: float) -> str:
    """A time with a unit.

    >>> format_time(48.71), format_time(4871.0)
    ('48.7 us', '4.87 ms')
    """
    return f"{microseconds:.1f} us" if microseconds < 1e3 else f"{microseconds / 1e3:.2f} ms"


def format_rate(each_second: float, what: str) -> str:
    """A rate with a decimal unit.

    >>> format_rate(4.31e12, "B"), format_rate(8.9e11, "FLOP")
    ('4.31 TB/s', '890 GFLOP/s')
    """
    size, prefix = (1e12, "T") if each_second >= 1e12 else (1e9, "G")
    return f"{each_second / size:.3g} {prefix}{what}/s"
