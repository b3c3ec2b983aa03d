"""Positions of a request: which of them its nodes see, and reading their rows out of a cache."""

from __future__ import annotations

import math
from ctypes import string_at
from functools import lru_cache
from typing import Final, NamedTuple

import torch
from torch import Tensor

AT_ONCE: Final = 1 << 16
"""Entries of a mask up to which context and nodes are one piece; beyond it sums are what counts."""

SHORT: Final = 1024
"""Positions up to which four times as many entries are one piece."""


def is_piece(rows: int, length: int) -> bool:
    """Tell that context and nodes are attended in one go, under one mask."""
    return rows * length <= (4 * AT_ONCE if length <= SHORT else AT_ONCE)


class Piece(NamedTuple):
    """Positions `start .. stop` that are attended in one go; unmasked, every node sees them all."""

    start: int
    stop: int
    is_masked: bool


class CacheReader:
    """Reads positions of neighbouring requests out of a contiguous cache, or of one of a paged one.

    Args:
        cache: `[blocks, block_size, kv_heads, dim]`, or `[batch, max_len, kv_heads, dim]`.
        scale: None, one number, or one per token and head.
        block_table: `[batch, max_blocks] int32` or None.
        begin, end: which requests.
    """

    def __init__(
        self,
        cache: Tensor,
        scale: Tensor | None,
        block_table: Tensor | None,
        begin: int,
        end: int,
    ) -> None:
        self.cache, self.scale, self.requests = cache, scale, slice(begin, end)
        self.table = None if block_table is None else block_table[begin:end]

    def of_heads(self, first: int, last: int) -> CacheReader:
        """Return a reader of some heads of a contiguous cache that has no scale."""
        own = self.requests
        return CacheReader(self.cache[:, :, first:last], None, None, own.start, own.stop)

    def read(self, start: int, stop: int, dtype: torch.dtype) -> Tensor:
        """Return positions `start .. stop`: `[requests, kv_heads, positions, dim]`."""
        rows = self._rows(self.cache, start, stop)
        if rows.dtype != dtype:
            rows = rows.to(dtype)
        if self.scale is not None:
            scale = self.scale
            if scale.dim() >= 3:
                scale = self._rows(scale, start, stop)[..., None]
            rows = rows * scale
        if rows.stride(3) != 1:
            rows = rows.contiguous()
        return rows.transpose(1, 2)

    def _rows(self, tensor: Tensor, start: int, stop: int) -> Tensor:
        if self.table is None:
            return tensor[self.requests, start:stop]
        size = tensor.shape[1]
        first = start // size
        rows = gather(tensor, self.table[:, first : -(-stop // size)])
        return rows[:, start - first * size : stop - first * size]


def gather(tensor: Tensor, table: Tensor) -> Tensor:
    """Put the blocks of every request together: `[requests, positions, ...]`.

    Args:
        tensor: `[blocks, block_size, ...]`.
        table: `[requests, blocks] int32`; -1, none, gives some block.
    """
    blocks = table.flatten().clamp(min=0)
    if tensor.dtype == torch.float8_e4m3fn:  # cannot be gathered
        rows = tensor.view(torch.uint8).index_select(0, blocks).view(torch.float8_e4m3fn)
    else:
        rows = tensor.index_select(0, blocks)
    return rows.view(len(table), -1, *rows.shape[2:])


class Place(NamedTuple):
    """Where a piece lies: positions counted from its first one.

    Attributes:
        context, end: the first position that isn't context, and that isn't there at all.
        width: positions of the piece.
        nodes, group: nodes of a request, rows of a node.
    """

    context: int
    end: int
    width: int
    nodes: int
    group: int


def make_bias(place: Place, words: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return what to add to the scores of a piece, 0 or -inf: `[requests, nodes, width]`.

    Args:
        words: ancestor words of all nodes; None: chains, and one request for all.
    """
    context, end, width, nodes, _ = place
    if words is None:
        bias = torch.full((nodes, width), -math.inf, dtype=dtype).triu_(context + 1)
    else:
        bias = torch.zeros(len(words), width, dtype=dtype)
        shifted = words[..., None] << torch.arange(31, -1, -1, dtype=torch.int32)
        first = max(context, 0)
        hidden = (shifted >= 0).flatten(1)[:, first - context : max(width, first) - context]
        known = first + hidden.shape[1]
        bias[:, first:known].masked_fill_(hidden, -math.inf)  # the sign is the bit of the node
        bias[:, known:] = -math.inf
    if width > end:
        bias[:, max(end, 0) :] = -math.inf
    return bias.view(-1, nodes, width)


def by_rows(bias: Tensor, group: int) -> Tensor:
    """Repeat a bias for the rows of every node: `[requests, 1, nodes * group, width]`."""
    return bias[:, None, :, None].expand(-1, -1, -1, group, -1).flatten(2, 3)


Bias = tuple[Tensor, Tensor | None]
"""What to add to the scores of a piece, `[requests, 1, nodes * group, width]`, or one for all
requests; and which rows see nothing of the piece, None: all see something."""


def bias_of(place: Place, words: Tensor | None, dtype: torch.dtype) -> Bias:
    """Return the bias of a piece. A small one is made once for all layers of a step."""
    nodes, rows, most = place.nodes, place.width * place.group, 4 * AT_ONCE
    if nodes * rows <= most:
        if words is None:
            return remembered_bias(place, b"", 0, dtype)
        words, requests = words.contiguous(), len(words) // nodes
        known = string_at(words.data_ptr(), words.nbytes)
        first = known[: len(known) // requests] if requests > 1 else known
        if known == first * requests:
            return remembered_bias(place, first, nodes, dtype)
        if len(words) * rows <= most:
            return remembered_bias(place, known, len(words), dtype)
    return piece_bias(place, words, dtype)


@lru_cache(maxsize=16)
def remembered_bias(place: Place, words: bytes, tokens: int, dtype: torch.dtype) -> Bias:
    """Make a small bias of the bytes of ancestor words: at most 16 * 4 * `AT_ONCE` floats are kept,
    16 MiB."""
    table = None
    if tokens:
        table = torch.frombuffer(bytearray(words), dtype=torch.int32).view(tokens, -1)
    return piece_bias(place, table, dtype)


def piece_bias(place: Place, words: Tensor | None, dtype: torch.dtype) -> Bias:
    """Make a bias. Nodes see the context, and those of a chain the root."""
    bias = by_rows(make_bias(place, words, dtype), place.group)
    return bias, hidden_rows(bias) if place.context < (words is not None) else None


def hidden_rows(bias: Tensor) -> Tensor | None:
    """Return which rows see nothing, or None: all see something."""
    hidden = bias.amax(3) == -math.inf
    return hidden if hidden.any() else None


class Sight:
    """What the nodes of one request see, or those of requests that are alike.

    Args:
        context, nodes, end: positions of the context, nodes, and positions that exist.
        words: ancestor words of all nodes, or None: chains.
        depths, window: as in `verify_attention`, of the nodes.
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

    def pieces(self, group: int, chunk: int, is_in_place: bool) -> list[Piece]:
        """Cut what some node sees into pieces.

        Args:
            group: rows of a node.
            chunk: most positions of a piece that is copied or masked.
            is_in_place: whether pieces without a mask are not copied.
        """
        start, whole, context = 0, 0, min(self.context, self.end)
        if self.window is not None:
            depths = self._depths()
            below = self.context - self.window + 1
            start = min(max(below + int(depths.min()), 0), context)
            whole = min(max(below + int(depths.max()), start), context)
        elif self.nodes == 1 and self.words is None:
            context = self.end
        length = self.end - start
        is_short = is_in_place or length <= chunk
        if length and is_short and is_piece(self.nodes * group, length):
            return [Piece(start, self.end, start < whole or context < self.end)]
        unmasked = max(length, 1) if is_in_place else chunk
        parts = (
            (start, whole, chunk, True),
            (whole, context, unmasked, False),
            (context, self.end, chunk, True),
        )
        return [
            Piece(first, min(first + step, last), is_masked)
            for begin, last, step, is_masked in parts
            for first in range(begin, last, step)
        ]

    def bias(self, start: int, stop: int, group: int, dtype: torch.dtype) -> Bias:
        """Return the bias of some positions, for `group` rows a node."""
        place = Place(self.context - start, self.end - start, stop - start, self.nodes, group)
        if self.window is None:
            return bias_of(place, self.words, dtype)
        bias = make_bias(place, self.words, dtype)
        other = torch.arange(start, stop) - self.context
        depths = self._depths()
        depth = torch.where(other < 0, other, depths[other.clamp(0, self.nodes - 1)])
        bias.masked_fill_(depth <= depths[:, None] - self.window, -math.inf)
        rows = by_rows(bias, group)
        return rows, hidden_rows(rows)

    def _depths(self) -> Tensor:
        return torch.arange(self.nodes) if self.depths is None else self.depths.long()
