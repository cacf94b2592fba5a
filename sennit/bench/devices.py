"""What each kind of device brings to ``sennit bench attention``: workloads, instruments, peers, and usual settings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from sennit.bench.instruments import Absent, Instruments, Peer
from sennit.bench.workloads import CPU_WORKLOADS, GPU_WORKLOADS, Workload
from sennit.errors import InvalidInput
from sennit.pools import KVLayout

__all__ = ["DeviceKind", "kind_of"]

Building = Callable[[str, str, int, int], None]


@dataclass(frozen=True)
class DeviceKind:
    """A kind of device.

    Attributes:
        workloads: what has a name.
        kv_layout: of pages, as :class:`sennit.KVCache` has it there.
        repeat: samples of everything.
        apart: whether to measure in a process of its own, since what fails on the device ends the process with it.
        heats: whether times after a rest and under sustained load can be told apart.
        instruments: makes those of one device.
        peers: finds the peers; takes the library of vLLM for CPUs, or None.
        prepare: builds what the peers need for ``(workloads, dtype, page_size, told)``; ``told`` is called with a
            name, what went wrong, how many are done, and of how many.
    """

    workloads: Sequence[Workload]
    kv_layout: KVLayout
    repeat: int
    apart: bool
    heats: bool
    instruments: Callable[[torch.device], Instruments]
    peers: Callable[[Path | None], Sequence[Peer | Absent]]
    prepare: Callable[[Sequence[Workload], torch.dtype, int, Building], None]


def kind_of(device: torch.device) -> DeviceKind:
    """The kind that a device is of."""
    return _KINDS[device.type]


def _cpu_instruments(device: torch.device) -> Instruments:
    from sennit.bench.cpu import CpuInstruments

    return CpuInstruments()


def _cpu_peers(vllm_library: Path | None) -> Sequence[Peer | Absent]:
    from sennit.bench.sdpa import sdpa_peers
    from sennit.bench.vllm_cpu import find_vllm

    return [find_vllm(vllm_library), *sdpa_peers()]


def _nothing_to_prepare(workloads: Sequence[Workload], dtype: torch.dtype, page_size: int, told: Building) -> None:
    pass


def _gpu_instruments(device: torch.device) -> Instruments:
    from sennit.bench.cuda import CudaInstruments

    return CudaInstruments(device)


def _gpu_peers(vllm_library: Path | None) -> Sequence[Peer | Absent]:
    from sennit.bench.flashinfer_peers import find_flashinfer

    if vllm_library is not None:
        raise InvalidInput("--vllm-library", expected="nothing on a GPU: it is a library for CPUs", got=vllm_library)
    return find_flashinfer()


def _prepare_gpu_peers(workloads: Sequence[Workload], dtype: torch.dtype, page_size: int, told: Building) -> None:
    from sennit.bench.flashinfer_modules import Module, build_modules, needed_modules
    from sennit.bench.flashinfer_peers import find_flashinfer

    if isinstance(find_flashinfer()[0], Absent):
        return
    modules = needed_modules(workloads, dtype, page_size)
    done = 0

    def tell(module: Module, problem: str) -> None:
        nonlocal done
        done += 1
        told(module.name, problem, done, len(modules))

    told("", "", 0, len(modules))
    build_modules(modules, tell)


_KINDS = {
    "cpu": DeviceKind(
        workloads=CPU_WORKLOADS,
        kv_layout="HND",
        repeat=7,
        apart=False,
        heats=False,
        instruments=_cpu_instruments,
        peers=_cpu_peers,
        prepare=_nothing_to_prepare,
    ),
    "cuda": DeviceKind(
        workloads=GPU_WORKLOADS,
        kv_layout="NHD",
        repeat=25,
        apart=True,
        heats=True,
        instruments=_gpu_instruments,
        peers=_gpu_peers,
        prepare=_prepare_gpu_peers,
    ),
}
