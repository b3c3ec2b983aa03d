"""Laws in float64: what temperature, top-k, top-p and min-p make of a row of logits.

    p(x) = exp((l(x) - row_max) * inv_temperature - log_sum)   if l(x) >= cutoff, else 0

Every filter only raises `cutoff`; ids equal to it are all kept.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from spec_kernels.types import (
    GREEDY_TEMPERATURE,
    INVALID_TARGET,
    MAX_TEMPERATURE,
    OK,
    PAD_TOKEN,
    TOP_P_SLACK,
    Law,
    SamplingParams,
)


def tile_stats(logits: Tensor, inv_temperature: float, cutoff: float) -> tuple[float, float]:
    """Return the largest logit of a row, and the sum of `exp((l - max) * inv_temperature)` over
    the kept ids."""
    row_max = logits.max()
    weights = torch.exp((logits - row_max) * inv_temperature)
    return float(row_max), float(weights[logits >= cutoff].sum())


def find_cutoff(
    logits: Tensor, temperature: float, top_k: int, top_p: float, min_p: float
) -> float:
    """Return the smallest logit that top-k, then top-p, then min-p keep; `-inf` if all are off.

    Args:
        logits: `[vocab] float64`, one valid row.
        temperature: not greedy.
        top_k: <= 0 or >= vocab is off.
        top_p: 1 is off. Mass counts under the law that top-k left.
        min_p: 0 is off.
    """
    cutoff = -math.inf
    descending = logits.sort(descending=True).values
    if 0 < top_k < logits.numel():
        cutoff = float(descending[top_k - 1])
    if top_p < 1.0:
        kept = descending[descending >= cutoff]
        mass = torch.exp((kept - kept[0]) / temperature).cumsum(0)
        enough = mass >= top_p * (1.0 - TOP_P_SLACK) * mass[-1]
        cutoff = float(kept[int(enough.nonzero()[0])])
    if min_p > 0.0:
        smallest = float(descending[0]) + temperature * math.log(min_p)
        cutoff = max(cutoff, float(torch.tensor(smallest, dtype=torch.float32)))
    return cutoff


def _one_law(logits: Tensor, params: SamplingParams, request: int) -> tuple[float, ...]:
    """Return the six fields of the law of one float64 row."""
    invalid = (0.0, math.inf, 0.0, 0.0, PAD_TOKEN, INVALID_TARGET)
    if not 0 <= request < params.temperature.numel():
        return invalid
    temperature = params.temperature[request].float()  # its bounds are float32 values too
    top_k = 0 if params.top_k is None else int(params.top_k[request])
    top_p = 1.0 if params.top_p is None else float(params.top_p[request])
    min_p = 0.0 if params.min_p is None else float(params.min_p[request])
    # Each comparison is false for NaN.
    in_range = bool((temperature >= 0.0) & (temperature <= MAX_TEMPERATURE))
    in_range = in_range and 0.0 < top_p <= 1.0 and 0.0 <= min_p <= 1.0
    row_max = float(logits.max())  # NaN if any logit is
    if not in_range or not math.isfinite(row_max):
        return invalid
    argmax = int((logits == row_max).nonzero()[0])
    if bool(temperature < GREEDY_TEMPERATURE):
        return (0.0, row_max, row_max, 0.0, argmax, OK)
    inv_temperature = 1.0 / float(temperature)
    cutoff = find_cutoff(logits, float(temperature), top_k, top_p, min_p)
    row_max, total = tile_stats(logits, inv_temperature, cutoff)
    return (inv_temperature, cutoff, row_max, math.log(total), argmax, OK)


def row_law(logits: Tensor, params: SamplingParams, row_request: Tensor) -> Law:
    """Compute the law of each row of logits, with float64 fields.

    Args:
        logits: `[rows, vocab]` float.
        params: sampling parameters of the requests.
        row_request: `[rows] int32`, the request that each row belongs to.

    Example:
        >>> logits = torch.tensor([[1.0, 3.0, 2.0]])
        >>> law = row_law(logits, SamplingParams.make(1.0, top_k=2), torch.tensor([0]))
        >>> float(law.cutoff), float(law.row_max), int(law.argmax)
        (2.0, 3.0, 1)
    """
    fields = [
        _one_law(row.double(), params, int(request))
        for row, request in zip(logits, row_request, strict=True)
    ]
    columns = torch.tensor(fields, dtype=torch.float64, device=logits.device).reshape(-1, 6)
    inv_temperature, cutoff, row_max, log_sum, argmax, status = columns.unbind(1)
    return Law(inv_temperature, cutoff, row_max, log_sum, argmax.long(), status.int())


def probabilities(logits: Tensor, law: Law | None, row: int) -> Tensor:
    """Return the `[vocab] float64` probabilities of one valid row; without a law, the row itself.

    Example:
        >>> logits = torch.tensor([[1.0, 3.0, 2.0]])
        >>> law = row_law(logits, SamplingParams.make(0.0), torch.tensor([0]))
        >>> probabilities(logits, law, 0)
        tensor([0., 1., 0.], dtype=torch.float64)
    """
    values = logits[row].double()
    if law is None:
        return values
    inv_temperature = law.inv_temperature[row].double()
    if inv_temperature == 0.0:
        one_hot = torch.zeros_like(values)
        one_hot[law.argmax[row]] = 1.0
        return one_hot
    exponent = (values - law.row_max[row].double()) * inv_temperature - law.log_sum[row].double()
    return torch.where(values >= law.cutoff[row].double(), exponent.exp(), 0.0)


def is_valid(law: Law | None, row: int, rows: int) -> bool:
    """Say whether `row` exists and its law, if one is given, is valid."""
    return 0 <= row < rows and (law is None or int(law.status[row]) == OK)


def on_target_ids(q: Tensor, vocab: int, target_to_draft: Tensor | None) -> Tensor:
    """Spread a draft law over the target's ids: 0 where an id has no draft column.

    Example:
        >>> q = torch.tensor([0.25, 0.75])
        >>> on_target_ids(q, 3, None), on_target_ids(q, 3, torch.tensor([1, -1, 0]))
        (tensor([0.2500, 0.7500, 0.0000]), tensor([0.7500, 0.0000, 0.2500]))
    """
    columns = torch.arange(vocab) if target_to_draft is None else target_to_draft.long()
    known = (columns >= 0) & (columns < q.numel())
    return torch.where(known, q[columns.clamp(0, q.numel() - 1)], 0.0)


def overlap(
    target_logits: Tensor,
    target_law: Law | None,
    draft_logits: Tensor,
    draft_law: Law | None,
    *,
    target_to_draft: Tensor | None = None,
) -> Tensor:
    """Return the acceptance probability of each row: `beta = sum_x min(p(x), q(x))`.

    Args:
        target_logits: `[rows, vocab]` float.
        target_law: laws of the target rows; None if they are probabilities.
        draft_logits: `[rows, draft_vocab]` float, row i against row i.
        draft_law: likewise.
        target_to_draft: `[vocab] int32`, draft column of each target id, -1 = none.

    Returns:
        `[rows] float64`, NaN where either row is invalid.

    Example:
        >>> p, q = torch.tensor([[0.6, 0.2, 0.2]]), torch.tensor([[0.5, 0.5]])
        >>> round(float(overlap(p, None, q, None)), 6)
        0.7
    """
    rows, vocab = target_logits.shape
    beta = torch.full((rows,), math.nan, dtype=torch.float64, device=target_logits.device)
    for row in range(rows):
        if is_valid(target_law, row, rows) and is_valid(draft_law, row, rows):
            p = probabilities(target_logits, target_law, row)
            q = probabilities(draft_logits, draft_law, row)
            beta[row] = torch.minimum(p, on_target_ids(q, vocab, target_to_draft)).sum()
    return beta


def _bits(words: Tensor, vocab: int) -> Tensor:
    """Unpack `[ceil(vocab / 32)] int32` words into `[vocab] bool`, bit x % 32 of word x // 32."""
    ids = torch.arange(vocab)
    return ((words.long()[ids // 32] >> (ids % 32)) & 1).bool()


def _counts(vocab: int, output_counts: Tensor | None, drafts: Tensor) -> Tensor:
    """Return how often each id occurs in the committed output and in `drafts`."""
    counts = torch.zeros(vocab) if output_counts is None else output_counts
    drafts = drafts[(drafts >= 0) & (drafts < vocab)].long()
    return counts.double() + torch.bincount(drafts, minlength=vocab).double()


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

    Counts at the row of node i are those of the committed output plus the drafts at nodes 1..i.

    Args:
        logits: `[rows, vocab]` float, written.
        row_request: `[rows] int32`; rows with a request that does not exist are left alone.
        allowed_words: `[rows, ceil(vocab / 32)] int32`, a set bit allows an id.
        bias_ids: `[batch, max_bias] int64`; ids outside the vocabulary are skipped.
        bias_values: `[batch, max_bias] float32`; duplicates add.
        output_counts: `[batch, vocab] int32`, occurrences in the committed output.
        prompt_words: `[batch, ceil(vocab / 32)] int32`, ids that the prompt holds.
        repetition_penalty: `[batch] float32`; divides positive and multiplies negative logits
            of the ids seen.
        presence_penalty, frequency_penalty: `[batch] float32`.
        draft_tokens: `[batch, nodes]`, a chain.
        row_node: `[rows] int32`, the node that each row belongs to.

    Example:
        >>> logits = torch.tensor([[1.0, 2.0, 3.0]])
        >>> adjust_logits_(logits, torch.tensor([0]), allowed_words=torch.tensor([[0b011]]))
        >>> logits
        tensor([[1., 2., -inf]])
    """
    vocab = logits.shape[1]
    per_request = (bias_ids, output_counts, prompt_words, draft_tokens)
    penalties = (repetition_penalty, presence_penalty, frequency_penalty)
    sizes = [len(tensor) for tensor in (*per_request, *penalties) if tensor is not None]
    for row, request in enumerate(row_request.tolist()):
        if request < 0 or any(request >= size for size in sizes):
            continue
        drafts = torch.empty(0, dtype=torch.int64)
        if draft_tokens is not None and row_node is not None:
            drafts = draft_tokens[request, 1 : max(int(row_node[row]), 0) + 1]
        counts = _counts(vocab, None if output_counts is None else output_counts[request], drafts)
        seen = counts > 0
        values = logits[row].double()
        if repetition_penalty is not None:
            prompt = torch.zeros_like(seen)
            if prompt_words is not None:
                prompt = _bits(prompt_words[request], vocab)
            penalty = repetition_penalty[request].double()
            penalised = torch.where(values > 0, values / penalty, values * penalty)
            values = torch.where(seen | prompt, penalised, values)
        if frequency_penalty is not None:
            values = values - frequency_penalty[request].double() * counts
        if presence_penalty is not None:
            values = values - presence_penalty[request].double() * seen
        if bias_ids is not None and bias_values is not None:
            known = (bias_ids[request] >= 0) & (bias_ids[request] < vocab)
            bias = bias_values[request][known].double()
            values = values.index_add(0, bias_ids[request][known].long(), bias)
        if allowed_words is not None:
            values = values.masked_fill(~_bits(allowed_words[row], vocab), -math.inf)
        logits[row] = values.to(logits.dtype)
