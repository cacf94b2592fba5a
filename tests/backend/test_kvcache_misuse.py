"""A cache that is used wrongly: steps left twice or by strangers, sizes no machine has, options of the wrong type."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from kvcache_twin import SCALE, Twin, assert_same_state, attend_all, gqa_spec, host_state, make_cache, whole_state

from sennit.attention import BatchAttention
from sennit.cache import pages, sequences, tables
from sennit.cache.layout import StorageLayout
from sennit.cache.memory import allocate
from sennit.errors import InvalidInput, StepClosed, StepOpen, UnknownSequence
from sennit.kvcache import KVCache

NEVER = 2**50  # tokens that no address space holds, in pages of 2**20


# Leaving a step that is not open


def never_entered(cache, seq):
    return cache.step([(seq, 1)])


def committed(cache, seq):
    step = cache.step([(seq, 1)])
    with step:
        attend_all(cache, step)
    return step


def rolled_back(cache, seq):
    step = cache.step([(seq, 1)])
    with pytest.raises(KeyError), step:
        raise KeyError
    return step


def refused_to_enter(cache, seq):
    step = cache.step([(seq, 10**6)])
    with pytest.raises(MemoryError):
        step.__enter__()
    return step


@pytest.mark.parametrize("error", [None, ValueError("mine")], ids=["no error", "error"])
@pytest.mark.parametrize("make", [never_entered, committed, rolled_back, refused_to_enter])
def test_leaving_a_step_that_is_not_open_touches_no_other_step(make, error):
    cache = make_cache()
    twin = Twin(cache)
    a, b, c = twin.add(3), twin.add(2), twin.add()
    stray = make(cache, a)
    with cache.step([(b, 5)]) as step:
        inside = host_state(cache)
        for _ in range(2):
            with pytest.raises(StepClosed, match="leaving the block: the step is not open"):
                stray.__exit__(type(error) if error else None, error, None)
        assert host_state(cache) == inside
        with pytest.raises(StepOpen):
            cache.step([(c, 3)])
        attend_all(cache, step)
    assert cache.length(b) == 7
    cache.check()


def test_a_step_left_by_hand_inside_its_own_block_is_committed_once():
    cache = make_cache()
    a = cache.add()

    def leave_twice():
        with cache.step([(a, 3)]) as step:
            attend_all(cache, step)
            step.__exit__(None, None, None)

    with pytest.raises(StepClosed):
        leave_twice()
    assert cache.length(a) == 3
    cache.check()


def test_two_open_steps_never_share_a_page():
    """A stray exit must not hand an open step's pages to the next one, which would be overwritten."""
    cache = make_cache([gqa_spec()])
    a, b = cache.add(), cache.add()
    stray = cache.step([(a, 1)])
    first = cache.step([(a, 3)]).__enter__()
    with pytest.raises(StepClosed):
        stray.__exit__(None, None, None)
    with pytest.raises(StepOpen):
        cache.step([(b, 3)])
    attend_all(cache, first)
    first.__exit__(None, None, None)
    with cache.step([(b, 3)]) as second:
        attend_all(cache, second)
    assert not set(cache.page_table(a)) & set(cache.page_table(b))


def test_items_that_enter_a_step_while_they_are_read_leave_that_step_open_and_right():
    cache = make_cache()
    twin = Twin(cache)
    a, b = twin.add(3), twin.add(2)
    inner = cache.step([(a, 2)])

    def items():
        inner.__enter__()
        yield b, 1

    with pytest.raises(StepOpen), cache.step(items()):
        pytest.fail("the block must not run")
    cache.check()
    attend_all(cache, inner)
    inner.__exit__(None, None, None)
    assert (cache.length(a), cache.length(b)) == (5, 2)
    cache.check()


@pytest.mark.parametrize("arguments", [("__enter__",), ("__exit__", None, None, None)], ids=["enter", "leave"])
def test_items_that_enter_or_leave_their_own_step_are_refused(arguments):
    cache = make_cache()
    a = cache.add()

    def items():
        getattr(step, arguments[0])(*arguments[1:])
        yield a, 1

    before = host_state(cache)
    step = cache.step(items())
    with pytest.raises(StepClosed), step:
        pytest.fail("the block must not run")
    assert host_state(cache) == before
    cache.check()


def test_leaving_a_step_while_it_is_entered_takes_nothing_from_it():
    """Planning reads ``causal`` when the pages are reserved and the step is not open yet."""
    refusals = []

    class Leaves(list):
        def __array__(self, *args, **kwargs):
            with pytest.raises(StepClosed) as caught:
                step.__exit__(None, None, None)
            refusals.append(caught.value)
            return np.array([True])

    cache = make_cache()
    a = cache.add()
    step = cache.step([(a, 3)], causal=Leaves([True]))
    with step:
        assert refusals
        cache.check()
        assert cache.stats().used_pages == 1
        attend_all(cache, step)
    assert cache.length(a) == 3
    cache.check()


# Ids, counts and options of the wrong type


@pytest.mark.parametrize("wrong", [True, 1.0, np.float64(1), np.True_, "1", None, torch.tensor(1)], ids=repr)
def test_what_only_equals_a_sequence_id_names_none(wrong):
    cache = make_cache()
    twin = Twin(cache)
    twin.add(5)
    twin.add(6)
    before = whole_state(cache)
    uses = [
        lambda: cache.length(wrong),
        lambda: cache.page_table(wrong),
        lambda: cache.read(wrong, 0),
        lambda: cache.fork(wrong),
        lambda: cache.trim(wrong, length=0),
        lambda: cache.remove(wrong),
        lambda: cache.pages_needed([(wrong, 1)]),
        lambda: cache.step([(wrong, 1)]).__enter__(),
    ]
    assert wrong not in cache
    for use in uses:
        with pytest.raises(UnknownSequence, match="is not in the cache: ids are integers"):
            use()
    assert_same_state(whole_state(cache), before)


@pytest.mark.parametrize("kind", [np.int64, np.int32, np.uint8])
def test_numpy_integers_are_taken_wherever_integers_are(kind):
    cache = KVCache([gqa_spec()] * 2, num_tokens=kind(64), page_size=kind(4), device="cpu")
    assert (cache.num_pages, cache.page_size, type(cache.page_size)) == (16, 4, int)
    assert KVCache([gqa_spec()], memory=np.int64(4096), page_size=kind(4), device="cpu").num_pages == 8
    cache.add()
    a = kind(cache.add())
    assert a in cache
    with cache.step([(a, kind(6))]) as step:
        assert step.plan(kind(1)) is step.plan(1)
        attend_all(cache, step)
    assert cache.length(cache.fork(a, kind(3))) == 3
    cache.trim(a, length=kind(5))
    assert cache.read(a, kind(1))[0].shape == (5, 2, 8)
    assert cache.pages_needed([(a, kind(4))]) == 1
    cache.remove(a)
    assert a not in cache
    cache.check()


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"append": "no"}, "append: expected a boolean, got 'no'"),
        ({"append": None}, "append"),
        ({"append": 0}, "append"),
        ({"append": torch.tensor(True)}, "append"),
        ({"into": object()}, "into: expected graph buffers, got object"),
        ({"into": False}, "into: expected graph buffers, got bool"),
        ({"into": torch.zeros(4)}, "into"),
        ({"into": BatchAttention(gqa_spec(), page_size=4, device="cpu")}, "into"),
    ],
)
def test_options_of_the_wrong_type_are_refused_when_the_step_is_made(options, text):
    cache = make_cache()
    a = cache.add()
    before = host_state(cache)
    with pytest.raises(InvalidInput, match=text):
        cache.step([(a, 1)], **options)
    assert host_state(cache) == before


def test_numpy_booleans_are_booleans():
    cache = make_cache()
    twin = Twin(cache)
    a = twin.add(3)
    with cache.step([(a, 2)], append=np.False_) as step:
        for layer in range(2):
            step.attend(layer, torch.zeros(2, 4, 8), sm_scale=SCALE)
    assert cache.length(a) == 3


# Sizes that no machine has


def no_pages(count):
    pytest.fail(f"a list of {count} pages was made before there was memory for them")


@pytest.mark.parametrize(
    ("arguments", "argument"),
    [
        ({"num_tokens": NEVER, "page_size": 2**20}, "num_tokens"),
        ({"memory": NEVER * 128, "page_size": 2**20}, "memory"),
        ({"num_tokens": 1, "page_size": 2**31 - 1, "specs": [gqa_spec(head_dim_qk=2**20)]}, "num_tokens"),
        ({"num_tokens": 2**61, "page_size": 2**31 - 1}, "num_tokens"),  # more bytes than an int64 counts
    ],
)
def test_memory_that_is_not_there_is_refused_by_the_bytes_asked_for(arguments, argument, monkeypatch):
    monkeypatch.setattr("sennit.kvcache.PagePool", no_pages)
    with pytest.raises(
        InvalidInput,
        match=rf"^{argument}: expected no more than fits .* cpu, got a cache of \d+ bytes \(.*ask for less",
    ):
        KVCache(**{"specs": [gqa_spec()], "device": "cpu"} | arguments)


def test_a_host_too_small_for_the_lists_of_pages_is_refused_likewise(monkeypatch):
    def too_small(count):
        raise MemoryError

    monkeypatch.setattr("sennit.kvcache.PagePool", too_small)
    with pytest.raises(InvalidInput, match=r"num_tokens: expected no more than fits .* got a cache of 8192 bytes"):
        KVCache([gqa_spec()], num_tokens=64, device="cpu")


def test_other_failures_of_a_device_are_not_taken_for_a_lack_of_memory(monkeypatch):
    def broken(*args, **kwargs):
        raise RuntimeError("device fault")

    monkeypatch.setattr("sennit.cache.memory.torch.empty", broken)
    with pytest.raises(RuntimeError, match="device fault"):
        allocate(8, torch.device("cuda", 0))
    with pytest.raises(MemoryError):
        allocate(8, torch.device("cpu"))


def test_too_many_tokens_are_not_blamed_on_the_page_size():
    with pytest.raises(InvalidInput) as caught:
        KVCache([gqa_spec()], num_tokens=10**15, device="cpu")
    assert caught.value.argument == "num_tokens"
    assert "page_size" not in str(caught.value)


def test_sizes_of_huge_pages_do_not_wrap():
    layout = StorageLayout(gqa_spec(), num_layers=2, page_size=2**62, kv_layout="NHD")
    assert layout.total_bytes(1) == layout.bytes_per_page == 2 * 2**62 * gqa_spec().kv_bytes_per_token


@pytest.mark.skipif(sys.platform != "linux", reason="limits its own address space")
def test_a_process_with_little_memory_gets_a_typed_error():
    code = """
import resource, torch, sennit
torch.zeros(1)
resource.setrlimit(resource.RLIMIT_AS, (6 << 30, 6 << 30))
spec = sennit.AttentionSpec(num_qo_heads=4, num_kv_heads=2, head_dim=8, dtype=torch.float32)
for tokens in (2**32, 10**9):
    try:
        sennit.KVCache([spec], num_tokens=tokens, page_size=4, device="cpu")
    except sennit.InvalidInput as error:
        assert f"{tokens * 128} bytes" in str(error), error
"""
    subprocess.run([sys.executable, "-c", code], check=True, env=os.environ | {"OMP_NUM_THREADS": "1"})


# Interrupts outside steps


def interrupted(operation, wanted):
    """Run ``operation``, interrupted at the ``wanted``-th line that it runs in these modules; whether it has one."""
    files, seen = {module.__file__ for module in (pages, sequences, tables)}, 0

    def trace(frame, event, argument):
        nonlocal seen
        if frame.f_code.co_filename not in files:
            return None
        if event == "line":
            seen += 1
            if seen == wanted + 1:
                raise KeyboardInterrupt
        return trace

    previous = sys.gettrace()
    sys.settrace(trace)
    try:
        operation()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(previous)
    return False


@pytest.mark.parametrize(
    "specs", [[gqa_spec()], [gqa_spec(), gqa_spec(window_left=4)]], ids=["one group", "two groups"]
)
@pytest.mark.parametrize("name", ["add", "fork", "trim", "remove", "clear"])
def test_clear_makes_a_cache_as_good_as_new_after_an_interrupt_anywhere(name, specs):
    line = 0
    for line in range(1000):
        cache = make_cache(specs, num_pages=20)
        twin = Twin(cache)
        a = twin.add(9)
        twin.fork(a, max(7, cache.shortest(a)))
        for _ in range(14):
            twin.add()  # the table is full: what adds a row makes it grow
        operation = {
            "add": cache.add,
            "fork": lambda a=a, cache=cache: cache.fork(a),
            "trim": lambda a=a, cache=cache: cache.trim(a, length=max(1, cache.shortest(a))),
            "remove": lambda a=a, cache=cache: cache.remove(a),
            "clear": cache.clear,
        }[name]
        if not interrupted(operation, line):
            break
        cache.clear()
        cache.check()
        assert cache.free_pages == cache.num_pages
        twin.stored.clear()
        twin.step([(twin.add(), 11), (twin.add(), 3)], verify=True)
        twin.check()
    assert line >= 5


def test_a_step_that_nobody_can_leave_is_abandoned_on_demand():
    cache = make_cache([gqa_spec()])
    a = cache.add()
    step = cache.step([(a, 3)])
    step.__enter__()
    with pytest.raises(StepOpen):
        cache.clear()
    cache.clear(abandon_step=True)
    assert cache.sequences == []
    for use in (lambda: step.num_tokens, lambda: step.attend(0, None), lambda: step.__exit__(None, None, None)):
        with pytest.raises(StepClosed):
            use()
    b = cache.add()
    assert b != a
    with cache.step([(b, 0)]) as other:
        with pytest.raises(StepClosed):
            step.__exit__(None, None, None)
        other.attend(0, *(torch.zeros(0, heads, 8) for heads in (4, 2, 2)), sm_scale=1.0)
    cache.check()


@pytest.mark.parametrize(
    "error", [TypeError("mine"), ValueError("mine"), KeyError("mine")], ids=lambda e: type(e).__name__
)
def test_errors_of_the_callers_iterator_are_its_own(error):
    cache = make_cache([gqa_spec()])
    a = cache.add()

    def items():
        yield a, 1
        raise error

    with pytest.raises(type(error), match="mine"):
        cache.pages_needed(items())
    with pytest.raises(type(error), match="mine"), cache.step(items()):
        pass


def test_lengths_that_kernels_cannot_be_told_are_refused_by_sequence():
    cache = make_cache([gqa_spec()])
    a, b = cache.add(), cache.add()
    most = 2**31 - 1
    for items in ([(a, most), (b, most)], [(a, 1), (b, most)]):
        with pytest.raises(InvalidInput, match="items: expected at most 2147483647 tokens in all"):
            cache.missing_pages(items)
    cache._sequences.tables.lengths[0] = most
    with pytest.raises(InvalidInput, match=f"2147483648 for sequence {a}"):
        cache.missing_pages([(a, 1)])


def test_sizes_beyond_any_integer_are_typed_errors():
    spec = gqa_spec()
    with pytest.raises(InvalidInput, match="layers"):
        KVCache([spec], layers=range(2**70), num_tokens=64, device="cpu")
    huge, most = spec.replace(window_left=2**31 - 1, num_sink_tokens=2**31 - 1), 2**31 - 1
    options = {"max_sequences": most, "max_step_tokens": most, "max_trim": most, "page_size": 1, "device": "cpu"}
    assert KVCache([huge], memory="1MiB", **options).num_pages > 0
