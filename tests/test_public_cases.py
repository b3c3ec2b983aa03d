"""Public reports of wrong verifiers, each as a small input with the right result.

The ids in the names are those of the project's collection of public cases. Coins run over an even
grid where a report speaks of frequencies: a share is then met to one grid point, without chance.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from spec_kernels import reference
from spec_kernels.types import (
    INVALID_DRAFT,
    INVALID_TARGET,
    OK,
    PAD_TOKEN,
    ZERO_Q,
    Acceptance,
    Draft,
    Law,
    SamplingParams,
    invert_id_map,
)
from tests.layers import layer

LAST_COIN = 1.0 - 2.0**-53
RULES = ("token", "block")
POINTS = 16
GRID = [(i + 0.5) / POINTS for i in range(POINTS)]  # coins in the middle of equal intervals


LAYERS = [
    "reference",
    "eager",
    pytest.param("triton-interpreter", marks=pytest.mark.slow),
    pytest.param("triton", marks=pytest.mark.gpu),
]


@pytest.fixture(params=LAYERS)
def ops(request: pytest.FixtureRequest) -> Any:
    """The public functions of one layer."""
    return reference if request.param == "reference" else layer(request.param)


def log(rows: Sequence[Sequence[float]]) -> Tensor:
    return torch.tensor(rows).log()


def law_of(ops: Any, logits: Tensor, *parameters: Any) -> Law:
    """Return the laws of rows under one request's parameters."""
    owner = torch.zeros(len(logits), dtype=torch.int32)
    law: Law = ops.row_law(logits, SamplingParams.make(*parameters), owner)
    return law


def verify(
    ops: Any,
    target: Tensor,
    tokens: list[int],
    u: Sequence[float | list[float]],
    z: Sequence[float],
    *,
    law: Law | SamplingParams | None = None,
    draft: Tensor | None = None,
    draft_law: Law | None = None,
    rule: str = "block",
    target_to_draft: Tensor | None = None,
) -> Acceptance:
    """Judge the same drafts with one set of coins per request; node i + 1 was drawn from row i of
    `draft`, or is fixed without it. Without laws the rows are probabilities."""
    batch, nodes = len(z), len(tokens) + 1
    coins = torch.full((batch, nodes), 0.5, dtype=torch.float64)
    for b, own in enumerate(u):
        coins[b, 1:] = torch.tensor(own, dtype=torch.float64)
    rows = torch.arange(nodes, dtype=torch.int32).expand(batch, nodes)
    out: Acceptance = ops.accept(
        Draft(
            torch.tensor([[0, *tokens]]).expand(batch, nodes),
            torch.full((batch,), nodes, dtype=torch.int32),
            logits=draft,
            law=draft_law,
            row=None if draft is None else rows - 1,
        ),
        target,
        law,
        rows,
        coins,
        torch.tensor(z, dtype=torch.float64),
        rule=rule,
        max_depth=len(tokens),
        target_to_draft=target_to_draft,
    )
    return out


def emitted(out: Acceptance) -> list[list[int]]:
    """Return the emitted tokens of every request."""
    lists = out.output_tokens.tolist()
    return [row[: n + 1] for row, n in zip(lists, out.accepted_lens.tolist(), strict=True)]


def counts(tokens: Sequence[int], vocab: int) -> list[int]:
    return torch.bincount(torch.tensor(tokens), minlength=vocab).tolist()


def recovered_counts(out: Acceptance, vocab: int) -> list[int]:
    """Count the ids drawn by requests that all rejected their first draft."""
    assert out.accepted_lens.tolist() == [0] * len(out.accepted_lens)
    return counts(out.output_tokens[:, 0].tolist(), vocab)


def greedy_rows(argmax: list[int], vocab: int) -> Tensor:
    return 5.0 * torch.nn.functional.one_hot(torch.tensor(argmax), vocab).float()


# The accept rule


def test_b001_hits_behind_the_first_rejection_do_not_count(ops: Any) -> None:
    half = torch.full((4, 2), 0.5)
    coins = [[0.1, 0.9, 0.1], [0.1, 0.1, 0.1]]
    out = verify(ops, half, [0, 0, 0], coins, [0.2, 0.2], rule="token")
    assert out.accepted_lens.tolist() == [1, 3]
    assert emitted(out) == [[0, 1], [0, 0, 0, 0]]


GREEDY_CHAINS = [
    # id, the target's argmax rows, drafts, what is emitted
    ("b002-aligned", [2, 4, 1, 3], [2, 4, 1], [2, 4, 1, 3]),
    ("b002-shifted", [2, 4, 1, 3], [4, 1, 2], [2]),
    ("b003", [1, 2, 3, 4, 6, 8], [1, 2, 3, 5, 7], [1, 2, 3, 4]),
    ("b012", [4, 0, 0], [1, 1], [4]),
    ("b020", [3, 7, 5], [3, 6], [3, 7]),
]


@pytest.mark.parametrize("rule", [*RULES, "match"])
@pytest.mark.parametrize("chain", GREEDY_CHAINS, ids=lambda chain: chain[0])
def test_greedy_chain_emits_the_targets_argmax(
    ops: Any, chain: tuple[str, list[int], list[int], list[int]], rule: str
) -> None:
    _, argmax, drafts, expected = chain
    logits = greedy_rows(argmax, 9)
    if rule == "match":
        draft = Draft(torch.tensor([[0, *drafts]]), torch.tensor([len(argmax)], dtype=torch.int32))
        out = ops.match(draft, torch.tensor([argmax]), max_depth=len(drafts))
    else:
        params = SamplingParams.make(0.0)
        out = verify(ops, logits, drafts, [[0.9] * len(drafts)], [0.9], law=params, rule=rule)
    assert emitted(out) == [expected]
    assert out.output_tokens[0, len(expected) :].tolist() == [-1] * (len(argmax) - len(expected))
    assert out.path[0].tolist() == [i if i < len(expected) else -1 for i in range(len(argmax))]


@pytest.mark.parametrize("rule", RULES)
def test_b004_acceptance_is_a_ratio_not_a_comparison(ops: Any, rule: str) -> None:
    p, q = torch.tensor([[0.3, 0.7], [0.5, 0.5]]), torch.tensor([[0.6, 0.4]])
    out = verify(ops, p, [0], GRID, GRID, draft=q, rule=rule)
    assert int(out.accepted_lens.sum()) == 8


@pytest.mark.parametrize("rule", RULES)
def test_b005_a_likelier_target_accepts_for_every_coin(ops: Any, rule: str) -> None:
    p = torch.tensor([[0.3, 0.5, 0.2], [0.2, 0.3, 0.5]])
    q = torch.tensor([[0.2, 0.4, 0.4]])
    coins = [0.0, 0.6, 0.999, LAST_COIN]
    out = verify(ops, p, [0], coins, [0.5] * 4, draft=q, rule=rule)
    assert out.accepted_lens.tolist() == [1, 1, 1, 1]


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("p", [[0.25] * 4, [0.1, 0.2, 0.3, 0.4]], ids=["b006", "b032"])
def test_equal_laws_accept_everything(ops: Any, p: list[float], rule: str) -> None:
    rows = torch.tensor([p, p, p])
    out = verify(ops, rows, [1, 3], [[LAST_COIN] * 2, [0.0] * 2], [0.5] * 2, draft=rows, rule=rule)
    assert out.accepted_lens.tolist() == [2, 2]
    assert ops.overlap(rows, None, rows, None).tolist() == pytest.approx([1.0] * 3)


def test_b009_a_later_success_rescues_an_earlier_failure(ops: Any) -> None:
    p = torch.tensor([[0.3, 0.7], [0.8, 0.2], [0.5, 0.5]])
    q = torch.tensor([[0.6, 0.4], [0.5, 0.5]])
    out = verify(ops, p, [0, 0], [[0.99, 0.01]], [0.9], draft=q, rule="block")
    assert emitted(out) == [[0, 0, 1]]
    out = verify(ops, p, [0, 0], [[0.99, 0.01]], [0.9], draft=q, rule="token")
    assert emitted(out) == [[1]]


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(
    ("p", "q"),
    [([0.3, 0.5, 0.2], [0.4, 0.3, 0.3]), ([0.3, 0.5, 0.2], [0.2, 0.1, 0.1])],
    ids=["b010", "b011"],
)
def test_greedy_target_rejects_all_but_its_argmax(
    ops: Any, p: list[float], q: list[float], rule: str
) -> None:
    target, draft = log([p, p]), log([q])
    laws = {"law": law_of(ops, target, 0.0), "draft_law": law_of(ops, draft, 0.0)}
    assert laws["draft_law"].argmax.tolist() == [0]
    out = verify(ops, target, [0], [0.0, 0.5], [0.1, 0.9], draft=draft, rule=rule, **laws)
    assert emitted(out) == [[1], [1]]


# The recovered token


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(
    ("p", "q", "expected"),
    [
        ([0.1, 0.5, 0.4], [0.5, 0.3, 0.2], [0, 0.5, 0.5]),
        ([0.10, 0.20, 0.30, 0.40], [0.55, 0.25, 0.15, 0.05], [0, 0, 0.3, 0.7]),
        ([0.10, 0.20, 0.30, 0.40], None, [0, 2 / 9, 3 / 9, 4 / 9]),
    ],
    ids=["b013", "b014", "b017-b026"],
)
def test_recovered_token_follows_the_residual(
    ops: Any, p: list[float], q: list[float] | None, expected: list[float], rule: str
) -> None:
    """A draft from a law loses all of q; a fixed one, such as a drafter's argmax, only its id."""
    draft = None if q is None else torch.tensor([q])
    rows = torch.tensor([p, p])
    out = verify(ops, rows, [0], [0.9] * POINTS, GRID, draft=draft, rule=rule)
    for found, share in zip(recovered_counts(out, len(p)), expected, strict=True):
        assert abs(found - POINTS * share) <= (1 if share else 0)


def test_b016_inputs_are_left_alone(ops: Any) -> None:
    p, q = torch.rand(3, 5).softmax(1), torch.rand(2, 5).softmax(1)
    kept = p.clone(), q.clone()
    for rule in RULES:
        verify(ops, p, [1, 2], [[0.3, 0.9]], [0.5], draft=q, rule=rule)
        verify(ops, p, [1, 2], [[0.9, 0.3]], [0.5], rule=rule)
    ops.overlap(p[:2], None, q, None)
    ops.sample(p, law_of(ops, p, 0.7, 3, 0.9, 0.1), coins=torch.tensor([0.1, 0.5, 0.9]).double())
    assert torch.equal(p, kept[0])
    assert torch.equal(q, kept[1])


def test_b018_a_residual_of_1e_8_keeps_its_digits() -> None:
    from spec_kernels.reference.law import probabilities

    q = [0.25 * (1 - 1e-7)] + [0.25 * (1 + 1e-7 / 3)] * 3
    rows = torch.tensor([[0.25] * 4, q], dtype=torch.float64)
    weights = (probabilities(rows, None, 0) - probabilities(rows, None, 1)).clamp(min=0)
    assert weights.tolist() == pytest.approx([0.25e-7, 0, 0, 0], rel=1e-5)


@pytest.mark.parametrize("vocab", [151936, 129280])
def test_b021_large_vocabularies(ops: Any, vocab: int) -> None:
    """Heavy ids lie far apart, so no coin is near a boundary."""
    heavy = [5, vocab // 2, vocab - 1]
    target = torch.full((2, vocab), -20.0)
    target[:, heavy] = torch.tensor([1.0, 2.0, 3.0])
    draft = target[:1].clone()
    draft[0, heavy] = torch.tensor([3.0, 1.0, 1.0])
    laws = {"law": law_of(ops, target, 1.0), "draft_law": law_of(ops, draft, 1.0)}
    for rule in RULES:
        out = verify(
            ops, target, [5], [0.05, 0.9, 0.9], [0.8, 0.1, 0.9], draft=draft, rule=rule, **laws
        )
        assert emitted(out) == [[5, vocab - 1], [vocab // 2], [vocab - 1]]


# Parameters reach every row of their own request


@pytest.mark.parametrize("rule", RULES)
def test_b024_min_p_reaches_verified_rows(ops: Any, rule: str) -> None:
    logits, params = log([[0.6, 0.2, 0.2]] * 2), SamplingParams.make(1.0, min_p=0.5, batch=POINTS)
    out = verify(ops, logits, [1], GRID, GRID, law=params, rule=rule)
    assert emitted(out) == [[0]] * POINTS


def test_b025_every_row_uses_its_own_requests_parameters(ops: Any) -> None:
    logits = log([[0.5, 0.3, 0.15, 0.05]]).expand(8, 4)
    params = SamplingParams.make([1.0] * 3, min_p=[0.9, 0.5, 0.2])
    owner = [0, 1, 1, 1, 2, 2, 2, 2]
    law = ops.row_law(logits, params, torch.tensor(owner, dtype=torch.int32))
    kept = (logits >= law.cutoff[:, None]).sum(1).tolist()
    assert kept == [[1, 2, 3][request] for request in owner]
    num_nodes = torch.tensor([1, 3, 4], dtype=torch.int32)
    target_row = torch.tensor([[0, 0, 0, 0], [1, 2, 3, 0], [4, 5, 6, 7]], dtype=torch.int32)
    draft = Draft(torch.tensor([[0, -1, -1, -1], [0, 1, 2, -1], [0, 1, 2, 3]]), num_nodes)
    coins = torch.full((3, 4), 0.01, dtype=torch.float64)
    last = torch.full((3,), LAST_COIN, dtype=torch.float64)
    for target_law in (law, params):
        out = ops.accept(
            draft, logits, target_law, target_row, coins, last, rule="token", max_depth=3
        )
        assert emitted(out) == [[0], [1, 1], [1, 2, 2]]


# The draft law is the law that was drawn from


@pytest.mark.parametrize("rule", RULES)
def test_b027_filtered_draft_law_is_renormalised(ops: Any, rule: str) -> None:
    draft = log([[0.4, 0.3, 0.2, 0.1]])
    law = law_of(ops, draft, 1.0, 2)
    rows = draft.expand(POINTS, 4)
    coins = torch.tensor(GRID, dtype=torch.float64)
    drawn = ops.sample(rows, law_of(ops, rows, 1.0, 2), coins=coins)
    assert counts(drawn[:, 0].tolist(), 4) == [9, 7, 0, 0]
    # 0.2 / (4 / 7) = 0.35, where the unfiltered 0.4 would accept half of the time.
    target = torch.tensor([[0.2, 0.3, 0.25, 0.25]] * 2).log()
    out = verify(
        ops,
        target,
        [0],
        [0.34, 0.36],
        [0.5, 0.5],
        law=law_of(ops, target, 1.0),
        draft=draft,
        draft_law=law,
        rule=rule,
    )
    assert out.accepted_lens.tolist() == [1, 0]


@pytest.mark.parametrize("temperature", [1.0, 0.5, 2.0])
def test_b028_draws_follow_the_temperature(ops: Any, temperature: float) -> None:
    logits = torch.tensor([[2.0, 1.5, 1.0, 0.5]]).expand(POINTS, 4)
    coins = torch.tensor(GRID, dtype=torch.float64)
    drawn = ops.sample(logits, law_of(ops, logits, temperature), coins=coins)
    shares = (logits[0].double() / temperature).softmax(0) * POINTS
    for found, share in zip(counts(drawn[:, 0].tolist(), 4), shares.tolist(), strict=True):
        assert abs(found - share) <= 1


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("token", [0, 1, 2, 3])
def test_b029_filtered_ids_are_neither_accepted_nor_recovered(
    ops: Any, token: int, rule: str
) -> None:
    target, draft = log([[0.5, 0.3, 0.15, 0.05]] * 2), log([[0.25] * 4])
    laws = {"law": law_of(ops, target, 1.0, 0, 0.6), "draft_law": law_of(ops, draft, 1.0)}
    out = verify(
        ops, target, [token], [0.0, *GRID[1:]], [0.0, *GRID[1:]], draft=draft, rule=rule, **laws
    )
    assert all(set(tokens) <= {0, 1} for tokens in emitted(out))


@pytest.mark.parametrize("rule", RULES)
def test_b030_draw_and_ratio_read_the_same_bf16_row(ops: Any, rule: str) -> None:
    logits = (3 * torch.randn(4, 512)).bfloat16()
    law = law_of(ops, logits, 0.8)
    coins = torch.tensor([0.1, 0.4, 0.7, 0.9], dtype=torch.float64)
    tokens = ops.sample(logits, law, coins=coins)[:3, 0].tolist()
    out = verify(
        ops,
        logits,
        tokens,
        [[LAST_COIN] * 3],
        [0.5],
        law=law,
        draft=logits,
        draft_law=law,
        rule=rule,
    )
    assert out.accepted_lens.tolist() == [3]


@pytest.mark.parametrize("rule", RULES)
def test_b031_with_q_more_is_accepted_than_without(ops: Any, rule: str) -> None:
    p, q = [0.6, 0.2, 0.1, 0.1], [0.7, 0.2, 0.05, 0.05]
    rows, draft = torch.tensor([p, p]), torch.tensor([q])
    assert ops.overlap(rows[:1], None, draft, None).tolist() == pytest.approx([0.9])
    rates = {}
    coins = [(i + 0.5) / 20 for i in range(20)]
    for name, law in (("sampled", draft), ("fixed", None)):
        rates[name] = 0.0
        for token in range(4):
            out = verify(ops, rows, [token], coins, coins, draft=law, rule=rule)
            rates[name] += q[token] * int(out.accepted_lens.sum()) / 20
    assert rates["sampled"] == pytest.approx(0.90, abs=0.01)
    assert rates["fixed"] == pytest.approx(0.47, abs=0.01)


def test_b036_draft_laws_travel_with_their_ids(ops: Any) -> None:
    """Rows may be stored in any order: each node names its own."""
    p, q = torch.rand(4, 6).softmax(1), torch.rand(3, 6).softmax(1)
    coins = torch.rand(2, 5, 4, dtype=torch.float64)
    tokens = torch.randint(6, (5, 4))
    order = torch.tensor([2, 0, 1])
    outs = []
    for rows, laws in ((torch.arange(3), q), (order.argsort(), q[order])):
        row = torch.cat((torch.tensor([-1]), rows)).int().expand(5, 4)
        draft = Draft(tokens, torch.full((5,), 4, dtype=torch.int32), logits=laws, row=row)
        target_row = torch.arange(4, dtype=torch.int32).expand(5, 4)
        outs.append(ops.accept(draft, p, None, target_row, coins[0], coins[1, :, 0], max_depth=3))
    for first, second in zip(*outs, strict=True):
        assert torch.equal(first, second)


# Temperature


@pytest.mark.parametrize(
    ("temperature", "logits"),
    [
        (1e-40, [1.0, 9.0, 3.0]),
        (1e-12, [-1e4, 1e4, 9.9e3]),
        (1e-4, [-100.0, 50.0, 49.0]),
        (0.0, [0.0, 2.0, 2.0]),
    ],
    ids=["b041", "b042", "b043", "b044"],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_tiny_temperature_is_the_argmax(
    ops: Any, temperature: float, logits: list[float], dtype: torch.dtype
) -> None:
    rows = torch.tensor([logits] * 10, dtype=torch.float64).to(dtype)
    law = law_of(ops, rows, temperature)
    assert all(bool(torch.isfinite(field).all()) for field in law._replace(cutoff=law.row_max))
    coins = torch.tensor([*GRID[::2], 0.0, LAST_COIN], dtype=torch.float64)
    assert ops.sample(rows, law, coins=coins).tolist() == [[1]] * 10
    seeds = torch.arange(10)
    assert ops.sample(rows, law, noise=(seeds, seeds)).tolist() == [[1]] * 10


def test_bounds_of_the_temperature_are_inside(ops: Any) -> None:
    params = SamplingParams.make([1e-5, 9e-6, 1e30])
    law = ops.row_law(torch.ones(3, 2), params, torch.arange(3, dtype=torch.int32))
    assert law.status.tolist() == [OK] * 3
    assert law.inv_temperature.tolist() == pytest.approx([1e5, 0.0, 1e-30])


# The ends of coins and noise, filters


def test_b062_an_id_of_weight_zero_is_never_drawn(ops: Any) -> None:
    coins = torch.tensor([0.0, 2.0**-53, *GRID, LAST_COIN], dtype=torch.float64)
    rows = torch.tensor([[0.0, 1.0, 0.0]]).expand(len(coins), 3)
    assert ops.sample(rows, None, coins=coins).tolist() == [[1]] * len(coins)
    assert ops.sample(rows.log(), law_of(ops, rows.log(), 1.0), coins=coins).tolist() == [
        [1]
    ] * len(coins)


def test_b063_four_million_ids(ops: Any) -> None:
    vocab = 2**22
    logits = torch.zeros(1, vocab)
    logits[0, : vocab // 2] = math.log(2.0)
    rows = logits.expand(2, vocab)
    law = Law(*(field.expand(2) for field in law_of(ops, logits, 1.0)))
    low, high = ops.sample(rows, law, coins=torch.tensor([0.66, 0.674], dtype=torch.float64))
    assert int(low) < vocab // 2 <= int(high)
    assert int(low) == pytest.approx(0.66 * 0.75 * vocab, rel=1e-5)


def test_b064_noise_never_picks_an_underflowed_id(ops: Any) -> None:
    rows = torch.tensor([[-2000.0, 0.0, -math.inf, -3000.0]]).expand(POINTS, 4)
    seeds = torch.arange(POINTS)
    drawn = ops.sample(rows, law_of(ops, rows, 1.0), noise=(seeds, seeds + 9))
    assert drawn.tolist() == [[1]] * POINTS


def test_b064_b065_noise_is_positive_and_finite_at_its_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from spec_kernels.reference import random

    ends = torch.tensor([0, 2**31 - 1, 2**31, 2**32 - 1])
    monkeypatch.setattr(random, "philox", lambda *_: (ends,) * 4)
    noise = random.exponential(torch.tensor(0), torch.tensor(0), torch.zeros(4, dtype=torch.int64))
    assert noise.tolist() == pytest.approx(
        [2.0**-33, math.log(2.0), math.log(2.0), 33 * math.log(2.0)], rel=1e-9
    )
    assert bool((noise.diff() > 0).all())


@pytest.mark.parametrize(
    ("p", "parameters", "kept"),
    [
        ([0.5, 0.3, 0.1, 0.1], (1.0, 0, 0.8), [0, 1]),
        ([0.5, 0.3, 0.15, 0.05], (1.0, 0, 0.6), [0, 1]),
        ([1 / 4096] * 4000 + [96 / 4096], (1.0, 0, 1e-8), [4000]),
        ([0.125] * 8, (1.0, 4), list(range(8))),
        ([0.125] * 8, (1.0, 0, 0.5), list(range(8))),
    ],
    ids=["b067", "b068", "b069", "b071", "b071-top-p"],
)
def test_filters_keep(
    ops: Any, p: list[float], parameters: tuple[Any, ...], kept: list[int]
) -> None:
    rows = log([p]).expand(POINTS, len(p))
    law = law_of(ops, rows, *parameters)
    assert (rows[0] >= law.cutoff[0]).nonzero().flatten().tolist() == kept
    drawn = ops.sample(rows, law, coins=torch.tensor(GRID, dtype=torch.float64))
    found = counts(drawn[:, 0].tolist(), len(p))
    total = sum(p[x] for x in kept)
    assert all(abs(found[x] - POINTS * p[x] / total) <= 1 for x in kept)


def test_b070_a_flat_bf16_row_of_131072_ids_is_drawn_flat(ops: Any) -> None:
    vocab, coins = 131072, torch.tensor(GRID[::2], dtype=torch.float64)
    rows = torch.ones(1, vocab, dtype=torch.bfloat16).expand(8, vocab)
    drawn = ops.sample(rows, law_of(ops, rows, 1.0), coins=coins)[:, 0]
    assert bool(((drawn - coins * vocab).abs() <= 1).all())


# Rows without a law


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("bad", [math.nan, math.inf], ids=["nan", "inf"])
def test_b077_an_invalid_row_accepts_nothing(
    ops: Any, bad: float, temperature: float, rule: str
) -> None:
    rows = torch.zeros(3, 4)
    rows[0, 2] = bad
    params = SamplingParams.make(temperature)
    out = verify(ops, rows, [0, 0], [[0.0, 0.0]], [0.5], law=params, rule=rule)
    assert out.output_tokens.tolist() == [[PAD_TOKEN] * 3]
    assert out.accepted_lens.tolist() == [0]
    assert out.status.tolist() == [INVALID_TARGET]
    rows = rows.flip(0)  # the row behind both drafts
    out = verify(ops, rows, [0, 0], [[0.0, 0.0]], [0.5], law=params, rule=rule)
    assert out.output_tokens.tolist() == [[0, 0, PAD_TOKEN]]
    assert out.status.tolist() == [INVALID_TARGET]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    "row",
    [[math.nan, 6.0, 8.0], [6.0, math.nan, 8.0], [math.nan] * 3, [-math.inf] * 3, [math.inf, 1, 2]],
    ids=["b080-first", "b080-middle", "b080-all", "b079", "inf"],
)
def test_a_row_without_a_law_has_no_argmax(ops: Any, row: list[float], temperature: float) -> None:
    rows = torch.tensor([row, [1.0, 3.0, 2.0]])
    law = law_of(ops, rows, temperature)
    assert law.status.tolist() == [INVALID_TARGET, OK]
    assert law.argmax.tolist() == [PAD_TOKEN, 1]
    coins = torch.tensor([0.5, 0.5], dtype=torch.float64)
    assert ops.sample(rows, law, coins=coins).tolist() == [[PAD_TOKEN], [1]]
    seeds = torch.arange(2)
    assert ops.sample(rows, law, noise=(seeds, seeds))[0].tolist() == [PAD_TOKEN]


def test_b079_a_row_with_every_id_masked_has_no_law(ops: Any) -> None:
    rows, owner = torch.zeros(2, 40), torch.zeros(2, dtype=torch.int32)
    words = torch.tensor([[0, 0], [-1, -1]], dtype=torch.int32)
    ops.adjust_logits_(rows, owner, allowed_words=words)
    assert law_of(ops, rows, 1.0).status.tolist() == [INVALID_TARGET, OK]


# Padding


@pytest.mark.parametrize("rule", RULES)
def test_b084_every_negative_id_ends_the_chain(ops: Any, rule: str) -> None:
    rows = torch.zeros(4, 5)
    rows[0, 4] = rows[1, 3] = 1.0
    out = verify(ops, rows, [4, -2, -100], [[0.0] * 3], [0.5], rule=rule)
    assert emitted(out) == [[4, 3]]
    assert out.status.tolist() == [INVALID_DRAFT]
    out = verify(ops, rows, [4, PAD_TOKEN, 3], [[0.0] * 3], [0.5], rule=rule)
    assert emitted(out) == [[4, 3]]
    assert out.status.tolist() == [OK]


@pytest.mark.parametrize("rule", RULES)
def test_b087_places_behind_the_emitted_tokens_are_marked(ops: Any, rule: str) -> None:
    rows = torch.eye(4)
    out = verify(ops, rows, [0, 3, 2], [[0.5] * 3], [0.5], rule=rule)
    assert out.output_tokens.tolist() == [[0, 1, -1, -1]]
    assert out.path.tolist() == [[0, 1, -1, -1]]


# Vocabularies of other widths


@pytest.mark.parametrize("rule", RULES)
def test_b102_a_narrower_draft_leaves_its_missing_ids_to_the_target(ops: Any, rule: str) -> None:
    p = torch.tensor([[0.1, 0.1, 0.1, 0.1, 0.1, 0.1, 0.4, 0.0]] * 2)
    q = torch.full((1, 6), 1 / 6)
    out = verify(ops, p, [0], [0.9] * POINTS, GRID, draft=q, rule=rule)
    assert recovered_counts(out, 8) == [0] * 6 + [POINTS, 0]


@pytest.mark.parametrize("rule", RULES)
def test_b103_a_wider_draft_never_emits_its_extra_ids(ops: Any, rule: str) -> None:
    p, q = torch.full((2, 6), 1 / 6), torch.full((1, 8), 1 / 8)
    out = verify(ops, p, [7], [0.0, *GRID[1:]], GRID, draft=q, rule=rule)
    assert max(recovered_counts(out, 8)[6:]) == 0
    assert out.status.tolist() == [OK] * POINTS
    out = verify(ops, p, [8], [0.0], [0.5], draft=q, rule=rule)
    assert out.status.tolist() == [INVALID_DRAFT]


@pytest.mark.parametrize("bad", [-1, 8])
def test_b106_an_id_map_out_of_range_is_refused(bad: int) -> None:
    with pytest.raises(ValueError, match="draft_to_target"):
        invert_id_map(torch.tensor([0, bad, 3]), 8)


@pytest.mark.parametrize("rule", RULES)
def test_b107_a_mapped_draft_law_meets_the_right_target_ids(ops: Any, rule: str) -> None:
    p = torch.tensor([[0.0, 0.1, 0.0, 0.1, 0.3, 0.1, 0.0, 0.4]] * 2)
    q = torch.tensor([[0.2, 0.2, 0.2, 0.4]])
    to_draft = invert_id_map(torch.tensor([5, 3, 7, 1]), 8)
    options: dict[str, Any] = {"draft": q, "target_to_draft": to_draft, "rule": rule}
    # Id 1 is column 3 of the draft: accepted with 0.1 / 0.4. The residual is 0.3 at 4, 0.2 at 7.
    out = verify(ops, p, [1], [0.24], [0.5], **options)
    assert out.accepted_lens.tolist() == [1]
    out = verify(ops, p, [1], [0.26] * 20, [(i + 0.5) / 20 for i in range(20)], **options)
    assert recovered_counts(out, 8) == [0, 0, 0, 0, 12, 0, 0, 8]
    out = verify(ops, p, [4], [0.0], [0.5], **options)  # no column: not drawn from this law
    assert out.accepted_lens.tolist() == [0]
    assert out.status.tolist() == [ZERO_Q]
