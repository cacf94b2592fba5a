"""What kernels are compiled for tells kernels of one release from those of another."""

from __future__ import annotations

from pathlib import Path

import pytest

from sennit.backends.gpus import variant
from sennit.backends.hopper.variant import Variant

FACTS = {
    "group_size": 4, "dim_qk": 128, "dim_vo": 128, "page_size": 16, "window_left": None, "window_right": None,
    "num_sink_tokens": 0, "logits_soft_cap": None, "trees": False,
}  # fmt: skip
MORE = {
    "wide": None, "narrow": None, "columns": 128, "box_rows": 16, "aligned": True, "query_boxes": True,
    "ordinary_scale": True,
}  # fmt: skip


@pytest.mark.parametrize("changed", ["gpus", "hopper"])
def test_kernels_that_triton_keeps_are_not_taken_for_those_of_other_properties(changed, monkeypatch):
    """Which would be run with the shapes and registers of a release that is no longer installed."""
    before = repr(Variant(**FACTS, **MORE))
    read = Path.read_bytes
    monkeypatch.setattr(Path, "read_bytes", lambda path: read(path) + b"#" * (path.parent.name == changed))
    assert repr(Variant(**FACTS, **MORE)) == before
    variant._hash_of_files.cache_clear()
    assert repr(Variant(**FACTS, **MORE)) != before
    variant._hash_of_files.cache_clear()
