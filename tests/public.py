"""What the tests of public cases share: coins on a grid, and one call that judges drafts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from spec_kernels import reference
from spec_kernels.types import (
    Acceptance,
    Draft,
    Law,
    SamplingParams,
)
from tests.layers import layer

LAST_COIN = 1.0 - 2.0**-53
RULES = ("token", "block")
POINTS = 16
GRID = [(i + 0.5) / POINTS for i in range(POINTS)]  # coins in the middle of equal intervals


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


LAYERS = [
    "reference",
    "eager",
    pytest.param("triton-interpreter", marks=pytest.mark.slow),
    pytest.param("triton", marks=pytest.mark.gpu),
]


def functions_of(name: str) -> Any:
    """Return the public functions of one layer."""
    return reference if name == "reference" else layer(name)
