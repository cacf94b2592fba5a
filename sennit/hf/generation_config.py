"""What a model's generation configuration means here: the tokens that end a request, and settings that are refused."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sennit.cache.demand import is_integer
from sennit.errors import InvalidInput, UnsupportedFeature

__all__ = ["check_generation_config", "stop_tokens"]

# Settings that change a model's tokens, each with the values that do not. Those of sampling (do_sample, temperature,
# top_p, ...) are not among them: they are a request's own, and a request that says nothing is decoded greedily.
NEUTRAL: dict[str, tuple[object, ...]] = {
    "num_beams": (None, 1),
    "repetition_penalty": (None, 1),
    "encoder_repetition_penalty": (None, 1),
    "no_repeat_ngram_size": (None, 0),
    "encoder_no_repeat_ngram_size": (None, 0),
    "min_length": (None, 0),
    "min_new_tokens": (None, 0),
    "guidance_scale": (None, 1),
    "forced_bos_token_id": (None,),
    "forced_eos_token_id": (None,),
    "exponential_decay_length_penalty": (None,),
    "watermarking_config": (None,),
    "token_healing": (None, False),
    "penalty_alpha": (None,),
    "dola_layers": (None,),
}
# And those that are lists, which are neutral where they are empty.
LISTS = (
    "bad_words_ids",
    "suppress_tokens",
    "begin_suppress_tokens",
    "sequence_bias",
    "stop_strings",
    "force_words_ids",
    "constraints",
)


def check_generation_config(generation_config: Any) -> None:
    """Refuse a generation configuration under which transformers' own greedy tokens would be others.

    Raises:
        UnsupportedFeature: names the setting.
    """
    for name in (*NEUTRAL, *LISTS):
        value = getattr(generation_config, name, None)
        empty = name in LISTS and isinstance(value, (list, tuple, dict)) and not value
        if value not in NEUTRAL.get(name, (None,)) and not empty:
            instead = " and give stop= with each request" if name == "stop_strings" else ""
            raise UnsupportedFeature(
                f"generation_config.{name}",
                f"{value!r} would change the tokens; set model.generation_config.{name} = None{instead}",
            )


def stop_tokens(eos_token_id: int | Sequence[int] | None, generation_config: Any, *, vocab_size: int) -> frozenset[int]:
    """Return the tokens that end a request: those given, or else those of the model's generation configuration.

    An empty list means that no token does.

    Raises:
        InvalidInput: ``eos_token_id`` is neither an integer nor a sequence of integers, or not below ``vocab_size``: a
            token that the model does not have would never come. (Those of the configuration may be: nobody asked.)

    >>> sorted(stop_tokens([2, 5], None, vocab_size=8)), sorted(stop_tokens([], None, vocab_size=8))
    ([2, 5], [])
    """
    given: Any = eos_token_id if eos_token_id is not None else getattr(generation_config, "eos_token_id", None)
    if given is None:
        return frozenset()
    ids = list(given) if isinstance(given, (list, tuple, set, frozenset)) else [given]
    if not all(map(is_integer, ids)):
        raise InvalidInput("eos_token_id", expected="an integer or a list of integers", got=repr(given))
    outside = next((i for i in ids if not 0 <= i < vocab_size), None)
    if outside is not None and eos_token_id is not None:
        raise InvalidInput("eos_token_id", expected=f"token ids from 0 to {vocab_size - 1}", got=outside)
    return frozenset(map(int, ids))
