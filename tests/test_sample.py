"""Contract of `sample`: every layer draws what the oracle draws, in any memory layout."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from scipy.stats import binomtest, chisquare
from torch import Tensor

from spec_kernels import reference
from spec_kernels.types import INVALID_TARGET, PAD_TOKEN, Law, SamplingParams
from tests.cases import (
    EPSILON,
    LAST_COIN,
    LAYOUTS,
    assert_tokens,
    float32_law,
    lay_out,
    random_params,
)
from tests.layers import FAST_LAYERS, LAYERS, fewer, layer

every_layer = pytest.mark.parametrize("name", LAYERS)
fast_layers = pytest.mark.parametrize("name", FAST_LAYERS)


def make_rows(
    rows: int, vocab: int, dtype: torch.dtype = torch.float32, filters: str = "all"
) -> tuple[Tensor, Law]:
    """Return random logits and their laws, every row with its own parameters."""
    generator = torch.Generator().manual_seed(rows + vocab)
    logits = (torch.randn(rows, vocab, generator=generator) * 2.5).to(dtype)
    params = random_params(rows, filters, generator)
    owner = torch.arange(rows, dtype=torch.int32)
    return logits, float32_law(reference.row_law(logits, params, owner))


def make_coins(rows: int) -> Tensor:
    """Return random coins, with both ends among them."""
    coins = torch.rand(rows, dtype=torch.float64)
    coins[:1], coins[1:2] = 0.0, LAST_COIN
    return coins


def arrivals(logits: Tensor, law: Law | None, noise: Any, row: int) -> Tensor:
    """Return the logarithm of every id's arrival in the oracle's race."""
    p = reference.law.probabilities(logits, law, row)
    ids = torch.arange(p.numel())
    return reference.random.exponential(noise[0][row], noise[1][row], ids).log() - p.log()


def assert_noise_tokens(tokens: Tensor, logits: Tensor, law: Law | None, noise: Any) -> None:
    """Compare with the oracle's race: the same id, or one that arrives within rounding of it."""
    expected = reference.sample(logits, law, noise=noise)
    for row in (tokens != expected).nonzero()[:, 0].tolist():
        p = reference.law.probabilities(logits, law, row)
        arrival = arrivals(logits, law, noise, row)
        late = float(arrival[tokens[row, 0]] - arrival.min())
        assert late < 1e-6 * (1.0 - float(p[tokens[row, 0]].log())), (row, late)


def assert_children(
    tokens: Tensor,
    logits: Tensor,
    law: Law | None,
    excluded: Tensor | None,
    *,
    coins: Tensor | None = None,
    noise: Any = None,
    replacement: bool = False,
) -> None:
    """Compare k draws with the oracle's, each behind the layer's own draws before: equal, or
    within rounding of the boundary."""
    assert tokens.dtype == torch.int64
    for row in range(len(tokens)):
        is_valid = reference.law.is_valid(law, row, len(tokens))
        left = torch.zeros(logits.shape[1], dtype=torch.float64)
        left = reference.law.probabilities(logits, law, row).clone() if is_valid else left
        if excluded is not None:
            left[[x for x in excluded[row].tolist() if 0 <= x < len(left)]] = 0.0
        for j, token in enumerate(tokens[row].tolist()):
            if token == PAD_TOKEN:
                assert float(left.sum()) < EPSILON, (row, j)
                continue
            assert float(left[token]) > 0.0, (row, j, token)
            if coins is not None:
                edge = left.cumsum(0)
                point = float(coins[row, j] * edge[-1])
                assert float(edge[token] - left[token]) - EPSILON < point, (row, j)
                assert point < float(edge[token]) + EPSILON, (row, j)
            else:
                arrival = torch.where(left > 0.0, arrivals(logits, law, noise, row), math.inf)
                late = float(arrival[token] - arrival.min())
                assert late < 1e-6 * (1.0 - float(left[token].log())), (row, j, late)
            if not replacement:
                left[token] = 0.0


@every_layer
@pytest.mark.parametrize(
    ("rows", "vocab", "dtype", "filters"),
    [
        (0, 7, torch.float32, "none"),
        (1, 1, torch.float32, "none"),
        (17, 7, torch.float32, "all"),
        (17, 257, torch.bfloat16, "all"),
        (6, 1000, torch.float16, "none"),
        (6, 4097, torch.float32, "all"),
        (6, 32000, torch.float32, "none"),
        (3, 128256, torch.bfloat16, "none"),
        (3, 128257, torch.float32, "all"),
    ],
    ids=lambda value: str(value).removeprefix("torch."),
)
def test_draws_equal_the_oracles(
    name: str, rows: int, vocab: int, dtype: torch.dtype, filters: str
) -> None:
    rows = fewer(name, rows, 7)
    logits, law = make_rows(rows, vocab, dtype, filters)
    coins = make_coins(rows)
    assert_tokens(layer(name).sample(logits, law, coins=coins), logits, law, coins)
    noise = (torch.arange(rows) - 3, torch.arange(rows) * 2**31)
    assert_noise_tokens(layer(name).sample(logits, law, noise=noise), logits, law, noise)


@every_layer
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
def test_layout_does_not_matter(name: str, layout: str, dtype: torch.dtype) -> None:
    rows = fewer(name, 9)
    logits, law = make_rows(rows, 257, dtype)
    coins, noise = make_coins(rows), (torch.arange(rows), torch.arange(rows))
    laid = lay_out(logits, layout)
    assert_tokens(layer(name).sample(laid, law, coins=coins), logits, law, coins)
    assert_noise_tokens(layer(name).sample(laid, law, noise=noise), logits, law, noise)


@every_layer
def test_expanded_rows_and_strided_coins_are_read_in_place(name: str) -> None:
    logits, law = make_rows(1, 257, filters="none")
    many = Law(*(field.expand(8) for field in law))
    coins = torch.rand(8, 3, dtype=torch.float64)[:, 1]
    tokens = layer(name).sample(logits.expand(8, 257), many, coins=coins)
    assert_tokens(tokens, logits.repeat(8, 1), Law(*(f.repeat(8) for f in law)), coins)


@every_layer
def test_a_row_does_not_depend_on_its_neighbours(name: str) -> None:
    rows = fewer(name, 12, 6)
    logits, law = make_rows(rows, 1000)
    coins, noise = make_coins(rows), (torch.arange(rows) + 5, torch.arange(rows))
    ops, order = layer(name), torch.randperm(rows)
    by_coin, by_noise = ops.sample(logits, law, coins=coins), ops.sample(logits, law, noise=noise)
    moved = Law(*(field[order] for field in law))
    assert torch.equal(ops.sample(logits[order], moved, coins=coins[order]), by_coin[order])
    shuffled = (noise[0][order], noise[1][order])
    assert torch.equal(ops.sample(logits[order], moved, noise=shuffled), by_noise[order])
    alone = Law(*(field[4:5] for field in law))
    assert torch.equal(ops.sample(logits[4:5], alone, coins=coins[4:5]), by_coin[4:5])


@every_layer
def test_probabilities_need_no_law(name: str) -> None:
    p = make_rows(9, 257)[0].softmax(1)
    p[2, :200] = 0.0
    p[3] = 0.0
    p[3, 256] = 1.0
    coins, noise = make_coins(9), (torch.arange(9), torch.arange(9))
    assert_tokens(layer(name).sample(p, None, coins=coins), p, None, coins)
    assert_noise_tokens(layer(name).sample(p, None, noise=noise), p, None, noise)


@every_layer
def test_coins_at_boundaries(name: str) -> None:
    """An id of weight 0 is never drawn, a boundary belongs to the next positive id, and the last
    coin gives the last positive id."""
    p = torch.tensor([0.0, 0.25, 0.0, 0.5, 0.25, 0.0, 0.0])
    coins = torch.tensor([0.0, 0.25, 0.5, 0.75, LAST_COIN], dtype=torch.float64)
    tokens = layer(name).sample(p.expand(5, 7), None, coins=coins)
    assert tokens[:, 0].tolist() == [1, 3, 3, 4, 4]
    wide = torch.zeros(2, 5000)
    wide[:, 1023], wide[:, 1024] = 0.5, 0.5
    tokens = layer(name).sample(wide, None, coins=coins[[2, 4]])
    assert tokens[:, 0].tolist() == [1024, 1024]


@every_layer
def test_invalid_and_greedy_rows(name: str) -> None:
    """Invalid rows give `PAD_TOKEN`; greedy ones the law's argmax, whatever the coin."""
    logits, law = make_rows(6, 257, filters="none")
    status = law.status.clone()
    status[[0, 3]] = INVALID_TARGET
    inverse = law.inv_temperature.clone()
    inverse[:] = 0.0
    law = law._replace(status=status, inv_temperature=inverse)
    argmax = law.argmax.clone()
    argmax[[0, 3]] = PAD_TOKEN
    for random in ({"coins": make_coins(6)}, {"noise": (torch.arange(6), torch.arange(6))}):
        assert torch.equal(layer(name).sample(logits, law, **random)[:, 0], argmax)


@every_layer
def test_a_law_that_keeps_nothing_draws_nothing(name: str) -> None:
    """The law of another row, with a cutoff above every logit of this one."""
    logits, law = make_rows(3, 1000, filters="none")
    law = law._replace(
        cutoff=torch.full((3,), 1e6),
        inv_temperature=torch.ones(3),
        status=torch.zeros(3, dtype=torch.int32),
    )
    for random in ({"coins": make_coins(3)}, {"noise": (torch.arange(3), torch.arange(3))}):
        tokens = layer(name).sample(logits, law, **random)
        assert tokens[:, 0].tolist() == [PAD_TOKEN] * 3
        assert torch.equal(tokens, reference.sample(logits, law, **random))


@every_layer
def test_wrong_arguments_are_refused(name: str) -> None:
    logits, law = make_rows(2, 7)
    coins, noise = make_coins(2), (torch.arange(2), torch.arange(2))
    with pytest.raises(ValueError, match="replacement"):
        layer(name).sample(logits, law, noise=noise, k=2, replacement=True)
    with pytest.raises(ValueError, match="exactly one"):
        layer(name).sample(logits, law)
    with pytest.raises(ValueError, match="exactly one"):
        layer(name).sample(logits, law, coins=coins, noise=noise)


@fast_layers
@pytest.mark.parametrize("way", ["coins", "noise"])
def test_draws_follow_the_law(name: str, way: str) -> None:
    """Chi-square over 3000 draws with fixed seeds, filtered and plain."""
    rows, vocab = 3000, 6
    logits = torch.tensor([0.5, 1.0, -1.0, 2.0, 0.0, -2.0]).expand(rows, vocab)
    for params in (SamplingParams.make(0.8), SamplingParams.make(1.2, top_k=3)):
        owner = torch.zeros(1, dtype=torch.int32)
        law = reference.row_law(logits[:1], params, owner)
        p = reference.law.probabilities(logits, law, 0)
        many = Law(*(field.expand(rows) for field in float32_law(law)))
        positions, seeds = torch.arange(rows), torch.full((rows,), 11)
        random: dict[str, Any] = {"noise": (seeds, positions)}
        if way == "coins":
            random = {"coins": reference.coins(seeds, positions, 1)[1]}
        tokens = layer(name).sample(logits, many, **random)[:, 0]
        counts = tokens.bincount(minlength=vocab)
        assert not bool(counts[p == 0].any())
        kept = p > 0
        assert chisquare(counts[kept], (p[kept] * rows).numpy()).pvalue > 1e-6


# Positions of seed 5 at which one of 131,071 ids at -17 arrives before the one at 0.
TAIL_WINS = {424: 94837, 680: 59764}


def tail_rows(rows: int) -> tuple[Tensor, Law]:
    """Return equal rows of one id at 0 and 131,071 at -17, which together weigh 5.4e-3."""
    logits = torch.full((1, 131072), -17.0)
    logits[0, 0] = 0.0
    owner = torch.zeros(1, dtype=torch.int32)
    law = float32_law(reference.row_law(logits, SamplingParams.make(1.0), owner))
    return logits.expand(rows, 131072), Law(*(field.expand(rows) for field in law))


@every_layer
def test_coupled_noise_lets_a_long_tail_win(name: str) -> None:
    """An id of probability 4e-8 wins where its noise says so: 24 bits of noise cannot tell."""
    positions = torch.tensor([0, *TAIL_WINS])
    logits, law = tail_rows(len(positions))
    noise = (torch.full_like(positions, 5), positions)
    tokens = layer(name).sample(logits, law, noise=noise)
    assert tokens[:, 0].tolist() == [0, *TAIL_WINS.values()]


@pytest.mark.slow
def test_coupled_noise_keeps_the_share_of_a_long_tail() -> None:
    rows = 5000
    logits, law = tail_rows(rows)
    noise = (torch.full((rows,), 5), torch.arange(rows))
    tokens = layer("eager").sample(logits, law, noise=noise)
    tail = tokens[tokens != 0]
    assert binomtest(tail.numel(), rows, 131071 / (math.exp(17.0) + 131071)).pvalue > 1e-6
    assert tail.unique().numel() == tail.numel()


def check_children(ops: Any, rows: int, vocab: int, k: int, *kind: Any) -> None:
    """Draw k children per row in every way, and compare with the oracle."""
    dtype, filters, layout = kind
    logits, law = make_rows(rows, vocab, dtype, filters)
    laid = lay_out(logits, layout)
    generator = torch.Generator().manual_seed(k)
    coins = torch.rand(rows, k, dtype=torch.float64, generator=generator)
    coins[:1], coins[1:2] = 0.0, LAST_COIN
    noise = (torch.arange(rows) - 3, torch.arange(rows) * 2**31)
    best = logits.float().topk(2).indices
    skipped = torch.tensor([PAD_TOKEN, vocab, 2**40]).expand(rows, 3)
    for excluded in (None, best, torch.cat((skipped, best[:, 1:], best), 1)):
        given: dict[str, Any] = {"k": k, "excluded": excluded}
        for replacement in (False, True):
            repeat: dict[str, Any] = {"coins": coins, "replacement": replacement}
            tokens = ops.sample(laid, law, **repeat, **given)
            assert tokens.shape == (rows, k)
            assert_children(tokens, logits, law, excluded, **repeat)
        tokens = ops.sample(laid, law, noise=noise, **given)
        assert_children(tokens, logits, law, excluded, noise=noise)


CHILDREN = [
    (12, 7, 4, torch.float32, "none", "packed"),
    (12, 7, 9, torch.float32, "all", "odd"),
    (12, 257, 2, torch.bfloat16, "all", "transposed"),
    (6, 1000, 4, torch.float16, "none", "columns"),
    (4, 4097, 3, torch.float32, "none", "odd"),
]
LARGE_CHILDREN = [
    (2, 32000, 4, torch.bfloat16, "none", "packed"),
    (2, 128257, 3, torch.float32, "all", "packed"),
]


@every_layer
@pytest.mark.parametrize("case", CHILDREN, ids=lambda case: f"v{case[1]}-k{case[2]}")
def test_children_equal_the_oracles(name: str, case: tuple[Any, ...]) -> None:
    check_children(layer(name), fewer(name, case[0], 2), *case[1:])


@fast_layers
def test_children_over_a_large_vocabulary(name: str) -> None:
    check_children(layer(name), *LARGE_CHILDREN[0])


@pytest.mark.slow
@every_layer
@pytest.mark.parametrize("case", LARGE_CHILDREN, ids=lambda case: f"v{case[1]}-k{case[2]}")
def test_children_over_large_vocabularies(name: str, case: tuple[Any, ...]) -> None:
    check_children(layer(name), *case)


@every_layer
def test_one_child_is_drawn_as_ever(name: str) -> None:
    """Coins in a column, k = 1, nothing excluded: bit-equal to the plain call."""
    logits, law = make_rows(6, 257)
    coins, noise = make_coins(6), (torch.arange(6), torch.arange(6))
    ops = layer(name)
    plain = ops.sample(logits, law, coins=coins)
    nothing = torch.empty(6, 0, dtype=torch.int64)
    skipped = torch.tensor([[257, -1]]).expand(6, 2)
    for excluded in (None, nothing, skipped):
        column = ops.sample(logits, law, coins=coins[:, None], k=1, excluded=excluded)
        assert torch.equal(column, plain)
    raced = ops.sample(logits, law, noise=noise)
    for excluded in (nothing, skipped):
        assert torch.equal(ops.sample(logits, law, noise=noise, excluded=excluded), raced)
    assert torch.equal(ops.sample(logits, law, noise=noise, k=3)[:, :1], raced)


@every_layer
def test_children_of_small_supports(name: str) -> None:
    """Missing children are `PAD_TOKEN` and come last; a greedy row has one child."""
    p = torch.tensor([[0.0, 0.5, 0.0, 0.5], [0.0, 0.0, 1.0, 0.0], [0.25, 0.25, 0.25, 0.25]])
    coins = torch.tensor([[0.6, 0.6, 0.6]] * 3, dtype=torch.float64)
    drawn = layer(name).sample(p, None, coins=coins, k=3)
    assert drawn.tolist() == [[3, 1, -1], [2, -1, -1], [2, 1, 3]]
    excluded = torch.tensor([[3], [2], [9]])
    drawn = layer(name).sample(p, None, coins=coins, k=3, excluded=excluded)
    assert drawn.tolist() == [[1, -1, -1], [-1, -1, -1], [2, 1, 3]]
    drawn = layer(name).sample(p, None, coins=coins, k=3, excluded=excluded, replacement=True)
    assert drawn.tolist() == [[1, 1, 1], [-1, -1, -1], [2, 2, 2]]

    logits = torch.tensor([[1.0, 9.0, 9.0, 3.0]]).expand(3, 4)
    law = reference.row_law(logits, SamplingParams.make(0.0), torch.zeros(3, dtype=torch.int32))
    law = float32_law(law)._replace(status=torch.tensor([0, 0, INVALID_TARGET]).int())
    excluded = torch.tensor([[0], [1], [0]])
    noise = (torch.arange(3), torch.arange(3))
    for random in ({"coins": coins}, {"noise": noise}):
        drawn = layer(name).sample(logits, law, **random, k=3, excluded=excluded)
        assert drawn.tolist() == [[1, -1, -1], [-1, -1, -1], [-1, -1, -1]]
    drawn = layer(name).sample(logits, law, coins=coins, k=3, replacement=True)
    assert drawn.tolist() == [[1, 1, 1], [1, 1, 1], [-1, -1, -1]]


@every_layer
def test_children_do_not_depend_on_their_neighbours(name: str) -> None:
    rows = fewer(name, 12, 6)
    logits, law = make_rows(rows, 1000)
    coins = torch.rand(rows, 3, dtype=torch.float64)
    noise, excluded = (torch.arange(rows) + 5, torch.arange(rows)), torch.arange(rows)[:, None]
    ops, order = layer(name), torch.randperm(rows)
    moved = Law(*(field[order] for field in law))
    shuffled = (noise[0][order], noise[1][order])
    by_coin = ops.sample(logits, law, coins=coins, k=3, excluded=excluded)
    by_noise = ops.sample(logits, law, noise=noise, k=3, excluded=excluded)
    given: dict[str, Any] = {"k": 3, "excluded": excluded[order]}
    assert torch.equal(
        ops.sample(logits[order], moved, coins=coins[order], **given), by_coin[order]
    )
    assert torch.equal(ops.sample(logits[order], moved, noise=shuffled, **given), by_noise[order])
    strided = torch.rand(rows, 6, dtype=torch.float64)
    strided[:, ::2] = coins
    ids = torch.full((rows, 2), 3)
    ids[:, :1] = excluded
    drawn = ops.sample(logits, law, coins=strided[:, ::2], k=3, excluded=ids[:, :1])
    assert torch.equal(drawn, by_coin)


@fast_layers
@pytest.mark.parametrize("way", ["coins", "noise"])
def test_pairs_of_children_follow_their_law(name: str, way: str) -> None:
    """Chi-square over 3000 ordered pairs: p(x) * p(y) / (1 - p(x)) without replacement."""
    rows, vocab = 3000, 4
    p = torch.tensor([0.5, 0.3, 0.15, 0.05])
    seeds, positions = torch.full((rows,), 12), torch.arange(rows)
    random: dict[str, Any] = {"noise": (seeds, positions)}
    if way == "coins":
        random = {"coins": reference.draft_coins(seeds, positions, 1, 2)[:, 0]}
    drawn = layer(name).sample(p.expand(rows, vocab), None, k=2, **random)
    counts = (drawn[:, 0] * vocab + drawn[:, 1]).bincount(minlength=vocab**2)
    law = (p[:, None] * p / (1.0 - p[:, None])).fill_diagonal_(0.0).flatten().double()
    assert not bool(counts[law == 0].any())
    kept = law > 0
    assert chisquare(counts[kept], (law[kept] / law.sum() * rows).numpy()).pvalue > 1e-6
