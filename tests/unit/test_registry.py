"""Which backend is taken, and what is said where none is, or only a slower one."""

from __future__ import annotations

import pytest
import torch

import sennit
from sennit import jit
from sennit.backends import registry

SPEC = sennit.AttentionSpec(num_qo_heads=2, num_kv_heads=1, head_dim=8, dtype=torch.float32)
CPU = torch.device("cpu")


@pytest.fixture
def no_compiler(tmp_path, monkeypatch):
    """The path of a compiler that is not there."""
    monkeypatch.setenv("CXX", str(tmp_path / "none"))
    return tmp_path / "none"


def test_a_named_backend_that_cannot_run_says_so_and_nothing_of_others(no_compiler):
    with pytest.raises(sennit.BackendUnavailable) as caught:
        sennit.BatchAttention(SPEC, device="cpu", backend="cpu")
    assert str(caught.value).startswith(f"backend 'cpu' cannot run here: no C++ compiler: CXX is '{no_compiler}'")


@pytest.mark.compiler
def test_a_named_backend_that_refuses_a_spec_says_so_and_nothing_of_others():
    with pytest.raises(sennit.UnsupportedFeature, match=r"backend 'cpu' does not take it: dtype=torch\.float64"):
        sennit.BatchAttention(SPEC.replace(dtype=torch.float64), device="cpu", backend="cpu")


def test_a_fall_back_is_told_once_at_the_line_that_called_sennit(no_compiler, recwarn):
    for _ in range(2):
        attn = sennit.BatchAttention(SPEC, page_size=4, device="cpu")
        assert attn.plan(sennit.Batch.parse("1@3", page_size=4)).backend == "reference"
    [told] = recwarn
    assert told.filename == __file__
    said = f"attention runs on backend 'reference', {registry.SLOWER}, since backend 'cpu' cannot: no C++ compiler: "
    assert str(told.message).startswith(said)


@pytest.mark.compiler
@pytest.mark.parametrize(
    ("kept", "accepted"), [((), False), (("cpu-cache",), False), (("cpu-attention",), False), (..., True)]
)
def test_where_nothing_can_be_built_the_cpu_backend_runs_on_what_is_there(kept, accepted, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("SENNIT_CACHE_DIR", str(tmp_path / "file"))
    monkeypatch.setattr(jit, "find", lambda source: tmp_path if kept is ... or source.name in kept else None)
    support = registry.load("cpu").available(CPU)
    assert support.accepted == accepted
    assert accepted or (support.mendable and f"{tmp_path / 'file'} is not a folder" in support.reason)


@pytest.mark.compiler
def test_asking_whether_the_cpu_backend_can_run_builds_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("SENNIT_CACHE_DIR", str(tmp_path))
    assert registry.load("cpu").available(CPU).accepted
    assert not list(tmp_path.rglob("*.so"))
