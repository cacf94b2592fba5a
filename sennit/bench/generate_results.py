"""What is measured of generation, and what is found, as frozen values."""

from __future__ import annotations

from dataclasses import dataclass, field
from statistics import median

import torch

from sennit.bench.generate_check import Agreement
from sennit.bench.generate_engines import Sennit
from sennit.bench.generate_profile import TimeParts
from sennit.bench.generate_workloads import Workload
from sennit.bench.host import Activity
from sennit.errors import InvalidInput

__all__ = ["Measurement", "Options", "Report", "Speed", "WorkloadReport"]


@dataclass(frozen=True)
class Options:
    """What is measured.

    Attributes:
        model: a folder, a hub id, or a name of :mod:`~sennit.bench.generate_shapes`.
        dtype: of weights and cache; None: as the weights are stored.
        prompts: prompts of each workload.
        prompt_tokens: their mean length.
        max_new_tokens: new tokens of each prompt, at least 2.
        repeat: measurements of each engine, taken in turns.
        peers: whether transformers is measured too.
        thorough: whether the check compares all prompts and tokens instead of a few.
        engine: Sennit's settings.
        device: where all of them run, ``"cpu"`` or a CUDA device.
    """

    model: str
    dtype: torch.dtype | None = torch.bfloat16
    prompts: int = 16
    prompt_tokens: int = 1000
    max_new_tokens: int = 128
    repeat: int = 1
    peers: bool = True
    thorough: bool = False
    engine: Sennit = field(default_factory=Sennit)
    device: str = "cpu"

    def __post_init__(self) -> None:
        for name, least in (("prompts", 1), ("prompt_tokens", 4), ("max_new_tokens", 2), ("repeat", 1)):
            if getattr(self, name) < least:
                raise InvalidInput(name, expected=f"at least {least}", got=getattr(self, name))


@dataclass(frozen=True)
class Measurement:
    """One engine, once, in a process of its own.

    Attributes:
        prompt_seconds: until every prompt has one new token, in a generation that ends there.
        seconds: of the generation of all new tokens.
        peak_bytes: most resident memory during both, runtime and weights included; on a GPU, most that tensors took.
        loading_included: the peak is that of the whole process, as this system cannot tell them apart.
        activity: what the machine did meanwhile.
    """

    prompt_seconds: float
    seconds: float
    peak_bytes: int
    loading_included: bool
    activity: Activity


@dataclass(frozen=True)
class Speed:
    """An engine's measurements of one workload, or why it has none; rates are of the medians.

    Attributes:
        failure: why a peer has no measurements; empty where it has.
    """

    engine: str
    settings: str
    prompts: int
    prompt_tokens: int
    new_tokens: int
    measurements: tuple[Measurement, ...]
    failure: str = ""

    @property
    def seconds(self) -> float:
        """Median of a whole generation."""
        return median(each.seconds for each in self.measurements)

    @property
    def prompt_seconds(self) -> float:
        """Median until every prompt has its first token."""
        return median(each.prompt_seconds for each in self.measurements)

    @property
    def new_tokens_per_second(self) -> float:
        """All new tokens over the whole time."""
        return self.new_tokens / self.seconds

    @property
    def prompt_rate(self) -> float:
        """Prompt tokens a second, until each prompt has its first new token."""
        return self.prompt_tokens / self.prompt_seconds

    @property
    def decode_rate(self) -> float | None:
        """New tokens a second after each prompt's first, in the time that they add; None where it is none."""
        added = self.seconds - self.prompt_seconds
        return (self.new_tokens - self.prompts) / added if added > 0 else None

    @property
    def peak_bytes(self) -> int:
        """Largest peak."""
        return max(each.peak_bytes for each in self.measurements)


@dataclass(frozen=True)
class WorkloadReport:
    """What was found for one workload: Sennit first, then its peers.

    ``parts`` is None on a GPU, which works after a call has returned, so that hooks on the host do not see its time.
    """

    workload: Workload
    speeds: tuple[Speed, ...]
    parts: TimeParts | None

    @property
    def speedup(self) -> float | None:
        """How many times as long the fastest peer takes; None without one."""
        ours, *peers = (speed for speed in self.speeds if not speed.failure)
        return min((peer.seconds for peer in peers), default=0.0) / ours.seconds or None


@dataclass(frozen=True)
class Report:
    """Everything, beside the check that had to pass before."""

    options: Options
    backend: str
    threads: int
    agreement: Agreement
    workloads: tuple[WorkloadReport, ...]
