"""Measuring on the CPU: cold caches, threads in a known state, and how fast it reads and multiplies."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from sennit.bench.instruments import Ceiling, Clock, Subject
from sennit.bench.probe import Probe
from sennit.check.problems import Problem
from sennit.errors import BuildFailed, BuildUnavailable, UnsupportedFeature

__all__ = ["CpuInstruments", "threads", "wait_for_other_threads"]

BUFFER_BYTES = 2**30  # read to empty the caches, and to see how fast memory is: several times what most caches hold
LOOK = 1e-3  # seconds between looks at other threads
IDLE = 0.1  # of a processor
PATIENCE = 0.5  # seconds
PER_THREAD = 2**16  # elements that PyTorch divides no further

SQUARES = (2048, 4096)
ATTENTION_SHAPED = (32, 1024, 128)  # heads, rows and keys, dimension
TRIED = 512  # rows of a product that tells how fast a dtype's are
RESTLESS = "other threads of this process never came to rest, so ceilings may be too low"


def _product_time(dtype: torch.dtype) -> float:
    """Seconds that a small matrix product takes."""
    square = torch.ones(TRIED, TRIED, dtype=dtype)
    square @ square
    start = time.perf_counter()
    square @ square
    return time.perf_counter() - start


@contextmanager
def threads(count: int | None) -> Iterator[None]:
    """PyTorch has ``count`` threads meanwhile; for None as many as before."""
    before = torch.get_num_threads()
    torch.set_num_threads(before if count is None else count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def wait_for_other_threads() -> bool:
    """Wait until the other threads of this process do nothing, but not for ever; whether they came to that.

    PyTorch's threads (OpenMP's) wait for their next work in a loop that keeps a processor busy, and any other thread
    that runs meanwhile shares it. GOMP_SPINCOUNT bounds that, but is read only when a process starts.
    """
    give_up = time.perf_counter() + PATIENCE
    while time.perf_counter() < give_up:
        start, before = time.perf_counter(), _time_of_others()
        time.sleep(LOOK)
        if _time_of_others() - before < IDLE * (time.perf_counter() - start):
            return True
    return False


def _time_of_others() -> float:
    """Seconds that the other threads of this process have computed."""
    return time.process_time() - time.thread_time()


class CpuInstruments:
    """Measures on the CPU, with as many threads as PyTorch has when it is made."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        self.notes: list[str] = []
        self._buffer = torch.ones(BUFFER_BYTES // 4)
        self._little = torch.ones(torch.get_num_threads() * PER_THREAD)
        self._probe: Probe | None = None
        try:
            self._probe = Probe(torch.get_num_threads())
        except (BuildUnavailable, BuildFailed) as error:
            self.notes.append(f"pages are not probed, and memory is read by PyTorch alone: {error}")

    @property
    def hardware(self) -> Mapping[str, Any]:
        """Nothing beside the host's processor."""
        return {}

    def clocks(
        self, subjects: Mapping[str, Subject], before: Callable[[str], None] = lambda name: None
    ) -> dict[str, Clock]:
        """All of them by :meth:`time`; none is tried."""
        return {name: Clock(partial(self.time, s.run, s.little), s.run) for name, s in subjects.items()}

    def heat(self, clock: Clock) -> None:
        """A processor's times are those of whatever heat it has."""

    def settle(self) -> None:
        """A call on the CPU is over when it returns."""

    def time(self, function: Callable[[], object], before: Callable[[], object] | None = None) -> float:
        """Seconds that one call takes when caches hold none of its data, right after ``before`` and a small operation.

        So it is in a model: caches hold the code, which ran for the layer before, and PyTorch's threads have not gone
        to sleep yet, which helps who uses them and hinders who has threads of his own.
        """
        self._empty_caches()
        if before is not None:
            before()
        self._little.neg_()
        start = time.perf_counter()
        function()
        return time.perf_counter() - start

    def ceilings(self, dtype: torch.dtype) -> list[Ceiling]:
        """Reads of memory from end to end, and matrix products: squares, and 32 shaped as in prefill.

        Products are of ``dtype``, or of float32 where that is faster: in a dtype that a processor does not multiply
        PyTorch's take minutes, and who computes well converts.
        """
        dtype = min((dtype, torch.float32), key=_product_time)
        of = " float32" if dtype == torch.float32 else ""
        buffer, size = self._buffer, self._buffer.nbytes
        found = [Ceiling("torch.sum", "read", size, partial(self.time, buffer.sum))]
        if self._probe is not None:
            found.append(Ceiling("native read", "read", size, partial(self._rested, partial(self._probe.read, buffer))))
        for side in SQUARES:
            square = torch.randn(side, side).to(dtype)
            found.append(self._product(f"GEMM {side}^3{of}", square, square))
        heads, keys, dim = ATTENTION_SHAPED
        shaped = torch.randn(heads, keys, dim).to(dtype)
        name = f"{heads} GEMMs {keys} x {dim} x {keys}{of}"
        return [*found, self._product(name, shaped, shaped.transpose(1, 2), counts=False)]

    def probe(self, problem: Problem) -> Ceiling | None:
        """A read of the pages that a problem's rows see, the fastest way each time, see :meth:`Probe.pages_of`; None
        where there is no probe.
        """
        if self._probe is None:
            return None
        try:
            size, reads = self._probe.pages_of(problem)
        except UnsupportedFeature:
            return None

        def cold(read: Callable[[], float]) -> float:
            self._empty_caches()
            return self._rested(read)

        return Ceiling("pages", "pages", size, lambda: min(map(cold, reads)))

    def _product(self, name: str, a: torch.Tensor, b: torch.Tensor, *, counts: bool = True) -> Ceiling:
        multiply = partial(torch.matmul, a, b, out=a @ b)
        return Ceiling(name, "matrix", 2 * a.numel() * b.shape[-1], partial(self.time, multiply), counts)

    def _empty_caches(self) -> None:
        if self._probe is not None:
            self._probe.read(self._buffer)
        else:
            self._buffer.sum()

    def _rested(self, native: Callable[[], float]) -> float:
        """Seconds that a native read takes by its own clock and threads, when PyTorch's have come to rest."""
        if not wait_for_other_threads() and RESTLESS not in self.notes:
            self.notes.append(RESTLESS)
        return native()
