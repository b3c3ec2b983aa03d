"""The watcher: planted faults are caught with argument and line, and sound kernels pass."""

from __future__ import annotations

import inspect
import re
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from spec_kernels.testing import OutOfBoundsError, RaceError, watch
from spec_kernels.testing import _intervals as intervals
from tests import kernels_for_tests as k

ORDERS = ["natural", "reverse", "shuffle"]


def line_of(kernel: Any, text: str) -> str:
    """`file.py:line` of the line of a kernel that contains a text."""
    lines, first = inspect.getsourcelines(kernel.fn)
    return f"kernels_for_tests.py:{first + next(i for i, x in enumerate(lines) if text in x)}"


@pytest.mark.parametrize("order", ORDERS)
def test_sound_kernels_raise_nothing(order: Any) -> None:
    with watch(order, seed=1) as seen:
        x, out = torch.rand(100), torch.empty(100)
        k.doubled[(2,)](out, x, 100, SLACK_LOAD=0, SLACK=0, BLOCK=64)
        assert torch.equal(out, x * 2)
        wide = torch.rand(3, 80)[:, 5:70]  # rows with gaps between them
        sums = torch.empty(3)
        k.row_sum[(3,)](sums, wide, 80, 65, BLOCK=64)
        torch.testing.assert_close(sums, wide.sum(1))
        total = torch.zeros(1)
        k.count[(4,)](total, torch.ones(32), BLOCK=8)
        assert total.item() == 32
        both = torch.empty(16)
        k.pick[(2,)](both, x[:8], x[50:58], BLOCK=8)
        assert torch.equal(both, torch.cat([x[:8], x[50:58]]))
    assert [launch.kernel for launch in seen.launches] == ["doubled", "row_sum", "count", "pick"]


def test_program_order_is_as_asked() -> None:
    """A kernel with a race gives another result in another order, when nobody stops it."""
    results = {}
    for order in ORDERS:
        out = torch.zeros(10, dtype=torch.int32)
        with watch(order, seed=3, races=False) as seen:
            k.overlapping_stores[(3,)](out, WIDTH=4)
        results[order] = out.tolist()
        assert seen.launches[0].grid == (3, 1, 1)
    assert results["natural"] == [0, 1, 2, 0, 1, 2, 0, 1, 2, 3]
    assert results["reverse"] == [0, 1, 2, 3, 1, 2, 3, 1, 2, 3]
    with pytest.raises(ValueError, match="order must be one of"), watch("random"):  # type: ignore[arg-type]
        pass


@pytest.mark.parametrize(
    ("slack", "kind", "name", "text"),
    [((1, 0), "load", "x_ptr", "tl.load"), ((0, 1), "store", "out_ptr", "tl.store")],
)
def test_mask_bound_off_by_one(slack: tuple[int, int], kind: str, name: str, text: str) -> None:
    # both tensors are slices of larger memory: nothing crashes, and the result looks right
    x, out = torch.zeros(200)[:100], torch.zeros(200)[:100]
    message = rf"doubled, {line_of(k.doubled, text)}, program \(1, 0, 0\): {kind} of {name} out of"
    message += r" bounds in 1 lanes, first at element 100 of 100"
    with watch() as seen, pytest.raises(OutOfBoundsError, match=message):
        k.doubled[(2,)](out, x, 100, SLACK_LOAD=slack[0], SLACK=slack[1], BLOCK=64)
    with watch(bounds=False) as seen:
        k.doubled[(2,)](out, x, 100, SLACK_LOAD=slack[0], SLACK=slack[1], BLOCK=64)
    assert seen.launches


def test_access_into_another_argument_is_out_of_bounds() -> None:
    """The neighbour in memory is an argument too, but not the one that the pointer came from."""
    memory = torch.zeros(128)
    with watch(), pytest.raises(OutOfBoundsError, match="load of x_ptr out of bounds in 8 lanes"):
        k.doubled[(1,)](memory[100:], memory[:100], 28, SLACK_LOAD=80, SLACK=0, BLOCK=128)


def test_gap_of_a_strided_view() -> None:
    out = torch.zeros(8, 2)[:, 0]
    with watch(), pytest.raises(OutOfBoundsError, match=r"element 1 of 15 \(a gap of the view\)"):
        k.copy_flat[(1,)](out, torch.zeros(8), BLOCK=8)


def test_store_load_race_in_place() -> None:
    x = torch.arange(12.0).reshape(3, 4)
    line = line_of(k.shift_rows, "tl.store")
    message = rf"shift_rows: store/load race on x_ptr, element 4: program .* at {line} and program"
    with watch(), pytest.raises(RaceError, match=message):
        k.shift_rows[(2,)](x, ROWS=3, WIDTH=4)


def test_store_store_race() -> None:
    line = line_of(k.overlapping_stores, "tl.store")
    message = rf"store/store race on out_ptr, element 3: program \(\d, 0, 0\) at {line} and"
    with watch("shuffle"), pytest.raises(RaceError, match=message):
        k.overlapping_stores[(3,)](torch.zeros(10, dtype=torch.int32), WIDTH=4)


def test_atomic_load_race() -> None:
    with watch(), pytest.raises(RaceError, match="atomic/load race on out_ptr, element 0"):
        k.count_and_read[(2,)](torch.zeros(1), torch.zeros(2), torch.ones(16), BLOCK=8)


def test_pointer_tables_reach_named_tensors_only() -> None:
    rows = [torch.rand(8), torch.rand(8)]
    table = torch.tensor([r.data_ptr() for r in rows])
    out = torch.empty(16)
    with watch(reachable=rows):
        k.through_table[(2,)](out, table, BLOCK=8)
    assert torch.equal(out, torch.cat(rows))
    with watch(reachable=rows[:1]), pytest.raises(OutOfBoundsError):
        k.through_table[(2,)](out, table, BLOCK=8)


def test_bytes_and_mask_use_per_line() -> None:
    x, out = torch.rand(100).bfloat16(), torch.empty(100)
    with watch() as seen:
        k.doubled[(2,)](out, x, 100, SLACK_LOAD=0, SLACK=0, BLOCK=64)
    (launch,) = seen.launches
    assert (launch.load_bytes, launch.store_bytes) == (200, 400)
    use = launch.lines[line_of(k.doubled, "tl.load"), "load", "x_ptr"]
    assert (use.bytes, use.active, use.lanes) == (200, 100, 128)
    assert re.search(r"tl|load +x_ptr +200 B +78.1 %", seen.table())
    with watch() as seen:
        k.pick[(2,)](torch.empty(16), x.float()[:8], x.float()[:8], BLOCK=8)
    assert seen.launches[0].bytes("load", "x_ptr or y_ptr") == 64


def test_distinct_bytes_count_once() -> None:
    x = torch.rand(1, 64).expand(5, 64)
    with watch() as seen:
        k.row_sum[(5,)](torch.empty(5), x, 0, 64, BLOCK=64)
    assert seen.launches[0].load_bytes == 5 * 256
    assert seen.launches[0].distinct_load_bytes == 256


Records = st.lists(
    st.tuples(st.integers(0, 3), st.sets(st.integers(0, 40), min_size=1, max_size=8)), max_size=6
)


@given(Records, Records, st.sampled_from([1, 2, 4]))
def test_meeting_is_what_counting_bytes_says(
    writes: list[tuple[int, set[int]]], others: list[tuple[int, set[int]]], width: int
) -> None:
    def touch(records: list[tuple[int, set[int]]]) -> Any:
        parts = []
        for program, elements in records:
            addresses = np.array(sorted(elements), np.uint64) * np.uint64(width)
            parts.append((*intervals.runs(addresses, width), program, program))
        return intervals.join(parts)

    found = intervals.first_meeting(touch(writes), touch(others))
    clashes = {e for p, es in writes for q, fs in others if p != q for e in es & fs}
    assert (found is None) == (not clashes)
    if found is not None:
        assert found.address // width in clashes
        p, q = found.programs
        assert p != q
        assert any(a == p and found.address // width in es for a, es in writes)
        assert any(b == q and found.address // width in fs for b, fs in others)
    loaded = touch(others)
    if loaded is not None:
        distinct = {e for _, es in others for e in es}
        assert intervals.total(loaded.low, loaded.high) == width * len(distinct)
