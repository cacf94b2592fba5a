"""How the tokens of one request are chosen: greedily or at random, as one frozen value that checks itself."""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable
from dataclasses import dataclass, replace
from numbers import Real
from typing import Any, TypeVar

import numpy as np

from sennit.cache.demand import is_integer
from sennit.errors import InvalidInput

__all__ = ["NEEDS_TEMPERATURE", "Sampling"]

NEEDS_TEMPERATURE = "a temperature above 0 beside it"

Number = TypeVar("Number", int, float)


@dataclass(frozen=True)
class Sampling:
    """How the tokens of one request are chosen.

    At temperature 0 each token is the most probable one. Above, it is drawn from the softmax of the logits divided by
    the temperature, of which top-k, top-p and min-p each keep a part, in this order (that of transformers). Tokens as
    probable as the last one that a filter keeps are kept too.

    Attributes:
        temperature: 0 for greedy decoding, or a positive number.
        top_k: keep the ``top_k`` most probable tokens; at least 1.
        top_p: of these, keep the fewest most probable ones whose probabilities add up to ``top_p`` or more; above 0, at
            most 1.
        min_p: of these, keep those at least ``min_p`` times as probable as the most probable one; from 0 to 1.
        seed: from 0 to 2**63 - 1. The random number for a request's token ``t`` depends on the seed and on ``t`` alone.

    Raises:
        InvalidInput: a value is out of range, or has no effect because the temperature is 0.

    >>> Sampling(temperature=0.8, top_p=0.95, seed=7)
    Sampling(temperature=0.8, top_k=None, top_p=0.95, min_p=None, seed=7)
    >>> Sampling(top_k=40)
    Traceback (most recent call last):
    ...
    sennit.errors.InvalidInput: top_k: expected a temperature above 0 beside it, got 40 at temperature 0; leave it \
out, or give a temperature (1.0 is the model's own)
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int | None = None

    def __post_init__(self) -> None:
        zero = "0 (greedy decoding) or a positive number"
        self._check("temperature", _real, lambda x: 0 <= x < math.inf, zero)
        keep_all = "leave it out to keep all tokens"
        self._check("top_k", _integer, lambda x: x >= 1, "an integer of at least 1", keep_all)
        self._check("top_p", _real, lambda x: 0 < x <= 1, "a number above 0, at most 1", keep_all)
        self._check("min_p", _real, lambda x: 0 <= x <= 1, "a number from 0 to 1", keep_all)
        self._check("seed", _integer, lambda x: 0 <= x < 2**63, "an integer from 0 to 2**63 - 1")
        if self.greedy:
            self._refuse_what_greedy_decoding_ignores()

    @property
    def greedy(self) -> bool:
        """Whether each token is the most probable one."""
        return self.temperature == 0

    def seeded(self) -> Sampling:
        """This value with a seed: its own, or a fresh one from the operating system; greedy decoding needs none."""
        if self.greedy or self.seed is not None:
            return self
        return replace(self, seed=secrets.randbits(53))  # every reader of JSON keeps so many bits

    def _check(
        self,
        name: str,
        read: Callable[[Any], Number | None],
        fits: Callable[[Number], bool],
        expected: str,
        hint: str = "",
    ) -> None:
        """Keep a field as a Python number, or refuse it."""
        given = getattr(self, name)
        if given is None and name != "temperature":
            return
        value = read(given)
        if value is None or not fits(value):
            raise InvalidInput(name, expected=expected, got=repr(given), hint=hint)
        object.__setattr__(self, name, value)

    def _refuse_what_greedy_decoding_ignores(self) -> None:
        for name in ("top_k", "top_p", "min_p", "seed"):
            if (given := getattr(self, name)) is not None:
                raise InvalidInput(
                    name,
                    expected=NEEDS_TEMPERATURE,
                    got=f"{given} at temperature 0",
                    hint="leave it out, or give a temperature (1.0 is the model's own)",
                )


def _integer(value: object) -> int | None:
    return int(value) if is_integer(value) else None


def _real(value: object) -> float | None:
    """A finite or infinite number as a float; None of anything else. Comparisons with NaN are false."""
    if not isinstance(value, Real) or isinstance(value, (bool, np.bool_)):
        return None
    try:
        return float(value)
    except OverflowError:  # an integer beyond every float
        return None
