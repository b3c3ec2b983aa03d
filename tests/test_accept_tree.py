"""Contract of `accept` on trees: every layer decides as the oracle does."""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from spec_kernels import reference
from spec_kernels.types import (
    BAD_TREE,
    INVALID_DRAFT,
    INVALID_TARGET,
    OK,
    PAD_TOKEN,
    ZERO_Q,
    Acceptance,
    Draft,
)
from tests.cases import LAST_COIN, Case, Step, assert_equal, make_step, spread_columns
from tests.layers import LAYERS, fewer, layer
from tests.tree_cases import TreeCase, assert_tree_accepts, make_tree_step

every_layer = pytest.mark.parametrize("name", LAYERS)
both_rules = pytest.mark.parametrize("rule", ["token", "block"])

F16, BF16, I32 = torch.float16, torch.bfloat16, torch.int32

# Every value of every axis at least twice, not every combination. Request 0 has all the nodes,
# 1 is absent, 2 a root alone; greedy requests stand among the sampled ones; shapes alternate.
CASES = [
    TreeCase(3, 1, 5),
    TreeCase(3, 2, 5, "any"),
    TreeCase(6, 30, 5, "sampled", ids=I32),
    TreeCase(6, 30, 5, "sampled", replacement=True, seed=1),
    TreeCase(4, 66, 5, "any", is_probabilities=True, seed=2),
    TreeCase(40, 6, 9, "sampled", seed=7),  # many small trees: second siblings come to be judged
    TreeCase(40, 6, 9, "any", replacement=True),
    TreeCase(6, 30, 259, "sampled", seed=1),
    TreeCase(4, 30, 259, "sampled first", BF16, "padded", "all", seed=2),
    TreeCase(4, 30, 259, "fixed first", F16, "odd", seed=3),
    TreeCase(4, 30, 259, "fixed", layout="columns", filters="all"),
    TreeCase(4, 30, 259, "any", BF16, "transposed", "all", is_shared=True, seed=1),
    TreeCase(4, 30, 259, "any", replacement=True, is_shared=True, ids=I32, seed=6),
    TreeCase(4, 30, 259, "sampled first", draft_vocab=200, replacement=True, seed=1),
    TreeCase(4, 30, 200, "any", draft_vocab=259, seed=3),
    TreeCase(4, 30, 259, "sampled first", draft_vocab=100, is_mapped=True, filters="all"),
    TreeCase(4, 30, 7, "any", draft_vocab=5, is_mapped=True, replacement=True, layout="odd"),
    TreeCase(3, 63, 259, "sampled", layout="odd", seed=3),
    TreeCase(1, 66, 259, "fixed first", is_probabilities=True, seed=1),
    TreeCase(1, 260, 259, "sampled", seed=1),
    TreeCase(1, 260, 5, "any", ids=I32, replacement=True),
]
LARGE_CASES = [
    TreeCase(3, 13, 32000, "sampled", BF16, seed=1),
    TreeCase(1, 13, 32000, "sampled first", layout="odd", filters="all"),
    TreeCase(1, 5, 128256, "sampled", seed=3),
]
SLOW_CASES = [
    TreeCase(3, 260, 259, "any", seed=seed, replacement=seed % 2 == 0) for seed in range(4)
] + [
    TreeCase(3, 66, 259, kind, BF16, filters="all", seed=seed)
    for seed, kind in enumerate(("sampled", "sampled first", "fixed first", "fixed"))
]

step_of = cache(make_tree_step)


def smaller(name: str, case: TreeCase) -> TreeCase:
    """Return a case that a layer judges in about a second."""
    return case._replace(batch=fewer(name, case.batch, 3), nodes=fewer(name, case.nodes, 13))


@every_layer
@both_rules
@pytest.mark.parametrize("case", CASES, ids=str)
def test_decisions_equal_the_oracles(name: str, rule: str, case: TreeCase) -> None:
    step = step_of(smaller(name, case))
    assert assert_tree_accepts(step.accept(layer(name), rule), step, rule) <= 1


@pytest.mark.parametrize("name", ["eager", *LAYERS[2:]])
@both_rules
@pytest.mark.parametrize("case", LARGE_CASES, ids=str)
def test_decisions_over_large_vocabularies(name: str, rule: str, case: TreeCase) -> None:
    step = step_of(case)
    assert assert_tree_accepts(step.accept(layer(name), rule), step, rule) <= 1


@pytest.mark.slow
@every_layer
@both_rules
@pytest.mark.parametrize("case", CASES[-4:] + LARGE_CASES + SLOW_CASES, ids=str)
def test_decisions_about_large_trees(name: str, rule: str, case: TreeCase) -> None:
    step = step_of(case)
    assert assert_tree_accepts(step.accept(layer(name), rule), step, rule) <= 1


@every_layer
@both_rules
@pytest.mark.parametrize("coin", [0.0, LAST_COIN])
def test_coins_at_their_ends(name: str, rule: str, coin: float) -> None:
    for kind in ("any", "sampled first"):
        step = step_of(smaller(name, TreeCase(6, 30, 259, kind, seed=3)))
        moved = step._replace(
            accept_coins=torch.full_like(step.accept_coins, coin),
            final_coins=torch.full_like(step.final_coins, LAST_COIN - coin),
        )
        assert_tree_accepts(moved.accept(layer(name), rule), moved, rule)


@every_layer
@both_rules
@pytest.mark.parametrize("replacement", [False, True])
def test_a_chain_given_as_parents_has_the_same_result(
    name: str, rule: str, replacement: bool
) -> None:
    """Bit for bit, whatever closes the chain."""
    batch = fewer(name, 17, 6)
    parents = torch.arange(-1, 4, dtype=I32).expand(batch, 5)
    cases = [
        Case(batch, 4, 7, filters="none", drafts="sampled"),
        Case(batch, 4, 257, BF16),
        Case(batch, 4, 200, draft_vocab=257, filters="none"),
        Case(batch, 4, 257, draft_vocab=100, is_mapped=True),
        Case(batch, 4, 7, is_probabilities=True, drafts="fixed"),
    ]
    for seed, case in enumerate(cases[: fewer(name, 5, 2)]):
        step = make_step(case)
        if case.drafts != "fixed":
            step = spoil(step, seed)
        tree = step.draft._replace(parents=parents)
        for depth in (4, 5)[: fewer(name, 2, 1)]:
            given = step._replace(max_depth=depth, replacement=replacement)
            expected = given.accept(layer(name), rule)
            assert_equal(given.accept(layer(name), rule, draft=tree), expected)


def spoil(step: Step, seed: int) -> Step:
    """Return a step with faults of every kind at a fifth of the nodes: ids that do not exist,
    padding, rows that do not exist, are invalid or are not the siblings', and another id."""
    generator = torch.Generator().manual_seed(seed)
    tokens, row, target_row = step.draft.tokens, step.draft.row, step.target_row
    assert row is not None
    rows = int(row.max()) + 1

    def spoilt(values: Tensor, choices: list[int]) -> Tensor:
        place = torch.randint(len(choices), values.shape, generator=generator)
        is_hit = torch.rand(values.shape, generator=generator) < 0.1
        return torch.where(is_hit, torch.tensor(choices, dtype=values.dtype)[place], values)

    wide = 10**5 + step.target_logits.shape[1]
    return step._replace(
        draft=step.draft._replace(
            tokens=spoilt(tokens, [-7, PAD_TOKEN, wide, 2**31 - 1, 0, 1]),
            row=spoilt(row, [-2, 10**6, 0, 1, rows - 1, rows, rows + 1, -1]),
        ),
        target_row=spoilt(target_row, [-1, 10**6, 0, 1, 2]),
    )


@every_layer
@both_rules
@pytest.mark.parametrize("replacement", [False, True])
def test_faults_are_judged_as_the_oracle_does(name: str, rule: str, replacement: bool) -> None:
    seen = 0
    for seed in range(fewer(name, 4, 2)):
        nodes, vocab = (30, 5) if seed % 2 else (13, 40)
        case = TreeCase(7, nodes, vocab, "any", replacement=replacement, seed=seed)
        step = spoil(step_of(smaller(name, case)), seed)
        result = step.accept(layer(name), rule)
        assert_tree_accepts(result, step, rule)
        for status in result.status.tolist():
            seen |= status
    if name == "eager":  # with replacement a drawn id never leaves q
        assert seen == INVALID_TARGET | INVALID_DRAFT | (OK if replacement else ZERO_Q)


MALFORMED = {
    "second root": [-1, 0, -1, 0, 2],
    "parent behind its child": [-1, 0, 3, 0, 2],
    "own parent": [-1, 0, 2, 0, 2],
    "cycle": [-1, 2, 1, 0, 2],
    "outside": [-1, 0, 5, 0, 0],
    "far outside": [-1, 0, 2**31 - 1, 0, 0],
    "negative": [-1, 0, -(2**31), 0, 0],
    "root with a parent": [0, 0, 0, 0, 0],
    "root outside": [-2, 0, 0, 0, 0],
    "root far outside": [2**31 - 1, 0, 0, 0, 0],
    "too deep": [-1, 0, 1, 2, 3],
}


@every_layer
@both_rules
def test_a_malformed_tree_is_its_root(name: str, rule: str) -> None:
    """Every kind of fault, and behind them a tree that is fine."""
    count, ops = len(MALFORMED), layer(name)
    step = step_of(TreeCase(count + 1, 5, 12, seed=3))._replace(max_depth=3)
    fine = torch.tensor([-1, 0, 0, 1, 3])
    parents = torch.stack([*map(torch.tensor, MALFORMED.values()), fine]).int()

    def judged(parents: Tensor, num_nodes: int) -> Acceptance:
        counts = torch.full((count + 1,), num_nodes, dtype=I32)
        draft = step.draft._replace(parents=parents, num_nodes=counts)
        result = step.accept(ops, rule, draft=draft)
        assert_equal(result, step.accept(reference, rule, draft=draft))
        return result

    result = judged(parents, 5)
    assert result.status.tolist() == [BAD_TREE] * count + [OK]
    assert result.path[:count].tolist() == [[0, -1, -1, -1]] * count
    # Nobody looks at parents behind `num_nodes`.
    alone = judged(torch.cat((parents[-1:, :1].expand(count + 1, 1), parents[:, 1:]), 1), 1)
    assert alone.status.tolist() == [OK] * (count + 1)
    assert torch.equal(result.output_tokens[:count], alone.output_tokens[:count])
    absent = judged(parents, 0)
    assert absent.status.tolist() == [OK] * (count + 1)
    assert bool((absent.path == -1).all())


@every_layer
@both_rules
def test_a_malformed_tree_over_an_invalid_row(name: str, rule: str) -> None:
    step = step_of(TreeCase(1, 5, 40, seed=3))
    draft = step.draft._replace(parents=torch.tensor([[-1, 0, 3, 0, 0]], dtype=I32))
    rows = torch.full_like(step.target_row, -1)
    result = step.accept(layer(name), rule, draft=draft, target_row=rows)
    assert result.status.tolist() == [BAD_TREE | INVALID_TARGET]
    assert bool((result.output_tokens == PAD_TOKEN).all())


def pick(step: Step, order: Tensor) -> Step:
    """Return the requests of a step in another order, or some of them."""
    draft = step.draft
    assert draft.parents is not None
    assert draft.row is not None
    draft = draft._replace(
        tokens=draft.tokens[order],
        num_nodes=draft.num_nodes[order],
        parents=draft.parents[order],
        row=draft.row[order],
    )
    return step._replace(
        draft=draft,
        target_row=step.target_row[order],
        accept_coins=step.accept_coins[order],
        final_coins=step.final_coins[order],
    )


@every_layer
@both_rules
@pytest.mark.parametrize("kind", ["sampled", "any"])
def test_a_request_does_not_depend_on_its_neighbours(name: str, rule: str, kind: str) -> None:
    """Bit-equal in any order, alone, beside invalid rows, and whatever the budget of nodes."""
    case = smaller(name, TreeCase(6, 30, 517, kind, seed=3))
    step, batch = step_of(case), case.batch
    ops, order = layer(name), torch.randperm(batch)
    expected = step.accept(ops, rule)
    assert_equal(pick(step, order).accept(ops, rule), Acceptance(*(x[order] for x in expected)))
    for b in (0, batch - 1):
        alone = pick(step, torch.tensor([b]))
        assert_equal(alone.accept(ops, rule), Acceptance(*(x[b : b + 1] for x in expected)))

    spoilt = step.target_logits.clone()
    spoilt[step.target_row[0].long()] = math.nan
    law = ops.row_law(spoilt, step.params, step.row_request)
    clean = step.accept(ops, rule, target_law=step.params)
    for given in (law, step.params):
        faulty = step.accept(ops, rule, target_logits=spoilt, target_law=given)
        assert int(faulty.status[0]) & INVALID_TARGET
        rest = slice(1, None)
        assert_equal(Acceptance(*(x[rest] for x in faulty)), Acceptance(*(x[rest] for x in clean)))

    wide = widen(step, 5).accept(ops, rule)
    columns = step.max_depth + 1
    assert_equal(
        wide._replace(output_tokens=wide.output_tokens[:, :columns], path=wide.path[:, :columns]),
        expected,
    )
    assert bool((wide.output_tokens[:, columns:] == PAD_TOKEN).all())
    assert bool((wide.path[:, columns:] == -1).all())


def widen(step: Step, columns: int) -> Step:
    """Return the same requests in a wider padding that holds rubbish, and a deeper result."""

    def padded(tensor: Tensor | None, value: float) -> Tensor:
        assert tensor is not None
        return torch.nn.functional.pad(tensor, (0, columns), value=value)

    return step._replace(
        draft=step.draft._replace(
            tokens=padded(step.draft.tokens, 2),
            row=padded(step.draft.row, 10**6),
            parents=padded(step.draft.parents, 0),
        ),
        target_row=padded(step.target_row, -(10**6)),
        accept_coins=padded(step.accept_coins, math.nan),
        max_depth=step.max_depth + 3,
    )


@every_layer
@both_rules
def test_parameters_give_what_their_laws_give(name: str, rule: str) -> None:
    batch, nodes = fewer(name, 6, 1), fewer(name, 30, 5)
    step = step_of(TreeCase(batch, nodes, 259, "sampled first", BF16, "odd", "all", seed=5))
    ops = layer(name)
    law = ops.row_law(step.target_logits, step.params, step.row_request)
    assert_equal(
        step.accept(ops, rule, target_law=step.params), step.accept(ops, rule, target_law=law)
    )


@every_layer
@both_rules
def test_strided_arguments_are_read_in_place(name: str, rule: str) -> None:
    step = step_of(smaller(name, TreeCase(4, 30, 259, "any", ids=I32, seed=4)))
    draft = step.draft
    assert draft.row is not None
    assert draft.parents is not None
    strided = step._replace(
        draft=draft._replace(
            tokens=spread_columns(draft.tokens),
            num_nodes=spread_columns(draft.num_nodes[None])[0],
            row=spread_columns(draft.row),
            parents=spread_columns(draft.parents),
        ),
        target_row=spread_columns(step.target_row),
        accept_coins=spread_columns(step.accept_coins),
        final_coins=spread_columns(step.final_coins[None])[0],
    )
    ops = layer(name)
    assert_equal(strided.accept(ops, rule), step.accept(ops, rule))


P = torch.tensor([[0.5, 0.25, 0.25, 0.0], [0.25, 0.5, 0.0, 0.25], [0.25, 0.25, 0.25, 0.25]])
Q = torch.tensor([[0.25, 0.25, 0.25, 0.25], [0.5, 0.0, 0.5, 0.0]])


def verdict(
    name: str,
    rule: str,
    tokens: list[int],
    parents: list[int],
    rows: list[int],
    coins: list[float],
    final: float = 0.0,
    replacement: bool = False,
) -> tuple[list[int], list[int], int]:
    """Judge one tree by a layer and by the oracle, which must agree; node i + 1 has token i."""
    nodes = len(tokens) + 1
    draft = Draft(
        torch.tensor([[0, *tokens]]),
        torch.tensor([nodes], dtype=I32),
        torch.tensor([[-1, *parents]], dtype=I32),
        Q,
        None,
        torch.tensor([[-1, *rows]], dtype=I32),
    )
    arguments: tuple[Any, ...] = (
        draft,
        P,
        None,
        (torch.arange(nodes, dtype=I32) % 3)[None],
        torch.tensor([[0.5, *coins]], dtype=torch.float64),
        torch.tensor([final], dtype=torch.float64),
    )
    result, expected = (
        ops.accept(*arguments, rule=rule, replacement=replacement, max_depth=2)
        for ops in (layer(name), reference)
    )
    assert_equal(result, expected)
    length = int(result.accepted_lens)
    emitted, path = result.output_tokens[0, : length + 1], result.path[0, : length + 1]
    return emitted.tolist(), path.tolist(), int(result.status)


@every_layer
@both_rules
def test_siblings_by_hand(name: str, rule: str) -> None:
    """Worked out on paper: p = (1/2, 1/4, 1/4, 0) at the root, q = 1/4 everywhere."""
    last = LAST_COIN
    # Rejected 3 leaves r = (p - q)+ = (1/4, 0, 0, 0), Z = 1/4, and q without 3 has the mass 3/4.
    # The sibling 0 has D = 1/3 and enters with min(1, (1/4) / (1/4 * 1/3)) = 1.
    assert verdict(name, rule, [3, 0], [0, 0], [0, 0], [0.0, last], 0.9) == ([0, 3], [0, 2], OK)
    # 1 is accepted at first, never behind 3.
    assert verdict(name, rule, [1, 3], [0, 0], [0, 0], [last, 0.0]) == ([1, 0], [0, 1], OK)
    assert verdict(name, rule, [3, 1], [0, 0], [0, 0], [0.0, 0.0]) == ([0], [0], OK)
    # Fixed children: 0 by its 1/2, then 1 by 1/4 of the half that is left.
    fixed = ([0, 1], [0, 0], [-1, -1])
    for coins, path in (([0.49, 0.0], [0, 1]), ([0.51, 0.49], [0, 2]), ([0.51, 0.51], [0])):
        emitted = verdict(name, rule, *fixed, coins)
        assert emitted[1:] == (path, OK)
    assert verdict(name, rule, *fixed, [0.51, 0.51])[0] == [2]
    # Twice the same: what was rejected stays rejected.
    assert verdict(name, rule, [0, 0], [0, 0], [-1, -1], [0.51, 0.0])[1:] == ([0], OK)
    # The fixed 0 is out of q: 1 has D = 1/3 and enters with (1/4) / (1/3).
    mixed = ([1, 0], [0, 0], [0, -1])
    assert verdict(name, rule, *mixed, [0.74, last])[1] == [0, 1]
    assert verdict(name, rule, *mixed, [0.76, last])[1] == [0, 2]


@every_layer
@both_rules
def test_statuses_by_hand(name: str, rule: str) -> None:
    """A flag is set if and only if the walk ends at the fault."""
    zero, last = [0.0] * 4, [LAST_COIN] * 4
    # 1 is impossible under q = (1/2, 0, 1/2, 0): rejected, flagged if its sibling is too.
    assert verdict(name, rule, [1, 3], [0, 0], [1, 1], zero)[1:] == ([0], ZERO_Q)
    assert verdict(name, rule, [1, 2], [0, 0], [1, 1], zero)[1:] == ([0], ZERO_Q)
    # Drawn twice without replacement; with it, a duplicate is an ordinary rejection.
    assert verdict(name, rule, [3, 3], [0, 0], [0, 0], zero)[1:] == ([0], ZERO_Q)
    assert verdict(name, rule, [3, 3], [0, 0], [0, 0], zero, replacement=True)[1:] == ([0], OK)
    # Of another law than the first sampled sibling, out of range, or no row: never proposed.
    for tokens, rows in (([3, 0], [0, 1]), ([3, 4], [0, 0]), ([3, -2], [0, -1]), ([3, 0], [0, 2])):
        out = verdict(name, rule, [*tokens, 0], [0, 0, 2], [*rows, -1], zero)
        assert out == ([0], [0], INVALID_DRAFT)
        assert verdict(name, rule, [*tokens, 0], [0, 0, 0], [*rows, 0], zero)[1:] == ([0, 3], OK)
    # Padding is silent.
    assert verdict(name, rule, [PAD_TOKEN, 3], [0, 0], [5, 0], zero)[1:] == ([0], OK)
    assert verdict(name, rule, [PAD_TOKEN, 0], [0, 0], [0, 0], last)[1:] == ([0, 2], OK)
