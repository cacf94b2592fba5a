"""The memory of a cache: a layer group's keys and values in one allocation, and the page tables' copy on the device."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from sennit.cache.layout import StorageLayout, aligned
from sennit.cache.memory import allocate
from sennit.cache.tables import NO_PAGE, PageTables
from sennit.errors import CacheCorrupt

__all__ = ["KVStorage", "Pools", "TableMirror", "upload"]

Pools = tuple[torch.Tensor, torch.Tensor] | torch.Tensor


def upload(array: NDArray[Any], device: torch.device) -> torch.Tensor:
    """``array`` on ``device``, without waiting for the device. On the CPU the tensor shares the array's memory."""
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    # The caching host allocator keeps the pinned copy until the transfer is done.
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


class KVStorage:
    """Keys and values of a layer group: views of one allocation, never initialised (unused slots may hold anything).

    Attributes:
        layout: sizes and layout.
        num_pages: pages of each pool.
        buffer: the allocation, uint8.

    Raises:
        MemoryError: there is no room for it.
    """

    def __init__(self, layout: StorageLayout, num_pages: int, device: torch.device) -> None:
        self.layout = layout
        self.num_pages = num_pages
        with torch.inference_mode(False):  # inference tensors could not be written outside inference mode
            self.buffer = allocate(layout.total_bytes(num_pages), device)
            self._pools = self._make_pools()

    def _make_pools(self) -> list[Pools]:
        pools: list[Pools] = []
        start = 0
        for _ in range(self.layout.num_layers):
            views = []
            for page_shape, size in zip(self.layout.page_shapes, self.layout.pool_bytes(self.num_pages), strict=True):
                pool = self.buffer[start : start + size].view(self.layout.spec.kv_dtype)
                views.append(pool.view(self.num_pages, *page_shape))
                start += aligned(size)
            pools.append(views[0] if self.layout.spec.latent else (views[0], views[1]))
        return pools

    def pools(self, index: int) -> Pools:
        """The pools of the group's ``index``-th owner as views, in the form that :class:`BatchAttention` takes."""
        return self._pools[index]

    def read(self, index: int, pages: NDArray[np.int32], length: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Copies of the first ``length`` rows in ``pages``: keys, and values or None where the layer is latent.

        Rows in pages of -1 are NaN.
        """
        device = self.buffer.device
        held = upload(np.maximum(pages, 0), device)
        gone = upload(np.flatnonzero(np.repeat(pages == NO_PAGE, self.layout.page_size)[:length]), device)
        pools = self._pools[index]
        if isinstance(pools, torch.Tensor):
            return self._rows(pools, held, length, gone), None
        return self._rows(pools[0], held, length, gone), self._rows(pools[1], held, length, gone)

    def _rows(self, pool: torch.Tensor, held: torch.Tensor, length: int, gone: torch.Tensor) -> torch.Tensor:
        pages = pool.index_select(0, held)
        if pool.dim() == 4 and self.layout.kv_layout == "HND":
            pages = pages.transpose(1, 2)
        return pages.flatten(0, 1)[:length].index_fill_(0, gone, torch.nan)


class TableMirror:
    """The page tables' copy on a device, brought up to date by the cells that changed.

    Attributes:
        pages: int32 ``[groups, slots, capacity]``, as in :class:`PageTables`; cells that are not in use, or whose page
            has been released, may hold anything.
    """

    def __init__(self, device: torch.device) -> None:
        self.pages = torch.empty(0, 0, 0, dtype=torch.int32, device=device)

    def rows(self, tables: PageTables, slots: NDArray[np.int64], width: int) -> torch.Tensor:
        """``[groups, len(slots), width]`` int32: the first ``width`` pages of these rows, as they are now."""
        self.update(tables)
        return self.pages[:, :, :width].index_select(1, upload(slots, self.pages.device))

    def update(self, tables: PageTables) -> None:
        """Take over the cells that changed, or everything when the tables have grown."""
        device = self.pages.device
        with torch.inference_mode(False):  # see KVStorage
            if tuple(self.pages.shape) != tables.pages.shape:
                self.pages = upload(tables.pages.copy(), device)  # on the CPU, not the tables themselves
            elif len((cells := tables.dirty_cells())[0]):
                rows, cols = cells
                changed = upload(np.stack([rows, cols, *tables.pages[:, rows, cols]]), device)
                self.pages[:, changed[0], changed[1]] = changed[2:].to(torch.int32)
        tables.mark_clean()

    def check(self, tables: PageTables) -> None:
        """Raise :class:`CacheCorrupt` unless every page in use that has not changed since the last update is here."""
        if tuple(self.pages.shape) != tables.pages.shape:
            return
        known = np.arange(tables.pages.shape[2]) < tables.page_counts[:, None]
        known[tables.dirty_cells()] = False
        wrong = known & (tables.pages != NO_PAGE) & (self.pages.cpu().numpy() != tables.pages)
        if wrong.any():
            group, slot, column = np.argwhere(wrong)[0]
            raise CacheCorrupt(
                f"slot {slot}: page {column} on {self.pages.device} is not {tables.pages[group, slot, column]}"
            )
