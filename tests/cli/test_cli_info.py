"""``sennit info``: what is there, what is not and why, without loading what it reports on."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import numpy
import pytest
import torch

import sennit as package
from sennit.backends import registry
from sennit.jit import Toolchain
from sennit.jit.store import seal

AUTO = registry.AUTO_ORDER["cpu"]


@pytest.fixture
def toolchain(monkeypatch):
    """A compiler that nobody asks anything, and that has built nothing."""
    made = Toolchain(Path("/opt/c++"), (), "c++ 13.1", "x86_64-linux-gnu", (), frozenset({"avx2"}), "")
    monkeypatch.delenv("SENNIT_CPU_ISA", raising=False)
    monkeypatch.setattr("sennit.jit.find_toolchain", lambda: made)
    monkeypatch.setattr("sennit.backends.cpu.instructions.find_toolchain", lambda: made)
    return made


def found(sennit, **options):
    result = sennit("info", "--json", **options)
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout)


def test_versions_are_those_of_the_packages(sennit):
    versions = found(sennit)["versions"]
    assert versions["sennit"] == package.__version__
    assert (versions["torch"], versions["numpy"]) == (torch.__version__, numpy.__version__)


def test_a_missing_package_is_shown_with_what_to_install(sennit, monkeypatch):
    def version(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr("sennit.cli.info.metadata.version", version)
    assert found(sennit)["versions"]["transformers"] is None
    assert "not installed: pip install 'sennit[hf]'" in sennit("info").stdout


def test_every_backend_is_listed_with_its_reason(sennit, add_backend):
    add_backend("absent", "faulty_backends:ABSENT")
    entries = {entry["backend"]: entry for entry in found(sennit)["backends"] if entry["device"] == "cpu"}
    assert set(entries) == set(registry.names())
    assert entries["reference"]["accepted"]
    assert entries["reference"]["auto_order"] == len(registry.AUTO_ORDER["cpu"])
    assert not entries["absent"]["accepted"]
    assert entries["absent"]["reason"] == "needs a GPU [red]of another kind"
    assert entries["absent"]["auto_order"] is None
    assert "backend absent, device cpu: needs a GPU [red]of another kind" in sennit("info").stdout.splitlines()


def test_auto_uses_the_first_backend_that_accepts(sennit, add_backend, monkeypatch):
    add_backend("absent", "faulty_backends:ABSENT")
    monkeypatch.setitem(registry.AUTO_ORDER, "cpu", ("absent", "reference", "reference-items"))
    entries = [entry for entry in found(sennit)["backends"] if entry["device"] == "cpu"]
    assert [entry["backend"] for entry in entries if entry["used_by_auto"]] == ["reference"]
    assert [entry["backend"] for entry in entries[:3]] == ["absent", "reference", "reference-items"]
    lines = sennit("info", width=100).stdout.splitlines()
    assert [line.split()[1] for line in lines if "used" in line.split()] == ["reference"]


def test_the_compiler_is_shown_or_why_there_is_none(sennit, toolchain, monkeypatch):
    native = {"compiler": "/opt/c++", "version": "c++ 13.1", "instructions": "avx2", "problem": None}
    assert found(sennit)["native"] == native
    assert any(line.split() == ["/opt/c++", "c++", "13.1", "avx2"] for line in sennit("info").stdout.splitlines())
    monkeypatch.setenv("SENNIT_CPU_ISA", "neon")
    none = found(sennit)["native"]
    assert none["compiler"] is None
    assert "neon" in none["problem"]
    assert any(line.split()[:1] == ["none"] for line in sennit("info").stdout.splitlines())


@pytest.mark.compiler
def test_a_cache_in_which_nothing_can_be_built_turns_the_cpu_backend_down(sennit, tmp_path):
    (tmp_path / "file").write_text("")
    env = {"SENNIT_CACHE_DIR": str(tmp_path / "file")}
    cpu, reference = (next(e for e in found(sennit, env=env)["backends"] if e["backend"] == b) for b in AUTO)
    assert (cpu["accepted"], cpu["used_by_auto"], reference["used_by_auto"]) == (False, False, True)
    assert f"{tmp_path / 'file'} is not a folder" in cpu["reason"]
    assert any(
        line.endswith(f"not a folder  {tmp_path / 'file'}") for line in sennit("info", env=env).stdout.splitlines()
    )


def test_a_variable_that_stops_every_launch_stops_info_too(sennit):
    result = sennit("info", env={"SENNIT_CPU_ISA": "nonsense"})
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith("error: SENNIT_CPU_ISA: expected one of amx, ")


def test_a_broken_backend_of_a_third_party_does_not_hide_the_others(sennit, add_backend):
    add_backend("broken", "faulty_backends:NO_SUCH_NAME")
    entries = {entry["backend"]: entry for entry in found(sennit)["backends"]}
    assert "NO_SUCH_NAME" in entries["broken"]["reason"]
    assert entries["reference"]["accepted"]


def test_cache_folders_are_measured_and_never_made(sennit, toolchain, add_backend, tmp_path):
    add_backend("cpu", "faulty_backends:ABSENT")  # the real one may build, which makes folders
    root = tmp_path / "cache"
    env = {"SENNIT_CACHE_DIR": str(root)}
    libraries = root / "libraries"
    assert found(sennit, env=env)["cache"] == [
        {"folder": str(root), "exists": False, "bytes": 0},
        {"folder": str(libraries), "exists": False, "bytes": 0, "libraries": 0},
    ]
    assert not root.exists()
    (root / "models" / "one").mkdir(parents=True)
    (root / "models" / "one" / "weights").write_bytes(bytes(1234))
    (built := libraries / "small-0f").mkdir(parents=True)
    (built / "small.so").write_bytes(bytes(100))
    seal(built, "small", "0f", compiler="c++ 13.1", flags=())
    (libraries / "half-built").mkdir()
    size = sum(path.stat().st_size for path in built.iterdir())
    described = {entry.pop("folder"): entry for entry in found(sennit, env=env)["cache"]}
    assert described == {
        str(root): {"exists": True, "bytes": 1234 + size},
        str(libraries): {"exists": True, "bytes": size, "libraries": 1},
        str(root / "models" / "one"): {"exists": True, "bytes": 1234},
    }


def test_the_cpu_has_a_name_and_threads(sennit):
    cpu = found(sennit)["devices"][0]
    assert cpu["device"] == "cpu"
    assert cpu["name"]
    assert cpu["threads"] == torch.get_num_threads()


def test_info_loads_neither_transformers_nor_a_compiler():
    code = "import sys; sys.argv = ['sennit', 'info']\nfrom sennit.cli import main\ntry: main()\nfinally:"
    code += " loaded = set(sys.modules); print({'transformers', 'triton'} & loaded, file=sys.stderr)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0
    assert result.stderr.splitlines()[-1] == "set()"
