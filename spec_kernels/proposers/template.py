"""The shape of a tree that is the same in every round."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from spec_kernels._check import require
from spec_kernels.tree import MAX_NODES, check_parents


@dataclass(frozen=True)
class TreeTemplate:
    """A static tree whose nodes are numbered level by level.

    Attributes:
        parents: the parent of each node, -1 for the root; depths never fall.

    Raises:
        ValueError: no tree (`check_parents`), only a root, or a node lies above an earlier one.

    Example:
        >>> TreeTemplate((-1, 0, 0, 1)).levels
        ((0, 1), (1, 3), (3, 4))
    """

    parents: tuple[int, ...]

    def __post_init__(self) -> None:
        check_parents(self.parents)
        require(len(self.parents) > 1, "a tree of drafts must have more than its root")
        depths = self._depths
        for node in range(1, len(depths)):
            require(
                depths[node - 1] <= depths[node],
                f"parents: node {node} has depth {depths[node]}, behind one of depth "
                f"{depths[node - 1]}; number the nodes level by level",
            )

    @staticmethod
    def make(tree: Sequence[int]) -> TreeTemplate:
        """Build a template from its parents, or from the number of children at each depth.

        Args:
            tree: parents, which begin with -1; or `[4, 2, 2]`: four children of the root, two of
                each of these, and so on.

        Raises:
            ValueError: see the class; or a number of children is below 1.

        Example:
            >>> TreeTemplate.make([2, 1]).parents
            (-1, 0, 0, 1, 2)
        """
        if tree and tree[0] == -1:
            return TreeTemplate(tuple(tree))
        parents, level = [-1], [0]
        for children in tree:
            require(children >= 1, f"tree must name at least 1 child per node, got {children}")
            size = len(parents) + len(level) * children
            require(size <= MAX_NODES, f"tree must have at most {MAX_NODES} nodes, got {size}")
            first = len(parents)
            parents += [parent for parent in level for _ in range(children)]
            level = list(range(first, len(parents)))
        return TreeTemplate(tuple(parents))

    @staticmethod
    def parse(text: str) -> TreeTemplate:
        """Read the number of children at each depth from text such as `4,2,2`, or parents such as
        `-1,0,0,1`.

        Raises:
            ValueError: see `make`; or the text is no list of numbers.

        Example:
            >>> len(TreeTemplate.parse("4,2,2").parents), TreeTemplate.parse("-1,0,0,1").depth
            (29, 2)
        """
        parts = [part.strip() for part in text.split(",")]
        are_numbers = all(map(str.isdecimal, parts[parts[0] == "-1" :]))
        require(are_numbers, f"tree must look like 4,2,2 or -1,0,0,1, got {text!r}")
        return TreeTemplate.make([int(part) for part in parts])

    @property
    def depth(self) -> int:
        """Depth of the deepest node."""
        return len(self.levels) - 1

    @cached_property
    def _depths(self) -> tuple[int, ...]:
        depths = [0]
        for parent in self.parents[1:]:
            depths.append(depths[parent] + 1)
        return tuple(depths)

    @cached_property
    def levels(self) -> tuple[tuple[int, int], ...]:
        """First node of each depth, and the node behind its last."""
        depths = self._depths
        starts = [depths.index(depth) for depth in range(depths[-1] + 1)]
        return tuple(zip(starts, [*starts[1:], len(depths)], strict=True))

    @cached_property
    def num_children(self) -> tuple[int, ...]:
        """Children of each node."""
        counts = [0] * len(self.parents)
        for parent in self.parents[1:]:
            counts[parent] += 1
        return tuple(counts)

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """Place of each node among its siblings; 0 for the root."""
        seen = [0] * len(self.parents)
        ranks = [0]
        for parent in self.parents[1:]:
            ranks.append(seen[parent])
            seen[parent] += 1
        return tuple(ranks)

    def inner(self, depth: int) -> list[int]:
        """Return the nodes of one depth that have children."""
        return [node for node in range(*self.levels[depth]) if self.num_children[node]]
