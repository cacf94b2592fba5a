"""A step as the caller describes it: lengths and page tables, or packed tensors, of a batch of requests."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from sennit.errors import InvalidInput
from sennit.plan.grammar import format_lengths, parse_lengths
from sennit.plan.integers import INT32_MAX, IntArray, host_integers, on_device
from sennit.spec import checked_integer

__all__ = ["Batch", "PageTable"]

Int64Array = npt.NDArray[np.int64]

MAX_PARSED_PAGES = 2**27  # a request of 2**31 - 1 keys in pages of 16; page ids are then half a gigabyte
LENGTH_HINT = "lengths are host integers: keep a copy on the CPU, or give upper bounds and kv_lens_device"


@dataclass(frozen=True, eq=False)
class PageTable:
    """Page ids of all requests in one array: request ``r`` reads ``entries[starts[r] : starts[r] + widths[r]]``."""

    entries: IntArray | torch.Tensor  # [entries]; a NumPy array, or an int32 tensor on a device
    starts: Int64Array  # [num_requests]
    widths: Int64Array  # [num_requests]; entries beyond the visible keys are never read

    def __post_init__(self) -> None:
        # Not the entries: plans on the CPU wrap them in a tensor, and PyTorch warns of read-only memory.
        _freeze(self, "starts", "widths")


@dataclass(frozen=True, eq=False, repr=False)
class Batch:
    """A batch of requests; made by :meth:`csr`, :meth:`padded`, :meth:`ragged` or :meth:`parse`.

    Its starts and lengths are read-only, so that a plan goes on saying what it was made for.

    Attributes:
        q_starts: int64 ``[num_requests]``, first query row of each request.
        q_lens: int64 ``[num_requests]``, query rows (new tokens) of each.
        kv_lens: int64 ``[num_requests]``, keys visible to each, the new tokens included; upper bounds with
            ``kv_lens_device``, which must not exceed them.
        pages: the page table, or None where keys and values are packed tensors.
        kv_starts: int64 ``[num_requests]``, first row of each in packed keys and values, or None.
        kv_lens_device: int32 ``[num_requests]`` tensor of exact lengths, or None where ``kv_lens`` are exact.
        slot_mapping: int64 ``[rows]``, slot ``page * page_size + offset`` of every row for ``append``, -1 to skip one;
            None derives them from the page table.
    """

    q_starts: Int64Array
    q_lens: Int64Array
    kv_lens: Int64Array
    pages: PageTable | None = None
    kv_starts: Int64Array | None = None
    kv_lens_device: torch.Tensor | None = None
    slot_mapping: IntArray | torch.Tensor | None = None

    def __post_init__(self) -> None:
        if (self.pages is None) == (self.kv_starts is None):
            raise InvalidInput(
                "Batch", expected="either pages or kv_starts", got="neither" if self.pages is None else "both",
                hint="make batches with Batch.csr, Batch.padded, Batch.ragged or Batch.parse, which check them",
            )  # fmt: skip
        _freeze(self, "q_starts", "q_lens", "kv_lens", *(() if self.kv_starts is None else ("kv_starts",)))

    @classmethod
    def csr(
        cls,
        *,
        qo_indptr: Any,
        kv_lens: Any,
        kv_indptr: Any,
        kv_indices: Any,
        qo_starts: Any = None,
        kv_lens_device: torch.Tensor | None = None,
        slot_mapping: Any = None,
    ) -> Batch:
        """Page tables in compressed rows, FlashInfer's form.

        Args:
            qo_indptr: ``[num_requests + 1]``, query rows of request ``r`` are ``qo_indptr[r] : qo_indptr[r + 1]``.
            kv_lens: ``[num_requests]``, keys visible to each request.
            kv_indptr: ``[num_requests + 1]``, the same for ``kv_indices``.
            kv_indices: page ids, on the host or an int32 device tensor.
            qo_starts: ``[num_requests]``, explicit first query rows; ``qo_indptr`` then only gives lengths.
            kv_lens_device: exact lengths where ``kv_lens`` are upper bounds.
            slot_mapping: explicit slots for ``append``.

        Raises:
            InvalidInput: an argument has a wrong dtype, shape or order.

        >>> Batch.csr(qo_indptr=[0, 3, 4], kv_lens=[3, 20], kv_indptr=[0, 1, 3], kv_indices=[7, 2, 5])
        Batch(3@3 + 1@20, 3 page entries)
        """
        q_starts, q_lens = _rows("qo_indptr", qo_indptr, "qo_starts", qo_starts)
        table_starts, widths = _extents("kv_indptr", kv_indptr)
        _check_count("kv_indptr", len(widths), len(q_lens), "num_requests + 1 entries, as qo_indptr has")
        entries = _in_a_row(_page_ids("kv_indices", kv_indices, ndim=1))
        if len(widths) and table_starts[-1] + widths[-1] > entries.shape[0]:
            raise InvalidInput(
                "kv_indices",
                expected=f"at least kv_indptr[-1] = {table_starts[-1] + widths[-1]} entries",
                got=entries.shape[0],
            )
        table = PageTable(entries, table_starts, widths)
        return cls._paged(q_starts, q_lens, "kv_lens", kv_lens, table, kv_lens_device, slot_mapping)

    @classmethod
    def padded(
        cls,
        *,
        query_start_loc: Any,
        seq_lens: Any,
        block_table: Any,
        qo_starts: Any = None,
        kv_lens_device: torch.Tensor | None = None,
        slot_mapping: Any = None,
    ) -> Batch:
        """Page tables as a padded matrix, vLLM's form.

        Args:
            query_start_loc: ``[num_requests + 1]``, see ``qo_indptr`` of :meth:`csr`.
            seq_lens: ``[num_requests]``, keys visible to each request.
            block_table: ``[num_requests, max_pages]`` page ids, on the host or an int32 device tensor; entries past a
                request's last page may hold anything.
            qo_starts, kv_lens_device, slot_mapping: as in :meth:`csr`.

        Raises:
            InvalidInput: an argument has a wrong dtype, shape or order.

        >>> Batch.padded(query_start_loc=[0, 3, 4], seq_lens=[3, 20], block_table=[[7, -1], [2, 5]])
        Batch(3@3 + 1@20, 4 page entries)
        """
        q_starts, q_lens = _rows("query_start_loc", query_start_loc, "qo_starts", qo_starts)
        table = _page_ids("block_table", block_table, ndim=2)
        rows, width = table.shape
        _check_count("block_table", rows, len(q_lens), "num_requests rows, as query_start_loc has")
        stride = width
        if isinstance(table, torch.Tensor) and table.numel() and table.stride(1) == 1:
            # A column slice of a larger table is addressed in place: an engine may rewrite it between launches.
            stride = table.stride(0)
            flat: IntArray | torch.Tensor = table.as_strided(((rows - 1) * stride + width,), (1,))
        else:
            flat = _in_a_row(table.reshape(-1))
        starts = np.arange(rows, dtype=np.int64) * stride
        pages = PageTable(flat, starts, np.full(rows, width, np.int64))
        return cls._paged(q_starts, q_lens, "seq_lens", seq_lens, pages, kv_lens_device, slot_mapping)

    @classmethod
    def ragged(
        cls, *, qo_indptr: Any, kv_indptr: Any, kv_lens: Any = None, qo_starts: Any = None, kv_starts: Any = None
    ) -> Batch:
        """Keys and values in packed tensors, without pages: self- and cross-attention.

        Args:
            qo_indptr: ``[num_requests + 1]``, query rows of each request.
            kv_indptr: ``[num_requests + 1]``, key rows of each request.
            kv_lens: ``[num_requests]``, keys to use of each request's rows; all of them when left out.
            qo_starts: ``[num_requests]``, explicit first query rows (left-padded tensors); requests may not overlap.
            kv_starts: ``[num_requests]``, explicit first key rows; requests may share rows.

        Raises:
            InvalidInput: an argument has a wrong dtype, shape or order.

        >>> Batch.ragged(qo_indptr=[0, 3, 7], kv_indptr=[0, 3, 7])
        Batch(3@3 + 4@4, packed keys)
        """
        q_starts, q_lens = _rows("qo_indptr", qo_indptr, "qo_starts", qo_starts)
        starts, widths = _extents("kv_indptr", kv_indptr)
        _check_count("kv_indptr", len(widths), len(q_lens), "num_requests + 1 entries, as qo_indptr has")
        if kv_starts is not None:
            starts = _lengths("kv_starts", kv_starts, len(q_lens))
        lens = widths if kv_lens is None else _lengths("kv_lens", kv_lens, len(q_lens))
        if (lens > widths).any():
            r = int(np.argmax(lens > widths))
            raise InvalidInput(f"kv_lens[{r}]", expected=f"at most the {widths[r]} rows of its request", got=lens[r])
        if (starts > INT32_MAX - lens).any():
            r = int(np.argmax(starts > INT32_MAX - lens))
            raise InvalidInput(f"kv_starts[{r}]", expected=f"at most {INT32_MAX} - {lens[r]} key rows", got=starts[r])
        return cls(q_starts, q_lens, lens, kv_starts=starts)

    @classmethod
    def parse(cls, text: str, *, page_size: int) -> Batch:
        """A batch from its text (see :mod:`sennit.plan.grammar`), with consecutive page ids.

        Raises:
            InvalidInput: the text is none, or names more than 2**24 requests or 2**27 pages; ``page_size`` is not a
                positive integer.

        >>> Batch.parse("2*1@100 + 7@7", page_size=16)
        Batch(2*1@100 + 7@7, 15 page entries)
        """
        page_size = checked_integer("page_size", page_size, minimum=1)
        q_lens, kv_lens = parse_lengths(text)
        pages = -(-np.asarray(kv_lens, np.int64) // page_size)
        if pages.sum() > MAX_PARSED_PAGES:
            raise InvalidInput("batch", expected=f"at most {MAX_PARSED_PAGES} pages in all", got=int(pages.sum()))
        return cls.csr(
            qo_indptr=np.append(0, np.cumsum(q_lens, dtype=np.int64)),
            kv_lens=np.asarray(kv_lens, np.int64),
            kv_indptr=np.append(0, np.cumsum(pages)),
            kv_indices=np.arange(pages.sum(), dtype=np.int32),
        )

    @classmethod
    def _paged(
        cls,
        q_starts: Int64Array,
        q_lens: Int64Array,
        lens_name: str,
        lens: Any,
        pages: PageTable,
        kv_lens_device: torch.Tensor | None,
        slot_mapping: Any,
    ) -> Batch:
        kv_lens = _lengths(lens_name, lens, len(q_lens))
        if kv_lens_device is not None:
            _check_device_lengths(kv_lens_device, len(q_lens))
        if slot_mapping is not None:
            slot_mapping = _check_slots(slot_mapping, int((q_starts + q_lens).max(initial=0, where=q_lens > 0)))
        return cls(q_starts, q_lens, kv_lens, pages, None, kv_lens_device, slot_mapping)

    @classmethod
    def of_table(cls, q_lens: Int64Array, kv_lens: Int64Array, table: npt.NDArray[np.int32] | torch.Tensor) -> Batch:
        """Packed query rows over a padded page table, all of Sennit's own: nothing is checked, and nothing copied.

        Args:
            q_lens, kv_lens: int64 ``[num_requests]``.
            table: contiguous int32 ``[num_requests, max_pages]``.
        """
        rows, width = table.shape
        pages = PageTable(table.reshape(-1), np.arange(rows) * width, np.full(rows, width))
        return cls(q_lens.cumsum() - q_lens, q_lens, kv_lens, pages)

    @property
    def num_requests(self) -> int:
        """Requests in the batch, those without query rows included."""
        return len(self.q_lens)

    @cached_property
    def num_tokens(self) -> int:
        """Query rows of all requests together."""
        return int(self.q_lens.sum())

    @cached_property
    def num_rows(self) -> int:
        """Rows that the query tensor must at least have."""
        return int((self.q_starts + self.q_lens).max(initial=0, where=self.q_lens > 0))

    def pages_needed(self, page_size: int) -> Int64Array:
        """Pages that the visible keys of each request take, int64 ``[num_requests]``."""
        return -(-self.kv_lens // page_size)

    def __str__(self) -> str:
        return format_lengths(self.q_lens.tolist(), self.kv_lens.tolist())

    def __repr__(self) -> str:
        where = "packed keys" if self.pages is None else f"{self.pages.entries.shape[0]} page entries"
        return f"Batch({self}, {where})"


def _freeze(owner: object, *names: str) -> None:
    """Make arrays of a frozen dataclass read-only."""
    for name in names:
        value = getattr(owner, name)
        if not isinstance(value, np.ndarray) or value.dtype != np.int64 or value.ndim != 1:
            got = f"{value.dtype} {value.shape}" if isinstance(value, np.ndarray) else type(value).__name__
            raise InvalidInput(
                name, expected="an int64 array of one dimension", got=got,
                hint="make batches with Batch.csr, Batch.padded, Batch.ragged or Batch.parse, which convert",
            )  # fmt: skip
        value.setflags(write=False)


def _lengths(name: str, value: Any, count: int | None = None) -> Int64Array:
    lengths = host_integers(name, value, hint=LENGTH_HINT).astype(np.int64, copy=False)
    if count is not None:
        _check_count(name, len(lengths), count, "one entry a request")
    if lengths.size and not (lengths.min() >= 0 and lengths.max() <= INT32_MAX):
        r = int(np.argmax((lengths < 0) | (lengths > INT32_MAX)))
        raise InvalidInput(f"{name}[{r}]", expected=f"between 0 and {INT32_MAX}", got=int(lengths[r]))
    return lengths


def _extents(name: str, value: Any) -> tuple[Int64Array, Int64Array]:
    """Starts and lengths of the rows that an ``indptr`` array describes."""
    indptr = _lengths(name, value)
    if not len(indptr):
        raise InvalidInput(name, expected="num_requests + 1 entries", got="none", hint="an empty batch is [0]")
    if indptr[0] != 0:
        raise InvalidInput(f"{name}[0]", expected="0", got=int(indptr[0]), hint="explicit starts have an argument")
    lengths = np.diff(indptr)
    if lengths.size and lengths.min() < 0:
        r = int(np.argmax(lengths < 0))
        raise InvalidInput(
            f"{name}[{r + 1}]", expected=f"at least {name}[{r}] = {indptr[r]}", got=int(indptr[r + 1]),
            hint="offsets never go down",
        )  # fmt: skip
    return indptr[:-1], lengths


def _rows(name: str, indptr: Any, starts_name: str, explicit: Any) -> tuple[Int64Array, Int64Array]:
    """Query starts and lengths; explicit starts may leave gaps but not overlap, since rows are written."""
    starts, lengths = _extents(name, indptr)
    if explicit is None:
        return starts, lengths
    starts = _lengths(starts_name, explicit, len(lengths))
    used = np.flatnonzero(lengths)
    order = used[np.argsort(starts[used], kind="stable")]
    ends = starts[order] + lengths[order]
    if (ends[:-1] > starts[order][1:]).any():
        clash = int(np.argmax(ends[:-1] > starts[order][1:]))
        raise InvalidInput(
            f"{starts_name}[{order[clash + 1]}]",
            expected=f"rows that no other request has (request {order[clash]} ends at row {ends[clash]})",
            got=int(starts[order[clash + 1]]),
        )
    return starts, lengths


def _page_ids(name: str, value: Any, *, ndim: int) -> IntArray | torch.Tensor:
    if not on_device(value):
        return host_integers(name, value, ndim=ndim)
    tensor = _dense(name, value)
    if tensor.dtype not in (torch.int32, torch.int64) or tensor.dim() != ndim:
        raise InvalidInput(
            name,
            expected=f"{ndim} dimensions of int32 (or int64) on a device",
            got=f"{tensor.dtype} {tuple(tensor.shape)}",
        )
    return tensor.to(torch.int32)


def _in_a_row(entries: IntArray | torch.Tensor) -> IntArray | torch.Tensor:
    """Entries of a page table without gaps, as kernels read them on a device."""
    return entries.contiguous() if isinstance(entries, torch.Tensor) else entries


def _dense(name: str, value: Any) -> torch.Tensor:
    if not isinstance(value, torch.Tensor):
        raise InvalidInput(name, expected="a tensor", got=type(value).__name__)
    if value.is_nested or value.layout != torch.strided:
        raise InvalidInput(name, expected="a dense tensor", got="a nested one" if value.is_nested else value.layout)
    return value


def _check_count(name: str, got: int, expected: int, meaning: str) -> None:
    if got != expected:
        raise InvalidInput(name, expected=f"{meaning} ({expected} requests)", got=f"{got} requests")


def _check_device_lengths(lengths: object, count: int) -> None:
    tensor = _dense("kv_lens_device", lengths)
    if tensor.dtype != torch.int32 or tuple(tensor.shape) != (count,):
        raise InvalidInput(
            "kv_lens_device",
            expected=f"an int32 tensor of shape ({count},)",
            got=f"{tensor.dtype} {tuple(tensor.shape)}",
        )


def _check_slots(slots: Any, rows: int) -> IntArray | torch.Tensor:
    if on_device(slots):
        tensor = _dense("slot_mapping", slots)
        if tensor.dtype != torch.int64 or tensor.dim() != 1 or tensor.shape[0] < rows:
            raise InvalidInput(
                "slot_mapping", expected=f"int64 [rows >= {rows}]", got=f"{tensor.dtype} {tuple(tensor.shape)}"
            )
        if not tensor.is_contiguous():  # a copy would not be where a captured graph reads
            got = f"strides {tensor.stride()}"
            raise InvalidInput("slot_mapping", expected="slots without gaps", got=got, hint="call .contiguous()")
        return tensor
    array = host_integers("slot_mapping", slots).astype(np.int64, copy=False)
    if len(array) < rows:
        raise InvalidInput("slot_mapping", expected=f"a slot for each of {rows} query rows", got=f"{len(array)} slots")
    if array.size and array.min() < -1:
        raise InvalidInput("slot_mapping", expected="slots of at least 0, or -1 to skip", got=int(array.min()))
    return array
