"""Which keys and values a segment reads, where its new ones go, and which of them each row sees."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from sennit.backends.base import Append, Attend
from sennit.plan.tensors import Header
from sennit.spec import AttentionSpec

__all__ = ["Segment", "SegmentTree", "new_slots", "read_keys", "read_segment"]


@dataclass(frozen=True)
class SegmentTree:
    """The tree of a segment's last keys: depths ``[nodes]``, and what its rows see of it, bool ``[q_len, nodes]``."""

    depths: torch.Tensor
    sees: torch.Tensor


@dataclass(frozen=True)
class Segment:
    """One segment as Python numbers; ``exact_len`` is a 0-dim tensor where only the device knows it."""

    request: int
    q_start: int
    q_len: int
    kv_start: int
    kv_len: int
    key_offset: int
    causal: bool
    mask_at: int
    exact_len: int | torch.Tensor
    tree: SegmentTree | None

    def row_positions(self, tokens: torch.Tensor) -> torch.Tensor:
        """Position of each token."""
        if self.tree is None:
            return self.exact_len - self.q_len + tokens
        nodes = len(self.tree.depths)
        return self.exact_len - nodes + self.tree.depths[nodes - self.q_len + tokens]

    def key_positions(self, keys: torch.Tensor) -> torch.Tensor:
        """Position of each key."""
        if self.tree is None:
            return self.key_offset + keys
        committed, nodes = self.exact_len - len(self.tree.depths), len(self.tree.depths)
        depths = self.tree.depths[(keys - committed).clamp(0, nodes - 1)]
        return torch.where(keys < committed, keys, committed + depths)

    def visible(self, tokens: torch.Tensor, keys: torch.Tensor, row_positions: torch.Tensor) -> torch.Tensor:
        """bool ``[tokens, keys]``: what there is and, of that, what causality or the tree lets each token see."""
        seen = (keys < self.exact_len).expand(len(tokens), -1)
        if self.tree is not None:
            committed, nodes = self.exact_len - len(self.tree.depths), len(self.tree.depths)
            pending = self.tree.sees[tokens][:, (keys - committed).clamp(0, nodes - 1)]
            return seen & ((keys < committed) | pending)
        return seen & (self.key_offset + keys <= row_positions) if self.causal else seen

    def _window_start(self, first_token: int, window_left: int) -> Any:  # what exact_len is
        oldest = first_token if self.tree is None else self.q_len - len(self.tree.depths)
        return self.exact_len - self.q_len + oldest - window_left

    def there(self, keys: torch.Tensor, spec: AttentionSpec) -> torch.Tensor:
        """bool ``[keys]``: those that exist and, where only the device knows lengths, lie behind no row's window."""
        there: torch.Tensor = keys < self.exact_len
        if spec.window_left is None or isinstance(self.exact_len, int):
            return there
        visible: torch.Tensor = (keys >= self._window_start(0, spec.window_left)) | (keys < spec.num_sink_tokens)
        return there & visible

    def keys(self, spec: AttentionSpec, first_token: int, last_token: int, device: torch.device) -> torch.Tensor:
        """int64 ``[keys]``: at least every key that these rows see; those behind a window are left out."""
        first, sinks = 0, 0
        if spec.window_left is not None and isinstance(self.exact_len, int):
            first = min(max(self._window_start(first_token, spec.window_left), 0), self.kv_len)
            sinks = min(spec.num_sink_tokens, first)
        last = self.kv_len
        if self.causal and isinstance(self.exact_len, int):
            last = min(max(self.exact_len - self.q_len + last_token + 1, first), self.kv_len)
        return torch.cat([torch.arange(sinks, device=device), torch.arange(first, last, device=device)])


def read_segment(launch: Attend | Append, index: int) -> Segment:
    """Segment ``index`` of a plan."""
    request, q_start, q_len, kv_start, kv_len, key_offset, causal, tree_len, tree_at, mask_at, *_ = (
        launch.arrays.segments[index].tolist()
    )
    tree = None
    if tree_len:
        start = launch.arrays[Header.TREES_AT] + tree_at
        words = launch.plan[start : start + tree_len + q_len * -(-tree_len // 32)].long()
        node = torch.arange(tree_len, device=words.device)
        rows = words[tree_len:].view(q_len, -(-tree_len // 32))
        tree = SegmentTree(words[:tree_len], (rows[:, node // 32] >> (node % 32) & 1).bool())
    exact = kv_len if launch.kv_lens is None else launch.kv_lens[request].clamp(0, kv_len)
    return Segment(
        request, q_start, q_len, kv_start, kv_len, key_offset, bool(causal), mask_at, exact, tree
    )  # fmt: skip


def read_keys(
    launch: Attend, segment: Segment, keys: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Some keys of a segment and their values as ``[num_kv_heads, keys, dim]`` of ``dtype``.

    Keys past an exact length, and keys behind a window, are zeroed and not read: their pages may be gone, slots that
    nobody owns may hold NaN, and zero times NaN is NaN.
    """
    there = segment.there(keys, launch.spec)
    if launch.page_size is None:
        k, v = launch.k[segment.kv_start + keys], launch.v[segment.kv_start + keys]
    else:
        pages = launch.page_table[segment.kv_start + keys // launch.page_size].long()
        there &= pages >= 0
        pages = pages.masked_fill(~there, 0)  # any page serves
        k, v = launch.k[pages, keys % launch.page_size], launch.v[pages, keys % launch.page_size]
    if isinstance(segment.exact_len, torch.Tensor) or launch.spec.window_left is not None:
        absent = ~there[:, None, None]
        k, v = k.masked_fill(absent, 0), v.masked_fill(absent, 0)
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
