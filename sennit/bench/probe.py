"""Native reads of memory: a tensor from end to end, and a batch's pages in the order in which decoding reads them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from sennit import jit
from sennit.bench.work import seen_keys
from sennit.check.problems import Problem
from sennit.errors import UnsupportedFeature
from sennit.pools import nhd_views, split_pools

__all__ = ["Probe", "seen_pages"]

SOURCE = Path(__file__).parent / "csrc" / "probe.cpp"
LINE = 64  # bytes


class Probe:
    """The compiled probe, on as many threads as it is told.

    Raises:
        BuildUnavailable: nothing can be compiled here.
        BuildFailed: the compiler rejected the probe.
    """

    def __init__(self, threads: int) -> None:
        units = ((SOURCE.name, SOURCE.read_text()),)
        source = jit.Source("bench-probe", units, headers=None, flags=jit.find_toolchain().native)
        self._module: Any = jit.load(source)
        self._threads = threads

    def read(self, tensor: torch.Tensor) -> float:
        """Seconds that reading a contiguous tensor takes, from when all threads are running."""
        return float(self._module.read_tensor(tensor, self._threads))

    def pages_of(self, problem: Problem) -> tuple[int, list[Callable[[], float]]]:
        """How to read the pages that a problem's rows see: once, with four dot products for every 64 bytes.

        Returns:
            ``(bytes, reads)``: two ways, which prefetch into the first and into the second level of caches. Which of
            them is faster, sometimes by half, depends on the processor. Each returns seconds, as :meth:`read` does.

        Raises:
            UnsupportedFeature: rows of the pools are not made of whole lines of 64 bytes.
        """
        spec = problem.spec
        k, v = nhd_views(*split_pools("kv", problem.kv, spec, paged=True), spec, problem.kv_layout, problem.page_size)
        pools = [k] if spec.latent else [k, v]
        if any(pool.shape[-1] * pool.itemsize % LINE for pool in pools):
            dims = f"{spec.head_dim_qk} and {spec.head_dim_vo}"
            raise UnsupportedFeature("head_dim", f"the probe reads whole lines of {LINE} bytes, which {dims} are not")
        pages = seen_pages(problem)
        size = len(pages) * sum(pool[0].numel() * pool.itemsize for pool in pools)
        values = None if spec.latent else v

        def by(function: Callable[..., float]) -> Callable[[], float]:
            return lambda: float(function(k, values, pages, self._threads))

        return size, [by(self._module.read_pages_into_first_level), by(self._module.read_pages_into_second_level)]


def seen_pages(problem: Problem) -> torch.Tensor:
    """Ids of the pages that hold keys which some row sees, request after request, int32 ``[pages]``."""
    batch, size = problem.batch, problem.page_size
    assert batch.pages is not None
    assert size is not None
    found = []
    for request, (q_len, kv_len) in enumerate(zip(batch.q_lens.tolist(), batch.kv_lens.tolist(), strict=True)):
        seen = seen_keys(problem.spec, q_len, kv_len)
        numbers = np.union1d(np.arange(-(-seen.sinks // size)), np.arange(seen.first // size, -(-seen.last // size)))
        found.append(batch.pages.entries[batch.pages.starts[request] + numbers.astype(int)])
    return torch.from_numpy(np.concatenate(found).astype(np.int32))
