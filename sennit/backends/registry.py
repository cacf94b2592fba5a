"""Finds backends by name, and explains for each of them why it was or was not chosen."""

from __future__ import annotations

import functools
import importlib
import os
import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import torch

from sennit.backends.base import Backend, Support
from sennit.errors import BackendUnavailable, InvalidInput, UnsupportedFeature
from sennit.spec import AttentionSpec

__all__ = ["Candidate", "candidates", "check_runs", "choose", "load", "names", "unavailable"]

BUILT_IN = {
    "cpu": "sennit.backends.cpu:BACKEND",
    "flashinfer": "sennit.backends.flashinfer:BACKEND",
    "hopper": "sennit.backends.hopper:BACKEND",
    "reference": "sennit.backends.reference:BACKEND",
    "reference-items": "sennit.backends.reference:ITEMS_BACKEND",
    "triton": "sennit.backends.triton:BACKEND",
}
AUTO_ORDER = {"cpu": ("cpu", "reference"), "cuda": ("hopper", "triton", "reference")}
ENTRY_POINTS = "sennit.backends"
SLOWER = "10 to 100 times slower"
PACKAGE = str(Path(__file__).parents[1]) + os.sep


@dataclass(frozen=True)
class Candidate:
    """A backend, and whether it takes what was asked."""

    name: str
    support: Support

    def __str__(self) -> str:
        return f"{self.name}: {'accepted' if self.support.accepted else self.support.reason}"


@functools.cache
def _locations() -> dict[str, str]:
    """Where each backend is: built-in ones, and those of installed packages under the entry point."""
    third_party = {point.name: point.value for point in metadata.entry_points(group=ENTRY_POINTS)}
    return third_party | BUILT_IN


def names() -> tuple[str, ...]:
    """All backends, third parties' included."""
    return tuple(_locations())


@functools.cache
def load(name: str) -> Backend:
    """Import a backend.

    Raises:
        InvalidInput: no backend has that name.
        BackendUnavailable: it cannot be imported here.
    """
    if name not in _locations():
        raise InvalidInput("backend", expected=f'"auto" or one of {", ".join(_locations())}', got=repr(name))
    module, _, attribute = _locations()[name].partition(":")
    try:
        backend: Backend = getattr(importlib.import_module(module), attribute)
    except ImportError as error:
        raise BackendUnavailable(f"backend {name!r} cannot be imported: {error}") from error
    return backend


def candidates(backend: str, device: torch.device) -> tuple[str, ...]:
    """Backends to try, in order, for ``backend=`` on a device."""
    if not isinstance(backend, str):
        raise InvalidInput("backend", expected="a name", got=type(backend).__name__)
    if backend != "auto":
        load(backend)
        return (backend,)
    return AUTO_ORDER.get(device.type, ("reference",))


def examine(name: str, spec: AttentionSpec | None, features: frozenset[str], device: torch.device) -> Candidate:
    """Ask one backend whether it takes a spec (None: anything) and plan features on a device."""
    try:
        found = load(name)
    except BackendUnavailable as error:
        return Candidate(name, Support.no(str(error)))
    support = found.available(device)
    if support.accepted and spec is not None:
        support = found.supports(spec, features, device)
    return Candidate(name, support)


def choose(tried: Sequence[str], spec: AttentionSpec, features: frozenset[str], device: torch.device) -> str:
    """The first of ``tried`` that accepts.

    Raises:
        BackendUnavailable: none can run on the device.
        UnsupportedFeature: one can run here, but none can do what is asked.
    """
    examined: list[Candidate] = []
    for name in tried:
        candidate = examine(name, spec, features, device)
        if candidate.support.accepted:
            for passed in examined:
                if passed.support.mendable:
                    reason = f"backend {passed.name!r} cannot: {passed.support.reason}"
                    _tell(f"attention runs on backend {name!r}, {SLOWER}, since {reason}")
            return name
        examined.append(candidate)
    anything = (each if each.support.mendable else examine(each.name, None, frozenset(), device) for each in examined)
    if not any(each.support.accepted for each in anything):
        raise unavailable(examined, device)
    if not any(examine(name, spec, frozenset(), device).support.accepted for name in tried):
        features = frozenset()  # of which nobody has got so far as to think
    reason = f"no backend accepts it on {device} ({'; '.join(map(str, examined))})"
    if len(examined) == 1:
        reason = f"backend {examined[0].name!r} does not take it: {examined[0].support.reason}"
    raise UnsupportedFeature(", ".join(sorted(spec.features | features)) or "spec", reason)


def check_runs(name: str, device: torch.device) -> None:
    """Raise :class:`InvalidInput` or :class:`BackendUnavailable` where nothing of that name can run on a device."""
    tried = candidates(name, device)
    examined = [examine(each, None, frozenset(), device) for each in tried]
    if not any(candidate.support.accepted for candidate in examined):
        raise unavailable(examined, device)


def unavailable(examined: Sequence[Candidate], device: torch.device) -> BackendUnavailable:
    """The error for backends none of which can run on a device."""
    if len(examined) == 1:
        return BackendUnavailable(f"backend {examined[0].name!r} cannot run here: {examined[0].support.reason}")
    return BackendUnavailable(f"no backend can run on {device} ({'; '.join(map(str, examined))})")


@functools.cache
def _tell(text: str) -> None:
    """Warn, once a process, at the line that called Sennit."""
    frame, level = sys._getframe(), 1
    while frame.f_back is not None and frame.f_code.co_filename.startswith(PACKAGE):
        frame, level = frame.f_back, level + 1
    warnings.warn(text, stacklevel=level)
