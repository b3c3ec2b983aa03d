"""The KV cache, one request and one row at a time: append, compact, select, gather."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from spec_kernels.types import CacheTensors

GROUP = 128
"""Entries of a path that are read before the first of them is written."""

LIMIT = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0, torch.int8: 127.0}
"""Largest number of each quantised dtype."""

MANTISSA = {torch.float8_e4m3fn: (3, -6), torch.float8_e5m2: (2, -14)}
"""Bits of the mantissa, and exponent of the smallest normal number."""


def append_cache(
    key_cache: Tensor,
    value_cache: Tensor | None,
    key: Tensor,
    value: Tensor | None,
    slots: Tensor,
    *,
    key_scale: Tensor | None = None,
    value_scale: Tensor | None = None,
) -> None:
    """Write each new row of K and V at its slot, quantising where the cache is quantised.

    Args:
        key_cache, value_cache: `[blocks, block_size, kv_heads, head_dim]`; value_cache may be None.
        key, value: `[tokens, kv_heads, head_dim]` float.
        slots: `[tokens] int64`, block * block_size + slot in the block; outside the cache = skip.
        key_scale, value_scale: `[1] float32`, the scale of a whole cache, read; or
            `[blocks, block_size, kv_heads] float32`, written: amax / limit of each row.

    Example:
        >>> cache, slots = torch.zeros(2, 2, 1, 1), torch.tensor([3, -1])
        >>> append_cache(cache, None, torch.tensor([[[5.0]], [[6.0]]]), None, slots)
        >>> cache.flatten()
        tensor([0., 0., 0., 5.])
    """
    pairs = [(key_cache, key, key_scale)]
    if value_cache is not None and value is not None:
        pairs.append((value_cache, value, value_scale))
    for cache, rows, scale in pairs:
        blocks, block_size = cache.shape[:2]
        for token, slot in enumerate(slots.tolist()):
            if 0 <= slot < blocks * block_size:
                place = slot // block_size, slot % block_size
                _append_row(cache[place], rows[token], scale, place)


def _append_row(out: Tensor, row: Tensor, scale: Tensor | None, place: tuple[int, int]) -> None:
    if out.dtype not in LIMIT:
        out.copy_(row)
        return
    limit = LIMIT[out.dtype]
    for head in range(row.shape[0]):
        x = row[head].double()
        one = 1.0
        if scale is not None and scale.dim() == 1:
            one = float(scale[0])
        elif scale is not None:
            largest = float(x.abs().max()) if not bool(x.isnan().any()) else math.nan
            scale[place][head] = largest / limit
            one = float(scale[place][head])
        scaled = (x / one).float().double() if one != 0.0 else torch.zeros_like(x)
        out[head] = torch.tensor([_round(v, out.dtype) for v in scaled.tolist()]).to(out.dtype)


def _round(x: float, dtype: torch.dtype) -> float:
    """Round to the nearest number of a quantised dtype, ties to even, saturating."""
    limit = LIMIT[dtype]
    if math.isnan(x):
        return 0.0 if dtype == torch.int8 else math.nan
    x = min(max(x, -limit), limit)
    if dtype == torch.int8:
        return float(round(x))
    bits, lowest = MANTISSA[dtype]
    exponent = max(math.frexp(x)[1] - 1, lowest) - bits
    return math.copysign(min(abs(round(math.ldexp(x, -exponent))) * 2.0**exponent, limit), x)


def compact_cache(
    caches: CacheTensors,
    block_table: Tensor | None,
    context_lens: Tensor,
    path: Tensor,
    accepted_lens: Tensor,
    *,
    num_nodes: Tensor | None = None,
) -> None:
    """Move the accepted path of every request to the front of its draft, in every tensor.

        row context_lens[b] + i  <-  row context_lens[b] + path[b, i]       i <= accepted_lens[b]

    Args:
        caches: the tensors.
        block_table: `[batch, max_blocks] int32`, or one per group; None = contiguous.
        context_lens: `[batch] int32`, committed rows.
        path: `[batch, max_depth + 1] int32`, kept nodes, root first.
        accepted_lens: `[batch] int32`.
        num_nodes: `[batch] int32`; if given, the rows behind the path are set to zero bytes.

    Example:
        >>> cache = torch.arange(6).view(1, 6)
        >>> one = torch.ones(1, dtype=torch.int32)
        >>> path = torch.tensor([[0, 3]], dtype=torch.int32)
        >>> compact_cache(CacheTensors.make([cache]), None, one, path, one)
        >>> cache
        tensor([[0, 1, 4, 3, 4, 5]])
    """
    for number, tensor in enumerate(caches.tensors):
        rows = _as_integers(tensor)
        group = int(caches.table[number, 9])
        table = block_table if block_table is None or block_table.dim() == 2 else block_table[group]
        for b, nodes in _kept(path, accepted_lens):
            places = _Places(rows, table, b, int(context_lens[b]))
            count = None if num_nodes is None else int(num_nodes[b])
            for start in range(0, len(nodes), GROUP):
                _write(rows, list(_moves(places, rows, nodes, start, count)))
            _clear(places, rows, len(nodes), count or 0)


def _write(rows: Tensor, moves: list[tuple[tuple[int, int], Tensor]]) -> None:
    for place, row in moves:
        rows[place] = row


def _clear(places: _Places, rows: Tensor, kept: int, count: int) -> None:
    """Set the rows of the nodes [kept, count) to zero, if any node was kept."""
    for node in range(kept, min(count, places.end)) if kept else ():
        dead = places.of(node)
        if dead is not None:
            rows[dead] = 0


def _as_integers(tensor: Tensor) -> Tensor:
    """View a tensor as integers of the same size: moving them keeps every bit."""
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.view(kinds[tensor.element_size()])


def _kept(path: Tensor, accepted_lens: Tensor) -> Iterator[tuple[int, list[int]]]:
    """Yield every request with the nodes that it keeps; none if it is absent."""
    for b, nodes in enumerate(path.tolist()):
        is_present = bool(nodes) and nodes[0] >= 0
        yield b, nodes[: max(int(accepted_lens[b]) + 1, 0)] if is_present else []


class _Places:
    """Where the nodes of one request lie in one tensor."""

    def __init__(self, rows: Tensor, table: Tensor | None, request: int, context: int) -> None:
        self.blocks, self.block_size = rows.shape[:2]
        self.table = [request] if table is None else table[request].tolist()
        self.context = context
        self.end = len(self.table) * self.block_size - context  # no node has a row from here on

    def of(self, node: int) -> tuple[int, int] | None:
        """Return block and slot of a node, or None if it has no row."""
        position = self.context + node
        index, slot = divmod(position, self.block_size)
        if node < 0 or self.context < 0 or not 0 <= index < len(self.table):
            return None
        block = self.table[index]
        return (block, slot) if 0 <= block < self.blocks else None


def _moves(
    places: _Places, rows: Tensor, nodes: list[int], start: int, count: int | None
) -> Iterator[tuple[tuple[int, int], Tensor]]:
    """Yield the destinations of one group of a path, and copies of what goes there."""
    for i in range(start, min(start + GROUP, len(nodes))):
        source, target = places.of(nodes[i]), places.of(i)
        is_node = count is None or nodes[i] < count
        if source is not None and target is not None and nodes[i] != i and is_node:
            yield target, rows[source].clone()


def compact_hidden(
    hidden: Tensor, target_row: Tensor, path: Tensor, accepted_lens: Tensor
) -> Tensor:
    """Gather the hidden states of the kept nodes, in the order of the path.

    Args:
        hidden: `[rows, size]`, packed in any order.
        target_row: `[batch, nodes] int32`, row of each node.
        path: `[batch, max_depth + 1] int32`.
        accepted_lens: `[batch] int32`.

    Returns:
        `[batch, max_depth + 1, size]`; zeros behind the path and where a node has no row.

    Example:
        >>> hidden, one = torch.tensor([[5.0], [6.0], [7.0]]), torch.ones(1, dtype=torch.int32)
        >>> row, path = torch.tensor([[2, 1, 0]]).int(), torch.tensor([[0, 2, -1]]).int()
        >>> compact_hidden(hidden, row, path, one).flatten()
        tensor([7., 5., 0.])
    """
    out = hidden.new_zeros(*path.shape, hidden.shape[1])
    for b, nodes in _kept(path, accepted_lens):
        for i, node in enumerate(nodes):
            row = int(target_row[b, node]) if 0 <= node < target_row.shape[1] else -1
            if 0 <= row < hidden.shape[0]:
                out[b, i] = hidden[row]
    return out


def select_state(
    states: CacheTensors,
    checkpoints: CacheTensors,
    path: Tensor,
    accepted_lens: Tensor,
    *,
    state_slots: Tensor | None = None,
) -> None:
    """Set the recurrent state of every request to its checkpoint at the last kept node.

    Args:
        states: each `[slots, 1, ...]`.
        checkpoints: each `[batch, nodes, ...]`, the state behind each node.
        path: `[batch, max_depth + 1] int32`.
        accepted_lens: `[batch] int32`.
        state_slots: `[batch] int32`, state of each request; None = request b has state b.

    Example:
        >>> state, after = torch.zeros(1, 1), torch.tensor([[1.0, 2.0, 3.0]])
        >>> path, one = torch.tensor([[0, 2]]).int(), torch.ones(1, dtype=torch.int32)
        >>> select_state(CacheTensors.make([state]), CacheTensors.make([after]), path, one)
        >>> state
        tensor([[3.]])
    """
    for state, checkpoint in zip(states.tensors, checkpoints.tensors, strict=True):
        target, source = _as_integers(state), _as_integers(checkpoint)
        for b, nodes in _kept(path, accepted_lens):
            slot = b if state_slots is None else int(state_slots[b])
            node = nodes[-1] if nodes else -1
            known = b < source.shape[0] and 0 <= node < source.shape[1]
            if known and 0 <= slot < target.shape[0]:
                target[slot, 0] = source[b, node]
