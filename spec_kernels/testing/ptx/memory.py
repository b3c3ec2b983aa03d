"""Loads, stores, atomics, asynchronous copies and `ldmatrix`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from .._formats import Array
from .operations import operation
from .program import Instruction, UnsupportedError
from .values import UNSIGNED, Lanes, Step, address, reader, writer

if TYPE_CHECKING:
    from .machine import Machine


def _space(i: Instruction) -> str:
    found = next((x for x in i.op[1:] if x in ("global", "shared", "param", "local")), None)
    if found in (None, "local"):
        raise UnsupportedError(i.text)
    return str(found)


@operation("ld")
def _load(i: Instruction) -> Step:
    space, (kind, bits) = _space(i), i.type
    if space == "param":
        return _load_parameter(i, kind)
    writes, place, width = [writer(x) for x in i.vector(0)], address(i.register(1)), bits // 8

    def run(machine: Machine, lanes: Lanes) -> None:
        values = machine.load(space, place(machine, lanes), width, len(writes), i.text)
        for n, write in enumerate(writes):
            column = values[:, n]
            if kind == "s":
                column = column.view(f"i{width}")
            write(machine, lanes, column)

    return run


def _load_parameter(i: Instruction, kind: str) -> Step:
    name, write = i.register(1).strip("[]"), writer(i.register(0))

    def run(machine: Machine, lanes: Lanes) -> None:
        value = machine.parameters.get(name)
        if value is None:
            raise UnsupportedError(i.text)
        array = np.array([value])
        if kind == "s":  # sign-extended into a wider register
            array = array.view(f"i{array.dtype.itemsize}")
        write(machine, lanes, array)

    return run


@operation("st")
def _store(i: Instruction) -> Step:
    space, bits = _space(i), i.type[1]
    place, reads = address(i.register(0)), [reader(x, "u", bits) for x in i.vector(1)]

    def run(machine: Machine, lanes: Lanes) -> None:
        values = np.empty((machine.count(lanes), len(reads)), UNSIGNED[bits])
        for n, read in enumerate(reads):
            values[:, n] = read(machine, lanes)
        machine.store(space, place(machine, lanes), values, i.text)

    return run


_ATOMIC: Final[dict[str, Callable[[Any, Any], Any]]] = {
    "add": lambda old, new: old + new,
    "min": min,
    "max": max,
    "and": lambda old, new: old & new,
    "or": lambda old, new: old | new,
    "xor": lambda old, new: old ^ new,
    "exch": lambda old, new: new,
}


@operation("atom", "red")
def _atomic(i: Instruction) -> Step:
    kind, bits = i.type
    space, reduces = _space(i), i.op[0] == "red"
    combine = next((_ATOMIC[x] for x in i.op if x in _ATOMIC), None)
    if combine is None or "noftz" in i.op:
        raise UnsupportedError(i.text)
    write = writer("_" if reduces else i.register(0))
    place = address(i.register(0 if reduces else 1))
    read = reader(i.register(1 if reduces else 2), kind, bits)
    unsigned = UNSIGNED[bits]

    def run(machine: Machine, lanes: Lanes) -> None:
        where, new = place(machine, lanes), read(machine, lanes)
        new = np.broadcast_to(new, where.shape)
        old = np.empty(where.shape, new.dtype)
        for n in range(where.size):
            one = where[n : n + 1]
            old[n] = machine.load(space, one, bits // 8, 1, i.text).view(new.dtype)[0, 0]
            value = np.array([[combine(old[n], new[n])]], new.dtype)
            machine.store(space, one, value.view(unsigned), i.text)
        write(machine, lanes, old)

    return run


# --------------------------------------------------------------------------- asynchronous copies


@operation("cp")
def _copy(i: Instruction) -> Step:
    if "async" not in i.op or "bulk" in i.op:
        raise UnsupportedError(i.text)
    if "commit_group" in i.op:
        return _commit
    if "wait_group" in i.op or "wait_all" in i.op:
        return partial(_wait, keep=int(i.register(0), 0) if i.operands else 0)
    target, source = address(i.register(0)), address(i.register(1))
    size = int(i.register(2), 0)
    given = reader(i.register(3), "u", 32) if len(i.operands) > 3 else None

    def run(machine: Machine, lanes: Lanes) -> None:
        to, origin = target(machine, lanes), source(machine, lanes)
        wanted = np.full(to.shape, size) if given is None else given(machine, lanes)
        wanted = np.broadcast_to(wanted, to.shape)
        if not np.isin(wanted, (0, size)).all():
            raise UnsupportedError(i.text)
        warp = machine.numbers(lanes) // 32
        for w in np.unique(warp):
            mine = warp == w

            def move(
                m: Machine, _: Lanes, to: Array = to[mine], origin: Array = origin[mine],
                filled: Array = wanted[mine] == size,
            ) -> None:  # fmt: skip
                data = np.zeros((to.size, size // 4), np.uint32)
                if filled.any():
                    data[filled] = m.load("global", origin[filled], 4, size // 4, i.text)
                m.store("shared", to, data, i.text)

            if machine.late_copies:
                machine.copies.setdefault(int(w), [[]])[-1].append(move)
            else:
                move(machine, lanes)

    return run


def _commit(machine: Machine, lanes: Lanes) -> None:
    for w in np.unique(machine.numbers(lanes) // 32):
        machine.copies.setdefault(int(w), [[]]).append([])


def _wait(machine: Machine, lanes: Lanes, keep: int) -> None:
    for w in np.unique(machine.numbers(lanes) // 32):
        groups = machine.copies.setdefault(int(w), [[]])
        done = max(0, len(groups) - 1 - keep)
        for move in (move for group in groups[:done] for move in group):
            move(machine, lanes)
        machine.copies[int(w)] = groups[done:]


@operation("ldmatrix")
def _load_matrix(i: Instruction) -> Step:
    writes, place = [writer(x) for x in i.vector(0)], address(i.register(1))
    transposed = "trans" in i.op
    if "m8n8" not in i.op:
        raise UnsupportedError(i.text)

    def run(machine: Machine, lanes: Lanes) -> None:
        machine.whole_warps(lanes, i.text)
        threads = machine.numbers(lanes).reshape(-1, 32)
        rows = place(machine, lanes).reshape(-1, 32)
        for warp, addresses in zip(threads, rows, strict=True):
            data = machine.load("shared", addresses[: 8 * len(writes)], 2, 8, i.text)
            for n, write in enumerate(writes):
                matrix = data[8 * n : 8 * n + 8].astype(np.uint32)
                if transposed:
                    matrix = matrix.T
                pairs = matrix[:, 0::2] | matrix[:, 1::2] << np.uint32(16)
                write(machine, warp, np.ascontiguousarray(pairs).reshape(32))

    return run
