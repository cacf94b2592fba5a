"""Functions traced into graphs: evaluated on full grids against calling them, compared, printed, and refused."""

from __future__ import annotations

import functools
import gc
import math
import operator
import pickle
import subprocess
import sys
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention.flex_attention import and_masks, noop_mask, or_masks

from sennit import variants
from sennit.backends.reference.variants import evaluate
from sennit.errors import InvalidInput
from sennit.variants import Capture, Graph, trace
from sennit.variants.promotion import COMPARISONS

B, H, Q, K = 2, 3, 5, 7
SIZES = {"b": B, "h": H, "q_idx": Q, "kv_idx": K}
# Captured by the functions below.
slopes = torch.tensor([0.5, 0.25, 0.125])
prefix_length = torch.tensor([3, 5], dtype=torch.int32)
document_id = torch.tensor([0, 0, 1, 1, 1, 2, 2])
documents = torch.tensor([[0, 0, 0, 1, 1, 1, 1], [0, 1, 1, 1, 2, 2, 2]])
offsets = torch.tensor([0, 2, 5, 7])
table = torch.randn(B, H, Q, K, generator=torch.Generator().manual_seed(1))
temperature = torch.tensor(0.75)
divisor = torch.ones(1)
half_table = slopes.to(torch.bfloat16)


def grids() -> dict[str, torch.Tensor]:
    """Every index, each along its own dimension of ``[B, H, Q, K]``."""
    shapes = ((B, 1, 1, 1), (1, H, 1, 1), (1, 1, Q, 1), (1, 1, 1, K))
    return {
        name: torch.arange(n, dtype=torch.int32).view(s) for (name, n), s in zip(SIZES.items(), shapes, strict=True)
    }


def scores(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return 3 * torch.randn(B, H, Q, K, dtype=dtype, generator=torch.Generator().manual_seed(0))


def direct(function: Callable[..., Any], kind: str, score: torch.Tensor) -> torch.Tensor:
    """What FlexAttention computes in eager mode: the function itself on 0-dim tensors, mapped over every index."""
    for dim in (3, 2, 1, 0):
        mapped = tuple(0 if i == dim else None for i in range(4))
        function = torch.vmap(function, in_dims=(0, *mapped) if kind == "score" else mapped)
    indices = [torch.arange(n, dtype=torch.int32) for n in SIZES.values()]
    return function(score, *indices) if kind == "score" else function(*indices)


def evaluated(graph: Graph, score: torch.Tensor, **captures: torch.Tensor) -> torch.Tensor:
    inputs = grids() | ({"score": score} if graph.kind == "score" else {})
    return evaluate(graph, inputs, captures).expand(B, H, Q, K)


def assert_traced_right(
    function: Callable[..., Any], kind: str, dtype: torch.dtype = torch.float32, **captures: torch.Tensor
) -> Graph:
    graph = trace(function, kind)
    expected = direct(function, kind, scores(dtype))
    if dtype == torch.float32:
        assert graph.nodes[-1].dtype == expected.dtype
    expected = expected.to(dtype) if kind == "score" else expected
    torch.testing.assert_close(evaluated(graph, scores(dtype), **captures), expected, equal_nan=True)
    return graph


# FlexAttention's examples, as its documentation and attention-gym write them.


def causal_mask(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx


SLIDING_WINDOW = 2


def sliding_window_causal(b, h, q_idx, kv_idx):
    causal_mask = q_idx >= kv_idx
    window_mask = q_idx - kv_idx <= SLIDING_WINDOW
    return causal_mask & window_mask


def prefix_mask(b, h, q_idx, kv_idx):
    return kv_idx < prefix_length[b]


def document_masking(b, h, q_idx, kv_idx):
    return document_id[q_idx] == document_id[kv_idx]


def generate_doc_mask_mod(mask_mod, offsets, document_id):
    def doc_mask_mod(b, h, q_idx, kv_idx):
        same_doc = document_id[q_idx] == document_id[kv_idx]
        q_logical = q_idx - offsets[document_id[q_idx]]
        kv_logical = kv_idx - offsets[document_id[kv_idx]]
        inner_mask = mask_mod(b, h, q_logical, kv_logical)
        return same_doc & inner_mask

    return doc_mask_mod


def generate_natten(canvas_w, canvas_h, kernel_w, kernel_h):
    def get_x_y(idx):
        return idx // canvas_w, idx % canvas_w

    def natten_mask_mod(b, h, q_idx, kv_idx):
        q_x, q_y = get_x_y(q_idx)
        kv_x, kv_y = get_x_y(kv_idx)
        kernel_x = q_x.clamp(kernel_w // 2, (canvas_w - 1) - kernel_w // 2)
        kernel_y = q_y.clamp(kernel_h // 2, (canvas_h - 1) - kernel_h // 2)
        hori_mask = (kernel_x - kv_x).abs() <= kernel_w // 2
        vert_mask = (kernel_y - kv_y).abs() <= kernel_h // 2
        return hori_mask & vert_mask

    return natten_mask_mod


def generate_dilated_sliding_window(window_size, dilation):
    def dilated_sliding_window(b, h, q_idx, kv_idx):
        sliding_window_mask = torch.abs(q_idx - kv_idx) <= window_size
        dilation_mask = (q_idx - kv_idx) % dilation == 0
        return torch.logical_and(sliding_window_mask, dilation_mask)

    return dilated_sliding_window


def noop(score, b, h, q_idx, kv_idx):
    return score


def relative_positional(score, b, h, q_idx, kv_idx):
    return score + (q_idx - kv_idx)


def checkerboard(score, batch, head, token_q, token_kv):
    score = torch.where(torch.abs(token_kv - token_q) % 1 == 0, score * 0.5, score)
    return torch.where(torch.abs(token_kv - token_q) % 2 == 0, score * 2.0, score)


def causal_score(score, b, h, q_idx, kv_idx):
    return torch.where(q_idx >= kv_idx, score, -float("inf"))


def generate_alibi_bias(num_heads):
    def alibi_mod(score, b, h, q_idx, kv_idx):
        scale = torch.exp2(-((h + 1) * 8.0 / num_heads))
        bias = (kv_idx - q_idx) * scale
        return score + bias

    return alibi_mod


alibi_bias = slopes


def alibi(score, b, h, q_idx, kv_idx):
    bias = alibi_bias[h] * (q_idx - kv_idx)
    return score + bias


def generate_tanh_softcap(soft_cap):
    def tanh_softcap(score, b, h, q_idx, kv_idx):
        return soft_cap * torch.tanh(score / soft_cap)

    return tanh_softcap


def generate_relative_bias(bias):
    def relative_bias(score, b, h, q_idx, kv_idx):
        return score + bias[b, h, q_idx, kv_idx]

    return relative_bias


def t5_bucket(relative_position, num_buckets=8, max_distance=6):
    """transformers' T5Attention._relative_position_bucket, bidirectional."""
    relative_buckets = 0
    num_buckets //= 2
    relative_buckets += (relative_position > 0).to(torch.long) * num_buckets
    relative_position = torch.abs(relative_position)
    max_exact = num_buckets // 2
    is_small = relative_position < max_exact
    relative_position_if_large = max_exact + (
        torch.log(relative_position.float() / max_exact)
        / math.log(max_distance / max_exact)
        * (num_buckets - max_exact)
    ).to(torch.long)
    relative_position_if_large = torch.min(
        relative_position_if_large, torch.full_like(relative_position_if_large, num_buckets - 1)
    )
    return relative_buckets + torch.where(is_small, relative_position, relative_position_if_large)


EXAMPLES = [
    ("mask", causal_mask, {}),
    ("mask", sliding_window_causal, {}),
    ("mask", prefix_mask, {"prefix_length": prefix_length}),
    ("mask", or_masks(prefix_mask, causal_mask), {"prefix_length": prefix_length}),
    ("mask", and_masks(document_masking, causal_mask), {"document_id": document_id}),
    ("mask", and_masks(causal_mask, or_masks(document_masking, noop_mask), prefix_mask),
     {"prefix_length": prefix_length}),
    ("mask", noop_mask, {}),
    ("mask", generate_doc_mask_mod(causal_mask, offsets, document_id),
     {"offsets": offsets, "document_id": document_id}),
    ("mask", generate_natten(3, 3, 1, 3), {}),
    ("mask", generate_dilated_sliding_window(3, 2), {}),
    ("score", noop, {}),
    ("score", relative_positional, {}),
    ("score", checkerboard, {}),
    ("score", causal_score, {}),
    ("score", generate_alibi_bias(H), {}),
    ("score", alibi, {"alibi_bias": alibi_bias}),
    ("score", generate_tanh_softcap(2), {}),
    ("score", generate_relative_bias(table), {"bias": table}),
    ("score", lambda score, b, h, q, kv: score + slopes[t5_bucket(kv - q) % 3], {"slopes": slopes}),
    ("mask", variants.causal, {}),
    ("mask", variants.sliding_window(2), {}),
    ("mask", variants.prefix_lm(prefix_length), {"prefix_length": prefix_length}),
    ("mask", variants.document(documents), {"document_id": documents}),
    ("score", variants.alibi(slopes), {"slopes": slopes}),
    ("score", variants.soft_cap(2.0), {}),
    ("score", variants.relative_bias(table[0, :, 0], 3), {"table": table[0, :, 0]}),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "function", "captures"), EXAMPLES, ids=lambda v: getattr(v, "__name__", None))
def test_flex_attention_examples_unchanged_give_what_calling_them_gives(kind, function, captures):
    graph = assert_traced_right(function, kind, **captures)
    assert [c.name for c in graph.captures] == sorted(captures)
    assert_traced_right(function, kind, torch.float64, **captures)


# Every operation, in every way to write it.

SCORES: list[Callable[..., Any]] = [
    lambda s, b, h, q, kv: 1 + s * 2 - q / 3,
    lambda s, b, h, q, kv: (1 - s) / (2 - b) + (7 // (kv + 1)) + 7 % (q + 1) + 2.5 / s,
    lambda s, b, h, q, kv: (q - kv) // 3 + (q - kv) % 3 + (q - kv) // -2 + (q - kv) % -2 + (kv - q) // (h + 1),
    lambda s, b, h, q, kv: s // 0.75 + s % 0.75 + s % -0.75 + s // -1.5,
    lambda s, b, h, q, kv: torch.floor_divide(q - kv, 2) + torch.div(kv, -2, rounding_mode="floor"),
    lambda s, b, h, q, kv: torch.remainder(s, 2) + torch.rsub(q, s),
    lambda s, b, h, q, kv: s**2 + s**3 + q**5 + (s.abs() + 0.5) ** 1.5 + 2.0**q + (s * s) ** -1 + s**1,
    lambda s, b, h, q, kv: torch.pow(2.0, q - kv) + torch.square(s) + abs(s) + (-s) + (+s) - -2 * s,
    lambda s, b, h, q, kv: torch.where((q > kv) | (s < 0), s, -1) + s.where(q == kv, 2.0) + s.where(q != kv, s * 3),
    lambda s, b, h, q, kv: torch.minimum(s, q + 0.5) + torch.maximum(s, kv * 1.0) + torch.max(q, kv) + torch.min(q, kv),
    lambda s, b, h, q, kv: s.exp() + torch.exp2(s) + torch.log(s.abs() + 1) + torch.log2(kv + 1) + s.tanh(),
    lambda s, b, h, q, kv: torch.sqrt(kv) + torch.rsqrt(kv + 1) + torch.sin(s) + s.cos() + torch.sigmoid(s),
    lambda s, b, h, q, kv: s.floor() + torch.ceil(s) + torch.floor(q - kv) + torch.reciprocal(kv + 1),
    lambda s, b, h, q, kv: s.clamp(-1, 1) + torch.clamp(kv, max=3) + q.clip(min=1) + torch.clamp_min(s, 0.5),
    lambda s, b, h, q, kv: torch.nn.functional.relu(s) + torch.relu(q - kv),
    lambda s, b, h, q, kv: s.to(torch.int32) + s.int() + s.long() + (q - kv).bool() + s.to(dtype=torch.float16),
    lambda s, b, h, q, kv: (q / 2).half() * 3.5 + (kv / 3).bfloat16() + q.double() / 3,
    lambda s, b, h, q, kv: s * (q < kv) + (q < kv).float() + q.type_as(s) + kv.to(s.dtype),
    lambda s, b, h, q, kv: (q & kv) + (q | 1) + (3 ^ kv) + ~q + (q << 2) + (kv >> 1) + torch.bitwise_and(q, 5),
    lambda s, b, h, q, kv: s.masked_fill(q < kv, -1e4) + torch.zeros_like(s) + torch.full_like(s, 2.5) + b.new_ones(()),
    lambda s, b, h, q, kv: s * torch.tensor(0.1) + torch.tensor(3) * torch.tensor(2, dtype=torch.int32) + q,
    lambda s, b, h, q, kv: s * np.float32(0.1) + np.int64(3) * q + np.float64(0.1) * s + (np.float64(2) < s),
    lambda s, b, h, q, kv: torch.where(q < kv, 1, 2.5),
    lambda s, b, h, q, kv: torch.where(s > 0, float("inf"), float("nan")),
    lambda s, b, h, q, kv: sum([s, q, kv]) * math.pi,
    lambda s, b, h, q, kv: q - kv,
    lambda s, b, h, q, kv: q + torch.tensor(3),
    lambda s, b, h, q, kv: q + torch.tensor(0.5, dtype=torch.float64),
    lambda s, b, h, q, kv: temperature.where(q < kv, 2.0) + torch.tensor(3.0).where(q > kv, s),
    lambda s, b, h, q, kv: s * temperature + torch.tanh(temperature) + (q > temperature),
    lambda s, b, h, q, kv: s + slopes[h] + slopes[0] + slopes[-1] + slopes[np.int64(1)] + slopes[torch.tensor(2)],
    lambda s, b, h, q, kv: s + slopes[kv % 3 - 3],
    lambda s, b, h, q, kv: s + half_table[h] * 3 + half_table[h] * q,
    lambda s, b, h, q, kv: s + table[b][h][q][kv] - table[b, h][q, kv] * table[1, h, -1, kv],
]
MASKS: list[Callable[..., Any]] = [
    lambda b, h, q, kv: (q < kv) ^ (q <= kv) ^ (q == kv) ^ (q != kv) ^ (q > kv) ^ (q >= kv) ^ (h < 1) ^ (b == 1),
    lambda b, h, q, kv: ~(q < kv) & (kv < 3) | (h < 2),
    lambda b, h, q, kv: torch.logical_or(q, kv) & torch.logical_not(b) & ~torch.logical_xor(q - 1, kv),
    lambda b, h, q, kv: (q < kv) * (kv < 5) + (q == kv),
    lambda b, h, q, kv: torch.minimum(q < kv, kv < 5) | torch.maximum(q < 2, h < 1),
    lambda b, h, q, kv: (q < kv) == (h < 1),
    lambda b, h, q, kv: ((q < kv) <= (h < 1)) | ((kv < 1) < (q < 1)),
    lambda b, h, q, kv: q / 2 < kv,
    lambda b, h, q, kv: (q < kv) & True | False,
    lambda b, h, q, kv: (documents[b, kv] == 1) & (document_id[kv] < q),
    lambda b, h, q, kv: document_id[documents[b, q]] == 0,
    lambda b, h, q, kv: (q < 1.5) & (q < float("inf")),
]


@pytest.mark.parametrize("number", range(len(SCORES) + len(MASKS)))
def test_operations_give_what_calling_the_function_gives(number):
    kind, function = ("score", SCORES[number]) if number < len(SCORES) else ("mask", MASKS[number - len(SCORES)])
    captures = {c.name: globals()[c.name] for c in trace(function, kind).captures}
    check_typed(assert_traced_right(function, kind, **captures))
    assert_traced_right(function, kind, torch.float64, **captures)


def test_floor_division_of_floats_is_that_of_pytorch():
    a, b = torch.randn(2, 20_000, generator=torch.Generator().manual_seed(2))
    a, b = torch.cat([a, 3 * b]), torch.cat([b, b])  # exact multiples among them
    graph = trace(lambda s, b, h, q, kv: s // divisor[q], "score")
    inputs = {name: torch.arange(len(a)) for name in SIZES} | {"score": a}
    assert torch.equal(evaluate(graph, inputs, {"divisor": b}), a // b)


def test_a_score_of_float64_keeps_its_digits_and_those_of_constants():
    graph = trace(lambda s, b, h, q, kv: s * 0.1 + 1 / 3, "score")
    score = scores(torch.float64)
    assert torch.equal(evaluated(graph, score), score * 0.1 + 1 / 3)
    assert evaluated(graph, score).dtype == torch.float64


# Random expressions, of operations that IEEE 754 rounds in one way only: what follows may jump, as floor does.

NUMBERS = st.sampled_from([0.5, -1.25, 3.0, 1, -2, 7])  # bfloat16 has them too
WHOLE = st.sampled_from([1, 2, 3, 5, -1, -4])


def _of(functions: list[Callable[..., Any]], *args: Any) -> st.SearchStrategy[tuple[Any, ...]]:
    return st.tuples(st.sampled_from(functions), *args)


def expressions(depth: int) -> tuple[st.SearchStrategy[Any], st.SearchStrategy[Any], st.SearchStrategy[Any]]:
    """Trees ``(function, argument, ...)`` that give ints, floats and bools."""
    leaf = st.sampled_from(["b", "h", "q_idx", "kv_idx"])
    if depth == 0:
        return leaf, st.just("score"), _of([operator.lt, operator.ge, operator.eq], leaf, leaf)
    ints, floats, bools = expressions(depth - 1)
    numbers = ints | floats
    return (
        leaf
        | _of([operator.add, operator.sub, operator.mul, torch.minimum, torch.maximum, operator.xor], ints, ints)
        | _of([operator.add, operator.floordiv, operator.mod, operator.mul, operator.and_], ints, WHOLE)
        | _of([operator.neg, abs, operator.invert], ints)
        | _of([torch.where], bools, ints, ints)
        | _of([lambda i: document_id[i.int() % 7], lambda x: x.to(torch.int64), lambda x: x.to(torch.int16)], ints),
        st.just("score")
        | _of([operator.add, operator.sub, operator.mul, operator.truediv, torch.minimum], floats, numbers)
        | _of([operator.add, operator.mul, operator.truediv, operator.mod, lambda x, y: y - x], floats, NUMBERS)
        | _of([torch.neg, torch.abs, torch.floor, torch.sqrt], floats)
        | _of([torch.where], bools, floats, numbers | NUMBERS)
        | _of([lambda i: slopes[i.int() % 3], lambda i: half_table[i.int() % 3], lambda i: i / 3], ints),
        _of([operator.lt, operator.le, operator.eq, operator.ne, operator.gt, operator.ge], numbers, numbers | NUMBERS)
        | _of([operator.and_, operator.or_, operator.xor, operator.eq, operator.mul], bools, bools)
        | _of([operator.invert], bools),
    )


ints, floats, bools = expressions(4)


def built(tree: Any, kind: str) -> Callable[..., Any]:
    """A function that computes an expression tree with whatever it is called on."""

    def value(tree: Any, arguments: dict[str, Any]) -> Any:
        if isinstance(tree, str):
            return arguments[tree]
        return tree[0](*(value(part, arguments) for part in tree[1:])) if isinstance(tree, tuple) else tree

    if kind == "score":
        return lambda score, b, h, q_idx, kv_idx: value(tree, locals())
    return lambda b, h, q_idx, kv_idx: value(tree, locals() | {"score": q_idx * 0.5})


def check_random(tree: Any, kind: str) -> None:
    function = built(tree, kind)
    graph = assert_traced_right(function, kind, document_id=document_id, slopes=slopes, half_table=half_table)
    assert reread(graph) == graph
    check_typed(graph)


def check_typed(graph: Graph) -> None:
    """What backends count on: operands have the dtypes that the docstring says."""
    nodes = graph.typed(torch.float64)
    for node in nodes:
        dtypes = {nodes[arg].dtype for arg in node.args}
        if node.op == "const":
            assert isinstance(node.value, float) == node.dtype.is_floating_point
        if node.op in COMPARISONS:
            assert len(dtypes) == 1
            assert torch.bool not in dtypes or node.op in ("eq", "ne")
        elif node.op == "index":
            assert dtypes <= {torch.int32, torch.int64}
        elif node.op == "where":
            assert nodes[node.args[0]].dtype == torch.bool
            assert {nodes[arg].dtype for arg in node.args[1:]} == {node.dtype}
        elif node.op != "cast":
            assert dtypes <= {node.dtype}
            assert node.dtype != torch.bool or node.op in ("const", "not", "and", "or", "xor")
    assert nodes[-1].dtype == (torch.float64 if graph.kind == "score" else torch.bool)


@settings(max_examples=150, deadline=None)
@given(floats | ints)
def test_random_scores_give_what_calling_them_gives(tree):
    check_random(tree, "score")


@settings(max_examples=100, deadline=None)
@given(bools)
def test_random_masks_give_what_calling_them_gives(tree):
    check_random(tree, "mask")


def reread(graph: Graph) -> Graph:
    """The graph of what its text says, read as Python."""
    *definitions, result = str(graph).split("; ")
    names = {
        name: (lambda f: lambda *args: f(*args))(getattr(torch, name)) for name in ("where", "abs", "floor", "sqrt")
    }
    names |= {"minimum": lambda a, b: a.minimum(b), "maximum": lambda a, b: a.maximum(b), "inf": math.inf}
    for dtype in ("bool", "int16", "int32", "int64", "bfloat16", "float16", "float32", "float64"):
        names[dtype] = functools.partial(lambda x, dtype: x.to(dtype), dtype=getattr(torch, dtype))
    source = ["def read(" + ("score, " if graph.kind == "score" else "") + "b, h, q_idx, kv_idx):"]
    source += [f"    {line}" for line in (*definitions, f"return {result}")]
    namespace = names | {c.name: globals()[c.name] for c in graph.captures}
    exec("\n".join(source), namespace)
    return trace(namespace["read"], graph.kind)


# Text, equality, keys.


def test_a_graph_prints_as_the_expression_that_it_is():
    assert str(trace(alibi, "score")) == "score + alibi_bias[h] * (q_idx - kv_idx)"
    assert repr(trace(alibi, "score")) == "<alibi: score + alibi_bias[h] * (q_idx - kv_idx)>"
    assert repr(trace(and_masks(causal_mask, document_masking), "mask")) == (
        "<and_mask: (q_idx >= kv_idx) & (document_id[q_idx] == document_id[kv_idx])>"
    )
    assert str(trace(lambda s, b, h, q, kv: -(s - (q - kv)) * (s / (2 * s)) - ~q, "score")) == (
        "-(score - (q_idx - kv_idx)) * (score / (2 * score)) - ~q_idx"
    )
    assert str(trace(lambda s, b, h, q, kv: s * temperature, "score")) == "score * temperature"


def test_a_long_shared_expression_is_written_once():
    def doubling(s, b, h, q, kv):
        for _ in range(100):
            s = s * s + q
        return s

    graph = trace(doubling, "score")
    assert len(graph.nodes) == 2 + 200
    assert len(str(graph)) < 5000
    assert reread(graph) == graph


def test_graphs_are_equal_exactly_where_they_compute_the_same_in_the_same_way():
    def other_name_and_order(score, x, y, query, key):
        distance, _unused = query - key, torch.tanh(score)
        bias = alibi_bias[y] * distance
        return score + bias

    a, b = trace(alibi, "score"), trace(other_name_and_order, "score")
    assert a == b
    assert hash(a) == hash(b)
    assert a.key == b.key
    different = [
        trace(f, "score")
        for f in (
            alibi,
            lambda s, b, h, q, kv: s + slopes[h] * (q - kv),
            lambda s, b, h, q, kv: s + 1,
            lambda s, b, h, q, kv: s + 1.0,
            lambda s, b, h, q, kv: s + True,
            lambda s, b, h, q, kv: s + 0.0,
            lambda s, b, h, q, kv: s + -0.0,
            lambda s, b, h, q, kv: s - 1,
            lambda s, b, h, q, kv: 1 - s,
            lambda s, b, h, q, kv: s + float("nan"),
            lambda s, b, h, q, kv: s.to(torch.float16),
            lambda s, b, h, q, kv: s.to(torch.bfloat16),
        )
    ]
    assert len(set(different)) == len({graph.key for graph in different}) == len(different)
    assert a != "score + alibi_bias[h] * (q_idx - kv_idx)"
    nan = [trace(lambda s, b, h, q, kv: s + float("nan"), "score") for _ in range(2)]
    assert nan[0] == nan[1]


def test_the_order_in_which_python_computes_does_not_matter():
    def first(s, b, h, q, kv):
        left = s * 2
        return left + q * 3

    def second(s, b, h, q, kv):
        right = q * 3
        return s * 2 + right

    assert trace(first, "score") == trace(second, "score")


def test_graphs_survive_pickling():
    graph = trace(variants.prefix_lm(prefix_length), "mask")
    copy = pickle.loads(pickle.dumps(graph))
    assert copy == graph
    assert copy.key == graph.key
    assert copy.name == "prefix_lm"
    assert copy.captures == (Capture("prefix_length", torch.int32, 1),)


def test_another_process_gives_the_same_key_and_loads_no_compiler():
    code = (
        "import sys, torch; from sennit.variants import prefix_lm, trace; "
        "print(trace(prefix_lm(torch.zeros(1, dtype=torch.int32)), 'mask').key, "
        "*(m for m in sys.modules if m.startswith(('torch._dynamo', 'torch._inductor', 'triton'))))"
    )
    printed = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.split()
    assert printed == [trace(variants.prefix_lm(prefix_length), "mask").key]


def test_bools_that_are_known_leave_no_trace():
    assert str(trace(lambda b, h, q, kv: b.new_ones((), dtype=torch.bool) & (q < kv), "mask")) == "q_idx < kv_idx"
    assert str(trace(lambda b, h, q, kv: (q < kv) | b.new_zeros((), dtype=torch.bool), "mask")) == "q_idx < kv_idx"
    assert str(trace(lambda b, h, q, kv: (q < kv) | True, "mask")) == "True"
    assert str(trace(lambda b, h, q, kv: (q < kv) & False, "mask")) == "False"
    assert str(trace(lambda s, b, h, q, kv: s * (torch.tensor(2.0) * 3), "score")) == "score * float32(6.0)"


# Tensors from outside.


class Bias(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(slopes)
        self.plain = slopes

    def forward(self, score, b, h, q_idx, kv_idx):
        return score + self.weight[h]

    def method(self, score, b, h, q_idx, kv_idx):
        return score * self.plain[h]


class Gains:
    of_class = slopes

    def __call__(self, score, b, h, q_idx, kv_idx):
        return score * self.of_class[h]


def look_up(values, index):
    return values[index]


def with_default(score, b, h, q_idx, kv_idx, bias=slopes):
    return score + bias[h]


def with_keyword(score, b, h, q_idx, kv_idx, *, bias):
    return score + bias[h]


bias_module = Bias()
holder = type("Holder", (), {"inner": type("Inner", (), {"gains": slopes})})


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (alibi, "alibi_bias"),
        (variants.alibi(slopes), "slopes"),
        (with_default, "bias"),
        (functools.partial(with_keyword, bias=slopes), "bias"),
        (functools.partial(lambda learned, score, b, h, q, kv: score + learned[h], slopes), "learned"),
        (bias_module, "weight"),
        (bias_module.method, "plain"),
        (Gains(), "of_class"),
        (lambda s, b, h, q, kv: s + holder.inner.gains[h], "gains"),
        (lambda s, b, h, q, kv: s + look_up(slopes, h), "slopes"),
        (lambda s, b, h, q, kv: s + (lambda: slopes[h])(), "slopes"),
        (lambda s, b, h, q, kv: s + sum(slopes[i] for i in range(3)), "slopes"),
    ],
)
def test_captures_are_named_by_the_variable_that_holds_them(function, name):
    assert trace(function, "score").captures == (Capture(name, torch.float32, 1),)


def test_captures_are_listed_by_name_with_dtype_and_dimensions():
    graph = trace(lambda s, b, h, q, kv: s * temperature + table[b, h, q, kv] + document_id[kv], "score")
    assert graph.captures == (
        Capture("document_id", torch.int64, 1),
        Capture("table", torch.float32, 4),
        Capture("temperature", torch.float32, 0),
    )


def test_a_trace_keeps_no_tensor_and_changes_nothing_of_the_function():
    def make():
        gains = torch.ones(3)

        def function(score, b, h, q_idx, kv_idx):
            return score * gains[h]

        return function, weakref.ref(gains)

    function, reference = make()
    before = dict(vars(sys.modules[__name__]))
    gc.disable()
    try:
        graph = trace(function, "score")
        assert function.__closure__[0].cell_contents is reference()
        assert vars(sys.modules[__name__]) == before
        del function
        assert reference() is None
    finally:
        gc.enable()
    assert graph.captures[0].name == "gains"


def test_constants_do_not_depend_on_the_default_device_or_dtype():
    def function(s, b, h, q, kv):
        return torch.where(b.new_ones((), dtype=torch.bool) & (q < kv), s, q * 0.5)

    usual = trace(function, "score")
    with torch.device("meta"):
        assert trace(function, "score") == usual
        assert trace(lambda s, b, h, q, kv: s * torch.tensor(0.5), "score").nodes[-1].dtype == torch.float32
    torch.set_default_dtype(torch.bfloat16)
    try:
        assert trace(function, "score") == usual
    finally:
        torch.set_default_dtype(torch.float32)


def test_an_index_wraps_once_and_is_clamped_beyond():
    values = torch.tensor([10, 20, 30])
    graph = trace(lambda b, h, q, kv: values[q] == kv, "mask")
    q_idx = torch.tensor([-9, -4, -3, -1, 0, 2, 3, 2**31 - 1])
    inputs = {"b": q_idx, "h": q_idx, "q_idx": q_idx, "kv_idx": torch.tensor([10, 10, 10, 30, 10, 30, 30, 30])}
    assert evaluate(graph, inputs, {"values": values}).all()


def test_dividing_an_integer_by_zero_gives_something():
    graph = trace(lambda s, b, h, q, kv: 7 // q + 7 % q, "score")
    inputs = {name: torch.tensor([0, 2]) for name in SIZES} | {"score": torch.zeros(2)}
    assert evaluate(graph, inputs, {})[1] == 3 + 1


def test_integers_wrap_around_as_in_pytorch():
    graph = trace(lambda s, b, h, q, kv: (q * q * q).to(torch.int16), "score")
    q_idx = torch.tensor([5000], dtype=torch.int32)
    got = evaluate(graph, {"score": torch.zeros(1), "b": q_idx, "h": q_idx, "q_idx": q_idx, "kv_idx": q_idx}, {})
    assert got.tolist() == (q_idx**3).to(torch.int16).tolist()


# What cannot be traced.

array = np.arange(7)
listed = [slopes, slopes.clone()]
twin = same_as_twin = torch.ones(3)
config = {"window": 3}


def chain(b, h, q_idx, kv_idx):
    return 0 <= q_idx - kv_idx < 5


def branch(score, b, h, q_idx, kv_idx):
    if q_idx < kv_idx:
        return score
    return -score


def python_and(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx and kv_idx > 0


def in_place(score, b, h, q_idx, kv_idx):
    score += 1
    return score


def stores(score, b, h, q_idx, kv_idx):
    slopes[0] = 1
    return score


def accumulates(score, b, h, q_idx, kv_idx):
    total = torch.zeros(())
    total += score
    return total


def forgets(score, b, h, q_idx, kv_idx):
    score = score + 1


def raises(score, b, h, q_idx, kv_idx):
    return score * config["windows"]


def deep(score, b, h, q_idx, kv_idx):
    return torch.abs(look_inside(score))


def look_inside(x):
    return math.exp(x)


def two_tables(mask, document_id):
    return and_masks(mask, lambda b, h, q, kv: document_id[q] == document_id[kv])


REFUSALS = [
    ("mask", chain, ["in chain", "`return 0 <= q_idx - kv_idx < 5`", "(a <= b) & (b < c)"]),
    ("score", branch, ["in branch", "`if q_idx < kv_idx:`", "torch.where"]),
    ("mask", python_and, ["`return q_idx >= kv_idx and kv_idx > 0`", "&, | and ~"]),
    ("mask", lambda b, h, q, kv: not q < kv, ["lambda b, h, q, kv: not q < kv", "~"]),
    ("mask", lambda b, h, q, kv: q in (1, 2), ["q in (1, 2)"]),
    ("mask", lambda b, h, q, kv: q in {1, 2}, ["q in {1, 2}", "look-up"]),
    ("score", lambda s, b, h, q, kv: max(s, 0), ["torch.maximum for min and max"]),
    ("score", lambda s, b, h, q, kv: float(s), ["float(s)", "Python number"]),
    ("score", lambda s, b, h, q, kv: s * int(q), ["int(q)"]),
    ("score", lambda s, b, h, q, kv: s.item(), ["`item`"]),
    ("score", lambda s, b, h, q, kv: s * round(q), ["Python number"]),
    ("score", lambda s, b, h, q, kv: s * array[q], ["array[q]", "tensors made outside"]),
    ("score", lambda s, b, h, q, kv: s * [1, 2][q], ["Python number"]),
    ("score", lambda s, b, h, q, kv: s * array, ["of type ndarray"]),
    ("score", lambda s, b, h, q, kv: s * 1j, ["of type complex"]),
    ("score", lambda s, b, h, q, kv: s + None, ["None"]),
    ("score", lambda s, b, h, q, kv: sum(x for x in s), ["iteration"]),
    ("score", lambda s, b, h, q, kv: s[0], ["an index into `score`, which is a scalar"]),
    ("score", lambda s, b, h, q, kv: s if temperature else -s, ["`__bool__`", "if temperature else"]),
    ("score", lambda s, b, h, q, kv: s * float(temperature), ["`__float__`"]),
    ("score", deep, ["in look_inside", "`return math.exp(x)`", "torch.exp for math.exp"]),
    ("score", in_place, ["in place", "`score += 1`", "`x = x + y`"]),
    ("score", lambda s, b, h, q, kv: s.add_(1), ["in place, `add_`"]),
    ("score", lambda s, b, h, q, kv: s.relu_(), ["in place"]),
    ("score", lambda s, b, h, q, kv: torch.nn.functional.relu(s, inplace=True), ["in place"]),
    ("score", stores, ["`slopes[0] = 1`", "`setitem` of `slopes`"]),
    ("score", accumulates, ["`total += score`", "in place"]),
    ("score", forgets, ["a number for each pair", "None", "return", "`def forgets(score, b, h, q_idx, kv_idx):`"]),
    ("score", lambda s, b, h, q, kv: (s, s), ["a result that is of type tuple"]),
    ("score", lambda s, b, h, q, kv: slopes, ["a result that is a tensor of 1 dimension"]),
    ("score", lambda s, b, h, q, kv: torch.zeros(3), ["a result that is a tensor of 1 dimension"]),
    ("score", lambda s, b, h, q, kv: table[b, h], ["`table`, a tensor of 4 dimensions with 2 of them indexed"]),
    ("score", lambda s, b, h, q, kv: q < kv, ["a number for each pair", "the bool `q_idx < kv_idx`", "mask_mod="]),
    ("mask", lambda b, h, q, kv: q - kv, ["a bool for each pair", "`q_idx - kv_idx` of torch.int32", "`x != 0`"]),
    ("mask", and_masks(causal_mask, lambda b, h, q, kv: q), ["a bool for each pair", "torch.int32"]),
    ("mask", causal_score, ["a function of (b, h, q_idx, kv_idx)", "causal_score(score, b, h, q_idx, kv_idx)"]),
    ("score", causal_mask, ["a function of (score, b, h, q_idx, kv_idx)", "in causal_mask"]),
    ("score", lambda: 0, ["a function of (score, b, h, q_idx, kv_idx)", "lambda()"]),
    ("score", 3, ["a function of", "of type int"]),
    ("score", None, ["a function of", "None"]),
    ("score", raises, ["KeyError: 'windows'", '`return score * config["windows"]`']),
    ("score", lambda s, b, h, q, kv: s / 0 + 1 // 0, ["ZeroDivisionError"]),
    ("score", lambda s, b, h, q, kv: s + q // 0, ["a division by zero"]),
    ("score", lambda s, b, h, q, kv: s + slopes[h, q], ["2 indices into `slopes`, a tensor of 1 dimension"]),
    ("score", lambda s, b, h, q, kv: s + table[b, h], ["2 of them indexed"]),
    ("score", lambda s, b, h, q, kv: s + slopes, ["`add` of `slopes`, a tensor of 1 dimension"]),
    ("score", lambda s, b, h, q, kv: s + slopes[h / 2], ["an index into `slopes` of torch.float32, `h / 2`"]),
    ("score", lambda s, b, h, q, kv: s + slopes[h < 2], ["an index into `slopes` of torch.bool"]),
    ("score", lambda s, b, h, q, kv: s + slopes[h.to(torch.uint8)], ["torch.uint8", ".to(torch.int32)"]),
    ("score", lambda s, b, h, q, kv: s + slopes[2**31], ["an index into `slopes`", "2147483648"]),
    ("score", lambda s, b, h, q, kv: s + slopes[0:2], ["an index into `slopes` that is of type slice"]),
    ("score", lambda s, b, h, q, kv: s + slopes[h:], ["an index into `slopes` that is of type slice"]),
    ("score", lambda s, b, h, q, kv: s + table[b, ..., h], ["of type ellipsis"]),
    ("score", lambda s, b, h, q, kv: s + slopes[None, h], ["an index into `slopes` that is None"]),
    ("score", lambda s, b, h, q, kv: s + slopes[document_id], ["an index into `slopes`", "a tensor of 1 dimension"]),
    ("score", lambda s, b, h, q, kv: s + slopes.cumsum(0)[h], ["`cumsum` of `slopes`", "outside the function"]),
    ("score", lambda s, b, h, q, kv: s * slopes.shape[0], ["`shape` of `slopes`"]),
    ("score", lambda s, b, h, q, kv: s * len(slopes), ["`len` of `slopes`"]),
    ("score", lambda s, b, h, q, kv: s + listed[0][h], ["that no variable", "table = tables[0]"]),
    ("score", lambda s, b, h, q, kv: s + twin[h] * same_as_twin[h], ["called `same_as_twin` and `twin`"]),
    ("mask", two_tables(document_masking, torch.zeros(7)), ["two different tensors called `document_id`"]),
    ("score", lambda s, b, h, q, kv: s + torch.arange(9)[q], ["a tensor of 1 dimension made inside the function"]),
    ("score", lambda s, b, h, q, kv: s + torch.ones(2), ["a tensor of 1 dimension made inside the function"]),
    ("score", lambda s, b, h, q, kv: s + torch.rand(()), ["torch's `rand`"]),
    ("score", lambda s, b, h, q, kv: s.cumsum(0), ["torch's `cumsum`", "tanh"]),
    ("score", lambda s, b, h, q, kv: torch.special.erfcx(s), ["erfcx"]),
    ("score", lambda s, b, h, q, kv: torch.stack([s, s]), ["torch's `stack`"]),
    ("score", lambda s, b, h, q, kv: s @ s, ["TypeError", "unsupported operand"]),
    ("score", lambda s, b, h, q, kv: torch.add(s, q, alpha=2), ["torch's `add` with these arguments", "alpha"]),
    ("score", lambda s, b, h, q, kv: torch.max(s, 0), ["along dimension 0"]),
    ("score", lambda s, b, h, q, kv: torch.div(q, 2, rounding_mode="trunc"), ["rounding_mode='trunc'"]),
    ("score", lambda s, b, h, q, kv: s.to("cuda"), ["a conversion to cuda"]),
    ("score", lambda s, b, h, q, kv: s.to(torch.complex64), ["a conversion to torch.complex64", "bfloat16"]),
    ("score", lambda s, b, h, q, kv: 2 ** (q + 1), ["an integer to the power of `q_idx + 1`", "torch.exp2"]),
    ("score", lambda s, b, h, q, kv: q << kv, ["a shift"]),
    ("score", lambda s, b, h, q, kv: q + 2**31, ["the number 2147483648", "torch.int32", ".to(torch.int64)"]),
    ("mask", lambda b, h, q, kv: q < 2**40, ["the number 1099511627776"]),
    ("mask", lambda b, h, q, kv: q == kv & 1.5, ["`and` of torch.float32", "bind stronger"]),
    ("mask", lambda b, h, q, kv: torch.where(q, kv < 1, kv < 2), ["a condition of torch.int32", "`x != 0`"]),
    ("mask", lambda b, h, q, kv: (q < kv) - (q > kv), ["`sub` of bools", "^"]),
]


@pytest.mark.parametrize("number", range(len(REFUSALS)))
def test_what_cannot_be_traced_is_refused_with_the_users_line_and_what_to_write(number):
    kind, function, fragments = REFUSALS[number]
    with pytest.raises(InvalidInput) as caught:
        trace(function, kind)
    message = str(caught.value)
    assert caught.value.argument == f"{kind}_mod"
    for fragment in fragments:
        assert fragment in message
    if callable(function) and getattr(function, "__module__", __name__) == __name__:
        assert f"{__file__}:" in message


def test_a_refusal_names_the_file_and_line_and_keeps_the_original_error():
    with pytest.raises(InvalidInput) as caught:
        trace(branch, "score")
    assert f", in branch, {__file__}:{branch.__code__.co_firstlineno + 1}: `if q_idx < kv_idx:`;" in str(caught.value)
    with pytest.raises(InvalidInput) as caught:
        trace(raises, "score")
    assert isinstance(caught.value.__cause__, KeyError)


def test_a_kind_that_there_is_not_is_refused():
    with pytest.raises(InvalidInput, match="kind: expected 'score' or 'mask', got 'bias'"):
        trace(causal_mask, "bias")


def test_arguments_are_of_no_use_after_the_trace():
    kept = []

    def keeps(score, b, h, q_idx, kv_idx):
        kept.append(score)
        return score

    trace(keeps, "score")
    with pytest.raises(InvalidInput, match="from another call"):
        trace(lambda s, b, h, q, kv: s + kept[0], "score")
    with pytest.raises(AttributeError, match="after the function has returned"):
        torch.tanh(kept[0])


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int32], ids=str)
def test_a_sigmoid_of_integers_is_one_of_floats(dtype):
    counts = torch.tensor([9, 100, 127], dtype=dtype)
    assert_traced_right(lambda score, b, h, q_idx, kv_idx: score + torch.sigmoid(counts[h]), "score", counts=counts)


def test_what_is_filled_in_takes_the_dtype_of_what_it_replaces():
    function = lambda score, b, h, q_idx, kv_idx: score + h.masked_fill(q_idx > kv_idx, 2.5)  # noqa: E731
    assert_traced_right(function, "score")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_numbers_beside_half_precision_are_not_rounded_to_it(dtype):
    small = torch.tensor([1e-3, 2e-3, 3e-3], dtype=dtype)
    graph = trace(lambda score, b, h, q_idx, kv_idx: score + small[h] * 1e6, "score")
    torch.testing.assert_close(evaluated(graph, scores(), small=small), scores() + (small * 1e6).view(1, H, 1, 1))
    far = trace(lambda score, b, h, q_idx, kv_idx: score + small[h] * (q_idx - kv_idx), "score")
    inputs = {name: torch.tensor(n) for name, n in {"b": 0, "h": 0, "q_idx": 70_000, "kv_idx": 0}.items()}
    assert evaluate(far, {"score": torch.zeros(()), **inputs}, {"small": small}).item() == pytest.approx(70, rel=0.01)
