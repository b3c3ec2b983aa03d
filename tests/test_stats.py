"""Counters: what is in the numerator, what is in the denominator, and nothing behind a stop."""

from __future__ import annotations

import pytest
import torch

from spec_kernels.decoder import Decoder, Request
from spec_kernels.stats import DecoderStats, Stopwatch
from spec_kernels.targets import TableTarget
from spec_kernels.types import PAD_TOKEN, Draft
from tests.tiny_models import FixedProposer

SUCCESSOR = torch.eye(10).roll(1, dims=1)  # id x is followed by x + 1


def successors(row: int, committed: list[int], count: int) -> list[int]:
    return [(committed[-1] + 1 + i) % 10 for i in range(count)]


def wrong(row: int, committed: list[int], count: int) -> list[int]:
    return [(committed[-1] + 5) % 10] * count


def test_nothing_accepted_is_a_rate_of_zero() -> None:
    """Public case B232: 0 of 3 accepted is 0.0, not 1/4."""
    stats = DecoderStats()
    stats.count(drafted=3, accepted=0, emitted=1)
    assert stats.acceptance_rate == 0.0
    assert stats.acceptance_by_position == [0.0, 0.0, 0.0]
    assert stats.mean_accepted_length == 1.0


def test_without_drafts_every_figure_is_defined() -> None:
    """Public case B234."""
    stats = DecoderStats()
    figures = (stats.acceptance_rate, stats.mean_accepted_length, stats.acceptance_by_position)
    assert figures == (0.0, 0.0, [])
    (output,) = Decoder(TableTarget(SUCCESSOR)).generate([Request([0], max_new_tokens=3)])
    assert (output.stats.drafted, output.stats.acceptance_rate) == (0, 0.0)
    assert output.stats.mean_accepted_length == 1.0


def test_real_drafts_are_counted_not_the_width() -> None:
    """Public case B235: drafts of 3 and 1 are 4, whatever gamma is."""
    proposer = FixedProposer(lambda row, c, n: successors(row, c, (3, 1)[row]))
    decoder = Decoder(TableTarget(SUCCESSOR), proposer, gamma=6)
    run = decoder.start([Request([0], max_new_tokens=20), Request([4], max_new_tokens=20)])
    run.step()
    stats = DecoderStats.total(row.stats for row in run._rows)
    assert (stats.drafted, stats.accepted, stats.emitted, stats.steps) == (4, 4, 6, 2)
    assert (stats.drafted_at, stats.accepted_at) == ([2, 1, 1], [2, 1, 1])


def test_drafts_behind_a_gap_were_not_tested() -> None:
    """Public case B233: 4 drafted, the chain closes behind the second: 2 in the denominator."""

    class Gappy(FixedProposer):
        def propose(self, state, limits, gamma) -> Draft:
            draft = super().propose(state, limits, gamma)
            draft.tokens[:, 3] = PAD_TOKEN
            return draft

    run = Decoder(TableTarget(SUCCESSOR), Gappy(successors), gamma=4).start([Request([0])])
    run.step()
    assert (run._rows[0].stats.drafted, run._rows[0].stats.accepted) == (2, 2)


def test_malformed_drafts_were_not_tested() -> None:
    proposer = FixedProposer(lambda row, c, n: [*successors(row, c, 1), 99, 99])
    run = Decoder(TableTarget(SUCCESSOR), proposer, gamma=4).start([Request([0])])
    (chunk,) = run.step()
    assert chunk.tokens == (1, 2)
    assert (run._rows[0].stats.drafted, run._rows[0].stats.accepted) == (1, 1)


@pytest.mark.parametrize("stop", [1, 2, 3, 4, 5])
def test_nothing_counts_behind_a_stop(stop: int) -> None:
    """Public cases B181, B236: 5 accepted and EOS at 3 adds 3 to the mean length, not 6."""
    decoder = Decoder(TableTarget(SUCCESSOR), FixedProposer(successors), gamma=5, eos_ids=[stop])
    (output,) = decoder.generate([Request([0])])
    assert output.tokens == tuple(range(1, stop + 1))
    stats = output.stats
    assert (stats.steps, stats.emitted, stats.accepted) == (1, stop, stop)
    assert stats.drafted == stop
    assert stats.mean_accepted_length == stop
    assert sum(stats.accepted_at) == stats.accepted <= stats.emitted
    assert stats.drafted_at == [1] * stop


def test_totals_add_counters_and_keep_the_longest_time() -> None:
    decoder = Decoder(TableTarget(SUCCESSOR), FixedProposer(wrong), gamma=2)
    outputs = decoder.generate([Request([0], max_new_tokens=n) for n in (2, 5)])
    total = DecoderStats.total(output.stats for output in outputs)
    assert total.emitted == 7
    assert total.steps == 7
    assert total.drafted == sum(output.stats.drafted for output in outputs) == sum(total.drafted_at)
    assert total.seconds == outputs[1].stats.seconds
    assert outputs[0].stats.seconds.decode < total.seconds.decode
    parts = (total.seconds.draft, total.seconds.verify, total.seconds.accept, total.seconds.state)
    assert all(part > 0 for part in parts)
    assert total.seconds.decode == pytest.approx(sum(parts))


def test_stopwatch_keeps_parts_apart() -> None:
    watch = Stopwatch(torch.device("cpu"))
    with watch.part("verify"):
        sum(range(1000))
    seconds = watch.seconds()
    assert seconds.verify > 0.0
    assert seconds.draft == seconds.accept == seconds.state == seconds.prefill == 0.0
