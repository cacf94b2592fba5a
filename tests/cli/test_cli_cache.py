"""``sennit cache``: lists what was built, builds what will be needed, and removes what it says it removes."""

from __future__ import annotations

import dataclasses
import json

import pytest

from sennit import jit
from sennit.cli import cache
from sennit.errors import BuildUnavailable


def source(name):
    return jit.Source(name, (("one.cpp", "int x;"),), None, ("-DSOME=[red]",))


@pytest.fixture
def root(tmp_path, monkeypatch):
    monkeypatch.setenv("SENNIT_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(cache, "_sources", lambda: [source("first"), source("second")])
    return tmp_path / "cache"


def as_json(result):
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout)


def folder_bytes(folder):
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def test_an_empty_cache_has_no_libraries_and_is_not_made(sennit, root):
    assert as_json(sennit("cache", "list", "--json")) == {"folder": str(root / "libraries"), "libraries": []}
    assert f"no libraries in {root / 'libraries'}" in sennit("cache", "list").stdout
    assert as_json(sennit("cache", "clear", "--json"))["libraries"] == 0
    assert not root.exists()


def test_list_shows_what_was_built(sennit, root):
    path = jit.build(dataclasses.replace(source("first"), purpose="float16 / bfloat16"))
    [entry] = as_json(sennit("cache", "list", "--json"))["libraries"]
    assert entry["name"] == "first"
    assert entry["folder"] == str(path.parent) == str(root / "libraries" / f"first-{entry['key']}")
    assert entry["size"] == folder_bytes(path.parent)
    assert entry["compiler"] == jit.find_toolchain().version
    assert entry["flags"] == ["-DSOME=[red]"]
    version = entry["compiler"].split()[-1]
    parts = "first", "float16 / bfloat16", entry["key"][:8], entry["built"][:10], version
    assert any(all(part in line for part in parts) for line in sennit("cache", "list").stdout.splitlines())


def test_a_folder_that_cannot_be_written_is_named_with_what_to_do(sennit, root):
    root.write_text("")
    result = sennit("cache", "clear")
    said = f"{root} is not a folder; remove it, or set SENNIT_CACHE_DIR to a folder"
    assert (result.exit_code, result.stderr) == (2, f"error: nothing can be removed: {said}\n")
    assert sennit("cache", "list").stdout == f"no libraries in {root / 'libraries'}; none can be built: {said}\n"


def test_warm_builds_what_is_missing_and_says_what_was_there(sennit, root):
    jit.build(source("second"))
    described = as_json(sennit("cache", "warm", "--json"))
    assert [(entry["name"], entry["was_there"]) for entry in described] == [("first", False), ("second", True)]
    assert len(list((root / "libraries").glob("*/*.so"))) == 2
    assert "built 0; 2 had been there already" in sennit("cache", "warm").stdout


def test_warm_without_a_compiler_is_an_error_of_one_line(sennit, root, monkeypatch):
    monkeypatch.setenv("CXX", "/no/such/compiler")
    result = sennit("cache", "warm")
    assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (2, "", 1)
    assert result.stderr.startswith("error: no C++ compiler: CXX is '/no/such/compiler'")
    with pytest.raises(BuildUnavailable):
        jit.build(source("first"))


def test_clear_removes_libraries_keeps_models_and_says_what_was_freed(sennit, root):
    jit.build_all([source("first"), source("second")])
    (root / "models" / "one").mkdir(parents=True)
    (root / "models" / "one" / "weights").write_bytes(b"0" * 5_000_000)
    (root / "functions").mkdir()
    (root / "functions" / "change.py").touch()
    taken = folder_bytes(root / "libraries")
    done = as_json(sennit("cache", "clear", "--json"))
    assert done == {"libraries": 2, "library_bytes": taken, "model_bytes": 0, "kept": []}
    assert as_json(sennit("cache", "list", "--json"))["libraries"] == []
    assert folder_bytes(root / "libraries") == 0
    assert not (root / "functions").exists()
    assert (root / "models" / "one" / "weights").exists()
    assert (
        sennit("cache", "clear", "--models").stdout == "libraries removed: 0, 0 B freed\nmodels removed: 5 MB freed\n"
    )
    assert not (root / "models").exists()
