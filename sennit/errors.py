"""Every error that Sennit raises: typed, and worded as what was expected, what came, and what to do."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

__all__ = [
    "BackendUnavailable",
    "BuildFailed",
    "BuildUnavailable",
    "CacheCorrupt",
    "CapacityExceeded",
    "FetchFailed",
    "IncompleteStep",
    "InvalidInput",
    "ModelNotFound",
    "OutOfPages",
    "PagesReleased",
    "PlanMismatch",
    "RequestFailed",
    "SennitError",
    "StalePlan",
    "StepClosed",
    "StepOpen",
    "UnknownSequence",
    "UnsupportedFeature",
    "UnsupportedModel",
]


class SennitError(Exception):
    """Base class of every error that Sennit raises on purpose; all can be pickled and copied.

    Python rebuilds an exception by calling its class with its text, so classes with another signature say how.
    """

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else ""


class InvalidInput(SennitError, ValueError):
    """An argument is wrong: the text names it, says what was expected, what came, and what to do.

    Attributes:
        argument: name of the argument, as the caller wrote it.
        expected: what it should have been.
        got: what it was.
        hint: what to do, or empty.

    >>> raise InvalidInput("page_size", expected="a positive integer", got=0, hint="use 16")
    Traceback (most recent call last):
    ...
    sennit.errors.InvalidInput: page_size: expected a positive integer, got 0; use 16
    """

    def __init__(self, argument: str, *, expected: str, got: object, hint: str = "") -> None:
        self.argument, self.expected, self.got, self.hint = argument, expected, got, hint
        super().__init__(f"{argument}: expected {expected}, got {got}" + (f"; {hint}" if hint else ""))

    def __reduce__(self) -> tuple[Any, ...]:
        make = partial(type(self), self.argument, expected=self.expected, got=self.got, hint=self.hint)
        return make, (), self.__dict__


class PlanMismatch(InvalidInput):
    """A tensor given to ``run`` or ``append`` does not fit the plan that came with it."""


class UnsupportedFeature(SennitError, NotImplementedError):
    """Something valid that no chosen backend can do.

    Attributes:
        feature: its name, as the caller wrote it (``"window_left"``, ``"tree"``).
        reason: why not.
    """

    def __init__(self, feature: str, reason: str) -> None:
        self.feature, self.reason = feature, reason
        super().__init__(f"{feature}: {reason}")

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.feature, self.reason), self.__dict__


class BackendUnavailable(SennitError, RuntimeError):
    """No backend, or not the named one, can run here; the text lists the reason for each."""


class BuildUnavailable(SennitError, RuntimeError):
    """Nothing can be compiled here: no compiler, a cache folder that cannot be written, too little disk or memory."""


class BuildFailed(SennitError, RuntimeError):
    """The compiler or linker rejected a source; the text names the file to attach to a report."""


class CapacityExceeded(SennitError, ValueError):
    """A batch does not fit fixed-capacity buffers; nothing has been written."""


class StalePlan(SennitError, RuntimeError):
    """A plan was run after its buffers had been rewritten by a later plan."""


class OutOfPages(SennitError, MemoryError):
    """The cache has too few free pages; nothing has changed.

    Attributes:
        needed: pages that the operation needs.
        free: pages that are free.
        total: pages in the pool.
    """

    def __init__(self, message: str, *, needed: int, free: int, total: int) -> None:
        self.needed, self.free, self.total = needed, free, total
        super().__init__(message)

    def __reduce__(self) -> tuple[Any, ...]:
        make = partial(type(self), str(self), needed=self.needed, free=self.free, total=self.total)
        return make, (), self.__dict__


class PagesReleased(SennitError, ValueError):
    """Tokens are asked for whose pages a window has released; nothing has changed.

    Attributes:
        sequence: the sequence's id.
        length: the length that was asked for.
        shortest: the least length that is possible, and every one from there to the sequence's own is.
    """

    def __init__(self, message: str, *, sequence: int, length: int, shortest: int) -> None:
        self.sequence, self.length, self.shortest = sequence, length, shortest
        super().__init__(message)

    def __reduce__(self) -> tuple[Any, ...]:
        make = partial(type(self), str(self), sequence=self.sequence, length=self.length, shortest=self.shortest)
        return make, (), self.__dict__


class RequestFailed(SennitError, RuntimeError):
    """Some of a batch's requests cannot go on, and the text names them; nothing of the others is lost.

    Attributes:
        problem: what is wrong.
        requests: whose fault it is: ids of a batcher's requests, or indices of the prompts.
    """

    def __init__(self, problem: str, *, requests: Sequence[int] = (), named: str = "request {}") -> None:
        self.problem, self.requests, self.named = problem, tuple(requests), named
        who = ", ".join(named.format(request) for request in requests)
        super().__init__(f"{who}: {problem}" if who else problem)

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(type(self), self.problem, requests=self.requests, named=self.named), (), self.__dict__


class UnknownSequence(SennitError, KeyError):
    """A sequence id that the cache does not hold (never added, or removed)."""


class StepOpen(SennitError, RuntimeError):
    """The cache was asked to change while one of its steps is open."""


class StepClosed(SennitError, RuntimeError):
    """A step was used before it was entered or after it ended."""


class IncompleteStep(SennitError, RuntimeError):
    """A step ended before every layer had attended exactly once; it was rolled back."""


class CacheCorrupt(SennitError, AssertionError):
    """``KVCache.check`` found a broken invariant: a bug in Sennit, or memory written from outside."""


class ModelNotFound(SennitError, FileNotFoundError):
    """A model's folder, weights or tokenizer are not where they were said to be."""


class UnsupportedModel(SennitError, NotImplementedError):
    """A model whose architecture or configuration Sennit has not been tested with."""


class FetchFailed(SennitError, RuntimeError):
    """A download failed or did not match its checksum; nothing was left behind."""
