"""Draft by looking the last tokens up in the prompt and the output: no model, no probabilities.

1. For every earlier place of the row, count how many tokens before it equal the last tokens of the
   row, up to `max_ngram`. The longest matches, of these the most recent, are looked at closer.
2. Their *likeness*: how many of the last `WINDOW` tokens of the row stand among the `WINDOW` before
   the place. A text that is copied with changes is found again where it went on.
3. Take the place with the longest match of at least `min_ngram` tokens; among equals the one with
   the most likeness, then the most recent.
4. Without such a place, look at shorter matches, and at matches of the tokens before the last one:
   there a copy went on, into which the row has put a token. Half of the window must be alike. Take
   the one with the most likeness, where an interrupted copy counts `LESS`.
5. Draft what followed it. If that reaches the end of the row, go on with its own beginning: a
   match d places back predicts a repetition with period d.
6. For a tree, do so for the best places and merge what followed them: the best continuation whole,
   then of each next one what is new, until the nodes are used up.

The drafts are fixed (one-hot law), so any rule keeps the output exact.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from spec_kernels._check import require
from spec_kernels.proposers.base import DecodingState, root_draft
from spec_kernels.targets.base import can_read
from spec_kernels.tree import MAX_NODES
from spec_kernels.types import PAD_TOKEN, Acceptance, Draft

PLACES: Final = 16
"""Matches that are looked at closer, and most that a tree merges the continuations of."""

WINDOW: Final = 10
"""Tokens in which likeness is counted."""

HALF: Final = WINDOW // 2
"""Likeness from which a place counts without a long match of the last tokens."""

LESS: Final = 3
"""How much more alike an interrupted copy must be than a short match of the last tokens."""


class NgramProposer:
    """Propose the continuation of the longest earlier match of the last tokens.

    Args:
        max_ngram: longest match that is looked for.
        min_ngram: shortest match that is used whatever stands before it.
        nodes: most nodes of a tree, its root included; None = a chain.

    Raises:
        ValueError: not 1 <= min_ngram <= max_ngram, or nodes is outside [2, MAX_NODES].

    Note:
        Vectorised over the batch, on the device, without synchronisation; a row is never read past
        its length. Traffic: `2 * max_ngram` passes over the tokens of the batch; on a CPU fewer
        where nothing matches, or all rows have a long match.
    """

    wants_hidden = False

    def __init__(self, max_ngram: int = 4, min_ngram: int = 2, *, nodes: int | None = None) -> None:
        require(
            1 <= min_ngram <= max_ngram,
            f"min_ngram must be in [1, max_ngram = {max_ngram}], got {min_ngram}",
        )
        require(
            nodes is None or 2 <= nodes <= MAX_NODES,
            f"nodes must be in [2, {MAX_NODES}], got {nodes}",
        )
        self.max_ngram, self.min_ngram, self.nodes = max_ngram, min_ngram, nodes

    def open(self, state: DecodingState, capacity: int) -> NgramProposer:
        """Return itself: there is nothing to remember."""
        return self

    def prefill(
        self, state: DecodingState, row: int, tokens: Sequence[int], hidden: Tensor | None
    ) -> None:
        """Nothing to do: the prompt stands in the state."""

    def propose(self, state: DecodingState, limits: Tensor, gamma: int) -> Draft:
        """Draft fixed tokens up to `limits[b]` deep; none where nothing matches."""
        if gamma == 0:
            return root_draft(state, limits)
        places = 1 if self.nodes is None else PLACES
        row = state.tokens[:, : state.longest]
        tokens, found = ngram_lookup(
            row, state.lens, self.max_ngram, self.min_ngram, gamma, places=places
        )
        if can_read(found) and not found.any():
            return root_draft(state, limits)
        roots = torch.where(limits[:, None] >= 0, state.roots, PAD_TOKEN)
        if self.nodes is not None:
            return merge_continuations(roots, tokens, found, limits, self.nodes)
        num_drafts = torch.where(found[:, 0], limits, limits.clamp(max=0))
        inside = torch.arange(gamma, device=tokens.device) < num_drafts[:, None]
        drafts = torch.where(inside, tokens[:, 0], PAD_TOKEN)
        return Draft(torch.cat([roots, drafts], 1), num_drafts + 1)

    def commit(self, state: DecodingState, result: Acceptance, hidden: Tensor | None) -> None:
        """Nothing to do."""

    def rollback(self, state: DecodingState) -> None:
        """Nothing to do."""


def ngram_lookup(
    tokens: Tensor, lens: Tensor, max_ngram: int, min_ngram: int, count: int, *, places: int = 1
) -> tuple[Tensor, Tensor]:
    """Continue each row from the best earlier matches of its last tokens: the longest, then those
    with the most likeness, then the most recent.

    Args:
        tokens: `[batch, width] int64`.
        lens: `[batch] int32`, at least 1; what stands behind is not read.
        max_ngram: longest match.
        min_ngram: shortest match; where half of the window is alike a shorter one counts, and one
            of so many tokens before the last one.
        count: tokens to return for each match.
        places: most matches, at most `PLACES`.

    Returns:
        continuations `[batch, matches, count] int64`, best match first, and found
        `[batch, matches] bool`; where nothing was found, the continuation repeats the last token.

    Example:
        >>> row = torch.tensor([[5, 1, 2, 3, 9, 1, 2]])
        >>> ngram_lookup(row, torch.tensor([7]), max_ngram=3, min_ngram=1, count=4)
        (tensor([[[3, 9, 1, 2]]]), tensor([[True]]))
    """
    last = lens.long()[:, None] - 1
    length, start, likeness = _matches(tokens, last, max_ngram)
    is_long = length >= min_ngram
    is_short = (length > 0) & (likeness >= HALF)
    rank = torch.where(is_long, (length + 1) * (WINDOW + 1), 0) + likeness
    rank = torch.where(is_long | is_short, rank, -1)
    if places > 1 or not can_read(is_long) or not is_long.any(1).all():
        length, before, likeness = _matches(tokens, last - 1, max_ngram)
        is_copy = (length >= min_ngram) & (likeness >= HALF)
        start = torch.cat([start, before], 1)
        rank = torch.cat([rank, torch.where(is_copy, likeness - LESS, -1)], 1)
    order = rank.argsort(dim=1, descending=True, stable=True)[:, :places]
    found = rank.gather(1, order) >= 0
    start = torch.where(found, start.gather(1, order), last)
    period = last + 1 - start
    offset = torch.arange(count, device=tokens.device) % period[..., None]
    columns = (start[..., None] + offset).flatten(1)
    return tokens.gather(1, columns).view(*start.shape, count), found


def _matches(tokens: Tensor, last: Tensor, max_ngram: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the longest, then most recent matches of the tokens up to `last [batch, 1]`: length,
    place and likeness, `[batch, places]` each; a length of 0 is none."""
    batch, width = tokens.shape
    place = torch.arange(width, device=tokens.device)
    matches = (place <= last) & (place > 0)  # place = first token behind a match
    length = torch.zeros(batch, width, dtype=torch.int64, device=tokens.device)
    for back in range(max_ngram):
        wanted = tokens.gather(1, (last - back).clamp(min=0))
        equal = torch.zeros_like(matches)
        equal[:, back + 1 :] = tokens[:, : max(width - back - 1, 0)] == wanted
        matches = matches & equal
        length += matches
        if can_read(matches) and not matches.any():
            break  # longer ones would find nothing
    scores = length * (width + 1) + place  # no two alike
    best, start = scores.topk(min(PLACES, width), dim=1)
    return best // (width + 1), start, _likeness(tokens, last, start)


def _likeness(tokens: Tensor, last: Tensor, start: Tensor) -> Tensor:
    """Return how many of the `WINDOW` tokens up to `last [batch, 1]` stand among those in front of
    each `start [batch, places]`, `[batch, places]`."""
    back = torch.arange(WINDOW, device=tokens.device)
    own, near = last - back, start[..., None] - 1 - back
    wanted = torch.where(own >= 0, tokens.gather(1, own.clamp(min=0)), -1)
    window = tokens.gather(1, near.clamp(min=0).flatten(1)).view(near.shape)
    window = torch.where(near >= 0, window, -2)
    return (wanted[:, None, :, None] == window[:, :, None]).any(3).sum(2)


def merge_continuations(
    roots: Tensor, tokens: Tensor, found: Tensor, limits: Tensor, nodes: int
) -> Draft:
    """Merge continuations into a tree: those that begin alike share their first nodes.

    Args:
        roots: `[batch, 1] int64`; `PAD_TOKEN` = absent request.
        tokens: `[batch, matches, depth] int64`, the best continuation first.
        found: `[batch, matches] bool`, which of them count.
        limits: `[batch] int32`, deepest node.
        nodes: width of the draft; what no longer fits is left out.

    Returns:
        `Draft` of fixed nodes: the first continuation, then what is new in each next one. So
        siblings stand in the order of their matches.

    Example:
        >>> tokens = torch.tensor([[[3, 9], [3, 4], [7, 9]]])
        >>> root, all_found = torch.tensor([[2]]), torch.ones(1, 3, dtype=torch.bool)
        >>> draft = merge_continuations(root, tokens, all_found, torch.tensor([2]), nodes=6)
        >>> draft.tokens, draft.parents, draft.num_nodes
        (tensor([[2, 3, 9, 4, 7, 9]]), tensor([[-1,  0,  1,  1,  0,  4]], dtype=torch.int32),
            tensor([6], dtype=torch.int32))
    """
    batch, matches, depth = tokens.shape
    alike = (tokens[:, :, None] == tokens[:, None]) & found[:, None, :, None]
    alike = alike.cumprod(3)  # [batch, match, other, depth]: the first tokens are the same
    owner = alike.argmax(2)  # the first of these
    match = torch.arange(matches, device=tokens.device)[:, None]
    level = torch.arange(depth, device=tokens.device)
    inside = found[..., None] & (level < limits[:, None, None])
    is_new = inside & (owner == match)
    number = is_new.flatten(1).cumsum(1).view(is_new.shape)  # node, where it is new
    node = number.gather(1, owner)
    above = torch.cat([torch.zeros_like(node[..., :1]), node[..., :-1]], 2)
    slot = torch.where(is_new & (number < nodes), number, nodes).flatten(1)
    drafts = torch.full((batch, nodes + 1), PAD_TOKEN, device=tokens.device)
    drafts[:, :1] = roots
    drafts.scatter_(1, slot, tokens.flatten(1))
    parents = torch.full((batch, nodes + 1), -1, dtype=torch.int32, device=tokens.device)
    parents.scatter_(1, slot, above.flatten(1).to(torch.int32))
    num_nodes = 1 + is_new.flatten(1).sum(1).clamp(max=nodes - 1)
    num_nodes = torch.where(limits >= 0, num_nodes, 0).to(torch.int32)
    return Draft(drafts[:, :nodes], num_nodes, parents[:, :nodes])
