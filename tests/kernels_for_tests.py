# ruff: noqa: N803 - compile-time arguments of kernels are upper case
"""Small kernels for the tests of the harness: sound ones, and one for each planted fault."""

from __future__ import annotations

import triton
import triton.language as tl

SHIFT = tl.constexpr(3)


# --------------------------------------------------------------------------- numbers


@triton.jit
def binary(out_ptr, x_ptr, y_ptr, OP: tl.constexpr, BLOCK: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offs)
    y = tl.load(y_ptr + offs)
    if OP == "add":
        z = x + y
    elif OP == "mul":
        z = x * y
    elif OP == "max":
        z = tl.maximum(x, y)
    elif OP == "fma":
        z = tl.fma(x, y, x)
    elif OP == "neg":
        z = -x
    elif OP == "clamp":
        z = tl.clamp(x, y, y + y)
    else:
        z = tl.where(x < y, x, y)
    tl.store(out_ptr + offs, z)


@triton.jit
def cast(out_ptr, x_ptr, BLOCK: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    tl.store(out_ptr + offs, tl.load(x_ptr + offs).to(out_ptr.dtype.element_ty))


@triton.jit
def dot(out_ptr, x_ptr, y_ptr, N: tl.constexpr):
    rows = tl.arange(0, N)[:, None] * N
    cols = tl.arange(0, N)[None, :]
    x = tl.load(x_ptr + rows + cols)
    y = tl.load(y_ptr + rows + cols)
    tl.store(out_ptr + rows + cols, tl.dot(x, y, input_precision="ieee"))


@triton.jit
def column_sum(out_ptr, x_ptr, N: tl.constexpr):
    rows = tl.arange(0, N)[:, None] * N
    cols = tl.arange(0, N)[None, :]
    tl.store(out_ptr + tl.arange(0, N), tl.sum(tl.load(x_ptr + rows + cols), 0))


@triton.jit
def _first_of_best(value, index, other_value, other_index):
    better = (other_value > value) | ((other_value == value) & (other_index < index))
    return tl.where(better, other_value, value), tl.where(better, other_index, index)


@triton.jit
def _left_of_best(value, index, other_value, other_index):
    better = other_value > value
    return tl.where(better, other_value, value), tl.where(better, other_index, index)


@triton.jit
def left_argmax(out_ptr, x_ptr, N: tl.constexpr):
    """Fault: takes the left operand of a tie for the first one; compiled code swaps operands."""
    offs = tl.arange(0, N)
    _, index = tl.reduce((tl.load(x_ptr + offs), offs), 0, _left_of_best)
    tl.store(out_ptr, index)


@triton.jit
def first_argmax(out_ptr, x_ptr, N: tl.constexpr):
    offs = tl.arange(0, N)
    x = tl.load(x_ptr + offs)
    tl.store(out_ptr + 1, tl.argmax(x, 0))
    tl.store(out_ptr + 2, tl.max(x, 0).to(tl.int32))
    _, index = tl.reduce((x, offs), 0, _first_of_best)
    tl.store(out_ptr, index)


@triton.jit
def nan_argmax(out_ptr, x_ptr, N: tl.constexpr):
    tl.store(out_ptr, tl.argmax(tl.load(x_ptr + tl.arange(0, N)), 0))


@triton.jit
def _compose(scale, shift, next_scale, next_shift):
    return scale * next_scale, shift * next_scale + next_shift


@triton.jit
def affine_scan(out_ptr, scale_ptr, shift_ptr, N: tl.constexpr, REVERSE: tl.constexpr):
    offs = tl.arange(0, N)
    pair = (tl.load(scale_ptr + offs), tl.load(shift_ptr + offs))
    _, shift = tl.associative_scan(pair, 0, _compose, reverse=REVERSE)
    tl.store(out_ptr + offs, shift)


@triton.jit
def scalar_mask(out_ptr, low, high, BLOCK: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    tl.store(out_ptr + offs, offs, mask=(offs < BLOCK) & (low < high))


@triton.jit
def shifts(out_ptr, BLOCK: tl.constexpr):
    tl.static_assert(BLOCK == 8, "BLOCK must be 8")
    width: tl.constexpr = BLOCK // 2
    offs = tl.arange(0, BLOCK)
    y = (1 << SHIFT) + (-5 >> SHIFT) + SHIFT * offs + tl.arange(0, width).shape[0]
    later = SHIFT + offs
    tl.store(out_ptr + offs, y + later.to(tl.int32))


@triton.jit
def scaled(out_ptr, x_ptr, factor, bias_ptr, BLOCK: tl.constexpr):
    """A float argument and a pointer that may be None."""
    offs = tl.arange(0, BLOCK)
    y = tl.load(x_ptr + offs) * factor
    if bias_ptr is not None:
        y += tl.load(bias_ptr + offs)
    tl.store(out_ptr + offs, y)


@triton.jit
def float_argument(out_ptr, factor):
    tl.store(out_ptr, (factor * 3.0).to(tl.float64))


@triton.jit
def asserting(x_ptr, BLOCK: tl.constexpr):
    tl.device_assert(tl.load(x_ptr + tl.arange(0, BLOCK)) > 0, "x must be positive")


# --------------------------------------------------------------------------- rows


@triton.jit
def row_sum(out_ptr, x_ptr, x_stride_row, size, BLOCK: tl.constexpr):
    """Sound: one program a row, masked tail."""
    row = tl.program_id(0).to(tl.int64)
    offs = tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, size, BLOCK):
        mask = start + offs < size
        x = tl.load(x_ptr + row * x_stride_row + start + offs, mask=mask, other=0.0)
        total += x.to(tl.float32)
    tl.store(out_ptr + row, tl.sum(total, 0))


@triton.jit
def row_sum_int32(out_ptr, x_ptr, x_stride_row, size, BLOCK: tl.constexpr):
    """Fault: the row offset is computed in 32 bits."""
    row = tl.program_id(0)
    offs = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * x_stride_row + offs, mask=offs < size, other=0.0)
    tl.store(out_ptr + row, tl.sum(x.to(tl.float32), 0))


@triton.jit
def row_sum_bf16(out_ptr, x_ptr, x_stride_row, size, BLOCK: tl.constexpr):
    """Fault: accumulates in bfloat16."""
    row = tl.program_id(0).to(tl.int64)
    offs = tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.bfloat16)
    for start in range(0, size, BLOCK):
        mask = start + offs < size
        total += tl.load(x_ptr + row * x_stride_row + start + offs, mask=mask, other=0.0)
    tl.store(out_ptr + row, tl.sum(total.to(tl.float32), 0))


@triton.jit
def last_argmax(out_ptr, x_ptr, size, BLOCK: tl.constexpr):
    """Fault: of equal values the last one wins."""
    offs = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offs, mask=offs < size, other=-float("inf"))
    best = tl.max(x, 0)
    tl.store(out_ptr, tl.max(tl.where(x == best, offs, -1), 0))


# --------------------------------------------------------------------------- bounds and races


@triton.jit
def doubled(
    out_ptr, x_ptr, size, SLACK_LOAD: tl.constexpr, SLACK: tl.constexpr, BLOCK: tl.constexpr
):
    """Sound with slack 0; a mask bound that is off by the slack otherwise."""
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offs, mask=offs < size + SLACK_LOAD, other=0.0)
    tl.store(out_ptr + offs, x * 2, mask=offs < size + SLACK)


@triton.jit
def copy_flat(out_ptr, x_ptr, BLOCK: tl.constexpr):
    """Fault with a strided `out`: treats it as contiguous."""
    offs = tl.arange(0, BLOCK)
    tl.store(out_ptr + offs, tl.load(x_ptr + offs))


@triton.jit
def pick(out_ptr, x_ptr, y_ptr, BLOCK: tl.constexpr):
    """Sound: the pointer is chosen at run time."""
    offs = tl.arange(0, BLOCK)
    source = tl.where(tl.program_id(0) == 0, x_ptr, y_ptr)
    tl.store(out_ptr + tl.program_id(0) * BLOCK + offs, tl.load(source + offs))


@triton.jit
def shift_rows(x_ptr, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Fault: program i copies row i + 1 to row i while program i + 1 writes row i + 1."""
    row = tl.program_id(0)
    offs = tl.arange(0, WIDTH)
    tl.store(x_ptr + row * WIDTH + offs, tl.load(x_ptr + (row + 1) * WIDTH + offs))


@triton.jit
def overlapping_stores(out_ptr, WIDTH: tl.constexpr):
    """Fault: neighbours share one element."""
    offs = tl.arange(0, WIDTH)
    tl.store(out_ptr + tl.program_id(0) * (WIDTH - 1) + offs, offs)


@triton.jit
def count(out_ptr, x_ptr, BLOCK: tl.constexpr):
    """Sound: programs meet only in an atomic."""
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.atomic_add(out_ptr, tl.sum(tl.load(x_ptr + offs), 0))


@triton.jit
def count_and_read(out_ptr, seen_ptr, x_ptr, BLOCK: tl.constexpr):
    """Fault: reads the counter while others add to it."""
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.atomic_add(out_ptr, tl.sum(tl.load(x_ptr + offs), 0))
    tl.store(seen_ptr + tl.program_id(0), tl.load(out_ptr))


@triton.jit
def through_table(out_ptr, table_ptr, BLOCK: tl.constexpr):
    """Reads tensors whose addresses stand in a table."""
    pid = tl.program_id(0)
    offs = tl.arange(0, BLOCK)
    source = tl.load(table_ptr + pid).to(tl.pointer_type(tl.float32))
    tl.store(out_ptr + pid * BLOCK + offs, tl.load(source + offs))


# --------------------------------------------------------------------------- inside a program


@triton.jit
def rotate_in_place(x_ptr, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Sound: reads everything, then writes; other warps' rows are only safe behind a barrier."""
    rows = tl.arange(0, ROWS)[:, None]
    cols = tl.arange(0, WIDTH)[None, :]
    x = tl.load(x_ptr + ((rows + 1) % ROWS) * WIDTH + cols)
    tl.debug_barrier()
    tl.store(x_ptr + rows * WIDTH + cols, x)


@triton.jit
def rotate_without_barrier(x_ptr, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Fault: the barrier is missing."""
    rows = tl.arange(0, ROWS)[:, None]
    cols = tl.arange(0, WIDTH)[None, :]
    x = tl.load(x_ptr + ((rows + 1) % ROWS) * WIDTH + cols)
    tl.store(x_ptr + rows * WIDTH + cols, x)


@triton.jit
def spilling(out_ptr, x_ptr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Fault: one warp holds far more values than it has registers."""
    offs = tl.arange(0, ROWS)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    x = tl.load(x_ptr + offs)
    tl.store(out_ptr + offs, x / tl.sum(x, 0)[None, :])


@triton.jit
def copy_rows(out_ptr, x_ptr, x_stride_row, size, BLOCK: tl.constexpr, PEELED: tl.constexpr = True):
    """Sound: full blocks without a mask. Fault if not PEELED: every load is masked, so narrow."""
    row = tl.program_id(0).to(tl.int64)
    start = tl.program_id(1) * BLOCK
    offs = start + tl.arange(0, BLOCK)
    source = x_ptr + row * x_stride_row + offs
    target = out_ptr + row * x_stride_row + offs
    if PEELED:
        if start + BLOCK <= size:
            tl.store(target, tl.load(source) + 1)
        else:
            tl.store(target, tl.load(source, mask=offs < size) + 1, mask=offs < size)
    else:
        tl.store(target, tl.load(source, mask=offs < size) + 1, mask=offs < size)


@triton.jit
def matrix_product(out_ptr, x_ptr, y_ptr, K, N: tl.constexpr, BLOCK: tl.constexpr):
    """Sound: a pipelined product with shared memory, asynchronous copies and barriers."""
    rows = tl.arange(0, N)[:, None]
    cols = tl.arange(0, N)[None, :]
    inner = tl.arange(0, BLOCK)
    total = tl.zeros((N, N), tl.float32)
    for start in range(0, K, BLOCK):
        x = tl.load(x_ptr + rows * K + start + inner[None, :])
        y = tl.load(y_ptr + (start + inner[:, None]) * N + cols)
        total = tl.dot(x, y, total)
    tl.store(out_ptr + rows * N + cols, total)


@triton.jit
def special_functions(out_ptr, x_ptr, BLOCK: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offs)
    y = tl.exp(x) + tl.log(x + 2) + tl.sqrt(x + 2) + 1 / (x + 3) + tl.exp2(x) + tl.log2(x + 2)
    tl.store(out_ptr + offs, y + tl.abs(x) - tl.floor(x) + tl.fma(x, x, x))


@triton.jit
def wide_integers(out_ptr, seed, BLOCK: tl.constexpr):
    """Random bits, 64-bit products, shifts and divisions."""
    offs = tl.arange(0, BLOCK)
    a, b, c, _ = tl.randint4x(seed, offs)
    x = (a.to(tl.uint32, bitcast=True).to(tl.int64) << 20) ^ b.to(tl.int64)
    x = x // 7 + x % 13 - (x >> 3)
    tl.store(out_ptr + offs, x + tl.cumsum((c & 15).to(tl.int64), 0))


@triton.jit
def float64_search(out_ptr, weight_ptr, target, BLOCK: tl.constexpr):
    """First index whose cumulative weight exceeds a target, in float64."""
    offs = tl.arange(0, BLOCK)
    weight = tl.load(weight_ptr + offs).to(tl.float64)
    below = tl.cumsum(weight, 0) / tl.sum(weight, 0)
    hit = tl.min(tl.where(below > target, offs, BLOCK), 0)
    tl.store(out_ptr + tl.program_id(0), hit)


@triton.jit
def diverging(out_ptr, x_ptr, BLOCK: tl.constexpr):
    """Loops of another length in every program, and branches on values."""
    pid = tl.program_id(0)
    total = 0.0
    i = 0
    while i < tl.load(x_ptr + pid):
        if i % 2 == 0:
            total += i
        else:
            total -= 0.5
        i += 1
    tl.store(out_ptr + pid, total)
    tl.atomic_max(out_ptr + BLOCK, total)


@triton.jit
def misaligned(out_ptr, x_ptr, offset, BLOCK: tl.constexpr):
    """Fault: promises an alignment that the offset does not have."""
    offs = tl.max_contiguous(tl.multiple_of(offset + tl.arange(0, BLOCK), BLOCK), BLOCK)
    tl.store(out_ptr + tl.arange(0, BLOCK), tl.load(x_ptr + offs))
