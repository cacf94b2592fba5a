"""Runs cases of the self-test: one after the other in this process, or dealt out to several."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sennit.bench.fresh_process import Say, run_alone
from sennit.check.selftest import Case, cases
from sennit.errors import SennitError, UnsupportedFeature

if TYPE_CHECKING:
    import torch

    from sennit.check.outcome import Outcome

__all__ = ["Battery", "Finding", "find"]


@dataclass(frozen=True)
class Battery:
    """All cases of one backend and device; the same values stand for the same cases in every process."""

    backend: str
    device: torch.device
    num_random: int
    num_operations: int
    seed: int

    @property
    def cases(self) -> list[Case]:
        """See :func:`~sennit.check.selftest.cases`."""
        sizes = {"num_random": self.num_random, "num_operations": self.num_operations, "seed": self.seed}
        return list(cases(self.backend, self.device, **sizes))


@dataclass(frozen=True)
class Finding:
    """What running a case came to: an outcome, the reason to skip it, or an error."""

    outcome: Outcome | None = None
    skipped: str | None = None
    error: str | None = None


Job = tuple[Battery, str]  # a case, by its name


def find(jobs: Sequence[Job], *, num_processes: int) -> Iterator[tuple[Job, Finding]]:
    """Run cases; with several processes they come in any order.

    A process that ends in the middle of a case has failed that case, and another goes on behind it.

    >>> battery = Battery("reference", "cpu", num_random=0, num_operations=0, seed=0)
    >>> [(job, finding)] = find([(battery, "lengths/empty")], num_processes=1)
    >>> finding.outcome.passed
    True
    """
    if num_processes == 1:
        known: dict[Battery, dict[str, Case]] = {}
        for job in jobs:
            battery, name = job
            if battery not in known:
                known[battery] = {case.name: case for case in battery.cases}
            yield job, _run(known[battery][name])
        return
    found: queue.Queue[tuple[Job, Finding]] = queue.Queue()
    for first in range(num_processes):
        share = list(jobs[first::num_processes])
        threading.Thread(target=_see_to, args=(share, found), daemon=True).start()
    for _ in jobs:
        yield found.get()


def _see_to(jobs: list[Job], found: queue.Queue[tuple[Job, Finding]]) -> None:
    """Have cases run in a process of their own, and in another where that has ended before they are done."""
    while jobs:

        def take(finding: Finding) -> None:
            found.put((jobs.pop(0), finding))

        try:
            run_alone(_serve, jobs, on_stage=take)
        except Exception as error:
            take(Finding(error=str(error)))


def _serve(say: Say, jobs: Sequence[Job]) -> None:
    for _, finding in find(jobs, num_processes=1):
        say(finding)


def _run(case: Case) -> Finding:
    try:
        return Finding(outcome=case.run())
    except UnsupportedFeature as error:
        return Finding(skipped=error.reason)
    except Exception as error:  # whatever a backend raises is a failure of that case, not the end of the test
        return Finding(error=str(error) if isinstance(error, SennitError) else f"{type(error).__name__}: {error}")
