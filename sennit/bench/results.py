"""What measuring attention finds, as frozen values, and the figures that follow from it."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from sennit.bench.correctness import Check
from sennit.bench.host import Activity
from sennit.bench.timing import Times
from sennit.bench.work import Work

__all__ = ["Balance", "Ceilings", "Heat", "Measurement", "Part", "PeerResult"]


@dataclass(frozen=True)
class Ceilings:
    """What the device could do while a workload was measured, per second: medians of each way to do it.

    Attributes:
        reads: bytes, by name.
        products: operations of matrix products, by name.
        read_rate, matrix_rate: the best of those that count.
    """

    reads: dict[str, float]
    products: dict[str, float]
    read_rate: float
    matrix_rate: float


@dataclass(frozen=True)
class Heat:
    """What a call takes on a cool device and on a hot one: ten launches after a rest, and sustained ones.

    Attributes:
        cool, hot: microseconds of a launch, one right after the other.
        clock: MHz of the multiprocessors under sustained load; None where the system does not say.
        power: watts that the device draws then; likewise.
    """

    cool: float
    hot: float
    clock: float | None
    power: float | None


@dataclass(frozen=True)
class PeerResult:
    """What came of one peer.

    Attributes:
        name: with its version.
        note: how it was set up, or why it has no times.
        check: of its output; None where it has none.
        times: None where it is not here, cannot do what is asked, or is wrong.
        speedup: its median over ours.
        timed: how, where the device has several ways.
        heat: where it was asked for.
    """

    name: str
    note: str
    check: Check | None = None
    times: Times | None = None
    speedup: float | None = None
    timed: str = ""
    heat: Heat | None = None


@dataclass(frozen=True)
class Balance:
    """Microseconds of every worker: as planned, and medians of what was measured, where the backend tells."""

    predicted: list[float]
    measured: list[float] | None

    @property
    def predicted_imbalance(self) -> float:
        """The fullest worker over the mean."""
        return _imbalance(self.predicted)

    @property
    def measured_imbalance(self) -> float | None:
        """The same of the measured times."""
        return None if self.measured is None else _imbalance(self.measured)


def _imbalance(times: list[float]) -> float:
    return max(times) * len(times) / sum(times) if any(times) else 1.0


@dataclass(frozen=True)
class Part:
    """Some requests of a batch, called alone."""

    name: str
    batch: str
    times: Times


@dataclass(frozen=True)
class Measurement:
    """What was found of one workload.

    Attributes:
        name, batch: of the workload.
        layer: its spec, in short.
        backend, config: which ran.
        check: of the output, before anything was timed.
        work: what there was to do.
        times: of one call.
        activity: of the machine while it was timed.
        ceilings: measured in turn with it.
        probe: of reading all pages without softmax; None where there is no probe.
        probe_bytes: that were read then.
        balance: of the workers.
        parts: the requests with many new tokens and those with one, where there are both.
        plain, plain_work: the same batch without masks and functions, where the workload has some.
        peers: one entry each.
        timed: how, where the device has several ways.
        heat: where it was asked for.
    """

    name: str
    batch: str
    layer: str
    backend: str
    config: str
    check: Check
    work: Work
    times: Times
    activity: Activity
    ceilings: Ceilings
    probe: Times | None
    probe_bytes: int | None
    balance: Balance
    parts: list[Part] = field(default_factory=list)
    plain: Times | None = None
    plain_work: Work | None = None
    peers: list[PeerResult] = field(default_factory=list)
    timed: str = ""
    heat: Heat | None = None

    @property
    def read_floor(self) -> float:
        """Microseconds that all bytes take at the measured rate."""
        return self.work.bytes / self.ceilings.read_rate * 1e6

    @property
    def matrix_floor(self) -> float:
        """Microseconds that all operations take at the measured rate."""
        return self.work.flops / self.ceilings.matrix_rate * 1e6

    @property
    def floor(self) -> float:
        """The least time, in microseconds: the larger of the two."""
        return max(self.read_floor, self.matrix_floor)

    @property
    def bound(self) -> Literal["memory", "compute"]:
        """Which of the two the floor is."""
        return "memory" if self.read_floor >= self.matrix_floor else "compute"

    @property
    def floor_ratio(self) -> float:
        """How many times its floor a call takes."""
        return self.times.median / self.floor

    @property
    def probe_share(self) -> float | None:
        """The probe's time over ours: 1 is reading the pages as fast as without softmax."""
        return None if self.probe is None else self.probe.median / self.times.median

    @property
    def matrix_share(self) -> float:
        """Our operations per second over those of the best matrix product."""
        return self.matrix_floor / self.times.median

    @property
    def parts_sum(self) -> float | None:
        """Microseconds of the parts, one after the other; None where there are none."""
        return sum(part.times.median for part in self.parts) if self.parts else None

    @property
    def pair_cost(self) -> float | None:
        """Time of a visible pair over that of one without masks and functions; None where there are none anyhow."""
        if self.plain is None or self.plain_work is None:
            return None
        return (self.times.median / self.work.pairs) / (self.plain.median / self.plain_work.pairs)

    def as_json(self) -> dict[str, Any]:
        """All of it, and the figures that follow, in values that JSON has."""
        seconds = self.times.median * 1e-6
        found = asdict(self) | {
            "bytes_per_s": self.work.bytes / seconds,
            "flops_per_s": self.work.flops / seconds,
            "floor": self.floor,
            "bound": self.bound,
            "floor_ratio": self.floor_ratio,
            "peer_floor_ratios": {peer.name: peer.times.median / self.floor for peer in self.peers if peer.times},
            "probe_share": self.probe_share,
            "matrix_share": self.matrix_share,
            "imbalance": {
                "predicted": self.balance.predicted_imbalance,
                "measured": self.balance.measured_imbalance,
            },
            "parts_sum": self.parts_sum,
            "pair_cost": self.pair_cost,
        }
        return {name: _finite(value) for name, value in found.items()}


def _finite(value: Any) -> Any:
    """The same without the infinite error of an output that is wrong: JSON has no infinity."""
    if isinstance(value, dict):
        return {name: _finite(part) for name, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
