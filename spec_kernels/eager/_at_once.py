"""Attention of short requests in one call of torch: little time goes where little work is.

Requests of equal size, whose contexts and nodes are one piece, or one each in a contiguous cache,
need no bookkeeping. The calls are those that `attention` makes, so bits are the same.

Between two calls of large products the code of an operation of torch leaves a core's caches, and
each kind of them costs tens of microseconds: so all views are made by one kind, `as_strided`.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from spec_kernels.eager._positions import Place, bias_of, gather, is_piece

PACKED: Final = 1 << 16
"""See `is_packed`; 65,536 keys and values are 512 KiB, a core's second cache."""

ALIKE: Final = 8
"""Most requests of one call of torch's fused attention."""

LONG: Final = 4096
"""Positions above which a few calls more cost nothing."""

CHUNK: Final = 256
"""Positions at a time in invariant calls, and least of a chunk: enough for a matrix product."""

GATHERED: Final = 1 << 23
"""Most bytes of keys and values that are put together in one go: a shared cache holds 8 MiB."""

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
    """Turn `[requests, heads, nodes * group, ...]` into contiguous `[tokens, heads, ...]`."""
    requests, heads, count, *dims = rows.shape
    request, head, row, *rest = rows.stride()
    group = count // nodes
    if dims and (group, request, head, row) == (1, nodes * row, dims[0], heads * dims[0]):
        return rows.as_strided((requests * nodes, heads, *dims), (row, head, 1))  # in order already
    grouped = rows.as_strided(
        (requests, nodes, heads, group, *dims), (request, row * group, head, row, *rest)
    )
    return grouped.reshape(requests * nodes, heads * group, *dims).contiguous()


def positions(rows: Tensor, start: int, stop: int) -> Tensor:
    """Turn `[requests, positions, heads, dim]` into `[requests, heads, stop - start, dim]`."""
    requests, _, heads, dim = rows.shape
    request, position, head, column = rows.stride()
    size, first = (requests, heads, stop - start, dim), rows.storage_offset() + start * position
    return rows.as_strided(size, (request, head, position, column), first)


Sums = tuple[Tensor, Tensor]
"""Attention to some positions: out `[requests, heads, rows, v_dim]` and lse without v_dim. A row
that sees nothing has out 0 and lse -inf."""


def add_piece(whole: Sums, piece: Sums) -> Sums:
    """Merge as `merge_attention`, writing over the first sums."""
    (out, lse), (part, part_lse) = whole, piece
    share = (part_lse - lse).sigmoid_().nan_to_num_(0.0)  # NaN: neither saw anything
    return out.lerp_(part.to(out.dtype), share[..., None]), torch.logaddexp(lse, part_lse)


class Plan(NamedTuple):
    """How requests of equal size are attended together.

    Attributes:
        start: where the masked piece begins; all before it is one without a mask.
        place: of the masked piece.
        rows: heads that the queries are turned to: those of the cache, or their own.
        blocks: of a request.
        bias: of chains; None for trees, and where nothing is hidden.
        wide: dtype of a bias and of sums.
    """

    start: int
    place: Place
    rows: int
    blocks: int
    bias: Tensor | None
    wide: torch.dtype


@lru_cache(maxsize=16)
def plan_for(
    query: torch.Size,
    cache: torch.Size,
    dtype: torch.dtype,
    lens: tuple[int, ...],
    starts: tuple[int, ...],
    table: torch.Size | None,
    is_tree: bool,
    limit: int | None,
) -> Plan | None:
    """Return how the requests are attended, or None: they aren't alike, or are more pieces.
    A plan is made once for all layers of a step.

    Args:
        query, cache, table: shapes.
        lens, starts: `context_lens` and `cu_seqlens_q`.
        limit: `max_seqlen_k`.
    """
    (tokens, heads, dim), batch, (_, size, kv_heads, _) = query, len(lens), cache
    nodes = tokens // batch
    if not nodes or starts != (*range(0, tokens + 1, nodes),) or lens != lens[:1] * batch:
        return None
    if tokens != nodes * batch:  # rows of no request
        return None
    end = lens[0] + nodes
    if end > capacity_of(cache, table, limit):
        return None
    rows = kv_heads if is_packed(nodes, heads, dim, end, dtype) else heads
    group, start = heads // rows, 0
    gathered = 0 if table is None else batch * end * kv_heads * 2 * dim * dtype.itemsize
    if not is_piece(nodes * group, end):
        if table is not None or not 1 < nodes <= CHUNK or end > LONG or not lens[0]:
            return None
        start = lens[0]
    if gathered > GATHERED:
        return None
    place = Place(lens[0] - start, end - start, end - start, nodes, group)
    wide = torch.promote_types(dtype, torch.float32)
    bias = bias_of(place, None, wide)[0] if nodes > 1 and not is_tree else None
    return Plan(start, place, rows, -(-end // size), bias, wide)


def capacity_of(cache: torch.Size, table: torch.Size | None, limit: int | None) -> int:
    """Return how many positions a request may have."""
    capacity = cache[1] * (1 if table is None else table[1])
    return capacity if limit is None else min(capacity, limit)


def attend_at_once(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    lens: list[int],
    starts: list[int],
    block_table: Tensor | None,
    ancestors: Tensor | None,
    scale: float | None,
    limit: int | None,
) -> Tensor | None:
    """Attend from requests of equal size, or return None: they aren't, or are more pieces.

    Args:
        query, key_cache, value_cache: of one dtype and dim, with adjacent columns.
        lens, starts: `context_lens` and `cu_seqlens_q`.
        block_table, ancestors, scale: as in `verify_attention`.
        limit: `max_seqlen_k`.

    Returns:
        `[tokens, heads, v_dim]`.
    """
    if not 0 < len(lens) <= ALIKE:
        return None
    table = None if block_table is None else block_table.shape
    plan = plan_for(
        query.shape, key_cache.shape, query.dtype, tuple(lens), tuple(starts), table,
        ancestors is not None, limit,
    )  # fmt: skip
    if plan is None:
        return None
    keys, values, place, bias, hidden = key_cache, value_cache, plan.place, plan.bias, None
    if block_table is not None:
        blocks = block_table[:, : plan.blocks]
        keys, values = gather(keys, blocks), gather(values, blocks)
    if ancestors is not None:
        bias, hidden = bias_of(place, ancestors, plan.wide)
    start, end = plan.start, plan.start + place.end
    rows = by_head(query, place.nodes, plan.rows)
    k, v = positions(keys, start, end), positions(values, start, end)
    out, lse = FUSED(rows, k, v, attn_mask=bias, scale=scale)
    if start:
        if hidden is not None:
            lse = lse.masked_fill(hidden, -math.inf)
        k, v = positions(keys, 0, start), positions(values, 0, start)
        whole, whole_lse = FUSED(rows, k, v, scale=scale)
        out = add_piece((whole.to(plan.wide), whole_lse), (out, lse))[0].to(query.dtype)
    return by_node(out, place.nodes)
