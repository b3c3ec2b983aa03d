"""Registers as numpy vectors: one element a thread, read and written under their PTX types."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, cast

import numpy as np

from .._formats import Array
from .program import UnsupportedError

if TYPE_CHECKING:
    from .machine import Machine

Lanes = Any
"""The threads that act: a slice, or an array of thread numbers."""

Read = Callable[["Machine", Lanes], Array]
Write = Callable[["Machine", Lanes, Array], None]
Step = Callable[["Machine", Lanes], None]

UNSIGNED: Final[dict[int, Any]] = {
    1: np.bool_, 8: np.uint8, 16: np.uint16, 32: np.uint32, 64: np.uint64,
}  # fmt: skip
SIGNED: Final[dict[int, Any]] = {8: np.int8, 16: np.int16, 32: np.int32, 64: np.int64}
FLOAT: Final[dict[int, Any]] = {16: np.float16, 32: np.float32, 64: np.float64}


def numpy_type(kind: str, bits: int) -> Any:
    """Return the numpy type of a PTX type; formats that numpy lacks stay bit patterns."""
    if kind == "f":
        return np.dtype(FLOAT[bits])
    if kind == "s":
        return np.dtype(SIGNED[bits])
    return np.dtype(UNSIGNED[bits])


def _immediate(text: str, dtype: Any) -> Array | None:
    """Return a literal as an array of one element, or None if it is not one."""
    if re.fullmatch(r"0[fF][0-9a-fA-F]{8}", text):
        value = np.array([int(text[2:], 16)], np.uint32)
    elif re.fullmatch(r"0[dD][0-9a-fA-F]{16}", text):
        value = np.array([int(text[2:], 16)], np.uint64)
    elif re.fullmatch(r"-?(0x[0-9a-fA-F]+|\d+)U?", text):
        if dtype == np.bool_:
            return np.array([int(text, 0) != 0])
        bits = 8 * dtype.itemsize
        number = int(text.rstrip("U"), 0) & ((1 << bits) - 1)
        return cast(Array, np.array([number], UNSIGNED[bits]).view(dtype))
    else:
        return None
    same = value.dtype.itemsize == dtype.itemsize
    return cast(Array, value.view(dtype) if same else value.astype(dtype))


def reader(operand: str, kind: str, bits: int) -> Read:
    """Return a function that reads an operand under a PTX type."""
    dtype = numpy_type(kind, bits)
    if operand.startswith("%"):
        unsigned = np.dtype(UNSIGNED[bits])

        def read(machine: Machine, lanes: Lanes) -> Array:
            value = machine.register(operand)[lanes]
            if value.dtype.itemsize != unsigned.itemsize:
                value = value.astype(unsigned)
            return value if value.dtype == dtype else value.view(dtype)

        return read
    literal = _immediate(operand, dtype)
    if literal is not None:
        return lambda machine, lanes: literal
    if operand == "global_smem":  # shared memory starts at address 0
        zero = np.zeros(1, dtype)
        return lambda machine, lanes: zero
    raise UnsupportedError(f"operand {operand}")


def writer(operand: str) -> Write:
    """Return a function that writes a register; values are reinterpreted or truncated to fit."""
    if operand == "_":
        return lambda machine, lanes, value: None

    def write(machine: Machine, lanes: Lanes, value: Array) -> None:
        target = machine.register(operand)
        if value.dtype != target.dtype:
            same = value.dtype.itemsize == target.dtype.itemsize and target.dtype != np.bool_
            value = value.view(target.dtype) if same else _resize(value, target.dtype)
        target[lanes] = value

    return write


def _resize(value: Array, dtype: Any) -> Array:
    if value.dtype.kind == "f":  # a 16-bit float in a 32-bit register: its bits
        value = value.view(UNSIGNED[8 * value.dtype.itemsize])
    return value.astype(dtype)


def address(operand: str) -> Read:
    """Return a function that evaluates an address operand: "[%rd1+16]", "[global_smem+64]"."""
    match = re.match(r"\[\s*(%?[\w$]+)\s*(?:\+\s*(-?\w+))?\s*\]", operand)
    if match is None:
        raise UnsupportedError(f"address {operand}")
    base, offset = match.group(1), np.uint64(int(match.group(2) or "0", 0) & (2**64 - 1))
    if base == "global_smem":
        return lambda machine, lanes: np.full(machine.count(lanes), offset)
    if not base.startswith("%"):
        raise UnsupportedError(f"address {operand}")

    def read(machine: Machine, lanes: Lanes) -> Array:
        found: Array = machine.register(base)[lanes].astype(np.uint64) + offset
        return found

    return read
