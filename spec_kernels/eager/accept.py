"""Accept or reject the drafts of a tree, and draw the token that follows.

    token rule   from the root: u_c * W * D < r(y_c) enters child c, with a = 1; the walk ends
                 where every child is rejected
    block rule   depth first: every child is entered, with a = min(1, r(y) / (W * D)); the first
                 node in post-order with u < h = Z / W is kept, or else the root
    final token  norm(r) where the walk ends; without children there, the plain target law

The names are those of `_tree.py`. On a chain this is, with a_i = min(1, a_(i-1) p_i / q_i),

    token rule   accept y_i iff u_i * q_i(y_i) < p_i(y_i), up to the first rejection
    block rule   the last node with u_i < h_i = Z_i / (Z_i + (1 - a_i)),
                 Z_i = sum_x (a_i * p_(i+1)(x) - q_(i+1)(x))+, at the end of the chain h = a

Rows are read when the walk needs them. The token rule reads those of the nodes that it enters.
Under the block rule a node with a = 0 is never entered; since Z <= a, a node with `u >= a` is not
kept whatever its row holds; and the row of a leaf is read only if the walk ends there.
"""

from __future__ import annotations

from array import array

import torch
from torch import Tensor

from spec_kernels.eager._tree import (
    Readers,
    State,
    Tree,
    drop,
    residual_mass,
)
from spec_kernels.eager.law import RowReader
from spec_kernels.eager.sample import draw_id
from spec_kernels.types import (
    BAD_TREE,
    INVALID_DRAFT,
    INVALID_TARGET,
    OK,
    PAD_TOKEN,
    Acceptance,
    Draft,
    Law,
    SamplingParams,
)


def _walk_token(tree: Tree, coins: list[float]) -> list[State]:
    """Return the nodes that the token rule keeps."""
    path = [State(tree, 0, 1.0)]
    while (child := path[-1].child) is not None:
        gain, cost = path[-1].judge()
        # A token that its own law excludes, of cost 0, is rejected.
        if cost > 0.0 and coins[child.node] * cost < gain:
            path.append(State(tree, child.node, 1.0))
        else:
            path[-1].reject()
    return path


def _walk_block(tree: Tree, coins: list[float]) -> list[State]:
    """Return the path to the node that the block rule keeps."""
    path = [State(tree, 0, 1.0)]
    while True:
        state = path[-1]
        if state.child is not None:
            gain, cost = state.judge()
            a = min(gain / cost, 1.0) if cost > 0.0 else 0.0
            if a > 0.0:
                path.append(State(tree, state.child.node, a))
            else:
                state.reject()
        elif len(path) == 1 or _is_kept(state, coins[state.node]):
            return path
        else:
            path.pop()
            path[-1].reject()


def _is_kept(state: State, coin: float) -> bool:
    """Say whether coin < h at a node whose children are all rejected."""
    if coin >= state.a:
        return False
    whole = state.whole()
    return coin < (1.0 if whole == 0.0 else state.mass() / whole)


def accept_scan(tree: Tree, coins: list[float], rule: str) -> list[State]:
    """Return the states of the kept nodes, root first; all children of the last are rejected.

    Args:
        tree: the drafts of one request.
        coins: `coins[i]` judges node i.
        rule: "token" or "block".
    """
    return _walk_block(tree, coins) if rule == "block" else _walk_token(tree, coins)


def _draw_final(state: State, coin: float) -> int:
    """Draw from the residual; where it vanishes, from p without the rejected ids; where that does,
    from p. `PAD_TOKEN` if the row is invalid."""
    readers = state.tree.readers
    if state.is_leaf:
        p = state.tree.target(state.node)
        return draw_id(coin, readers.target.weights(*p)) if p.law.status == OK else PAD_TOKEN
    token = draw_id(coin, *(state.residual or residual_mass(state)))
    if token == PAD_TOKEN:
        without = readers.target.scaled(*state.target, 1.0)
        drop(without, state.rejected)
        token = draw_id(coin, without)
    return token if token != PAD_TOKEN else draw_id(coin, readers.target.weights(*state.target))


class _Results:
    """Collects the results of the requests."""

    def __init__(self, max_depth: int) -> None:
        self._width = max_depth + 1
        self._tokens, self._path = array("q"), array("i")
        self._lens, self._status = array("i"), array("i")

    def add(self, path: list[int], tokens: list[int], token: int, status: int) -> None:
        """Add a request: the nodes that it keeps, its draft tokens and its final token."""
        padding = [-1] * (self._width - len(path))
        self._tokens.extend([*(tokens[node] for node in path[1:]), token, *padding])
        self._path.extend(path + padding)
        self._lens.append(len(path) - 1)
        self._status.append(status)

    def add_absent(self) -> None:
        """Add a request without nodes."""
        self._tokens.extend([PAD_TOKEN] * self._width)
        self._path.extend([-1] * self._width)
        self._lens.append(0)
        self._status.append(OK)

    def tensors(self, device: torch.device) -> Acceptance:
        """Return the results as tensors."""
        shape = (len(self._lens), self._width)
        return Acceptance(
            _tensor(self._tokens, torch.int64, device).view(shape),
            _tensor(self._lens, torch.int32, device),
            _tensor(self._path, torch.int32, device).view(shape),
            _tensor(self._status, torch.int32, device),
        )


def _tensor(numbers: array[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return an array as a tensor, on a CPU in the memory where it lies."""
    if not numbers:  # which no buffer can be
        return torch.empty(0, dtype=dtype, device=device)
    return torch.frombuffer(numbers, dtype=dtype).to(device)


class _Shape:
    """Who is whose child, in every request: from `draft.parents`, or the chain."""

    def __init__(self, draft: Draft, max_depth: int) -> None:
        self._nodes, self._max_depth = draft.tokens.shape[1], max_depth
        self._num_nodes: list[int] = draft.num_nodes.tolist()
        self._parents = None if draft.parents is None else draft.parents.tolist()
        self._chain = [[node + 1] for node in range(self._nodes)]

    def of(self, request: int) -> tuple[list[list[int]], int, int]:
        """Return the children of every node, the number of nodes and the status: a malformed
        tree counts as its root, a chain ends at `max_depth`."""
        num_nodes = min(self._num_nodes[request], self._nodes)
        if self._parents is None or num_nodes <= 0:
            return self._chain, min(num_nodes, self._max_depth + 1), OK
        children = _children(self._parents[request][:num_nodes], self._max_depth)
        return ([[]], 1, BAD_TREE) if children is None else (children, num_nodes, OK)


def _children(parents: list[int], max_depth: int) -> list[list[int]] | None:
    """Return the children of every node, None if the parents are no tree of that depth."""
    children: list[list[int]] = [[] for _ in parents]
    depth = [0] * len(parents)
    for node, parent in enumerate(parents[1:], start=1):
        if not 0 <= parent < node or depth[parent] == max_depth:
            return None
        depth[node] = depth[parent] + 1
        children[parent].append(node)
    return children if parents[0] == -1 else None


def _present(children: list[int], num_nodes: int) -> list[int]:
    """Return the children that exist."""
    return [node for node in children if node < num_nodes]


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
    """Verify drafts against the target's laws; the emitted tokens follow the target's law exactly.

    Args:
        draft: a chain or a tree per request.
        target_logits: `[rows, vocab]` float32, float16 or bfloat16, any strides.
        target_law: laws of the rows, or the requests' parameters; None if they are probabilities.
        target_row: `[batch, nodes] int32`, the row computed at each node.
        accept_coins: `[batch, nodes] float64`; column i judges node i.
        final_coins: `[batch] float64`, draw the final tokens.
        rule: "block" or "token".
        replacement: whether sampled siblings were drawn with replacement.
        max_depth: most drafts to accept; a deeper tree is malformed, a chain is cut.
        target_to_draft: `[vocab] int32`, draft column of each target id, -1 = none.

    Raises:
        ValueError: another rule.

    Example:
        >>> draft = Draft(torch.tensor([[9, 1]]), torch.tensor([2]))
        >>> p = torch.tensor([[0.5, 0.5], [0.0, 1.0]])
        >>> coins = torch.full((1, 2), 0.4, dtype=torch.float64)
        >>> rows = torch.tensor([[0, 1]])
        >>> accept(draft, p, None, rows, coins, coins[:, 0], max_depth=1).output_tokens
        tensor([[1, 1]])
    """
    if rule not in ("block", "token"):
        raise ValueError(f'rule must be "block" or "token", got {rule!r}')
    target = RowReader(target_logits, target_law)
    readers = Readers(
        target,
        None if draft.logits is None else RowReader(draft.logits, draft.law, width=target.vocab),
        None if target_to_draft is None else target_to_draft.long(),
        replacement,
    )
    tokens, target_rows = draft.tokens.tolist(), target_row.tolist()
    draft_rows = None if draft.row is None else draft.row.tolist()
    coins, finals = accept_coins.tolist(), final_coins.tolist()
    shape, results = _Shape(draft, max_depth), _Results(max_depth)
    for b in range(len(tokens)):
        children, num_nodes, status = shape.of(b)
        if num_nodes <= 0:
            results.add_absent()
            continue
        rows = None if draft_rows is None else draft_rows[b]
        tree = Tree(readers, b, tokens[b], rows, target_rows[b], children, num_nodes)
        path = accept_scan(tree, coins[b], rule)
        token = _draw_final(path[-1], finals[b])
        status |= path[-1].status | (INVALID_TARGET if token == PAD_TOKEN else OK)
        results.add([state.node for state in path], tokens[b], token, status)
    return results.tensors(target_logits.device)


def match(draft: Draft, target_tokens: Tensor, *, max_depth: int) -> Acceptance:
    """Accept drafts while one equals the target's own token; then emit the target's token.

    The verification of greedy decoding and of coupled sampling; laws are not read.

    Args:
        draft: a chain or a tree per request.
        target_tokens: `[batch, nodes]` int64 or int32, the target's token after each node;
            negative marks an invalid row.
        max_depth: most drafts to accept; a deeper tree is malformed, a chain is cut.

    Example:
        >>> draft = Draft(torch.tensor([[9, 4, 5]]), torch.tensor([3]))
        >>> match(draft, torch.tensor([[4, 6, 7]]), max_depth=2).output_tokens
        tensor([[ 4,  6, -1]])
    """
    shape, results = _Shape(draft, max_depth), _Results(max_depth)
    tokens, own_tokens = draft.tokens.tolist(), target_tokens.tolist()
    for b, (drafts, own) in enumerate(zip(tokens, own_tokens, strict=True)):
        children, num_nodes, status = shape.of(b)
        if num_nodes <= 0:
            results.add_absent()
            continue
        path, following = [0], _present(children[0], num_nodes)
        while own[path[-1]] >= 0:
            same = next((node for node in following if drafts[node] == own[path[-1]]), None)
            if same is None:
                break
            path.append(same)
            following = _present(children[same], num_nodes)
        token = own[path[-1]]
        if any(drafts[node] < PAD_TOKEN for node in following):
            status |= INVALID_DRAFT
        status |= OK if token >= 0 else INVALID_TARGET
        results.add(path, drafts, max(token, PAD_TOKEN), status)
    return results.tensors(draft.tokens.device)
