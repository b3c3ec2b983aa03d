"""The decoder's benchmark: whose turn it is, and the alphas that its predictions come from."""

from __future__ import annotations

import argparse
import math
import random

import pytest
import torch

from benchmarks import bench_decoder
from benchmarks.bench_decoder import GAMMAS, MAX_GAMMA, count, replay, take_turns
from spec_kernels.adaptive import Judged
from spec_kernels.proposers import NgramProposer
from spec_kernels.stats import Seconds
from spec_kernels.targets import TableTarget


def walk(right: list[bool], gamma: int) -> list[tuple[bool, int]]:
    """Decode a text whose drafts are right or wrong by place; the last place is wrong."""
    rounds, root = [], 0
    while root < len(right):
        kept = 0
        while kept < gamma and root + kept < len(right) - 1 and right[root + kept]:
            kept += 1
        rounds.append((True, kept))
        root += kept + 1
    return rounds


@pytest.mark.parametrize("share", [0.2, 0.6, 0.9])
def test_replayed_rounds_are_those_of_the_smaller_gamma(share: float) -> None:
    """Exactly, where no round was full: the token behind a full one was never a draft."""
    rng = random.Random(1)
    for _ in range(50):
        right = [rng.random() < share for _ in range(60)] + [False]
        most = 61
        for gamma in (1, 2, 5, 8):
            assert replay(walk(right, most), most, gamma) == walk(right, gamma)


def test_a_run_goes_on_behind_a_full_round() -> None:
    assert replay([(True, 3), (True, 1)], 3, 1) == [(True, 1), (True, 1), (True, 1)]
    assert replay([(True, 3), (True, 0)], 3, 1) == [(True, 1), (True, 1), (True, 0)]
    assert replay([(False, 0), (True, 0)], 3, 1) == [(False, 0), (True, 0)]


def test_counts_are_alphas_and_the_share_of_rounds_with_drafts() -> None:
    assert count([(True, 2), (True, 1), (True, 0), (False, 0)], 3) == (
        [pytest.approx(2 / 3), 0.5, 0.0],
        0.75,
    )
    assert count([(False, 0)], 2) == ([0.0, 0.0], 0.0)


def test_drafting_costs_what_it_did_with_the_same_gamma() -> None:
    """Means over rounds, in plain rounds; between two gammas along the line of their times."""

    def lane(gamma: int, *rounds: Seconds) -> argparse.Namespace:
        warm = Seconds(draft=99.0, verify=99.0)
        judged = Judged(gamma > 0, 0, gamma > 0)
        return argparse.Namespace(rounds=[(gamma, gamma, judged, one) for one in (warm, *rounds)])

    apart = [lane(0, Seconds(verify=0.75, accept=0.25))]
    for gamma, draft in ((1, 0.25), (2, 0.3), (4, 0.5), (8, 0.9)):
        rounds = [Seconds(draft=draft + noise, verify=5.0, accept=0.5) for noise in (-0.1, 0.1)]
        apart.append(lane(gamma, *rounds))
    forwards = argparse.Namespace(times={n: [0.75, 0.75 + 0.5 * (n - 1)] for n in range(1, 10)})
    costs = bench_decoder.costs_of(forwards, apart)
    assert [gamma * one.c for gamma, one in enumerate(costs)] == pytest.approx(
        [0.0, 0.25, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9]
    )
    assert costs[3].o == pytest.approx(0.25)
    assert costs[3].v == pytest.approx({n: 1.0 + 0.25 * (n - 1) for n in range(1, 10)})


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
    lanes, costs = bench_decoder.measure(
        target, lambda gamma: NgramProposer(), prompts, options, math.inf
    )
    rows = bench_decoder.judge("ngram", lanes, costs)
    assert [row["gamma"] for row in rows] == list(GAMMAS)
    assert {len(lane.tokens) for lane in lanes.values()} == {12}
    assert all(sorted(one.v) == list(range(1, MAX_GAMMA + 2)) for one in costs)
    assert rows[0]["measured"] == rows[0]["predicted"] == 1.0
    assert [row["tokens_per_round"] for row in rows[:5]] == [1.0, 2.0, 3.0, 4.0, 4.0]


def test_without_time_every_gamma_still_has_a_row() -> None:
    target = TableTarget(torch.eye(5).roll(1, dims=1))
    options = argparse.Namespace(apart=6, forwards=2, max_new_tokens=12)
    prompts = [[0, 1, 2, 3, 4, 0, 1], [1, 2, 3, 4, 0, 1, 2]]
    measured = bench_decoder.measure(target, lambda gamma: NgramProposer(), prompts, options, 0.0)
    rows = bench_decoder.judge("ngram", *measured)
    assert [row["tokens_per_round"] for row in rows[:3]] == [1.0, 2.0, 3.0]
