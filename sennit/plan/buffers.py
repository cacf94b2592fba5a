"""Buffers of fixed capacity and address, so that one captured CUDA graph serves every plan that fits them."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

from sennit.errors import CapacityExceeded
from sennit.plan.cost import KernelConfig
from sennit.plan.deal import MOST_BANDS
from sennit.plan.integers import INT32_MAX
from sennit.plan.tensors import Int32Array, Layout
from sennit.spec import checked_integer

__all__ = ["PlanBuffers"]


@dataclass(eq=False)
class PlanBuffers:
    """Room for one plan at a time; made by ``BatchAttention.buffers``, given to ``plan(into=...)``.

    Attributes:
        owner: the ``BatchAttention`` that they belong to.
        backend: name of the backend of every plan in them.
        config: configuration of every plan in them.
        max_requests: requests of a batch.
        max_rows: query rows.
        max_pages: page table entries of all requests together.
        max_tree_nodes: pending tokens of one request's tree.
        layout: rows that each section has room for.
        max_partial_rows: rows of partial results that launches reserve.
        generation: how many plans have been written.
    """

    owner: str
    backend: str
    config: KernelConfig
    max_requests: int
    max_rows: int
    max_pages: int
    max_tree_nodes: int
    layout: Layout
    max_partial_rows: int
    device_array: torch.Tensor
    generation: int = 0
    host_array: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.host_array = (
            self.device_array
            if self.device_array.device.type == "cpu"
            else torch.zeros_like(self.device_array, device="cpu")
        )

    @classmethod
    def allocate(
        cls,
        *,
        owner: str,
        backend: str,
        config: KernelConfig,
        group_size: int,
        num_kv_heads: int,
        max_requests: int,
        max_tokens: int,
        max_pages: int,
        max_tree_nodes: int,
        device: torch.device,
    ) -> PlanBuffers:
        """Reserve room for every plan of at most these sizes.

        A strand has at most one range of the line a tile, or a band of it where these are dealt, and a worker; a cut
        adds at most two partial items. Fixed splits may need more; a plan that does not fit is refused.
        """
        for name, value in (("max_requests", max_requests), ("max_tokens", max_tokens), ("max_pages", max_pages)):
            checked_integer(name, value, minimum=1)
        checked_integer("max_tree_nodes", max_tree_nodes, minimum=0)
        ranges = config.num_workers * len(config.strands)
        tiles = [max_requests + max_tokens * group_size // strand.tile_rows for strand in config.strands]
        bands = [
            min((num_kv_heads // strand.heads - 1) * count, MOST_BANDS * config.num_workers)
            for count, strand in zip(tiles, config.strands, strict=True)
            if strand.dealt
        ]
        layout = Layout(
            segments=max_requests,
            items=max(tiles) + sum(bands) + 3 * ranges,
            merges=config.max_merges,
            strands=len(config.strands),
            workers=config.num_workers,
            trees=max_requests * max_tree_nodes + max_tokens * -(-max_tree_nodes // 32),
            table=max_pages,
        )
        if layout.offsets[-1] > INT32_MAX:
            raise CapacityExceeded(f"buffers: {layout.offsets[-1]} words are more than an index of 32 bits reaches")
        try:
            array = torch.zeros(layout.offsets[-1], dtype=torch.int32, device=device)
        except RuntimeError as error:
            raise CapacityExceeded(
                f"buffers: {4 * layout.offsets[-1]} bytes could not be had on {device} ({str(error).splitlines()[0]}); "
                "ask for fewer requests, tokens or pages"
            ) from error
        return cls(
            owner=owner,
            backend=backend,
            config=config,
            max_requests=max_requests,
            max_rows=max_tokens,
            max_pages=max_pages,
            max_tree_nodes=max_tree_nodes,
            layout=layout,
            max_partial_rows=config.max_partial_rows,
            device_array=array,
        )

    def check(self, needed: Layout, num_rows: int, num_partial_rows: int) -> None:
        """Raise CapacityExceeded, naming every size that is too large."""
        sizes = {
            "max_requests": (needed.segments, self.max_requests),
            "max_tokens": (num_rows, self.max_rows),
            "max_pages": (needed.table, self.max_pages),
            "words of trees (max_tree_nodes)": (needed.trees, self.layout.trees),
            "work items": (needed.items, self.layout.items),
            "merges": (needed.merges, self.layout.merges),
            "partial rows": (num_partial_rows, self.max_partial_rows),
        }
        over = [f"{name}: {need} needed, {room} there" for name, (need, room) in sizes.items() if need > room]
        if over:
            raise CapacityExceeded(
                f"into: the batch does not fit these buffers ({'; '.join(over)}); nothing was written; "
                "make larger ones with BatchAttention.buffers(...)"
            )

    def write(self, array: Int32Array) -> None:
        """Replace the contents; the copy to a device starts from memory of its own, never from ``host_array``."""
        self.generation += 1
        host: Int32Array = self.host_array.numpy()
        host[: array.size] = array
        if self.device_array is not self.host_array:
            staged = torch.from_numpy(np.ascontiguousarray(array)).pin_memory()
            self.device_array[: array.size].copy_(staged, non_blocking=True)
