"""Accept or reject a chain of drafts, and draw the token that follows, in float64.

    token rule   accept y_i iff u_i * q_i(y_i) < p_i(y_i), up to the first rejection
    block rule   a_i = min(1, a_(i-1) * p_i(y_i) / q_i(y_i))
                 Z_i = sum_x (a_i * p_(i+1)(x) - q_(i+1)(x))+
                 h_i = Z_i / (Z_i + (1 - a_i)), at the end of the chain h = a
                 accept n drafts, the largest i with u_i < h_i
    final token  the plain target law after the last draft, else norm((a_n p_(n+1) - q_(n+1))+)

The law that judges node i is the row of its parent. A fixed draft has the one-hot law.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from spec_kernels.reference import random
from spec_kernels.reference.law import is_valid, on_target_ids, probabilities, row_law
from spec_kernels.reference.sample import draw
from spec_kernels.types import (
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


class Step(NamedTuple):
    """One draft token with the two laws that meet at it, both over the target's ids."""

    token: int
    p: Tensor  # [vocab], the target's law given the drafts before
    q: Tensor | None  # [vocab], the law that the token was drawn from; None = fixed
    p_token: float
    q_token: float


class Chain(NamedTuple):
    """A request's drafts up to where its chain is closed."""

    steps: list[Step]
    last: Tensor | None  # [vocab], the target's law after the last draft; None = invalid row
    status: int  # INVALID_DRAFT if the draft behind is unusable


class _Reader:
    """Reads laws and drafts of one request out of the packed arguments of `accept`."""

    def __init__(
        self,
        draft: Draft,
        target_logits: Tensor,
        target_law: Law | SamplingParams | None,
        target_row: Tensor,
        target_to_draft: Tensor | None,
        request: int,
    ) -> None:
        self.draft, self.request = draft, request
        self.target_logits, self.target_law = target_logits, target_law
        self.target_row, self.target_to_draft = target_row, target_to_draft
        self.vocab = target_logits.shape[1]

    def target(self, node: int) -> Tensor | None:
        """Return the target's law after `node`, None if that row is invalid."""
        row, logits, law = int(self.target_row[self.request, node]), self.target_logits, None
        rows = logits.shape[0]
        if isinstance(self.target_law, SamplingParams) and 0 <= row < rows:
            law = row_law(logits[row][None], self.target_law, torch.tensor([self.request]))
            logits, row, rows = logits[row][None], 0, 1
        elif isinstance(self.target_law, Law):
            law = self.target_law
        return probabilities(logits, law, row) if is_valid(law, row, rows) else None

    def draft_row(self, node: int) -> int:
        """Return the row that `node` was drawn from, -1 if it is fixed."""
        return -1 if self.draft.row is None else int(self.draft.row[self.request, node])

    def has_fault(self, node: int) -> bool:
        """Say whether the draft at `node` is unusable: its id, its row or the law of its row."""
        token, row = int(self.draft.tokens[self.request, node]), self.draft_row(node)
        logits = self.draft.logits
        if row == -1:
            return not 0 <= token < self.vocab
        if logits is None or not is_valid(self.draft.law, row, logits.shape[0]):
            return True
        widest = logits.shape[1] if self.target_to_draft is None else 0
        return not 0 <= token < max(self.vocab, widest)

    def step(self, node: int, p: Tensor) -> Step:
        """Return the draft at `node`, which is usable, to be judged by `p`."""
        token, row = int(self.draft.tokens[self.request, node]), self.draft_row(node)
        p_token = float(p[token]) if token < self.vocab else 0.0
        if row == -1:
            return Step(token, p, None, p_token, 1.0)
        assert self.draft.logits is not None
        own = probabilities(self.draft.logits, self.draft.law, row)
        q = on_target_ids(own, self.vocab, self.target_to_draft)
        q_token = float(q[token]) if token < self.vocab else float(own[token])
        return Step(token, p, q, p_token, q_token)


def read_chain(reader: _Reader, length: int) -> Chain:
    """Read at most `length` drafts, up to the first one that cannot be judged or used."""
    steps: list[Step] = []
    while True:
        node = len(steps)
        p = reader.target(node)
        if node == length or int(reader.draft.tokens[reader.request, node + 1]) == PAD_TOKEN:
            return Chain(steps, p, OK)
        if reader.has_fault(node + 1):
            return Chain(steps, p, INVALID_DRAFT)
        if p is None:
            return Chain(steps, p, OK)
        steps.append(reader.step(node + 1, p))


def residual(a: float, step: Step) -> Tensor:
    """Return the unnormalised law of the token that replaces a rejected draft:
    `(a * p - q)+`, and for a fixed draft `a * p` without its id."""
    if step.q is not None:
        return (a * step.p - step.q).clamp(min=0.0)
    weights = a * step.p
    weights[step.token] = 0.0
    return weights


def residual_mass(a: float, step: Step) -> float:
    """Return the sum of the residual: `Z` of the block rule.

    Example:
        >>> p, q = torch.tensor([0.25, 0.75]), torch.tensor([0.5, 0.5])
        >>> residual_mass(1.0, Step(0, p, q, 0.25, 0.5))
        0.25
        >>> residual_mass(1.0, Step(0, p, None, 0.25, 1.0))
        0.75
    """
    return float(residual(a, step).sum())


def scan_token(steps: list[Step], coins: list[float]) -> tuple[int, float]:
    """Return how many drafts the token rule accepts, and 1: the scale of p in the residual."""
    for n, step in enumerate(steps):
        # A token that its own law excludes cannot have been drawn from it.
        if step.q_token == 0.0 or not random.decide(coins[n], step.p_token, step.q_token):
            return n, 1.0
    return len(steps), 1.0


def scan_block(steps: list[Step], coins: list[float]) -> tuple[int, float]:
    """Return how many drafts the block rule accepts, and `a` there."""
    a = [1.0]
    for step in steps:
        ratio = a[-1] * step.p_token / step.q_token if step.q_token > 0.0 else 0.0
        a.append(min(ratio, 1.0))
    for n in range(len(steps), 0, -1):
        h = a[n]
        if n < len(steps):
            mass = residual_mass(a[n], steps[n])
            whole = mass + (1.0 - a[n])
            h = 1.0 if whole == 0.0 else mass / whole
        if random.decide(coins[n - 1], h):
            return n, a[n]
    return 0, 1.0


def accept_scan(steps: list[Step], coins: list[float], rule: str) -> tuple[int, float]:
    """Return how many drafts are accepted, and the scale `a` of p in the residual after them.

    Args:
        steps: the closed chain.
        coins: `coins[i]` judges `steps[i]`.
        rule: "token" or "block".
    """
    return scan_token(steps, coins) if rule == "token" else scan_block(steps, coins)


def recovered_weights(a: float, step: Step) -> Tensor:
    """Return the residual; where it vanishes, p without the rejected id; where that does, p."""
    without = step.p.clone()
    if step.token < without.numel():
        without[step.token] = 0.0
    for weights in (residual(a, step), without):
        if float(weights.sum()) > 0.0:
            return weights
    return step.p


def _finish(chain: Chain, coins: list[float], final_coin: float, rule: str) -> tuple[int, int, int]:
    """Return accepted length, final token and status of one request."""
    n, a = accept_scan(chain.steps, coins, rule)
    if n < len(chain.steps):
        step = chain.steps[n]
        status = ZERO_Q if step.q_token == 0.0 else OK
        token = draw(final_coin, recovered_weights(a, step))
    else:
        status = chain.status
        token = PAD_TOKEN if chain.last is None else draw(final_coin, chain.last)
    return n, token, status | (INVALID_TARGET if token == PAD_TOKEN else OK)


def _empty(batch: int, max_depth: int, device: torch.device) -> Acceptance:
    """Return the result of absent requests, to be filled."""
    return Acceptance(
        torch.full((batch, max_depth + 1), PAD_TOKEN, dtype=torch.int64, device=device),
        torch.zeros(batch, dtype=torch.int32, device=device),
        torch.full((batch, max_depth + 1), -1, dtype=torch.int32, device=device),
        torch.zeros(batch, dtype=torch.int32, device=device),
    )


def _record(out: Acceptance, request: int, drafts: Tensor, n: int, token: int, status: int) -> None:
    """Write one request's result; `drafts` are its tokens behind the root."""
    out.output_tokens[request, :n] = drafts[:n]
    out.output_tokens[request, n] = token
    out.accepted_lens[request] = n
    out.path[request, : n + 1] = torch.arange(n + 1)
    out.status[request] = status


def _length(draft: Draft, request: int, max_depth: int) -> int:
    """Return how many drafts a request may use; -1 if it is absent."""
    nodes = min(int(draft.num_nodes[request]), draft.tokens.shape[1])
    return min(nodes - 1, max_depth) if nodes > 0 else -1


def _refuse_trees(draft: Draft) -> None:
    if draft.parents is not None:
        raise NotImplementedError(
            "draft.parents: trees are not supported yet; pass parents=None for a chain"
        )


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
        draft: a chain per request.
        target_logits: `[rows, vocab]` float.
        target_law: laws of the rows, or the requests' parameters; None if they are probabilities.
        target_row: `[batch, nodes] int32`, the row computed at each node.
        accept_coins: `[batch, nodes] float64`; column i judges node i.
        final_coins: `[batch] float64`.
        rule: "block" or "token".
        replacement: no effect on a chain.
        max_depth: most drafts to accept.
        target_to_draft: `[vocab] int32`, draft column of each target id, -1 = none.

    Raises:
        ValueError: another rule.
        NotImplementedError: `draft.parents` is given.

    Example:
        >>> draft = Draft(torch.tensor([[9, 1]]), torch.tensor([2]))
        >>> p = torch.tensor([[0.5, 0.5], [0.0, 1.0]])
        >>> coins = torch.full((1, 2), 0.4, dtype=torch.float64)
        >>> rows = torch.tensor([[0, 1]])
        >>> accept(draft, p, None, rows, coins, coins[:, 0], max_depth=1).output_tokens
        tensor([[1, 1]])
    """
    _refuse_trees(draft)
    if rule not in ("block", "token"):
        raise ValueError(f'rule must be "block" or "token", got {rule!r}')
    batch = draft.tokens.shape[0]
    out = _empty(batch, max_depth, draft.tokens.device)
    for b in range(batch):
        length = _length(draft, b, max_depth)
        if length < 0:
            continue
        reader = _Reader(draft, target_logits, target_law, target_row, target_to_draft, b)
        chain = read_chain(reader, length)
        coins = accept_coins[b, 1:].tolist()
        n, token, status = _finish(chain, coins, float(final_coins[b]), rule)
        _record(out, b, draft.tokens[b, 1:], n, token, status)
    return out


def match(draft: Draft, target_tokens: Tensor, *, max_depth: int) -> Acceptance:
    """Accept drafts while they equal the target's own tokens; then emit the target's token.

    Args:
        draft: a chain per request; laws are not read.
        target_tokens: `[batch, nodes]` int64 or int32, the target's token after each node;
            negative marks an invalid row.
        max_depth: most drafts to accept.

    Raises:
        NotImplementedError: `draft.parents` is given.

    Example:
        >>> draft = Draft(torch.tensor([[9, 4, 5]]), torch.tensor([3]))
        >>> match(draft, torch.tensor([[4, 6, 7]]), max_depth=2).output_tokens
        tensor([[ 4,  6, -1]])
    """
    _refuse_trees(draft)
    batch = draft.tokens.shape[0]
    out = _empty(batch, max_depth, draft.tokens.device)
    for b in range(batch):
        length = _length(draft, b, max_depth)
        if length < 0:
            continue
        drafts, own = draft.tokens[b, 1:].tolist(), target_tokens[b].tolist()
        n = 0
        while n < length and own[n] >= 0 and drafts[n] == own[n]:
            n += 1
        status = OK if own[n] >= 0 else INVALID_TARGET
        if n < length and drafts[n] < PAD_TOKEN:
            status |= INVALID_DRAFT
        _record(out, b, draft.tokens[b, 1:], n, max(own[n], PAD_TOKEN), status)
    return out
