"""Tile shapes of the kernels by layer and device, and the time that work takes on them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch

from sennit.backends.triton.variant import Tile, columns_of, value_columns
from sennit.plan.cost import KernelConfig, Strand
from sennit.spec import AttentionSpec

__all__ = ["Device", "TritonConfig", "device_of", "kernel_configs", "shared_memory"]


@dataclass(frozen=True)
class TritonConfig(KernelConfig):
    """A configuration, and how its kernel is compiled.

    Attributes:
        num_warps: of a worker.
        tiles: one a strand.
    """

    num_warps: int = 4
    tiles: tuple[Tile, ...] = ()


@dataclass(frozen=True)
class Device:
    """What decides tiles and times.

    Attributes:
        multiprocessors: SMs.
        shared_memory: bytes that one worker may have.
        hopper: it multiplies matrices out of shared memory.
    """

    multiprocessors: int
    shared_memory: int
    hopper: bool


H200 = Device(multiprocessors=132, shared_memory=232448, hopper=True)
INTERPRETER = Device(multiprocessors=3, shared_memory=232448, hopper=True)  # it runs worker after worker

SPLIT_TIME = 0.5  # microseconds: what a partial result takes beside its bytes


@dataclass(frozen=True)
class Shape:
    """A candidate: how it divides an SM, its tiles, and what an H200 does with it.

    Attributes:
        residency: workers an SM.
        num_warps: of each.
        wide, narrow: tiles of the strands; one may be missing.
        flops: of wide tiles, in a microsecond.
        item_times: microseconds that a worker takes for an item of each strand beside its steps: reading the plan and
            queries, filling pipelines, writing outputs.
        bytes: of scattered pages that are read in a microsecond.
    """

    residency: int
    num_warps: int
    wide: Tile | None
    narrow: Tile | None
    flops: float
    item_times: tuple[float, float] = (8.0, 11.0)
    bytes: float = 4.3e6


# In the order of preference: the first that fits also serves graphs and fixed splits.
SIXTEEN_BITS = (
    Shape(1, 8, Tile(128, 64, 3, bare_loop=True), Tile(16, 128, 4, bare_loop=False), flops=380e6),
    Shape(1, 8, Tile(128, 64, 2, bare_loop=True), Tile(16, 64, 4, bare_loop=False), flops=350e6),
    Shape(1, 8, Tile(64, 64, 2, bare_loop=True), Tile(16, 64, 3, bare_loop=False), flops=200e6),
    Shape(1, 4, Tile(64, 32, 2, bare_loop=True), Tile(16, 32, 3, bare_loop=False), flops=150e6),
    Shape(1, 4, Tile(16, 32, 2, bare_loop=True), None, flops=60e6),
    Shape(1, 4, Tile(16, 16, 1, bare_loop=True), None, flops=30e6),
)
# Beside the preferred one: two workers an SM hide each other's waits. Of equal times, the first is taken.
PAIRS = (
    Shape(2, 4, None, Tile(16, 64, 4, bare_loop=True), flops=320e6, item_times=(12.0, 5.0), bytes=4.0e6),
    Shape(
        2, 4, Tile(64, 64, 3, bare_loop=True), Tile(16, 64, 4, bare_loop=True), flops=320e6, item_times=(12.0, 5.0),
        bytes=4.0e6,
    ),
)  # fmt: skip
FLOATS = (
    Shape(1, 4, Tile(32, 32, 2, bare_loop=True), Tile(16, 32, 2, bare_loop=False), flops=20e6),
    Shape(1, 4, Tile(16, 16, 2, bare_loop=True), None, flops=10e6),
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
    buffers = tile.stages if hopper and tile.rows >= 64 and size == 2 else max(tile.stages - 1, 1)
    return size * (tile.rows * columns + buffers * tile.keys * row) + 1024


def is_sixteen_bits(spec: AttentionSpec) -> bool:
    """Whether tensor cores multiply queries, keys and values as they are."""
    return spec.dtype == spec.kv_dtype and spec.dtype.itemsize == 2


def fits(shape: Shape, spec: AttentionSpec, device: Device) -> bool:
    """Whether a shape's tiles have room in shared memory and registers."""
    room = (device.shared_memory - 1024 * (shape.residency - 1)) // shape.residency
    tiles = [tile for tile in (shape.wide, shape.narrow) if tile is not None]
    keys_are_values = spec.latent and is_sixteen_bits(spec)
    sums = value_columns(spec.head_dim_qk, spec.head_dim_vo, keys_are_values=keys_are_values).width
    return all(
        shared_memory(tile, spec, hopper=device.hopper) <= room
        and tile.rows * (sums + tile.keys) <= 144 * 32 * shape.num_warps
        for tile in tiles
    )


def kernel_configs(spec: AttentionSpec, device: Device) -> tuple[TritonConfig, ...]:
    """The configurations that fit a spec and a device, the preferred one first."""
    sixteen_bits = is_sixteen_bits(spec)
    shapes = SIXTEEN_BITS if sixteen_bits else FLOATS
    preferred = next((shape for shape in shapes if fits(shape, spec, device)), shapes[-1])
    pairs = [shape for shape in PAIRS if sixteen_bits and fits(shape, spec, device)]
    return tuple(_config(shape, spec, device) for shape in (preferred, *pairs))


def _config(shape: Shape, spec: AttentionSpec, device: Device) -> TritonConfig:
    tiles = tuple(tile for tile in (shape.wide, shape.narrow) if tile is not None)
    strands = tuple(_strand(tile, shape, spec) for tile in tiles)
    workers = shape.residency * device.multiprocessors
    name = "+".join(f"{tile.rows}x{tile.keys}" for tile in tiles)
    return TritonConfig(f"{name}-{workers}", strands, workers, num_warps=shape.num_warps, tiles=tiles)


def _strand(tile: Tile, shape: Shape, spec: AttentionSpec) -> Strand:
    """A worker has its share of an SM, and an SM does what one of an H200 does."""
    workers = H200.multiprocessors * shape.residency
    narrow = tile is shape.narrow
    columns = columns_of(spec.head_dim_qk).width + columns_of(spec.head_dim_vo).width
    flops = 2 * max(tile.rows, 64) * tile.keys * columns  # fewer rows take as long
    partial_rows = min(tile.rows, spec.group_size) if narrow else tile.rows  # written once and read once
    return Strand(
        "narrow" if narrow else "wide",
        tile.rows,
        tile.keys,
        item_time=shape.item_times[narrow],
        compute_time=flops / shape.flops * workers,
        memory_time=tile.keys * (spec.kv_bytes_per_token // spec.num_kv_heads) / shape.bytes * workers,
        split_time=SPLIT_TIME + partial_rows * spec.head_dim_vo * 8 / shape.bytes * workers,
    )
