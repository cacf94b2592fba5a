"""Kernels compile for GPUs that are not here, within registers and shared memory, once for sizes that may change."""

from __future__ import annotations

import json

import pytest
import torch
from typer.testing import CliRunner

import sennit
from sennit import variants
from sennit.backends.triton import costs
from sennit.bench import compiling
from sennit.bench.compiling import ARCHITECTURES, Layer, Outcome, compile_layers
from sennit.bench.machine_code import CompiledKernel
from sennit.cli import app
from sennit.errors import BackendUnavailable, InvalidInput

pytest.importorskip("triton")
if compiling.triton_interpreted():
    pytest.skip("TRITON_INTERPRET is set, and nothing can be compiled", allow_module_level=True)

SMALL = sennit.AttentionSpec(num_qo_heads=4, num_kv_heads=2, head_dim=16, dtype=torch.bfloat16)
LAYERS = compiling.usual_layers()
# Sums of very wide rows, and masks that are looked up key by key, take more registers than there are.
SPILLING = (
    "bf16 256, cap, window", "bf16 MLA 576/512", "bf16 128, tree", "bf16 128, packed mask",
    "bf16 128, score and mask functions",
)  # fmt: skip
FAST = ("bf16 128", "bf16 MLA 576/512", "fp32 128", "bf16 128, window, sink tokens", "bf16 128, packed keys")


def spilling(outcomes: list[Outcome]) -> list[tuple[str, str, str, int]]:
    """Kernels that must keep everything in registers while they loop over keys, and do not.

    What they have once a head, they may spill: it is loaded once a head.
    """
    return [
        (outcome.architecture, outcome.layer, kernel.name, kernel.spills_in_loops)
        for outcome in outcomes
        for kernel in outcome.kernels
        if kernel.spills_in_loops and outcome.layer not in SPILLING
    ]


def check(outcomes: list[Outcome]) -> None:
    assert not [(outcome.layer, outcome.error) for outcome in outcomes if outcome.error]
    for outcome in outcomes:
        assert outcome.shared_memory <= ARCHITECTURES[outcome.architecture].shared_memory, outcome
    assert not spilling(outcomes)


@pytest.mark.slow
def test_usual_layers_compile_for_hopper_and_one_for_ampere():
    check(compile_layers({name: LAYERS[name] for name in FAST}, ["sm_90"]))
    check(compile_layers({"bf16 128": LAYERS["bf16 128"]}, ["sm_80"]))


@pytest.mark.thorough
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_all_layers_compile(architecture):
    check(compile_layers(LAYERS, [architecture]))


@pytest.mark.slow
def test_sizes_of_captured_tensors_compile_nothing_anew_and_other_functions_do():
    def layer(function, *sizes):
        captured = torch.zeros(sizes, dtype=torch.int32)
        return Layer(SMALL.replace(mask_mod=function(captured)), captures={"document_id": captured})

    def adjacent(document_id):
        return lambda b, h, q_idx, kv_idx: (document_id[b, q_idx] - document_id[b, kv_idx]).abs() <= 1

    def attend(layers):
        outcomes = compile_layers(layers, ["sm_80"])
        assert not [outcome.error for outcome in outcomes if outcome.error]
        return [kernel.key for outcome in outcomes for kernel in outcome.kernels if kernel.name == "attend_kernel"]

    same = {f"{sizes}": layer(variants.document, *sizes) for sizes in ((3, 4096), (1, 1), (16, 77), (2, 2**16))}
    one = len(attend({"document": same["(1, 1)"]}))
    assert one > 0
    assert len(attend(same)) == one
    assert len(attend({"document": layer(variants.document, 3, 50), "adjacent": layer(adjacent, 3, 50)})) == 2 * one


def test_what_cannot_be_compiled_for_is_refused(monkeypatch):
    with pytest.raises(InvalidInput, match=r"expected one of sm_80, .* got sm_12"):
        compile_layers(LAYERS, ["sm_12"])
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(BackendUnavailable, match="TRITON_INTERPRET"):
        compile_layers(LAYERS, ["sm_80"])


def test_the_command_prints_what_was_found_and_fails_where_it_does_not_fit(monkeypatch):
    kernel = CompiledKernel("attend_kernel", 8, 240, 16, 0, 170 * 1024, "key")
    found = [Outcome("bf16 128", name, "128x64-132", (kernel,)) for name in ("sm_80", "sm_90")]
    monkeypatch.setattr(compiling, "compile_layers", lambda layers, names, *_: found[-len(names) :])

    def run(*arguments):
        return CliRunner().invoke(app, ["kernels", *arguments], env={"COLUMNS": "160", "NO_COLOR": "1"})

    result = run("--arch", "sm_90", "--only", "bf16 128")
    assert result.exit_code == 0
    for part in ("sm_90: 227 KiB", "bf16 128", "128x64-132", "attend", "240", "16", "170.0"):
        assert part in result.stdout
    result = run("--json")
    assert result.exit_code == 1  # sm_80 has 163 KiB
    read = json.loads(result.stdout)
    assert read["shared_memory"] == {"sm_80": 163 * 1024, "sm_90": 227 * 1024}
    assert read["outcomes"][0]["kernels"][0]["registers"] == 240
    assert run("--only", "nothing").exit_code == 2
    assert run("--backend", "cpu").exit_code == 2


def test_layers_that_the_backend_does_not_take_are_an_error():
    result = CliRunner().invoke(app, ["kernels", "--backend", "hopper", "--only", "fp32*"])
    assert result.exit_code == 2
    assert "of which hopper takes some, got fp32 128" in " ".join(result.stderr.split())
    result = CliRunner().invoke(app, ["kernels", "--backend", "hopper", "--arch", "sm_80"])
    assert (result.exit_code, "expected sm_90" in result.stderr) == (2, True)


@pytest.mark.parametrize(
    ("architecture", "dim", "fits"), [("sm_90", 2048, True), ("sm_90", 4096, False), ("sm_86", 2048, False)]
)
def test_heads_that_no_tile_has_room_for_are_refused(architecture, dim, fits):
    spec = sennit.AttentionSpec(num_qo_heads=1, num_kv_heads=1, head_dim=dim, dtype=torch.float16)
    support = costs.has_room(spec, ARCHITECTURES[architecture])
    assert support.accepted == fits
    assert fits or "shared memory" in support.reason
