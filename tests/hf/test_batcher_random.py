"""Random arrivals, cancellations, sizes and shared prefixes: nothing is lost, and every token is the prompt's own.

Of models without windows, with windows in all layers, in some, and with latent layers.
"""

from __future__ import annotations

import random
from functools import lru_cache
from typing import Any

import pytest
from tiny_models import reference_tokens, tiny_model

from sennit.hf import Batcher, Completion

LONGEST, NEW = 60, 24


MODELS: dict[str, dict[str, Any]] = {
    "llama": {"num_hidden_layers": 1},
    "mistral": {"num_hidden_layers": 1, "sliding_window": 7},
    "gemma2": {"num_hidden_layers": 2, "sliding_window": 7},
    "deepseek_v3": {"num_hidden_layers": 1},
}


@lru_cache
def small_model(name: str) -> Any:
    return tiny_model(name, **MODELS[name])


@lru_cache
def own_tokens(name: str, prompt: tuple[int, ...]) -> list[int]:
    return reference_tokens(small_model(name), list(prompt), NEW)


def random_prompt(rng: random.Random, pool: list[list[int]], longest: int) -> list[int]:
    length = rng.randint(1, longest)
    common = rng.choice(pool)[: rng.choice([length, rng.randint(0, length)])]
    return common + [rng.randrange(256) for _ in range(length - len(common))]


@pytest.mark.parametrize("name", list(MODELS))
@pytest.mark.parametrize("seed", [*range(3), *(pytest.param(s, marks=pytest.mark.slow) for s in range(3, 25))])
def test_any_order_of_events_loses_nothing(seed: int, name: str) -> None:
    rng = random.Random(seed)
    pool = [[rng.randrange(256) for _ in range(LONGEST)] for _ in range(2)]
    max_requests = rng.randint(1, 6)
    batcher = Batcher(
        small_model(name),
        num_tokens=rng.randint(24, 160),
        page_size=rng.choice([1, 2, 4, 8, 16]),
        max_batch_tokens=rng.randint(max_requests, 40),
        max_requests=max_requests,
        share_prefixes=rng.random() < 0.85,
    )
    capacity = batcher.cache.num_tokens
    asked: dict[int, tuple[list[int], int]] = {}
    told: dict[int, list[int]] = {}
    done: dict[int, Completion] = {}
    cancelled = set()
    while batcher.has_work or len(asked) < 10:
        if len(asked) < 10 and rng.random() < 0.4:
            prompt, new = random_prompt(rng, pool, min(LONGEST, capacity - 1)), rng.randint(1, NEW)
            request = batcher.submit(prompt, max_new_tokens=new)
            asked[request], told[request] = (prompt, new), []
        if asked and rng.random() < 0.04 and batcher.cancel(request := rng.choice(list(asked))):
            cancelled.add(request)
        for event in batcher.step():
            assert event.request not in done
            told[event.request] += [event.token_id] if event.token_id is not None else []
            if event.completion:
                done[event.request] = event.completion
                pool.append(asked[event.request][0] + event.completion.token_ids)  # as a chat goes on
        batcher.cache.check()
    assert done.keys() == asked.keys()
    for request, completion in done.items():
        prompt, new = asked[request]
        count = len(completion.token_ids)
        assert completion.token_ids == own_tokens(name, tuple(prompt))[:count] == told[request]
        if request in cancelled:
            assert completion.finish_reason == "cancelled"
        elif completion.finish_reason == "capacity":
            assert len(prompt) + count == capacity + 1
        else:
            assert (completion.finish_reason, count) == ("length", new)
