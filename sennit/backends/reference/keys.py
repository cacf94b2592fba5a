"""Which keys and values a segment reads, where its new ones go, and which of them each row sees."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sennit.backends.base import Append, Attend

__all__ = ["Segment", "new_slots", "read_keys", "read_segment"]


@dataclass(frozen=True)
class Segment:
    """One segment as Python numbers; ``exact_len`` is a 0-dim tensor where only the device knows it."""

    q_start: int
    q_len: int
    kv_start: int
    kv_len: int
    key_offset: int
    causal: bool
    exact_len: int | torch.Tensor

    def visible(self, tokens: torch.Tensor, key_start: int, key_end: int) -> torch.Tensor:
        """bool ``[tokens, keys]``: key ``j`` is visible iff ``j < kv_len`` and, if causal, ``j <= p``."""
        keys = torch.arange(key_start, key_end, device=tokens.device)
        position = self.exact_len - self.q_len + tokens
        seen = (keys < self.exact_len).expand(len(tokens), -1)
        if self.causal:
            seen = seen & (self.key_offset + keys <= position.unsqueeze(1))
        return seen


def read_segment(launch: Attend | Append, index: int) -> Segment:
    """Segment ``index`` of a plan."""
    request, q_start, q_len, kv_start, kv_len, key_offset, causal, _ = launch.arrays.segments[index].tolist()
    exact = kv_len if launch.kv_lens is None else launch.kv_lens[request]
    return Segment(q_start, q_len, kv_start, kv_len, key_offset, bool(causal), exact)


def read_keys(
    launch: Attend, segment: Segment, key_start: int, key_end: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values ``key_start : key_end`` of a segment as ``[num_kv_heads, keys, dim]`` of ``dtype``.

    Keys past the exact length are zeroed, since slots that nobody owns may hold NaN and zero times NaN is NaN.
    """
    if launch.page_size is None:
        rows = slice(segment.kv_start + key_start, segment.kv_start + key_end)
        k, v = launch.k[rows], launch.v[rows]
    else:
        first, last = key_start // launch.page_size, -(-key_end // launch.page_size)
        pages = launch.page_table[segment.kv_start + first : segment.kv_start + last].long()
        if isinstance(segment.exact_len, torch.Tensor):
            # Entries past the exact length may hold anything; any page serves, since its keys are zeroed below.
            first_keys = torch.arange(first, last, device=pages.device) * launch.page_size
            pages = pages.masked_fill(first_keys >= segment.exact_len, 0)
        keys = slice(key_start - first * launch.page_size, key_end - first * launch.page_size)
        k, v = launch.k[pages].flatten(0, 1)[keys], launch.v[pages].flatten(0, 1)[keys]
    if isinstance(segment.exact_len, torch.Tensor):
        beyond = (torch.arange(key_start, key_end, device=k.device) >= segment.exact_len)[:, None, None]
        k, v = k.masked_fill(beyond, 0), v.masked_fill(beyond, 0)
    return k.transpose(0, 1).to(dtype), v.transpose(0, 1).to(dtype)


def new_slots(launch: Append, segment: Segment) -> torch.Tensor:
    """Slot ``page * page_size + offset`` of each new token of a segment, int64 ``[q_len]``; -1: not stored."""
    table = launch.page_table
    position = segment.exact_len - segment.q_len + torch.arange(segment.q_len, device=table.device)
    if launch.slots is not None:
        slots = launch.slots[segment.q_start : segment.q_start + segment.q_len]
        return torch.where(position >= 0, slots, -1)
    if not len(table):
        return torch.full_like(position, -1)
    # A row without a position may belong to a request without entries, at the end of the table.
    entry = (segment.kv_start + position.clamp(min=0) // launch.page_size).clamp(max=len(table) - 1)
    slots = table[entry].long() * launch.page_size + position % launch.page_size
    return torch.where(position >= 0, slots, -1)
