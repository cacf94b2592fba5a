"""Measuring on an NVIDIA GPU: empty caches, events and captured graphs, and how fast it reads and multiplies."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from statistics import median
from typing import Any

import torch

from sennit.bench.events import launch_between_events
from sennit.bench.heat import measure_heat
from sennit.bench.instruments import Ceiling, Clock, DeviceLost, Subject
from sennit.bench.nvml import MISSING, find_meter
from sennit.bench.results import Heat
from sennit.check.problems import Problem

__all__ = ["CudaInstruments"]

MOST_BYTES = 4 * 2**30  # read to see how fast memory is, and to empty the L2 cache: a millisecond on an H200
SHARE = 16  # of the device's memory, what is read may take one part in so many
SIDE = 8192
BRIEF = 100e-6  # seconds; a call that takes less is launched too slowly to be timed as its host launches it
TRIALS, WARMING = 3, 2
EVENTS, GRAPH = "events", "graph replay"


class CudaInstruments:
    """Measures on a CUDA device, which becomes the current one."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        torch.cuda.set_device(device)
        properties = torch.cuda.get_device_properties(device)
        self._meter = find_meter(device)
        self.notes = [] if self._meter is not None else [MISSING]
        self.hardware: Mapping[str, Any] = {
            "gpu": properties.name,
            "capability": f"{properties.major}.{properties.minor}",
            "multiprocessors": properties.multi_processor_count,
            "gpu_memory_bytes": properties.total_memory,
            "l2_bytes": properties.L2_cache_size,
        } | (self._meter.facts if self._meter is not None else {})
        size = min(MOST_BYTES, properties.total_memory // SHARE)
        self._buffer = torch.randn(size // 4, device=device)

    def time(self, launch: Callable[[], object]) -> float:
        """Seconds between two events around a call, when the L2 cache holds other data.

        That data has been read, not written: written data would go to memory during the call. The device is busy with
        it, for much longer than the cache needs, while the host launches the call: it is the call that is timed, and
        not a slow host.
        """
        self._buffer.sum()
        return launch_between_events(launch).seconds

    def clocks(
        self, subjects: Mapping[str, Subject], before: Callable[[str], None] = lambda name: None
    ) -> dict[str, Clock]:
        """By events; where one takes less than 100 us, all of them by events around a captured graph's replay."""
        rough = {}
        for name, subject in subjects.items():
            before(name)
            rough[name] = median(self.time(subject.run) for _ in range(TRIALS))
        if min(rough.values()) >= BRIEF:
            return {name: self._launched(subject, EVENTS) for name, subject in subjects.items()}
        found = {}
        for name, subject in subjects.items():
            before(name)
            found[name] = self._replayed(subject)
        return found

    def ceilings(self, dtype: torch.dtype) -> list[Ceiling]:
        """A sum, a copy, of which bytes read and written count, and a matrix product of ``dtype``."""
        buffer, size = self._buffer, self._buffer.nbytes
        source, target = buffer.chunk(2)
        square = torch.randn(SIDE, SIDE, device=self.device).to(dtype)
        multiply = partial(torch.matmul, square, square.T.contiguous(), out=torch.empty_like(square))
        return [
            Ceiling("torch.sum", "read", size, partial(self.time, buffer.sum)),
            Ceiling("copy", "read", size, partial(self.time, partial(target.copy_, source))),
            Ceiling(f"GEMM {SIDE}^3", "matrix", 2 * SIDE**3, partial(self.time, multiply)),
        ]

    def probe(self, problem: Problem) -> None:
        """There is none: what reads scattered pages at full speed is what is measured."""

    def heat(self, clock: Clock) -> Heat:
        """See :func:`measure_heat`."""
        return measure_heat(clock.launch, self.device, self._meter)

    def settle(self) -> None:
        """Wait until the device has nothing left to do.

        Raises:
            DeviceLost: a launch failed on it.
        """
        try:
            torch.cuda.synchronize(self.device)
        except RuntimeError as error:
            raise DeviceLost(f"{self.device} failed: {_first_line(error)}") from error

    def _launched(self, subject: Subject, how: str) -> Clock:
        return Clock(partial(self.time, subject.run), subject.run, how)

    def _replayed(self, subject: Subject) -> Clock:
        """By replay, or by events with the reason: not everything that people call can be captured."""
        try:
            graph, found = _capture(subject.run)
        except Exception as error:  # libraries raise what they like
            self.settle()
            return self._launched(subject, f"{EVENTS}, since it cannot be captured: {_first_line(error)}")
        for tensor in (found,) if isinstance(found, torch.Tensor) else found:
            tensor.fill_(torch.nan)
        graph.replay()
        if not subject.is_right(found):
            return self._launched(subject, f"{EVENTS}, since a replayed graph computes something else")
        return Clock(partial(self.time, graph.replay), graph.replay, GRAPH)


def _capture(run: Callable[[], Any]) -> tuple[torch.cuda.CUDAGraph, Any]:
    """A graph of one call, and what the call returned, which a replay writes again."""
    stream, current = torch.cuda.Stream(), torch.cuda.current_stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(current)
    with torch.cuda.stream(stream):
        for _ in range(WARMING):
            run()
    current.wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = run()
    return graph, found


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0][:200]
