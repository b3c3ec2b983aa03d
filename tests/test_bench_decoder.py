"""The decoder's benchmark: whose turn it is, and the alphas that its predictions come from."""

from __future__ import annotations

import argparse
import math
import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from benchmarks import bench_decoder
from benchmarks.bench_decoder import GAMMAS, MAX_GAMMA, Lane, Noted, count, take_turns, walk
from spec_kernels.adaptive import Judged
from spec_kernels.decoder import Decoder, Request
from spec_kernels.proposers import DraftModelProposer, MTPProposer, NgramProposer
from spec_kernels.stats import Seconds
from spec_kernels.targets import TableTarget, Target
from tests.test_proposers_mtp import CHAOS, near_oracle
from tests.tiny_models import FixedProposer, gpt, plain


def mostly_right(target: Target, prompt: Sequence[int], tokens: int) -> FixedProposer:
    """Drafts right by their place, or missing behind some."""
    (output,) = plain(target, [Request(prompt, max_new_tokens=tokens)])
    text, rng = [*prompt, *output.tokens], random.Random(1)
    drafts = [token if rng.random() < 0.8 else 0 for token in text]
    is_there = [rng.random() < 0.8 for _ in text]
    return FixedProposer(
        lambda row, seen, count: drafts[len(seen) :][: count * is_there[len(seen)]]
    )


@pytest.mark.parametrize("gamma", [1, 2, 5, 8])
@pytest.mark.parametrize("kind", ["mtp", "draft model", "places", "ngram"])
def test_rounds_walked_are_those_that_a_gamma_has(gamma: int, kind: str) -> None:
    """From the drafts of every place, noted in a run that takes none."""
    prompt, tokens = [1, 2, 3, 1, 2], 40
    target: Any = TableTarget(CHAOS) if kind == "mtp" else gpt()
    proposer: Any = {
        "mtp": lambda: MTPProposer(near_oracle(CHAOS, 0.5, is_shared=True), depth=MAX_GAMMA),
        "draft model": lambda: DraftModelProposer(gpt(seed=2)),
        "places": lambda: mostly_right(target, prompt, tokens),
        "ngram": NgramProposer,
    }[kind]()
    noted = Noted(proposer)
    noting = Lane(Decoder(target, noted, gamma=MAX_GAMMA), prompt, tokens)
    lane = Lane(Decoder(target, proposer, gamma=gamma), prompt, tokens)
    take_turns([noting, lane])
    assert noting.tokens == lane.tokens
    assert len(noting.rounds) == len(noted.drafts) == tokens
    found = [(one.drafts, one.accepted) for _, _, one, _ in lane.rounds]
    assert walk(noted.drafts, lane.tokens, gamma) == found


def test_counts_are_alphas_and_the_share_of_rounds_with_drafts() -> None:
    assert count([(True, 2), (True, 1), (True, 0), (False, 0)], 3) == (
        [pytest.approx(2 / 3), 0.5, 0.0],
        0.75,
    )
    assert count([(False, 0)], 2) == ([0.0, 0.0], 0.0)


def test_costs_are_means_and_catching_up_is_apart() -> None:
    """In plain rounds; the first round of a lane warms up, and the next follows a full one."""

    def lane(gamma: int, *rounds: tuple[Seconds, int]) -> argparse.Namespace:
        every = ((Seconds(draft=99.0, verify=99.0), gamma), *rounds)
        return argparse.Namespace(
            rounds=[(gamma, gamma, Judged(gamma > 0, n, n < gamma), one) for one, n in every]
        )

    def seconds(draft: float) -> Seconds:
        return Seconds(draft=draft, verify=5.0, accept=0.5)

    apart = [lane(0, (Seconds(verify=0.75, accept=0.25), 0))]
    for gamma in (1, 3, 8):
        drafts = [(9.0, 0), (0.2 * gamma - 0.1, 0), (0.2 * gamma + 0.1, gamma), (0.2 * gamma, 0)]
        drafts[3] = (0.2 * gamma + 0.4, 0)
        apart.append(lane(gamma, *[(seconds(draft), kept) for draft, kept in drafts]))
    forwards = argparse.Namespace(times={n: [0.75, 0.75 + 0.5 * (n - 1)] for n in range(1, 10)})
    costs = bench_decoder.costs_of(forwards, apart)
    assert (costs.c, costs.catch_up, costs.o) == pytest.approx((0.2, 0.4, 0.25))
    assert costs.v == pytest.approx({n: 1.0 + 0.25 * (n - 1) for n in range(1, 10)})
    full = [lane(gamma, *[(seconds(0.2 * gamma), gamma)] * 3) for gamma in (1, 3, 8)]
    costs = bench_decoder.costs_of(forwards, [apart[0], *full])
    assert (costs.c, costs.catch_up) == pytest.approx((0.2, 0.0))


class Counted:
    def __init__(self, name: str, bits: int, seen: list[str]) -> None:
        self.name, self.bits, self.seen, self.steps = name, bits, seen, 0

    @property
    def done(self) -> float:
        return self.steps / self.bits

    def step(self) -> None:
        self.steps += 1
        self.seen.append(self.name)


def test_the_least_done_takes_the_next_turn() -> None:
    seen: list[str] = []
    take_turns([Counted("a", 2, seen), Counted("b", 4, seen)])
    assert "".join(seen) == "abbabb"
    take_turns([Counted("c", 2, seen)], end=-math.inf)
    assert "c" not in seen


def test_every_gamma_decodes_the_same_text() -> None:
    target = TableTarget(torch.eye(5).roll(1, dims=1))  # id x is followed by x + 1
    options = argparse.Namespace(apart=6, forwards=2, max_new_tokens=12)
    prompts = [[0, 1, 2, 3, 4, 0, 1], [1, 2, 3, 4, 0, 1, 2]]
    measured = bench_decoder.measure(
        target, lambda gamma: NgramProposer(), prompts, options, math.inf
    )
    rows = bench_decoder.judge("ngram", measured)
    assert [row["gamma"] for row in rows] == list(GAMMAS)
    assert {len(lane.tokens) for lane in measured.lanes.values()} == {12}
    assert sorted(measured.costs.v) == list(range(1, MAX_GAMMA + 2))
    assert rows[0]["measured"] == rows[0]["predicted"] == 1.0
    assert [row["tokens_per_round"] for row in rows[:5]] == [1.0, 2.0, 3.0, 4.0, 4.0]


def test_without_time_every_gamma_still_has_a_row() -> None:
    target = TableTarget(torch.eye(5).roll(1, dims=1))
    options = argparse.Namespace(apart=6, forwards=2, max_new_tokens=12)
    prompts = [[0, 1, 2, 3, 4, 0, 1], [1, 2, 3, 4, 0, 1, 2]]
    measured = bench_decoder.measure(target, lambda gamma: NgramProposer(), prompts, options, 0.0)
    rows = bench_decoder.judge("ngram", measured)
    assert [row["tokens_per_round"] for row in rows[:3]] == [1.0, 2.0, 3.0]
