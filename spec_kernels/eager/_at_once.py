"""Attention of short requests in one call of torch: little time goes where little work is.

Requests of equal size, whose contexts and nodes are one piece, or one each in a contiguous cache,
need no bookkeeping. The calls are those that `attention` makes, so bits are the same.

Between two calls of large products code leaves a core's caches, and then each kind of operation of
torch costs tens of microseconds, and Python several times what it costs otherwise. So all views
are made by one kind, `as_strided`, and what is known of a call is looked up at once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from ctypes import string_at
from functools import lru_cache
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from spec_kernels.eager._positions import AT_ONCE, Bias, Place, bias_of, gather, is_piece

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

WORDS: Final = 1 << 12
"""Most bytes of ancestor words by which a call is remembered."""

FUSED: Final[Any] = torch._scaled_dot_product_flash_attention_for_cpu
"""Torch's fused attention. The same of `torch.ops` costs 25 to 75 us more a call."""


def is_packed(nodes: int, heads: int, dim: int, end: int, dtype: torch.dtype) -> bool:
    """Tell that the heads of a KV head become rows of one matrix: it costs copies of the queries,
    which pay where products are large. Those of many nodes are, and those of 16-bit numbers."""
    heads_worth = 2 if nodes >= 32 else heads / 2 * (2 if dtype.itemsize == 2 else 1)
    return nodes == 1 or end * dim * heads_worth > PACKED


class View(NamedTuple):
    """A view of a tensor: its sizes and strides, and where it begins in the tensor."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    first: int = 0

    def of(self, tensor: Tensor) -> Tensor:
        """Make the view."""
        if not self.first:
            return tensor.as_strided(self.size, self.stride)
        return tensor.as_strided(self.size, self.stride, tensor.storage_offset() + self.first)


Layout = tuple[tuple[int, ...], tuple[int, ...]]
"""Sizes and strides of a tensor."""


def heads_of(query: Layout, nodes: int, heads: int) -> View:
    """Turn `[tokens, heads * group, dim]` into `[requests, heads, nodes, group, dim]`, without the
    group if it is 1."""
    (tokens, all_heads, dim), (token, head, column) = query
    requests, group = tokens // nodes, all_heads // heads
    if group == 1:
        return View((requests, heads, nodes, dim), (nodes * token, head, token, column))
    size = requests, heads, nodes, group, dim
    return View(size, (nodes * token, group * head, token, head, column))


def positions_of(rows: Layout, start: int, stop: int) -> View:
    """Turn `[requests, positions, heads, dim]` into `[requests, heads, stop - start, dim]`."""
    (requests, _, heads, dim), (request, position, head, column) = rows
    size = (requests, heads, stop - start, dim)
    return View(size, (request, head, position, column), start * position)


def by_head(query: Tensor, nodes: int, heads: int) -> Tensor:
    """Turn `[tokens, heads * group, dim]` into `[requests, heads, nodes * group, dim]`."""
    return by_view(query, heads_of((query.shape, query.stride()), nodes, heads))


def by_view(query: Tensor, view: View) -> Tensor:
    """Do as `by_head` with a view that is known."""
    rows = view.of(query)
    return rows if rows.dim() == 4 else rows.flatten(2, 3)


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


Sums = tuple[Tensor, Tensor]
"""Attention to some positions: out `[requests, heads, rows, v_dim]` and lse without v_dim. A row
that sees nothing has out 0 and lse -inf."""


def add_piece(whole: Sums, piece: Sums) -> Sums:
    """Merge as `merge_attention`, writing over the first sums."""
    (out, lse), (part, part_lse) = whole, piece
    share = (part_lse - lse).sigmoid_().nan_to_num_(0.0)  # NaN: neither saw anything
    return out.lerp_(part.to(out.dtype), share[..., None]), torch.logaddexp(lse, part_lse)


Known = Bias | tuple[None, None]


class Plan(NamedTuple):
    """How requests of equal size are attended together.

    Attributes:
        place: of the piece that is masked; all before it is one without a mask.
        start: where it begins.
        query: view of the queries by heads: those of the cache, or their own (`heads_of`).
        keys, values: views of the masked piece, and of the one before it if there is any.
        blocks: of a request.
        is_known: whether the bias is; a large one of a tree is made by each call.
        bias: as of `bias_of`; None of a single node.
        wide: dtype of a bias and of sums.
    """

    place: Place
    start: int
    query: View
    keys: list[View]
    values: list[View]
    blocks: int
    is_known: bool
    bias: Known
    wide: torch.dtype


@lru_cache(maxsize=16)
def plan_for(
    query: Layout,
    keys: Layout,
    values: Layout,
    dtype: torch.dtype,
    lens: tuple[int, ...],
    starts: tuple[int, ...],
    table: torch.Size | None,
    words: bytes | None,
    is_tree: bool,
    limit: int | None,
) -> Plan | None:
    """Return how the requests are attended, or None: they aren't alike, or are more pieces, or
    torch's fused attention doesn't take the rows as they are. A plan is made once for all layers of
    a step.

    Args:
        query, keys, values: as they lie.
        dtype: of all of them.
        lens, starts: `context_lens` and `cu_seqlens_q`.
        table: its shape.
        words: ancestor words if they are few.
        is_tree: whether there are any.
        limit: `max_seqlen_k`.
    """
    (tokens, heads, dim), batch, (_, size, kv_heads, _) = query[0], len(lens), keys[0]
    nodes, columns = tokens // batch, (query[1][2], keys[1][3], values[1][3])
    if values[0][3] != dim or columns != (1, 1, 1):
        return None
    if not nodes or starts != (*range(0, tokens + 1, nodes),) or lens != lens[:1] * batch:
        return None
    if tokens != nodes * batch:  # rows of no request
        return None
    end = lens[0] + nodes
    if end > capacity_of(keys[0], table, limit):
        return None
    turned = kv_heads if is_packed(nodes, heads, dim, end, dtype) else heads
    group, start = heads // turned, 0
    if not is_piece(nodes * group, end):
        if table is not None or not 1 < nodes <= CHUNK or end > LONG or not lens[0]:
            return None
        start = lens[0]
    blocks = -(-end // size)
    if table is not None:
        if batch * end * kv_heads * 2 * dim * dtype.itemsize > GATHERED:
            return None
        shape = batch, blocks * size, kv_heads, dim
        strides = blocks * size * kv_heads * dim, kv_heads * dim, dim, 1
        keys = values = shape, strides
    place = Place(lens[0] - start, end - start, end - start, nodes, group)
    wide = torch.promote_types(dtype, torch.float32)
    spans = [(start, end), (0, start)][: 2 if start else 1]
    bias: Known = None, None
    is_known = not is_tree or (words is not None and tokens * group * place.width <= 4 * AT_ONCE)
    if is_known and (is_tree or nodes > 1):
        tree = None
        if words is not None:
            tree = torch.frombuffer(bytearray(words), dtype=torch.int32).view(tokens, -1)
        bias = bias_of(place, tree, wide)
    return Plan(
        place,
        start,
        heads_of(query, nodes, turned),
        [positions_of(keys, *span) for span in spans],
        [positions_of(values, *span) for span in spans],
        blocks,
        is_known,
        bias,
        wide,
    )


def capacity_of(cache: Sequence[int], table: torch.Size | None, limit: int | None) -> int:
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
        query, key_cache, value_cache: of any dtype, dim and strides.
        lens, starts: `context_lens` and `cu_seqlens_q`.
        block_table, ancestors, scale: as in `verify_attention`.
        limit: `max_seqlen_k`.

    Returns:
        `[tokens, heads, v_dim]`.
    """
    if key_cache.dtype != query.dtype or not 0 < len(lens) <= ALIKE:
        return None
    words = None
    if ancestors is not None and ancestors.nbytes <= WORDS and ancestors.is_contiguous():
        words = string_at(ancestors.data_ptr(), ancestors.nbytes)
    plan = plan_for(
        (query.shape, query.stride()), (key_cache.shape, key_cache.stride()),
        (value_cache.shape, value_cache.stride()), query.dtype, tuple(lens), tuple(starts),
        None if block_table is None else block_table.shape, words, ancestors is not None, limit,
    )  # fmt: skip
    if plan is None:
        return None
    keys, values = key_cache, value_cache
    if block_table is not None:
        blocks = block_table[:, : plan.blocks]
        keys, values = gather(keys, blocks), gather(values, blocks)
    rows = by_view(query, plan.query)
    bias, hidden = plan.bias if plan.is_known else bias_of(plan.place, ancestors, plan.wide)
    k, v = plan.keys[0].of(keys), plan.values[0].of(values)
    out, lse = FUSED(rows, k, v, attn_mask=bias, scale=scale)
    if plan.start:
        if hidden is not None:
            lse = lse.masked_fill(hidden, -math.inf)
        k, v = plan.keys[1].of(keys), plan.values[1].of(values)
        whole, whole_lse = FUSED(rows, k, v, scale=scale)
        out = add_piece((whole.to(plan.wide), whole_lse), (out, lse))[0].to(query.dtype)
    return by_node(out, plan.place.nodes)
