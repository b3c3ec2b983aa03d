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
_CONSTANTS: Final = (0xD2511F53, 0xCD9E8D57, 0x9E3779B9, 0xBB67AE85, _MASK, 32)
"""Two factors, two steps of the key, the mask of a word, and its width."""


def _philox(seeds: Tensor, positions: Tensor, third: Tensor, fourth: Tensor) -> Tensor:
    """Return the four words at each counter, `[4, ...]`; the arguments broadcast.

    `even` holds words 0 and 2; words 1 and 3 are the lower halves of the last products, which have
    changed places. Upper halves that do not matter are masked out only before the next product.
    """
    # Constants are tensors: a Python number doubles the price of a small call.
    constants = torch.tensor(_CONSTANTS, device=third.device)
    mask, half = constants[4], constants[5]
    counter = (positions & mask, third, fourth)
    _, low, third, fourth = torch.broadcast_tensors(seeds, *counter)  # type: ignore[no-untyped-call]
    even, odd = torch.stack((low, third)), torch.stack((fourth, (positions >> half).expand_as(low)))
    trailing = [1] * low.dim()
    factors, step = constants[:4].reshape([2, 2, *trailing]).unbind()
    key = torch.stack((seeds, seeds >> half)).reshape([2, *trailing[seeds.dim() :], *seeds.shape])
    products, high = torch.empty_like(even), torch.empty_like(even)
    for _ in range(_ROUNDS):
        torch.mul(even, factors, out=products)
        torch.bitwise_right_shift(products, half, out=high)
        torch.bitwise_xor(high.bitwise_xor_(odd).flip(0), key, out=even).bitwise_and_(mask)
        odd, products = products, odd
        key += step
    odd.bitwise_and_(mask)
    return torch.stack((even[0], odd[1], even[1], odd[0]))


def _uniform(seeds: Tensor, positions: Tensor, node: Tensor, fourth: Tensor) -> Tensor:
    """Return float64 coins in [0, 1)."""
    words = _philox(seeds, positions, node, fourth)
    bits = (words[0] >> 5 << 26) + (words[1] >> 6)
    return bits.double().mul_(2.0**-53)


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
    streams = [ACCEPT << 24] * nodes + [FINAL << 24]
    node, stream = torch.tensor([[*range(nodes), 0], streams], device=seeds.device)
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
