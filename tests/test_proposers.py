"""Proposers alone: what they draft, what they never read, and how they refuse."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from spec_kernels.decoder import Decoder, Request
from spec_kernels.proposers import DraftModelProposer, NgramProposer, ngram_lookup
from spec_kernels.proposers.ngram import LESS, PLACES, WINDOW
from spec_kernels.targets import TableTarget
from tests.tiny_models import assert_holds, gpt, plain


def matches_by_hand(row: list[int], longest: int) -> list[tuple[int, int, int]]:
    """Length, place and likeness of the longest, then most recent matches of the end of a row."""
    matches = []
    for start in range(1, len(row)):
        length = 0
        while length < min(longest, start) and row[start - 1 - length] == row[-1 - length]:
            length += 1
        near = row[max(start - WINDOW, 0) : start]
        alike = sum(token in near for token in row[-WINDOW:])
        matches.append((length, start, alike))
    return sorted(matches, reverse=True)[:PLACES]


def lookup_by_hand(row: list[int], longest: int, shortest: int, count: int) -> list[list[int]]:
    """The definition, one row at a time: what follows each match, the best first."""
    ranked = []
    for length, start, alike in matches_by_hand(row, longest):
        if length >= shortest:
            ranked.append(((length, alike), start))
        elif length and alike >= WINDOW // 2:
            ranked.append(((0, alike), start))
    for length, start, alike in matches_by_hand(row[:-1], longest):
        if length >= shortest and alike >= WINDOW // 2:
            ranked.append(((0, alike - LESS), start))
    found = []
    for _, start in sorted(ranked, key=lambda match: match[0], reverse=True):
        grown = list(row)
        for _ in range(count):
            grown.append(grown[len(grown) - len(row) + start])
        found.append(grown[len(row) :])
    return found


@given(
    st.lists(st.lists(st.integers(0, 4), min_size=1, max_size=40), min_size=1, max_size=4),
    st.integers(1, 4),
    st.integers(1, 4),
    st.integers(1, 6),
    st.booleans(),
)
def test_lookup_equals_its_definition(
    rows: list[list[int]], longest: int, shortest: int, count: int, is_new: bool
) -> None:
    shortest = min(shortest, longest)
    if is_new:  # a last token that stands nowhere else
        rows = [[*row, 5] for row in rows]
    width = max(map(len, rows)) + 2
    # Behind its length each row continues its own text: reading there would find better matches.
    tokens = torch.tensor([(row * width)[:width] for row in rows])
    lens = torch.tensor([len(row) for row in rows], dtype=torch.int32)
    drafts, found = ngram_lookup(tokens, lens, longest, shortest, count)
    for row, draft, is_found in zip(rows, drafts.tolist(), found.tolist(), strict=True):
        expected = lookup_by_hand(row, longest, shortest, count)[:1]
        assert is_found == [bool(expected)]
        assert not expected or draft == expected


def test_a_copy_is_found_again_behind_a_change() -> None:
    """One token was changed, and the token behind it stands in several places."""
    copied = [1, 2, 3, 4, 5, 6, 9, 7, 8, *range(10, 18), 9, 18, 19, 9, 3]
    row = torch.tensor([[*copied, 1, 2, 3, 4, 5, 0, 9]])
    lens = torch.tensor([row.shape[1]], dtype=torch.int32)
    for shortest in (1, 2):
        assert ngram_lookup(row, lens, 4, shortest, 3)[0].tolist() == [[[7, 8, 10]]]
    unlike = torch.tensor([[*copied[6:], *range(20, 30), 9]])
    lens = torch.tensor([unlike.shape[1]], dtype=torch.int32)
    assert ngram_lookup(unlike, lens, 4, 1, 1)[0].tolist() == [[[3]]]  # the most recent one
    assert ngram_lookup(unlike, lens, 4, 2, 1)[1].tolist() == [[False]]


def test_a_copy_into_which_a_token_was_put_goes_on() -> None:
    """The token never stood anywhere before; or it did, in other company."""
    copied = [*range(1, 13)]
    for between in ([], [30, 99, 31]):
        row = torch.tensor([[*copied, *between, *range(20, 28), *copied[:6], 99]])
        lens = torch.tensor([row.shape[1]], dtype=torch.int32)
        assert ngram_lookup(row, lens, 4, 2, 3)[0].tolist() == [[[7, 8, 9]]]
    for put_in in ([99, 98], [6, 6]):  # two tokens are too many; and a match goes first
        row = torch.tensor([[*copied, *copied[:6], *put_in]])
        lens = torch.tensor([row.shape[1]], dtype=torch.int32)
        assert ngram_lookup(row, lens, 4, 2, 3)[0].tolist() != [[[7, 8, 9]]]
    strange = torch.tensor([[1, 2, 3, *range(20, 29), 1, 2, 99]])  # of ten tokens two are alike
    lens = torch.tensor([strange.shape[1]], dtype=torch.int32)
    assert ngram_lookup(strange, lens, 4, 2, 3)[1].tolist() == [[False]]


def test_the_most_recent_matches_are_looked_at() -> None:
    for others, drafted in ((PLACES - 1, 7), (PLACES, 100 + PLACES)):
        between = [token for i in range(1, others + 1) for token in (9, 100 + i)]
        between = [*range(20, 30), *between]
        row = torch.tensor([[1, 2, 3, 4, 5, 6, 9, 7, *between, 1, 2, 3, 4, 5, 0, 9]])
        lens = torch.tensor([row.shape[1]], dtype=torch.int32)
        assert ngram_lookup(row, lens, 4, 1, 1)[0].item() == drafted


def test_the_longest_match_wins_then_the_most_recent() -> None:
    row = torch.tensor([[1, 2, 3, 7, 1, 2, 4, 8, 2, 5, 1, 2]])
    lens = torch.tensor([12], dtype=torch.int32)
    assert ngram_lookup(row, lens, 3, 1, 2)[0].tolist() == [[[4, 8]]]
    assert ngram_lookup(row, lens, 1, 1, 2)[0].tolist() == [[[5, 1]]]


def test_ngram_refuses_bad_lengths() -> None:
    for longest, shortest in ((0, 0), (2, 3), (3, 0)):
        with pytest.raises(ValueError, match="min_ngram must be in"):
            NgramProposer(longest, shortest)


def test_rows_without_room_or_match_get_no_drafts() -> None:
    """Public cases B223, B204: limits of 3, 0, absent, and a row that never repeats."""
    target = TableTarget(torch.eye(9))
    decoder = Decoder(target, NgramProposer(min_ngram=1), gamma=3)
    prompts = ([1, 2, 1], [1, 2, 1], [1, 2, 1], [1, 2, 3])
    run = decoder.start([Request(prompt) for prompt in prompts])
    limits = torch.tensor([3, 0, -1, 3], dtype=torch.int32)
    draft = run.session.propose(run.state, limits, 3)
    assert draft.num_nodes.tolist() == [4, 1, 0, 1]
    expected = [[1, 2, 1, 2], [1, -1, -1, -1], [-1] * 4, [3, -1, -1, -1]]
    assert draft.tokens.tolist() == expected


@pytest.mark.parametrize("rule", ["block", "token", "coupled"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("gamma", [1, 2, 5, 8])
def test_a_copy_of_the_target_is_always_accepted(gamma: int, temperature: float, rule: str) -> None:
    """And both caches equal a fresh prefill after every round."""
    target = gpt()
    decoder = Decoder(target, DraftModelProposer(target), gamma=gamma, rule=rule)
    requests = [
        Request([1, 2, 3], max_new_tokens=12, temperature=temperature, top_k=9, seed=1),
        Request([4], max_new_tokens=9, temperature=temperature, top_p=0.9, seed=2),
    ]
    run = decoder.start(requests)
    while not run.is_done:
        run.step()
        for row, length in enumerate(run.state.lens.tolist()):
            if run._rows[row].is_done:  # its blocks are free again
                assert run.cache.context_lens[row] == 0
                continue
            committed = run.state.tokens[row, :length].tolist()
            assert_holds(target, run.cache, row, committed[:-1])
            drafted = run.session.cache.context_lens[row]
            assert length - 2 <= drafted <= length - 1
            assert_holds(target, run.session.cache, row, committed[:drafted])
    for row in run._rows:
        assert row.stats.acceptance_rate == 1.0
        assert row.stats.steps == -(-row.stats.emitted // (gamma + 1))


def test_caches_equal_a_fresh_prefill_when_drafts_are_rejected() -> None:
    """Public cases B150, B169: the draft model differs, so lengths roll back by 0 to gamma."""
    target, model = gpt(), gpt(seed=1)
    requests = [
        Request([row, 2, 3][: row + 1], max_new_tokens=20, temperature=1.5, seed=row)
        for row in range(3)
    ]
    run = Decoder(target, DraftModelProposer(model), gamma=4).start(requests)
    accepted = set()
    while not run.is_done:
        before = [row.length for row in run._rows]
        run.step()
        for row, length in enumerate(run.state.lens.tolist()):
            if run._rows[row].is_done:
                continue
            committed = run.state.tokens[row, :length].tolist()
            assert_holds(target, run.cache, row, committed[:-1])
            drafted = int(run.session.cache.context_lens[row])
            assert_holds(model, run.session.cache, row, committed[:drafted])
            accepted.add(length - before[row] - 1)
    assert {0, 1, 2} <= accepted


@pytest.mark.parametrize("reads_lengths", [True, False])
def test_the_draft_recovers_after_rounds_without_drafts(
    reads_lengths: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Public case B206: gamma 3, 0, 0, 3 leaves no hole; a copy is still accepted in full. So it
    is where lengths are not read, as on a GPU, and every forward has its largest width."""
    if not reads_lengths:
        for module in ("proposers.base", "proposers.draft_model"):
            monkeypatch.setattr(f"spec_kernels.{module}.needed_width", lambda lens, most: most)
    target = gpt()
    decoder = Decoder(target, DraftModelProposer(target), gamma=3)
    request = Request([1, 2, 3], max_new_tokens=40, temperature=1.0, seed=5)
    other = Request([9, 8], max_new_tokens=40, temperature=1.0, seed=6)
    for requests in ([request], [request, other]):
        run = decoder.start(requests)
        for gamma in (3, 0, 0, 3, 3):
            monkeypatch.setattr(run.pace, "begin", lambda most, gamma=gamma: gamma)
            run.step()
        assert [row.stats.acceptance_rate for row in run._rows] == [1.0] * len(requests)
        assert [row.stats.emitted for row in run._rows] == [14] * len(requests)
        for row in range(len(requests)):
            length = int(run.session.cache.context_lens[row])
            committed = run.state.tokens[row, :length].tolist()
            assert_holds(target, run.session.cache, row, committed)


@pytest.mark.parametrize("length", [1, 6, 7, 8, 9, 14])
@pytest.mark.parametrize("gamma", [1, 3, 8])
def test_context_longer_than_the_draft_model(gamma: int, length: int) -> None:
    """Public cases B228, B229: drafts stop at the draft's maximum, the output does not change."""
    target, model = gpt(), gpt(max_length=8)
    requests = [
        Request([1 + i % 5 for i in range(length)], max_new_tokens=12),
        Request([2], max_new_tokens=12),
    ]
    outputs = Decoder(target, DraftModelProposer(model), gamma=gamma).generate(requests)
    expected = plain(target, requests)
    assert [o.tokens for o in outputs] == [o.tokens for o in expected]
    assert (outputs[0].stats.drafted == 0) == (length > 8)
    assert outputs[1].stats.drafted > 0


def test_own_temperature_is_the_law_that_is_recorded() -> None:
    """The law handed over is the one sampled from: the draft's temperature, the request's filter;
    a greedy request is drafted greedily."""
    proposer = DraftModelProposer(gpt(seed=1), temperature=0.5)
    requests = [Request([1, 2], temperature=1.0, top_k=3, seed=1), Request([3, 4])]
    run = Decoder(gpt(), proposer, gamma=2).start(requests)
    draft = run.session.propose(run.state, torch.tensor([2, 2], dtype=torch.int32), 2)
    assert draft.law.inv_temperature.tolist() == [2.0, 0.0, 2.0, 0.0]
    assert draft.row.tolist() == [[-1, 0, 2], [-1, 1, 3]]
    kept = draft.logits >= draft.law.cutoff[:, None]
    assert kept.sum(1).tolist() == [3, 1, 3, 1]
    for row in range(2):
        for node in (1, 2):
            assert kept[draft.row[row, node], draft.tokens[row, node]]


def test_other_vocabulary_widths_must_be_declared() -> None:
    target = gpt(vocab_size=31)
    decoder = Decoder(target, DraftModelProposer(gpt(vocab_size=40)), gamma=3)
    with pytest.raises(ValueError, match="40 ids and the target 31: pass padded_vocab=True"):
        decoder.generate([Request([1])])


@pytest.mark.parametrize("vocab", [20, 40])
@pytest.mark.parametrize("rule", ["block", "token", "coupled"])
def test_padded_vocabularies(vocab: int, rule: str) -> None:
    """A wider draft never proposes padding; a narrower one reads unknown ids without a fault."""
    target = gpt(vocab_size=31)
    proposer = DraftModelProposer(gpt(vocab_size=vocab), padded_vocab=True)
    greedy = [Request([30, 29, 3], max_new_tokens=10), Request([1], max_new_tokens=10)]
    outputs = Decoder(target, proposer, gamma=3, rule=rule).generate(greedy)
    assert [o.tokens for o in outputs] == [o.tokens for o in plain(target, greedy)]
    sampled = [Request([30, 2], max_new_tokens=30, temperature=2.0, seed=seed) for seed in range(4)]
    run = Decoder(target, proposer, gamma=3, rule=rule).start(sampled)
    limits = torch.full((4,), 3, dtype=torch.int32)
    draft = run.session.propose(run.state, limits, 3)
    assert draft.num_nodes.tolist() == [4] * 4
    assert draft.tokens.max() < min(vocab, 31)


def test_a_draft_model_that_fails_numerically_drafts_nothing() -> None:
    model = gpt(seed=1)
    with torch.no_grad():
        model.module.unembed.fill_(float("nan"))
    requests = [Request([1, 2, 3], max_new_tokens=8)]
    (output,) = Decoder(gpt(), DraftModelProposer(model), gamma=3).generate(requests)
    assert output.tokens == plain(gpt(), requests)[0].tokens
    assert output.stats.drafted == 0


@pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf")])
def test_bad_draft_temperature_is_refused(value: float) -> None:
    with pytest.raises(ValueError, match="temperature must be"):
        DraftModelProposer(gpt(), temperature=value)
