"""Attention of draft nodes over a cache: piece by piece, merged by their sums.

    s_j = softcap * tanh(q . k_j * scale / softcap), or q . k_j * scale
    out = sum_j exp(s_j - lse) v_j,   lse = log sum_j exp(s_j)

Request by request. The query heads that share a KV head are rows of one matrix, so keys and values
are read once.

1. Positions are cut into pieces: those that every node sees, without a mask, and those that meet
   the draft block or the edge of a window, with one. Short requests are one piece.
2. A piece goes through torch's fused attention, which writes no scores; with a soft cap, or values
   of another dim than keys, through two matrix products.
3. Rows of a contiguous cache in the dtype of the queries are read where they lie, all context at
   once. Blocks of it that are one piece are put together. Others, and those that need float32 for
   lse or sinks, are copied chunk by chunk to float32 (float64 if the query is).

Memory: what is held beside inputs and outputs doesn't grow with the context, and no
`[tokens, context + nodes]` mask exists. In floats, with rows = nodes * heads of a request (of up to
`ALIKE` neighbours of equal size, where nothing is copied) and `Options.chunk` positions:

    rows * (4 * v_dim + qk_dim + 3 * chunk)             sums and queries; mask or scores of a piece
    + 2 * chunk * kv_heads * (qk_dim + v_dim)           one copied chunk; nothing if read in place

where chunk * kv_heads * (qk_dim + v_dim) <= `COPIED`, unless `CHUNK` positions are more; blocks
that are one piece take up to `GATHERED` bytes. Small masks are remembered, 32 MiB at most.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise
from typing import Final, NamedTuple

import torch
from torch import Tensor

from spec_kernels.eager._at_once import (
    ALIKE,
    CHUNK,
    FUSED,
    GATHERED,
    LONG,
    Sums,
    add_piece,
    attend_at_once,
    by_head,
    by_node,
    capacity_of,
    is_packed,
)
from spec_kernels.eager._positions import CacheReader, Sight, is_piece

HELD: Final = 1 << 14
"""Floats of queries that are attended in one go over a long cache that is read in place, one KV
head at least: their sums are what is held."""

COPIED: Final = 1 << 20
"""Floats of a chunk of keys and values: 4 MiB, which stay in a shared cache while they are used."""


class Options(NamedTuple):
    """What does not change from request to request.

    Attributes:
        scale, softcap, sinks, returns_lse, invariant: of the call.
        is_fused: whether torch's fused attention computes what is asked for.
        is_in_place: whether it takes keys and values from where they lie.
        dtype: of products; that of the cache if `is_in_place`, else `wide`.
        wide: float32, or float64 if the query is.
        chunk: positions that are copied or masked at a time.
        gathered: positions that are put together from blocks in the dtype of the queries.
        heads: of the queries.
    """

    scale: float
    softcap: float | None
    sinks: Tensor | None
    returns_lse: bool
    invariant: bool
    is_fused: bool
    is_in_place: bool
    dtype: torch.dtype
    wide: torch.dtype
    chunk: int
    gathered: int
    heads: int

    @classmethod
    def make(
        cls,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        is_paged: bool,
        *,
        scale: float | None,
        softcap: float | None,
        sinks: Tensor | None,
        returns_lse: bool,
        invariant: bool,
    ) -> Options:
        """Decide how a call is made."""
        dim, row = keys.shape[3], keys.shape[2] * (keys.shape[3] + values.shape[3])
        wide = torch.promote_types(query.dtype, torch.float32)
        is_fused = softcap is None and not invariant and dim == values.shape[3] > 0
        is_at_hand = is_fused and not is_paged and keys.stride(3) == values.stride(3) == 1
        is_narrow = is_fused and keys.dtype == query.dtype and sinks is None
        dtype = query.dtype if is_narrow and is_at_hand else wide
        return cls(
            dim**-0.5 if scale is None else scale,
            softcap,
            sinks,
            returns_lse,
            invariant,
            is_fused,
            is_at_hand and keys.dtype == dtype,
            dtype,
            wide,
            min(max(COPIED // max(row, 1) // CHUNK, 1), 8) * CHUNK,
            GATHERED // (row * query.itemsize) if is_narrow and is_paged else 0,
            query.shape[1],
        )

    def for_nodes(self, nodes: int, end: int, query: Tensor, kv_heads: int) -> Options:
        """Decide for a request: blocks of a short one are put together in the dtype of queries."""
        heads, dim = query.shape[1:]
        is_grouped = is_packed(nodes, heads, dim, end, query.dtype)
        rows = nodes * heads // kv_heads if is_grouped else nodes
        if end > self.gathered or not is_piece(rows, end):
            return self
        return self._replace(dtype=query.dtype, chunk=max(end, self.chunk))

    @property
    def is_lse_rough(self) -> bool:
        """Tell that torch's lse is good for merging, but not to be returned."""
        return self.dtype != self.wide


def attend_plain(
    query: Tensor, keys: Tensor, values: Tensor, bias: Tensor | None, softcap: float | None
) -> Sums:
    """Attend to the positions of a piece by two matrix products.

    Args:
        query: `[1, kv_heads, rows, qk_dim]`, scaled.
        keys, values: `[1, kv_heads, positions, dim]`.
        bias: `[1, 1, rows, positions]`, or None: all are seen.
        softcap: bound of the scores, or None.
    """
    scores = torch.matmul(query, keys.transpose(2, 3))
    if softcap is not None:
        scores.mul_(1.0 / softcap).tanh_().mul_(softcap)
    if bias is not None:
        scores.add_(bias)
    largest = scores.amax(-1, keepdim=True)
    if bias is not None:
        largest.masked_fill_(largest == -math.inf, 0.0)
    weights = scores.sub_(largest).exp_()
    total = weights.sum(-1, keepdim=True)  # at least 1, or 0
    out = torch.matmul(weights, values).div_(total.clamp(min=1.0))
    return out, largest.add_(total.log_())[..., 0]


def attend_fused(
    query: Tensor, keys: Tensor, values: Tensor, bias: Tensor | None, scale: float
) -> Sums:
    """Do as `attend_plain` in one call that writes no scores; rows that see nothing get lse 0."""
    out, lse = FUSED(query, keys, values, attn_mask=bias, scale=scale)
    return out, lse


def attend_pieces(
    query: Tensor, keys: CacheReader, values: CacheReader, sight: Sight, options: Options
) -> Sums:
    """Attend to all positions in the dtype of `query`: `[requests, heads, nodes * group, dim]`,
    with heads those of the cache, or with group 1 any multiple.
    """
    group, dtype = query.shape[2] // sight.nodes, query.dtype
    is_in_place = options.is_in_place and dtype == options.dtype
    if not options.is_fused:
        query = query * options.scale
    whole: Sums | None = None
    for start, stop, is_masked in sight.pieces(group, options.chunk, is_in_place):
        k, v = keys.read(start, stop, dtype), values.read(start, stop, dtype)
        bias = hidden = None
        if is_masked:
            bias, hidden = sight.bias(start, stop, group, options.wide)
        if options.is_fused:
            out, lse = attend_fused(query, k, v, bias, options.scale)
            if hidden is not None:
                lse = lse.masked_fill(hidden, -math.inf)
        else:
            out, lse = attend_plain(query, k, v, bias, options.softcap)
        if whole is None:
            whole = out, lse
        else:
            whole = add_piece((whole[0].to(options.wide), whole[1]), (out, lse))
        del k, v, bias, out, lse  # before the next piece is copied
    return nothing(query, values) if whole is None else whole


def nothing(query: Tensor, values: CacheReader) -> Sums:
    """Return attention to no positions."""
    out = query.new_zeros(*query.shape[:3], values.cache.shape[3])
    return out, out.new_full(out.shape[:3], -math.inf)


def attend_node_by_node(
    query: Tensor, keys: CacheReader, values: CacheReader, sight: Sight, options: Options
) -> Sums:
    """Do as `attend_pieces` with matrices of one shape, so that a node's bits don't depend on its
    neighbours: one node at a time, over chunks at absolute positions, masked to their full length.
    """
    _, kv_heads, _, dim = query.shape
    parts = [part.contiguous() for part in (query * options.scale).chunk(sight.nodes, 2)]
    whole = [nothing(part, values) for part in parts]
    k = query.new_zeros(1, kv_heads, CHUNK, dim)
    v = query.new_zeros(1, kv_heads, CHUNK, values.cache.shape[3])
    for start in range(0, sight.end, CHUNK):
        stop = min(start + CHUNK, sight.end)
        k[:, :, : stop - start] = keys.read(start, stop, query.dtype)
        v[:, :, : stop - start] = values.read(start, stop, query.dtype)
        bias, _ = sight.bias(start, start + CHUNK, 1, query.dtype)
        for node, part in enumerate(parts):
            sums = attend_plain(part, k, v, bias[:, :, node : node + 1], options.softcap)
            whole[node] = add_piece(whole[node], sums)
    outs, lses = zip(*whole, strict=True)
    return torch.cat(outs, 2), torch.cat(lses, 2)


def attend_requests(
    query: Tensor, keys: CacheReader, values: CacheReader, sight: Sight, options: Options
) -> tuple[Tensor, Tensor | None]:
    """Attend from the nodes of one request, or of several that are alike.

    Args:
        query: `[requests * nodes, heads, qk_dim]`.
        keys, values: the cache of the requests.
        sight: what their nodes see.
        options: of the call.

    Returns:
        out: `[requests * nodes, heads, v_dim]`.
        lse: `[requests * nodes, heads]`; None unless needed.
    """
    (tokens, heads, dim), kv_heads = query.shape, keys.cache.shape[2]
    options = options.for_nodes(sight.nodes, sight.end, query, kv_heads)
    needs_lse = options.returns_lse or options.sinks is not None
    is_small = sight.end <= LONG or tokens * heads * dim <= HELD
    if is_small or needs_lse or not options.is_in_place:
        return attend_heads(query, keys, values, sight, options)
    group = heads // kv_heads
    step = max(HELD // (tokens * group * dim), 1)
    out = query.new_empty(tokens, heads, dim)
    for first in range(0, kv_heads, step):
        own = slice(first * group, (first + step) * group)
        k, v = (x.of_heads(first, first + step) for x in (keys, values))
        out[:, own] = attend_heads(query[:, own], k, v, sight, options)[0]
    return out, None


def attend_heads(
    query: Tensor, keys: CacheReader, values: CacheReader, sight: Sight, options: Options
) -> tuple[Tensor, Tensor | None]:
    """Do as `attend_requests` for all heads together."""
    (_, heads, dim), nodes = query.shape, sight.nodes
    if not options.is_fused or is_packed(nodes, options.heads, dim, sight.end, options.dtype):
        heads = keys.cache.shape[2]
    rows = by_head(query, nodes, heads)
    if rows.stride(3) != 1:
        rows = rows.contiguous()
    if rows.dtype != options.dtype:
        rows = rows.to(options.dtype)
    attend = attend_node_by_node if options.invariant else attend_pieces
    out, lse = attend(rows, keys, values, sight, options)
    if not options.returns_lse and options.sinks is None:
        return by_node(out.to(query.dtype), nodes), None
    if options.is_lse_rough:
        lse = attend_pieces(rows.to(options.wide), keys, values, sight, options)[1]
    out, lse = by_node(out, nodes), by_node(lse, nodes)
    if options.sinks is None:
        return out, lse
    whole = torch.logaddexp(lse, options.sinks.to(lse.dtype))
    return out * (lse - whole).exp_()[..., None], whole


def runs(context_lens: list[int], starts: list[int], most: int) -> Iterator[tuple[int, int]]:
    """Yield runs of requests with equal numbers of positions and nodes, at most `most` of them."""
    sizes = list(zip(context_lens, (b - a for a, b in pairwise(starts)), strict=True))
    begin = 0
    for b in range(1, len(sizes) + 1):
        if b == len(sizes) or b - begin == most or sizes[b] != sizes[begin]:
            if sizes[begin][1]:
                yield begin, b
            begin = b


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
        query: `[tokens, heads, qk_dim]` float.
        key_cache, value_cache: `[blocks, block_size, kv_heads, dim]`, or `[batch, max_len, ...]`.
        context_lens, cu_seqlens_q: `[batch]` and `[batch + 1] int32`; max_seqlen_q is not needed.
        block_table: `[batch, max_blocks] int32`, or None for contiguous caches.
        ancestors, depths: `[tokens, words]` and `[tokens] int32`, or None: causal, the index.
        scale, softcap: of the scores; scale is by default `qk_dim ** -0.5`.
        window: visible positions by depth, the own one included.
        sinks: `[heads]`.
        key_scale, value_scale: of 8-bit caches.
        return_lse: also return the log-sum-exp; `out` has the same bits without.
        max_seqlen_k: positions that a request may have.
        invariant: attend node by node, and chunks by absolute position.

    Returns:
        out: `[tokens, heads, v_dim]` in the dtype of query; rows of no request are 0.
        lse: `[tokens, heads] float32`, or None.

    Example:
        >>> x = torch.ones(1, 2, 1, 1)
        >>> lens, cu = torch.tensor([1]), torch.tensor([0, 1])
        >>> verify_attention(x[0, :1], x, 3 * x, lens, cu, 1)
        (tensor([[[3.]]]), None)
    """
    lens, starts = context_lens.tolist(), cu_seqlens_q.tolist()
    is_plain = softcap is None and window is None and sinks is None and key_scale is None
    if is_plain and not (return_lse or invariant):
        out = attend_at_once(
            query, key_cache, value_cache, lens, starts, block_table, ancestors, scale, max_seqlen_k
        )
        if out is not None:
            return out, None
    table = None if block_table is None else block_table.shape
    capacity = capacity_of(key_cache.shape, table, max_seqlen_k)
    options = Options.make(
        query, key_cache, value_cache, block_table is not None,
        scale=scale, softcap=softcap, sinks=sinks, returns_lse=return_lse, invariant=invariant,
    )  # fmt: skip
    parts: list[tuple[slice, Tensor, Tensor | None]] = []
    is_copied = not options.is_in_place or (return_lse and options.is_lse_rough)
    for begin, end in runs(lens, starts, 1 if is_copied or window is not None else ALIKE):
        own = slice(starts[begin], starts[end])
        nodes = starts[begin + 1] - own.start
        sight = Sight(
            lens[begin],
            nodes,
            min(lens[begin] + nodes, capacity),
            None if ancestors is None else ancestors[own],
            None if depths is None else depths[own],
            window,
        )
        keys = CacheReader(key_cache, key_scale, block_table, begin, end)
        values = CacheReader(value_cache, value_scale, block_table, begin, end)
        parts.append((own, *attend_requests(query[own], keys, values, sight, options)))
    return joined(parts, query, value_cache.shape[3], return_lse)


def joined(
    parts: list[tuple[slice, Tensor, Tensor | None]], query: Tensor, dim: int, returns_lse: bool
) -> tuple[Tensor, Tensor | None]:
    """Put the results of requests together, 0 and -inf where there are none."""
    if len(parts) == 1 and len(parts[0][1]) == len(query):
        _, out, lse = parts[0]
        return out.to(query.dtype), lse.float() if returns_lse and lse is not None else None
    out = query.new_zeros(*query.shape[:2], dim)
    lse = query.new_full(out.shape[:2], -math.inf, dtype=torch.float32) if returns_lse else None
    for own, part, part_lse in parts:
        out[own] = part
        if lse is not None and part_lse is not None:
            lse[own] = part_lse
    return out, lse


def merge_attention(
    out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor
) -> tuple[Tensor, Tensor]:
    """Merge attention over two disjoint sets of positions into that over both.

    Example:
        >>> out, lse = merge_attention(torch.zeros(1, 1, 1), torch.zeros(1, 1),
        ...                            torch.ones(1, 1, 1), torch.zeros(1, 1))
        >>> out, lse.exp()
        (tensor([[[0.5000]]]), tensor([[2.]]))
    """
    lse = torch.logaddexp(lse_a, lse_b)
    origin = lse.masked_fill(lse == -math.inf, 0.0)
    out = out_a * (lse_a - origin).exp()[..., None] + out_b * (lse_b - origin).exp()[..., None]
    return out.to(out_a.dtype), lse
