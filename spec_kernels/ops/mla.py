"""Attention of draft nodes over a cache of latents, in the absorbed form."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from spec_kernels._check import FLOATS, check
from spec_kernels.ops._register import checked_once, register
from spec_kernels.ops.attention import (
    EIGHT_BITS,
    check_dim,
    check_options,
    check_queries,
    check_scale,
    refuse_grad,
)


@checked_once()
def verify_attention_mla(
    query_latent: Tensor,
    query_rope: Tensor,
    latent_cache: Tensor,
    context_lens: Tensor,
    cu_seqlens_q: Tensor,
    max_seqlen_q: int,
    *,
    scale: float,
    block_table: Tensor | None = None,
    ancestors: Tensor | None = None,
    depths: Tensor | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    cache_scale: Tensor | None = None,
    return_lse: bool = False,
    max_seqlen_k: int | None = None,
    invariant: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Attend from draft nodes to a latent cache (multi-head latent attention, absorbed form).

        s_j = (q_latent . c_j + q_rope . r_j) * scale,   out = sum_j exp(s_j - lse) c_j

    A cache row is the latent c_j with the rotary key r_j behind it, shared by all heads. The key
    projection is absorbed into q_latent, the value projection is applied to out by the caller.

    Args:
        query_latent: `[tokens, heads, latent] float32/float16/bfloat16`.
        query_rope: `[tokens, heads, rope]`, the same dtype; rope may be 0.
        latent_cache: `[blocks, block_size, latent + rope]`, or without a block table
            `[batch, max_len, latent + rope]`. Dtype of the queries, float8_e4m3fn or int8.
        context_lens: `[batch] int32`, committed rows before the nodes.
        cu_seqlens_q: `[batch + 1] int32`, ascending from 0.
        max_seqlen_q: at least the nodes of any request.
        scale: `(nope_dim + rope) ** -0.5` in the published models; it can't be read off the
            absorbed shapes.
        block_table, ancestors, depths, window, softcap, sinks: as in `verify_attention`.
        cache_scale: of an 8-bit cache, `[] float32`, or per token `[blocks, block_size] float32`.
        return_lse, max_seqlen_k, invariant: as in `verify_attention`.

    Returns:
        out: `[tokens, heads, latent]` in the dtype of the queries.
        lse: `[tokens, heads] float32`, or None unless asked for.

    Raises:
        TypeError: an argument has another dtype or type.
        ValueError: shapes or devices do not fit, or an option is out of range (see
            `verify_attention`).
        NotImplementedError: an argument requires grad under grad mode; there is no gradient.

    Note:
        As `verify_attention`. On a GPU the cache is read once per 32 rows (node and head) of a
        request, once for keys and values together.

    Source:
        DeepSeek-AI 2024, "DeepSeek-V2", section 2.1.

    Example:
        >>> cache = torch.tensor([[[2.0, 0.0], [4.0, 0.0]]])  # latent and rope of two positions
        >>> query = torch.zeros(1, 3, 1)  # three heads, equal weights
        >>> context, cu = (torch.tensor(x, dtype=torch.int32) for x in ([1], [0, 1]))
        >>> verify_attention_mla(query, query, cache, context, cu, 1, scale=1.0)[0].flatten()
        tensor([3., 3., 3.])
    """
    check("query_latent", query_latent, ("tokens", "heads", "latent"), FLOATS)
    tokens, heads, latent = query_latent.shape
    device = query_latent.device
    check("query_rope", query_rope, (tokens, heads, "rope"), query_latent.dtype, device)
    width = latent + query_rope.shape[2]
    dtypes = (query_latent.dtype, *EIGHT_BITS)
    check("latent_cache", latent_cache, ("blocks", "block_size", width), dtypes, device)
    check_dim("latent", latent)
    check_queries(context_lens, cu_seqlens_q, max_seqlen_q, block_table, latent_cache)
    check_options(query_latent, ancestors, depths, window, softcap, sinks, max_seqlen_k)
    check_scale("cache_scale", cache_scale, latent_cache, latent_cache.shape[:2])
    refuse_grad("verify_attention_mla", query_latent, query_rope, latent_cache, sinks, cache_scale)
    out, lse = _verify_attention_mla(
        query_latent,
        query_rope,
        latent_cache,
        context_lens,
        cu_seqlens_q,
        max_seqlen_q,
        float(scale),
        block_table,
        ancestors,
        depths,
        window,
        softcap,
        sinks,
        cache_scale,
        return_lse,
        max_seqlen_k,
        invariant,
    )
    return out, (lse if return_lse else None)


def _call_verify_attention_mla(
    layer: ModuleType,
    query_latent: Tensor,
    query_rope: Tensor,
    latent_cache: Tensor,
    context_lens: Tensor,
    cu_seqlens_q: Tensor,
    max_seqlen_q: int,
    scale: float,
    block_table: Tensor | None,
    ancestors: Tensor | None,
    depths: Tensor | None,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
    cache_scale: Tensor | None,
    return_lse: bool,
    max_seqlen_k: int | None,
    invariant: bool,
) -> tuple[Tensor, Tensor]:
    out, lse = layer.verify_attention_mla(
        query_latent,
        query_rope,
        latent_cache,
        context_lens,
        cu_seqlens_q,
        max_seqlen_q,
        scale=scale,
        block_table=block_table,
        ancestors=ancestors,
        depths=depths,
        window=window,
        softcap=softcap,
        sinks=sinks,
        cache_scale=cache_scale,
        return_lse=return_lse,
        max_seqlen_k=max_seqlen_k,
        invariant=invariant,
    )
    return out, query_latent.new_empty(0, dtype=torch.float32) if lse is None else lse


def _fake_verify_attention_mla(query_latent: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
    return_lse = arguments[-3]
    return (
        query_latent.new_empty(query_latent.shape),
        query_latent.new_empty(query_latent.shape[:2] if return_lse else (0,), dtype=torch.float32),
    )


_verify_attention_mla = register(
    "verify_attention_mla(Tensor query_latent, Tensor query_rope, Tensor latent_cache,"
    " Tensor context_lens, Tensor cu_seqlens_q, SymInt max_seqlen_q, float scale,"
    " Tensor? block_table, Tensor? ancestors, Tensor? depths, SymInt? window, float? softcap,"
    " Tensor? sinks, Tensor? cache_scale, bool return_lse, SymInt? max_seqlen_k, bool invariant)"
    " -> (Tensor, Tensor)",
    _call_verify_attention_mla,
    _fake_verify_attention_mla,
)
