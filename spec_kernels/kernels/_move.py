# ruff: noqa: N803, N806  (compile-time arguments are written in capitals)
"""Rows of tensors that are reached through a table of addresses, and how they are moved in place.

A row is `heads` pieces of `row_bytes` adjacent bytes. Pieces are cut into blocks of columns; all
rows of one block of columns are loaded before one of them is stored. Where everything is a
multiple of 16 bytes the pieces move as 128-bit words, else byte by byte in narrower blocks.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl
from triton.language.target_info import is_hip

COLUMNS = tl.constexpr(10)
"""Columns of `CacheTensors.table`."""


class Geometry(NamedTuple):
    """A row of `CacheTensors.table` on the device; steps and sizes in bytes.

    Sizes within a row are 32-bit, since 64-bit division takes a hundred instructions.
    """

    address: Any
    block_step: Any
    slot_step: Any
    head_step: Any
    row_bytes: Any
    heads: Any
    move_bytes: Any
    block_size: Any
    blocks: Any
    group: Any


@triton.jit
def load_geometry(table_ptr, tensor):
    """Row `tensor` of the table."""
    row_ptr = table_ptr + tensor * COLUMNS
    return Geometry(
        tl.load(row_ptr),
        tl.load(row_ptr + 1),
        tl.load(row_ptr + 2),
        tl.load(row_ptr + 3),
        tl.load(row_ptr + 4).to(tl.int32),
        tl.load(row_ptr + 5).to(tl.int32),
        tl.load(row_ptr + 6),
        tl.load(row_ptr + 7).to(tl.int32),
        tl.load(row_ptr + 8),
        tl.load(row_ptr + 9),
    )


class DraftRows(NamedTuple):
    """Where the draft of one request begins.

    Attributes:
        request: index of the request, i64.
        context: committed rows, i64.
        blocks_ptr: the request's row of its block table, or None: block = request.
        max_blocks: entries of that row; 1 without a table.
    """

    request: Any
    context: Any
    blocks_ptr: Any
    max_blocks: Any


@triton.jit
def load_draft(context_ptr, block_table_ptr, stride_group, stride_row, group, request, max_blocks):
    """Read where the draft of a request begins, for tensors of one group."""
    context = tl.load(context_ptr + request).to(tl.int64)
    if block_table_ptr is None:
        return DraftRows(request, context, None, max_blocks)
    else:  # noqa: RET505  (the compiler needs both arms)
        blocks_ptr = block_table_ptr + group * stride_group + request * stride_row
        return DraftRows(request, context, blocks_ptr, max_blocks)


@triton.jit
def find_rows(node, mask, draft, one):
    """Byte offsets of the rows of nodes, and which of them exist."""
    position = draft.context + node
    end = tl.minimum(draft.max_blocks.to(tl.int64) * one.block_size, 2147483647)
    mask = mask & (draft.context >= 0) & (position < end)
    position = tl.where(mask, position, 0).to(tl.int32)
    index = position // one.block_size
    block = draft.request + tl.zeros_like(position)
    if draft.blocks_ptr is not None:
        block = tl.load(draft.blocks_ptr + index, mask=mask, other=-1).to(tl.int64)
    mask = mask & (block >= 0) & (block < one.blocks)
    place = (position - index * one.block_size).to(tl.int64)
    return block * one.block_step + place * one.slot_step, mask


@triton.jit
def move_words(base, source, target, offs, mask, CLEAR: tl.constexpr):
    """Stage some columns of all rows, then store them: no thread stores before all have loaded."""
    x = tl.zeros(mask.shape, base.dtype.element_ty)
    if not CLEAR:
        x = tl.load(base + source[:, None] + offs[None, :], mask=mask)
        if is_hip():
            # A barrier of AMD does not wait for loads; what reads their results does.
            x = tl.inline_asm_elementwise("", "=v,0", [x.to(tl.int64)], tl.int64, False, 1).to(
                x.dtype
            )
        tl.debug_barrier()
    tl.store(base + target[:, None] + offs[None, :], x, mask=mask)


@triton.jit
def move_block(
    one, head, first, source, target, move, CLEAR: tl.constexpr, BLOCK_BYTES: tl.constexpr
):
    """Move bytes [first, first + BLOCK_BYTES) of one head's rows."""
    if one.move_bytes == 16:
        # The hint sits on the result of an addition: on the cast it would be ignored. Divisions
        # state the rest, so that no hint reaches the other branch.
        words_ptr = one.address.to(tl.pointer_type(tl.int64))
        base = tl.multiple_of(words_ptr + (head.to(tl.int64) * one.head_step + first) // 16 * 2, 16)
        offs = tl.arange(0, BLOCK_BYTES // 8)
        mask = move[:, None] & (offs < (one.row_bytes - first) // 16 * 2)[None, :]
        move_words(base, source // 16 * 2, target // 16 * 2, offs, mask, CLEAR)
    else:
        STEP: tl.constexpr = BLOCK_BYTES // 8
        bytes_ptr = one.address.to(tl.pointer_type(tl.uint8)) + head.to(tl.int64) * one.head_step
        for start in range(first, tl.minimum(first + BLOCK_BYTES, one.row_bytes), STEP):
            column = start + tl.arange(0, STEP)
            inside = move[:, None] & (column < one.row_bytes)[None, :]
            move_words(bytes_ptr, source, target, column, inside, CLEAR)


@triton.jit
def move_span(one, source, target, move, CLEAR: tl.constexpr, BLOCK_BYTES: tl.constexpr,
              SPAN: tl.constexpr):  # fmt: skip
    """Move this program's blocks of columns, all heads counted through."""
    per_head = tl.cdiv(one.row_bytes, BLOCK_BYTES)
    first = tl.program_id(2) * SPAN
    for block in range(first, tl.minimum(first + SPAN, one.heads * per_head)):
        start = (block % per_head) * BLOCK_BYTES
        move_block(one, block // per_head, start, source, target, move, CLEAR, BLOCK_BYTES)
