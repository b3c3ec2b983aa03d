"""The loop: equal to plain decoding, independent of neighbours, consistent after a failure."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from spec_kernels.decoder import Decoder, Generation, Request, Run
from spec_kernels.proposers import DraftModelProposer, NgramProposer
from spec_kernels.targets import TableTarget, Target, TargetOutput
from tests.tiny_models import (
    FixedProposer,
    assert_holds,
    gpt,
    greedy_by_hand,
    oracle_proposer,
    plain,
    random_proposer,
)

PROMPTS = ([1, 2, 3, 1, 2], [5], [7, 8, 9, 7, 8, 9, 7])
RULES = ("block", "token", "coupled")


def proposers(outputs: Sequence[Sequence[int]]) -> dict[str, object]:
    return {
        "ngram": NgramProposer(),
        "draft-model": DraftModelProposer(gpt(seed=1)),
        "near-copy": DraftModelProposer(gpt(), temperature=0.8),
        "random": random_proposer(31),
        "oracle": oracle_proposer(outputs),
    }


def tokens_of(outputs: Sequence[Generation]) -> list[tuple[int, ...]]:
    return [output.tokens for output in outputs]


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("gamma", range(9))
def test_greedy_equals_plain_greedy(gamma: int, batch: int) -> None:
    target = gpt()
    requests = [Request(prompt, max_new_tokens=14) for prompt in PROMPTS[:batch]]
    expected = [tuple(greedy_by_hand(target, r.prompt, 14)) for r in requests]
    known = [[*r.prompt, *tokens] for r, tokens in zip(requests, expected, strict=True)]
    for proposer in proposers(known).values():
        rule = RULES[gamma % 3]
        outputs = Decoder(target, proposer, gamma=gamma, rule=rule).generate(requests)
        assert tokens_of(outputs) == expected


@pytest.mark.parametrize("gamma", [1, 3, 7])
def test_coupled_output_is_that_of_plain_decoding(gamma: int) -> None:
    """Seeded and sampled, the text is the same whatever the drafter and gamma."""
    target = gpt()
    requests = [
        Request(PROMPTS[0], max_new_tokens=11, temperature=1.0, seed=3),
        Request(PROMPTS[1], max_new_tokens=11, temperature=0.6, top_p=0.8, seed=4),
        Request(PROMPTS[2], max_new_tokens=11, temperature=1.4, top_k=5, min_p=0.01, seed=5),
    ]
    expected = tokens_of(plain(target, requests, rule="coupled"))
    known = [[*r.prompt, *tokens] for r, tokens in zip(requests, expected, strict=True)]
    rates = {}
    for name, proposer in proposers(known).items():
        outputs = Decoder(target, proposer, gamma=gamma, rule="coupled").generate(requests)
        assert tokens_of(outputs) == expected
        rates[name] = outputs[0].stats.acceptance_rate
    assert rates["oracle"] == 1.0
    assert rates["near-copy"] > 0.4 > rates["random"]


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", ["ngram", "draft-model", "near-copy"])
def test_a_request_does_not_depend_on_its_neighbours(name: str, rule: str) -> None:
    """Public cases B045, B046, B205: slots, batch composition, padding, neighbours' lengths."""
    target, proposer = gpt(), proposers([])[name]
    mine = Request(PROMPTS[0], max_new_tokens=9, temperature=0.9, top_p=0.95, seed=7)
    others = [
        Request([4, 4, 4, 4], max_new_tokens=3, seed=9, temperature=1.5),
        Request(list(range(20)), max_new_tokens=12, repetition_penalty=1.3),
        Request([6], max_new_tokens=1, temperature=0.2, top_k=2),
    ]
    decoder = Decoder(target, proposer, gamma=4, rule=rule)
    (alone,) = decoder.generate([mine])
    for slot in (0, 2, 3):
        outputs = decoder.generate([*others[:slot], mine, *others[slot:]])
        again = outputs[slot]
        assert again.tokens == alone.tokens
        assert again.stats.accepted_at == alone.stats.accepted_at
        assert again.stats.steps == alone.stats.steps


def test_neighbours_gamma_changes_nothing() -> None:
    """A neighbour with room for fewer drafts, round after round."""
    target = gpt()
    decoder = Decoder(target, DraftModelProposer(gpt(), temperature=0.7), gamma=5)
    mine = Request([1, 2], max_new_tokens=20, temperature=1.0, seed=1)
    (alone,) = decoder.generate([mine])
    for budget in range(1, 7):
        outputs = decoder.generate([mine, Request([3], max_new_tokens=budget, temperature=1.0)])
        assert outputs[0].tokens == alone.tokens


def test_seeds() -> None:
    """Public cases B045, B057: a seed gives the same output whatever else draws; without one a
    seed is drawn and reported, and reproduces the output."""
    decoder = Decoder(gpt(), NgramProposer(), gamma=3)
    request = Request([1, 2, 1], max_new_tokens=20, temperature=2.0)
    (first,) = decoder.generate([request])
    torch.rand(17)
    (second,) = decoder.generate([request])
    assert first.seed != second.seed
    assert first.tokens != second.tokens
    again = Request([1, 2, 1], max_new_tokens=20, temperature=2.0, seed=first.seed)
    torch.rand(5)
    assert decoder.generate([again])[0].tokens == first.tokens


def test_a_longer_budget_continues_the_same_text() -> None:
    """Public case B058: what stood behind a stop rewinds nothing, under the coupled rule."""
    decoder = Decoder(gpt(), NgramProposer(), gamma=4, rule="coupled")
    outputs = decoder.generate(
        [Request([1, 2, 1], max_new_tokens=n, temperature=1.2, seed=3) for n in (5, 9, 20)]
    )
    assert outputs[2].tokens[:5] == outputs[1].tokens[:5] == outputs[0].tokens
    assert outputs[2].tokens[:9] == outputs[1].tokens


def test_the_cache_holds_all_but_the_last_token() -> None:
    """The loop invariant, for rows that finish at different times."""
    target = gpt()
    decoder = Decoder(target, NgramProposer(), gamma=3)
    requests = [Request(prompt, max_new_tokens=4 + 5 * i) for i, prompt in enumerate(PROMPTS)]
    run = decoder.start(requests)
    rounds = 0
    while not run.is_done:
        for row, length in enumerate(run.state.lens.tolist()):
            if run._rows[row].is_done:
                assert run.cache.context_lens[row] == 0
                continue
            committed = run.state.tokens[row, :length].tolist()
            assert_holds(target, run.cache, row, committed[:-1])
        run.step()
        rounds += 1
    assert rounds > 5
    assert run.step() == []


class Flaky:
    """A target, a session and a proposer that fail on command."""

    def __init__(self, part: object) -> None:
        self.part, self.fuse = part, -1

    def __getattr__(self, name: str) -> object:
        return getattr(self.part, name)

    def _tick(self) -> None:
        self.fuse -= 1
        if self.fuse == 0:
            raise RuntimeError("planted")

    def open(self, *arguments: object) -> object:
        opened = self.part.open(*arguments)
        if isinstance(self.part, Target):
            return opened
        self.session = Flaky(opened)
        return self.session

    def forward(self, *arguments: object, **options: object) -> TargetOutput:
        output = self.part.forward(*arguments, **options)
        self._tick()
        return output

    def propose(self, *arguments: object) -> object:
        draft = self.part.propose(*arguments)
        self._tick()
        return draft

    def commit(self, *arguments: object) -> None:
        self.part.commit(*arguments)
        self._tick()


def snapshot(run: Run) -> tuple[list, ...]:
    """Lengths, sequences and counters of a batch."""
    caches = (run.cache.context_lens.tolist(), run.session.cache.context_lens.tolist())
    steps = [row.stats.steps for row in run._rows]
    return *caches, run.state.lens.tolist(), run.state.tokens.tolist(), steps


@pytest.mark.parametrize("place", ["draft-forward", "propose", "forward", "detokenize", "commit"])
@pytest.mark.parametrize("good_rounds", [0, 2])
def test_a_failed_round_leaves_everything_as_before(place: str, good_rounds: int) -> None:
    target, model = Flaky(gpt()), Flaky(gpt())
    proposer = Flaky(DraftModelProposer(model, temperature=0.8))
    fuse = [0]

    def detokenize(ids: Sequence[int]) -> str:
        fuse[0] -= 1
        if fuse[0] == 0:
            raise RuntimeError("planted")
        return "".join(chr(97 + i % 26) for i in ids)

    decoder = Decoder(target, proposer, gamma=4, detokenize=detokenize)
    requests = [
        Request([1, 2, 3], max_new_tokens=14, temperature=1.0, seed=3, presence_penalty=0.5),
        Request([4], max_new_tokens=18, temperature=1.0, seed=4, stop_strings=["zzz"]),
    ]
    (expected, other) = decoder.generate(requests)
    run = decoder.start(requests)
    for _ in range(good_rounds):
        run.step()
    before = snapshot(run)
    if place == "detokenize":
        fuse[0] = 2
    else:
        parts = {"draft-forward": model, "forward": target}
        parts.update(propose=proposer.session, commit=proposer.session)
        parts[place].fuse = 3 if place == "draft-forward" else 1
        if place == "commit":
            parts[place].fuse = 2  # propose ticks first
    with pytest.raises(RuntimeError, match="planted"):
        run.step()
    assert snapshot(run) == before
    outputs = {}
    while not run.is_done:
        outputs.update((c.request, c.generation) for c in run.step() if c.generation)
    for index, output in enumerate((expected, other)):
        assert outputs[index].tokens == output.tokens
        assert outputs[index].text == output.text
        assert outputs[index].stats.accepted_at == output.stats.accepted_at
    assert tokens_of(decoder.generate(requests)) == [expected.tokens, other.tokens]


def test_an_abandoned_stream_leaves_the_decoder_usable() -> None:
    decoder = Decoder(gpt(), DraftModelProposer(gpt(seed=1)), gamma=3)
    request = Request([1, 2, 3], max_new_tokens=12)
    expected = decoder.generate([request])[0].tokens
    first, second = decoder.stream([request]), decoder.stream([request])
    chunks = [next(first).tokens, next(second).tokens]
    first.close()
    assert chunks[0] == chunks[1] == expected[: len(chunks[0])]
    assert sum((chunk.tokens for chunk in second), chunks[1]) == expected
    assert decoder.generate([request])[0].tokens == expected


def test_stream_gives_what_generate_gives() -> None:
    decoder = Decoder(
        gpt(), NgramProposer(), gamma=4, detokenize=lambda ids: "".join(chr(65 + i) for i in ids)
    )
    requests = [Request(prompt, max_new_tokens=9 - i) for i, prompt in enumerate(PROMPTS)]
    outputs = decoder.generate(requests)
    chunks = list(decoder.stream(requests))
    for index, output in enumerate(outputs):
        mine = [chunk for chunk in chunks if chunk.request == index]
        assert sum((chunk.tokens for chunk in mine), ()) == output.tokens
        assert "".join(chunk.text for chunk in mine) == output.text
        assert output.text == decoder.detokenize(output.tokens)
        assert [chunk.finish_reason for chunk in mine[:-1]] == [None] * (len(mine) - 1)
        assert mine[-1].finish_reason == output.finish_reason == "length"


def test_invalid_rows_end_their_request_only() -> None:
    """NaN behind id 3: the tokens before it are right, and the neighbour does not notice."""
    table = torch.eye(6).roll(1, dims=1)
    table[3] = math.nan
    proposer = FixedProposer(
        lambda row, committed, n: [(committed[-1] + 1 + i) % 6 for i in range(n)]
    )
    for gamma in (0, 1, 2, 4):
        decoder = Decoder(TableTarget(table), proposer, gamma=gamma)
        run = decoder.start([Request([1]), Request([4], max_new_tokens=4), Request([3])])
        outputs = {}
        while not run.is_done:
            outputs.update((c.request, c.generation) for c in run.step() if c.generation)
        assert [outputs[i].tokens for i in range(3)] == [(2, 3), (5, 0, 1, 2), ()]
        assert [outputs[i].finish_reason for i in range(3)] == ["invalid", "length", "invalid"]
        assert run.state.lens.tolist() == [3, 5, 1]


def naive_adjust(logits: torch.Tensor, request: Request, output: list[int]) -> torch.Tensor:
    """Penalties, bias and mask by their definitions, for one row."""
    row = logits.double()
    for token in range(row.shape[0]):
        count = output.count(token)
        if request.repetition_penalty and (count or token in request.prompt):
            factor = request.repetition_penalty
            row[token] = row[token] / factor if row[token] > 0 else row[token] * factor
        row[token] -= (request.frequency_penalty or 0.0) * count
        row[token] -= (request.presence_penalty or 0.0) * (count > 0)
        row[token] += (request.logit_bias or {}).get(token, 0.0)
        if request.allowed_ids is not None and token not in request.allowed_ids:
            row[token] = -math.inf
    return row


ADJUSTED = {
    "repetition": {"repetition_penalty": 1.8},
    "presence": {"presence_penalty": 1.5},
    "frequency": {"frequency_penalty": 0.7},
    "bias": {"logit_bias": {3: 4.0, 7: -math.inf, 30: -2.0}},
    "allowed": {"allowed_ids": [2, 3, 5, 30]},
    "all": {
        "repetition_penalty": 1.3,
        "presence_penalty": 0.4,
        "frequency_penalty": 0.9,
        "logit_bias": {1: 2.0},
        "allowed_ids": range(0, 31, 2),
    },
}


@pytest.mark.parametrize("gamma", [0, 1, 4])
@pytest.mark.parametrize("name", ADJUSTED)
def test_penalties_bias_and_allowed_ids(name: str, gamma: int) -> None:
    """Public cases B184, B185, B186, B187, B189: in every row, with the drafts before it counted,
    for one request of a batch only; equal to a loop that adjusts one row at a time."""
    target = gpt()
    request = Request(PROMPTS[0], max_new_tokens=12, **ADJUSTED[name])
    expected = []
    for _ in range(12):
        tokens = [*request.prompt, *expected]
        cache = target.open(1, len(tokens))
        target.prefill(cache, 0, tokens[:-1])
        one = torch.ones(1, dtype=torch.int32)
        logits = target.forward(torch.tensor([tokens[-1:]]), one, cache).logits[0]
        expected.append(int(naive_adjust(logits, request, expected).argmax()))
    assert tuple(expected) != plain(target, [Request(PROMPTS[0], max_new_tokens=12)])[0].tokens
    other = Request(PROMPTS[2], max_new_tokens=12)
    known = [[*request.prompt, *expected], [*other.prompt, *plain(target, [other])[0].tokens]]
    makers = proposers(known)
    makers["copy"] = DraftModelProposer(target)
    for kind, proposer in makers.items():
        outputs = Decoder(target, proposer, gamma=gamma).generate([request, other])
        assert outputs[0].tokens == tuple(expected)
        assert outputs[1].tokens == tuple(known[1][len(other.prompt) :])
        if kind in ("oracle", "copy") and gamma > 0:
            assert outputs[0].stats.acceptance_rate == 1.0


BAD_REQUESTS = [
    ({"prompt": []}, "prompt must have at least one token"),
    ({"prompt": [1, -2]}, "prompt must not hold negative ids, got -2"),
    ({"max_new_tokens": -1}, "max_new_tokens must be at least 0"),
    ({"temperature": -0.1}, "temperature must be in"),
    ({"temperature": math.nan}, "temperature must be in"),
    ({"temperature": math.inf}, "temperature must be in"),
    ({"top_k": -1}, "top_k must be in"),
    ({"top_p": 0.0}, "top_p must be in"),
    ({"top_p": 1.5}, "top_p must be in"),
    ({"min_p": -0.5}, "min_p must be in"),
    ({"seed": -1}, "seed must be in"),
    ({"seed": 2**63}, "seed must be in"),
    ({"stop_ids": [-1]}, "stop_ids must not hold negative ids"),
    ({"stop_strings": [""]}, "stop_strings must not hold an empty string"),
    ({"repetition_penalty": 0.0}, "repetition_penalty must be positive"),
    ({"repetition_penalty": math.nan}, "repetition_penalty must be positive"),
    ({"repetition_penalty": 1e-60}, "repetition_penalty must be positive"),
    ({"repetition_penalty": 1e39}, "repetition_penalty must be positive"),
    ({"presence_penalty": math.inf}, "presence_penalty must be finite"),
    ({"frequency_penalty": math.nan}, "frequency_penalty must be finite"),
    ({"frequency_penalty": -1e39}, "frequency_penalty must be finite in float32"),
    ({"logit_bias": {1: math.nan}}, "logit_bias must be finite in float32 or -inf"),
    ({"logit_bias": {1: math.inf}}, "logit_bias must be finite in float32 or -inf"),
    ({"logit_bias": {1: 1e39}}, "logit_bias must be finite in float32 or -inf"),
    ({"logit_bias": {-1: 1.0}}, "logit_bias must not hold negative ids"),
    ({"allowed_ids": []}, "allowed_ids must allow at least one id"),
]


@pytest.mark.parametrize(("fields", "message"), BAD_REQUESTS, ids=lambda v: str(v)[:30])
def test_bad_requests_are_refused_when_made(fields: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message.replace("[", r"\[")):
        Request(**{"prompt": [1], **fields})


WRONG_TYPES: list[dict[str, object]] = [
    {"prompt": [1.5]},
    {"stop_strings": "END"},
    {"stop_strings": [3]},
    {"top_k": 1.5},
    {"seed": 1.5},
    {"max_new_tokens": 1.5},
]


@pytest.mark.parametrize("fields", WRONG_TYPES, ids=str)
def test_wrong_types_are_refused_when_made(fields: dict[str, object]) -> None:
    with pytest.raises(TypeError):
        Request(**{"prompt": [1], **fields})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"prompt": [1] * 97}, "prompt of request 1 must have at most 96 tokens, got 97"),
        ({"prompt": [31]}, "prompt of request 1 must be below 31, got 31"),
        ({"stop_ids": [40]}, "stop_ids of request 1 must be below 31, got 40"),
        ({"logit_bias": {31: 0.0}}, "logit_bias of request 1 must be below 31"),
        ({"allowed_ids": [3, 99]}, "allowed_ids of request 1 must be below 31, got 99"),
        ({"stop_strings": ["a"]}, "stop_strings of request 1 need Decoder"),
    ],
)
def test_nothing_runs_before_all_requests_are_checked(
    fields: dict[str, object], message: str
) -> None:
    class Untouched(TableTarget):
        max_length = 96

        def open(self, batch: int, capacity: int) -> None:
            raise AssertionError("a request was not checked first")

    target = Untouched(torch.zeros(31, 31), max_length=96)
    requests = [Request([1]), Request(**{"prompt": [1], **fields})]
    with pytest.raises(ValueError, match=message):
        Decoder(target).stream(requests)


@pytest.mark.parametrize("integer", [bool, np.int32, np.uint8, np.uint64])
def test_seeds_and_budgets_may_be_any_integers(integer: Callable[[int], Any]) -> None:
    def tokens(one: Any) -> tuple[int, ...]:
        request = Request([1], max_new_tokens=one, temperature=1.0, seed=one)
        return Decoder(gpt()).generate([request])[0].tokens

    assert tokens(integer(1)) == tokens(1)


def test_bad_decoders_are_refused() -> None:
    with pytest.raises(TypeError):
        Decoder(gpt(), gamma=2.5)
    with pytest.raises(ValueError, match="gamma must be at least 0, got -1"):
        Decoder(gpt(), gamma=-1)
    with pytest.raises(ValueError, match="rule must be one of block, token, coupled, got 'greedy'"):
        Decoder(gpt(), rule="greedy")
    with pytest.raises(ValueError, match="eos_ids must not hold negative ids"):
        Decoder(gpt(), eos_ids=[-1])


def test_empty_batch() -> None:
    assert Decoder(gpt()).generate([]) == []
    assert list(Decoder(gpt(), NgramProposer()).stream([])) == []


def test_hidden_states_reach_a_proposer_that_wants_them() -> None:
    """Public case B204: regrouped by request and node, the prompt's included."""
    target, seen = gpt(), []

    class Reader(FixedProposer):
        wants_hidden = True

        def prefill(self, state, row, tokens, hidden) -> None:
            seen.append((row, None if hidden is None else hidden.shape[0], len(tokens)))

        def commit(self, state, result, hidden) -> None:
            for row, path in enumerate(result.path.tolist()):
                length = int(state.lens[row])
                for node in (node for node in path if node >= 0):
                    drafted = result.output_tokens[row, :node].tolist()
                    text = [*state.tokens[row, :length].tolist(), *drafted]
                    cache = target.open(1, len(text))
                    fresh = target.prefill(cache, 0, text, hidden=True)
                    assert (fresh[-1] - hidden[row, node]).abs().max() < 1e-12
            embedded = state.embed(state.roots)
            assert torch.equal(embedded[:, 0], target.module.token[state.roots[:, 0]])

    known = [[*p, *greedy_by_hand(target, p, 8)] for p in PROMPTS]
    proposer = Reader(lambda row, c, n: known[row][len(c) : len(c) + (n, 0, 1)[row]])
    decoder = Decoder(target, proposer, gamma=3)
    decoder.generate([Request(prompt, max_new_tokens=8) for prompt in PROMPTS])
    assert seen == [(0, 4, 4), (1, None, 0), (2, 6, 6)]
