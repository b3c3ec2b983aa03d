"""Draw tokens from laws: by one coin per row, by argmax, or by coupled noise.

coin    the first id whose cumulative weight exceeds coin * total, in id order: tile, then id
noise   argmax of log p(x) + g(seed, position, x), the same for every drafter and draft length
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from itertools import accumulate
from typing import Final

import torch
from torch import Tensor

from spec_kernels.eager._rows import TILE, RowLaw, Weights, first_argmax, tile_sums
from spec_kernels.eager.law import RowReader
from spec_kernels.eager.random import exponential, exponential_rows
from spec_kernels.types import OK, PAD_TOKEN, Law

NOISE_BLOCK: Final = 2**15
"""Ids whose noise is made at once."""


def draw(coin: float, weights: Tensor, tiles: list[float] | None = None) -> int:
    """Draw an index in proportion to non-negative weights; `PAD_TOKEN` if nothing is positive.

    An index of weight 0 is never drawn; a coin on a boundary gives the next positive index.

    Args:
        coin: in [0, 1).
        weights: `[n] float32`, contiguous.
        tiles: their `tile_sums`, if known.

    Example:
        >>> [draw(coin, torch.tensor([0.0, 0.25, 0.0, 0.75, 0.0])) for coin in (0.0, 0.25, 0.99)]
        [1, 3, 3]
    """
    cumulative = list(accumulate(tile_sums(weights) if tiles is None else tiles))
    total = cumulative[-1]
    if not 0.0 < total < math.inf:
        return PAD_TOKEN
    target = max(coin, 0.0) * total
    tile = min(bisect_right(cumulative, target), bisect_left(cumulative, total))
    before = cumulative[tile - 1] if tile else 0.0
    start = tile * TILE
    steps = list(accumulate(weights[start : start + TILE].tolist()))
    # The part of the tile that lies below the coin, in the tile's own sum.
    part = (target - before) / (cumulative[tile] - before)
    return start + min(bisect_right(steps, part * steps[-1]), bisect_left(steps, steps[-1]))


def draw_id(coin: float, weights: Weights, tiles: list[float] | None = None) -> int:
    """Draw an id in proportion to its weight; `PAD_TOKEN` if no weight is positive."""
    place = draw(coin, weights.mass, tiles)
    return place if weights.ids is None or place == PAD_TOKEN else int(weights.ids[place])


class _Noise:
    """The coupled noise of every row, for as many rows at once as fit in `NOISE_BLOCK` ids."""

    def __init__(self, seeds: Tensor, positions: Tensor, vocab: int) -> None:
        self._seeds, self._positions, self._vocab = seeds, positions, vocab
        self._rows = max(1, NOISE_BLOCK // vocab)
        self._start, self._block = -1, torch.empty(0)

    def at(self, row: int, ids: Tensor | None) -> Tensor:
        """Return the noise of a row, at every id or at the ones given."""
        if ids is not None and self._rows == 1:
            return exponential(self._seeds[row], self._positions[row], ids)
        start = row // self._rows * self._rows
        if start != self._start:
            rows = slice(start, start + self._rows)
            self._start = start
            self._block = exponential_rows(self._seeds[rows], self._positions[rows], self._vocab)
        noise = self._block[row - start]
        return noise if ids is None else noise[ids]


def _race(reader: RowReader, row: int, law: RowLaw, noise: _Noise) -> int:
    """Return the id with the largest `weight / E`: that of `log p + g`, the first in a tie."""
    ids, mass = reader.weights(row, law)
    arrivals = mass / noise.at(row, ids)
    if not arrivals.numel() or not float(arrivals.amax()) > 0.0:
        return PAD_TOKEN
    first = first_argmax(arrivals)
    return first if ids is None else int(ids[first])


def sample(
    logits: Tensor,
    law: Law | None,
    *,
    coins: Tensor | None = None,
    noise: tuple[Tensor, Tensor] | None = None,
    k: int = 1,
    replacement: bool = False,
) -> Tensor:
    """Sample one token per row from its law.

    Args:
        logits: `[rows, vocab]` float32, float16 or bfloat16, any strides.
        law: laws of the rows; None if they are probabilities.
        coins: `[rows] float64` in [0, 1); the inverse cumulative sum in id order decides.
        noise: seeds and positions, each `[rows] int64`; the position is that of the token to be
            emitted.
        k: 1.
        replacement: no effect at `k = 1`.

    Returns:
        tokens `[rows, 1] int64`; greedy rows give `law.argmax`, invalid ones `PAD_TOKEN`.

    Raises:
        ValueError: not exactly one of coins and noise is given.
        NotImplementedError: k > 1.

    Example:
        >>> p = torch.tensor([[0.25, 0.25, 0.5], [1.0, 0.0, 0.0]])
        >>> sample(p, None, coins=torch.tensor([0.3, 0.9], dtype=torch.float64))
        tensor([[1],
                [0]])
    """
    if k > 1:
        raise NotImplementedError("k > 1 draws children of a tree; trees are not supported yet")
    if (coins is None) == (noise is None):
        raise ValueError("exactly one of coins and noise must be given")
    reader = RowReader(logits, law)
    given = [] if coins is None else coins.tolist()
    race = None if noise is None else _Noise(*noise, reader.vocab)
    tokens = [PAD_TOKEN] * reader.rows
    for row in range(reader.rows):
        row_law = reader.law(row)
        if row_law.status != OK:
            continue
        if row_law.inv_temperature == 0.0:
            tokens[row] = row_law.argmax
        elif race is not None:
            tokens[row] = _race(reader, row, row_law, race)
        else:
            tokens[row] = draw_id(given[row], reader.weights(row, row_law))
    return torch.tensor(tokens, dtype=torch.int64, device=logits.device)[:, None]
