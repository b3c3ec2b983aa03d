"""The loop: propose, forward, accept, roll back. The only place that reads device values.

One round of a batch:

    draft = session.propose(state, limits)              tokens, and the laws they were drawn from
    output = target.forward(draft.tokens, cache)        one row of logits per node
    result = verifier(draft, output.logits, ...)        accepted drafts, then one more token
    cache.keep(result.path)                             the accepted nodes become context
    session.commit(result)                              the proposer's own cache follows

The invariant: *the cache holds K/V of every committed token but the last*, which is the root of the
next draft. Plain decoding is the same loop with gamma 0: no drafts, the bonus token is the token.

All random numbers come from the request's seed and the position of the root. So the output of a
request does not depend on its neighbours, and a round that failed can be repeated.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal, NamedTuple

import torch

from spec_kernels._check import require
from spec_kernels.adaptive import GammaPolicy, Judged
from spec_kernels.cost_model import StepCosts
from spec_kernels.nn.verifier import Verifier
from spec_kernels.proposers.base import (
    DecodingState,
    Proposer,
    Session,
    fit_draft,
    parents_of_tested,
    root_draft,
)
from spec_kernels.requests import (
    Adjustments,
    Chunk,
    Generation,
    Request,
    check_ids,
    stack_params,
)
from spec_kernels.stats import DecoderStats, Stopwatch, cut_below
from spec_kernels.stopping import Detokenize, StopScanner
from spec_kernels.targets import Target, TargetOutput, can_read
from spec_kernels.types import INVALID_TARGET, PAD_TOKEN, Acceptance, Draft

__all__ = ["Chunk", "Decoder", "Generation", "Request", "Run"]

RULES: Final = ("block", "token", "coupled")


class Decoder:
    """Decode with a target model, speculatively if there is a proposer, exactly in any case.

    Args:
        target: the model.
        proposer: where drafts come from; None = plain decoding.
        gamma: most drafts that a request may accept in a round: length of a chain, depth of a tree.
            "auto": chosen before each round, 0 included, from what rounds cost and accept
            (`spec_kernels.adaptive`); sampled text of a seed then depends on the clock.
        max_gamma: largest gamma of "auto".
        costs: v, c and o for "auto", so that outputs can be repeated; None = measured.
        rule: "block" (most tokens per round), "token", or "coupled" (a seeded output is the same
            with and without speculation, whatever the proposer and gamma).
        eos_ids: ids that end every request.
        detokenize: text of a sequence of ids, for `text` and stop strings.

    Raises:
        TypeError: gamma is no integer.
        ValueError: gamma is negative, max_gamma below 1, or the rule unknown.

    Example:
        >>> from spec_kernels.targets import TableTarget
        >>> from spec_kernels.proposers import NgramProposer
        >>> successor = torch.eye(5).roll(1, dims=1)  # id x is followed by x + 1
        >>> decoder = Decoder(TableTarget(successor), NgramProposer(), gamma=4)
        >>> prompt = [0, 1, 2, 3, 4, 0, 1]
        >>> result, = decoder.generate([Request(prompt, max_new_tokens=8)])
        >>> result.tokens, result.stats.steps
        ((2, 3, 4, 0, 1, 2, 3, 4), 2)
    """

    def __init__(
        self,
        target: Target,
        proposer: Proposer | None = None,
        *,
        gamma: int | Literal["auto"] = 4,
        max_gamma: int = 8,
        costs: StepCosts | None = None,
        rule: str = "block",
        eos_ids: Sequence[int] = (),
        detokenize: Detokenize | None = None,
    ) -> None:
        self.policy = GammaPolicy(gamma, max_gamma, costs)
        require(rule in RULES, f"rule must be one of {', '.join(RULES)}, got {rule!r}")
        self.target, self.rule = target, rule
        self.proposer = proposer if self.policy.most > 0 else None
        self.gamma = self.policy.most if proposer is not None else 0
        self.eos_ids = check_ids("eos_ids", eos_ids)
        self.detokenize = detokenize
        ids = getattr(proposer, "draft_to_target", None)
        self.verifier = Verifier(
            rule,
            replacement=getattr(proposer, "replacement", False),
            draft_to_target=ids,
            vocab=None if ids is None else target.vocab_size,
        )

    def generate(self, requests: Sequence[Request]) -> list[Generation]:
        """Return the outputs of all requests, in their order.

        Raises:
            ValueError: a prompt is longer than the model's length, an id is outside the vocabulary,
                or stop strings are given without `detokenize`: before anything runs.
        """
        outputs: dict[int, Generation] = {}
        for chunk in self.stream(requests):
            if chunk.generation is not None:
                outputs[chunk.request] = chunk.generation
        return [outputs[index] for index in range(len(outputs))]

    def stream(self, requests: Sequence[Request]) -> Iterator[Chunk]:
        """Return an iterator of chunks, round by round. Raises as `generate`, when called."""
        run = self.start(requests)

        def chunks() -> Iterator[Chunk]:
            while not run.is_done:
                yield from run.step()

        return chunks()

    def start(self, requests: Sequence[Request]) -> Run:
        """Check the requests and fill the caches; the caller then steps. Raises as `generate`."""
        requests = list(requests)
        for index, request in enumerate(requests):
            self._check(index, request)
        return Run(self, requests)

    def _check(self, index: int, request: Request) -> None:
        limit = self.target.max_length
        length = len(request.prompt)
        require(
            limit is None or length <= limit,
            f"prompt of request {index} must have at most {limit} tokens, got {length}",
        )
        vocab = self.target.vocab_size
        for name, token in request.all_ids():
            require(token < vocab, f"{name} of request {index} must be below {vocab}, got {token}")
        require(
            not request.stop_strings or self.detokenize is not None,
            f"stop_strings of request {index} need Decoder(detokenize=...)",
        )


class Run:
    """A batch being decoded, one round per `step`. Made by `Decoder.start`.

    A round that raises leaves everything as it was before: the lengths of the caches, the
    sequences, the counters. `step` may then be called again, and emits what that round would have.

    Attributes:
        state: the sequences and parameters of the batch; None for an empty batch.
        cache: the target's cache; between rounds `context_lens` is `state.lens - 1`, or 0 where a
            request has ended: its blocks are free.
        session: the proposer at work, or None.
        pace: the gammas of the rounds, and what the rounds cost.
    """

    def __init__(self, decoder: Decoder, requests: Sequence[Request]) -> None:
        self._decoder = decoder
        self._watch = Stopwatch(decoder.target.device)
        self._rows = [_Row.make(decoder, request) for request in requests]
        self._ready = [
            self._finish(index, (), "", row.limit_reason)
            for index, row in enumerate(self._rows)
            if row.length >= row.limit
        ]
        self._adjustments: Adjustments | None = None
        self.session: Session | None = None
        self.pace = decoder.policy.open(
            len(requests), decoder.target.device, has_proposer=decoder.proposer is not None
        )
        if requests:
            self._open(requests)

    @property
    def is_done(self) -> bool:
        """Whether every request has finished and its last chunk was returned."""
        return not self._ready and all(row.is_done for row in self._rows)

    @torch.no_grad()
    def step(self) -> list[Chunk]:
        """Run one round and return what it added; an empty list when all is done."""
        if self._ready or self.is_done:
            chunks, self._ready = self._ready, []
            return chunks
        before = self._committed()
        self._watch.lap()  # what a round that failed has left
        try:
            with self._watch.part("draft"):
                draft = self._propose()
            with self._watch.part("verify"):
                output = self._forward(draft)
            with self._watch.part("accept"):
                result = self._verify(draft, output)
                outcomes = self._read(draft, result)
            with self._watch.part("state"):
                result = self._cut(result, outcomes)
                self.cache.keep(result.path, result.accepted_lens, lens=self._committed(outcomes))
                if self.session is not None:
                    self.session.commit(self.state, result, output.by_node())
        except BaseException:
            self.cache.truncate(before)
            if self.session is not None:
                self.session.rollback(self.state)
            raise
        with self._watch.part("state"):
            self._advance(result, outcomes)
        judged = (Judged.of(o.parents, o.path) for o in outcomes if o is not None)
        self.pace.end(draft, judged, self._watch.lap())
        return self._report(outcomes)

    @torch.no_grad()
    def _open(self, requests: Sequence[Request]) -> None:
        target, device = self._decoder.target, self._decoder.target.device
        capacity = max(row.limit for row in self._rows)
        longest = max(row.length for row in self._rows)
        tokens = torch.full((len(requests), max(capacity, longest) + 1), PAD_TOKEN)
        for row, request in zip(tokens, requests, strict=True):
            row[: len(request.prompt)] = torch.tensor(request.prompt)
        self._adjustments = Adjustments.make(requests, target.vocab_size, device)
        self.state = DecodingState(
            tokens=tokens.to(device),
            lens=torch.tensor([r.length for r in self._rows], dtype=torch.int32, device=device),
            longest=longest,
            params=stack_params(requests, device),
            seeds=torch.tensor([row.seed for row in self._rows], device=device),
            rule=self._decoder.rule,
            vocab_size=target.vocab_size,
            embed=target.embed,
            adjust_=None if self._adjustments is None else self._adjustments.apply_,
        )
        self.cache = self.state.cache = target.open(len(requests), capacity)
        if self._decoder.proposer is not None:
            self.session = self._decoder.proposer.open(self.state, capacity)
        with self._watch.part("prefill"):
            for index, row in enumerate(self._rows):
                if not row.is_done:
                    self._prefill(index, requests[index].prompt[:-1])

    def _prefill(self, index: int, tokens: Sequence[int]) -> None:
        wanted = self.session is not None and self.session.wants_hidden
        hidden = self._decoder.target.prefill(self.cache, index, tokens, hidden=wanted)
        if self.session is not None:
            self.session.prefill(self.state, index, tokens, hidden)

    def _committed(self, outcomes: Sequence[_Outcome | None] = ()) -> list[int]:
        """Return the rows of each request in the target's cache, behind these outcomes if any."""
        lens = [0 if row.is_done else row.length - 1 for row in self._rows]
        for index, outcome in enumerate(outcomes):
            lens[index] += 0 if outcome is None else len(outcome.tokens)
        return lens

    def _propose(self) -> Draft:
        """Draft within the budgets: r drafts and the token after them use r + 1."""
        rows = self._rows
        gamma = self.pace.begin(max(r.limit - r.length - 1 for r in rows if not r.is_done))
        limits = [-1 if r.is_done else min(gamma, r.limit - r.length - 1) for r in rows]
        most = torch.tensor(limits, dtype=torch.int32, device=self.state.lens.device)
        if self.session is None:
            return root_draft(self.state, most)
        draft = self.session.propose(self.state, most, max(limits))
        return fit_draft(draft, most, max(limits))

    def _forward(self, draft: Draft) -> TargetOutput:
        """Run the target; ids that it does not have are the verifier's matter, not the model's."""
        target, session = self._decoder.target, self.session
        tokens = draft.tokens.long().clamp(0, target.vocab_size - 1)
        self._reserve(draft)
        wanted = session is not None and session.wants_hidden
        return target.forward(
            tokens, draft.num_nodes, self.cache, parents=draft.parents, hidden=wanted
        )

    def _reserve(self, draft: Draft) -> None:
        """Make room for all nodes that there may be where the target cannot count them."""
        if can_read(draft.tokens):
            return
        nodes, is_chain = draft.tokens.shape[1], draft.parents is None
        if not is_chain:
            self.cache.extend(nodes)
        most = [min(nodes, r.limit - r.length) if is_chain else nodes for r in self._rows]
        pairs = zip(most, self._rows, strict=True)
        self.cache.reserve([0 if row.is_done else count for count, row in pairs])

    def _verify(self, draft: Draft, output: TargetOutput) -> Acceptance:
        state, logits = self.state, output.logits
        if state.adjust_ is not None:
            row_request, row_node = output.owners()
            state.adjust_(logits, row_request, draft.tokens, row_node, draft.parents)
        acceptance: Acceptance = self._decoder.verifier(
            draft,
            logits,
            state.params,
            state.seeds,
            state.root_positions,
            target_row=output.row,
            max_depth=min(draft.tokens.shape[1] - 1, self._decoder.gamma),
        )
        return acceptance

    def _read(self, draft: Draft, result: Acceptance) -> list[_Outcome | None]:
        """Read the result, the one synchronisation of a round, and judge it request by request."""
        tested = parents_of_tested(draft, self._decoder.target.vocab_size)
        columns = torch.stack([result.accepted_lens, result.status], 1)
        width = result.path.shape[1]
        packed = torch.cat([columns, result.output_tokens, result.path, tested], 1).tolist()
        return [
            None if row.is_done else row.judge(values, width)
            for row, values in zip(self._rows, packed, strict=True)
        ]

    def _cut(self, result: Acceptance, outcomes: Sequence[_Outcome | None]) -> Acceptance:
        """Drop what stands behind a stop, so that caches and sequences agree with the output."""
        if not any(outcome is not None and outcome.is_cut for outcome in outcomes):
            return result
        device = result.path.device
        kept = torch.tensor([0 if o is None else len(o.tokens) for o in outcomes], device=device)
        inside = torch.arange(result.path.shape[1], device=device) < kept[:, None]
        return result._replace(
            output_tokens=torch.where(inside, result.output_tokens, PAD_TOKEN),
            accepted_lens=(kept - 1).clamp(min=0).to(torch.int32),
            path=torch.where(inside, result.path, -1),
        )

    def _advance(self, result: Acceptance, outcomes: Sequence[_Outcome | None]) -> None:
        """Commit the round to the sequences; nothing in here fails."""
        state, emitted = self.state, result.output_tokens
        is_token = emitted != PAD_TOKEN
        columns = state.lens[:, None] + torch.arange(emitted.shape[1], device=emitted.device)
        columns = torch.where(is_token, columns, state.tokens.shape[1] - 1).long()
        state.tokens.scatter_(1, columns, emitted)
        state.lens = state.lens + is_token.sum(1, dtype=torch.int32)
        if self._adjustments is not None:
            self._adjustments.commit_(emitted)
        for index, (row, outcome) in enumerate(zip(self._rows, outcomes, strict=True)):
            if outcome is not None:
                row.advance(outcome)
                if outcome.finish_reason is not None:
                    self.cache.free(index)
        state.longest = max(row.length for row in self._rows)

    def _report(self, outcomes: Sequence[_Outcome | None]) -> list[Chunk]:
        chunks = []
        for index, outcome in enumerate(outcomes):
            if outcome is None:
                continue
            tokens, reason = tuple(outcome.tokens), outcome.finish_reason
            if reason is None:
                chunks.append(Chunk(index, tokens, outcome.text))
            else:
                chunks.append(self._finish(index, tokens, outcome.text, reason))
        return chunks

    def _finish(self, index: int, tokens: tuple[int, ...], text: str, reason: str) -> Chunk:
        row = self._rows[index]
        row.is_done = True
        row.stats.seconds = self._watch.seconds()
        generation = Generation(tuple(row.tokens), "".join(row.texts), reason, row.seed, row.stats)
        return Chunk(index, tokens, text, reason, generation)


class _Outcome(NamedTuple):
    """What one round means for one request; applied only when the whole round succeeded."""

    tokens: list[int]
    text: str
    finish_reason: str | None
    parents: list[int]
    path: list[int]
    is_cut: bool
    scanner: StopScanner


@dataclass
class _Row:
    """One request on the host."""

    length: int  # committed tokens, prompt included
    limit: int  # most of them
    limit_reason: str
    seed: int
    scanner: StopScanner
    tokens: list[int] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    stats: DecoderStats = field(default_factory=DecoderStats)
    is_done: bool = False

    @staticmethod
    def make(decoder: Decoder, request: Request) -> _Row:
        budget = len(request.prompt) + request.max_new_tokens
        longest = decoder.target.max_length
        is_short = longest is not None and longest < budget
        return _Row(
            length=len(request.prompt),
            limit=longest if longest is not None and is_short else budget,
            limit_reason="context" if is_short else "length",
            seed=secrets.randbits(63) if request.seed is None else request.seed,
            scanner=StopScanner(
                (*decoder.eos_ids, *request.stop_ids), request.stop_strings, decoder.detokenize
            ),
        )

    def judge(self, values: list[int], width: int) -> _Outcome:
        """Find the end of the request in `[accepted, status, *output_tokens, *path, *parents]`, the
        second and third of them `width` long."""
        accepted, status = values[:2]
        is_invalid = bool(status & INVALID_TARGET)
        tokens = values[2 : 2 + accepted + (not is_invalid)]
        scanner = self.scanner.copy()
        kept, text, is_stopped = scanner.feed(tokens)
        reason = None
        if is_stopped:
            reason = "stop"
        elif is_invalid:
            reason = "invalid"
        elif self.length + kept >= self.limit:
            reason = self.limit_reason
        if reason is not None and not is_stopped:
            text += scanner.flush()
        path, parents = values[2 + width : 3 + width + accepted], values[2 + 2 * width :]
        if is_stopped and kept <= accepted:
            path, parents = path[: kept + 1], cut_below(parents, kept)
        is_cut = kept != accepted + 1
        return _Outcome(tokens[:kept], text, reason, parents, path, is_cut, scanner)

    def advance(self, outcome: _Outcome) -> None:
        """Apply an outcome."""
        self.length += len(outcome.tokens)
        self.tokens += outcome.tokens
        self.scanner = outcome.scanner
        if outcome.text:
            self.texts.append(outcome.text)
        self.stats.count_tree(outcome.parents, outcome.path, len(outcome.tokens))
