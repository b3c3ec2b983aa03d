"""The caches of targets, and how the nodes of a forward are written to them and attend to them.

What is the same for every layer of a forward is found once, in `Nodes`; per layer it takes one
`append_cache` and one `verify_attention`. No mask over the context exists.

A round of one request on a CPU is the exception: a layer of a small model takes little longer than
checking such calls. If its rows lie side by side, views of them go to the fused attention of torch,
where `verify_attention` would have led as well (`_Alone`).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from itertools import accumulate
from typing import Final

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from spec_kernels.nn import AttentionStep, ContiguousKVCache, KVShape, PagedKVCache
from spec_kernels.ops import verify_attention
from spec_kernels.targets.base import can_read, contain_faults, padded_rows
from spec_kernels.tree import ancestor_mask, ancestor_words, depths

BLOCK_SIZE: Final = 16

FEW_NODES: Final = 64
"""Most nodes with a mask of their own; a prompt has more, and `verify_attention` bounds memory."""

KVCache = ContiguousKVCache | PagedKVCache


def open_cache(
    shapes: Sequence[KVShape],
    batch: int,
    capacity: int,
    *,
    dtype: torch.dtype,
    device: torch.device,
    block_size: int | None = None,
    num_blocks: int | None = None,
) -> KVCache:
    """Return an empty cache: paged on a GPU; on a CPU, which reads them faster, contiguous rows.

    Args:
        shapes: of every layer.
        batch: requests.
        capacity: most positions of a request.
        dtype, device: of the rows.
        block_size: rows per block, on any device; None = the default of the device.
        num_blocks: blocks for all requests; None = enough.

    Example:
        >>> cpu = torch.device("cpu")
        >>> cache = open_cache([KVShape(1, 2, 2)], 1, 8, dtype=torch.float32, device=cpu)
        >>> type(cache).__name__
        'ContiguousKVCache'
    """
    if block_size is None and num_blocks is None and device.type == "cpu":
        return ContiguousKVCache(shapes, batch, max_length=capacity, dtype=dtype, device=device)
    return PagedKVCache(
        shapes,
        batch,
        num_blocks=num_blocks,
        block_size=BLOCK_SIZE if block_size is None else block_size,
        max_length=capacity,
        dtype=dtype,
        device=device,
    )


def make_room(cache: KVCache, num_nodes: Tensor, nodes: int, *, is_tree: bool) -> list[int] | None:
    """Reserve rows for the nodes where reading costs nothing, on a CPU; return their counts there.

    On a GPU nothing is read: None. A cache with blocks enough for all gives them out; of another
    one the caller has reserved the rows.

    Raises:
        OutOfBlocks: nothing changed.
    """
    cache.holds_tree = is_tree
    if is_tree:
        cache.extend(nodes)
    if not can_read(num_nodes):
        cache.fill()
        return None
    cache.tell(cache.context_lens.tolist())
    counts: list[int] = num_nodes.clamp(0, nodes).tolist()
    cache.reserve(counts)
    return counts


class _Alone:
    """The only request with new nodes, in a contiguous cache on a CPU.

    Args:
        cache: of all requests.
        request: its number.
        count: its nodes.
        start: the first new one.
        parents: `[nodes]` of its tree, or None.
    """

    def __init__(
        self, cache: KVCache, request: int, count: int, start: int, parents: Tensor | None
    ) -> None:
        context = int(cache.context_lens[request])
        self.own = slice(request, request + 1)
        self.first, self.end = context + start, context + count
        self.dtype = cache.keys[0].dtype
        self._bias: Tensor | None = None
        self._masks: dict[int, Tensor | None] = {}
        if parents is not None:
            self._bias = torch.zeros(count - start, self.end, dtype=self.dtype)
            self._bias[:, context:] = torch.tensor(_biases(parents[:count].tolist())[start:])
        elif count - start > 1:
            self._bias = torch.full((count - start, self.end), -math.inf, dtype=self.dtype)
            self._bias.triu_(self.first + 1)

    @staticmethod
    def find(
        cache: KVCache, counts: Sequence[int] | None, start: int, parents: Tensor | None
    ) -> _Alone | None:
        """Return the request if there is one such, it has few nodes, and the cache need not know
        where they go."""
        active = [b for b, count in enumerate(counts or ()) if count > start]
        if (
            len(active) != 1
            or cache.block_table is not None
            or cache.clears
            or not cache.context_lens.is_cpu
        ):
            return None
        assert counts is not None
        request, count = active[0], counts[active[0]]
        if count - start > FEW_NODES:
            return None
        return _Alone(cache, request, count, start, None if parents is None else parents[request])

    def suits(
        self, query: Tensor, window: int | None, softcap: float | None, sinks: Tensor | None
    ) -> bool:
        """Tell that torch's attention computes what a layer asks for."""
        is_seen = window is None or window >= self.end
        return is_seen and softcap is None and sinks is None and query.dtype == self.dtype

    def attend(
        self,
        cache: KVCache,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float | None,
    ) -> Tensor:
        """Write the new rows and look at all of them: as `Nodes.attend`."""
        all_values = cache.values[layer]
        assert all_values is not None
        keys, values = cache.keys[layer][self.own, : self.end], all_values[self.own, : self.end]
        keys[0, self.first :] = key
        values[0, self.first :] = value
        (nodes, heads, dim), kv_heads = query.shape, key.shape[1]
        groups = heads // kv_heads
        if groups not in self._masks:
            bias = self._bias
            self._masks[groups] = None if bias is None else bias.repeat(groups, 1)[None, None]
        out = scaled_dot_product_attention(
            query.transpose(0, 1).reshape(1, kv_heads, groups * nodes, dim),
            keys.transpose(1, 2),
            values.transpose(1, 2),
            attn_mask=self._masks[groups],
            scale=scale,
        )
        return out.reshape(heads, nodes, values.shape[3]).transpose(0, 1)


def _biases(parents: Sequence[int]) -> list[list[float]]:
    """Return what each node of a tree adds to the scores of all: 0 for itself and its ancestors,
    -inf for others. The tree is small: a list costs less than tensors do.

    Example:
        >>> _biases([-1, 0, 0])
        [[0.0, -inf, -inf], [0.0, 0.0, -inf], [0.0, -inf, 0.0]]
    """
    rows: list[list[float]] = []
    for node, parent in enumerate(parents):
        row = rows[parent].copy() if 0 <= parent < node else [-math.inf] * len(parents)
        row[node] = 0.0
        rows.append(row)
    return rows


class Nodes:
    """The new nodes of a forward: where their K/V go, where they stand, what they see.

    Args:
        cache: with rows reserved for the nodes.
        num_nodes: `[batch] int32`, nodes of each request.
        nodes: width of the padded draft.
        counts: num_nodes on the host, if known: then only real nodes are computed, request by
            request. Without them all places of the draft are, `batch * (nodes - start)`.
        parents: `[batch, nodes] int32`, or None: chains.
        start: first node to compute; K/V of those before it are in place.
        contained: keep NaN and inf in the K/V of a node from those that must not see it; not for a
            prompt, all of which is seen by what follows. Where the result can be looked at for
            nothing, on a CPU, only when it shows that there are any: see `is_spoiled`.

    Attributes:
        positions: `[tokens] int64` of the new nodes, 0 for padding.
    """

    def __init__(
        self,
        cache: KVCache,
        num_nodes: Tensor,
        nodes: int,
        counts: Sequence[int] | None = None,
        *,
        parents: Tensor | None = None,
        start: int = 0,
        contained: bool = True,
    ) -> None:
        self._cache, self._num_nodes, self._parents = cache, num_nodes, parents
        self._may_leak = contained and nodes > 1
        self._contained = self._may_leak and counts is None
        self._start, self._nodes = start, nodes
        device = num_nodes.device
        self._picked = None if counts is None else _real_places(counts, start, nodes, device)
        node = torch.arange(start, nodes, device=device).expand(cache.batch, -1)
        depth = node if parents is None else depths(parents, num_nodes)[:, start:].clamp(min=0)
        position = cache.context_lens[:, None].long() + depth
        if counts is None:
            position = torch.where(node < num_nodes[:, None], position, 0)
        self.positions = self.pick(position)
        self._alone = _Alone.find(cache, counts, start, parents)
        self._places: Tensor | None = None
        self._counts = counts
        self._sees: Tensor | None = None

    @functools.cached_property
    def row(self) -> Tensor:
        """`[batch, nodes] int32`, number of each new node among those computed; -1 elsewhere."""
        batch, start, device = self._cache.batch, self._start, self._num_nodes.device
        if self._counts is None:
            return padded_rows(self._num_nodes, batch, self._nodes, start)
        places = batch * (self._nodes - start)
        row = torch.arange(places, dtype=torch.int32, device=device)
        if self._picked is not None:
            number = row[: len(self._picked)]
            row = torch.full_like(row, -1).index_copy_(0, self._picked, number)
        row = row.view(batch, -1)
        return pad(row, (start, 0), value=-1) if start else row

    def pick(self, grid: Tensor) -> Tensor:
        """Return the entries of the new nodes, `[tokens, ...]`, from a grid `[batch, nodes - start,
        ...]`."""
        flat = grid.flatten(0, 1)
        return flat if self._picked is None else flat[self._picked]

    def spread(self, found: Tensor) -> Tensor:
        """Return a grid `[batch, nodes - start, ...]` of what was found for the new nodes,
        `[tokens, ...]`; arbitrary in other places."""
        shape = self._cache.batch, self._nodes - self._start
        if self._picked is None:
            return found.view(*shape, *found.shape[1:])
        if not len(found):
            return found.new_zeros(*shape, *found.shape[1:])
        return found[self.row[:, self._start :].clamp(min=0).long()]

    @functools.cached_property
    def _slots(self) -> Tensor:
        """Where the cache puts the new rows; asked for unless the request is alone."""
        return self.pick(self._cache.slots(self._num_nodes, self._nodes, start=self._start))

    @functools.cached_property
    def _step(self) -> AttentionStep:
        """What a layer that is not alone attends by; found, with `_queries` and `_places`, when one
        first asks."""
        if self._parents is None and self._counts is not None:
            return self._packed_chains(self._counts)
        return self._padded_or_tree()

    def _packed_chains(self, counts: Sequence[int]) -> AttentionStep:
        """Say where the queries are: the new nodes of one request behind those of another."""
        cache, start = self._cache, self._start
        ends = [0, *accumulate(max(count - start, 0) for count in counts)]
        self._queries = ends[-1]
        return AttentionStep(
            cache.context_lens + start if start else cache.context_lens,
            torch.tensor(ends, dtype=torch.int32, device=cache.context_lens.device),
            self._nodes - start,
            cache.block_table,
        )

    def _padded_or_tree(self) -> AttentionStep:
        """Say where the queries are: of a tree that is extended, those before `start` count too."""
        cache, parents, device = self._cache, self._parents, self._num_nodes.device
        nodes, start = self._nodes, self._start
        first = start if parents is None else 0
        counts = (self._num_nodes.clamp(max=nodes) - first).clamp(min=0)
        ends = pad(counts.cumsum(0), (1, 0)).to(torch.int32)
        is_packed = self._counts is not None and first == start
        queries = len(self.positions) if is_packed else cache.batch * (nodes - first)
        index = torch.arange(nodes - first, device=device)
        place = torch.where(index < counts[:, None], ends[:-1, None] + index, queries).long()
        self._places = None if is_packed else self.pick(place[:, start - first :])
        self._queries = queries if is_packed else queries + 1  # padding goes to the last one
        words = depth = None
        if parents is not None:
            flat, grid = place.flatten(), ancestor_words(parents, self._num_nodes).flatten(0, 1)
            words = grid.new_zeros(queries + 1, grid.shape[1]).index_copy(0, flat, grid)
            below = depths(parents, self._num_nodes).flatten()
            depth = below.new_zeros(queries + 1).index_copy(0, flat, below)
            words, depth = words[: self._queries], depth[: self._queries]
        context = cache.context_lens + first
        return AttentionStep(context, ends, nodes - first, cache.block_table, words, depth, None)

    def attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        scale: float | None = None,
        window: int | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Write the K/V of a layer and attend from each new node to its context, its ancestors and
        itself.

        Args:
            layer: index of the layer.
            query: `[tokens, heads, qk_dim]`.
            key, value: `[tokens, kv_heads, dim]`.
            scale, window, softcap, sinks: as of `verify_attention`.

        Returns:
            `[tokens, heads, v_dim]`.
        """
        poison = None
        if self._contained:
            key, value, poison = contain_faults(key, value, self._see())
        alone = self._alone
        if alone is not None and alone.suits(query, window, softcap, sinks):
            out = alone.attend(self._cache, layer, query, key, value, scale)
        else:
            self._cache.append(layer, key, value, self._slots)
            out = self._look(layer, query, scale, window, softcap, sinks)
        return out if poison is None else out + poison[:, None, None].to(out.dtype)

    def _look(
        self,
        layer: int,
        query: Tensor,
        scale: float | None,
        window: int | None,
        softcap: float | None,
        sinks: Tensor | None,
    ) -> Tensor:
        """Attend to what has been written, with queries where the step looks for them."""
        step, values = self._step, self._cache.values[layer]
        places = self._places  # set with the step
        assert values is not None
        if places is not None:
            blank = query.new_zeros(self._queries, *query.shape[1:])
            query = blank.index_copy(0, places, query)
        out, _ = verify_attention(
            query,
            self._cache.keys[layer],
            values,
            step.context_lens,
            step.cu_seqlens_q,
            step.max_seqlen_q,
            block_table=step.block_table,
            ancestors=step.ancestors,
            depths=step.depths,
            scale=scale,
            window=window,
            softcap=softcap,
            sinks=sinks,
        )
        return out if places is None else out[places]

    def is_spoiled(self, states: Tensor) -> bool:
        """Return whether the forward must run again, since a faulty node may have spoiled others;
        from then on faults are contained.

        Args:
            states: `[tokens, size]`, last hidden states: NaN in the K/V of a node ends up there.
        """
        if self._contained or not self._may_leak or math.isfinite(states.sum(dtype=torch.float32)):
            return False
        self._contained = True
        return True

    def _see(self) -> Tensor:
        """Return which new nodes each one sees, `[tokens, tokens] bool`."""
        if self._sees is None:
            shape = (self._cache.batch, self._nodes - self._start)
            device = self._num_nodes.device
            request = torch.arange(shape[0], device=device)[:, None]
            node = torch.arange(self._start, self._nodes, device=device)
            request, node = self.pick(request.expand(shape)), self.pick(node.expand(shape))
            if self._parents is None:
                inside = node <= node[:, None]
            else:
                mask = ancestor_mask(self._parents, self._num_nodes)
                inside = mask[request[:, None], node[:, None], node]
            self._sees = inside & (request == request[:, None])
        return self._sees


def _real_places(
    counts: Sequence[int], start: int, nodes: int, device: torch.device
) -> Tensor | None:
    """Return where the new nodes are in the grid `[batch, nodes - start]`, flat; None = all of it
    are."""
    width = nodes - start
    places = [b * width + i for b, count in enumerate(counts) for i in range(count - start)]
    if len(places) == len(counts) * width:
        return None
    return torch.tensor(places, dtype=torch.int64, device=device)
