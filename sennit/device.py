"""Which device is meant: by name, by default, and with an index where it is a GPU."""

from __future__ import annotations

import torch

from sennit.errors import InvalidInput

__all__ = ["resolve_device"]


def resolve_device(device: torch.device | str | None) -> torch.device:
    """The device that is meant, with an index where it is a GPU; the CPU has none, as its tensors have none.

    Raises:
        InvalidInput: it is neither the CPU nor a CUDA device, or it is not on this machine.

    >>> resolve_device("cpu:0")
    device(type='cpu')
    """
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        resolved = torch.device(device)
    except (RuntimeError, TypeError, ValueError) as error:
        raise InvalidInput(
            "device", expected='a torch device, "cpu" or "cuda"', got=repr(device), hint=str(error).split("\n")[0]
        ) from None
    if isinstance(device, bool) or resolved.type not in ("cpu", "cuda"):
        raise InvalidInput("device", expected='"cpu" or "cuda"', got=repr(device), hint="Sennit runs on no other")
    if resolved.type == "cuda":
        count = torch.cuda.device_count()
        if (resolved.index or 0) >= count:
            if count:
                raise InvalidInput(
                    "device", expected=f"one of the {count} CUDA devices of this machine", got=str(device)
                )
            without = f"this PyTorch ({torch.__version__}) is built without CUDA; install one that is"
            raise InvalidInput(
                "device", expected='"cpu", since there is no CUDA device', got=repr(str(device)),
                hint="PyTorch sees no GPU; look at nvidia-smi" if torch.version.cuda else without,
            )  # fmt: skip
        if resolved.index is None:
            return torch.device("cuda", torch.cuda.current_device())
        return resolved
    if resolved.index:
        raise InvalidInput("device", expected='"cpu", of which there is one', got=repr(str(device)))
    return torch.device("cpu")
