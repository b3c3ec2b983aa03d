"""Stops inside an accepted run: tokens, text, caches and counters agree to the token."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from spec_kernels.decoder import Decoder, Request
from spec_kernels.stopping import IncrementalText, StopScanner
from spec_kernels.targets import TableTarget
from tests.tiny_models import FixedProposer, assert_holds, gpt, oracle_proposer, plain

PIECES = ["a", "b", "ab", " ", "\n", "é", "EN", "D", "END", "né"]


def decode_bytes(ids: Sequence[int]) -> str:
    return bytes(ids).decode(errors="replace")


def script(text: Sequence[int], vocab: int = 256) -> TableTarget:
    """A chain that spells distinct ids one after the other."""
    table = torch.zeros(vocab, vocab)
    for before, after in zip((0, *text), text, strict=False):
        table[before, after] = 1.0
    return TableTarget(table)


def follow(text: Sequence[int]) -> FixedProposer:
    """Drafts the script."""
    return FixedProposer(lambda row, committed, n: list(text[len(committed) - 1 :])[:n])


@pytest.mark.parametrize("gamma", [0, 1, 3, 8])
@pytest.mark.parametrize("stop", [0, 1, 2, 3, 4, 7])
def test_stop_id_inside_an_accepted_run(stop: int, gamma: int) -> None:
    """Public cases B178, B164: output, both lengths and the sequence agree."""
    target = gpt()
    (full,) = plain(target, [Request([3, 1, 4], max_new_tokens=8)])
    known = [3, 1, 4, *full.tokens]
    stop_id = full.tokens[stop]
    end = full.tokens.index(stop_id) + 1
    decoder = Decoder(target, oracle_proposer([known]), gamma=gamma, eos_ids=[stop_id])
    run = decoder.start([Request([3, 1, 4], max_new_tokens=8)])
    chunks = []
    while not run.is_done:
        assert_holds(target, run.cache, 0, known[: run.state.lens[0] - 1])
        chunks += run.step()
    output = chunks[-1].generation
    assert output.tokens == full.tokens[:end]
    assert output.finish_reason == chunks[-1].finish_reason == "stop"
    assert sum((chunk.tokens for chunk in chunks), ()) == output.tokens
    assert output.stats.emitted == end
    committed = known[: 3 + end]
    assert run.state.tokens[0, : run.state.lens[0]].tolist() == committed
    assert (run.state.tokens[0, run.state.lens[0] :] == -1).all()
    assert run.cache.context_lens.tolist() == [0]  # what has ended holds nothing


def test_works_without_any_eos() -> None:
    """Public case B177."""
    (output,) = Decoder(script([1, 2, 3]), follow([1, 2, 3])).generate(
        [Request([0], max_new_tokens=3)]
    )
    assert output.finish_reason == "length"


def test_rejected_draft_eos_does_not_stop() -> None:
    """Public case B180: the draft says EOS, the target 5."""
    proposer = FixedProposer(lambda row, committed, n: [9] * n)
    decoder = Decoder(script([5, 6, 7, 8]), proposer, gamma=3, eos_ids=[9])
    (output,) = decoder.generate([Request([0], max_new_tokens=4)])
    assert output.tokens == (5, 6, 7, 8)
    assert output.finish_reason == "length"


@pytest.mark.parametrize("gamma", [0, 1, 2, 5, 9])
@pytest.mark.parametrize(
    ("stop", "text", "count"),
    [
        ("cd", "ab", 4),
        ("d", "abc", 4),
        ("bcdefg", "a", 7),
        ("z", "abcdefgh", 8),
        ("h", "abcdefg", 8),
    ],
)
def test_stop_string_cuts_tokens_and_text(stop: str, text: str, count: int, gamma: int) -> None:
    """Public case B179: tokens, text and counters end together, across tokens and rounds."""
    ids = list(b"abcdefgh")
    decoder = Decoder(script(ids), follow(ids), gamma=gamma, detokenize=decode_bytes)
    chunks = list(decoder.stream([Request([0], max_new_tokens=8, stop_strings=[stop])]))
    output = chunks[-1].generation
    assert output.text == text == "".join(chunk.text for chunk in chunks)
    assert output.tokens == tuple(ids[:count])
    assert output.stats.emitted == count
    assert output.finish_reason == ("length" if stop == "z" else "stop")


def test_text_that_may_become_a_stop_is_held_back() -> None:
    scanner = StopScanner(stop_strings=["END", "NDX"], detokenize=decode_bytes)
    assert scanner.feed(list(b"xE")).text == "x"
    assert scanner.feed(list(b"N")).text == ""
    assert scanner.feed(list(b"dE")).text == "ENd"
    assert scanner.flush() == "E"


def test_the_earliest_of_two_stops_counts() -> None:
    scanner = StopScanner(stop_strings=["c", "bcd", "b"], detokenize=decode_bytes)
    assert scanner.feed(list(b"abcd")) == (2, "a", True)
    one_token = StopScanner((), ["cd", "ab", "zz"], lambda ids: "xab cd" * len(ids))
    assert one_token.feed([7, 7]) == (1, "x", True)


def test_a_stop_id_leaves_no_text_and_releases_what_was_held() -> None:
    scanner = StopScanner([0], ["END"], decode_bytes)
    assert scanner.feed([*b"xEN", 0, *b"y"]) == (4, "xEN", True)


def test_a_stop_string_before_an_unfinished_character() -> None:
    """The stop is found at its token, though the text behind it is not finished."""
    tokens = [b"a", b"END\xc3", b"\xa9"]
    scanner = StopScanner(
        (), ["END"], lambda ids: b"".join(tokens[i] for i in ids).decode(errors="replace")
    )
    assert scanner.feed([0, 1, 2]) == (2, "a", True)


def test_an_unfinished_character_is_shown_at_the_end_only() -> None:
    decoder = Decoder(script([65, 0xC3]), detokenize=decode_bytes)
    chunks = list(decoder.stream([Request([0], max_new_tokens=2)]))
    assert [chunk.text for chunk in chunks] == ["A", "\N{REPLACEMENT CHARACTER}"]


@settings(max_examples=60)
@given(st.text(max_size=30), st.integers(1, 3), st.randoms(use_true_random=False))
def test_incremental_text_is_the_text(text: str, width: int, source: random.Random) -> None:
    """Any cut of the bytes into tokens gives the same text, and never half a character."""
    raw, pieces = text.encode(), []
    while raw:
        size = source.randint(1, width)
        pieces.append(raw[:size])
        raw = raw[size:]
    stream = IncrementalText(lambda ids: b"".join(pieces[i] for i in ids).decode(errors="replace"))
    parts = [stream.add(token) for token in range(len(pieces))]
    assert "".join(parts) + stream.rest() == text
    if "\N{REPLACEMENT CHARACTER}" not in text:
        assert not any("\N{REPLACEMENT CHARACTER}" in part for part in parts)


@settings(max_examples=60)
@given(st.lists(st.sampled_from(["▁a", "b", "▁", "", "▁c"]), max_size=80))
@example(["b"] * 20 + ["", "▁a"] * 20)
def test_incremental_text_keeps_the_spaces_of_words(pieces: list[str]) -> None:
    """A detokenizer that drops the space in front of a text drops none behind empty tokens."""

    def detokenize(ids: Sequence[int]) -> str:
        return "".join(pieces[i] for i in ids).replace("▁", " ").removeprefix(" ")

    stream = IncrementalText(detokenize)
    parts = [stream.add(token) for token in range(len(pieces))]
    assert "".join(parts) + stream.rest() == detokenize(range(len(pieces)))


@given(
    st.lists(st.integers(0, len(PIECES) - 1), max_size=40),
    st.lists(st.sampled_from(["END", "ab", "né", "\n\n", "D a"]), max_size=3),
    st.lists(st.integers(1, 7), min_size=1, max_size=40),
)
def test_scanner_equals_a_search_token_by_token(
    tokens: list[int], stops: list[str], widths: list[int]
) -> None:
    """Whatever the rounds, the kept tokens are the fewest whose text holds a stop string."""

    def text_of(ids: Sequence[int]) -> str:
        return "".join(PIECES[i] for i in ids)

    scanner = StopScanner((), stops, text_of)
    kept, text, stopped, rest, index = 0, "", False, tokens, 0
    while rest and not stopped:
        width = widths[index % len(widths)]
        verdict = scanner.feed(rest[:width])
        kept, text, stopped = kept + verdict.kept, text + verdict.text, verdict.stopped
        rest, index = rest[width:], index + 1
    text += scanner.flush()
    hits = [n for n in range(1, len(tokens) + 1) if any(s in text_of(tokens[:n]) for s in stops)]
    assert stopped == bool(hits)
    assert kept == (hits[0] if hits else len(tokens))
    whole = text_of(tokens[:kept])
    found = [whole.find(stop) for stop in stops if stop in whole]
    assert text == (whole[: min(found)] if found else whole)


def test_budget_is_never_exceeded() -> None:
    ids = list(range(1, 40))
    for budget in range(6):
        decoder = Decoder(script(ids), follow(ids), gamma=4)
        (output,) = decoder.generate([Request([0], max_new_tokens=budget)])
        assert output.tokens == tuple(ids[:budget])
        assert output.finish_reason == "length"


@pytest.mark.parametrize("gamma", [0, 3, 8])
def test_the_models_length_ends_a_request(gamma: int) -> None:
    """Public cases B157, B162, B223: clean stop at the border, shorter drafts before it."""
    target = gpt(max_length=10)
    (wide,) = plain(gpt(max_length=96), [Request([1, 2, 3], max_new_tokens=1)])
    proposer = FixedProposer(lambda row, committed, n: [7] * n)
    decoder = Decoder(target, proposer, gamma=gamma)
    outputs = decoder.generate([Request([1, 2, 3]), Request([5] * 10), Request([5] * 9)])
    assert [len(output.tokens) for output in outputs] == [7, 0, 1]
    assert [output.finish_reason for output in outputs] == ["context"] * 3
    assert wide.tokens[0] == plain(gpt(max_length=96), [Request([1, 2, 3])])[0].tokens[0]
