"""Acceptance by the reference: examples by hand, faults, mixed batches, and `match`."""

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

RULES = ("token", "block")


def run(
    target: Tensor,
    tokens: list[list[int]],
    *,
    law: Law | SamplingParams | None = None,
    num_nodes: list[int] | None = None,
    draft: Tensor | None = None,
    draft_law: Law | None = None,
    row: list[list[int]] | None = None,
    target_row: list[list[int]] | None = None,
    u: float | list[list[float]] = 0.5,
    z: float = 0.5,
    rule: str = "block",
    max_depth: int | None = None,
) -> Acceptance:
    """Judge drafts; by default node i of every request is followed by target row i."""
    batch, nodes = len(tokens), len(tokens[0])
    coins = torch.full((batch, nodes), 0.5, dtype=torch.float64)
    coins[:, 1:] = torch.tensor(u, dtype=torch.float64)
    return reference.accept(
        Draft(
            torch.tensor(tokens),
            torch.tensor(num_nodes or [nodes] * batch, dtype=torch.int32),
            logits=draft,
            law=draft_law,
            row=None if row is None else torch.tensor(row, dtype=torch.int32),
        ),
        target,
        law,
        torch.tensor(target_row or [list(range(nodes))] * batch, dtype=torch.int32),
        coins,
        torch.full((batch,), z, dtype=torch.float64),
        rule=rule,
        max_depth=nodes - 1 if max_depth is None else max_depth,
    )


def test_block_rule_with_numbers() -> None:
    # a_1 = 0.3 / 0.6 = 0.5; Z_1 = 0.5 * 1 - 0.2 = 0.3; h_1 = 0.3 / (0.3 + 0.5) = 0.375; a_2 = 0.
    p, q = (
        torch.tensor([[0.3, 0.7], [1.0, 0.0], [0.5, 0.5]]),
        torch.tensor([[0.6, 0.4], [0.2, 0.8]]),
    )
    arguments: dict[str, Any] = {"draft": q, "row": [[-1, 0, 1]]}
    kept = run(p, [[0, 0, 1]], u=[[0.374, 0.0]], **arguments)
    assert kept.output_tokens.tolist() == [[0, 0, -1]]
    left = run(p, [[0, 0, 1]], u=[[0.376, 0.0]], **arguments)
    assert left.output_tokens.tolist() == [[1, -1, -1]]


@pytest.mark.parametrize("rule", RULES)
def test_length_of_the_chain(rule: str) -> None:
    """Absent requests, no drafts, too large num_nodes, padding inside, and the depth limit."""
    p = torch.eye(4)  # node i is followed by token i
    tokens = [[9, 0, 1, 2]] * 6
    tokens[4] = [9, 0, PAD_TOKEN, 2]
    out = run(p, tokens, num_nodes=[0, -5, 1, 9, 4, 3], rule=rule)
    assert out.accepted_lens.tolist() == [0, 0, 0, 3, 1, 2]
    assert out.output_tokens.tolist() == [
        [-1, -1, -1, -1],
        [-1, -1, -1, -1],
        [0, -1, -1, -1],
        [0, 1, 2, 3],
        [0, 1, -1, -1],
        [0, 1, 2, -1],
    ]
    assert out.path[:, 0].tolist() == [-1, -1, 0, 0, 0, 0]
    assert out.status.tolist() == [OK] * 6
    out = run(p, tokens[3:4], rule=rule, max_depth=1)
    assert out.output_tokens.tolist() == [[0, 1]]
    out = run(p, tokens[3:4], rule=rule, num_nodes=[9], max_depth=6)
    assert out.output_tokens.tolist() == [[0, 1, 2, 3, -1, -1, -1]]


FAULTS = [
    # what is wrong, tokens, rows of the draft, rows of the target, emitted, status
    ("token-too-large", [9, 0, 4], None, [0, 1, 2], [0, 1], INVALID_DRAFT),
    ("token-negative", [9, 0, -7], None, [0, 1, 2], [0, 1], INVALID_DRAFT),
    ("draft-row", [9, 0, 1], [-1, -1, 2], [0, 1, 2], [0, 1], INVALID_DRAFT),
    ("draft-row-negative", [9, 0, 1], [-1, -1, -2], [0, 1, 2], [0, 1], INVALID_DRAFT),
    ("draft-law", [9, 0, 1], [-1, -1, 1], [0, 1, 2], [0, 1], INVALID_DRAFT),
    ("target-row", [9, 0, 1], None, [0, 4, 2], [0, -1], INVALID_TARGET),
    ("target-row-negative", [9, 0, 1], None, [0, -1, 2], [0, -1], INVALID_TARGET),
    ("bonus-row", [9, 0, 1], None, [0, 1, 4], [0, 1, -1], INVALID_TARGET),
    ("both", [9, 0, 4], None, [0, 4, 2], [0, -1], INVALID_TARGET | INVALID_DRAFT),
    ("behind-rejection", [9, 3, 4], None, [0, 4, 2], [0], OK),
    ("behind-padding", [9, PAD_TOKEN, 4], None, [0, 4, 2], [0], OK),
]


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault[0])
def test_faults_close_the_chain_where_they_are(fault: tuple[Any, ...], rule: str) -> None:
    _, tokens, row, target_row, emitted, status = fault
    logits = 90.0 * torch.eye(4)
    draft = torch.tensor([[1.0, 1.0, 1.0, 1.0], [math.nan, 1.0, 1.0, 1.0]])
    params = SamplingParams.make(1.0)
    out = run(
        logits,
        [tokens],
        law=params,
        draft=draft,
        draft_law=reference.row_law(draft, params, torch.tensor([0, 0])),
        row=None if row is None else [row],
        target_row=[target_row],
        rule=rule,
    )
    assert out.output_tokens[0, : len(emitted)].tolist() == emitted
    assert out.accepted_lens.tolist() == [len(emitted) - 1]
    assert out.status.tolist() == [status]


@pytest.mark.parametrize("rule", RULES)
def test_faults_at_the_depth_limit_are_not_reached(rule: str) -> None:
    out = run(torch.eye(4), [[9, 0, 4]], rule=rule, max_depth=1)
    assert (out.output_tokens.tolist(), out.status.tolist()) == ([[0, 1]], [OK])


@pytest.mark.parametrize("rule", RULES)
def test_a_draft_that_its_law_excludes_is_rejected(rule: str) -> None:
    p, q = torch.tensor([[0.5, 0.5]] * 3), torch.tensor([[0.0, 1.0]])
    out = run(p, [[9, 0, 1]], draft=q, row=[[-1, 0, 0]], u=0.0, z=0.0, rule=rule)
    assert (out.output_tokens.tolist(), out.status.tolist()) == ([[0, -1, -1]], [ZERO_Q])
    # The one behind it is not the one that ended the walk.
    out = run(p, [[9, 0, 0]], draft=q, row=[[-1, -1, 0]], u=0.9, z=0.0, rule=rule)
    assert (out.output_tokens.tolist(), out.status.tolist()) == ([[1, -1, -1]], [OK])


@pytest.mark.parametrize("rule", RULES)
def test_a_kept_node_with_nothing_to_recover_is_kept_for_sure(rule: str) -> None:
    # a_1 = 1 and Z_1 = 0 since p = q: h_1 = 0 / 0 counts as 1. Node 2 is excluded by its own law.
    p = torch.tensor([[0.5, 0.5, 0.0]] * 3)
    out = run(p, [[9, 0, 2]], draft=p, row=[[-1, 0, 1]], u=0.999, rule=rule)
    assert (out.output_tokens.tolist(), out.status.tolist()) == ([[0, 1, -1]], [ZERO_Q])


@pytest.mark.parametrize("rule", RULES)
def test_a_vanished_residual_falls_back_to_p(rule: str) -> None:
    """Rows whose sum rounding made smaller than 1, exaggerated."""
    p, q = torch.tensor([[0.5, 0.25, 0.0]] * 2), torch.tensor([[0.8, 0.25, 0.0]])
    out = run(p, [[9, 0]], draft=q, row=[[-1, 0]], u=0.9, z=0.2, rule=rule)
    assert out.output_tokens.tolist() == [[1, -1]]  # p without the rejected id
    p = torch.tensor([[0.75, 0.0, 0.0]] * 2)
    out = run(p, [[9, 0]], u=0.9, rule=rule)
    assert out.output_tokens.tolist() == [[0, -1]]  # nothing else is left


@pytest.mark.parametrize("rule", RULES)
def test_nan_probabilities_are_never_accepted(rule: str) -> None:
    p = torch.full((3, 3), math.nan)
    for row in (None, [[-1, 0, 1]]):
        out = run(p, [[9, 0, 1]], draft=torch.full((2, 3), 1 / 3), row=row, u=0.0, rule=rule)
        assert out.accepted_lens.tolist() == [0]
        assert (out.output_tokens[0, 0], out.status[0]) == (PAD_TOKEN, INVALID_TARGET)


@pytest.mark.parametrize("rule", RULES)
def test_mixed_batch_equals_each_request_alone_and_parameters_equal_laws(rule: str) -> None:
    batch, nodes, vocab = 12, 4, 6
    target, draft = torch.randn(batch * nodes, vocab), torch.randn(batch * nodes, vocab)
    params = SamplingParams.make([0.0, 0.7, 1.5] * 4, [0, 3, 0] * 4, [1.0, 1.0, 0.8] * 4)
    owner = torch.arange(batch).repeat_interleave(nodes)
    law, draft_law = (reference.row_law(rows, params, owner) for rows in (target, draft))
    row = torch.arange(batch * nodes).view(batch, nodes).roll(1, 1).int()
    row[torch.rand(batch, nodes) < 0.3] = -1
    whole = Draft(
        torch.randint(vocab, (batch, nodes), dtype=torch.int32),
        torch.randint(nodes + 1, (batch,)).int(),
        logits=draft,
        law=draft_law,
        row=row,
    )
    target_row = torch.arange(batch * nodes).view(batch, nodes).int()
    coins = torch.rand(batch, nodes, dtype=torch.float64) / 2
    options: dict[str, Any] = {"rule": rule, "max_depth": 3}
    out = reference.accept(whole, target, law, target_row, coins, coins[:, 0], **options)
    fused = reference.accept(whole, target, params, target_row, coins, coins[:, 0], **options)
    assert all(torch.equal(*pair) for pair in zip(out, fused, strict=True))
    assert out.accepted_lens.unique().numel() > 2
    for b in range(batch):
        one = slice(b, b + 1)
        alone = whole._replace(
            tokens=whole.tokens[one], num_nodes=whole.num_nodes[one], row=row[one]
        )
        single = reference.accept(
            alone, target, law, target_row[one], coins[one], coins[one, 0], **options
        )
        assert all(torch.equal(x, y[one]) for x, y in zip(single, out, strict=True))


def test_accept_refuses_unknown_rules_and_takes_empty_batches() -> None:
    draft = Draft(torch.zeros(0, 2, dtype=torch.int64), torch.zeros(0, dtype=torch.int32))
    rows, coins = torch.zeros(0, 2, dtype=torch.int32), torch.zeros(0, 2, dtype=torch.float64)
    arguments = torch.zeros(0, 5), None, rows, coins, coins[:, 0]
    out = reference.accept(draft, *arguments, max_depth=1)
    assert [list(field.shape) for field in out] == [[0, 2], [0], [0, 2], [0]]
    with pytest.raises(ValueError, match="rule"):
        reference.accept(draft, *arguments, rule="typical", max_depth=1)


def test_match_with_numbers() -> None:
    tokens = torch.tensor([[9, 1, 2], [9, 1, 2], [9, 1, 2], [9, 1, -3], [9, 1, 2], [9, 1, 2]])
    own = torch.tensor([[1, 2, 3], [1, 5, 6], [4, -1, -1], [1, 7, 8], [1, -1, 6], [1, 2, 3]])
    num_nodes = torch.tensor([3, 3, 3, 3, 3, 0], dtype=torch.int32)
    out = reference.match(Draft(tokens, num_nodes), own, max_depth=2)
    assert out.output_tokens.tolist() == [
        [1, 2, 3],
        [1, 5, -1],
        [4, -1, -1],
        [1, 7, -1],
        [1, -1, -1],
        [-1, -1, -1],
    ]
    assert out.accepted_lens.tolist() == [2, 1, 0, 1, 1, 0]
    assert out.path[:, 1].tolist() == [1, 1, -1, 1, 1, -1]
    assert out.status.tolist() == [OK, OK, OK, INVALID_DRAFT, INVALID_TARGET, OK]
    both = reference.match(
        Draft(tokens[3:4], num_nodes[3:4]), torch.tensor([[1, -3, 8]]), max_depth=2
    )
    assert both.output_tokens.tolist() == [[1, -1, -1]]
    assert both.status.tolist() == [INVALID_TARGET | INVALID_DRAFT]
    shallow = reference.match(Draft(tokens[:1], num_nodes[:1]), own[:1], max_depth=1)
    assert shallow.output_tokens.tolist() == [[1, 2]]
