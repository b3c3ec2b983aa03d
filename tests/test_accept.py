"""Contract of `accept`: every layer decides as the oracle does, in any layout."""

from __future__ import annotations

import math
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
)
from tests.cases import (
    LAST_COIN,
    Case,
    Step,
    assert_accepts,
    assert_equal,
    lay_out,
    make_step,
    spread_columns,
)
from tests.layers import LAYERS, fewer, layer

every_layer = pytest.mark.parametrize("name", LAYERS)
both_rules = pytest.mark.parametrize("rule", ["token", "block"])

F16, BF16 = torch.float16, torch.bfloat16

# Every value of every axis at least twice, not every combination.
CASES = [
    Case(0, 4, 7),
    Case(1, 0, 7),
    Case(3, 0, 257, BF16, "padded"),
    Case(3, 1, 7, drafts="sampled"),
    Case(17, 4, 7, drafts="sampled", filters="none", ids=torch.int32),
    Case(17, 8, 7, BF16, "odd"),
    Case(3, 4, 257, F16, "columns", ids=torch.int32),
    Case(17, 4, 257, BF16, "transposed", filters="none"),
    Case(17, 1, 257, drafts="fixed"),
    Case(3, 8, 257, layout="odd", drafts="sampled", filters="none"),
    Case(3, 4, 257, draft_vocab=200),
    Case(3, 4, 200, draft_vocab=257, drafts="sampled", filters="none"),
    Case(3, 4, 257, draft_vocab=100, is_mapped=True),
    Case(17, 4, 7, draft_vocab=5, is_mapped=True, filters="none", layout="odd"),
    Case(17, 4, 7, is_probabilities=True, drafts="sampled"),
    Case(3, 4, 257, layout="padded", is_probabilities=True, filters="none"),
    Case(3, 4, 1000, BF16, "odd"),
    Case(3, 4, 1000, F16, drafts="sampled", filters="none"),
    Case(3, 8, 1000, draft_vocab=1100, is_mapped=True, filters="none"),
]
SLOW_CASES = [
    Case(3, 4, 32000, BF16, filters="none", drafts="sampled"),
    Case(1, 4, 32000, layout="odd", drafts="sampled", seed=1),
    Case(1, 1, 128256, filters="none", drafts="sampled"),
    Case(1, 1, 128257, BF16),
]


@every_layer
@both_rules
@pytest.mark.parametrize("case", CASES, ids=str)
def test_decisions_equal_the_oracles(name: str, rule: str, case: Case) -> None:
    case = case._replace(batch=fewer(name, case.batch, 5))
    for seed in range(fewer(name, 2 if case.vocab < 1000 else 1, 1)):
        step = make_step(case._replace(seed=seed))
        assert_accepts(step.accept(layer(name), rule), step, rule)


@every_layer
@both_rules
@pytest.mark.parametrize("case", SLOW_CASES, ids=str)
def test_decisions_over_large_vocabularies(name: str, rule: str, case: Case) -> None:
    step = make_step(case)
    assert_accepts(step.accept(layer(name), rule), step, rule)


@every_layer
@both_rules
@pytest.mark.parametrize("coin", [0.0, LAST_COIN])
def test_coins_at_their_ends(name: str, rule: str, coin: float) -> None:
    step = make_step(Case(fewer(name, 17), 4, 257, filters="none", drafts="sampled", seed=3))
    coins = torch.full_like(step.accept_coins, coin)
    for final in (0.0, LAST_COIN):
        moved = step._replace(
            accept_coins=coins, final_coins=torch.full_like(step.final_coins, final)
        )
        assert_accepts(moved.accept(layer(name), rule), moved, rule)


@every_layer
@both_rules
@pytest.mark.parametrize("filters", ["none", "all"])
def test_parameters_give_what_their_laws_give(name: str, rule: str, filters: str) -> None:
    """The law computed on the way is the one `row_law` returns."""
    step = make_step(Case(fewer(name, 17), 4, 257, BF16, filters=filters))
    ops = layer(name)
    law = ops.row_law(step.target_logits, step.params, step.row_request)
    by_law = step.accept(ops, rule, target_law=law)
    by_parameters = step.accept(ops, rule, target_law=step.params)
    assert_equal(by_parameters, by_law)


@every_layer
@both_rules
def test_requests_and_nodes_may_share_rows(name: str, rule: str) -> None:
    """All nodes of a request, and all requests, are judged by the same rows at other
    temperatures."""
    params = SamplingParams.make([1.0, 0.3, 0.0, 2.0, 1.5])
    for seed in range(fewer(name, 6, 1)):
        step = make_step(Case(5, 3, 257, filters="none", drafts="sampled", seed=seed))
        step = step._replace(target_row=step.target_row[:1, :1].expand(5, 4))
        assert_accepts(step.accept(layer(name), rule), step, rule)
        assert step.draft.row is not None
        same = step._replace(
            draft=step.draft._replace(row=step.draft.row[:1, 1:2].repeat(5, 4)),
            params=params,
            target_law=params,
        )
        assert_accepts(same.accept(layer(name), rule), same, rule)


def pick(step: Step, order: Tensor) -> Step:
    """Return the requests of a step in another order, or some of them."""
    draft = step.draft._replace(
        tokens=step.draft.tokens[order],
        num_nodes=step.draft.num_nodes[order],
        row=None if step.draft.row is None else step.draft.row[order],
    )
    return step._replace(
        draft=draft,
        target_row=step.target_row[order],
        accept_coins=step.accept_coins[order],
        final_coins=step.final_coins[order],
    )


@every_layer
@both_rules
def test_a_request_does_not_depend_on_its_neighbours(name: str, rule: str) -> None:
    """Bit-equal in any order, alone, beside faulty neighbours, and in a wider padding."""
    batch = fewer(name, 9)
    step = make_step(Case(batch, 4, 517, filters="none", seed=2))
    ops, order = layer(name), torch.randperm(batch)
    expected = step.accept(ops, rule)
    assert_equal(pick(step, order).accept(ops, rule), Acceptance(*(x[order] for x in expected)))
    for b in (0, batch - 1):
        alone = pick(step, torch.tensor([b]))
        assert_equal(alone.accept(ops, rule), Acceptance(*(x[b : b + 1] for x in expected)))

    spoilt = step.target_logits.clone()
    spoilt[step.target_row[3].long()] = math.nan
    law = ops.row_law(spoilt, step.params, step.row_request)
    keep = torch.arange(batch) != 3
    clean = step.accept(ops, rule, target_law=step.params)
    for changes in (
        {"target_logits": spoilt, "target_law": law},
        {"target_logits": spoilt, "target_law": step.params},
    ):
        faulty = step.accept(ops, rule, **changes)
        assert int(faulty.status[3]) == INVALID_TARGET
        assert_equal(Acceptance(*(x[keep] for x in faulty)), Acceptance(*(x[keep] for x in clean)))

    def widen(tensor: Tensor, value: float) -> Tensor:
        return torch.nn.functional.pad(tensor, (0, 3), value=value)

    assert step.draft.row is not None
    wide = step._replace(
        draft=step.draft._replace(
            tokens=widen(step.draft.tokens, 5), row=widen(step.draft.row, 10**6)
        ),
        target_row=widen(step.target_row, -(10**6)),
        accept_coins=widen(step.accept_coins, math.nan),
        max_depth=7,
    ).accept(ops, rule)
    assert_equal(
        Acceptance(wide.output_tokens[:, :5], wide.accepted_lens, wide.path[:, :5], wide.status),
        expected,
    )
    assert bool((wide.output_tokens[:, 5:] == PAD_TOKEN).all())
    assert bool((wide.path[:, 5:] == -1).all())


@every_layer
@both_rules
def test_strided_arguments_are_read_in_place(name: str, rule: str) -> None:
    """Ids, rows and coins as slices of wider tensors; one row of logits expanded to many (B099)."""
    step = make_step(Case(5, 4, 257, ids=torch.int32))
    assert step.draft.row is not None

    strided = step._replace(
        draft=step.draft._replace(
            tokens=spread_columns(step.draft.tokens),
            num_nodes=spread_columns(step.draft.num_nodes[None])[0],
            row=spread_columns(step.draft.row),
        ),
        target_row=spread_columns(step.target_row),
        accept_coins=spread_columns(step.accept_coins),
        final_coins=spread_columns(step.final_coins[None])[0],
    )
    assert not strided.draft.num_nodes.is_contiguous()
    ops = layer(name)
    assert_equal(strided.accept(ops, rule), step.accept(ops, rule))

    one = torch.tensor([[0.1, 0.2, 0.3, 0.4]]).expand(6, 4)
    draft = Draft(torch.tensor([[0, 3, 2]]).expand(2, 3), torch.tensor([3, 2], dtype=torch.int32))
    rows = torch.arange(6, dtype=torch.int32).view(2, 3)
    coins = torch.tensor([[0.5, 0.35, 0.29]]).double().expand(2, 3)
    result = ops.accept(draft, one, None, rows, coins, coins[:, 0], rule=rule, max_depth=2)
    emitted = {"token": [[3, 2, 2], [3, 2, -1]], "block": [[2, -1, -1], [3, 2, -1]]}
    assert result.output_tokens.tolist() == emitted[rule]


P = torch.tensor([[0.5, 0.25, 0.25, 0.0], [0.25, 0.5, 0.0, 0.25], [0.25, 0.25, 0.25, 0.25]])
Q = torch.tensor([[0.25, 0.25, 0.25, 0.25], [0.25, 0.25, 0.25, 0.25], [1.0, 0.0, 0.0, 0.0]])


def judge(
    name: str,
    rule: str,
    tokens: list[int],
    *,
    coins: list[float] | None = None,
    final: float = 0.0,
    p: Tensor = P,
    q: Tensor | None = Q,
    law: Law | SamplingParams | None = None,
    q_law: Law | None = None,
    rows: list[int] | None = None,
    q_rows: list[int] | None = None,
    num_nodes: int | None = None,
    max_depth: int | None = None,
) -> tuple[list[int], int, list[int], int]:
    """Judge one request of a layer and of the oracle, which must agree; node i + 1 was drawn from
    row i of q. Coins of 0 accept whatever can be accepted."""
    nodes = len(tokens) + 1
    draft = Draft(
        torch.tensor([[0, *tokens]]),
        torch.tensor([nodes if num_nodes is None else num_nodes], dtype=torch.int32),
        None,
        q,
        q_law,
        torch.tensor([q_rows or [-1, *range(nodes - 1)]], dtype=torch.int32),
    )
    arguments: tuple[Any, ...] = (
        draft,
        p,
        law,
        torch.tensor([rows or list(range(nodes))], dtype=torch.int32),
        torch.tensor([[0.5, *(coins or [0.0] * (nodes - 1))]], dtype=torch.float64),
        torch.tensor([final], dtype=torch.float64),
    )
    depth = nodes - 1 if max_depth is None else max_depth
    result, expected = (
        ops.accept(*arguments, rule=rule, max_depth=depth) for ops in (layer(name), reference)
    )
    assert_equal(result, expected)
    tokens_out, lens, path, status = (x[0].tolist() for x in result)
    return tokens_out, lens, path, status


@every_layer
@both_rules
def test_faults_close_the_chain(name: str, rule: str) -> None:
    """Each fault is reported if and only if the walk ends there; what lies behind is unread."""
    nan_row = torch.full((1, 4), math.nan)
    logits = torch.cat((P.log(), nan_row, P.log()[:1]))
    owner = torch.zeros(5, dtype=torch.int32)
    law = reference.row_law(logits, SamplingParams.make(1.0), owner)
    q_law = reference.row_law(torch.cat((Q.log(), nan_row)), SamplingParams.make(1.0), owner[:4])
    given: dict[str, Any] = {
        "p": logits,
        "law": Law(*(f.float() if f.is_floating_point() else f for f in law)),
        "q": torch.cat((Q.log(), nan_row)),
        "q_law": Law(*(f.float() if f.is_floating_point() else f for f in q_law)),
    }
    chain = [0, 1]
    assert judge(name, rule, chain, **given) == ([0, 1, 0], 2, [0, 1, 2], OK)
    # The row after the last draft is invalid.
    for row in (3, -1, 5, 10**6):
        assert judge(name, rule, chain, rows=[0, 1, row], **given) == (
            [0, 1, PAD_TOKEN],
            2,
            [0, 1, 2],
            INVALID_TARGET,
        )
        # A row in between closes the chain before the draft that it would judge.
        assert judge(name, rule, chain, rows=[0, row, 2], **given)[0] == [0, PAD_TOKEN, PAD_TOKEN]
        # A rejection before it hides the fault.
        hidden = judge(name, rule, [3, 1], rows=[0, row, 2], **given)
        assert hidden[1:] == (0, [0, -1, -1], OK)
    # A draft that cannot be used: the final token comes from the plain target law.
    for changes in (
        {"tokens": [0, 4]},
        {"tokens": [0, -2]},
        {"tokens": [0, -100]},
        {"tokens": [0, 2**31 - 1]},
        {"tokens": chain, "q_rows": [-1, 0, 3]},
        {"tokens": chain, "q_rows": [-1, 0, 4]},
        {"tokens": chain, "q_rows": [-1, 0, -2]},
    ):
        for final, token in ((0.0, 0), (0.3, 1), (LAST_COIN, 3)):
            out = judge(name, rule, final=final, **changes, **given)
            assert out == ([0, token, PAD_TOKEN], 1, [0, 1, -1], INVALID_DRAFT)
    both = judge(name, rule, [0, 4], rows=[0, 3, 2], **given)
    assert both == ([0, PAD_TOKEN, PAD_TOKEN], 1, [0, 1, -1], INVALID_TARGET | INVALID_DRAFT)
    # Padding and the depth limit close it silently; faults behind are not reached.
    assert judge(name, rule, [0, PAD_TOKEN], **given)[1:] == (1, [0, 1, -1], OK)
    assert judge(name, rule, [0, 4], max_depth=1, **given) == ([0, 0], 1, [0, 1], OK)
    assert judge(name, rule, [0, 4], num_nodes=2, **given)[1:] == (1, [0, 1, -1], OK)


@every_layer
@both_rules
def test_absent_clamped_and_deep_requests(name: str, rule: str) -> None:
    for num_nodes in (0, -1, -(2**31)):
        absent = judge(name, rule, [0, 1], num_nodes=num_nodes)
        assert absent == ([PAD_TOKEN] * 3, 0, [-1] * 3, OK)
    assert judge(name, rule, [0, 1], num_nodes=100) == ([0, 1, 0], 2, [0, 1, 2], OK)
    assert judge(name, rule, [0, 1], max_depth=4) == ([0, 1, 0, -1, -1], 2, [0, 1, 2, -1, -1], OK)
    assert judge(name, rule, [0, 1], max_depth=0) == ([0], 0, [0], OK)


@every_layer
@both_rules
def test_a_draft_of_probability_zero_is_rejected_with_a_flag(name: str, rule: str) -> None:
    q = torch.tensor([[0.0, 0.5, 0.5, 0.0]])
    out = judge(name, rule, [0], q=q)
    assert out == ([0, PAD_TOKEN], 0, [0, -1], ZERO_Q)
    # An id that only the wider draft knows: an ordinary rejection.
    wide = torch.tensor([[0.0, 0.5, 0.25, 0.0, 0.25]])
    assert judge(name, rule, [4], q=wide) == ([0, PAD_TOKEN], 0, [0, -1], OK)
    assert judge(name, rule, [5], q=wide)[3] == INVALID_DRAFT


@every_layer
@both_rules
def test_equal_laws_accept_everything(name: str, rule: str) -> None:
    for coin in (0.0, 0.5, LAST_COIN):
        out = judge(name, rule, [0, 1], q=P[:2].contiguous(), coins=[coin, coin], final=coin)
        assert out[1] == 2


@every_layer
@both_rules
def test_a_vanished_residual_falls_back_to_the_target(name: str, rule: str) -> None:
    """p <= q everywhere, or p one-hot at a fixed draft: never an id with p = 0, and the rejected
    id only if nothing else has p > 0."""
    p = torch.tensor([[0.25, 0.5, 0.25, 0.0]] * 2)
    above = torch.tensor([[0.3, 0.6, 0.3, 0.1]])
    for final, token in ((0.0, 0), (0.49, 0), (0.51, 2), (LAST_COIN, 2)):
        out = judge(name, rule, [1], p=p, q=above, coins=[LAST_COIN], final=final)
        assert out[:2] == ([token, PAD_TOKEN], 0)
    one_hot = torch.tensor([[0.0, 1.0, 0.0, 0.0]] * 2)
    out = judge(name, rule, [1], p=one_hot, q=above * 2.0, coins=[LAST_COIN], final=0.5)
    assert out[:2] == ([1, PAD_TOKEN], 0)


@every_layer
@both_rules
def test_nan_probabilities_are_never_accepted(name: str, rule: str) -> None:
    """Public case B077."""
    p = torch.full((3, 4), math.nan)
    for q in (None, Q):
        out = judge(name, rule, [0, 0], p=p, q=q, q_rows=[-1] * 3 if q is None else None)
        assert out == ([PAD_TOKEN] * 3, 0, [0, -1, -1], INVALID_TARGET)


@every_layer
@pytest.mark.parametrize("temperature", [0.0, 1e-12, 1e-40])
@both_rules
def test_greedy_rows_accept_their_first_argmax(name: str, rule: str, temperature: float) -> None:
    logits = torch.tensor([[1.0, 9.0, 9.0, 3.0]]).repeat(3, 1)
    params = SamplingParams.make(temperature)
    q = Q.clone()
    for tokens, emitted in (([1, 1], [1, 1, 1]), ([1, 2], [1, 1, -1]), ([2, 1], [1, -1, -1])):
        for coin in (0.0, LAST_COIN):
            out = judge(
                name,
                rule,
                tokens,
                p=logits,
                q=q.fill_(0.25),
                law=params,
                final=coin,
                coins=[coin, coin],
            )
            assert out[0] == emitted
            assert out[3] == OK


@every_layer
def test_unknown_rules_are_refused(name: str) -> None:
    step = make_step(Case(1, 1, 7))
    with pytest.raises(ValueError, match="rule"):
        step.accept(layer(name), "typical")


def test_layouts_hold_the_same_values() -> None:
    """The maker of layouts itself: equal values, other strides."""
    values = torch.randn(3, 7)
    strides = {layout: lay_out(values, layout).stride() for layout in ("padded", "odd", "columns")}
    assert strides == {"padded": (64, 1), "odd": (9, 1), "columns": (21, 3)}
    for layout in ("packed", "padded", "odd", "columns", "transposed"):
        assert torch.equal(lay_out(values, layout), values)
