"""Chi-square of the output law through the whole decoder and its own random numbers.

Each batch is a few thousand requests over a Markov chain that differ in their seed only. What is
judged is the joint law of the first four emitted tokens, so several rounds: faults that hide from
one-round enumeration (coins keyed by the judged position) show here. V = 2 first, where a
simulation of that fault moves the law most: chi-square grows by 0.11 to 0.15 per request.
"""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
import torch
from scipy.stats import chi2
from torch import Tensor

from spec_kernels import ops
from spec_kernels.decoder import Decoder, Request
from spec_kernels.proposers import DraftModelProposer, NgramProposer
from spec_kernels.targets import TableTarget
from spec_kernels.types import Acceptance, Draft, SamplingParams

TOKENS = 4
SIGNIFICANT = 1e-6
TARGET_2 = torch.tensor([[0.66, 0.34], [0.72, 0.28]]).log()
DRAFT_2 = torch.tensor([[0.98, 0.02], [0.92, 0.08]]).log()


def random_table(vocab: int, seed: int, scale: float = 1.0) -> Tensor:
    return scale * torch.randn(vocab, vocab, generator=torch.Generator().manual_seed(seed))


def joint_law(table: Tensor, root: int, temperature: float) -> dict[tuple[int, ...], float]:
    step = (table.double() / temperature).softmax(1)
    law = {}
    for path in itertools.product(range(table.shape[1]), repeat=TOKENS):
        pairs = itertools.pairwise((root, *path))
        law[path] = float(torch.stack([step[a, b] for a, b in pairs]).prod())
    return law


def p_value(outputs: list[tuple[int, ...]], law: dict[tuple[int, ...], float]) -> float:
    """Chi-square; cells that expect fewer than 5 outputs are judged together."""
    counts, total = Counter(outputs), len(outputs)
    assert sum(counts[path] for path in law) == total
    large = [path for path, mass in law.items() if mass * total >= 5]
    observed = [counts[path] for path in large]
    expected = [law[path] * total for path in large]
    observed.append(total - sum(observed))
    expected.append(total - sum(expected))
    cells = [(o, e) for o, e in zip(observed, expected, strict=True) if e > 1e-9]
    return float(chi2.sf(sum((o - e) ** 2 / e for o, e in cells), len(cells) - 1))


def run(decoder: Decoder, count: int, temperature: float = 1.0, **arguments: object) -> float:
    requests = [
        Request([0], max_new_tokens=TOKENS + 2, temperature=temperature, seed=seed, **arguments)
        for seed in range(count)
    ]
    outputs = [generation.tokens[:TOKENS] for generation in decoder.generate(requests)]
    return p_value(outputs, joint_law(decoder.target.table, 0, temperature))


CASES = {
    "block-g2-v2": ("block", 2, TARGET_2, DRAFT_2, 1.0, 1200),
    "block-g4-v2": ("block", 4, TARGET_2, DRAFT_2, 1.0, 1200),
    "block-g4-v3": ("block", 4, random_table(3, 1), random_table(3, 2), 0.8, 1000),
    "token-g2-v3": ("token", 2, random_table(3, 3), random_table(3, 4), 1.0, 1000),
    "token-g4-v4": ("token", 4, random_table(4, 5), random_table(4, 6), 1.3, 1000),
    "coupled-g2-v3": ("coupled", 2, random_table(3, 7), random_table(3, 8), 1.0, 250),
}


@pytest.mark.parametrize("case", CASES)
def test_joint_law_of_four_tokens(case: str) -> None:
    rule, gamma, target, draft, temperature, count = CASES[case]
    proposer = DraftModelProposer(TableTarget(draft))
    decoder = Decoder(TableTarget(target), proposer, gamma=gamma, rule=rule)
    assert run(decoder, count, temperature) > SIGNIFICANT


def test_joint_law_with_drafts_of_another_temperature() -> None:
    proposer = DraftModelProposer(TableTarget(random_table(3, 9)), temperature=0.3)
    decoder = Decoder(TableTarget(random_table(3, 10)), proposer, gamma=2)
    assert run(decoder, 1000) > SIGNIFICANT


def test_joint_law_with_fixed_drafts() -> None:
    decoder = Decoder(TableTarget(random_table(2, 11)), NgramProposer(), gamma=4)
    assert run(decoder, 1000) > SIGNIFICANT


def test_joint_law_of_plain_decoding() -> None:
    assert run(Decoder(TableTarget(random_table(3, 12))), 600) > SIGNIFICANT


class MutantVerifier(torch.nn.Module):
    """The block rule with accept coins from the wrong place."""

    def __init__(self, fault: str) -> None:
        super().__init__()
        self.fault = fault

    def forward(
        self,
        draft: Draft,
        target_logits: Tensor,
        params: SamplingParams,
        seeds: Tensor,
        root_positions: Tensor,
        *,
        target_row: Tensor,
        max_depth: int,
    ) -> Acceptance:
        nodes = draft.tokens.shape[1]
        accept_coins, final_coins = ops.coins(seeds, root_positions, nodes)
        if self.fault == "keyed by the judged position":
            columns = [ops.coins(seeds, root_positions + node, 1)[0] for node in range(nodes)]
            accept_coins = torch.cat(columns, 1)
        if self.fault == "the draft's own stream" and nodes > 1:
            accept_coins[:, 1:] = ops.draft_coins(seeds, root_positions, nodes - 1)[:, :, 0]
        laws = (draft, target_logits, params, target_row)
        return ops.accept(*laws, accept_coins, final_coins, max_depth=max_depth)


FAULTS = {
    "keyed by the judged position": (DRAFT_2, 1000),
    "the draft's own stream": (torch.zeros(2, 2), 400),
}


@pytest.mark.parametrize("gamma", [2, 4])
@pytest.mark.parametrize("fault", FAULTS)
def test_planted_fault_is_caught(fault: str, gamma: int) -> None:
    draft, count = FAULTS[fault]
    decoder = Decoder(TableTarget(TARGET_2), DraftModelProposer(TableTarget(draft)), gamma=gamma)
    decoder.verifier = MutantVerifier(fault)
    assert run(decoder, count) < SIGNIFICANT


@pytest.mark.parametrize("fault", FAULTS)
def test_mutant_without_its_fault_passes(fault: str) -> None:
    draft, count = FAULTS[fault]
    decoder = Decoder(TableTarget(TARGET_2), DraftModelProposer(TableTarget(draft)), gamma=2)
    decoder.verifier = MutantVerifier("none")
    assert run(decoder, count // 2) > SIGNIFICANT
