"""48 prompts of 1 to 900 tokens, 40 new ones each, in one crowded batch, against transformers one by one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from batches import alike_prompts, drain, mixed_lengths
from tiny_models import reference_tokens, tiny_model

import sennit
from sennit.hf import Batcher, Completion
from sennit.hf.loading import load

# Long prompts take several steps, and running requests outgrow what is free.
CROWDED: dict[str, Any] = {"num_tokens": 1400, "page_size": 8, "max_batch_tokens": 256, "max_requests": 24}


@pytest.mark.model
@pytest.mark.parametrize(
    "stride", [pytest.param(12, marks=pytest.mark.slow), pytest.param(1, marks=pytest.mark.thorough)]
)
def test_smollm2_gives_the_tokens_of_each_prompt_alone_wherever_they_are_not_a_near_tie(stride: int) -> None:
    """In float32 two right computations may differ where the two most probable tokens are as good as equal."""
    model, tokenizer = load(None, dtype=torch.float32)
    model.eval()
    prompts = smollm2_prompts(tokenizer)
    assert len(prompts) == 48
    assert {1, 900} <= {len(prompt) for prompt in prompts}
    with Batcher(model, tokenizer, **CROWDED) as batcher:
        for prompt in prompts:
            batcher.submit(prompt, max_new_tokens=40)
        _, done = drain(batcher, check=False)
        stats = batcher.stats()
    assert stats.prompts_chunked > 0
    assert stats.forks > 0
    assert stats.preemptions > 0
    # Prompts alone take minutes: some of all kinds are compared, and by hand all of them.
    some = range(stride - 1, 48, stride)
    compared = sum(agreed_tokens(model, prompts[i], done[i]) for i in some)
    # Near ties are rare: nearly every token must have been compared.
    assert compared > 0.9 * sum(len(done[i].token_ids) for i in some)


def smollm2_prompts(tokenizer: Any) -> list[list[int]]:
    """48 prompts of 1 to 900 tokens of text; some are chats, which begin alike with the template's system message."""
    words = tokenizer((Path(sennit.__file__).parent / "spec.py").read_text())["input_ids"]
    prompts = [words[i * 37 % 400 :][:length] for i, length in enumerate(mixed_lengths(36, 900))]
    for i in range(12):
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": f"Name {i + 2} animals that live in the sea."}],
            add_generation_prompt=True,
            tokenize=False,
        )
        prompts.append(tokenizer(text, add_special_tokens=False)["input_ids"])
    return prompts


def agreed_tokens(model: Any, prompt: list[int], completion: Completion) -> int:
    """Compare with eager generate up to the first near tie that was decided otherwise; return the tokens compared."""
    expected = reference_tokens(model, prompt, 40)
    for i, (got, want) in enumerate(zip(completion.token_ids, expected, strict=False)):
        if got != want:
            with torch.no_grad():
                top = model(torch.tensor([prompt + expected[:i]])).logits[0, -1].topk(2).values
            assert top[0] - top[1] <= 1e-3, f"token {i}: {got}, expected {want}, by {top[0] - top[1]}"
            return i
    assert len(completion.token_ids) == len(expected)
    return len(expected)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "llama-tied", "qwen3", "qwen3-tied"])
def test_48_prompts_in_one_continuous_batch_give_the_tokens_of_each_alone(name: str) -> None:
    architecture, _, tied = name.partition("-")
    model = tiny_model(architecture, tied=bool(tied))
    lengths = mixed_lengths(48, 900)
    assert (min(lengths), max(lengths), len(lengths)) == (1, 900, 48)
    prompts, new = alike_prompts(lengths, shared=100), 40
    with Batcher(model, **CROWDED) as batcher:
        for prompt in prompts:
            batcher.submit(prompt, max_new_tokens=new)
        _, done = drain(batcher)
        stats = batcher.stats()
    assert stats.prompts_chunked > 0
    assert stats.forks > 0
    assert stats.preemptions > 0
    for i, prompt in enumerate(prompts):
        assert done[i].token_ids == reference_tokens(model, prompt, new), i
