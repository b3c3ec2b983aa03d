"""Penalties and masks on one row of logits, for `adjust_logits_`."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Penalties(NamedTuple):
    """What `adjust_logits_` subtracts, indexed by request."""

    output_counts: Tensor | None
    prompt_words: Tensor | None
    repetition: Tensor | None
    presence: Tensor | None
    frequency: Tensor | None


def unpack(words: Tensor, vocab: int) -> Tensor:
    """Return bit x % 32 of word x // 32 for every id x: `[vocab] bool`."""
    shifts = torch.arange(32, dtype=words.dtype, device=words.device)
    return ((words[:, None] >> shifts) & 1).flatten()[:vocab].bool()


def penalise(values: Tensor, penalties: Penalties, request: int, drafts: Tensor) -> Tensor:
    """Return `values` with the penalties of a request whose text ends in `drafts`."""
    if penalties[2:] == (None, None, None):
        return values
    counts = torch.zeros_like(values)
    if penalties.output_counts is not None:
        counts.copy_(penalties.output_counts[request])
    drafts = drafts[(drafts >= 0) & (drafts < values.numel())].long()
    counts.index_add_(0, drafts, torch.ones_like(drafts, dtype=values.dtype))
    is_counted = counts > 0
    if penalties.repetition is not None:
        seen, factor = is_counted, penalties.repetition[request].float()
        if penalties.prompt_words is not None:
            seen = seen | unpack(penalties.prompt_words[request], values.numel())
        penalised = torch.where(values > 0, values / factor, values * factor)
        values = torch.where(seen, penalised, values)
    if penalties.frequency is not None:
        values = values - penalties.frequency[request].float() * counts
    if penalties.presence is not None:
        values = values - penalties.presence[request].float() * is_counted
    return values
