"""What tests of printed functions share: functions, hostile values, and what PyTorch and the evaluator make of them."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from sennit import variants
from sennit.backends.reference.variants import evaluate
from sennit.check.functions import random_functions
from sennit.variants import Graph, trace

QUERIES, STEPS = 32, 77  # steps: more than are taken at once, and no multiple of the lanes
HEADS, REQUESTS, LONGEST, REQUEST = 3, 2, 90, 1
RNG = torch.Generator().manual_seed(11)


@dataclass(frozen=True)
class Case:
    """Functions, and the tensors that they read."""

    score_mod: Graph | None
    mask_mod: Graph | None = None
    captured: dict[str, torch.Tensor] = field(default_factory=dict)

    @property
    def captures(self) -> tuple[variants.Capture, ...]:
        found = {c for graph in (self.score_mod, self.mask_mod) if graph for c in graph.captures}
        return tuple(sorted(found, key=lambda capture: capture.name))


@dataclass(frozen=True)
class Pairs:
    """What a block holds: logits ``[steps, queries]``, indices of queries, and those of keys for steps or for pairs."""

    score: torch.Tensor
    q_idx: torch.Tensor
    h: torch.Tensor
    kv_idx: torch.Tensor

    @property
    def inputs(self) -> dict[str, torch.Tensor]:
        kv_idx = self.kv_idx if self.kv_idx.ndim == 2 else self.kv_idx.unsqueeze(1)
        b = torch.tensor(REQUEST, dtype=torch.int32)
        return {"score": self.score, "b": b, "h": self.h, "q_idx": self.q_idx, "kv_idx": kv_idx}


def made(
    *functions: tuple[Callable[..., Any] | None, Callable[..., Any] | None, dict[str, torch.Tensor]],
) -> list[Case]:
    return [Case(s and trace(s, "score"), m and trace(m, "mask"), captured) for s, m, captured in functions]


Printed = Callable[[Pairs], torch.Tensor]
Prepare = Callable[[Sequence[Case]], Sequence[Printed]]  # prints, and compiles where that is needed


def expected(case: Case, pairs: Pairs) -> torch.Tensor:
    score = pairs.score
    if case.score_mod is not None:
        score = evaluate(case.score_mod, pairs.inputs, case.captured).expand(score.shape)
    if case.mask_mod is not None:
        score = torch.where(evaluate(case.mask_mod, pairs.inputs, case.captured), score, -torch.inf)
    return score


def assert_equal(got: torch.Tensor, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(got, wanted.expand(got.shape), rtol=0, atol=0, equal_nan=True)


def random_pairs(seed: int) -> list[Pairs]:
    """The same logits with a key a step and with a key a lane; some logits are not finite."""
    rng = torch.Generator().manual_seed(seed)
    score = 3 * torch.randn(STEPS, QUERIES, generator=rng)
    odd = torch.tensor([torch.inf, -torch.inf, torch.nan, 0.0, -0.0])
    score.view(-1)[::101] = odd[torch.arange(0, score.numel(), 101) % len(odd)]
    q_idx = torch.randint(0, LONGEST, (QUERIES,), generator=rng, dtype=torch.int32)
    h = torch.randint(0, HEADS, (QUERIES,), generator=rng, dtype=torch.int32)
    shapes = ((STEPS,), (STEPS, QUERIES))
    return [
        Pairs(score, q_idx, h, torch.randint(0, LONGEST, shape, generator=rng, dtype=torch.int32)) for shape in shapes
    ]


# Functions as users write them.

bias = torch.randn(LONGEST, HEADS, REQUESTS, LONGEST, generator=RNG).permute(2, 1, 0, 3)  # strides in any order
shared_bias = torch.randn(HEADS, LONGEST, generator=RNG)[:, 1::2].unsqueeze(1).expand(HEADS, LONGEST, LONGEST // 2)
slopes = torch.tensor([0.5, 0.25, 0.125], dtype=torch.bfloat16)
documents = torch.randint(0, 5, (REQUESTS, LONGEST), generator=RNG)
lengths = torch.tensor([9, 40], dtype=torch.int32)
gain = torch.tensor(0.7, dtype=torch.float64)


def full_bias(score, b, h, q_idx, kv_idx):
    return score + bias[b, h, q_idx, kv_idx] - shared_bias[h, q_idx, kv_idx]


def bias_from_the_end(score, b, h, q_idx, kv_idx):
    return score * bias[-1, -h - 1, -q_idx - 1, 7]


def scaled(score, b, h, q_idx, kv_idx):
    return score * gain - 0.1 * (b + 1)


def natten(b, h, q_idx, kv_idx):
    q_x, q_y, kv_x, kv_y = q_idx // 9, q_idx % 9, kv_idx // 9, kv_idx % 9
    return ((q_x.clamp(1, 7) - kv_x).abs() <= 2) & ((q_y.clamp(1, 7) - kv_y).abs() <= 2)


def of_keys_alone(b, h, q_idx, kv_idx):
    return (kv_idx % 3 != b) & (documents[b, kv_idx] > 0)


def of_queries_alone(b, h, q_idx, kv_idx):
    return (h != 1) & (documents[b, q_idx] > 0)


def of_requests_alone(b, h, q_idx, kv_idx):
    return lengths[b] < 10


def constant(score, b, h, q_idx, kv_idx):
    return b * 0.5 + 1


def sinks(score, b, h, q_idx, kv_idx):
    return torch.where((kv_idx < 4) | (q_idx - kv_idx < lengths[b]), score, -float("inf"))


EXAMPLES = made(
    (None, variants.causal, {}),
    (None, variants.sliding_window(20), {}),
    (None, variants.prefix_lm(lengths), {"prefix_length": lengths}),
    (None, variants.document(documents), {"document_id": documents}),
    (variants.alibi(slopes), None, {"slopes": slopes}),
    (variants.alibi(slopes.float()), variants.causal, {"slopes": slopes.float()}),
    (variants.relative_bias(bias[0, :, 0], 16), None, {"table": bias[0, :, 0]}),
    (full_bias, variants.document(documents), {"bias": bias, "shared_bias": shared_bias, "document_id": documents}),
    (bias_from_the_end, natten, {"bias": bias}),
    (scaled, None, {"gain": gain}),
    (None, of_keys_alone, {"documents": documents}),
    (None, of_queries_alone, {"documents": documents}),
    (None, of_requests_alone, {"lengths": lengths}),
    (constant, of_keys_alone, {"documents": documents}),
    (sinks, of_queries_alone, {"lengths": lengths, "documents": documents}),
)
for seed in range(8):
    functions = random_functions(
        np.random.default_rng(seed), heads=HEADS, requests=REQUESTS, positions=LONGEST, dtype=torch.float32
    )
    if functions.score_mod or functions.mask_mod:
        EXAMPLES += made((functions.score_mod, functions.mask_mod, functions.captures))


def check_functions_as_users_write_them(prepare: Prepare, of: Sequence[Pairs]) -> None:
    for case, printed in zip(EXAMPLES, prepare(EXAMPLES), strict=True):
        for pairs in of:
            tolerance = 5e-7 if "tanh" in str(case.score_mod) else 0  # of it and of PyTorch's
            torch.testing.assert_close(printed(pairs), expected(case, pairs), rtol=tolerance, atol=0, equal_nan=True)


# Every operation on every dtype: of x[kv_idx] and y[q_idx].

INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
DTYPES = (torch.bool, *INTEGERS, *FLOATS)
USUAL = (torch.bool, torch.uint8, torch.int32, torch.int64, torch.bfloat16, torch.float32)
WHOLE = (0, 1, -1, 2, 3, -3, 7, -8, 60, -100, 127, -128, 1000, -32768, 65537, 2**24 + 1, -(2**31), 2**40 + 3, -(2**63))
REAL = (0.0, -0.0, 1.0, -1.0, 0.5, 2.5, -2.5, 3.75, -0.3, 1e-3, -7.1, 60000.0, 65519.0, 65520.0, 1e-7, -3e-5,
        1e30, -1e-40, float("inf"), -float("inf"), float("nan"))  # fmt: skip
BASES = (0.0, -0.0, 1.0, -1.0, 2.0, -2.0, 0.5, -0.3, float("inf"), -float("inf"), float("nan"))
EXPONENTS = (0.0, -0.0, 1.0, -1.0, 2.0, 3.0, -3.0, 0.5, -2.5, 1e30, float("inf"), -float("inf"), float("nan"))


def numpys(ufunc: np.ufunc, name: str) -> Callable[..., Any]:
    """NumPy's function on tensors, since PyTorch's vectorised ones round otherwise; PyTorch's name in traces."""

    def function(*args: Any) -> Any:
        if not isinstance(args[0], torch.Tensor):
            return getattr(torch, name)(*args)
        wide = torch.promote_types(args[0].dtype, torch.float32)
        with np.errstate(invalid="ignore"):
            return torch.from_numpy(ufunc(*(arg.to(wide).numpy() for arg in args))).to(args[0].dtype)

    return function


sqrt, remainder = numpys(np.sqrt, "sqrt"), numpys(np.mod, "remainder")
FLOORED = (operator.floordiv, operator.mod)
Group = Callable[[Any, Any], list[Any]]
GROUPS: dict[str, tuple[Group, Sequence[torch.dtype]]] = {
    "arithmetic": (
        lambda x, y: [
            x + y,
            x - y,
            x * y,
            -x,
            abs(x),
            torch.minimum(x, y),
            torch.maximum(x, y),
            torch.where(x == y, x, -y),
        ],
        (*INTEGERS, *FLOATS),
    ),
    "bits": (lambda x, y: [x & y, x | y, x ^ y, ~x], (torch.bool, *INTEGERS)),
    "floats": (lambda x, y: [x / y, x / -y, torch.floor(x), sqrt(x), remainder(x, y)], FLOATS),
    "divisions": (lambda x, y: [x // y, x % y, *(f(x, n) for f in FLOORED for n in (1, 2, 3, 64))], INTEGERS),
    "negative divisors": (lambda x, y: [f(x, n) for f in FLOORED for n in (-1, -3, -8)], INTEGERS[1:]),
    "conversions": (lambda x, y: [x.to(dtype) for dtype in DTYPES], DTYPES),
}


def values(dtype: torch.dtype) -> torch.Tensor:
    """Hostile values of a dtype."""
    if dtype == torch.bool:
        return torch.tensor([False, True])
    if dtype.is_floating_point:
        return torch.tensor(REAL, dtype=torch.float64).to(dtype)
    limits = torch.iinfo(dtype)
    return torch.tensor([*(n for n in WHOLE if limits.min <= n <= limits.max), limits.max], dtype=dtype)


def tables(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Values for every step and for every query."""
    found = values(dtype)
    return found[torch.arange(STEPS) % len(found)], found[torch.arange(QUERIES) % len(found)]


def value_pairs() -> Pairs:
    """Logits of 0, and indices that meet in all pairs; a key a lane."""
    q_idx, kv_idx = torch.arange(QUERIES, dtype=torch.int32), torch.arange(STEPS, dtype=torch.int32)
    return Pairs(torch.zeros(STEPS, QUERIES), q_idx, torch.zeros_like(q_idx), kv_idx.unsqueeze(1).expand(-1, QUERIES))


def checked(group: Group, dtype: torch.dtype) -> Case:
    """A mask that is true where each result of a group is what PyTorch computes; all of its digits are compared."""
    x, y = tables(dtype)
    if group in (GROUPS["divisions"][0], GROUPS["negative divisors"][0]):
        # PyTorch faults where it divides by 0, and where a result is too large.
        y = torch.where((y == 0) | (y == -1), 5, y)
        x = torch.where(x == torch.iinfo(dtype).min, x + 1, x)
    wanted = group(*torch.broadcast_tensors(x.unsqueeze(1), y))
    of = [result.dtype for result in wanted]
    wide = torch.float64 if len(set(of)) > 1 else of[0]  # results of several dtypes are small enough
    z = torch.stack([result.to(wide) for result in wanted])
    free = ~torch.stack([possible(x, dtype) for dtype in of])

    def mask(b, h, q_idx, kv_idx):
        seen = q_idx >= 0
        for i, result in enumerate(group(x[kv_idx], y[q_idx])):
            digits, expected = result.to(wide), z[i, kv_idx, q_idx]
            same = digits == expected
            if wide.is_floating_point:
                same = same | ((digits != digits) & (expected != expected))
            seen = seen & (same | free[i, kv_idx])
        return seen

    return Case(None, trace(mask, "mask"), {"x": x, "y": y, "z": z, "free": free})


def possible(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Whether values can be converted to a dtype: floats that an integer cannot hold may become anything."""
    if not x.is_floating_point() or dtype.is_floating_point or dtype == torch.bool:
        return torch.ones(x.shape, dtype=torch.bool)
    limits = torch.iinfo(dtype)
    return (
        (x.double() > limits.min - 1.0) & (x.double() < limits.max + 1.0) if dtype != torch.int64 else x.abs() < 2.0**63
    )


def compared(dtype: torch.dtype) -> Case:
    """Six comparisons, as the bits of a score."""
    x, y = tables(dtype)

    def score_mod(score, b, h, q_idx, kv_idx):
        a, b = x[kv_idx], y[q_idx]
        return (a == b) + 2 * (a != b) + 4 * (a < b) + 8 * (a <= b) + 16 * (a > b) + 32 * (a >= b)

    return Case(trace(score_mod, "score"), None, {"x": x, "y": y})


def check_operations(prepare: Prepare, dtypes: Sequence[torch.dtype]) -> None:
    names = [(name, dtype) for name, (_, of) in GROUPS.items() for dtype in of if dtype in dtypes]
    cases = [checked(GROUPS[name][0], dtype) for name, dtype in names]
    for name, case, printed in zip(names, cases, prepare(cases), strict=True):
        wrong = (printed(value_pairs()) != 0).nonzero()
        assert not len(wrong), (name, [(case.captured["x"][s], case.captured["y"][q]) for s, q in wrong[:5]])


def check_comparisons(prepare: Prepare) -> None:
    cases = [compared(dtype) for dtype in DTYPES]
    for case, printed in zip(cases, prepare(cases), strict=True):
        x, y = case.captured["x"].unsqueeze(1), case.captured["y"]
        signs = [x == y, x != y, x < y, x <= y, x > y, x >= y]
        wanted = sum(sign.float() * 2**bit for bit, sign in enumerate(signs))
        assert_equal(printed(value_pairs()), wanted)


def check_functions_of_float32(prepare: Prepare, limits: Mapping[Callable[..., Any], float]) -> None:
    """Errors are at most so many units in the last place; what is 0, infinite or NaN is so exactly."""
    cases = [Case(trace(lambda score, b, h, q_idx, kv_idx, f=f: f(score), "score")) for f in limits]
    rng = torch.Generator().manual_seed(5)
    any_bits = torch.randint(-(2**31), 2**31, (2000, QUERIES), generator=rng, dtype=torch.int32).view(torch.float32)
    moderate = torch.empty(1000, QUERIES).uniform_(-160, 160, generator=rng)
    near_1 = 1 + torch.empty(500, QUERIES).uniform_(-0.5, 0.5, generator=rng) ** 3
    small = torch.empty(500, QUERIES).uniform_(-1, 1, generator=rng) ** 5
    inf = torch.inf
    special = torch.tensor([0.0, -0.0, inf, -inf, torch.nan, 1.0, 2.0**-149, 2.0**-126, 88.8, -103.9, 128, -150])
    x = torch.cat([any_bits, moderate, near_1, small, special.repeat(QUERIES).view(-1, QUERIES)])
    nothing = torch.zeros(QUERIES, dtype=torch.int32)
    pairs = Pairs(x, nothing, nothing, torch.zeros(len(x), dtype=torch.int32))
    for (function, limit), printed in zip(limits.items(), prepare(cases), strict=True):
        got, exact = printed(pairs), function(x.double())
        wanted = exact.float()
        usual = wanted.isfinite() & got.isfinite() & (wanted != 0)
        unit = (torch.nextafter(wanted.abs(), torch.tensor(inf)) - wanted.abs()).double()
        assert ((got.double() - exact).abs() / unit)[usual].max() <= limit, function
        assert_equal(torch.where(usual, 0, got), torch.where(usual, 0, wanted))


def check_functions_of_float64_and_powers(prepare: Prepare, precision: float) -> None:
    x, y = tables(torch.float64)
    functions = (torch.exp, torch.exp2, torch.tanh, torch.log, torch.log2, torch.sin, torch.cos)
    a, z = x.unsqueeze(1).abs() % 100, torch.stack([f(x % 100) for f in functions])
    powers, float32_powers = a**y, (a.float().double() ** y.float().double()).float()

    def mask(b, h, q_idx, kv_idx):
        base, exponent = x[kv_idx].abs() % 100, y[q_idx]
        results = [(f(x[kv_idx] % 100), z[i, kv_idx]) for i, f in enumerate(functions)]
        results.append((base**exponent, powers[kv_idx, q_idx]))
        results.append(((base.float() ** exponent.float()), float32_powers[kv_idx, q_idx]))
        same = [
            ((got - wanted).abs() <= wanted.abs() * (precision if wanted.dtype == torch.float64 else 1e-7))
            | (got == wanted)
            | ((got != got) & (wanted != wanted))
            for got, wanted in results
        ]
        return functools.reduce(operator.and_, same)

    captured = {"x": x, "y": y, "z": z, "powers": powers, "float32_powers": float32_powers}
    case = Case(None, trace(mask, "mask"), captured)
    base, exponent = torch.tensor(BASES)[torch.arange(STEPS) % len(BASES)], torch.tensor(EXPONENTS)

    def power(score, b, h, q_idx, kv_idx):
        return base[kv_idx] ** exponent[q_idx]

    special = Case(trace(power, "score"), None, {"base": base, "exponent": exponent})
    mask, powers_at_limits = prepare([case, special])
    assert_equal(mask(value_pairs()), torch.zeros(STEPS, QUERIES))
    with np.errstate(all="ignore"):
        exact = torch.from_numpy(np.power(base.double().unsqueeze(1).numpy(), exponent.double().numpy()))
    got, wanted = powers_at_limits(value_pairs())[:, : len(EXPONENTS)], exact.float()
    torch.testing.assert_close(got, wanted, rtol=1e-7, atol=0, equal_nan=True)
    assert (got.signbit() == wanted.signbit())[~wanted.isnan()].all()


def check_hidden_pairs_never_fault(prepare: Prepare) -> None:
    """Division by 0 and of the smallest integer by -1, floats that no integer holds, and indices far outside."""

    def wrapped(n: int, dtype: torch.dtype) -> int:
        limits = torch.iinfo(dtype)
        return (n - limits.min) % (limits.max - limits.min + 1) + limits.min

    cases, wanted = [], []
    for dtype in INTEGERS:
        x, y = tables(dtype)
        z = torch.tensor([[wrapped(a // (b or 1), dtype) for b in y.tolist()] for a in x.tolist()], dtype=dtype)

        def divided(b, h, q_idx, kv_idx, x=x, y=y, z=z):
            quotient, rest = x[kv_idx] // y[q_idx], x[kv_idx] % y[q_idx]
            return (y[q_idx] == 0) | ((quotient == z[kv_idx, q_idx]) & (quotient * y[q_idx] + rest == x[kv_idx]))

        cases.append(Case(None, trace(divided, "mask"), {"x": x, "y": y, "z": z}))
        wanted.append(torch.zeros(STEPS, QUERIES))
    for source in FLOATS:
        x, _ = tables(source)

        def converted(score, b, h, q_idx, kv_idx, x=x):
            counts = sum((x[kv_idx].to(dtype) != 0).int() for dtype in INTEGERS)
            return torch.where(counts < 0, counts, score)

        cases.append(Case(trace(converted, "score"), None, {"x": x}))
        wanted.append(torch.zeros(STEPS, QUERIES))
    x, y = tables(torch.int64)
    few = torch.tensor([[1.0, 2.0, 3.0, 4.0], [5.0, 6.0, 7.0, 8.0]])

    def far(score, b, h, q_idx, kv_idx):
        return few[y[q_idx], x[kv_idx]]

    def place(n: int, size: int) -> int:
        return min(max(n + size if n < 0 else n, 0), size - 1)

    cases.append(Case(trace(far, "score"), None, {"few": few, "x": x, "y": y}))
    wanted.append(torch.tensor([[few[place(m, 2), place(n, 4)] for m in y.tolist()] for n in x.tolist()]))
    for printed, right in zip(prepare(cases), wanted, strict=True):
        assert_equal(printed(value_pairs()), right)


# Random expressions, of operations that IEEE 754 rounds in one way only: what follows may jump, as floor does.

tiny_table = torch.tensor([7, -3, 100], dtype=torch.int8)
wide_table = torch.tensor([2**40, -5, 3])
half_table = torch.tensor([0.1, -2.5, 300.0], dtype=torch.float16)
double_table = torch.tensor([0.1, 1 / 3, -7.0], dtype=torch.float64)
flags = torch.tensor([True, False, True])
CAPTURED = {
    "tiny_table": tiny_table, "wide_table": wide_table, "half_table": half_table, "double_table": double_table,
    "flags": flags, "slopes": slopes, "documents": documents, "bias": bias,
}  # fmt: skip
# Functions and what they take: ints, floats and bools.
OF_INTS = [
    *((f, "ii") for f in (operator.add, operator.sub, operator.mul, operator.xor, torch.minimum, torch.maximum)),
    *((lambda i, n=n: i // n, "i") for n in (2, 3)), (lambda i: i.long() // -5, "i"),  # -5 is no uint8
    *((lambda i, n=n: i % n, "i") for n in (4, 7)), (lambda i: i.long() % -3, "i"),
    (operator.neg, "i"), (abs, "i"), (operator.invert, "i"), (lambda i: i & 13, "i"), (torch.where, "bii"),
    (lambda i, j: i // (j.abs() % 5 + 1), "ii"), (lambda i: i.to(torch.int16), "i"), (lambda i: i.to(torch.uint8), "i"),
    (lambda i: i.to(torch.int64), "i"), (lambda i: tiny_table[i.int() % 3], "i"), (lambda b: b.int(), "b"),
    (lambda i: wide_table[i.int() % 3], "i"), (lambda i, j: documents[i.int() & 1, j.int() % 90], "ii"),
    (lambda x: torch.clamp(torch.where(x == x, x, 0), -1e4, 1e4).int(), "f"),
]  # fmt: skip
OF_FLOATS = [
    *((f, "ff") for f in (operator.add, operator.sub, operator.mul, operator.truediv, torch.minimum, torch.maximum)),
    *((f, "fi") for f in (operator.add, operator.mul, operator.truediv)),
    *((f, "f") for f in (torch.neg, abs, torch.floor)),
    (torch.where, "bff"), (lambda x: x * 0.3 + 1, "f"), (lambda x: x.half(), "f"), (lambda x: x.bfloat16(), "f"),
    (lambda i: half_table[i.int() % 3], "i"), (lambda i: slopes[i.int() % 3], "i"), (lambda x: x.double(), "f"),
    (lambda i: double_table[i.int() % 3], "i"), (lambda i, j: bias[i.int() % 2, 1, 2, j.int() % 90], "ii"),
    (lambda i: i / 3, "i"), (lambda i: i.float(), "i"), (lambda b: b.float(), "b"),
]  # fmt: skip
OF_BOOLS = [
    *((f, kinds) for f in (operator.lt, operator.le, operator.eq, operator.ne, operator.gt, operator.ge)
      for kinds in ("ii", "ff", "fi")),
    *((f, "bb") for f in (operator.and_, operator.or_, operator.xor, operator.eq)), (operator.invert, "b"),
    (lambda i: flags[i.int() % 3], "i"), (lambda i: i.bool(), "i"),
]  # fmt: skip
TABLES = {"i": OF_INTS, "f": OF_FLOATS, "b": OF_BOOLS}
LEAVES = {"i": ("b", "h", "q_idx", "kv_idx"), "f": ("score",)}


def random_tree(rng: np.random.Generator, kind: str, depth: int) -> Any:
    """A name, or a function and the trees of its arguments."""
    if depth == 0 and kind in LEAVES:
        return LEAVES[kind][rng.integers(len(LEAVES[kind]))]
    function, kinds = TABLES[kind][rng.integers(len(TABLES[kind]))]
    return function, *(random_tree(rng, argument, max(depth - 1, 0)) for argument in kinds)


def value(tree: Any, arguments: dict[str, Any]) -> Any:
    return arguments[tree] if isinstance(tree, str) else tree[0](*(value(part, arguments) for part in tree[1:]))


def random_case(rng: np.random.Generator) -> Case:
    score, mask = random_tree(rng, "f", 4), random_tree(rng, "b", 3)

    def score_mod(score_, b, h, q_idx, kv_idx):
        return value(score, {"score": score_, "b": b, "h": h, "q_idx": q_idx, "kv_idx": kv_idx})

    def mask_mod(b, h, q_idx, kv_idx):
        return value(mask, {"score": q_idx * 0.5, "b": b, "h": h, "q_idx": q_idx, "kv_idx": kv_idx})

    return Case(trace(score_mod, "score"), trace(mask_mod, "mask"), CAPTURED)


def check_random_functions(prepare: Prepare, count: int, of: Sequence[Pairs], seed: int) -> None:
    rng = np.random.default_rng(seed)
    cases = [random_case(rng) for _ in range(count)]
    for case, printed in zip(cases, prepare(cases), strict=True):
        for pairs in of:
            assert_equal(printed(pairs), expected(case, pairs))
