"""The small grammar in which people write batches: ``2048@16384 + 64*1@16384``."""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np

from sennit.errors import InvalidInput
from sennit.plan.integers import INT32_MAX

__all__ = ["format_lengths", "parse_lengths"]

TERM = re.compile(r"\s*(?:([0-9]+)\s*\*\s*)?([0-9]+)\s*@\s*([0-9]+)\s*")
MAX_REQUESTS = 2**24
EXAMPLE = "write terms like 2048@16384 (2048 new tokens of 16384 visible) or 64*1@8192, joined by +"


def parse_lengths(text: str) -> tuple[list[int], list[int]]:
    """Read a batch: ``count*q_len@kv_len`` terms joined by ``+``; an empty text is an empty batch.

    Spaces may stand around ``+``, ``*`` and ``@``.

    Returns:
        ``(q_lens, kv_lens)``, one entry a request.

    Raises:
        InvalidInput: not a text; a term is not of that form, or a number is too large (it is quoted); or there are
            too many requests.

    >>> parse_lengths("5@9 + 2*1@4")
    ([5, 1, 1], [9, 4, 4])
    """
    if not isinstance(text, str):
        raise InvalidInput("batch", expected="a text", got=type(text).__name__, hint=EXAMPLE)
    q_lens: list[int] = []
    kv_lens: list[int] = []
    for term in text.split("+") if text.strip() else []:
        match = TERM.fullmatch(term)
        if match is None:
            raise InvalidInput("batch", expected="terms count*q_len@kv_len", got=repr(term.strip()), hint=EXAMPLE)
        digits = [number.lstrip("0") or "0" for number in match.groups("1")]
        if max(map(len, digits)) > 10 or max(map(int, digits)) > INT32_MAX:  # Python reads no number of any length
            raise InvalidInput("batch", expected=f"numbers of at most {INT32_MAX}", got=repr(term.strip()))
        count, q_len, kv_len = map(int, digits)
        if len(q_lens) + count > MAX_REQUESTS:
            raise InvalidInput("batch", expected=f"at most {MAX_REQUESTS} requests", got=f"more, at {term.strip()!r}")
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
