"""Measures workloads one after another; on a GPU in a process that may fail, and is begun anew without what failed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from sennit.bench.attention import Setting, Stage, measure
from sennit.bench.devices import kind_of
from sennit.bench.fresh_process import Say, run_alone
from sennit.bench.instruments import Absent, DeviceLost, Peer
from sennit.bench.results import Measurement
from sennit.bench.workloads import choose_workloads
from sennit.errors import SennitError

__all__ = ["Event", "Failure", "Machine", "Order", "run_session"]

PATIENCE = 180.0  # seconds without a word, after which something is taken to hang


@dataclass(frozen=True)
class Order:
    """What is to be measured.

    Attributes:
        device: where.
        workloads: names of the device's workloads, or batches.
        setting: how; its peers are found by the process that measures.
        peers: whether there are any.
        vllm_library: see :func:`~sennit.bench.vllm_cpu.find_vllm`.
        left_out: for pairs of workload and peer that are not to be tried, the reason.
    """

    device: torch.device
    workloads: tuple[str, ...]
    setting: Setting
    peers: bool = False
    vllm_library: Path | None = None
    left_out: Mapping[tuple[str, str], str] = field(default_factory=dict)

    def find_peers(self) -> Sequence[Peer | Absent]:
        """Whom to compare with."""
        return kind_of(self.device).peers(self.vllm_library) if self.peers else ()


@dataclass(frozen=True)
class Failure:
    """A workload that was not measured, and why."""

    workload: str
    reason: str


@dataclass(frozen=True)
class Machine:
    """What the instruments say of the device, and of what they cannot measure."""

    hardware: Mapping[str, Any]
    notes: Sequence[str]


Event = Stage | Measurement | Failure | Machine


def run_session(order: Order, tell: Callable[[Event], None]) -> None:
    """Measure everything in an order, and tell of each event as it comes.

    A workload that cannot be measured is told of as a :class:`Failure`, and the others are measured all the same. Where
    a peer takes the process down, or hangs, its workload is measured again without it.

    Raises:
        SennitError: the device cannot be measured at all.
    """
    if kind_of(order.device).apart:
        _measure_apart(order, tell)
    else:
        _measure_here(order, tell)


def _measure_here(order: Order, tell: Callable[[Event], None]) -> None:
    kind = kind_of(order.device)
    instruments = kind.instruments(order.device)
    peers = order.find_peers()
    for workload in choose_workloads(order.workloads, kind.workloads):
        chosen = [_unless_left_out(order, workload.name, peer) for peer in peers]
        try:
            tell(measure(workload, replace(order.setting, peers=chosen), instruments, progress=tell))
        except DeviceLost:
            raise
        except SennitError as error:
            tell(Failure(workload.name, str(error)))
    tell(Machine(instruments.hardware, instruments.notes))


def _unless_left_out(order: Order, workload: str, peer: Peer | Absent) -> Peer | Absent:
    reason = order.left_out.get((workload, peer.name))
    return peer if reason is None else Absent(peer.name, reason)


def _measure_apart(order: Order, tell: Callable[[Event], None]) -> None:
    """In new processes, until every workload has been measured or has failed."""
    peers = {peer.name for peer in order.find_peers()}
    while order.workloads:
        left, last = list(order.workloads), Stage("", "")

        def hear(event: Event, left: list[str] = left) -> None:
            nonlocal last
            if isinstance(event, Stage):
                last = event
            elif isinstance(event, (Measurement, Failure)):
                left.remove(event.name if isinstance(event, Measurement) else event.workload)
            tell(event)

        try:
            run_alone(_serve, order, on_stage=hear, patience=PATIENCE)
            return
        except Exception as error:  # whatever it was, the process is gone
            if last.workload not in left:
                raise
            reason = f"failed in {last.doing}: {' '.join(f'{type(error).__name__}: {error}'.split())[:500]}"
            at = last.workload, last.subject
            if last.subject in peers and at not in order.left_out:
                order = replace(order, left_out={**order.left_out, at: reason})
            else:
                tell(Failure(last.workload, reason))
                left.remove(last.workload)
            order = replace(order, workloads=tuple(left))


def _serve(say: Say, order: Order) -> None:
    _measure_here(order, say)
