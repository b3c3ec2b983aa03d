"""The KV cache in torch: one gather and one scatter per tensor, over the rows that move."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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
    if not slots.numel():
        return
    end = key_cache.shape[0] * key_cache.shape[1]
    lowest, highest = slots.aminmax()
    if lowest.item() < 0 or highest.item() >= end:
        is_kept = (slots >= 0) & (slots < end)
        slots, key = slots[is_kept], key[is_kept]
        value = None if value is None else value[is_kept]
    _append(key_cache, key, slots, key_scale)
    if value_cache is not None and value is not None:
        _append(value_cache, value, slots, value_scale)


def _append(cache: Tensor, rows: Tensor, slots: Tensor, scale: Tensor | None) -> None:
    """Write rows at slots that exist."""
    if cache.dtype not in LIMIT:
        _write(cache, slots, rows if rows.dtype == cache.dtype else rows.to(cache.dtype))
        return
    x, limit = rows.float(), LIMIT[cache.dtype]
    if scale is not None and scale.dim() == 1:
        x = x / scale
    elif scale is not None:
        largest = x.abs().amax(-1) / limit
        _write(scale, slots, largest)
        x = torch.where(largest[..., None] == 0.0, 0.0, x / largest[..., None])
    x = x.clamp(-limit, limit)
    if cache.dtype == torch.int8:
        x = x.nan_to_num(0.0).round()
    _write(_as_integers(cache), slots, _as_integers(x.to(cache.dtype)))


def _write(cache: Tensor, slots: Tensor, rows: Tensor) -> None:
    if cache.is_contiguous():  # whole rows are copied faster than by two indices
        cache.flatten(0, 1).index_copy_(0, slots, rows)
    else:
        cache[slots // cache.shape[1], slots % cache.shape[1]] = rows


def _as_integers(tensor: Tensor) -> Tensor:
    """View a tensor as integers of the same size: moving them keeps every bit."""
    return tensor.view(_INTEGERS[tensor.element_size()])


class _Finder:
    """Finds the rows of nodes in tensors of one shape and block table."""

    def __init__(
        self, table: Tensor | None, blocks: int, block_size: int, contexts: Sequence[int]
    ) -> None:
        self._table, self._blocks, self._block_size = table, blocks, block_size
        self._contexts = contexts
        self.end = block_size * (1 if table is None else table.shape[1])

    def rows(self, requests: Sequence[int], nodes: Sequence[int]) -> list[int]:
        """Return block * block_size + slot of each node, -1 where it has no row."""
        contexts, size = self._contexts, self._block_size
        positions = [contexts[b] + n for b, n in zip(requests, nodes, strict=True)]
        exists = [
            n >= 0 and contexts[b] >= 0 and p < self.end
            for b, n, p in zip(requests, nodes, positions, strict=True)
        ]
        positions = [p if ok else 0 for p, ok in zip(positions, exists, strict=True)]
        blocks = list(requests)
        if self._table is not None and any(exists):
            index = torch.tensor([p // size for p in positions])
            blocks = self._table[torch.tensor(requests), index].tolist()
        return [
            block * size + p % size if ok and 0 <= block < self._blocks else -1
            for block, p, ok in zip(blocks, positions, exists, strict=True)
        ]


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
    kept = _kept_lens(path, accepted_lens)
    counts = None if num_nodes is None else num_nodes.tolist()
    moves = [
        (b, i, node)
        for b, nodes in enumerate(path.tolist())
        for i, node in enumerate(nodes[: kept[b]])
        if node not in (i, -1) and (counts is None or node < counts[b])
    ]
    if not moves and counts is None:
        return
    contexts = context_lens.tolist()
    plans: dict[tuple[int, ...], _Plan] = {}
    for stack, group in _stacks(caches):
        blocks, block_size = stack.shape[1:3]
        key = (blocks, block_size, group)
        if key not in plans:
            is_shared = block_table is None or block_table.dim() == 2
            table = block_table if block_table is None or is_shared else block_table[group]
            find = _Finder(table, blocks, block_size, contexts)
            dead = None if counts is None else _dead(kept, counts, contexts, find.end)
            plans[key] = _plan(find, moves, dead)
        _carry_out(plans[key], _as_integers(stack))


def _stacks(caches: CacheTensors) -> Iterator[tuple[Tensor, int]]:
    """Yield the tensors, `[tensors, blocks, block_size, ...]` each, and the group of their block
    table: neighbours of one layout that lie at one distance in one storage are one stack."""
    tensors, layouts = caches.tensors, caches.table[:, 1:].tolist()
    first = 0
    while first < len(tensors):
        one, step, end = tensors[first], 0, first + 1
        storage, layout = one.untyped_storage().data_ptr(), (layouts[first], one.stride())
        while end < len(tensors) and (layouts[end], tensors[end].stride()) == layout:
            distance = caches.addresses[end] - caches.addresses[end - 1]
            is_next = distance > 0 and distance == (step or distance)
            if not is_next or tensors[end].untyped_storage().data_ptr() != storage:
                break
            step, end = distance, end + 1
        item = one.element_size()
        if step % item:  # where bytes lie between elements of another size
            step, end = 0, first + 1
        stack = one.as_strided((end - first, *one.shape), (step // item, *one.stride()))
        yield stack, layouts[first][-1]
        first = end


def _kept_lens(path: Tensor, accepted_lens: Tensor) -> list[int]:
    """Return how many entries of each path count: accepted_lens + 1 of a present request."""
    lens = accepted_lens.clamp(-1, path.shape[1] - 1) + 1
    kept: list[int] = torch.where(path[:, 0] >= 0, lens, 0).tolist()
    return kept


def _dead(
    kept: Sequence[int], counts: Sequence[int], contexts: Sequence[int], end: int
) -> list[tuple[int, int]]:
    """Return request and node of what lies behind the paths and may have rows."""
    return [
        (b, node)
        for b, (length, count, context) in enumerate(zip(kept, counts, contexts, strict=True))
        if length and context >= 0
        for node in range(length, min(count, end - context))
    ]


class _Plan(NamedTuple):
    """What happens to the rows of tensors of one shape and block table.

    Attributes:
        moves: sources and targets of each group of path entries.
        cleared: rows that become zero.
    """

    moves: list[tuple[Tensor, Tensor]]
    cleared: Tensor | None


def _plan(
    find: _Finder, moves: Sequence[tuple[int, int, int]], dead: Sequence[tuple[int, int]] | None
) -> _Plan:
    requests = [b for b, _, _ in moves]
    targets = find.rows(requests, [i for _, i, _ in moves])
    sources = find.rows(requests, [node for _, _, node in moves])
    groups: dict[int, list[tuple[int, int]]] = {}
    for (_, i, _), source, target in zip(moves, sources, targets, strict=True):
        if source >= 0 and target >= 0:
            groups.setdefault(i // GROUP, []).append((source, target))
    pairs = [torch.tensor(groups[number]).unbind(1) for number in sorted(groups)]
    found = [(source, target) for source, target in pairs]
    if dead is None:
        return _Plan(found, None)
    cleared = find.rows([b for b, _ in dead], [node for _, node in dead])
    return _Plan(found, torch.tensor([row for row in cleared if row >= 0], dtype=torch.int64))


def _carry_out(plan: _Plan, stack: Tensor) -> None:
    """Move and clear rows of `[tensors, blocks, block_size, ...]`; the sources of a group are read
    first."""
    block_size = stack.shape[2]
    if stack[0].is_contiguous():  # whole rows are copied faster than by two indices
        flat = stack.flatten(1, 2)
        for source, target in plan.moves:
            flat.index_copy_(1, target, flat.index_select(1, source))
        if plan.cleared is not None:
            flat.index_fill_(1, plan.cleared, 0)
        return
    for source, target in plan.moves:
        moved = stack[:, source // block_size, source % block_size]
        stack[:, target // block_size, target % block_size] = moved
    if plan.cleared is not None:
        stack[:, plan.cleared // block_size, plan.cleared % block_size] = 0


def _is_kept(path: Tensor, accepted_lens: Tensor) -> Tensor:
    """Tell which entries of a path count."""
    columns = torch.arange(path.shape[1], device=path.device)
    return (columns <= accepted_lens[:, None]) & (path[:, :1] >= 0)


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
