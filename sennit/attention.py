"""Level 1: plan a step over pages that the caller owns, append its keys and values, run its attention."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypedDict, overload

import numpy as np
import torch
from torch.autograd import forward_ad

from sennit import ops
from sennit.backends import registry
from sennit.device import resolve_device
from sennit.errors import InvalidInput, PlanMismatch, UnsupportedFeature
from sennit.plan.batch import Batch
from sennit.plan.buffers import PlanBuffers
from sennit.plan.integers import INT32_MAX, host_integers
from sennit.plan.plan import Plan, make_plan, plan_features
from sennit.plan.tree import Tree
from sennit.pools import KVLayout, KVPages, check_distinct, nhd_views, split_pools
from sennit.spec import FLOAT32_MAX, AttentionSpec

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["BatchAttention", "RunOptions"]


class RunOptions(TypedDict, total=False):
    """Keywords of :meth:`BatchAttention.run` that do not decide what it returns."""

    sm_scale: float | None
    out: torch.Tensor | None
    lse: torch.Tensor | None
    sinks: torch.Tensor | None
    alibi_slopes: torch.Tensor | None
    captures: dict[str, torch.Tensor] | None
    k_scale: float | torch.Tensor | None
    v_scale: float | torch.Tensor | None


class BatchAttention:
    """Attention of one kind of layer over batches of any mix of requests.

    Args:
        spec: what the layer computes.
        page_size: tokens a page; None where only packed keys are used (:meth:`Batch.ragged`).
        kv_layout: ``"NHD"``: pages ``[pages, page_size, num_kv_heads, dim]``; ``"HND"``:
            ``[pages, num_kv_heads, page_size, dim]``. Latent pages are ``[pages, page_size, dim]`` in both.
        device: where everything runs; the current CUDA device if there is one, otherwise the CPU.
        backend: ``"auto"``: for each plan the first that accepts it; or one backend's name, which then never falls
            back to another.

    Raises:
        InvalidInput: an argument is out of range.
        UnsupportedFeature: no backend in question can do what the spec asks; the text has each one's reason.
        BackendUnavailable: none can run on the device.

    >>> spec = AttentionSpec(num_qo_heads=4, num_kv_heads=2, head_dim=8, dtype=torch.float32)
    >>> attn = BatchAttention(spec, page_size=4, device="cpu")
    >>> plan = attn.plan(Batch.csr(qo_indptr=[0, 3, 4], kv_lens=[3, 5], kv_indptr=[0, 1, 3], kv_indices=[2, 0, 1]))
    >>> pages = torch.zeros(3, 4, 2, 8), torch.zeros(3, 4, 2, 8)
    >>> attn.append(plan, torch.randn(4, 2, 8), torch.randn(4, 2, 8), pages)
    >>> attn.run(plan, torch.randn(4, 4, 8), pages, sm_scale=8**-0.5).shape
    torch.Size([4, 4, 8])
    """

    def __init__(
        self,
        spec: AttentionSpec,
        *,
        page_size: int | None = None,
        kv_layout: KVLayout = "NHD",
        device: torch.device | str | None = None,
        backend: str = "auto",
    ) -> None:
        if not isinstance(spec, AttentionSpec):
            raise InvalidInput("spec", expected="an AttentionSpec", got=type(spec).__name__)
        page_size = _positive("page_size", page_size, "or None for packed keys")
        if kv_layout not in ("NHD", "HND"):
            raise InvalidInput("kv_layout", expected='"NHD" or "HND"', got=repr(kv_layout))
        self.spec = spec
        self.page_size = page_size
        self.kv_layout: KVLayout = kv_layout
        self.device = resolve_device(device)
        self._tried = registry.candidates(backend, self.device)
        registry.choose(self._tried, spec, frozenset(), self.device)
        self._captures = spec.captures  # before Python 3.12, Dynamo cannot trace the first look at a cached property
        self._owner = f"{spec.key}/page{page_size}-{kv_layout}/{self.device}"

    @property
    def backends(self) -> list[tuple[str, bool, str]]:
        """``(name, accepted, reason)`` of every backend that plans may use, in order of preference."""
        examined = [registry.examine(name, self.spec, frozenset(), self.device) for name in self._tried]
        return [(candidate.name, candidate.support.accepted, candidate.support.reason) for candidate in examined]

    def __repr__(self) -> str:
        return (
            f"BatchAttention({self.spec}, page_size={self.page_size}, kv_layout={self.kv_layout!r}, "
            f"device={str(self.device)!r}, backends={', '.join(self._tried)})"
        )

    def plan(
        self,
        batch: Batch,
        *,
        causal: bool | Sequence[bool] = True,
        tree: Sequence[Tree | None] | None = None,
        packed_mask: torch.Tensor | None = None,
        split_size: int | None = None,
        into: PlanBuffers | None = None,
    ) -> Plan:
        """Plan a step once, for all layers with this spec.

        Args:
            batch: lengths and tables.
            causal: whether row ``i`` of a request sees no key after position ``kv_len - q_len + i``; one flag for all
                requests, or one each.
            tree: one :class:`Tree` or None a request: what its last keys see of each other, in place of causality.
            packed_mask: uint8 ``[bytes]``, a bit for every row and key, ANDed with the other masks; see
                :func:`sennit.pack_mask`.
            split_size: keys of a fixed chunk. Requests are then split at its multiples only, whatever else is in the
                batch, and give the same bits in every batch.
            into: buffers from :meth:`buffers`, for CUDA graphs; the previous plan in them becomes stale.

        Raises:
            InvalidInput: the batch does not fit this object, or a page id that a key uses is negative.
            UnsupportedFeature: no backend in question accepts the plan.
            CapacityExceeded: it does not fit ``into``, which is then unchanged.
        """
        if not isinstance(batch, Batch):
            raise InvalidInput(
                "batch", expected="a Batch", got=type(batch).__name__, hint="see Batch.csr, .padded, .ragged"
            )
        if batch.pages is not None and self.page_size is None:
            raise InvalidInput(
                "batch", expected="packed keys (Batch.ragged)", got="pages", hint="give page_size= to BatchAttention"
            )
        split_size = _positive("split_size", split_size, "or None")
        if into is not None and not isinstance(into, PlanBuffers):
            raise InvalidInput("into", expected="buffers from BatchAttention.buffers", got=type(into).__name__)
        for name, tensor in (
            ("page table", batch.pages.entries if batch.pages else None),
            ("kv_lens_device", batch.kv_lens_device),
            ("slot_mapping", batch.slot_mapping),
        ):
            if isinstance(tensor, torch.Tensor):
                self._check_device(name, tensor)
        page_size = self.page_size if batch.pages is not None else None
        features = plan_features(batch, tree=tree, packed_mask=packed_mask, split_size=split_size, into=into)
        owner = self._owner_of(page_size)
        if into is not None and page_size is None:
            raise InvalidInput("into", expected="None with packed keys: buffers hold page tables", got="buffers")
        if into is not None and into.owner != owner:
            raise InvalidInput("into", expected=f"buffers of this BatchAttention ({owner})", got=into.owner)
        if into is not None and into.backend not in self._tried:
            raise InvalidInput("into", expected=f"buffers for backend {' or '.join(self._tried)}", got=into.backend)
        backend = registry.choose(self._tried if into is None else (into.backend,), self.spec, features, self.device)
        plan = make_plan(
            batch,
            spec=self.spec,
            owner=owner,
            backend=backend,
            configs=registry.load(backend).configs(self.spec, self.device) if into is None else (into.config,),
            page_size=page_size,
            device=self.device,
            causal=causal,
            tree=tree,
            packed_mask=packed_mask,
            split_size=split_size,
            into=into,
        )
        self._register(plan)
        return plan

    def buffers(self, *, max_requests: int, max_tokens: int, max_pages: int, max_tree_nodes: int = 0) -> PlanBuffers:
        """Buffers of fixed address and capacity for ``plan(into=...)``: one CUDA graph serves every plan in them.

        Args:
            max_requests: requests of a batch.
            max_tokens: query rows of a batch.
            max_pages: page table entries of all requests together.
            max_tree_nodes: pending tokens of one request's tree; 0 where there are no trees.
        """
        if self.page_size is None:
            raise InvalidInput("page_size", expected="a page size, since buffers hold page tables", got=None)
        backend = registry.choose(self._tried, self.spec, frozenset({"paged", "into"}), self.device)
        return PlanBuffers.allocate(
            owner=self._owner,
            backend=backend,
            config=registry.load(backend).configs(self.spec, self.device)[0],
            group_size=self.spec.group_size,
            num_kv_heads=self.spec.num_kv_heads,
            max_requests=max_requests,
            max_tokens=max_tokens,
            max_pages=max_pages,
            max_tree_nodes=max_tree_nodes,
            device=self.device,
        )

    def pages(self, kv_pages: Any) -> KVPages:
        """Check pools once, for many steps: ``append``, ``run`` and ``copy_pages`` take the result in their place.

        It holds the tensors themselves; their content may change, their shape and place may not.

        Args:
            kv_pages: see :meth:`run`.

        Raises:
            InvalidInput: a tensor has a wrong shape, dtype or device; or this object has no page size.
            PlanMismatch: the pools have another page size or head count.

        >>> spec = AttentionSpec(num_qo_heads=4, num_kv_heads=2, head_dim=8, dtype=torch.float32)
        >>> attn = BatchAttention(spec, page_size=4, device="cpu")
        >>> pages = attn.pages((torch.zeros(3, 4, 2, 8), torch.zeros(3, 4, 2, 8)))
        >>> attn.run(attn.plan(Batch.parse("1@9", page_size=4)), torch.randn(1, 4, 8), pages, sm_scale=8**-0.5).shape
        torch.Size([1, 4, 8])
        """
        if self.page_size is None:
            raise InvalidInput("page_size", expected="a page size, since packed keys have no pages", got=None)
        return self._checked(kv_pages, self.page_size)

    def append(self, plan: Plan, k: torch.Tensor, v: torch.Tensor | None, kv_pages: Any) -> None:
        """Write the new tokens' keys and values to their slots: position ``kv_len - q_len + i`` for row ``i``.

        Rows with a negative position (``kv_len < q_len``), or slot -1 in ``slot_mapping``, are not stored.

        Args:
            plan: the step's plan.
            k: ``[rows, num_kv_heads, head_dim_qk]`` of ``kv_dtype``, rows as in the query tensor; where the spec is
                latent ``[rows, head_dim_qk]``.
            v: ``[rows, num_kv_heads, head_dim_vo]``; None where the spec is latent.
            kv_pages: see :meth:`run`.

        Raises:
            InvalidInput: a tensor has a wrong shape, dtype or device.
            PlanMismatch: a tensor does not fit the plan.
        """
        self._check_plan(plan)
        if plan.page_size is None:
            raise PlanMismatch("plan", expected="a plan over pages", got="one over packed keys, which has no pages")
        spec = self.spec
        if spec.latent and v is not None:
            got = f"a tensor of shape {tuple(v.shape)}" if isinstance(v, torch.Tensor) else type(v).__name__
            raise InvalidInput("v", expected="None: V is a prefix of K", got=got)
        self._check_rows(
            "k", k, (spec.head_dim_qk,) if spec.latent else (spec.num_kv_heads, spec.head_dim_qk), spec.kv_dtype
        )
        if not spec.latent:
            self._check_rows("v", v, (spec.num_kv_heads, spec.head_dim_vo), spec.kv_dtype)
            assert v is not None
            if v.shape[0] != k.shape[0]:
                raise InvalidInput("v", expected=f"as many rows as k, {k.shape[0]}", got=v.shape[0])
        pages = self._checked(kv_pages, plan.page_size)
        pages.check_writable()
        t = plan.tensors
        torch.ops.sennit.append(
            plan.key, k, v, pages.k, None if spec.latent else pages.v,
            t.host, t.device, t.page_table, t.stamp, t.kv_lens, t.slots,
        )  # fmt: skip

    @overload
    def run(
        self, plan: Plan, q: torch.Tensor, kv: Any, *, return_lse: Literal[False] = ..., **options: Unpack[RunOptions]
    ) -> torch.Tensor: ...

    @overload
    def run(
        self, plan: Plan, q: torch.Tensor, kv: Any, *, return_lse: Literal[True], **options: Unpack[RunOptions]
    ) -> tuple[torch.Tensor, torch.Tensor]: ...

    @overload
    def run(
        self, plan: Plan, q: torch.Tensor, kv: Any, *, return_lse: bool, **options: Unpack[RunOptions]
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]: ...

    def run(
        self,
        plan: Plan,
        q: torch.Tensor,
        kv: Any,
        *,
        sm_scale: float | None = None,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        return_lse: bool = False,
        sinks: torch.Tensor | None = None,
        alibi_slopes: torch.Tensor | None = None,
        captures: dict[str, torch.Tensor] | None = None,
        k_scale: float | torch.Tensor | None = None,
        v_scale: float | torch.Tensor | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Attention of every request in the plan.

        Args:
            plan: the step's plan, from this object.
            q: ``[rows, num_qo_heads, head_dim_qk]`` of the spec's dtype; rows that no request covers are ignored.
            kv: for pages ``(k_pages, v_pages)`` or one interleaved ``[pages, 2, ...]`` tensor, any strides with a
                contiguous last dimension; for packed keys ``(k, v)`` with ``[key rows, num_kv_heads, dim]``; where the
                spec is latent one tensor ``[pages, page_size, head_dim_qk]`` or ``[key rows, head_dim_qk]``. What a
                request owns must be finite; slots that nobody owns may hold anything.
            sm_scale: factor of the logits; there is no default, see the error.
            out: ``[rows, num_qo_heads, head_dim_vo]``, written where requests have rows and untouched elsewhere; it
                shares no memory with q.
            lse: float32 ``[rows, num_qo_heads]``, likewise.
            return_lse: return the LSE too: natural log, ``-inf`` where a row sees no key.
            sinks: float32 ``[num_qo_heads]``, a logit a head that enters the denominator and the LSE but has no value;
                exactly where the spec has ``learned_sinks`` (GPT-OSS, arXiv:2508.10925).
            alibi_slopes: float32 ``[num_qo_heads]``: ``slope * (j - p)`` is added to the logits; exactly where the spec
                has ``alibi`` (arXiv:2108.12409).
            captures: the tensors that ``score_mod`` and ``mask_mod`` close over, by the names they have there; of the
                dtype and number of dimensions that they had when the spec was made (``spec.captures``).
            k_scale, v_scale: of quantised keys and values, which no ``kv_dtype`` of this release is.

        Returns:
            ``out [rows, num_qo_heads, head_dim_vo]``, zero in rows that no request covers; or ``(out, lse)``.

        Raises:
            InvalidInput: a tensor has a wrong shape, dtype or device, or needs gradients; ``sm_scale`` is missing.
            PlanMismatch: a tensor does not fit the plan, or the plan is another object's.
            StalePlan: the plan's buffers have been rewritten.
        """
        self._check_plan(plan)
        spec = self.spec
        scale = self._check_scale(sm_scale)
        for name, value in (("k_scale", k_scale), ("v_scale", v_scale)):
            if value is not None:
                raise UnsupportedFeature(name, f"kv_dtype {spec.kv_dtype} has no scale")
        self._check_heads("sinks", sinks, wanted=spec.learned_sinks, field="learned_sinks")
        self._check_heads("alibi_slopes", alibi_slopes, wanted=spec.alibi, field="alibi")
        captured = self._check_captures({} if captures is None else captures)
        self._check_rows("q", q, (spec.num_qo_heads, spec.head_dim_qk), spec.dtype)
        if not torch.compiler.is_compiling():  # a new plan is no reason to recompile
            ops.check_rows("q", q, plan.num_rows)
        pages = self._checked(kv, plan.page_size)
        fresh = out is None
        if out is None:
            out = q.new_empty(q.shape[0], spec.num_qo_heads, spec.head_dim_vo)
        else:
            self._check_rows("out", out, (spec.num_qo_heads, spec.head_dim_vo), spec.dtype, rows=q.shape[0])
            check_distinct("out", out)
        if lse is not None:
            self._check_rows("lse", lse, (spec.num_qo_heads,), torch.float32, rows=q.shape[0])
            check_distinct("lse", lse)
        elif return_lse:
            lse = q.new_full((q.shape[0], spec.num_qo_heads), -math.inf, dtype=torch.float32)
        t = plan.tensors
        torch.ops.sennit.attend(
            plan.key, q, pages.k, pages.v, out, lse, t.host, t.device, t.page_table, t.stamp, t.kv_lens, t.packed_mask,
            sinks, alibi_slopes, captured, scale, fresh,
        )  # fmt: skip
        return (out, lse) if return_lse and lse is not None else out

    def copy_pages(self, source: Any, target: Any, kv_pages: Any) -> None:
        """Copy whole pages of one layer, ``source[i]`` to ``target[i]``.

        Args:
            source: page ids, host integers.
            target: as many page ids, none of them twice or among the sources.
            kv_pages: see :meth:`run`.

        Raises:
            InvalidInput: page ids are out of range, or not as said.
            PlanMismatch: the pools have another page size or head count.
        """
        pair = [host_integers(name, ids) for name, ids in (("source", source), ("target", target))]
        if len(pair[0]) != len(pair[1]):
            raise InvalidInput("target", expected=f"{len(pair[0])} page ids, as source has", got=len(pair[1]))
        pages = self.pages(kv_pages)
        pages.check_writable()
        num_pages = pages.k.shape[0]
        for name, ids in zip(("source", "target"), pair, strict=True):
            if ids.size and not (ids.min() >= 0 and ids.max() < num_pages):
                raise InvalidInput(name, expected=f"page ids from 0 to {num_pages - 1}", got=ids.tolist())
        clash = np.isin(pair[1], pair[0])
        if clash.any() or len(np.unique(pair[1])) < len(pair[1]):
            raise InvalidInput("target", expected="different pages, none of them a source", got=pair[1].tolist())
        if not len(pair[0]):
            return
        ids_on_device = [torch.from_numpy(ids.astype("int64")).to(self.device) for ids in pair]
        backend = registry.choose(self._tried, self.spec, frozenset({"paged"}), self.device)
        for pool in pages.given:
            torch.ops.sennit.copy_pages(backend, pool, *ids_on_device)

    def warmup(self) -> None:
        """Compile and load, now rather than in the first step, everything that plans with this spec may run."""
        spec, heads = self.spec, () if self.spec.latent else (self.spec.num_kv_heads,)
        if self.page_size is None:
            batch = Batch.ragged(qo_indptr=[0, 1, 8], kv_indptr=[0, 40, 47])
            shape: tuple[int, ...] = (47, *heads)
        else:
            batch = Batch.parse("1@40 + 7@7", page_size=self.page_size)
            pages = int(batch.pages_needed(self.page_size).sum())
            hnd = self.kv_layout == "HND"
            shape = (pages, *heads, self.page_size) if hnd else (pages, self.page_size, *heads)

        def zeros(dtype: torch.dtype, *sizes: int) -> torch.Tensor:
            return torch.zeros(sizes, dtype=dtype, device=self.device)

        k = zeros(spec.kv_dtype, *shape, spec.head_dim_qk)
        kv = k if spec.latent else (k, zeros(spec.kv_dtype, *shape, spec.head_dim_vo))
        plan = self.plan(batch)
        if self.page_size is not None:
            new_v = None if spec.latent else zeros(spec.kv_dtype, 8, *heads, spec.head_dim_vo)
            self.append(plan, zeros(spec.kv_dtype, 8, *heads, spec.head_dim_qk), new_v, kv)
        per_head = zeros(torch.float32, spec.num_qo_heads)
        self.run(
            plan,
            zeros(spec.dtype, 8, spec.num_qo_heads, spec.head_dim_qk),
            kv,
            sm_scale=1.0,
            sinks=per_head if spec.learned_sinks else None,
            alibi_slopes=per_head if spec.alibi else None,
            captures={capture.name: zeros(capture.dtype, *[1] * capture.ndim) for capture in spec.captures},
        )

    def _check_plan(self, plan: Plan) -> None:
        if not isinstance(plan, Plan):
            raise InvalidInput("plan", expected="a Plan from BatchAttention.plan", got=type(plan).__name__)
        expected = self._owner_of(plan.page_size)
        if plan.owner != expected:
            raise PlanMismatch("plan", expected=f"one made for {expected}", got=plan.owner)
        if plan.backend not in self._tried:
            raise PlanMismatch("plan", expected=f"one for backend {' or '.join(self._tried)}", got=plan.backend)
        if not torch.compiler.is_compiling() and not ops.registered(plan.key):  # it was planned in another process
            self._register(plan)

    def _owner_of(self, page_size: int | None) -> str:
        """What plans and buffers of this object are marked with; plans over packed keys have no page size."""
        return self._owner if page_size is not None else f"{self.spec.key}/packed/{self.device}"

    def _register(self, plan: Plan) -> None:
        operator = ops.Operator(self.spec, plan.page_size, plan.backend, plan.config)
        ops.register(plan.key, operator)

    def _check_scale(self, sm_scale: float | None) -> float:
        if sm_scale is None:
            raise InvalidInput(
                "sm_scale",
                expected="a number",
                got="nothing",
                hint=f"usually head_dim ** -0.5, here {self.spec.head_dim_qk**-0.5:.6g}, but with MLA's absorbed "
                "weights it is (qk_nope_head_dim + qk_rope_head_dim) ** -0.5; transformers keeps it in module.scaling",
            )
        if isinstance(sm_scale, (np.integer, np.floating)):
            sm_scale = sm_scale.item()
        if isinstance(sm_scale, bool) or not isinstance(sm_scale, (int, float)) or not abs(sm_scale) <= FLOAT32_MAX:
            raise InvalidInput("sm_scale", expected="a finite number that fits float32", got=repr(sm_scale))
        return float(sm_scale)

    def _check_heads(self, name: str, tensor: object, *, wanted: bool, field: str) -> None:
        """A number a query head, exactly where the spec asks for it."""
        if wanted != (tensor is not None):
            expected = f"float32 [{self.spec.num_qo_heads}]" if wanted else "None"
            raise InvalidInput(
                name, expected=f"{expected}, since the spec has {field}={wanted}",
                got="nothing" if tensor is None else type(tensor).__name__,
            )  # fmt: skip
        if wanted:
            self._check_rows(name, tensor, (), torch.float32, rows=self.spec.num_qo_heads)

    def _check_captures(self, given: object) -> list[torch.Tensor]:
        """The captured tensors in the order of the spec's names."""
        if isinstance(given, dict) and not given and not self._captures:
            return []
        if not isinstance(given, Mapping):
            raise InvalidInput("captures", expected="a dictionary of tensors", got=type(given).__name__)
        wanted = {capture.name: capture for capture in self._captures}
        if given.keys() != wanted.keys():
            raise InvalidInput(
                "captures",
                expected=f"tensors named {', '.join(wanted)}" if wanted else "nothing: no function closes over tensors",
                got=", ".join(map(str, given)) or "nothing",
                hint="captures={name: tensor} with the names that score_mod and mask_mod close over",
            )
        for name, capture in wanted.items():
            self._check_tensor(f"captures[{name!r}]", given[name])
            tensor = given[name]
            if tensor.dtype != capture.dtype or tensor.dim() != capture.ndim or not tensor.numel():
                raise InvalidInput(
                    f"captures[{name!r}]",
                    expected=f"{capture.dtype} with {capture.ndim} dimensions, not empty, as when it was traced",
                    got=f"{tensor.dtype} of shape {tuple(tensor.shape)}",
                )
        return [given[name] for name in wanted]

    def _checked(self, kv: Any, page_size: int | None) -> KVPages:
        """Keys and values, checked for plans over pages, or over packed keys where ``page_size`` is None."""
        name, owner = "kv" if page_size is None else "kv_pages", self._owner_of(page_size)
        if isinstance(kv, KVPages):
            if kv.owner != owner:
                raise InvalidInput(name, expected=f"what has been checked for {owner}", got=kv.owner)
            return kv
        for tensor in kv if isinstance(kv, (tuple, list)) else (kv,):
            if isinstance(tensor, torch.Tensor):
                self._check_device(name, tensor)
        k, v = split_pools(name, kv, self.spec, paged=page_size is not None)
        return KVPages(owner, (k,) if v is None else (k, v), *nhd_views(k, v, self.spec, self.kv_layout, page_size))

    def _check_rows(
        self, name: str, tensor: object, shape: tuple[int, ...], dtype: torch.dtype, rows: int | None = None
    ) -> None:
        self._check_tensor(name, tensor)
        assert isinstance(tensor, torch.Tensor)
        if (
            tuple(tensor.shape[1:]) != shape
            or tensor.dim() != len(shape) + 1
            or (rows is not None and tensor.shape[0] != rows)
        ):
            wanted = ", ".join(map(str, ("rows" if rows is None else rows, *shape)))
            raise InvalidInput(name, expected=f"shape [{wanted}]", got=tuple(tensor.shape))
        if tensor.dtype != dtype:
            raise InvalidInput(name, expected=f"dtype {dtype}", got=tensor.dtype)

    def _check_tensor(self, name: str, tensor: object) -> None:
        if not isinstance(tensor, torch.Tensor):
            raise InvalidInput(name, expected="a tensor", got=type(tensor).__name__)
        self._check_device(name, tensor)

    def _check_device(self, name: str, tensor: torch.Tensor) -> None:
        if tensor.is_nested or tensor.layout != torch.strided:
            got = "a nested one" if tensor.is_nested else f"layout {tensor.layout}"
            raise InvalidInput(name, expected="a dense tensor", got=got)
        if tensor.device != self.device:
            raise InvalidInput(name, expected=f"a tensor on {self.device}", got=f"one on {tensor.device}")
        if tensor.requires_grad or (forward_ad._current_level >= 0 and _has_tangent(tensor)):
            raise InvalidInput(
                name, expected="a tensor without gradients",
                got="one with requires_grad=True" if tensor.requires_grad else "one with a tangent (forward mode)",
                hint="Sennit is for inference: use torch.inference_mode(), and pass parameters as .detach()",
            )  # fmt: skip


def _has_tangent(tensor: torch.Tensor) -> bool:
    return forward_ad.unpack_dual(tensor).tangent is not None  # type: ignore[no-untyped-call]


def _positive(name: str, value: object, otherwise: str) -> int | None:
    """A positive integer, NumPy's included, that fits 32 bits; or None."""
    if value is None:
        return None
    if not isinstance(value, (int, np.integer)) or isinstance(value, bool) or not 1 <= value <= INT32_MAX:
        raise InvalidInput(name, expected=f"a positive integer up to {INT32_MAX}, {otherwise}", got=repr(value))
    return int(value)
