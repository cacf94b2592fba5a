"""Reading what callers give as lengths and page ids: lists, NumPy arrays and CPU tensors of any integer dtype."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from sennit.errors import InvalidInput

__all__ = ["INT32_MAX", "IntArray", "host_array", "host_integers", "on_device"]

IntArray: TypeAlias = npt.NDArray[np.integer[Any]]

INT32_MAX = 2**31 - 1


def on_device(value: object) -> bool:
    """Whether ``value`` is a tensor that the host cannot read without a copy."""
    return isinstance(value, torch.Tensor) and value.device.type != "cpu"


def host_array(name: str, value: object, *, of: str, hint: str = "") -> npt.NDArray[Any]:
    """Return ``value`` as a NumPy array of whatever dtype and shape it has, in the same memory where that is possible.

    Args:
        name: the argument's name, for the error.
        value: a list, NumPy array or CPU tensor.
        of: what it should hold, for the error (``"integers"``).
        hint: what to do when ``value`` is a device tensor.

    Raises:
        InvalidInput: on another device, ragged, or a tensor that NumPy has no form for.
    """
    if on_device(value):
        assert isinstance(value, torch.Tensor)
        raise InvalidInput(name, expected=f"{of} on the host", got=f"a tensor on {value.device}", hint=hint)
    try:
        return value.detach().numpy() if isinstance(value, torch.Tensor) else np.asarray(value)
    except ValueError as error:
        raise InvalidInput(name, expected=f"a rectangular array of {of}", got=f"nested lists ({error})") from None
    except (RuntimeError, TypeError) as error:  # sparse, nested, float8, ...; or a list of tensors on a device
        kind = f"{value.dtype}, {value.layout}" if isinstance(value, torch.Tensor) else type(value).__name__
        reason = str(error).split("\n")[0]
        raise InvalidInput(
            name, expected=f"{of} on the host, dense", got=f"what NumPy cannot read ({kind}: {reason})", hint=hint
        ) from None


def host_integers(name: str, value: object, *, ndim: int = 1, hint: str = "") -> IntArray:
    """Return a NumPy copy of ``value`` in its own integer dtype and native byte order (int64 for lists and uint64).

    Args:
        name: the argument's name, for the error.
        value: a list, NumPy array or CPU tensor of any integer dtype.
        ndim: how many dimensions it must have; an empty list may stand for any number.
        hint: what to do when ``value`` is a device tensor.

    Raises:
        InvalidInput: on another device, of another dtype or of another number of dimensions.
    """
    if isinstance(value, np.ndarray):  # the common case, and planning is timed in microseconds
        array = np.asarray(value)
    else:
        array = host_array(name, value, of="integers", hint=hint)
        if array.size == 0 and not isinstance(value, torch.Tensor):  # an empty list has no dtype,
            array = np.empty((0,) * ndim if array.ndim == 1 else array.shape, np.int64)  # nor inner dimensions
    dtype = array.dtype
    if dtype.kind not in "iu":
        raise InvalidInput(
            name, expected="integers", got=f"dtype {getattr(value, 'dtype', dtype)}",
            hint="lengths and page ids are whole",
        )  # fmt: skip
    if array.ndim != ndim:
        raise InvalidInput(name, expected=f"{ndim} dimension{'s' * (ndim != 1)}", got=f"shape {array.shape}")
    if not dtype.isnative:
        return host_integers(name, array.astype(dtype.newbyteorder("=")), ndim=ndim)
    if dtype == np.uint64:
        if array.size and array.max() > np.iinfo(np.int64).max:
            raise InvalidInput(name, expected="values that fit int64", got=int(array.max()))
        array = array.astype(np.int64)
    copy: IntArray = array.copy()
    return copy
