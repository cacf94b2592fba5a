"""How much memory a cache may take: sizes as people write them, and what is free."""

from __future__ import annotations

import os
import re
from pathlib import Path

import torch

from sennit.cache.demand import is_integer
from sennit.errors import InvalidInput

__all__ = ["MAX_BYTES", "byte_budget", "format_bytes", "free_bytes", "parse_bytes"]

UNITS = {
    "b": 1,
    **{f"{prefix}b": 1000**power for power, prefix in enumerate("kmgt", start=1)},
    **{f"{prefix}ib": 1024**power for power, prefix in enumerate("kmgt", start=1)},
}
MAX_BYTES = 2**63 - 1  # of one allocation
SIZE = re.compile(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([a-z]+)\s*", re.IGNORECASE)


def parse_bytes(text: str) -> int:
    """Read a size with its unit: B, KB, MB, GB, TB (powers of 1000), KiB, MiB, GiB, TiB (powers of 1024), in any case.

    Raises:
        InvalidInput: no number, or no unit of these, or more than any machine has.

    >>> parse_bytes("4GiB"), parse_bytes("1.5 mb")
    (4294967296, 1500000)
    """
    match = SIZE.fullmatch(text)
    unit = UNITS.get(match[2].lower()) if match else None
    if match is None or unit is None:
        raise InvalidInput("memory", expected="a number and a unit, as '4GiB' or '500MB'", got=repr(text))
    size = float(match[1]) * unit
    if size > MAX_BYTES:
        raise _too_much(text)
    return int(size)


def format_bytes(count: int) -> str:
    """Write a size in the largest binary unit that leaves at least 1.

    >>> format_bytes(4 * 2**30), format_bytes(1536), format_bytes(12)
    ('4.00 GiB', '1.50 KiB', '12 B')
    """
    for power, unit in ((4, "TiB"), (3, "GiB"), (2, "MiB"), (1, "KiB")):
        if count >= 1024**power:
            return f"{count / 1024**power:.2f} {unit}"
    return f"{count} B"


def free_bytes(device: torch.device) -> int:
    """Memory free on ``device`` now: a GPU's as its driver says, the host's without swapping."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        for line in meminfo.read_text().splitlines():
            name, _, value = line.partition(":")
            if name == "MemAvailable":
                return int(value.split()[0]) * 1024
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def byte_budget(memory: object, device: torch.device) -> int:
    """Bytes that ``memory`` stands for: a size as text, bytes as an integer, or a fraction of what is free.

    Raises:
        InvalidInput: text without a known unit, a number that is not positive or more than any machine has, or a
            fraction above 1.

    >>> byte_budget("64 KiB", torch.device("cpu")), byte_budget(4096, torch.device("cpu"))
    (65536, 4096)
    """
    if isinstance(memory, str):
        return parse_bytes(memory)
    if isinstance(memory, float) and 0 < memory <= 1:
        return int(memory * free_bytes(device))
    if is_integer(memory) and memory > 0:
        if memory > MAX_BYTES:
            raise _too_much(memory)
        return int(memory)
    raise InvalidInput(
        "memory", expected="a size as '4GiB', a positive number of bytes, or a fraction in (0, 1] of what is free",
        got=repr(memory), hint="1.0 is all that is free, 1 is one byte",
    )  # fmt: skip


def _too_much(memory: object) -> InvalidInput:
    return InvalidInput(
        "memory", expected=f"at most {format_bytes(MAX_BYTES)}", got=repr(memory), hint="ask for less, as '4GiB'"
    )
