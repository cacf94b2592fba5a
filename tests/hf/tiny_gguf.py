"""Writes the GGUF file of a tiny random Llama model with a byte-level tokenizer, in the form of SmolLM2's file."""

from __future__ import annotations

from pathlib import Path

import numpy as np

LAYERS, HEADS, KV_HEADS, WIDTH, INNER = 2, 4, 2, 64, 96
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MERGES = ["Ċ Ċ", "h i", "Ġ hi"]
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"


def write(path: Path, *, pre_tokenizer: str = "smollm") -> None:
    from gguf import GGMLQuantizationType, GGUFWriter
    from gguf.quants import quantize

    writer = GGUFWriter(path, "llama")
    writer.add_name("tiny")
    writer.add_block_count(LAYERS)
    writer.add_context_length(512)
    writer.add_embedding_length(WIDTH)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(100_000.0)
    writer.add_rope_dimension_count(WIDTH // HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    tokens = SPECIAL + _alphabet() + [merge.replace(" ", "") for merge in MERGES]
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre_tokenizer)
    writer.add_token_list(tokens)
    writer.add_token_types([3] * len(SPECIAL) + [1] * (len(tokens) - len(SPECIAL)))
    writer.add_token_merges(MERGES)
    writer.add_unk_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_chat_template(TEMPLATE)
    for name, shape in _shapes(len(tokens)).items():
        values = np.random.default_rng(len(name)).standard_normal(shape).astype(np.float32)
        kind = GGMLQuantizationType.Q4_1 if len(shape) == 2 else GGMLQuantizationType.F32
        writer.add_tensor(f"{name}.weight", quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _alphabet() -> list[str]:
    """The 256 printable characters that byte-level BPE writes for bytes."""
    from tokenizers import pre_tokenizers

    return sorted(pre_tokenizers.ByteLevel.alphabet())


def _shapes(vocab_size: int) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {"token_embd": (vocab_size, WIDTH), "output_norm": (WIDTH,)}
    kv_width = WIDTH // HEADS * KV_HEADS
    for i in range(LAYERS):
        shapes |= {f"blk.{i}.attn_norm": (WIDTH,), f"blk.{i}.ffn_norm": (WIDTH,)}
        shapes |= {f"blk.{i}.attn_q": (WIDTH, WIDTH), f"blk.{i}.attn_output": (WIDTH, WIDTH)}
        shapes |= {f"blk.{i}.attn_k": (kv_width, WIDTH), f"blk.{i}.attn_v": (kv_width, WIDTH)}
        shapes |= {f"blk.{i}.ffn_gate": (INNER, WIDTH), f"blk.{i}.ffn_up": (INNER, WIDTH)}
        shapes |= {f"blk.{i}.ffn_down": (WIDTH, INNER)}
    return shapes
