"""``sennit info``: versions, devices, backends with their reasons, compiler, and the folders that Sennit writes to."""

from __future__ import annotations

import platform
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any

import typer

from sennit.cli.output import console, format_bytes, print_json, table

__all__ = ["info"]

# Looked up by their metadata: importing some of them takes seconds.
OPTIONAL = {"transformers": "hf", "safetensors": "hf", "accelerate": "hf", "gguf": "hf", "matplotlib": "bench"}
OTHERS = ("triton", "flashinfer-python")


def info(as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
    """Show versions, devices, backends with the reason for each, the compiler, and cache folders.

    Example: sennit info --json
    """
    found = {
        "versions": _versions(),
        "devices": _devices(),
        "backends": _backends(),
        "native": _native(),
        "cache": _cache(),
    }
    if as_json:
        print_json(found)
    else:
        _print(found)


def _versions() -> dict[str, str | None]:
    import numpy
    import torch

    import sennit

    found: dict[str, str | None] = {
        "sennit": sennit.__version__,
        "python": f"{platform.python_version()} on {platform.system()} {platform.machine()}",
        "torch": torch.__version__,
        "numpy": numpy.__version__,
    }
    for name in OPTIONAL:
        found[name] = _installed(name)
    return found | {name: version for name in OTHERS if (version := _installed(name)) is not None}


def _installed(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _devices() -> list[dict[str, Any]]:
    import torch

    from sennit.bench.host import cpu_name, main_memory

    devices: list[dict[str, Any]] = [
        {
            "device": "cpu",
            "name": cpu_name(),
            "threads": torch.get_num_threads(),
            "instructions": torch.backends.cpu.get_cpu_capability(),
            "memory_bytes": main_memory(),
        }
    ]
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        properties = torch.cuda.get_device_properties(index)
        devices.append(
            {
                "device": f"cuda:{index}",
                "name": properties.name,
                "multiprocessors": properties.multi_processor_count,
                "capability": f"{properties.major}.{properties.minor}",
                "memory_bytes": properties.total_memory,
            }
        )
    return devices


def _backends() -> list[dict[str, Any]]:
    import torch

    from sennit.backends import registry

    kinds = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
    found = []
    for device in map(torch.device, kinds):
        preferred = registry.candidates("auto", device)
        ordered = [*preferred, *(name for name in registry.names() if name not in preferred)]
        examined = {name: _examine(name, device) for name in ordered}
        used = next((name for name in preferred if examined[name][0]), None)
        for name, (accepted, reason) in examined.items():
            place = preferred.index(name) + 1 if name in preferred else None
            entry = {"backend": name, "device": device.type, "accepted": accepted, "reason": reason}
            found.append(entry | {"auto_order": place, "used_by_auto": name == used})
    return found


def _examine(name: str, device: Any) -> tuple[bool, str]:
    from sennit.backends import registry
    from sennit.errors import SennitError

    try:
        support = registry.examine(name, None, frozenset(), device).support
    except SennitError:  # a variable that nothing would run with
        raise
    except Exception as error:  # one broken package of a third party must not hide all the rest
        return False, f"{type(error).__name__}: {error}"
    return support.accepted, support.reason


def _native() -> dict[str, Any]:
    """What compiles the planner and the CPU backend, and for which instructions; or why nothing can."""
    from sennit.backends.cpu.instructions import instruction_set
    from sennit.errors import BuildUnavailable
    from sennit.jit import find_toolchain

    try:
        toolchain, machine = find_toolchain(), instruction_set()
    except BuildUnavailable as error:  # no compiler, or a variable that asks for what is not here
        return {"compiler": None, "version": None, "instructions": None, "problem": str(error)}
    command = " ".join(toolchain.command)
    return {"compiler": command, "version": toolchain.version, "instructions": machine.name, "problem": None}


def _cache() -> list[dict[str, Any]]:
    """The cache folder, that of libraries with their number, and one for each model."""
    from sennit.env import cache_dir, folder_size, library_dir, model_dir
    from sennit.jit.store import entries

    root, libraries, models = cache_dir(), library_dir(), model_dir()

    def described(folder: Path) -> dict[str, Any]:
        return {"folder": str(folder), "exists": folder.is_dir(), "bytes": folder_size(folder)}

    inside = sorted(path for path in models.glob("*") if path.is_dir()) if models.is_dir() else []
    return [described(root), described(libraries) | {"libraries": len(entries())}, *map(described, inside)]


def _print(found: dict[str, Any]) -> None:
    from rich.text import Text

    stdout = console()
    versions = table("Versions", "package", "version")
    for name, version in found["versions"].items():
        missing = Text(f"not installed: pip install 'sennit[{OPTIONAL.get(name)}]'", "dim")
        versions.add_row(name, version or missing)
    devices = table("Devices", "device", "name", ">memory", "details")
    for device in found["devices"]:
        memory = device["memory_bytes"]
        devices.add_row(device["device"], device["name"], format_bytes(memory) if memory else "", _details(device))
    backends = table("Backends", "device", "backend", "accepted", "auto")
    for backend in found["backends"]:
        accepted = Text("yes", "green") if backend["accepted"] else Text("no", "red")
        place = backend["auto_order"]
        order = f"choice {place}{', used' if backend['used_by_auto'] else ''}" if place else "by name only"
        backends.add_row(backend["device"], backend["backend"], accepted, order)
    native = table("Compiler of the planner and the CPU backend", "compiler", "version", "instruction set")
    made_by = found["native"]
    if made_by["problem"]:
        native.add_row(Text("none", "red"), Text("the reason is that of backend cpu", "dim"), "")
    else:
        native.add_row(made_by["compiler"], made_by["version"], made_by["instructions"])
    for part in (versions, devices, backends):
        stdout.print(part)
        stdout.print()
    for backend in found["backends"]:
        if backend["reason"]:
            stdout.print(
                f"backend {backend['backend']}, device {backend['device']}: {backend['reason']}", soft_wrap=True
            )
    stdout.print()
    stdout.print(native)
    stdout.print()
    stdout.print("Cache folders", style="bold")
    for entry in found["cache"]:  # no table: paths must not fold
        stdout.print(f"{_size(entry):>15}  {entry['folder']}", soft_wrap=True)
    stdout.print()
    stdout.print("SENNIT_CACHE_DIR moves the cache; any folder in it may be deleted.", style="dim")


def _size(entry: dict[str, Any]) -> str:
    if not entry["exists"]:
        return "not a folder" if Path(entry["folder"]).exists() else "not there yet"
    size = format_bytes(entry["bytes"])
    return f"{entry['libraries']} in {size}" if entry.get("libraries") else size


def _details(device: dict[str, Any]) -> str:
    if "threads" in device:
        return f"{device['threads']} threads; PyTorch uses {device['instructions']}"
    return f"{device['multiprocessors']} SMs, compute capability {device['capability']}"
