# ruff: noqa: N803, N806  (compile-time arguments are written in capitals)
"""Acceptance probability of pairs of rows: `beta = sum_x min(p(x), q(x))`, in two launches.

1. `overlap_kernel` (rows, tiles): sum over one tile. A greedy row is one-hot at its argmax.
2. `add_kernel` (rows,): sum over tiles; NaN where either row is invalid.

Traffic: both rows once, 4 bytes per tile in between; with a map, 4 bytes an id of it, and the
draft row in the order of the map.
Determinism: the order of every sum depends on vocabulary size and layout alone.
"""

from __future__ import annotations

import triton
import triton.language as tl

from spec_kernels.kernels._device import (
    NEG_INF,
    load_law,
    load_tile,
    sum_tile,
    tile_offsets,
    weigh,
)


@triton.jit
def weigh_any(x, ids, law, IS_LAW: tl.constexpr):
    """Probabilities of logits, also of a greedy row; `ids` are those of the law's own row."""
    weight = weigh(x, law, IS_LAW)
    if law.scale == 0.0:
        weight = (ids == law.argmax).to(tl.float32)
    return weight


@triton.jit
def overlap_kernel(
    part_ptr,  # [rows, tiles] f32, out
    target_ptr,  # [rows, vocab] float
    target_law,  # Law of pointers, or None: probabilities
    draft_ptr,  # [rows, draft_vocab] float
    draft_law,  # Law of pointers, or None: probabilities
    map_ptr,  # [vocab] i32, draft column of a target id, -1 = none; or None
    target_stride_row,
    target_stride_col,
    draft_stride_row,
    draft_stride_col,
    vocab,
    draft_vocab,
    CHUNKS: tl.constexpr,
    LANES: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Overlap within one tile. Floor: `2 * rows * vocab * itemsize` bytes: both rows once; 20
    instructions per pair."""
    row = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    IS_P: tl.constexpr = target_law is not None
    IS_Q: tl.constexpr = draft_law is not None
    OTHER_P: tl.constexpr = NEG_INF if IS_P else 0.0
    OTHER_Q: tl.constexpr = NEG_INF if IS_Q else 0.0
    p_law = load_law(target_law, row)
    q_law = load_law(draft_law, row)
    if not (p_law.is_valid & q_law.is_valid):
        return

    first = tile * (CHUNKS * LANES * WIDTH)
    ids = first + tile_offsets(CHUNKS, LANES, WIDTH)
    p_ptr = target_ptr + row * target_stride_row
    q_ptr = draft_ptr + row * draft_stride_row
    x = load_tile(p_ptr, first, vocab, OTHER_P, CHUNKS, LANES, WIDTH, target_stride_col)
    if map_ptr is None:
        columns = ids
        z = load_tile(q_ptr, first, draft_vocab, OTHER_Q, CHUNKS, LANES, WIDTH, draft_stride_col)
    else:
        columns = tl.load(map_ptr + ids, mask=ids < vocab, other=-1)
        is_known = (columns >= 0) & (columns < draft_vocab)
        places = columns.to(tl.int64) * draft_stride_col
        z = tl.load(q_ptr + places, mask=is_known, other=OTHER_Q).to(tl.float32)

    p = weigh_any(x, ids, p_law, IS_P)
    q = weigh_any(z, columns, q_law, IS_Q)
    shared = tl.minimum(p, q, propagate_nan=tl.PropagateNan.ALL)
    tl.store(part_ptr + row * tl.num_programs(1) + tile, sum_tile(shared))


@triton.jit
def add_kernel(
    beta_ptr,  # [rows] f32, out
    part_ptr,  # [rows, tiles] f32
    target_law,  # Law of pointers, or None: probabilities
    draft_law,  # Law of pointers, or None: probabilities
    tiles,
    TILES: tl.constexpr,  # >= tiles, a power of two
):
    """Overlap of one pair of rows: 4 bytes per tile."""
    row = tl.program_id(0).to(tl.int64)
    is_valid = load_law(target_law, row).is_valid & load_law(draft_law, row).is_valid
    tile = tl.arange(0, TILES)
    mask_tile = tile < tl.where(is_valid, tiles, 0)
    beta = tl.sum(tl.load(part_ptr + row * tiles + tile, mask=mask_tile, other=0.0), 0)
    tl.store(beta_ptr + row, tl.where(is_valid, beta, float("nan")))
