"""FlashInfer's ways to compute a step's attention as peers, each over the same pages as Sennit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch

from sennit.bench.flashinfer_modules import DTYPES, LATENT_DIMS, XQA_PAGE_SIZES
from sennit.bench.host import installed_version
from sennit.bench.instruments import Absent, Peer, Prepared
from sennit.check.problems import Problem
from sennit.errors import UnsupportedFeature
from sennit.spec import AttentionSpec

__all__ = ["find_flashinfer"]

NAME = "FlashInfer"
MISSING = "not installed: pip install flashinfer-python (0.6.13 is tested)"
WORKSPACE_BYTES = 512 * 2**20


def find_flashinfer() -> list[Peer | Absent]:
    """All of them; one that is absent where FlashInfer is not installed."""
    if find_spec("flashinfer") is None:
        return [Absent(NAME, MISSING)]
    version = installed_version("flashinfer-python", "flashinfer")
    ways: dict[str, Callable[[Problem], Prepared]] = {
        "prefill FA2": partial(_prefill, backend="fa2"),
        "prefill FA3": partial(_prefill, backend="fa3"),
        "decode": _decode,
        "XQA": _xqa,
        "BatchAttention": _batch_attention,
        "decode then FA3": partial(_both, streams=1),
        "decode beside FA3": partial(_both, streams=2),
        "batch POD": _batch_pod,
        "MLA FA2": partial(_latent, backend="fa2"),
        "MLA FA3": partial(_latent, backend="fa3"),
    }
    return [Peer(f"{NAME} {version} {name}", prepare) for name, prepare in ways.items()]


def _prefill(problem: Problem, *, backend: str) -> Prepared:
    _check_plain(problem)
    part = Part.of(problem)
    return Prepared(_planned_prefill(part, backend), f"BatchPrefillWithPagedKVCacheWrapper, {backend}")


def _decode(problem: Problem) -> Prepared:
    _check_plain(problem)
    _check_decode(problem)
    return Prepared(_planned_decode(Part.of(problem)), "BatchDecodeWithPagedKVCacheWrapper, tensor cores")


def _batch_attention(problem: Problem) -> Prepared:
    _check_plain(problem)
    part, spec = Part.of(problem), problem.spec
    wrapper = _flashinfer().BatchAttention(problem.kv_layout, device=str(part.q.device))
    wrapper.plan(
        part.qo_indptr, part.kv_indptr, part.kv_indices, part.kv_lens, spec.num_qo_heads, spec.num_kv_heads,
        spec.head_dim_qk, spec.head_dim_vo, problem.page_size, causal=True, sm_scale=problem.sm_scale,
        q_data_type=spec.dtype, kv_data_type=spec.kv_dtype,
    )  # fmt: skip
    out = part.new_out()
    return Prepared(lambda: wrapper.run(part.q, problem.kv, out=out), "", lambda found: found[0])


def _xqa(problem: Problem) -> Prepared:
    _check_plain(problem)
    _check_decode(problem)
    if problem.page_size not in XQA_PAGE_SIZES:
        raise UnsupportedFeature("page_size", f"XQA takes one of {XQA_PAGE_SIZES}")
    part = Part.of(problem)
    counts = part.kv_indptr.diff().tolist()
    tables = torch.zeros(len(counts), max(counts), dtype=torch.int32)
    for row, pages in zip(tables, torch.split(part.kv_indices.cpu(), counts), strict=True):
        row[: len(pages)] = pages
    run = partial(
        import_module("flashinfer.decode").xqa_batch_decode_with_kv_cache,
        part.q,
        problem.kv,
        torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=part.q.device),  # it counts in there, from 0
        tables.to(part.q.device),
        part.kv_lens.view(torch.uint32),
        int(part.kv_lens.max()),
        bmm1_scale=problem.sm_scale,
        bmm2_scale=1.0,
        out=part.new_out(),
        kv_layout=problem.kv_layout,
    )
    return Prepared(run, "xqa_batch_decode_with_kv_cache")


def _both(problem: Problem, *, streams: int) -> Prepared:
    """Decode and prefill wrappers, one after the other on one stream, or side by side on two."""
    _check_plain(problem)
    narrow, wide = _two_parts(problem)
    decode, prefill = _planned_decode(narrow), _planned_prefill(wide, "fa3")
    note, collect = f"two wrappers on {streams} stream{'s' * (streams > 1)}", partial(_collect, narrow, wide)
    if streams == 1:
        return Prepared(lambda: (decode(), prefill()), note, collect)
    second = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def run() -> tuple[torch.Tensor, torch.Tensor]:
        current = torch.cuda.current_stream()
        second.wait_stream(current)
        with torch.cuda.stream(second):
            wide_out = prefill()
        narrow_out = decode()
        current.wait_stream(second)
        return narrow_out, wide_out

    return Prepared(run, note, collect)


def _batch_pod(problem: Problem) -> Prepared:
    _check_plain(problem)
    narrow, wide = _two_parts(problem)
    spec = problem.spec
    wrapper = _flashinfer().BatchPODWithPagedKVCacheWrapper(_workspace(wide), problem.kv_layout)
    wrapper.plan(
        wide.qo_indptr, wide.kv_indptr, wide.kv_indices, wide.last_page_lens,
        narrow.qo_indptr, narrow.kv_indptr, narrow.kv_indices, narrow.last_page_lens,
        spec.num_qo_heads, spec.num_kv_heads, spec.head_dim_qk, problem.page_size,
        sm_scale=problem.sm_scale, q_data_type=spec.dtype, kv_data_type=spec.kv_dtype,
    )  # fmt: skip
    run = partial(wrapper.run, wide.q, problem.kv, narrow.q, problem.kv, causal_p=True)
    return Prepared(run, "BatchPODWithPagedKVCacheWrapper", lambda found: _collect(narrow, wide, (found[1], found[0])))


def _latent(problem: Problem, *, backend: str) -> Prepared:
    spec = problem.spec
    if not spec.latent or (spec.head_dim_qk, spec.head_dim_vo) != LATENT_DIMS:
        raise UnsupportedFeature("latent", f"this wrapper is for latents of {LATENT_DIMS} columns")
    _check_common(spec)
    part = Part.of(problem)
    wrapper = import_module("flashinfer.mla").BatchMLAPagedAttentionWrapper(_workspace(part), backend=backend)
    columns, rest = spec.head_dim_vo, spec.head_dim_qk - spec.head_dim_vo
    wrapper.plan(
        part.qo_indptr, part.kv_indptr, part.kv_indices, part.kv_lens, spec.num_qo_heads, columns, rest,
        problem.page_size, True, problem.sm_scale, spec.dtype, spec.kv_dtype,
    )  # fmt: skip
    split = [
        tensor.contiguous() for whole in (part.q, problem.kv) for tensor in torch.split(whole, [columns, rest], dim=-1)
    ]
    run = partial(wrapper.run, *split, out=part.new_out())
    return Prepared(run, f"BatchMLAPagedAttentionWrapper, {backend}, latents and positions in tensors of their own")


def _flashinfer() -> Any:
    return import_module("flashinfer")


def _check_plain(problem: Problem) -> None:
    if problem.spec.latent:
        raise UnsupportedFeature("latent", "this wrapper has keys and values")
    _check_common(problem.spec)


def _check_common(spec: AttentionSpec) -> None:
    if spec.features:
        raise UnsupportedFeature(", ".join(sorted(spec.features)), "measured without masks and functions only")
    if spec.dtype not in DTYPES:
        raise UnsupportedFeature("dtype", f"FlashInfer's kernels with tensor cores do not take {spec.dtype}")


def _check_decode(problem: Problem) -> None:
    if (problem.batch.q_lens != 1).any():
        raise UnsupportedFeature("batch", "it decodes one new token of every request")


@dataclass(frozen=True)
class Part:
    """Some requests of a problem as FlashInfer takes them: int32 on the device, since it reads int64 as if it were."""

    problem: Problem
    rows: torch.Tensor  # int64, of the query tensor
    q: torch.Tensor  # those rows
    qo_indptr: torch.Tensor
    kv_indptr: torch.Tensor
    kv_indices: torch.Tensor
    kv_lens: torch.Tensor
    last_page_lens: torch.Tensor

    @classmethod
    def of(cls, problem: Problem, chosen: Sequence[bool] | np.ndarray[Any, Any] | None = None) -> Part:
        """The requests that are chosen; all of them for None."""
        batch, size = problem.batch, problem.page_size
        assert batch.pages is not None
        assert size is not None
        if (batch.kv_lens < 1).any() or (batch.q_lens < 1).any():
            raise UnsupportedFeature("batch", "every request of FlashInfer has new tokens and keys")
        kept = np.flatnonzero(np.ones(batch.num_requests, bool) if chosen is None else chosen)
        q_lens, kv_lens = batch.q_lens[kept], batch.kv_lens[kept]
        counts, starts = batch.pages_needed(size)[kept], batch.pages.starts[kept]
        entries = np.asarray(batch.pages.entries)
        pages = [entries[start : start + count] for start, count in zip(starts, counts, strict=True)]
        rows = [np.arange(start, start + count) for start, count in zip(batch.q_starts[kept], q_lens, strict=True)]
        device = problem.q.device

        def sent(values: np.ndarray[Any, Any]) -> torch.Tensor:
            return torch.tensor(values.tolist(), dtype=torch.int32, device=device)

        at = torch.from_numpy(np.concatenate(rows)).to(device)
        return cls(
            problem=problem,
            rows=at,
            q=problem.q[at],
            qo_indptr=sent(np.append(0, q_lens.cumsum())),
            kv_indptr=sent(np.append(0, counts.cumsum())),
            kv_indices=sent(np.concatenate(pages)),
            kv_lens=sent(kv_lens),
            last_page_lens=sent((kv_lens - 1) % size + 1),
        )

    def new_out(self) -> torch.Tensor:
        """``[rows, num_qo_heads, head_dim_vo]``, in which nothing has been computed yet."""
        spec = self.problem.spec
        return self.q.new_zeros(len(self.rows), spec.num_qo_heads, spec.head_dim_vo)


def _two_parts(problem: Problem) -> tuple[Part, Part]:
    """The requests with one new token, and those with more."""
    narrow = problem.batch.q_lens == 1
    if narrow.all() or not narrow.any():
        raise UnsupportedFeature("batch", "it is for batches that hold requests with one new token and with more")
    return Part.of(problem, narrow), Part.of(problem, ~narrow)


def _collect(narrow: Part, wide: Part, found: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    out = torch.empty_like(narrow.problem.q)
    for part, rows in zip((narrow, wide), found, strict=True):
        out[part.rows] = rows
    return out


def _planned_prefill(part: Part, backend: str) -> Callable[[], torch.Tensor]:
    problem, spec = part.problem, part.problem.spec
    wrapper = _flashinfer().BatchPrefillWithPagedKVCacheWrapper(_workspace(part), problem.kv_layout, backend=backend)
    wrapper.plan(
        part.qo_indptr, part.kv_indptr, part.kv_indices, part.last_page_lens, spec.num_qo_heads, spec.num_kv_heads,
        spec.head_dim_qk, problem.page_size, causal=True, sm_scale=problem.sm_scale, q_data_type=spec.dtype,
        kv_data_type=spec.kv_dtype,
    )  # fmt: skip
    return partial(wrapper.run, part.q, problem.kv, out=part.new_out())


def _planned_decode(part: Part) -> Callable[[], torch.Tensor]:
    problem, spec = part.problem, part.problem.spec
    wrapper = _flashinfer().BatchDecodeWithPagedKVCacheWrapper(
        _workspace(part), problem.kv_layout, use_tensor_cores=True
    )
    wrapper.plan(
        part.kv_indptr, part.kv_indices, part.last_page_lens, spec.num_qo_heads, spec.num_kv_heads, spec.head_dim_qk,
        problem.page_size, sm_scale=problem.sm_scale, q_data_type=spec.dtype, kv_data_type=spec.kv_dtype,
    )  # fmt: skip
    return partial(wrapper.run, part.q, problem.kv, out=part.new_out())


def _workspace(part: Part) -> torch.Tensor:
    return torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=part.q.device)
