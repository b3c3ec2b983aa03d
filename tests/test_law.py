"""Contract of `row_law`, `overlap` and `adjust_logits_`, for every layer."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from spec_kernels import reference
from spec_kernels.types import INVALID_TARGET, OK, PAD_TOKEN, Law, SamplingParams
from tests.cases import EPSILON, LAYOUTS, float32_law, lay_out, random_params
from tests.layers import LAYERS, fewer, layer

every_layer = pytest.mark.parametrize("name", LAYERS)

ULP = 2.0**-23


def one_request(rows: int) -> Tensor:
    return torch.zeros(rows, dtype=torch.int32)


def cutoff_bounds(logits: Tensor, params: SamplingParams, owner: Tensor) -> tuple[Tensor, Tensor]:
    """Return the oracle's cutoffs for a top_p that is smaller or larger by `EPSILON`."""
    if params.top_p is None:
        cutoff = reference.row_law(logits, params, owner).cutoff
        return cutoff, cutoff
    bounds = []
    for shift in (-EPSILON, EPSILON):
        top_p = params.top_p.double() * (1.0 + shift)
        top_p = torch.where(params.top_p < 1.0, top_p.clamp(max=1.0 - 1e-9), params.top_p.double())
        moved = params._replace(top_p=torch.where(params.top_p > 0, top_p, params.top_p.double()))
        bounds.append(reference.row_law(logits, moved, owner).cutoff)
    return bounds[1], bounds[0]


def assert_laws(law: Law, logits: Tensor, params: SamplingParams, owner: Tensor) -> None:
    """Compare with the oracle: indices and maxima are equal; a cutoff lies where the oracle's
    would for a top_p within `EPSILON`; the sum is that of the ids kept."""
    expected = reference.row_law(logits, params, owner)
    for field in Law._fields:
        given, wanted = getattr(law, field), getattr(expected, field)
        assert given.shape == wanted.shape, field
        is_index = field in ("argmax", "status")
        assert given.dtype == (wanted.dtype if is_index else torch.float32), field
    assert torch.equal(law.argmax, expected.argmax)
    assert torch.equal(law.status, expected.status)
    assert torch.equal(law.row_max.double(), expected.row_max)
    scale = expected.inv_temperature
    assert bool(((law.inv_temperature.double() - scale).abs() <= ULP * scale).all())

    low, high = cutoff_bounds(logits, params, owner)
    slack = torch.zeros_like(low)
    if params.min_p is not None:  # the only cutoff that is computed, not picked
        exponent = params.temperature.double() * params.min_p.double().log().clamp(min=-1e30)
        exponent = exponent.nan_to_num(0.0)[owner.long().clamp(0, len(exponent) - 1)]
        slack = 2.0 * ULP * (expected.row_max.abs() + exponent.abs())
    cutoff = law.cutoff.double()
    off = torch.where(cutoff == low, 0.0, low - cutoff).maximum(
        torch.where(cutoff == high, 0.0, cutoff - high)
    )
    assert bool((off <= slack).all()), (cutoff, low, high)
    for row in (expected.inv_temperature > 0).nonzero()[:, 0].tolist():
        values = logits[row].double()
        mass = ((values - law.row_max[row].double()) * scale[row]).exp()
        log_sum = float(mass[values >= cutoff[row]].sum().log())
        assert abs(float(law.log_sum[row]) - log_sum) <= 2e-6, (row, log_sum)
    is_fixed = expected.inv_temperature == 0
    assert not bool(law.log_sum[is_fixed].any())


def make_logits(rows: int, vocab: int, dtype: torch.dtype, scale: float = 2.5) -> Tensor:
    generator = torch.Generator().manual_seed(rows * 31 + vocab)
    return (torch.randn(rows, vocab, generator=generator) * scale).to(dtype)


@every_layer
@pytest.mark.parametrize("filters", ["none", "all"])
@pytest.mark.parametrize(
    ("rows", "vocab", "dtype"),
    [
        (0, 7, torch.float32),
        (5, 1, torch.float32),
        (17, 7, torch.float32),
        (17, 257, torch.bfloat16),
        (12, 1000, torch.float16),
        (12, 4160, torch.float32),
        (6, 32000, torch.bfloat16),
        (2, 128256, torch.float32),
    ],
    ids=lambda value: str(value).removeprefix("torch."),
)
def test_laws_equal_the_oracles(
    name: str, rows: int, vocab: int, dtype: torch.dtype, filters: str
) -> None:
    rows = fewer(name, rows, 7)
    logits = make_logits(rows, vocab, dtype)
    params = random_params(max(rows, 1), filters, torch.Generator().manual_seed(vocab))
    owner = torch.randperm(max(rows, 1), dtype=torch.int32)[:rows]
    assert_laws(layer(name).row_law(logits, params, owner), logits, params, owner)


@every_layer
@pytest.mark.parametrize(
    ("scale", "vocab"),
    [(0.0, 257), (1.0, 257), (0.0, 5000), (0.05, 5000), (1.0, 40_000), (6.0, 40_000)],
)
def test_filters_of_flat_peaked_and_tied_rows(name: str, scale: float, vocab: int) -> None:
    """One request per kind of filter, on rows from all equal to one peak, values repeating."""
    vocab = fewer(name, vocab, 9000)
    params = SamplingParams.make(
        [1.0, 1.0, 1.0, 0.6, 1.7, 1.0, 1.0, 1.0],
        top_k=[50, 0, 0, 40, 400, 1, 3000, 0],
        top_p=[1.0, 0.9, 1.0, 0.95, 0.7, 1.0, 0.99, 1e-8],
        min_p=[0.0, 0.0, 0.02, 0.0, 0.01, 0.0, 0.0, 1.0],
    )
    logits = make_logits(8, vocab, torch.bfloat16, scale)
    owner = torch.arange(8, dtype=torch.int32)
    assert_laws(layer(name).row_law(logits, params, owner), logits, params, owner)


@every_layer
@pytest.mark.parametrize("vocab", [1025, 5001, 8193])
def test_kept_ids_may_be_the_last_of_a_row(name: str, vocab: int) -> None:
    """Ties at the cutoff are kept in every part of a row: its start, a border, its last ids."""
    logits = torch.full((1, vocab), -1.0)
    logits[0, [0, 511, 512, 1023, 1024, vocab - 1]] = 2.0
    logits[0, 700] = 3.0
    ties = len({0, 511, 512, 1023, 1024, vocab - 1})
    for params in (SamplingParams.make(1.0, 2), SamplingParams.make(1.0, 3, 0.5)):
        law = layer(name).row_law(logits, params, one_request(1))
        assert (float(law.cutoff), int(law.argmax)) == (2.0, 700)
        assert float(law.log_sum) == pytest.approx(math.log(1.0 + ties * math.exp(-1.0)), abs=1e-6)


@every_layer
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layout_and_neighbours_do_not_matter(name: str, layout: str) -> None:
    """Rows are right in every memory layout, and bit-equal in any order and alone."""
    rows = fewer(name, 12)
    dtype = torch.bfloat16 if layout in ("odd", "transposed") else torch.float32
    logits = make_logits(rows, 517, dtype)
    params = random_params(rows, "all", torch.Generator().manual_seed(3))
    owner, order = torch.arange(rows, dtype=torch.int32), torch.randperm(rows)
    ops = layer(name)
    law = ops.row_law(lay_out(logits, layout), params, owner)
    assert_laws(law, logits, params, owner)
    moved = ops.row_law(lay_out(logits[order], layout), params, owner[order])
    assert all(torch.equal(a[order], b) for a, b in zip(law, moved, strict=True))
    alone = ops.row_law(lay_out(logits[2:3], layout), params, owner[2:3])
    assert all(torch.equal(a[2:3], b) for a, b in zip(law, alone, strict=True))


@every_layer
def test_invalid_rows_and_parameters_set_a_status(name: str) -> None:
    """NaN, +inf, all -inf, parameters outside their range, requests that do not exist; the other
    rows are bit-equal to what they are without the faults."""
    nan, inf = math.nan, math.inf
    logits = make_logits(14, 300, torch.float32)
    owner = torch.zeros(14, dtype=torch.int32)
    good = SamplingParams.make([0.8] * 10, 5, 0.9, 0.1)
    clean = layer(name).row_law(logits, good, owner)
    assert not bool(clean.status.any())
    logits = logits.clone()
    logits[1, 299], logits[2, 64], logits[3] = nan, inf, -inf
    logits[12, 1:], logits[12, 0] = -inf, 1.0
    temperature = torch.tensor([0.8, nan, -1.0, 1e31, inf, 0.8, 0.8, 0.8, 0.8, 0.8])
    top_p = torch.tensor([0.9, 0.9, 0.9, 0.9, 0.9, 0.0, 1.1, nan, 0.9, 0.9])
    min_p = torch.tensor([0.1, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1, -0.1, nan])
    bad = SamplingParams(temperature, torch.full((10,), 5, dtype=torch.int32), top_p, min_p)
    owner[4:12] = torch.tensor([1, 2, 3, 4, 5, 6, 7, 8])
    owner[13] = 10
    law = layer(name).row_law(logits, bad, owner)
    fine = [0, 12]
    assert law.status.tolist() == [OK if row in fine else INVALID_TARGET for row in range(14)]
    for given, wanted in zip(law, clean, strict=True):
        assert torch.equal(given[0], wanted[0])
    is_bad = law.status != OK
    assert not bool(law.inv_temperature[is_bad].any())
    assert not bool(law.row_max[is_bad].any())
    assert not bool(law.log_sum[is_bad].any())
    assert bool((law.cutoff[is_bad] == inf).all())
    assert bool((law.argmax[is_bad] == PAD_TOKEN).all())
    assert (float(law.log_sum[12]), int(law.argmax[12])) == (0.0, 0)
    last = torch.tensor([9, -1], dtype=torch.int32)
    assert layer(name).row_law(logits[:2], bad, last).status.tolist() == [INVALID_TARGET] * 2


@every_layer
def test_bounds_of_the_temperature_are_inside(name: str) -> None:
    """The smallest and the largest temperature as float32 values, and their neighbours outside."""
    low, high = torch.tensor(1e-5), torch.tensor(1e30)
    zero, top = torch.tensor(0.0), torch.tensor(math.inf)
    temperature = torch.stack((low, low.nextafter(zero), high, high.nextafter(top)))
    logits, owner = torch.zeros(4, 40), torch.arange(4, dtype=torch.int32)
    law = layer(name).row_law(logits, SamplingParams(temperature), owner)
    assert (law.inv_temperature > 0).tolist() == [True, False, True, False]
    assert law.status.tolist() == [OK, OK, OK, INVALID_TARGET]


@every_layer
@pytest.mark.parametrize("temperature", [0.0, 1e-12, 1e-40, 9e-6])
def test_greedy_laws_name_the_first_argmax(name: str, temperature: float) -> None:
    """Ties go to the first id, also across tiles; nothing is divided by the temperature (B041,
    B042); filters are ignored but their range is not."""
    logits = torch.zeros(3, 9000)
    logits[0, [4100, 8999]] = 1e4
    logits[1, [0, 4096]] = 3.0
    params = SamplingParams.make(temperature, 2, 0.5, 0.3)
    law = layer(name).row_law(logits, params, one_request(3))
    assert law.argmax.tolist() == [4100, 0, 0]
    assert torch.equal(law.cutoff, law.row_max)
    assert law.row_max.tolist() == [1e4, 3.0, 0.0]
    assert not bool(law.inv_temperature.any() | law.log_sum.any() | law.status.any())


@every_layer
@pytest.mark.parametrize(
    ("p", "parameters", "kept"),
    [
        ([0.5, 0.3, 0.1, 0.1], {"top_p": 0.8}, [0, 1]),
        ([0.5, 0.3, 0.15, 0.05], {"top_p": 0.6}, [0, 1]),
        ([0.1, 0.5, 0.1, 0.3], {"top_p": 1e-8}, [1]),
        ([0.125] * 8, {"top_k": 4}, list(range(8))),
        ([0.4, 0.2, 0.2, 0.2], {"top_k": 2}, [0, 1, 2, 3]),
        ([0.4, 0.2, 0.2, 0.1, 0.1], {"top_k": 2, "top_p": 0.5}, [0]),
        ([0.4, 0.2, 0.2, 0.1, 0.1], {"top_k": 2, "top_p": 0.51}, [0, 1, 2]),
        ([0.5, 0.26, 0.24], {"min_p": 0.5}, [0, 1]),
        ([0.5, 0.3, 0.2], {"min_p": 1.0}, [0]),
        ([0.5, 0.3, 0.2], {"top_k": 3, "top_p": 1.0}, [0, 1, 2]),
    ],
    ids=lambda value: str(value).replace(" ", ""),
)
def test_filters_keep(
    name: str, p: list[float], parameters: dict[str, Any], kept: list[int]
) -> None:
    """Public cases B067, B068, B069, B071: the smallest set that reaches top_p; ties are kept."""
    logits = torch.tensor([p]).log()
    law = layer(name).row_law(logits, SamplingParams.make(1.0, **parameters), one_request(1))
    assert (logits[0] >= law.cutoff[0]).nonzero()[:, 0].tolist() == kept
    mass = sum(p[i] for i in kept) / max(p)
    assert float(law.log_sum[0]) == pytest.approx(math.log(mass), abs=1e-6)


@every_layer
@pytest.mark.parametrize("layout", ["packed", "odd"])
@pytest.mark.parametrize(
    ("vocab", "draft_vocab"), [(7, 7), (1000, 900), (257, 400), (32000, 32000)]
)
def test_overlap_equals_the_oracles(name: str, vocab: int, draft_vocab: int, layout: str) -> None:
    rows = 6
    generator = torch.Generator().manual_seed(vocab)
    params = random_params(rows, "all", generator)
    owner = torch.arange(rows, dtype=torch.int32)
    target = make_logits(rows, vocab, torch.float32)
    own = make_logits(rows, draft_vocab, torch.bfloat16)
    shared = min(vocab, draft_vocab)
    own[:, :shared] += target[:, :shared].bfloat16()
    target[4, 0] = math.nan
    law = float32_law(reference.row_law(target, params, owner))
    draft_law = float32_law(reference.row_law(own, params, owner.flip(0)))
    id_map = torch.randperm(vocab, dtype=torch.int32)
    id_map[id_map >= draft_vocab] = -1
    for laws, rows_of in (
        ((law, draft_law), (target, own)),
        ((None, None), (target.softmax(1), own.softmax(1))),
    ):
        for mapped in (None, id_map):
            beta = layer(name).overlap(
                lay_out(rows_of[0], layout),
                laws[0],
                lay_out(rows_of[1], layout),
                laws[1],
                target_to_draft=mapped,
            )
            exact = reference.overlap(
                rows_of[0], laws[0], rows_of[1], laws[1], target_to_draft=mapped
            )
            assert beta.dtype == torch.float32
            assert torch.equal(beta.isnan(), exact.isnan())
            assert float((beta.double() - exact).nan_to_num(0.0).abs().max()) < 2e-6


@every_layer
def test_overlap_of_equal_laws_is_one(name: str) -> None:
    p = torch.tensor([[0.25, 0.5, 0.25], [0.6, 0.2, 0.2]])
    q = torch.tensor([[0.25, 0.5, 0.25], [0.0, 0.0, 1.0]])
    assert layer(name).overlap(p, None, q, None).tolist() == pytest.approx([1.0, 0.2])
    assert layer(name).overlap(p[:0], None, q[:0], None).shape == (0,)


def make_adjustments(batch: int, nodes: int, vocab: int, kinds: str) -> dict[str, Tensor]:
    """Return arguments of `adjust_logits_` of the given kinds, with ids out of range among them."""
    generator = torch.Generator().manual_seed(vocab + nodes)

    def integers(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=generator)

    words = (vocab + 31) // 32
    all_kinds = {
        "m": {"allowed_words": integers(-(2**31), 2**31, batch * nodes, words).int()},
        "b": {
            "bias_ids": integers(-2, vocab + 3, batch, 5),
            "bias_values": torch.randn(batch, 5, generator=generator),
        },
        "r": {
            "repetition_penalty": torch.rand(batch, generator=generator) + 0.5,
            "prompt_words": integers(-(2**31), 2**31, batch, words).int(),
        },
        "p": {"presence_penalty": torch.randn(batch, generator=generator)},
        "f": {"frequency_penalty": torch.randn(batch, generator=generator)},
        "c": {"output_counts": integers(0, 3, batch, vocab).int()},
        "d": {
            "draft_tokens": integers(-3, vocab + 2, batch, nodes),
            "row_node": torch.arange(nodes, dtype=torch.int32).repeat(batch),
        },
    }
    return {key: value for kind in kinds for key, value in all_kinds[kind].items()}


@every_layer
@pytest.mark.parametrize("kinds", ["m", "b", "bm", "r", "pc", "fcd", "rpfcdbm", "rd", "pd", "bc"])
@pytest.mark.parametrize(("batch", "nodes", "vocab"), [(0, 3, 7), (1, 1, 7), (3, 4, 257)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
def test_adjusted_logits_equal_the_oracles(
    name: str, batch: int, nodes: int, vocab: int, kinds: str, dtype: torch.dtype
) -> None:
    logits = make_logits(batch * nodes, vocab, dtype)
    owner = torch.arange(batch, dtype=torch.int32).repeat_interleave(nodes)
    if batch > 1:
        owner[2], owner[5] = -1, -7
    arguments = make_adjustments(batch, nodes, vocab, kinds)
    exact = logits.double()
    reference.adjust_logits_(exact, owner, **arguments)
    for layout in ("packed", "odd"):
        given = lay_out(logits, layout)
        layer(name).adjust_logits_(given, owner, **arguments)
        assert torch.equal(given.isinf(), exact.isinf())
        error = (given.double() - exact).nan_to_num(0.0).abs()
        bound = exact.nan_to_num(0.0, neginf=0.0).abs() + 8.0
        assert bool((error <= torch.finfo(dtype).eps * bound).all())
        untouched = owner < 0
        assert torch.equal(given[untouched], logits[untouched])


@every_layer
def test_a_penalised_infinity_stays_one(name: str) -> None:
    """Also where the division overflows; the row has no law, but its values are defined."""
    logits = torch.tensor([[math.inf, 3e38, -math.inf, 3e38, math.nan]])
    expected = logits.clone()
    arguments = {
        "repetition_penalty": torch.tensor([0.5]),
        "output_counts": torch.tensor([[1, 1, 1, 0, 1]], dtype=torch.int32),
    }
    layer(name).adjust_logits_(logits, one_request(1), **arguments)
    reference.adjust_logits_(expected, one_request(1), **arguments)
    assert expected[0, :4].tolist() == [math.inf, math.inf, -math.inf, float(logits[0, 3])]
    assert torch.equal(
        logits.nan_to_num(7.0, math.inf, -math.inf), expected.nan_to_num(7.0, math.inf, -math.inf)
    )


@every_layer
def test_b186_b189_a_mask_alone_bans_ids_in_every_row(name: str) -> None:
    logits = torch.zeros(4, 40)
    words = torch.full((4, 2), -1, dtype=torch.int32)
    words[:, 0] ^= 1 << 7
    layer(name).adjust_logits_(logits, torch.tensor([0, 0, 1, 5]).int(), allowed_words=words)
    expected = torch.zeros(4, 40)
    expected[:, 7] = -math.inf
    assert torch.equal(logits, expected)


@every_layer
def test_b184_b185_b187_penalties_reach_every_row_with_its_own_history(name: str) -> None:
    """Row i sees the committed output and the drafts before it: 2, then 1, then 2 again."""
    logits = torch.full((4, 3), 4.0)
    layer(name).adjust_logits_(
        logits,
        one_request(4),
        output_counts=torch.tensor([[1, 0, 0]], dtype=torch.int32),
        repetition_penalty=torch.tensor([2.0]),
        frequency_penalty=torch.tensor([0.25]),
        presence_penalty=torch.tensor([0.5]),
        draft_tokens=torch.tensor([[0, 2, 1, 2]]),
        row_node=torch.arange(4, dtype=torch.int32),
    )
    assert logits.tolist() == [
        [1.25, 4.0, 4.0],
        [1.25, 4.0, 1.25],
        [1.25, 1.25, 1.25],
        [1.25, 1.25, 1.0],
    ]


@every_layer
def test_b188_adjusted_rows_are_still_laws(name: str) -> None:
    """Probabilities of adjusted logits sum to one over what is allowed."""
    logits = make_logits(2, 50, torch.float32)
    arguments = make_adjustments(2, 1, 50, "rpfcbm")
    ops = layer(name)
    owner = torch.arange(2, dtype=torch.int32)
    ops.adjust_logits_(logits, owner, **arguments)
    law = ops.row_law(logits, SamplingParams.make([1.0, 0.5]), owner)
    for row in range(2):
        p = reference.law.probabilities(logits, law, row)
        assert float(p.sum()) == pytest.approx(1.0, abs=1e-6)
        assert not bool(p[logits[row] == -math.inf].any())


@every_layer
def test_b190_b191_ragged_rows_use_the_mask_and_history_of_their_own_place(name: str) -> None:
    """Requests with 3 and 0 drafts, drafts trimmed to PAD_TOKEN: no row is shifted."""
    rows, vocab = 5, 9
    owner = torch.tensor([0, 0, 0, 0, 1], dtype=torch.int32)
    words = torch.tensor([[1], [2], [4], [8], [16]], dtype=torch.int32)
    logits = torch.zeros(rows, vocab)
    layer(name).adjust_logits_(
        logits,
        owner,
        allowed_words=words,
        frequency_penalty=torch.tensor([1.0, 1.0]),
        draft_tokens=torch.tensor([[0, 1, 2, PAD_TOKEN], [0, PAD_TOKEN, PAD_TOKEN, PAD_TOKEN]]),
        row_node=torch.tensor([0, 1, 2, 3, 0], dtype=torch.int32),
    )
    assert logits.isfinite().nonzero().tolist() == [[0, 0], [1, 1], [2, 2], [3, 3], [4, 4]]
    assert logits[torch.arange(5), torch.arange(5)].tolist() == [0.0, -1.0, -1.0, 0.0, 0.0]


@every_layer
def test_b192_a_state_change_in_the_window_binds_later_rows(name: str) -> None:
    """After the end marker at draft 1 only id 5 is allowed: rows 1 to 3 can emit nothing else."""
    words = torch.tensor([[-1], [1 << 5], [1 << 5], [1 << 5]], dtype=torch.int32)
    logits = make_logits(4, 20, torch.float32)
    ops = layer(name)
    ops.adjust_logits_(logits, one_request(4), allowed_words=words)
    law = ops.row_law(logits, SamplingParams.make(1.0), one_request(4))
    for coin in (0.0, 0.5, 1.0 - 2.0**-53):
        coins = torch.full((4,), coin, dtype=torch.float64)
        assert ops.sample(logits, law, coins=coins)[1:, 0].tolist() == [5, 5, 5]


@every_layer
def test_b024_b025_every_row_uses_its_own_requests_parameters(name: str) -> None:
    """Requests with 0, 2 and 3 drafts and different min_p: bias and filter reach verified rows."""
    logits = torch.tensor([0.5, 0.3, 0.2]).log().repeat(8, 1)
    owner = torch.tensor([0, 1, 1, 1, 2, 2, 2, 2], dtype=torch.int32)
    ops = layer(name)
    params = SamplingParams.make(1.0, min_p=[0.9, 0.5, 0.1])
    kept = (logits >= ops.row_law(logits, params, owner).cutoff[:, None]).sum(1)
    assert kept.tolist() == [1, 2, 2, 2, 3, 3, 3, 3]
    bias_ids = torch.tensor([[0], [1], [2]])
    ops.adjust_logits_(logits, owner, bias_ids=bias_ids, bias_values=torch.full((3, 1), 9.0))
    assert logits.argmax(1).tolist() == owner.tolist()
