"""Measures attention over a batch: first whether it is right, then how long it takes beside what is possible."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from sennit.attention import BatchAttention
from sennit.bench.calls import Call, parts_of
from sennit.bench.correctness import Check, Truth, find_truth
from sennit.bench.host import Observer
from sennit.bench.instruments import Absent, Ceiling, Clock, Instruments, Peer, Subject
from sennit.bench.results import Balance, Ceilings, Heat, Measurement, Part, PeerResult
from sennit.bench.timing import Times, take_turns
from sennit.bench.workloads import Workload, make_workload_problem
from sennit.check.problems import Problem
from sennit.errors import UnsupportedFeature
from sennit.pools import KVLayout

__all__ = ["Setting", "Stage", "measure"]

WHOLE, PLAIN, PROBE = "sennit", "plain causal", "probe"


@dataclass(frozen=True)
class Stage:
    """What is about to be done, and with what.

    Attributes:
        workload: name of the workload.
        doing: in words.
        subject: name of what it is done with; empty where it is nothing of the kind.
    """

    workload: str
    doing: str
    subject: str = ""

    def __str__(self) -> str:
        return f"{self.workload}: {self.doing} {self.subject}".rstrip()


@dataclass(frozen=True)
class Setting:
    """How workloads are measured.

    Attributes:
        dtype: of queries, keys and values.
        kv_layout, page_size, backend: as :class:`sennit.BatchAttention` takes them.
        repeat: samples of everything that is timed.
        peers: whom to compare with, those included that are not here.
        heat: whether to time Sennit and its peers on a cool and on a hot device too, after everything else.
    """

    dtype: torch.dtype = torch.bfloat16
    kv_layout: KVLayout = "HND"
    page_size: int = 16
    backend: str = "auto"
    repeat: int = 7
    peers: Sequence[Peer | Absent] = ()
    heat: bool = False


def measure(
    workload: Workload,
    setting: Setting,
    instruments: Instruments,
    *,
    progress: Callable[[Stage], None] = lambda stage: None,
) -> Measurement:
    """Measure one workload.

    Everything is timed in turn: Sennit, parts of the batch, the batch without masks, peers, and what the device can do.

    Args:
        workload: the batch and its layer.
        setting: what else there is to choose.
        instruments: of the device.
        progress: told what comes next, outside of all times.

    Raises:
        SennitError: an output of Sennit is wrong; nothing is timed then.
        UnsupportedFeature: the backend cannot do what the workload asks.
    """

    def say(doing: str, subject: str = "") -> None:
        progress(Stage(workload.name, doing, subject))

    ready = _prepare(workload, setting, instruments, say)
    whole, plain, probe = ready.whole, ready.plain, ready.probe
    observer = Observer()
    clocks = instruments.clocks(ready.subjects, before=lambda name: say("trying", name))
    times, workers = _take_times(ready, clocks, setting.repeat, say)
    compared = [WHOLE, *(peer.name for peer in ready.peers if peer.name in clocks)]
    heats = {name: _heat(name, clocks[name], instruments, say) for name in compared if setting.heat}
    instruments.settle()
    return Measurement(
        name=workload.name,
        batch=str(whole.plan.batch),
        layer=whole.plan.spec.key,
        backend=whole.plan.backend,
        config=whole.plan.config.name,
        check=ready.check,
        work=whole.work,
        times=times[WHOLE],
        activity=observer.activity(),
        ceilings=_rates(ready.ceilings, times),
        probe=times.get(PROBE),
        probe_bytes=None if probe is None else probe.amount,
        balance=Balance(whole.plan.loads.tolist(), workers),
        parts=[Part(name, str(part.plan.batch), times[name]) for name, part in ready.parts.items()],
        plain=times.get(PLAIN),
        plain_work=None if plain is None else plain.work,
        peers=[_timed(peer, times, clocks, heats) for peer in ready.peers],
        timed=clocks[WHOLE].how,
        heat=heats.get(WHOLE),
    )


Say = Callable[..., None]


@dataclass(frozen=True, eq=False)
class Ready:
    """What is to be timed of one workload: all of it has been found right."""

    whole: Call
    check: Check
    parts: dict[str, Call]
    plain: Call | None
    peers: list[PeerResult]
    subjects: dict[str, Subject]  # Sennit's calls and those of peers, by name
    ceilings: list[Ceiling]
    probe: Ceiling | None


def _prepare(workload: Workload, setting: Setting, instruments: Instruments, say: Say) -> Ready:
    say("making tensors")
    problem = _problem(workload, setting, instruments)
    say("computing rows in float64")
    truth = find_truth(problem)
    say("checking", WHOLE)
    attention = _attention(problem, setting, instruments)
    whole = Call(attention, problem)
    check = whole.verified(truth)
    parts = {name: Call(attention, problem, batch) for name, batch in parts_of(problem.batch).items()}
    for part in parts.values():
        part.verified(truth)
    subjects = {WHOLE: whole.subject(truth)} | {name: part.subject(truth) for name, part in parts.items()}
    plain = None
    if workload.plain is not None:
        bare = _problem(workload.plain, setting, instruments)
        known = find_truth(bare)
        plain = Call(_attention(bare, setting, instruments), bare)
        plain.verified(known)
        subjects[PLAIN] = plain.subject(known)
    instruments.settle()
    found, peers = _prepare_peers(problem, setting.peers, truth, instruments, say)
    ceilings, probe = instruments.ceilings(setting.dtype), instruments.probe(problem)
    return Ready(whole, check, parts, plain, peers, subjects | found, ceilings, probe)


def _take_times(
    ready: Ready, clocks: Mapping[str, Clock], rounds: int, say: Say
) -> tuple[dict[str, Times], list[float] | None]:
    """Times of everything, and of each worker of the whole call."""
    workers: list[list[float]] = []

    def run_whole() -> float:
        seconds = clocks[WHOLE].run()
        workers.append(ready.whole.worker_times() or [])
        return seconds

    turns = {name: clock.run for name, clock in clocks.items()} | {WHOLE: run_whole}
    turns |= {ceiling.name: ceiling.run for ceiling in ready.ceilings}
    if ready.probe is not None:
        turns[PROBE] = ready.probe.run
    times = take_turns(turns, rounds, before=lambda name: say("timing", name))
    counted = workers[1:]  # take_turns leaves out the first round
    return times, np.median(counted, axis=0).tolist() if all(counted) else None


def _heat(name: str, clock: Clock, instruments: Instruments, say: Say) -> Heat | None:
    say("heating", name)
    return instruments.heat(clock)


def _problem(workload: Workload, setting: Setting, instruments: Instruments) -> Problem:
    return make_workload_problem(workload, setting.dtype, setting.kv_layout, setting.page_size, instruments.device)


def _attention(problem: Problem, setting: Setting, instruments: Instruments) -> BatchAttention:
    return BatchAttention(
        problem.spec,
        page_size=setting.page_size,
        kv_layout=setting.kv_layout,
        device=instruments.device,
        backend=setting.backend,
    )


def _prepare_peers(
    problem: Problem, peers: Sequence[Peer | Absent], truth: Truth, instruments: Instruments, say: Say
) -> tuple[dict[str, Subject], list[PeerResult]]:
    """The peers that can be timed, since their output is right, and what is known of all."""
    ready, results = {}, []
    for peer in peers:
        if isinstance(peer, Absent):
            results.append(PeerResult(peer.name, peer.reason))
            continue
        say("preparing", peer.name)
        try:
            subject, result = _prepare_peer(problem, peer, truth)
        except UnsupportedFeature as error:
            subject, result = None, PeerResult(peer.name, f"cannot do it: {error}")
        except Exception as error:  # of code that is not ours; ours is still worth measuring
            subject, result = None, PeerResult(peer.name, f"failed, so not timed: {_one_line(error)}")
        instruments.settle()
        if subject is not None:
            ready[peer.name] = subject
        results.append(result)
    return ready, results


def _prepare_peer(problem: Problem, peer: Peer, truth: Truth) -> tuple[Subject | None, PeerResult]:
    prepared = peer.prepare(problem)

    def check(found: Any) -> Check:
        return truth.check(prepared.collect(found))

    first = check(prepared.run())
    if not first.passed:
        return None, PeerResult(peer.name, f"wrong, so not timed: {first}", first)
    return Subject(prepared.run, lambda found: check(found).passed), PeerResult(peer.name, prepared.note, first)


def _one_line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]


def _timed(
    peer: PeerResult, times: Mapping[str, Times], clocks: Mapping[str, Clock], heats: Mapping[str, Heat | None]
) -> PeerResult:
    found = times.get(peer.name)
    if found is None:
        return peer
    speedup = found.median / times[WHOLE].median
    return replace(peer, times=found, speedup=speedup, timed=clocks[peer.name].how, heat=heats.get(peer.name))


def _rates(ceilings: Sequence[Ceiling], times: Mapping[str, Times]) -> Ceilings:
    rates = {c.name: c.amount / times[c.name].median * 1e6 for c in ceilings}

    def of(kind: str) -> dict[str, float]:
        return {c.name: rates[c.name] for c in ceilings if c.kind == kind}

    def best(kind: str) -> float:
        return max(rates[c.name] for c in ceilings if c.kind == kind and c.counts)

    return Ceilings(of("read"), of("matrix"), best("read"), best("matrix"))
