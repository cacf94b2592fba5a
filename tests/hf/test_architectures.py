"""Every architecture gives transformers' greedy tokens: in one continuous batch, and in transformers' own generate.

Windows are shorter than the prompts. What each architecture has of its own (windows, caps, sinks, a scale) changes the
tokens of these models, so that none of it could be dropped unnoticed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from batches import alike_prompts, drain, mixed_lengths, step_counts
from tiny_models import ARCHITECTURES, CACHE_ARGUMENT, WINDOW, YARN, reference_tokens, tiny_model
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    DynamicCache,
    Gemma3Config,
    LlamaConfig,
    MistralConfig,
    Qwen3Config,
)

import sennit.hf
from sennit import AttentionSpec
from sennit.errors import InvalidInput, PlanMismatch, UnsupportedFeature, UnsupportedModel
from sennit.hf import Batcher, check_supported, step_keywords
from sennit.hf.latent import LatentRows
from sennit.kvcache import KVCache

PECULIAR_ONES = ["qwen3_window", "mistral", "gemma2", "gemma3", "gpt_oss", "deepseek_v3"]
WINDOWED = [name for name in PECULIAR_ONES if name != "deepseek_v3"]
NEW = 8

architectures = pytest.mark.parametrize("name", PECULIAR_ONES)
windowed = pytest.mark.parametrize("name", WINDOWED)


def prompts_of(lengths: list[int]) -> list[list[int]]:
    return alike_prompts(lengths, shared=60)


def left_padded(prompts: list[list[int]]) -> dict[str, torch.Tensor]:
    width = max(map(len, prompts))
    rows = [[0] * (width - len(prompt)) + prompt for prompt in prompts]
    mask = [[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts]
    return {"input_ids": torch.tensor(rows), "attention_mask": torch.tensor(mask)}


@pytest.mark.slow
@pytest.mark.parametrize("name", list(ARCHITECTURES))
def test_24_prompts_in_one_continuous_batch_give_the_tokens_of_each_alone(name: str) -> None:
    model, lengths, new = tiny_model(name), mixed_lengths(24, 300), 32
    assert (min(lengths), max(lengths), len(lengths)) == (1, 300, 24)
    prompts = prompts_of(lengths)
    with Batcher(model, num_tokens=1400, page_size=8, max_batch_tokens=128, max_requests=12) as batcher:
        for prompt in prompts:
            batcher.submit(prompt, max_new_tokens=new)
        with step_counts(batcher) as counts:
            _, done = drain(batcher)
        stats = batcher.stats()
    assert stats.prompts_chunked > 0
    assert any(1 in step and max(step) > 1 for step in counts)  # decodes beside a prompt
    for i, prompt in enumerate(prompts):
        assert done[i].token_ids == reference_tokens(model, prompt, new), i


@architectures
def test_a_small_batch_gives_the_tokens_of_each_prompt_alone(name: str) -> None:
    model, prompts = tiny_model(name), prompts_of([70, 3, 45, 1])
    with Batcher(model, num_tokens=400, page_size=8, max_batch_tokens=40, max_requests=4) as batcher:
        for prompt in prompts:
            batcher.submit(prompt, max_new_tokens=NEW)
        _, done = drain(batcher)
    for i, prompt in enumerate(prompts):
        assert done[i].token_ids == reference_tokens(model, prompt, NEW), i


def without_sinks(model: Any) -> Any:
    for layer in model.model.layers:
        torch.nn.init.constant_(layer.self_attn.sinks, -1e9)
    return model


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        *[(name, {"sliding_window": window}) for name in WINDOWED for window in (WINDOW - 1, WINDOW + 1)],
        ("gemma2", {"attn_logit_softcapping": None}),
        ("gpt_oss", "without sinks"),
        ("deepseek_v3", {"rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 0.0}}),
    ],
)
def test_what_an_architecture_has_of_its_own_changes_the_tokens(name: str, changes: Any) -> None:
    """Of transformers' own generate: the tests of this file would notice if it were dropped."""
    other = without_sinks(tiny_model(name)) if changes == "without sinks" else tiny_model(name, **changes)
    prompts = prompts_of([70, 45])
    tokens = [[reference_tokens(model, prompt, 20) for prompt in prompts] for model in (tiny_model(name), other)]
    assert tokens[0] != tokens[1]


@architectures
def test_left_padded_generate_gives_each_prompt_its_own_tokens(name: str) -> None:
    model, prompts = tiny_model(name), prompts_of([WINDOW + 13, 1, WINDOW - 2, WINDOW, 5])
    model.set_attn_implementation("sennit")
    out = model.generate(**left_padded(prompts), max_new_tokens=NEW, do_sample=False)
    for row, prompt in zip(out[:, -NEW:].tolist(), prompts, strict=True):
        assert row == reference_tokens(model, prompt, NEW)


@architectures
@pytest.mark.parametrize("options", [{"cache_implementation": "static"}, {"use_cache": False}, {"num_beams": 2}])
def test_generate_modes_give_what_eager_gives(name: str, options: dict[str, Any]) -> None:
    model, (prompt,) = tiny_model(name), prompts_of([WINDOW + 5])
    expected = reference_tokens(model, prompt, NEW, **options)
    model.set_attn_implementation("sennit")
    inputs = left_padded([prompt, [7, 8]])
    out = model.generate(**inputs, max_new_tokens=NEW, do_sample=False, **options)
    assert out[0, -NEW:].tolist() == expected


@windowed
@pytest.mark.parametrize("sliding_cache", [True, False])
def test_chunks_over_a_transformers_cache_agree(name: str, sliding_cache: bool) -> None:
    """A cache made for the model keeps what its windows need, and one that knows nothing of them keeps everything."""
    model, (prompt,) = tiny_model(name), prompts_of([90])
    ids, (pad, zeros) = torch.tensor([prompt]), (torch.zeros(1, 4).long(), torch.zeros(1, 4))
    model.set_attn_implementation("eager")
    with torch.no_grad():
        expected = model(ids).logits
    model.set_attn_implementation("sennit")
    cache, parts = DynamicCache(config=model.config) if sliding_cache else DynamicCache(), []
    ids, mask = torch.cat([pad, ids], 1), torch.cat([zeros, torch.ones(1, 90)], 1)
    positions = (mask.cumsum(1) - 1).clamp(min=0).long()
    for first, last in ((0, 20), (20, 21), (21, 70), (70, 71), (71, 94)):
        with torch.no_grad():
            out = model(
                input_ids=ids[:, first:last],
                attention_mask=mask[:, :last],
                position_ids=positions[:, first:last],
                use_cache=True,
                **{CACHE_ARGUMENT: cache},
            )
        parts.append(out.logits)
    torch.testing.assert_close(torch.cat(parts, 1)[:, 4:], expected, rtol=0, atol=1e-4)


@windowed
def test_right_padding_agrees_with_eager(name: str) -> None:
    # In float64 eager attention is NaN in rows that see no key, so here the window of all padding reaches a key.
    model, prompts = tiny_model(name), prompts_of([50, 23, WINDOW + 1])
    ids = torch.tensor([prompt + [0] * (50 - len(prompt)) for prompt in prompts])
    mask = torch.tensor([[1] * len(prompt) + [0] * (50 - len(prompt)) for prompt in prompts])
    outs = []
    for implementation in ("eager", "sennit"):
        model.set_attn_implementation(implementation)
        with torch.no_grad():
            outs.append(model(ids, attention_mask=mask).logits)
    torch.testing.assert_close(outs[1], outs[0], rtol=0, atol=1e-4)


def test_padding_whose_window_reaches_no_key_disturbs_nobody() -> None:
    model, (prompt,) = tiny_model("mistral"), prompts_of([3])
    model.set_attn_implementation("sennit")
    with torch.no_grad():
        alone = model(torch.tensor([prompt])).logits
        ids, mask = torch.tensor([prompt + [0] * 60]), torch.tensor([[1] * 3 + [0] * 60])
        padded = model(ids, attention_mask=mask).logits
    assert padded.isfinite().all()
    torch.testing.assert_close(padded[:, :3], alone, rtol=0, atol=1e-5)


def plain_keywords(step: Any) -> dict[str, Any]:
    """All that a packed step needs where no layer stores latents."""
    return {"position_ids": step.positions[None], "use_cache": False, "sennit_step": step}


def packed_logits(
    model: Any, paged: KVCache, prompts: list[list[int]], keywords: Callable[[Any], dict[str, Any]] | None = None
) -> torch.Tensor:
    model.set_attn_implementation("sennit")
    ids = torch.tensor([[token for prompt in prompts for token in prompt]])
    with torch.no_grad(), paged.step([(paged.add(), len(prompt)) for prompt in prompts]) as step:
        return model(ids, **(keywords(step) if keywords else step_keywords(model, step))).logits[0]


@architectures
def test_a_packed_step_written_by_hand_gives_the_logits_of_each_sequence(name: str) -> None:
    model, prompts = tiny_model(name), prompts_of([50, 3, 1])
    cache = KVCache(sennit.hf.layer_specs(model), num_tokens=128, page_size=4, device="cpu")
    got = packed_logits(model, cache, prompts)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        expected = torch.cat([model(torch.tensor([prompt])).logits[0] for prompt in prompts])
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("changes", [{}, {"rope_interleave": False}, {"q_lora_rank": None}, {"kv_lora_rank": 5}])
def test_a_latent_cache_gives_what_an_expanded_one_gives(changes: dict[str, Any]) -> None:
    model, prompts = tiny_model("deepseek_v3", **changes), prompts_of([50, 3, 1])
    latent = KVCache(sennit.hf.layer_specs(model), num_tokens=128, page_size=4, device="cpu")
    heads = AttentionSpec(num_qo_heads=4, num_kv_heads=4, head_dim_qk=16, head_dim_vo=8, dtype=torch.float64)
    expanded = KVCache([heads] * 3, num_tokens=128, page_size=4, device="cpu")
    got = packed_logits(model, latent, prompts)
    torch.testing.assert_close(got, packed_logits(model, expanded, prompts, plain_keywords), rtol=0, atol=1e-5)


def test_deepseek_v3_stores_576_numbers_a_token_and_layer_in_its_real_shape() -> None:
    config = DeepseekV3Config(num_hidden_layers=2, first_k_dense_replace=2, vocab_size=16)
    with torch.device("meta"):
        model = DeepseekV3ForCausalLM(config).to(torch.bfloat16)
    cache = KVCache(sennit.hf.layer_specs(model), num_tokens=64, page_size=16, device="cpu")
    numbers = cache.memory().bytes_per_token / (2 * 2)  # layers, bytes
    print(f"DeepSeek-V3 stores {numbers:.0f} numbers a token and layer; two layers of a cache: {cache.memory()}")
    assert numbers == 576


def expected_windows(name: str) -> list[int | None]:
    left = WINDOW - 1
    return {
        "qwen3_window": [None, left, left],
        "mistral": [left, left, left],
        "gemma2": [left, None, left],
        "gemma3": [left, left, None],
        "gpt_oss": [left, None, left],
        "deepseek_v3": [None, None, None],
    }[name]


@architectures
def test_specs_say_what_each_layer_computes(name: str) -> None:
    specs = sennit.hf.layer_specs(tiny_model(name))
    assert [spec.window_left for spec in specs] == expected_windows(name)
    for spec in specs:
        assert spec.logits_soft_cap == (2.0 if name == "gemma2" else None)
        assert spec.learned_sinks is (name == "gpt_oss")
        assert spec.latent is (name == "deepseek_v3")
        assert (spec.num_qo_heads, spec.num_kv_heads) == ((4, 1) if spec.latent else (4, 2))
        assert (spec.head_dim_qk, spec.head_dim_vo) == ((18, 12) if spec.latent else (8, 8))
        assert spec.dtype == torch.float64


def test_windows_that_are_switched_off_are_none() -> None:
    assert {spec.window_left for spec in sennit.hf.layer_specs(tiny_model("mistral", sliding_window=None))} == {None}
    off = tiny_model("qwen3", use_sliding_window=False, sliding_window=WINDOW)
    assert {spec.window_left for spec in sennit.hf.layer_specs(off)} == {None}


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        (
            "mistral",
            {"window_left": 15},
            f"layer 0 has window_left={WINDOW - 1}, as the model's has, got window_left=15",
        ),
        ("mistral", {"window_left": None}, "window_left=None"),
        ("gemma2", {"logits_soft_cap": None}, "logits_soft_cap=2.0, .* got logits_soft_cap=None"),
        ("gpt_oss", {"learned_sinks": False}, "learned_sinks=True, .* got learned_sinks=False"),
    ],
)
def test_a_cache_whose_layers_compute_something_else_is_refused(
    name: str, changes: dict[str, Any], message: str
) -> None:
    model = tiny_model(name)
    specs = [spec.replace(**changes) for spec in sennit.hf.layer_specs(model)]
    cache = KVCache(specs, num_tokens=64, page_size=4, device="cpu")
    with pytest.raises(PlanMismatch, match=message):
        packed_logits(model, cache, [[1, 2, 3]])
    assert cache.stats().num_tokens == 0


def test_a_packed_step_over_latents_needs_something_that_takes_them() -> None:
    model = tiny_model("deepseek_v3")
    cache = KVCache(sennit.hf.layer_specs(model), num_tokens=64, page_size=4, device="cpu")
    with pytest.raises(InvalidInput, match=r"sennit_latents: expected .*step_keywords\(model, step\)"):
        packed_logits(model, cache, [[1, 2, 3]], plain_keywords)
    with pytest.raises(InvalidInput, match="nothing that the layer's latents went to"):
        packed_logits(model, cache, [[1, 2, 3]], lambda step: plain_keywords(step) | {"sennit_latents": LatentRows()})
    with pytest.raises(InvalidInput, match=r"sennit_step: .* got batch 2"):
        LatentRows().update(torch.zeros(2, 1, 3, 12), torch.zeros(2, 1, 3, 6), 0)


class Adapted(torch.nn.Linear):
    """Stands for a quantized or adapted layer: its result is not that of its weight alone."""


@pytest.mark.parametrize("kind", ["subclass", "dtype", "bias", "parametrized"])
def test_weights_that_cannot_be_absorbed_are_refused(kind: str) -> None:
    model = tiny_model("deepseek_v3")
    layer = model.model.layers[1].self_attn
    if kind == "subclass":
        layer.kv_b_proj.__class__ = Adapted
    elif kind == "dtype":
        layer.kv_b_proj.bfloat16()
    elif kind == "bias":
        layer.kv_b_proj.bias = torch.nn.Parameter(torch.zeros(72).double())
    else:
        torch.nn.utils.parametrizations.weight_norm(layer.kv_b_proj)
    with pytest.raises(UnsupportedFeature, match=r"kv_b_proj: .*layer 1 has a"):
        Batcher(model, num_tokens=64)


@pytest.mark.parametrize("kind", ["hook", "pre-hook", "forward"])
def test_a_projection_whose_forward_would_never_run_is_refused(kind: str) -> None:
    model = tiny_model("deepseek_v3")
    projection = model.model.layers[2].self_attn.kv_b_proj
    if kind == "hook":
        projection.register_forward_hook(lambda *args: args[-1] * 2)
    elif kind == "pre-hook":
        projection.register_forward_pre_hook(lambda module, args: args[0] * 2)
    else:
        projection.forward = lambda x: x
    with pytest.raises(UnsupportedFeature, match=r"^kv_b_proj: .* layer 2 has hooks or was replaced"):
        Batcher(model, num_tokens=64)


def test_weights_that_were_adapted_later_are_refused_by_the_step() -> None:
    model = tiny_model("deepseek_v3")
    with Batcher(model, num_tokens=64, max_requests=4) as batcher:
        batcher.submit([1, 2], max_new_tokens=2)
        model.model.layers[2].self_attn.kv_b_proj.__class__ = Adapted
        with pytest.raises(UnsupportedFeature, match=r"kv_b_proj: .*layer 2 has a Adapted"):
            batcher.step()


@pytest.mark.parametrize(
    ("config", "error", "message"),
    [
        (Gemma3Config(), UnsupportedModel, "^gemma3 has not been tested"),
        (tiny_model("gemma3", use_bidirectional_attention=True).config, UnsupportedFeature, "use_bidirectional"),
        (tiny_model("gemma2", use_bidirectional_attention=True).config, UnsupportedFeature, "use_bidirectional"),
        (tiny_model("gemma3", attn_logit_softcapping=30.0).config, UnsupportedFeature, "does not apply it"),
        (LlamaConfig(sliding_window=8), UnsupportedFeature, "sliding_window: LlamaForCausalLM.*does not apply them"),
        (
            MistralConfig(num_hidden_layers=2, layer_types=["full_attention", "sliding_attention"]),
            UnsupportedFeature,
            r"layer_types: .*sliding_window=4096 and windows in layers \[1\].*in all of them",
        ),
        (
            Qwen3Config(num_hidden_layers=2, layer_types=["full_attention", "sliding_attention"]),
            UnsupportedFeature,
            "sliding_window=None.*no size for them",
        ),
        (
            Qwen3Config(num_hidden_layers=1, layer_types=["chunked_attention"]),
            UnsupportedFeature,
            "chunked_attention: layers may be full_attention or sliding_attention",
        ),
    ],
)
def test_configurations_that_would_be_wrong_are_refused(config: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        check_supported(config)


def test_rotary_frequencies_of_gemma3s_local_layers_are_checked_too() -> None:
    config = tiny_model("gemma3").config
    config.rope_parameters["sliding_attention"] = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    with pytest.raises(UnsupportedFeature, match="rope_type='dynamic'"):
        check_supported(config)


def test_a_window_that_the_mask_does_not_have_is_refused() -> None:
    model = tiny_model("mistral")
    model.set_attn_implementation("sennit")
    model.model.layers[1].self_attn.config = MistralConfig(**(model.config.to_dict() | {"sliding_window": 5}))
    model.model.layers[1].self_attn.config._attn_implementation = "sennit"
    with (
        torch.no_grad(),
        pytest.raises(PlanMismatch, match=f"sliding_window: expected {WINDOW}, .* got 5 at the layer"),
    ):
        model(torch.tensor([[1, 2, 3]]))
