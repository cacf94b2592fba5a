"""``sennit plan``: the numbers are the plan's, and every worker has its bar."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from rich.console import Console

from sennit import AttentionSpec, Batch, BatchAttention
from sennit.backends import registry
from sennit.cli import plan as plan_command
from sennit.cli.bars import WorkerBars
from sennit.plan.cost import KernelConfig
from sennit.plan.example import example_config
from sennit.plan.plan import make_plan

MIX = "2048@2048 + 128*1@2048"


def described(sennit, *arguments):
    result = sennit("plan", *arguments, "--json")
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout)


def make(text, config, **options):
    spec = AttentionSpec(num_qo_heads=32, num_kv_heads=8, head_dim=128, dtype=torch.bfloat16)
    return make_plan(
        Batch.parse(text, page_size=16),
        spec=spec,
        owner="test",
        backend="test",
        configs=(config,),
        page_size=16,
        device=torch.device("cpu"),
        **options,
    )


@pytest.mark.parametrize("combine", ["sum", "max"])
def test_json_holds_the_numbers_of_the_plan(sennit, combine):
    found, plan = described(sennit, MIX, "--combine", combine), make(MIX, example_config(132, combine))
    assert found["items"] == plan.schedule.num_items
    assert found["merges"] == plan.schedule.num_merges
    assert found["partial_rows"] == plan.schedule.num_partial_rows
    np.testing.assert_allclose([found["loads_us"]["wide"], found["loads_us"]["narrow"]], plan.schedule.loads)
    assert found["makespan_us"] == pytest.approx(plan.loads.max())
    assert found["imbalance"] == pytest.approx(plan.loads.max() / plan.loads.mean())


@pytest.mark.parametrize("options", [(), ("--split-size", "128"), ("--combine", "sum")], ids=" ".join)
def test_segments_are_grouped_and_their_numbers_add_up(sennit, options):
    found = described(sennit, "1@9 + 3*1@900 + 0@4 + 2*1@900", *options)
    groups = [(g["requests"], g["q_len"], g["kv_len"], g["strand"]) for g in found["segments"]]
    assert groups == [(1, 1, 9, "narrow"), (3, 1, 900, "narrow"), (1, 0, 4, None), (2, 1, 900, "narrow")]
    assert sum(g["items"] for g in found["segments"]) == found["items"] == sum(found["items_by_strand"].values())
    assert sum(g["splits"] for g in found["segments"]) == found["splits"]
    assert sum(g["time_us"] for g in found["segments"]) == pytest.approx(sum(map(sum, found["loads_us"].values())))


def test_fixed_splits_fall_on_multiples_whatever_the_workers(sennit):
    found = described(sennit, "1@100", "--split-size", "32", "--heads", "8/2")
    assert (found["splits"], found["merges"]) == (8, 2)  # four chunks of two KV heads


def test_options_reach_the_plan(sennit):
    found = described(sennit, "256@256", "--heads", "6/2", "--head-dim", "192/128", "--page-size", "8", "--no-causal")
    given = {
        "num_qo_heads": 6,
        "num_kv_heads": 2,
        "head_dim_qk": 192,
        "head_dim_vo": 128,
        "page_size": 8,
        "causal": False,
    }
    assert given.items() <= found.items()
    causal = described(sennit, "256@256", "--heads", "6/2")
    assert found["segments"][0]["time_us"] > causal["segments"][0]["time_us"]


def test_a_backend_brings_its_own_configuration(sennit):
    spec = AttentionSpec(num_qo_heads=32, num_kv_heads=8, head_dim=128, dtype=torch.bfloat16)
    config = registry.load("reference").configs(spec, torch.device("cpu"))[0]
    found = described(sennit, MIX, "--backend", "reference")
    assert (found["configuration"], found["workers"]) == (config.name, config.num_workers)


def test_it_is_said_what_a_plan_is_for(sennit):
    assert "planned for    an imaginary GPU" in sennit("plan", MIX).stdout
    assert "planned for    reference " in sennit("plan", MIX, "--backend", "reference").stdout


def test_auto_is_the_backend_that_would_be_chosen(sennit):
    spec = AttentionSpec(num_qo_heads=32, num_kv_heads=8, head_dim=128, dtype=torch.bfloat16)
    chosen = BatchAttention(spec, page_size=16).plan(Batch.parse(MIX, page_size=16)).backend
    assert described(sennit, MIX, "--backend", "auto")["backend"] == chosen


@pytest.mark.parametrize(("option", "value"), [("--workers", "8"), ("--combine", "sum")])
def test_options_of_the_example_are_refused_beside_a_backend(sennit, option, value):
    result = sennit("plan", MIX, "--backend", "reference", option, value)
    assert result.exit_code == 2
    assert result.stderr.startswith(f"error: {option}: expected nothing beside --backend")
    assert result.stderr.endswith(f", got {value}\n")


def test_a_backend_that_cannot_run_here_is_an_error_with_its_reason(sennit, add_backend):
    result = sennit("plan", MIX, "--backend", add_backend("absent", "faulty_backends:ABSENT"))
    assert result.exit_code == 2
    assert "needs a GPU [red]of another kind" in result.stderr


MEASURED = "90@300 + 12*1@200", "--heads", "4/2", "--backend", "reference-items", "--measure"


def test_measured_items_follow_each_other_and_fill_their_workers(sennit):
    found = described(sennit, *MEASURED)
    measured = found["measured"]
    start, end = np.array(measured["start_us"]), np.array(measured["end_us"])
    assert len(start) == found["items"]
    assert start.min() == 0.0
    assert (end > start).all()
    loads = np.array([measured["loads_us"][name] for name in ("wide", "narrow")])
    assert loads.sum() == pytest.approx((end - start).sum())
    assert ((loads > 0) == (np.array(list(found["loads_us"].values())) > 0)).all()
    assert measured["makespan_us"] == end.max()


@pytest.mark.parametrize("options", [(), ("--no-causal",), ("--split-size", "64")], ids=" ".join)
def test_the_plan_that_is_measured_is_the_one_that_is_shown(sennit, options):
    found = described(sennit, *MEASURED, *options)
    assert len(found.pop("measured")["start_us"]) == found["items"]
    assert found == described(sennit, *MEASURED[:-1], *options)


def test_of_times_that_cannot_be_told_the_reason_is(sennit):
    strands = described(sennit, "9@40", *MEASURED[1:])["measured"]["strands"]
    untold = {strand["name"]: strand["untold"] for strand in strands}
    assert untold["wide"]["key step"] == "0 of the 8 items needed"
    for strand in strands:
        assert {part for part, time in strand["measured_us"].items() if time is None} == set(strand["untold"])
    assert "cannot be told: 0 of the 8 items needed" in sennit("plan", "9@40", *MEASURED[1:]).stdout
    alike = described(sennit, "30*1@64", *MEASURED[1:])["measured"]["strands"][1]
    assert alike["untold"]["key step"] == "its items differ too little"


def test_tables_say_what_their_columns_are(sennit):
    words = " ".join(sennit("plan", *MEASURED).stdout.split())
    assert "keys a row: planned for the mean query row" in words
    assert "configured: what the planner counts with" in words


def test_measured_loads_are_drawn_beside_the_predicted_ones(sennit):
    result = sennit("plan", *MEASURED)
    assert result.exit_code == 0
    assert "Load of each worker" in result.stdout
    assert "Measured, each worker busy" in result.stdout
    assert "key step" in result.stdout


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ([], "--backend beside it"),
        (["--backend", "reference"], "reference-items has"),
        (["--backend", "reference-items", "--page-size", str(2**31 - 1)], "ask for a smaller batch"),
    ],
)
def test_what_cannot_be_measured_is_said(sennit, options, text):
    result = sennit("plan", "9@40", "--measure", *options)
    assert result.exit_code != 0
    assert text in result.stderr


@pytest.mark.parametrize("width", [60, 80, 120, 200])
@pytest.mark.parametrize("combine", ["sum", "max"])
def test_every_worker_has_a_bar_and_no_line_is_too_long(sennit, width, combine):
    result = sennit("plan", MIX, "--combine", combine, width=width)
    lines = result.stdout.splitlines()
    assert max(map(len, lines)) <= width
    first = next(i for i, line in enumerate(lines) if line.startswith("Load of each worker"))
    labels = [int(word) for line in lines[first + 1 : -1] for word in line.split() if word.isdecimal()]
    assert sorted(labels) == list(range(132))


def test_an_empty_batch_is_printed(sennit):
    result = sennit("plan", "", "--workers", "2")
    assert result.exit_code == 0
    assert "(empty)" in result.stdout
    assert "Load of" not in result.stdout


def test_strands_with_workers_of_their_own_have_bars_of_their_own(sennit, monkeypatch):
    wide, narrow = (replace(strand, workers=4) for strand in example_config().strands)
    config = KernelConfig("apart", (wide, narrow), 4, "apart")
    monkeypatch.setattr(plan_command, "_example", lambda workers, combine: (config,))
    shares = [strand["workers"] for strand in described(sennit, MIX)["strands"]]
    assert sum(shares) == 4
    blocks = sennit("plan", MIX).stdout.split("Load of each ")[1:]
    assert [block.split(",")[0] for block in blocks] == ["wide worker", "narrow worker"]
    for block, count in zip(blocks, shares, strict=True):
        labels = [int(word) for line in block.splitlines()[1:] for word in line.split() if word.isdecimal()]
        assert sorted(labels) == list(range(count))
    alone = sennit("plan", "128*1@2048").stdout
    assert alone.count("Load of each") == alone.count("Load of each narrow worker") == 1


def drawn(bars, *, width, colour=False):
    console = Console(width=width, no_color=not colour, force_terminal=colour, color_system="256" if colour else None)
    with console.capture() as capture:
        console.print(bars)
    return capture.get().splitlines()


def test_stacked_bars_add_the_strands_and_the_fullest_fills_its_line():
    bars = WorkerBars(np.array([3.0, 0.0, 1.0]), np.array([1.0, 2.0, 0.0]), side_by_side=False)
    lines = [line.split()[1] for line in drawn(bars, width=30)[:3]]
    assert lines == ["█" * 15 + "▒" * 5, "▒" * 10 + "·" * 10, "█" * 5 + "·" * 15]


def test_bars_side_by_side_show_the_longer_strand_and_tell_which():
    bars = WorkerBars(np.array([4.0, 1.0]), np.array([2.0, 3.0]), side_by_side=True)
    lines = [line.split()[1] for line in drawn(bars, width=30)[:2]]
    assert lines == ["█" * 10 + "▀" * 10, "█" * 5 + "▄" * 10 + "·" * 5]


def test_in_colour_the_strands_have_two_colours():
    bars = WorkerBars(np.array([4.0]), np.array([2.0]), side_by_side=True)
    text = "\n".join(drawn(bars, width=30, colour=True))
    assert "\x1b[38;5;27;48;5;208m" + "▀" * 10 in text


def test_of_too_many_workers_the_fullest_neighbours_are_drawn():
    wide = np.ones(10_000)
    wide[4321] = 2.0
    lines = drawn(WorkerBars(wide, np.zeros(10_000), side_by_side=False), width=80)
    assert len(lines) < 60
    assert sum("█" * 13 in line for line in lines) == 1
    assert "the fullest of" in lines[-1]
