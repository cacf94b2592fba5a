"""When a result is right: its error against float64 is at most twice that of plain PyTorch in the same dtype."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from sennit.check.problems import Problem

__all__ = ["Comparison", "compare"]


@dataclass(frozen=True)
class Comparison:
    """Largest errors of a result, and the largest allowed."""

    out_error: float
    out_allowed: float
    lse_error: float
    lse_allowed: float

    @property
    def passed(self) -> bool:
        """Whether both errors are allowed, which NaN never is, nor an infinity where there should be none."""
        finite = math.isfinite(self.out_error) and math.isfinite(self.lse_error)
        return finite and self.out_error <= self.out_allowed and self.lse_error <= self.lse_allowed

    def __str__(self) -> str:
        return (
            f"out error {self.out_error:.2e} (allowed {self.out_allowed:.2e}), "
            f"lse error {self.lse_error:.2e} (allowed {self.lse_allowed:.2e})"
        )


def compare(problem: Problem, out: torch.Tensor, lse: torch.Tensor) -> Comparison:
    """Compare ``out [rows, heads, dim]`` and ``lse [rows, heads]`` with the dense float64 results of a problem."""
    exact_out, exact_lse = problem.solve()
    plain_out, plain_lse = problem.solve(problem.spec.dtype)
    if not math.isfinite(_error(plain_out, exact_out) + _error(plain_lse, exact_lse)):  # logits overflow the dtype
        plain_out, plain_lse = problem.solve(torch.float32)
    rounding = torch.finfo(problem.spec.dtype).eps * max(1.0, _largest(exact_out))
    # Rounding a logit once, in the precision that sums are kept in, moves weights and outputs by that many eps.
    kept = torch.finfo(torch.promote_types(problem.spec.dtype, torch.float32)).eps
    rounding += kept * _largest(exact_lse) * _largest(exact_out)
    if problem.spec.dtype == torch.float64:
        rounding *= problem.spec.head_dim_qk  # the oracle has no digits to spare: it rounds a dot product as well
    # LSE is float32 whatever the dtype of the logits.
    lse_rounding = max(torch.finfo(torch.float32).eps * 8, torch.finfo(problem.spec.dtype).eps / 64)
    return Comparison(
        out_error=_error(out, exact_out),
        out_allowed=2 * _error(plain_out, exact_out) + rounding,
        lse_error=_error(lse, exact_lse),
        lse_allowed=2 * _error(plain_lse, exact_lse) + lse_rounding * max(1.0, _largest(exact_lse)),
    )


def _error(got: torch.Tensor, exact: torch.Tensor) -> float:
    """Largest absolute difference; infinities must be equal, and NaN is an infinite error."""
    difference = (got.double() - exact).abs()
    difference = torch.where(got.double() == exact, 0.0, difference)
    return float(difference.nan_to_num(nan=torch.inf).max()) if difference.numel() else 0.0


def _largest(tensor: torch.Tensor) -> float:
    finite = tensor[torch.isfinite(tensor)]
    return float(finite.abs().max()) if finite.numel() else 0.0
