"""Reads a GPU's clock, power and driver from NVML, where nvidia-ml-py is installed."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch

__all__ = ["MISSING", "Meter", "find_meter"]

MISSING = "clock and power are not known: pip install nvidia-ml-py"
POWER_NOW = 186  # NVML_FI_DEV_POWER_INSTANT, in milliwatts; the other reading is a mean over a second


@dataclass(frozen=True)
class Meter:
    """One GPU as NVML sees it."""

    nvml: Any
    handle: Any

    @property
    def clock(self) -> float:
        """MHz of the multiprocessors."""
        return float(self.nvml.nvmlDeviceGetClockInfo(self.handle, self.nvml.NVML_CLOCK_SM))

    @property
    def power(self) -> float:
        """Watts that are drawn now, or in the last second where the device only says that."""
        field = self.nvml.nvmlDeviceGetFieldValues(self.handle, [POWER_NOW])[0]
        if field.nvmlReturn == self.nvml.NVML_SUCCESS:
            return int(field.value.uiVal) / 1e3
        return int(self.nvml.nvmlDeviceGetPowerUsage(self.handle)) / 1e3

    @property
    def facts(self) -> dict[str, Any]:
        """Driver, highest clock in MHz and power limit in watts."""
        nvml, handle = self.nvml, self.handle
        return {
            "driver": nvml.nvmlSystemGetDriverVersion(),
            "highest_clock": nvml.nvmlDeviceGetMaxClockInfo(handle, nvml.NVML_CLOCK_SM),
            "power_limit": nvml.nvmlDeviceGetEnforcedPowerLimit(handle) / 1e3,
        }


def find_meter(device: torch.device) -> Meter | None:
    """The meter of a CUDA device; None without nvidia-ml-py, or where it cannot read everything that a meter reads."""
    try:
        nvml = import_module("pynvml")
    except ImportError:
        return None
    try:
        nvml.nvmlInit()
        uuid = torch.cuda.get_device_properties(device).uuid
        meter = Meter(nvml, nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}"))
        _ = meter.clock, meter.power, meter.facts
    except (nvml.NVMLError, AttributeError):  # of old drivers and packages
        return None
    return meter
