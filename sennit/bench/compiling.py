"""Compiles what GPU backends launch for GPUs that need not be here: layer by layer, in several processes."""

from __future__ import annotations

import pickle
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from threading import Event, Thread

import torch

from sennit import variants
from sennit.backends.base import Append, Attend
from sennit.backends.gpus import caching
from sennit.backends.gpus.launching import installed
from sennit.backends.hopper import configs as hopper
from sennit.backends.hopper.backend import HopperBackend
from sennit.backends.triton import costs as triton_costs
from sennit.backends.triton.backend import TritonBackend
from sennit.backends.triton.costs import Device
from sennit.bench.machine_code import CompiledKernel, Recorder
from sennit.env import triton_interpreted
from sennit.errors import BackendUnavailable, BuildFailed, InvalidInput
from sennit.jit.processes import Workers, processors
from sennit.plan.batch import Batch
from sennit.plan.cost import KernelConfig
from sennit.plan.mask import pack_mask
from sennit.plan.plan import Plan, make_plan
from sennit.plan.tensors import PlanArrays
from sennit.plan.tree import Tree
from sennit.spec import AttentionSpec

__all__ = [
    "ARCHITECTURES", "BACKENDS", "Layer", "Outcome", "attend_of", "compile_layers", "usual_layers",
]  # fmt: skip

KIB = 1024
ARCHITECTURES = {
    "sm_80": Device(multiprocessors=108, shared_memory=163 * KIB, hopper=False),  # A100
    "sm_86": Device(multiprocessors=84, shared_memory=99 * KIB, hopper=False),  # A10, RTX 3090
    "sm_89": Device(multiprocessors=142, shared_memory=99 * KIB, hopper=False),  # L40, RTX 4090
    "sm_90": Device(multiprocessors=132, shared_memory=227 * KIB, hopper=True),  # H100, H200
}
BACKENDS = ("triton", "hopper")
CPU = torch.device("cpu")
LOOK = 0.2  # seconds between looks at what has been compiled
# What is planned: a chunk of a prefill, a verification, and a decode long enough to be split.
QUERY_LENGTHS, KEY_LENGTHS = (256, 4, 1), (4096, 1000, 65536)


@dataclass(frozen=True, eq=False)
class Layer:
    """A layer that kernels are compiled for.

    Attributes:
        spec: what it computes.
        page_size: of its cache; None: keys are packed rows, and the LSE is asked for.
        tree: whether a request has a token tree.
        packed_mask: whether there is a packed mask.
        captures: what its functions close over.
    """

    spec: AttentionSpec
    page_size: int | None = 16
    tree: bool = False
    packed_mask: bool = False
    captures: Mapping[str, torch.Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Outcome:
    """The kernels of a layer in one configuration, but for those that an earlier outcome has.

    Attributes:
        layer: its name.
        architecture: such as sm_90.
        config: name of the configuration.
        kernels: what was compiled.
        error: why something could not be, or empty.
    """

    layer: str
    architecture: str
    config: str
    kernels: tuple[CompiledKernel, ...]
    error: str = ""

    @property
    def shared_memory(self) -> int:
        """Bytes that the largest of the kernels takes."""
        return max((kernel.shared_memory for kernel in self.kernels), default=0)


@dataclass(frozen=True, eq=False)
class Job:
    """A layer to compile in one configuration of a backend."""

    name: str
    layer: Layer
    architecture: str
    backend: str
    config: KernelConfig


def usual_layers() -> dict[str, Layer]:
    """Layers of well-known models, and one for each feature that changes kernels, by name."""
    llama = AttentionSpec(num_qo_heads=32, num_kv_heads=8, head_dim=128, dtype=torch.bfloat16)
    small = AttentionSpec(num_qo_heads=16, num_kv_heads=16, head_dim=64, dtype=torch.float16)
    gemma = AttentionSpec(num_qo_heads=16, num_kv_heads=8, head_dim=256, dtype=torch.bfloat16)
    oss = AttentionSpec(num_qo_heads=64, num_kv_heads=8, head_dim=64, dtype=torch.bfloat16)
    expanded = AttentionSpec(num_qo_heads=128, num_kv_heads=128, head_dim_qk=192, head_dim_vo=128, dtype=torch.bfloat16)
    latent = AttentionSpec.mla(num_qo_heads=128, kv_lora_rank=512, qk_rope_head_dim=64, dtype=torch.bfloat16)
    table, document_id = torch.zeros(32, 33), torch.zeros(len(QUERY_LENGTHS), max(KEY_LENGTHS), dtype=torch.int32)
    functions = llama.replace(score_mod=variants.relative_bias(table, 16), mask_mod=variants.document(document_id))
    return {
        "bf16 128": Layer(llama),
        "fp16 64": Layer(small),
        "bf16 96": Layer(llama.replace(head_dim=96)),
        "bf16 256, cap, window": Layer(gemma.replace(logits_soft_cap=50.0, window_left=4095)),
        "bf16 192/128": Layer(expanded),
        "bf16 MLA 576/512": Layer(latent),
        "fp32 128": Layer(llama.replace(dtype=torch.float32)),
        "bf16 64, window, sinks": Layer(oss.replace(window_left=127, learned_sinks=True)),
        "bf16 128, window, sink tokens": Layer(llama.replace(window_left=1023, num_sink_tokens=4)),
        "bf16 128, ALiBi": Layer(llama.replace(alibi=True)),
        "bf16 128, tree": Layer(llama, tree=True),
        "bf16 128, packed mask": Layer(llama, packed_mask=True),
        "bf16 128, score and mask functions": Layer(
            functions, captures={"table": table, "document_id": document_id}
        ),
        "bf16 128, pages of one token": Layer(llama, page_size=1),
        "bf16 128, packed keys": Layer(llama, page_size=None),
    }  # fmt: skip


def compile_layers(
    layers: Mapping[str, Layer],
    architectures: Iterable[str],
    backend: str = "triton",
    told: Callable[[int, int], None] = lambda done, total: None,
) -> list[Outcome]:
    """Compile all kernels of layers, as a backend configures them.

    On all processors that this process may use, in processes of their own: its own Triton is left alone.

    Args:
        layers: by name.
        architectures: names among :data:`ARCHITECTURES`.
        backend: one of :data:`BACKENDS`; layers that it does not take are left out.
        told: called with how many configurations are done, and of how many.

    Raises:
        InvalidInput: an architecture is not known, or not the backend's.
        BackendUnavailable: there is no Triton, or its interpreter is asked for, which compiles nothing.
        BuildFailed: a compiling process ended early, by a lack of memory for example.
    """
    if not (support := installed()).accepted:
        raise BackendUnavailable(support.reason)
    if triton_interpreted():
        raise BackendUnavailable("nothing can be compiled while TRITON_INTERPRET is set: unset it")
    jobs: list[Job] = []
    for architecture in architectures:
        if architecture not in ARCHITECTURES:
            raise InvalidInput("architecture", expected="one of " + ", ".join(ARCHITECTURES), got=architecture)
        for name, layer in layers.items():
            configs = _configs(backend, layer.spec, architecture)
            jobs += [Job(name, layer, architecture, backend, config) for config in configs]
    with tempfile.TemporaryDirectory() as folder, Workers() as workers, _watched(Path(folder), len(jobs), told):
        return _distinct(_shared_out(jobs, workers, Path(folder)))


def _configs(backend: str, spec: AttentionSpec, architecture: str) -> Sequence[KernelConfig]:
    device = ARCHITECTURES[architecture]
    if backend == "triton":
        return triton_costs.kernel_configs(spec, device)
    if not device.hopper:
        raise InvalidInput("architecture", expected="sm_90, for which the hopper backend is", got=architecture)
    return hopper.kernel_configs(spec, device.multiprocessors) if hopper.takes(spec).accepted else ()


@contextmanager
def _watched(folder: Path, total: int, told: Callable[[int, int], None]) -> Iterator[None]:
    """Tell now and then of how many jobs its processes have written into a folder that they are done."""
    over = Event()

    def watch() -> None:
        while not over.wait(LOOK):
            told(sum(file.stat().st_size for file in folder.glob("*.done")), total)

    told(0, total)
    thread = Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _shared_out(jobs: Sequence[Job], workers: Workers, folder: Path) -> list[Outcome]:
    """Outcomes of the jobs, each worker's processor taking an equal part in a process of its own."""
    count = min(processors(), len(jobs))
    parts = [jobs[first::count] for first in range(count)]
    code = f"import sys; sys.path[:] = {sys.path!r}; from {__name__} import serve; serve(sys.argv[1])"
    files = [folder / f"{number}.pickle" for number in range(len(parts))]
    for file, part in zip(files, parts, strict=True):
        file.write_bytes(pickle.dumps(part))
    ended = workers.run([[sys.executable, "-c", code, str(file)] for file in files], folder)
    for one in ended:
        if one.status:
            raise BuildFailed(f"a process that compiles kernels ended with exit status {one.status}:\n{one.output}")
    outcomes = [iter(pickle.loads(file.read_bytes())) for file in files]
    return [next(outcomes[place % count]) for place in range(len(jobs))]


def serve(file: str) -> None:
    """What a compiling process does: read jobs from a file, and write their outcomes into it."""
    path, outcomes = Path(file), []
    for job in pickle.loads(path.read_bytes()):
        outcomes.append(_compile(job))
        with path.with_suffix(".done").open("a") as done:
            done.write(".")
    path.write_bytes(pickle.dumps(outcomes))


def _distinct(outcomes: Sequence[Outcome]) -> list[Outcome]:
    """The same without kernels that were in an earlier one, whichever process compiled them."""
    seen: set[tuple[str, str]] = set()
    distinct = []
    for outcome in outcomes:
        new = tuple(kernel for kernel in outcome.kernels if (outcome.architecture, kernel.key) not in seen)
        seen |= {(outcome.architecture, kernel.key) for kernel in new}
        distinct.append(Outcome(outcome.layer, outcome.architecture, outcome.config, new, outcome.error))
    return distinct


def _compile(job: Job) -> Outcome:
    from triton.runtime import driver

    torch.set_num_threads(1)
    recorder = Recorder(int(job.architecture.removeprefix("sm_")))
    driver.set_active(recorder)
    caching.forget()  # another architecture's
    made = partial(Outcome, job.name, job.architecture, job.config.name)
    try:
        _launch(job.backend, job.layer, job.config)
    except Exception as error:  # whatever a compiler raises is a finding
        return made(tuple(recorder.kernels), f"{type(error).__name__}: {error}")
    return made(tuple(recorder.kernels))


def _launch(name: str, layer: Layer, config: KernelConfig) -> None:
    """All that a backend launches for a layer, over a batch that needs every kernel; caches have one set of kernels."""
    launch = attend_of(layer, config)
    if name == "hopper":
        HopperBackend().attend(launch)
        return
    backend = TritonBackend()
    backend.attend(launch)
    if layer.page_size is None:
        return
    spec, rows, k = layer.spec, len(launch.q), launch.k
    backend.append(
        Append(
            spec=spec,
            page_size=layer.page_size,
            arrays=launch.arrays,
            plan=launch.plan,
            page_table=launch.page_table,
            kv_lens=None,
            slots=None,
            k=torch.empty(rows, *k.shape[2:], dtype=spec.kv_dtype),
            v=None if spec.latent else torch.empty(rows, *launch.v.shape[2:], dtype=spec.kv_dtype),
            k_pages=k,
            v_pages=None if spec.latent else launch.v,
        )
    )
    backend.copy_pages(k, torch.tensor([0]), torch.tensor([1]))


def attend_of(layer: Layer, config: KernelConfig) -> Attend:
    """An attention launch for a layer, over a batch that needs every kernel."""
    spec, page_size = layer.spec, layer.page_size
    plan = _plan(layer, config)
    tensors = plan.tensors
    slots = () if page_size is None else (page_size,)
    k = torch.empty(2, *slots, spec.num_kv_heads, spec.head_dim_qk, dtype=spec.kv_dtype)
    v = torch.empty(2, *slots, spec.num_kv_heads, spec.head_dim_vo, dtype=spec.kv_dtype)
    per_head = torch.zeros(spec.num_qo_heads)
    return Attend(
        spec=spec,
        config=config,
        page_size=page_size,
        arrays=PlanArrays(tensors.host.numpy()),
        plan=tensors.device,
        page_table=tensors.page_table,
        kv_lens=None,
        q=torch.empty(plan.num_rows, spec.num_qo_heads, spec.head_dim_qk, dtype=spec.dtype),
        k=k,
        v=k[..., : spec.head_dim_vo] if spec.latent else v,
        out=torch.empty(plan.output_shape, dtype=spec.dtype),
        lse=torch.empty(plan.num_rows, spec.num_qo_heads) if page_size is None else None,
        sm_scale=0.1,
        packed_mask=tensors.packed_mask,
        sinks=per_head if spec.learned_sinks else None,
        alibi_slopes=per_head if spec.alibi else None,
        captures=layer.captures,
    )


def _plan(layer: Layer, config: KernelConfig) -> Plan:
    def indptr(lengths: Iterable[int]) -> list[int]:
        return torch.tensor([0, *lengths]).cumsum(0).tolist()

    page_size, masks = layer.page_size, None
    if page_size is None:
        batch = Batch.ragged(qo_indptr=indptr(QUERY_LENGTHS), kv_indptr=indptr(KEY_LENGTHS))
    else:
        pages = [-(-length // page_size) for length in KEY_LENGTHS]
        batch = Batch.csr(
            qo_indptr=indptr(QUERY_LENGTHS), kv_lens=KEY_LENGTHS, kv_indptr=indptr(pages), kv_indices=range(sum(pages))
        )
    if layer.packed_mask:
        sizes = zip(QUERY_LENGTHS, KEY_LENGTHS, strict=True)
        masks = pack_mask([torch.ones(size, dtype=torch.bool) for size in sizes])
    return make_plan(
        batch,
        spec=layer.spec,
        owner="",
        backend="triton",
        configs=(config,),
        page_size=page_size,
        device=CPU,
        tree=[None, Tree([-1, 0, 0, 1]), None] if layer.tree else None,
        packed_mask=masks,
    )
