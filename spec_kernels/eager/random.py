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


def _philox(seeds: Tensor, positions: Tensor, third: Tensor, fourth: Tensor) -> Tensor:
    """Return the four words at each counter, `[4, ...]`; the arguments broadcast.

    Words 0 and 2 are the rows of `even`, words 1 and 3 those of `odd`; a round multiplies the
    even ones, and their products change places.
    """
    shape = (seeds + positions + third + fourth).shape
    keys = _key_schedule(seeds.reshape([1] * (len(shape) - seeds.dim()) + list(seeds.shape)))
    even, odd, products = (
        torch.empty((2, *shape), dtype=torch.int64, device=third.device) for _ in range(3)
    )
    even[0], even[1] = positions & _MASK, third
    odd[0], odd[1] = (positions >> 32) & _MASK, fourth
    for key in keys:
        torch.mul(even[0], 0xD2511F53, out=products[1])
        torch.mul(even[1], 0xCD9E8D57, out=products[0])
        torch.bitwise_right_shift(products, 32, out=even)
        even.bitwise_xor_(odd).bitwise_xor_(key).bitwise_and_(_MASK)
        torch.bitwise_and(products, _MASK, out=odd)
    return torch.stack((even[0], odd[0], even[1], odd[1]))


def _key_schedule(seeds: Tensor) -> Tensor:
    """Return the two key words of every round: `[rounds, 2, ...]`."""
    key = torch.stack((seeds & _MASK, (seeds >> 32) & _MASK))
    step = torch.tensor([0x9E3779B9, 0xBB67AE85], device=seeds.device)
    steps = torch.arange(_ROUNDS, device=seeds.device)[:, None] * step
    schedule: Tensor = key + steps.reshape([_ROUNDS, 2] + [1] * seeds.dim())
    return schedule.bitwise_and(_MASK)


def _uniform(seeds: Tensor, positions: Tensor, node: Tensor, fourth: Tensor) -> Tensor:
    """Return float64 coins in [0, 1)."""
    words = _philox(seeds, positions, node, fourth)
    return ((words[0] >> 5).double() * 2.0**26 + (words[1] >> 6).double()) * 2.0**-53


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
    node = torch.arange(nodes + 1, device=seeds.device)
    stream = torch.full_like(node, ACCEPT << 24)
    node[nodes], stream[nodes] = 0, FINAL << 24
    both = _uniform(seeds[:, None], root_positions[:, None], node, stream)
    return both[:, :nodes].contiguous(), both[:, nodes].contiguous()


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
    fourth = torch.tensor(COUPLED << 24, device=ids.device)
    words = _philox(seeds, positions, ids >> 2, fourth)
    lane = (ids & 3).expand(words.shape[1:])
    return _variate(words.gather(0, lane[None])[0])


def exponential_rows(seeds: Tensor, positions: Tensor, vocab: int) -> Tensor:
    """Return `exponential` of the ids 0 .. vocab - 1 in every row, at a Philox call per four ids.

    Args:
        seeds, positions: `[rows] int64`.
        vocab: number of ids.

    Returns:
        `[rows, vocab] float32`.

    Example:
        >>> seeds, positions = torch.tensor([7, 8]), torch.tensor([5, 5])
        >>> every_id = exponential(seeds[:, None], positions[:, None], torch.arange(10))
        >>> bool((exponential_rows(seeds, positions, 10) == every_id).all())
        True
    """
    fourth = torch.tensor(COUPLED << 24, device=seeds.device)
    blocks = torch.arange((vocab + 3) // 4, device=seeds.device)
    words = _philox(seeds[:, None], positions[:, None], blocks, fourth)
    return _variate(words.permute(1, 2, 0).flatten(1)[:, :vocab])


def _variate(words: Tensor) -> Tensor:
    """Map uniform words to exponential variates, each half by the logarithm exact at its end."""
    distance = torch.minimum(words, _MASK - words).float().add_(0.5).mul_(2.0**-32)
    high = torch.log(distance)
    return torch.where(words < 2**31, torch.log1p(distance.neg_()), high).neg_()
