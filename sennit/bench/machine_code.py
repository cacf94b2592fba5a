"""What kernels take of a GPU's registers and memory, read off their machine code, on machines that have no GPU."""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from sennit.jit.files import hash_bytes

__all__ = ["CompiledKernel", "spills_in_loops"]

CPU = torch.device("cpu")
USAGE = re.compile(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)")
LABEL = re.compile(r"(\.L_x_\d+):")
INSTRUCTION = re.compile(r"\s*/\*[0-9a-f]{4,}\*/")
BRANCH = re.compile(r"\bBRA\b.*`\((\.L_x_\d+)\)")
PRODUCT = re.compile(r"\b(HMMA|HGMMA|FFMA)\b")
SPILL = re.compile(r"\b(LDL|STL)\b")


@dataclass(frozen=True)
class CompiledKernel:
    """What a kernel takes.

    Attributes:
        name: of the kernel.
        warps: of a worker.
        registers: a thread.
        spilled: bytes of memory a thread that registers are spilled to.
        spills_in_loops: loads and stores of them in loops over keys, where they are repeated.
        shared_memory: bytes a worker.
        key: of its machine code.
    """

    name: str
    warps: int
    registers: int
    spilled: int
    spills_in_loops: int
    shared_memory: int
    key: str


class Recorder:
    """As much of a Triton driver as launches ask for: nothing runs, and what would be loaded is looked at instead."""

    def __init__(self, architecture: int) -> None:
        self.kernels: list[CompiledKernel] = []
        self.utils = self
        self._architecture = architecture
        self._metadata: Any = None

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self._architecture, 32)

    def get_current_device(self) -> int:
        """One for each architecture, since Triton keeps kernels by device."""
        return self._architecture

    def get_current_stream(self, device: int | None = None) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return CPU

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": 2**31 - 1}  # what does not fit is to be reported

    def launcher_cls(self, source: object, metadata: Any) -> Any:
        """Called for each kernel before it is loaded."""
        self._metadata = metadata
        return lambda *arguments: None

    def load_binary(self, name: str, binary: bytes, shared: int, device: int) -> tuple[int, int, int, int, int]:
        registers, spilled = _usage(binary)
        in_loops = spills_in_loops(_looked_at("nvdisasm", "-c", binary)) if spilled else 0
        warps = self._metadata.num_warps
        kernel = CompiledKernel(name, warps, registers, spilled, in_loops, shared, hash_bytes(binary))
        self.kernels.append(kernel)
        return 1, 1, registers, spilled, 1024  # module, function, and the most threads

    def unload_module(self, module: int) -> None:
        pass


def _usage(binary: bytes) -> tuple[int, int]:
    """Registers, and bytes of spilled ones, a thread."""
    [found] = USAGE.finditer(_looked_at("cuobjdump", "-res-usage", binary))
    registers, stack, local = map(int, found.groups())
    return registers, stack + local


def _looked_at(program: str, option: str, binary: bytes) -> str:
    """What a program of the Triton package says of machine code."""
    import triton

    path = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / program
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary)
        file.flush()
        return subprocess.run([path, option, file.name], capture_output=True, text=True, check=True).stdout


def spills_in_loops(program: str) -> int:
    """Loads and stores of spilled registers in the innermost loops of a disassembled program that multiply matrices."""
    labels: dict[str, int] = {}
    lines: list[str] = []
    loops: list[tuple[int, int]] = []
    for line in program.splitlines():
        if label := LABEL.match(line):
            labels[label[1]] = len(lines)
        elif INSTRUCTION.match(line):
            lines.append(line)
            if (branch := BRANCH.search(line)) and branch[1] in labels:  # back
                loops.append((labels[branch[1]], len(lines)))
    multiplying = [loop for loop in loops if any(PRODUCT.search(line) for line in lines[slice(*loop)])]
    innermost = [
        (start, end)
        for start, end in multiplying
        if not any(start <= first and last <= end and (start, end) != (first, last) for first, last in multiplying)
    ]
    return sum(bool(SPILL.search(line)) for loop in innermost for line in lines[slice(*loop)])
