"""Measures attention over a batch: first whether it is right, then how long it takes beside what is possible."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch

from sennit.attention import BatchAttention
from sennit.bench.calls import Call, parts_of
from sennit.bench.correctness import Check, Truth, find_truth
from sennit.bench.host import Observer
from sennit.bench.instruments import Absent, Ceiling, Instruments, Peer, Prepared
from sennit.bench.results import Balance, Ceilings, Measurement, Part, PeerResult
from sennit.bench.timing import Times, take_turns
from sennit.bench.workloads import Workload, make_workload_problem
from sennit.check.problems import Problem
from sennit.errors import UnsupportedFeature
from sennit.pools import KVLayout

__all__ = ["Setting", "measure"]

WHOLE, PLAIN, PROBE = "sennit", "plain causal", "probe"


@dataclass(frozen=True)
class Setting:
    """How workloads are measured.

    Attributes:
        dtype: of queries, keys and values.
        kv_layout, page_size, backend: as :class:`sennit.BatchAttention` takes them.
        repeat: samples of everything that is timed.
        peers: whom to compare with, those included that are not here.
    """

    dtype: torch.dtype = torch.bfloat16
    kv_layout: KVLayout = "HND"
    page_size: int = 16
    backend: str = "auto"
    repeat: int = 7
    peers: Sequence[Peer | Absent] = ()


def measure(
    workload: Workload,
    setting: Setting,
    instruments: Instruments,
    *,
    progress: Callable[[str], None] = lambda what: None,
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
    subjects = _prepare(workload, setting, instruments, progress)
    whole, plain, probe = subjects.whole, subjects.plain, subjects.probe
    observer = Observer()
    times, workers = _take_times(subjects, setting.repeat, instruments, progress)
    return Measurement(
        name=workload.name,
        batch=str(whole.plan.batch),
        layer=whole.plan.spec.key,
        backend=whole.plan.backend,
        config=whole.plan.config.name,
        check=subjects.check,
        work=whole.work,
        times=times[WHOLE],
        activity=observer.activity(),
        ceilings=_rates(subjects.ceilings, times),
        probe=times.get(PROBE),
        probe_bytes=None if probe is None else probe.amount,
        balance=Balance(whole.plan.loads.tolist(), workers),
        parts=[Part(name, str(part.plan.batch), times[name]) for name, part in subjects.parts.items()],
        plain=times.get(PLAIN),
        plain_work=None if plain is None else plain.work,
        peers=[_timed(peer, times) for peer in subjects.peers],
    )


@dataclass(frozen=True, eq=False)
class Subjects:
    """What is to be timed of one workload: all of it has been found right."""

    whole: Call
    check: Check
    parts: dict[str, Call]
    plain: Call | None
    prepared: dict[str, Prepared]
    peers: list[PeerResult]
    ceilings: list[Ceiling]
    probe: Ceiling | None


def _prepare(
    workload: Workload, setting: Setting, instruments: Instruments, progress: Callable[[str], None]
) -> Subjects:
    progress("making tensors")
    problem = _problem(workload, setting, instruments)
    progress("computing rows in float64")
    truth = find_truth(problem)
    attention = _attention(problem, setting, instruments)
    whole = Call(attention, problem)
    check = whole.verified(truth)
    parts = {name: Call(attention, problem, batch) for name, batch in parts_of(problem.batch).items()}
    for part in parts.values():
        part.verified(truth)
    plain = None if workload.plain is None else _plain(workload.plain, setting, instruments)
    prepared, peers = _prepare_peers(problem, setting.peers, truth, progress)
    ceilings, probe = instruments.ceilings(setting.dtype), instruments.probe(problem)
    return Subjects(whole, check, parts, plain, prepared, peers, ceilings, probe)


def _take_times(
    subjects: Subjects, rounds: int, instruments: Instruments, progress: Callable[[str], None]
) -> tuple[dict[str, Times], list[float] | None]:
    """Times of everything, and of each worker of the whole call."""
    workers: list[list[float]] = []

    def run_whole() -> float:
        seconds = instruments.time(subjects.whole.run, subjects.whole.run_little)
        workers.append(subjects.whole.worker_times() or [])
        return seconds

    calls = dict(subjects.parts)
    if subjects.plain is not None:
        calls[PLAIN] = subjects.plain
    turns = {WHOLE: run_whole} | {name: partial(instruments.time, c.run, c.run_little) for name, c in calls.items()}
    turns |= {name: partial(instruments.time, peer.run) for name, peer in subjects.prepared.items()}
    turns |= {ceiling.name: ceiling.run for ceiling in subjects.ceilings}
    if subjects.probe is not None:
        turns[PROBE] = subjects.probe.run
    times = take_turns(turns, rounds, before=lambda name: progress(f"timing {name}"))
    counted = workers[1:]  # take_turns leaves out the first round
    return times, np.median(counted, axis=0).tolist() if all(counted) else None


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


def _plain(workload: Workload, setting: Setting, instruments: Instruments) -> Call:
    """A verified call over the same batch without masks and functions."""
    problem = _problem(workload, setting, instruments)
    call = Call(_attention(problem, setting, instruments), problem)
    call.verified(find_truth(problem))
    return call


def _prepare_peers(
    problem: Problem, peers: Sequence[Peer | Absent], truth: Truth, progress: Callable[[str], None]
) -> tuple[dict[str, Prepared], list[PeerResult]]:
    """The peers that can be timed, since their output is right, and what is known of all."""
    ready, results = {}, []
    for peer in peers:
        if isinstance(peer, Absent):
            results.append(PeerResult(peer.name, peer.reason))
            continue
        progress(f"preparing {peer.name}")
        try:
            prepared = peer.prepare(problem)
        except UnsupportedFeature as error:
            results.append(PeerResult(peer.name, f"cannot do it: {error}"))
            continue
        check = truth.check(prepared.run())
        if check.passed:
            ready[peer.name] = prepared
        results.append(PeerResult(peer.name, prepared.note if check.passed else f"wrong, so not timed: {check}", check))
    return ready, results


def _timed(peer: PeerResult, times: Mapping[str, Times]) -> PeerResult:
    found = times.get(peer.name)
    if found is None:
        return peer
    return replace(peer, times=found, speedup=found.median / times[WHOLE].median)


def _rates(ceilings: Sequence[Ceiling], times: Mapping[str, Times]) -> Ceilings:
    rates = {c.name: c.amount / times[c.name].median * 1e6 for c in ceilings}

    def of(kind: str) -> dict[str, float]:
        return {c.name: rates[c.name] for c in ceilings if c.kind == kind}

    def best(kind: str) -> float:
        return max(rates[c.name] for c in ceilings if c.kind == kind and c.counts)

    return Ceilings(of("read"), of("matrix"), best("read"), best("matrix"))
