"""Small trees whose joint output law is summed exactly: `tests.joint` with several children.

Every prefix has its own random row, as there. The children of a node are made as a drafter makes
them: fixed ones are the best of the draft row, sampled ones are drawn by the reference's own
`sample` without the fixed ids. What hangs below a child that could not be drawn is filled with
tokens that must not be read.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain, combinations
from random import Random
from typing import NamedTuple

import torch
from torch import Tensor

from spec_kernels import reference
from spec_kernels.types import PAD_TOKEN, Acceptance, Draft, Law
from tests.forking import outcomes
from tests.joint import Accept, Filters, Measured, Problem

Prefix = tuple[int, ...]
Visits = dict[tuple[int, Prefix], float]


class Survey(NamedTuple):
    """What enumeration found of a tree."""

    measured: Measured
    visits: Visits  # probability that the kept path leads over a node, by the tokens up to it


@dataclass(frozen=True)
class TreeProblem(Problem):
    """A problem whose drafts are a tree; `gamma` is its depth.

    `kinds` has a letter per node: s = sampled, f = fixed, d = fixed, a duplicate of the sibling
    before; the root's is not read.
    """

    parents: tuple[int, ...] = (-1,)
    replacement: bool = False
    row_per_depth: bool = False  # one draft row for all nodes of a depth

    def children(self, node: int) -> list[int]:
        return [i for i, parent in enumerate(self.parents) if parent == node]

    def height(self, node: int) -> int:
        return max((1 + self.height(child) for child in self.children(node)), default=0)

    @property
    def is_deepest_first(self) -> bool:
        """Say whether no sibling has deeper drafts below it than one before."""
        heights = [[self.height(c) for c in self.children(v)] for v in range(len(self.parents))]
        return all(row == sorted(row, reverse=True) for row in heights)

    def draft_number(self, prefix: Prefix) -> int:
        """Return the draft row behind `prefix`."""
        return self.number((0,) * len(prefix) if self.row_per_depth else prefix)

    def fixed(self, node: int, prefix: Prefix) -> list[int]:
        """Return the columns of the fixed children, best first."""
        row = self.logits[1][self.draft_number(prefix)].tolist()
        order = sorted(range(len(row)), key=lambda x: (-row[x], x))
        columns: list[int] = []
        for child in self.children(node):
            if self.kinds[child] == "f":
                columns.append(order[len(set(columns)) % len(order)])
            elif self.kinds[child] == "d":
                columns.append(columns[-1])
        return columns

    def sampled(self, node: int, prefix: Prefix, fixed: list[int]) -> list[int]:
        """Draw the columns of the sampled children; call it under `outcomes`."""
        count = sum(self.kinds[child] == "s" for child in self.children(node))
        if count == 0:
            return []
        number, law = self.draft_number(prefix), self.laws[1]
        return reference.sample(
            self.logits[1][number][None],
            None if law is None else Law(*(field[number][None] for field in law)),
            coins=torch.zeros(1, count, dtype=torch.float64),
            k=count,
            replacement=self.replacement,
            excluded=torch.tensor([fixed], dtype=torch.int64) if fixed else None,
        )[0].tolist()

    def drawing(self) -> Callable[[int, Prefix, list[int]], list[int]]:
        """Return what draws the sampled children in one step."""
        return self.sampled

    def propose(self) -> list[int]:
        """Draft the tokens of nodes 1..; `PAD_TOKEN` where nothing was left to draw."""
        draw = self.drawing()
        tokens, prefixes = [PAD_TOKEN] * len(self.parents), self.prefixes([])
        for node in range(len(self.parents)):
            prefix = prefixes[node]
            if prefix is None:
                continue
            fixed = self.fixed(node, prefix)
            sampled = iter(draw(node, prefix, fixed))
            rest = iter(fixed)
            for child in self.children(node):
                column = next(sampled if self.kinds[child] == "s" else rest)
                is_mapped = column != PAD_TOKEN and self.draft_to_target is not None
                tokens[child] = self.draft_to_target[column] if is_mapped else column  # type: ignore[index]
                prefixes[child] = None if column == PAD_TOKEN else (*prefix, tokens[child])
        return tokens[1:]

    def prefixes(self, tokens: list[int]) -> list[Prefix | None]:
        """Return the tokens that lead to each node, None where nothing does."""
        prefixes: list[Prefix | None] = [()] + [None] * (len(self.parents) - 1)
        for node, token in enumerate(tokens, start=1):
            above = prefixes[self.parents[node]]
            if above is not None and token != PAD_TOKEN:
                prefixes[node] = (*above, token)
        return prefixes

    def step(self, tokens: list[int]) -> tuple[Draft, Tensor]:
        prefixes, nodes = self.prefixes(tokens), range(len(self.parents))
        numbers = [0 if prefix is None else self.number(prefix) for prefix in prefixes]
        rows, filled = [-1], [0]
        for node in nodes[1:]:
            above = prefixes[self.parents[node]]
            is_sampled = self.kinds[node] == "s"
            rows.append(self.draft_number(above or ()) if is_sampled else -1)
            filled.append(tokens[node - 1] if above is not None else 0)
        draft = Draft(
            torch.tensor([filled]),
            torch.tensor([len(nodes)], dtype=torch.int32),
            torch.tensor([self.parents], dtype=torch.int32),
            self.logits[1],
            self.laws[1],
            torch.tensor([rows], dtype=torch.int32),
        )
        return draft, torch.tensor([numbers], dtype=torch.int32)

    @property
    def options(self) -> dict[str, object]:
        return {**super().options, "replacement": self.replacement}

    def survey(self, accept: Accept, rule: str) -> Survey:
        """Compare the output's law with the target's, and count which nodes are kept."""
        visits: Visits = Counter()

        def watched() -> Iterator[tuple[float, Acceptance]]:
            for weight, result in self.results(accept, rule):
                path = result.path[0, : int(result.accepted_lens[0]) + 1].tolist()
                tokens = result.output_tokens[0].tolist()
                for depth, node in enumerate(path):
                    visits[node, tuple(tokens[:depth])] += weight
                yield weight, result

        return Survey(self.sum_up(watched()), visits)

    def drafted(self) -> Visits:
        """Return the probability of each node's prefix."""
        found: Visits = Counter()
        for weight, tokens in outcomes(self.propose):
            for node, prefix in enumerate(self.prefixes(tokens)):
                if prefix is not None:
                    found[node, prefix] += weight
        return found

    def starts_with(self, prefix: Prefix) -> float:
        """Return the target's probability of `prefix`."""
        result = 1.0
        for depth, token in enumerate(prefix):
            law = self.plain(prefix[:depth])
            result *= law[token] if token < len(law) else 0.0
        return result

    def drafting_law(self, prefix: Prefix) -> list[float]:
        """Return q behind `prefix` by definition."""
        row = self.logits[1][self.draft_number(prefix)].tolist()
        return row if self.as_probabilities else self.draft.apply(row)

    def all_within(self, node: int, prefix: Prefix, kept: set[int]) -> float:
        """Return the probability that every child drafted behind `prefix` is in `kept`."""
        to_target = self.draft_to_target or range(self.width)
        fixed = self.fixed(node, prefix)
        if not {to_target[column] for column in fixed} <= kept:
            return 0.0
        q = self.drafting_law(prefix)
        q = [0.0 if column in fixed else x for column, x in enumerate(q)]
        within = {column for column in range(len(q)) if to_target[column] in kept}
        count = sum(self.kinds[child] == "s" for child in self.children(node))
        return all_drawn_within(q, within, count, self.replacement)

    def best_entry(self, node: int, prefix: Prefix, reached: float, drafted: float) -> float:
        """Return the bound on the probability that the output follows `prefix` and then a child
        of `node`: `min_H reached * p(H) + drafted * (1 - Pr(all children in H))`.

        Args:
            node, prefix: a node, and the tokens that lead to it.
            reached: probability that the output starts with `prefix`.
            drafted: probability that `node` was drafted behind `prefix`.
        """
        p = self.plain(prefix)
        subsets = chain.from_iterable(combinations(range(len(p)), n) for n in range(len(p) + 1))
        return min(
            reached * sum(p[x] for x in kept)
            + drafted * (1.0 - self.all_within(node, prefix, set(kept)))
            for kept in subsets
        )


def all_drawn_within(q: list[float], within: set[int], count: int, replacement: bool) -> float:
    """Return the probability that `count` draws from q stay within some ids."""
    total = sum(q)
    if count == 0 or total <= 0.0:
        return 1.0
    result = 0.0
    for x in within:
        if q[x] > 0.0:
            left = q if replacement else [0.0 if y == x else v for y, v in enumerate(q)]
            result += q[x] / total * all_drawn_within(left, within, count - 1, replacement)
    return result


# Random trees of each kind


def random_parents(random: Random, widest: int, deepest: int) -> tuple[int, ...]:
    """Return a tree of 3 to 6 nodes in which some node has several children."""
    while True:
        parents = [-1]
        for node in range(1, random.randint(3, 6)):
            parents.append(random.randrange(node))
        depths = [0]
        for parent in parents[1:]:
            depths.append(depths[parent] + 1)
        counts = [parents.count(node) for node in range(len(parents))]
        if 2 <= max(counts) <= widest and 2 <= max(depths) <= deepest:
            return tuple(parents)


def kinds_of(parents: tuple[int, ...], pattern: str, random: Random) -> str:
    """Give each child a letter: `pattern` by its place among its siblings, the last one repeated;
    "?" is s or f by chance."""
    kinds = ["-"]
    for node in range(1, len(parents)):
        place = parents[:node].count(parents[node])
        letter = pattern[min(place, len(pattern) - 1)]
        kinds.append(random.choice("sf") if letter == "?" else letter)
    return "".join(kinds)


_MIXED = Filters(0.8, top_k=3, top_p=0.9), Filters(1.3, top_p=0.95)

KINDS: dict[str, tuple[str, dict[str, object]]] = {
    "without-replacement": ("s", {}),
    "with-replacement": ("s", {"replacement": True}),
    "fixed": ("f", {}),
    "sampled-first": ("sf", {}),
    "fixed-first": ("fs", {}),
    "fixed-first-with-replacement": ("fs", {"replacement": True}),
    "uneven": ("?", {}),
    "duplicates": ("fds", {"replacement": True}),
    "scarce": ("s", {"draft": Filters(top_k=1)}),
    "scarce-mixed": ("sfs", {"draft": Filters(top_k=2)}),
    "filters": ("s", {"target": _MIXED[0], "draft": _MIXED[1]}),
    "filters-mixed": ("?", {"target": _MIXED[0], "draft": _MIXED[1]}),
    "parameters": ("sf", {"target": _MIXED[0], "law_on_the_way": True}),
    "probabilities": ("?", {"as_probabilities": True}),
    "greedy-target": ("?", {"target": Filters(0.0)}),
    "greedy-draft": ("?", {"draft": Filters(0.0)}),
    "row-per-depth": ("?", {"row_per_depth": True}),
    "narrower-draft": ("sf", {"draft_vocab": 2}),
    "mapped-draft": ("s", {"draft_vocab": 2, "draft_to_target": (2, 0)}),
    "wider-draft": ("s", {"draft_vocab": 4}),
}
"""Pattern of letters and further fields of each kind of problem."""

WAYS = tuple(KINDS)[tuple(KINDS).index("parameters") :]
"""Kinds that differ in how laws are handed over rather than in the tree: fewer trees will do."""


def drafts_of(problem: TreeProblem) -> float:
    """Return about how many drafts the tree can have."""
    size = 1.0
    for node in range(len(problem.parents)):
        count = sum(problem.kinds[child] == "s" for child in problem.children(node))
        for drawn in range(count):
            ids = (problem.draft_vocab or problem.vocab) - (0 if problem.replacement else drawn)
            size *= max(ids, 1)
    return size


def tree_problems(kind: str, count: int) -> Iterator[TreeProblem]:
    """Yield `count` random trees of a kind, none with more than 64 drafts."""
    pattern, fields = KINDS[kind]
    random, made = Random(kind), 0
    while made < count:
        parents = random_parents(random, widest=3, deepest=3)
        depths = [0]
        for parent in parents[1:]:
            depths.append(depths[parent] + 1)
        problem = TreeProblem(
            f"{kind}-{made}",
            vocab=3 + (made % 3 == 2 and "draft_vocab" not in fields),
            gamma=max(depths),
            kinds=kinds_of(parents, pattern, random),
            parents=parents,
            seed=1000 + made,
            **fields,  # type: ignore[arg-type]
        )
        if drafts_of(problem) <= 64:
            made += 1
            yield problem
