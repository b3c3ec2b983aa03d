"""The best static tree for a measured acceptance matrix, by dynamic programming (Sequoia, with
depth).

`P[d, b]` is the probability that, a node at depth d being accepted, its b-th child is accepted
next. A tree's expected tokens per step are the sum over its nodes, the root included, of the
product of `P` on the path. Let `F[d, n, b]` be the best sum of n nodes under a node at depth d,
itself counted as 1, that has b children:

    F[d, 1, 0] = 1;   F[d, n, b + 1] = max_m F[d, n - m, b] + P[d, b] * max_c F[d + 1, m, c]
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from spec_kernels._check import require
from spec_kernels.tree.topology import MAX_NODES, check_parents, parents_from_choices


class StaticTree(NamedTuple):
    """A tree of ranks that serves every step.

    Attributes:
        parents: the parent of each node, -1 for the root; nodes by depth, siblings by rank.
        ranks: which of its parent's best children each node is, from 0; -1 for the root.
        expected_tokens: tokens per step under the acceptance matrix, the final one included.
    """

    parents: list[int]
    ranks: list[int]
    expected_tokens: float


class _Level(NamedTuple):
    """The nodes of one depth: n counts the nodes of a subtree, from 0 to the bound."""

    value: Tensor  # [n + 1] float64, the best over all numbers of children
    children: Tensor  # [n + 1] int64, that number
    last: list[Tensor]  # [n + 1] int64 each, nodes under the b-th child if it is the last


def optimal_tree(acceptance: Sequence[Sequence[float]], nodes: int) -> StaticTree:
    """Find the tree of at most `nodes` nodes with the most expected tokens per step.

    Args:
        acceptance: `acceptance[d][b]`, the probability that a node at depth d that is accepted is
            followed by its child of rank b; its rows bound the depth, their length the children.
        nodes: most nodes, the root included.

    Returns:
        The smallest of the best trees.

    Raises:
        ValueError: nodes is not in [1, MAX_NODES]; rows differ in length; or an entry is not in
            [0, 1].

    Source:
        Chen et al. 2024, "Sequoia: scalable, robust, and hardware-aware speculative decoding".

    Example:
        >>> optimal_tree([[0.6, 0.3], [0.6, 0.1]], nodes=4)
        StaticTree(parents=[-1, 0, 0, 1], ranks=[-1, 0, 1, 0], expected_tokens=2.26)
    """
    levels = _solve(acceptance, nodes)
    best = levels[0].value
    size = int((best == best.max()).nonzero()[0])
    choices: list[tuple[int, ...]] = []
    stack: list[tuple[tuple[int, ...], int]] = [((), size)]
    while stack:
        choice, n = stack.pop()
        level = levels[len(choice)]
        for rank in reversed(range(int(level.children[n]))):
            below = int(level.last[rank][n])
            choices.append((*choice, rank))
            stack.append((choices[-1], below))
            n -= below
    parents, ranks = parents_from_choices(choices)
    return StaticTree(parents, ranks, float(best[size]))


def best_expected_tokens(acceptance: Sequence[Sequence[float]], nodes: int) -> list[float]:
    """Return the expected tokens per step of the best trees of at most 1, 2, ... `nodes` nodes.

    Args:
        acceptance: see `optimal_tree`.
        nodes: most nodes, the root included.

    Raises:
        ValueError: see `optimal_tree`.

    Example:
        >>> best_expected_tokens([[0.5, 0.25]], nodes=4)
        [1.0, 1.5, 1.75, 1.75]
    """
    best: list[float] = _solve(acceptance, nodes)[0].value[1:].cummax(0).values.tolist()
    return best


def expected_tokens(
    parents: Sequence[int], ranks: Sequence[int], acceptance: Sequence[Sequence[float]]
) -> float:
    """Return the expected tokens per step of a tree of ranks.

    Args:
        parents: a tree.
        ranks: which of its parent's best children each node is; the root's is not read.
        acceptance: see `optimal_tree`; what lies outside it is never accepted.

    Raises:
        ValueError: parents are no tree, ranks differ in length, or acceptance is malformed.

    Example:
        >>> expected_tokens([-1, 0, 0, 1], [-1, 0, 1, 0], [[0.5, 0.25], [0.5, 0.25]])
        2.0
    """
    check_parents(parents)
    require(
        len(ranks) == len(parents),
        f"ranks must have {len(parents)} entries, one per node, got {len(ranks)}",
    )
    table = _table(acceptance).tolist()
    depth, reached = [0], [1.0]
    for node in range(1, len(parents)):
        above, rank = parents[node], ranks[node]
        row = table[depth[above]] if depth[above] < len(table) else []
        depth.append(depth[above] + 1)
        reached.append(reached[above] * (row[rank] if 0 <= rank < len(row) else 0.0))
    return sum(reached)


def _table(acceptance: Sequence[Sequence[float]]) -> Tensor:
    """Check an acceptance matrix and return it as `[depth, ranks] float64`."""
    widths = sorted({len(row) for row in acceptance})
    require(len(widths) <= 1, f"acceptance must have rows of one length, got {widths}")
    for depth, row in enumerate(acceptance):
        for rank, value in enumerate(row):
            require(
                0.0 <= value <= 1.0,
                f"acceptance[{depth}][{rank}] must be in [0, 1], got {value}",
            )
    return torch.tensor([list(row) for row in acceptance], dtype=torch.float64).view(
        len(acceptance), widths[0] if widths else 0
    )


def _solve(acceptance: Sequence[Sequence[float]], nodes: int) -> list[_Level]:
    """Return the levels of the dynamic program, one per depth and one of leaves."""
    require(1 <= nodes <= MAX_NODES, f"nodes must be in [1, {MAX_NODES}], got {nodes}")
    table = _table(acceptance)
    alone = torch.full((nodes + 1,), -math.inf, dtype=torch.float64)
    alone[1] = 1.0
    levels = [_Level(alone, torch.zeros(nodes + 1, dtype=torch.int64), [])]
    for row in table.flip(0):
        values, last = [alone], []
        below = levels[-1].value
        for chance in row:
            child = torch.where(below == -math.inf, -math.inf, chance * below)
            value, under = _join(values[-1], child)
            values.append(value)
            last.append(under)
        value, children = torch.stack(values).max(0)
        levels.append(_Level(value, children, last))
    return levels[::-1]


def _join(rest: Tensor, child: Tensor) -> tuple[Tensor, Tensor]:
    """Return `max_m rest[n - m] + child[m]` for every n, and the m that reaches it."""
    n = torch.arange(rest.numel())
    left = n[:, None] - n
    total = torch.where(left >= 0, rest[left.clamp(min=0)] + child, -math.inf)
    value, under = total.max(1)
    return value, under
