"""What a device brings to a measurement: a clock, what it can do at most, and whom to compare with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch

from sennit.check.problems import Problem

__all__ = ["Absent", "Ceiling", "Instruments", "Peer", "Prepared"]


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
class Prepared:
    """A call that is ready to be timed.

    Attributes:
        run: returns the output ``[query rows, num_qo_heads, head_dim_vo]``.
        note: how it was set up.
    """

    run: Callable[[], torch.Tensor]
    note: str


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
    def notes(self) -> Sequence[str]:
        """What cannot be measured here, and why."""
        ...

    def time(self, function: Callable[[], object], before: Callable[[], object] | None = None) -> float:
        """Seconds that one call takes, with no data of it in caches, after a call that is not timed."""
        ...

    def ceilings(self, dtype: torch.dtype) -> list[Ceiling]:
        """What the device can read, and multiply in a dtype."""
        ...

    def probe(self, problem: Problem) -> Ceiling | None:
        """A read of the pages that a problem's rows see; None where there is none."""
        ...
