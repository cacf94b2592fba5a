"""Reading what callers give as lengths and page ids: lists, NumPy arrays and CPU tensors of any integer dtype."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from sennit.errors import InvalidInput

__all__ = ["INT32_MAX", "IntArray", "host_integers", "on_device"]

IntArray: TypeAlias = npt.NDArray[np.integer[Any]]

INT32_MAX = 2**31 - 1


def on_device(value: object) -> bool:
    """Whether ``value`` is a tensor that the host cannot read without a copy."""
    return isinstance(value, torch.Tensor) and value.device.type != "cpu"


def host_integers(name: str, value: object, *, ndim: int = 1, hint: str = "") -> IntArray:
    """Return a NumPy copy of ``value`` in its own integer dtype (int64 for lists and for uint64).

    Args:
        name: the argument's name, for the error.
        value: a list, NumPy array or CPU tensor of any integer dtype.
        ndim: how many dimensions it must have.
        hint: what to do when ``value`` is a device tensor.

    Raises:
        InvalidInput: on another device, of another dtype or of another number of dimensions.
    """
    if isinstance(value, torch.Tensor):
        if on_device(value):
            raise InvalidInput(name, expected="integers on the host", got=f"a tensor on {value.device}", hint=hint)
        array = value.detach().numpy() if value.dtype != torch.bfloat16 else np.empty(0, np.float32)
        described = str(value.dtype)
    else:
        try:
            array = np.asarray(value)
        except ValueError as error:
            raise InvalidInput(
                name, expected="a rectangular array of integers", got=f"nested lists ({error})"
            ) from None
        described = str(array.dtype)
    if array.size == 0 and not isinstance(value, (np.ndarray, torch.Tensor)):
        array = array.astype(np.int64)  # an empty list has no dtype of its own
    if array.dtype.kind not in "iu":
        raise InvalidInput(name, expected="integers", got=f"dtype {described}", hint="lengths and page ids are whole")
    if array.ndim != ndim:
        raise InvalidInput(name, expected=f"{ndim} dimension{'s' * (ndim != 1)}", got=f"shape {array.shape}")
    if array.dtype == np.uint64:
        if array.size and array.max() > np.iinfo(np.int64).max:
            raise InvalidInput(name, expected="values that fit int64", got=int(array.max()))
        array = array.astype(np.int64)
    copy: IntArray = array.copy()
    return copy
