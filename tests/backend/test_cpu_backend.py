"""The CPU backend by itself: its threads, its instruction sets, and its kernels under sanitizers."""

from __future__ import annotations

import io
import os
import shlex
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
import torch
from solving import FLOATS, attention_for, gqa

from sennit.backends.cpu import BACKEND, backend, failures
from sennit.backends.cpu import linear as products
from sennit.backends.cpu import threads as finding
from sennit.backends.cpu.instructions import instruction_set
from sennit.check.problems import make_problem
from sennit.errors import BuildFailed, BuildUnavailable
from sennit.jit import find_toolchain

pytestmark = pytest.mark.compiler
SANITIZERS = ("libasan.so", "libubsan.so")
MAIN = "import sennit.cli; sennit.cli.main()"


def mixed_batch(dtype, seed=0, **fields):
    """Prefill, chunks, decodes, and requests without rows or keys, over enough keys for several workers."""
    lengths = [200, 1, 0, 7, 1, 33, 2], [230, 900, 9, 300, 0, 410, 1]
    return make_problem(np.random.default_rng(seed), gqa(4, 40, dtype=dtype).replace(**fields), *lengths, page_size=16)


def run(attn, problem, split_size=None):
    plan = attn.plan(problem.batch, split_size=split_size)
    return attn.run(plan, problem.q, problem.kv, sm_scale=problem.sm_scale, return_lse=True)


@pytest.mark.parametrize("form", ["as planned", pytest.param("wide", marks=pytest.mark.wide_tiles)])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_with_fixed_splits_any_number_of_threads_gives_the_same_bits(dtype, form):
    problem = mixed_batch(dtype, window_left=700)
    attn = attention_for(problem, "cpu")
    expected = run(attn, problem, split_size=64)
    for threads in (2, 3, 4):
        torch.set_num_threads(threads)
        plan = attn.plan(problem.batch, split_size=64)
        assert plan.schedule.worker_indptr.shape[1] == threads + 1
        for planned_for in (threads, 1):  # a plan may run on other threads than it was made for
            torch.set_num_threads(planned_for)
            got = attn.run(plan, problem.q, problem.kv, sm_scale=problem.sm_scale, return_lse=True)
            assert all(map(torch.equal, got, expected))


def test_python_threads_that_run_at_once_do_not_disturb_each_other():
    torch.set_num_threads(2)
    problems = [mixed_batch(dtype, seed) for seed, dtype in enumerate([torch.float32, torch.bfloat16, torch.float32])]
    attns = [attention_for(problem, "cpu") for problem in problems]
    expected = [run(*pair, split_size=64) for pair in zip(attns, problems, strict=True)]
    wrong, start = [], threading.Barrier(len(problems))

    def work(place):
        start.wait()
        for _ in range(20):
            got = run(attns[place], problems[place], split_size=64)
            if not all(map(torch.equal, got, expected[place])):
                wrong.append(place)

    workers = [threading.Thread(target=work, args=(place,)) for place in range(len(problems))]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not wrong


@pytest.fixture
def builds(monkeypatch):
    """The errors of coming builds, each of which takes a moment; those after them succeed."""
    errors = []

    def build():
        time.sleep(0.01)
        if errors:
            raise errors.pop(0)

    monkeypatch.setattr(backend, "_attention", lambda dtype, kv_dtype: None)
    monkeypatch.setattr(backend, "_append", build)
    yield errors
    backend._libraries.cache_clear()
    failures._failures.clear()


def reason():
    """Why attention of a kind is refused at the moment, or nothing."""
    return BACKEND.supports(gqa(3, 5), frozenset(), torch.device("cpu")).reason


@pytest.mark.parametrize("variable", ["CXX", "PATH", "SENNIT_CACHE_DIR", "SENNIT_CXXFLAGS", "SENNIT_CPU_ISA"])
def test_a_failed_build_is_not_tried_again_until_the_environment_changes(builds, monkeypatch, variable):
    builds += [BuildFailed("first"), BuildUnavailable("second")]
    monkeypatch.setattr(failures, "HOLD", 1e6)
    assert [reason(), reason()] == ["first", "first"]
    monkeypatch.setenv(variable, "generic")
    assert [reason(), reason()] == ["second", "second"]


def test_a_failed_build_is_tried_again_after_a_pause_and_a_success_is_kept(builds, monkeypatch):
    builds += [BuildUnavailable("disk full"), BuildUnavailable("still")]
    monkeypatch.setattr(failures, "HOLD", 5.0)
    assert [reason(), reason()] == ["disk full", "disk full"]
    time.sleep(0.1)
    assert [reason(), reason()] == ["still", "still"]
    time.sleep(0.1)
    assert reason() == ""
    builds += [BuildFailed("never asked for")]
    assert reason() == ""


@pytest.mark.parametrize("inside", ["lib/libgomp-1.so.1", "lib/libomp.so"])
def test_only_what_lies_in_its_folder_is_pytorchs_openmp(monkeypatch, inside):
    own = os.path.join(os.path.realpath(os.path.dirname(torch.__file__)), inside)
    others = ["/envs/pytorch/lib/python3/site-packages/scikit_learn.libs/libgomp-2.so.1", "/a/torch.py/libgomp.so.1"]
    text = "".join(f"7f00-7f01 r-xp 00000000 08:01 42    {path}\n" for path in [*others, own, "/lib/libc.so.6"])
    monkeypatch.setattr(finding, "open", lambda path: io.StringIO(text), raising=False)
    found = finding._loaded()
    assert found[0] == own
    assert sorted(found) == sorted([*others, own])


def check(*options, **environment):
    """Run ``sennit check`` on this backend in a process of its own."""
    command = [sys.executable, "-c", MAIN, "check", "--device", "cpu", "--backend", "cpu", *options]
    found = subprocess.run(command, capture_output=True, text=True, env=os.environ | environment)
    assert found.returncode == 0, f"{environment}: {found.stdout}\n{found.stderr}"


@pytest.fixture
def isa(request, monkeypatch):
    """An instruction set by its name, where this machine has it."""
    monkeypatch.setenv("SENNIT_CPU_ISA", request.param)
    try:
        instruction_set()
    except BuildUnavailable as error:
        pytest.skip(str(error))


@pytest.mark.thorough
@pytest.mark.parametrize("isa", ["amx", "avx512_bf16", "avx512", "avx2", "neon", "generic"], indirect=True)
def test_every_instruction_set_of_this_machine_gives_right_results(isa):
    check("--random", "60", "--operations", "400")


@pytest.mark.thorough
def test_sanitizers_find_nothing():
    """Overruns, use after free, misaligned or null pointers and undefined arithmetic end the process."""
    compiler = find_toolchain()
    paths = [
        subprocess.check_output([*compiler.command, f"-print-file-name={library}"], text=True).strip()
        for library in SANITIZERS
    ]
    if not all(map(os.path.isabs, paths)):
        pytest.skip(f"{compiler.version} has no {' and '.join(SANITIZERS)}")
    check(
        "--random", "40", "--operations", "200",
        CXX=shlex.join(["env", "-u", "LD_PRELOAD", *compiler.command]),  # the compiler itself runs without them
        SENNIT_CXXFLAGS="-fsanitize=address,undefined -fno-sanitize-recover=undefined -O1",
        LD_PRELOAD=" ".join(paths),
        ASAN_OPTIONS="detect_leaks=0",
    )  # fmt: skip


@pytest.fixture
def few_rows():
    if not products.ready():
        pytest.skip("the processor does not multiply pairs of bfloat16")


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    ("rows", "dim", "outputs"), [(1, 32, 1), (3, 64, 63), (16, 96, 64), (17, 544, 65), (32, 1536, 130), (5, 2080, 200)]
)
def test_few_rows_times_weights_are_as_exact_as_pytorchs(few_rows, rows, dim, outputs, bias):
    memory = torch.full((outputs + 1, dim + 32), torch.nan, dtype=torch.bfloat16)  # nothing beside the weights is read
    weight = memory[:outputs, :dim].copy_(torch.randn(outputs, dim))
    x = torch.randn(2, dim, rows).mT.bfloat16()[:1]
    added = torch.randn(outputs).bfloat16() if bias else None
    exact = torch.nn.functional.linear(x.double(), weight.double(), None if added is None else added.double())
    with torch.no_grad():
        assert products.can_multiply(x, weight, added)
        found = products.linear(x, weight, added)
        plain = torch.nn.functional.linear(x, weight, added)
    assert found.shape == exact.shape
    rounding = torch.finfo(torch.bfloat16).eps * exact.abs().max()
    assert (found - exact).abs().max() <= 2 * (plain - exact).abs().max() + rounding
    assert torch.equal(found, products.linear(x, weight, added))


class Own(torch.Tensor):
    """As quantised weights come: what they say of themselves is not where their numbers are."""


def test_other_products_are_left_to_pytorch():
    weight = torch.randn(8, 64).bfloat16()
    x = torch.randn(2, 64).bfloat16()
    with torch.no_grad():
        assert products.can_multiply(x, weight, None)
        for other in (
            (x.float(), weight, None),
            (x, weight.float(), None),
            (x, weight, torch.zeros(8)),
            (x.repeat(20, 1), weight, None),
            (x[:0], weight, None),
            (x[:, :48], weight[:, :48], None),
            (x[:, :32], weight, None),
            (x, weight.t().contiguous().t(), None),
            (x, weight.to_sparse(), None),
            (x, weight.as_subclass(Own), None),
            (x.as_subclass(Own), weight, None),
            (x, weight, torch.zeros(1).bfloat16()),
        ):
            assert not products.can_multiply(*other)
        with torch.autocast("cpu", torch.float16):
            assert not products.can_multiply(x, weight, None)
    assert not products.can_multiply(x, weight, None)  # gradients may be wanted
