"""Public reports about temperature, ends of coins, invalid rows, padding and vocabularies."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from spec_kernels.types import (
    INVALID_DRAFT,
    INVALID_TARGET,
    OK,
    PAD_TOKEN,
    ZERO_Q,
    Law,
    SamplingParams,
    invert_id_map,
)
from tests.public import (
    GRID,
    LAST_COIN,
    LAYERS,
    POINTS,
    RULES,
    counts,
    emitted,
    functions_of,
    law_of,
    log,
    recovered_counts,
    verify,
)


@pytest.fixture(params=LAYERS)
def ops(request: pytest.FixtureRequest) -> Any:
    return functions_of(request.param)


# Temperature


@pytest.mark.parametrize(
    ("temperature", "logits"),
    [
        (1e-40, [1.0, 9.0, 3.0]),
        (1e-12, [-1e4, 1e4, 9.9e3]),
        (1e-4, [-100.0, 50.0, 49.0]),
        (0.0, [0.0, 2.0, 2.0]),
    ],
    ids=["b041", "b042", "b043", "b044"],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_tiny_temperature_is_the_argmax(
    ops: Any, temperature: float, logits: list[float], dtype: torch.dtype
) -> None:
    rows = torch.tensor([logits] * 10, dtype=torch.float64).to(dtype)
    law = law_of(ops, rows, temperature)
    assert all(bool(torch.isfinite(field).all()) for field in law._replace(cutoff=law.row_max))
    coins = torch.tensor([*GRID[::2], 0.0, LAST_COIN], dtype=torch.float64)
    assert ops.sample(rows, law, coins=coins).tolist() == [[1]] * 10
    seeds = torch.arange(10)
    assert ops.sample(rows, law, noise=(seeds, seeds)).tolist() == [[1]] * 10


def test_bounds_of_the_temperature_are_inside(ops: Any) -> None:
    params = SamplingParams.make([1e-5, 9e-6, 1e30])
    law = ops.row_law(torch.ones(3, 2), params, torch.arange(3, dtype=torch.int32))
    assert law.status.tolist() == [OK] * 3
    assert law.inv_temperature.tolist() == pytest.approx([1e5, 0.0, 1e-30])


# The ends of coins and noise, filters


def test_b062_an_id_of_weight_zero_is_never_drawn(ops: Any) -> None:
    coins = torch.tensor([0.0, 2.0**-53, *GRID, LAST_COIN], dtype=torch.float64)
    rows = torch.tensor([[0.0, 1.0, 0.0]]).expand(len(coins), 3)
    assert ops.sample(rows, None, coins=coins).tolist() == [[1]] * len(coins)
    assert ops.sample(rows.log(), law_of(ops, rows.log(), 1.0), coins=coins).tolist() == [
        [1]
    ] * len(coins)


def test_b063_four_million_ids(ops: Any) -> None:
    vocab = 2**22
    logits = torch.zeros(1, vocab)
    logits[0, : vocab // 2] = math.log(2.0)
    rows = logits.expand(2, vocab)
    law = Law(*(field.expand(2) for field in law_of(ops, logits, 1.0)))
    low, high = ops.sample(rows, law, coins=torch.tensor([0.66, 0.674], dtype=torch.float64))
    assert int(low) < vocab // 2 <= int(high)
    assert int(low) == pytest.approx(0.66 * 0.75 * vocab, rel=1e-5)


def test_b064_noise_never_picks_an_underflowed_id(ops: Any) -> None:
    rows = torch.tensor([[-2000.0, 0.0, -math.inf, -3000.0]]).expand(POINTS, 4)
    seeds = torch.arange(POINTS)
    drawn = ops.sample(rows, law_of(ops, rows, 1.0), noise=(seeds, seeds + 9))
    assert drawn.tolist() == [[1]] * POINTS


def test_b064_b065_noise_is_positive_and_finite_at_its_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from spec_kernels.reference import random

    ends = torch.tensor([0, 2**31 - 1, 2**31, 2**32 - 1])
    monkeypatch.setattr(random, "philox", lambda *_: (ends,) * 4)
    noise = random.exponential(torch.tensor(0), torch.tensor(0), torch.zeros(4, dtype=torch.int64))
    assert noise.tolist() == pytest.approx(
        [2.0**-33, math.log(2.0), math.log(2.0), 33 * math.log(2.0)], rel=1e-9
    )
    assert bool((noise.diff() > 0).all())


@pytest.mark.parametrize(
    ("p", "parameters", "kept"),
    [
        ([0.5, 0.3, 0.1, 0.1], (1.0, 0, 0.8), [0, 1]),
        ([0.5, 0.3, 0.15, 0.05], (1.0, 0, 0.6), [0, 1]),
        ([1 / 4096] * 4000 + [96 / 4096], (1.0, 0, 1e-8), [4000]),
        ([0.125] * 8, (1.0, 4), list(range(8))),
        ([0.125] * 8, (1.0, 0, 0.5), list(range(8))),
    ],
    ids=["b067", "b068", "b069", "b071", "b071-top-p"],
)
def test_filters_keep(
    ops: Any, p: list[float], parameters: tuple[Any, ...], kept: list[int]
) -> None:
    rows = log([p]).expand(POINTS, len(p))
    law = law_of(ops, rows, *parameters)
    assert (rows[0] >= law.cutoff[0]).nonzero().flatten().tolist() == kept
    drawn = ops.sample(rows, law, coins=torch.tensor(GRID, dtype=torch.float64))
    found = counts(drawn[:, 0].tolist(), len(p))
    total = sum(p[x] for x in kept)
    assert all(abs(found[x] - POINTS * p[x] / total) <= 1 for x in kept)


def test_b070_a_flat_bf16_row_of_131072_ids_is_drawn_flat(ops: Any) -> None:
    vocab, coins = 131072, torch.tensor(GRID[::2], dtype=torch.float64)
    rows = torch.ones(1, vocab, dtype=torch.bfloat16).expand(8, vocab)
    drawn = ops.sample(rows, law_of(ops, rows, 1.0), coins=coins)[:, 0]
    assert bool(((drawn - coins * vocab).abs() <= 1).all())


# Rows without a law


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("bad", [math.nan, math.inf], ids=["nan", "inf"])
def test_b077_an_invalid_row_accepts_nothing(
    ops: Any, bad: float, temperature: float, rule: str
) -> None:
    rows = torch.zeros(3, 4)
    rows[0, 2] = bad
    params = SamplingParams.make(temperature)
    out = verify(ops, rows, [0, 0], [[0.0, 0.0]], [0.5], law=params, rule=rule)
    assert out.output_tokens.tolist() == [[PAD_TOKEN] * 3]
    assert out.accepted_lens.tolist() == [0]
    assert out.status.tolist() == [INVALID_TARGET]
    rows = rows.flip(0)  # the row behind both drafts
    out = verify(ops, rows, [0, 0], [[0.0, 0.0]], [0.5], law=params, rule=rule)
    assert out.output_tokens.tolist() == [[0, 0, PAD_TOKEN]]
    assert out.status.tolist() == [INVALID_TARGET]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    "row",
    [[math.nan, 6.0, 8.0], [6.0, math.nan, 8.0], [math.nan] * 3, [-math.inf] * 3, [math.inf, 1, 2]],
    ids=["b080-first", "b080-middle", "b080-all", "b079", "inf"],
)
def test_a_row_without_a_law_has_no_argmax(ops: Any, row: list[float], temperature: float) -> None:
    rows = torch.tensor([row, [1.0, 3.0, 2.0]])
    law = law_of(ops, rows, temperature)
    assert law.status.tolist() == [INVALID_TARGET, OK]
    assert law.argmax.tolist() == [PAD_TOKEN, 1]
    coins = torch.tensor([0.5, 0.5], dtype=torch.float64)
    assert ops.sample(rows, law, coins=coins).tolist() == [[PAD_TOKEN], [1]]
    seeds = torch.arange(2)
    assert ops.sample(rows, law, noise=(seeds, seeds))[0].tolist() == [PAD_TOKEN]


def test_b079_a_row_with_every_id_masked_has_no_law(ops: Any) -> None:
    rows, owner = torch.zeros(2, 40), torch.zeros(2, dtype=torch.int32)
    words = torch.tensor([[0, 0], [-1, -1]], dtype=torch.int32)
    ops.adjust_logits_(rows, owner, allowed_words=words)
    assert law_of(ops, rows, 1.0).status.tolist() == [INVALID_TARGET, OK]


# Padding


@pytest.mark.parametrize("rule", RULES)
def test_b084_every_negative_id_ends_the_chain(ops: Any, rule: str) -> None:
    rows = torch.zeros(4, 5)
    rows[0, 4] = rows[1, 3] = 1.0
    out = verify(ops, rows, [4, -2, -100], [[0.0] * 3], [0.5], rule=rule)
    assert emitted(out) == [[4, 3]]
    assert out.status.tolist() == [INVALID_DRAFT]
    out = verify(ops, rows, [4, PAD_TOKEN, 3], [[0.0] * 3], [0.5], rule=rule)
    assert emitted(out) == [[4, 3]]
    assert out.status.tolist() == [OK]


@pytest.mark.parametrize("rule", RULES)
def test_b087_places_behind_the_emitted_tokens_are_marked(ops: Any, rule: str) -> None:
    rows = torch.eye(4)
    out = verify(ops, rows, [0, 3, 2], [[0.5] * 3], [0.5], rule=rule)
    assert out.output_tokens.tolist() == [[0, 1, -1, -1]]
    assert out.path.tolist() == [[0, 1, -1, -1]]


# Vocabularies of other widths


@pytest.mark.parametrize("rule", RULES)
def test_b102_a_narrower_draft_leaves_its_missing_ids_to_the_target(ops: Any, rule: str) -> None:
    p = torch.tensor([[0.1, 0.1, 0.1, 0.1, 0.1, 0.1, 0.4, 0.0]] * 2)
    q = torch.full((1, 6), 1 / 6)
    out = verify(ops, p, [0], [0.9] * POINTS, GRID, draft=q, rule=rule)
    assert recovered_counts(out, 8) == [0] * 6 + [POINTS, 0]


@pytest.mark.parametrize("rule", RULES)
def test_b103_a_wider_draft_never_emits_its_extra_ids(ops: Any, rule: str) -> None:
    p, q = torch.full((2, 6), 1 / 6), torch.full((1, 8), 1 / 8)
    out = verify(ops, p, [7], [0.0, *GRID[1:]], GRID, draft=q, rule=rule)
    assert max(recovered_counts(out, 8)[6:]) == 0
    assert out.status.tolist() == [OK] * POINTS
    out = verify(ops, p, [8], [0.0], [0.5], draft=q, rule=rule)
    assert out.status.tolist() == [INVALID_DRAFT]


@pytest.mark.parametrize("bad", [-1, 8])
def test_b106_an_id_map_out_of_range_is_refused(bad: int) -> None:
    with pytest.raises(ValueError, match="draft_to_target"):
        invert_id_map(torch.tensor([0, bad, 3]), 8)


@pytest.mark.parametrize("rule", RULES)
def test_b107_a_mapped_draft_law_meets_the_right_target_ids(ops: Any, rule: str) -> None:
    p = torch.tensor([[0.0, 0.1, 0.0, 0.1, 0.3, 0.1, 0.0, 0.4]] * 2)
    q = torch.tensor([[0.2, 0.2, 0.2, 0.4]])
    to_draft = invert_id_map(torch.tensor([5, 3, 7, 1]), 8)
    options: dict[str, Any] = {"draft": q, "target_to_draft": to_draft, "rule": rule}
    # Id 1 is column 3 of the draft: accepted with 0.1 / 0.4. The residual is 0.3 at 4, 0.2 at 7.
    out = verify(ops, p, [1], [0.24], [0.5], **options)
    assert out.accepted_lens.tolist() == [1]
    out = verify(ops, p, [1], [0.26] * 20, [(i + 0.5) / 20 for i in range(20)], **options)
    assert recovered_counts(out, 8) == [0, 0, 0, 0, 12, 0, 0, 8]
    out = verify(ops, p, [4], [0.0], [0.5], **options)  # no column: not drawn from this law
    assert out.accepted_lens.tolist() == [0]
    assert out.status.tolist() == [ZERO_Q]
