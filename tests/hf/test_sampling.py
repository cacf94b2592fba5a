"""Sampled requests get the tokens of their own seeds and logits, whatever shares their steps, each with its options."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import Any

import numpy as np
import pytest
import torch
from batches import alike_prompts, drain
from sampling_oracle import reference_uniform, transformers_probabilities
from tiny_models import reference_logprobs, reference_tokens, tiny_model

import sennit.hf
from sennit.errors import InvalidInput, SennitError
from sennit.hf import Batcher, Sampling
from sennit.hf.options import OptionsByPrompt

# Small enough that prompts are chunked and running requests are preempted.
TIGHT: dict[str, Any] = {"page_size": 4, "num_tokens": 160, "max_batch_tokens": 24, "max_requests": 8, "split_size": 16}

HOWS: list[dict[str, Any]] = [
    {"temperature": 1.0, "seed": 5},
    {"temperature": 0.0},
    {"temperature": 1.5, "top_k": 20, "seed": 0},
    {"temperature": 0.8, "top_p": 0.9, "seed": 2**63 - 1},
    {"temperature": 1.2, "min_p": 0.05, "seed": 5},
    {"temperature": 2.0, "top_k": 50, "top_p": 0.95, "min_p": 0.01, "seed": 123},
]


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_model("llama")


def expected_tokens(model: Any, prompt: list[int], count: int, how: dict[str, Any]) -> list[int]:
    """Eager logits, transformers' filters, and the token at which their probabilities add up to the random number."""
    if not how["temperature"]:
        return reference_tokens(model, prompt, count)
    before = model.config._attn_implementation
    model.set_attn_implementation("eager")
    tokens = list(prompt)
    try:
        for place in range(count):
            with torch.no_grad():
                logits = model(torch.tensor([tokens]), use_cache=False).logits[:, -1]
            sums = transformers_probabilities(logits, Sampling(**how))[0].cumsum(0)
            tokens.append(int((sums <= reference_uniform(how["seed"], place) * sums[-1]).sum()))
    finally:
        model.set_attn_implementation(before)
    return tokens[len(prompt) :]


def test_every_request_of_a_crowded_batch_gets_the_tokens_of_its_own_seed(model: Any) -> None:
    prompts, new = alike_prompts([1, 70, 33, 34, 5, 50, 51, 64, 2, 40, 41, 90], shared=30), 12
    hows = [HOWS[i % len(HOWS)] for i in range(len(prompts))]
    expected = [expected_tokens(model, prompt, new, how) for prompt, how in zip(prompts, hows, strict=True)]
    for order in (list(range(12)), list(range(11, -1, -1)), [3, 0, 7]):
        with Batcher(model, **TIGHT) as batcher:
            for i in order:
                batcher.submit(prompts[i], max_new_tokens=new, **hows[i])
            done = drain(batcher)[1]
            stats = batcher.stats()
        assert [done[request].token_ids for request in range(len(order))] == [expected[i] for i in order]
        assert [done[request].seed for request in range(len(order))] == [hows[i].get("seed") for i in order]
        if len(order) == 12:
            assert stats.preemptions > 0
            assert stats.prompts_chunked > 0
            assert stats.forks > 0
    greedy = [reference_tokens(model, prompt, new) for prompt in prompts]
    assert sum(a == b for a, b in zip(expected, greedy, strict=True)) == 2  # those that asked for it


def test_generate_gives_each_prompt_what_it_asked_for(model: Any) -> None:
    prompts = alike_prompts([9, 12, 7, 30, 4, 5], shared=6)
    names = ("temperature", "top_k", "top_p", "min_p", "seed")
    lists = {name: [how.get(name) for how in HOWS] for name in names}
    news = [3, 8, 5, 1, 6, 4]
    done = sennit.hf.generate(
        model, None, prompts, max_new_tokens=news, logprobs=[i % 2 == 0 for i in range(6)], **lists
    )
    for i, (prompt, new) in enumerate(zip(prompts, news, strict=True)):
        assert done[i].token_ids == expected_tokens(model, prompt, new, HOWS[i])
        assert (done[i].logprobs is None) == (i % 2 == 1)
        assert done[i].seed == HOWS[i].get("seed")


def test_a_request_without_a_seed_reports_the_one_that_repeats_it(model: Any) -> None:
    done = sennit.hf.generate(model, None, [[1, 2, 3]] * 4, max_new_tokens=12, temperature=1.5)
    seeds = [one.seed for one in done]
    assert len(set(seeds)) == 4
    assert all(0 <= seed < 2**53 for seed in seeds)
    assert len({tuple(one.token_ids) for one in done}) == 4
    assert sennit.hf.generate(model, None, [[1, 2, 3]] * 4, max_new_tokens=12, temperature=1.5, seed=seeds) == done
    same = sennit.hf.generate(model, None, [[1, 2, 3]] * 2, max_new_tokens=12, temperature=1.5, seed=seeds[2])
    assert same == [done[2], done[2]]


def test_log_probabilities_are_those_of_the_model_whatever_is_sampled(model: Any) -> None:
    how = {"temperature": 1.7, "top_k": 30, "top_p": 0.9, "seed": 3}
    done = sennit.hf.generate(model, None, [[5, 6, 7]], max_new_tokens=8, logprobs=True, **how)[0]
    expected = reference_logprobs(model, [5, 6, 7], done.token_ids)
    torch.testing.assert_close(torch.tensor(done.logprobs), torch.tensor(expected), rtol=0, atol=1e-5)
    assert done.token_ids != reference_tokens(model, [5, 6, 7], 8)


def test_without_a_temperature_decoding_is_greedy_whatever_the_generation_configuration_says() -> None:
    model = tiny_model("llama")
    expected = reference_tokens(model, [1, 2, 3], 8)
    model.generation_config.update(do_sample=True, temperature=1.9, top_p=0.9, top_k=20)
    done = sennit.hf.generate(model, None, [[1, 2, 3]], max_new_tokens=8)[0]
    assert (done.token_ids, done.seed) == (expected, None)


def test_a_step_that_raises_draws_the_same_when_it_is_tried_again(model: Any) -> None:
    prompts = alike_prompts([30, 31, 12], shared=20)
    calls = iter(range(10**6))

    def every_other(*_: Any) -> None:
        if next(calls) % 2 == 0:
            raise RuntimeError("the device is on fire")

    expected = [expected_tokens(model, prompt, 6, HOWS[i]) for i, prompt in enumerate(prompts)]
    hook = model.model.layers[1].register_forward_pre_hook(every_other)
    try:
        with Batcher(model, **TIGHT) as batcher:
            for i, prompt in enumerate(prompts):
                batcher.submit(prompt, max_new_tokens=6, **HOWS[i])
            done = {}
            while batcher.has_work:
                with pytest.raises(RuntimeError, match="on fire"):
                    batcher.step()
                done |= {event.request: event.completion for event in batcher.step() if event.completion}
    finally:
        hook.remove()
    assert [done[i].token_ids for i in range(3)] == expected


def test_logits_that_are_no_numbers_are_an_error_for_a_sampled_request() -> None:
    model = tiny_model("llama")
    torch.nn.init.constant_(model.lm_head.weight, torch.inf)
    with pytest.raises(SennitError, match="expected logits, got NaN or infinity"):
        sennit.hf.generate(model, None, [[1, 2]], max_new_tokens=2, temperature=1.0)


def test_split_size_reaches_every_step(model: Any) -> None:
    with Batcher(model, num_tokens=64, max_requests=2, split_size=8) as batcher:
        seen = []
        step = batcher.cache.step
        batcher.cache.step = lambda items, **options: seen.append(options) or step(items, **options)
        batcher.submit([1, 2, 3], max_new_tokens=3)
        drain(batcher)
    assert seen == [{"split_size": 8}] * 3
    with pytest.raises(InvalidInput, match="split_size: expected an integer of at least 1, got 0"):
        Batcher(model, num_tokens=64, split_size=0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": -0.1}, r"temperature: expected 0 \(greedy decoding\) or a positive number, got -0.1"),
        ({"temperature": math.nan}, "temperature: .* got nan"),
        ({"temperature": math.inf}, "temperature: .* got inf"),
        ({"temperature": True}, "temperature: .* got True"),
        ({"temperature": "1"}, "temperature: .* got '1'"),
        ({"temperature": None}, "temperature: .* got None"),
        ({"temperature": [1.0]}, r"temperature: .* got \[1.0\]"),
        ({"temperature": 1, "top_k": 0}, "top_k: expected an integer of at least 1, got 0; leave it out"),
        ({"temperature": 1, "top_k": -1}, "top_k: .* got -1"),
        ({"temperature": 1, "top_k": 2.0}, "top_k: .* got 2.0"),
        ({"temperature": 1, "top_k": True}, "top_k: .* got True"),
        ({"temperature": 1, "top_p": 0}, "top_p: expected a number above 0, at most 1, got 0; leave it out"),
        ({"temperature": 1, "top_p": 1.01}, "top_p: .* got 1.01"),
        ({"temperature": 1, "top_p": math.nan}, "top_p: .* got nan"),
        ({"temperature": 1, "top_p": True}, "top_p: .* got True"),
        ({"temperature": 1, "min_p": -0.1}, "min_p: expected a number from 0 to 1, got -0.1"),
        ({"temperature": 1, "min_p": 1.5}, "min_p: .* got 1.5"),
        ({"temperature": 1, "min_p": math.nan}, "min_p: .* got nan"),
        ({"temperature": 1, "min_p": np.bool_(True)}, "min_p: .* got .*True"),
        ({"temperature": 1, "seed": -1}, r"seed: expected an integer from 0 to 2\*\*63 - 1, got -1"),
        ({"temperature": 1, "seed": 2**63}, "seed: .* got 9223372036854775808"),
        ({"temperature": 1, "seed": 1.0}, "seed: .* got 1.0"),
        ({"temperature": 1, "seed": False}, "seed: .* got False"),
        ({"top_k": 5}, "top_k: expected a temperature above 0 beside it, got 5 at temperature 0; leave it out"),
        ({"top_p": 0.9}, "top_p: expected a temperature above 0 beside it, got 0.9 at temperature 0"),
        ({"min_p": 0.0}, "min_p: expected a temperature above 0"),
        ({"temperature": 0, "seed": 7}, "seed: expected a temperature above 0"),
    ],
)
def test_values_out_of_range_or_without_effect_are_refused(model: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        Sampling(**options)
    with Batcher(model, num_tokens=64, max_requests=4) as batcher:
        with pytest.raises(InvalidInput, match=message):
            batcher.submit([1], max_new_tokens=1, **options)
        assert not batcher.has_work


def test_numbers_of_numpy_are_kept_as_pythons() -> None:
    how = Sampling(np.float32(0.5), np.int64(4), np.float64(0.9), np.float32(0.25), np.uint64(7))
    assert asdict(how) == {"temperature": 0.5, "top_k": 4, "top_p": 0.9, "min_p": 0.25, "seed": 7}
    assert [type(value) for value in asdict(how).values()] == [float, int, float, float, int]
    assert hash(how) == hash(Sampling(0.5, 4, 0.9, 0.25, 7))
    assert type(Sampling(1).temperature) is float


@pytest.mark.parametrize("form", [list, tuple, np.array, torch.tensor])
def test_lists_of_one_a_prompt_may_be_of_any_kind(model: Any, form: Any) -> None:
    done = sennit.hf.generate(
        model, None, [[1], [2]], max_new_tokens=form([2, 3]), temperature=form([1.0, 2.0]), seed=form([3, 4])
    )
    assert [(len(one.token_ids), one.seed) for one in done] == [(2, 3), (3, 4)]
    seeds = sennit.hf.generate(model, None, [[1], [2]], max_new_tokens=np.int32(2), temperature=1.0, seed=range(2))
    assert [one.seed for one in seeds] == [0, 1]


@pytest.mark.parametrize(
    ("name", "value", "each"),
    [
        ("stop", "a", ["a", "a"]),
        ("stop", ["a", "b"], [["a", "b"]] * 2),
        ("stop", [["a"], None], [["a"], None]),
        ("stop", [None, "b"], [None, "b"]),
        ("stop", [["a", "b"], "c"], [["a", "b"], "c"]),
        ("stop", [], [[], []]),
        ("stop", [[], []], [[], []]),
        ("eos_token_id", 3, [3, 3]),
        ("eos_token_id", [3, 4], [[3, 4]] * 2),
        ("eos_token_id", [[3], 4], [[3], 4]),
        ("eos_token_id", [None, [5]], [None, [5]]),
        ("top_k", [None, 4], [None, 4]),
        ("temperature", 0.5, [0.5, 0.5]),
    ],
)
def test_which_lists_are_one_a_prompt(name: str, value: Any, each: list[Any]) -> None:
    asked = OptionsByPrompt({name: value}, count=2)
    assert [asked[i] for i in range(2)] == [{name: one} for one in each]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": [0.5]}, r"temperature: expected one value, or a list of 2, one a prompt, got 1"),
        ({"max_new_tokens": [1, 2, 3]}, "max_new_tokens: expected one value, or a list of 2, one a prompt, got 3"),
        ({"stop": [["a"]]}, "stop: expected one value, or a list of 2, one a prompt, got 1"),
        ({"eos_token_id": [[1], [2], None]}, "eos_token_id: expected one value, or a list of 2, .* got 3"),
        ({"temperature": [0.5, -1]}, r"temperature\[1\]: expected 0 \(greedy decoding\) or a positive number, got -1"),
        ({"max_new_tokens": [5, 0]}, r"max_new_tokens\[1\]: expected an integer of at least 1, got 0"),
        ({"temperature": [0.5, 0], "seed": [1, 2]}, r"seed\[1\]: expected a temperature above 0 beside it, got 2 at"),
        (
            {"temperature": [0.5, 0], "seed": 7},
            r"seed: expected a temperature above 0 beside it, got 7, and prompts\[1\] has temperature 0",
        ),
        ({"stop": [None, ["a"]]}, r"stop\[1\]: expected no strings, since no tokenizer was given"),
        ({"eos_token_id": [[1], ["x"]]}, r"eos_token_id\[1\]: expected an integer or a list of integers"),
        ({"temperature": (t for t in (0.5, 0.5))}, "temperature: .* got <generator"),
    ],
)
def test_errors_of_lists_name_the_prompt(model: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInput, match=f"^{message}"):
        sennit.hf.stream(model, None, [[1], [2]], **options)


def test_stop_tokens_of_numpy_end_each_its_own_request(model: Any) -> None:
    free = reference_tokens(model, [1, 2, 3], 9)
    last = np.int64(free[6])
    done = sennit.hf.generate(model, None, [[1, 2, 3]] * 2, max_new_tokens=9, eos_token_id=[[last], []])
    count = free.index(last) + 1
    assert [one.token_ids for one in done] == [free[:count], free]
    assert [(one.finish_reason, one.stopped_by) for one in done] == [("stop", last), ("length", None)]


def test_a_request_may_be_named_by_a_number_of_numpy(model: Any) -> None:
    with Batcher(model, num_tokens=64, max_requests=np.int64(2)) as batcher:
        batcher.submit([1], max_new_tokens=np.int32(3))
        assert batcher.cancel(np.int64(0))
