"""Read one request's tree of drafts, and the laws that meet at each node, out of packed arguments.

A chain is the tree in which each node is the only child of the one before it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from spec_kernels.reference.law import is_valid, on_target_ids, probabilities, row_law
from spec_kernels.types import PAD_TOKEN, Draft, Law, SamplingParams


class Topology(NamedTuple):
    """The nodes of a request and how they hang together, whatever their tokens."""

    parents: list[int]
    children: list[list[int]]  # of each node, ascending
    is_bad: bool  # malformed: only the root is left

    def path(self, node: int) -> list[int]:
        """Return the nodes from the root to `node`."""
        path = [node]
        while path[-1] != 0:
            path.append(self.parents[path[-1]])
        return path[::-1]


def read_topology(draft: Draft, request: int, max_depth: int) -> Topology | None:
    """Return the nodes of a request, None if it is absent.

    A chain is cut at `max_depth`; a tree with a node below it is malformed, as is one with a
    parent that does not come before its child.

    Example:
        >>> draft = Draft(torch.zeros(1, 4), torch.tensor([4]), torch.tensor([[-1, 0, 0, 1]]))
        >>> read_topology(draft, 0, max_depth=2).children
        [[1, 2], [3], [], []]
        >>> read_topology(draft, 0, max_depth=1)
        Topology(parents=[-1], children=[[]], is_bad=True)
    """
    nodes = min(int(draft.num_nodes[request]), draft.tokens.shape[1])
    if nodes <= 0:
        return None
    if draft.parents is None:
        parents = list(range(-1, min(nodes, max_depth + 1) - 1))
    else:
        parents = draft.parents[request, :nodes].tolist()
    children: list[list[int]] = [[] for _ in parents]
    depth = [0] * len(parents)
    for node, parent in enumerate(parents):
        is_fine = 0 <= parent < node if node else parent == -1
        if is_fine and node:
            depth[node] = depth[parent] + 1
            children[parent].append(node)
        if not is_fine or depth[node] > max_depth:
            return Topology([-1], [[]], True)
    return Topology(parents, children, False)


class Child(NamedTuple):
    """A draft that can be judged."""

    node: int
    token: int
    column: int  # of the token in the draft law, -1 = none
    is_fixed: bool


class Family(NamedTuple):
    """A node with its children that can be judged, and the two laws that meet at them."""

    p: Tensor | None  # [vocab], the target's law after the node; None = invalid row, no children
    q: Tensor | None  # [draft_vocab], what the sampled children were drawn from; None = no such
    q_target: Tensor | None  # [vocab], q over the target's ids
    children: list[Child]  # ascending
    has_fixed: bool
    has_fault: bool  # a child, left out here, can't be judged


class Tree:
    """One request's tree; laws are read when a node is asked for.

    Args:
        topology: the request's nodes.
        draft, target_logits, target_law, target_row, target_to_draft: see `accept`.
        request: index of the request.
    """

    def __init__(
        self,
        topology: Topology,
        draft: Draft,
        target_logits: Tensor,
        target_law: Law | SamplingParams | None,
        target_row: Tensor,
        target_to_draft: Tensor | None,
        request: int,
    ) -> None:
        self.topology, self.draft, self.request = topology, draft, request
        self.target_logits, self.target_law = target_logits, target_law
        self.target_row, self.target_to_draft = target_row, target_to_draft
        self.vocab = target_logits.shape[1]

    def family(self, node: int) -> Family:
        """Return a node with its children that can be judged."""
        p, children, has_fault = self.target(node), self.topology.children[node], False
        usable: list[Child] = []
        first_row = -1  # siblings share one law: the first one's
        for child in children:
            token, row = int(self.draft.tokens[self.request, child]), self.draft_row(child)
            if token == PAD_TOKEN:
                continue
            if self.has_fault(token, row) or (row != -1 and first_row not in (-1, row)):
                has_fault = True
                continue
            first_row = row if first_row == -1 else first_row
            usable.append(Child(child, token, self.column(token), row == -1))
        if p is None:
            usable = []
        fixed = [child.column for child in usable if child.is_fixed]
        if len(fixed) == len(usable):
            return Family(p, None, None, usable, bool(fixed), has_fault)
        assert self.draft.logits is not None
        q = probabilities(self.draft.logits, self.draft.law, first_row).clone()
        q[[column for column in fixed if column >= 0]] = 0.0
        q_target = on_target_ids(q, self.vocab, self.target_to_draft)
        return Family(p, q, q_target, usable, bool(fixed), has_fault)

    def target(self, node: int) -> Tensor | None:
        """Return the target's law after `node`, None if that row is invalid."""
        row, logits, law = int(self.target_row[self.request, node]), self.target_logits, None
        rows = logits.shape[0]
        if isinstance(self.target_law, SamplingParams) and 0 <= row < rows:
            law = row_law(logits[row][None], self.target_law, torch.tensor([self.request]))
            logits, row, rows = logits[row][None], 0, 1
        elif isinstance(self.target_law, Law):
            law = self.target_law
        return probabilities(logits, law, row) if is_valid(law, row, rows) else None

    def draft_row(self, node: int) -> int:
        """Return the row that `node` was drawn from, -1 if it is fixed."""
        return -1 if self.draft.row is None else int(self.draft.row[self.request, node])

    def has_fault(self, token: int, row: int) -> bool:
        """Say whether a draft is unusable: its id, its row or the law of its row."""
        logits = self.draft.logits
        if row == -1:
            return not 0 <= token < self.vocab
        if logits is None or not is_valid(self.draft.law, row, logits.shape[0]):
            return True
        widest = logits.shape[1] if self.target_to_draft is None else 0
        return not 0 <= token < max(self.vocab, widest)

    def column(self, token: int) -> int:
        """Return the column of a target id in the draft law, -1 if it has none."""
        width = 0 if self.draft.logits is None else self.draft.logits.shape[1]
        column = token if self.target_to_draft is None else int(self.target_to_draft[token])
        return column if 0 <= column < width else -1
