"""What backends for NVIDIA GPUs ask of a device, making it the current one, and the stream that work goes to."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

from sennit.backends.base import Support

__all__ = ["ampere_or_newer", "current_stream", "made_current"]

LEAST_CAPABILITY = (8, 0)


def ampere_or_newer(device: torch.device) -> Support:
    """Whether PyTorch finds GPUs, and this one is of Ampere's generation or a later one."""
    if not torch.cuda.is_available():
        return Support.no("PyTorch finds no GPU")
    capability = torch.cuda.get_device_capability(device)
    if capability < LEAST_CAPABILITY:
        return Support.no(f"the GPU's capability {capability[0]}.{capability[1]} is below 8.0 (Ampere)")
    return Support.yes()


def made_current(device: torch.device) -> AbstractContextManager[object]:
    """The device made the current one, on which libraries launch; nothing where it is that already, or a CPU."""
    if device.type == "cpu" or device.index == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device(device)


def current_stream(device: torch.device) -> int:
    """Address of the stream that work for a GPU goes to; asked of C++, since an object in Python takes 3 us."""
    return int(torch._C._cuda_getCurrentRawStream(device.index))
