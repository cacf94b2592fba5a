"""Runs one packed step of a transformers model: new tokens of many sequences in, each one's next token out."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any
from weakref import WeakKeyDictionary

import torch

from sennit.errors import InvalidInput
from sennit.hf.attention import NAME
from sennit.hf.drawing import Choice, choose
from sennit.hf.latent import latent_keywords
from sennit.hf.linears import few_row_linears, linears_of
from sennit.hf.masks import no_mask
from sennit.hf.models import check_supported, model_config
from sennit.step import Step

__all__ = ["PackedForward", "step_keywords"]

# Who may run a model with its attention setting changed; one lock for each model.
_TURNS: WeakKeyDictionary[Any, threading.RLock] = WeakKeyDictionary()
_TURNS_LOCK = threading.Lock()


def step_keywords(model: Any, step: Any) -> dict[str, Any]:
    """Return the keywords that make a forward of a model a packed step over a :class:`sennit.KVCache`.

    ``model(ids, **step_keywords(model, step))`` computes the step's tokens, packed into one row ``ids``, int64
    ``[1, step.num_tokens]``: it appends them to the cache, and its logits are those of every token after all that its
    sequence holds. They are ``position_ids``, ``use_cache=False``, ``sennit_step``, and for a model with latent layers
    what takes their latents. Ask for them anew in every step.

    Args:
        model: a transformers causal language model of a supported architecture, its attention set to ``"sennit"``.
        step: an open step of a cache made of ``sennit.hf.layer_specs(model)``.

    Raises:
        UnsupportedModel, UnsupportedFeature: see :func:`sennit.hf.check_supported`.
        InvalidInput: the model's attention is not Sennit's, and would know nothing of the step; or there is no model or
            no step.
        StepClosed: the step is not open.

    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> import sennit
    >>> tiny = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1}
    >>> model = LlamaForCausalLM(LlamaConfig(vocab_size=32, attn_implementation="sennit", **tiny)).eval()
    >>> cache = sennit.KVCache(sennit.hf.layer_specs(model), num_tokens=64, device="cpu")
    >>> with torch.inference_mode(), cache.step([(cache.add(), 3), (cache.add(), 2)]) as step:
    ...     logits = model(torch.tensor([[5, 6, 7, 8, 9]]), **step_keywords(model, step)).logits
    >>> logits.shape
    torch.Size([1, 5, 32])
    """
    config = model_config(model)
    latent = check_supported(config).latent
    if not isinstance(step, Step):
        raise InvalidInput("step", expected="an open step of a sennit.KVCache", got=type(step).__name__)
    if config._attn_implementation != NAME:
        raise InvalidInput(
            "model",
            expected=f"attention set to {NAME!r}",
            got=repr(config._attn_implementation),
            hint=f"call model.set_attn_implementation({NAME!r})",
        )
    keywords = {"position_ids": step.positions[None], "use_cache": False, "sennit_step": step}
    return keywords | (latent_keywords(model) if latent else {})


class PackedForward:
    """A model, run on packed steps with its attention set to Sennit for the duration of each.

    The setting is an attribute of the model's few configuration objects, so switching it for every step costs nothing
    and leaves the model as it was for everybody else between steps. Steps of one model in several threads take turns.
    Where the CPU backend computes attention, it multiplies few rows in linear layers too.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        with _TURNS_LOCK:
            self._turn = _TURNS.setdefault(model, threading.RLock())
        configs = [module.config for module in model.modules() if hasattr(getattr(module, "config", None), "to_dict")]
        self._configs = list({id(config): config for config in configs}.values())
        self._linears = linears_of(model)

    def __call__(
        self, step: Any, ids: Sequence[int], rows: Sequence[int], choices: Sequence[Choice], *, logprobs: bool
    ) -> tuple[list[int], list[float] | None]:
        """Compute a step and return the next token after each of ``rows``.

        Args:
            step: an open :class:`sennit.KVCache` step over these tokens.
            ids: the new tokens of all sequences, packed in the step's order.
            rows: indices into ``ids`` whose next token is wanted; may be empty.
            choices: how each of these tokens is chosen.
            logprobs: also return the natural logarithm of each next token's probability, by the model alone.

        Returns:
            The tokens, :data:`sennit.hf.drawing.NO_TOKEN` where logits are no numbers, and the logarithms.
        """
        host = torch.tensor([*ids, *rows], dtype=torch.int64)
        device = host.to(self._model.device)
        linears = few_row_linears(self._linears) if "cpu" in step.backends else nullcontext()
        with self._turn, _attention_set_to(NAME, self._configs), linears:
            logits = self._model(
                input_ids=device[None, : len(ids)],
                attention_mask=no_mask(self._model.device),
                logits_to_keep=device[len(ids) :],
                return_dict=True,
                **step_keywords(self._model, step),
            ).logits[0]
            tokens = choose(logits, choices)
            if not logprobs:
                return tokens.tolist(), None
            wide = logits if logits.dtype == torch.float64 else logits.float()
            chosen = torch.log_softmax(wide, dim=-1).gather(1, tokens.clamp(min=0)[:, None])[:, 0]
            return tokens.tolist(), chosen.tolist()


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
