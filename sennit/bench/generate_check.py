"""Whether ``sennit.hf.generate`` gives the greedy tokens of transformers' own ``generate`` in float32."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from sennit.bench.generate_engines import Engine, Prompts
from sennit.errors import SennitError

__all__ = ["TIE", "Agreement", "check_tokens", "compare"]

TIE = 1e-3  # two logits this close may change places when sums are taken in another order

Reference: TypeAlias = "tuple[Sequence[int], torch.Tensor]"  # tokens, and the logits [tokens, vocabulary] before each


@dataclass(frozen=True)
class Agreement:
    """How far tokens were compared, and agreed.

    Attributes:
        prompts: prompts that were compared.
        tokens: tokens of them that were compared.
        ties: prompts whose rest was left out, because two logits were within :data:`TIE` and another was taken.
    """

    prompts: int
    tokens: int
    ties: int


def check_tokens(engine: Engine, model: Any, prompts: Prompts, max_new_tokens: int) -> Agreement:
    """Compare an engine's greedy tokens with those of transformers' ``generate``, one prompt at a time.

    Args:
        engine: what is checked.
        model: a model in float32.
        prompts: token ids.
        max_new_tokens: tokens to compare a prompt.

    Raises:
        SennitError: a token differs that is not a tie.
    """
    made = engine(model, prompts, max_new_tokens)
    tokens = ties = 0
    for index, (prompt, ours) in enumerate(zip(prompts, made, strict=True)):
        agreed = compare(ours, _reference(model, prompt, max_new_tokens), named=f"prompt {index}")
        tokens += agreed
        ties += agreed < max_new_tokens
    return Agreement(len(prompts), tokens, ties)


def compare(ours: Sequence[int], reference: Reference, *, named: str) -> int:
    """Return how many tokens agree before the first tie that was decided otherwise; all of them if there is none.

    Raises:
        SennitError: there are more or fewer tokens, or one differs whose logit is more than :data:`TIE` below the
            largest.

    >>> logits = torch.tensor([[1.0, 0.0], [0.5, 0.5004], [1.0, 0.0]])
    >>> compare([0, 0, 1], ([0, 1, 0], logits), named="prompt 0")
    1
    """
    theirs, logits = reference
    if len(ours) != len(theirs):
        raise SennitError(f"{named}: {len(ours)} tokens instead of {len(theirs)}")
    for place, (token, expected) in enumerate(zip(ours, theirs, strict=True)):
        if token == expected:
            continue
        gap = float(logits[place, expected] - logits[place, token])
        if gap <= TIE:
            return place
        raise SennitError(
            f"{named}: new token {place} is {token} instead of {expected}, whose float32 logit is larger by {gap:.2g}"
        )
    return len(ours)


def _reference(model: Any, prompt: Sequence[int], max_new_tokens: int) -> Reference:
    model.set_attn_implementation("sdpa")
    ids = torch.tensor([list(prompt)], device=model.device)
    made = model.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=max_new_tokens,
        return_dict_in_generate=True,
        output_logits=True,
    )
    return made.sequences[0, len(prompt) :].tolist(), torch.cat(made.logits)
