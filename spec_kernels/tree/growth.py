"""Grow trees where drafts are likely: best children, and the best nodes of a grown tree.

A tree grown level by level is cut to the nodes whose whole path is most likely (EAGLE-2). That is
exact for *fixed* children only: a node that was drawn must stay, since dropping it by its value
changes the law that it was drawn from. Nothing here waits for the device.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from spec_kernels._check import FLOATS, IDS, check, require
from spec_kernels.tree.topology import depths
from spec_kernels.types import PAD_TOKEN, Draft

_SCORES = (*FLOATS, torch.float64)


def top_children(logits: Tensor, k: int) -> Tensor:
    """Return the k ids with the largest logits of each row: fixed children of a node.

    Ties go to the lower id. A logit of -inf or NaN is never taken.

    Args:
        logits: `[rows, vocab]` float.
        k: ids per row, at least 1.

    Returns:
        `[rows, k] int64`, best first; `PAD_TOKEN` where a row has fewer.

    Raises:
        ValueError: logits have another shape, or k < 1.
        TypeError: logits are no floats.

    Example:
        >>> top_children(torch.tensor([[0.0, 2.0, 1.0, 2.0]]), k=3)
        tensor([[1, 3, 2]])
    """
    check("logits", logits, ["rows", "vocab"], _SCORES)
    require(k >= 1, f"k must be at least 1, got {k}")
    vocab = logits.shape[1]
    values = logits.nan_to_num(-math.inf, math.inf, -math.inf)
    found, count = [], min(k, vocab)
    for place in range(count):
        found.append(values.max(1, keepdim=True))  # the first of the largest
        if place + 1 < count:
            values = values.scatter(1, found[-1].indices, -math.inf)
    largest, ids = (
        torch.cat(parts, 1) if count > 1 else parts[0] for parts in zip(*found, strict=True)
    )
    ids = ids.masked_fill(largest == -math.inf, PAD_TOKEN)
    return F.pad(ids, (0, k - count), value=PAD_TOKEN) if count < k else ids


def path_scores(parents: Tensor, scores: Tensor, max_depth: int) -> Tensor:
    """Add up scores along each path: the log-probability that all drafts up to a node are right.

    Args:
        parents: `[batch, nodes] int32`; a path ends at a parent that does not come before its
            child.
        scores: `[batch, nodes]` float, log-probability of each node after its parent.
        max_depth: of the tree.

    Returns:
        `[batch, nodes]` like scores. What a node adds counts as 0 where it is positive, and NaN
        as -inf: so no node has a larger sum than its parent.

    Raises:
        TypeError: a tensor has another dtype.
        ValueError: the shapes or devices do not fit.

    Example:
        >>> tree = torch.tensor([[-1, 0, 0, 1]], dtype=torch.int32)
        >>> path_scores(tree, torch.tensor([[0.0, -0.5, -1.0, -0.25]]), max_depth=2)
        tensor([[ 0.0000, -0.5000, -1.0000, -0.7500]])
    """
    check("parents", parents, ["batch", "nodes"], IDS)
    check("scores", scores, parents.shape, _SCORES, parents.device)
    node = torch.arange(parents.shape[1], device=parents.device)
    is_linked = (parents >= 0) & (parents < node)
    above = torch.where(is_linked, parents.long(), node)
    own = torch.where(scores.isnan(), -math.inf, scores).clamp(max=0.0)
    total = own
    for _ in range(max_depth):  # level by level: rounding then keeps parents above children
        total = torch.where(is_linked, own + total.gather(1, above), own)
    return total


def keep_best(
    draft: Draft,
    scores: Tensor,
    budget: int | Tensor,
    *,
    max_depth: int,
    nodes: int | None = None,
) -> tuple[Draft, Tensor]:
    """Cut trees of fixed drafts to the nodes whose paths are most likely (EAGLE-2's rerank).

    With a node its ancestors stay, since no path is likelier than a part of it. Ties go to the
    lower node. Kept nodes stay in their order, so parents come first and siblings keep theirs.
    Nodes that do not hang on the root, or lie below `max_depth`, are dropped.

    Args:
        draft: trees; `PAD_TOKEN` nodes and what hangs below them are dropped.
        scores: `[batch, nodes]` float, log-probability of each node after its parent; the root's
            is not read, -inf drops a node.
        budget: most nodes to keep, the root included: one number, or `[batch] int32`; less than
            1 keeps the root.
        max_depth: of the trees.
        nodes: width of the result; by default the budget, which then must be a number.

    Returns:
        The cut draft with `nodes` columns; and `[batch, nodes] int32`, which node of the given
        draft each one was, -1 behind `num_nodes`.

    Raises:
        ValueError: the draft is a chain, or holds drawn nodes (`draft.row`); a shape does not
            fit; or nodes is missing or < 1.
        TypeError: a tensor has another dtype.

    Source:
        Li et al. 2024, "EAGLE-2: faster inference of language models with dynamic draft trees".

    Example:
        >>> tree = torch.tensor([[-1, 0, 0, 1, 1, 2]], dtype=torch.int32)
        >>> draft = Draft(torch.tensor([[9, 5, 6, 7, 8, 4]]), torch.tensor([6]).int(), tree)
        >>> scores = torch.tensor([[0.0, 0.6, 0.3, 0.5, 0.2, 0.9]]).log()
        >>> best, kept = keep_best(draft, scores, budget=4, max_depth=2)
        >>> kept, best.tokens, best.parents
        (tensor([[0, 1, 2, 3]], dtype=torch.int32), tensor([[9, 5, 6, 7]]),
         tensor([[-1,  0,  0,  1]], dtype=torch.int32))
    """
    parents, width = _check_draft(draft, scores, budget, nodes)
    size = parents.shape[1]
    node = torch.arange(size, device=parents.device)
    is_root, depth = node == 0, depths(parents, draft.num_nodes)
    is_usable = (depth >= 0) & (depth <= max_depth) & (draft.tokens != PAD_TOKEN)
    own = torch.where(is_root, 0.0, torch.where(is_usable, scores, -math.inf))
    total = path_scores(parents, own, max_depth)

    limit = budget[:, None] if isinstance(budget, Tensor) else budget
    order = total.sort(dim=1, descending=True, stable=True).indices
    place = torch.empty_like(order).scatter_(1, order, node.expand_as(order))
    is_kept = (total > -math.inf) & (place < limit) & (place < width)
    is_kept = (is_kept | is_root) & (draft.num_nodes > 0)[:, None]

    kept = torch.where(is_kept, node, size).sort(dim=1).values[:, :width]
    kept = F.pad(kept, (0, width - kept.shape[1]), value=size)
    is_there = kept < size
    kept = torch.where(is_there, kept, 0)
    new_index = is_kept.cumsum(1) - 1
    above = parents.gather(1, kept).long()
    above = torch.where(above < 0, -1, new_index.gather(1, above.clamp(min=0)))
    cut = Draft(
        torch.where(is_there, draft.tokens.gather(1, kept), PAD_TOKEN),
        is_kept.sum(1).int(),
        torch.where(is_there, above, -1).int(),
    )
    return cut, torch.where(is_there, kept, -1).int()


def _check_draft(
    draft: Draft, scores: Tensor, budget: int | Tensor, nodes: int | None
) -> tuple[Tensor, int]:
    """Check the arguments of `keep_best`; return the parents and the width of the result."""
    if not isinstance(draft, Draft):
        raise TypeError(f"draft must be a Draft, got {type(draft).__name__}")
    require(draft.row is None, "draft.row must be None: a drawn node is never dropped by its value")
    if draft.parents is None:
        raise ValueError("draft.parents must be a tree, got None (a chain)")
    check("draft.tokens", draft.tokens, ["batch", "nodes"], IDS)
    batch, size = draft.tokens.shape
    device = draft.tokens.device
    check("draft.num_nodes", draft.num_nodes, [batch], torch.int32, device)
    check("draft.parents", draft.parents, [batch, size], torch.int32, device)
    check("scores", scores, [batch, size], _SCORES, device)
    if isinstance(budget, Tensor):
        check("budget", budget, [batch], torch.int32, device)
    elif nodes is None:
        nodes = budget
    if nodes is None or nodes < 1:
        raise ValueError(f"nodes must be at least 1, got {nodes}")
    return draft.parents, nodes
