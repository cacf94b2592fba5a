"""What kernels are compiled for tells kernels of one release from those of another."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import sennit
from sennit.backends.hopper.variant import Variant

FACTS = {
    "group_size": 4, "dim_qk": 128, "dim_vo": 128, "page_size": 16, "window_left": None, "window_right": None,
    "num_sink_tokens": 0, "logits_soft_cap": None, "trees": False, "wide": None, "narrow": None, "columns": 128,
    "box_rows": 16, "aligned": True, "query_boxes": True, "ordinary_scale": True,
}  # fmt: skip
SOURCES_OF_VARIANTS = f"""
import sys
sys.path.insert(0, sys.argv[1])
import sennit.backends.hopper.variant as hopper
from pathlib import Path
assert hopper.__file__.startswith(sys.argv[1])
print(hopper.Variant(**{FACTS!r}).source)
for file in sys.argv[2:]:
    path = Path(file)
    path.write_text(path.read_text() + "# another release")
print(hopper.Variant(**{FACTS!r}).source)
"""
IN_AN_ARCHIVE = f"""
import sys
sys.path.insert(0, sys.argv[1])
import torch
import sennit
import sennit.backends.hopper.variant as hopper
spec = sennit.AttentionSpec(num_qo_heads=4, num_kv_heads=2, head_dim=8, dtype=torch.float32)
attn = sennit.BatchAttention(spec, page_size=4, device="cpu")
plan = attn.plan(sennit.Batch.parse("1@9", page_size=4))
pools = torch.zeros(3, 4, 2, 8), torch.zeros(3, 4, 2, 8)
print(attn.run(plan, torch.randn(1, 4, 8), pools, sm_scale=1.0).shape)
print(hopper.Variant(**{FACTS!r}).source)
print(sennit.__file__.startswith(sys.argv[1]), *(reason for name, _, reason in attn.backends if name == "cpu"))
"""


def _lines(code: str, *arguments: object) -> list[str]:
    found = subprocess.run([sys.executable, "-c", code, *map(str, arguments)], capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
    return found.stdout.splitlines()


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A copy of the package's modules, without its C++."""
    folder = Path(sennit.__file__).parent
    for file in folder.rglob("*.py"):
        copy = tmp_path / file.relative_to(folder.parent)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(file, copy)
    return tmp_path


@pytest.mark.parametrize("changed", ["gpus", "hopper"])
def test_kernels_that_triton_keeps_are_not_taken_for_those_of_other_properties(changed, package):
    """Which would be run with the shapes and registers of a release that is no longer installed."""
    file = package / "sennit" / "backends" / changed / "variant.py"
    before, while_it_is_replaced = _lines(SOURCES_OF_VARIANTS, package, file)
    assert while_it_is_replaced == before
    assert _lines(SOURCES_OF_VARIANTS, package)[0] != before


def test_a_package_in_an_archive_plans_and_computes(package):
    """Where no C++ source can be read: NumPy plans, and the reference backend computes, and says why."""
    archive = shutil.make_archive(str(package / "sennit"), "zip", package, "sennit")
    shape, source, reason = _lines(IN_AN_ARCHIVE, archive)
    assert shape == "torch.Size([1, 4, 8])"
    assert source == Variant(**FACTS).source
    assert reason.startswith("True the C++ source of 'cpu-cache' cannot be read")
