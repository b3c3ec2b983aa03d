"""Draws: tokens of a row of logits, by coins or by noise that draft and target share."""

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
from spec_kernels.ops._register import checked_once, register
from spec_kernels.types import Law


@checked_once()
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
    """Draw tokens from each row of logits: greedy, by coins, or by coupled noise.

        coins     the first id whose cumulative mass exceeds coin * total, in id order
        noise     argmax over kept ids of log p(x) + g(seed, position, x),  g = Gumbel
        k > 1     the children of a node of a tree: without replacement each token is drawn from
                  what the ones before it left, renormalised; by noise they are the k largest

    Greedy rows give `law.argmax` either way. With noise, two models that draw at the same
    position under the same seed draw the same token wherever their laws agree; so drafts drawn
    this way are verified by `match`. Where a node has fixed children too, exclude their ids here,
    and give the drawn child the lowest node of the siblings: it is verified first.

    Args:
        logits: `[rows, vocab] float32/float16/bfloat16`; probabilities where law is None.
        law: the laws of these rows (`row_law`), or None.
        coins: `[rows, k] float64` in [0, 1), or `[rows]` at k = 1; column j draws token j.
        noise: `(seeds, positions)`, each `[rows] int64`; the position is that of the token to be
            drawn. Exactly one of coins and noise must be given.
        k: tokens per row.
        replacement: whether each of the k tokens is drawn from the whole law, so that they may
            repeat; no effect at k = 1.
        excluded: `[rows, m] int64`, ids that are taken out of the law first; those outside it,
            such as `PAD_TOKEN`, are skipped.

    Returns:
        `[rows, k] int64`, distinct in a row unless with replacement. `PAD_TOKEN` in an invalid
        row, and behind the last token where fewer than k ids have positive probability: a greedy
        row has one. An id of probability 0 is never drawn.

    Raises:
        TypeError: an argument has another dtype, or law is neither a `Law` nor None.
        ValueError: shapes or devices do not fit, k < 1, not exactly one of coins and noise is
            given, or replacement=True with noise and k > 1: noise draws the same token each time.

    Note:
        Sums per tile in float32, across tiles in float64; what is left of a law is summed again,
        never a difference. 32-bit noise with full precision in both tails. A row's tokens depend
        on that row alone. No synchronisation.

    Source:
        Inverse transform sampling; the Gumbel-max trick, Gumbel 1954, Maddison et al. 2014; its k
        largest, Kool et al. 2019.

    Example:
        >>> probabilities = torch.tensor([[0.1, 0.2, 0.7], [0.1, 0.2, 0.7]])
        >>> sample(probabilities, None, coins=torch.tensor([0.2, 0.9], dtype=torch.float64))
        tensor([[1],
                [2]])
        >>> coins = torch.tensor([[0.2, 0.9], [0.9, 0.9]], dtype=torch.float64)
        >>> sample(probabilities, None, coins=coins, k=2)
        tensor([[1, 2],
                [2, 1]])
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
    if noise is not None and k > 1 and replacement:
        raise ValueError("replacement must be False with noise and k > 1, got True")
    seeds, positions = (None, None) if noise is None else noise
    if coins is not None:
        is_column = k == 1 and isinstance(coins, Tensor) and coins.dim() == 1
        check("coins", coins, (rows,) if is_column else (rows, k), torch.float64, device)
    if noise is not None:
        check("noise seeds", seeds, (rows,), torch.int64, device)
        check("noise positions", positions, (rows,), torch.int64, device)
    if excluded is not None:
        check("excluded", excluded, (rows, "ids"), torch.int64, device)
    tokens: Tensor = _sample(
        logits, pack_law(law), coins, seeds, positions, k, replacement, excluded
    )
    return tokens


def _call_sample(
    layer: ModuleType,
    logits: Tensor,
    law: Sequence[Tensor],
    coins: Tensor | None,
    seeds: Tensor | None,
    positions: Tensor | None,
    k: int,
    replacement: bool,
    excluded: Tensor | None,
) -> Tensor:
    noise = None if seeds is None else (seeds, positions)
    tokens: Tensor = layer.sample(
        logits,
        unpack_law(law),
        coins=coins,
        noise=noise,
        k=k,
        replacement=replacement,
        excluded=excluded,
    )
    return tokens


def _fake_sample(
    logits: Tensor,
    law: Sequence[Tensor],
    coins: Tensor | None,
    seeds: Tensor | None,
    positions: Tensor | None,
    k: int,
    replacement: bool,
    excluded: Tensor | None,
) -> Tensor:
    return logits.new_empty((logits.shape[0], k), dtype=torch.int64)


_sample = register(
    "sample(Tensor logits, Tensor[] law, Tensor? coins, Tensor? seeds, Tensor? positions,"
    " SymInt k, bool replacement, Tensor? excluded) -> Tensor",
    _call_sample,
    _fake_sample,
)
