"""Attention of draft nodes over a cache, in chunks of positions that are merged by their sums.

    s_j = softcap * tanh(q . k_j * scale / softcap), or q . k_j * scale
    out = sum_j exp(s_j - lse) v_j,   lse = log sum_j exp(s_j)

Request by request, in float32, or in float64 if the query is. The query heads that share a KV head
are rows of one matrix, so keys and values are read once. The context goes through in chunks of
`CHUNK` positions without a mask; only chunks that a window cuts, and the draft block itself, get
one.

Memory: keys and values are gathered, converted or laid out chunk by chunk. Temporary floats, at
most, with rows = nodes * heads of the largest request:
rows * (2 * CHUNK + 3 * v_dim) + 2 * CHUNK * kv_heads * (qk_dim + v_dim). It doesn't grow with the
context; no `[tokens, context + nodes]` mask exists.
"""

from __future__ import annotations

import math
from typing import Final, NamedTuple

import torch
from torch import Tensor

CHUNK: Final = 256
"""Positions at a time: large enough for matrix products, small enough for the cache of a core."""

INVARIANT_CHUNK: Final = 256
"""With `invariant`; every chunk is padded to this length."""


class Options(NamedTuple):
    """The keywords of a call that do not change from request to request."""

    scale: float
    softcap: float | None
    window: int | None
    sinks: Tensor | None  # [kv_heads, group, 1] f32
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
        block_table: `[batch, max_blocks] int32`, or None.
        request: whose positions.
        dtype: to read in.
    """

    def __init__(
        self,
        cache: Tensor,
        scale: Tensor | None,
        block_table: Tensor | None,
        request: int,
        dtype: torch.dtype,
    ) -> None:
        self.cache, self.scale, self.request, self.dtype = cache, scale, request, dtype
        self.blocks = None if block_table is None else block_table[request]

    def read(self, start: int, stop: int) -> Tensor:
        """Return positions `start .. stop`: `[kv_heads, stop - start, dim]`."""
        rows = self._rows(self.cache, start, stop).to(self.dtype)
        if self.scale is not None:
            scale = self.scale
            if scale.dim() >= 3:
                scale = self._rows(scale, start, stop)[..., None]
            rows = rows * scale
        return rows.transpose(0, 1)

    def _rows(self, tensor: Tensor, start: int, stop: int) -> Tensor:
        if self.blocks is None:
            return tensor[self.request, start:stop]
        size = tensor.shape[1]
        first = start // size
        blocks = self.blocks[first : -(-stop // size)].long()
        if tensor.dtype == torch.float8_e4m3fn:  # cannot be gathered
            tensor = tensor.view(torch.uint8)
            rows = tensor[blocks].flatten(0, 1)[start - first * size : stop - first * size]
            return rows.view(torch.float8_e4m3fn)
        return tensor[blocks].flatten(0, 1)[start - first * size : stop - first * size]


class Visibility:
    """Which positions the nodes of one request see.

    Args:
        context, nodes, end: positions of the context, nodes, and positions that exist.
        words: `[nodes, words] int32`, or None: causal.
        depths: `[nodes] int32`, or None.
        window: visible positions by depth, or None.
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
        self.context, self.end = context, end
        self.depths = torch.arange(nodes) if depths is None else depths.long()
        self.window = window
        self.words = words
        self.nodes = nodes

    def spans(self) -> list[tuple[int, int, bool]]:
        """Cut what some node sees into `(start, stop, is_masked)`, each at most CHUNK long."""
        context = min(self.context, self.end)
        start, whole = 0, 0
        if self.window is not None:
            start = min(max(self.context + int(self.depths.min()) - self.window + 1, 0), context)
            whole = min(max(self.context + int(self.depths.max()) - self.window + 1, 0), context)
        parts = [(start, whole, True), (max(start, whole), context, False)]
        parts.append((context, self.end, True))
        return [
            (first, min(first + CHUNK, stop), is_masked)
            for begin, stop, is_masked in parts
            for first in range(begin, stop, CHUNK)
        ]

    def mask(self, start: int, stop: int) -> Tensor:
        """Return what each node sees of some positions: `[nodes, stop - start]`."""
        other = torch.arange(start, stop) - self.context
        node = other.clamp(0, self.nodes - 1)
        seen = (other < 0) | (self._draft_block(node) & (other < self.end - self.context))
        if self.window is not None:
            depth = torch.where(other < 0, other, self.depths[node])
            seen = seen & (depth > self.depths[:, None] - self.window)
        return seen

    def _draft_block(self, other: Tensor) -> Tensor:
        """Return which of some nodes are ancestors of each node, or itself."""
        if self.words is None:
            return other <= torch.arange(self.nodes)[:, None]
        last = self.words.shape[1] - 1
        words = self.words[:, (other // 32).clamp(max=last)]
        return ((words >> (other % 32)) & 1 != 0) & (other // 32 <= last)


def attend(
    running: Running,
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor | None,
    options: Options,
) -> Running:
    """Go on over some positions.

    Args:
        running: the softmax so far.
        query: `[kv_heads, rows, qk_dim]`, scaled unless there is a soft cap.
        keys: `[kv_heads, positions, qk_dim]`.
        values: `[kv_heads, positions, v_dim]`.
        mask: `[rows, positions]`, or None: all are seen.
        options: of the call.
    """
    scores = torch.matmul(query, keys.transpose(1, 2))
    if options.softcap is not None:
        scores.mul_(1.0 / options.softcap).tanh_().mul_(options.softcap)
    if mask is not None:
        scores.masked_fill_(~mask, -math.inf)
    largest = torch.maximum(running.largest, scores.amax(-1, keepdim=True))
    origin = largest.masked_fill(largest == -math.inf, 0.0)
    weights = scores.sub_(origin).exp_()
    shrink = (running.largest - origin).exp_()
    total = running.total * shrink + weights.sum(-1, keepdim=True)
    acc = torch.baddbmm(running.acc.mul_(shrink), weights, values)
    return Running(acc, largest, total)


def attend_node_by_node(
    running: Running,
    query: Tensor,
    keys: CacheReader,
    values: CacheReader,
    sight: Visibility,
    options: Options,
) -> Running:
    """Go over all positions with matrices of one shape, so that a node's bits don't depend on its
    neighbours: one node at a time, over chunks at absolute positions, masked to their full length.
    """
    kv_heads, rows, dim = query.shape
    group = rows // sight.nodes
    for start in range(0, sight.end, INVARIANT_CHUNK):
        stop = min(start + INVARIANT_CHUNK, sight.end)
        k = query.new_zeros(kv_heads, INVARIANT_CHUNK, dim)
        v = query.new_zeros(kv_heads, INVARIANT_CHUNK, running.acc.shape[2])
        k[:, : stop - start] = keys.read(start, stop)
        v[:, : stop - start] = values.read(start, stop)
        mask = sight.mask(start, start + INVARIANT_CHUNK)
        for node in range(sight.nodes):
            own = slice(node * group, (node + 1) * group)
            part = Running(*(x[:, own].contiguous() for x in running))
            part = attend(part, query[:, own].contiguous(), k, v, mask[node], options)
            for whole, piece in zip(running, part, strict=True):
                whole[:, own] = piece
    return running


def attend_request(
    query: Tensor, keys: CacheReader, values: CacheReader, sight: Visibility, options: Options
) -> tuple[Tensor, Tensor]:
    """Attend from the nodes of one request.

    Args:
        query: `[nodes, heads, qk_dim]`.
        keys, values: its cache.
        sight: what the nodes see.
        options: of the call.

    Returns:
        out: `[nodes, heads, v_dim]` in float32, or float64 if the query is.
        lse: `[nodes, heads]`, likewise.
    """
    nodes, heads, dim = query.shape
    kv_heads = keys.cache.shape[2]
    group = heads // kv_heads
    rows = query.to(keys.dtype).view(nodes, kv_heads, group, dim).transpose(0, 1)
    rows = (rows * options.scale).reshape(kv_heads, nodes * group, dim)
    running = Running(
        rows.new_zeros(kv_heads, nodes * group, values.cache.shape[3]),
        rows.new_full((kv_heads, nodes * group, 1), -math.inf),
        rows.new_zeros(kv_heads, nodes * group, 1),
    )
    if options.invariant:
        running = attend_node_by_node(running, rows, keys, values, sight, options)
    else:
        for start, stop, is_masked in sight.spans():
            mask = sight.mask(start, stop).repeat_interleave(group, 0) if is_masked else None
            k, v = keys.read(start, stop), values.read(start, stop)
            running = attend(running, rows, k, v, mask, options)
    acc, largest, total = running
    if options.sinks is not None:
        sinks = options.sinks.repeat(1, nodes, 1)
        origin = torch.maximum(largest, sinks)
        shrink = (largest - origin).exp_()
        acc, total, largest = acc * shrink, total * shrink + (sinks - origin).exp_(), origin
    out = acc / total.masked_fill(total == 0.0, 1.0)
    lse = largest + total.log()
    out = out.view(kv_heads, nodes, group, -1).transpose(0, 1).reshape(nodes, heads, -1)
    return out, lse.view(kv_heads, nodes, group).transpose(0, 1).reshape(nodes, heads)


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
        query: `[tokens, heads, qk_dim]` float32, float16 or bfloat16.
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
    tokens, heads, dim = query.shape
    kv_heads = key_cache.shape[2]
    capacity = key_cache.shape[1] * (1 if block_table is None else block_table.shape[1])
    capacity = capacity if max_seqlen_k is None else min(capacity, max_seqlen_k)
    wide = torch.promote_types(query.dtype, torch.float32)
    if sinks is not None:
        sinks = sinks.to(wide).view(kv_heads, heads // kv_heads, 1)
    scale = dim**-0.5 if scale is None else scale
    options = Options(scale, softcap, window, sinks, invariant)
    out = query.new_zeros(tokens, heads, value_cache.shape[3])
    lse = query.new_full((tokens, heads), -math.inf, dtype=torch.float32)
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
        keys = CacheReader(key_cache, key_scale, block_table, b, wide)
        values = CacheReader(value_cache, value_scale, block_table, b, wide)
        result = attend_request(query[first:last], keys, values, sight, options)
        out[first:last], lse[first:last] = result
    return out, (lse if return_lse else None)


def merge_attention(
    out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor
) -> tuple[Tensor, Tensor]:
    """Merge attention over two disjoint sets of positions into that over both.

    Args:
        out_a, out_b: `[tokens, heads, dim]` of one dtype.
        lse_a, lse_b: `[tokens, heads] float32`.

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
