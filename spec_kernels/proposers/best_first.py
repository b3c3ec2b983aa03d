"""Trees that grow where the draft model is sure of itself (EAGLE-2).

1. The children of a node are the tokens that the draft model ranks first: fixed, never drawn.
2. Of the nodes of a level those with the likeliest paths are expanded.
3. Of all nodes those with the likeliest paths are kept: a node comes with its ancestors.

The shape depends on the tokens. That is exact because none of them was drawn.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from spec_kernels._check import require
from spec_kernels.tree import MAX_NODES, keep_best
from spec_kernels.types import PAD_TOKEN, Draft


@dataclass(frozen=True)
class BestFirst:
    """How a tree grows.

    Attributes:
        nodes: nodes of the tree that is verified, its root included.
        depth: deepest node.
        expanded: nodes of a level whose children are looked at.
        children: children of each of them.

    Raises:
        ValueError: nodes is outside [2, MAX_NODES], or another number is below 1.
    """

    nodes: int
    depth: int = 5
    expanded: int = 4
    children: int = 4

    def __post_init__(self) -> None:
        require(
            2 <= self.nodes <= MAX_NODES, f"nodes must be in [2, {MAX_NODES}], got {self.nodes}"
        )
        for name in ("depth", "expanded", "children"):
            value = getattr(self, name)
            require(value >= 1, f"{name} must be at least 1, got {value}")


class Growth:
    """A batch of trees while they grow: every node that was looked at, and those expanded.

    The expanded nodes are numbered on their own, level by level, since only they are fed to the
    draft model: 0 is the root.

    Attributes:
        tokens, parents: `[batch, expanded]`, of the expanded nodes.
        level: the newest of them, first and behind the last.
    """

    def __init__(self, shape: BestFirst, roots: Tensor) -> None:
        batch, device = len(roots), roots.device
        self._shape, self._depth = shape, 0
        self._nodes = roots
        self._parents = torch.full((batch, 1), -1, dtype=torch.int32, device=device)
        self._scores = torch.zeros(batch, 1, dtype=torch.float64, device=device)
        self._total = self._scores  # of the path to each node
        self._fed = torch.zeros(batch, 1, dtype=torch.int64, device=device)  # number if expanded
        self._frontier = self._fed  # which nodes the newest expanded ones are
        self.tokens, self.parents, self.level = roots, self._parents, (0, 1)

    def add(self, children: Tensor, scores: Tensor) -> None:
        """Append children and their log-probabilities, `[batch, newest, k]` each."""
        k = children.shape[2]
        above = self._frontier.repeat_interleave(k, 1)
        tokens = children.flatten(1)
        own = torch.where(tokens == PAD_TOKEN, float("-inf"), scores.flatten(1).double())
        total = self._total.gather(1, above) + own
        self._nodes = torch.cat([self._nodes, tokens], 1)
        self._parents = torch.cat([self._parents, above.to(torch.int32)], 1)
        self._scores = torch.cat([self._scores, own], 1)
        self._total = torch.cat([self._total, total], 1)
        self._fed = torch.cat([self._fed, torch.full_like(above, -1)], 1)
        self._depth += 1

    def expand(self) -> None:
        """Expand the likeliest nodes of the newest level; ties go to the lower node."""
        first = self._nodes.shape[1] - self._frontier.shape[1] * self._shape.children
        order = self._total[:, first:].sort(dim=1, descending=True, stable=True).indices
        chosen = first + order[:, : self._shape.expanded].sort(1).values
        start = self.tokens.shape[1]
        self.level = (start, start + chosen.shape[1])
        number = torch.arange(*self.level, device=chosen.device).expand_as(chosen)
        above = self._parents.gather(1, chosen).long()
        self._fed = self._fed.scatter(1, chosen, number)
        self.tokens = torch.cat([self.tokens, self._nodes.gather(1, chosen)], 1)
        self.parents = torch.cat([self.parents, self._fed.gather(1, above).to(torch.int32)], 1)
        self._frontier = chosen

    def finish(self) -> tuple[Draft, Tensor]:
        """Return the best nodes as a draft, and the number of each among the expanded ones,
        `[batch, nodes]`; -1 where it was not expanded."""
        is_present = self._nodes[:, 0] != PAD_TOKEN
        num_nodes = torch.where(is_present, self._nodes.shape[1], 0).to(torch.int32)
        draft = Draft(self._nodes, num_nodes, self._parents)
        best, kept = keep_best(draft, self._scores, self._shape.nodes, max_depth=self._depth)
        number = self._fed.gather(1, kept.clamp(min=0).long())
        return best, torch.where(kept >= 0, number, -1)
