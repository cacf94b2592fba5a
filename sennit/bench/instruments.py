"""What a device brings to a measurement: a clock, what it can do at most, and whom to compare with."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch

from sennit.bench.results import Heat
from sennit.check.problems import Problem
from sennit.errors import SennitError

__all__ = ["Absent", "Ceiling", "Clock", "DeviceLost", "Instruments", "Peer", "Prepared", "Subject"]


class DeviceLost(SennitError, RuntimeError):
    """A call made the device fail, so that this process can compute nothing more on it."""


@dataclass(frozen=True)
class Ceiling:
    """Something that a device does as fast as it can.

    Attributes:
        name: what it is.
        kind: ``"read"``: bytes from memory; ``"matrix"``: operations of matrix products; ``"pages"``: bytes of a
            batch's pages, in the order in which decoding reads them.
        amount: bytes, or operations.
        counts: whether it may be the ceiling that figures are compared with; otherwise it is only reported.
        run: does it, and returns the seconds that it took.
    """

    name: str
    kind: Literal["read", "matrix", "pages"]
    amount: int
    run: Callable[[], float]
    counts: bool = True


@dataclass(frozen=True)
class Subject:
    """A call to be timed.

    Attributes:
        run: makes it, and returns what it writes to: a tensor, or several.
        is_right: whether what ``run`` returned holds the right numbers.
        little: a call of the same kind over one key, where there is one. Instruments that put code out of caches as
            they empty them make it before a call that they time: in a model the layer before has run the same code.
    """

    run: Callable[[], Any]
    is_right: Callable[[Any], bool]
    little: Callable[[], object] | None = None


@dataclass(frozen=True)
class Clock:
    """A call together with how it is timed.

    Attributes:
        run: makes it once, with no data of it in caches, and returns the seconds that it took.
        launch: makes it once.
        how: how it is timed, where a device has several ways.
    """

    run: Callable[[], float]
    launch: Callable[[], object]
    how: str = ""


@dataclass(frozen=True)
class Prepared:
    """A peer's call that is ready to be timed.

    Attributes:
        run: makes it; returns the output, or what ``collect`` makes the output of.
        note: how it was set up.
        collect: puts together ``[query rows, num_qo_heads, head_dim_vo]``, which is not timed.
    """

    run: Callable[[], Any]
    note: str
    collect: Callable[[Any], torch.Tensor] = lambda found: found


@dataclass(frozen=True)
class Peer:
    """Another implementation of attention.

    Attributes:
        name: with its version.
        prepare: puts a problem's keys and values where it wants them, which is not timed. Raises
            :class:`~sennit.UnsupportedFeature` for what it cannot do.
    """

    name: str
    prepare: Callable[[Problem], Prepared]


@dataclass(frozen=True)
class Absent:
    """A peer that is not here.

    Attributes:
        name: its name.
        reason: why, and what to do.
    """

    name: str
    reason: str


class Instruments(Protocol):
    """Measures on one device."""

    @property
    def device(self) -> torch.device:
        """Where everything runs."""
        ...

    @property
    def hardware(self) -> Mapping[str, Any]:
        """What is known of the device beside the host's processor, in values that JSON has."""
        ...

    @property
    def notes(self) -> Sequence[str]:
        """What cannot be measured here, and why."""
        ...

    def clocks(
        self, subjects: Mapping[str, Subject], before: Callable[[str], None] = lambda name: None
    ) -> dict[str, Clock]:
        """How each of these calls is timed: all in the same way if they can be.

        Args:
            subjects: the calls, by name.
            before: told a call's name before it is tried.
        """
        ...

    def ceilings(self, dtype: torch.dtype) -> list[Ceiling]:
        """What the device can read, and multiply in a dtype."""
        ...

    def probe(self, problem: Problem) -> Ceiling | None:
        """A read of the pages that a problem's rows see; None where there is none."""
        ...

    def heat(self, clock: Clock) -> Heat | None:
        """Times of a call after a rest and under sustained load; None where they are not told apart."""
        ...

    def settle(self) -> None:
        """Wait until the device has nothing left to do.

        Raises:
            DeviceLost: it failed; nothing more can be computed on it by this process.
        """
        ...
