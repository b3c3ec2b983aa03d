"""Draw tokens from laws in float64: by one coin per row, by argmax, or by coupled noise."""

from __future__ import annotations

import torch
from torch import Tensor

from spec_kernels.reference import random
from spec_kernels.reference.law import is_valid, probabilities
from spec_kernels.types import PAD_TOKEN, Law


def draw(coin: float, weights: Tensor) -> int:
    """Draw an id in proportion to non-negative weights; `PAD_TOKEN` if nothing is positive.

    Example:
        >>> draw(0.5, torch.tensor([0.25, 0.5, 0.25])), draw(0.5, torch.zeros(3))
        (1, -1)
    """
    total = float(weights.sum())
    if not 0.0 < total < float("inf"):
        return PAD_TOKEN
    return random.choose(coin, weights)


def _race(p: Tensor, seed: Tensor, position: Tensor, k: int) -> list[int]:
    """Return the k largest of `log p + Gumbel noise`, the first one in a tie."""
    arrival = random.exponential(seed, position, torch.arange(p.numel())).log() - p.log()
    first = arrival.sort(stable=True).indices[:k].tolist()
    return [x if arrival[x] < float("inf") else PAD_TOKEN for x in first]


def _draw_children(p: Tensor, coins: list[float], replacement: bool) -> list[int]:
    """Draw one id per coin, each without those before it unless with replacement."""
    left, tokens = p.clone(), []
    for coin in coins:
        token = draw(coin, left)
        if token != PAD_TOKEN and not replacement:
            left[token] = 0.0
        tokens.append(token)
    return tokens


def _exclude(p: Tensor, ids: Tensor) -> Tensor:
    """Return p without some ids; those outside the vocabulary are skipped."""
    left = p.clone()
    left[ids[(ids >= 0) & (ids < p.numel())]] = 0.0
    return left


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
    """Sample k tokens per row from its law; a greedy row has the one-hot law of its argmax.

    Args:
        logits: `[rows, vocab]` float.
        law: laws of the rows; None if they are probabilities.
        coins: `[rows]` or `[rows, k] float64` in [0, 1); the inverse cumulative sum in id order
            decides, over what the draws before left.
        noise: seeds and positions, each `[rows] int64`: the k largest of
            `log p + g(seed, position, id)`.
        k: tokens per row.
        replacement: draw each token from the whole law.
        excluded: `[rows, m] int64`, ids taken out of the law; those outside it are skipped.

    Returns:
        tokens `[rows, k] int64`; `PAD_TOKEN` in an invalid row, and behind the last id where the
        law has fewer than k.

    Raises:
        ValueError: not exactly one of coins and noise is given; or noise for several tokens with
            replacement.

    Example:
        >>> p = torch.tensor([[0.25, 0.25, 0.5], [1.0, 0.0, 0.0]])
        >>> coins = torch.tensor([[0.3, 0.9], [0.9, 0.9]], dtype=torch.float64)
        >>> sample(p, None, coins=coins, k=2)
        tensor([[ 1,  2],
                [ 0, -1]])
        >>> sample(p, None, coins=coins, k=2, excluded=torch.tensor([[2], [-1]]))
        tensor([[ 0,  1],
                [ 0, -1]])
    """
    if (coins is None) == (noise is None):
        raise ValueError("exactly one of coins and noise must be given")
    if noise is not None and replacement and k > 1:
        raise ValueError("replacement must be False with noise and k > 1: one noise, one order")
    rows = logits.shape[0]
    tokens = torch.full((rows, k), PAD_TOKEN, dtype=torch.int64, device=logits.device)
    for row in range(rows):
        if not is_valid(law, row, rows):
            continue
        p = probabilities(logits, law, row)
        if excluded is not None:
            p = _exclude(p, excluded[row])
        if coins is not None:
            drawn = _draw_children(p, coins.reshape(rows, k)[row].tolist(), replacement)
        elif noise is not None:
            drawn = _race(p, noise[0][row], noise[1][row], k)
        tokens[row, : len(drawn)] = torch.tensor(drawn)
    return tokens
