# ruff: noqa: N803, N806  (compile-time arguments are written in capitals)
"""Penalties, bias and masks: one pass over the logits, in place.

    seen(x)  = count(x) > 0 or x in the prompt          count = committed output + drafts 1..i
    l(x)    <- l(x) / r or l(x) * r where seen          positive or negative logit
    l(x)    <- l(x) - frequency * count(x) - presence * [count(x) > 0] + bias(x)
    l(x)    <- -inf where x is not allowed

1. A program holds a tile in registers. Drafts and bias entries that fall into it are few: each is
   compared with all its ids, in order, so duplicates add and nothing needs atomics.
2. The tile is stored once, rounded once.

Traffic: the logits read and written once, 4 bytes an id of counts, 1/8 byte per bit mask.
Determinism: an id's value depends on its own inputs only.
"""

from __future__ import annotations

import triton
import triton.language as tl

from spec_kernels.kernels._device import INF, NEG_INF, load_tile, tile_offsets


@triton.jit
def read_bits(words_ptr, ids, mask):
    """Bit x % 32 of word x // 32 for every id x; false outside the mask."""
    words = tl.load(words_ptr + ids // 32, mask=mask, other=0)
    return ((words >> (ids % 32)) & 1) != 0


@triton.jit
def divide(x, divisor):
    """x / divisor with one Newton step: the exact division would call a subroutine."""
    inverse = 1.0 / divisor
    quotient = x * inverse
    refined = tl.fma(tl.fma(-quotient, divisor, x), inverse, quotient)
    return tl.where(tl.abs(quotient) < INF, refined, quotient)  # inf - inf is NaN


@triton.jit
def count_drafts(count, ids, first, tokens_ptr, last, TILE: tl.constexpr):
    """Add the occurrences of the drafts at nodes 1..last."""
    for node in range(1, last + 1):
        token = tl.load(tokens_ptr + node)
        if (token >= first) & (token < first + TILE):
            count += (ids == token).to(tl.int32)
    return count


@triton.jit
def add_bias(
    x, ids, first, ids_ptr, values_ptr, max_bias, BIAS_BLOCK: tl.constexpr, TILE: tl.constexpr
):
    """Add the bias entries of a tile, in their order."""
    for start in range(0, max_bias, BIAS_BLOCK):
        place = start + tl.arange(0, BIAS_BLOCK)
        tokens = tl.load(ids_ptr + place, mask=place < max_bias, other=-1)
        inside = (tokens >= first) & (tokens < first + TILE)
        if tl.max(inside.to(tl.int32), 0) > 0:
            for entry in range(start, tl.minimum(start + BIAS_BLOCK, max_bias)):
                token = tl.load(ids_ptr + entry)
                if (token >= first) & (token < first + TILE):
                    x += tl.where(ids == token, tl.load(values_ptr + entry), 0.0)
    return x


@triton.jit(do_not_specialize=["batch", "nodes", "max_bias"])
def adjust_kernel(
    logits_ptr,  # [rows, vocab] float, in and out
    row_request_ptr,  # [rows] i32
    allowed_ptr,  # [rows, ceil(vocab / 32)] i32, or None
    bias_ids_ptr,  # [batch, max_bias] i64, or None
    bias_values_ptr,  # [batch, max_bias] f32, or None
    counts_ptr,  # [batch, vocab] i32, or None
    prompt_ptr,  # [batch, ceil(vocab / 32)] i32, or None
    repetition_ptr,  # [batch] f32, or None
    presence_ptr,  # [batch] f32, or None
    frequency_ptr,  # [batch] f32, or None
    draft_tokens_ptr,  # [batch, nodes] int, or None
    row_node_ptr,  # [rows] i32, or None
    logits_stride_row,
    logits_stride_col,
    batch,
    nodes,
    max_bias,
    vocab,
    CHUNKS: tl.constexpr,
    LANES: tl.constexpr,
    WIDTH: tl.constexpr,
    BIAS_BLOCK: tl.constexpr,
):
    """Adjust one tile of one row; 10 instructions an id for a mask alone, about 50 with everything.
    A row whose request does not exist is left alone.

    Floor: `rows * vocab * (2 * itemsize + 4 * counts) + rows * (vocab // 8) * masks` bytes: the row
    read and written, its counts, and one or two masks of bits.
    """
    row = tl.program_id(0).to(tl.int64)
    TILE: tl.constexpr = CHUNKS * LANES * WIDTH
    first = tl.program_id(1) * TILE
    request = tl.load(row_request_ptr + row).to(tl.int64)
    if (request < 0) | (request >= batch):
        return

    row_ptr = logits_ptr + row * logits_stride_row
    words = (vocab + 31) // 32
    ids = first + tile_offsets(CHUNKS, LANES, WIDTH)
    mask = ids < vocab
    x = load_tile(row_ptr, first, vocab, 0.0, CHUNKS, LANES, WIDTH, logits_stride_col)

    HAS_PENALTY: tl.constexpr = (
        (repetition_ptr is not None) or (presence_ptr is not None) or (frequency_ptr is not None)
    )
    if HAS_PENALTY:
        count = tl.zeros((CHUNKS, LANES, WIDTH), tl.int32)
        if counts_ptr is not None:
            count = tl.load(counts_ptr + request * vocab + ids, mask=mask, other=0)
        if draft_tokens_ptr is not None:
            last = tl.minimum(tl.load(row_node_ptr + row), nodes - 1)
            count = count_drafts(count, ids, first, draft_tokens_ptr + request * nodes, last, TILE)
        if repetition_ptr is not None:
            penalty = tl.load(repetition_ptr + request)
            seen = count > 0
            if prompt_ptr is not None:
                seen = seen | read_bits(prompt_ptr + request * words, ids, mask)
            x = tl.where(seen, tl.where(x > 0.0, divide(x, penalty), x * penalty), x)
        if frequency_ptr is not None:
            x -= tl.load(frequency_ptr + request) * count.to(tl.float32)
        if presence_ptr is not None:
            x -= tl.where(count > 0, tl.load(presence_ptr + request), 0.0)
    if bias_ids_ptr is not None:
        start = request * max_bias
        x = add_bias(
            x, ids, first, bias_ids_ptr + start, bias_values_ptr + start, max_bias, BIAS_BLOCK, TILE
        )
    if allowed_ptr is not None:
        x = tl.where(read_bits(allowed_ptr + row * words, ids, mask), x, NEG_INF)

    out = x.to(logits_ptr.dtype.element_ty)
    if first + TILE <= vocab:
        tl.store(row_ptr + ids * logits_stride_col, out)
    else:
        tl.store(row_ptr + ids * logits_stride_col, out, mask=mask)
