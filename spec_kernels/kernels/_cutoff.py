# ruff: noqa: N803, N806  (compile-time arguments are written in capitals)
"""The law of a row from the statistics of its tiles: cutoffs without sorting.

1. Combine the tiles: largest logit, sum, and with them the status. For the first argmax one tile
   is read again; where the maxima of its groups are known, the groups that hold it.
2. k groups have a maximum >= B, so the k-th largest id is >= B, and every id >= B lies in the
   groups whose maximum is. Bisection over the group maxima finds a B that few more groups reach;
   their numbers are listed, and only they are read.
3. Bisection over the listed ids, in the order of the floats: by count for top-k, then by mass for
   top-p. Ties stay together. It ends early once only one id is left between the bounds.
4. Without top-k the number of groups that top-p needs is unknown: few at first, then four times as
   many, until their mass suffices.
5. min-p needs no search. The mass that is kept in the end gives `log_sum`.

Traffic: 8 bytes per tile and one tile; with filters 512 bytes per tile and the listed groups, about
3 % of a row at top-k 50, up to 1.7 rows, and many times more from the cache, for a flat row at
top-p.
Determinism: the order of every sum depends on the row alone; no atomics.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from spec_kernels.kernels._device import (
    INF,
    INVALID_TARGET,
    LOG2E,
    MAX_TEMPERATURE,
    NEG_INF,
    OK,
    PAD_TOKEN,
    TOP_P_SLACK,
    combine_tiles,
    first_argmax,
    invert_temperature,
    is_sampled,
    is_valid_row,
    locate_slot,
    order_key,
    order_unkey,
)


class Row(NamedTuple):
    """A row that is searched."""

    ptr: Any
    stride_col: Any
    vocab: Any
    row_max: Any
    scale: Any


@triton.jit
def halve(low, high, SHIFT: tl.constexpr):
    """The upper middle of two keys, and its float."""
    middle = low + ((high.to(tl.int64) - low.to(tl.int64) + 1) >> 1).to(tl.int32)
    return middle, order_unkey(middle << SHIFT)


@triton.jit
def load_groups(group_ptr, start, groups, GROUP_BLOCK: tl.constexpr):
    """Maxima of GROUP_BLOCK groups, -inf behind the end."""
    offs = start + tl.arange(0, GROUP_BLOCK)
    return tl.load(group_ptr + offs, mask=offs < groups, other=NEG_INF)


@triton.jit
def bound_groups(
    group_ptr,
    groups,
    want,
    row_max,
    SHIFT: tl.constexpr,
    GROUP_BLOCK: tl.constexpr,
    FEW: tl.constexpr,
):
    """A bound that at least `want` group maxima reach, but few more where ties allow it."""
    low = order_key(tl.full((), NEG_INF, tl.float32)) >> SHIFT
    high = order_key(row_max) >> SHIFT
    limit = tl.where(want <= FEW, FEW, want + want // 4)
    maxima = load_groups(group_ptr, 0, groups, GROUP_BLOCK)
    count = groups
    while (low < high) & (count > limit):
        middle, bound = halve(low, high, SHIFT)
        reached = tl.sum((maxima >= bound).to(tl.int32), 0)
        for start in range(GROUP_BLOCK, groups, GROUP_BLOCK):
            more = load_groups(group_ptr, start, groups, GROUP_BLOCK)
            reached += tl.sum((more >= bound).to(tl.int32), 0)
        enough = reached >= want
        low = tl.where(enough, middle, low)
        count = tl.where(enough, reached, count)
        high = tl.where(enough, high, middle - 1)
    return order_unkey(low << SHIFT)


@triton.jit
def list_groups(list_ptr, group_ptr, groups, bound, GROUP_BLOCK: tl.constexpr):
    """Write the numbers of the groups whose maximum is >= bound, in order; return how many."""
    tl.debug_barrier()  # the list before may still be read
    count = 0
    for start in range(0, groups, GROUP_BLOCK):
        offs = start + tl.arange(0, GROUP_BLOCK)
        maxima = load_groups(group_ptr, start, groups, GROUP_BLOCK)
        chosen = ((maxima >= bound) & (offs < groups)).to(tl.int32)
        place = count + tl.cumsum(chosen, 0) - 1
        tl.store(list_ptr + place, offs, mask=chosen > 0)
        count += tl.sum(chosen, 0)
    tl.debug_barrier()  # every thread reads the list next
    return count


@triton.jit
def load_candidates(row, list_ptr, start, listed, SHAPE: tl.constexpr, FEW: tl.constexpr):
    """Logits of FEW listed groups: `[CHUNKS, FEW, WIDTH]`, -inf behind the end."""
    CHUNKS: tl.constexpr = SHAPE[0]
    LANES: tl.constexpr = SHAPE[1]
    WIDTH: tl.constexpr = SHAPE[2]
    place = start + tl.arange(0, FEW)
    group = tl.load(list_ptr + place, mask=place < listed, other=0)
    first = group // LANES * (CHUNKS * LANES * WIDTH) + group % LANES * WIDTH
    chunk = tl.arange(0, CHUNKS) * (LANES * WIDTH)
    ids = first[None, :, None] + chunk[:, None, None] + tl.arange(0, WIDTH)[None, None, :]
    mask = (place < listed)[None, :, None] & (ids < row.vocab)
    return tl.load(row.ptr + ids * row.stride_col, mask=mask, other=NEG_INF).to(tl.float32)


@triton.jit
def mass_from(x, bound, row):
    """Unnormalised mass of the logits that are >= bound."""
    return tl.sum(tl.where(x >= bound, tl.exp2((x - row.row_max) * row.scale), 0.0))


@triton.jit
def measure_candidates(x, bound, row, list_ptr, listed, SHAPE: tl.constexpr, FEW: tl.constexpr):
    """Number and mass of the candidates that are >= bound; x is their first block."""
    count = tl.sum((x >= bound).to(tl.int32))
    mass = mass_from(x, bound, row)
    for start in range(FEW, listed, FEW):
        more = load_candidates(row, list_ptr, start, listed, SHAPE, FEW)
        count += tl.sum((more >= bound).to(tl.int32))
        mass += mass_from(more, bound, row)
    return count, mass


@triton.jit
def finish_candidates(
    x, bound, least, row, list_ptr, listed, SHAPE: tl.constexpr, FEW: tl.constexpr
):
    """Smallest candidate >= bound, and the mass of those that are also >= least."""
    both = tl.maximum(bound, least)
    smallest = tl.min(tl.where(x >= bound, x, INF))
    mass = mass_from(x, both, row)
    for start in range(FEW, listed, FEW):
        more = load_candidates(row, list_ptr, start, listed, SHAPE, FEW)
        smallest = tl.minimum(smallest, tl.min(tl.where(more >= bound, more, INF)))
        mass += mass_from(more, both, row)
    return smallest, mass


@triton.jit
def search_cutoff(
    row,
    row_sum,
    top_k,  # off unless 0 < top_k < vocab
    top_p,  # off unless < 1
    least,  # the bound of min-p, -inf if off
    list_ptr,
    group_ptr,
    groups,
    SHIFT: tl.constexpr,
    SHAPE: tl.constexpr,
    FEW: tl.constexpr,
    GROUP_BLOCK: tl.constexpr,
):
    """Cutoff and kept mass of a row with a filter.

    Stage 0 is top-k, stage 1 top-p: bisection between a bound that keeps enough and the largest
    logit, until no float or only one candidate is left between the two. Without top-k the number
    of groups that top-p needs is unknown: few at first, then four times as many.
    """
    by_count = (top_k > 0) & (top_k < row.vocab)
    by_mass = top_p < 1.0
    share = top_p * (1.0 - TOP_P_SLACK)
    want = tl.where(by_count, top_k, FEW // 2)
    cutoff = least
    mass = row_sum
    searching = True
    while searching:
        bound = least
        if by_count | by_mass:
            bound = tl.full((), NEG_INF, tl.float32)
            if want <= groups:
                bound = bound_groups(group_ptr, groups, want, row.row_max, SHIFT, GROUP_BLOCK, FEW)
        listed = list_groups(list_ptr, group_ptr, groups, bound, GROUP_BLOCK)
        x = load_candidates(row, list_ptr, 0, listed, SHAPE, FEW)
        count, mass = measure_candidates(x, bound, row, list_ptr, listed, SHAPE, FEW)
        searching = by_mass & (not by_count) & (mass < share * row_sum) & (bound > NEG_INF)
        want *= 4
        if not searching:
            low = order_key(bound) >> SHIFT
            for stage in range(2):
                want_count = tl.where(stage == 0, top_k, 0)
                whole = tl.where(by_count, mass, row_sum)
                want_mass = tl.where(stage == 0, 0.0, share * whole)
                high = order_key(row.row_max) >> SHIFT
                high = tl.where(tl.where(stage == 0, by_count, by_mass), high, low)
                above = 0
                while (low < high) & (count - above > 1):
                    middle, probe = halve(low, high, SHIFT)
                    reached, weight = measure_candidates(
                        x, probe, row, list_ptr, listed, SHAPE, FEW
                    )
                    enough = (reached >= want_count) & (weight >= want_mass)
                    low = tl.where(enough, middle, low)
                    count = tl.where(enough, reached, count)
                    mass = tl.where(enough, weight, mass)
                    high = tl.where(enough, high, middle - 1)
                    above = tl.where(enough, above, reached)
            if by_count | by_mass:
                bound = order_unkey(low << SHIFT)
            smallest, mass = finish_candidates(x, bound, least, row, list_ptr, listed, SHAPE, FEW)
            if by_count | by_mass:
                cutoff = tl.maximum(smallest, least)
    return cutoff, mass


@triton.jit(do_not_specialize=["rows", "batch", "nodes"])
def find_cutoff_kernel(
    inv_temperature_ptr,  # [slots] f32, out
    cutoff_ptr,  # [slots] f32, out
    row_max_ptr,  # [slots] f32, out
    log_sum_ptr,  # [slots] f32, out
    argmax_ptr,  # [slots] i64, out
    status_ptr,  # [slots] i32, out
    list_ptr,  # [slots, tiles * LANES] i32, scratch, or None: no filter
    logits_ptr,  # [rows, vocab] float
    tile_max_ptr,  # [slots, tiles] f32
    tile_sum_ptr,  # [slots, tiles] f32
    group_max_ptr,  # [slots, tiles * LANES] f32, or None: no filter
    temperature_ptr,  # [batch] f32
    top_k_ptr,  # [batch] i32, or None
    top_p_ptr,  # [batch] f32, or None
    min_p_ptr,  # [batch] f32, or None
    slot_row_ptr,  # [slots] i32, or None: slot i is row i
    slot_request_ptr,  # [slots] i32, or None: a slot is a node of a request
    num_nodes_ptr,  # [batch] i32, or None: every slot is present
    logits_stride_row,
    logits_stride_col,
    rows,
    batch,
    nodes,
    vocab,
    tiles,
    SHIFT: tl.constexpr,  # low bits of a float32 that the logits' dtype lacks
    CHUNKS: tl.constexpr,
    LANES: tl.constexpr,
    WIDTH: tl.constexpr,
    TILES: tl.constexpr,  # >= tiles, a power of two
    FEW: tl.constexpr,  # groups held in registers
    GROUP_BLOCK: tl.constexpr,
):
    """Law of one slot. Floor: 8 bytes per tile, and one tile; with filters 512 bytes per tile and
    the listed groups. Of the instructions, 1-2 per group and step of the first search and 5 (count)
    to 9 (mass) per candidate and step of the second."""
    slot, row, request, exists = locate_slot(
        tl.program_id(0), tl.program_id(1), slot_row_ptr, slot_request_ptr, num_nodes_ptr, rows,
        batch, nodes,
    )  # fmt: skip
    row_ptr = logits_ptr + row.to(tl.int64) * logits_stride_row
    temperature = tl.load(temperature_ptr + request, mask=exists, other=0.0)
    valid = exists & (temperature >= 0.0) & (temperature <= MAX_TEMPERATURE)
    top_k = 0
    top_p = tl.full((), 1.0, tl.float32)
    min_p = tl.full((), 0.0, tl.float32)
    if top_k_ptr is not None:
        top_k = tl.load(top_k_ptr + request, mask=exists, other=0)
    if top_p_ptr is not None:
        top_p = tl.load(top_p_ptr + request, mask=exists, other=1.0)
        valid = valid & (top_p > 0.0) & (top_p <= 1.0)
    if min_p_ptr is not None:
        min_p = tl.load(min_p_ptr + request, mask=exists, other=0.0)
        valid = valid & (min_p >= 0.0) & (min_p <= 1.0)

    tile = tl.arange(0, TILES)
    place = slot.to(tl.int64) * tiles + tile
    mask_tile = tile < tl.where(exists, tiles, 0)
    tile_max = tl.load(tile_max_ptr + place, mask=mask_tile, other=NEG_INF)
    tile_sum = tl.load(tile_sum_ptr + place, mask=mask_tile, other=0.0)
    inv_temperature = invert_temperature(temperature)
    scale = inv_temperature * LOG2E
    row_max, mass = combine_tiles(tile_max, tile_sum, scale, 0)
    valid = valid & is_valid_row(row_max, mass)

    argmax = tl.full((), PAD_TOKEN, tl.int32)
    group_ptr = group_max_ptr
    if group_max_ptr is not None:
        group_ptr = group_max_ptr + slot.to(tl.int64) * tiles * LANES
    if valid:
        argmax = first_argmax(
            row_ptr, tile_max, row_max, vocab, CHUNKS, LANES, WIDTH, logits_stride_col, group_ptr
        )
    sampled = valid & is_sampled(temperature)
    tl.store(inv_temperature_ptr + slot, tl.where(sampled, inv_temperature, 0.0))
    tl.store(row_max_ptr + slot, tl.where(valid, row_max, 0.0))
    tl.store(argmax_ptr + slot, argmax.to(tl.int64))
    tl.store(status_ptr + slot, tl.where(valid, OK, INVALID_TARGET))

    cutoff = tl.where(valid, tl.where(sampled, NEG_INF, row_max), INF)
    if group_max_ptr is not None:
        least = tl.where(min_p > 0.0, row_max + temperature * tl.log(min_p), NEG_INF)
        has_filter = ((top_k > 0) & (top_k < vocab)) | (top_p < 1.0) | (min_p > 0.0)
        if sampled & has_filter:
            groups = tiles * LANES
            start = slot.to(tl.int64) * groups
            searched = Row(row_ptr, logits_stride_col, vocab, row_max, scale)
            cutoff, mass = search_cutoff(
                searched, mass, top_k, top_p, least, list_ptr + start, group_ptr, groups,
                SHIFT, (CHUNKS, LANES, WIDTH), FEW, GROUP_BLOCK,
            )  # fmt: skip
    tl.store(cutoff_ptr + slot, cutoff)
    tl.store(log_sum_ptr + slot, tl.where(sampled, tl.log(mass), 0.0))
