"""Draft by looking the last tokens up in the prompt and the output: no model, no probabilities.

1. For every earlier place of the row, count how many tokens before it equal the last tokens of the
   row, up to `max_ngram`.
2. Take the place with the longest match of at least `min_ngram` tokens; among equals the most
   recent one.
3. Draft what followed it. If that reaches the end of the row, go on with its own beginning: a
   match d places back predicts a repetition with period d.

The drafts are fixed (one-hot law), so any rule keeps the output exact.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from spec_kernels._check import require
from spec_kernels.proposers.base import DecodingState
from spec_kernels.types import PAD_TOKEN, Acceptance, Draft


class NgramProposer:
    """Propose the continuation of the longest earlier match of the last tokens.

    Args:
        max_ngram: longest match that is looked for.
        min_ngram: shortest match that is used.

    Raises:
        ValueError: not 1 <= min_ngram <= max_ngram.

    Note:
        Vectorised over the batch, on the device, without synchronisation; a row is never read past
        its length. Traffic: `max_ngram` passes over the tokens of the batch.
    """

    wants_hidden = False

    def __init__(self, max_ngram: int = 3, min_ngram: int = 1) -> None:
        require(
            1 <= min_ngram <= max_ngram,
            f"min_ngram must be in [1, max_ngram = {max_ngram}], got {min_ngram}",
        )
        self.max_ngram, self.min_ngram = max_ngram, min_ngram

    def open(self, state: DecodingState, capacity: int) -> NgramProposer:
        """Return itself: there is nothing to remember."""
        return self

    def prefill(
        self, state: DecodingState, row: int, tokens: Sequence[int], hidden: Tensor | None
    ) -> None:
        """Nothing to do: the prompt stands in the state."""

    def propose(self, state: DecodingState, limits: Tensor, gamma: int) -> Draft:
        """Draft up to `limits[b]` fixed tokens; none where nothing matches."""
        tokens, found = ngram_lookup(
            state.tokens[:, : state.longest], state.lens, self.max_ngram, self.min_ngram, gamma
        )
        num_drafts = torch.where(found, limits, limits.clamp(max=0))
        inside = torch.arange(gamma, device=tokens.device) < num_drafts[:, None]
        roots = torch.where(limits[:, None] >= 0, state.roots, PAD_TOKEN)
        drafts = torch.where(inside, tokens, PAD_TOKEN)
        return Draft(torch.cat([roots, drafts], 1), num_drafts + 1)

    def commit(self, state: DecodingState, result: Acceptance, hidden: Tensor | None) -> None:
        """Nothing to do."""

    def rollback(self, state: DecodingState) -> None:
        """Nothing to do."""


def ngram_lookup(
    tokens: Tensor, lens: Tensor, max_ngram: int, min_ngram: int, count: int
) -> tuple[Tensor, Tensor]:
    """Continue each row from the longest, then most recent, earlier match of its last tokens.

    Args:
        tokens: `[batch, width] int64`.
        lens: `[batch] int32`, at least 1; what stands behind is not read.
        max_ngram: longest match.
        min_ngram: shortest match.
        count: tokens to return.

    Returns:
        continuation `[batch, count] int64`, found `[batch] bool`; where nothing was found, the
        continuation repeats the last token.

    Example:
        >>> row = torch.tensor([[5, 1, 2, 3, 9, 1, 2]])
        >>> ngram_lookup(row, torch.tensor([7]), max_ngram=3, min_ngram=1, count=4)
        (tensor([[3, 9, 1, 2]]), tensor([True]))
    """
    batch, width = tokens.shape
    last = lens.long()[:, None] - 1
    place = torch.arange(width, device=tokens.device)
    matches = (place <= last) & (place > 0)  # place = first token behind a match
    length = torch.zeros(batch, width, dtype=torch.int64, device=tokens.device)
    for back in range(max_ngram):
        wanted = tokens.gather(1, (last - back).clamp(min=0))
        equal = torch.zeros_like(matches)
        equal[:, back + 1 :] = tokens[:, : max(width - back - 1, 0)] == wanted
        matches = matches & equal
        length += matches
    best, start = (length * (width + 1) + place).max(1, keepdim=True)
    found = best >= min_ngram * (width + 1)
    start = torch.where(found, start, last)
    period = last + 1 - start
    offset = torch.arange(count, device=tokens.device) % period
    return tokens.gather(1, start + offset), found[:, 0]
