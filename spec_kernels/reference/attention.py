"""Attention of draft nodes over a cache, in float64: one softmax per node over what it sees.

    s_j = softcap * tanh(q . k_j * scale / softcap), or q . k_j * scale
    out = sum_j exp(s_j - lse) v_j,   lse = log sum_j exp(s_j)

Position j < context belongs to the context and lies at depth j - context below 0; position
context + n is node n. A sink adds exp(sink) to the sum of every row and no value.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def is_ancestor(ancestors: Tensor | None, token: int, node: int, other: int) -> bool:
    """Say whether a node sees another one: by bit `other` of its words, or `other <= node`.

    Example:
        >>> is_ancestor(torch.tensor([[5]]), 0, 2, 0), is_ancestor(torch.tensor([[5]]), 0, 2, 1)
        (True, False)
    """
    if ancestors is None:
        return other <= node
    word = other // 32
    return word < ancestors.shape[1] and bool((int(ancestors[token, word]) >> (other % 32)) & 1)


def visible_positions(
    context: int,
    end: int,
    first_token: int,
    node: int,
    ancestors: Tensor | None,
    depths: Tensor | None,
    window: int | None,
) -> list[int]:
    """List the positions that a node sees, in order.

    Args:
        context, end: positions of the context, and of context and nodes.
        first_token: token of the request's node 0.
        node: the one that looks.
        ancestors, depths, window: as in `verify_attention`.

    Example:
        >>> visible_positions(2, 5, 0, 1, None, None, None)
        [0, 1, 2, 3]
        >>> visible_positions(2, 5, 0, 1, None, None, 3)
        [1, 2, 3]
    """

    def depth(position: int) -> int:
        index = position - context
        return index if index < 0 or depths is None else int(depths[first_token + index])

    seen = list(range(min(context, end)))
    for other in range(end - context):
        if is_ancestor(ancestors, first_token + node, node, other):
            seen.append(context + other)
    if window is None:
        return seen
    own = depth(context + node)
    return [position for position in seen if depth(position) > own - window]


def read_rows(
    cache: Tensor, scale: Tensor | None, block_table: Tensor | None, request: int, seen: list[int]
) -> Tensor:
    """Return the rows of a request at some positions, scaled, in float64: `[seen, kv_heads, dim]`.

    Args:
        cache: `[blocks, block_size, kv_heads, dim]`, or `[batch, max_len, kv_heads, dim]`.
        scale: of an 8-bit cache, one number or `[blocks, block_size, kv_heads]`; or None.
        block_table: `[batch, max_blocks] int32`, or None: contiguous.
        request: whose rows.
        seen: positions.
    """
    slots = torch.tensor(seen, dtype=torch.int64)
    block = torch.full_like(slots, request)
    if block_table is not None:
        block, slots = block_table[request].long()[slots // cache.shape[1]], slots % cache.shape[1]
    rows = cache[block, slots].double()
    if scale is None:
        return rows
    factor = scale.double() if scale.dim() < 3 else scale[block, slots].double()[..., None]
    return rows * factor


def attend(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Attend from the heads of one node to what it sees, in float64.

    Args:
        query: `[heads, qk_dim]`; head h belongs to KV head `h // (heads // kv_heads)`.
        keys: `[seen, kv_heads, qk_dim]`.
        values: `[seen, kv_heads, v_dim]`.
        scale, softcap, sinks: as in `verify_attention`.

    Returns:
        out: `[heads, v_dim]`, 0 where nothing is seen.
        lse: `[heads]`, -inf where nothing is seen and there is no sink.
    """
    heads, kv_heads = query.shape[0], keys.shape[1]
    group = torch.arange(heads) // (heads // kv_heads)
    scores = torch.einsum("hd,jhd->hj", query.double(), keys[:, group]) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    sink = torch.full((heads, 1), -math.inf) if sinks is None else sinks[:, None]
    lse = torch.cat([scores, sink.double()], 1).logsumexp(1)
    weights = torch.exp(scores - lse[:, None])
    return torch.einsum("hj,jhd->hd", weights, values[:, group]), lse


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
    """Attend from the nodes of every request to its context and their ancestors.

    Args:
        query: `[tokens, heads, qk_dim]`.
        key_cache: `[blocks, block_size, kv_heads, qk_dim]`, or `[batch, max_len, ...]`.
        value_cache: the same with v_dim columns.
        context_lens: `[batch] int32`.
        cu_seqlens_q: `[batch + 1] int32`.
        max_seqlen_q: not needed here.
        block_table: `[batch, max_blocks] int32`, or None for contiguous caches.
        ancestors: `[tokens, words] int32`, or None: causal.
        depths: `[tokens] int32`, or None: the node's index.
        scale: of the scores, by default `qk_dim ** -0.5`.
        window: visible positions by depth, the own one included.
        softcap: bound of the scores.
        sinks: `[heads]`.
        key_scale, value_scale: of 8-bit caches.
        return_lse: also return the log-sum-exp.
        max_seqlen_k: positions that a request may have.
        invariant: no effect in float64.

    Returns:
        out: `[tokens, heads, v_dim] float64`; rows of no request are 0.
        lse: `[tokens, heads] float64`, or None.

    Example:
        >>> x = torch.ones(1, 2, 1, 1)
        >>> lens, cu = torch.tensor([1]), torch.tensor([0, 1])
        >>> out, lse = verify_attention(x[0, :1], x, 3 * x, lens, cu, 1, return_lse=True)
        >>> round(out.item(), 6), round(lse.exp().item(), 4)  # two equal scores of 1
        (3.0, 5.4366)
    """
    tokens, heads, qk_dim = query.shape
    scale = qk_dim**-0.5 if scale is None else scale
    capacity = key_cache.shape[1] * (1 if block_table is None else block_table.shape[1])
    capacity = capacity if max_seqlen_k is None else min(capacity, max_seqlen_k)
    out = torch.zeros(tokens, heads, value_cache.shape[3], dtype=torch.float64)
    lse = torch.full((tokens, heads), -math.inf, dtype=torch.float64)
    for b in range(context_lens.shape[0]):
        first, last = int(cu_seqlens_q[b]), int(cu_seqlens_q[b + 1])
        context = int(context_lens[b])
        end = min(context + last - first, capacity)
        for token in range(first, last):
            node = token - first
            seen = visible_positions(context, end, first, node, ancestors, depths, window)
            keys = read_rows(key_cache, key_scale, block_table, b, seen)
            values = read_rows(value_cache, value_scale, block_table, b, seen)
            out[token], lse[token] = attend(query[token], keys, values, scale, softcap, sinks)
    out = torch.where((lse == -math.inf)[..., None], 0.0, out)
    return out, (lse if return_lse else None)


def merge_attention(
    out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor
) -> tuple[Tensor, Tensor]:
    """Merge attention over two disjoint sets of positions into that over both.

    Args:
        out_a, out_b: `[tokens, heads, dim]`.
        lse_a, lse_b: `[tokens, heads]`.

    Example:
        >>> out, lse = merge_attention(torch.zeros(1, 1, 1), torch.zeros(1, 1),
        ...                            torch.ones(1, 1, 1), torch.zeros(1, 1))
        >>> out, lse.exp()
        (tensor([[[0.5000]]], dtype=torch.float64), tensor([[2.]], dtype=torch.float64))
    """
    lse = torch.logaddexp(lse_a.double(), lse_b.double())
    seen = lse > -math.inf
    weight_a = torch.where(seen, torch.exp(lse_a.double() - lse), 0.0)[..., None]
    weight_b = torch.where(seen, torch.exp(lse_b.double() - lse), 0.0)[..., None]
    return weight_a * out_a.double() + weight_b * out_b.double(), lse
