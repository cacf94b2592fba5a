"""Whatever goes wrong in a step, lengths, pages, free list and stored content are what they were before it."""

from __future__ import annotations

import itertools
import sys

import pytest
import torch
from kvcache_twin import (
    SCALE,
    Fault,
    StepFault,
    Twin,
    assert_same_contents,
    assert_same_state,
    gqa_spec,
    make_cache,
    whole_state,
)

from sennit.attention import BatchAttention
from sennit.cache.pages import PagePool
from sennit.cache.sequences import Sequences
from sennit.cache.tables import PageTables
from sennit.errors import (
    IncompleteStep,
    InvalidInput,
    OutOfPages,
    StepClosed,
    StepOpen,
    UnknownSequence,
    UnsupportedFeature,
)

ONE_GROUP = [gqa_spec(), gqa_spec(num_qo_heads=2), gqa_spec()]
WINDOWS = [gqa_spec(window_left=6, num_sink_tokens=2), gqa_spec(num_qo_heads=2), gqa_spec(window_left=9)]


class Scene:
    """A cache with shared full and partly filled pages, a shuffled free list, and a step that touches all of it.

    The step copies shared pages for some writers, lets the longest holder of another page write in place, fills a
    partly filled page, opens new ones, and makes the tables grow. Windows then release pages that others hold too, and
    pages that the step itself has opened.
    """

    def __init__(self, specs=None):
        self.cache = make_cache(specs or ONE_GROUP, num_pages=60)
        self.twin = twin = Twin(self.cache, seed=1)
        a, gone, b, c = twin.add(10), twin.add(9), twin.add(7), twin.add(4)
        forks = [twin.fork(a, 9), twin.fork(a), twin.fork(b, 6)]
        twin.remove(gone)
        twin.trim(c, 3)
        self.empty = twin.add()
        self.items = [(forks[0], 2), (b, 3), (forks[2], 1), (c, 75), (self.empty, 5), (forks[1], 0)]
        reservation = self.cache._sequences.reserve(self, self.items)
        for copies in reservation.copies:
            assert len(copies.source) == 2, "one copy beside holders that only read, one beside a writer in place"
        self.cache._sequences.rollback(self)
        self.before = whole_state(self.cache)

    def assert_unchanged(self):
        assert_same_state(whole_state(self.cache), self.before)
        self.cache.check()

    def assert_step_works(self):
        """The step that failed goes through now, and gives what the dictionary has."""
        self.twin.step(self.items, verify=True)
        self.cache.check()
        self.twin.check()


def fail(monkeypatch, owner, name, *, call=0, after=False, error=Fault):
    """Make ``owner.name`` raise at its ``call``-th call, before or after doing its work."""
    original, calls = getattr(owner, name), iter(range(10**6))

    def failing(*args, **kwargs):
        now = next(calls)
        if now == call and not after:
            raise error("injected")
        result = original(*args, **kwargs)
        if now == call:
            raise error("injected")
        return result

    monkeypatch.setattr(owner, name, failing)


POINTS = {
    "reserve": (Sequences, "reserve"),
    "tables grow": (PageTables, "grow"),
    "mark": (PagePool, "mark"),
    "alloc": (PagePool, "alloc"),
    "unshare": (PagePool, "unshare"),
    "mark_dirty": (PageTables, "mark_dirty"),
    "plan": (BatchAttention, "plan"),
    "copy_pages": (BatchAttention, "copy_pages"),
    "append": (BatchAttention, "append"),
    "run": (BatchAttention, "run"),
    "release": (PagePool, "release"),
    "commit": (Sequences, "commit"),
}
# How often a step comes by: once, or for each group, spec in a group, layer, or window.
CALLS = dict.fromkeys(POINTS, 1) | {"plan": 2, "copy_pages": 3, "append": 3, "run": 3, "release": 0}
CALLS_WITH_WINDOWS = CALLS | {"mark": 3, "alloc": 3, "unshare": 3, "plan": 3, "release": 2}
CASES = [
    pytest.param(specs, name, call, after, error, id=f"{kind}-{name}-{call}-{'after' if after else 'before'}-{what}")
    for kind, specs, calls, errors in (
        ("one group", ONE_GROUP, CALLS, {"exception": Fault, "interrupt": KeyboardInterrupt}),
        ("windows", WINDOWS, CALLS_WITH_WINDOWS, {"interrupt": KeyboardInterrupt}),
    )
    for name, count in calls.items()
    for call in range(count)
    for after in (False, True)
    for what, error in errors.items()
    if (name, after) != ("commit", True)  # it is done then
]


@pytest.mark.parametrize(("specs", "name", "call", "after", "error"), CASES)
def test_a_failure_at_any_point_leaves_no_trace(specs, name, call, after, error):
    scene = Scene(specs)
    owner, attribute = POINTS[name]
    with pytest.MonkeyPatch.context() as monkeypatch:
        fail(monkeypatch, owner, attribute, call=call, after=after, error=error)
        with pytest.raises(error, match="injected"):
            scene.twin.step(scene.items)
    scene.assert_unchanged()
    scene.assert_step_works()


@pytest.mark.slow
@pytest.mark.parametrize("specs", [ONE_GROUP, WINDOWS], ids=["one group", "windows"])
def test_a_failure_at_any_line_leaves_no_trace(specs):
    """An exception at each line that a step runs in the cache's modules, one after the other."""
    modules = (
        "sennit.step",
        *(f"sennit.cache.{name}" for name in ("sequences", "tables", "pages", "demand", "groups")),
    )
    files = [sys.modules[module].__file__ for module in modules]
    for line in itertools.count():
        scene = Scene(specs)
        if not _step_interrupted_at(scene, line, files):
            break
        scene.assert_unchanged()
        assert scene.cache._sequences.open_step is None
    assert line > 100
    assert scene.cache.length(scene.empty) == 5, "without a fault the step is committed"


def _step_interrupted_at(scene, wanted, files):
    """Run the scene's step with a fault at the ``wanted``-th line; whether there was such a line."""
    spared = {"rollback", "restore", "__exit__"}  # going back cannot itself be interrupted
    seen, hit = 0, False

    def trace(frame, event, argument):
        nonlocal seen, hit
        if frame.f_code.co_filename not in files or frame.f_code.co_name in spared:
            return None
        if event == "line" and not hit:
            if seen == wanted:
                hit = True
                raise Fault(f"{frame.f_code.co_name}:{frame.f_lineno}")
            seen += 1
        return trace

    previous = sys.gettrace()
    sys.settrace(trace)
    try:
        scene.twin.step(scene.items)
    except Fault:
        pass
    finally:
        sys.settrace(previous)
    return hit


@pytest.mark.parametrize("layers", [0, 1, 2, 3])
def test_an_exception_in_the_block_is_raised_unchanged_and_leaves_no_trace(layers):
    scene = Scene()
    error = Fault("mine")

    def fail_inside():
        with scene.cache.step(scene.items) as step:
            attend(scene, step, range(layers))
            raise error

    with pytest.raises(Fault) as caught:
        fail_inside()
    assert caught.value is error
    assert caught.value.__context__ is None
    scene.assert_unchanged()
    scene.assert_step_works()


def attend(scene, step, layers):
    for layer in layers:
        spec = scene.cache.specs[layer]
        q = scene.twin.random(step.num_tokens, spec.num_qo_heads, spec.head_dim_qk)
        step.attend(layer, q, *scene.twin.new_keys(spec, step.num_tokens), sm_scale=SCALE)


def test_a_writer_in_place_that_is_rolled_back_has_not_touched_what_the_others_store():
    """The shorter holders' tokens and the longer one's are all there although the page was written to."""
    cache = make_cache()
    twin = Twin(cache)
    a = twin.add(7)
    forks = [twin.fork(a, 5), twin.fork(a, 6)]
    before = whole_state(cache)
    with pytest.raises(Fault):
        twin.step([(forks[0], 3), (a, 1), (forks[1], 2)], fault=StepFault(2))
    assert_same_state(whole_state(cache), before)
    twin.check()


def leave_by_break(cache, items):
    for _ in range(1):
        with cache.step(items):
            break


def leave_by_return(cache, items):
    with cache.step(items):
        return


def leave_by_continue(cache, items):
    for _ in range(1):
        with cache.step(items):
            continue


@pytest.mark.parametrize("leave", [leave_by_break, leave_by_return, leave_by_continue])
def test_leaving_early_rolls_back_and_says_which_layers_are_missing(leave):
    scene = Scene()
    with pytest.raises(IncompleteStep, match="layers 0, 1, 2 of 3 did not attend"):
        leave(scene.cache, scene.items)
    scene.assert_unchanged()
    with pytest.raises(IncompleteStep, match="layers 1 of 3"), scene.cache.step(scene.items) as step:
        attend(scene, step, [2, 0])
    scene.assert_unchanged()
    scene.assert_step_works()


def test_an_abandoned_generator_rolls_back():
    scene = Scene()

    def generate():
        with scene.cache.step(scene.items) as step:
            attend(scene, step, [0])
            yield

    generator = generate()
    next(generator)
    generator.close()
    scene.assert_unchanged()


def test_out_of_pages_names_the_numbers_and_leaves_no_trace():
    scene = Scene()
    too_many = [*scene.items[:3], (3, 300), *scene.items[4:]]
    with pytest.raises(OutOfPages, match="needs 80 pages of 4 tokens, 2 of them copies of shared pages, and 54 of 60"):
        scene.twin.step(too_many)
    scene.assert_unchanged()
    scene.assert_step_works()


BAD_ITEMS = {
    "unknown": (lambda a, b: [(a, 1), (12345, 1)], UnknownSequence),
    "removed": (lambda a, b: [(1, 1)], UnknownSequence),
    "not an id": (lambda a, b: [("a", 1)], UnknownSequence),
    "twice": (lambda a, b: [(a, 1), (b, 1), (a, 2)], InvalidInput),
    "twice, once without tokens": (lambda a, b: [(a, 1), (a, 0)], InvalidInput),
    "negative": (lambda a, b: [(b, 3), (a, -1)], InvalidInput),
    "fraction": (lambda a, b: [(b, 3), (a, 1.5)], InvalidInput),
    "boolean": (lambda a, b: [(a, True)], InvalidInput),
    "tensor": (lambda a, b: [(a, torch.tensor(1))], InvalidInput),
    "none": (lambda a, b: [(a, None)], InvalidInput),
    "huge": (lambda a, b: [(a, 10**12)], InvalidInput),
    "not pairs": (lambda a, b: [a, b], InvalidInput),
}


@pytest.mark.parametrize("case", BAD_ITEMS)
def test_a_bad_batch_is_refused_on_entering_and_leaves_no_trace(case):
    scene = Scene()
    make, error = BAD_ITEMS[case]
    step = scene.cache.step(make(0, 2))  # errors come when the block is entered
    with pytest.raises(error), step:
        pytest.fail("the block must not run")
    scene.assert_unchanged()
    scene.assert_step_works()


@pytest.mark.parametrize("options", [{"split_size": 0}, {"split_size": "x"}, {"causal": [True]}, {"into": object()}])
def test_options_that_planning_refuses_leave_no_trace(options):
    scene = Scene()
    with pytest.raises((InvalidInput, UnsupportedFeature)), scene.cache.step(scene.items, **options):
        pytest.fail("the block must not run")
    scene.assert_unchanged()
    scene.assert_step_works()


def test_while_a_step_is_open_every_change_is_refused_and_reading_goes_on():
    scene = Scene()
    cache = scene.cache
    other = cache.step([(0, 1)])
    with cache.step(scene.items) as step:
        inside = whole_state(cache)
        changes = [
            cache.add,
            cache.clear,
            lambda: cache.fork(0),
            lambda: cache.trim(0, length=1),
            lambda: cache.remove(0),
            lambda: cache.step([(0, 1)]),
            lambda: cache.pages_needed([(0, 1)]),
            other.__enter__,
        ]
        for change in changes:
            with pytest.raises(StepOpen, match="a step of this cache is open"):
                change()
            assert_same_state(whole_state(cache), inside)
        assert {seq: cache.length(seq) for seq in cache.sequences} == scene.before[0]["lengths"]
        assert_same_contents(inside[1], scene.before[1])
        cache.check()
        attend(scene, step, range(3))
    assert cache.length(scene.empty) == 5
    with other as step:  # a step that was refused to enter while another was open is still good
        attend(scene, step, range(3))
    assert cache.length(0) == 11


def test_wrong_layers_are_refused_and_the_step_goes_on():
    scene = Scene()
    with scene.cache.step(scene.items) as step:
        attend(scene, step, [1])
        with pytest.raises(InvalidInput, match="has not attended in this step, got 1"):
            attend(scene, step, [1])
        q, (k, v) = scene.twin.random(step.num_tokens, 4, 8), scene.twin.new_keys(gqa_spec(), step.num_tokens)
        for layer in (-1, 3, 1.0, True, None, "0"):
            with pytest.raises(InvalidInput, match="layer: expected an integer from 0 to 2"):
                step.attend(layer, q, k, v, sm_scale=SCALE)
            with pytest.raises(InvalidInput, match="layer: expected an integer from 0 to 2"):
                step.plan(layer)
        attend(scene, step, [0, 2])
    assert scene.cache.length(scene.empty) == 5


def test_a_layer_whose_tensors_were_refused_may_attend_again():
    scene = Scene()
    new = {}
    with scene.cache.step(scene.items) as step:
        for layer, spec in enumerate(scene.cache.specs):
            q = scene.twin.random(step.num_tokens, spec.num_qo_heads, 8)
            k, v = new[layer] = scene.twin.new_keys(spec, step.num_tokens)
            for wrong in [(q, None, None), (q, k[1:], v[1:]), (q[:, :1], k, v), (q, k, v.double()), (q, k, None)]:
                with pytest.raises(InvalidInput):
                    step.attend(layer, *wrong, sm_scale=SCALE)
            with pytest.raises(InvalidInput, match=r"sm_scale: expected a number, got nothing; usually head_dim"):
                step.attend(layer, q, k, v)
            step.attend(layer, q, k, v, sm_scale=SCALE)
    scene.twin._append(scene.items, new)
    scene.twin.check()


def test_a_step_works_in_its_block_only():
    scene = Scene()
    step = scene.cache.step(scene.items)
    q, (k, v) = scene.twin.random(86, 4, 8), scene.twin.new_keys(gqa_spec(), 86)

    def assert_closed():
        for use in (
            lambda: step.attend(0, q, k, v, sm_scale=1.0),
            lambda: step.plan(0),
            lambda: step.positions,
            lambda: step.last_rows,
            lambda: step.batch,
            lambda: step.num_tokens,
        ):
            with pytest.raises(StepClosed, match="use it inside"):
                use()

    assert_closed()
    scene.assert_unchanged()
    with step:
        attend(scene, step, range(3))
    assert_closed()
    after = whole_state(scene.cache)
    with pytest.raises(StepClosed, match="entered before"), step:
        pass
    assert_same_state(whole_state(scene.cache), after)


def test_a_step_that_failed_to_enter_is_closed():
    scene = Scene()
    step = scene.cache.step([(0, 10**6)])
    with pytest.raises(OutOfPages), step:
        pass
    with pytest.raises(StepClosed), step:
        pass
    scene.assert_unchanged()


def test_changing_sequences_with_wrong_arguments_leaves_no_trace():
    scene = Scene()
    cache = scene.cache
    attempts = [
        (lambda: cache.fork(999), UnknownSequence),
        (lambda: cache.fork(0, 11), InvalidInput),
        (lambda: cache.fork(0, -1), InvalidInput),
        (lambda: cache.fork(0, 2.0), InvalidInput),
        (lambda: cache.trim(0, length=11), InvalidInput),
        (lambda: cache.trim(0, length=-1), InvalidInput),
        (lambda: cache.trim(0, length=None), InvalidInput),
        (lambda: cache.trim(999, length=0), UnknownSequence),
        (lambda: cache.remove(1), UnknownSequence),
        (lambda: cache.remove(None), UnknownSequence),
        (lambda: cache.length(999), UnknownSequence),
        (lambda: cache.read(999, 0), UnknownSequence),
        (lambda: cache.read(0, 3), InvalidInput),
        (lambda: cache.pools(-1), InvalidInput),
        (lambda: cache.page_table(999), UnknownSequence),
        (lambda: cache.pages_needed([(0, 1), (0, 1)]), InvalidInput),
        (lambda: cache.accept({0: [1]}), UnsupportedFeature),
    ]
    for attempt, error in attempts:
        with pytest.raises(error):
            attempt()
        scene.assert_unchanged()
    scene.assert_step_works()
