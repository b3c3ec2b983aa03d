"""What all KV caches share: tensors, lengths, appending, keeping, reading; policies come on top.

Lengths and tables are device tensors, and nothing here reads them. Who holds which block is counted
on the host, from numbers that the caller already has: what it reserves, and the lengths that it
read once per step (`lens`). Without them blocks stay reserved until the next time they are given.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate
from typing import Final, Literal, NamedTuple

import torch
from torch import Tensor

from spec_kernels._check import require
from spec_kernels.ops import append_cache, compact_cache
from spec_kernels.types import CacheTensors

QUANTISED: Final = (torch.float8_e4m3fn, torch.float8_e5m2, torch.int8)
"""Dtypes of caches that store a scale beside the rows."""

_LINE: Final = 64
"""Bytes that tensors in one storage are aligned to."""


class KVShape(NamedTuple):
    """Rows of one layer.

    Attributes:
        kv_heads: heads per row.
        key_dim: numbers per head of a key.
        value_dim: numbers per head of a value; 0 = the layer stores latent rows, as keys only.
    """

    kv_heads: int
    key_dim: int
    value_dim: int


class KVCacheBase:
    """What all caches share: tensors, lengths, appending, keeping, reading.

    Attributes:
        context_lens: `[batch] int32`, committed rows; replaced, never written.
        block_table: `[batch, max_blocks] int32`, -1 = none; None if the cache is contiguous.
        keys, values: per layer `[blocks, block_size, kv_heads, dim]`, or `[batch, max_length, ...]`
            if contiguous; a value is None where a layer stores latent rows.
        key_scales, value_scales: per layer `[blocks, block_size, kv_heads]` or `[1] float32` of a
            quantised cache, else None.
        tensors: all tensors whose rows move together.
        holds_tree: whether the last forward may have been over trees. If not, rows already lie in
            place and `keep` only advances the lengths.
        clears: whether `keep` sets the rows of rejected nodes to zero.
        max_length: most positions of a request.
        max_rows: most rows of a request: as many, and more after `extend`.
    """

    def __init__(
        self,
        shapes: Sequence[KVShape],
        batch: int,
        blocks: int,
        block_size: int,
        *,
        max_length: int,
        dtype: torch.dtype,
        device: torch.device | str,
        scale: Literal["row", "cache"],
        clears: bool,
    ) -> None:
        require(len(shapes) > 0, "shapes must have at least one layer, got none")
        for name, number in (("batch", batch), ("max_length", max_length), ("blocks", blocks)):
            require(number > 0, f"{name} must be at least 1, got {number}")
        require(block_size > 0, f"block_size must be at least 1, got {block_size}")
        require(scale in ("row", "cache"), f"scale must be row or cache, got {scale!r}")
        self.batch, self.max_length, self.block_size = batch, max_length, block_size
        self.max_rows = max_length
        self.holds_tree, self.clears = True, clears
        self.context_lens = torch.zeros(batch, dtype=torch.int32, device=device)
        self.block_table: Tensor | None = None
        self._num_nodes: Tensor | None = None
        # Lengths as last told, upper bounds of the present ones, and ends of what is reserved.
        self._known, self._lens, self._ends = [0] * batch, [0] * batch, [0] * batch

        def rows(shapes: list[tuple[int, int]]) -> list[Tensor]:
            sizes = [(blocks, block_size, *shape) for shape in shapes]
            return _side_by_side(sizes, dtype, device)

        def scales(heads: int) -> Tensor | None:
            if dtype not in QUANTISED:
                return None
            if scale == "cache":
                return torch.ones(1, device=device)
            return torch.zeros(blocks, block_size, heads, device=device)

        self.keys = rows([(s.kv_heads, s.key_dim) for s in shapes])
        values = iter(rows([(s.kv_heads, s.value_dim) for s in shapes if s.value_dim]))
        self.values = [next(values) if s.value_dim else None for s in shapes]
        self.key_scales = [scales(s.kv_heads) for s in shapes]
        self.value_scales = [scales(s.kv_heads) if s.value_dim else None for s in shapes]
        self._describe()

    def _describe(self) -> None:
        parts = [*self.keys, *self.values, *self.key_scales, *self.value_scales]
        self.tensors = CacheTensors.make([x for x in parts if x is not None and x.dim() > 1])

    def _pad(self, blocks: int, rows: int) -> None:
        """Replace all tensors by larger ones, by so many blocks and rows per block."""

        def pad(tensors: Sequence[Tensor | None]) -> list[Tensor | None]:
            old = [x for x in tensors if x is not None and x.dim() > 1]
            if not old:
                return list(tensors)
            sizes = [(x.shape[0] + blocks, x.shape[1] + rows, *x.shape[2:]) for x in old]
            larger = _side_by_side(sizes, old[0].dtype, old[0].device)
            for one, two in zip(old, larger, strict=True):
                two[: one.shape[0], : one.shape[1]] = one
            found = iter(larger)
            return [next(found) if x is not None and x.dim() > 1 else x for x in tensors]

        self.keys = pad(self.keys)  # type: ignore[assignment]
        self.values = pad(self.values)
        self.key_scales = pad(self.key_scales)
        self.value_scales = pad(self.value_scales)
        self._describe()

    # ------------------------------------------------------------------ host: room

    def reserve(self, counts: Sequence[int]) -> None:
        """Make room for `counts[b]` rows behind the context of each request.

        Raises:
            OutOfBlocks: there are too few free blocks. Nothing changed; `missing` says how many
                more must be freed.
            ValueError: a count is negative, or a request would outgrow the cache for good.
        """
        require(len(counts) == self.batch, f"counts must be {self.batch} ints, got {len(counts)}")
        ends = [max(n + c, e) for n, c, e in zip(self._lens, counts, self._ends, strict=True)]
        for b, (count, end) in enumerate(zip(counts, ends, strict=True)):
            require(count >= 0, f"count of request {b} must be at least 0, got {count}")
            require(
                end <= self.max_rows,
                f"request {b} must have at most {self.max_rows} rows, got {end}",
            )
        starts = self._known
        self._grow(starts, [e if c else s for s, c, e in zip(starts, counts, ends, strict=True)])
        self._ends = ends

    def extend(self, nodes: int) -> None:
        """Make room for trees of so many nodes behind any context: they have more rows than
        positions. Tensors and table may be replaced by larger ones."""
        rows = self.max_length + nodes - 1
        if rows > self.max_rows:
            self._widen(rows)
            self.max_rows = rows

    def fill(self, *, required: bool = False) -> None:
        """Reserve all rows that requests may have, if there is room for all: then nobody has to
        count them.

        Args:
            required: raise if there is not.
        """

    def tell(self, lens: Sequence[int]) -> None:
        """Tell the host the lengths as they are on the device; what is reserved stays."""
        self._known, self._lens = list(lens), list(lens)

    def trim(self, bounds: Sequence[int]) -> None:
        """Release what lies behind `bounds[b]` rows, where the lengths are known not to reach."""
        self._shrink(bounds)
        pairs = (zip(old, bounds, strict=True) for old in (self._known, self._lens, self._ends))
        self._known, self._lens, self._ends = ([min(pair) for pair in many] for many in pairs)

    def truncate(self, lens: Tensor | Sequence[int]) -> None:
        """Shorten every request to `lens[b]` rows, and forget the nodes of the last forward.

        Args:
            lens: host integers, or `[batch] int32`, which releases no block and must not go below
                the lengths last told by host integers. A length above the present one leaves it.

        Raises:
            ValueError: a host integer is negative or above the present length.
        """
        if isinstance(lens, Tensor):
            self.context_lens = torch.minimum(self.context_lens, lens.to(torch.int32))
            return
        kept = self._checked(lens, self._lens)
        self._shrink(kept)
        self.context_lens = torch.minimum(self.context_lens, self._on_device(kept))
        self._settle(kept)

    def free(self, request: int) -> None:
        """Empty a request, so that another one can take its place."""
        ends = [0 if b == request else end for b, end in enumerate(self._ends)]
        self._shrink(ends)
        self._ends = ends
        self._lens[request] = self._known[request] = 0
        self._set_length(request, torch.zeros((), dtype=torch.int32))

    def fork(self, source: int, target: int, length: int) -> None:
        """Let the empty request `target` begin with the first `length` rows of `source`.

        Raises:
            ValueError: target is not empty, or source has fewer rows, or more than it was told:
                `keep` was called without lens.
        """
        require(self._ends[target] == 0, f"request {target} must be empty, free it first")
        have = self._known[source]
        require(have == self._lens[source], f"the length of request {source} was not told: lens")
        require(0 <= length <= have, f"length must be in [0, {have}], got {length}")
        self._share(source, target, length)
        self._known[target] = self._lens[target] = self._ends[target] = length
        self._set_length(target, self.context_lens[source].clamp(max=length))

    def _settle(self, lens: Sequence[int]) -> None:
        """Note lengths as told; nothing is reserved behind them."""
        self._known, self._lens, self._ends = list(lens), list(lens), list(lens)

    def _checked(self, lens: Sequence[int], most: Sequence[int]) -> list[int]:
        require(len(lens) == self.batch, f"lens must be {self.batch} ints, got {len(lens)}")
        for b, (length, limit) in enumerate(zip(lens, most, strict=True)):
            require(
                0 <= length <= limit, f"length of request {b} must be in [0, {limit}], got {length}"
            )
        self._require_rows(lens)
        return list(lens)

    def _on_device(self, numbers: Sequence[int]) -> Tensor:
        host = torch.tensor(numbers, dtype=torch.int32)
        return host.to(self.context_lens.device, non_blocking=True)

    def _set_length(self, request: int, length: Tensor) -> None:
        lens = self.context_lens.clone()
        lens[request] = length
        self.context_lens = lens

    def _require_rows(self, lens: Sequence[int]) -> None:
        """Raise unless the rows that matter at these lengths are still there."""

    def _grow(self, starts: Sequence[int], ends: Sequence[int]) -> None:
        """Make the rows [starts[b], ends[b]) writable, or raise before anything changed."""

    def _shrink(self, lens: Sequence[int]) -> None:
        """Release what lies behind `lens[b]` rows."""

    def _widen(self, rows: int) -> None:
        """Let each request have so many rows."""
        raise NotImplementedError(f"{type(self).__name__} cannot be extended for trees")

    def _share(self, source: int, target: int, length: int) -> None:
        """Give `target` the first rows of `source`."""
        raise NotImplementedError

    # ------------------------------------------------------------------ device: rows

    def slots(self, num_nodes: Tensor, nodes: int, *, start: int = 0) -> Tensor:
        """Return where the rows of the nodes go, for `append` and for engines.

        Args:
            num_nodes: `[batch] int32`, at most what was reserved; 0 = absent request.
            nodes: width of the padded draft.
            start: first node; those before it were appended by earlier forwards of this step.

        Returns:
            `[batch, nodes - start] int64`: block * block_size + place; -1 = no row.
        """
        self._num_nodes = num_nodes
        node = torch.arange(start, nodes, device=num_nodes.device)
        position = self.context_lens[:, None].long() + node
        return torch.where(node < num_nodes[:, None], self._rows(position), -1)

    def _rows(self, position: Tensor) -> Tensor:
        """Return the flat row of positions `[batch, n] int64`, -1 where there is none."""
        block = torch.arange(self.batch, device=position.device)[:, None]
        exists = position < self.max_rows
        if self.block_table is not None:
            index = (position // self.block_size).clamp(max=self.block_table.shape[1] - 1)
            block = self.block_table.gather(1, index).long()
            exists = exists & (block >= 0)
        return torch.where(exists, block * self.block_size + position % self.block_size, -1)

    def append(self, layer: int, key: Tensor, value: Tensor | None, slots: Tensor) -> None:
        """Write the K/V of new nodes of one layer; a negative slot is skipped.

        Args:
            layer: index of the layer.
            key: `[..., kv_heads, key_dim]` float.
            value: `[..., kv_heads, value_dim]`, or None for latent rows.
            slots: `[...] int64`, from `slots`.
        """
        append_cache(
            self.keys[layer],
            self.values[layer],
            key.flatten(0, -3),
            None if value is None else value.flatten(0, -3),
            slots.flatten(),
            key_scale=self.key_scales[layer],
            value_scale=self.value_scales[layer],
        )

    def keep(
        self, path: Tensor, accepted_lens: Tensor, *, lens: Sequence[int] | None = None
    ) -> None:
        """Make the root and the accepted nodes of the last forward permanent.

        Args:
            path: `[batch, max_depth + 1] int32`: kept nodes, root first, then -1. A row of -1
                (absent request) keeps its length.
            accepted_lens: `[batch] int32`: accepted drafts; a length grows by this plus one.
            lens: the new lengths, as the caller read them; releases the blocks behind them.

        Raises:
            ValueError: a length in lens is outside what was reserved.
        """
        kept = list(self._ends) if lens is None else self._checked(lens, self._ends)
        accepted_lens = accepted_lens.to(torch.int32)
        if self.holds_tree or self.clears:
            compact_cache(
                self.tensors,
                self.block_table,
                self.context_lens,
                path,
                accepted_lens,
                num_nodes=self._num_nodes if self.clears else None,
            )
        grown = self.context_lens + accepted_lens + 1
        self.context_lens = torch.where(path[:, 0] >= 0, grown, self.context_lens)
        if lens is None:
            self._lens = kept
        else:
            self._shrink(kept)
            self._settle(kept)

    def advance(self, counts: Sequence[int]) -> None:
        """Make the first `counts[b]` appended rows of each request permanent: those of a prompt.

        Raises:
            ValueError: more rows than were reserved.
        """
        kept = self._checked([n + c for n, c in zip(self._lens, counts, strict=True)], self._ends)
        self._shrink(kept)
        self.context_lens = self.context_lens + self._on_device(counts)
        self._settle(kept)

    def rows(self, layer: int, lens: Tensor, length: int) -> tuple[Tensor, Tensor | None]:
        """Gather the K/V of one layer side by side, for attention that reads no block table.

        Args:
            layer: index of the layer.
            lens: `[batch] int32`: rows that count; those behind them are zero, whatever the cache
                holds there.
            length: rows to return per request.

        Returns:
            key `[batch, length, kv_heads, key_dim]` and value, or None. Rows of a quantised cache
            are float32.
        """
        position = torch.arange(length, device=lens.device).expand(self.batch, length)
        flat = torch.where(position < lens[:, None], self._rows(position), -1)
        key = self._read(self.keys[layer], self.key_scales[layer], flat)
        value = self.values[layer]
        return key, None if value is None else self._read(value, self.value_scales[layer], flat)

    def _read(self, store: Tensor, scale: Tensor | None, flat: Tensor) -> Tensor:
        safe = flat.clamp(min=0)
        place = safe // self.block_size, safe % self.block_size
        rows = (
            store.view(torch.uint8)[place].view(store.dtype) if scale is not None else store[place]
        )
        if scale is not None:
            rows = rows.float() * (scale if scale.dim() == 1 else scale[place][..., None])
        return torch.where((flat >= 0)[..., None, None], rows, 0.0)


def _side_by_side(
    sizes: Sequence[tuple[int, ...]], dtype: torch.dtype, device: torch.device | str
) -> list[Tensor]:
    """Return tensors of zeros; on a CPU in one storage, where rows of layers that are alike move in
    one step. (A kernel reaches tensors by their addresses, wherever they are.)"""
    if torch.device(device).type != "cpu":
        return [torch.zeros(size, dtype=dtype, device=device) for size in sizes]
    line = _LINE // dtype.itemsize
    places = [0, *accumulate(-(-math.prod(size) // line) * line for size in sizes)]
    storage = torch.zeros(places[-1], dtype=dtype).untyped_storage()
    found = []
    for place, size in zip(places, sizes, strict=False):
        strides = torch.empty(size, device="meta").stride()
        # no view: a view's version would change with every write to another layer
        found.append(torch.empty(0, dtype=dtype).set_(storage, place, size, strides))
    return found
