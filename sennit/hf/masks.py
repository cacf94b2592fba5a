"""The mask function registered in transformers: which keys of a padded batch each query sees, as numbers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
from transformers.masking_utils import (
    causal_mask_function,
    sliding_window_causal_mask_function,
    sliding_window_overlay,
)

from sennit.plan.batch import Batch

__all__ = ["KeyRanges", "key_ranges", "no_mask"]


@dataclass(frozen=True, eq=False)
class KeyRanges:
    """One forward pass's mask: row ``b`` of a padded batch sees its keys ``starts[b] : ends[b]``, causally.

    This is what attention layers of that forward receive in place of a mask tensor (one for those without a window and
    one for those with it), so it also keeps the plans that they share: they live and die with the forward they were
    made for.

    Attributes:
        batch_size: rows of the padded batch.
        q_length: query tokens of each row, padding included.
        kv_length: key columns that attention receives; a static cache has more than are visible.
        q_offset: key column of the first query token; keys that the cache has dropped have no column.
        starts: first key of each row that is not padding.
        ends: one past the last such key.
        window: keys that a query sees at most, the one in its own column and those before it; None: no window.
        masked: a mask was given that hides tokens, or that cannot be read.
        problem: why Sennit cannot express this mask, or empty. Raised by the attention function and not here: a packed
            step brings its own batch and needs no mask.
    """

    batch_size: int
    q_length: int
    kv_length: int
    q_offset: int = 0
    starts: tuple[int, ...] = ()
    ends: tuple[int, ...] = ()
    window: int | None = None
    masked: bool = False
    problem: str = ""
    plans: dict[Any, Any] = field(default_factory=dict, repr=False)

    # transformers makes the masks of a static cache early, passes them as `attention_mask`, and tells prepared masks
    # from padding masks by their dimensions.
    ndim = 4

    @property
    def visible(self) -> int:
        """Key columns that the last query token can see at all."""
        return min(self.q_offset + self.q_length, self.kv_length)

    def requests(self) -> tuple[Batch, list[bool]]:
        """Return the batch over packed rows (``row * q_length`` and ``row * visible``), and whether each is causal.

        ::

            key column   0 ... starts[b] ........ ends[b] ... visible
            query token        q_offset ... split ... q_offset + q_length
                               causal          | sees all of starts[b] : ends[b]

        A row padded on the right gives further requests: the tokens up to its last key are one, and the padding after
        it, which is no key itself but sees every key, or those that the window leaves it, as it does in transformers.
        """
        q_lens, kv_lens, q_starts, kv_starts, causal = [], [], [], [], []
        for row, (start, end) in enumerate(zip(self.starts, self.ends, strict=True)):
            split = min(max(end - self.q_offset, 0), self.q_length)
            parts = [(0, split, start, True)]
            if self.window is None:
                parts.append((split, self.q_length, start, False))
            else:  # a request's last query is at its last key, so here every query is a request with keys of its own
                behind = self.q_offset - self.window + 1
                parts += [(i, i + 1, min(max(start, behind + i), end), False) for i in range(split, self.q_length)]
            for first, last, first_key, is_causal in parts:
                if first < last:
                    q_lens.append(last - first)
                    kv_lens.append(end - first_key)
                    q_starts.append(row * self.q_length + first)
                    kv_starts.append(row * self.visible + first_key)
                    causal.append(is_causal)
        batch = Batch.ragged(
            qo_indptr=_offsets(q_lens), kv_indptr=_offsets(kv_lens), qo_starts=q_starts, kv_starts=kv_starts
        )
        return batch, causal


@lru_cache(maxsize=64)
def no_mask(device: torch.device) -> torch.Tensor:
    """Return the mask by which a packed step says that it has none.

    transformers takes a 4-D mask for a finished one and hands it on. Left to itself it would look for several sequences
    in one row, which costs a transfer from the device, and ask for a mask that nobody reads.
    """
    return torch.ones((1, 1, 1, 1), dtype=torch.bool, device=device)


def key_ranges(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | torch.Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = causal_mask_function,
    attention_mask: torch.Tensor | KeyRanges | None = None,
    **_: Any,
) -> KeyRanges:
    """Return the mask of one forward pass; the mask function that transformers calls for ``sennit``.

    Args:
        batch_size, q_length, kv_length: the padded batch, as attention will receive it.
        q_offset: absolute position of the first query token; kv_offset: of the first key.
        mask_function: transformers' rule of who sees whom; causal attention, with a window or without, can be
            expressed and nothing else.
        attention_mask: bool ``[batch_size, n]``, True where a token is not padding; None: no padding.
    """
    if isinstance(attention_mask, KeyRanges):
        return attention_mask
    sizes = (batch_size, q_length, kv_length)
    known, window = _window(mask_function)
    if not known:
        name = getattr(mask_function, "__qualname__", repr(mask_function)).split(".")[0]
        return KeyRanges(
            *sizes,
            masked=attention_mask is not None,
            problem="only causal masks are supported, with a sliding window or without, and transformers asks for "
            f"`{name}` (bidirectional attention, several sequences packed in one row, or a custom mask)",
        )
    first = int(q_offset) - kv_offset
    visible = min(first + q_length, kv_length)
    if attention_mask is None:
        return KeyRanges(*sizes, first, (0,) * batch_size, (visible,) * batch_size, window)
    if attention_mask.shape[:1] != (batch_size,) or attention_mask.ndim != 2:
        shape = tuple(attention_mask.shape)
        problem = f"expected a padding mask [{batch_size}, length], got shape {shape}"
        return KeyRanges(*sizes, masked=True, problem=problem)
    starts, ends, hole = _runs(attention_mask[:, kv_offset : kv_offset + visible])
    if hole is not None:
        return KeyRanges(
            *sizes,
            masked=True,
            problem=f"row {hole} of attention_mask has padding between tokens; padding may be on the left, on the "
            "right of a prompt, or both",
        )
    masked = any(starts) or min(ends, default=visible) < visible
    return KeyRanges(*sizes, first, starts, ends, window, masked)


def _window(mask_function: Callable[..., Any]) -> tuple[bool, int | None]:
    """Whether a mask function is causal attention and nothing else, and the window that it leaves, if any.

    transformers builds a window as ``and_masks(sliding_window_overlay(W), causal_mask_function)``. What was put into
    these closures is read back; a function that was put together in another way is unknown.
    """
    if mask_function is causal_mask_function:
        return True, None
    overlay, *others = _closed_over(mask_function, sliding_window_causal_mask_function(1), "mask_functions") or [None]
    window: int | None = _closed_over(overlay, sliding_window_overlay(1), "sliding_window")
    return window is not None and others == [causal_mask_function], window


def _closed_over(function: Any, made_alike: Any, name: str) -> Any:
    """What a closure holds under a name; None unless it comes from the same definition as ``made_alike``."""
    code = getattr(function, "__code__", None)
    if code is not made_alike.__code__ or name not in code.co_freevars:
        return None
    return function.__closure__[code.co_freevars.index(name)].cell_contents


def _runs(mask: torch.Tensor) -> tuple[tuple[int, ...], tuple[int, ...], int | None]:
    """Start and end of the only run of True in each row, and the first row that has more than one run."""
    if not mask.shape[1]:
        return (0,) * mask.shape[0], (0,) * mask.shape[0], None
    counts = mask.sum(dim=1)
    starts = mask.to(torch.uint8).argmax(dim=1)
    last = mask.shape[1] - mask.flip(1).to(torch.uint8).argmax(dim=1)
    ends = torch.where(counts > 0, last, starts)
    # One transfer for all three.
    host = torch.stack([starts, ends, counts]).tolist()
    hole = next((row for row, (s, e, n) in enumerate(zip(*host, strict=True)) if e - s != n), None)
    return tuple(host[0]), tuple(host[1]), hole


def _offsets(lengths: list[int]) -> list[int]:
    offsets = [0]
    for length in lengths:
        offsets.append(offsets[-1] + length)
    return offsets
