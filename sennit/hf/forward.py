"""Runs one packed step of a transformers model: new tokens of many sequences in, each one's next token out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from sennit.errors import SennitError
from sennit.hf.attention import NAME

__all__ = ["PackedForward"]

NOT_A_NUMBER = -1  # in place of a token


class PackedForward:
    """A model, run on packed steps with its attention set to Sennit for the duration of each.

    The setting is an attribute of the model's few configuration objects, so switching it for every step costs nothing
    and leaves the model as it was for everybody else between steps.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        configs = [module.config for module in model.modules() if hasattr(getattr(module, "config", None), "to_dict")]
        self._configs = list({id(config): config for config in configs}.values())
        # transformers takes a 4-D mask for a finished one and hands it on. Left to itself it would look for several
        # sequences in one row, which costs a transfer from the device, and ask for a mask that nobody reads.
        self._no_mask = torch.ones((1, 1, 1, 1), dtype=torch.bool, device=model.device)

    def __call__(
        self, step: Any, ids: Sequence[int], rows: Sequence[int], *, logprobs: bool
    ) -> tuple[list[int], list[float] | None]:
        """Compute a step and return the most probable next token after each of ``rows``.

        Args:
            step: an open :class:`sennit.KVCache` step over these tokens.
            ids: the new tokens of all sequences, packed in the step's order.
            rows: indices into ``ids`` whose next token is wanted; may be empty.
            logprobs: also return the natural logarithm of each next token's probability.
        """
        host = torch.tensor([*ids, *rows], dtype=torch.int64)
        device = host.to(self._model.device)
        with _attention_set_to(NAME, self._configs):
            logits = self._model(
                input_ids=device[None, : len(ids)],
                attention_mask=self._no_mask,
                position_ids=step.positions[None],
                use_cache=False,
                logits_to_keep=device[len(ids) :],
                return_dict=True,
                sennit_step=step,
            ).logits[0]
            best, tokens = logits.max(dim=-1)
            tokens = tokens.masked_fill(best.isnan(), NOT_A_NUMBER)
            if not logprobs:
                return _checked(tokens.tolist()), None
            wide = logits if logits.dtype == torch.float64 else logits.float()
            chosen = torch.log_softmax(wide, dim=-1).gather(1, tokens.clamp(min=0)[:, None])[:, 0]
            return _checked(tokens.tolist()), chosen.tolist()


def _checked(tokens: list[int]) -> list[int]:
    if NOT_A_NUMBER in tokens:
        raise SennitError(
            "model: expected logits, got NaN; its weights hold NaN, or numbers overflow in its dtype (try bfloat16 or "
            "float32)"
        )
    return tokens


@contextmanager
def _attention_set_to(name: str, configs: Sequence[Any]) -> Iterator[None]:
    before = [config._attn_implementation for config in configs]
    try:
        for config in configs:
            config._attn_implementation = name
        yield
    finally:
        for config, implementation in zip(configs, before, strict=True):
            config._attn_implementation = implementation
