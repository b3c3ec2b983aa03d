"""KV caches that roll back in place: paged, contiguous, and a ring for sliding windows.

One interface. A step of speculative decoding:

    cache.reserve(counts)                    host: blocks for the nodes, or OutOfBlocks
    slots = cache.slots(num_nodes, nodes)    where the rows of the nodes go
    cache.append(layer, key, value, slots)   for every layer
    cache.keep(path, accepted_lens)          the accepted path becomes context

Undo with `truncate`, share a prefix with `fork`, end a request with `free`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import pad

from spec_kernels._check import require
from spec_kernels.nn._blocks import BlockLists
from spec_kernels.nn._cache import KVCacheBase, KVShape

__all__ = ["ContiguousKVCache", "KVShape", "PagedKVCache", "SlidingWindowKVCache"]


class PagedKVCache(KVCacheBase):
    """K/V in blocks that requests take as they grow, share as they fork, and give back.

    Args:
        shapes: of every layer.
        batch: most requests at a time.
        num_blocks: blocks for all of them; None = as many as they can ever need.
        block_size: rows per block.
        max_length: most rows of a request, drafts included.
        dtype: of the rows; float8_e4m3fn, float8_e5m2 and int8 are quantised.
        device: where the tensors are.
        scale: of a quantised cache: "row" = one per token and head, computed; "cache" = one per
            tensor, yours to set in `key_scales` and `value_scales`.
        clears: set the rows of rejected nodes to zero.

    Note:
        Rows of different requests never meet: before a request writes to a block that it shares,
        `reserve` gives it a copy. Rows that are full and shared are never written.

    Example:
        >>> cache = PagedKVCache([KVShape(1, 2, 2)], 2, num_blocks=3, block_size=4, max_length=16)
        >>> cache.reserve([5, 3])
        >>> cache.num_free
        0
        >>> num_nodes = torch.tensor([5, 3], dtype=torch.int32)
        >>> key = torch.arange(20.0).view(2, 5, 1, 2)
        >>> cache.append(0, key, key, cache.slots(num_nodes, 5))
        >>> path = torch.tensor([[0, 2, 4], [0, -1, -1]], dtype=torch.int32)
        >>> cache.keep(path, torch.tensor([2, 0], dtype=torch.int32), lens=[3, 1])
        >>> cache.num_free, cache.context_lens
        (1, tensor([3, 1], dtype=torch.int32))
        >>> cache.rows(0, cache.context_lens, 3)[0][0, :, 0, 0]
        tensor([0., 4., 8.])
    """

    block_table: Tensor

    def __init__(
        self,
        shapes: Sequence[KVShape],
        batch: int,
        *,
        num_blocks: int | None,
        block_size: int = 16,
        max_length: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        scale: Literal["row", "cache"] = "row",
        clears: bool = False,
    ) -> None:
        require(block_size > 0, f"block_size must be at least 1, got {block_size}")
        self._is_elastic = num_blocks is None
        if num_blocks is None:
            num_blocks = batch * -(-max_length // block_size)
        super().__init__(
            shapes,
            batch,
            num_blocks,
            block_size,
            max_length=max_length,
            dtype=dtype,
            device=device,
            scale=scale,
            clears=clears,
        )
        self._lists = BlockLists(batch, num_blocks, block_size)
        self._table = torch.full((batch, -(-max_length // block_size)), -1, dtype=torch.int32)
        self.block_table = self._table.to(device, copy=True)

    @property
    def num_free(self) -> int:
        """Blocks that no request holds."""
        return self._lists.pool.num_free

    def blocks_of(self, request: int) -> tuple[int, ...]:
        """Return the blocks that a request holds, in the order of its rows."""
        return tuple(self._lists.blocks[request])

    def fill(self, *, required: bool = False) -> None:
        """Give every request all its blocks if `num_blocks` was None or it is required.

        Raises:
            OutOfBlocks: it is required, and there are too few. Nothing changed.
        """
        if (self._is_elastic or required) and min(self._ends) < self.max_rows:
            ends = [self.max_rows] * self.batch
            self._grow(self._known, ends)
            self._ends = ends

    def _widen(self, rows: int) -> None:
        width = -(-rows // self.block_size)
        more = width - self._table.shape[1]
        if more and self._is_elastic:
            self._pad(self.batch * more, 0)
            self._lists.pool.add(self.batch * more)
        self._table = pad(self._table, (0, more), value=-1)
        self.block_table = self._table.to(self.block_table.device, copy=True)

    def _grow(self, starts: Sequence[int], ends: Sequence[int]) -> None:
        growth = self._lists.grow(starts, ends)
        for tensor in self.tensors.tensors if growth.copies else ():
            for old, new in growth.copies:
                tensor[new] = tensor[old]
        self._upload(growth.changed)

    def _shrink(self, lens: Sequence[int]) -> None:
        self._upload(self._lists.shrink(lens))

    def _share(self, source: int, target: int, length: int) -> None:
        self._lists.share(source, target, length)
        self._upload({target})

    def _upload(self, changed: set[int]) -> None:
        """Write the lists of some requests to the table; its address stays."""
        for request in changed:
            own = self._lists.blocks[request]
            self._table[request] = -1
            self._table[request, : len(own)] = torch.tensor(own, dtype=torch.int32)
        if changed:
            self.block_table.copy_(self._table, non_blocking=True)


class ContiguousKVCache(KVCacheBase):
    """K/V of each request side by side: no table, no blocks, `max_length` rows per request.

    Args:
        shapes, batch, max_length, dtype, device, scale, clears: as of `PagedKVCache`.

    Example:
        >>> cache = ContiguousKVCache([KVShape(1, 2, 2)], 1, max_length=8)
        >>> cache.reserve([3])
        >>> key = torch.ones(1, 3, 1, 2)
        >>> cache.append(0, key, key, cache.slots(torch.tensor([3]), 3))
        >>> cache.advance([3])
        >>> cache.truncate([1])
        >>> cache.context_lens
        tensor([1], dtype=torch.int32)
    """

    def __init__(
        self,
        shapes: Sequence[KVShape],
        batch: int,
        *,
        max_length: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        scale: Literal["row", "cache"] = "row",
        clears: bool = False,
    ) -> None:
        super().__init__(
            shapes,
            batch,
            batch,
            max_length,
            max_length=max_length,
            dtype=dtype,
            device=device,
            scale=scale,
            clears=clears,
        )

    def _widen(self, rows: int) -> None:
        self._pad(0, rows - self.block_size)
        self.block_size = rows

    def _share(self, source: int, target: int, length: int) -> None:
        for tensor in self.tensors.tensors:
            tensor[target, :length] = tensor[source, :length]


class SlidingWindowKVCache(KVCacheBase):
    """K/V of the last rows of each request, in a ring that can undo what was written too far.

    The ring is longer than the window by what one forward may write, so a row that the window still
    needs is never overwritten by a draft, and a rejected draft leaves the window whole. What would
    break that is refused before anything is written. Row p of a request lies in the ring's row
    p % ring_rows; the block table says so to every operation.

    Args:
        shapes, batch, max_length, dtype, device, scale, clears: as of `PagedKVCache`; max_length
            bounds the positions, not the memory.
        window: rows that a query sees, its own included.
        max_nodes: most rows that one `reserve` may ask for; longer prompts go in pieces.
        block_size: rows per block of the ring.

    Example:
        >>> cache = SlidingWindowKVCache([KVShape(1, 2, 2)], 1, window=4, max_nodes=3,
        ...                              block_size=2, max_length=100)
        >>> cache.ring_rows
        6
        >>> cache.reserve([4])
        Traceback (most recent call last):
        ValueError: count of request 0 must be at most 3, got 4
    """

    block_table: Tensor

    def __init__(
        self,
        shapes: Sequence[KVShape],
        batch: int,
        *,
        window: int,
        max_nodes: int,
        max_length: int,
        block_size: int = 16,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        scale: Literal["row", "cache"] = "row",
        clears: bool = False,
    ) -> None:
        for name, number in (("window", window), ("max_nodes", max_nodes)):
            require(number > 0, f"{name} must be at least 1, got {number}")
        require(block_size > 0, f"block_size must be at least 1, got {block_size}")
        ring = -(-(window + max_nodes - 1) // block_size)
        super().__init__(
            shapes,
            batch,
            batch * ring,
            block_size,
            max_length=max_length,
            dtype=dtype,
            device=device,
            scale=scale,
            clears=clears,
        )
        self.window, self.max_nodes, self.ring_rows = window, max_nodes, ring * block_size
        index = torch.arange(-(-max_length // block_size)) % ring
        table = torch.arange(batch)[:, None] * ring + index
        self.block_table = table.to(device=device, dtype=torch.int32)
        self._written = [0] * batch  # rows that were ever written, or may have been

    def _require_rows(self, lens: Sequence[int]) -> None:
        for b, length in enumerate(lens):
            self._require_window(b, length, self._written[b])

    def _grow(self, starts: Sequence[int], ends: Sequence[int]) -> None:
        for b, (length, end) in enumerate(zip(self._lens, ends, strict=True)):
            count = end - length
            require(
                count <= self.max_nodes,
                f"count of request {b} must be at most {self.max_nodes}, got {count}",
            )
            self._require_window(b, self._known[b], max(self._written[b], end))
        self._written = [max(pair) for pair in zip(self._written, ends, strict=True)]

    def _shrink(self, lens: Sequence[int]) -> None:
        self._written = [n if length else 0 for n, length in zip(self._written, lens, strict=True)]

    def _require_window(self, request: int, length: int, written: int) -> None:
        """Raise if a row that a query at position `length` sees was, or would be, overwritten."""
        oldest, needed = written - self.ring_rows, max(length - self.window + 1, 0)
        require(
            length == 0 or oldest <= needed,
            f"request {request} needs row {needed}, but rows below {oldest} are overwritten",
        )

    def _share(self, source: int, target: int, length: int) -> None:
        self._require_window(source, length, self._written[source])
        ring = self.ring_rows // self.block_size
        here, there = (slice(b * ring, b * ring + ring) for b in (source, target))
        for tensor in self.tensors.tensors:
            tensor[there] = tensor[here]
        self._written[target] = self._written[source]
