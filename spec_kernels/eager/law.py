"""Laws of rows of logits: temperature, top-k, top-p and min-p, penalties, bias and masks.

    p(x) = exp((l(x) - row_max) * inv_temperature - log_sum)   if l(x) >= cutoff, else 0

Filters only raise `cutoff`; ids equal to it are all kept. See `_rows.py` for the arithmetic.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from spec_kernels.eager._rows import (
    RowLaw,
    RowReader,
    Weights,
    find_cutoff,
    tile_stats,
    tile_sums,
)
from spec_kernels.types import OK, Law, SamplingParams

__all__ = ["adjust_logits_", "find_cutoff", "on_same_ids", "overlap", "row_law", "tile_stats"]


def row_law(logits: Tensor, params: SamplingParams, row_request: Tensor) -> Law:
    """Compute the law of each row of logits.

    Args:
        logits: `[rows, vocab]` float32, float16 or bfloat16, any strides.
        params: sampling parameters of the requests.
        row_request: `[rows] int32`, the request that each row belongs to.

    Returns:
        The laws; a row with a NaN or `+inf` logit, without a finite one, or whose request does
        not exist or has parameters out of range, has status `INVALID_TARGET`.

    Example:
        >>> logits = torch.tensor([[1.0, 3.0, 2.0]])
        >>> law = row_law(logits, SamplingParams.make(1.0, top_k=2), torch.tensor([0]))
        >>> float(law.cutoff), float(law.row_max), int(law.argmax)
        (2.0, 3.0, 1)
    """
    reader = RowReader(logits, params)
    laws = [reader.law(row, request) for row, request in enumerate(row_request.tolist())]
    columns: list[tuple[float, ...]] = list(zip(*laws, strict=True)) or [()] * len(Law._fields)
    dtypes = (torch.float32,) * 4 + (torch.int64, torch.int32)
    return Law(
        *(
            torch.tensor(column, dtype=dtype, device=logits.device)
            for column, dtype in zip(columns, dtypes, strict=True)
        )
    )


def on_same_ids(
    weights: Weights, reader: RowReader, row: int, law: RowLaw, columns: Tensor | None
) -> Tensor:
    """Return a draft law at the ids of target `weights`: 0 where an id has no draft column.

    Args:
        weights: of a target row.
        reader: of the draft rows, as wide as the target's.
        row, law: a valid draft row.
        columns: `[vocab] int64`, the draft column of every target id, out of range = none; None =
            columns are ids.
    """
    if weights.ids is not None:
        return reader.at(row, law, weights.ids if columns is None else columns[weights.ids])
    q = reader.dense(row, law)
    if columns is None:
        return q[: weights.mass.numel()]
    known = (columns >= 0) & (columns < reader.vocab)
    return q[columns.where(known, 0)].mul_(known)


def overlap(
    target_logits: Tensor,
    target_law: Law | None,
    draft_logits: Tensor,
    draft_law: Law | None,
    *,
    target_to_draft: Tensor | None = None,
) -> Tensor:
    """Return the acceptance probability of each pair of rows: `beta = sum_x min(p(x), q(x))`.

    Args:
        target_logits: `[rows, vocab]` float.
        target_law: laws of the target rows; None if they are probabilities.
        draft_logits: `[rows, draft_vocab]` float, row i against row i.
        draft_law: likewise.
        target_to_draft: `[vocab] int32`, draft column of each target id, -1 = none.

    Returns:
        `[rows] float32`, NaN where either row is invalid.

    Example:
        >>> p, q = torch.tensor([[0.6, 0.2, 0.2]]), torch.tensor([[0.5, 0.5]])
        >>> overlap(p, None, q, None)
        tensor([0.7000])
    """
    target = RowReader(target_logits, target_law)
    draft = RowReader(draft_logits, draft_law, width=target.vocab)
    columns = None if target_to_draft is None else target_to_draft.long()
    beta = [math.nan] * target.rows
    for row in range(target.rows):
        p_law, q_law = target.law(row), draft.law(row)
        if p_law.status == OK and q_law.status == OK:
            p = target.scaled(row, p_law, 1.0)
            q = on_same_ids(p, draft, row, q_law, columns)
            beta[row] = float(tile_sums(torch.minimum(p.mass, q)).sum())
    return torch.tensor(beta, dtype=torch.float32, device=target_logits.device)


class _Penalties(NamedTuple):
    """What `adjust_logits_` subtracts, indexed by request."""

    output_counts: Tensor | None
    prompt_words: Tensor | None
    repetition: Tensor | None
    presence: Tensor | None
    frequency: Tensor | None


def _unpack(words: Tensor, vocab: int) -> Tensor:
    """Return bit x % 32 of word x // 32 for every id x: `[vocab] bool`."""
    shifts = torch.arange(32, dtype=words.dtype, device=words.device)
    return ((words[:, None] >> shifts) & 1).flatten()[:vocab].bool()


def _penalise(values: Tensor, penalties: _Penalties, request: int, drafts: Tensor) -> Tensor:
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
            seen = seen | _unpack(penalties.prompt_words[request], values.numel())
        penalised = torch.where(values > 0, values / factor, values * factor)
        values = torch.where(seen, penalised, values)
    if penalties.frequency is not None:
        values = values - penalties.frequency[request].float() * counts
    if penalties.presence is not None:
        values = values - penalties.presence[request].float() * is_counted
    return values


def adjust_logits_(
    logits: Tensor,
    row_request: Tensor,
    *,
    allowed_words: Tensor | None = None,
    bias_ids: Tensor | None = None,
    bias_values: Tensor | None = None,
    output_counts: Tensor | None = None,
    prompt_words: Tensor | None = None,
    repetition_penalty: Tensor | None = None,
    presence_penalty: Tensor | None = None,
    frequency_penalty: Tensor | None = None,
    draft_tokens: Tensor | None = None,
    row_node: Tensor | None = None,
) -> None:
    """Apply penalties, then bias, then the mask of allowed ids to logits, in place.

    The counts at the row of node i are those of the committed output plus the drafts at nodes
    1..i of the request: a row sees the text that leads to it, the root included.

    Args:
        logits: `[rows, vocab]` float, written.
        row_request: `[rows] int32`; rows with a request that does not exist are left alone.
        allowed_words: `[rows, ceil(vocab / 32)] int32`, a set bit allows an id.
        bias_ids: `[batch, max_bias] int64`; ids outside the vocabulary are skipped.
        bias_values: `[batch, max_bias] float32`; duplicates add.
        output_counts: `[batch, vocab] int32`, occurrences in the committed output.
        prompt_words: `[batch, ceil(vocab / 32)] int32`, ids that the prompt holds.
        repetition_penalty: `[batch] float32`; divides positive and multiplies negative logits of
            the ids seen in prompt, output or drafts.
        presence_penalty: `[batch] float32`, subtracted from ids counted at least once.
        frequency_penalty: `[batch] float32`, subtracted once per occurrence.
        draft_tokens: `[batch, nodes]` int64 or int32, a chain.
        row_node: `[rows] int32`, the node that each row belongs to.

    Example:
        >>> logits = torch.tensor([[1.0, 2.0, 3.0]])
        >>> words = torch.tensor([[0b011]], dtype=torch.int32)
        >>> adjust_logits_(logits, torch.tensor([0]), allowed_words=words)
        >>> logits
        tensor([[1., 2., -inf]])
    """
    vocab = logits.shape[1]
    penalties = _Penalties(
        output_counts, prompt_words, repetition_penalty, presence_penalty, frequency_penalty
    )
    per_request = [t for t in (*penalties, bias_ids, draft_tokens) if t is not None]
    batch = min((t.shape[0] for t in per_request), default=None)
    nodes = None if row_node is None else row_node.tolist()
    nothing = torch.empty(0, dtype=torch.int64, device=logits.device)
    for row, request in enumerate(row_request.tolist()):
        if request < 0 or (batch is not None and request >= batch):
            continue
        drafts = nothing
        if draft_tokens is not None and nodes is not None:
            drafts = draft_tokens[request, 1 : max(nodes[row], 0) + 1]
        values = _penalise(logits[row].float(), penalties, request, drafts)
        if bias_ids is not None and bias_values is not None:
            known = (bias_ids[request] >= 0) & (bias_ids[request] < vocab)
            values = values.index_add(0, bias_ids[request][known], bias_values[request][known])
        if allowed_words is not None:
            values = values.masked_fill(~_unpack(allowed_words[row], vocab), -math.inf)
        logits[row] = values.to(logits.dtype)
