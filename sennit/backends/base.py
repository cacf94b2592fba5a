"""What every backend implements, and the arguments of its launches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

import torch

from sennit.plan.cost import KernelConfig
from sennit.plan.tensors import PlanArrays
from sennit.spec import AttentionSpec

__all__ = ["Append", "Attend", "Backend", "MeasuresItems", "Support"]


@dataclass(frozen=True)
class Support:
    """Whether a backend takes something, and why not.

    Attributes:
        accepted: whether it does.
        reason: why not.
        mendable: whether it would, if the machine had what the reason names; falling back then deserves a word.
    """

    accepted: bool
    reason: str = ""
    mendable: bool = False

    @classmethod
    def yes(cls) -> Support:
        """Accepted."""
        return cls(True)

    @classmethod
    def no(cls, reason: str) -> Support:
        """Rejected, for a reason that reads well after the backend's name and a colon."""
        return cls(False, reason)

    @classmethod
    def not_yet(cls, reason: str) -> Support:
        """Rejected as long as the machine is as the reason says."""
        return cls(False, reason, mendable=True)


class Attend(NamedTuple):
    """Arguments of one attention launch. Pools are NHD views with any strides but a contiguous last dimension."""

    spec: AttentionSpec
    config: KernelConfig
    page_size: int | None  # None: k and v are packed
    arrays: PlanArrays  # the plan on the host
    plan: torch.Tensor  # int32 [words], the same on the device
    page_table: torch.Tensor  # int32 [entries] on the device
    kv_lens: torch.Tensor | None  # int32 [requests] exact lengths, where the plan's are upper bounds
    q: torch.Tensor  # [rows, num_qo_heads, head_dim_qk]
    k: torch.Tensor  # [pages, page_size, num_kv_heads, head_dim_qk], or packed [key rows, num_kv_heads, head_dim_qk]
    v: torch.Tensor  # the same with head_dim_vo; a view of k where the spec is latent
    out: torch.Tensor  # [rows, num_qo_heads, head_dim_vo]; rows that no segment covers are not written
    lse: torch.Tensor | None  # float32 [rows, num_qo_heads], natural log
    sm_scale: float
    packed_mask: torch.Tensor | None  # uint8 [bytes], see plan/mask.py
    sinks: torch.Tensor | None  # float32 [num_qo_heads], where the spec has learned sinks
    alibi_slopes: torch.Tensor | None  # float32 [num_qo_heads], where the spec has ALiBi
    captures: Mapping[str, torch.Tensor]  # what the spec's functions close over


class Append(NamedTuple):
    """Arguments of one append: new keys and values into their slots."""

    spec: AttentionSpec
    page_size: int
    arrays: PlanArrays  # the plan on the host
    plan: torch.Tensor  # int32 [words], the same on the device
    page_table: torch.Tensor  # int32 [entries] on the device
    kv_lens: torch.Tensor | None  # int32 [requests] exact lengths
    slots: torch.Tensor | None  # int64 [rows] explicit slots; -1 skips a row
    k: torch.Tensor  # [rows, num_kv_heads, head_dim_qk]
    v: torch.Tensor | None  # [rows, num_kv_heads, head_dim_vo]; None where the spec is latent
    k_pages: torch.Tensor  # [pages, page_size, num_kv_heads, head_dim_qk]
    v_pages: torch.Tensor | None  # the same with head_dim_vo; None where the spec is latent


@runtime_checkable
class MeasuresItems(Protocol):
    """What a backend is too if it can tell when its work items ran."""

    def measure(self, launch: Attend) -> torch.Tensor:
        """Like ``attend``, and when each item began and ended: int64 ``[items, 2]``, nanoseconds of one clock.

        The clock begins anywhere. A kernel of its own does it: ``attend`` pays nothing for that it exists.
        """
        ...


class Backend(Protocol):
    """One way to compute attention. Stateless: everything is in the arguments."""

    @property
    def name(self) -> str:
        """The name by which ``backend=`` asks for it."""
        ...

    def available(self, device: torch.device) -> Support:
        """Whether it can run on a device at all, as this machine is."""
        ...

    def supports(self, spec: AttentionSpec, features: frozenset[str], device: torch.device) -> Support:
        """Whether it can do what a spec and a plan's features (``plan_features``) ask."""
        ...

    def configs(self, spec: AttentionSpec, device: torch.device) -> Sequence[KernelConfig]:
        """Kernel configurations for a spec, the preferred one first."""
        ...

    def attend(self, launch: Attend) -> None:
        """Write ``launch.out`` and ``launch.lse`` for every row that a segment covers, merges included."""
        ...

    def append(self, launch: Append) -> None:
        """Write new keys and values to their slots; rows with a negative position or slot are skipped."""
        ...

    def merge(self, outs: torch.Tensor, lses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Merge ``[states, rows, heads, dim]`` and ``[states, rows, heads]`` along the states by log-sum-exp."""
        ...

    def copy_pages(self, pages: torch.Tensor, source: torch.Tensor, target: torch.Tensor) -> None:
        """Copy whole pages ``pages[source[i]]`` to ``pages[target[i]]``; no page is both a source and a target."""
        ...
