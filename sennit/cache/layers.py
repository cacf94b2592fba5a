"""Which layers a cache has, which of them own keys and values, and which owners store alike and share page tables."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from sennit.cache.demand import is_integer
from sennit.errors import InvalidInput
from sennit.spec import AttentionSpec

__all__ = ["CacheLayers", "Layer", "read_layers"]

STORED = ("num_kv_heads", "head_dim_qk", "head_dim_vo", "kv_dtype", "latent")  # what a page of a layer looks like
KEPT = ("window_left", "num_sink_tokens")  # which pages a layer needs


@dataclass(frozen=True)
class Layer:
    """One layer of a cache."""

    index: int  # the caller's, global over pipeline stages
    spec: AttentionSpec
    owner: int  # index of the layer whose keys and values it reads; its own where it stores them
    group: int  # of the owner
    pool: int  # the owner's place among the owners of the group

    @property
    def owns(self) -> bool:
        """Whether it stores keys and values."""
        return self.owner == self.index


@dataclass(frozen=True)
class CacheLayers:
    """The layers of a cache.

    >>> import torch
    >>> full = AttentionSpec(num_qo_heads=4, num_kv_heads=2, head_dim=8, dtype=torch.float32)
    >>> local = full.replace(window_left=15)
    >>> layers = read_layers([local, local, full, full], layers=range(8, 12), kv_owner={11: 10})
    >>> [(layer.index, layer.owner, layer.group, layer.pool) for layer in layers]
    [(8, 8, 0, 0), (9, 9, 0, 1), (10, 10, 1, 0), (11, 10, 1, 0)]
    >>> layers.group_names
    ('layers 8-9 with window_left=15', 'layers 10-11')
    """

    indices: range  # of the layers, global over pipeline stages
    entries: tuple[Layer, ...]
    owners: tuple[tuple[Layer, ...], ...] = field(init=False)  # of each group

    def __post_init__(self) -> None:
        groups = range(1 + max(layer.group for layer in self.entries))
        owners = tuple(
            tuple(layer for layer in self.entries if layer.owns and layer.group == group) for group in groups
        )
        object.__setattr__(self, "owners", owners)

    def __iter__(self) -> Iterator[Layer]:
        return iter(self.entries)

    def position(self, index: object) -> int:
        """Which of the entries has a global index. Raises :class:`InvalidInput`."""
        first, last = self.indices[0], self.indices[-1]
        if not is_integer(index) or not first <= index <= last:
            raise InvalidInput("layer", expected=f"an integer from {first} to {last}", got=repr(index))
        return index - first

    @property
    def group_names(self) -> tuple[str, ...]:
        """The layers of each group, in words."""
        members = [[layer.index for layer in self.entries if layer.group == group] for group in range(len(self.owners))]
        return tuple(
            f"layer{'s' * (len(indices) > 1)} {_ranges(indices)}{_window(owners[0].spec)}"
            for indices, owners in zip(members, self.owners, strict=True)
        )


def read_layers(specs: Sequence[AttentionSpec], *, layers: object, kv_owner: object) -> CacheLayers:
    """Read what a cache is told of its layers.

    Args:
        specs: one a layer.
        layers: their global indices, a range of step 1; None: from 0.
        kv_owner: the owner of each layer that reads another's keys and values; None: there are no such layers.

    Raises:
        InvalidInput: not specs, or none; no range, or one of another size; or a layer and its owner do not fit.
    """
    specs = _read_specs(specs)
    indices = _read_range(layers, len(specs))
    owner_of = _read_owners(kv_owner, indices)
    by_index = dict(zip(indices, specs, strict=True))
    for index, owner in owner_of.items():
        _check_owner(index, by_index[index], owner, by_index[owner])
    groups: dict[tuple[Any, ...], list[int]] = {}  # owners by what they store
    for index, spec in by_index.items():
        if index not in owner_of:
            groups.setdefault(tuple(getattr(spec, name) for name in STORED + KEPT), []).append(index)
    places = {index: (g, pool) for g, owners in enumerate(groups.values()) for pool, index in enumerate(owners)}
    owned = ((index, spec, owner_of.get(index, index)) for index, spec in by_index.items())
    return CacheLayers(indices, tuple(Layer(index, spec, owner, *places[owner]) for index, spec, owner in owned))


def _read_specs(specs: object) -> tuple[AttentionSpec, ...]:
    if isinstance(specs, AttentionSpec) or not isinstance(specs, Iterable):
        raise InvalidInput(
            "specs", expected="a list with one spec a layer", got=type(specs).__name__, hint="[spec] * 32"
        )
    given = tuple(specs)
    if not given or not all(isinstance(spec, AttentionSpec) for spec in given):
        names = ", ".join(sorted({type(spec).__name__ for spec in given})) or "none"
        raise InvalidInput("specs", expected="AttentionSpecs, one a layer", got=names)
    return given


def _read_range(layers: object, count: int) -> range:
    if layers is None:
        return range(count)
    if not isinstance(layers, range) or layers.step != 1 or layers.start < 0:
        raise InvalidInput("layers", expected="a range of step 1", got=repr(layers), hint="range(8, 16)")
    if (given := max(layers.stop - layers.start, 0)) != count:
        raise InvalidInput(
            "layers", expected=f"as many layers as there are specs, {count}", got=f"{given} in {layers!r}",
            hint="specs has one entry for each layer of the range",
        )  # fmt: skip
    return layers


def _read_owners(kv_owner: object, indices: range) -> dict[int, int]:
    if kv_owner is None:
        return {}
    if not isinstance(kv_owner, Mapping):
        raise InvalidInput("kv_owner", expected="a dictionary, layer to owner", got=type(kv_owner).__name__)
    for pair in kv_owner.items():
        for index in pair:
            if not is_integer(index) or index not in indices:
                raise InvalidInput(
                    "kv_owner", expected=f"layers from {indices[0]} to {indices[-1]}", got=f"{pair[0]!r}: {pair[1]!r}",
                    hint="a layer and its owner are in one pipeline stage",
                )  # fmt: skip
    owners = {int(index): int(owner) for index, owner in kv_owner.items()}
    for index, owner in owners.items():
        if owner in owners:
            raise InvalidInput(
                f"kv_owner[{index}]", expected="a layer with keys and values of its own", got=f"layer {owner}",
                hint="name the layer that stores them" if owner == index else f"name layer {owners[owner]}",
            )  # fmt: skip
    return owners


def _check_owner(index: int, spec: AttentionSpec, owner: int, stored: AttentionSpec) -> None:
    """Refuse an owner that stores something else, or lets go of what the layer still sees."""
    for name in STORED:
        if (ours := getattr(spec, name)) != (theirs := getattr(stored, name)):
            raise InvalidInput(
                f"kv_owner[{index}]", expected=f"an owner with {name}={ours}, as layer {index} has",
                got=f"layer {owner} with {theirs}",
            )  # fmt: skip
    if stored.window_left is None:
        return
    if spec.window_left is None or spec.window_left > stored.window_left:
        got, wanted = f"window_left={stored.window_left}", f"window_left={spec.window_left}"
    elif spec.num_sink_tokens > stored.num_sink_tokens:
        got, wanted = f"num_sink_tokens={stored.num_sink_tokens}", f"num_sink_tokens={spec.num_sink_tokens}"
    else:
        return
    raise InvalidInput(
        f"kv_owner[{index}]", expected=f"an owner that keeps all that layer {index} sees, with {wanted}",
        got=f"layer {owner} with {got}", hint="pages behind the owner's window go back to the pool",
    )  # fmt: skip


def _ranges(indices: Sequence[int]) -> str:
    """Ascending integers in words: ``0-4, 6``."""
    breaks = [i for i, (one, other) in enumerate(pairwise(indices), start=1) if other != one + 1]
    runs = [indices[i:j] for i, j in pairwise([0, *breaks, len(indices)])]
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


def _window(spec: AttentionSpec) -> str:
    sinks = f" and num_sink_tokens={spec.num_sink_tokens}" if spec.num_sink_tokens else ""
    return "" if spec.window_left is None else f" with window_left={spec.window_left}{sinks}"
