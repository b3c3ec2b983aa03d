"""Draws: one token per row of logits, by a coin or by noise that draft and target share."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType

import torch
from torch import Tensor

from spec_kernels._check import check
from spec_kernels.ops._arguments import (
    check_law,
    check_logits,
    pack_law,
    unpack_law,
)
from spec_kernels.ops._register import register
from spec_kernels.types import Law


def sample(
    logits: Tensor,
    law: Law | None,
    *,
    coins: Tensor | None = None,
    noise: tuple[Tensor, Tensor] | None = None,
    k: int = 1,
    replacement: bool = False,
) -> Tensor:
    """Draw a token from each row of logits: greedy, by a coin, or by coupled noise.

        coins     the first id whose cumulative mass exceeds coin * total, in id order
        noise     argmax over kept ids of log p(x) + g(seed, position, x),  g = Gumbel

    Greedy rows give `law.argmax` either way. With noise, two models that draw at the same
    position under the same seed draw the same token wherever their laws agree; so drafts drawn
    this way are verified by `match`.

    Args:
        logits: `[rows, vocab] float32/float16/bfloat16`; probabilities where law is None.
        law: the laws of these rows (`row_law`), or None.
        coins: `[rows] float64` in [0, 1).
        noise: `(seeds, positions)`, each `[rows] int64`; the position is that of the token to be
            drawn. Exactly one of coins and noise must be given.
        k: tokens per row; only 1 so far.
        replacement: whether the k tokens may repeat; only False so far.

    Returns:
        `[rows, 1] int64`; `PAD_TOKEN` in an invalid row. An id of probability 0 is never drawn.

    Raises:
        TypeError: an argument has another dtype, or law is neither a `Law` nor None.
        ValueError: shapes or devices do not fit, k < 1, or not exactly one of coins and noise is
            given.
        NotImplementedError: k > 1 or replacement=True; both draw the children of a tree.

    Note:
        Sums per tile in float32, across tiles in float64; 32-bit noise with full precision in
        both tails. A row's token depends on that row alone. No synchronisation.

    Source:
        Inverse transform sampling; the Gumbel-max trick, Gumbel 1954, Maddison et al. 2014.

    Example:
        >>> probabilities = torch.tensor([[0.1, 0.2, 0.7], [0.1, 0.2, 0.7]])
        >>> sample(probabilities, None, coins=torch.tensor([0.2, 0.9], dtype=torch.float64))
        tensor([[1],
                [2]])
    """
    check_logits("logits", logits)
    rows, device = logits.shape[0], logits.device
    if law is not None:
        check_law("law", law, rows, device)
    if (coins is None) == (noise is None):
        given = "neither" if coins is None else "both"
        raise ValueError(f"exactly one of coins and noise must be given, got {given}")
    if k < 1:
        raise ValueError(f"k must be at least 1, got {k}")
    if k > 1:
        raise NotImplementedError("k > 1 draws children of a tree; trees are not supported yet")
    if replacement:
        raise NotImplementedError(
            "replacement=True draws children of a tree; trees are not supported yet"
        )
    seeds, positions = (None, None) if noise is None else noise
    if coins is not None:
        check("coins", coins, (rows,), torch.float64, device)
    if noise is not None:
        check("noise seeds", seeds, (rows,), torch.int64, device)
        check("noise positions", positions, (rows,), torch.int64, device)
    tokens: Tensor = _sample(logits, pack_law(law), coins, seeds, positions)
    return tokens


def _call_sample(
    layer: ModuleType,
    logits: Tensor,
    law: Sequence[Tensor],
    coins: Tensor | None,
    seeds: Tensor | None,
    positions: Tensor | None,
) -> Tensor:
    noise = None if seeds is None else (seeds, positions)
    tokens: Tensor = layer.sample(logits, unpack_law(law), coins=coins, noise=noise)
    return tokens


def _fake_sample(logits: Tensor, *_: Tensor | Sequence[Tensor] | None) -> Tensor:
    return logits.new_empty((logits.shape[0], 1), dtype=torch.int64)


_sample = register(
    "sample(Tensor logits, Tensor[] law, Tensor? coins, Tensor? seeds, Tensor? positions)"
    " -> Tensor",
    _call_sample,
    _fake_sample,
)
