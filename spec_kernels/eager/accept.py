"""Accept or reject a chain of drafts, and draw the token that follows.

    token rule   accept y_i iff u_i * q_i(y_i) < p_i(y_i), up to the first rejection
    block rule   a_i = min(1, a_(i-1) * p_i(y_i) / q_i(y_i))
                 Z_i = sum_x (a_i * p_(i+1)(x) - q_(i+1)(x))+
                 h_i = Z_i / (Z_i + (1 - a_i)), at the end of the chain h = a
                 accept n drafts, the largest i with u_i < h_i
    final token  the plain target law after the last draft, else norm((a_n p_(n+1) - q_(n+1))+)

Probabilities of single ids and the scan over nodes are float64; rows are read in float32, and only
when asked for. The token rule reads a row once it has accepted the drafts before it. The block
rule reads from the back and stops at the first node that is kept; since Z <= a, a node with
`u >= a` is not kept whatever its row holds.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from spec_kernels.eager._rows import INVALID, RowLaw, Weights, tile_sums
from spec_kernels.eager.law import RowReader, on_same_ids
from spec_kernels.eager.sample import draw_id
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


class _Row(NamedTuple):
    """A row of logits with its law."""

    row: int
    law: RowLaw


class _Step(NamedTuple):
    """One usable draft, with the row that judges it and the row that it was drawn from."""

    token: int
    p: _Row
    q: _Row | None  # None = fixed
    p_token: float
    q_token: float


class _Residual(NamedTuple):
    """An unnormalised law and its sum per tile."""

    weights: Weights
    tiles: list[float]


class _Readers(NamedTuple):
    """The rows of a call, shared by its requests."""

    target: RowReader
    draft: RowReader | None
    columns: Tensor | None  # [vocab] int64, draft column of each target id


class _Chain:
    """The drafts of one request, read one after the other up to where the chain is closed."""

    def __init__(
        self,
        readers: _Readers,
        request: int,
        tokens: list[int],
        draft_rows: list[int] | None,
        target_rows: list[int],
        length: int,
    ) -> None:
        self.readers, self._request, self._length = readers, request, length
        self._tokens, self._draft_rows, self._target_rows = tokens, draft_rows, target_rows
        self.last = _Row(-1, INVALID)  # the row behind the last draft, once the chain is closed
        self.status = OK  # what closed it

    def step(self, node: int) -> _Step | None:
        """Return the draft behind `node`, None if the chain is closed there."""
        readers, index = self.readers, self._target_rows[node]
        p = _Row(index, readers.target.law(index, self._request))
        self.last, self.status = p, p.law.status
        if node == self._length or self._tokens[node + 1] == PAD_TOKEN:
            return None
        token, row = self._tokens[node + 1], -1
        if self._draft_rows is not None:
            row = self._draft_rows[node + 1]
        q = (
            None
            if row == -1
            else _Row(row, INVALID if readers.draft is None else readers.draft.law(row))
        )
        if not self._is_usable(token, q):
            self.status |= INVALID_DRAFT
        if self.status != OK:
            return None
        p_token = 0.0
        if token < readers.target.vocab:
            p_token = readers.target.probability(index, p.law, token)
        return _Step(token, p, q, p_token, 1.0 if q is None else self._q_token(token, q))

    def _is_usable(self, token: int, q: _Row | None) -> bool:
        """Say whether a draft has an id that exists, and a valid law if it is sampled."""
        limit = self.readers.target.vocab
        if q is not None:
            if q.law.status != OK:
                return False
            assert self.readers.draft is not None
            if self.readers.columns is None:
                limit = max(limit, self.readers.draft.vocab)
        return 0 <= token < limit

    def _q_token(self, token: int, q: _Row) -> float:
        """Return the probability that the draft law gives to its token."""
        draft, columns = self.readers.draft, self.readers.columns
        assert draft is not None
        column = token if columns is None else int(columns[token])
        return draft.probability(q.row, q.law, column) if 0 <= column < draft.vocab else 0.0


def _without(weights: Weights, token: int) -> Weights:
    """Set the weight of one id to 0, in place."""
    if weights.ids is not None:
        weights.mass[weights.ids == token] = 0.0
    elif token < weights.mass.numel():
        weights.mass[token] = 0.0
    return weights


def residual_mass(readers: _Readers, step: _Step, a: float) -> _Residual:
    """Return the residual behind a rejected draft, and its mass per tile: `(a * p - q)+`, and for
    a fixed draft `a * p` without its id."""
    weights = readers.target.scaled(step.p.row, step.p.law, a)
    if step.q is None:
        _without(weights, step.token)
    else:
        assert readers.draft is not None
        q = on_same_ids(weights, readers.draft, step.q.row, step.q.law, readers.columns)
        weights.mass.sub_(q).clamp_min_(0.0)
    return _Residual(weights, tile_sums(weights.mass))


def _scan_token(chain: _Chain, coins: list[float]) -> tuple[int, _Step | None]:
    """Return how many drafts the token rule accepts, and the draft that it rejects; one that its
    own law excludes is rejected."""
    n, step = 0, chain.step(0)
    while step is not None and step.q_token > 0.0 and coins[n + 1] * step.q_token < step.p_token:
        n += 1
        step = chain.step(n)
    return n, step


def _scan_block(
    chain: _Chain, coins: list[float]
) -> tuple[int, _Step | None, float, _Residual | None]:
    """Return how many drafts the block rule accepts, the draft behind them, `a` there, and the
    residual if it had to be summed."""
    steps: list[_Step] = []
    a = [1.0]
    # Behind a node with a = 0 nothing can be kept.
    while a[-1] > 0.0 and (step := chain.step(len(steps))) is not None:
        steps.append(step)
        a.append(min(a[-1] * step.p_token / step.q_token, 1.0) if step.q_token > 0.0 else 0.0)
    end = len(steps)
    if coins[end] < a[end] or end == 0:
        return end, None, 1.0, None
    for n in range(end - 1, 0, -1):
        if coins[n] >= a[n]:
            continue
        residual = residual_mass(chain.readers, steps[n], a[n])
        mass = math.fsum(residual.tiles)
        whole = mass + (1.0 - a[n])
        if coins[n] < (1.0 if whole == 0.0 else mass / whole):
            return n, steps[n], a[n], residual
    return 0, steps[0], 1.0, None


def accept_scan(
    chain: _Chain, coins: list[float], rule: str
) -> tuple[int, _Step | None, float, _Residual | None]:
    """Return how many drafts are accepted, the draft behind them (None at the end of the chain),
    the scale `a` of p in the residual there, and that residual if it is known.

    Args:
        chain: the drafts of one request.
        coins: `coins[i]` judges node i.
        rule: "token" or "block".
    """
    if rule == "block":
        return _scan_block(chain, coins)
    n, step = _scan_token(chain, coins)
    return n, step, 1.0, None


def _draw_recovered(
    readers: _Readers, step: _Step, a: float, residual: _Residual | None, coin: float
) -> int:
    """Draw from the residual; where it vanishes, from p without the rejected id; where that does,
    from p."""
    token = draw_id(coin, *(residual or residual_mass(readers, step, a)))
    if token == PAD_TOKEN:
        token = draw_id(coin, _without(readers.target.scaled(*step.p, 1.0), step.token))
    return token if token != PAD_TOKEN else draw_id(coin, readers.target.weights(*step.p))


def _judge(chain: _Chain, coins: list[float], final_coin: float, rule: str) -> tuple[int, int, int]:
    """Return accepted length, final token and status of one request."""
    n, step, a, residual = accept_scan(chain, coins, rule)
    if step is not None:
        status = ZERO_Q if step.q_token == 0.0 else OK
        token = _draw_recovered(chain.readers, step, a, residual, final_coin)
    else:
        status, token = chain.status, PAD_TOKEN
        if chain.last.law.status == OK:
            token = draw_id(final_coin, chain.readers.target.weights(*chain.last))
    return n, token, status | (INVALID_TARGET if token == PAD_TOKEN else OK)


class _Results:
    """Collects the results of the requests."""

    def __init__(self, max_depth: int) -> None:
        self._width = max_depth + 1
        self._tokens: list[list[int]] = []
        self._path: list[list[int]] = []
        self._lens: list[int] = []
        self._status: list[int] = []

    def add(self, emitted: list[int], status: int) -> None:
        """Add a request: its accepted drafts and its final token; nothing if it is absent."""
        padding = [-1] * (self._width - len(emitted))
        self._tokens.append(emitted + padding)
        self._path.append([*range(len(emitted)), *padding])
        self._lens.append(max(len(emitted) - 1, 0))
        self._status.append(status)

    def tensors(self, device: torch.device) -> Acceptance:
        """Return the results as tensors."""
        shape = (len(self._lens), self._width)
        return Acceptance(
            torch.tensor(self._tokens, dtype=torch.int64, device=device).reshape(shape),
            torch.tensor(self._lens, dtype=torch.int32, device=device),
            torch.tensor(self._path, dtype=torch.int32, device=device).reshape(shape),
            torch.tensor(self._status, dtype=torch.int32, device=device),
        )


def _lengths(draft: Draft, max_depth: int) -> list[int]:
    """Return how many drafts each request may use, -1 if it is absent."""
    nodes = draft.tokens.shape[1]
    return [min(min(n, nodes) - 1, max_depth) if n > 0 else -1 for n in draft.num_nodes.tolist()]


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
        target_logits: `[rows, vocab]` float32, float16 or bfloat16, any strides.
        target_law: laws of the rows, or the requests' parameters; None if they are probabilities.
        target_row: `[batch, nodes] int32`, the row computed at each node.
        accept_coins: `[batch, nodes] float64`; column i judges node i.
        final_coins: `[batch] float64`, draw the final tokens.
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
    target = RowReader(target_logits, target_law)
    readers = _Readers(
        target,
        None if draft.logits is None else RowReader(draft.logits, draft.law, width=target.vocab),
        None if target_to_draft is None else target_to_draft.long(),
    )
    tokens, target_rows = draft.tokens.tolist(), target_row.tolist()
    draft_rows = None if draft.row is None else draft.row.tolist()
    coins, finals = accept_coins.tolist(), final_coins.tolist()
    results = _Results(max_depth)
    for b, length in enumerate(_lengths(draft, max_depth)):
        if length < 0:
            results.add([], OK)
            continue
        rows = None if draft_rows is None else draft_rows[b]
        chain = _Chain(readers, b, tokens[b], rows, target_rows[b], length)
        n, token, status = _judge(chain, coins[b], finals[b], rule)
        results.add([*tokens[b][1 : n + 1], token], status)
    return results.tensors(target_logits.device)


def match(draft: Draft, target_tokens: Tensor, *, max_depth: int) -> Acceptance:
    """Accept drafts while they equal the target's own tokens; then emit the target's token.

    The verification of greedy decoding and of coupled sampling; laws are not read.

    Args:
        draft: a chain per request.
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
    results = _Results(max_depth)
    tokens, own_tokens = draft.tokens.tolist(), target_tokens.tolist()
    for b, length in enumerate(_lengths(draft, max_depth)):
        if length < 0:
            results.add([], OK)
            continue
        drafts, own, n = tokens[b][1:], own_tokens[b], 0
        while n < length and own[n] >= 0 and drafts[n] == own[n]:
            n += 1
        status = OK if own[n] >= 0 else INVALID_TARGET
        if n < length and drafts[n] < PAD_TOKEN:
            status |= INVALID_DRAFT
        results.add([*drafts[:n], max(own[n], PAD_TOKEN)], status)
    return results.tensors(draft.tokens.device)
