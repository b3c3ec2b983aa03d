"""The library's kernels through the harness: bounds, races, orders, machine code, bytes."""

from __future__ import annotations

import mmap
from typing import Any

import pytest
import torch

from spec_kernels import kernels, reference
from spec_kernels.testing import IntegerOverflowError, emulated, interpreted, watch
from spec_kernels.types import Draft, SamplingParams
from tests.cases import (
    LAST_COIN,
    Case,
    assert_equal,
    assert_tokens,
    float32_law,
    lay_out,
    make_step,
)
from tests.layers import layer
from tests.steps import Step
from tests.test_law import assert_laws
from tests.test_sample import assert_noise_tokens

# why these: the dtypes of logits, aligned and odd rows, every source of laws, ragged and absent
# requests (`make_step`), fixed and sampled drafts, and a vocabulary of more than one tile
STEPS = [
    (Case(3, 2, 257, torch.bfloat16, "odd", filters="none"), "block"),
    (Case(3, 2, 100, draft_vocab=60, is_mapped=True), "token"),
    pytest.param(Case(3, 3, 1000, torch.float32, "padded"), "block", marks=pytest.mark.slow),
    pytest.param(
        Case(2, 2, 9001, torch.bfloat16, drafts="sampled", filters="none"),
        "block",
        marks=pytest.mark.slow,
    ),
    pytest.param(
        Case(2, 1, 70, torch.float16, drafts="fixed", ids=torch.int32),
        "token",
        marks=pytest.mark.slow,
    ),
]


def run_all(case: Case, rule: str) -> list[torch.Tensor]:
    """Every launcher of the layer on one step; returns what it computed."""
    step = make_step(case)
    seeds, positions = torch.arange(case.batch) * 2**40 - 5, torch.arange(case.batch) + 2**33
    accepted = step.accept(kernels, rule, target_law=step.params)
    law = kernels.row_law(step.target_logits, step.params, step.row_request)
    given = step.accept(kernels, rule, target_law=law)
    drawn = kernels.sample(
        step.target_logits, law, coins=torch.rand(len(step.row_request)).double()
    )
    rows = torch.arange(len(step.row_request))
    coupled = kernels.sample(step.target_logits, law, noise=(rows, rows + 7))
    own = coupled[step.target_row.clamp(min=0).long()][..., 0]
    matched = kernels.match(step.draft, own, max_depth=step.max_depth)
    coins = kernels.coins(seeds, positions, case.gamma + 1)
    draft_coins = kernels.draft_coins(seeds, positions, case.gamma + 1, 2)
    return [*accepted, *law, *given, drawn, coupled, *matched, *coins, draft_coins]


@pytest.mark.parametrize(("case", "rule"), STEPS, ids=str)
def test_no_kernel_leaves_its_arguments_races_or_depends_on_the_order(
    case: Case, rule: str
) -> None:
    """Reversed and shuffled; the natural order is that of the contract tests."""
    results = []
    for order in ("reverse", "shuffle"):
        torch.manual_seed(1)
        with watch(order, seed=3) as seen:
            results.append(run_all(case, rule))
    launched = {launch.kernel for launch in seen.launches}
    assert {"tile_stats_kernel", "residual_mass_kernel", "decide_kernel"} <= launched
    for first, second in zip(*results, strict=True):
        assert torch.equal(first.nan_to_num(7.0), second.nan_to_num(7.0))


@pytest.mark.parametrize(
    "context",
    [lambda: watch("reverse"), lambda: watch("shuffle"), lambda: emulated(order="reverse")],
    ids=["reverse", "shuffle", "emulated"],
)
def test_adjusting_logits_and_measuring_overlap(context: Any) -> None:
    step = Step()
    expected, got = step.logits.clone(), step.logits.clone()
    reference.adjust_logits_(expected, step.request, **step.adjustments)
    oracle = reference.overlap(step.logits, step.law, step.draft_logits, step.draft_law)
    with context():
        kernels.adjust_logits_(got, step.request, **step.adjustments)
        beta = kernels.overlap(step.logits, step.law, step.draft_logits, step.draft_law)
    torch.testing.assert_close(got, expected.float(), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(beta, oracle.float(), rtol=1e-5, atol=1e-6, equal_nan=True)


# --------------------------------------------------------------------------- compiled code


@pytest.mark.parametrize(
    ("case", "rule"),
    [
        (Case(3, 3, 257, torch.bfloat16, filters="none", seed=1), "block"),
        pytest.param(Case(3, 3, 1000, filters="none"), "token", marks=pytest.mark.slow),
        pytest.param(Case(3, 2, 257, torch.bfloat16, "odd"), "block", marks=pytest.mark.slow),
        pytest.param(
            Case(3, 2, 70, torch.float16, drafts="fixed"), "token", marks=pytest.mark.slow
        ),
        pytest.param(Case(2, 4, 9001, filters="none"), "block", marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_emulated_compiled_code_gives_the_reference(case: Case, rule: str) -> None:
    """Warps in random order: a barrier that the kernels lack would show too."""
    step = make_step(case)
    with emulated(schedule="warps", order="shuffle", seed=case.gamma) as launches:
        got = step.accept(kernels, rule, target_law=step.params)
    expected = step.accept(reference, rule, target_law=step.params)
    assert len(launches) == (4 if case.filters == "all" else 3)
    for name, one, other in zip(got._fields, got, expected, strict=True):
        assert torch.equal(one, other), name


@pytest.mark.parametrize("name", ["triton-ptx", "triton-reverse", "triton-shuffle"])
@pytest.mark.parametrize("part", ["laws", "coin", "noise", "match", "coins"])
def test_every_operation_in_every_execution(name: str, part: str) -> None:
    """Compiled code on the CPU, and programs in other orders, under watch; three rows each."""
    step, ops = Step(), layer(name)
    own = torch.tensor([0, 1, 2], dtype=torch.int32)
    logits = lay_out(step.logits[::4], "odd" if part == "noise" else "padded")
    if part == "laws":
        assert_laws(ops.row_law(logits, step.params, own), logits, step.params, own)
        return
    law = float32_law(reference.row_law(logits, step.params, own))
    if part == "coin":
        coins = torch.tensor([0.1, 0.5, LAST_COIN], dtype=torch.float64)
        assert_tokens(ops.sample(logits, law, coins=coins), logits, law, coins)
    elif part == "noise":
        noise = step.seeds, step.positions
        assert_noise_tokens(ops.sample(logits, law, noise=noise), logits, law, noise)
    elif part == "match":
        tokens = step.draft.tokens.clone()
        tokens[0] = step.tokens[0].roll(1)  # every draft of the first request matches
        draft = step.draft._replace(tokens=tokens)
        assert_equal(
            ops.match(draft, step.tokens, max_depth=3),
            reference.match(draft, step.tokens, max_depth=3),
        )
    else:
        seeds, positions = torch.tensor([3, -5, 2**62]), torch.tensor([0, 2**33, 7])
        found = [*ops.coins(seeds, positions, 5), ops.draft_coins(seeds, positions, 3, 2)]
        expected = [*reference.coins(seeds, positions, 5)]
        expected.append(reference.draft_coins(seeds, positions, 3, 2))
        assert all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))


# --------------------------------------------------------------------------- bytes


@pytest.mark.slow
@pytest.mark.parametrize("sharpness", [1.0, 4.0])
@pytest.mark.parametrize(
    ("top_k", "top_p", "share"), [(50, 1.0, 0.05), (64, 0.95, 0.05), (0, 0.9, 1.7)]
)
def test_cutoffs_read_little_again(
    sharpness: float, top_k: int, top_p: float, share: float
) -> None:
    rows, vocab = 2, 128256
    logits = (torch.randn(rows, vocab) * sharpness).bfloat16()
    params = SamplingParams.make([1.0] * rows, top_k=top_k, top_p=top_p)
    with watch() as seen:
        kernels.row_law(logits, params, torch.arange(rows, dtype=torch.int32))
    stats, cutoff = seen.launches
    bytes_of_rows = logits.numel() * 2
    assert cutoff.distinct["logits_ptr"] <= share * bytes_of_rows  # of the first argmax too
    assert stats.store_bytes <= 0.04 * bytes_of_rows


# --------------------------------------------------------------------------- addresses


@pytest.mark.parametrize("layout", ["packed", "padded", "odd"])
def test_a_rows_result_does_not_depend_on_its_place(layout: str) -> None:
    rows = lay_out(torch.randn(1, 257).expand(5, 257).bfloat16(), layout)
    params = SamplingParams.make([0.7], top_k=40, top_p=0.9)
    with interpreted():
        law = kernels.row_law(rows, params, torch.zeros(5, dtype=torch.int32))
    for field in law:
        assert (field == field[0]).all()


def test_offsets_pass_two_to_the_thirty_one() -> None:
    """Rows whose distance is 2^30 elements, in memory that exists only where it is touched."""
    stride, rows, vocab = 2**30 + 64, 4, 257
    memory = mmap.mmap(-1, (rows * stride) * 2, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    flat = torch.frombuffer(memory, dtype=torch.bfloat16)
    target = flat.as_strided((rows, vocab), (stride, 1))
    target.copy_(torch.randn(rows, vocab))
    near = target.clone()
    params = SamplingParams.make([0.8, 0.0])
    place = torch.arange(4, dtype=torch.int32).view(2, 2)
    tokens = torch.tensor([[0, 5], [0, 9]])
    coins = torch.full((2, 2), 0.5, dtype=torch.float64)
    results = []
    for logits in (target, near):
        law = None
        with watch(bounds=False):  # the extent has too many gaps for a map of them
            law = kernels.row_law(logits, params, torch.tensor([0, 0, 1, 1], dtype=torch.int32))
            draft = Draft(
                tokens, torch.tensor([2, 2], dtype=torch.int32), None, logits, law, place.roll(1, 1)
            )
            results.append(
                kernels.accept(draft, logits, params, place, coins, coins[:, 0], max_depth=1)
            )
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)


def test_the_overflow_check_sees_such_offsets() -> None:
    from tests import kernels_for_tests as planted

    x = torch.zeros(1, 8).expand(3, 8)
    with watch(), pytest.raises(IntegerOverflowError):
        planted.row_sum_int32[(3,)](torch.empty(3), x, 2**30 + 64, 0, BLOCK=8)
