"""Draft with a smaller model: it samples a chain or a tree level by level from its own laws.

A round of the session, whose cache holds a prefix of the committed tokens:

1. catch up: one forward over the committed tokens that the cache lacks, the root the last of them
   (one, or two after a round in which every draft was accepted); all but the root are kept;
2. draw the children of the root from the law there, feed them, draw their children, and so on: the
   nodes of the last level are drawn and not fed;
3. after the verification keep the accepted nodes that were fed, and forget the others.

Every drawn token is handed over with the row of logits and the law it was really drawn from, and
drawn with the coin of its parent node and its rank: cousins share no coin.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import torch
from torch import Tensor

from spec_kernels._check import require
from spec_kernels.ops import draft_coins, row_law, sample
from spec_kernels.proposers.base import DecodingState, needed_width, root_draft
from spec_kernels.proposers.best_first import BestFirst, Growth
from spec_kernels.proposers.template import TreeTemplate
from spec_kernels.targets import Cache, Target
from spec_kernels.tree import top_children
from spec_kernels.types import (
    GREEDY_TEMPERATURE,
    OK,
    PAD_TOKEN,
    Acceptance,
    Draft,
    Law,
    SamplingParams,
)

CHILDREN: Final = ("sampled", "replacement", "fixed", "mixed")


class DraftModelProposer:
    """Propose with a draft model that shares the target's tokenizer.

    Args:
        model: the draft model, behind the same protocol as a target.
        temperature: of the drafts of sampling requests; None = each request's own. The filters are
            the request's own. Greedy requests are drafted greedily.
        padded_vocab: allow another width of the logits than the target's. Right only where both
            share one tokenizer and the wider one is padded.
        tree: children of each node by depth, e.g. `[4, 2, 2]`, or the parents of a tree whose nodes
            are numbered level by level (`TreeTemplate`), or `BestFirst`: a tree that grows where
            its paths are likely, of fixed children whatever `children` says; None = a chain.
        children: how the siblings of a sampling request are chosen: "sampled" (drawn without
            replacement), "replacement" (drawn independently), "fixed" (the most likely ones), or
            "mixed" (one drawn, then the most likely ones). Under the coupled rule all but "fixed"
            are the k tokens that the noise ranks first. Siblings of greedy requests are fixed.

    Raises:
        ValueError: the temperature is out of range, the tree is none, or children is unknown; when
            a batch opens: the widths differ without `padded_vocab`.

    Note:
        A request whose context no longer fits into the draft model gets no drafts; its output does
        not change.
    """

    def __init__(
        self,
        model: Target,
        *,
        temperature: float | None = None,
        padded_vocab: bool = False,
        tree: Sequence[int] | BestFirst | None = None,
        children: str = "sampled",
    ) -> None:
        if temperature is not None:
            SamplingParams.make(temperature)
        require(
            children in CHILDREN,
            f"children must be one of {', '.join(CHILDREN)}, got {children!r}",
        )
        self.model = model
        self.temperature = temperature
        self.padded_vocab = padded_vocab
        self.tree = TreeTemplate.make(tree) if isinstance(tree, Sequence) else tree
        self.children = "fixed" if isinstance(tree, BestFirst) else children
        self.replacement = self.children == "replacement"

    def open(self, state: DecodingState, capacity: int) -> DraftModelSession:
        """Open the draft model's cache for a batch."""
        require(
            self.model.vocab_size == state.vocab_size or self.padded_vocab,
            f"the draft model has {self.model.vocab_size} ids and the target {state.vocab_size}: "
            "pass padded_vocab=True if both share one tokenizer and differ in padding only",
        )
        return DraftModelSession(self, state, capacity)


class _Children(NamedTuple):
    """The children of some nodes: `tokens [batch, parents, k] int64`, and which were drawn."""

    tokens: Tensor
    is_drawn: Tensor


class DraftModelSession:
    """The draft model at work on one batch.

    Attributes:
        cache: the draft model's cache. Between rounds it holds every committed token but the last
            one, or the last two; nothing of a request that outgrew the draft model is used.
    """

    wants_hidden = False

    def __init__(self, proposer: DraftModelProposer, state: DecodingState, capacity: int) -> None:
        self._model = proposer.model
        limit = self._model.max_length
        self._capacity = capacity if limit is None else min(capacity, limit)
        self._params = _draft_params(state.params, proposer.temperature)
        self._tree, self._kind = proposer.tree, proposer.children
        self._is_greedy = self._params.temperature < GREEDY_TEMPERATURE
        self._has_greedy = bool(self._is_greedy.any())
        self._is_fixed = state.rule == "coupled" or self._kind == "fixed"
        self.cache: Cache = self._model.open(state.lens.shape[0], self._capacity)
        self._lag = 1  # most committed tokens that a request's cache lacks, on the host
        self._before = (self.cache.context_lens, self._lag)
        self._fed = torch.zeros_like(state.lens)  # nodes of this round whose K/V are in the cache
        self._places: Tensor | None = None  # where the K/V of each node are; None = in its place

    def prefill(
        self, state: DecodingState, row: int, tokens: Sequence[int], hidden: Tensor | None
    ) -> None:
        """Feed the prompt but its last token, unless it is too long for the draft model."""
        if len(tokens) < self._capacity:
            last = self._model.vocab_size - 1
            self._model.prefill(self.cache, row, [min(token, last) for token in tokens])

    def propose(self, state: DecodingState, limits: Tensor, gamma: int) -> Draft:
        """Draw drafts up to `limits[b]` deep; their laws are kept for the verifier."""
        self._before = (self.cache.context_lens, self._lag)
        self._fed, self._places = torch.zeros_like(state.lens), None
        draft = root_draft(state, limits)
        if gamma == 0:
            self._lag += 1
            return draft
        room = self._capacity - state.lens + 1  # the last draft is drawn, not fed
        logits = self._catch_up(state, (limits >= 0) & (room > 0))
        grow = self._grow_best if isinstance(self._tree, BestFirst) else self._grow
        return grow(state, draft.tokens, logits, limits.minimum(room), gamma)

    def commit(self, state: DecodingState, result: Acceptance, hidden: Tensor | None) -> None:
        """Keep the committed tokens and the accepted drafts that were fed."""
        path = result.path
        if self._places is not None:
            place = self._places.gather(1, path.clamp(min=0).long()).to(torch.int32)
            path = torch.where(path >= 0, place, -1)
        is_kept = (path >= 0) & (path < self._fed[:, None])
        path = torch.where(is_kept, path, -1)
        self.cache.keep(path, (is_kept.sum(1, dtype=torch.int32) - 1).clamp(min=0))

    def rollback(self, state: DecodingState) -> None:
        """Return to the lengths before the round."""
        lens, self._lag = self._before
        self.cache.truncate(lens)

    def _catch_up(self, state: DecodingState, is_present: Tensor) -> Tensor:
        """Feed the committed tokens that the cache lacks and keep all but the root, which becomes
        node 0 of the draft; return the logits there, `[batch, 1, vocab]`."""
        context = self.cache.context_lens
        lag = torch.where(is_present, state.lens - context, 0)
        width = max(needed_width(lag, self._lag), 1)
        offset = torch.arange(width, device=lag.device)
        columns = (context[:, None] + offset).clamp(max=state.tokens.shape[1] - 1).long()
        is_real = offset < lag[:, None]
        tokens = torch.where(is_real, state.tokens.gather(1, columns), PAD_TOKEN)
        self._lag = 2
        logits = self._forward(tokens, lag, lag[:, None] - 1)
        path = torch.where(offset < lag[:, None] - 1, offset, -1)
        self.cache.keep(path.to(torch.int32), (lag - 2).clamp(min=0))
        self._fed = is_present.to(torch.int32)
        return logits

    def _grow(
        self, state: DecodingState, tokens: Tensor, logits: Tensor, limits: Tensor, gamma: int
    ) -> Draft:
        """Draw level after level behind the roots, `tokens [batch, 1]`."""
        is_chain = not isinstance(self._tree, TreeTemplate)
        template = TreeTemplate.make([1] * gamma) if is_chain else self._tree
        assert isinstance(template, TreeTemplate)
        depth = min(gamma, template.depth)
        parents = None
        if not is_chain:
            shape = torch.tensor(template.parents, dtype=torch.int32, device=tokens.device)
            parents = shape.repeat(len(tokens), 1)
        coins = draft_coins(
            state.seeds, state.root_positions, len(template.parents), max(template.num_children)
        )
        rows = torch.full_like(tokens, -1, dtype=torch.int32)
        laws: list[tuple[Tensor, Law]] = []
        for level in range(depth):
            nodes = template.inner(level)
            is_wanted = (limits[:, None] > level) & (tokens[:, nodes] != PAD_TOKEN)
            flat, law = self._laws(state, logits, tokens, parents, nodes, is_wanted)
            counts = [template.num_children[node] for node in nodes]
            found = self._choose(state, flat, law, coins[:, nodes], counts, level)
            first = sum(len(one) for one, _ in laws)
            tokens, rows = _append(template, level, tokens, rows, found, first)
            laws.append((flat, law))
            if level + 1 < depth:
                start, stop = template.levels[level + 1]
                known = None if parents is None else parents[:, :stop]
                inner = template.inner(level + 1)
                logits = self._feed(tokens, known, start, inner, limits > level + 1)
        return self._draft(tokens, parents, rows, laws)

    def _grow_best(
        self, state: DecodingState, roots: Tensor, logits: Tensor, limits: Tensor, gamma: int
    ) -> Draft:
        """Expand the likeliest nodes level by level, then keep the likeliest of all."""
        assert isinstance(self._tree, BestFirst)
        growth, k = Growth(self._tree, roots), self._tree.children
        depth = min(gamma, self._tree.depth)
        for level in range(depth):
            nodes = list(range(*growth.level))
            is_wanted = (limits[:, None] > level) & (growth.tokens[:, nodes] != PAD_TOKEN)
            shown = (growth.tokens, growth.parents)
            flat, law = self._laws(state, logits, *shown, nodes, is_wanted)
            best = torch.where(law.status[:, None] == OK, top_children(flat, k), PAD_TOKEN)
            scale = torch.where(law.inv_temperature > 0.0, law.inv_temperature, 1.0)
            surprise = (flat.float() * scale[:, None]).log_softmax(1)
            score = surprise.gather(1, best.clamp(min=0))
            growth.add(*(x.view(len(roots), len(nodes), k) for x in (best, score)))
            if level + 1 < depth:
                growth.expand()
                nodes = list(range(*growth.level))
                shown = (growth.tokens, growth.parents)
                logits = self._feed(*shown, nodes[0], nodes, limits > level + 1)
        draft, self._places = growth.finish()
        return draft

    def _laws(
        self,
        state: DecodingState,
        logits: Tensor,
        tokens: Tensor,
        parents: Tensor | None,
        nodes: list[int],
        is_wanted: Tensor,
    ) -> tuple[Tensor, Law]:
        """Apply the requests' adjustments and filters to `logits [batch, nodes, vocab]`, flat; the
        rows of nodes that want no children are invalid."""
        batch = logits.shape[0]
        flat = logits.flatten(0, 1)[:, : state.vocab_size]  # a wider model's padding is never drawn
        request = torch.arange(batch, dtype=torch.int32, device=flat.device)[:, None]
        owner = torch.where(is_wanted, request, -1).flatten()
        if state.adjust_ is not None:
            node = torch.tensor(nodes, dtype=torch.int32, device=flat.device).repeat(batch)
            known = None if parents is None else parents[:, : tokens.shape[1]]
            state.adjust_(flat, owner, tokens, node, known)
        return flat, row_law(flat, self._params, owner)

    def _choose(
        self,
        state: DecodingState,
        logits: Tensor,
        law: Law,
        coins: Tensor,
        counts: list[int],
        depth: int,
    ) -> _Children:
        """Choose the children of nodes at one depth; `counts` of each, of which the most are k."""
        batch, k = coins.shape[0], max(counts)
        flat_coins = coins[..., :k].flatten(0, 1)
        kind = self._kind if k > 1 or self._kind == "fixed" else "sampled"
        is_drawn = torch.ones(batch, len(counts), k, dtype=torch.bool, device=logits.device)
        best = None
        if kind in ("fixed", "mixed") or (self._has_greedy and k > 1):
            best = torch.where(law.status[:, None] == OK, top_children(logits, k), PAD_TOKEN)
        if kind == "fixed":
            assert best is not None
            return _Children(best.view(is_drawn.shape), ~is_drawn)
        if state.rule == "coupled":
            seeds = state.seeds.repeat_interleave(len(counts))
            places = (state.root_positions + depth + 1).repeat_interleave(len(counts))
            tokens = sample(logits, law, noise=(seeds, places), k=k)
        elif kind == "mixed":
            assert best is not None
            limit = torch.tensor(counts, device=logits.device).repeat(batch)[:, None] - 1
            place = torch.arange(k - 1, device=logits.device)
            others = torch.where(place < limit, best[:, : k - 1], PAD_TOKEN)
            drawn = sample(logits, law, coins=flat_coins[:, 0], excluded=others)
            tokens = torch.cat([drawn, others], 1)
            is_drawn[:, :, 1:] = False
        else:
            uniform = flat_coins if k > 1 else flat_coins[:, 0]
            tokens = sample(logits, law, coins=uniform, k=k, replacement=kind == "replacement")
        tokens = tokens.view(is_drawn.shape)
        if best is not None and self._has_greedy and k > 1:
            is_greedy = self._is_greedy[:, None, None]
            tokens = torch.where(is_greedy, best.view(is_drawn.shape), tokens)
            is_drawn &= ~is_greedy
        return _Children(tokens, is_drawn)

    def _feed(
        self,
        tokens: Tensor,
        parents: Tensor | None,
        start: int,
        nodes: list[int],
        is_wanted: Tensor,
    ) -> Tensor:
        """Feed the nodes from `start` on; return the logits behind some of them."""
        count = _num_nodes(tokens)
        num_nodes = torch.where(is_wanted & (count > start), count, 0)
        self._fed = torch.maximum(self._fed, num_nodes)
        places = torch.tensor(nodes, device=tokens.device).expand(len(tokens), -1)
        return self._forward(tokens, num_nodes, places, parents, start)

    def _forward(
        self,
        tokens: Tensor,
        num_nodes: Tensor,
        nodes: Tensor,
        parents: Tensor | None = None,
        start: int = 0,
    ) -> Tensor:
        """Write the nodes from `start` on behind the context; return the logits at some nodes,
        `[batch, nodes, vocab]`, arbitrary where there are none."""
        readable = tokens.clamp(max=self._model.vocab_size - 1)
        output = self._model.forward(readable, num_nodes, self.cache, parents=parents, start=start)
        row = output.row.gather(1, nodes.clamp(min=0).long()).clamp(min=0).long()
        return (
            output.logits[row]
            if len(output.logits)
            else output.logits.new_zeros(*row.shape, output.logits.shape[1])
        )

    def _draft(
        self,
        tokens: Tensor,
        parents: Tensor | None,
        rows: Tensor,
        laws: Sequence[tuple[Tensor, Law]],
    ) -> Draft:
        """Put the draft together; `match` and fixed drafts need no laws."""
        num_nodes = _num_nodes(tokens)
        parents = None if parents is None else parents[:, : tokens.shape[1]]
        if self._is_fixed:
            return Draft(tokens, num_nodes, parents)
        law = Law(*(torch.cat(columns) for columns in zip(*(law for _, law in laws), strict=True)))
        logits = torch.cat([logits for logits, _ in laws])
        return Draft(tokens, num_nodes, parents, logits, law, rows)


def _append(
    template: TreeTemplate,
    level: int,
    tokens: Tensor,
    rows: Tensor,
    found: _Children,
    first: int,
) -> tuple[Tensor, Tensor]:
    """Append the children of a level to tokens and rows; `first` is the first row of their laws,
    which lie by request and then by parent."""
    batch, parents, _ = found.tokens.shape
    place = {node: index for index, node in enumerate(template.inner(level))}
    new = range(*template.levels[level + 1])
    parent = torch.tensor([place[template.parents[node]] for node in new], device=tokens.device)
    rank = torch.tensor([template.ranks[node] for node in new], device=tokens.device)
    request = torch.arange(batch, device=tokens.device)[:, None]
    row = torch.where(found.is_drawn[:, parent, rank], first + request * parents + parent, -1)
    tokens = torch.cat([tokens, found.tokens[:, parent, rank]], 1)
    return tokens, torch.cat([rows, row.to(torch.int32)], 1)


def _num_nodes(tokens: Tensor) -> Tensor:
    """Return the place behind the last token of each request."""
    place = torch.arange(1, tokens.shape[1] + 1, dtype=torch.int32, device=tokens.device)
    return torch.where(tokens != PAD_TOKEN, place, 0).amax(1)


def _draft_params(params: SamplingParams, temperature: float | None) -> SamplingParams:
    if temperature is None:
        return params
    is_greedy = params.temperature < GREEDY_TEMPERATURE
    return params._replace(temperature=torch.where(is_greedy, params.temperature, temperature))
