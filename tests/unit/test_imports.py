"""Imports go one way, and importing Sennit loads nothing heavy."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2] / "sennit"

# Lower lines may import higher ones; on one line, modules may import those to their left.
LAYERS = [
    ["errors", "env"],
    ["variants"],
    ["spec", "device", "pools"],
    ["jit", "cache", "plan"],
    ["backends", "ops"],
    ["attention", "states", "step", "kvcache"],
    ["hf", "compat", "check", "bench", "cli"],
]
ORDER = {name: (line, column) for line, names in enumerate(LAYERS) for column, name in enumerate(names)}


def imported_parts(path: Path) -> set[str]:
    """Top-level parts of sennit that a file imports, inside functions too."""
    modules = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "sennit":
            rest = node.module.split(".")[1:]
            modules |= {rest[0]} if rest else {alias.name for alias in node.names}
        elif isinstance(node, ast.Import):
            modules |= {a.name.split(".")[1] for a in node.names if a.name.startswith("sennit.")}
    return modules


def part_of(path: Path) -> str:
    relative = path.relative_to(ROOT)
    return relative.parts[0] if len(relative.parts) > 1 else relative.stem


FILES = [p for p in sorted(ROOT.rglob("*.py")) if p != ROOT / "__init__.py"]


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_a_module_imports_only_from_higher_lines_or_from_its_left(path):
    part = part_of(path)
    for other in imported_parts(path) - {part, "__version__"}:
        assert ORDER[other] < ORDER[part], f"{path.relative_to(ROOT)} ({part}) imports {other}"
        if ORDER[other][0] == ORDER[part][0]:
            assert ORDER[other][1] < ORDER[part][1]


def test_backends_never_import_each_other():
    folders = [p.parent for p in (ROOT / "backends").glob("*/__init__.py") if "BACKEND" in p.read_text()]
    assert len(folders) == 5
    for folder in folders:
        text = "".join(p.read_text() for p in folder.rglob("*.py"))
        for other in folders:
            assert other == folder or f"sennit.backends.{other.name}" not in text


def test_bookkeeping_of_the_cache_knows_no_torch():
    for name in ("pages", "sequences"):
        assert "torch" not in (ROOT / "cache" / f"{name}.py").read_text()


def run(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout


def test_importing_sennit_loads_no_triton_transformers_compiler_or_backend():
    loaded = run(
        "import torch, sys; before = set(sys.modules); import sennit; print(*(set(sys.modules) - before))"
    ).split()
    heavy = [
        m for m in loaded
        if m.split(".")[0] in ("triton", "transformers", "rich", "typer", "tvm_ffi", "platformdirs", "filelock")
        or (m.startswith(("torch._inductor", "torch._dynamo", "sennit.backends.", "sennit.hf", "sennit.cli"))
        and m not in ("sennit.backends.base", "sennit.backends.registry"))
    ]  # fmt: skip
    assert heavy == []


def test_the_reference_backend_runs_with_triton_transformers_and_every_compiler_blocked():
    code = """
import os, sys
os.environ["PATH"] = ""
for name in ("triton", "transformers", "tvm_ffi", "torch._inductor", "torch.utils.cpp_extension", "ninja"):
    sys.modules[name] = None
import torch, sennit
spec = sennit.AttentionSpec(num_qo_heads=4, num_kv_heads=2, head_dim=8, dtype=torch.float32)
cache = sennit.KVCache([spec], num_tokens=64, page_size=4, device="cpu", backend="reference")
a = cache.add()
with cache.step([(a, 5)]) as step:
    out = step.attend(0, torch.randn(5, 4, 8), torch.randn(5, 2, 8), torch.randn(5, 2, 8), sm_scale=1.0)
print(tuple(out.shape), bool(out.isfinite().all()))
"""
    assert run(code) == "(5, 4, 8) True\n"


@pytest.mark.slow
def test_importing_sennit_adds_less_than_100_ms_to_importing_torch(tmp_path):
    # As installed: pip leaves bytecode, which the first of these imports writes where the environment forbids it.
    # CPU time, since other processes may be running.
    code = f"""
import time, torch, sys
sys.dont_write_bytecode, sys.pycache_prefix = False, {str(tmp_path)!r}
start = time.process_time()
import sennit
print(time.process_time() - start)
"""
    run(code)
    assert min(float(run(code)) for _ in range(5)) < 0.1
