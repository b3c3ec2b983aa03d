"""Every hot call of the library: compiled for every target, in its budget, near its floor."""

from __future__ import annotations

from typing import Any

import pytest

from spec_kernels.testing import static_report as static
from spec_kernels.testing.hot import COLUMNS, HotCall
from spec_kernels.testing.hot._call import floor_of
from tests import budgets

CALLS = [(column, call) for column, calls in COLUMNS.items() for call in calls]
FIRST = [str(call) for call in static.first_calls()]


def compilations() -> list[Any]:
    """Every call on every target; what the default suite leaves out is slow."""
    return [
        pytest.param(
            column, call, target, marks=[] if is_fast else pytest.mark.slow, id=f"{call}-{target}"
        )
        for column, call, target, is_fast in budgets.PAIRS
    ]


@pytest.mark.parametrize(("column", "call", "target"), compilations())
def test_kernels_compile_and_stay_in_their_budgets(column: str, call: HotCall, target: str) -> None:
    rows = static.rows(target, [call])
    assert {row.launches for row in rows} == {call.launches}
    assert set(call.paths) <= {row.kernel for row in rows}
    over = [text for row in rows for text in budgets.complaints(column, row)]
    assert not over, "\n".join(over)


def test_budgets_hold_no_rows_of_calls_that_are_gone() -> None:
    for column, calls in COLUMNS.items():
        recorded = {(x["operation"], x["configuration"]) for x in budgets.recorded(column)}
        assert recorded == {(call.operation, call.configuration) for call in calls}


def row_of(**changes: Any) -> static.Row:
    fields: dict[str, Any] = {
        "operation": "accept", "configuration": "bf16", "kernel": "k", "path": "draw",
        "target": "sm_90", "launches": 3, "registers": 96, "spill_bytes": 8, "shared_bytes": 64,
        "load_bits": 16, "instructions_per_element": 21.5, "mma": "", "bound": {},
    }  # fmt: skip
    return static.Row(**fields | changes)


def test_leaving_a_budget_is_named() -> None:
    limit = {"registers": 88, "spill_bytes": 0, "shared_bytes": 64, "load_bits": 128}
    limit |= {"launches": 3, "instructions_per_element": 16.0, "mma": "HMMA"}
    assert static.over_budget(row_of(), limit) == [
        "accept bf16 k[draw] sm_90: registers 96, budget 88",
        "accept bf16 k[draw] sm_90: spill_bytes 8, budget 0",
        "accept bf16 k[draw] sm_90: load_bits 16, budget 128",
        "accept bf16 k[draw] sm_90: instructions_per_element 21.5, budget 16.0",
        "accept bf16 k[draw] sm_90: mma , budget HMMA",
    ]
    assert static.over_budget(row_of(), {}) == []


def test_the_last_limit_that_matches_counts() -> None:
    known = [
        {"target": "sm_*", "spill_bytes": 0, "load_bits": 128},
        {"kernel": "k", "spill_bytes": 32},
        {"kernel": "other", "load_bits": 64},
        {"configuration": "*-odd", "load_bits": 16},
    ]
    assert budgets.limit_of(row_of(), known) == {"spill_bytes": 32, "load_bits": 128}
    assert budgets.limit_of(row_of(configuration="bf16-odd"), known)["load_bits"] == 16
    assert budgets.limit_of(row_of(target="gfx942"), known) == {"spill_bytes": 32}


def test_a_kernel_without_a_budget_is_named() -> None:
    (text,) = budgets.complaints("accept", row_of())
    assert text.startswith("accept bf16 k[draw] sm_90: no budget")


def test_a_record_reads_back_and_changes_are_named() -> None:
    known = budgets._parse(budgets.to_toml(row_of()))
    assert budgets.changes(row_of(), known) == []
    text = "accept bf16 k[draw] sm_90: load_bits 16 -> 128"
    assert budgets.changes(row_of(load_bits=128), known) == [text]
    assert budgets.changes(row_of(path=""), known) == ["accept bf16 k sm_90: new"]


# --------------------------------------------------------------------------- traffic


def traffic_cases() -> list[Any]:
    """The first call of every operation, the rest slow."""
    return [
        pytest.param(
            column, call, marks=[] if str(call) in FIRST else pytest.mark.slow, id=str(call)
        )
        for column, call in CALLS
        if budgets.traffic_of(column, call)
    ]


@pytest.mark.parametrize(("column", "call"), traffic_cases())
def test_bytes_stay_near_the_floor(column: str, call: HotCall) -> None:
    launches = static.traffic(call)
    floor = sum(x.floor or 0 for x in launches)
    assert floor > 0, "no kernel of this call states a floor"
    sums = {"moved": sum(x.moved for x in launches), "stored": sum(x.stored for x in launches)}
    for name, bar in budgets.traffic_of(column, call).items():
        assert sums[name] <= bar * floor, f"{name} {sums[name]} bytes, floor {floor}"


def test_floors_are_read_from_docstrings() -> None:
    assert (
        floor_of("Sum.\n\n    Floor: `2 * rows *\n    (vocab + 1)` bytes", {"rows": 3, "vocab": 4})
        == 30
    )
    assert floor_of("Floor: both tiles once.", {}) is None
    assert floor_of(None, {}) is None
    for wrong in ("rows * other", "rows ** 2", "rows()", "rows *"):
        with pytest.raises(ValueError, match="floor"):
            floor_of(f"Floor: `{wrong}` bytes", {"rows": 3})
