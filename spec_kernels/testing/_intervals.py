"""Byte intervals: what a launch touched, and where two programs met."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ._formats import Array


class Touch(NamedTuple):
    """Byte intervals `[low, high)` with the program and the line (an index) that touched each."""

    low: Array
    high: Array
    program: Array
    line: Array


def runs(addresses: Array, nbytes: int) -> tuple[Array, Array]:
    """Merge accesses of `nbytes` at these addresses into intervals `(lows, highs)`.

    Example:
        >>> runs(np.array([8, 12, 0, 32], np.uint64), 4)
        (array([ 0,  8, 32], dtype=uint64), array([ 4, 16, 36], dtype=uint64))
    """
    step = np.uint64(nbytes)
    if addresses.size > 1 and not (addresses[1:] - addresses[:-1] == step).all():
        addresses = np.unique(addresses)
    gap = np.nonzero(addresses[1:] - addresses[:-1] > step)[0]
    low = addresses[np.concatenate([[0], gap + 1])]
    high = addresses[np.concatenate([gap, [-1]])] + step
    return low, high


def total(low: Array, high: Array) -> int:
    """Return the number of distinct bytes in a union of intervals."""
    if low.size == 0:
        return 0
    order = np.argsort(low, kind="stable")
    low, reach = low[order], np.maximum.accumulate(high[order])
    start = np.maximum(low[1:], reach[:-1])
    fresh = np.where(reach[1:] > start, reach[1:] - start, 0)
    return int(reach[0] - low[0]) + int(fresh.sum())


def join(parts: list[tuple[Array, Array, int, int]]) -> Touch | None:
    """Concatenate `(low, high, program, line)` records; None if there are none."""
    if not parts:
        return None
    sizes = [p[0].size for p in parts]
    return Touch(
        np.concatenate([p[0] for p in parts]),
        np.concatenate([p[1] for p in parts]),
        np.repeat(np.array([p[2] for p in parts]), sizes),
        np.repeat(np.array([p[3] for p in parts]), sizes),
    )


class Meeting(NamedTuple):
    """A byte that two programs touched."""

    address: int
    programs: tuple[int, int]
    lines: tuple[int, int]


def _spread(edges: Array, touch: Touch) -> tuple[Array, Array]:
    """Return (record, segment) pairs: the elementary segments that each interval covers."""
    first = np.searchsorted(edges, touch.low, side="right") - 1
    last = np.searchsorted(edges, touch.high, side="left")
    first = np.maximum(first, 0)
    count = np.maximum(last - first, 0)
    record = np.repeat(np.arange(count.size), count)
    offset = np.arange(record.size) - np.repeat(np.cumsum(count) - count, count)
    return record, first[record] + offset


def first_meeting(writes: Touch | None, others: Touch | None) -> Meeting | None:
    """Find a byte written by one program and touched (as `others`) by a different one."""
    if writes is None or others is None:
        return None
    edges = np.unique(np.concatenate([writes.low, writes.high]))
    record, segment = _spread(edges, writes)
    order = np.lexsort((writes.program[record], segment))
    record, segment = record[order], segment[order]
    covered, begin = np.unique(segment, return_index=True)
    final = np.append(begin[1:], segment.size) - 1
    lowest, highest = record[begin], record[final]  # records of the smallest, largest program

    reader, where = _spread(edges, others)
    place = np.minimum(np.searchsorted(covered, where), covered.size - 1)
    inside = covered[place] == where
    mine = others.program[reader]
    small, large = writes.program[lowest[place]], writes.program[highest[place]]
    hit = np.nonzero(inside & ((small != mine) | (large != mine)))[0]
    if hit.size == 0:
        return None
    k = int(hit[0])
    writer = int(lowest[place[k]] if small[k] != mine[k] else highest[place[k]])
    other = int(reader[k])
    address = max(int(edges[where[k]]), int(others.low[other]))
    return Meeting(
        address,
        (int(writes.program[writer]), int(others.program[other])),
        (int(writes.line[writer]), int(others.line[other])),
    )
