"""Draft with a smaller model: it samples a chain or a tree level by level from its own laws.

A round of the session, whose cache holds a prefix of the committed tokens:

1. catch up: one forward over the committed tokens that the cache lacks, the root the last of them
   (one, or two after a round in which every draft was accepted); all but the root are kept;
2. draw the children of the root from the law there, feed them, draw their children, and so on: the
   nodes of the last level are drawn and not fed;
3. after the verification keep the accepted nodes that were fed, and forget the others.

How children are chosen, and what the verifier is told, is in `levels`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from spec_kernels._check import require
from spec_kernels.proposers.base import DecodingState, needed_width, root_draft
from spec_kernels.proposers.best_first import BestFirst
from spec_kernels.proposers.levels import Grower, Growing, Shown
from spec_kernels.targets import Cache, Target, can_read
from spec_kernels.types import PAD_TOKEN, Acceptance, Draft


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
        not change. On a GPU a paged cache of the draft model must have blocks for all requests in
        full (`num_blocks=None` has): a round raises `OutOfBlocks` otherwise.
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
        self.model, self.padded_vocab = model, padded_vocab
        self.growing = Growing(tree, children, temperature)
        self.replacement = self.growing.replacement

    def open(self, state: DecodingState, capacity: int) -> DraftModelSession:
        """Open the draft model's cache for a batch."""
        require(
            self.model.vocab_size == state.vocab_size or self.padded_vocab,
            f"the draft model has {self.model.vocab_size} ids and the target {state.vocab_size}: "
            "pass padded_vocab=True if both share one tokenizer and differ in padding only",
        )
        return DraftModelSession(self, state, capacity)


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
        self._grower = Grower(proposer.growing, state)
        self.cache: Cache = self._model.open(state.lens.shape[0], self._capacity)
        self._lag = 1  # most committed tokens that a request's cache lacks, on the host
        self._before = (self.cache.context_lens, self._lag)
        self._fed = torch.zeros_like(state.lens)  # nodes of this round whose K/V are in the cache

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
        self._fed = torch.zeros_like(state.lens)
        self._grower.places = None
        draft = root_draft(state, limits)
        if gamma == 0:
            self._lag += 1
            return draft
        room = self._capacity - state.lens + 1  # the last draft is drawn, not fed
        logits = self._catch_up(state, (limits >= 0) & (room > 0))
        limits = limits.minimum(room)
        return self._grower.grow(state, draft.tokens, logits, limits, gamma, self._feed)

    def commit(self, state: DecodingState, result: Acceptance, hidden: Tensor | None) -> None:
        """Keep the committed tokens and the accepted drafts that were fed."""
        path = result.path
        if self._grower.places is not None:
            place = self._grower.places.gather(1, path.clamp(min=0).long()).to(torch.int32)
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

    def _feed(self, shown: Shown) -> Tensor:
        """Feed the nodes of a level; return the logits behind some of them."""
        tokens = shown.tokens
        self._fed = torch.maximum(self._fed, shown.num_nodes)
        places = torch.tensor(shown.nodes, device=tokens.device).expand(len(tokens), -1)
        return self._forward(tokens, shown.num_nodes, places, shown.parents, shown.start)

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
        if not can_read(tokens):  # nobody counts the rows of this cache
            if parents is not None:
                self.cache.extend(tokens.shape[1])
            self.cache.fill(required=True)
        readable = tokens.clamp(max=self._model.vocab_size - 1)
        output = self._model.forward(readable, num_nodes, self.cache, parents=parents, start=start)
        row = output.row.gather(1, nodes.clamp(min=0).long()).clamp(min=0).long()
        return (
            output.logits[row]
            if len(output.logits)
            else output.logits.new_zeros(*row.shape, output.logits.shape[1])
        )
