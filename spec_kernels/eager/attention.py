"""Attention of draft nodes over a cache: one fused call, or chunks that are merged by their sums.

    s_j = softcap * tanh(q . k_j * scale / softcap), or q . k_j * scale
    out = sum_j exp(s_j - lse) v_j,   lse = log sum_j exp(s_j)

Request by request. The query heads that share a KV head are rows of one matrix, so keys and values
are read once.

1. Where torch's fused attention can do it (no soft cap, sinks or cut by a window, cache and
   queries of one dtype, few rows or a single node), it takes all positions in one call, from where
   they lie. Only rows of several nodes need a mask; it has at most `AT_ONCE` entries.
2. Elsewhere positions go through in chunks of `CHUNK`, in float32, or in float64 if the query is.
   Chunks that neither meet the draft block nor are cut by a window have no mask.

Memory in chunks: keys and values are gathered and converted chunk by chunk. Temporary floats, at
most, with rows = nodes * heads of the largest request:
rows * (2 * CHUNK + 3 * v_dim) + 2 * CHUNK * kv_heads * (qk_dim + v_dim). It doesn't grow with the
context; no `[tokens, context + nodes]` mask exists.
"""

from __future__ import annotations

import math
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

CHUNK: Final = 256
"""Positions at a time: large enough for matrix products, small enough for the cache of a core."""

AT_ONCE: Final = 1 << 16
"""Largest mask of the fused call: beyond it arithmetic counts, and chunks are as fast."""

_FUSED: Final[Any] = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default


class Options(NamedTuple):
    """The keywords of a call that do not change from request to request."""

    scale: float
    softcap: float | None
    sinks: Tensor | None  # [heads] f32
    needs_lse: bool
    invariant: bool


class Running(NamedTuple):
    """A softmax on its way over the positions; rows are node-major within each KV head.

    Attributes:
        acc: `[kv_heads, rows, v_dim]`, sum of exp(s - largest) * v.
        largest: `[kv_heads, rows, 1]`, largest score so far, -inf if nothing was seen.
        total: `[kv_heads, rows, 1]`, sum of exp(s - largest).
    """

    acc: Tensor
    largest: Tensor
    total: Tensor


class CacheReader:
    """Reads positions of one request out of a paged or contiguous cache.

    Args:
        cache: `[blocks, block_size, kv_heads, dim]`, or `[batch, max_len, kv_heads, dim]`.
        scale: None, one number, or one per token and head.
        block_table, request: `[batch, max_blocks] int32` or None, and which row.
    """

    def __init__(
        self, cache: Tensor, scale: Tensor | None, block_table: Tensor | None, request: int
    ) -> None:
        self.cache, self.scale, self.request = cache, scale, request
        self.blocks = None if block_table is None else block_table[request]

    def read(self, start: int, stop: int, dtype: torch.dtype) -> Tensor:
        """Return positions `start .. stop`: `[1, kv_heads, stop - start, dim]`."""
        rows = self._rows(self.cache, start, stop)
        if rows.dtype != dtype:
            rows = rows.to(dtype)
        if self.scale is not None:
            scale = self.scale
            if scale.dim() >= 3:
                scale = self._rows(scale, start, stop)[..., None]
            rows = rows * scale
        return rows.transpose(1, 2)

    def _rows(self, tensor: Tensor, start: int, stop: int) -> Tensor:
        if self.blocks is None:
            return tensor[self.request : self.request + 1, start:stop]
        size = tensor.shape[1]
        first = start // size
        blocks = self.blocks[first : -(-stop // size)]
        own = slice(start - first * size, stop - first * size)
        if tensor.dtype == torch.float8_e4m3fn:  # cannot be gathered
            rows = tensor.view(torch.uint8)[blocks].view(torch.float8_e4m3fn)
        else:
            rows = tensor[blocks]
        return rows.flatten(0, 1)[None, own]


class Visibility:
    """Which positions the nodes of one request see.

    Args:
        context, nodes, end: positions of the context, nodes, and positions that exist.
        words, depths, window: as `ancestors` and so on of `verify_attention`, of the nodes.
    """

    def __init__(
        self,
        context: int,
        nodes: int,
        end: int,
        words: Tensor | None,
        depths: Tensor | None,
        window: int | None,
    ) -> None:
        self.context, self.nodes, self.end = context, nodes, end
        self.words, self.depths = words, depths
        self.window = None if window is None or window >= context + nodes else window

    @property
    def is_whole(self) -> bool:
        """Tell that every node sees all positions: there is one, and no tree."""
        return self.nodes == 1 and self.words is None and self.window is None

    def spans(self) -> list[tuple[int, int, bool]]:
        """Cut what some node sees into `(start, stop, is_masked)`, each at most CHUNK long."""
        start = whole = 0
        if self.window is not None:
            depths = self._depths()
            below = self.context - self.window + 1
            start = min(max(below + int(depths.min()), 0), self.context, self.end)
            whole = below + int(depths.max())
        stops = [(first, min(first + CHUNK, self.end)) for first in range(start, self.end, CHUNK)]
        return [(first, stop, first < whole or stop > self.context) for first, stop in stops]

    def mask(self, start: int, stop: int) -> Tensor:
        """Return what each node sees of some positions: `[nodes, stop - start]`."""
        seen = torch.ones(self.nodes, stop - start, dtype=torch.bool)
        end, first = min(stop, self.end), max(start, self.context)
        if end > first:
            block = self._draft_block(first - self.context, end - self.context)
            seen[:, first - start : end - start] = block
        if stop > end:
            seen[:, max(end - start, 0) :] = False
        if self.window is not None:
            other = torch.arange(start, stop) - self.context
            depths = self._depths()
            depth = torch.where(other < 0, other, depths[other.clamp(0, self.nodes - 1)])
            seen &= depth > depths[:, None] - self.window
        return seen

    def bias(self, group: int, dtype: torch.dtype) -> Tensor | None:
        """Return what to add to the scores of all positions, 0 or -inf, for `group` rows a node:
        `[1, 1, nodes * group, end]`, or None: nothing is hidden. Without a window.
        """
        if self.is_whole or self.end <= self.context:
            return None
        if self.words is None:
            bias = torch.full((self.nodes, self.end), -math.inf, dtype=dtype)
            bias.triu_(self.context + 1)
        else:
            bias = torch.zeros(self.nodes, self.end, dtype=dtype)
            bias[:, self.context :] = self._draft_block(0, self.end - self.context).log()
        rows = bias[:, None].expand(self.nodes, group, self.end)
        return rows.reshape(1, 1, self.nodes * group, self.end)

    def _depths(self) -> Tensor:
        return torch.arange(self.nodes) if self.depths is None else self.depths.long()

    def _draft_block(self, first: int, stop: int) -> Tensor:
        """Return 1 where a node sees one of the nodes `first .. stop`: `[nodes, stop - first]`."""
        if self.words is None:
            return torch.ones(self.nodes, stop - first, dtype=torch.bool).tril_(-first)
        bits = (self.words[..., None] >> torch.arange(32, dtype=torch.int32)) & 1
        bits = bits.flatten(1)[:, first:stop]
        missing = stop - first - bits.shape[1]
        return torch.nn.functional.pad(bits, (0, missing)) if missing > 0 else bits


def attend(
    running: Running | None,
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor | None,
    softcap: float | None,
) -> Running:
    """Go on over some positions.

    Args:
        running: the softmax so far; None at the first positions.
        query: `[kv_heads, rows, qk_dim]`, scaled.
        keys, values: `[kv_heads, positions, dim]`.
        mask: `[rows, positions]`, or None: all are seen.
        softcap: bound of the scores, or None.
    """
    scores = torch.bmm(query, keys.transpose(1, 2))
    if softcap is not None:
        scores.mul_(1.0 / softcap).tanh_().mul_(softcap)
    if mask is not None:
        scores.masked_fill_(~mask, -math.inf)
    largest = scores.amax(-1, keepdim=True)
    if running is not None:
        largest = torch.maximum(running.largest, largest)
    origin = largest if mask is None else largest.masked_fill(largest == -math.inf, 0.0)
    weights = scores.sub_(origin).exp_()
    total = weights.sum(-1, keepdim=True)
    if running is None:
        return Running(torch.bmm(weights, values), largest, total)
    shrink = (running.largest - origin).exp_()
    total += running.total * shrink
    return Running(torch.baddbmm(running.acc.mul_(shrink), weights, values), largest, total)


def attend_at_once(
    query: Tensor, keys: CacheReader, values: CacheReader, sight: Visibility, options: Options
) -> tuple[Tensor, Tensor | None]:
    """Do as `attend_in_chunks` in one call of torch's fused attention; see `is_for_fused`."""
    wide = torch.promote_types(query.dtype, torch.float32)
    out: Tensor
    lse: Tensor | None
    out, lse = _FUSED(
        query[None],
        keys.read(0, sight.end, query.dtype),
        values.read(0, sight.end, query.dtype),
        attn_mask=sight.bias(query.shape[1] // sight.nodes, wide),
        scale=options.scale,
    )
    if not options.needs_lse:
        return out[0], None
    if query.dtype == wide:
        return out[0], lse[0, ..., None]
    return out[0], attend_in_chunks(query, keys, values, sight, options)[1]  # its own is rough


def attend_in_chunks(
    query: Tensor, keys: CacheReader, values: CacheReader, sight: Visibility, options: Options
) -> tuple[Tensor, Tensor | None]:
    """Attend in float32 or float64, chunk by chunk.

    Args:
        query: `[kv_heads, nodes * group, qk_dim]`.
        keys, values: the cache of the request.
        sight: what its nodes see.
        options: of the call.

    Returns:
        out: `[kv_heads, nodes * group, v_dim]`.
        lse: `[kv_heads, nodes * group, 1]`; None unless needed.
    """
    query = query.to(torch.promote_types(query.dtype, torch.float32)) * options.scale
    group = query.shape[1] // sight.nodes
    running = None
    if options.invariant:
        running = attend_node_by_node(query, keys, values, sight, options)
    else:
        for start, stop, is_masked in sight.spans():
            mask = sight.mask(start, stop).repeat_interleave(group, 0) if is_masked else None
            k, v = (reader.read(start, stop, query.dtype)[0] for reader in (keys, values))
            running = attend(running, query, k, v, mask, options.softcap)
    if running is None:  # no positions
        out = query.new_zeros(*query.shape[:2], values.cache.shape[3])
        return out, query.new_full((*query.shape[:2], 1), -math.inf)
    acc, largest, total = running
    out = acc.div_(total.masked_fill(total == 0.0, 1.0))
    return out, largest + total.log() if options.needs_lse else None


def attend_node_by_node(
    query: Tensor, keys: CacheReader, values: CacheReader, sight: Visibility, options: Options
) -> Running | None:
    """Go over all positions with matrices of one shape, so that a node's bits don't depend on its
    neighbours: one node at a time, over chunks at absolute positions, masked to their full length.
    """
    kv_heads, _, dim = query.shape
    queries = [part.contiguous() for part in query.chunk(sight.nodes, 1)]
    running: list[Running | None] = [None] * sight.nodes
    k = query.new_zeros(kv_heads, CHUNK, dim)
    v = query.new_zeros(kv_heads, CHUNK, values.cache.shape[3])
    for start in range(0, sight.end, CHUNK):
        stop = min(start + CHUNK, sight.end)
        k[:, : stop - start] = keys.read(start, stop, query.dtype)[0]
        v[:, : stop - start] = values.read(start, stop, query.dtype)[0]
        mask = sight.mask(start, start + CHUNK)
        for node, part in enumerate(queries):
            running[node] = attend(running[node], part, k, v, mask[node], options.softcap)
    found = [part for part in running if part is not None]
    return Running(*(torch.cat(x, 1) for x in zip(*found, strict=True))) if found else None


def is_for_fused(
    query: Tensor, keys: CacheReader, values: CacheReader, sight: Visibility, options: Options
) -> bool:
    """Tell that torch's fused attention computes what is asked for, and fast.

    It wants adjacent columns, and no row that sees nothing, as a tree without context may have.
    A request alone decides, so that its rows do not depend on others.
    """
    nodes, heads, dim = query.shape
    k, v = keys.cache, values.cache
    if options.softcap is not None or options.sinks is not None or sight.window is not None:
        return False
    if k.dtype != query.dtype or dim != v.shape[3] or options.invariant:
        return False
    if sight.context < (0 if sight.words is None else 1):
        return False
    if not query.stride(2) == k.stride(3) == v.stride(3) == 1:
        return False
    mask = 0 if sight.is_whole else nodes * heads // k.shape[2] * sight.end
    return mask <= AT_ONCE and (keys.blocks is None or sight.end <= CHUNK)


def by_node(rows: Tensor, nodes: int) -> Tensor:
    """Turn `[kv_heads, nodes * group, dim]` into `[nodes, heads, dim]`."""
    kv_heads, count, dim = rows.shape
    if nodes == 1:
        return rows.reshape(1, kv_heads * count, dim)
    grouped = rows.view(kv_heads, nodes, count // nodes, dim).transpose(0, 1)
    return grouped.reshape(nodes, -1, dim)


def attend_request(
    query: Tensor, keys: CacheReader, values: CacheReader, sight: Visibility, options: Options
) -> tuple[Tensor, Tensor | None]:
    """Attend from the nodes of one request, `[nodes, heads, qk_dim]`.

    Returns:
        out: `[nodes, heads, v_dim]`.
        lse: `[nodes, heads]`; None unless needed.
    """
    nodes, heads, dim = query.shape
    kv_heads = keys.cache.shape[2]
    rows = query.view(nodes, kv_heads, heads // kv_heads, dim)
    rows = rows[0] if nodes == 1 else rows.transpose(0, 1).reshape(kv_heads, -1, dim)
    if is_for_fused(query, keys, values, sight, options):
        out, lse = attend_at_once(rows, keys, values, sight, options)
    else:
        out, lse = attend_in_chunks(rows, keys, values, sight, options)
    out = by_node(out, nodes)
    if lse is None:
        return out, None
    lse = by_node(lse, nodes)
    if options.sinks is not None:
        whole = torch.logaddexp(lse, options.sinks[:, None])
        out, lse = out * (lse - whole).exp_(), whole
    return out, lse[..., 0]


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
    capacity = key_cache.shape[1] * (1 if block_table is None else block_table.shape[1])
    capacity = capacity if max_seqlen_k is None else min(capacity, max_seqlen_k)
    if sinks is not None:
        sinks = sinks.to(torch.promote_types(query.dtype, torch.float32))
    scale = query.shape[2] ** -0.5 if scale is None else scale
    options = Options(scale, softcap, sinks, return_lse or sinks is not None, invariant)
    parts: list[tuple[int, int, Tensor, Tensor | None]] = []
    ends = cu_seqlens_q.tolist()
    for b, context in enumerate(context_lens.tolist()):
        first, last = ends[b], ends[b + 1]
        if first == last:
            continue
        sight = Visibility(
            context,
            last - first,
            min(context + last - first, capacity),
            None if ancestors is None else ancestors[first:last],
            None if depths is None else depths[first:last],
            window,
        )
        keys = CacheReader(key_cache, key_scale, block_table, b)
        values = CacheReader(value_cache, value_scale, block_table, b)
        rows = query[first:last]
        parts.append((first, last, *attend_request(rows, keys, values, sight, options)))
    if len(parts) == 1 and parts[0][:2] == (0, len(query)):
        _, _, out, lse = parts[0]
        return out.to(query.dtype), (lse.float() if lse is not None and return_lse else None)
    out = query.new_zeros(*query.shape[:2], value_cache.shape[3])
    lse = query.new_full(out.shape[:2], -math.inf, dtype=torch.float32) if return_lse else None
    for first, last, part, part_lse in parts:
        out[first:last] = part
        if lse is not None and part_lse is not None:
            lse[first:last] = part_lse
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
