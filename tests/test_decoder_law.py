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
from spec_kernels.proposers import BestFirst, DraftModelProposer, NgramProposer
from spec_kernels.proposers.draft_model import DraftModelSession
from spec_kernels.targets import TableTarget
from spec_kernels.types import PAD_TOKEN, Acceptance, Draft, SamplingParams

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


TREES = {
    "block-sampled": ("block", "sampled", [2, 2], 300),
    "token-sampled": ("token", "sampled", [3, 1], 300),
    "block-replacement": ("block", "replacement", [2, 2], 300),
    "token-replacement": ("token", "replacement", [2, 2], 300),
    "block-fixed": ("block", "fixed", [2, 1], 300),
    "block-mixed": ("block", "mixed", [2, 2], 300),
    "token-mixed": ("token", "mixed", [3, 1], 300),
    "block-mixed-uneven": ("block", "mixed", [-1, 0, 0, 0, 1, 1, 3], 300),
    "block-sampled-uneven": ("block", "sampled", [-1, 0, 0, 0, 1, 1, 3, 4, 4, 6], 300),
    "coupled-sampled": ("coupled", "sampled", [2, 2], 200),
    "block-best": ("block", "fixed", BestFirst(5, depth=3, expanded=2, children=2), 300),
}


@pytest.mark.parametrize("case", TREES)
def test_joint_law_with_trees(case: str) -> None:
    rule, children, tree, count = TREES[case]
    model = TableTarget(random_table(3, 14))
    proposer = DraftModelProposer(model, tree=tree, children=children)
    decoder = Decoder(TableTarget(random_table(3, 13)), proposer, gamma=3, rule=rule)
    assert run(decoder, count, 0.8) > SIGNIFICANT


@pytest.mark.slow
@pytest.mark.parametrize("vocab", [2, 4])
@pytest.mark.parametrize("case", TREES)
def test_joint_law_with_trees_in_long_runs(case: str, vocab: int) -> None:
    """With filters besides: supports smaller than the children asked for."""
    rule, children, tree, count = TREES[case]
    model = TableTarget(random_table(vocab, 16, 1.5))
    proposer = DraftModelProposer(model, tree=tree, children=children)
    decoder = Decoder(TableTarget(random_table(vocab, 15)), proposer, gamma=3, rule=rule)
    assert run(decoder, 5 * count, 1.0) > SIGNIFICANT


def test_joint_law_with_trees_of_ngrams() -> None:
    decoder = Decoder(TableTarget(random_table(2, 17)), NgramProposer(nodes=7), gamma=3)
    assert run(decoder, 400) > SIGNIFICANT


def test_drawn_nodes_dropped_by_value_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    propose = DraftModelSession.propose

    def drop(session: DraftModelSession, *arguments: object) -> Draft:
        draft = propose(session, *arguments)
        if draft.logits is None:
            return draft
        law = draft.logits.softmax(1)[draft.row.clamp(min=0).long()]
        q = law.gather(2, draft.tokens.clamp(min=0)[..., None])[..., 0]
        tokens = torch.where((draft.row >= 0) & (q < 0.3), PAD_TOKEN, draft.tokens)
        return draft._replace(tokens=tokens)

    monkeypatch.setattr(DraftModelSession, "propose", drop)
    target = torch.tensor([[0.5, 0.3, 0.2], [0.1, 0.2, 0.7], [0.7, 0.2, 0.1]]).log()
    draft = (0.2 + 0.4 * torch.eye(3)).log()
    for rule in ("block", "token"):
        proposer = DraftModelProposer(TableTarget(draft), tree=[2, 1])
        decoder = Decoder(TableTarget(target), proposer, gamma=2, rule=rule)
        assert run(decoder, 150) < SIGNIFICANT


@pytest.mark.slow
@pytest.mark.parametrize("shares", [True, False])
def test_cousins_that_share_noise_are_caught(shares: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def shared(*arguments: object) -> Tensor:
        coins = ops.draft_coins(*arguments)
        coins[:, 2:] = coins[:, 1:2]
        return coins

    if shares:
        monkeypatch.setattr("spec_kernels.proposers.levels.draft_coins", shared)
    target = torch.tensor([[0.64, 0.36], [0.94, 0.06]]).log()
    draft = torch.tensor([[0.33, 0.67], [0.53, 0.47]]).log()
    proposer = DraftModelProposer(TableTarget(draft), tree=[2, 1])
    decoder = Decoder(TableTarget(target), proposer, gamma=2)
    assert (run(decoder, 6000) > SIGNIFICANT) != shares


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
