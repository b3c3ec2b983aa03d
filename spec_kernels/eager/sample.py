"""Draw tokens from laws: by coins, by argmax, or by coupled noise.

coin    the first id whose cumulative weight exceeds coin * total, in id order: tile, then id
noise   argmax of log p(x) + g(seed, position, x), the same for every drafter and draft length

Of k tokens drawn without replacement each one leaves the law, and its tile is summed again: what
is left is never a difference. With noise they are the k largest.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from itertools import accumulate
from typing import Final

import torch
from torch import Tensor

from spec_kernels.eager._rows import (
    TILE,
    Weights,
    first_argmax,
    places_of,
    tile_sum_without,
)
from spec_kernels.eager.law import RowReader
from spec_kernels.eager.random import exponential, exponential_rows
from spec_kernels.types import OK, PAD_TOKEN, Law

NOISE_BLOCK: Final = 2**15
"""Ids whose noise is made at once."""


def draw(coin: float, weights: Tensor, tiles: list[float]) -> int:
    """Draw an index in proportion to non-negative weights; `PAD_TOKEN` if nothing is positive.

    An index of weight 0 is never drawn; a coin on a boundary gives the next positive index.

    Args:
        coin: in [0, 1).
        weights: `[n] float32`, contiguous.
        tiles: their sums by tile, as `Weights.sums` gives.

    Example:
        >>> weights = torch.tensor([0.0, 0.25, 0.0, 0.75, 0.0])
        >>> [draw(coin, weights, [1.0]) for coin in (0.0, 0.25, 0.99)]
        [1, 3, 3]
    """
    cumulative = list(accumulate(tiles))
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
    place = draw(coin, weights.mass, weights.sums() if tiles is None else tiles)
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


def _race(weights: Weights, noise: Tensor, k: int, excluded: list[int]) -> list[int]:
    """Return the k ids with the largest `weight / E`: those of `log p + g`, the first in a tie."""
    ids = weights.ids
    arrivals, drawn = weights.mass / noise, list[int]()
    for place in places_of(ids, excluded, arrivals.numel()):
        arrivals[place] = 0.0
    while len(drawn) < k and arrivals.numel() and float(arrivals.amax()) > 0.0:
        first = first_argmax(arrivals)
        arrivals[first] = 0.0
        drawn.append(first if ids is None else int(ids[first]))
    return drawn


def _draw_ids(
    coins: list[float], weights: Weights, replacement: bool, excluded: list[int], buffer: Tensor
) -> list[int]:
    """Draw an id per coin from weights without the excluded ids and, unless with replacement,
    without those drawn before."""
    ids, mass, tiles = weights.ids, weights.mass, weights.sums()
    if len(coins) > 1 or excluded:
        mass = buffer[: mass.numel()].copy_(mass)  # the reader's weights are not ours to write

    def remove(places: list[int]) -> None:
        for tile in {place // TILE for place in places}:
            tiles[tile] = tile_sum_without(mass, tile, places)
        for place in places:
            mass[place] = 0.0

    remove(places_of(ids, excluded, mass.numel()))
    drawn: list[int] = []
    for coin in coins:
        place = draw(coin, mass, tiles)
        if place == PAD_TOKEN:
            break
        drawn.append(place if ids is None else int(ids[place]))
        if not replacement and len(drawn) < len(coins):
            remove([place])
    return drawn


def sample(
    logits: Tensor,
    law: Law | None,
    *,
    coins: Tensor | None = None,
    noise: tuple[Tensor, Tensor] | None = None,
    k: int = 1,
    replacement: bool = False,
    excluded: Tensor | None = None,
) -> Tensor:
    """Sample k tokens per row from its law.

    Args:
        logits: `[rows, vocab]` float32, float16 or bfloat16, any strides.
        law: laws of the rows; None if they are probabilities.
        coins: `[rows, k] float64` in [0, 1), or `[rows]` at k = 1; column j draws token j, by the
            inverse cumulative sum in id order.
        noise: seeds and positions, each `[rows] int64`; the position is that of the token to be
            emitted.
        k: tokens per row.
        replacement: whether a token stays in the law after it was drawn.
        excluded: `[rows, m] int64`, ids that leave the law first; those outside it are skipped.

    Returns:
        tokens `[rows, k] int64`; `PAD_TOKEN` behind the last one where the law has fewer. A greedy
        row has one, `law.argmax`; an invalid one none.

    Raises:
        ValueError: not exactly one of coins and noise is given, or k > 1 tokens shall be drawn by
            noise with replacement.

    Example:
        >>> p = torch.tensor([[0.25, 0.25, 0.5], [1.0, 0.0, 0.0]])
        >>> coins = torch.tensor([[0.3, 0.9], [0.9, 0.9]], dtype=torch.float64)
        >>> sample(p, None, coins=coins, k=2)
        tensor([[ 1,  2],
                [ 0, -1]])
    """
    if (coins is None) == (noise is None):
        raise ValueError("exactly one of coins and noise must be given")
    if noise is not None and replacement and k > 1:
        raise ValueError(
            "replacement must be False with noise and k > 1: it gives one order of ids"
        )
    reader = RowReader(logits, law)
    given = [] if coins is None else coins.reshape(reader.rows, k).tolist()
    banned = [[]] * reader.rows if excluded is None else excluded.tolist()
    race = None if noise is None else _Noise(*noise, reader.vocab)
    buffer = torch.empty(reader.vocab, device=logits.device)
    tokens = [[PAD_TOKEN] * k for _ in range(reader.rows)]
    for row in range(reader.rows):
        row_law, out = reader.law(row), banned[row]
        if row_law.status != OK:
            continue
        if row_law.inv_temperature == 0.0:
            drawn = [row_law.argmax] * (0 if row_law.argmax in out else k if replacement else 1)
        elif race is not None:
            weights = reader.weights(row, row_law)
            drawn = _race(weights, race.at(row, weights.ids), k, out)
        else:
            drawn = _draw_ids(given[row], reader.weights(row, row_law), replacement, out, buffer)
        tokens[row][: len(drawn)] = drawn
    return torch.tensor(tokens, dtype=torch.int64, device=logits.device).reshape(-1, k)
