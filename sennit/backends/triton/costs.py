"""Tile shapes of the kernels by layer and device, and the time that work takes on them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

import torch

from sennit.backends.base import Support
from sennit.backends.triton.variant import Tile, columns_of, value_columns
from sennit.plan.cost import KernelConfig, Strand
from sennit.spec import AttentionSpec

__all__ = ["Device", "TritonConfig", "device_of", "has_room", "kernel_configs", "possible_tile", "shared_memory"]


@dataclass(frozen=True)
class TritonConfig(KernelConfig):
    """A configuration, and how its kernels are compiled: ``tiles`` has one entry a strand."""

    tiles: tuple[Tile, ...] = ()


@dataclass(frozen=True)
class Device:
    """What decides tiles and times.

    Attributes:
        multiprocessors: SMs.
        shared_memory: bytes that one worker may have.
        hopper: it multiplies matrices out of shared memory, and a kernel can begin before another ends.
        interpreted: by Triton's interpreter, which runs worker after worker.
    """

    multiprocessors: int
    shared_memory: int
    hopper: bool
    interpreted: bool = False


H200 = Device(multiprocessors=132, shared_memory=232448, hopper=True)
INTERPRETER = Device(multiprocessors=3, shared_memory=232448, hopper=True, interpreted=True)

SPLIT_TIME = 0.5  # microseconds: what a partial result takes beside its bytes
BYTES = 4.3e6  # of scattered pages that an H200 reads in a microsecond
# How much more of the memory bus than its share a narrow worker can use.
HASTE = 1.7
FEW_ROWS = 32


@dataclass(frozen=True)
class Shape:
    """A tile, and what an H200 does with it.

    Attributes:
        tile: the tile.
        flops: in a microsecond, of the whole device.
        item_time: microseconds that a worker takes for an item beside its steps: reading the plan and queries, filling
            pipelines, writing outputs.
    """

    tile: Tile
    flops: float
    item_time: float


# In the order of preference: the first that fits is taken.
WIDE = (
    Shape(Tile(128, 64, 3, bare_loop=True, num_warps=8), flops=400e6, item_time=14.0),
    Shape(Tile(128, 64, 2, bare_loop=True, num_warps=8), flops=350e6, item_time=14.0),
    Shape(Tile(64, 64, 2, bare_loop=True, num_warps=8), flops=200e6, item_time=8.0),
    Shape(Tile(64, 32, 2, bare_loop=True), flops=150e6, item_time=8.0),
    Shape(Tile(16, 32, 2, bare_loop=True), flops=60e6, item_time=8.0),
    Shape(Tile(16, 16, 1, bare_loop=True), flops=30e6, item_time=8.0),
)
NARROW = (
    Shape(Tile(16, 64, 3, keys_first=True, residency=2), flops=320e6, item_time=5.0),
    Shape(Tile(16, 64, 2, keys_first=True, residency=2), flops=320e6, item_time=5.0),
    Shape(Tile(16, 64, 3, keys_first=True), flops=320e6, item_time=5.0),
    Shape(Tile(16, 64, 2, keys_first=True), flops=320e6, item_time=5.0),
    Shape(Tile(16, 32, 2), flops=100e6, item_time=8.0),
    Shape(Tile(16, 16, 1), flops=30e6, item_time=8.0),
)
# Keys that are values lie in shared memory once, as rows for one product and as columns for the other.
NARROW_LATENT = (
    Shape(Tile(16, 32, 3, residency=2), flops=320e6, item_time=8.0),
    Shape(Tile(16, 64, 3, num_warps=8), flops=320e6, item_time=8.0),
    *NARROW[-2:],
)
WIDE_FLOATS = (
    Shape(Tile(32, 32, 2, bare_loop=True), flops=20e6, item_time=8.0),
    Shape(Tile(16, 16, 2, bare_loop=True), flops=10e6, item_time=8.0),
)
NARROW_FLOATS = (
    Shape(Tile(16, 32, 2), flops=20e6, item_time=8.0),
    Shape(Tile(16, 16, 2), flops=10e6, item_time=8.0),
)


def device_of(device: torch.device) -> Device:
    """The numbers of a GPU, or of Triton's interpreter on a CPU."""
    return _properties(device.index or 0) if device.type == "cuda" else INTERPRETER


@cache
def _properties(index: int) -> Device:
    found = torch.cuda.get_device_properties(index)
    # A worker may have all of an SM but what the system takes of it.
    return Device(found.multi_processor_count, found.shared_memory_per_multiprocessor - 1024, found.major == 9)


def shared_memory(tile: Tile, spec: AttentionSpec, *, hopper: bool) -> int:
    """Bytes of shared memory that a tile takes: queries, and the keys and values of its pipeline's steps."""
    size = 2 if is_sixteen_bits(spec) else 4
    columns = columns_of(spec.head_dim_qk).width
    row = columns + (0 if spec.latent else columns_of(spec.head_dim_vo).width)
    # Products of wide tiles read keys in the background, so that their steps need a buffer more.
    multiplied = tile.keys if tile.keys_first else tile.rows
    buffers = tile.stages if hopper and multiplied >= 64 and size == 2 else max(tile.stages - 1, 1)
    # Warps that share 16 rows exchange their weights there, which Hopper's products read from a group's registers.
    exchanged = tile.rows * tile.keys if not hopper and 16 * tile.num_warps > tile.rows else 0
    return size * (tile.rows * columns + buffers * tile.keys * row + exchanged) + 1024


def is_sixteen_bits(spec: AttentionSpec) -> bool:
    """Whether tensor cores multiply queries, keys and values as they are."""
    return spec.dtype == spec.kv_dtype and spec.dtype.itemsize == 2


def fits(tile: Tile, spec: AttentionSpec, device: Device) -> bool:
    """Whether a tile has room in shared memory and registers."""
    room = (device.shared_memory - 1024 * (tile.residency - 1)) // tile.residency
    keys_are_values = spec.latent and is_sixteen_bits(spec)
    sums = value_columns(spec.head_dim_qk, spec.head_dim_vo, keys_are_values=keys_are_values).width
    return (
        shared_memory(tile, spec, hopper=device.hopper) <= room
        and tile.rows * (sums + tile.keys) <= 144 * 32 * tile.num_warps
    )


def has_room(spec: AttentionSpec, device: Device) -> Support:
    """Whether the smallest tiles of queries, keys and values fit into a multiprocessor's shared memory."""
    needed = shared_memory(NARROW[-1].tile, spec, hopper=device.hopper)
    if is_sixteen_bits(spec) and needed > device.shared_memory:
        dims = f"head dims {spec.head_dim_qk} and {spec.head_dim_vo}"
        return Support.no(f"{dims} need {needed} bytes of shared memory, of which there are {device.shared_memory}")
    return Support.yes()


def possible_tile(tile: Tile, spec: AttentionSpec, *, aligned: bool, looks_up: bool) -> Tile:
    """What to run in place of a tile where keys and values cannot all be copied ahead of the steps that need them.

    What Triton 3.6 multiplies out of a Hopper's shared memory is wrong in some cases where it did not come there by
    asynchronous copies: where only some of the operands did, and where values have few columns. Tiles of few rows are
    multiplied out of registers.

    Args:
        tile: the tile of a strand.
        spec: the layer.
        aligned: rows begin where Triton knows them to be aligned; it copies no others ahead, and no odd columns.
        looks_up: steps with masks look up a value for every row and key, which leaves no room for copies.

    >>> spec = AttentionSpec(num_qo_heads=1, num_kv_heads=1, head_dim=128, dtype=torch.bfloat16)
    >>> [possible_tile(WIDE[0].tile, spec, aligned=aligned, looks_up=True).rows for aligned in (True, False)]
    [128, 32]
    """
    aligned = aligned and spec.head_dim_qk % 2 == 0 and spec.head_dim_vo % 2 == 0
    ahead = aligned and not spec.captures
    if ahead and not looks_up:
        return tile
    columns = columns_of(spec.head_dim_vo)
    few = min(columns.main, columns.tail or columns.main) < 64
    rows = min(tile.rows, FEW_ROWS) if few or not aligned else tile.rows
    return replace(tile, rows=rows, stages=tile.stages if ahead else 1, keys_first=False)


def kernel_configs(spec: AttentionSpec, device: Device) -> tuple[TritonConfig]:
    """The configuration for a spec and a device: the widest tiles that fit, and narrow ones if those are not."""
    candidates: tuple[Sequence[Shape], Sequence[Shape]] = WIDE_FLOATS, NARROW_FLOATS
    if is_sixteen_bits(spec):
        candidates = WIDE, NARROW_LATENT if spec.latent else NARROW
    shapes = [next((shape for shape in some if fits(shape.tile, spec, device)), some[-1]) for some in candidates]
    if shapes[0].tile.rows <= shapes[1].tile.rows:
        shapes = shapes[:1]
    # Elsewhere than on Hopper products read keys and values from registers, of which keys as rows take too many.
    tiles = tuple(replace(shape.tile, keys_first=shape.tile.keys_first and device.hopper) for shape in shapes)
    overlapping = device.hopper and not device.interpreted
    num_workers = max(tile.residency for tile in tiles) * device.multiprocessors
    return (
        TritonConfig(
            "+".join(tile.name for tile in tiles) + f"-{num_workers}",
            tuple(_strand(shape, spec, device, narrow=shape is not shapes[0]) for shape in shapes),
            num_workers,
            "apart" if overlapping else "turns",
            tiles,
        ),
    )


def _strand(shape: Shape, spec: AttentionSpec, device: Device, *, narrow: bool) -> Strand:
    """A worker has its share of an SM, and an SM does what one of an H200 does."""
    tile = shape.tile
    share = H200.multiprocessors * tile.residency
    columns = columns_of(spec.head_dim_qk).width + columns_of(spec.head_dim_vo).width
    flops = 2 * max(tile.rows, 64) * tile.keys * columns  # fewer rows take as long
    partial_rows = min(tile.rows, spec.group_size) if narrow else tile.rows  # written once and read once
    return Strand(
        "narrow" if narrow else "wide",
        tile.rows,
        tile.keys,
        item_time=shape.item_time,
        compute_time=flops / shape.flops * share,
        memory_time=tile.keys * (spec.kv_bytes_per_token // spec.num_kv_heads) / BYTES * share,
        split_time=SPLIT_TIME + partial_rows * spec.head_dim_vo * 8 / BYTES * share,
        workers=tile.residency * device.multiprocessors,
        haste=HASTE if narrow else 1.0,
        dealt=0 if narrow else 1.1,
    )
