"""What a proposer must offer, and what the decoder tells it.

A `Proposer` is the recipe; `open` makes a `Session` for one batch. The decoder owns the sequences:
a session reads them from `DecodingState` and keeps only what is its own (its cache, its states).
Whatever a session proposes, the verifier keeps the output exact, provided that the draft says from
which law each token was drawn.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from spec_kernels.targets.base import Cache, can_read
from spec_kernels.tree import depths
from spec_kernels.types import OK, PAD_TOKEN, Acceptance, Draft, SamplingParams


@dataclass
class DecodingState:
    """The batch as every part of a round sees it. Only the decoder writes into it.

    Attributes:
        tokens: `[batch, capacity] int64`: prompt and output of each request, then `PAD_TOKEN`.
        lens: `[batch] int32`: committed tokens; the last one is the root of the next round.
        longest: the largest of `lens`, on the host.
        params: how the requests sample.
        seeds: `[batch] int64`.
        rule: "block", "token" or "coupled". Under "coupled" sampled drafts should be drawn with
            the noise of the position that they would be emitted at.
        vocab_size: width of the target's logits; draft tokens are ids below it.
        adjust_: applies penalties, bias and allowed ids of the requests to logits in place:
            `adjust_(logits [rows, vocab], row_request [rows] i32, draft_tokens [batch, nodes] i64,
            row_node [rows] i32, parents [batch, nodes] i32 | None = None)`, or None if no request
            has any.
        embed: the target's input embeddings, `[...] int64` to `[..., size]`.
        cache: the target's own cache. It is the target's to write; one that drafts with a part of
            the target may let that part write behind the context, as the target does afterwards.
    """

    tokens: Tensor
    lens: Tensor
    longest: int
    params: SamplingParams
    seeds: Tensor
    rule: str
    vocab_size: int
    embed: Callable[[Tensor], Tensor]
    adjust_: Callable[..., None] | None = None
    cache: Cache | None = None

    @property
    def root_positions(self) -> Tensor:
        """`[batch] int64`: position of the root; of every request's random numbers too."""
        return self.lens.long() - 1

    @property
    def roots(self) -> Tensor:
        """`[batch, 1] int64`: last committed token."""
        return self.tokens.gather(1, self.root_positions[:, None])


class Session(Protocol):
    """A proposer at work on one batch.

    Attributes:
        wants_hidden: whether `prefill` and `commit` are to be given the target's hidden states.
    """

    wants_hidden: bool

    def prefill(
        self, state: DecodingState, row: int, tokens: Sequence[int], hidden: Tensor | None
    ) -> None:
        """Take in the prompt of request `row` but its last token.

        Args:
            state: the batch.
            row: which request.
            tokens: the prompt without its last token; possibly none.
            hidden: `[len(tokens), size]`, the target's last hidden states, if wanted and not empty.
        """
        ...

    def propose(self, state: DecodingState, limits: Tensor, gamma: int) -> Draft:
        """Draft up to `limits[b]` tokens deep behind the root of each request.

        Args:
            state: the batch before this round.
            limits: `[batch] int32`: deepest draft; -1 = the request is absent.
            gamma: the largest limit, on the host.

        Returns:
            Chains: `num_nodes <= limits + 1`, tokens `[batch, nodes] int64` of any width up to
            gamma + 1, node 0 the root. Or trees, with `parents`, of any number of nodes: none
            deeper than gamma, and those deeper than `limits[b]` are dropped.
        """
        ...

    def commit(self, state: DecodingState, result: Acceptance, hidden: Tensor | None) -> None:
        """Follow the verifier's decision: roll the own cache or state back to what was kept.

        Args:
            state: the batch, still as it was before this round.
            result: the decision, cut where a request stopped.
            hidden: `[batch, nodes, size]`, the target's last hidden states at the nodes, if wanted;
                arbitrary behind `num_nodes`.
        """
        ...

    def rollback(self, state: DecodingState) -> None:
        """Return to where `propose` of this round began: the round failed."""
        ...


class Proposer(Protocol):
    """Makes sessions; holds no state of any batch.

    One whose siblings are drawn with replacement says so by an attribute `replacement = True`; one
    whose draft logits have columns of their own by `draft_to_target [draft_vocab] int64`.
    """

    def open(self, state: DecodingState, capacity: int) -> Session:
        """Start on a batch of sequences of at most `capacity` tokens each.

        Raises:
            ValueError: the proposer does not fit the target, for instance by its vocabulary.
        """
        ...


def needed_width(lens: Tensor, most: int) -> int:
    """Return the width that holds `lens` tokens per request: their maximum where reading them costs
    nothing (on the CPU, where a narrow forward is faster), else the bound `most`."""
    return int(lens.max()) if can_read(lens) else most


def root_draft(state: DecodingState, limits: Tensor) -> Draft:
    """Return the draft without drafts: a round over it is a plain decoding step."""
    present = limits >= 0
    tokens = torch.where(present[:, None], state.roots, PAD_TOKEN)
    return Draft(tokens, present.to(torch.int32))


def fit_draft(draft: Draft, limits: Tensor, most: int) -> Draft:
    """Drop what lies deeper than its request's limit, and columns that nobody needs.

    Args:
        draft: what a session proposed.
        limits: `[batch] int32`, deepest draft; -1 = absent.
        most: the largest limit, on the host.
    """
    num_nodes = draft.num_nodes.clamp(min=1).masked_fill(limits < 0, 0)
    tokens, parents = draft.tokens, draft.parents
    if parents is None:
        num_nodes = num_nodes.minimum(limits + 1)
        nodes = needed_width(num_nodes, min(tokens.shape[1], most + 1))
        tokens = tokens[:, :nodes]
    else:
        nodes = needed_width(num_nodes, tokens.shape[1])
        parents = parents[:, :nodes]
        is_deep = depths(parents, num_nodes) > limits[:, None]
        tokens = tokens[:, :nodes].masked_fill(is_deep, PAD_TOKEN)
    row = None if draft.row is None else draft.row[:, :nodes]
    return draft._replace(tokens=tokens, num_nodes=num_nodes, parents=parents, row=row)


def parents_of_tested(draft: Draft, vocab: int) -> Tensor:
    """Return the parent of each node, `[batch, nodes]`: -1 for the root and for what a verifier
    skips, padding and malformed drafts. What hangs on such a node was not tested either."""
    batch, nodes = draft.tokens.shape
    node = torch.arange(nodes, device=draft.tokens.device)
    parents = draft.parents if draft.parents is not None else (node - 1).expand(batch, nodes)
    is_tested = (node > 0) & (node < draft.num_nodes[:, None]) & (draft.tokens >= 0)
    if draft.row is None or draft.logits is None:
        return torch.where(is_tested & (draft.tokens < vocab), parents, -1)
    rows, width = draft.logits.shape
    has_law = (draft.row >= 0) & (draft.row < rows)
    if draft.law is not None:
        has_law &= draft.law.status[draft.row.clamp(0, rows - 1).long()] == OK
    limit = torch.where(draft.row == -1, vocab, torch.where(has_law, max(vocab, width), 0))
    return torch.where(is_tested & (draft.tokens < limit), parents, -1)
