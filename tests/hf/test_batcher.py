"""Continuous batching gives every prompt the tokens that it gets alone, whatever joins, leaves or is preempted."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from batches import alike_prompts, drain, step_counts
from tiny_models import reference_logprobs, reference_tokens, tiny_model

import sennit.hf
from sennit.hf import Batcher, Completion, Event

# Small enough that prompts are chunked and running requests are preempted.
TIGHT: dict[str, Any] = {"page_size": 4, "num_tokens": 160, "max_batch_tokens": 24, "max_requests": 8}


def test_a_crowded_batch_gives_each_prompt_its_own_tokens(model: Any) -> None:
    lengths = [1, 70, 33, 34, 5, 50, 51, 64, 2, 40, 41, 90, 17, 60]
    prompts, new = alike_prompts(lengths, shared=30), 14
    with Batcher(model, **TIGHT) as batcher:
        for prompt in prompts:
            batcher.submit(prompt, max_new_tokens=new)
        with step_counts(batcher) as counts:
            events, done = drain(batcher)
        stats = batcher.stats()
    for i, prompt in enumerate(prompts):
        assert done[i].token_ids == reference_tokens(model, prompt, new), i
        assert done[i].finish_reason == "length"
        assert done[i].num_prompt_tokens == len(prompt)
        assert [e.token_id for e in events if e.request == i] == done[i].token_ids
    assert stats.prompts_chunked > 0
    assert stats.forks > 0
    assert stats.tokens_shared >= 4 * stats.forks
    assert stats.preemptions > 0
    assert stats.evictions > 0
    assert max(map(sum, counts)) == TIGHT["max_batch_tokens"]
    assert stats.tokens_computed == sum(map(sum, counts))
    assert stats.steps == len(counts)
    assert stats.tokens_generated == new * len(prompts)


def test_requests_join_and_leave_while_others_decode(model: Any) -> None:
    prompts = alike_prompts([20, 9, 31, 12, 25, 7], shared=8)
    news = [12, 3, 9, 1, 5, 8]
    with Batcher(model, num_tokens=512, max_batch_tokens=16, max_requests=4, page_size=4) as batcher:
        done: dict[int, Completion] = {}
        for prompt, new in zip(prompts, news, strict=True):
            batcher.submit(prompt, max_new_tokens=new)
            for _ in range(2):
                done |= {e.request: e.completion for e in batcher.step() if e.completion}
        assert 0 < len(done) < len(prompts)  # some have left, others still run
        done |= drain(batcher)[1]
    for i, (prompt, new) in enumerate(zip(prompts, news, strict=True)):
        assert done[i].token_ids == reference_tokens(model, prompt, new)


def test_steps_are_the_same_every_time(llama: Any) -> None:
    runs = []
    for _ in range(2):
        with Batcher(llama, **TIGHT) as batcher:
            for prompt in alike_prompts([50, 40, 41, 60, 33], shared=20):
                batcher.submit(prompt, max_new_tokens=12)
            runs.append((drain(batcher)[0], batcher.stats()))
    assert runs[0] == runs[1]


def test_a_long_prompt_does_not_stop_others_from_decoding(llama: Any) -> None:
    with Batcher(llama, num_tokens=512, max_batch_tokens=8, max_requests=2, page_size=4) as batcher:
        first = batcher.submit([1, 2, 3], max_new_tokens=30)
        batcher.step()
        batcher.submit(list(range(100)), max_new_tokens=2)
        for _ in range(12):
            assert [e.request for e in batcher.step()] == [first]
        assert batcher.stats().prompts_chunked == 1


def test_alike_prompts_submitted_together_compute_their_common_part_once(llama: Any) -> None:
    common = alike_prompts([64], shared=0)[0]
    prompts = [[*common, i, i + 1] for i in range(6)]
    with Batcher(llama, num_tokens=2048, page_size=4) as batcher:
        for prompt in prompts:
            batcher.submit(prompt, max_new_tokens=1)
        events, done = drain(batcher)
        stats = batcher.stats()
    assert [e.request for e in events] == [0, 1, 2, 3, 4, 5]
    assert stats.forks == 5
    assert stats.tokens_computed == 66 + 5 * 2
    for i, prompt in enumerate(prompts):
        assert done[i].token_ids == reference_tokens(llama, prompt, 1)


def test_a_finished_request_lends_its_prefix_generated_tokens_included(llama: Any) -> None:
    prompt = alike_prompts([21], shared=0)[0]
    with Batcher(llama, num_tokens=512, page_size=4) as batcher:
        batcher.submit(prompt, max_new_tokens=10)
        answer = drain(batcher)[1][0].token_ids
        assert batcher.stats().retained == 1
        before = batcher.stats().tokens_computed
        turn = [*prompt, *answer, 1, 2, 3]
        second = batcher.submit(turn, max_new_tokens=4)
        done = drain(batcher)[1]
        # The last generated token was never computed; neither were the three new ones.
        assert batcher.stats().tokens_computed - before == 4 + 3
    assert done[second].token_ids == reference_tokens(llama, turn, 4)


def test_the_same_prompt_again_computes_one_token(llama: Any) -> None:
    prompt = alike_prompts([32], shared=0)[0]
    with Batcher(llama, num_tokens=512, page_size=4) as batcher:
        batcher.submit(prompt, max_new_tokens=1)
        first = drain(batcher)[1][0]
        batcher.submit(prompt, max_new_tokens=1)
        second = drain(batcher)[1][1]
        assert batcher.stats().tokens_computed == 33
    assert first == second


def test_a_cancelled_prompt_is_not_waited_for(llama: Any) -> None:
    prompt = alike_prompts([64], shared=0)[0]
    with Batcher(llama, num_tokens=512, page_size=4, max_batch_tokens=16, max_requests=4) as batcher:
        batcher.submit(prompt, max_new_tokens=1)
        batcher.step()
        batcher.cancel(0)
        batcher.submit(prompt, max_new_tokens=1)
        done = drain(batcher)[1]
        assert batcher.stats().tokens_shared == 16  # what had been computed until then
    assert done[1].token_ids == reference_tokens(llama, prompt, 1)


def test_retained_prefixes_give_way_to_decoding_before_anybody_is_preempted(llama: Any) -> None:
    prompts = [list(range(24)), list(range(100, 108)), list(range(200, 208))]
    with Batcher(llama, num_tokens=64, page_size=4, max_batch_tokens=64, max_requests=4) as batcher:
        batcher.submit(prompts[0], max_new_tokens=3)
        drain(batcher)
        for prompt in prompts[1:]:
            batcher.submit(prompt, max_new_tokens=20)
        done = drain(batcher)[1]
        assert (batcher.stats().evictions, batcher.stats().preemptions) == (1, 0)
    for i in (1, 2):
        assert done[i].token_ids == reference_tokens(llama, prompts[i], 20)


def test_retained_prefixes_give_way_to_new_requests(llama: Any) -> None:
    with Batcher(llama, num_tokens=64, page_size=4, max_batch_tokens=64, max_requests=4) as batcher:
        for i in range(6):
            prompt = alike_prompts([40], shared=0, seed=i)[0]
            batcher.submit(prompt, max_new_tokens=3)
            assert drain(batcher)[1][i].token_ids == reference_tokens(llama, prompt, 3)
        assert batcher.stats().evictions > 0
        assert batcher.stats().preemptions == 0


def test_without_sharing_nothing_is_forked_or_kept(llama: Any) -> None:
    with Batcher(llama, num_tokens=512, page_size=4, share_prefixes=False) as batcher:
        for _ in range(3):
            batcher.submit(list(range(40)), max_new_tokens=3)
        done = drain(batcher)[1]
        stats = batcher.stats()
        assert (stats.forks, stats.retained, stats.tokens_computed) == (0, 0, 3 * 42)
        assert batcher.cache.sequences == []
    assert done[0] == done[1] == done[2]


def test_the_request_that_started_last_is_preempted_and_loses_nothing(llama: Any) -> None:
    prompts = [list(range(16)), list(range(100, 116)), [50, 51]]
    # Ten pages: two start with four each and one to grow into each, then both want more. The third waits behind them.
    with Batcher(llama, num_tokens=40, page_size=4, max_batch_tokens=64, max_requests=2) as batcher:
        for prompt in prompts:
            batcher.submit(prompt, max_new_tokens=16)
        batcher.step()
        assert (batcher.stats().running, batcher.stats().waiting) == (2, 1)
        events, done = drain(batcher)
        assert batcher.stats().preemptions > 0
    assert list(done) == [0, 1, 2]
    # Back at the front of the queue: the third has not slipped past the one that was put back.
    ended = next(i for i, e in enumerate(events) if e.request == 0 and e.completion)
    assert min(i for i, e in enumerate(events) if e.request == 2) > ended
    for i, prompt in enumerate(prompts):
        assert done[i].token_ids == reference_tokens(llama, prompt, 16)


def test_a_request_waits_until_there_is_a_page_to_grow_into(llama: Any) -> None:
    with Batcher(llama, num_tokens=36, page_size=4, max_batch_tokens=64, max_requests=2) as batcher:
        for start in (0, 100):
            batcher.submit(list(range(start, start + 16)), max_new_tokens=4)
        batcher.step()
        assert (batcher.stats().running, batcher.stats().waiting) == (1, 1)
        drain(batcher)
        assert batcher.stats().preemptions == 0


def test_a_request_that_outgrows_the_whole_cache_ends_with_what_it_has(llama: Any) -> None:
    prompt = list(range(20))
    with Batcher(llama, num_tokens=32, page_size=4, max_batch_tokens=64, max_requests=4) as batcher:
        batcher.submit(prompt, max_new_tokens=100)
        batcher.submit([7, 8, 9], max_new_tokens=6)
        events, done = drain(batcher)
    expected = reference_tokens(llama, prompt, 13)
    assert done[0].finish_reason == "capacity"
    assert done[0].token_ids == expected  # 12 in the cache, and the one after them
    assert done[1].token_ids == reference_tokens(llama, [7, 8, 9], 6)
    end = next(e for e in events if e.request == 0 and e.completion)
    assert (end.token_id, end.finish_reason) == (None, "capacity")


def test_stop_tokens_of_the_generation_config_end_a_request(llama: Any) -> None:
    prompt = list(range(30))
    free = reference_tokens(llama, prompt, 12)
    stop = free[5]
    first = free.index(stop)
    llama.generation_config.eos_token_id = [stop, 259]
    done = sennit.hf.generate(llama, None, [prompt], max_new_tokens=12)
    assert done[0].finish_reason == "stop"
    assert done[0].token_ids == free[: first + 1] == reference_tokens(llama, prompt, 12)
    # Given ones replace them, and an empty list has none.
    assert sennit.hf.generate(llama, None, [prompt], max_new_tokens=12, eos_token_id=[])[0].token_ids == free
    other = sennit.hf.generate(llama, None, [prompt], max_new_tokens=12, eos_token_id=free[0])[0]
    assert (other.token_ids, other.finish_reason) == (free[:1], "stop")


@pytest.mark.parametrize("when", ["waiting", "prefilling", "decoding"])
def test_a_cancelled_request_ends_with_what_it_has_and_the_others_go_on(llama: Any, when: str) -> None:
    prompts = [list(range(30)), list(range(60, 90))]
    with Batcher(llama, num_tokens=512, page_size=4, max_batch_tokens=8, max_requests=2) as batcher:
        ids = [batcher.submit(prompt, max_new_tokens=9) for prompt in prompts]
        events: list[Event] = []
        for _ in range({"waiting": 0, "prefilling": 2, "decoding": 7}[when]):
            events += batcher.step()
        assert batcher.cancel(ids[0])
        assert not batcher.cancel(ids[0])
        rest, done = drain(batcher)
        assert not batcher.cancel(ids[1])
    assert rest[0].completion is not None
    assert rest[0].completion.finish_reason == "cancelled"
    had = [e.token_id for e in events if e.request == ids[0]]
    assert (len(had) > 0) == (when == "decoding")
    assert done[ids[0]].token_ids == had
    assert done[ids[1]].token_ids == reference_tokens(llama, prompts[1], 9)


def test_log_probabilities_are_those_of_the_softmax(model: Any) -> None:
    prompts = alike_prompts([19, 26], shared=8)
    with Batcher(model, num_tokens=512) as batcher:
        batcher.submit(prompts[0], max_new_tokens=6, logprobs=True)
        batcher.submit(prompts[1], max_new_tokens=6)
        events, done = drain(batcher)
    assert done[1].logprobs is None
    assert all(e.logprob is None for e in events if e.request == 1)
    assert done[0].logprobs == [e.logprob for e in events if e.request == 0]
    expected = reference_logprobs(model, prompts[0], done[0].token_ids)
    torch.testing.assert_close(torch.tensor(done[0].logprobs), torch.tensor(expected), rtol=0, atol=1e-5)


def test_the_models_attention_setting_is_its_own_between_steps(llama: Any) -> None:
    llama.set_attn_implementation("sdpa")
    seen = []
    llama.model.layers[0].register_forward_pre_hook(lambda *_: seen.append(llama.config._attn_implementation))
    with Batcher(llama, num_tokens=512) as batcher:
        batcher.submit([1, 2, 3], max_new_tokens=2)
        batcher.step()
        assert seen == ["sennit"]
        assert llama.config._attn_implementation == "sdpa"
        alone = reference_tokens(llama, [4, 5], 2)  # somebody else uses the model between two steps
        assert len(alone) == 2
        assert drain(batcher)[1][0].token_ids == reference_tokens(llama, [1, 2, 3], 2)


def test_a_step_that_raises_changes_nothing_and_can_be_tried_again(llama: Any) -> None:
    prompts = alike_prompts([30, 31, 12], shared=20)
    fail = {"at": -1, "calls": 0}

    def hook(*_: Any) -> None:
        fail["calls"] += 1
        if fail["calls"] == fail["at"]:
            raise RuntimeError("the device is on fire")

    llama.model.layers[1].register_forward_pre_hook(hook)
    with Batcher(llama, **TIGHT) as batcher:
        for prompt in prompts:
            batcher.submit(prompt, max_new_tokens=6)
        done: dict[int, Completion] = {}
        step = 0
        while batcher.has_work:
            step += 1
            fail["at"] = fail["calls"] + 1
            before = batcher.stats()
            with pytest.raises(RuntimeError, match="on fire"):
                batcher.step()
            assert llama.config._attn_implementation != "sennit"
            assert batcher.stats().tokens_computed == before.tokens_computed
            batcher.cache.check()
            done |= {e.request: e.completion for e in batcher.step() if e.completion}
    for i, prompt in enumerate(prompts):
        assert done[i].token_ids == reference_tokens(llama, prompt, 6)


def test_a_closed_batcher_holds_no_pages(llama: Any) -> None:
    batcher = Batcher(llama, num_tokens=512)
    batcher.submit(list(range(40)), max_new_tokens=5)
    batcher.step()
    assert batcher.cache.stats().used_pages > 0
    batcher.close()
    batcher.close()
    assert batcher.cache.stats().used_pages == 0
    assert not batcher.has_work


def test_a_step_without_work_does_nothing(llama: Any) -> None:
    with Batcher(llama, num_tokens=64, max_requests=4) as batcher:
        assert batcher.step() == []
        assert batcher.stats().steps == 0


def test_generate_returns_completions_in_prompt_order(model: Any, tokenizer: Any) -> None:
    prompts = ["Hello", [{"role": "user", "content": "Grüße"}], [5, 6, 7]]
    done = sennit.hf.generate(model, tokenizer, prompts, max_new_tokens=8)
    ids = [
        tokenizer("<user>Hello<bot>")["input_ids"],
        tokenizer("<user>Grüße<bot>")["input_ids"],
        [5, 6, 7],
    ]
    for completion, prompt in zip(done, ids, strict=True):
        assert completion.token_ids == reference_tokens(model, prompt, 8)
        assert completion.text == tokenizer.decode(completion.token_ids, skip_special_tokens=True)
        assert completion.num_prompt_tokens == len(prompt)
        assert completion.logprobs is None
    raw = sennit.hf.generate(model, tokenizer, ["Hello"], max_new_tokens=8, raw=True)
    assert raw[0].token_ids == reference_tokens(model, tokenizer("Hello")["input_ids"], 8)


def test_generate_for_no_prompts_is_empty(llama: Any) -> None:
    assert sennit.hf.generate(llama, None, []) == []


def test_streamed_pieces_join_to_the_completions(model: Any, tokenizer: Any) -> None:
    prompts = ["one", "two", "three and more"]
    events = list(sennit.hf.stream(model, tokenizer, prompts, max_new_tokens=20, logprobs=True))
    done = sennit.hf.generate(model, tokenizer, prompts, max_new_tokens=20, logprobs=True)
    for i, completion in enumerate(done):
        mine = [e for e in events if e.request == i]
        assert "".join(e.text for e in mine) == completion.text
        assert [e.token_id for e in mine] == completion.token_ids
        assert [e.logprob for e in mine] == completion.logprobs
        assert [e.finish_reason for e in mine] == [None] * 19 + ["length"]
        assert mine[-1].completion == completion


def test_closing_a_stream_ends_everything_and_restores_the_model(llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    monkeypatch.setattr("sennit.hf.generation.Batcher", lambda *a, **k: made.append(Batcher(*a, **k)) or made[-1])
    llama.set_attn_implementation("eager")
    events = sennit.hf.stream(llama, None, [[1, 2, 3], [4, 5]], max_new_tokens=30)
    next(events)
    assert made[0].cache.stats().used_pages > 0
    events.close()
    assert made[0].cache.stats().used_pages == 0
    assert llama.config._attn_implementation == "eager"


def test_options_reach_the_batcher(llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    monkeypatch.setattr("sennit.hf.generation.Batcher", lambda *a, **k: made.append(Batcher(*a, **k)) or made[-1])
    sennit.hf.generate(
        llama, None, [[1, 2, 3]], max_new_tokens=2, memory="64KiB", page_size=8, backend="reference", max_requests=2
    )
    assert made[0].cache.page_size == 8
    assert made[0].cache.memory().total_bytes <= 65536
    sennit.hf.generate(llama, None, [[1, 2, 3], [4]], max_new_tokens=2)
    # Room for both at full length, a page each to grow into, and no more.
    assert made[1].cache.num_pages == 4


def test_a_batcher_without_sizes_holds_all_its_requests_at_full_length(llama: Any) -> None:
    with Batcher(llama, max_requests=3) as batcher:
        assert batcher.cache.num_pages * batcher.cache.page_size == 3 * 2048


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_caches_dtype_is_the_models(dtype: torch.dtype) -> None:
    model = tiny_model("llama", dtype=dtype)
    with Batcher(model, num_tokens=64, max_requests=2) as batcher:
        batcher.submit([1, 2, 3], max_new_tokens=3, logprobs=True)
        done = drain(batcher)[1][0]
        assert len(done.token_ids) == 3
        assert batcher.cache.specs[0].kv_dtype == dtype
    # The softmax is in float32 even where the model is not.
    assert done.logprobs is not None
    assert any(torch.tensor(p).bfloat16().item() != p for p in done.logprobs)
