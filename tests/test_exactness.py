"""The reference's own code, summed over all drafts and coins, gives exactly the target's law."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from spec_kernels import reference
from spec_kernels.reference import random
from spec_kernels.reference.law import probabilities
from spec_kernels.types import Acceptance, Draft
from tests.forking import outcomes
from tests.joint import Filters, Measured, Problem, problems
from tests.mutants import MUTANTS, Mutant, bias, edge_faults, module

RULES = ("token", "block")
SUITE = problems()


@cache
def measured(problem: Problem, rule: str) -> Measured:
    return problem.measure(reference.accept, rule)


def names(value: object) -> str:
    return str(getattr(value, "name", value))


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("problem", SUITE, ids=names)
def test_output_law_is_the_targets(problem: Problem, rule: str) -> None:
    assert measured(problem, rule).distance < 1e-12


@pytest.mark.parametrize("rule", RULES)
def test_output_law_over_five_ids_and_three_drafts(rule: str) -> None:
    filters = Filters(0.8, top_k=3, top_p=0.9), Filters(1.3, top_k=3)
    problem = Problem("wide", 5, 3, *filters, kinds="ssf", seed=7)
    assert measured(problem, rule).distance < 1e-12


@pytest.mark.parametrize("problem", SUITE, ids=names)
def test_block_rule_accepts_at_least_as_many(problem: Problem) -> None:
    token, block = (measured(problem, rule).mean_accepted for rule in RULES)
    assert block > token - 1e-12
    if problem.gamma == 1 or set(problem.kinds[: problem.gamma]) == {"f"}:
        assert block == pytest.approx(token, abs=1e-12)


def drafting_law(problem: Problem, prefix: tuple[int, ...]) -> list[float]:
    """Return the law of the next draft by definition."""
    number = problem.number(prefix)
    row = problem.logits[1][number]
    if problem.kinds[len(prefix)] == "f":
        fixed = int(row.argmax()) if number % 2 else number % problem.vocab
        return [float(x == fixed) for x in range(problem.vocab)]
    return row.tolist() if problem.as_probabilities else problem.draft.apply(row.tolist())


def expected_accepted(problem: Problem, rule: str, prefix: tuple[int, ...], a: float) -> float:
    """Return the closed form: the sum over i of the chance that at least i drafts are kept,
    `sum_y prod min(p, q)` for the token rule and `E_q[a_i]` for the block rule."""
    if len(prefix) == problem.gamma:
        return 0.0
    total = 0.0
    p, q = problem.plain(prefix), drafting_law(problem, prefix)
    for x in range(problem.vocab):
        if q[x] > 0.0:
            entry = min(1.0, a * p[x] / q[x])
            behind = expected_accepted(problem, rule, (*prefix, x), entry if rule == "block" else 1)
            total += q[x] * (entry + behind if rule == "block" else entry * (1.0 + behind))
    return total


CLOSED = [p for p in SUITE if not p.draft_vocab and p.stop_behind is None and p.max_depth is None]


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("problem", CLOSED, ids=names)
def test_accepted_drafts_equal_the_closed_form(problem: Problem, rule: str) -> None:
    expected = expected_accepted(problem, rule, (), 1.0)
    assert measured(problem, rule).mean_accepted == pytest.approx(expected, abs=1e-12)


def test_block_rule_accepts_more_in_the_published_example() -> None:
    # Sun et al. 2025, section 3: p = (1/3, 2/3), q = (2/3, 1/3) at every prefix, two drafts.
    def tables(target: Tensor, draft: Tensor) -> None:
        target[:] = torch.tensor([1.0, 2.0]).log()
        draft[:] = torch.tensor([2.0, 1.0]).log()

    problem = Problem("published", 2, 2, tables=tables)
    assert measured(problem, "token").mean_accepted == pytest.approx(10 / 9, abs=1e-6)
    assert measured(problem, "block").mean_accepted == pytest.approx(11 / 9, abs=1e-6)


def test_b008_block_rule_has_its_own_test_and_residual() -> None:
    def tables(target: Tensor, draft: Tensor) -> None:
        target[0], target[1:3] = torch.tensor([0.3, 0.7]).log(), torch.tensor([0.8, 0.2]).log()
        draft[0], draft[1:3] = torch.tensor([0.6, 0.4]).log(), torch.tensor([0.5, 0.5]).log()

    problem = Problem("b008", 2, 2, as_probabilities=True, tables=tables)
    token, block = (measured(problem, rule) for rule in RULES)
    assert max(token.distance, block.distance) < 1e-12
    assert token.mean_accepted == pytest.approx(0.7 + 0.7 * 0.7, abs=1e-6)
    assert block.mean_accepted == pytest.approx(0.7 + 0.6 * 0.5 + 0.4 * 0.7, abs=1e-6)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("problem", [p for p in SUITE if "same-law" in p.name], ids=names)
def test_a_draft_with_the_targets_law_is_always_accepted(problem: Problem, rule: str) -> None:
    assert measured(problem, rule).mean_accepted == pytest.approx(problem.gamma, abs=1e-12)


def match_with_own_draws(*args: Any, **options: Any) -> Acceptance:
    """Draw the target's own token at every node, then compare: what an engine does with `match`."""
    draft, logits, law, target_row = args[:4]
    tokens = torch.tensor(
        [[random.choose(0.5, probabilities(logits, law, r)) for r in target_row[0]]]
    )
    return reference.match(draft, tokens, max_depth=options["max_depth"])


@pytest.mark.parametrize("kinds", ["ss", "fs", "ff"])
def test_match_with_the_targets_own_draws_is_exact(kinds: str) -> None:
    problem = Problem("match", 3, 2, Filters(0.7), kinds=kinds, seed=3)
    assert problem.measure(match_with_own_draws, "token").distance < 1e-12


@pytest.mark.parametrize("mutant", MUTANTS, ids=names)
def test_wrong_verifier_is_caught(mutant: Mutant) -> None:
    assert bias(mutant) > 1e-6


@pytest.mark.parametrize("rule", RULES)
def test_reference_errs_at_no_end_of_the_coins(rule: str) -> None:
    assert list(edge_faults(reference.accept, rule)) == []


def laws(size: int) -> st.SearchStrategy[Tensor]:
    """Return laws whose probabilities are ratios of small integers, many of them 0."""
    counts = st.lists(st.sampled_from([0, 0, 1, 2, 3, 7, 50]), min_size=size, max_size=size)
    tensors = counts.filter(any).map(lambda c: torch.tensor(c, dtype=torch.float64))
    return tensors.map(lambda t: t / t.sum())


pairs = st.integers(2, 12).flatmap(lambda size: st.tuples(laws(size), laws(size)))


@given(pairs)
def test_accepted_and_recovered_mass_make_up_the_target(pair: tuple[Tensor, Tensor]) -> None:
    """The proof: min(p, q) + (1 - beta) * norm((p - q)+) = p, because the rejected mass 1 - beta
    is the mass of the residual."""
    p, q = pair
    beta = float(reference.overlap(p[None], None, q[None], None)[0])
    token = int((q - p).argmax())  # one that may be rejected
    child = module.Child(1, token, token, False)
    state = module.State(0, 1.0, module.Family(p, q, q, [child], False, False), False)
    beta_token = min(float(p[token]), float(q[token]))
    assert float(q[token]) * module.entry_probability(state, child) == pytest.approx(beta_token)
    module.reject(state, child)
    weights, mass = module.residual(state), module.residual_mass(state)
    assert mass == pytest.approx(1.0 - beta, abs=1e-14)
    assert mass == pytest.approx(float((q - p).clamp(min=0).sum()), abs=1e-14)
    recovered = weights / mass if mass > 0.0 else torch.zeros_like(p)
    torch.testing.assert_close(
        torch.minimum(p, q) + (1.0 - beta) * recovered, p, rtol=0, atol=1e-14
    )


@settings(max_examples=40)
@given(pairs, st.sampled_from(RULES))
def test_one_draft_gives_the_targets_law(pair: tuple[Tensor, Tensor], rule: str) -> None:
    p, q = pair
    law = torch.zeros_like(p)
    rows, coins = torch.tensor([[0, 1]]), torch.full((1, 2), 0.5, dtype=torch.float64)
    target = torch.stack([p, torch.ones_like(p) / p.numel()])
    for token in q.nonzero().flatten().tolist():
        draft = Draft(
            torch.tensor([[0, token]]),
            torch.tensor([2]),
            logits=q[None],
            row=torch.tensor([[-1, 0]]),
        )

        def verify(draft: Draft = draft) -> int:
            out = reference.accept(
                draft, target, None, rows, coins, coins[:, 0], rule=rule, max_depth=1
            )
            return int(out.output_tokens[0, 0])

        for weight, emitted in outcomes(verify):
            law[emitted] += weight * q[token]
    torch.testing.assert_close(law, p, rtol=0, atol=1e-14)


def test_forking_sums_to_one_and_leaves_nothing_behind() -> None:
    originals = random.decide, random.choose

    def two_answers() -> tuple[bool, int]:
        yes = random.decide(0.0, 0.25)
        return yes, random.choose(0.0, torch.tensor([0.0, 0.5, 1.5])) if yes else -1

    found = {result: weight for weight, result in outcomes(two_answers)}
    assert found == {(True, 1): 0.0625, (True, 2): 0.1875, (False, -1): 0.75}
    assert (random.decide, random.choose) == originals
    with pytest.raises(ZeroDivisionError):
        next(outcomes(lambda: 1 / 0))
    assert (random.decide, random.choose) == originals
