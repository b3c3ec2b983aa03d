"""Attention of draft nodes over a cache of latents, in the absorbed form (multi-head latent
attention).

    s = (q_latent . c + q_rope . r) * scale,   out = sum_j exp(s_j - lse) c_j

A cache row is the latent c and, behind it, the rotary key r; all heads share it, and values are the
latents themselves. The kernels are those of `attention`: one KV head, whose values are the first
columns of its keys, so a tile of the cache is read once for both.

Traffic: the cache once per request and tile of 32 rows (16 on AMD), a row being a node and a head:
one node of 128 heads reads it 4 times, of 16 heads once. Neighbouring programs read the same tile,
so what misses the cache of the chip is less.
"""

from __future__ import annotations

from torch import Tensor

from spec_kernels.kernels.attention import Options, attend


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
    """Attend from the nodes of every request to latents: two launches."""
    if cache_scale is not None and cache_scale.dim() == 2:
        cache_scale = cache_scale.unsqueeze(2)
    options = Options(
        block_table, ancestors, depths, scale, window, softcap, sinks, cache_scale, cache_scale,
        return_lse, max_seqlen_k, invariant,
    )  # fmt: skip
    keys = latent_cache.unsqueeze(2)
    values = keys[..., : query_latent.shape[2]]
    return attend(
        query_latent, query_rope, keys, values, context_lens, cu_seqlens_q, max_seqlen_q, options
    )
