"""Attention on CPUs in C++, compiled when it is first needed."""

from __future__ import annotations

from sennit.backends.cpu.backend import CpuBackend, last_worker_times
from sennit.backends.cpu.libraries import warm_sources

__all__ = ["BACKEND", "last_worker_times", "warm_sources"]

BACKEND = CpuBackend()
