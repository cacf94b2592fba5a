"""Named batches to measure, and the layer that each is for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

import torch

from sennit.bench.tensors import make_tensors
from sennit.check.functions import Functions
from sennit.check.problems import Problem
from sennit.errors import InvalidInput
from sennit.plan.grammar import parse_lengths
from sennit.pools import KVLayout
from sennit.spec import AttentionSpec

__all__ = ["CPU_WORKLOADS", "GPU_WORKLOADS", "Workload", "choose_workloads", "make_workload_problem"]

HEADS = {"num_qo_heads": 32, "num_kv_heads": 8, "head_dim": 128}
HALF = {"num_qo_heads": 16, "num_kv_heads": 4, "head_dim": 128}
MOST_CACHE_BYTES = 48 << 30  # of a mix in the sweep
MLA = {"num_qo_heads": 128, "num_kv_heads": 1, "head_dim_qk": 576, "head_dim_vo": 512, "latent": True}


@dataclass(frozen=True)
class Workload:
    """A batch to measure.

    Attributes:
        name: what it is asked for by.
        batch: the batch, as people write it.
        heads: heads and dimensions of the layer, as :class:`sennit.AttentionSpec` takes them.
        masks: further fields of the spec.
        score: a user's score function, with what it closes over.
        usual: whether it is measured when nothing is asked for.
    """

    name: str
    batch: str
    heads: Mapping[str, Any] = field(default_factory=lambda: HEADS)
    masks: Mapping[str, Any] = field(default_factory=dict)
    score: Functions | None = None
    usual: bool = True

    @property
    def lengths(self) -> tuple[list[int], list[int]]:
        """``(q_lens, kv_lens)``."""
        return parse_lengths(self.batch)

    @property
    def plain(self) -> Workload | None:
        """The same without masks and function, where there are some: what their cost is measured against."""
        if not self.masks and self.score is None:
            return None
        return Workload(f"{self.name}, plain causal", self.batch, self.heads)


def _distance_bias(num_heads: int) -> Functions:
    """ALiBi (arXiv:2108.12409) as a user's function that closes over a tensor of slopes."""
    slopes = 2.0 ** (-8.0 * torch.arange(1, num_heads + 1) / num_heads)

    def distance_bias(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score + slopes[h] * (kv_idx - q_idx)

    return Functions(score_mod=distance_bias, captures={"slopes": slopes})


CPU_WORKLOADS = (
    Workload("decode-8k", "8*1@8192"),
    Workload("decode-2k", "8*1@2048"),
    Workload("prefill-1k", "1024@1024"),
    Workload("prefill-4k", "4096@4096"),
    Workload("mixed", "512@2048 + 8*1@2048"),
    Workload("skewed", "1@32768 + 15*1@512"),
    Workload("mla", "8*1@4096", heads=MLA),
    Workload("window", "2048@2048", masks={"window_left": 1023}),
    Workload("score-mod", "2048@2048", score=_distance_bias(32)),
)


def _sweep() -> Iterator[Workload]:
    """Sixty mixes of a chunk and decodes of one context: lengths and counts that every kind of layer meets evenly."""
    chunks, batches = (512, 1024, 2048, 4096), (16, 64, 128, 256)
    for qo_heads, kv_heads in ((32, 8), (16, 4), (32, 32), (64, 4)):
        heads = {"num_qo_heads": qo_heads, "num_kv_heads": kv_heads, "head_dim": 128}
        for i, context in enumerate((4096, 8192, 12288, 16384, 20480)):
            for j in range(3):
                chunk, batch = chunks[(i + j) % 4], batches[(2 * i + j) % 4]
                if batch * context * kv_heads * 512 > MOST_CACHE_BYTES:
                    batch = max(b for b in batches if b * context * kv_heads * 512 <= MOST_CACHE_BYTES)
                name = f"sweep-{qo_heads}x{kv_heads}-{chunk}-{context}-{batch}"
                yield Workload(name, f"{chunk}@{context} + {batch}*1@{context}", heads=heads, usual=False)


GPU_WORKLOADS = (
    Workload("decode-8k", "64*1@8192"),
    Workload("decode-2k", "128*1@2048"),
    Workload("decode-1k", "8*1@1024"),
    Workload("skewed", "1@131072 + 63*1@1024"),
    Workload("speculative", "64*4@4096"),
    Workload("prefill-8k", "8192@8192"),
    Workload("prefill-2k", "4*2048@2048"),
    Workload("chunk", "2048@16384"),
    Workload("mixed-512", "512@512 + 128*1@2048"),
    Workload("mixed-2k", "2048@2048 + 128*1@2048"),
    Workload("mixed-4k", "4096@4096 + 128*1@8192"),
    Workload("mixed-16k", "2048@16384 + 64*1@16384"),
    # Figure 1 of the paper on POD-Attention (arXiv:2410.18038): one of two GPUs that share the heads of Llama-3-8B.
    Workload("pod-c0", "1024@12288 + 80*1@12288", heads=HALF),
    Workload("pod-c1", "12288@12288 + 220*1@12288", heads=HALF),
    Workload("pod-c2", "16384@16384 + 250*1@12288", heads=HALF),
    Workload("mla-8k", "64*1@8192", heads=MLA),
    Workload("mla-4k-16", "128*1@4096", heads=MLA | {"num_qo_heads": 16}),
    Workload("mla-4k", "16*1@4096", heads=MLA),
    *_sweep(),
)


def choose_workloads(wanted: Sequence[str], named: Sequence[Workload] = CPU_WORKLOADS) -> list[Workload]:
    """Workloads by name, by a pattern of names, or by a batch of the caller's own; the usual ones for none.

    Raises:
        InvalidInput: a text is neither, or a batch has no visible key.

    >>> [workload.name for workload in choose_workloads(["decode-*", "3*1@100"])]
    ['decode-8k', 'decode-2k', '3*1@100']
    """
    chosen = {} if wanted else {workload.name: workload for workload in named if workload.usual}
    for text in wanted:
        found = [_own(text)] if "@" in text else [w for w in named if fnmatchcase(w.name, text)]
        if not found:
            names = ", ".join(dict.fromkeys(w.name if w.usual else "sweep-*" for w in named))
            expected = f"one of {names}, or a batch such as 8*1@8192"
            raise InvalidInput("workload", expected=expected, got=repr(text), hint=_whose(text))
        chosen |= {workload.name: workload for workload in found}
    return list(chosen.values())


def _whose(text: str) -> str:
    """What kind of device has workloads of that name, if one has."""
    for kind, device, workloads in (("CPUs", "cpu", CPU_WORKLOADS), ("GPUs", "cuda", GPU_WORKLOADS)):
        if any(fnmatchcase(workload.name, text) for workload in workloads):
            return f"that is for {kind}: --device {device}"
    return ""


def _own(batch: str) -> Workload:
    q_lens, kv_lens = parse_lengths(batch)
    if not any(q_len and kv_len for q_len, kv_len in zip(q_lens, kv_lens, strict=True)):
        raise InvalidInput("workload", expected="a batch in which some row sees a key", got=repr(batch))
    return Workload(batch, batch)


def make_workload_problem(
    workload: Workload, dtype: torch.dtype, kv_layout: KVLayout, page_size: int, device: torch.device
) -> Problem:
    """Its tensors: see :func:`make_tensors`.

    Raises:
        InvalidInput: ``page_size`` or a length is out of range.
    """
    q_lens, kv_lens = workload.lengths
    return make_tensors(
        AttentionSpec(dtype=dtype, **workload.heads, **workload.masks),
        q_lens,
        kv_lens,
        page_size=page_size,
        kv_layout=kv_layout,
        functions=workload.score,
        device=device,
    )
