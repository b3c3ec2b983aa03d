"""Philox4x32-10: random numbers addressed by (seed, position, stream, node, lane).

    key = (seed low, seed high)
    counter = (position low, position high, node, stream << 24 | lane)
    coin = 53 bits of the first two words, in [0, 1)

Words of 32 bits live in int64 tensors; a product wraps modulo 2^64, so that both of its halves are
right after a shift and a mask.

Source: Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3".
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

DRAFT: Final = 1
ACCEPT: Final = 2
FINAL: Final = 3
COUPLED: Final = 4

_MASK: Final = 0xFFFFFFFF
_ROUNDS: Final = 10


def _philox(
    seeds: Tensor, positions: Tensor, third: Tensor, fourth: int | Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the four words at each counter; the arguments broadcast."""
    key0, key1 = seeds & _MASK, (seeds >> 32) & _MASK
    c0, c1, c2 = positions & _MASK, (positions >> 32) & _MASK, third
    c3 = torch.as_tensor(fourth, dtype=torch.int64, device=third.device)
    for _ in range(_ROUNDS):
        even, odd = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1 = ((odd >> 32) & _MASK) ^ (c1 ^ key0), odd & _MASK
        c2, c3 = ((even >> 32) & _MASK) ^ (c3 ^ key1), even & _MASK
        key0, key1 = (key0 + 0x9E3779B9) & _MASK, (key1 + 0xBB67AE85) & _MASK
    return c0, c1, c2, c3


def _uniform(seeds: Tensor, positions: Tensor, node: Tensor, fourth: int | Tensor) -> Tensor:
    """Return float64 coins in [0, 1)."""
    high, low, _, _ = _philox(seeds, positions, node, fourth)
    return ((high >> 5).double() * 2.0**26 + (low >> 6).double()) * 2.0**-53


def coins(seeds: Tensor, root_positions: Tensor, nodes: int) -> tuple[Tensor, Tensor]:
    """Return the coins of a verification step: one per draft node, one for the final token.

    Args:
        seeds: `[batch] int64`, one per request.
        root_positions: `[batch] int64`, position of the root (the last committed token).
        nodes: width of the padded draft.

    Returns:
        `accept_coins [batch, nodes] float64` and `final_coins [batch] float64`, in [0, 1).

    Example:
        >>> accept_coins, final_coins = coins(torch.tensor([7, 8]), torch.tensor([5, 5]), 3)
        >>> accept_coins.shape, final_coins.shape
        (torch.Size([2, 3]), torch.Size([2]))
    """
    node = torch.arange(nodes, device=seeds.device)
    accept_coins = _uniform(seeds[:, None], root_positions[:, None], node, ACCEPT << 24)
    return accept_coins, _uniform(seeds, root_positions, torch.zeros_like(seeds), FINAL << 24)


def draft_coins(seeds: Tensor, root_positions: Tensor, nodes: int, lanes: int = 1) -> Tensor:
    """Return the coins that draw drafts: `[b, n, l]` draws the l-th child of node n.

    Args:
        seeds: `[batch] int64`.
        root_positions: `[batch] int64`, position of the root.
        nodes: number of parent nodes.
        lanes: children per node.

    Returns:
        `[batch, nodes, lanes] float64`, in [0, 1).

    Example:
        >>> draft_coins(torch.tensor([7]), torch.tensor([5]), 4, lanes=2).shape
        torch.Size([1, 4, 2])
    """
    node = torch.arange(nodes, device=seeds.device)[:, None]
    fourth = (DRAFT << 24) | torch.arange(lanes, device=seeds.device)
    return _uniform(seeds[:, None, None], root_positions[:, None, None], node, fourth)


def exponential(seeds: Tensor, positions: Tensor, ids: Tensor) -> Tensor:
    """Return the exponential variates E of the coupled noise; Gumbel noise is `-log(E)`.

    Both ends keep the full relative precision of float32, so that tails come out at their share.

    Args:
        seeds, positions, ids: int64, broadcast; the position is that of the token to be emitted.

    Example:
        >>> noise = exponential(torch.tensor(7), torch.tensor(5), torch.arange(100))
        >>> noise.dtype, bool((noise > 0).all())
        (torch.float32, True)
    """
    words = torch.stack(_philox(seeds, positions, ids >> 2, COUPLED << 24))
    lane = (ids & 3).expand(words.shape[1:])
    return _variate(words.gather(0, lane[None])[0])


def exponential_row(seed: Tensor, position: Tensor, vocab: int) -> Tensor:
    """Return `exponential` for the ids 0 .. vocab - 1, at one Philox call per four ids.

    Example:
        >>> seed, position = torch.tensor(7), torch.tensor(5)
        >>> every_id = exponential(seed, position, torch.arange(10))
        >>> bool((exponential_row(seed, position, 10) == every_id).all())
        True
    """
    blocks = torch.arange((vocab + 3) // 4, device=seed.device)
    words = _philox(seed, position, blocks, COUPLED << 24)
    return _variate(torch.stack(words, 1).flatten()[:vocab])


def _variate(words: Tensor) -> Tensor:
    """Map uniform words to exponential variates, each half by the logarithm exact at its end."""
    is_low = words < 2**31
    distance = torch.where(is_low, words, _MASK - words).float().add_(0.5).mul_(2.0**-32)
    return torch.where(is_low, -torch.log1p(-distance), -torch.log(distance))
