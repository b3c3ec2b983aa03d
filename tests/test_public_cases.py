"""Public reports of wrong verifiers, each as a small input with the right result.

The ids in the names are those of the project's collection of public cases. Coins run over an even
grid where a report speaks of frequencies: a share is then met to one grid point, without chance.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from spec_kernels.types import (
    Draft,
    SamplingParams,
)
from tests.public import (
    GRID,
    LAST_COIN,
    LAYERS,
    POINTS,
    RULES,
    counts,
    emitted,
    functions_of,
    greedy_rows,
    law_of,
    log,
    recovered_counts,
    verify,
)


@pytest.fixture(params=LAYERS)
def ops(request: pytest.FixtureRequest) -> Any:
    return functions_of(request.param)


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
