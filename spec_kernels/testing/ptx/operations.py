"""Arithmetic of the emulated PTX: a builder for each opcode returns the function that runs it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, cast

import numpy as np

from .._formats import Array, bfloat16_to_float32, float32_to_bfloat16, fma
from .program import Instruction, UnsupportedError
from .values import UNSIGNED, Lanes, Step, numpy_type, reader, writer

if TYPE_CHECKING:
    from .machine import Machine

Builder = Callable[[Instruction], Step]
_BUILDERS: Final[dict[str, Builder]] = {}


def operation(*names: str) -> Callable[[Builder], Builder]:
    """Register the builder of opcodes."""

    def register(builder: Builder) -> Builder:
        _BUILDERS.update(dict.fromkeys(names, builder))
        return builder

    return register


def build(instruction: Instruction) -> Step:
    """Return the function that runs an instruction.

    Raises:
        UnsupportedError: the emulator does not know it.
    """
    builder = _BUILDERS.get(instruction.op[0])
    if builder is None:
        raise UnsupportedError(instruction.text)
    return builder(instruction)


# --------------------------------------------------------------------------- formats


def _flush(value: Array) -> Array:
    """Replace subnormal float32 by zero of the same sign."""
    return np.where(np.abs(value) < np.float32(2.0**-126), np.copysign(0, value), value).astype(
        value.dtype
    )


def elementwise(instruction: Instruction, function: Callable[..., Array]) -> Step:
    """Apply a function of the operands behind the first, all under the instruction's type."""
    kind, bits = instruction.type
    reads = [
        reader(instruction.register(i), kind, bits) for i in range(1, len(instruction.operands))
    ]
    write = writer(instruction.register(0))
    flush = "ftz" in instruction.op
    decode, encode = _packed(kind)

    def run(machine: Machine, lanes: Lanes) -> None:
        values = [decode(read(machine, lanes)) for read in reads]
        if flush:
            values = [_flush(v) for v in values]
        result = function(*values)
        if flush:
            result = _flush(result)
        write(machine, lanes, encode(result))

    return run


def _packed(kind: str) -> tuple[Callable[[Array], Array], Callable[[Array], Array]]:
    """Decoder to, and encoder from, numbers for the formats that numpy lacks."""
    if kind == "bf16":
        return bfloat16_to_float32, float32_to_bfloat16
    if kind == "bf16x2":
        return (
            lambda u: bfloat16_to_float32(np.ascontiguousarray(u).view(np.uint16).reshape(-1, 2)),
            lambda f: float32_to_bfloat16(f).reshape(-1).view(np.uint32),
        )
    if kind == "f16x2":
        return (
            lambda u: np.ascontiguousarray(u).view(np.float16).reshape(-1, 2),
            lambda f: np.ascontiguousarray(f, np.float16).reshape(-1).view(np.uint32),
        )
    return (lambda x: x), (lambda x: x)


# --------------------------------------------------------------------------- integers and floats


def _nan_aware(instruction: Instruction, plain: Any, propagating: Any) -> Any:
    is_float = instruction.type[0] not in ("u", "s", "b")
    return propagating if not is_float or "NaN" in instruction.op else plain


@operation("min")
def _min(i: Instruction) -> Step:
    return elementwise(i, _nan_aware(i, np.fmin, np.minimum))


@operation("max")
def _max(i: Instruction) -> Step:
    return elementwise(i, _nan_aware(i, np.fmax, np.maximum))


for _names, _function in (
    (("and",), lambda a, b: a & b),
    (("or",), lambda a, b: a | b),
    (("xor",), lambda a, b: a ^ b),
    (("not",), lambda a: ~a),
    (("neg",), lambda a: -a),
    (("abs",), np.abs),
    (("rem",), np.fmod),
    (("fma",), fma),
    (("copysign",), lambda a, b: np.copysign(b, a)),
):
    operation(*_names)(lambda i, f=_function: elementwise(i, f))  # type: ignore[misc]


@operation("add", "sub")
def _add(i: Instruction) -> Step:
    if "cc" in i.op or "sat" in i.op:
        raise UnsupportedError(i.text)
    return elementwise(i, np.add if i.op[0] == "add" else np.subtract)


@operation("mul")
def _mul(i: Instruction) -> Step:
    kind, bits = i.type
    if "wide" in i.op:
        wide = numpy_type(kind, 2 * bits)
        return elementwise(i, lambda a, b: a.astype(wide) * b.astype(wide))
    if "hi" in i.op:
        return elementwise(i, lambda a, b: _high_half(a, b))
    return elementwise(i, lambda a, b: a * b)


def _high_half(a: Array, b: Array) -> Array:
    dtype = a.dtype
    bits = 8 * dtype.itemsize
    if bits < 64:
        wide = np.dtype(f"{dtype.kind}{2 * dtype.itemsize}")
        return cast(Array, ((a.astype(wide) * b.astype(wide)) >> wide.type(bits)).astype(dtype))
    product = a.astype(object) * b.astype(object)
    return np.array([int(p) >> bits & (2**64 - 1) for p in np.ravel(product)], np.uint64).view(
        dtype
    )


@operation("mad")
def _mad(i: Instruction) -> Step:
    kind, bits = i.type
    wide_bits = 2 * bits if "wide" in i.op else bits
    wide = numpy_type(kind, wide_bits)
    first, second = (reader(i.register(n), kind, bits) for n in (1, 2))
    third, write = reader(i.register(3), kind, wide_bits), writer(i.register(0))
    if "hi" in i.op:
        raise UnsupportedError(i.text)

    def run(machine: Machine, lanes: Lanes) -> None:
        a, b = first(machine, lanes).astype(wide), second(machine, lanes).astype(wide)
        write(machine, lanes, a * b + third(machine, lanes))

    return run


def _divide(a: Array, b: Array) -> Array:
    if a.dtype.kind == "f":
        return a / b
    safe = np.where(b == 0, 1, b).astype(b.dtype)  # undefined on the device
    if a.dtype.kind == "u":
        return cast(Array, a // safe)
    signs = np.sign(a) * np.sign(safe)
    return cast(Array, (signs * (np.abs(a) // np.abs(safe))).astype(a.dtype))


@operation("div")
def _div(i: Instruction) -> Step:
    return elementwise(i, _divide)


_WIDE_FUNCTIONS: Final[dict[str, Callable[[Array], Array]]] = {
    "ex2": np.exp2,
    "lg2": np.log2,
    "rcp": lambda x: 1 / x,
    "sqrt": np.sqrt,
    "rsqrt": lambda x: 1 / np.sqrt(x),
    "sin": np.sin,
    "cos": np.cos,
    "tanh": np.tanh,
}


@operation(*_WIDE_FUNCTIONS)
def _special(i: Instruction) -> Step:
    """Approximations of the device: here the exact value, rounded."""
    function = _WIDE_FUNCTIONS[i.op[0]]
    return elementwise(i, lambda x: function(x.astype(np.float64)).astype(x.dtype))


# --------------------------------------------------------------------------- moves and choices


@operation("mov", "cvta")
def _move(i: Instruction) -> Step:
    if isinstance(i.operands[0], list):
        return _unpack(i)
    if isinstance(i.operands[1], list):
        return _pack(i)
    kind, bits = i.type
    read, write = reader(i.register(1), kind, bits), writer(i.register(0))
    return lambda machine, lanes: write(machine, lanes, read(machine, lanes))


def _unpack(i: Instruction) -> Step:
    bits = i.type[1]
    targets = i.vector(0)
    width = bits // len(targets)
    read, writes = reader(i.register(1), "u", bits), [writer(x) for x in targets]
    unsigned = UNSIGNED[bits]

    def run(machine: Machine, lanes: Lanes) -> None:
        value = read(machine, lanes)
        for n, write in enumerate(writes):
            part = value >> unsigned(n * width) & unsigned((1 << width) - 1)
            write(machine, lanes, part.astype(UNSIGNED[width]))

    return run


def _pack(i: Instruction) -> Step:
    bits = i.type[1]
    sources = i.vector(1)
    width = bits // len(sources)
    reads, write = [reader(x, "u", width) for x in sources], writer(i.register(0))
    unsigned = UNSIGNED[bits]

    def run(machine: Machine, lanes: Lanes) -> None:
        value = np.zeros(machine.count(lanes), unsigned)
        for n, read in enumerate(reads):
            value |= read(machine, lanes).astype(unsigned) << unsigned(n * width)
        write(machine, lanes, value)

    return run


@operation("selp")
def _select(i: Instruction) -> Step:
    kind, bits = i.type
    first, second = (reader(i.register(n), kind, bits) for n in (1, 2))
    chosen, write = reader(i.register(3), "pred", 1), writer(i.register(0))

    def run(machine: Machine, lanes: Lanes) -> None:
        pick = chosen(machine, lanes)
        write(machine, lanes, np.where(pick, first(machine, lanes), second(machine, lanes)))

    return run


_COMPARE: Final[dict[str, Callable[[Array, Array], Array]]] = {
    "eq": lambda x, y: x == y,
    "ne": lambda x, y: x != y,
    "lt": lambda x, y: x < y,
    "le": lambda x, y: x <= y,
    "gt": lambda x, y: x > y,
    "ge": lambda x, y: x >= y,
}
_UNSIGNED_NAMES: Final = {"lo": "lt", "ls": "le", "hi": "gt", "hs": "ge"}


def _comparison(i: Instruction) -> Callable[[Array, Array], Array]:
    name, kind = i.op[1], i.type[0]
    if kind in ("u", "s", "b"):
        return _COMPARE[_UNSIGNED_NAMES.get(name, name)]
    if name == "nan":
        return lambda x, y: np.isnan(x) | np.isnan(y)
    if name == "num":
        return lambda x, y: ~(np.isnan(x) | np.isnan(y))
    if name in ("equ", "neu", "ltu", "leu", "gtu", "geu"):  # true for NaN
        compare = _COMPARE[name[:-1]]
        return lambda x, y: compare(x, y) | np.isnan(x) | np.isnan(y)
    compare = _COMPARE[name]
    return lambda x, y: compare(x, y) & ~(np.isnan(x) | np.isnan(y))


@operation("setp")
def _compare(i: Instruction) -> Step:
    kind, bits = i.type
    if len(i.operands) != 3 or {"and", "or", "xor"} & set(i.op) or "|" in i.register(0):
        raise UnsupportedError(i.text)
    compare, write = _comparison(i), writer(i.register(0))
    first, second = (reader(i.register(n), kind, bits) for n in (1, 2))
    decode, _ = _packed(kind)

    def run(machine: Machine, lanes: Lanes) -> None:
        write(
            machine, lanes, compare(decode(first(machine, lanes)), decode(second(machine, lanes)))
        )

    return run
