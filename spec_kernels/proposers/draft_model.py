"""Draft with a smaller model: it samples a chain token by token from its own law.

A round of the session, whose cache holds a prefix of the committed tokens:

1. catch up: one forward over the committed tokens that the cache lacks, the root the last of them
   (one, or two after a round in which every draft was accepted);
2. draw draft 1 from the law at the root, feed it, draw draft 2, and so on: gamma - 1 more forwards;
3. after the verification keep the accepted drafts in the cache, and forget the others.

Every drawn token is handed over with the row of logits and the law it was really drawn from.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from spec_kernels._check import require
from spec_kernels.ops import draft_coins, row_law, sample
from spec_kernels.proposers.base import DecodingState, needed_width, root_draft
from spec_kernels.targets import Cache, Target
from spec_kernels.types import (
    GREEDY_TEMPERATURE,
    PAD_TOKEN,
    Acceptance,
    Draft,
    Law,
    SamplingParams,
)


class DraftModelProposer:
    """Propose with a draft model that shares the target's tokenizer.

    Args:
        model: the draft model, behind the same protocol as a target.
        temperature: of the drafts of sampling requests; None = each request's own. The filters are
            the request's own. Greedy requests are drafted greedily.
        padded_vocab: allow another width of the logits than the target's. Right only where both
            share one tokenizer and the wider one is padded.

    Raises:
        ValueError: the temperature is out of range; when a batch opens: the widths differ without
            `padded_vocab`.

    Note:
        A request whose context no longer fits into the draft model gets no drafts; its output does
        not change.
    """

    def __init__(
        self, model: Target, *, temperature: float | None = None, padded_vocab: bool = False
    ) -> None:
        if temperature is not None:
            SamplingParams.make(temperature)
        self.model = model
        self.temperature = temperature
        self.padded_vocab = padded_vocab

    def open(self, state: DecodingState, capacity: int) -> DraftModelSession:
        """Open the draft model's cache for a batch."""
        require(
            self.model.vocab_size == state.vocab_size or self.padded_vocab,
            f"the draft model has {self.model.vocab_size} ids and the target {state.vocab_size}: "
            "pass padded_vocab=True if both share one tokenizer and differ in padding only",
        )
        return DraftModelSession(self, state, capacity)


class DraftModelSession:
    """The draft model at work on one batch.

    Attributes:
        cache: the draft model's cache. Between rounds it holds every committed token but the last
            one, or the last two; nothing of a request that outgrew the draft model is used.
    """

    wants_hidden = False

    def __init__(self, proposer: DraftModelProposer, state: DecodingState, capacity: int) -> None:
        self._model = proposer.model
        limit = self._model.max_length
        self._capacity = capacity if limit is None else min(capacity, limit)
        self._params = _draft_params(state.params, proposer.temperature)
        self.cache: Cache = self._model.open(state.lens.shape[0], self._capacity)
        self._lag = 1  # most committed tokens that a request's cache lacks, on the host
        self._before = (self.cache.context_lens, self._lag)

    def prefill(
        self, state: DecodingState, row: int, tokens: Sequence[int], hidden: Tensor | None
    ) -> None:
        """Feed the prompt but its last token, unless it is too long for the draft model."""
        if len(tokens) < self._capacity:
            last = self._model.vocab_size - 1
            self._model.prefill(self.cache, row, [min(token, last) for token in tokens])

    def propose(self, state: DecodingState, limits: Tensor, gamma: int) -> Draft:
        """Draw up to `limits[b]` drafts; their laws are kept for the verifier."""
        self._before = (self.cache.context_lens, self._lag)
        draft = root_draft(state, limits)
        if gamma == 0:
            self._lag += 1
            return draft
        room = self._capacity - state.lens + 1  # the last draft is drawn, not fed
        logits = self._catch_up(state, (limits >= 0) & (room > 0))
        limits = limits.minimum(room)
        coins = draft_coins(state.seeds, state.root_positions, gamma)[:, :, 0]
        tokens, num_nodes = draft.tokens, draft.num_nodes
        laws: list[tuple[Tensor, Law]] = []
        for depth in range(gamma):
            is_wanted = (limits > depth) & (num_nodes == depth + 1)
            logits, law = self._law(state, logits, tokens, is_wanted)
            token = _draw(state, logits, law, coins[:, depth], depth)
            tokens = torch.cat([tokens, token], 1)
            num_nodes = num_nodes + (token[:, 0] != PAD_TOKEN)
            laws.append((logits, law))
            if depth + 1 < gamma:
                logits = self._feed(token, (limits > depth + 1) & (num_nodes == depth + 2))
        return _chain(state, tokens, num_nodes, laws)

    def commit(self, state: DecodingState, result: Acceptance, hidden: Tensor | None) -> None:
        """Keep the committed tokens and the accepted drafts."""
        self.cache.truncate(state.lens + result.accepted_lens)

    def rollback(self, state: DecodingState) -> None:
        """Return to the lengths before the round."""
        lens, self._lag = self._before
        self.cache.truncate(lens)

    def _catch_up(self, state: DecodingState, is_present: Tensor) -> Tensor:
        """Feed the committed tokens that the cache lacks; return the logits at the roots."""
        context = self.cache.context_lens
        lag = torch.where(is_present, state.lens - context, 0)
        width = max(needed_width(lag, self._lag), 1)
        offset = torch.arange(width, device=lag.device)
        columns = (context[:, None] + offset).clamp(max=state.tokens.shape[1] - 1).long()
        is_real = offset < lag[:, None]
        tokens = torch.where(is_real, state.tokens.gather(1, columns), PAD_TOKEN)
        self._lag = 2
        return self._forward(tokens, lag.to(torch.int32), torch.where(is_real, offset, -1))

    def _feed(self, token: Tensor, is_present: Tensor) -> Tensor:
        """Feed one draft token per present request; return the logits behind it."""
        num_nodes = is_present.to(torch.int32)
        tokens = torch.where(is_present[:, None], token, PAD_TOKEN)
        return self._forward(tokens, num_nodes, num_nodes[:, None] - 1)

    def _forward(self, tokens: Tensor, num_nodes: Tensor, path: Tensor) -> Tensor:
        """Append tokens to the cache; return `[batch, vocab]` logits at the last of each request,
        arbitrary where there is none."""
        readable = tokens.clamp(max=self._model.vocab_size - 1)
        output = self._model.forward(readable, num_nodes, self.cache)
        self.cache.keep(path.to(torch.int32), (num_nodes - 1).clamp(min=0))
        last = output.row.gather(1, (num_nodes[:, None] - 1).clamp(min=0).long())
        return output.logits[last[:, 0].clamp(min=0).long()]

    def _law(
        self, state: DecodingState, logits: Tensor, tokens: Tensor, is_wanted: Tensor
    ) -> tuple[Tensor, Law]:
        """Apply the requests' adjustments and filters; a request that wants no draft is invalid."""
        logits = logits[:, : state.vocab_size]  # padding of a wider draft model is never drawn
        request = torch.arange(logits.shape[0], dtype=torch.int32, device=logits.device)
        request = torch.where(is_wanted, request, -1)
        if state.adjust_ is not None:
            node = torch.full_like(request, tokens.shape[1] - 1)
            state.adjust_(logits, request, tokens, node)
        return logits, row_law(logits, self._params, request)


def _draw(state: DecodingState, logits: Tensor, law: Law, coins: Tensor, depth: int) -> Tensor:
    """Draw one draft per request, `[batch, 1]`; `PAD_TOKEN` where its law is invalid."""
    if state.rule == "coupled":
        return sample(logits, law, noise=(state.seeds, state.root_positions + depth + 1))
    return sample(logits, law, coins=coins)


def _chain(
    state: DecodingState, tokens: Tensor, num_nodes: Tensor, laws: Sequence[tuple[Tensor, Law]]
) -> Draft:
    """Gather the chain; row `depth * batch + b` is the law of draft `depth` of request b."""
    if state.rule == "coupled":
        return Draft(tokens, num_nodes)
    batch, nodes = tokens.shape
    row = torch.arange((nodes - 1) * batch, dtype=torch.int32, device=tokens.device)
    row = torch.cat([row.new_full((batch, 1), -1), row.view(nodes - 1, batch).T], 1)
    law = Law(*(torch.cat(columns) for columns in zip(*(law for _, law in laws), strict=True)))
    return Draft(
        tokens, num_nodes, logits=torch.cat([logits for logits, _ in laws]), law=law, row=row
    )


def _draft_params(params: SamplingParams, temperature: float | None) -> SamplingParams:
    if temperature is None:
        return params
    is_greedy = params.temperature < GREEDY_TEMPERATURE
    return params._replace(temperature=torch.where(is_greedy, params.temperature, temperature))
