"""Whether an output is right, from a sample of its rows: float64 attention of a whole batch would take minutes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from sennit.check.oracle import Rules, dense_attention
from sennit.check.problems import Problem
from sennit.check.threads import one_thread

__all__ = ["Check", "Truth", "find_truth"]

MOST_ROWS = 24
MOST_PLAIN_ROWS = 4


@dataclass(frozen=True)
class Check:
    """How far an output is from float64, relative to the root mean square of each row and head.

    Attributes:
        error: the largest, of all rows and heads that were looked at; infinite where a number is not finite.
        allowed: twice that of plain PyTorch in the same dtype, and one rounding.
        rows: query rows that were looked at.
    """

    error: float
    allowed: float
    rows: int

    @property
    def passed(self) -> bool:
        """Whether the error is allowed."""
        return self.error <= self.allowed

    def __str__(self) -> str:
        return f"relative error {self.error:.2g} (allowed {self.allowed:.2g}) in {self.rows} rows"


@dataclass(frozen=True, eq=False)
class Truth:
    """Float64 results of some rows, and how far from them an output may be."""

    rows: torch.Tensor  # int64 [rows], of the query tensor
    exact: torch.Tensor  # float64 [rows, num_qo_heads, head_dim_vo]
    allowed: float

    def check(self, out: torch.Tensor) -> Check:
        """Compare ``out [query rows, num_qo_heads, head_dim_vo]``."""
        return Check(_relative_error(out[self.rows], self.exact), self.allowed, len(self.rows))

    def of_rows(self, rows: torch.Tensor) -> Truth:
        """What is known of those among ``rows``."""
        kept = torch.isin(self.rows, rows)
        return Truth(self.rows[kept], self.exact[kept], self.allowed)


def find_truth(problem: Problem) -> Truth:
    """Compute the first and last row of every request, or of evenly chosen ones, and some rows between, in float64."""
    chosen = _sample(problem)
    # The error of plain PyTorch is much the same in all rows.
    some = np.linspace(0, len(chosen) - 1, min(len(chosen), MOST_PLAIN_ROWS)).astype(int).tolist()
    with one_thread():
        exact = torch.stack([_row(problem, place, torch.float64) for place in chosen])
        plain = torch.stack([_row(problem, chosen[i], problem.spec.dtype) for i in some])
    allowed = 2 * _relative_error(plain, exact[some]) + torch.finfo(problem.spec.dtype).eps
    starts = problem.batch.q_starts
    rows = torch.tensor([int(starts[request]) + row for request, row in chosen])
    return Truth(rows, exact, allowed)


def _sample(problem: Problem) -> list[tuple[int, int]]:
    """``(request, row)`` of the rows to look at, in order."""
    q_lens = problem.batch.q_lens
    bounds = np.append(0, q_lens.cumsum())
    ends = np.stack([bounds[:-1], bounds[1:] - 1], axis=1)[q_lens > 0].reshape(-1)
    ends = np.unique(ends)
    if len(ends) > MOST_ROWS:
        ends = ends[np.linspace(0, len(ends) - 1, MOST_ROWS).astype(int)]
    between = np.random.default_rng(0).permutation(bounds[-1])[: MOST_ROWS - len(ends)]
    rows = np.unique(np.append(ends, between))
    requests = bounds.searchsorted(rows, side="right") - 1
    return list(zip(requests.tolist(), (rows - bounds[requests]).tolist(), strict=True))


def _row(problem: Problem, place: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
    """One row ``[num_qo_heads, head_dim_vo]``; causality leaves it the keys up to its own."""
    request, row = place
    q_len, kv_len = int(problem.batch.q_lens[request]), int(problem.batch.kv_lens[request])
    seen = max(kv_len - q_len + row + 1, 0)
    at = int(problem.batch.q_starts[request]) + row
    out, _ = dense_attention(
        problem.q[at : at + 1],
        problem.keys[request][:seen],
        problem.values[request][:seen],
        causal=True,
        sm_scale=problem.sm_scale,
        rules=problem.rules[request] if problem.rules else Rules(),
        dtype=dtype,
    )
    return out[0]


def _relative_error(got: torch.Tensor, exact: torch.Tensor) -> float:
    """The largest relative error of any ``[..., dim]``; exact zeros must be zeros."""
    error, size = ((t.double().square().mean(dim=-1).sqrt()) for t in (got.double() - exact, exact))
    relative = torch.where(error == 0, 0.0, error / size)
    return float(relative.nan_to_num(nan=torch.inf).max()) if relative.numel() else 0.0
