"""Coins: the random numbers of a step, addressed by request, position, node and lane."""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor

from spec_kernels._check import check
from spec_kernels.ops._register import checked_once, register


@checked_once()
def coins(seeds: Tensor, root_positions: Tensor, nodes: int) -> tuple[Tensor, Tensor]:
    """Make the uniform coins that `accept` takes: one per node, and one for the final token.

    Counter-based (Philox4x32-10): each coin is a function of the request's seed, the position of
    the step's root and the node, and of nothing else. A root position never recurs, since each
    step commits at least one token; so no coin is used twice, and a result does not depend on
    the batch, the slot or the padding.

    Args:
        seeds: `[batch] int64`, seed of each request; all 64 bits count.
        root_positions: `[batch] int64`, position in the sequence of each request's last committed
            token. Not the position of the token that a coin judges: the block rule looks at coins
            behind the kept length, which the next step would then use again.
        nodes: width of the padded draft, at least 1.

    Returns:
        `accept_coins [batch, nodes] float64` and `final_coins [batch] float64`, in [0, 1).
        Column 0 of the accept coins, the root's, is unused on a chain.

    Raises:
        TypeError: seeds or root_positions are no int64 tensors.
        ValueError: their shapes or devices differ, or nodes < 1.

    Note:
        Multiples of 2**-53, bit-equal in every layer and on every device. No state, no
        synchronisation: replaying a captured graph with new positions gives new coins.

    Source:
        Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3".

    Example:
        >>> seeds, positions = torch.tensor([7, 7]), torch.tensor([12, 12])
        >>> accept_coins, final_coins = coins(seeds, positions, nodes=5)
        >>> accept_coins.shape, final_coins.shape
        (torch.Size([2, 5]), torch.Size([2]))
        >>> torch.equal(accept_coins[0], accept_coins[1])
        True
    """
    _check(seeds, root_positions, nodes)
    accept_coins, final_coins = _coins(seeds, root_positions, nodes)
    return accept_coins, final_coins


@checked_once()
def draft_coins(seeds: Tensor, root_positions: Tensor, nodes: int, lanes: int = 1) -> Tensor:
    """Make the uniform coins that draw draft tokens: coin `[b, n, l]` draws child l of node n.

    The same generator as `coins`, on a stream of its own: a coin that draws a draft never judges
    one. The key names the *parent* node, so that cousins in a tree do not share noise.

    Args:
        seeds: `[batch] int64`, seed of each request.
        root_positions: `[batch] int64`, position of each request's last committed token.
        nodes: width of the padded draft, at least 1.
        lanes: children per node, at least 1; a chain has 1.

    Returns:
        `[batch, nodes, lanes] float64` in [0, 1).

    Raises:
        TypeError: seeds or root_positions are no int64 tensors.
        ValueError: their shapes or devices differ, nodes < 1, or lanes is outside [1, 2**24).

    Note:
        Bit-equal in every layer and on every device; no state, no synchronisation.

    Source:
        Salmon et al. 2011.

    Example:
        >>> draft_coins(torch.tensor([7]), torch.tensor([12]), nodes=5)[:, :, 0].shape
        torch.Size([1, 5])
    """
    _check(seeds, root_positions, nodes)
    if not 1 <= lanes < 1 << 24:
        raise ValueError(f"lanes must be in [1, {1 << 24}), got {lanes}")
    result: Tensor = _draft_coins(seeds, root_positions, nodes, lanes)
    return result


def _check(seeds: Tensor, root_positions: Tensor, nodes: int) -> None:
    check("seeds", seeds, ("batch",), torch.int64)
    check("root_positions", root_positions, (seeds.shape[0],), torch.int64, seeds.device)
    if nodes < 1:
        raise ValueError(f"nodes must be at least 1, got {nodes}")


def _call_coins(
    layer: ModuleType, seeds: Tensor, root_positions: Tensor, nodes: int
) -> tuple[Tensor, Tensor]:
    accept_coins, final_coins = layer.coins(seeds, root_positions, nodes)
    return accept_coins, final_coins


def _fake_coins(seeds: Tensor, root_positions: Tensor, nodes: int) -> tuple[Tensor, Tensor]:
    batch = seeds.shape[0]
    return (
        seeds.new_empty((batch, nodes), dtype=torch.float64),
        seeds.new_empty((batch,), dtype=torch.float64),
    )


def _call_draft_coins(
    layer: ModuleType, seeds: Tensor, root_positions: Tensor, nodes: int, lanes: int
) -> Tensor:
    result: Tensor = layer.draft_coins(seeds, root_positions, nodes, lanes)
    return result


def _fake_draft_coins(seeds: Tensor, root_positions: Tensor, nodes: int, lanes: int) -> Tensor:
    return seeds.new_empty((seeds.shape[0], nodes, lanes), dtype=torch.float64)


_coins = register(
    "coins(Tensor seeds, Tensor root_positions, SymInt nodes) -> (Tensor, Tensor)",
    _call_coins,
    _fake_coins,
)
_draft_coins = register(
    "draft_coins(Tensor seeds, Tensor root_positions, SymInt nodes, SymInt lanes) -> Tensor",
    _call_draft_coins,
    _fake_draft_coins,
)
