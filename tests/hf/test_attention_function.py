"""transformers' own forward and generate with ``attn_implementation="sennit"`` give what its other attentions give.

The reference is transformers' SDPA attention where a batch is padded: in float64 its eager attention is NaN in rows
that see no key, and the NaN spreads to real tokens through the keys of the next layer.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny_models import CACHE_ARGUMENT, reference_tokens, tiny_model
from transformers import DynamicCache, LlamaConfig, LlamaForSequenceClassification
from transformers.masking_utils import (
    and_masks,
    bidirectional_mask_function,
    causal_mask_function,
    or_masks,
    sdpa_mask,
    sliding_window_causal_mask_function,
    sliding_window_overlay,
)

import sennit.hf
from sennit.hf.masks import KeyRanges, key_ranges
from sennit.kvcache import KVCache

PROMPTS = [[5, 6, 7, 8, 9, 10, 11], [1, 2, 3], [99]]
NEW = 6


def padded(prompts: list[list[int]], side: str) -> dict[str, torch.Tensor]:
    width = max(map(len, prompts))
    rows, masks = [], []
    for prompt in prompts:
        pad = [0] * (width - len(prompt))
        ones = [1] * len(prompt)
        rows.append(pad + prompt if side == "left" else prompt + pad)
        masks.append(pad + ones if side == "left" else ones + pad)
    return {"input_ids": torch.tensor(rows), "attention_mask": torch.tensor(masks)}


def logits(model: Any, implementation: str, **inputs: Any) -> torch.Tensor:
    model.set_attn_implementation(implementation)
    with torch.no_grad():
        return model(**inputs).logits


def assert_close(got: torch.Tensor, expected: torch.Tensor) -> None:
    # transformers rounds to float32 in every norm; float64 attention differs in the last bits before that.
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-5)


def test_left_padded_generate_gives_each_prompt_its_own_tokens(model: Any) -> None:
    model.set_attn_implementation("sennit")
    out = model.generate(**padded(PROMPTS, "left"), max_new_tokens=NEW, do_sample=False)
    for row, prompt in zip(out[:, -NEW:].tolist(), PROMPTS, strict=True):
        assert row == reference_tokens(model, prompt, NEW)


@pytest.mark.parametrize("options", [{"num_beams": 3}, {"cache_implementation": "static"}, {"use_cache": False}])
def test_generate_modes_give_what_sdpa_gives(model: Any, options: dict[str, Any]) -> None:
    outs = []
    for implementation in ("sdpa", "sennit"):
        model.set_attn_implementation(implementation)
        outs.append(model.generate(**padded(PROMPTS, "left"), max_new_tokens=NEW, do_sample=False, **options))
    assert torch.equal(*outs)


def test_sampling_with_a_seed_gives_what_sdpa_gives(llama: Any) -> None:
    outs = []
    for implementation in ("sdpa", "sennit"):
        llama.set_attn_implementation(implementation)
        torch.manual_seed(3)
        outs.append(llama.generate(**padded(PROMPTS, "left"), max_new_tokens=NEW, do_sample=True))
    assert torch.equal(*outs)


@pytest.mark.parametrize("side", ["left", "right"])
def test_padded_logits_agree_wherever_a_query_sees_a_key(model: Any, side: str) -> None:
    inputs = padded(PROMPTS, side)
    got, expected = logits(model, "sennit", **inputs), logits(model, "sdpa", **inputs)
    assert got.isfinite().all()
    # Right padding is no key, but as a query it sees every key before it.
    sees = inputs["attention_mask"].cumsum(1) > 0
    assert_close(got[sees], expected[sees])


def test_padding_on_both_sides_agrees(llama: Any) -> None:
    inputs = {"input_ids": torch.tensor([[0, 5, 6, 0], [1, 2, 3, 4]])}
    inputs["attention_mask"] = torch.tensor([[0, 1, 1, 0], [1, 1, 1, 1]])
    sees = inputs["attention_mask"].cumsum(1) > 0
    assert_close(logits(llama, "sennit", **inputs)[sees], logits(llama, "sdpa", **inputs)[sees])


def test_logits_without_a_mask_agree(model: Any) -> None:
    ids = torch.tensor([PROMPTS[0], PROMPTS[0][::-1]])
    assert_close(logits(model, "sennit", input_ids=ids), logits(model, "eager", input_ids=ids))


def test_chunks_over_a_cache_agree(model: Any) -> None:
    ids = padded(PROMPTS, "left")
    expected = logits(model, "sdpa", **ids)
    model.set_attn_implementation("sennit")
    cache, parts = DynamicCache(config=model.config), []
    for first, last in ((0, 3), (3, 4), (4, 7)):
        with torch.no_grad():
            out = model(
                input_ids=ids["input_ids"][:, first:last],
                attention_mask=ids["attention_mask"][:, :last],
                use_cache=True,
                **{CACHE_ARGUMENT: cache},
            )
        parts.append(out.logits)
    sees = ids["attention_mask"].bool()
    # Without position_ids both count positions from the first column, padding included.
    assert_close(torch.cat(parts, 1)[sees], expected[sees])


def test_a_row_of_padding_alone_gives_zeros_and_disturbs_nobody(llama: Any) -> None:
    inputs = padded(PROMPTS, "left")
    inputs["attention_mask"][1] = 0
    got, expected = logits(llama, "sennit", **inputs), logits(llama, "sdpa", **inputs)
    sees = inputs["attention_mask"].bool()
    assert got.isfinite().all()
    assert_close(got[sees], expected[sees])


def test_queries_that_see_no_key_have_zero_attention(llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    outputs = []
    layer = llama.model.layers[0].self_attn.o_proj
    layer.register_forward_pre_hook(lambda module, args: outputs.append(args[0]))
    inputs = padded(PROMPTS, "left")
    logits(llama, "sennit", **inputs)
    zero = (outputs[0] == 0).all(-1)
    assert torch.equal(zero, inputs["attention_mask"] == 0)


def test_layers_of_a_forward_share_one_plan_and_the_next_forward_makes_its_own(
    llama: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = []
    original = sennit.BatchAttention.plan
    monkeypatch.setattr(
        sennit.BatchAttention, "plan", lambda self, *a, **k: made.append(original(self, *a, **k)) or made[-1]
    )
    inputs = padded(PROMPTS, "left")
    logits(llama, "sennit", **inputs)
    assert len(made) == 1
    # Same shapes, other padding: a plan kept by shape would be wrong here.
    inputs["attention_mask"] = torch.ones_like(inputs["attention_mask"])
    got = logits(llama, "sennit", **inputs)
    assert len(made) == 2
    assert_close(got, logits(llama, "sdpa", **inputs))


def test_float32_and_bfloat16_models_stay_within_rounding_of_sdpa() -> None:
    for dtype, tolerance in ((torch.float32, 1e-4), (torch.bfloat16, 0.15)):
        model = tiny_model("llama", dtype=dtype)
        inputs = padded(PROMPTS, "left")
        got, expected = logits(model, "sennit", **inputs), logits(model, "sdpa", **inputs)
        assert got.dtype == dtype
        sees = inputs["attention_mask"].bool()
        torch.testing.assert_close(got[sees], expected[sees], rtol=0, atol=tolerance)


def test_other_heads_of_a_supported_architecture_work_too() -> None:
    config = tiny_model("llama").config
    torch.manual_seed(1)
    model = LlamaForSequenceClassification(LlamaConfig(**config.to_dict())).double().eval()
    inputs = padded(PROMPTS, "left")
    assert_close(logits(model, "sennit", **inputs), logits(model, "sdpa", **inputs))


def test_a_packed_step_written_by_hand_gives_the_logits_of_each_sequence(model: Any) -> None:
    specs = sennit.hf.layer_specs(model)
    cache = KVCache(specs, num_tokens=64, page_size=4, device="cpu")
    ids = [token for prompt in PROMPTS for token in prompt]
    model.set_attn_implementation("sennit")
    with torch.no_grad(), cache.step([(cache.add(), len(p)) for p in PROMPTS]) as step:
        got = model(
            input_ids=torch.tensor([ids]), position_ids=step.positions[None], use_cache=False, sennit_step=step
        ).logits[0]
    expected = [logits(model, "eager", input_ids=torch.tensor([p]))[0] for p in PROMPTS]
    assert_close(got, torch.cat(expected))


@pytest.mark.slow
def test_a_compiled_model_gives_what_the_plain_one_gives(llama: Any) -> None:
    inputs = padded(PROMPTS, "left")
    expected = logits(llama, "sennit", **inputs)
    compiled = torch.compile(llama, backend="eager")
    with torch.no_grad():
        got = compiled(**inputs).logits
    assert_close(got, expected)


@pytest.mark.parametrize(
    ("mask", "offset", "length", "expected"),
    [
        (None, 0, 3, [(3, 3, True)]),
        (None, 5, 1, [(1, 6, True)]),
        ([0, 0, 1, 1], 0, 4, [(4, 2, True)]),
        ([1, 1, 0, 0], 0, 4, [(2, 2, True), (2, 2, False)]),
        ([0, 1, 1, 0], 2, 2, [(1, 2, True), (1, 2, False)]),
        ([0, 1, 0, 0], 2, 2, [(2, 1, False)]),
        ([0, 0, 0], 0, 3, [(3, 0, False)]),
    ],
)
def test_masks_become_requests(
    mask: list[int] | None, offset: int, length: int, expected: list[tuple[int, int, bool]]
) -> None:
    columns = offset + length
    attention_mask = None if mask is None else torch.tensor([mask]).bool()
    ranges = key_ranges(1, length, columns, q_offset=offset, attention_mask=attention_mask)
    batch, causal = ranges.requests()
    assert list(zip(batch.q_lens.tolist(), batch.kv_lens.tolist(), causal, strict=True)) == expected


def test_columns_of_a_static_cache_that_nobody_has_written_are_never_seen() -> None:
    ranges = key_ranges(2, 3, 10, q_offset=torch.tensor(2))
    batch, causal = ranges.requests()
    assert (batch.q_lens.tolist(), batch.kv_lens.tolist(), causal) == ([3, 3], [5, 5], [True, True])
    assert ranges.visible == 5


@pytest.mark.parametrize("seed", range(40))
def test_key_ranges_say_the_same_as_transformers_own_mask(seed: int) -> None:
    g = torch.Generator().manual_seed(seed)
    batch, length, offset, spare = (int(torch.randint(1, 6, (), generator=g)) for _ in range(4))
    window = int(torch.randint(1, 8, (), generator=g)) if seed % 2 else None
    # A sliding cache has dropped what no new query sees; a static one has columns that nobody has written.
    dropped = 0 if window is None else int(torch.randint(0, max(0, offset - window + 1) + 1, (), generator=g))
    columns = offset - dropped + length + spare
    bounds = torch.randint(0, offset + length + 1, (batch, 2), generator=g).sort(dim=1).values
    place = torch.arange(offset + length)
    mask = (place >= bounds[:, :1]) & (place < bounds[:, 1:])
    rule = causal_mask_function if window is None else sliding_window_causal_mask_function(window)
    asked = {"q_offset": offset, "kv_offset": dropped, "mask_function": rule, "attention_mask": mask}
    expected = sdpa_mask(batch, length, columns, allow_is_causal_skip=False, **asked)
    ranges = key_ranges(batch, length, columns, **asked)
    assert not ranges.problem
    got = torch.zeros(batch * length, columns, dtype=torch.bool)
    requests, causal = ranges.requests()
    for r in range(requests.num_requests):
        q_len, kv_len = int(requests.q_lens[r]), int(requests.kv_lens[r])
        assert requests.kv_starts is not None
        first = int(requests.kv_starts[r]) % ranges.visible if kv_len else 0
        for i in range(q_len):
            position = kv_len - q_len + i
            for j in range(kv_len):
                seen = (not causal[r] or j <= position) and (window is None or position - j < window)
                got[int(requests.q_starts[r]) + i, first + j] |= seen
    assert torch.equal(got.view(batch, 1, length, columns), expected)


@pytest.mark.parametrize(
    "rule",
    [
        bidirectional_mask_function,
        sliding_window_overlay(4),  # not causal
        and_masks(sliding_window_overlay(4), causal_mask_function, causal_mask_function),
        or_masks(sliding_window_overlay(4), causal_mask_function),
        and_masks(lambda *_: torch.tensor(True), causal_mask_function),
    ],
)
def test_other_mask_functions_are_a_problem(rule: Any) -> None:
    assert "only causal masks are supported" in key_ranges(1, 4, 4, mask_function=rule).problem


def test_a_mask_made_early_is_handed_on_unchanged() -> None:
    ranges = KeyRanges(1, 1, 4, 0, (0,), (1,))
    assert key_ranges(1, 1, 4, attention_mask=ranges) is ranges
