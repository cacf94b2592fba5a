"""Keys and values as callers keep them - pairs, interleaved, latent, NHD or HND - read as NHD views and checked."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch

from sennit.errors import InvalidInput, PlanMismatch
from sennit.spec import AttentionSpec

__all__ = ["KVLayout", "KVPages", "check_distinct", "nhd_views", "split_pools"]

KVLayout = Literal["NHD", "HND"]


class KVPages(NamedTuple):
    """Keys and values of one layer, checked once by :meth:`sennit.BatchAttention.pages`, to be used in every step.

    Attributes:
        owner: what they have been checked for.
        given: the tensors as they were given, one or two.
        k, v: NHD views of them: pages ``[pages, page_size, num_kv_heads, dim]``, packed rows without the first
            dimension; v is a view of k where the spec is latent.
    """

    owner: str
    given: tuple[torch.Tensor, ...]
    k: torch.Tensor
    v: torch.Tensor

    def check_writable(self) -> None:
        """Raise :class:`InvalidInput` where elements of one of the tensors share memory."""
        for name, tensor in zip(("kv_pages: k", "kv_pages: v"), self.given, strict=False):
            check_distinct(name, tensor)


def check_distinct(name: str, tensor: torch.Tensor) -> None:
    """Raise :class:`InvalidInput` for a tensor to be written whose elements share memory, or stand for others."""
    if not torch.compiler.is_compiling() and tensor.is_neg():  # which Dynamo cannot ask
        raise InvalidInput(name, expected="memory that holds its values", got="a negated view", hint="resolve_neg()")
    if not tensor.is_contiguous() and _overlaps_itself(tensor):
        got = f"strides {tensor.stride()}"
        raise InvalidInput(name, expected="memory of its own for every element", got=got, hint="call .clone()")


def split_pools(name: str, kv: object, spec: AttentionSpec, *, paged: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Take apart what the caller gives as keys and values.

    Args:
        name: the argument's name, for errors.
        kv: ``(k, v)``; one interleaved tensor ``[pages, 2, ...]``; or, where the spec is latent, one tensor.
        spec: the layer.
        paged: pools of pages, rather than packed rows.

    Returns:
        ``(k, v)``, or ``(tensor, None)`` for one tensor.

    Raises:
        InvalidInput: of another form, or with a head count, dimension or dtype that is not the spec's.
    """
    if isinstance(kv, torch.Tensor):
        if spec.latent:
            _check_tensor(name, kv, spec, ndim=3 if paged else 2, columns=spec.head_dim_qk)
        elif not paged or kv.dim() != 5 or kv.shape[1] != 2:
            expected = "(k, v), or one tensor [pages, 2, ...]" if paged else "(k, v)"
            raise InvalidInput(name, expected=expected, got=f"one tensor of shape {tuple(kv.shape)}")
        else:
            if spec.head_dim_qk != spec.head_dim_vo:
                raise InvalidInput(
                    name,
                    expected=f"(k, v), since their dims differ ({spec.head_dim_qk} and {spec.head_dim_vo})",
                    got="one interleaved tensor",
                )
            _check_tensor(name, kv, spec, ndim=5, columns=spec.head_dim_qk)
        return kv, None
    if not isinstance(kv, (tuple, list)) or len(kv) != 2 or not all(isinstance(t, torch.Tensor) for t in kv):
        form = "one tensor" if spec.latent else "a pair of tensors (k, v)"
        raise InvalidInput(name, expected=form, got=_describe(kv))
    if spec.latent:
        raise InvalidInput(name, expected="one tensor: V is a prefix of K", got="a pair", hint="pass the latent alone")
    k, v = kv
    for part, tensor, columns in (("k", k, spec.head_dim_qk), ("v", v, spec.head_dim_vo)):
        _check_tensor(f"{name}: {part}", tensor, spec, ndim=4 if paged else 3, columns=columns)
    if k.shape[:-1] != v.shape[:-1]:
        raise InvalidInput(
            f"{name}: v", expected=f"the shape of k but for the last dimension, {tuple(k.shape)}", got=tuple(v.shape)
        )
    return k, v


def nhd_views(
    k: torch.Tensor, v: torch.Tensor | None, spec: AttentionSpec, layout: KVLayout, page_size: int | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Views ``[pages, page_size, num_kv_heads, dim]`` (or packed ``[rows, num_kv_heads, dim]``) of keys and values.

    Raises:
        PlanMismatch: page size or head count are not those of the plan.
    """
    if spec.latent:
        k = k.unsqueeze(-2)
        v = k[..., : spec.head_dim_vo]
    elif v is None:
        k, v = k[:, 0], k[:, 1]
    if page_size is not None and layout == "HND" and not spec.latent:
        k, v = k.transpose(1, 2), v.transpose(1, 2)
    wanted = (page_size, spec.num_kv_heads) if page_size is not None else (spec.num_kv_heads,)
    if tuple(k.shape[1:-1]) != wanted:
        raise PlanMismatch(
            "kv_pages" if page_size is not None else "kv",
            expected=f"{'page_size and ' * (page_size is not None)}num_kv_heads {wanted} in layout {layout}",
            got=tuple(k.shape[1:-1]),
        )
    return k, v


def _overlaps_itself(tensor: torch.Tensor) -> bool:
    """Whether two elements may share memory: a step of some dimension is no longer than all shorter ones reach."""
    reach = 0
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride <= reach:
                return True
            reach += stride * (size - 1)
    return False


def _check_tensor(name: str, tensor: torch.Tensor, spec: AttentionSpec, *, ndim: int, columns: int) -> None:
    if tensor.dim() != ndim or tensor.shape[-1] != columns:
        raise InvalidInput(
            name, expected=f"{ndim} dimensions, the last of {columns}", got=f"shape {tuple(tensor.shape)}"
        )
    if tensor.dtype != spec.kv_dtype:
        raise InvalidInput(name, expected=f"dtype {spec.kv_dtype} (the spec's kv_dtype)", got=tensor.dtype)
    if tensor.stride(-1) != 1 and tensor.shape[-1] > 1:
        raise InvalidInput(
            name, expected="a contiguous last dimension", got=f"strides {tensor.stride()}", hint="call .contiguous()"
        )


def _describe(value: object) -> str:
    if isinstance(value, (tuple, list)):
        kinds = ", ".join(dict.fromkeys(type(each).__name__ for each in value))
        return f"a {type(value).__name__} of {len(value)}" + f" ({kinds})" * bool(kinds)
    return f"a {type(value).__name__}"
