"""Times a call on a GPU that has rested and on one that is hot, since a GPU at its power limit lowers its clock."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import mean, median

import torch

from sennit.bench.events import launch_between_events
from sennit.bench.nvml import Meter
from sennit.bench.results import Heat

__all__ = ["measure_heat"]

REST = 0.25  # seconds
WAKING, COOL, HOT = 6, 10, 20  # launches: before the cool ones are timed, of those, and of one hot sample
SUSTAINED = 0.5  # seconds of launches without a pause, of which the second half is looked at


def measure_heat(launch: Callable[[], object], device: torch.device, meter: Meter | None) -> Heat:
    """Launch a call again and again, first after a rest; what one launch leaves in the L2 cache the next may find."""
    launch()
    torch.cuda.synchronize(device)
    time.sleep(REST)
    launch_between_events(launch, WAKING)
    cool = launch_between_events(launch, COOL).seconds
    give_up = time.perf_counter() + SUSTAINED
    times, readings = [], []
    before = launch_between_events(launch, HOT)
    while time.perf_counter() < give_up:
        running = launch_between_events(launch, HOT)
        times.append(before.seconds)
        if meter is not None:
            readings.append((meter.clock, meter.power))
        before = running
    times.append(before.seconds)
    clocks, powers = zip(*readings[len(readings) // 2 :], strict=True) if readings else ((), ())
    return Heat(
        cool=cool * 1e6,
        hot=median(times[len(times) // 2 :]) * 1e6,
        clock=mean(clocks) if clocks else None,
        power=mean(powers) if powers else None,
    )
