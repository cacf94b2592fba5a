"""Reads a running function's frames: the name by which it knows a tensor, and the line that it is at."""

from __future__ import annotations

import functools
import inspect
import linecache
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from types import CodeType, FrameType
from typing import Any

import torch

from sennit.variants.symbols import Refused, dimensions

__all__ = ["name_of", "place_of_code", "place_of_error"]

HERE = os.path.dirname(__file__)
OURS = {os.path.join(HERE, f"{name}.py") for name in ("frames", "functions", "recorder", "symbols", "trace")}
TORCH = os.path.dirname(torch.__file__) + os.sep
DEEPEST = 4  # attributes of attributes: self.bias.weight


def name_of(tensor: torch.Tensor, below: CodeType) -> str:
    """The variable from which the functions that run below a caller, known by its code, have a tensor.

    The outermost function that has it decides. Variables of enclosing functions and globals come before parameters, and
    these before attributes.

    Raises:
        Refused: none holds it, or two do.
    """
    frames = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not below:
        frames.append(frame)
        frame = frame.f_back
    for frame in reversed(frames):
        if not _is_library(frame.f_code.co_filename):
            for names in _names(tensor, frame):
                if len(names) > 1:
                    both = " and ".join(f"`{name}`" for name in sorted(names))
                    raise Refused(f"one tensor that is called {both}", "give each variable a tensor of its own")
                if names:
                    return names.pop()
    raise Refused(
        f"a tensor of {dimensions(tensor)} that no variable from outside the function holds",
        "give every tensor a variable of its own there: `table = tables[0]`, and read `table`",
    )


def _names(tensor: torch.Tensor, frame: FrameType) -> Iterator[set[str]]:
    code, local = frame.f_code, frame.f_locals
    outer = {name: local.get(name) for name in code.co_freevars}
    outer |= {name: frame.f_globals[name] for name in code.co_names if name in frame.f_globals}
    count = code.co_argcount + code.co_kwonlyargcount
    parameters = {name: local.get(name) for name in code.co_varnames[:count]}
    yield {name for name, value in outer.items() if value is tensor}
    yield {name for name, value in parameters.items() if value is tensor}
    owners = [*outer.values(), *parameters.values()]
    for _ in range(DEEPEST):
        attributes = [(name, value) for owner in owners for name, value in _attributes(owner, code)]
        yield {name for name, value in attributes if value is tensor}
        owners = [value for _, value in attributes]


def _attributes(owner: object, code: CodeType) -> Iterator[tuple[str, Any]]:
    """What an object holds under names that the code mentions; a module of torch keeps some apart."""
    own = getattr(owner, "__dict__", {})
    apart = [own.get(name) for name in ("_parameters", "_buffers", "_modules")]
    for store in (own, vars(type(owner)), *apart):
        if isinstance(store, Mapping):
            yield from ((name, store[name]) for name in code.co_names if name in store)


def place_of_error(error: BaseException) -> str:
    """The line of the user's at which an error came up: the innermost that is neither ours nor torch's."""
    lines = [
        (frame.f_code.co_name, frame.f_code.co_filename, number)
        for frame, number in traceback.walk_tb(error.__traceback__)
        if frame.f_code.co_filename not in OURS
    ]
    users = [line for line in lines if not _is_library(line[1])] or lines
    return _written(*users[-1]) if users else ""


def place_of_code(function: Callable[..., Any]) -> str:
    """Where a function begins, if it is written in Python."""
    while isinstance(function, functools.partial):
        function = function.func
    function = inspect.unwrap(function)
    code = getattr(function, "__code__", None) or getattr(type(function).__call__, "__code__", None)
    return _written(code.co_name, code.co_filename, code.co_firstlineno) if isinstance(code, CodeType) else ""


def _is_library(filename: str) -> bool:
    return filename in OURS or filename.startswith(TORCH)


def _written(function: str, filename: str, number: int) -> str:
    line = linecache.getline(filename, number).strip()
    return f", in {function}, {filename}:{number}" + (f": `{line}`" if line else "")
