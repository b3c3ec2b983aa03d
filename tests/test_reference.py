"""The reference against independent arithmetic on Python numbers, and its defined results."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from spec_kernels import reference
from spec_kernels.reference import random
from spec_kernels.reference.law import find_cutoff, probabilities, tile_stats
from spec_kernels.types import (
    INVALID_TARGET,
    OK,
    PAD_TOKEN,
    Law,
    SamplingParams,
    invert_id_map,
)
from tests.joint import Filters

RULES = ("token", "block")


# Random numbers


def philox(key: int, counter: list[int]) -> list[int]:
    """Philox4x32-10 on Python integers."""
    low, high = key & 0xFFFFFFFF, key >> 32 & 0xFFFFFFFF
    for _ in range(10):
        even, odd = counter[0] * 0xD2511F53, counter[2] * 0xCD9E8D57
        counter = [
            odd >> 32 ^ counter[1] ^ low,
            odd & 0xFFFFFFFF,
            even >> 32 ^ counter[3] ^ high,
            even & 0xFFFFFFFF,
        ]
        low, high = (low + 0x9E3779B9) & 0xFFFFFFFF, (high + 0xBB67AE85) & 0xFFFFFFFF
    return counter


def coin(seed: int, position: int, stream: int, node: int, lane: int = 0) -> float:
    halves = [position & 0xFFFFFFFF, position >> 32 & 0xFFFFFFFF]
    words = philox(seed, [*halves, node, stream << 24 | lane])
    return ((words[0] >> 5) * 2**26 + (words[1] >> 6)) / 2**53


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [  # the known answers published with the generator
        ([0] * 4, 0, "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ([2**32 - 1] * 4, 2**64 - 1, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            0x299F31D0A4093822,
            "d16cfe09 94fdcceb 5001e420 24126ea1",
        ),
    ],
    ids=["zeros", "ones", "pi"],
)
def test_philox_gives_the_published_words(counter: list[int], key: int, expected: str) -> None:
    position = counter[1] << 32 | counter[0]
    arguments = [value - 2**64 if value >= 2**63 else value for value in (key, position)]
    words = random.philox(*(torch.tensor(value) for value in (*arguments, *counter[2:])))
    assert " ".join(f"{int(word):08x}" for word in words) == expected
    assert " ".join(f"{word:08x}" for word in philox(key, counter)) == expected


def test_coins_are_keyed_by_seed_root_stream_node_and_lane() -> None:
    seeds, positions = [7, -3, 2**62 + 5], [0, 2**33 + 1, 11]
    arguments = torch.tensor(seeds), torch.tensor(positions)
    accept_coins, final_coins = reference.coins(*arguments, 3)
    drafts = reference.draft_coins(*arguments, 3, 2)
    for b, (seed, position) in enumerate(zip(seeds, positions, strict=True)):
        assert accept_coins[b].tolist() == [coin(seed, position, 2, node) for node in range(3)]
        assert float(final_coins[b]) == coin(seed, position, 3, 0)
        for node in range(3):
            expected = [coin(seed, position, 1, node, lane) for lane in range(2)]
            assert drafts[b, node].tolist() == expected


def test_b045_b046_b052_b055_no_two_coins_share_an_address() -> None:
    """Other seeds, positions that differ by 2^32, other nodes and other streams all differ."""
    seeds, positions = torch.tensor([1, 1, 2]), torch.tensor([5, 5 + 2**32, 5])
    accept_coins, final_coins = reference.coins(seeds, positions, 4)
    drafts = reference.draft_coins(seeds, positions, 4, 2)
    together = torch.cat((accept_coins.flatten(), final_coins, drafts.flatten()))
    assert together.unique().numel() == together.numel()
    assert bool(((together >= 0) & (together < 1)).all())
    alone = reference.coins(seeds[2:], positions[2:], 2)
    assert torch.equal(alone[0][0], accept_coins[2, :2])
    assert torch.equal(alone[1], final_coins[2:])


def test_exponential_noise_follows_its_words() -> None:
    ids = torch.tensor([0, 3, 5, 131071])
    noise = random.exponential(torch.tensor(9), torch.tensor(2**32 + 4), ids)
    for value, token in zip(noise.tolist(), ids.tolist(), strict=True):
        word = philox(9, [4, 1, token >> 2, 4 << 24])[token & 3]
        assert value == pytest.approx(-math.log1p(-(word + 0.5) / 2**32), rel=1e-7)
    many = random.exponential(torch.tensor(1), torch.tensor(1), torch.arange(100_000))
    assert float(many.mean()) == pytest.approx(1.0, abs=0.02)
    assert float((many > 3.0).double().mean()) == pytest.approx(math.exp(-3), abs=0.003)


def test_noise_gives_faint_ids_their_exact_share(monkeypatch: pytest.MonkeyPatch) -> None:
    """One id at logit 0, 131,071 at -17: the earliest of these must come first in 5.4e-3 of all
    races. Integrated over the arrival of the first, with every small word enumerated."""
    words = torch.arange(8192)
    monkeypatch.setattr(random, "philox", lambda *_: (words,) * 4)
    noise = random.exponential(torch.tensor(0), torch.tensor(0), torch.zeros_like(words))
    arrival = torch.linspace(0.0, 30.0, 30001, dtype=torch.float64)
    earlier = torch.searchsorted(noise, arrival * math.exp(-17.0)).double() / 2.0**32
    share = torch.trapezoid((-arrival).exp() * (1.0 - (1.0 - earlier) ** 131071), arrival)
    rate = 131071 * math.exp(-17.0)
    assert float(share) == pytest.approx(rate / (1.0 + rate), rel=1e-4)


# Laws


filters = st.builds(
    Filters,
    st.sampled_from([0.0, 1e-6, 2e-5, 0.3, 1.0, 2.5, 1e4]),
    st.sampled_from([0, 1, 2, 5, 12, 50]),
    st.sampled_from([1.0, 0.01, 0.33, 0.77, 0.96]),
    st.sampled_from([0.0, 0.013, 0.21, 0.87, 1.0]),
)


@given(filters, st.integers(0, 10**6), st.sampled_from([torch.float32, torch.bfloat16]))
def test_law_equals_its_definition(chosen: Filters, seed: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = (2.0 * torch.randn(1, 12, generator=generator)).to(dtype)
    logits[0, seed % 12] = -math.inf
    law = reference.row_law(logits, chosen.params(), torch.tensor([0]))
    p = probabilities(logits, law, 0)
    expected = torch.tensor(chosen.apply(logits[0].tolist()), dtype=torch.float64)
    torch.testing.assert_close(p, expected, rtol=1e-11, atol=1e-15)
    assert int(law.argmax[0]) == logits[0].tolist().index(float(logits.max()))
    rounded = probabilities(
        logits, Law(*(f.float() if f.is_floating_point() else f for f in law)), 0
    )
    if chosen.temperature > 1e-3:
        torch.testing.assert_close(rounded, p, rtol=1e-4, atol=1e-6)


def test_stages_of_the_law_with_numbers() -> None:
    logits = torch.tensor([1.0, 3.0, 2.0, 2.0], dtype=torch.float64)
    assert find_cutoff(logits, 1.0, 0, 1.0, 0.0) == -math.inf
    assert find_cutoff(logits, 1.0, 4, 1.0, 0.0) == -math.inf
    assert find_cutoff(logits, 1.0, 2, 1.0, 0.0) == 2.0  # and the tie stays
    assert find_cutoff(logits, 1.0, 0, 0.5, 0.0) == 3.0
    assert find_cutoff(logits, 1.0, 1, 0.99, 0.0) == 3.0  # top-p of the law that top-k left
    assert find_cutoff(logits, 2.0, 0, 1.0, 0.5) == pytest.approx(3.0 + 2.0 * math.log(0.5))
    row_max, total = tile_stats(logits, 0.5, 2.0)
    assert (row_max, total) == (3.0, pytest.approx(1.0 + 2.0 * math.exp(-0.5)))


BAD_PARAMETERS = [
    {"temperature": math.nan},
    {"temperature": -0.1},
    {"temperature": 2e30},
    {"top_p": 0.0},
    {"top_p": 1.1},
    {"top_p": math.nan},
    {"min_p": -0.1},
    {"min_p": 1.1},
    {"min_p": math.nan},
]


@pytest.mark.parametrize("greedy", [False, True], ids=["sampled", "greedy"])
@pytest.mark.parametrize("bad", BAD_PARAMETERS, ids=str)
def test_parameters_out_of_range_make_a_row_invalid(bad: dict[str, float], greedy: bool) -> None:
    values = {"temperature": 0.0 if greedy else 1.0, "top_p": 1.0, "min_p": 0.0, **bad}
    columns = {name: torch.tensor([value, 1.0]) for name, value in values.items()}
    params = SamplingParams(columns["temperature"], None, columns["top_p"], columns["min_p"])
    law = reference.row_law(torch.ones(4, 3), params, torch.tensor([0, 1, -1, 2]))
    assert law.status.tolist() == [INVALID_TARGET, OK, INVALID_TARGET, INVALID_TARGET]
    for row in (0, 2, 3):
        fields = [float(field[row]) for field in law]
        assert fields == [0.0, math.inf, 0.0, 0.0, PAD_TOKEN, INVALID_TARGET]


def test_adjusted_logits_with_numbers() -> None:
    logits = torch.tensor([[2.0, -1.0, 0.5, 1.0, 3.0]] * 4)
    reference.adjust_logits_(
        logits,
        torch.tensor([0, 0, 1, -1]),
        allowed_words=torch.tensor([[0b11111], [0b01111], [0b11111], [0]]),
        bias_ids=torch.tensor([[0, 0, PAD_TOKEN, 9], [4, 3, 5, PAD_TOKEN]]),
        bias_values=torch.tensor([[1.0, 2.0, 100.0, 100.0], [-1.0, math.inf, 9.0, 9.0]]),
        output_counts=torch.tensor([[2, 0, 0, 0, 0], [0, 1, 0, 0, 0]]),
        prompt_words=torch.tensor([[0b00010], [0]]),
        repetition_penalty=torch.tensor([2.0, 2.0]),
        presence_penalty=torch.tensor([0.25, 1.0]),
        frequency_penalty=torch.tensor([0.5, 0.0]),
        draft_tokens=torch.tensor([[0, 4, 4], [0, 2, PAD_TOKEN]]),
        row_node=torch.tensor([0, 2, 2, 0]),
    )
    # Request 0 saw id 0 twice and has id 1 in its prompt; node 2 adds two drafts of id 4,
    # which the mask then removes. Request 1 saw id 1 and, at node 2, id 2.
    assert logits.tolist() == [
        [2.0 / 2 - 1.0 - 0.25 + 3.0, -2.0, 0.5, 1.0, 3.0],
        [2.0 / 2 - 1.0 - 0.25 + 3.0, -2.0, 0.5, 1.0, -math.inf],
        [2.0, -3.0, -0.75, math.inf, 2.0],
        [2.0, -1.0, 0.5, 1.0, 3.0],
    ]


def test_drafts_on_the_path_are_penalised() -> None:
    logits = torch.zeros(3, 4)
    reference.adjust_logits_(
        logits,
        torch.zeros(3, dtype=torch.int32),
        frequency_penalty=torch.tensor([1.0]),
        draft_tokens=torch.tensor([[3, 1, 1]]),
        row_node=torch.arange(3),
    )
    assert logits.tolist() == [[0, 0, 0, 0], [0, -1, 0, 0], [0, -2, 0, 0]]


def test_overlap_of_invalid_rows_is_nan_and_a_map_is_followed() -> None:
    params = SamplingParams.make(1.0)
    logits = torch.tensor([[0.0, 0.0, math.nan], [0.0, 0.0, 0.0]])
    law = reference.row_law(logits, params, torch.tensor([0, 0]))
    beta = reference.overlap(logits, law, torch.full((2, 3), 1 / 3), None)
    assert math.isnan(beta[0])
    assert float(beta[1]) == pytest.approx(1.0)
    p, q = torch.tensor([[0.5, 0.0, 0.5]]), torch.tensor([[0.9, 0.1]])
    to_draft = invert_id_map(torch.tensor([2, 0]), 3)
    assert float(reference.overlap(p, None, q, None, target_to_draft=to_draft)) == pytest.approx(
        0.6
    )
    assert float(reference.overlap(p, None, q, None)) == pytest.approx(0.5)


# Sampling


def test_a_coin_whose_place_rounds_up_to_the_total_draws_the_last_positive_id() -> None:
    weights = torch.tensor([0.0, 5e-324, 0.0], dtype=torch.float64)
    assert random.choose(1.0 - 2.0**-53, weights) == 1


def test_sample_refuses_and_pads() -> None:
    rows, coins = torch.tensor([[0.5, 0.5], [0.0, 0.0]]), torch.tensor([0.9, 0.9]).double()
    seeds = torch.tensor([1, 2])
    assert reference.sample(rows, None, coins=coins).tolist() == [[1], [PAD_TOKEN]]
    assert reference.sample(rows, None, noise=(seeds, seeds))[1].tolist() == [PAD_TOKEN]
    with pytest.raises(ValueError, match="exactly one"):
        reference.sample(rows, None)
    with pytest.raises(ValueError, match="exactly one"):
        reference.sample(rows, None, coins=coins, noise=(seeds, seeds))
    with pytest.raises(ValueError, match="replacement"):
        reference.sample(rows, None, noise=(seeds, seeds), k=2, replacement=True)


def test_coupled_noise_is_the_argmax_of_log_p_plus_gumbel() -> None:
    logits = torch.randn(20, 30)
    law = reference.row_law(logits, SamplingParams.make(0.7, top_k=9), torch.zeros(20).int())
    seeds, positions = torch.arange(20), torch.arange(20) + 100
    drawn = reference.sample(logits, law, noise=(seeds, positions))[:, 0].tolist()
    for row, token in enumerate(drawn):
        gumbel = -random.exponential(seeds[row], positions[row], torch.arange(30)).log()
        assert token == int((probabilities(logits, law, row).log() + gumbel).argmax())
    assert len(set(drawn)) > 5
