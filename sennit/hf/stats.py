"""What a batcher has done and what it holds, as numbers."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["BatcherStats"]


@dataclass(frozen=True)
class BatcherStats:
    """What a batcher has done so far, and what it holds now.

    Attributes:
        steps: packed steps run.
        tokens_computed: tokens that went through the model; more than once where preemption made it necessary.
        tokens_generated: new tokens.
        prompts_chunked: times that a prompt took more than one step.
        forks: requests that began with pages of another.
        tokens_shared: tokens that they did not have to compute.
        preemptions: times that a running request was put back because memory ran out.
        evictions: finished sequences given up because memory ran out.
        running: requests in the cache.
        waiting: requests in the queue.
        retained: finished sequences that are kept for their prefixes.
    """

    steps: int
    tokens_computed: int
    tokens_generated: int
    prompts_chunked: int
    forks: int
    tokens_shared: int
    preemptions: int
    evictions: int
    running: int
    waiting: int
    retained: int
