"""``sennit check``: right backends pass, each fault of a wrong one is found, and what it prints repeats the failure."""

from __future__ import annotations

import json
import os
import shlex

import pytest

from sennit.check.outcome import Outcome
from sennit.check.selftest import cases
from sennit.cli import checking
from sennit.cli.checking import Finding
from sennit.errors import UnsupportedFeature

BATTERY = [case for case in cases("reference-items", num_random=6) if case.group not in ("pages", "dims")]


@pytest.mark.parametrize("case", BATTERY, ids=lambda case: case.name)
def test_the_battery_passes_when_items_are_run_one_by_one(case):
    outcome = case.run()
    assert outcome.passed, outcome.text


def test_names_are_unique_and_cover_what_is_promised():
    names = [case.name for case in cases("reference", num_random=3, num_operations=401)]
    assert len(set(names)) == len(names)
    groups = {name.partition("/")[0] for name in names}
    assert groups == {
        "dims", "groups", "latent", "tiles", "lengths", "pages", "packed", "splits", "masks", "functions", "append",
        "cache", "random", "operations",
    }  # fmt: skip
    assert names[-3:] == ["operations/0", "operations/1", "operations/2"]


def find(name, **options):
    return next(case for case in cases("reference", **options) if case.name == name)


@pytest.mark.parametrize("name", ["dims/64x64-bfloat16", "random/5", "operations/1"])
def test_a_case_has_the_same_numbers_wherever_and_whenever_it_runs(name):
    first, second = (find(name, num_random=n, num_operations=100 * n) for n in (6, 9))
    assert first.run() == second.run()


def test_random_cases_depend_on_the_seed():
    one, other = (find("random/0", num_random=1, seed=seed).run() for seed in (0, 1))
    assert one.text != other.text
    one, other = (find("operations/0", num_operations=60, seed=seed).run() for seed in (0, 1))
    assert one.seen != other.seen


def test_operations_are_as_many_as_were_asked_for():
    from sennit.check.operations import OPERATIONS

    found = [case.run().seen for case in cases("reference", num_random=0, num_operations=250) if case.group[0] == "o"]
    assert [sum(seen[name] for name in OPERATIONS) for seen in found] == [200, 50]


def run_case(backend, name):
    return next(case for case in cases(backend, num_random=0) if case.name == name).run()


@pytest.mark.parametrize(
    ("fault", "name"),
    [
        ("inexact", "dims/64x64-float32"),
        ("inexact", "cache/float32-pages-of-4"),
        ("misplacing", "append/float32"),
        ("misplacing", "append/latent"),
        ("idle", "append/bfloat16"),
        ("forgetful", "cache/latent-pages-of-16"),
    ],
)
def test_a_faulty_backend_fails_the_case_that_is_about_its_fault(add_backend, fault, name):
    outcome = run_case(add_backend(fault, f"faulty_backends:{fault.upper()}"), name)
    assert not outcome.passed


def test_what_a_backend_does_not_support_is_raised_as_such(add_backend):
    with pytest.raises(UnsupportedFeature, match="latent keys not implemented"):
        run_case(add_backend("choosy", "faulty_backends:CHOOSY"), "latent/float32")


def test_a_right_backend_ends_with_exit_code_0(sennit):
    result = sennit("check", "--backend", "reference", "--random", "3", "--only", "[lr]*")
    assert result.exit_code == 0, result.stdout
    assert "reference on cpu: 14 of 14 cases right" in result.stdout


@pytest.mark.compiler
def test_without_a_name_every_backend_that_can_run_here_is_checked(sennit, add_backend):
    add_backend("absent", "faulty_backends:ABSENT")
    result = json.loads(sennit("check", "--device", "cpu", "--only", "lengths/empty", "--json").stdout)
    assert [group["backend"] for group in result["groups"]] == ["cpu", "reference", "reference-items"]


@pytest.mark.parametrize("group", ["random", "operations"])
@pytest.mark.parametrize("fault", ["inexact", "raising"])
def test_a_failure_ends_with_exit_code_1_and_the_command_that_repeats_it(sennit, add_backend, fault, group):
    add_backend(fault, f"faulty_backends:{fault.upper()}")
    sizes = ("--seed", "4", "--random", "8", "--operations", "400")
    options = ("--backend", fault, "--device", "cpu", *sizes, "--only", f"{group}/*")
    result = sennit("check", *options, "--json")
    found = json.loads(result.stdout)
    assert result.exit_code == 1
    assert not found["passed"]
    failure = found["failures"][0]
    assert ("page_size=" if group == "random" else "operations: ") in failure["text"]
    assert ("no such kernel" in failure["text"]) == (fault == "raising")
    again = sennit(*shlex.split(failure["repeat"])[1:], "--json")
    assert again.exit_code == 1
    assert [f["text"] for f in json.loads(again.stdout)["failures"]] == [failure["text"]]
    printed = sennit("check", *options)
    assert printed.exit_code == 1
    assert failure["repeat"] in printed.stdout
    assert "--seed 4" in printed.stdout


@pytest.mark.parametrize("fault", ["misplacing", "idle", "forgetful", "inexact"])
def test_operations_find_what_is_wrong_with_stored_keys(sennit, add_backend, fault):
    add_backend(fault, f"faulty_backends:{fault.upper()}")
    result = json.loads(sennit("check", "--backend", fault, "--only", "operations/*", "--json").stdout)
    assert result["failures"]
    assert all("Disagreement" in failure["text"] for failure in result["failures"])


def test_long_is_a_million_operations_and_20000_batches_of_which_each_runs_alone(sennit):
    options = ("check", "--backend", "reference", "--device", "cpu", "--long", "--seed", "2")
    last = json.loads(sennit(*options, "--only", "operations/4999", "--json").stdout)
    assert last["passed"]
    assert sum(last["groups"][0]["seen"].values()) >= 200
    assert sennit(*options, "--only", "random/19999", "--json").exit_code == 0
    for beyond in ("operations/5000", "random/20000"):
        assert sennit(*options, "--only", beyond).exit_code == 2
    fewer = sennit(*options, "--operations", "300", "--random", "3", "--only", "operations/*")
    assert "2 of 2 cases right" in fewer.stdout
    assert "fork" in fewer.stdout


def test_several_processes_find_what_one_does(sennit):
    options = ("check", "--backend", "reference", "--random", "3", "--operations", "30", "--only", "[lro]*", "--json")
    one, several = (json.loads(sennit(*options, "--jobs", jobs).stdout) for jobs in ("1", "3"))
    for found in (one, several):
        del found["seconds"]
    assert several == one
    assert several["passed"]


def dying(say, jobs):
    """Stands for a process in which the second case ends Python."""
    say(Finding(outcome=Outcome(0.0, jobs[0][1])))
    if len(jobs) > 1:
        os._exit(3)


def test_a_process_that_dies_has_failed_one_case_and_another_goes_on(monkeypatch):
    monkeypatch.setattr(checking, "_serve", dying)
    battery = checking.Battery("reference", "cpu", 0, 0, 0)
    jobs = [(battery, f"lengths/{index}") for index in range(6)]
    found = dict(checking.find(jobs, num_processes=2))
    assert list(map(found.get, jobs[:4])) == [
        Finding(outcome=Outcome(0.0, "lengths/0")), Finding(outcome=Outcome(0.0, "lengths/1")),
        Finding(error="the process ended with exit code 3 and without an answer"),
        Finding(error="the process ended with exit code 3 and without an answer"),
    ]  # fmt: skip
    assert all(finding.outcome for finding in map(found.get, jobs[4:]))


def test_what_is_not_supported_is_skipped_with_the_reason_and_not_failed(sennit, add_backend):
    add_backend("choosy", "faulty_backends:CHOOSY")
    options = ("check", "--backend", "choosy", "--only", "latent/*", "--random", "0")
    result = json.loads(sennit(*options, "--json").stdout)
    assert result["passed"]
    (group,) = result["groups"]
    assert (group["passed"], group["skipped"]) == (0, 4)
    assert "latent keys not implemented" in group["skip_reasons"][0]
    assert "latent keys not implemented" in " ".join(sennit(*options).stdout.split())


def test_a_backend_that_cannot_run_here_is_an_error(sennit, add_backend):
    result = sennit("check", "--backend", add_backend("absent", "faulty_backends:ABSENT"))
    assert result.exit_code == 2
    assert "needs a GPU [red]of another kind" in result.stderr


@pytest.mark.parametrize("width", [80, 120])
def test_the_table_fits_the_terminal(sennit, width):
    result = sennit("check", "--backend", "reference", "--random", "1", "--only", "*/*32", width=width)
    assert max(map(len, result.stdout.splitlines())) <= width
