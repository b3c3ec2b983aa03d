"""The KV cache in torch: one gather and one scatter per tensor, over the rows that move."""

from __future__ import annotations

from typing import Final, NamedTuple

import torch
from torch import Tensor

from spec_kernels.types import CacheTensors

GROUP: Final = 128
"""Entries of a path that are read before the first of them is written."""

LIMIT: Final = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0, torch.int8: 127.0}
"""Largest number of each quantised dtype."""

_INTEGERS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


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
    _append(key_cache, key, slots, key_scale)
    if value_cache is not None and value is not None:
        _append(value_cache, value, slots, value_scale)


def _append(cache: Tensor, rows: Tensor, slots: Tensor, scale: Tensor | None) -> None:
    is_kept = (slots >= 0) & (slots < cache.shape[0] * cache.shape[1])
    if not bool(is_kept.all()):
        slots, rows = slots[is_kept], rows[is_kept]
    place = slots // cache.shape[1], slots % cache.shape[1]
    if cache.dtype not in LIMIT:
        cache[place] = rows.to(cache.dtype)
        return
    x, limit = rows.float(), LIMIT[cache.dtype]
    if scale is not None and scale.dim() == 1:
        x = x / scale
    elif scale is not None:
        largest = x.abs().amax(-1) / limit
        scale[place] = largest
        x = torch.where(largest[..., None] == 0.0, 0.0, x / largest[..., None])
    x = x.clamp(-limit, limit)
    if cache.dtype == torch.int8:
        x = x.nan_to_num(0.0).round()
    _as_integers(cache)[place] = _as_integers(x.to(cache.dtype))


def _as_integers(tensor: Tensor) -> Tensor:
    """View a tensor as integers of the same size: moving them keeps every bit."""
    return tensor.view(_INTEGERS[tensor.element_size()])


class _Nodes(NamedTuple):
    """Pairs of a request and a node, `[n] int64` each."""

    request: Tensor
    node: Tensor


class _Finder:
    """Finds the rows of nodes in tensors of one shape and block table."""

    def __init__(
        self, table: Tensor | None, blocks: int, block_size: int, context_lens: Tensor
    ) -> None:
        self._table, self._blocks, self._block_size = table, blocks, block_size
        self._context_lens = context_lens.long()

    def rows(self, nodes: _Nodes) -> Tensor:
        """Return block * block_size + slot of each node, -1 where it has no row."""
        context = self._context_lens[nodes.request]
        position = torch.where((context < 0) | (nodes.node < 0), -1, context + nodes.node)
        index = position.div(self._block_size, rounding_mode="floor")
        if self._table is None:
            block = torch.where(index == 0, nodes.request, -1)
        else:
            table = torch.nn.functional.pad(self._table.long(), (0, 1), value=-1)
            last = table.shape[1] - 1
            block = table[nodes.request, torch.where((index < 0) | (index > last), last, index)]
        exists = (block >= 0) & (block < self._blocks)
        return torch.where(exists, block * self._block_size + position % self._block_size, -1)

    def dead(self, is_kept: Tensor, num_nodes: Tensor) -> _Nodes:
        """Return the nodes behind the paths of present requests that may have rows."""
        blocks = 1 if self._table is None else self._table.shape[1]
        end = (blocks * self._block_size - self._context_lens).minimum(num_nodes)
        count = is_kept.sum(1)
        widest = int(end.amax().clamp(min=0)) if len(end) else 0
        node = torch.arange(widest, device=num_nodes.device)
        is_dead = (node >= count[:, None]) & (node < end[:, None]) & (count[:, None] > 0)
        return _Nodes(*is_dead.nonzero(as_tuple=True))


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
    is_kept = _is_kept(path, accepted_lens)
    is_moved = is_kept & (path >= 0) & (path != _columns(path))
    if num_nodes is not None:
        is_moved &= path < num_nodes[:, None]
    targets = _Nodes(*is_moved.nonzero(as_tuple=True))
    if num_nodes is None and not targets.node.numel():
        return
    plans: dict[tuple[int, ...], _Plan] = {}
    for tensor, group in zip(caches.tensors, caches.table[:, 9].tolist(), strict=True):
        key = (tensor.shape[0], tensor.shape[1], group)
        if key not in plans:
            is_shared = block_table is None or block_table.dim() == 2
            table = block_table if block_table is None or is_shared else block_table[group]
            find = _Finder(table, tensor.shape[0], tensor.shape[1], context_lens)
            dead = None if num_nodes is None else find.dead(is_kept, num_nodes)
            plans[key] = _plan(find, path, targets, dead)
        _carry_out(plans[key], _as_integers(tensor))


def _columns(path: Tensor) -> Tensor:
    return torch.arange(path.shape[1], device=path.device)


def _is_kept(path: Tensor, accepted_lens: Tensor) -> Tensor:
    """Tell which entries of a path count: the first accepted_lens + 1 of a present request."""
    return (_columns(path) <= accepted_lens[:, None]) & (path[:, :1] >= 0)


class _Plan(NamedTuple):
    """What happens to the rows of tensors of one shape and block table.

    Attributes:
        moves: sources and targets of each group of path entries.
        cleared: rows that become zero.
    """

    moves: list[tuple[Tensor, Tensor]]
    cleared: Tensor | None


def _plan(find: _Finder, path: Tensor, targets: _Nodes, dead: _Nodes | None) -> _Plan:
    source = find.rows(_Nodes(targets.request, path[targets].long()))
    target = find.rows(targets)
    exists = (source >= 0) & (target >= 0)
    moves = []
    for start in range(0, path.shape[1], GROUP):
        chosen = exists & (targets.node >= start) & (targets.node < start + GROUP)
        if bool(chosen.any()):
            moves.append((source[chosen], target[chosen]))
    if dead is None:
        return _Plan(moves, None)
    cleared = find.rows(dead)
    return _Plan(moves, cleared[cleared >= 0])


def _carry_out(plan: _Plan, rows: Tensor) -> None:
    """Move and clear rows of `[blocks, block_size, ...]`; the sources of a group are read first."""
    if rows.is_contiguous():  # whole rows are copied faster than by two indices
        flat = rows.view(rows.shape[0] * rows.shape[1], -1)
        for source, target in plan.moves:
            flat.index_copy_(0, target, flat.index_select(0, source))
        if plan.cleared is not None:
            flat.index_fill_(0, plan.cleared, 0)
        return
    block_size = rows.shape[1]
    for source, target in plan.moves:
        moved = rows[source // block_size, source % block_size]
        rows[target // block_size, target % block_size] = moved
    if plan.cleared is not None:
        rows[plan.cleared // block_size, plan.cleared % block_size] = 0


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
    is_node = _is_kept(path, accepted_lens) & (path >= 0) & (path < target_row.shape[1])
    places = is_node.nonzero(as_tuple=True)
    row = target_row[places[0], path[places].long()].long()
    has_row = (row >= 0) & (row < hidden.shape[0])
    out[places[0][has_row], places[1][has_row]] = hidden.detach()[row[has_row]]
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
    batch, width = path.shape
    request = torch.arange(batch, device=path.device)
    last = accepted_lens.clamp(0, width - 1).long()[:, None]
    node = path.gather(1, last)[:, 0].long()
    is_kept = (accepted_lens >= 0) & (path[:, 0] >= 0) & (node >= 0)
    slot = request if state_slots is None else state_slots.long()
    for state, checkpoint in zip(states.tensors, checkpoints.tensors, strict=True):
        exists = is_kept & (request < checkpoint.shape[0]) & (node < checkpoint.shape[1])
        exists &= (slot >= 0) & (slot < state.shape[0])
        chosen = _as_integers(checkpoint)[request[exists], node[exists]]
        _as_integers(state)[slot[exists], 0] = chosen
