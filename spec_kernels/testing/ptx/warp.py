"""What the threads of a warp do together: shuffles, reductions, votes and matrix products."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np

from .._formats import Array, bfloat16_to_float32
from .operations import operation
from .program import Instruction, UnsupportedError
from .values import Lanes, Step, reader, writer

if TYPE_CHECKING:
    from .machine import Machine


def _rows(value: Array, machine: Machine, lanes: Lanes) -> Array:
    """One row of 32 for each acting warp."""
    return np.broadcast_to(value, (machine.count(lanes),)).reshape(-1, 32)


@operation("shfl")
def _shuffle(i: Instruction) -> Step:
    mode = i.op[2]
    target, _, valid = i.register(0).partition("|")
    value, amount = reader(i.register(1), "u", 32), reader(i.register(2), "u", 32)
    write, write_valid = writer(target), writer(valid or "_")
    clamp = int(i.register(3), 0)
    segment, limit = clamp >> 8 & 31, clamp & 31
    lane = np.arange(32)[None, :]
    low, high = lane & segment, (lane & segment) | (limit & ~segment)

    def run(machine: Machine, lanes: Lanes) -> None:
        machine.whole_warps(lanes, i.text)
        v = _rows(value(machine, lanes), machine, lanes)
        n = _rows(amount(machine, lanes), machine, lanes).astype(np.int64)
        if mode == "bfly":
            source = lane ^ n
        elif mode == "up":
            source = lane - n
        elif mode == "down":
            source = lane + n
        else:
            source = low | (n & ~segment)
        inside = source >= high if mode == "up" else source <= high
        source = np.where(inside, source, lane)
        write(machine, lanes, np.take_along_axis(v, source, 1).reshape(-1))
        write_valid(machine, lanes, inside.reshape(-1))

    return run


_REDUCE: Final[dict[str, Any]] = {
    "add": np.add, "min": np.minimum, "max": np.maximum,
    "and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor,
}  # fmt: skip


@operation("redux")
def _reduce(i: Instruction) -> Step:
    kind, bits = i.type
    if kind == "f":
        raise UnsupportedError(i.text)
    read, write, function = (
        reader(i.register(1), kind, bits),
        writer(i.register(0)),
        _REDUCE[i.op[2]],
    )

    def run(machine: Machine, lanes: Lanes) -> None:
        machine.whole_warps(lanes, i.text)
        v = _rows(read(machine, lanes), machine, lanes)
        write(machine, lanes, np.repeat(function.reduce(v, axis=1, dtype=v.dtype), 32))

    return run


@operation("vote")
def _vote(i: Instruction) -> Step:
    mode, write = i.op[2], writer(i.register(0))
    source = i.register(1)
    read = reader(source.lstrip("!"), "pred", 1)
    bit = np.uint64(1) << np.arange(32, dtype=np.uint64)

    def run(machine: Machine, lanes: Lanes) -> None:
        machine.whole_warps(lanes, i.text)
        v = _rows(read(machine, lanes), machine, lanes) != source.startswith("!")
        if mode == "ballot":
            out = (v * bit).sum(1, dtype=np.uint64).astype(np.uint32)
        else:
            out = v.all(1) if mode == "all" else v.any(1)
        write(machine, lanes, np.repeat(out, 32))

    return run


@operation("bar", "activemask")
def _nothing(i: Instruction) -> Step:
    """`bar.warp.sync`: the threads of a warp already run together here."""
    if i.op[:2] != ["bar", "warp"]:
        raise UnsupportedError(i.text)
    return lambda machine, lanes: None


# --------------------------------------------------------------------------- matrix products


def _halves(kind: str) -> Any:
    if kind == "bf16":
        return bfloat16_to_float32
    return lambda u: u.astype(np.uint16).view(np.float16).astype(np.float32)


@operation("mma")
def _multiply(i: Instruction) -> Step:
    if "m16n8k16" in i.op and i.op[-2:] != ["f16", "f16"]:
        kind = "bf16" if "bf16" in i.op else "f16"
        depth, parts, decode = 16, 2, _halves(kind)
    elif "m16n8k8" in i.op and "tf32" in i.op:
        depth, parts = 8, 1
        decode = lambda u: (u & np.uint32(0xFFFFE000)).view(np.float32)  # noqa: E731
    else:
        raise UnsupportedError(i.text)
    if i.op[-1] != "f32" or "s8" in i.op:
        raise UnsupportedError(i.text)
    a_read, b_read = ([reader(x, "u", 32) for x in i.vector(n)] for n in (1, 2))
    c_read, writes = [reader(x, "f", 32) for x in i.vector(3)], [writer(x) for x in i.vector(0)]

    def pieces(word: Array) -> list[Array]:
        """The numbers of a register: [warp, group, thread in group] each."""
        word = word.reshape(-1, 8, 4)
        if parts == 1:
            return [decode(word)]
        return [decode(word & np.uint32(0xFFFF)), decode(word >> np.uint32(16))]

    def run(machine: Machine, lanes: Lanes) -> None:
        machine.whole_warps(lanes, i.text)
        warps = machine.count(lanes) // 32
        a = np.zeros((warps, 16, depth))
        b = np.zeros((warps, depth, 8))
        c = np.zeros((warps, 16, 8))
        step = 4 * parts
        for n, read in enumerate(a_read):
            rows, start = slice(8 * (n & 1), 8 * (n & 1) + 8), step * (n >> 1)
            for part, number in enumerate(pieces(read(machine, lanes))):
                a[:, rows, start + part : start + step : parts] = number
        for n, read in enumerate(b_read):
            for part, number in enumerate(pieces(read(machine, lanes))):
                b[:, step * n + part : step * n + step : parts] = number.transpose(0, 2, 1)
        for n, read in enumerate(c_read):
            rows = slice(8 * (n >> 1), 8 * (n >> 1) + 8)
            c[:, rows, (n & 1) :: 2] = _rows(read(machine, lanes), machine, lanes).reshape(-1, 8, 4)
        d = (a @ b + c).astype(np.float32)
        for n, write in enumerate(writes):
            rows = slice(8 * (n >> 1), 8 * (n >> 1) + 8)
            write(machine, lanes, np.ascontiguousarray(d[:, rows, (n & 1) :: 2]).reshape(-1))

    return run
