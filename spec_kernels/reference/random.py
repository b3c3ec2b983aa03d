"""Philox4x32-10 random numbers, and the two functions through which the reference decides.

A number is addressed, never drawn from a generator: key = seed, counter = (position, node, stream
and lane). 32-bit words live in int64 tensors; a product of two words wraps around modulo 2^64,
which keeps every bit that is needed.

`decide` and `choose` are looked up in this module at every call. A test that replaces them by
versions which take every branch sums the reference's own code over all its outcomes.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

DRAFT: Final = 1
ACCEPT: Final = 2
FINAL: Final = 3
COUPLED: Final = 4

_WORD: Final = 0xFFFFFFFF


def philox(seed: Tensor, position: Tensor, third: Tensor, fourth: Tensor) -> tuple[Tensor, ...]:
    """Return the four 32-bit words of Philox4x32-10 as int64 tensors, broadcast.

    Args:
        seed: int64, the key: low word, high word.
        position: int64, counter words 0 and 1.
        third, fourth: int64 in [0, 2^32), counter words 2 and 3.

    Source:
        Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3".
    """
    key = [seed & _WORD, (seed >> 32) & _WORD]
    words = [position & _WORD, (position >> 32) & _WORD, third, fourth]
    for _ in range(10):
        even, odd = words[0] * 0xD2511F53, words[2] * 0xCD9E8D57
        words = [
            ((odd >> 32) & _WORD) ^ words[1] ^ key[0],
            odd & _WORD,
            ((even >> 32) & _WORD) ^ words[3] ^ key[1],
            even & _WORD,
        ]
        key = [(key[0] + 0x9E3779B9) & _WORD, (key[1] + 0xBB67AE85) & _WORD]
    return tuple(words)


def uniform(seed: Tensor, position: Tensor, stream: int, node: Tensor, lane: Tensor) -> Tensor:
    """Return float64 coins in [0, 1): 53 bits from the first two words of one Philox call."""
    words = philox(seed, position, node, (stream << 24) | lane)
    return ((words[0] >> 5).double() * 2.0**26 + (words[1] >> 6).double()) * 2.0**-53


def coins(seeds: Tensor, root_positions: Tensor, nodes: int) -> tuple[Tensor, Tensor]:
    """Return the coins that judge the nodes of a step, and the coin of its final token.

    Args:
        seeds: `[batch] int64`.
        root_positions: `[batch] int64`, position of each request's root in its text.
        nodes: width of the padded draft.

    Returns:
        accept_coins `[batch, nodes] float64` and final_coins `[batch] float64`, in [0, 1).

    Example:
        >>> accept_coins, final_coins = coins(torch.tensor([7]), torch.tensor([5]), 3)
        >>> accept_coins.shape, bool((accept_coins < 1).all()), final_coins.dtype
        (torch.Size([1, 3]), True, torch.float64)
    """
    zero = torch.zeros((), dtype=torch.int64, device=seeds.device)
    node = torch.arange(nodes, device=seeds.device)
    accept_coins = uniform(seeds[:, None], root_positions[:, None], ACCEPT, node, zero)
    return accept_coins, uniform(seeds, root_positions, FINAL, zero, zero)


def draft_coins(seeds: Tensor, root_positions: Tensor, nodes: int, lanes: int = 1) -> Tensor:
    """Return `[batch, nodes, lanes] float64` coins: `[b, n, l]` draws the l-th child of node n.

    Example:
        >>> draft_coins(torch.tensor([7, 8]), torch.tensor([5, 5]), 4).shape
        torch.Size([2, 4, 1])
    """
    node = torch.arange(nodes, device=seeds.device)[:, None]
    lane = torch.arange(lanes, device=seeds.device)
    return uniform(seeds[:, None, None], root_positions[:, None, None], DRAFT, node, lane)


def exponential(seeds: Tensor, positions: Tensor, ids: Tensor) -> Tensor:
    """Return the exponential variates of the coupled noise, `-log` of which is Gumbel noise.

    Both ends keep full relative precision: the smallest values are as exact as the largest.

    Args:
        seeds, positions: int64; the position is that of the token to be emitted.
        ids: int64 token ids. All three broadcast.

    Example:
        >>> seed, position = torch.tensor(7), torch.tensor(5)
        >>> bool((exponential(seed, position, torch.arange(1000)) > 0).all())
        True
    """
    fourth = torch.full((), COUPLED << 24, dtype=torch.int64, device=ids.device)
    words = torch.stack(philox(seeds, positions, ids >> 2, fourth))
    word = words.gather(0, (ids & 3).expand(words.shape[1:])[None])[0].double()
    low = -torch.log1p(-(word + 0.5) * 2.0**-32)
    high = -torch.log((_WORD - word + 0.5) * 2.0**-32)
    return torch.where(word < 2.0**31, low, high)


def decide(coin: float, numerator: float, denominator: float = 1.0) -> bool:
    """Say yes with probability `min(1, numerator / denominator)`, strictly and without dividing.

    Example:
        >>> decide(0.5, 0.5), decide(0.49, 0.1, 0.2)
        (False, True)
    """
    return coin * denominator < numerator


def choose(coin: float, weights: Tensor) -> int:
    """Choose an index in proportion to non-negative weights, by inverse cumulative sum.

    The first index whose cumulative weight exceeds `coin * total`: an index of weight 0 is never
    chosen, a boundary belongs to the next positive index.

    Example:
        >>> weights = torch.tensor([0.0, 0.25, 0.0, 0.75, 0.0], dtype=torch.float64)
        >>> [choose(coin, weights) for coin in (0.0, 0.2, 0.25, 1 - 2**-53)]
        [1, 1, 3, 3]
    """
    cumulative = weights.cumsum(0)
    place = int(torch.searchsorted(cumulative, coin * cumulative[-1], right=True))
    return min(place, int(weights.nonzero()[-1]))
