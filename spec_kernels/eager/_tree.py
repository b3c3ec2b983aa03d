"""The drafts of one request, and the state of a node whose children are judged one by one.

With `a` the acceptance with which the walk entered a node, p the target's law there, q the law of
its sampled children (without the ids of its fixed children) and M the ids rejected so far:

    residual                 r(x) = (a * p(x) - s * q(x))+ off M, 0 on M;   Z = sum r
    start                    s = 0, Z = a, W = Z + (1 - a)
    entry of child y         b = min(1, r(y) / (W * D)),  D = 1 if it is fixed, else q(y) / rem
    sampled child rejected   s += W / rem; y joins M, and leaves q if siblings never repeat
    fixed child rejected     Z -= r(y); y joins M
    D = 0                    b = 0, and y does not join M: nothing is known of it

`rem` is the mass that q still has, 1 before anything has left it. Both Z and rem are summed over a
row only when they are asked for. Rows are read when the walk comes to their node, in float32;
probabilities of single ids and all scalars are float64.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from torch import Tensor

from spec_kernels.eager._rows import (
    INVALID,
    TILE,
    RowLaw,
    Weights,
    places_of,
    tile_sum_without,
)
from spec_kernels.eager.law import RowReader, on_same_ids
from spec_kernels.types import INVALID_DRAFT, OK, PAD_TOKEN, ZERO_Q


class Row(NamedTuple):
    """A row of logits with its law."""

    row: int
    law: RowLaw


class Residual(NamedTuple):
    """An unnormalised law and its sum per tile."""

    weights: Weights
    tiles: list[float]


class Readers(NamedTuple):
    """The rows of a call, shared by its requests."""

    target: RowReader
    draft: RowReader | None
    columns: Tensor | None  # [vocab] int64, draft column of each target id
    replacement: bool

    def column(self, token: int) -> int:
        """Return the draft column of a token, -1 if there is none."""
        assert self.draft is not None
        column = token if self.columns is None else int(self.columns[token])
        return column if 0 <= column < self.draft.vocab else -1


class Tree(NamedTuple):
    """The drafts of one request; on a chain, node i has the one child i + 1."""

    readers: Readers
    request: int
    tokens: list[int]
    draft_rows: list[int] | None
    target_rows: list[int]
    children: list[list[int]]
    num_nodes: int  # children from here on do not exist

    def target(self, node: int) -> Row:
        """Return the row that judges the children of a node."""
        row = self.target_rows[node]
        return Row(row, self.readers.target.law(row, self.request))

    def draft(self, node: int) -> Row | None:
        """Return the row that a node claims to be drawn from, None if it is fixed."""
        row = -1 if self.draft_rows is None else self.draft_rows[node]
        if row == -1:
            return None
        return Row(row, INVALID if self.readers.draft is None else self.readers.draft.law(row))


class Child(NamedTuple):
    """A draft that can be judged."""

    node: int
    token: int
    is_fixed: bool


def drop(weights: Weights, tokens: list[int]) -> None:
    """Set the weights of a few ids to 0, in place; ids outside the vocabulary have none."""
    places = places_of(weights.ids, tokens, weights.mass.numel())
    for place in places:  # one or two, mostly: an index tensor would cost more
        weights.mass[place] = 0.0


def _subtract_draft(weights: Weights, readers: Readers, q: Row, scale: float) -> None:
    """Subtract `scale` times a draft law from target weights, in place."""
    draft = readers.draft
    assert draft is not None
    if weights.ids is None and readers.columns is None:
        own = draft.weights(*q)
        if own.ids is None:
            if q.law.inv_temperature != 0.0:
                scale *= math.exp(-q.law.log_sum)
            shared = min(own.mass.numel(), weights.mass.numel())
            weights.mass[:shared].sub_(own.mass[:shared], alpha=scale)
            return
    mass = on_same_ids(weights, draft, q.row, q.law, readers.columns)
    weights.mass.sub_(mass, alpha=scale)


def _mass_without(readers: Readers, q: Row, tokens: set[int]) -> float:
    """Return the mass of a draft law off a few tokens, summed over the ids that are left."""
    assert readers.draft is not None
    weights = readers.draft.weights(*q)
    columns, mass = [readers.column(token) for token in tokens], weights.mass
    places = places_of(weights.ids, columns, mass.numel())
    tiles = weights.sums()
    for tile in {place // TILE for place in places}:
        tiles[tile] = tile_sum_without(mass, tile, places)
    scale = 1.0 if q.law.inv_temperature == 0.0 else math.exp(-q.law.log_sum)
    return math.fsum(tiles) * scale


class State:
    """A node on the walk: the scalars named above, and which of its children come next.

    Args:
        tree: the request's.
        node: where the walk is.
        a: the acceptance with which the walk entered the node.

    Attributes:
        child: the child to be judged, None behind the last one.
        is_leaf: whether no child can be judged.
        rejected: M.
        residual: r, if it was summed since the last rejection.
        status: what the request reports if the walk ends here, but for the target's row.
    """

    def __init__(self, tree: Tree, node: int, a: float) -> None:
        self.tree, self.node, self.a = tree, node, a
        self.status = OK
        self.rejected: list[int] = []
        self.residual: Residual | None = None
        self._q: Row | None = None
        children = self._usable_children()
        if children:
            self.target = tree.target(node)
            children = children if self.target.law.status == OK else []
        self.is_leaf = not children
        self._children = iter(children)
        self.child = next(self._children, None)
        self._removed = {c.token for c in children if c.is_fixed}  # from q
        self._s, self._gain, self._is_excluded = 0.0, 0.0, False
        self._mass: float | None = a  # None = to be summed
        self._rest: float | None = None if self._removed else 1.0

    def judge(self) -> tuple[float, float]:
        """Return r(y) and W * D of the child: its entry is their ratio, at most 1."""
        assert self.child is not None
        token, target = self.child.token, self.tree.readers.target
        p = target.probability(*self.target, token) if token < target.vocab else 0.0
        q, share, self._is_excluded = 0.0, 1.0, False
        if not self.child.is_fixed:
            q = self._q_of(token)
            share = q / self.rest() if q > 0.0 else 0.0
            self._is_excluded = q == 0.0
            self.status |= ZERO_Q if self._is_excluded else OK
        self._gain = 0.0 if token in self.rejected else max(self.a * p - self._s * q, 0.0)
        return self._gain, self.whole() * share

    def reject(self) -> None:
        """Reject the child, which was judged, and turn to the next one."""
        assert self.child is not None
        token = self.child.token
        if self.child.is_fixed:
            self._mass = max(self.mass() - self._gain, 0.0)
        else:
            rest = self.rest()
            self._s += self.whole() / rest if rest > 0.0 else 0.0
            self._mass = None
            if not (self.tree.readers.replacement or self._is_excluded):
                self._removed.add(token)
                self._rest = None
        if not self._is_excluded:
            self.rejected.append(token)
        self.residual = None
        self.child = next(self._children, None)

    def mass(self) -> float:
        """Return Z."""
        if self._mass is None:
            self.residual = residual_mass(self)
            self._mass = math.fsum(self.residual.tiles)
        return self._mass

    def whole(self) -> float:
        """Return W."""
        return self.mass() + (1.0 - self.a)

    def rest(self) -> float:
        """Return the mass that q still has."""
        if self._rest is None:
            assert self._q is not None
            self._rest = _mass_without(self.tree.readers, self._q, self._removed)
        return self._rest

    def scaled_target(self) -> Weights:
        """Return `a` times p, to be written until the next call."""
        # The weights stay for the residual behind the next sibling.
        keeps = self.child is not None
        return self.tree.readers.target.scaled(*self.target, self.a, keeps=keeps)

    def subtract_draft(self, weights: Weights) -> None:
        """Make `(w - s * q)+` of target weights w, in place; q is 0 at every fixed child."""
        if self._q is None or self._s == 0.0:
            return
        fixed = list(self._removed.difference(self.rejected))
        places = places_of(weights.ids, fixed, weights.mass.numel())
        before = [float(weights.mass[place]) for place in places]
        _subtract_draft(weights, self.tree.readers, self._q, self._s)
        weights.mass.clamp_min_(0.0)
        for place, weight in zip(places, before, strict=True):
            weights.mass[place] = weight

    def _usable_children(self) -> list[Child]:
        """Return the children that can be judged; the first sampled one of them names q."""
        found, tree = [], self.tree
        for node in tree.children[self.node]:
            if node >= tree.num_nodes:
                break
            token = tree.tokens[node]
            if token == PAD_TOKEN:
                continue
            q = tree.draft(node)
            if not self._is_usable(token, q):
                self.status |= INVALID_DRAFT
                continue
            self._q = self._q or q
            found.append(Child(node, token, q is None))
        return found

    def _is_usable(self, token: int, q: Row | None) -> bool:
        """Say whether a child has an id that exists and, if it is sampled, the law of its
        sampled siblings, which is valid."""
        readers = self.tree.readers
        limit = readers.target.vocab
        if q is not None:
            if q.law.status != OK or (self._q is not None and q.row != self._q.row):
                return False
            assert readers.draft is not None
            if readers.columns is None:
                limit = max(limit, readers.draft.vocab)
        return 0 <= token < limit

    def _q_of(self, token: int) -> float:
        """Return what q has left at a token; not divided by the mass that it has left."""
        readers = self.tree.readers
        assert self._q is not None
        assert readers.draft is not None
        column = -1 if token in self._removed else readers.column(token)
        return 0.0 if column < 0 else readers.draft.probability(*self._q, column)


def residual_mass(state: State) -> Residual:
    """Return the residual of a node behind its rejected children, and its mass per tile."""
    weights = state.scaled_target()
    state.subtract_draft(weights)
    drop(weights, state.rejected)
    return Residual(weights, weights.sums())
