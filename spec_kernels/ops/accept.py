"""Verification: keep a path of each draft so that the output follows the target's own law."""

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
from spec_kernels.ops._register import checked_once, register
from spec_kernels.types import Acceptance, Draft, Law, SamplingParams


@checked_once()
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
    """Verify drafts, a chain or a tree: keep a path, then draw one recovered or bonus token.

    With p the target's law and q the law that a draft token was drawn from, on a chain y_i:

        token   accept y_i iff u_i * q_i(y_i) < p_i(y_i); stop at the first rejection, n kept
                rejected: draw from norm((p - q)+); all accepted: draw from p
        block   a_i = min(1, a_(i-1) * p_i(y_i) / q_i(y_i)),  a_0 = 1
                Z_i = sum_x (a_i * p_(i+1)(x) - q_(i+1)(x))+,  h_i = Z_i / (Z_i + (1 - a_i))
                n = the largest i with u_i < h_i  (h of the last node is its a)
                n not the last: draw from norm((a_n * p - q)+); else draw from p

    On a tree, at a node entered with acceptance a (the root: 1), its children y tried in ascending
    order, q without the ids of the fixed ones, M the ids rejected so far:

        always  r(x) = (a * p(x) - s * q(x))+ off M,  Z = sum r,  W = Z + (1 - a);  first s = 0
        y       b = min(1, r(y) / (W * D));  D = q(y) / rem if y is sampled, rem = the mass that q
                has left; D = 1 if it is fixed
        no y    s += W / rem if y is sampled; y joins M, and leaves q unless with replacement
        token   enter y, with a = 1, iff u * W * D < r(y); no child entered: draw from norm(r)
        block   enter every y with a = b; keep the first node in post-order with u < Z / W, or the
                root, and draw from norm(r) there

    Under either rule the emitted tokens follow exactly the target's law, whatever q is. The block
    rule keeps at least as many drafts on average.

    Args:
        draft: `Draft`. A node with row -1, or any node where draft.row is None, is fixed: proposed
            without a draw, its q is one-hot. Sampled siblings share one row. A chain given as
            parents has the result of parents=None.
        target_logits: `[rows, vocab] float32/float16/bfloat16`, in any order of rows.
        target_law: the laws of these rows (`row_law`); or `SamplingParams` per request, and the
            laws are computed on the way; or None where the rows are probabilities.
        target_row: `[batch, nodes] int32`, the row of target_logits computed at each node, which
            judges that node's children.
        accept_coins: `[batch, nodes] float64` in [0, 1); coin i judges node i (`coins`).
        final_coins: `[batch] float64` in [0, 1), for the final token.
        rule: "block" or "token".
        replacement: whether sampled siblings were drawn with replacement; no effect on a chain.
        max_depth: most drafts to keep; the results have max_depth + 1 columns. A chain without
            parents is cut there; a tree with a deeper node is malformed.
        target_to_draft: `[vocab] int32`, the draft column of each target id, -1 = none
            (`invert_id_map`); None where both share their ids.

    Returns:
        `Acceptance`. Faulty rows and ids never raise: they set that request's status and give a
        defined result, other requests do not change. A draft that can't be judged counts as never
        proposed, with all nodes below it; a malformed tree is judged as its root alone.

    Raises:
        TypeError: an argument has another dtype or type.
        ValueError: shapes or devices do not fit, rule is unknown, max_depth < 0, or parents has
            more than 1,024 columns.

    Note:
        Reads raw logits; writes no probabilities. A request's result depends on that request
        alone. No synchronisation.

    Source:
        token: Leviathan et al. 2023, algorithm 1; Chen et al. 2023 with p and q swapped.
        block: Sun et al. 2025, "Block verification accelerates speculative decoding".
        trees: Miao et al. 2024 (SpecInfer) and Chen et al. 2024 (Sequoia) for the token rule; Weng
        et al. 2025, "Traversal verification", for the block rule.

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
            draft.parents,
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
            replacement,
            max_depth,
        )
    )


@checked_once()
def match(draft: Draft, target_tokens: Tensor, *, max_depth: int) -> Acceptance:
    """Verify drafts by comparison: accept while one equals the target's own token.

    The target's token is drawn first, greedily or with noise that the draft shared (`sample`),
    and is what is emitted; so the law is the target's whatever proposed the drafts, and with
    seeded noise the text is the very one that plain decoding gives. On a tree the walk enters, from
    the root, the first child that equals the target's token after the node.

    Args:
        draft: `Draft`; only tokens, num_nodes and parents are read.
        target_tokens: `[batch, nodes] int64 or int32`, the target's token after each node; a
            negative one marks an invalid row.
        max_depth: most drafts to keep; the results have max_depth + 1 columns. A chain without
            parents is cut there; a tree with a deeper node is malformed.

    Returns:
        `Acceptance`: the matching drafts, then the target's token at the first difference.

    Raises:
        TypeError: an argument has another dtype or type.
        ValueError: shapes or devices do not fit, max_depth < 0, or parents has more than 1,024
            columns.

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
    result = _match(draft.tokens, draft.num_nodes, draft.parents, target_tokens, max_depth)
    return Acceptance(*result)


def _call_accept(
    layer: ModuleType,
    tokens: Tensor,
    num_nodes: Tensor,
    parents: Tensor | None,
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
    replacement: bool,
    max_depth: int,
) -> tuple[Tensor, ...]:
    draft = Draft(tokens, num_nodes, parents, draft_logits, unpack_law(draft_law), draft_row)
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
        replacement=replacement,
        max_depth=max_depth,
        target_to_draft=target_to_draft,
    )
    return tuple(result)


def _fake_accept(tokens: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
    return _fake_acceptance(tokens, arguments[-1])


def _call_match(
    layer: ModuleType,
    tokens: Tensor,
    num_nodes: Tensor,
    parents: Tensor | None,
    target_tokens: Tensor,
    max_depth: int,
) -> tuple[Tensor, ...]:
    draft = Draft(tokens, num_nodes, parents)
    result: Acceptance = layer.match(draft, target_tokens, max_depth=max_depth)
    return tuple(result)


def _fake_match(tokens: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
    return _fake_acceptance(tokens, arguments[-1])


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
    "accept(Tensor tokens, Tensor num_nodes, Tensor? parents, Tensor? draft_logits,"
    " Tensor[] draft_law, Tensor? draft_row, Tensor target_logits, Tensor[] target_law,"
    " Tensor? temperature, Tensor? top_k, Tensor? top_p, Tensor? min_p, Tensor target_row,"
    " Tensor accept_coins, Tensor final_coins, Tensor? target_to_draft, str rule,"
    " bool replacement, SymInt max_depth) -> (Tensor, Tensor, Tensor, Tensor)",
    _call_accept,
    _fake_accept,
)
_match = register(
    "match(Tensor tokens, Tensor num_nodes, Tensor? parents, Tensor target_tokens,"
    " SymInt max_depth) -> (Tensor, Tensor, Tensor, Tensor)",
    _call_match,
    _fake_match,
)
