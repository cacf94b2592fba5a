"""The machine that measurements are of: its processor, its versions, and what else it does meanwhile."""

from __future__ import annotations

import os
import platform
import shlex
import sys
import time
from dataclasses import dataclass
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy
import torch

import sennit
from sennit.errors import BuildUnavailable

__all__ = [
    "Activity",
    "Observer",
    "cpu_features",
    "cpu_name",
    "describe_host",
    "installed_version",
    "main_memory",
]

# Of the many that /proc/cpuinfo lists: the ones that decide how fast attention can be.
FEATURES = (
    "avx2", "fma", "f16c", "avx512f", "avx512_bf16", "avx512_fp16", "avx512_vnni", "amx_tile", "amx_bf16",
    "asimd", "asimdhp", "bf16", "i8mm", "sve", "sve2",
)  # fmt: skip
OPTIONAL = ("triton", "flashinfer-python")  # packages whose speed is measured, where they are there
MOST_STOLEN = 0.02  # of one processor
MOST_FOREIGN = 0.05


@dataclass(frozen=True)
class Activity:
    """What kept the processors busy while something was measured, beside the measurement.

    Attributes:
        seconds: how long that was.
        load_before, load_after: the load average of one minute; None where the system has none.
        stolen: processors' worth of time that the host gave to other machines; None where it does not say.
        foreign: processors' worth of time that other processes of this machine took; likewise.
    """

    seconds: float
    load_before: float | None
    load_after: float | None
    stolen: float | None
    foreign: float | None

    @property
    def warning(self) -> str:
        """What makes the figures doubtful, or nothing."""
        shares = {"the host took": (self.stolen, MOST_STOLEN), "other processes took": (self.foreign, MOST_FOREIGN)}
        found = [f"{who} {share:.2f}" for who, (share, most) in shares.items() if share is not None and share > most]
        return f"noisy machine: {' and '.join(found)} of {os.cpu_count()} processors" if found else ""


class Observer:
    """Watches the machine from when it is made."""

    def __init__(self) -> None:
        self._start = time.perf_counter()
        self._load = _load_average()
        self._own = time.process_time()
        self._ticks = _processor_ticks()

    def activity(self) -> Activity:
        """What happened until now."""
        seconds = time.perf_counter() - self._start
        stolen = foreign = None
        if self._ticks is not None and (now := _processor_ticks()) is not None:
            busy, stolen = ((after - before) / seconds for before, after in zip(self._ticks, now, strict=True))
            foreign = max(busy - (time.process_time() - self._own) / seconds, 0.0)
        return Activity(seconds, self._load, _load_average(), stolen, foreign)


def _load_average() -> float | None:
    try:
        return os.getloadavg()[0]
    except (AttributeError, OSError):
        return None


def _processor_ticks() -> tuple[float, float] | None:
    """Seconds that all processors have been busy for processes of this system, and taken away by its host."""
    try:
        fields = [int(field) for field in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    except (OSError, ValueError):
        return None
    user, nice, system, _idle, _waiting, interrupts, soft, steal = fields
    ticks = os.sysconf("SC_CLK_TCK")
    return (user + nice + system + interrupts + soft) / ticks, steal / ticks


def describe_host() -> dict[str, Any]:
    """Date, command, hardware and versions, in values that JSON has."""
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "hardware": {
            "cpu": cpu_name(),
            "machine": platform.machine(),
            "processors": os.cpu_count(),
            "threads": torch.get_num_threads(),
            "features": cpu_features(),
            "memory_bytes": main_memory(),
        },
        "versions": {
            "sennit": sennit.__version__,
            "python": f"{platform.python_version()} on {platform.system()}",
            "torch": torch.__version__,
            "numpy": numpy.__version__,
            "compiler": _compiler(),
        }
        | {name: version for name in OPTIONAL if (version := installed_version(name)) is not None},
    }


def cpu_name() -> str:
    """The processor's name, as well as the system knows it."""
    found = _cpu_info("model name")
    return found or platform.processor() or platform.machine()


def cpu_features() -> list[str]:
    """Instruction sets that matter here."""
    flags = (_cpu_info("flags") or _cpu_info("Features")).split()
    return [name for name in FEATURES if name in flags]


def _cpu_info(field: str) -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    return next((value.strip() for name, _, value in (x.partition(":") for x in lines) if name.strip() == field), "")


def main_memory() -> int | None:
    """Bytes of main memory, where the system says."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):
        return None


def installed_version(*names: str) -> str | None:
    """Version of the first of these distributions that is installed."""
    for name in names:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return None


def _compiler() -> str | None:
    from sennit.jit import find_toolchain

    try:
        return find_toolchain().version
    except BuildUnavailable:
        return None
