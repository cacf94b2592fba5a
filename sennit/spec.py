"""What an attention layer computes: heads, dimensions, dtypes, masks and score changes, as one frozen value."""

from __future__ import annotations

import dataclasses
import math
import numbers
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch

from sennit.errors import InvalidInput
from sennit.variants import Capture, Graph, Kind, trace

__all__ = ["FLOAT32_MAX", "QUERY_DTYPES", "AttentionSpec", "checked_integer"]

FLOAT32_MAX = torch.finfo(torch.float32).max
FLOAT32_TINY = torch.finfo(torch.float32).tiny
INTEGER_MAX = 2**31 - 1  # kernels count heads, dimensions and positions in 32 bits
QUERY_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


@dataclass(frozen=True, kw_only=True)
class AttentionSpec:
    """What one attention layer computes. Holds flags and numbers, never tensors; hashable; validates itself.

    Args:
        num_qo_heads: query (and output) heads.
        num_kv_heads: key/value heads; divides ``num_qo_heads`` (equal: MHA, 1: MQA, otherwise GQA).
        head_dim: dimension of queries, keys, values and outputs; or give the next two. Reads as None where they differ.
        head_dim_qk: dimension of queries and keys.
        head_dim_vo: dimension of values and outputs.
        dtype: of queries and outputs: bfloat16, float16, float32 or float64.
        kv_dtype: of stored keys and values; ``dtype`` when left out.
        latent: V is the first ``head_dim_vo`` columns of K, which is stored alone (see :meth:`mla`).
        window_left: keys more than this many positions behind a query are hidden; None: no limit. Hugging Face's
            ``sliding_window`` is ``window_left + 1``.
        window_right: keys more than this many positions ahead of a query are hidden; None: no limit.
        num_sink_tokens: the first keys of a sequence that a window never hides.
        learned_sinks: a learned logit per query head enters the softmax's denominator.
        alibi: ``alibi_slopes[h] * (j - p)`` is added to the logits.
        logits_soft_cap: ``cap * tanh(logit / cap)`` is applied to the scaled logits.
        score_mod: ``f(score, b, h, q_idx, kv_idx) -> score``, FlexAttention's signature: changes a logit after the soft
            cap and ALiBi. It is traced once into a :class:`sennit.variants.Graph`, which the field then holds.
        mask_mod: ``f(b, h, q_idx, kv_idx) -> bool``, likewise: where it is False the key is hidden.

    Raises:
        InvalidInput: a field has a wrong type or is out of range, dtypes are not floating, or a function cannot be
            traced.

    >>> gqa = AttentionSpec(num_qo_heads=32, num_kv_heads=8, head_dim=128, dtype=torch.bfloat16)
    >>> gqa.group_size, gqa.head_dim_qk, gqa.kv_dtype
    (4, 128, torch.bfloat16)
    >>> gqa.replace(num_kv_heads=32).group_size
    1
    >>> gqa.replace(dtype=torch.float16).kv_dtype
    torch.float16
    """

    num_qo_heads: int
    num_kv_heads: int
    head_dim: int | None = field(default=None, repr=False, compare=False)  # follows from the next two
    head_dim_qk: int = 0
    head_dim_vo: int = 0
    dtype: torch.dtype
    kv_dtype: torch.dtype = None  # type: ignore[assignment]  # None becomes `dtype`
    latent: bool = False
    window_left: int | None = None
    window_right: int | None = None
    num_sink_tokens: int = 0
    learned_sinks: bool = False
    alibi: bool = False
    logits_soft_cap: float | None = None
    score_mod: Graph | Callable[..., Any] | None = None
    mask_mod: Graph | Callable[..., Any] | None = None

    def __post_init__(self) -> None:
        def fill(name: str, value: object) -> None:
            object.__setattr__(self, name, value)

        for name, value in zip(("head_dim", "head_dim_qk", "head_dim_vo"), self._checked_dims(), strict=True):
            fill(name, value)
        for name in ("num_qo_heads", "num_kv_heads"):
            fill(name, checked_integer(name, getattr(self, name), minimum=1))
        for name in ("latent", "learned_sinks", "alibi"):
            fill(name, _checked_flag(name, getattr(self, name)))
        if self.num_qo_heads % self.num_kv_heads:
            raise InvalidInput(
                "num_kv_heads",
                expected=f"a divisor of num_qo_heads={self.num_qo_heads}",
                got=self.num_kv_heads,
                hint="every KV head serves the same number of query heads",
            )
        if self.kv_dtype is None:
            fill("kv_dtype", self.dtype)
        for name in ("dtype", "kv_dtype"):
            dtype = getattr(self, name)
            if not isinstance(dtype, torch.dtype) or dtype not in QUERY_DTYPES:
                names = ", ".join(str(d).removeprefix("torch.") for d in QUERY_DTYPES)
                raise InvalidInput(name, expected=f"one of torch's dtypes {names}", got=repr(dtype))
        if self.latent and (self.num_kv_heads != 1 or self.head_dim_vo > self.head_dim_qk):
            raise InvalidInput(
                "latent",
                expected="num_kv_heads=1 and head_dim_vo <= head_dim_qk (V is a prefix of K)",
                got=f"num_kv_heads={self.num_kv_heads}, dims {self.head_dim_qk}/{self.head_dim_vo}",
                hint="AttentionSpec.mla(...) sets these",
            )
        for name in ("window_left", "window_right"):
            if getattr(self, name) is not None:
                fill(name, checked_integer(name, getattr(self, name), minimum=0, hint="None means no window"))
        fill("num_sink_tokens", checked_integer("num_sink_tokens", self.num_sink_tokens, minimum=0))
        if self.num_sink_tokens and self.window_left is None:
            raise InvalidInput(
                "num_sink_tokens",
                expected="0 where window_left is None",
                got=self.num_sink_tokens,
                hint="sink tokens are the keys that a window never hides; for learned sinks use learned_sinks=True",
            )
        if self.logits_soft_cap is not None:
            fill("logits_soft_cap", _checked_cap(self.logits_soft_cap))
        captured: dict[str, torch.Tensor] = {}  # by both functions
        for name in ("score_mod", "mask_mod"):
            if getattr(self, name) is not None:
                fill(name, _traced(name, getattr(self, name), captured))
        self._check_captures()

    def _checked_dims(self) -> tuple[int | None, int, int]:
        least = 1 if self.head_dim is None else 0
        qk = checked_integer("head_dim_qk", self.head_dim_qk, minimum=least, hint="or give head_dim")
        vo = checked_integer("head_dim_vo", self.head_dim_vo, minimum=least, hint="or give head_dim")
        if self.head_dim is None:
            return (qk if qk == vo else None), qk, vo
        both = checked_integer("head_dim", self.head_dim, minimum=1)
        if (qk, vo) not in ((0, 0), (both, both)):  # dataclasses.replace gives the same number thrice
            raise InvalidInput(
                "head_dim",
                expected="either head_dim, or head_dim_qk and head_dim_vo",
                got=f"head_dim={both}, head_dim_qk={qk}, head_dim_vo={vo}",
            )
        return both, both, both

    def _check_captures(self) -> None:
        known: dict[str, Capture] = {}
        for capture in self._all_captures():
            if known.setdefault(capture.name, capture) != capture:
                raise InvalidInput(
                    "score_mod, mask_mod",
                    expected="one dtype and number of dimensions a captured name",
                    got=f"{known[capture.name]} and {capture}",
                    hint="rename one of the closed-over tensors",
                )

    def _all_captures(self) -> list[Capture]:
        return [c for graph in (self.score_mod, self.mask_mod) if isinstance(graph, Graph) for c in graph.captures]

    @cached_property
    def captures(self) -> tuple[Capture, ...]:
        """The tensors that the functions close over, by name; ``run`` takes them as ``captures=``."""
        return tuple(sorted(set(self._all_captures()), key=lambda capture: capture.name))

    @classmethod
    def mla(
        cls,
        *,
        num_qo_heads: int,
        kv_lora_rank: int,
        qk_rope_head_dim: int,
        dtype: torch.dtype,
        kv_dtype: torch.dtype | None = None,
    ) -> AttentionSpec:
        """Multi-head latent attention with absorbed weights (DeepSeek-V2, arXiv:2405.04434, section 2.1.2).

        One latent K of ``kv_lora_rank + qk_rope_head_dim`` columns is stored a token, and V is its first
        ``kv_lora_rank`` columns.

        >>> AttentionSpec.mla(num_qo_heads=128, kv_lora_rank=512, qk_rope_head_dim=64, dtype=torch.bfloat16).head_dim_qk
        576
        """
        rank = checked_integer("kv_lora_rank", kv_lora_rank, minimum=1)
        return cls(
            num_qo_heads=num_qo_heads,
            num_kv_heads=1,
            head_dim_qk=rank + checked_integer("qk_rope_head_dim", qk_rope_head_dim, minimum=0),
            head_dim_vo=rank,
            dtype=dtype,
            kv_dtype=dtype if kv_dtype is None else kv_dtype,
            latent=True,
        )

    def replace(self, **changes: Any) -> AttentionSpec:
        """Return a copy with some fields changed.

        ``head_dim=`` sets both dimensions; ``dtype=`` sets ``kv_dtype`` too where the two were equal.
        """
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        if unknown := changes.keys() - fields.keys():
            raise InvalidInput("replace", expected=f"fields among {', '.join(fields)}", got=", ".join(sorted(unknown)))
        fields["head_dim"] = None
        if changes.get("head_dim") is not None:
            fields |= {"head_dim_qk": 0, "head_dim_vo": 0}
        if self.kv_dtype == self.dtype:
            fields["kv_dtype"] = None
        return AttentionSpec(**(fields | changes))

    @property
    def group_size(self) -> int:
        """Query heads per KV head."""
        return self.num_qo_heads // self.num_kv_heads

    @property
    def key(self) -> str:
        """Short text that tells this spec from every other; part of an operator's key."""
        dtypes = f"{self.dtype}-{self.kv_dtype}".replace("torch.", "")
        values = {name: getattr(self, name) for name in sorted(self.features)}
        extras = [f"{name}={v.key if isinstance(v, Graph) else v}" for name, v in values.items()]
        extras += ["latent"] * self.latent
        heads = f"h{self.num_qo_heads}x{self.num_kv_heads}"
        return "-".join([heads, f"d{self.head_dim_qk}x{self.head_dim_vo}", dtypes, *extras])

    @property
    def features(self) -> frozenset[str]:
        """Names of the fields beyond plain scaled attention that this spec uses; backends accept or refuse each."""
        plain: dict[str, object] = {
            "window_left": None,
            "window_right": None,
            "num_sink_tokens": 0,
            "learned_sinks": False,
            "alibi": False,
            "logits_soft_cap": None,
            "score_mod": None,
            "mask_mod": None,
        }
        return frozenset(name for name, default in plain.items() if getattr(self, name) != default)

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes that one token's keys and values take in one layer's cache."""
        columns = self.head_dim_qk + (0 if self.latent else self.head_dim_vo)
        return int(self.num_kv_heads * columns * self.kv_dtype.itemsize)


def checked_integer(name: str, value: object, *, minimum: int, hint: str = "") -> int:
    """``value`` as an int, if it is an integer (NumPy's too) from ``minimum`` to what fits 32 bits.

    Raises:
        InvalidInput: it is not.

    >>> checked_integer("page_size", np.int64(16), minimum=1)
    16
    """
    if not isinstance(value, (int, np.integer)) or isinstance(value, bool) or not minimum <= value <= INTEGER_MAX:
        raise InvalidInput(
            name, expected=f"an integer of at least {minimum} and at most {INTEGER_MAX}", got=repr(value), hint=hint
        )
    return int(value)


def _traced(name: str, function: object, captured: dict[str, torch.Tensor]) -> Graph:
    kind: Kind = "score" if name == "score_mod" else "mask"
    if isinstance(function, Graph):
        if function.kind != kind:
            raise InvalidInput(name, expected=f"the graph of a {name}", got=f"that of a {function.kind}_mod")
        return function
    if not callable(function):
        raise InvalidInput(name, expected="a function", got=type(function).__name__)
    return trace(function, kind, captured)


def _checked_flag(name: str, value: object) -> bool:
    if not isinstance(value, (bool, np.bool_)):
        raise InvalidInput(name, expected="True or False", got=repr(value))
    return bool(value)


def _checked_cap(value: object) -> float:
    try:
        cap = float(value) if isinstance(value, numbers.Real) and not isinstance(value, bool) else math.nan
    except OverflowError:
        cap = math.inf
    if not FLOAT32_TINY <= cap <= FLOAT32_MAX:
        raise InvalidInput(
            "logits_soft_cap", expected=f"a positive number that fits float32, at least {FLOAT32_TINY:.3g}",
            got=repr(value), hint="None means no cap",
        )  # fmt: skip
    return cap
