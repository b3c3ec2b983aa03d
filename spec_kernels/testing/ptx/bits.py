"""Bit fields, permutations and conversions between number formats."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, cast

import numpy as np

from .._formats import Array, bfloat16_to_float32, float32_to_bfloat16
from .operations import operation
from .program import Instruction, UnsupportedError
from .values import FLOAT, SIGNED, UNSIGNED, Lanes, Step, numpy_type, reader, writer

if TYPE_CHECKING:
    from .machine import Machine


@operation("shl", "shr")
def _shift(i: Instruction) -> Step:
    kind, bits = i.type
    left = i.op[0] == "shl"
    value, amount = reader(i.register(1), kind, bits), reader(i.register(2), "u", 32)
    write, last = writer(i.register(0)), np.uint32(bits - 1)

    def run(machine: Machine, lanes: Lanes) -> None:
        a, n = value(machine, lanes), amount(machine, lanes)
        by = np.minimum(n, last).astype(a.dtype)
        shifted = a << by if left else a >> by
        if kind != "s" or left:
            shifted = np.where(n <= last, shifted, 0).astype(a.dtype)
        write(machine, lanes, shifted)

    return run


@operation("shf")
def _funnel(i: Instruction) -> Step:
    low, high, amount = (reader(i.register(n), "u", 32) for n in (1, 2, 3))
    write, left, wrap = writer(i.register(0)), "l" in i.op, "wrap" in i.op

    def run(machine: Machine, lanes: Lanes) -> None:
        n = amount(machine, lanes)
        n = n & np.uint32(31) if wrap else np.minimum(n, np.uint32(32))
        pair = high(machine, lanes).astype(np.uint64) << np.uint64(32) | low(machine, lanes)
        by = n.astype(np.uint64)
        out = (pair << by) >> np.uint64(32) if left else pair >> by
        write(machine, lanes, out.astype(np.uint32))

    return run


@operation("bfe")
def _extract(i: Instruction) -> Step:
    kind, bits = i.type
    position, length = int(i.register(2)), int(i.register(3))

    def extract(a: Array) -> Array:
        unsigned = UNSIGNED[bits]
        field = (a.view(unsigned) >> unsigned(position)) & unsigned((1 << length) - 1)
        if kind == "s":
            up = SIGNED[bits](bits - length)
            return cast(Array, (field.view(SIGNED[bits]) << up) >> up)
        return cast(Array, field)

    read, write = reader(i.register(1), kind, bits), writer(i.register(0))
    return lambda machine, lanes: write(machine, lanes, extract(read(machine, lanes)))


@operation("bfi")
def _insert(i: Instruction) -> Step:
    bits = i.type[1]
    position, length = int(i.register(3), 0), int(i.register(4), 0)
    unsigned = UNSIGNED[bits]
    field = unsigned(((1 << length) - 1) << position & (2**bits - 1))
    source, base = (reader(i.register(n), "u", bits) for n in (1, 2))
    write = writer(i.register(0))

    def run(machine: Machine, lanes: Lanes) -> None:
        moved = source(machine, lanes) << unsigned(position)
        write(machine, lanes, (base(machine, lanes) & ~field) | (moved & field))

    return run


@operation("lop3")
def _lop3(i: Instruction) -> Step:
    reads = [reader(i.register(n), "u", 32) for n in (1, 2, 3)]
    table, write = int(i.register(4), 0), writer(i.register(0))

    def run(machine: Machine, lanes: Lanes) -> None:
        operands = [read(machine, lanes) for read in reads]
        out = np.zeros(machine.count(lanes), np.uint32)
        for row in range(8):
            if table >> row & 1:
                term = np.full(out.shape, 0xFFFFFFFF, np.uint32)
                for n, x in enumerate(operands):
                    term &= x if row >> (2 - n) & 1 else ~x
                out |= term
        write(machine, lanes, out)

    return run


@operation("popc", "clz", "brev")
def _count_bits(i: Instruction) -> Step:
    bits = i.type[1]
    read, write = reader(i.register(1), "u", bits), writer(i.register(0))
    count: Callable[[str], int] = {
        "popc": lambda text: text.count("1"),
        "clz": lambda text: len(text) - len(text.lstrip("0")),
        "brev": lambda text: int(text[::-1], 2),
    }[i.op[0]]

    def run(machine: Machine, lanes: Lanes) -> None:
        values = read(machine, lanes)
        write(machine, lanes, np.array([count(f"{int(v):0{bits}b}") for v in values], np.uint32))

    return run


@operation("prmt")
def _permute(i: Instruction) -> Step:
    reads = [reader(i.register(n), "u", 32) for n in (1, 2, 3)]
    write = writer(i.register(0))
    if len(i.op) > 2:
        raise UnsupportedError(i.text)

    def run(machine: Machine, lanes: Lanes) -> None:
        low, high, selector = (read(machine, lanes).astype(np.uint64) for read in reads)
        pair = high << np.uint64(32) | low
        out = np.zeros(machine.count(lanes), np.uint64)
        for place in range(4):
            pick = selector >> np.uint64(4 * place) & np.uint64(15)
            byte = pair >> (pick & np.uint64(7)) * np.uint64(8) & np.uint64(255)
            sign = np.where(byte & np.uint64(128), np.uint64(255), np.uint64(0))
            out |= np.where(pick & np.uint64(8), sign, byte) << np.uint64(8 * place)
        write(machine, lanes, out.astype(np.uint32))

    return run


# --------------------------------------------------------------------------- conversions

_ROUNDING: Final[dict[str, Callable[[Array], Array]]] = {
    "rzi": np.trunc, "rni": np.rint, "rmi": np.floor, "rpi": np.ceil,
}  # fmt: skip


@operation("cvt")
def _convert(i: Instruction) -> Step:
    (to, to_bits), *rest = i.types
    write = writer(i.register(0))
    if to == "tf32":  # nearest, ties away from zero
        read = reader(i.register(1), "u", 32)
        mask = np.uint32(0xFFFFE000)
        return lambda m, lanes: write(m, lanes, (read(m, lanes) + np.uint32(0x1000)) & mask)
    if to in ("bf16x2", "f16x2"):
        return _convert_pair(i, to)
    ((source, bits),) = rest
    read = reader(i.register(1), source, bits)
    if source == "bf16":
        return lambda m, lanes: write(m, lanes, bfloat16_to_float32(read(m, lanes)))
    if to == "bf16":
        return lambda m, lanes: write(m, lanes, float32_to_bfloat16(read(m, lanes)))
    target = numpy_type(to, to_bits)
    rounding = next((_ROUNDING[x] for x in i.op if x in _ROUNDING), None)
    if source == "f" and to != "f" and rounding is None:
        raise UnsupportedError(i.text)

    def run(machine: Machine, lanes: Lanes) -> None:
        value = read(machine, lanes)
        if rounding is not None:
            value = rounding(value)
            if to != "f":
                value = _saturate(value, target)
        write(machine, lanes, value.astype(target))

    return run


def _saturate(value: Array, target: Any) -> Array:
    """Clamp to the integer type; NaN becomes 0."""
    limits = np.iinfo(target)
    wide = np.nan_to_num(value.astype(np.float64), nan=0.0)
    inside = np.clip(wide, float(limits.min), float(limits.max))
    over = inside >= 2.0 ** (limits.bits - (limits.min < 0))
    return np.where(over, limits.max, np.where(over, 0, inside).astype(target)).astype(target)


def _convert_pair(i: Instruction, to: str) -> Step:
    if "relu" in i.op:
        raise UnsupportedError(i.text)
    high, low = (reader(i.register(n), "f", 32) for n in (1, 2))
    write = writer(i.register(0))

    def encode(value: Array) -> Array:
        if to == "bf16x2":
            return float32_to_bfloat16(value)
        return value.astype(FLOAT[16]).view(np.uint16)

    def run(machine: Machine, lanes: Lanes) -> None:
        upper = encode(high(machine, lanes)).astype(np.uint32) << np.uint32(16)
        write(machine, lanes, upper | encode(low(machine, lanes)))

    return run
