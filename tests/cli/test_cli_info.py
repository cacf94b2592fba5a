"""``sennit info``: what is there, what is not and why, without loading what it reports on."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib import metadata

import numpy
import torch

import sennit as package
from sennit.backends import registry


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
    assert "needs a GPU [red]of another kind" in " ".join(sennit("info").stdout.split())


def test_a_broken_backend_of_a_third_party_does_not_hide_the_others(sennit, add_backend):
    add_backend("broken", "faulty_backends:NO_SUCH_NAME")
    entries = {entry["backend"]: entry for entry in found(sennit)["backends"]}
    assert "NO_SUCH_NAME" in entries["broken"]["reason"]
    assert entries["reference"]["accepted"]


def test_cache_folders_are_measured_and_never_made(sennit, tmp_path):
    root = tmp_path / "cache"
    env = {"SENNIT_CACHE_DIR": str(root)}
    assert found(sennit, env=env)["cache"] == [{"folder": str(root), "exists": False, "bytes": 0}]
    assert not root.exists()
    (root / "models" / "one").mkdir(parents=True)
    (root / "models" / "one" / "weights").write_bytes(bytes(1234))
    sizes = {entry["folder"]: entry["bytes"] for entry in found(sennit, env=env)["cache"]}
    assert sizes == {str(root): 1234, str(root / "models" / "one"): 1234}


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
