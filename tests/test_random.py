"""Contract of `coins` and `draft_coins`, and the precision of the coupled noise."""

from __future__ import annotations

import pytest
import torch

from spec_kernels import reference
from spec_kernels.eager import random as eager_random
from tests.layers import LAYERS, layer

every_layer = pytest.mark.parametrize("name", LAYERS)

# Words of seed and position at the edges of 32 bits, negative seeds among them.
SEEDS = torch.tensor([0, 1, -1, 2**32 - 1, 2**32, 2**63 - 1, -(2**63), 7, 123456789012345])
POSITIONS = torch.tensor([0, 2**32 - 1, 2**32, 5, 2**31, 2**40 + 3, 1, 5 + 2**32, 17])


@every_layer
@pytest.mark.parametrize("nodes", [0, 1, 2, 5, 9, 65])
@pytest.mark.parametrize("batch", [0, 1, 3, 9])
def test_coins_are_bit_equal_to_the_oracles(name: str, batch: int, nodes: int) -> None:
    seeds, positions = SEEDS[:batch], POSITIONS[:batch]
    result = layer(name).coins(seeds, positions, nodes)
    for given, expected in zip(result, reference.coins(seeds, positions, nodes), strict=True):
        assert given.dtype == torch.float64
        assert torch.equal(given, expected)


@every_layer
@pytest.mark.parametrize("lanes", [1, 3])
@pytest.mark.parametrize("nodes", [0, 1, 9])
@pytest.mark.parametrize("batch", [0, 1, 9])
def test_draft_coins_are_bit_equal_to_the_oracles(
    name: str, batch: int, nodes: int, lanes: int
) -> None:
    seeds, positions = SEEDS[:batch], POSITIONS[:batch]
    given = layer(name).draft_coins(seeds, positions, nodes, lanes)
    assert torch.equal(given, reference.draft_coins(seeds, positions, nodes, lanes))


@every_layer
def test_strided_seeds_and_positions_are_read_in_place(name: str) -> None:
    wide = torch.stack((SEEDS, POSITIONS), 1)
    accept_coins, final_coins = layer(name).coins(wide[:, 0], wide[:, 1], 4)
    expected = reference.coins(SEEDS, POSITIONS, 4)
    assert torch.equal(accept_coins, expected[0])
    assert torch.equal(final_coins, expected[1])
    one = SEEDS[7:8].expand(9)
    assert torch.equal(
        layer(name).draft_coins(one, POSITIONS, 4), reference.draft_coins(one, POSITIONS, 4)
    )


@every_layer
def test_a_coin_depends_on_its_own_address_only(name: str) -> None:
    """Neighbours, order and padding do not matter; streams and 64-bit positions do (B055)."""
    ops = layer(name)
    accept_coins, final_coins = ops.coins(SEEDS, POSITIONS, 5)
    order = torch.tensor([4, 0, 8, 2, 6, 1, 3, 7, 5])
    shuffled, shuffled_finals = ops.coins(SEEDS[order], POSITIONS[order], 9)
    assert torch.equal(shuffled[:, :5], accept_coins[order])
    assert torch.equal(shuffled_finals, final_coins[order])
    drafts = ops.draft_coins(SEEDS, POSITIONS, 5, 2)
    everything = torch.cat((accept_coins.flatten(), final_coins, drafts.flatten()))
    assert everything.unique().numel() == everything.numel()
    assert bool(((everything >= 0) & (everything < 1)).all())


def test_variates_are_precise_at_both_ends() -> None:
    """The smallest and the largest words keep full relative precision in float32."""
    words = torch.tensor([0, 1, 2, 2**20, 2**31 - 1, 2**31, 2**31 + 1, 2**32 - 2, 2**32 - 1])
    share = (words.double() + 0.5) * 2.0**-32
    rest = (2**32 - 1 - words.double() + 0.5) * 2.0**-32
    exact = torch.where(words < 2**31, -torch.log1p(-share), -torch.log(rest))
    given = eager_random._variate(words)
    assert float(((given.double() - exact) / exact).abs().max()) < 2e-7


def test_noise_is_addressed_by_seed_position_and_id() -> None:
    ids = torch.tensor([0, 3, 4, 5, 130_000])
    given = eager_random.exponential(SEEDS[:, None], POSITIONS[:, None], ids)
    exact = reference.random.exponential(SEEDS[:, None], POSITIONS[:, None], ids)
    assert float(((given.double() - exact) / exact).abs().max()) < 3e-7
    whole = eager_random.exponential_rows(SEEDS, POSITIONS, 130_001)
    assert torch.equal(whole[:, ids], given)
