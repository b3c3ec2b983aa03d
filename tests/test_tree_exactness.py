"""The reference's own code on trees, summed over all drafts and coins: exactly the target's law."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from spec_kernels import reference
from spec_kernels.reference import random
from spec_kernels.reference.law import probabilities
from spec_kernels.types import Acceptance, Draft
from tests.joint import Filters, Problem
from tests.joint_tree import KINDS, WAYS, Survey, TreeProblem, tree_problems
from tests.mutants import Mutant
from tests.mutants_tree import TREE_MUTANTS, cousins, tree_bias

RULES = ("token", "block")
FAST, SOME, ALL = 2, 8, 32
"""Random trees of each kind in the default suite, and in both suites together."""

SUITE = [
    pytest.param(problem, id=problem.name, marks=[] if place < FAST else pytest.mark.slow)
    for kind in KINDS
    for place, problem in enumerate(tree_problems(kind, SOME if kind in WAYS else ALL))
]


@cache
def surveyed(problem: TreeProblem, rule: str) -> Survey:
    return problem.survey(reference.accept, rule)


@pytest.mark.parametrize("problem", SUITE)
def test_tree_is_exact_and_accepts_no_more_than_can_be(problem: TreeProblem) -> None:
    """The law; both rules below the bound of every node; and block >= token where siblings with
    deeper drafts come first (see `test_block_rule_wants_deep_siblings_first`)."""
    token, block = (surveyed(problem, rule) for rule in RULES)
    assert max(token.measured.distance, block.measured.distance) < 1e-12
    if problem.is_deepest_first:
        assert block.measured.mean_accepted > token.measured.mean_accepted - 1e-12
    drafted = problem.drafted()
    for (node, prefix), weight in drafted.items():
        bound = problem.best_entry(node, prefix, problem.starts_with(prefix), weight)
        for survey in (token, block):
            assert entered(problem, survey, node, prefix) < bound + 1e-12
        reached = token.visits.get((node, prefix), 0.0)
        alone = problem.best_entry(node, prefix, 1.0, 1.0)  # the token rule has no second thoughts
        assert entered(problem, token, node, prefix) < reached * alone + 1e-12


def entered(problem: TreeProblem, survey: Survey, node: int, prefix: tuple[int, ...]) -> float:
    """Return the probability that the kept path leads over `prefix` to a child of `node`."""
    return sum(
        survey.visits.get((child, (*prefix, x)), 0.0)
        for child in problem.children(node)
        for x in range(problem.vocab)
    )


@pytest.mark.parametrize("parents", [(-1, 0, 0), (-1, 0, 0, 0)], ids=["k2", "k3"])
@pytest.mark.parametrize("kinds", ["-sss", "-fff", "-sff"])
def test_children_in_one_level_accept_alike_under_both_rules(
    parents: tuple[int, ...], kinds: str
) -> None:
    problem = TreeProblem("level", 4, 1, kinds=kinds, parents=parents, seed=1)
    token, block = (surveyed(problem, rule).measured for rule in RULES)
    assert max(token.distance, block.distance) < 1e-12
    assert block.mean_accepted == pytest.approx(token.mean_accepted, abs=1e-12)


def stated(parents: tuple[int, ...], replacement: bool) -> list[float]:
    """Return the mean accepted drafts of both rules: two ids, p = (1/3, 2/3) and q = (2/3, 1/3)
    everywhere, all nodes drawn."""

    def tables(target: Tensor, draft: Tensor) -> None:
        target[:] = torch.tensor([1.0, 2.0]).log()
        draft[:] = torch.tensor([2.0, 1.0]).log()

    problem = TreeProblem(
        "stated",
        2,
        2 if parents[-1] < 2 else 3,
        kinds="-ssss",
        parents=parents,
        replacement=replacement,
        tables=tables,
    )
    found = [surveyed(problem, rule).measured for rule in RULES]
    assert max(measured.distance for measured in found) < 1e-12
    return [measured.mean_accepted for measured in found]


def test_block_rule_accepts_more_on_a_stated_tree() -> None:
    token, block = stated((-1, 0, 0, 1, 1), replacement=True)
    assert token == pytest.approx(35 / 27, abs=1e-6)
    assert block == pytest.approx(37 / 27, abs=1e-6)


def test_block_rule_wants_deep_siblings_first() -> None:
    """It tries to keep a leaf before it looks at the leaf's siblings: where the second of two
    siblings has the drafts below it, the token rule can be better."""
    token, block = stated((-1, 0, 1, 1, 3), replacement=False)
    assert token == pytest.approx(40 / 27, abs=1e-6)
    assert block == pytest.approx(38 / 27, abs=1e-6)
    token, block = stated((-1, 0, 1, 1, 2), replacement=False)
    assert token == pytest.approx(44 / 27, abs=1e-6)
    assert block == pytest.approx(48 / 27, abs=1e-6)


def test_a_chain_of_nodes_is_measured_like_a_chain() -> None:
    filters = Filters(0.8, top_k=3), Filters(1.3, top_k=2)
    chain = Problem("chain", 3, 3, *filters, kinds="ssf", seed=5)
    nodes = TreeProblem("nodes", 3, 3, *filters, kinds="-ssf", parents=(-1, 0, 1, 2), seed=5)
    for rule in RULES:
        as_tree = nodes.measure(reference.accept, rule)
        assert as_tree.distance < 1e-12
        if "f" not in chain.kinds:
            assert as_tree == chain.measure(reference.accept, rule)


def match_with_own_draws(*args: Any, **options: Any) -> Acceptance:
    """Draw the target's own token at every node, then compare."""
    draft, logits, law, target_row = args[:4]
    drawn = [random.choose(0.5, probabilities(logits, law, row)) for row in target_row[0].tolist()]
    return reference.match(draft, torch.tensor([drawn]), max_depth=options["max_depth"])


@pytest.mark.parametrize("kinds", ["-fff", "-sfs", "-sss"])
def test_match_on_trees_with_the_targets_own_draws_is_exact(kinds: str) -> None:
    parents = (-1, 0, 0, 2)
    problem = TreeProblem("match", 3, 2, Filters(0.7), kinds=kinds, parents=parents, seed=3)
    assert problem.measure(match_with_own_draws, "token").distance < 1e-12


def test_match_accepts_as_many_fixed_drafts_as_the_token_rule() -> None:
    parents = (-1, 0, 0, 1, 2)
    problem = TreeProblem("fixed", 3, 2, kinds="-ffff", parents=parents, seed=3)
    by_match = problem.measure(match_with_own_draws, "token").mean_accepted
    by_rule = problem.measure(reference.accept, "token").mean_accepted
    assert by_match == pytest.approx(by_rule, abs=1e-12)


@pytest.mark.parametrize("mutant", TREE_MUTANTS, ids=lambda mutant: f"{mutant.name}-{mutant.rule}")
def test_wrong_verifier_of_trees_is_caught(mutant: Mutant) -> None:
    assert tree_bias(mutant) > 1e-6


@pytest.mark.parametrize("rule", RULES)
def test_cousins_that_share_noise_are_caught(rule: str) -> None:
    """The block rule looks at both, the token rule never does."""
    assert cousins(are_shared=False).measure(reference.accept, rule).distance < 1e-12
    shared = cousins(are_shared=True).measure(reference.accept, rule).distance
    assert shared > 1e-3 if rule == "block" else shared < 1e-12


def coupled(tree: list[int], place: str) -> tuple[list[int], list[int]]:
    """Return what a coupled step emits on a tree, and the text of plain seeded sampling.

    The noise of a node is keyed by the position of the token that it emits: its `place` ("depth",
    or wrongly "index") behind the root's.
    """
    vocab, root, seed = 4, 50, 9
    rows = torch.randn(vocab**3, vocab, generator=torch.Generator().manual_seed(1))

    def draw(prefix: list[int], position: int) -> int:
        number = sum((token + 1) * vocab**i for i, token in enumerate(prefix)) % len(rows)
        noise = torch.tensor([seed]), torch.tensor([position])
        return int(reference.sample(rows[number].softmax(0)[None], None, noise=noise))

    text: list[int] = []
    for position in range(root + 1, root + 4):
        text.append(draw(text, position))
    prefixes, own = [[]], []
    for node, parent in enumerate(tree):
        if node:  # the right continuation is the last sibling, the others are wrong
            above = prefixes[parent]
            is_last = node == max(i for i, p in enumerate(tree) if p == parent)
            right = text[len(above)]
            prefixes.append([*above, right if is_last else (right + 1) % vocab])
        offset = len(prefixes[node]) if place == "depth" else node
        own.append(draw(prefixes[node], root + offset + 1))
    tokens = [0] + [prefix[-1] for prefix in prefixes[1:]]
    draft = Draft(torch.tensor([tokens]), torch.tensor([len(tree)]), torch.tensor([tree]))
    out = reference.match(draft, torch.tensor([own]), max_depth=2)
    return out.output_tokens[0, : int(out.accepted_lens[0]) + 1].tolist(), text


def test_coupled_noise_by_depth_gives_the_plain_text_and_by_index_does_not() -> None:
    emitted, text = coupled([-1, 0, 0, 2, 2], "depth")
    assert emitted == text
    emitted, text = coupled([-1, 0, 0, 2, 2], "index")
    assert emitted != text
