"""Text ends before the first stop string, however it is cut into pieces; nothing is shown that must be taken back."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import tiny_model

import sennit.hf
from sennit.errors import InvalidInput
from sennit.hf import Batcher
from sennit.hf.stops import StopStrings, stop_strings
from sennit.hf.text import TextStream


def naive(text: str, stops: list[str]) -> tuple[str, str | None]:
    """Read letter by letter until the text ends with a stop string; cut the longest such one off."""
    for end in range(len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            longest = max(found, key=len)
            return text[: end - len(longest)], longest
    return text, None


@settings(deadline=None, max_examples=400)
@given(
    pieces=st.lists(st.text("ab.", max_size=4), max_size=12),
    stops=st.lists(st.text("ab.", min_size=1, max_size=5), max_size=3),
)
def test_the_cut_is_that_of_the_whole_text_and_nothing_is_shown_too_early(pieces: list[str], stops: list[str]) -> None:
    stop = StopStrings(stops)
    shown, given = "", ""
    for piece in pieces:
        shown, given = shown + stop.push(piece), given + piece
        if stop.matched is None:
            # Whatever comes next: it begins with what has been shown; and what is held back could still be cut off.
            ends = ["", *(one[size:] for one in stops for size in range(len(one)))]
            assert all(naive(given + end, stops)[0].startswith(shown) for end in ends)
            assert shown == given or any(one.startswith(given[len(shown) :]) for one in stops)
    assert (shown + stop.finish(), stop.matched) == naive("".join(pieces), stops)


class Chunks:
    """A tokenizer whose tokens are a few bytes each, characters cut anywhere."""

    def __init__(self, text: str, sizes: list[int]) -> None:
        data, self.chunks = text.encode(), []
        for size in sizes:
            self.chunks.append(data[:size])
            data = data[size:]
        self.chunks.append(data)

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        return b"".join(self.chunks[i] for i in ids).decode("utf-8", "replace")


@settings(deadline=None, max_examples=300)
@given(
    text=st.text("aé€😀", max_size=12),
    sizes=st.lists(st.integers(0, 6), max_size=20),
    stops=st.lists(st.text("aé€😀", min_size=1, max_size=3), max_size=2),
)
def test_stop_strings_of_several_bytes_a_character(text: str, sizes: list[int], stops: list[str]) -> None:
    tokenizer = Chunks(text, sizes)
    stream = TextStream(tokenizer, stops)
    seen: list[int] = []
    for token in range(len(tokenizer.chunks)):
        shown = stream.push(token)
        seen.append(token)
        assert "\ufffd" not in shown
        # The stop string is found with the token that completes it.
        whole = tokenizer.decode(seen).rstrip("\ufffd")
        assert stream.matched == naive(whole, stops)[1]
        if stream.matched is not None:
            break
    stream.finish()
    assert (stream.text, stream.matched) == naive(text, stops)


class Letters:
    """A letter for every token; decoding raises at the calls named."""

    chat_template = None

    def __init__(self, *fails_at: int) -> None:
        self.calls, self.fails_at = 0, fails_at

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        self.calls += 1
        if self.calls in self.fails_at:
            raise RuntimeError("decode")
        return "".join(chr(97 + i % 26) for i in ids)


PROMPTS = [[1, 2, 3], [4, 5, 6, 7], [8, 9]]


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_model("llama")


def test_a_request_ends_with_the_token_that_completes_a_stop_string(model: Any) -> None:
    free = sennit.hf.generate(model, Letters(), PROMPTS, max_new_tokens=20)
    stops = [[free[0].text[6:9], "A"], [], free[2].text[3:5]]
    done = sennit.hf.generate(model, Letters(), PROMPTS, max_new_tokens=20, stop=stops, logprobs=True)
    events = list(sennit.hf.stream(model, Letters(), PROMPTS, max_new_tokens=20, stop=stops, logprobs=True))
    for i, stop in enumerate(([free[0].text[6:9]], [], [free[2].text[3:5]])):
        text, matched = naive(free[i].text, stop)
        count = len(text + (matched or ""))  # a token a letter
        assert (done[i].text, done[i].stopped_by) == (text, matched)
        assert done[i].token_ids == free[i].token_ids[:count]
        assert done[i].logprobs is not None
        assert len(done[i].logprobs) == count
        assert done[i].finish_reason == ("stop" if stop else "length")
        mine = [event for event in events if event.request == i]
        assert "".join(event.text for event in mine) == text
        assert [event.token_id for event in mine] == done[i].token_ids
        assert mine[-1].completion == done[i]


def test_what_is_held_back_is_told_when_a_request_ends_otherwise(model: Any) -> None:
    free = sennit.hf.generate(model, Letters(), [PROMPTS[0]], max_new_tokens=8)[0]
    begun = free.text[-3:] + "?"
    events = list(sennit.hf.stream(model, Letters(), [PROMPTS[0]], max_new_tokens=8, stop=begun))
    assert events[-1].text.endswith(free.text[-3:])
    assert (events[-1].finish_reason, events[-1].completion.stopped_by) == ("length", None)
    assert "".join(event.text for event in events) == free.text
    by_token = free.token_ids[7]
    ended = sennit.hf.generate(model, Letters(), [PROMPTS[0]], max_new_tokens=8, stop=begun, eos_token_id=by_token)[0]
    first = free.token_ids.index(by_token)
    assert (ended.finish_reason, ended.stopped_by) == ("stop", by_token)
    assert (ended.text, ended.token_ids) == (free.text[: first + 1], free.token_ids[: first + 1])
    with Batcher(model, Letters(), num_tokens=64) as batcher:
        request = batcher.submit(PROMPTS[0], max_new_tokens=20, stop=begun)
        had = [event for _ in range(8) for event in batcher.step()]
        batcher.cancel(request)
        last = batcher.step()[0]
        assert last.completion is not None
        assert (last.finish_reason, last.completion.stopped_by) == ("cancelled", None)
        assert last.text == begun[:-1]
        assert "".join(event.text for event in had) + last.text == free.text == last.completion.text


def test_a_stop_string_wins_over_the_length_when_both_come_together(model: Any) -> None:
    free = sennit.hf.generate(model, Letters(), [PROMPTS[0]], max_new_tokens=8)[0]
    stop = free.text[-4:]
    assert free.text.index(stop) == 4
    done = sennit.hf.generate(model, Letters(), [PROMPTS[0]], max_new_tokens=8, stop=[stop])[0]
    assert (done.finish_reason, done.stopped_by, done.text) == ("stop", stop, free.text[:4])
    assert done.token_ids == free.token_ids


def test_requests_ended_by_stop_strings_leave_their_place_to_others_at_once(model: Any) -> None:
    free = sennit.hf.generate(model, Letters(), [PROMPTS[0]], max_new_tokens=9)[0]
    with Batcher(model, Letters(), num_tokens=64, max_requests=1) as batcher:
        first = batcher.submit(PROMPTS[0], max_new_tokens=50, stop=free.text[3:6])
        second = batcher.submit(PROMPTS[1], max_new_tokens=2)
        events = [event for _ in range(8) for event in batcher.step()]
        assert not batcher.has_work
        assert not batcher.cancel(first)
        batcher.cache.check()
    assert [event.request for event in events] == [first] * 6 + [second] * 2


@pytest.mark.parametrize("fails_at", [(1,), (2, 3), (11, 12), (17,), (18,), (19,), (20, 21), (22,), (30, 31)])
def test_a_tokenizer_that_raises_loses_nothing_of_a_request_with_stop_strings(model: Any, fails_at: Any) -> None:
    free = sennit.hf.generate(model, Letters(), PROMPTS, max_new_tokens=8)
    stop = free[0].text[2:4]
    expected = sennit.hf.generate(model, Letters(), PROMPTS, max_new_tokens=8, stop=stop)
    assert expected[0].finish_reason == "stop"
    with Batcher(model, Letters(*fails_at), num_tokens=1024) as batcher:
        for prompt in PROMPTS:
            batcher.submit(prompt, max_new_tokens=8, stop=stop)
        events, failed = [], 0
        while batcher.has_work:
            try:
                events += batcher.step()
            except RuntimeError:
                failed += 1
        assert batcher.stats().tokens_generated == sum(len(one.token_ids) for one in expected)
    assert 0 < failed <= len(fails_at)  # a step tells what it can of every request before it raises
    for request, completion in enumerate(expected):
        mine = [event for event in events if event.request == request]
        assert [event.token_id for event in mine] == completion.token_ids
        assert "".join(event.text for event in mine) == completion.text
        assert [event.completion for event in mine] == [None] * (len(mine) - 1) + [completion]


@pytest.mark.parametrize(
    ("stop", "tokenizer", "message"),
    [
        ("", Letters(), "stop: expected a string or a list of strings, none of them empty, got ''"),
        (["a", ""], Letters(), "none of them empty"),
        (["a", 3], Letters(), r"got \['a', 3\]"),
        (b"a", Letters(), "got b'a'"),
        ({"a"}, Letters(), "list of strings"),
        (True, Letters(), "got True"),
        ("a", None, "stop: expected no strings, since no tokenizer was given, got 'a'; pass tokenizer="),
    ],
)
def test_stop_strings_that_cannot_be_found_are_refused(stop: Any, tokenizer: Any, message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        stop_strings(stop, tokenizer)


@pytest.mark.parametrize("stop", ["<eos>", ["a", "<eos>"]])
def test_a_special_token_is_no_text_to_stop_at(tokenizer: Any, stop: Any) -> None:
    with pytest.raises(InvalidInput, match=r"^stop: .*got the special token '<eos>'; give eos_token_id=257$"):
        stop_strings(stop, tokenizer)
    assert stop_strings("<e", tokenizer) == ("<e",)


def test_a_stop_string_that_utf8_cannot_hold_is_refused(tokenizer: Any) -> None:
    with pytest.raises(InvalidInput, match=r"^stop: expected text that UTF-8 can hold"):
        stop_strings("a\udc80", tokenizer)


@pytest.mark.parametrize("stop", [None, [], ()])
def test_no_stop_strings_need_no_tokenizer(model: Any, stop: Any) -> None:
    assert sennit.hf.generate(model, None, [[1]], max_new_tokens=3, stop=stop)[0].finish_reason == "length"
