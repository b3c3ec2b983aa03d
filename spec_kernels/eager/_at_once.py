"""Attention of short requests in one call of torch: little time goes where little work is.

Requests of equal size, whose contexts and nodes are one piece, need no merging and no bookkeeping.
The call is the one that `attention` makes for such a piece of each of them, so bits are the same.

Between two calls of large products the code of an operation of torch leaves a core's caches, and
each kind of them costs tens of microseconds: so all views are made by one kind, `as_strided`.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor

from spec_kernels.eager._positions import Place, bias_of, gather, is_piece

PACKED: Final = 1 << 16
"""See `is_packed`; 65,536 keys and values are 512 KiB, a core's second cache."""

ALIKE: Final = 8
"""Most requests of one call of torch's fused attention."""

GATHERED: Final = 1 << 20
"""Most floats of keys and values together that are gathered: 4 MiB, which a shared cache holds."""

FUSED: Final[Any] = torch._scaled_dot_product_flash_attention_for_cpu
"""Torch's fused attention. The same of `torch.ops` costs 25 to 75 us more a call."""


def is_packed(nodes: int, heads: int, dim: int, end: int, dtype: torch.dtype) -> bool:
    """Tell that the heads of a KV head become rows of one matrix: it costs copies of the queries,
    which few nodes pay back where products are large (those of 16-bit numbers are), and many where
    keys outgrow a core's cache.
    """
    size = end * dim * (1 if nodes >= 32 else heads / 2) * (2 if dtype.itemsize == 2 else 1)
    return nodes == 1 or size > PACKED


def is_direct(query: Tensor, keys: Tensor, values: Tensor) -> bool:
    """Tell that torch's fused attention takes these rows as they are."""
    dim = query.shape[2]
    return (
        keys.dtype == query.dtype
        and values.shape[3] == dim
        and query.stride(2) == keys.stride(3) == values.stride(3) == 1
    )


def by_head(query: Tensor, nodes: int, heads: int) -> Tensor:
    """Turn `[tokens, heads * group, dim]` into `[requests, heads, nodes * group, dim]`."""
    tokens, all_heads, dim = query.shape
    token, head, column = query.stride()
    requests, group = tokens // nodes, all_heads // heads
    if group == 1:
        return query.as_strided((requests, heads, nodes, dim), (nodes * token, head, token, column))
    grouped = query.as_strided(
        (requests, heads, nodes, group, dim), (nodes * token, group * head, token, head, column)
    )
    return grouped.reshape(requests, heads, nodes * group, dim)


def by_node(rows: Tensor, nodes: int) -> Tensor:
    """Turn `[requests, heads, nodes * group, ...]` into `[tokens, heads * group, ...]`."""
    requests, heads, count, *dims = rows.shape
    request, head, row, *rest = rows.stride()
    group = count // nodes
    grouped = rows.as_strided(
        (requests, nodes, heads, group, *dims), (request, row * group, head, row, *rest)
    )
    return grouped.reshape(requests * nodes, heads * group, *dims)


def first_positions(rows: Tensor, end: int) -> Tensor:
    """Turn `[requests, positions, heads, dim]` into `[requests, heads, end, dim]`."""
    requests, _, heads, dim = rows.shape
    request, position, head, column = rows.stride()
    return rows.as_strided((requests, heads, end, dim), (request, head, position, column))


def attend_at_once(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    lens: list[int],
    starts: list[int],
    block_table: Tensor | None,
    ancestors: Tensor | None,
    scale: float | None,
    capacity: int,
) -> Tensor | None:
    """Attend from requests of equal size, or return None: they aren't, or are more than a piece.

    Args:
        query, key_cache, value_cache: of one dtype and dim, with adjacent columns.
        lens, starts: `context_lens` and `cu_seqlens_q`.
        block_table, ancestors, scale: as in `verify_attention`.
        capacity: positions that a request may have.

    Returns:
        `[tokens, heads, v_dim]`.
    """
    (tokens, heads, dim), batch = query.shape, len(lens)
    nodes = tokens // batch if batch else 0
    if not nodes or batch > ALIKE or starts != [*range(0, tokens + 1, nodes)]:
        return None
    if tokens != nodes * batch:  # rows of no request
        return None
    end, kv_heads = lens[0] + nodes, key_cache.shape[2]
    if end > capacity or (batch > 1 and lens != lens[:1] * batch):
        return None
    wide = torch.float64 if query.dtype == torch.float64 else torch.float32
    dtype = query.dtype if block_table is None else wide
    rows = kv_heads if is_packed(nodes, heads, dim, end, dtype) else heads
    group = heads // rows
    if not is_piece(nodes * group, end):
        return None
    keys, values = key_cache, value_cache
    if block_table is not None:
        size = keys.shape[1]
        table = block_table[:, : -(-end // size)]
        if 2 * table.numel() * size * kv_heads * dim > GATHERED:
            return None
        keys, values = (gather(x, table).to(wide) for x in (keys, values))
        query = query.to(wide)
    bias = None
    if nodes > 1 or ancestors is not None:
        bias = bias_of(Place(lens[0], end, end, nodes, group), ancestors, wide)
    keys, values = first_positions(keys, end), first_positions(values, end)
    query = by_head(query, nodes, rows)
    return by_node(FUSED(query, keys, values, attn_mask=bias, scale=scale)[0], nodes)
