"""How many threads PyTorch has while right answers are computed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

__all__ = ["one_thread"]


@contextmanager
def one_thread() -> Iterator[None]:
    """One thread for problems and dense answers, whose tensors are so small that more only wait for each other.

    What is tested keeps the threads that it would have anywhere else.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
