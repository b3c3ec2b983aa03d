"""Laws: from raw logits and sampling parameters to distributions, without writing one down."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType

import torch
from torch import Tensor

from spec_kernels._check import IDS, check
from spec_kernels.ops._arguments import (
    check_id_map,
    check_law,
    check_logits,
    check_params,
    detached,
    pack_law,
    unpack_law,
)
from spec_kernels.ops._register import checked_once, register
from spec_kernels.types import Law, SamplingParams


@checked_once()
def row_law(logits: Tensor, params: SamplingParams, row_request: Tensor) -> Law:
    """Turn temperature, top-k, top-p and min-p into a law per row of logits.

        p(x) = exp((l(x) - row_max) / T - log_sum)   if l(x) >= cutoff, else 0

    The filters apply in the order top-k, top-p (on the renormalised top-k law), min-p (relative
    to the largest probability), and each only raises the cutoff. Ids equal to the cutoff are all
    kept. A request with T < `GREEDY_TEMPERATURE` gets the one-hot law at its first argmax.

    Args:
        logits: `[rows, vocab] float32/float16/bfloat16`, raw; any strides. `-inf` is never
            emitted.
        params: `SamplingParams`, one entry per request.
        row_request: `[rows] int32`, the request whose parameters hold for each row.

    Returns:
        `Law` of `[rows]` tensors. A row with NaN or +inf, with nothing allowed, with parameters
        outside their range or with row_request outside [0, batch) has status `INVALID_TARGET` and
        argmax `PAD_TOKEN`; the other rows do not change.

    Raises:
        TypeError: an argument has another dtype, or params is no `SamplingParams`.
        ValueError: shapes or devices do not fit, or vocab is 0.

    Note:
        float32 arithmetic. A row's law depends on that row alone, bit for bit. No probability
        tensor is written, nothing is sorted, no synchronisation.

    Example:
        >>> logits = torch.tensor([[0.0, 2.0, 1.0, -3.0]])
        >>> params = SamplingParams.make(1.0, top_k=2)
        >>> law = row_law(logits, params, torch.zeros(1, dtype=torch.int32))
        >>> law.cutoff, law.argmax
        (tensor([1.]), tensor([1]))
    """
    check_logits("logits", logits)
    check_params("params", params, logits.device)
    check("row_request", row_request, (logits.shape[0],), torch.int32, logits.device)
    return Law(*_row_law(detached(logits), *params, row_request))


@checked_once(strides=True)
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
    """Apply penalties, logit bias and a mask of allowed ids to logits, in place, in that order.

        seen      l = l / repetition if l > 0 else l * repetition     (in the prompt or counted)
        counted   l = l - frequency * count - presence
        bias      l = l + value
        mask      l = -inf where not allowed

    The count of an id at a row is its count in the committed output plus its occurrences among
    the drafts on the way to the row's node, so each row of a draft sees the history that it would
    see without speculation.

    Args:
        logits: `[rows, vocab] float32/float16/bfloat16`, written.
        row_request: `[rows] int32`, request of each row; a row outside [0, batch) is not touched.
        allowed_words: `[rows, ceil(vocab / 32)] int32`; bit `x % 32` of word `x // 32` set = id x
            is allowed.
        bias_ids: `[batch, max_bias] int64`; an id outside the vocabulary, such as `PAD_TOKEN`, is
            skipped, and values of a repeated id add up.
        bias_values: `[batch, max_bias] float32`; given iff bias_ids is.
        output_counts: `[batch, vocab] int32`, occurrences of each id in the committed output, the
            root included.
        prompt_words: `[batch, ceil(vocab / 32)] int32`, bits of the ids in the prompt; only the
            repetition penalty reads it.
        repetition_penalty: `[batch] float32`; 1 is off.
        presence_penalty: `[batch] float32`; 0 is off.
        frequency_penalty: `[batch] float32`; 0 is off.
        draft_tokens: `[batch, nodes] int64 or int32`, the chains; column 0, the root, is already
            in output_counts.
        row_node: `[rows] int32`, the node at which each row was computed; given iff draft_tokens
            is.

    Raises:
        TypeError: an argument has another dtype.
        ValueError: shapes or devices do not fit; rows or columns of logits overlap or interleave;
            logits require grad; only one of bias_ids and bias_values, or of draft_tokens and
            row_node, is given.

    Note:
        Arithmetic in float32, stored in the dtype of logits. Call it before `row_law`. No
        synchronisation.

    Source:
        The repetition penalty is that of Keskar et al. 2019 (CTRL); presence and frequency as in
        the API of OpenAI.

    Example:
        >>> logits = torch.zeros(1, 4)
        >>> request = torch.zeros(1, dtype=torch.int32)
        >>> allowed = torch.tensor([[0b0110]], dtype=torch.int32)
        >>> adjust_logits_(logits, request, allowed_words=allowed)
        >>> logits
        tensor([[-inf, 0., 0., -inf]])
    """
    check_logits("logits", logits)
    rows, vocab = logits.shape
    if logits.requires_grad:
        raise ValueError("logits must not require grad: adjust_logits_ writes them in place")
    if _may_overlap(logits):
        raise ValueError(
            f"logits must not have overlapping rows or columns, got strides {list(logits.stride())}"
        )
    check("row_request", row_request, (rows,), torch.int32, logits.device)
    words = (vocab + 31) // 32
    if allowed_words is not None:
        check("allowed_words", allowed_words, (rows, words), torch.int32, logits.device)
    _check_together("bias_ids", bias_ids, "bias_values", bias_values)
    _check_together("draft_tokens", draft_tokens, "row_node", row_node)
    if row_node is not None:
        check("row_node", row_node, (rows,), torch.int32, logits.device)
    _check_per_request(
        logits.device,
        (
            ("bias_ids", bias_ids, ("max_bias",), torch.int64),
            ("bias_values", bias_values, ("max_bias",), torch.float32),
            ("output_counts", output_counts, (vocab,), torch.int32),
            ("prompt_words", prompt_words, (words,), torch.int32),
            ("repetition_penalty", repetition_penalty, (), torch.float32),
            ("presence_penalty", presence_penalty, (), torch.float32),
            ("frequency_penalty", frequency_penalty, (), torch.float32),
            ("draft_tokens", draft_tokens, ("nodes",), IDS),
        ),
    )
    if bias_ids is not None and bias_values is not None:
        check("bias_values", bias_values, bias_ids.shape, torch.float32)
    _adjust_logits_(
        logits,
        row_request,
        allowed_words,
        bias_ids,
        bias_values,
        output_counts,
        prompt_words,
        repetition_penalty,
        presence_penalty,
        frequency_penalty,
        draft_tokens,
        row_node,
    )


@checked_once()
def overlap(
    target_logits: Tensor,
    target_law: Law | None,
    draft_logits: Tensor,
    draft_law: Law | None,
    *,
    target_to_draft: Tensor | None = None,
) -> Tensor:
    """Compute the acceptance probability of a drawn draft token, beta, row against row.

        beta = sum_x min(p(x), q(x)) = 1 - TV(p, q)

    Args:
        target_logits: `[rows, vocab] float32/float16/bfloat16`.
        target_law: the laws of these rows, or None where the rows are probabilities.
        draft_logits: `[rows, draft_vocab] float32/float16/bfloat16`; row i meets target row i.
        draft_law: the laws of these rows, or None where the rows are probabilities.
        target_to_draft: `[vocab] int32`, the draft column of each target id, -1 = none
            (`invert_id_map`); None where both share their ids.

    Returns:
        `beta [rows] float32`; NaN where one of the two laws is invalid.

    Raises:
        TypeError: an argument has another dtype, or a law is neither a `Law` nor None.
        ValueError: shapes or devices do not fit.

    Note:
        float32 sums in a fixed order; no synchronisation.

    Source:
        Leviathan et al. 2023, definition 3.1 and lemma 3.3.

    Example:
        >>> p = torch.tensor([[0.5, 0.3, 0.2]])
        >>> q = torch.tensor([[0.2, 0.3, 0.5]])
        >>> overlap(p, None, q, None)
        tensor([0.7000])
    """
    check_logits("target_logits", target_logits)
    rows, device = target_logits.shape[0], target_logits.device
    check_logits("draft_logits", draft_logits, device)
    check("draft_logits", draft_logits, (rows, "draft_vocab"), draft_logits.dtype)
    if target_law is not None:
        check_law("target_law", target_law, rows, device)
    if draft_law is not None:
        check_law("draft_law", draft_law, rows, device)
    check_id_map(target_to_draft, target_logits)
    beta: Tensor = _overlap(
        detached(target_logits),
        pack_law(target_law),
        detached(draft_logits),
        pack_law(draft_law),
        target_to_draft,
    )
    return beta


def _may_overlap(logits: Tensor) -> bool:
    """Say whether two elements may lie in one place: a stride is shorter than what it spans."""
    reach = 1
    for stride, size in sorted(zip(logits.stride(), logits.shape, strict=True)):
        if size > 1:
            if stride < reach:
                return True
            reach += stride * (size - 1)
    return False


def _check_together(first: str, a: Tensor | None, second: str, b: Tensor | None) -> None:
    if (a is None) != (b is None):
        given, missing = (first, second) if b is None else (second, first)
        raise ValueError(f"{missing} must be given with {given}, got None")


def _check_per_request(
    device: torch.device,
    columns: Sequence[
        tuple[str, Tensor | None, Sequence[int | str], torch.dtype | Sequence[torch.dtype]]
    ],
) -> None:
    batch: int | str = "batch"
    for name, tensor, shape, dtypes in columns:
        if tensor is not None:
            check(name, tensor, (batch, *shape), dtypes, device)
            batch = tensor.shape[0]


def _call_row_law(
    layer: ModuleType,
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor | None,
    top_p: Tensor | None,
    min_p: Tensor | None,
    row_request: Tensor,
) -> tuple[Tensor, ...]:
    law: Law = layer.row_law(logits, SamplingParams(temperature, top_k, top_p, min_p), row_request)
    return tuple(law)


def _fake_row_law(logits: Tensor, *_: Tensor | None) -> tuple[Tensor, ...]:
    rows = logits.shape[0]
    floats = tuple(logits.new_empty((rows,), dtype=torch.float32) for _ in range(4))
    argmax = logits.new_empty((rows,), dtype=torch.int64)
    return (*floats, argmax, logits.new_empty((rows,), dtype=torch.int32))


def _call_adjust_logits_(
    layer: ModuleType,
    logits: Tensor,
    row_request: Tensor,
    allowed_words: Tensor | None,
    bias_ids: Tensor | None,
    bias_values: Tensor | None,
    output_counts: Tensor | None,
    prompt_words: Tensor | None,
    repetition_penalty: Tensor | None,
    presence_penalty: Tensor | None,
    frequency_penalty: Tensor | None,
    draft_tokens: Tensor | None,
    row_node: Tensor | None,
) -> None:
    layer.adjust_logits_(
        logits,
        row_request,
        allowed_words=allowed_words,
        bias_ids=bias_ids,
        bias_values=bias_values,
        output_counts=output_counts,
        prompt_words=prompt_words,
        repetition_penalty=repetition_penalty,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        draft_tokens=draft_tokens,
        row_node=row_node,
    )


def _fake_adjust_logits_(*_: Tensor | None) -> None:
    return None


def _call_overlap(
    layer: ModuleType,
    target_logits: Tensor,
    target_law: Sequence[Tensor],
    draft_logits: Tensor,
    draft_law: Sequence[Tensor],
    target_to_draft: Tensor | None,
) -> Tensor:
    beta: Tensor = layer.overlap(
        target_logits,
        unpack_law(target_law),
        draft_logits,
        unpack_law(draft_law),
        target_to_draft=target_to_draft,
    )
    return beta


def _fake_overlap(target_logits: Tensor, *_: Tensor | Sequence[Tensor] | None) -> Tensor:
    return target_logits.new_empty((target_logits.shape[0],), dtype=torch.float32)


_row_law = register(
    "row_law(Tensor logits, Tensor temperature, Tensor? top_k, Tensor? top_p, Tensor? min_p,"
    " Tensor row_request) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _call_row_law,
    _fake_row_law,
)
_adjust_logits_ = register(
    "adjust_logits_(Tensor(a!) logits, Tensor row_request, Tensor? allowed_words,"
    " Tensor? bias_ids, Tensor? bias_values, Tensor? output_counts, Tensor? prompt_words,"
    " Tensor? repetition_penalty, Tensor? presence_penalty, Tensor? frequency_penalty,"
    " Tensor? draft_tokens, Tensor? row_node) -> ()",
    _call_adjust_logits_,
    _fake_adjust_logits_,
)
_overlap = register(
    "overlap(Tensor target_logits, Tensor[] target_law, Tensor draft_logits, Tensor[] draft_law,"
    " Tensor? target_to_draft) -> Tensor",
    _call_overlap,
    _fake_overlap,
)
