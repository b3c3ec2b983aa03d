"""Attention of draft nodes: chains and trees over a long cache, and the merge of two parts."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from spec_kernels._check import FLOATS, check, floats_of
from spec_kernels.ops._register import checked_once, register

MAX_DIM = 512
EIGHT_BITS = (torch.float8_e4m3fn, torch.int8)


@checked_once()
def verify_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    context_lens: Tensor,
    cu_seqlens_q: Tensor,
    max_seqlen_q: int,
    *,
    block_table: Tensor | None = None,
    ancestors: Tensor | None = None,
    depths: Tensor | None = None,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    key_scale: Tensor | None = None,
    value_scale: Tensor | None = None,
    return_lse: bool = False,
    max_seqlen_k: int | None = None,
    invariant: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Attend from draft nodes to a KV cache: each sees its context and its ancestors.

        s_j = q . k_j * scale,  with a soft cap  softcap * tanh(q . k_j * scale / softcap)
        out = sum_j exp(s_j - lse) v_j,   lse = log(sum_j exp(s_j) + exp(sink))

    over the positions j that a node sees: 0 .. context_lens[b] - 1, and of the nodes, whose keys
    and values lie behind the context in order, those of its ancestor words.

    Args:
        query: `[tokens, heads, qk_dim] float32/float16/bfloat16`, on a CPU also float64; the nodes
            of request b are tokens cu_seqlens_q[b] .. cu_seqlens_q[b + 1] - 1. Any strides.
        key_cache: `[blocks, block_size, kv_heads, qk_dim]`, or without a block table
            `[batch, max_len, kv_heads, qk_dim]`. Any strides (HND: permute). Dtype of query, or
            float8_e4m3fn, or int8. heads is a multiple of kv_heads; head h reads KV head
            `h // (heads // kv_heads)`.
        value_cache: the same with v_dim columns, and its own strides.
        context_lens: `[batch] int32`, committed rows before the nodes.
        cu_seqlens_q: `[batch + 1] int32`, ascending from 0.
        max_seqlen_q: at least the nodes of any request.
        block_table: `[batch, max_blocks] int32`, block of each block_size positions. Entries
            behind the last node are not read.
        ancestors: `[tokens, words] int32`; bit `j % 32` of word `j // 32` is set iff the node sees
            node j (`tree.ancestor_words`). None: causal, a chain.
        depths: `[tokens] int32`, depth of each node below the root; None: its index. Only a window
            reads it.
        scale: by default `qk_dim ** -0.5`.
        window: how many positions a node sees, by depth, itself included.
        softcap: bound of the scores.
        sinks: `[heads] float32/float16/bfloat16`, a score without a value, part of every sum.
        key_scale, value_scale: factors of 8-bit caches: `[] float32`, or per token and head
            `[blocks, block_size, kv_heads] float32`; both of one form.
        return_lse: also return lse.
        max_seqlen_k: positions that a request may have, context and nodes; by default what the
            cache holds. Sizes the scratch memory on a GPU; positions behind it are not seen.
        invariant: make the bits of a row independent of the other nodes: see Note.

    Returns:
        out: `[tokens, heads, v_dim]` in the dtype of query. Exact zeros for a node that sees
            nothing, and for tokens of no request.
        lse: `[tokens, heads] float32`, natural log; -inf for such rows (with sinks: the sink, of
            a node). None unless asked for.

    Raises:
        TypeError: an argument has another dtype or type.
        ValueError: shapes or devices do not fit; heads is no multiple of kv_heads; a dim is above
            512; ancestors and window without depths; a window, softcap or max_seqlen_k that isn't
            positive; scales of a cache that isn't 8 bits wide, or of two forms.
        NotImplementedError: an argument requires grad under grad mode; there is no gradient.

    Note:
        Sums are float32; weights may be rounded to the dtype of query before they meet the values
        (GPU: always). Dead slots are never used, NaN in them does no harm. A row depends on its
        request alone (GPU: given max_seqlen_q, which sets the row tile). With `invariant` the root
        of a tree has the bits that it has alone, and nodes of a chain those of the same tokens
        decoded one at a time later. Nodes off the first branch cannot: after compaction their keys
        lie at other positions, and are summed in another order. No synchronisation.

    Source:
        Dao et al. 2023, "Flash-Decoding"; Miao et al. 2024, "SpecInfer", for the tree mask.

    Example:
        >>> cache = torch.tensor([1.0, 2.0, 4.0]).view(1, 3, 1, 1)  # one token, two drafts
        >>> query = torch.zeros(2, 1, 1)  # equal weights
        >>> context, cu = (torch.tensor(x, dtype=torch.int32) for x in ([1], [0, 2]))
        >>> verify_attention(query, cache, cache, context, cu, 2)[0].flatten()
        tensor([1.5000, 2.3333])
        >>> siblings = torch.tensor([[1], [2]], dtype=torch.int32)
        >>> verify_attention(query, cache, cache, context, cu, 2, ancestors=siblings)[0].flatten()
        tensor([1.5000, 2.5000])
    """
    floats = floats_of(query) if isinstance(query, Tensor) else FLOATS
    check("query", query, ("tokens", "heads", "qk_dim"), floats)
    _, heads, qk_dim = query.shape
    device = query.device
    dtypes = (query.dtype, *EIGHT_BITS)
    check("key_cache", key_cache, ("blocks", "block_size", "kv_heads", qk_dim), dtypes, device)
    check("value_cache", value_cache, (*key_cache.shape[:3], "v_dim"), key_cache.dtype, device)
    kv_heads = key_cache.shape[2]
    if kv_heads == 0 or heads % kv_heads:
        raise ValueError(f"query must have a multiple of {kv_heads} heads, got {heads}")
    check_dim("qk_dim", qk_dim)
    check_dim("v_dim", value_cache.shape[3])
    check_queries(context_lens, cu_seqlens_q, max_seqlen_q, block_table, key_cache)
    check_options(query, ancestors, depths, window, softcap, sinks, max_seqlen_k)
    check_scale("key_scale", key_scale, key_cache, key_cache.shape[:3])
    check_scale("value_scale", value_scale, value_cache, value_cache.shape[:3])
    if (key_scale is None) != (value_scale is None) or (
        key_scale is not None and value_scale is not None and key_scale.dim() != value_scale.dim()
    ):
        raise ValueError("key_scale and value_scale must both be given, in one form")
    refuse_grad("verify_attention", query, key_cache, value_cache, sinks, key_scale, value_scale)
    out, lse = _verify_attention(
        query,
        key_cache,
        value_cache,
        context_lens,
        cu_seqlens_q,
        max_seqlen_q,
        block_table,
        ancestors,
        depths,
        float(qk_dim**-0.5 if scale is None else scale),
        window,
        softcap,
        sinks,
        key_scale,
        value_scale,
        return_lse,
        max_seqlen_k,
        invariant,
    )
    return out, (lse if return_lse else None)


@checked_once()
def merge_attention(
    out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor
) -> tuple[Tensor, Tensor]:
    """Merge attention over two disjoint sets of positions into attention over both.

        lse = log(exp(lse_a) + exp(lse_b)),   out = exp(lse_a - lse) out_a + exp(lse_b - lse) out_b

    For a prefix that requests share (cascade attention), and for a context that is split over
    devices. Sinks belong to one of the parts only.

    Args:
        out_a, out_b: `[tokens, heads, dim] float32/float16/bfloat16`, of one dtype.
        lse_a, lse_b: `[tokens, heads] float32`, natural log; -inf where nothing was seen.

    Returns:
        out: `[tokens, heads, dim]`, exact zeros where neither part saw anything.
        lse: `[tokens, heads] float32`.

    Raises:
        TypeError: an argument has another dtype or type.
        ValueError: shapes or devices do not fit.
        NotImplementedError: an argument requires grad under grad mode; there is no gradient.

    Note:
        Sums are float32. Merging more than two parts one after the other is exact up to rounding
        in any order. No synchronisation.

    Example:
        >>> a, b = torch.full((1, 1, 1), 2.0), torch.full((1, 1, 1), 6.0)
        >>> out, lse = merge_attention(a, torch.zeros(1, 1), b, torch.zeros(1, 1))
        >>> out, lse.exp()
        (tensor([[[4.]]]), tensor([[2.]]))
    """
    check("out_a", out_a, ("tokens", "heads", "dim"), FLOATS)
    check("lse_a", lse_a, out_a.shape[:2], torch.float32, out_a.device)
    check("out_b", out_b, out_a.shape, out_a.dtype, out_a.device)
    check("lse_b", lse_b, out_a.shape[:2], torch.float32, out_a.device)
    refuse_grad("merge_attention", out_a, lse_a, out_b, lse_b)
    out, lse = _merge_attention(out_a, lse_a, out_b, lse_b)
    return out, lse


# --------------------------------------------------------------------------- checks


def check_dim(name: str, dim: int) -> None:
    """Check a number of columns of queries, keys or values."""
    if not 1 <= dim <= MAX_DIM:
        raise ValueError(f"{name} must be in [1, {MAX_DIM}], got {dim}")


def check_queries(
    context_lens: Tensor,
    cu_seqlens_q: Tensor,
    max_seqlen_q: int,
    block_table: Tensor | None,
    cache: Tensor,
) -> None:
    """Check what says which tokens belong to a request, and where its rows lie."""
    device = cache.device
    check("context_lens", context_lens, ("batch",), torch.int32, device)
    batch = context_lens.shape[0]
    check("cu_seqlens_q", cu_seqlens_q, (batch + 1,), torch.int32, device)
    if max_seqlen_q < 0:
        raise ValueError(f"max_seqlen_q must be at least 0, got {max_seqlen_q}")
    if block_table is not None:
        check("block_table", block_table, (batch, "max_blocks"), torch.int32, device)
    elif cache.shape[0] != batch:
        raise ValueError(
            f"a cache without block_table must have {batch} rows, one per request, "
            f"got {list(cache.shape)}"
        )


def check_options(
    query: Tensor,
    ancestors: Tensor | None,
    depths: Tensor | None,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
    max_seqlen_k: int | None,
) -> None:
    """Check the keywords that both forms of attention share."""
    tokens, heads = query.shape[:2]
    if ancestors is not None:
        check("ancestors", ancestors, (tokens, "words"), torch.int32, query.device)
        if ancestors.shape[1] == 0:
            raise ValueError(f"ancestors must have at least one word, got {list(ancestors.shape)}")
    if depths is not None:
        check("depths", depths, (tokens,), torch.int32, query.device)
    if sinks is not None:
        check("sinks", sinks, (heads,), floats_of(query), query.device)
    if window is not None and ancestors is not None and depths is None:
        raise ValueError("a window over a tree needs depths")
    check_positive("window", window)
    check_positive("max_seqlen_k", max_seqlen_k)
    check_positive("softcap", softcap)


def check_positive(name: str, value: float | None) -> None:
    """Check an optional number."""
    if value is not None and not value > 0:
        raise ValueError(f"{name} must be positive, got {value}")


def check_scale(name: str, scale: Tensor | None, cache: Tensor, shape: tuple[int, ...]) -> None:
    """Check the factors of an 8-bit cache: one number, or one per token (and head)."""
    if scale is None:
        return
    if cache.dtype not in EIGHT_BITS:
        raise ValueError(f"{name} must be None for a cache of {cache.dtype}")
    check(name, scale, () if scale.dim() == 0 else shape, torch.float32, cache.device)


def refuse_grad(name: str, *tensors: Tensor | None) -> None:
    """Refuse tensors whose gradient would silently be lost."""
    if not torch.is_grad_enabled():
        return
    for tensor in tensors:
        if tensor is not None and tensor.requires_grad:
            raise NotImplementedError(f"{name} has no gradient: call it under torch.no_grad()")


# --------------------------------------------------------------------------- registration


def _call_verify_attention(
    layer: ModuleType,
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    context_lens: Tensor,
    cu_seqlens_q: Tensor,
    max_seqlen_q: int,
    block_table: Tensor | None,
    ancestors: Tensor | None,
    depths: Tensor | None,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
    key_scale: Tensor | None,
    value_scale: Tensor | None,
    return_lse: bool,
    max_seqlen_k: int | None,
    invariant: bool,
) -> tuple[Tensor, Tensor]:
    out, lse = layer.verify_attention(
        query,
        key_cache,
        value_cache,
        context_lens,
        cu_seqlens_q,
        max_seqlen_q,
        block_table=block_table,
        ancestors=ancestors,
        depths=depths,
        scale=scale,
        window=window,
        softcap=softcap,
        sinks=sinks,
        key_scale=key_scale,
        value_scale=value_scale,
        return_lse=return_lse,
        max_seqlen_k=max_seqlen_k,
        invariant=invariant,
    )
    return out, query.new_empty(0, dtype=torch.float32) if lse is None else lse


def _fake_verify_attention(
    query: Tensor, key_cache: Tensor, value_cache: Tensor, *arguments: Any
) -> tuple[Tensor, Tensor]:
    tokens, heads, _ = query.shape
    return_lse = arguments[-3]
    lse_shape = (tokens, heads) if return_lse else (0,)
    return (
        query.new_empty((tokens, heads, value_cache.shape[3])),
        query.new_empty(lse_shape, dtype=torch.float32),
    )


def _call_merge_attention(layer: ModuleType, *arguments: Tensor) -> tuple[Tensor, Tensor]:
    result: tuple[Tensor, Tensor] = layer.merge_attention(*arguments)
    return result


def _fake_merge_attention(
    out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor
) -> tuple[Tensor, Tensor]:
    return out_a.new_empty(out_a.shape), lse_a.new_empty(lse_a.shape)


_verify_attention = register(
    "verify_attention(Tensor query, Tensor key_cache, Tensor value_cache, Tensor context_lens,"
    " Tensor cu_seqlens_q, SymInt max_seqlen_q, Tensor? block_table, Tensor? ancestors,"
    " Tensor? depths, float scale, SymInt? window, float? softcap, Tensor? sinks,"
    " Tensor? key_scale, Tensor? value_scale, bool return_lse, SymInt? max_seqlen_k,"
    " bool invariant) -> (Tensor, Tensor)",
    _call_verify_attention,
    _fake_verify_attention,
)
_merge_attention = register(
    "merge_attention(Tensor out_a, Tensor lse_a, Tensor out_b, Tensor lse_b) -> (Tensor, Tensor)",
    _call_merge_attention,
    _fake_merge_attention,
)
