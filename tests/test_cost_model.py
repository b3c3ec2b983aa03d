"""The performance model against sums over all outcomes, and against what a roofline must do."""

from __future__ import annotations

import itertools
import random

import pytest

from spec_kernels.cost_model import (
    Machine,
    Model,
    StepCosts,
    best_gamma,
    best_tree_size,
    conditional_acceptance,
    crossover_batch,
    expected_tokens,
    expected_tokens_of_tree,
    forward_seconds,
    ideal_speedup,
    practical_speedup,
    roofline_costs,
    survival,
)

H100 = Machine(bandwidth=3.35e12, flops=990e12)
CPU_V = {1: 1.0, 2: 1.73, 3: 2.08, 4: 1.48, 5: 1.69, 8: 1.73, 16: 2.17}  # not convex


def tokens_by_outcomes(alphas: list[float]) -> float:
    """Sum tokens over every pattern of accepted and rejected drafts."""
    total = 0.0
    for pattern in itertools.product([False, True], repeat=len(alphas)):
        weight = 1.0
        for accepted, alpha in zip(pattern, alphas, strict=True):
            weight *= alpha if accepted else 1.0 - alpha
        first = pattern.index(False) if False in pattern else len(pattern)
        total += weight * (first + 1)
    return total


@pytest.mark.parametrize("alphas", [[], [0.3], [0.9, 0.1], [0.7, 0.6, 0.0, 0.4], [1.0] * 5])
def test_expected_tokens_equals_the_sum_over_outcomes(alphas: list[float]) -> None:
    assert expected_tokens(alphas, len(alphas)) == pytest.approx(tokens_by_outcomes(alphas))


@pytest.mark.parametrize("alpha", [0.0, 0.2, 0.8, 0.999])
@pytest.mark.parametrize("gamma", [0, 1, 8])
def test_one_alpha_gives_the_closed_form(alpha: float, gamma: int) -> None:
    closed = (1.0 - alpha ** (gamma + 1)) / (1.0 - alpha)
    assert expected_tokens(alpha, gamma) == pytest.approx(closed)
    assert ideal_speedup(alpha, gamma, c=0.25) == pytest.approx(closed / (1 + 0.25 * gamma))


def test_conditional_acceptance_inverts_survival() -> None:
    alphas = [0.9, 0.5, 0.25, 0.0, 0.0]
    assert conditional_acceptance(survival(alphas, 5)) == pytest.approx(alphas)


def test_a_chain_is_a_tree() -> None:
    alphas = [0.9, 0.5, 0.25]
    tree = expected_tokens_of_tree([-1, 0, 1, 2], [1.0, *alphas])
    assert tree == pytest.approx(expected_tokens(alphas, 3))


def test_expected_tokens_of_a_tree_equals_a_simulation() -> None:
    parents, acceptance = [-1, 0, 0, 1, 1, 2], [1.0, 0.5, 0.3, 0.6, 0.2, 0.9]
    draws, rng, total, rounds = {}, random.Random(1), 0, 200_000
    for node, parent in enumerate(parents):
        draws.setdefault(parent, []).append(node)
    for _ in range(rounds):
        node: int | None = 0
        while node is not None:
            total += 1
            coin, entered = rng.random(), None
            for child in draws.get(node, []):
                if coin < acceptance[child]:
                    entered = child
                    break
                coin -= acceptance[child]
            node = entered
    assert total / rounds == pytest.approx(expected_tokens_of_tree(parents, acceptance), abs=0.01)


def test_costs_between_and_beyond_measured_widths_lie_on_lines() -> None:
    costs = StepCosts({1: 1.0, 3: 2.0, 5: 2.5})
    assert [costs.verify(n) for n in (1, 2, 3, 4, 5, 7)] == [1.0, 1.5, 2.0, 2.25, 2.5, 3.0]
    assert StepCosts({1: 1.0}).verify(9) == 1.0


def test_plain_decoding_pays_no_overhead() -> None:
    costs = StepCosts({1: 1.0, 5: 1.2}, c=0.1, o=0.3)
    assert practical_speedup(0.5, 0, costs) == 1.0
    assert practical_speedup(0.5, 4, costs) == pytest.approx(expected_tokens(0.5, 4) / 1.9)


def test_catching_up_is_paid_behind_full_rounds() -> None:
    """Against rounds one after the other: the first draft step costs more behind a full round."""
    alphas, gamma, rng = [0.9, 0.8, 0.7], 3, random.Random(3)
    costs = StepCosts({1: 1.0, 4: 1.6}, c=0.3, o=0.02, catch_up=0.5)
    for drafted in (1.0, 0.6):
        tokens, time, was_full = 0, 0.0, False
        for _ in range(100_000):
            time += gamma * costs.c + 0.5 * was_full
            is_drafted, kept = rng.random() < drafted, 0
            while is_drafted and kept < gamma and rng.random() < alphas[kept]:
                kept += 1
            time += 1.62 if is_drafted else 1.0
            tokens, was_full = tokens + kept + 1, kept == gamma
        found = practical_speedup(alphas, gamma, costs, drafted=drafted)
        assert found == pytest.approx(tokens / time, rel=0.005)
    assert practical_speedup(0.9, 0, costs) == 1.0


def test_best_gamma_passes_over_a_hump_of_the_cost() -> None:
    gamma, gain = best_gamma(0.85, StepCosts(CPU_V), max_gamma=12)
    assert gain == max(practical_speedup(0.85, n, StepCosts(CPU_V)) for n in range(13))
    assert gamma > 2  # three tokens cost more than four: the first local best is plain decoding
    assert practical_speedup(0.85, 1, StepCosts(CPU_V)) < 1.1


def test_best_gamma_is_plain_decoding_where_nothing_is_accepted() -> None:
    assert best_gamma(0.0, StepCosts({1: 1.0, 9: 1.0}, c=0.01), max_gamma=8) == (0, 1.0)


def test_best_tree_size_weighs_drafting_against_tokens() -> None:
    expected = [1.0, 1.5, 1.9, 2.1, 2.2]
    free, dear = StepCosts({1: 1.0}), StepCosts({1: 1.0}, c=0.5)
    assert best_tree_size(expected, free, draft_steps=lambda n: n - 1) == (5, 2.2)
    assert best_tree_size(expected, dear, draft_steps=lambda n: n - 1)[0] == 1


def test_touched_experts_equals_the_sum_over_routings() -> None:
    experts, used, tokens = 4, 2, 3
    routes = list(itertools.combinations(range(experts), used))
    touched = [len(set().union(*picks)) for picks in itertools.product(routes, repeat=tokens)]
    model = Model(0.0, experts=experts, experts_per_token=used, expert_parameters=1.0)
    assert model.touched_experts(tokens) == pytest.approx(sum(touched) / len(touched))


def test_a_mixture_of_experts_pays_for_drafts_that_a_dense_model_gets_free() -> None:
    dense = Model(10e9)
    mixture = Model(2e9, experts=64, experts_per_token=4, expert_parameters=0.5e9)
    v = [
        roofline_costs(H100, model, batch=1, context=0, max_gamma=7).verify(8)
        for model in (dense, mixture)
    ]
    assert v[0] == 1.0
    assert v[1] > 3.0


def test_a_forward_is_bound_by_memory_then_by_arithmetic() -> None:
    model = Model(8e9, kv_bytes=131072, attention_flops=524288)
    small = forward_seconds(H100, model, batch=1, tokens=1, context=1000)
    assert small == pytest.approx((16e9 + 1000 * 131072) / 3.35e12)
    large = forward_seconds(H100, model, batch=512, tokens=8, context=1000)
    assert large == pytest.approx(4096 * (16e9 + 1000 * 524288) / 990e12)


def test_the_crossover_batch_is_the_first_that_does_not_pay() -> None:
    def costs_at(batch: int) -> StepCosts:
        return roofline_costs(H100, Model(8e9), batch=batch, context=0, max_gamma=4, c=0.02)

    batch = crossover_batch(0.6, costs_at, max_gamma=4, max_batch=2000)
    assert batch is not None
    assert best_gamma(0.6, costs_at(batch), max_gamma=4)[0] == 0
    assert best_gamma(0.6, costs_at(batch - 1), max_gamma=4)[0] > 0
    assert crossover_batch(0.6, costs_at, max_gamma=4, max_batch=batch - 1) is None


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: expected_tokens(1.5, 2), "alpha must be in"),
        (lambda: expected_tokens(0.5, -1), "gamma must be >= 0"),
        (lambda: expected_tokens([0.5], 2), "must have 2 values"),
        (lambda: conditional_acceptance([0.2, 0.4]), "must fall"),
        (lambda: expected_tokens_of_tree([-1, 2, 0], [1, 1, 1]), "parent of node 1"),
        (lambda: expected_tokens_of_tree([-1, 0, 0], [1, 0.7, 0.6]), "sum to at most 1"),
        (lambda: expected_tokens_of_tree([0], [1.0]), "begin with the root"),
        (lambda: StepCosts({}), "at least one"),
        (lambda: StepCosts({0: 1.0}), "widths >= 1"),
        (lambda: StepCosts({1: 1.0}, c=-1.0), "c and o"),
        (lambda: best_tree_size([], StepCosts({1: 1.0}), draft_steps=int), "at least one tree"),
        (lambda: forward_seconds(H100, Model(1.0), batch=0, tokens=1, context=0), "batch"),
    ],
)
def test_impossible_numbers_are_refused(call: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()  # type: ignore[operator]
