"""What kernels are compiled for tells kernels of one release from those of another."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import sennit

FACTS = {
    "group_size": 4, "dim_qk": 128, "dim_vo": 128, "page_size": 16, "window_left": None, "window_right": None,
    "num_sink_tokens": 0, "logits_soft_cap": None, "trees": False, "wide": None, "narrow": None, "columns": 128,
    "box_rows": 16, "aligned": True, "query_boxes": True, "ordinary_scale": True,
}  # fmt: skip
SOURCE_OF_A_VARIANT = f"""
import sys
sys.path.insert(0, sys.argv[1])
import sennit.backends.hopper.variant as hopper
from pathlib import Path
for file in sys.argv[2:]:
    Path(file).write_text("changed = True")
assert hopper.__file__.startswith(sys.argv[1])
print(hopper.Variant(**{FACTS!r}).source)
"""


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """An archive of the package, which can be imported from."""
    folder = Path(sennit.__file__).parent
    with zipfile.ZipFile(tmp_path / "sennit.zip", "w") as archive:
        for file in folder.rglob("*.py"):
            archive.write(file, file.relative_to(folder.parent))
    return tmp_path / "sennit.zip"


def _run(code: str, *arguments: object) -> str:
    return subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)], capture_output=True, text=True, check=True
    ).stdout.strip()


@pytest.mark.parametrize("changed", ["gpus", "hopper"])
def test_kernels_that_triton_keeps_are_not_taken_for_those_of_other_properties(changed, package):
    """Which would be run with the shapes and registers of a release that is no longer installed."""
    unpacked = package.parent / "unpacked"
    with zipfile.ZipFile(package) as archive:
        archive.extractall(unpacked)
    file = unpacked / "sennit" / "backends" / changed / "variant.py"
    before = _run(SOURCE_OF_A_VARIANT, unpacked)
    assert before == _run(SOURCE_OF_A_VARIANT, package)
    file.write_text(file.read_text() + "# another release\n")
    after = _run(SOURCE_OF_A_VARIANT, unpacked)
    assert after != before
    assert after == _run(SOURCE_OF_A_VARIANT, unpacked, file)  # replaced while the process runs


def test_a_package_in_an_archive_plans_and_computes(package):
    """Where no C++ source can be read: NumPy plans, and the reference backend computes, and says why."""
    assert _run(
        """
import sys
sys.path.insert(0, sys.argv[1])
import torch
import sennit
spec = sennit.AttentionSpec(num_qo_heads=4, num_kv_heads=2, head_dim=8, dtype=torch.float32)
attn = sennit.BatchAttention(spec, page_size=4, device="cpu")
plan = attn.plan(sennit.Batch.parse("1@9", page_size=4))
pools = torch.zeros(3, 4, 2, 8), torch.zeros(3, 4, 2, 8)
print(attn.run(plan, torch.randn(1, 4, 8), pools, sm_scale=1.0).shape)
print(sennit.__file__.startswith(sys.argv[1]), *(reason for name, _, reason in attn.backends if name == "cpu"))
""",
        package,
    ).startswith("torch.Size([1, 4, 8])\nTrue the C++ source of 'cpu-cache' cannot be read")
