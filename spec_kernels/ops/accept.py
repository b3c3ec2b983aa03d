"""Verification: keep a prefix of each draft so that the output follows the target's own law."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from spec_kernels._check import IDS, check
from spec_kernels.ops._arguments import (
    check_draft,
    check_id_map,
    check_law,
    check_logits,
    check_max_depth,
    check_params,
    pack_law,
    unpack_law,
)
from spec_kernels.ops._register import register
from spec_kernels.types import Acceptance, Draft, Law, SamplingParams


def accept(
    draft: Draft,
    target_logits: Tensor,
    target_law: Law | SamplingParams | None,
    target_row: Tensor,
    accept_coins: Tensor,
    final_coins: Tensor,
    *,
    rule: str = "block",
    replacement: bool = False,
    max_depth: int,
    target_to_draft: Tensor | None = None,
) -> Acceptance:
    """Verify sampled drafts: accept a prefix, then draw one recovered or bonus token.

    With p the target's law and q the law that a draft token was drawn from, y_i the drafts:

        token   accept y_i iff u_i * q_i(y_i) < p_i(y_i); stop at the first rejection, n kept
                rejected: draw from norm((p - q)+); all accepted: draw from p
        block   a_i = min(1, a_(i-1) * p_i(y_i) / q_i(y_i)),  a_0 = 1
                Z_i = sum_x (a_i * p_(i+1)(x) - q_(i+1)(x))+,  h_i = Z_i / (Z_i + (1 - a_i))
                n = the largest i with u_i < h_i  (h of the last node is its a)
                n not the last: draw from norm((a_n * p - q)+); else draw from p

    Under either rule the emitted tokens follow exactly the target's law, whatever q is. The block
    rule keeps at least as many drafts on average.

    Args:
        draft: `Draft` of chains. A node with row -1, or any node where draft.row is None, is
            fixed: proposed without a draw, its q is one-hot.
        target_logits: `[rows, vocab] float32/float16/bfloat16`, in any order of rows.
        target_law: the laws of these rows (`row_law`); or `SamplingParams` per request, and the
            laws are computed on the way; or None where the rows are probabilities.
        target_row: `[batch, nodes] int32`, the row of target_logits computed at each node, which
            judges that node's child.
        accept_coins: `[batch, nodes] float64` in [0, 1); coin i judges node i (`coins`).
        final_coins: `[batch] float64` in [0, 1), for the final token.
        rule: "block" or "token".
        replacement: whether siblings were drawn with replacement; only False so far.
        max_depth: most drafts to keep; the results have max_depth + 1 columns.
        target_to_draft: `[vocab] int32`, the draft column of each target id, -1 = none
            (`invert_id_map`); None where both share their ids.

    Returns:
        `Acceptance`. Faulty rows and ids never raise: they set that request's status and give a
        defined result, other requests do not change.

    Raises:
        TypeError: an argument has another dtype or type.
        ValueError: shapes or devices do not fit, rule is unknown, or max_depth < 0.
        NotImplementedError: draft.parents is given, or replacement=True; both need trees.

    Note:
        Reads raw logits; writes no probabilities; one residual row per request. A request's
        result depends on that request alone. No synchronisation.

    Source:
        token: Leviathan et al. 2023, algorithm 1; Chen et al. 2023 with p and q swapped.
        block: Sun et al. 2025, "Block verification accelerates speculative decoding".

    Example:
        >>> draft = Draft(torch.tensor([[5, 1, 2]]), torch.tensor([3], dtype=torch.int32))
        >>> p = torch.tensor([[0.1, 0.9, 0.0], [0.3, 0.3, 0.4], [1.0, 0.0, 0.0]])
        >>> rows = torch.tensor([[0, 1, 2]], dtype=torch.int32)
        >>> u = torch.tensor([[0.0, 0.5, 0.7]], dtype=torch.float64)
        >>> z = torch.tensor([0.6], dtype=torch.float64)
        >>> accept(draft, p, None, rows, u, z, rule="token", max_depth=2).output_tokens
        tensor([[ 1,  1, -1]])
    """
    if rule not in ("block", "token"):
        raise ValueError(f'rule must be "block" or "token", got {rule!r}')
    if replacement:
        raise NotImplementedError(
            "replacement=True verifies siblings of a tree; trees are not supported yet"
        )
    check_max_depth(max_depth)
    batch, nodes, device = check_draft(draft)
    check_logits("target_logits", target_logits, device)
    params = target_law if isinstance(target_law, SamplingParams) else None
    law = None if isinstance(target_law, SamplingParams) else target_law
    if params is not None:
        check_params("target_law", params, device, batch)
    if law is not None:
        check_law("target_law", law, target_logits.shape[0], device)
    check("target_row", target_row, (batch, nodes), torch.int32, device)
    check("accept_coins", accept_coins, (batch, nodes), torch.float64, device)
    check("final_coins", final_coins, (batch,), torch.float64, device)
    check_id_map(target_to_draft, target_logits)
    return Acceptance(
        *_accept(
            draft.tokens,
            draft.num_nodes,
            draft.logits,
            pack_law(draft.law),
            draft.row,
            target_logits,
            pack_law(law),
            *(params or (None, None, None, None)),
            target_row,
            accept_coins,
            final_coins,
            target_to_draft,
            rule,
            max_depth,
        )
    )


def match(draft: Draft, target_tokens: Tensor, *, max_depth: int) -> Acceptance:
    """Verify drafts by comparison: accept while each equals the target's own token.

    The target's token is drawn first, greedily or with noise that the draft shared (`sample`),
    and is what is emitted; so the law is the target's whatever proposed the drafts, and with
    seeded noise the text is the very one that plain decoding gives.

    Args:
        draft: `Draft` of chains; only tokens and num_nodes are read.
        target_tokens: `[batch, nodes] int64 or int32`, the target's token after each node; a
            negative one marks an invalid row.
        max_depth: most drafts to keep; the results have max_depth + 1 columns.

    Returns:
        `Acceptance`: the matching drafts, then the target's token at the first difference.

    Raises:
        TypeError: an argument has another dtype or type.
        ValueError: shapes or devices do not fit, or max_depth < 0.
        NotImplementedError: draft.parents is given.

    Note:
        Integer comparisons only; no synchronisation.

    Source:
        Stern et al. 2018 for the greedy case.

    Example:
        >>> draft = Draft(torch.tensor([[9, 4, 7, 1]]), torch.tensor([4], dtype=torch.int32))
        >>> match(draft, torch.tensor([[4, 7, 2, 5]]), max_depth=3).output_tokens
        tensor([[ 4,  7,  2, -1]])
    """
    batch, nodes, device = check_draft(draft)
    check("target_tokens", target_tokens, (batch, nodes), IDS, device)
    check_max_depth(max_depth)
    return Acceptance(*_match(draft.tokens, draft.num_nodes, target_tokens, max_depth))


def _call_accept(
    layer: ModuleType,
    tokens: Tensor,
    num_nodes: Tensor,
    draft_logits: Tensor | None,
    draft_law: Sequence[Tensor],
    draft_row: Tensor | None,
    target_logits: Tensor,
    target_law: Sequence[Tensor],
    temperature: Tensor | None,
    top_k: Tensor | None,
    top_p: Tensor | None,
    min_p: Tensor | None,
    target_row: Tensor,
    accept_coins: Tensor,
    final_coins: Tensor,
    target_to_draft: Tensor | None,
    rule: str,
    max_depth: int,
) -> tuple[Tensor, ...]:
    draft = Draft(tokens, num_nodes, None, draft_logits, unpack_law(draft_law), draft_row)
    law: Law | SamplingParams | None = unpack_law(target_law)
    if temperature is not None:
        law = SamplingParams(temperature, top_k, top_p, min_p)
    result: Acceptance = layer.accept(
        draft,
        target_logits,
        law,
        target_row,
        accept_coins,
        final_coins,
        rule=rule,
        max_depth=max_depth,
        target_to_draft=target_to_draft,
    )
    return tuple(result)


def _fake_accept(tokens: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
    return _fake_acceptance(tokens, arguments[-1])


def _call_match(
    layer: ModuleType, tokens: Tensor, num_nodes: Tensor, target_tokens: Tensor, max_depth: int
) -> tuple[Tensor, ...]:
    result: Acceptance = layer.match(Draft(tokens, num_nodes), target_tokens, max_depth=max_depth)
    return tuple(result)


def _fake_match(
    tokens: Tensor, num_nodes: Tensor, target_tokens: Tensor, max_depth: int
) -> tuple[Tensor, ...]:
    return _fake_acceptance(tokens, max_depth)


def _fake_acceptance(tokens: Tensor, max_depth: int) -> tuple[Tensor, ...]:
    batch = tokens.shape[0]
    width = max_depth + 1
    return (
        tokens.new_empty((batch, width), dtype=torch.int64),
        tokens.new_empty((batch,), dtype=torch.int32),
        tokens.new_empty((batch, width), dtype=torch.int32),
        tokens.new_empty((batch,), dtype=torch.int32),
    )


_accept = register(
    "accept(Tensor tokens, Tensor num_nodes, Tensor? draft_logits, Tensor[] draft_law,"
    " Tensor? draft_row, Tensor target_logits, Tensor[] target_law, Tensor? temperature,"
    " Tensor? top_k, Tensor? top_p, Tensor? min_p, Tensor target_row, Tensor accept_coins,"
    " Tensor final_coins, Tensor? target_to_draft, str rule, SymInt max_depth)"
    " -> (Tensor, Tensor, Tensor, Tensor)",
    _call_accept,
    _fake_accept,
)
_match = register(
    "match(Tensor tokens, Tensor num_nodes, Tensor target_tokens, SymInt max_depth)"
    " -> (Tensor, Tensor, Tensor, Tensor)",
    _call_match,
    _fake_match,
)
