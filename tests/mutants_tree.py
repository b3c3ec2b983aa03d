"""Known wrong verifiers of trees, as in `tests.mutants`; and drafters that break the rules."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from spec_kernels import reference, tree
from spec_kernels.reference import random
from spec_kernels.types import PAD_TOKEN, Acceptance, Draft
from tests.joint_tree import Prefix, TreeProblem, drafts_of, tree_problems
from tests.mutants import Mutant, module, patched, rewired
from tests.mutants_rows import Call

originals = {name: getattr(module, name) for name in ("entry", "reject", "exhaust", "residual")}


def with_options(**changes: object) -> Callable[..., Acceptance]:
    def accept(*args: Any, **options: Any) -> Acceptance:
        return reference.accept(*args, **{**options, **changes})

    return accept


def not_renormalised(state: Any) -> float:
    return 1.0


def stale_p(state: Any, child: Any) -> tuple[float, float]:
    """Judge every sibling by the plain p instead of what the earlier ones left of it."""
    first = module.State(state.node, state.a, state.family, state.replacement)
    numerator, _ = originals["entry"](first, child)
    _, denominator = originals["entry"](state, child)
    return numerator, denominator


def stale_mass(state: Any, child: Any) -> tuple[float, float]:
    """Judge by the residual as it stands, without its mass."""
    numerator, _ = originals["entry"](state, child)
    return numerator, module.drafting(state, child)


def only_masks(state: Any) -> Tensor:
    """Take only the tried ids out of p, not the law that proposed them."""
    weights: Tensor = state.a * state.family.p
    weights[state.masked] = 0.0
    return weights


def enters_with_one(tree: Any, node: int, a: float, replacement: bool) -> Any:
    return originals["exhaust"](tree, node, 1.0, replacement)


def forgets_its_entry(state: Any) -> float:
    return 1.0 if state.mass == 0.0 else float(state.mass)


def tries_backwards(tree: Any, node: int) -> Any:
    family = original_family(tree, node)
    return family._replace(children=family.children[::-1])


original_family = module.Tree.family


def patched_family(family: Callable[[Any, int], Any]) -> Callable[..., Acceptance]:
    """Return the reference that reads the children of a node in another way."""

    class Other(module.Tree):  # type: ignore[misc, name-defined]
        def family(self, node: int) -> Any:
            return family(self, node)

    return patched(Tree=Other)


def keeps_fixed_in_q(tree: Any, node: int) -> Any:
    """Leave the ids of fixed siblings in the law that the sampled ones are said to come from."""
    family = original_family(tree, node)
    if family.q is None or not family.has_fixed:
        return family
    row = next(tree.draft_row(c.node) for c in family.children if not c.is_fixed)
    q = module.Tree.__init__.__globals__["probabilities"](tree.draft.logits, tree.draft.law, row)
    return family._replace(q=q, q_target=q, has_fixed=False)


def softmax_of_fixed(call: Call) -> Call:
    """Claim that fixed children were drawn: from the row of the sampled ones, or any other."""
    rows = call.draft.row.clone()
    parents = call.draft.parents[0].tolist()
    for node in range(1, len(parents)):
        if rows[0, node] < 0:
            rows[0, node] = call.target_row[0, parents[node]]
    return call._replace(draft=call.draft._replace(row=rows))


def drops_unlikely_nodes(call: Call) -> Call:
    """Take drawn nodes that the target finds unlikely out of the tree."""
    tokens = call.draft.tokens.clone()
    for node, parent in enumerate(call.draft.parents[0].tolist()):
        p = call.logits[call.target_row[0, max(parent, 0)]].softmax(0)
        if node and tokens[0, node] >= 0 and p[tokens[0, node]] < 0.2:
            tokens[0, node] = PAD_TOKEN
    return call._replace(draft=call.draft._replace(tokens=tokens))


def draws_per_path(*args: Any, **options: Any) -> Acceptance:
    """Verify every root-to-leaf path as a chain of its own, and keep the longest result."""
    call, best = Call(*args), None
    for path in tree.paths_from_parents(call.draft.parents[0].tolist()):
        draft = Draft(
            call.draft.tokens[:, path],
            torch.tensor([len(path)]),
            None,
            call.draft.logits,
            call.draft.law,
            call.draft.row[:, path],
        )
        rows, coins = call.target_row[:, path], call.accept_coins[:, path]
        found = reference.accept(draft, *call[1:3], rows, coins, call.final_coins, **options)
        if best is None or found.accepted_lens > best.accepted_lens:
            best = found
    assert best is not None
    return best


TREE_MUTANTS = (
    Mutant("stale-q", "token", with_options(replacement=True), "section 4", "without-replacement"),
    Mutant("stale-q", "block", with_options(replacement=True), "section 4", "without-replacement"),
    Mutant(
        "removes-what-was-put-back",
        "token",
        with_options(replacement=False),
        "section 4",
        "with-replacement",
    ),
    Mutant(
        "not-renormalised",
        "token",
        patched(remaining_mass=not_renormalised),
        "section 4",
        "without-replacement",
    ),
    Mutant("stale-p", "token", patched(entry=stale_p), "section 4", "without-replacement"),
    Mutant("stale-mass", "token", patched(entry=stale_mass), "section 4", "sampled-first"),
    Mutant("only-masks", "token", patched(residual=only_masks), "section 4", "without-replacement"),
    Mutant("only-masks", "block", patched(residual=only_masks), "section 4", "without-replacement"),
    Mutant(
        "enters-with-one",
        "block",
        patched(exhaust=enters_with_one),
        "section 4",
        "without-replacement",
    ),
    Mutant(
        "forgets-its-entry",
        "block",
        patched(kept_probability=forgets_its_entry),
        "section 4",
        "without-replacement",
    ),
    Mutant(
        "tries-backwards",
        "token",
        patched_family(tries_backwards),
        "section 4",
        "without-replacement",
    ),
    Mutant(
        "keeps-fixed-in-q", "token", patched_family(keeps_fixed_in_q), "section 4", "sampled-first"
    ),
    Mutant("softmax-q-of-fixed", "token", rewired(softmax_of_fixed), "section 1, B017", "fixed"),
    Mutant(
        "softmax-q-of-fixed", "block", rewired(softmax_of_fixed), "section 1, B017", "sampled-first"
    ),
    Mutant(
        "drops-drawn", "token", rewired(drops_unlikely_nodes), "section 4", "without-replacement"
    ),
    Mutant(
        "drops-drawn", "block", rewired(drops_unlikely_nodes), "section 4", "without-replacement"
    ),
    Mutant("draws-per-path", "token", draws_per_path, "section 4", "star"),
    Mutant("draws-per-path", "block", draws_per_path, "section 4", "star"),
)

STAR = TreeProblem("star", 3, 1, kinds="-ss", parents=(-1, 0, 0))


def tree_bias(mutant: Mutant) -> float:
    """Return how far the mutant's output law is from the target's, on the worse of two small trees
    of the kind that shows it."""
    problems = [STAR]
    if mutant.shown_by != "star":
        problems = sorted(tree_problems(mutant.shown_by, 8), key=drafts_of)[:2]
    return max(problem.measure(mutant.accept, mutant.rule).distance for problem in problems)


@dataclass(frozen=True)
class CousinProblem(TreeProblem):
    """Draws made from coins of three values, from draft laws in thirds, so that two draws can share
    a coin and the sum over all coins is still exact.

    `are_shared`: nodes of one depth draw their children with the same coins, as happens when the
    key of a coin names the depth instead of the parent node.
    """

    are_shared: bool = False

    @cached_property
    def logits(self) -> tuple[Tensor, Tensor]:
        rows = sum(self.vocab**depth for depth in range(self.gamma + 1))
        generator = torch.Generator().manual_seed(self.seed)
        target = torch.rand(rows, self.vocab, generator=generator).double()
        cells = torch.randint(self.vocab, (rows, 3), generator=generator)
        draft = torch.nn.functional.one_hot(cells, self.vocab).double().sum(1) / 3
        return target / target.sum(1, keepdim=True), draft

    def drawing(self) -> Callable[[int, Prefix, list[int]], list[int]]:
        cells: dict[tuple[int, int], int] = {}

        def draw(node: int, prefix: Prefix, fixed: list[int]) -> list[int]:
            tokens = []
            cumulative = self.logits[1][self.number(prefix)].cumsum(0)
            for place in range(len(self.children(node))):
                key = (len(prefix) if self.are_shared else node, place)
                if key not in cells:
                    cells[key] = random.choose(0.5, torch.ones(3))
                coin = torch.tensor((cells[key] + 0.5) / 3, dtype=torch.float64)
                tokens.append(int(torch.searchsorted(cumulative, coin)))
            return tokens

        return draw


def cousins(are_shared: bool) -> CousinProblem:
    """Return two drawn siblings, each with a drawn child."""
    return CousinProblem(
        "cousins",
        vocab=2,
        gamma=2,
        kinds="-ssss",
        parents=(-1, 0, 0, 1, 2),
        replacement=True,
        as_probabilities=True,
        seed=5,
        are_shared=are_shared,
    )
