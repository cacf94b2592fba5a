"""The small grammar in which people write batches: ``2048@16384 + 64*1@16384``."""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np

from sennit.errors import InvalidInput
from sennit.plan.integers import INT32_MAX

__all__ = ["format_lengths", "parse_lengths"]

TERM = re.compile(r"(?:(\d+)\*)?(\d+)@(\d+)")
EXAMPLE = "write terms like 2048@16384 (2048 new tokens of 16384 visible) or 64*1@8192, joined by +"


def parse_lengths(text: str) -> tuple[list[int], list[int]]:
    """Read a batch: ``count*q_len@kv_len`` terms joined by ``+``; an empty text is an empty batch.

    Returns:
        ``(q_lens, kv_lens)``, one entry a request.

    Raises:
        InvalidInput: a term is not of that form, or a number is too large; it is quoted.

    >>> parse_lengths("5@9 + 2*1@4")
    ([5, 1, 1], [9, 4, 4])
    """
    q_lens: list[int] = []
    kv_lens: list[int] = []
    for term in text.split("+") if text.strip() else []:
        match = TERM.fullmatch("".join(term.split()))
        if match is None:
            raise InvalidInput("batch", expected="terms count*q_len@kv_len", got=repr(term.strip()), hint=EXAMPLE)
        count, q_len, kv_len = int(match[1] or 1), int(match[2]), int(match[3])
        if max(count, q_len, kv_len) > INT32_MAX:
            raise InvalidInput("batch", expected=f"numbers of at most {INT32_MAX}", got=repr(term.strip()))
        q_lens += [q_len] * count
        kv_lens += [kv_len] * count
    return q_lens, kv_lens


def format_lengths(q_lens: Sequence[int], kv_lens: Sequence[int], *, limit: int = 12) -> str:
    """Write a batch, with equal neighbours counted together and at most ``limit`` terms.

    >>> format_lengths([5, 1, 1], [9, 4, 4])
    '5@9 + 2*1@4'
    """
    pairs = np.stack([np.asarray(q_lens, np.int64), np.asarray(kv_lens, np.int64)], axis=1).reshape(-1, 2)
    if not len(pairs):
        return "(empty)"
    starts = np.flatnonzero(np.append(True, (pairs[1:] != pairs[:-1]).any(axis=1)))
    counts = np.diff(np.append(starts, len(pairs)))
    terms = [
        f"{count}*{q_len}@{kv_len}" if count > 1 else f"{q_len}@{kv_len}"
        for count, (q_len, kv_len) in zip(counts[:limit], pairs[starts[:limit]], strict=True)
    ]
    left_out = len(pairs) - int(counts[:limit].sum())
    return " + ".join(terms) + (f" + {left_out} more" if left_out else "")
