"""What is measured against each other: ``sennit.hf.generate`` and transformers' two ways to generate for many prompts.

All take the same token ids and give exactly ``max_new_tokens`` greedy tokens a prompt; no token ends a text early.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, TypeAlias

import torch

from sennit.bench.generate_shapes import is_random, random_model
from sennit.errors import SennitError
from sennit.hf.batcher import MAX_BATCH_TOKENS
from sennit.hf.generation import generate

__all__ = ["Continuous", "Engine", "Padded", "Sennit", "load_model", "peers_on"]

Prompts: TypeAlias = "Sequence[Sequence[int]]"

PAD = 0  # any token: it is masked


class Engine(Protocol):
    """One way to generate for many prompts at once."""

    @property
    def name(self) -> str:
        """What it is called in a report."""
        ...

    @property
    def settings(self) -> str:
        """What else decides its speed, in words."""
        ...

    def __call__(self, model: Any, prompts: Prompts, max_new_tokens: int) -> list[list[int]]:
        """New tokens of each prompt."""
        ...


@dataclass(frozen=True)
class Sennit:
    """``sennit.hf.generate``."""

    backend: str = "auto"
    max_batch_tokens: int = MAX_BATCH_TOKENS
    name: ClassVar[str] = "sennit"

    @property
    def settings(self) -> str:
        """Backend as it was asked for, and the most tokens of a step."""
        return f"backend={self.backend}, max_batch_tokens={self.max_batch_tokens}"

    def __call__(self, model: Any, prompts: Prompts, max_new_tokens: int) -> list[list[int]]:
        """New tokens of each prompt."""
        completions = generate(
            model,
            None,
            [list(prompt) for prompt in prompts],
            max_new_tokens=max_new_tokens,
            max_requests=len(prompts),
            max_batch_tokens=self.max_batch_tokens,
            eos_token_id=[],
            backend=self.backend,
        )
        return [completion.token_ids for completion in completions]


@dataclass(frozen=True)
class Padded:
    """transformers' ``generate``: one batch, padded on the left."""

    name: ClassVar[str] = "generate"
    settings: ClassVar[str] = "transformers, one padded batch, sdpa"

    def __call__(self, model: Any, prompts: Prompts, max_new_tokens: int) -> list[list[int]]:
        """New tokens of each prompt."""
        longest = max(map(len, prompts))
        pads = [longest - len(prompt) for prompt in prompts]
        ids = torch.tensor([[PAD] * pad + list(prompt) for pad, prompt in zip(pads, prompts, strict=True)])
        mask = torch.tensor([[0] * pad + [1] * (longest - pad) for pad in pads])
        _use_sdpa(model)
        made = model.generate(
            input_ids=ids.to(model.device), attention_mask=mask.to(model.device), max_new_tokens=max_new_tokens
        )
        tokens: list[list[int]] = made[:, longest:].tolist()
        return tokens


@dataclass(frozen=True)
class Continuous:
    """transformers' ``generate_batch``: continuous batching over a paged cache.

    Its SDPA path lets every query of a step multiply the keys of all requests in the step and masks the others', so
    few requests at a time are fastest on a CPU although each of its steps then decodes for few. It has faster paths for
    FlashAttention's own packages, which PyTorch does not bring; without them SDPA is the fastest. None: its defaults.
    """

    max_batch_tokens: int | None = 1024
    max_requests: int | None = 4
    name: ClassVar[str] = "generate_batch"
    page_size: ClassVar[int] = 256  # transformers' default

    @property
    def settings(self) -> str:
        """What its configuration says."""
        chosen = {"max_batch_tokens": self.max_batch_tokens, "max_requests_per_batch": self.max_requests}
        limits = [f"{name}={value}" for name, value in chosen.items() if value is not None]
        return ", ".join(["transformers, continuous batching, sdpa", *(limits or ["its default limits"])])

    def __call__(self, model: Any, prompts: Prompts, max_new_tokens: int) -> list[list[int]]:
        """New tokens of each prompt."""
        from transformers import ContinuousBatchingConfig, GenerationConfig

        _use_sdpa(model)
        limits = ContinuousBatchingConfig(
            num_blocks=sum(-(-(len(prompt) + max_new_tokens) // self.page_size) + 1 for prompt in prompts),
            max_batch_tokens=self.max_batch_tokens,
            max_requests_per_batch=None if self.max_requests is None else min(self.max_requests, len(prompts)),
        )
        made = model.generate_batch(
            [list(prompt) for prompt in prompts],
            generation_config=GenerationConfig(max_new_tokens=max_new_tokens, do_sample=False, eos_token_id=-1),
            continuous_batching_config=limits,
            progress_bar=False,
        )
        if len(made) != len(prompts):  # what went wrong in its thread is only logged
            raise SennitError(f"generate_batch answered {len(made)} of {len(prompts)} prompts")
        return [output.generated_tokens for output in made.values()]


def peers_on(device: str) -> tuple[Engine, ...]:
    """transformers' ways, with the settings that are fastest on a CPU, or their own ones on a GPU."""
    return (Padded(), Continuous() if device == "cpu" else Continuous(None, None))


def load_model(model: str, dtype: torch.dtype | None, device: str = "cpu") -> Any:
    """Return a model that decodes greedily and knows no token that ends a text."""
    import transformers
    from transformers import GenerationConfig

    from sennit.hf.loading import load

    transformers.utils.logging.set_verbosity_error()
    if is_random(model):
        loaded = random_model(model, dtype or torch.bfloat16, device)
    else:
        loaded, _ = load(model, dtype=dtype, device=device)
    loaded.generation_config = GenerationConfig(do_sample=False, pad_token_id=PAD)
    return loaded


def _use_sdpa(model: Any) -> None:
    if model.config._attn_implementation != "sdpa":
        model.set_attn_implementation("sdpa")
