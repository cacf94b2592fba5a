"""Sennit's own calls that are measured: over all requests of a problem, or over some of them."""

from __future__ import annotations

import sys
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch

from sennit.attention import BatchAttention
from sennit.backends import registry
from sennit.bench.correctness import Check, Truth
from sennit.bench.instruments import Subject
from sennit.bench.work import Work, count_work
from sennit.check.problems import Problem
from sennit.errors import SennitError
from sennit.plan.batch import Batch
from sennit.plan.plan import Plan

__all__ = ["Call", "parts_of"]


class Call:
    """A planned call over a problem's tensors.

    Args:
        attention: what plans and runs it.
        problem: the tensors.
        batch: which of the problem's requests; all of them for None.

    Attributes:
        plan: the plan.
        work: what there is to do.
    """

    def __init__(self, attention: BatchAttention, problem: Problem, batch: Batch | None = None) -> None:
        self._attention, self._problem = attention, problem
        self._pages = attention.pages(problem.kv)  # as a cache does: they are checked once
        self.plan: Plan = attention.plan(problem.batch if batch is None else batch)
        assert self.plan.batch.pages is not None
        page = self.plan.batch.pages.entries[:1]
        self._little = attention.plan(Batch.csr(qo_indptr=[0, 1], kv_lens=[1], kv_indptr=[0, 1], kv_indices=page))
        lengths = self.plan.batch.q_lens.tolist(), self.plan.batch.kv_lens.tolist()
        self.work: Work = count_work(problem.spec, *lengths)
        shape = len(problem.q), problem.spec.num_qo_heads, problem.spec.head_dim_vo
        self._out = problem.q.new_zeros(shape)

    @property
    def rows(self) -> torch.Tensor:
        """Its query rows, int64."""
        batch = self.plan.batch
        spans = zip(batch.q_starts.tolist(), batch.q_lens.tolist(), strict=True)
        return torch.cat([torch.arange(start, start + count) for start, count in spans])

    def run(self) -> torch.Tensor:
        """Make the call, into the same output every time."""
        problem = self._problem
        self._attention.run(
            self.plan, problem.q, self._pages, sm_scale=problem.sm_scale, out=self._out, **problem.run_options
        )
        return self._out

    def run_little(self) -> None:
        """Make a call of the same kind over one key."""
        problem = self._problem
        q, options = problem.q[:1], problem.run_options
        self._attention.run(self._little, q, self._pages, sm_scale=problem.sm_scale, **options)

    def verified(self, truth: Truth) -> Check:
        """Compare a call's output with what is known of its rows.

        Raises:
            SennitError: it is wrong.
        """
        self._out.fill_(torch.nan)
        check = truth.of_rows(self.rows).check(self.run())
        if not check.passed:
            raise SennitError(
                f"{self.plan.backend} computes {self.plan.batch} wrongly, {check}: nothing was timed; a bug in Sennit, "
                f"which sennit check --backend {self.plan.backend} may narrow down"
            )
        return check

    def subject(self, truth: Truth) -> Subject:
        """The call, to be timed; ``truth`` is of all rows of the problem."""
        known = truth.of_rows(self.rows)
        return Subject(self.run, lambda out: known.check(out).passed, self.run_little)

    def worker_times(self) -> list[float] | None:
        """Microseconds that each worker took in the last call; None where the backend does not tell."""
        tell = _worker_clock(self.plan.backend)
        spec = self._problem.spec
        return None if tell is None else tell(spec.dtype, spec.kv_dtype)


def _worker_clock(backend: str) -> Callable[[torch.dtype, torch.dtype], list[float]] | None:
    """``last_worker_times`` of a backend's package."""
    package = type(registry.load(backend)).__module__.rpartition(".")[0]
    return getattr(sys.modules.get(package), "last_worker_times", None)


def parts_of(batch: Batch) -> dict[str, Batch]:
    """``"wide"``: the requests of a batch with many new tokens, ``"narrow"``: those with one; none if all are alike.

    >>> {name: str(part) for name, part in parts_of(Batch.parse("5@9 + 2*1@4", page_size=4)).items()}
    {'wide': '5@9', 'narrow': '2*1@4'}
    """
    wide, narrow = batch.q_lens > 1, batch.q_lens == 1
    if not (wide.any() and narrow.any()):
        return {}
    return {"wide": _some_of(batch, wide), "narrow": _some_of(batch, narrow)}


def _some_of(batch: Batch, chosen: npt.NDArray[np.bool_]) -> Batch:
    """Some requests of a batch, with their query rows and pages where they were."""
    assert batch.pages is not None
    starts, widths = batch.pages.starts[chosen], batch.pages.widths[chosen]
    entries = [batch.pages.entries[start : start + width] for start, width in zip(starts, widths, strict=True)]
    return Batch.csr(
        qo_indptr=np.append(0, batch.q_lens[chosen].cumsum()),
        kv_lens=batch.kv_lens[chosen],
        kv_indptr=np.append(0, widths.cumsum()),
        kv_indices=np.concatenate(entries),
        qo_starts=batch.q_starts[chosen],
    )
