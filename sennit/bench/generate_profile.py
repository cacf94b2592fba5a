"""How the time of a generation divides among a model's linear layers, its attention, its other layers, and the rest."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch

__all__ = ["Part", "TimeParts", "timed_parts"]


class Part(Enum):
    """Where time goes; each part without those inside it."""

    LINEAR = "linear layers"
    ATTENTION = "attention (without its linear layers)"
    OTHER = "other layers"
    HOST = "outside the model"


@dataclass(frozen=True)
class TimeParts:
    """Seconds of each part of a generation."""

    seconds: dict[Part, float]

    def share(self, part: Part) -> float:
        """Of the whole, from 0 to 1."""
        return self.seconds[part] / sum(self.seconds.values())

    @property
    def outside_linear(self) -> float:
        """Share of everything but the linear layers."""
        return 1 - self.share(Part.LINEAR)


@contextmanager
def timed_parts(model: torch.nn.Module) -> Iterator[TimeParts]:
    """Measure what runs inside the block; the result is complete when it ends.

    Hooks before and after every linear layer, every attention layer and the model add a few microseconds to each.

    >>> model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU())
    >>> with timed_parts(model) as parts:
    ...     output = model(torch.zeros(1, 8))
    >>> 0 < parts.outside_linear < 1
    True
    """
    clock = _Clock()
    handles = []
    try:
        for module in model.modules():
            part = Part.OTHER if module is model else _part_of(module)
            if part is not None:
                handles.append(module.register_forward_pre_hook(clock.enter(part)))
                handles.append(module.register_forward_hook(clock.leave))
        clock.charge()
        clock.seconds.update(dict.fromkeys(Part, 0.0))
        yield TimeParts(clock.seconds)
        clock.charge()
    finally:
        for handle in handles:
            handle.remove()


def _part_of(module: torch.nn.Module) -> Part | None:
    if isinstance(module, torch.nn.Linear):
        return Part.LINEAR
    return Part.ATTENTION if type(module).__name__.endswith("Attention") else None


class _Clock:
    """Charges the time between two events to the innermost part that was running."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(Part, 0.0)
        self._running = [Part.HOST]
        self._since = time.perf_counter()

    def charge(self) -> None:
        now = time.perf_counter()
        self.seconds[self._running[-1]] += now - self._since
        self._since = now

    def enter(self, part: Part) -> Any:
        def hook(*_: object) -> None:
            self.charge()
            self._running.append(part)

        return hook

    def leave(self, *_: object) -> None:
        self.charge()
        self._running.pop()
