"""The kernels of trees through the harness: rounds, order, races, compiled code, rows read."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch

from spec_kernels import kernels
from spec_kernels.kernels import _tree_accept
from spec_kernels.kernels._tree_accept import RoundsConfig, select_rounds
from spec_kernels.testing import emulated, interpreted, watch
from spec_kernels.types import Acceptance
from tests.cases import LAST_COIN, Step, assert_equal
from tests.tree_cases import TreeCase, assert_tree_accepts, make_tree_step

both_rules = pytest.mark.parametrize("rule", ["token", "block"])

SMALL = TreeCase(3, 13, 7, "any", seed=1)
MIXED = TreeCase(3, 13, 40, "sampled first", torch.bfloat16, "odd", seed=2)
DEEP = TreeCase(2, 30, 40, "sampled", seed=3)


def slow(*values: Any) -> Any:
    """Values of a parameter that the default suite leaves out."""
    return pytest.param(*values, marks=pytest.mark.slow, id="-".join(map(str, values)))


def accept_in(step: Step, rule: str, rounds: int, width: int = 1) -> Acceptance:
    """Verify a step with a number of rounds, of `width` tiles a program."""
    config = RoundsConfig(rounds, width)
    with mock.patch.object(_tree_accept, "select_rounds", return_value=config):
        return step.accept(kernels, rule, target_law=step.params)


@both_rules
@pytest.mark.parametrize("case", [SMALL, slow(MIXED), slow(DEEP)], ids=str)
def test_the_number_of_rounds_does_not_show(rule: str, case: TreeCase) -> None:
    step = make_tree_step(case)
    with interpreted():
        results = [accept_in(step, rule, rounds) for rounds in (0, 1, 4)]
    assert_tree_accepts(results[0], step, rule)
    for result in results[1:]:
        assert_equal(result, results[0])


@both_rules
@pytest.mark.parametrize("rounds", [slow(0), 2])
def test_no_tree_kernel_leaves_its_arguments_races_or_depends_on_the_order(
    rule: str, rounds: int
) -> None:
    step = make_tree_step(SMALL)
    results = []
    for order in ("reverse", "shuffle"):
        with watch(order, seed=3):
            results.append(accept_in(step, rule, rounds))
    assert_equal(*results)


@both_rules
def test_several_tiles_a_row(rule: str) -> None:
    """The sums of tiles do not depend on where they are made, nor on how many a program makes."""
    step = make_tree_step(TreeCase(1, 6, 2500, "any", seed=2))
    with watch("shuffle", seed=1):
        spread = accept_in(step, rule, 2)
    with interpreted():
        alone = accept_in(step, rule, 0)
        wide = accept_in(step, rule, 2, width=2)
    assert_tree_accepts(alone, step, rule)
    assert_equal(spread, alone)
    assert_equal(wide, alone)


@both_rules
@pytest.mark.slow
@pytest.mark.parametrize("case", [TreeCase(1, 9, 32000, "any", torch.bfloat16, seed=1)], ids=str)
def test_rounds_of_a_large_vocabulary(rule: str, case: TreeCase) -> None:
    step = make_tree_step(case)
    with interpreted():
        results = [accept_in(step, rule, rounds) for rounds in (0, 1, 4)]
    for result in results[1:]:
        assert_equal(result, results[0])


# --------------------------------------------------------------------------- launches and bytes


@pytest.mark.parametrize(("rule", "rounds", "launches"), [("token", 2, 7), ("block", 3, 11)])
def test_launches_do_not_depend_on_the_values(rule: str, rounds: int, launches: int) -> None:
    for seed in (1, 2):
        step = make_tree_step(SMALL._replace(batch=1, nodes=5, seed=seed))
        with watch(races=False) as seen:
            accept_in(step, rule, rounds)
        assert len(seen.launches) == launches


@both_rules
@pytest.mark.parametrize(
    "case",
    [
        TreeCase(1, 9, 32000, "sampled", torch.bfloat16, seed=2),
        slow(TreeCase(1, 9, 32000, "sampled first", torch.bfloat16, seed=2)),
        slow(TreeCase(1, 9, 32000, "fixed", torch.bfloat16, seed=2)),
    ],
    ids=str,
)
def test_rows_read(rule: str, case: TreeCase) -> None:
    """Every target row once, both rows in each pass, the draft rows beside fixed children, and
    1.2 rows for the final token. With high coins the walk ends behind passes, and reuses them."""
    step = make_tree_step(case)
    step = step._replace(accept_coins=torch.full_like(step.accept_coins, LAST_COIN))
    plans, passes = [], []
    make_plan, make_work = _tree_accept.make_plan, _tree_accept.make_work

    def keep_plan(*arguments: Any) -> Any:
        plans.append(make_plan(*arguments))
        return plans[-1]

    def keep_work(*arguments: Any) -> Any:
        passes.append(make_work(*arguments))
        passes[-1].mass.fill_(torch.nan)
        return passes[-1]

    with (
        mock.patch.object(_tree_accept, "make_plan", keep_plan),
        mock.patch.object(_tree_accept, "make_work", keep_work),
        watch(races=False) as seen,
    ):
        result = accept_in(step, rule, 2)
    assert_tree_accepts(result, step, rule)
    count = int(plans[0].count[0])
    mixed = int(plans[0].is_mixed[0, :count].sum())
    made = int((~passes[0].mass[0, :, 0].isnan()).sum())
    moved = sum(
        use.bytes
        for launch in seen.launches
        for (_, kind, name), use in launch.lines.items()
        if kind == "load" and "logits" in name
    )
    rows = moved / (case.vocab * case.dtype.itemsize)
    assert rows <= count + mixed + 2 * made + 1.2


# --------------------------------------------------------------------------- compiled code


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "rule", "rounds"),
    [
        (TreeCase(1, 7, 40, "any", seed=1), "block", 1),
        (TreeCase(1, 7, 40, "sampled", torch.bfloat16, "odd", seed=3), "token", 1),
        (TreeCase(1, 7, 40, "sampled first", filters="all", seed=3), "block", 0),
    ],
    ids=str,
)
def test_emulated_compiled_trees_give_what_the_interpreter_gives(
    case: TreeCase, rule: str, rounds: int
) -> None:
    step = make_tree_step(case)
    with emulated(schedule="warps", order="shuffle", seed=case.seed):
        got = accept_in(step, rule, rounds)
    with interpreted():
        assert_equal(got, accept_in(step, rule, rounds))
    assert_tree_accepts(got, step, rule)


def test_rounds_are_spread_only_where_there_is_something_to_spread() -> None:
    assert select_rounds("block", 1, 64, 1).rounds == 0
    assert select_rounds("token", 132, 64, 16).rounds == 0
    assert select_rounds("block", 132, 64, 16).rounds == 4
    assert select_rounds("block", 1, 64, 16).step == 1
