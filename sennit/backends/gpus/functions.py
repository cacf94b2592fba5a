"""Score and mask functions of specs as Triton functions: printed to a file, imported once, and given their captures."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from sennit.backends.gpus.printing import print_function
from sennit.env import function_dir
from sennit.errors import BuildUnavailable
from sennit.jit.files import hash_bytes, write_atomically
from sennit.spec import AttentionSpec
from sennit.variants import Capture, Graph

__all__ = ["capture_arguments", "graph_function"]

ELEMENTS = {torch.bool: torch.uint8, torch.bfloat16: torch.int16}  # what kernels read them as


def graph_function(spec: AttentionSpec) -> Any:
    """The ``@triton.jit`` function that applies a spec's ``score_mod`` and ``mask_mod``; None where it has neither.

    See :func:`~sennit.backends.gpus.printing.print_function` for its arguments. A kernel takes it as a
    ``tl.constexpr``. Equal functions are one object for as long as the process lives, and Triton's key of a kernel
    covers their source, so that nothing is compiled twice.

    Raises:
        BuildUnavailable: the cache folder cannot be written.
    """
    score_mod, mask_mod = (mod if isinstance(mod, Graph) else None for mod in (spec.score_mod, spec.mask_mod))
    return None if score_mod is mask_mod is None else _printed(score_mod, mask_mod, spec.captures)


def capture_arguments(spec: AttentionSpec, captures: Mapping[str, torch.Tensor]) -> tuple[Any, ...]:
    """What kernels give to the function of a spec: each captured tensor, followed by its sizes and strides.

    Triton compiles anew where an integer in a tuple becomes 1, a multiple of 16, or longer than 32 bits. Sizes and
    strides may change from step to step, so they are given in a form that is none of these: see ``operations.number``.

    Args:
        spec: the spec.
        captures: the tensors of ``spec.captures`` by name, of their dtypes and dimensions.
    """
    arguments: list[Any] = []
    for capture in spec.captures:
        tensor = captures[capture.name]
        arguments.append(tensor.view(ELEMENTS[tensor.dtype]) if tensor.dtype in ELEMENTS else tensor)
        for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
            arguments += (_argument(size), _argument(stride))
    return tuple(arguments)


def _argument(number: int) -> int:
    return 2 * (number + 2**32) + 1


@cache
def _printed(score_mod: Graph | None, mask_mod: Graph | None, captures: tuple[Capture, ...]) -> Any:
    return _loaded(print_function(score_mod, mask_mod, captures))


@cache
def _loaded(text: str) -> Any:
    """The function ``change`` of a module, whose text is put into a file of the cache folder, for Triton to read."""
    name = f"change_{hash_bytes(text.encode())}"
    path = function_dir() / f"{name}.py"
    try:
        if not _holds(path, text):
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(path, text)
    except OSError as error:
        raise BuildUnavailable(
            f"a score or mask function cannot be written to {path}: {error.strerror or error}; "
            "make that folder writable, or set SENNIT_CACHE_DIR to one that is"
        ) from error
    module = ModuleType(name)
    exec(compile(text, str(path), "exec"), vars(module))
    return module.change


def _holds(path: Path, text: str) -> bool:
    try:
        return path.read_text() == text
    except (FileNotFoundError, UnicodeDecodeError):
        return False
