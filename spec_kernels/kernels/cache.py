# ruff: noqa: N803, N806  (compile-time arguments are written in capitals)
"""The KV cache in place: append by slot, compact to the accepted path, select states.

    compact    row context + i  <-  row context + path[i]         every tensor of a table at once

Append (tokens, K or V, heads): one program converts the rows of some heads and stores them; with
scales per row it first takes the largest magnitude of each head's row.
Compact (requests, tensors, spans of columns):
1. Read the length and the path; leave if nothing moves.
2. Read address and geometry of the tensor from the table, and the blocks of the rows that move.
3. Per block of columns: read all rows, wait for all threads, write all rows. So the order of the
   path does not matter. Longer paths go 128 entries at a time.
4. With `num_nodes`: write zeros to the rows behind the path.
Select (requests, tensors, spans): copy the one checkpoint that counts.

Rows move as 128-bit words where the table says that address, strides and row bytes allow it, else
byte by byte; each tensor decides for itself. Programs of a launch touch different columns, tensors
or requests, so they never meet.

Traffic: compaction reads and writes each row that moves once; 4 bytes a path entry and 8 a moved
row of indices per program. Where nothing moves it reads paths and lengths only.
Determinism: bytes are copied; quantisation rounds each number by itself.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from spec_kernels.kernels._move import find_rows, load_draft, load_geometry, move_span
from spec_kernels.types import CacheTensors

MAX_STAGED = 128
"""Entries of a path that are read before the first of them is written."""

FORMATS = {
    torch.float8_e4m3fn: ("float8", 448.0, 3, 7),
    torch.float8_e5m2: ("float8", 57344.0, 2, 15),
    torch.int8: ("int8", 127.0, 0, 0),
}
"""Quantised dtypes: kind, largest number, bits of the mantissa, bias of the exponent."""

APPEND_ELEMENTS = 4096
"""Elements that one program of `append_kernel` converts: 32 a thread."""

STATE_BYTES = 4096
STATE_BLOCKS = 4
"""One program of `select_state_kernel` copies so many blocks of so many bytes."""

HIDDEN_COLUMNS = 1024


class Config(NamedTuple):
    """How compaction cuts rows.

    Attributes:
        group: path entries staged at once, a power of two.
        block_bytes: bytes of a row in one block of columns.
        span: blocks of columns per program.
        num_warps: warps per program.
    """

    group: int
    block_bytes: int
    span: int
    num_warps: int


def select_config(width: int) -> Config:
    """Choose the blocks of compaction by the width of the path.

    | width | staged | why |
    |---|---|---|
    | up to 8 | 1024 bytes of each row | 8 heads x 128 bf16: two turns of one program |
    | up to 32 | 8 KiB in all | 64 bytes a thread, and the addresses beside them |
    | above | 256 bytes of each row, 8 warps | narrower blocks would read too many indices |

    Args:
        width: entries of the padded path.

    Example:
        >>> select_config(6)
        Config(group=8, block_bytes=1024, span=4, num_warps=4)
        >>> select_config(1000)
        Config(group=128, block_bytes=256, span=4, num_warps=8)
    """
    group = min(max(triton.next_power_of_2(width), 2), MAX_STAGED)
    return Config(group, min(max(8192 // group, 256), 1024), 4, 8 if group > 32 else 4)


# --------------------------------------------------------------------------- append


@triton.jit
def encode_float8(x, MANTISSA: tl.constexpr, BIAS: tl.constexpr):
    """8-bit float of |x| <= the largest number, nearest even, as uint8; NaN is 0x7F.

    By integer arithmetic: the type itself does not compile before sm_89.
    """
    SHIFT: tl.constexpr = 23 - MANTISSA
    MAGIC: tl.constexpr = 2.0 ** (24 - BIAS - MANTISSA)  # its last place is the smallest number
    bits = x.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    normal = ((size + ((1 << (SHIFT - 1)) - 1) + ((size >> SHIFT) & 1)) >> SHIFT) - (
        (127 - BIAS) << MANTISSA
    )
    tiny = (tl.abs(x) + MAGIC).to(tl.int32, bitcast=True) & 0xFF
    code = tl.where(size < ((128 - BIAS) << 23), tiny, normal) | ((bits >> 24) & 0x80)
    return tl.where(x == x, code, 0x7F).to(tl.uint8)


@triton.jit
def append_rows(
    cache_ptr,
    rows_ptr,
    scale_ptr,
    token,
    slot,
    first_head,
    strides,  # cache: block, slot, head, column; rows: token, head, column; scale: 3
    block_size,
    heads,
    size,
    KIND: tl.constexpr,
    LIMIT: tl.constexpr,
    MANTISSA: tl.constexpr,
    BIAS: tl.constexpr,
    SCALE: tl.constexpr,
    HEADS: tl.constexpr,
    SIZE: tl.constexpr,
):
    """Convert and store the rows of HEADS heads of one token."""
    head = first_head + tl.arange(0, HEADS)
    column = tl.arange(0, SIZE)
    mask = (head < heads)[:, None] & (column < size)[None, :]
    head64, column64 = head.to(tl.int64), column.to(tl.int64)
    block, place = slot // block_size, slot % block_size
    source = token * strides[4] + head64[:, None] * strides[5] + column64[None, :] * strides[6]
    target = block * strides[0] + place * strides[1]
    target += head64[:, None] * strides[2] + column64[None, :] * strides[3]
    x = tl.load(rows_ptr + source, mask=mask, other=0.0)
    if KIND == "cast":
        tl.store(cache_ptr + target, x.to(cache_ptr.dtype.element_ty), mask=mask)
    else:
        x = x.to(tl.float32)
        if SCALE == "cache":
            x = tl.div_rn(x, tl.load(scale_ptr) + tl.zeros((HEADS, SIZE), tl.float32))
        if SCALE == "row":
            largest = tl.max(tl.where(x == x, tl.abs(x), 0.0), 1)
            is_nan = tl.max((x != x).to(tl.int32), 1) > 0
            scale = tl.div_rn(largest, tl.full((HEADS,), LIMIT, tl.float32))
            scale = tl.where(is_nan, float("nan"), scale)
            place_ptr = scale_ptr + block * strides[7] + place * strides[8]
            tl.store(place_ptr + head64 * strides[9], scale, mask=head < heads)
            by = scale[:, None] + tl.zeros((HEADS, SIZE), tl.float32)
            x = tl.where(by == 0.0, 0.0, tl.div_rn(x, tl.where(by == 0.0, 1.0, by)))
        x = tl.where(x > LIMIT, LIMIT, tl.where(x < -LIMIT, -LIMIT, x))
        if KIND == "float8":
            tl.store(cache_ptr + target, encode_float8(x, MANTISSA, BIAS), mask=mask)
        else:
            x = tl.where(x == x, x, 0.0)
            rounded = (x + 12582912.0) - 12582912.0  # 1.5 * 2^23: its last place is 1
            tl.store(cache_ptr + target, rounded.to(tl.int8), mask=mask)


@triton.jit(do_not_specialize=["block_size", "slots"])
def append_kernel(
    key_cache_ptr,  # [blocks, block_size, kv_heads, head_dim], out; float8 as uint8
    value_cache_ptr,  # likewise, or None
    key_ptr,  # [tokens, kv_heads, head_dim] float
    value_ptr,  # likewise, or None
    slots_ptr,  # [tokens] i64
    key_scale_ptr,  # [1], or [blocks, block_size, kv_heads] f32, out; or None
    value_scale_ptr,  # likewise
    key_strides,  # ten numbers, see append_rows
    value_strides,
    block_size,
    slots,  # block_size * blocks
    heads,
    key_size,
    value_size,
    KIND: tl.constexpr,
    LIMIT: tl.constexpr,
    MANTISSA: tl.constexpr,
    BIAS: tl.constexpr,
    KEY_SCALE: tl.constexpr,  # "none", "cache" or "row"
    VALUE_SCALE: tl.constexpr,
    HEADS: tl.constexpr,
    KEY_SIZE: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
):
    """Rows of one token. Floor: `tokens * (2 * row_bytes + 8)` bytes: each row read and written
    once, and its slot."""
    token = tl.program_id(0).to(tl.int64)
    first_head = tl.program_id(2) * HEADS
    slot = tl.load(slots_ptr + token)
    if (slot < 0) | (slot >= slots):
        return
    if tl.program_id(1) == 0:
        append_rows(
            key_cache_ptr, key_ptr, key_scale_ptr, token, slot, first_head, key_strides,
            block_size, heads, key_size, KIND, LIMIT, MANTISSA, BIAS, KEY_SCALE, HEADS, KEY_SIZE,
        )  # fmt: skip
    else:
        if value_ptr is not None:
            append_rows(
                value_cache_ptr, value_ptr, value_scale_ptr, token, slot, first_head,
                value_strides, block_size, heads, value_size, KIND, LIMIT, MANTISSA, BIAS,
                VALUE_SCALE, HEADS, VALUE_SIZE,
            )  # fmt: skip


# --------------------------------------------------------------------------- compact


@triton.jit(do_not_specialize=["width", "max_blocks"])
def compact_kernel(
    table_ptr,  # [tensors, 10] i64, see CacheTensors
    block_table_ptr,  # [groups, batch, max_blocks] i32, or None: contiguous
    context_ptr,  # [batch] i32
    path_ptr,  # [batch, width] i32
    accepted_ptr,  # [batch] i32
    num_nodes_ptr,  # [batch] i32, or None: dead rows stay
    block_table_stride_group,
    block_table_stride_row,
    path_stride_row,
    width,
    max_blocks,
    STAGED: tl.constexpr,
    BLOCK_BYTES: tl.constexpr,
    SPAN: tl.constexpr,
):
    """Accepted rows of one request, in one tensor and span of columns, to the front of the draft.
    Floor: `(2 * moved + cleared) * row_bytes` bytes: the rows that move, in all tensors, read and
    written once, and the dead ones that are cleared; paths and lengths where none does."""
    request = tl.program_id(0).to(tl.int64)
    HAS_NODES: tl.constexpr = num_nodes_ptr is not None
    path_row = path_ptr + request * path_stride_row
    kept = tl.minimum(tl.load(accepted_ptr + request), width - 1) + 1
    kept = tl.where(tl.load(path_row) >= 0, kept, 0)
    nodes = 2147483647
    if HAS_NODES:
        nodes = tl.load(num_nodes_ptr + request)

    for start in range(0, kept, STAGED):
        entry = start + tl.arange(0, STAGED)
        node = tl.load(path_row + entry, mask=entry < kept, other=-1)
        move = (entry < kept) & (node >= 0) & (node != entry) & (node < nodes)
        if tl.max(move.to(tl.int32), 0) > 0:
            one = load_geometry(table_ptr, tl.program_id(1))
            draft = load_draft(
                context_ptr, block_table_ptr, block_table_stride_group, block_table_stride_row,
                one.group, request, max_blocks,
            )  # fmt: skip
            source, move = find_rows(node, move, draft, one)
            target, move = find_rows(entry, move, draft, one)
            move_span(one, source, target, move, False, BLOCK_BYTES, SPAN)
            tl.debug_barrier()  # before later entries are read, or dead rows cleared

    if HAS_NODES and (kept > 0) & (kept < nodes):
        one = load_geometry(table_ptr, tl.program_id(1))
        draft = load_draft(
            context_ptr, block_table_ptr, block_table_stride_group, block_table_stride_row,
            one.group, request, max_blocks,
        )  # fmt: skip
        rows = max_blocks.to(tl.int64) * one.block_size
        end = tl.minimum(nodes, tl.minimum(rows, 2147483647) - draft.context).to(tl.int32)
        for start in range(kept, end, STAGED):
            entry = start + tl.arange(0, STAGED)
            dead, clear = find_rows(entry, entry < end, draft, one)
            move_span(one, dead, dead, clear, True, BLOCK_BYTES, SPAN)


# --------------------------------------------------------------------------- states, hidden states


@triton.jit
def copy_words(source_ptr, target_ptr, offs, mask):
    tl.store(target_ptr + offs, tl.load(source_ptr + offs, mask=mask), mask=mask)


@triton.jit(do_not_specialize=["width"])
def select_state_kernel(
    states_ptr,  # [tensors, 10] i64, see CacheTensors
    checkpoints_ptr,  # [tensors, 10] i64
    path_ptr,  # [batch, width] i32
    accepted_ptr,  # [batch] i32
    slots_ptr,  # [batch] i32, or None: request b has state b
    path_stride_row,
    width,
    BLOCK_BYTES: tl.constexpr,
    SPAN: tl.constexpr,
):
    """One span of the state of one request and tensor. Floor: `2 * state_bytes` bytes: the states
    of all tensors, read and written once."""
    request = tl.program_id(0).to(tl.int64)
    path_row = path_ptr + request * path_stride_row
    accepted = tl.load(accepted_ptr + request)
    if (accepted < 0) | (tl.load(path_row) < 0):
        return
    node = tl.load(path_row + tl.minimum(accepted, width - 1)).to(tl.int64)
    slot = request
    if slots_ptr is not None:
        slot = tl.load(slots_ptr + request).to(tl.int64)
    to = load_geometry(states_ptr, tl.program_id(1))
    one = load_geometry(checkpoints_ptr, tl.program_id(1))
    exists = (node >= 0) & (node < one.block_size) & (request < one.blocks)
    if (not exists) | (slot < 0) | (slot >= to.blocks):
        return

    source = one.address + request * one.block_step + node * one.slot_step
    target = to.address + slot * to.block_step
    per_head = tl.cdiv(one.row_bytes, BLOCK_BYTES)
    first = tl.program_id(2) * SPAN
    for block in range(first, tl.minimum(first + SPAN, one.heads * per_head)):
        head, start = block // per_head, (block % per_head) * BLOCK_BYTES
        from_row = source + head.to(tl.int64) * one.head_step
        to_row = target + head.to(tl.int64) * to.head_step
        if (one.move_bytes == 16) & (to.move_bytes == 16):
            from_ptr = from_row.to(tl.pointer_type(tl.int64))
            to_ptr = to_row.to(tl.pointer_type(tl.int64))
            words = tl.arange(0, BLOCK_BYTES // 8)
            copy_words(
                tl.multiple_of(from_ptr + start // 16 * 2, 16),
                tl.multiple_of(to_ptr + start // 16 * 2, 16),
                words,
                words < (one.row_bytes - start) // 16 * 2,
            )
        else:
            columns = start + tl.arange(0, BLOCK_BYTES)
            copy_words(
                from_row.to(tl.pointer_type(tl.uint8)),
                to_row.to(tl.pointer_type(tl.uint8)),
                columns,
                columns < one.row_bytes,
            )


@triton.jit(do_not_specialize=["rows", "nodes"])
def hidden_kernel(
    out_ptr,  # [batch, width, size] any, out
    hidden_ptr,  # [rows, size] any
    target_row_ptr,  # [batch, nodes] i32
    path_ptr,  # [batch, width] i32
    accepted_ptr,  # [batch] i32
    hidden_stride_row,
    hidden_stride_column,
    target_row_stride_row,
    path_stride_row,
    rows,
    nodes,
    size,
    BLOCK: tl.constexpr,
):
    """Hidden state of one entry of a path, or zeros. Floor: `(kept + width) * row_bytes` bytes: the
    kept rows read, all written."""
    request = tl.program_id(0).to(tl.int64)
    entry = tl.program_id(1)
    path_row = path_ptr + request * path_stride_row
    is_kept = (entry <= tl.load(accepted_ptr + request)) & (tl.load(path_row) >= 0)
    node = tl.load(path_row + entry)
    is_node = is_kept & (node >= 0) & (node < nodes)
    place = target_row_ptr + request * target_row_stride_row + node
    row = tl.load(place, mask=is_node, other=-1).to(tl.int64)
    has_row = (row >= 0) & (row < rows)

    column = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    source = row * hidden_stride_row + column.to(tl.int64) * hidden_stride_column
    x = tl.load(hidden_ptr + source, mask=column < tl.where(has_row, size, 0), other=0)
    out_row = out_ptr + (request * tl.num_programs(1) + entry) * size
    tl.store(out_row + column, x, mask=column < size)


# --------------------------------------------------------------------------- launchers


def append_cache(
    key_cache: Tensor,
    value_cache: Tensor | None,
    key: Tensor,
    value: Tensor | None,
    slots: Tensor,
    *,
    key_scale: Tensor | None = None,
    value_scale: Tensor | None = None,
) -> None:
    """Write each new row of K and V at its slot, quantising where the cache is quantised."""
    tokens, heads, key_size = key.shape
    if not key.numel() and (value is None or not value.numel()):
        return
    kind, limit, mantissa, bias = FORMATS.get(key_cache.dtype, ("cast", 0.0, 0, 0))
    value_size = 1 if value is None else value.shape[2]
    key_width, value_width = triton.next_power_of_2(key_size), triton.next_power_of_2(value_size)
    per_program = max(APPEND_ELEMENTS // max(key_width, value_width), 1)
    per_program = min(per_program, triton.next_power_of_2(heads))
    append_kernel[(tokens, 1 if value is None else 2, triton.cdiv(heads, per_program))](
        key_cache_ptr=_as_bytes(key_cache),
        value_cache_ptr=None if value_cache is None else _as_bytes(value_cache),
        key_ptr=key,
        value_ptr=value,
        slots_ptr=slots.contiguous(),
        key_scale_ptr=key_scale,
        value_scale_ptr=value_scale,
        key_strides=_strides(key_cache, key, key_scale),
        value_strides=None if value is None else _strides(value_cache, value, value_scale),
        block_size=key_cache.shape[1],
        slots=key_cache.shape[0] * key_cache.shape[1],
        heads=heads,
        key_size=key_size,
        value_size=value_size,
        KIND=kind,
        LIMIT=limit,
        MANTISSA=mantissa,
        BIAS=bias,
        KEY_SCALE=_scale_kind(key_scale),
        VALUE_SCALE=_scale_kind(value_scale),
        HEADS=per_program,
        KEY_SIZE=key_width,
        VALUE_SIZE=value_width,
        num_warps=4,
    )


def _as_bytes(cache: Tensor) -> Tensor:
    """View 8-bit floats as bytes."""
    is_float8 = FORMATS.get(cache.dtype, ("",))[0] == "float8"
    return cache.view(torch.uint8) if is_float8 else cache


def _strides(cache: Tensor, rows: Tensor, scale: Tensor | None) -> tuple[int, ...]:
    last = (0, 0, 0) if scale is None or scale.dim() == 1 else scale.stride()
    return (*cache.stride(), *rows.stride(), *last)


def _scale_kind(scale: Tensor | None) -> str:
    if scale is None:
        return "none"
    return "cache" if scale.dim() == 1 else "row"


def _require_in_place(caches: CacheTensors) -> None:
    """Raise unless every tensor lies where the table says."""
    if tuple(tensor.data_ptr() for tensor in caches.tensors) != caches.addresses:
        raise ValueError("tensors of caches must lie where CacheTensors.make saw them, got others")


@lru_cache(maxsize=256)
def _spans(rows: tuple[int, ...], block_bytes: int, span: int) -> int:
    """Programs that the columns of the widest tensor need."""
    pairs = zip(rows[::2], rows[1::2], strict=True)
    blocks = max(heads * triton.cdiv(row_bytes, block_bytes) for heads, row_bytes in pairs)
    return triton.cdiv(blocks, span)


def compact_cache(
    caches: CacheTensors,
    block_table: Tensor | None,
    context_lens: Tensor,
    path: Tensor,
    accepted_lens: Tensor,
    *,
    num_nodes: Tensor | None = None,
) -> None:
    """Move the accepted path of every request to the front of its draft, in every tensor."""
    batch, width = path.shape
    if not batch:
        return
    _require_in_place(caches)
    config = select_config(width)
    if block_table is not None and block_table.stride(-1) != 1:
        block_table = block_table.contiguous()
    is_shared = block_table is None or block_table.dim() == 2
    compact_kernel[
        (batch, len(caches.tensors), _spans(caches.rows, config.block_bytes, config.span))
    ](
        table_ptr=caches.table,
        block_table_ptr=block_table,
        context_ptr=context_lens.contiguous(),
        path_ptr=path if path.stride(1) == 1 else path.contiguous(),
        accepted_ptr=accepted_lens.contiguous(),
        num_nodes_ptr=None if num_nodes is None else num_nodes.contiguous(),
        block_table_stride_group=0 if is_shared else block_table.stride(0),
        block_table_stride_row=0 if block_table is None else block_table.stride(-2),
        path_stride_row=path.stride(0) if path.stride(1) == 1 else width,
        width=width,
        max_blocks=1 if block_table is None else block_table.shape[-1],
        STAGED=config.group,
        BLOCK_BYTES=config.block_bytes,
        SPAN=config.span,
        num_warps=config.num_warps,
        num_stages=1,
    )


def compact_hidden(
    hidden: Tensor, target_row: Tensor, path: Tensor, accepted_lens: Tensor
) -> Tensor:
    """Gather the hidden states of the kept nodes: `[batch, max_depth + 1, size]`."""
    batch, width = path.shape
    rows, size = hidden.shape
    out = hidden.new_empty(batch, width, size)
    if not out.numel():
        return out
    path, target_row = path.contiguous(), target_row.contiguous()
    hidden_kernel[(batch, width, triton.cdiv(size, HIDDEN_COLUMNS))](
        out_ptr=out,
        hidden_ptr=hidden,
        target_row_ptr=target_row,
        path_ptr=path,
        accepted_ptr=accepted_lens.contiguous(),
        hidden_stride_row=hidden.stride(0),
        hidden_stride_column=hidden.stride(1),
        target_row_stride_row=target_row.shape[1],
        path_stride_row=width,
        rows=rows,
        nodes=target_row.shape[1],
        size=size,
        BLOCK=HIDDEN_COLUMNS,
        num_warps=4,
    )
    return out


def select_state(
    states: CacheTensors,
    checkpoints: CacheTensors,
    path: Tensor,
    accepted_lens: Tensor,
    *,
    state_slots: Tensor | None = None,
) -> None:
    """Set the recurrent state of every request to its checkpoint at the last kept node."""
    batch, width = path.shape
    if not batch:
        return
    _require_in_place(states)
    _require_in_place(checkpoints)
    path = path.contiguous()
    spans = _spans(states.rows, STATE_BYTES, STATE_BLOCKS)
    select_state_kernel[(batch, len(states.tensors), spans)](
        states_ptr=states.table,
        checkpoints_ptr=checkpoints.table,
        path_ptr=path,
        accepted_ptr=accepted_lens.contiguous(),
        slots_ptr=None if state_slots is None else state_slots.contiguous(),
        path_stride_row=width,
        width=width,
        BLOCK_BYTES=STATE_BYTES,
        SPAN=STATE_BLOCKS,
        num_warps=4,
    )
