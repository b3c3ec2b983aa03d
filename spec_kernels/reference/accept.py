"""Accept or reject a tree of drafts, and draw the token that follows, in float64.

A node is entered with an acceptance `a` and the law `p` of its children. A child `y` is *sampled*,
from `q` without the ids of its fixed siblings and, unless drawn with replacement, without those of
its earlier sampled siblings; `rem` is the mass that is left of `q`. Or it is *fixed*: the one-hot
law. Siblings are tried in ascending order.

    start             s = 0, Z = a, M = {}
    always            W = Z + (1 - a);  r(x) = (a * p(x) - s * q(x))+ off M
    entry of child y  b = min(1, r(y) / (W * D)),  D = q(y) / rem if sampled, 1 if fixed
    y is rejected     s += W / rem if sampled;  M += y;  Z = sum_x r(x)
    token rule        accept y iff u * W * D < r(y), and enter it with a = 1; top-down
    block rule        enter every child with a = b; the kept node is the first in post-order with
                      u < h, h = Z / W (0/0 = 1); the root is kept for sure
    final token       norm(r) of the kept node, all its children rejected; without children, p

On a chain, where every node has one child, these are the token rule and the block rule as usual.
A sampled child with D = 0 can't have been drawn: it is rejected, but its id not masked.
"""

from __future__ import annotations

import torch
from torch import Tensor

from spec_kernels.reference import random
from spec_kernels.reference._tree import Child, Family, Topology, Tree, read_topology
from spec_kernels.reference.sample import draw
from spec_kernels.types import (
    BAD_TREE,
    INVALID_DRAFT,
    INVALID_TARGET,
    OK,
    PAD_TOKEN,
    ZERO_Q,
    Acceptance,
    Draft,
    Law,
    SamplingParams,
)


class State:
    """A node while its children are rejected one after another.

    Args:
        node: its index.
        a: the acceptance that it was entered with.
        family: its children and the laws that meet at them.
        replacement: the sampled children were drawn with replacement.
    """

    def __init__(self, node: int, a: float, family: Family, replacement: bool) -> None:
        self.node, self.a, self.family, self.replacement = node, a, family, replacement
        self.s = 0.0
        self.mass = a  # Z
        self.masked: list[int] = []  # M
        self.remaining = family.q  # without the children drawn so far
        self.is_whole = not family.has_fixed  # nothing is out of q yet
        self.was_tried = False
        self.has_zero_q = False

    @property
    def whole(self) -> float:
        """W."""
        return self.mass + (1.0 - self.a)  # (mass + 1) - a would lose a small mass


def residual(state: State) -> Tensor:
    """Return `r`: the unnormalised law of the token that replaces the children rejected so far."""
    assert state.family.p is not None
    weights = state.a * state.family.p
    if state.family.q_target is not None:
        weights = (weights - state.s * state.family.q_target).clamp(min=0.0)
    weights[state.masked] = 0.0
    return weights


def residual_mass(state: State) -> float:
    """Return the sum of the residual: Z.

    Example:
        >>> p, q = torch.tensor([0.25, 0.75]), torch.tensor([0.5, 0.5])
        >>> child = Child(node=1, token=0, column=0, is_fixed=False)
        >>> state = State(0, 1.0, Family(p, q, q, [child], False, False), replacement=False)
        >>> reject(state, child)
        >>> residual_mass(state)
        0.25
    """
    return float(residual(state).sum())


def remaining_mass(state: State) -> float:
    """Return `rem`, what is left of q: summed directly, since 1 - sum would lose its digits."""
    if state.is_whole:
        return 1.0
    return 0.0 if state.remaining is None else float(state.remaining.sum())


def drafting(state: State, child: Child) -> float:
    """Return D, the probability with which `child` was proposed after its earlier siblings."""
    if child.is_fixed:
        return 1.0
    if child.column < 0 or state.remaining is None:
        return 0.0
    q, rem = float(state.remaining[child.column]), remaining_mass(state)
    return 0.0 if q == 0.0 else q / rem


def entry(state: State, child: Child) -> tuple[float, float]:
    """Return `r(y)` and `W * D`, whose ratio accepts a child; (0, 1) where D or p is 0 for sure."""
    d, weights = drafting(state, child), residual(state)
    if d == 0.0 or child.token >= weights.numel():
        return 0.0, 1.0
    return float(weights[child.token]), state.whole * d


def entry_probability(state: State, child: Child) -> float:
    """Return b."""
    numerator, denominator = entry(state, child)
    return min(numerator / denominator, 1.0) if denominator > 0.0 else 0.0


def reject(state: State, child: Child) -> None:
    """Take a child's law, and the child, out of the node's law."""
    state.was_tried = True
    is_possible = drafting(state, child) != 0.0
    if not child.is_fixed:
        rem = remaining_mass(state)
        state.s += state.whole / rem if rem > 0.0 else 0.0
        state.has_zero_q |= not is_possible
        if not state.replacement and is_possible and state.remaining is not None:
            state.remaining, state.is_whole = state.remaining.clone(), False
            state.remaining[child.column] = 0.0
    if is_possible and state.family.p is not None and child.token < state.family.p.numel():
        state.masked.append(child.token)
    state.mass = residual_mass(state)


def kept_probability(state: State) -> float:
    """Return h of a node whose children are all rejected."""
    return 1.0 if state.whole == 0.0 else state.mass / state.whole


def exhaust(tree: Tree, node: int, a: float, replacement: bool) -> tuple[State, list[float]]:
    """Reject all children of a node; return its last state, and b of each child."""
    state, entries = State(node, a, tree.family(node), replacement), []
    for child in state.family.children:
        entries.append(entry_probability(state, child))
        reject(state, child)
    return state, entries


def scan_token(tree: Tree, coins: list[float], replacement: bool) -> State:
    """Walk down to the first node that keeps no child, by the token rule."""
    state = State(0, 1.0, tree.family(0), replacement)
    while True:
        for child in state.family.children:
            if random.decide(coins[child.node], *entry(state, child)):
                state = State(child.node, 1.0, tree.family(child.node), replacement)
                break
            reject(state, child)
        else:
            return state


def scan_block(tree: Tree, coins: list[float], replacement: bool) -> State:
    """Find the first node in post-order that the block rule keeps."""
    a, h, stack, order = {0: 1.0}, {}, [0], []
    while stack:
        node = stack.pop()
        order.append(node)
        state, entries = exhaust(tree, node, a[node], replacement)
        h[node] = kept_probability(state)
        nodes = [child.node for child in state.family.children]
        a.update(zip(nodes, entries, strict=True))
        stack += nodes
    kept = next(v for v in reversed(order) if v == 0 or random.decide(coins[v], h[v]))
    return exhaust(tree, kept, a[kept], replacement)[0]


def accept_scan(tree: Tree, coins: list[float], rule: str, replacement: bool) -> State:
    """Return the last kept node, with its children rejected.

    Args:
        tree: a request's tree.
        coins: `coins[i]` judges node i.
        rule: "token" or "block".
        replacement: siblings were drawn with replacement.
    """
    scan = scan_token if rule == "token" else scan_block
    return scan(tree, coins, replacement)


def final_weights(state: State) -> Tensor:
    """Return the unnormalised law of the final token: the plain law without a child, else the
    residual; where that vanishes, p without the masked ids; where that does too, p."""
    p = state.family.p
    assert p is not None
    if not state.was_tried:
        return p
    without = p.clone()
    without[state.masked] = 0.0
    for weights in (residual(state), without):
        if float(weights.sum()) > 0.0:
            return weights
    return p


def _finish(state: State, final_coin: float) -> tuple[int, int]:
    """Return the final token of a request and its status."""
    family = state.family
    token = PAD_TOKEN if family.p is None else draw(final_coin, final_weights(state))
    status = INVALID_TARGET if token == PAD_TOKEN else OK
    status |= INVALID_DRAFT if family.has_fault else OK
    return token, status | (ZERO_Q if state.has_zero_q else OK)


def _empty(batch: int, max_depth: int, device: torch.device) -> Acceptance:
    """Return the result of absent requests, to be filled."""
    return Acceptance(
        torch.full((batch, max_depth + 1), PAD_TOKEN, dtype=torch.int64, device=device),
        torch.zeros(batch, dtype=torch.int32, device=device),
        torch.full((batch, max_depth + 1), -1, dtype=torch.int32, device=device),
        torch.zeros(batch, dtype=torch.int32, device=device),
    )


def _record(
    out: Acceptance, draft: Draft, request: int, path: list[int], token: int, status: int
) -> None:
    """Write one request's result: the tokens on the path behind the root, then the final one."""
    n = len(path) - 1
    out.output_tokens[request, :n] = draft.tokens[request, path[1:]]
    out.output_tokens[request, n] = token
    out.accepted_lens[request] = n
    out.path[request, : n + 1] = torch.tensor(path)
    out.status[request] = status


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
        target_logits: `[rows, vocab]` float.
        target_law: laws of the rows, or the requests' parameters; None if they are probabilities.
        target_row: `[batch, nodes] int32`, the row computed at each node: it judges its children.
        accept_coins: `[batch, nodes] float64`; column i judges node i.
        final_coins: `[batch] float64`.
        rule: "block" or "token".
        replacement: siblings were drawn with replacement; no effect on a chain.
        max_depth: most drafts to accept. A chain is cut there; a tree that is deeper is malformed.
        target_to_draft: `[vocab] int32`, draft column of each target id, -1 = none.

    Raises:
        ValueError: another rule.

    Example:
        >>> draft = Draft(torch.tensor([[9, 1, 0]]), torch.tensor([3]), torch.tensor([[-1, 0, 0]]))
        >>> p = torch.tensor([[0.5, 0.5], [0.0, 1.0], [1.0, 0.0]])
        >>> coins = torch.full((1, 3), 0.6, dtype=torch.float64)
        >>> rows = torch.tensor([[0, 1, 2]])
        >>> out = accept(draft, p, None, rows, coins, coins[:, 0], max_depth=1)
        >>> out.output_tokens, out.path
        (tensor([[0, 0]]), tensor([[0, 2]], dtype=torch.int32))
    """
    if rule not in ("block", "token"):
        raise ValueError(f'rule must be "block" or "token", got {rule!r}')
    batch = draft.tokens.shape[0]
    out = _empty(batch, max_depth, draft.tokens.device)
    for b in range(batch):
        nodes = read_topology(draft, b, max_depth)
        if nodes is None:
            continue
        tree = Tree(nodes, draft, target_logits, target_law, target_row, target_to_draft, b)
        state = accept_scan(tree, accept_coins[b].tolist(), rule, replacement)
        token, status = _finish(state, float(final_coins[b]))
        status |= BAD_TREE if nodes.is_bad else OK
        _record(out, draft, b, nodes.path(state.node), token, status)
    return out


def _walk(nodes: Topology, tokens: list[int], own: list[int]) -> int:
    """Follow the target's own tokens from the root as far as a child equals them."""
    node, hits = 0, [0]
    while hits:
        node = hits[0]
        hits = [child for child in nodes.children[node] if tokens[child] == own[node] >= 0]
    return node


def match(draft: Draft, target_tokens: Tensor, *, max_depth: int) -> Acceptance:
    """Accept drafts while they equal the target's own tokens; then emit the target's token.

    Args:
        draft: a chain or a tree per request; laws are not read.
        target_tokens: `[batch, nodes]` int64 or int32, the target's token after each node;
            negative marks an invalid row.
        max_depth: most drafts to accept. A chain is cut there; a tree that is deeper is malformed.

    Example:
        >>> tree = torch.tensor([[-1, 0, 0, 2]])
        >>> draft = Draft(torch.tensor([[9, 4, 5, 6]]), torch.tensor([4]), tree)
        >>> match(draft, torch.tensor([[5, 0, 6, 7]]), max_depth=2).output_tokens
        tensor([[5, 6, 7]])
    """
    batch = draft.tokens.shape[0]
    out = _empty(batch, max_depth, draft.tokens.device)
    for b in range(batch):
        nodes = read_topology(draft, b, max_depth)
        if nodes is None:
            continue
        tokens, own = draft.tokens[b].tolist(), target_tokens[b].tolist()
        node = _walk(nodes, tokens, own)
        status = OK if own[node] >= 0 else INVALID_TARGET
        if any(tokens[child] < PAD_TOKEN for child in nodes.children[node]):
            status |= INVALID_DRAFT
        status |= BAD_TREE if nodes.is_bad else OK
        _record(out, draft, b, nodes.path(node), max(own[node], PAD_TOKEN), status)
    return out
