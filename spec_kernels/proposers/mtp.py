"""Draft with sequential MTP modules: each depth reads the token that the depth before drafted.

Module k takes in a token t, of the text or drafted, together with the state that module k - 1 gave
for the token in front of it (module 0 is the target: its last hidden state), and predicts the token
behind t. So its entry for the token at position n stands at position n - k:

    S_k(t) = module k (S_(k-1)(token in front of t), Emb(t))      depth k is drawn from S_k

A round in which drafts up to depth g are asked for. The root is the last committed token; new to a
module are those that it has not taken in yet, the root among them.

1. module 1 takes in its new tokens; depth 1 is drawn from S_1(root);
2. module 2 takes in its new tokens and the drafts of depth 1, depth 2 is drawn from these; and so
   on up to module g: each sees the whole way to every draft that it continues, as in training;
3. after the verification these modules keep the new tokens and forget the drafts, whether they were
   accepted or not: the next round takes the accepted ones in again, with true states;
4. modules deeper than g do nothing. What module g gave for its new tokens waits for module g + 1,
   which catches up when it is asked for drafts, or when `MOST_WAITING` tokens are new to it.

So the cache of module k holds what a fresh prefill of the tokens that it took in would leave, and
no number in it comes from a draft.

Source: DeepSeek-V3 technical report 2024 (section 2.2); Li et al. 2024 (EAGLE) where one module
serves every depth.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Final, NamedTuple

import torch
from torch import Tensor

from spec_kernels._check import require
from spec_kernels.nn import ContiguousKVCache, KVShape
from spec_kernels.nn.mtp import SequentialMTP
from spec_kernels.proposers._line import Fed, line_up, missing
from spec_kernels.proposers.base import DecodingState, needed_width, root_draft
from spec_kernels.proposers.best_first import BestFirst
from spec_kernels.proposers.heads import fit_hidden
from spec_kernels.proposers.levels import Grower, Growing, Shown
from spec_kernels.proposers.template import TreeTemplate
from spec_kernels.targets import Nodes, make_room
from spec_kernels.types import Acceptance, Draft

MOST_WAITING: Final = 64
"""States that wait for a module before it catches up unasked."""


class MTPProposer:
    """Propose with `SequentialMTP` modules over the target's last hidden states.

    Args:
        mtp: trained for the target, on its device. A reduced draft vocabulary brings its ids along:
            tokens outside it are never drafted.
        depth: deepest draft; by default one per module, or the tree's. A shared module may serve
            more depths.
        temperature: of the drafts of sampling requests; None = each request's own.
        tree: children of each node by depth, the parents of a tree, or `BestFirst`; None = a chain.
        children: how siblings are chosen, as of `DraftModelProposer`.

    Raises:
        ValueError: depth is below 1, or above the number of modules that share nothing; the
            temperature is out of range, the tree is none or too deep, or children is unknown; when
            a batch runs: the hidden states or the vocabulary do not fit.

    Note:
        A round feeds as many modules as it asks for drafts. A request with fewer tokens than depths
        drafts as many as it has in front of its root.
    """

    def __init__(
        self,
        mtp: SequentialMTP,
        *,
        depth: int | None = None,
        temperature: float | None = None,
        tree: Sequence[int] | BestFirst | None = None,
        children: str = "sampled",
    ) -> None:
        most = mtp.config.depth
        self.depth = most if depth is None else depth
        require(self.depth >= 1, f"depth must be at least 1, got {depth}")
        require(
            self.depth <= most or mtp.config.is_shared,
            f"depth must be at most the number of modules, {most}, got {depth}",
        )
        self.mtp, self.draft_to_target = mtp, mtp.draft_to_target
        self.growing = Growing(tree, children, temperature, mtp.draft_to_target, self.depth)
        if isinstance(self.growing.tree, TreeTemplate):
            self.depth = self.growing.tree.depth  # deeper modules have nothing to do
        self.replacement = self.growing.replacement

    def open(self, state: DecodingState, capacity: int) -> MTPSession:
        """Open a cache for every depth."""
        return MTPSession(self, state, capacity)


class _Memory(NamedTuple):
    """What a session remembers between rounds. Tensors are replaced, never written.

    Attributes:
        starts: of each module `[batch] int64`, position of the first token that is new to it.
        waiting: for each module the states in front of new tokens, `[batch, width, size]`: those
            that the one before has given. With n tokens before the root, module 1 has n + 1 less
            its start of them, a deeper one the start of the one before, plus 1, less its own.
        later: `[batch, 1, size]` of each round since then that asked for no drafts, the states of
            its roots: they belong behind those of module 1, which plain rounds leave undone.
    """

    starts: list[Tensor]
    waiting: list[Tensor]
    later: tuple[Tensor, ...] = ()


class MTPSession:
    """The modules at work on one batch.

    Attributes:
        caches: of each depth, the first first. With n tokens before those that are new to it, the
            cache of depth k holds n - k entries, or none.
    """

    wants_hidden = True

    def __init__(self, proposer: MTPProposer, state: DecodingState, capacity: int) -> None:
        self._mtp, self._depth = proposer.mtp, proposer.depth
        self._grower = Grower(proposer.growing, state)
        config, like = self._mtp.config, self._mtp.unembedding
        shape = KVShape(config.kv_heads, config.head_dim, config.head_dim)
        batch = len(state.lens)
        self.caches = [
            ContiguousKVCache(
                [shape], batch, max_length=capacity, dtype=like.dtype, device=like.device
            )
            for _ in range(self._depth)
        ]
        empty = like.new_zeros(batch, 1, config.hidden_size)
        start = torch.zeros(batch, dtype=torch.int64, device=like.device)
        self._memory = _Memory([start] * self._depth, [empty] * self._depth)
        self._before = (self._memory, [cache.context_lens for cache in self.caches])
        self._text, self._ends = state.tokens, start  # committed tokens of present requests
        self._fed: list[Fed] = []  # by module, in this round

    @torch.no_grad()
    def prefill(
        self, state: DecodingState, row: int, tokens: Sequence[int], hidden: Tensor | None
    ) -> None:
        """Take the prompt but its last token in, module by module."""
        start, waiting = self._memory.starts[0].clone(), [x.clone() for x in self._memory.waiting]
        start[row] = len(tokens)
        ids = torch.tensor([list(tokens)], dtype=torch.int64, device=start.device)
        states = waiting[0][row, :0] if hidden is None else fit_hidden(hidden, waiting[0])
        for depth, cache in enumerate(self.caches, 1):
            cache.free(row)
            if len(states):
                waiting[depth - 1][row, 0] = states[-1]
            length = len(tokens) - depth
            if length <= 0:
                states = states[:0]
                continue
            counts = [length if b == row else 0 for b in range(len(start))]
            num_nodes = torch.tensor(counts, dtype=torch.int32, device=start.device)
            if make_room(cache, num_nodes, length, is_tree=False) is None:
                cache.reserve(counts)
            new = Nodes(cache, num_nodes, length, counts, contained=False)
            states = self._run(depth, states[:length], ids[0, depth:], new)
            cache.advance(counts)
        self._memory = _Memory([start] * self._depth, waiting)

    @torch.no_grad()
    def propose(self, state: DecodingState, limits: Tensor, gamma: int) -> Draft:
        """Draw drafts up to `limits[b]` deep; a module for each depth takes in what is new."""
        self._before = (self._memory, [cache.context_lens for cache in self.caches])
        self._fed, draft = [], root_draft(state, limits)
        if gamma == 0 and len(self._memory.later) < MOST_WAITING:
            return draft
        is_present = limits >= 0
        self._text, self._ends = state.tokens, torch.where(is_present, state.lens.long(), 0)
        self._line_up_later()
        alone = Shown(draft.tokens, None, 0, 0, [0], draft.num_nodes)
        if gamma > 0:
            limits = limits.minimum(state.root_positions.to(torch.int32))
            logits = self._feed(alone)
            draft = self._grower.grow(state, draft.tokens, logits, limits, gamma, self._feed)
        if max(states.shape[1] for states in self._memory.waiting) > MOST_WAITING:
            while len(self._fed) < self._depth:
                self._take_in(alone)
        return draft

    def commit(self, state: DecodingState, result: Acceptance, hidden: Tensor | None) -> None:
        """Keep the new tokens in the caches that took them in, and what waits for a module."""
        assert hidden is not None
        if not self._fed:  # a plain round, of one node
            self._memory = self._memory._replace(later=(*self._memory.later, hidden))
            return
        starts, waiting = list(self._memory.starts), list(self._memory.waiting)
        is_present = result.path[:, 0] >= 0
        ends = torch.where(is_present, state.lens.long(), starts[0])
        for depth, fed in enumerate(self._fed, 1):
            cache, line = self.caches[depth - 1], fed.line
            cache.holds_tree = False  # what is kept lies in front
            if line.counts is not None:
                pairs = zip(line.counts, fed.start.tolist(), strict=True)
                cache.advance([max(count - max(depth - start, 0), 0) for count, start in pairs])
            else:
                kept = line.num_new - missing(depth, fed.start)
                cache.keep(torch.where(kept > 0, 0, -1)[:, None], (kept - 1).clamp(min=0))
            starts[depth - 1] = ends
        waiting[0] = _pick(fit_hidden(hidden, waiting[0]), result.path.clamp(min=0).long())
        for depth, fed in enumerate(self._fed[: self._depth - 1], 2):
            if depth <= len(self._fed):
                waiting[depth - 1] = _pick(fed.states, _behind(fed, [0]))
            else:
                have = fed.start - starts[depth - 1] + 1
                waiting[depth - 1] = _join(waiting[depth - 1], have, fed.states, fed.line.num_new)
        self._memory = _Memory(starts, waiting)

    def rollback(self, state: DecodingState) -> None:
        """Return to what was there before the round."""
        self._memory, lens = self._before
        for cache, length in zip(self.caches, lens, strict=True):
            cache.truncate(length)

    def _line_up_later(self) -> None:
        """Put the states of plain rounds behind those that wait for module 1: each request that is
        still there took part in all of these rounds."""
        starts, (first, *others), later = self._memory
        if later:
            is_present, more = self._ends > 0, len(later)
            have = torch.where(is_present, self._ends - starts[0] - more, 0)
            states = fit_hidden(torch.cat(later, 1), first)
            joined = _join(first, have, states, torch.where(is_present, more, 0))
            self._memory = _Memory(starts, [joined, *others])

    def _feed(self, shown: Shown) -> Tensor:
        """Feed the next module, and return its logits behind the nodes wanted."""
        self._take_in(shown)
        fed = self._fed[-1]
        return self._mtp.logits(_pick(fed.states, _behind(fed, shown.nodes)), len(self._fed))

    def _take_in(self, shown: Shown) -> None:
        """Let the next module take in its new tokens and the drafts so far; note its states."""
        depth = len(self._fed) + 1
        start, waiting = self._memory.starts[depth - 1], self._memory.waiting[depth - 1]
        above = self._fed[-1] if self._fed else None
        most = waiting.shape[1] + (0 if above is None else above.most - 1)
        given = waiting if above is None else torch.cat([waiting, above.states], 1)
        size = waiting.shape[1]
        line = line_up(depth, self._text, start, self._ends, shown, size, above, most)
        inputs = _pick(given, line.source)
        states = self._compute(depth, inputs, line.tokens, line.num_nodes, line.parents)
        if line.place is not None:
            states = _pick(states, line.place.clamp(max=states.shape[1] - 1))
        self._fed.append(Fed(start, line, most, states))

    def _compute(
        self, depth: int, inputs: Tensor, tokens: Tensor, num_nodes: Tensor, parents: Tensor | None
    ) -> Tensor:
        """Return the states of one module, `[batch, nodes, size]`; arbitrary behind `num_nodes`.

        Args:
            depth: of the module.
            inputs: `[batch, nodes, size]`, the states in front of the tokens.
            tokens: `[batch, nodes] int64`.
            num_nodes: `[batch] int32`.
            parents: `[batch, nodes] int32`, or None: chains.
        """
        cache, nodes = self.caches[depth - 1], tokens.shape[1]
        counts = make_room(cache, num_nodes, nodes, is_tree=parents is not None)
        new = Nodes(cache, num_nodes, nodes, counts, parents=parents)
        given = (depth, new.pick(inputs), new.pick(tokens), new)
        out = self._run(*given)
        if new.is_spoiled(out):
            out = self._run(*given)
        return new.spread(out)

    def _run(self, depth: int, hidden: Tensor, tokens: Tensor, new: Nodes) -> Tensor:
        """Return the states of one module at new nodes, `[tokens, size]`."""

        def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            return new.attend(0, query[0], key[0], value[0])[None]

        ids = tokens.clamp(min=0)[None]
        return self._mtp.state(hidden[None], ids, new.positions[None], attend, depth)[0]


def _behind(fed: Fed, nodes: Sequence[int]) -> Tensor:
    """Return the places of nodes of the draft, the root 0, among the states of a module, `[batch,
    nodes] int64`; any place where there is no root."""
    line, last = fed.line, fed.states.shape[1] - 1
    if line.counts is not None:
        places = ([min(max(n - 1 + node, 0), last) for node in nodes] for n in line.counts)
        return torch.tensor(list(places))
    root = line.num_new[:, None] - 1
    return (root + torch.tensor(nodes, device=root.device)).clamp(0, last)


def _join(first: Tensor, have: Tensor, then: Tensor, more: Tensor) -> Tensor:
    """Return the first `have[b]` states of each request and behind them `more[b]` others, `[batch,
    width, size]`."""
    width = first.shape[1]
    place = torch.arange(
        max(needed_width(have + more, width + then.shape[1]), 1), device=have.device
    )
    place = torch.where(place < have[:, None], place, place - have[:, None] + width)
    return _pick(torch.cat([first, then], 1), place.clamp(max=width + then.shape[1] - 1))


def _pick(states: Tensor, place: Tensor) -> Tensor:
    """Return `states[b, place[b, i]]`, `[batch, n, size]`, of `states [batch, nodes, size]`."""
    return states[_requests(len(states), states.device), place]


@functools.lru_cache(maxsize=64)
def _requests(batch: int, device: torch.device) -> Tensor:
    """Return the number of each request, `[batch, 1] int64`."""
    return torch.arange(batch, device=device)[:, None]
