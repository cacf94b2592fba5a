"""Imports tvm_ffi, by which libraries are called, without letting it compile anything on the way."""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from types import ModuleType

__all__ = ["runtime"]

SWITCH = "TVM_FFI_DISABLE_TORCH_C_DLPACK"


@cache
def runtime() -> ModuleType:
    """Return the module ``tvm_ffi``.

    With PyTorch 2.9, whose tensors lack DLPack's exchange functions, importing it would compile an extension for
    minutes. ``torch-c-dlpack-ext`` has that extension ready-made and is used where it is installed; otherwise tensors
    take a slower way. ``TVM_FFI_DISABLE_TORCH_C_DLPACK=0`` asks for compiling.
    """
    with _nothing_compiled():
        return importlib.import_module("tvm_ffi")


@contextmanager
def _nothing_compiled() -> Iterator[None]:
    if SWITCH in os.environ or _tensors_can_be_exchanged():
        yield
        return
    os.environ[SWITCH] = "1"
    try:
        yield
    finally:
        os.environ.pop(SWITCH, None)


def _tensors_can_be_exchanged() -> bool:
    import torch

    names = ("__dlpack_c_exchange_api__", "__c_dlpack_exchange_api__")
    if not any(hasattr(torch.Tensor, name) for name in names):
        with suppress(Exception):  # missing, or made for another PyTorch
            importlib.import_module("torch_c_dlpack_ext")
    return any(hasattr(torch.Tensor, name) for name in names)
