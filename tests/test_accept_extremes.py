"""Contract of `accept` where float32 alone would overflow, vanish or round too much."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from spec_kernels import reference
from spec_kernels.types import (
    INVALID_DRAFT,
    OK,
    PAD_TOKEN,
    Draft,
    Law,
    SamplingParams,
)
from tests.cases import assert_equal, float32_law
from tests.layers import LAYERS, layer

every_layer = pytest.mark.parametrize("name", LAYERS)
both_rules = pytest.mark.parametrize("rule", ["token", "block"])


def law_of(logits: Tensor, temperature: float) -> Law:
    owner = torch.zeros(len(logits), dtype=torch.int32)
    return float32_law(reference.row_law(logits, SamplingParams.make(temperature), owner))


def fixed(token: int) -> Draft:
    return Draft(torch.tensor([[0, token]]), torch.tensor([2], dtype=torch.int32))


def judge(
    name: str,
    rule: str,
    draft: Draft,
    logits: Tensor,
    law: Law | SamplingParams,
    coin: float = 0.999999,
    final: float = 0.5,
    target_to_draft: Tensor | None = None,
) -> list[Any]:
    """One draft, judged by rows 0 and 1 of the target; equal to what the oracle says."""
    answers = [
        ops.accept(
            draft,
            logits,
            law,
            torch.tensor([[0, 1]], dtype=torch.int32),
            torch.tensor([[0.0, coin]], dtype=torch.float64),
            torch.tensor([final], dtype=torch.float64),
            rule=rule,
            max_depth=1,
            target_to_draft=target_to_draft,
        )
        for ops in (layer(name), reference)
    ]
    assert_equal(*answers)
    return [field[0].tolist() for field in answers[0]]


@every_layer
@both_rules
@pytest.mark.parametrize("peak", [1e6, 7e8, 3e9, -1e10, 1e12, 1e20, 1e35])
def test_logits_of_any_size(name: str, rule: str, peak: float) -> None:
    """Only the difference to the largest logit counts, and that is exact."""
    logits = (torch.tensor([[0.0, 1.0, 2.0, 0.5]]) * abs(peak) * 1e-6 + peak).repeat(2, 1)
    for law in (SamplingParams.make(1.0), law_of(logits, 1.0)):
        assert judge(name, rule, fixed(1), logits, law)[0] == [2, PAD_TOKEN]
        judge(name, rule, fixed(2), logits, law)


@every_layer
@both_rules
def test_the_largest_float16_logits_at_the_lowest_temperature(name: str, rule: str) -> None:
    logits = torch.tensor([[0.0, 60000.0, 60000.0, 0.5]]).half().repeat(2, 1)
    for temperature in (1.0001e-5, 1.3e-5, 1.7e-5):
        for final, token in ((0.2, 1), (0.8, 2)):
            out = judge(name, rule, fixed(3), logits, SamplingParams.make(temperature), final=final)
            assert out[0] == [token, PAD_TOKEN]


@every_layer
@both_rules
def test_an_improbable_draft_that_its_coin_keeps(name: str, rule: str) -> None:
    """The token behind it follows the plain law, however small the acceptance probability was."""
    logits = torch.tensor([[0.0, -150.0, -75.0], [0.0, 0.1, 0.2]])
    for law in (SamplingParams.make(1.0), law_of(logits, 1.0)):
        for final, token in ((0.1, 0), (0.5, 1), (0.9, 2)):
            assert judge(name, rule, fixed(1), logits, law, coin=0.0, final=final)[0] == [1, token]


@every_layer
@both_rules
@pytest.mark.parametrize("peak", [0.0, 1e6, 3e6])
def test_the_residual_lacks_a_greedy_draft_behind_an_id_map(
    name: str, rule: str, peak: float
) -> None:
    own = torch.tensor([[3.0, 0.0]])
    greedy = Draft(
        torch.tensor([[0, 1]]),
        torch.tensor([2], dtype=torch.int32),
        logits=own,
        law=law_of(own, 0.0),
        row=torch.tensor([[-1, 0]], dtype=torch.int32),
    )
    id_map = torch.tensor([-1, 0, 1, -1], dtype=torch.int32)
    for shift in range(2, 4):
        logits = torch.tensor([[0.0, 5.0, 0.25, 0.5]]).repeat(2, 1) + peak * (1 + shift * 4e-5)
        for final in (0.3, 0.7):
            params = SamplingParams.make(1.0)
            out = judge(name, rule, greedy, logits, params, final=final, target_to_draft=id_map)
            assert out[0][0] != 1


@every_layer
@both_rules
def test_a_row_without_logits_is_a_fault(name: str, rule: str) -> None:
    logits = torch.tensor([[0.0, 5.0, 0.25, 0.5]]).repeat(2, 1)
    for row, status in ((-1, OK), (0, INVALID_DRAFT), (1, INVALID_DRAFT), (-2, INVALID_DRAFT)):
        draft = fixed(1)._replace(row=torch.tensor([[-1, row]], dtype=torch.int32))
        out = judge(name, rule, draft, logits, SamplingParams.make(1.0), coin=0.5)
        assert out[1:] == [int(status == OK), [0, 1] if status == OK else [0, -1], status]
