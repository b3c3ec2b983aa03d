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


def _race(p: Tensor, seed: Tensor, position: Tensor) -> int:
    """Return the argmax of `log p + Gumbel noise`, the first one in a tie."""
    arrival = random.exponential(seed, position, torch.arange(p.numel())).log() - p.log()
    return int(arrival.argmin())


def sample(
    logits: Tensor,
    law: Law | None,
    *,
    coins: Tensor | None = None,
    noise: tuple[Tensor, Tensor] | None = None,
    k: int = 1,
    replacement: bool = False,
) -> Tensor:
    """Sample one token per row from its law; a greedy row has the one-hot law of its argmax.

    Args:
        logits: `[rows, vocab]` float.
        law: laws of the rows; None if they are probabilities.
        coins: `[rows] float64` in [0, 1); the inverse cumulative sum in id order decides.
        noise: seeds and positions, each `[rows] int64`: argmax of `log p + g(seed, position, id)`.
        k: 1.
        replacement: no effect at `k = 1`.

    Returns:
        tokens `[rows, 1] int64`; `PAD_TOKEN` in an invalid row.

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
    rows = logits.shape[0]
    tokens = torch.full((rows, 1), PAD_TOKEN, dtype=torch.int64, device=logits.device)
    for row in range(rows):
        if not is_valid(law, row, rows):
            continue
        p = probabilities(logits, law, row)
        if coins is not None:
            tokens[row, 0] = draw(float(coins[row]), p)
        elif noise is not None and bool((p > 0).any()):
            tokens[row, 0] = _race(p, noise[0][row], noise[1][row])
    return tokens
