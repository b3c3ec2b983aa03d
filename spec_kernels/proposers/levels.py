"""Grow drafts level by level from rows of logits: what all proposers with laws share.

    root -> children of the root -> children of these -> ...

At each level every node that has children gets a law, from a row of logits of its own or from one
that all nodes of the level share, and its children are chosen from that law. Every drawn token is
handed over with the row and the law it was really drawn from, and drawn with the coin of its parent
node and its rank: cousins share no coin.

The logits may have columns of their own (`draft_to_target`): drafts are ids of the target always.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from spec_kernels._check import require
from spec_kernels.ops import draft_coins, row_law, sample
from spec_kernels.proposers.base import DecodingState
from spec_kernels.proposers.best_first import BestFirst, Growth
from spec_kernels.proposers.template import TreeTemplate
from spec_kernels.targets.base import can_read
from spec_kernels.tree import top_children
from spec_kernels.types import (
    GREEDY_TEMPERATURE,
    OK,
    PAD_TOKEN,
    Draft,
    Law,
    SamplingParams,
    invert_id_map,
)

CHILDREN: Final = ("sampled", "replacement", "fixed", "mixed")

Tree = TreeTemplate | BestFirst | None


class Shown(NamedTuple):
    """A draft that grows, as it is shown to the proposer: its newest level is to be taken in.

    Attributes:
        tokens: `[batch, nodes] int64`, all nodes so far.
        parents: `[batch, nodes] int32`, or None: chains.
        start: first node of the newest level.
        depth: of these nodes; the root has 0.
        nodes: those of them that are to have children.
        num_nodes: `[batch] int32`, nodes so far of requests that want children at this depth; of
            others 0.
    """

    tokens: Tensor
    parents: Tensor | None
    start: int
    depth: int
    nodes: list[int]
    num_nodes: Tensor

    @staticmethod
    def make(
        tokens: Tensor,
        parents: Tensor | None,
        start: int,
        depth: int,
        nodes: list[int],
        limits: Tensor,
    ) -> Shown:
        """Count the nodes; `limits [batch] int32`, deepest draft of each request."""
        count = num_nodes_of(tokens)
        count = count.masked_fill((limits <= depth) | (count <= start), 0)
        return Shown(tokens, parents, start, depth, nodes, count)


Feed = Callable[[Shown], Tensor]
"""Return the logits behind `shown.nodes`, `[batch, nodes, vocab]`; or `[batch, 1, vocab]` where
these nodes share a row."""


class Growing:
    """How drafts are grown: the options of a proposer that a level is drawn by.

    Args:
        tree: children of each node by depth, or parents (`TreeTemplate.make`), or `BestFirst`, or
            None: a chain.
        children: one of `CHILDREN`; `BestFirst` takes the most likely ones whatever it says.
        temperature: of the drafts of sampling requests; None = each request's own.
        draft_to_target: `[draft_vocab] int64`, id of each column of the logits; None = the columns
            are the target's ids.
        depth: deepest node that the proposer has laws for; None = any.

    Raises:
        ValueError: the temperature is out of range, the tree is none or too deep, or children is
            unknown.
    """

    def __init__(
        self,
        tree: Sequence[int] | BestFirst | None = None,
        children: str = "sampled",
        temperature: float | None = None,
        draft_to_target: Tensor | None = None,
        depth: int | None = None,
    ) -> None:
        if temperature is not None:
            SamplingParams.make(temperature)
        require(
            children in CHILDREN,
            f"children must be one of {', '.join(CHILDREN)}, got {children!r}",
        )
        self.tree: Tree = TreeTemplate.make(tree) if isinstance(tree, Sequence) else tree
        if isinstance(self.tree, TreeTemplate) and depth is not None:
            deepest = self.tree.depth
            require(deepest <= depth, f"tree must be at most {depth} deep, got {deepest}")
        self.children = "fixed" if isinstance(tree, BestFirst) else children
        self.replacement = self.children == "replacement"
        self.temperature, self.depth = temperature, depth
        self.draft_to_target = draft_to_target


class _Children(NamedTuple):
    """The children of some nodes: `tokens [batch, parents, k] int64`, and which were drawn; None =
    none."""

    tokens: Tensor
    is_drawn: Tensor | None


class _Level(NamedTuple):
    """The rows of a level, and which of them belongs to each node with children.

    Attributes:
        logits: `[rows, columns]`.
        is_valid: `[rows] bool`, rows that may give children.
        law: of these rows, if anyone asks for it.
        row: `[batch, parents] int64`.
    """

    logits: Tensor
    is_valid: Tensor
    law: Law | None
    row: Tensor


class Grower:
    """Grows the drafts of one batch.

    Attributes:
        places: `[batch, nodes]`: number of each node of the last draft among those that were fed;
            -1 = it was not. None = the nodes were fed as they are.
    """

    def __init__(self, growing: Growing, state: DecodingState) -> None:
        self._tree, self._depth = growing.tree, growing.depth
        self._params = _draft_params(state.params, growing.temperature)
        self._is_greedy = self._params.temperature < GREEDY_TEMPERATURE
        self._has_greedy = bool(self._is_greedy.any())
        # Greedy requests take the likeliest ids: a batch of such needs neither coins nor laws.
        self._kind = "fixed" if bool(self._is_greedy.all()) else growing.children
        self._is_fixed = state.rule == "coupled" or self._kind == "fixed"
        self._wants_laws = self._kind != "fixed" or isinstance(growing.tree, BestFirst)
        self._ids = growing.draft_to_target
        self._id_of: Tensor | None = None  # of each column; behind them that of PAD_TOKEN = -1
        if self._ids is not None:
            invert_id_map(self._ids, state.vocab_size)  # refuses ids that the target lacks
            self._id_of = pad(self._ids, (0, 1), value=PAD_TOKEN)
        self.places: Tensor | None = None

    def grow(
        self,
        state: DecodingState,
        roots: Tensor,
        logits: Tensor,
        limits: Tensor,
        gamma: int,
        feed: Feed,
    ) -> Draft:
        """Grow a draft behind each root.

        Args:
            state: the batch.
            roots: `[batch, 1] int64`; `PAD_TOKEN` = absent.
            logits: `[batch, 1, vocab]`, behind the roots.
            limits: `[batch] int32`, deepest draft of each request.
            gamma: the deepest level, on the host.
            feed: see `Feed`.
        """
        gamma = gamma if self._depth is None else min(gamma, self._depth)
        if isinstance(self._tree, BestFirst):
            return self._grow_best(state, roots, logits, limits, gamma, feed)
        return self._grow_template(state, roots, logits, limits, gamma, feed)

    def _grow_template(
        self,
        state: DecodingState,
        tokens: Tensor,
        logits: Tensor,
        limits: Tensor,
        gamma: int,
        feed: Feed,
    ) -> Draft:
        is_chain = not isinstance(self._tree, TreeTemplate)
        template = TreeTemplate.make([1] * gamma) if is_chain else self._tree
        assert isinstance(template, TreeTemplate)
        depth, self.places, parents = min(gamma, template.depth), None, None
        if not is_chain:
            shape = torch.tensor(template.parents, dtype=torch.int32, device=tokens.device)
            parents = shape.repeat(len(tokens), 1)
        coins = None
        if self._kind != "fixed":
            size = len(template.parents), max(template.num_children)
            coins = draft_coins(state.seeds, state.root_positions, *size)
        rows = torch.full_like(tokens, -1, dtype=torch.int32)
        is_whole = can_read(limits) and int(limits.min()) >= depth
        levels: list[_Level] = []
        for depth_now in range(depth):
            nodes = template.inner(depth_now)
            inner = _inner(template, depth_now, tokens.device)
            if is_whole:  # what hangs on padding becomes padding all the same
                is_wanted = torch.ones_like(inner.expand(len(tokens), -1), dtype=torch.bool)
            else:
                is_there = tokens.index_select(1, inner) != PAD_TOKEN
                is_wanted = (limits[:, None] > depth_now) & is_there
            level = self._laws(state, logits, tokens, parents, nodes, is_wanted)
            counts = [template.num_children[node] for node in nodes]
            own = None if coins is None else coins.index_select(1, inner)
            found = self._choose(state, level, own, counts, depth_now)
            first = sum(len(one.logits) for one in levels)
            tokens, rows = _append(template, depth_now, tokens, rows, found, level.row + first)
            levels.append(level)
            if depth_now + 1 < depth:
                start, stop = template.levels[depth_now + 1]
                known = None if parents is None else parents[:, :stop]
                below = depth_now + 1
                inner_below = template.inner(below)
                logits = feed(Shown.make(tokens, known, start, below, inner_below, limits))
        return self._draft(tokens, parents, rows, levels)

    def _grow_best(
        self,
        state: DecodingState,
        roots: Tensor,
        logits: Tensor,
        limits: Tensor,
        gamma: int,
        feed: Feed,
    ) -> Draft:
        """Expand the likeliest nodes level by level, then keep the likeliest of all."""
        assert isinstance(self._tree, BestFirst)
        growth, k = Growth(self._tree, roots), self._tree.children
        depth = min(gamma, self._tree.depth)
        for depth_now in range(depth):
            nodes = list(range(*growth.level))
            is_wanted = (limits[:, None] > depth_now) & (growth.tokens[:, nodes] != PAD_TOKEN)
            shown = (growth.tokens, growth.parents)
            level = self._laws(state, logits, *shown, nodes, is_wanted)
            assert level.law is not None
            best = self._best(level, k)
            scale = torch.where(level.law.inv_temperature > 0.0, level.law.inv_temperature, 1.0)
            surprise = (level.logits.float() * scale[:, None]).log_softmax(1)
            score = surprise.gather(1, best.clamp(min=0))
            best = torch.where(
                is_wanted[..., None], self._to_target(state, best)[level.row], PAD_TOKEN
            )
            growth.add(best, score[level.row])
            if depth_now + 1 < depth:
                growth.expand()
                nodes, below = list(range(*growth.level)), depth_now + 1
                shown = (growth.tokens, growth.parents)
                logits = feed(Shown.make(*shown, nodes[0], below, nodes, limits))
        draft, self.places = growth.finish()
        return draft

    def _laws(
        self,
        state: DecodingState,
        logits: Tensor,
        tokens: Tensor,
        parents: Tensor | None,
        nodes: list[int],
        is_wanted: Tensor,
    ) -> _Level:
        """Apply the requests' adjustments and filters to `logits [batch, nodes or 1, vocab]`; the
        rows of nodes that want no children are invalid."""
        batch, device = len(tokens), logits.device
        if state.adjust_ is not None:  # the tokens on the way to a node count: no two are alike
            logits = logits.expand(-1, len(nodes), -1)
        rows = logits.shape[1]
        flat = logits.flatten(0, 1)
        flat = flat.float() if flat.dtype == torch.float64 else flat
        if rows < len(nodes):
            is_wanted = is_wanted.any(1, keepdim=True)
        if self._ids is None:
            flat = flat[:, : state.vocab_size]  # a wider model's padding is never drawn
        elif state.adjust_ is not None or state.rule == "coupled":
            narrow, flat = flat, flat.new_full((len(flat), state.vocab_size), float("-inf"))
            flat[:, self._ids] = narrow
        if state.adjust_ is None and not self._wants_laws:
            row = _rows_of_nodes(batch, rows, len(nodes), device)
            return _Level(flat, is_wanted.flatten(), None, row)
        request = torch.arange(batch, dtype=torch.int32, device=device)[:, None]
        owner = torch.where(is_wanted, request, -1).flatten()
        if state.adjust_ is not None:
            node = torch.tensor(nodes, dtype=torch.int32, device=device).repeat(batch)
            known = None if parents is None else parents[:, : tokens.shape[1]]
            state.adjust_(flat, owner, tokens, node, known)
            if self._ids is not None and state.rule != "coupled":
                flat = flat[:, self._ids]
        law = row_law(flat, self._params, owner) if self._wants_laws else None
        is_valid = is_wanted.flatten() if law is None else law.status == OK
        return _Level(flat, is_valid, law, _rows_of_nodes(batch, rows, len(nodes), device))

    def _choose(
        self,
        state: DecodingState,
        level: _Level,
        coins: Tensor | None,
        counts: list[int],
        depth: int,
    ) -> _Children:
        """Choose the children of nodes at one depth; `counts` of each, of which the most are k. The
        coins are there unless all are fixed."""
        batch, k = len(level.row), max(counts)
        kind = self._kind if k > 1 or self._kind == "fixed" else "sampled"
        best = None
        if kind in ("fixed", "mixed") or (self._has_greedy and k > 1):
            best = self._best(level, k)[level.row]
        if coins is None:
            assert best is not None
            return _Children(self._to_target(state, best), None)
        assert level.law is not None
        is_drawn = torch.ones(batch, len(counts), k, dtype=torch.bool, device=level.row.device)
        flat_coins = coins[..., :k].flatten(0, 1)
        row = level.row.flatten()
        is_shared = len(level.logits) < len(row)
        logits = level.logits[row] if is_shared else level.logits
        law = Law(*(column[row] for column in level.law)) if is_shared else level.law
        if state.rule == "coupled":
            seeds = state.seeds.repeat_interleave(len(counts))
            places = (state.root_positions + depth + 1).repeat_interleave(len(counts))
            tokens = sample(logits, law, noise=(seeds, places), k=k)
        elif kind == "mixed":
            assert best is not None
            limit = torch.tensor(counts, device=logits.device).repeat(batch)[:, None] - 1
            place = torch.arange(k - 1, device=logits.device)
            others = torch.where(place < limit, best.flatten(0, 1)[:, : k - 1], PAD_TOKEN)
            drawn = sample(logits, law, coins=flat_coins[:, 0], excluded=others)
            tokens = torch.cat([drawn, others], 1)
            is_drawn[:, :, 1:] = False
        else:
            uniform = flat_coins if k > 1 else flat_coins[:, 0]
            tokens = sample(logits, law, coins=uniform, k=k, replacement=kind == "replacement")
        tokens = tokens.view(is_drawn.shape)
        if best is not None and self._has_greedy and k > 1:
            is_greedy = self._is_greedy[:, None, None]
            tokens = torch.where(is_greedy, best, tokens)
            is_drawn &= ~is_greedy
        return _Children(self._to_target(state, tokens), is_drawn)

    def _best(self, level: _Level, k: int) -> Tensor:
        """Return the k likeliest columns of each row, `[rows, k]`; `PAD_TOKEN` in invalid ones."""
        return top_children(level.logits, k).masked_fill(~level.is_valid[:, None], PAD_TOKEN)

    def _to_target(self, state: DecodingState, columns: Tensor) -> Tensor:
        """Turn columns of the logits into ids of the target."""
        if self._id_of is None or state.rule == "coupled":
            return columns
        return self._id_of[columns]

    def _draft(
        self, tokens: Tensor, parents: Tensor | None, rows: Tensor, levels: Sequence[_Level]
    ) -> Draft:
        """Put the draft together; `match` and fixed drafts need no laws."""
        num_nodes = num_nodes_of(tokens)
        parents = None if parents is None else parents[:, : tokens.shape[1]]
        if self._is_fixed:
            return Draft(tokens, num_nodes, parents)
        laws = [level.law for level in levels if level.law is not None]
        law = Law(*map(torch.cat, zip(*laws, strict=True)))
        logits = torch.cat([level.logits for level in levels])
        return Draft(tokens, num_nodes, parents, logits, law, rows)


def _append(
    template: TreeTemplate,
    depth: int,
    tokens: Tensor,
    rows: Tensor,
    found: _Children,
    row: Tensor,
) -> tuple[Tensor, Tensor]:
    """Append the children of a level to tokens, and to the rows of laws if any were drawn; `row
    [batch, parents]` of their laws. What hangs on padding is padding."""
    above, parent, rank = _new_children(template, depth, tokens.device)
    children = found.tokens[:, parent, rank]
    children = children.masked_fill(tokens[:, above] == PAD_TOKEN, PAD_TOKEN)
    if found.is_drawn is not None:
        drawn = torch.where(found.is_drawn[:, parent, rank], row[:, parent], -1)
        rows = torch.cat([rows, drawn.to(torch.int32)], 1)
    return torch.cat([tokens, children], 1), rows


@functools.lru_cache(maxsize=256)
def _rows_of_nodes(batch: int, rows: int, nodes: int, device: torch.device) -> Tensor:
    """Return the row of each node, `[batch, nodes] int64`: its own, or one that all share."""
    place = torch.arange(rows, device=device).expand(nodes)
    return torch.arange(batch, device=device)[:, None] * rows + place


@functools.lru_cache(maxsize=256)
def _inner(template: TreeTemplate, depth: int, device: torch.device) -> Tensor:
    """Return the nodes of a depth that have children, `[nodes] int64`."""
    return torch.tensor(template.inner(depth), device=device)


@functools.lru_cache(maxsize=256)
def _new_children(
    template: TreeTemplate, depth: int, device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    """Return of each node below a depth its parent, the number of that among the nodes of the depth
    that have children, and its place among its siblings, `[nodes] int64` each."""
    inner, new = template.inner(depth), range(*template.levels[depth + 1])
    above = [template.parents[node] for node in new]
    numbers = above, [inner.index(node) for node in above], [template.ranks[node] for node in new]
    one, two, three = (torch.tensor(each, device=device) for each in numbers)
    return one, two, three


@functools.lru_cache(maxsize=256)
def _counts(most: int, device: torch.device) -> Tensor:
    """Return 1 to `most`, `[most] int32`."""
    return torch.arange(1, most + 1, dtype=torch.int32, device=device)


def num_nodes_of(tokens: Tensor) -> Tensor:
    """Return the place behind the last token of each request, `[batch] int32`."""
    return ((tokens != PAD_TOKEN) * _counts(tokens.shape[1], tokens.device)).amax(1)


def _draft_params(params: SamplingParams, temperature: float | None) -> SamplingParams:
    if temperature is None:
        return params
    is_greedy = params.temperature < GREEDY_TEMPERATURE
    return params._replace(temperature=torch.where(is_greedy, params.temperature, temperature))
