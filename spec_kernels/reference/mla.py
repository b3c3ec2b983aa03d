"""Attention of draft nodes over a cache of latents, in float64.

    s_j = (q_latent . c_j + q_rope . r_j) * scale,   out = sum_j exp(s_j - lse) c_j

A cache row is the latent c_j and, behind it, the rotary key r_j; every head reads the same rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from spec_kernels.reference.attention import verify_attention


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
    """Attend from the nodes of every request to latents: `verify_attention` with one KV head.

    Args:
        query_latent: `[tokens, heads, latent]`, absorbed queries.
        query_rope: `[tokens, heads, rope]`.
        latent_cache: `[blocks, block_size, latent + rope]`, or `[batch, max_len, latent + rope]`.
        context_lens, cu_seqlens_q, max_seqlen_q: as in `verify_attention`.
        scale: of the scores.
        block_table, ancestors, depths, window, softcap, sinks: as in `verify_attention`.
        cache_scale: of an 8-bit cache, one number or `[blocks, block_size]`.
        return_lse, max_seqlen_k, invariant: as in `verify_attention`.

    Example:
        >>> c = torch.ones(1, 2, 3)
        >>> lens, cu = torch.tensor([1]), torch.tensor([0, 1])
        >>> out, _ = verify_attention_mla(c[:, :1, :2], c[:, :1, :1], c, lens, cu, 1, scale=1.0)
        >>> out.round(decimals=6).tolist()
        [[[1.0, 1.0]]]
    """
    if cache_scale is not None and cache_scale.dim() == 2:
        cache_scale = cache_scale.unsqueeze(2)
    keys = latent_cache.unsqueeze(2)
    return verify_attention(
        torch.cat([query_latent, query_rope], 2),
        keys,
        keys[..., : query_latent.shape[2]],
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
        key_scale=cache_scale,
        value_scale=cache_scale,
        return_lse=return_lse,
        max_seqlen_k=max_seqlen_k,
        invariant=invariant,
    )
