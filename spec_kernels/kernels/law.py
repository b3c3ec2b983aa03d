# ruff: noqa: N803, N806  (compile-time arguments are written in capitals)
"""Laws of rows of logits in two launches, without sorting and without a `[rows, vocab]` tensor.

    p(x) = exp((l(x) - row_max) * inv_temperature - log_sum)   if l(x) >= cutoff, else 0

1. `tile_stats` (slots, tiles): largest logit and sum of `exp2` of every tile; with filters also
   the largest logit of every group (the ids of one lane).
2. `find_cutoff` (slots,): combines the tiles. k groups have a maximum >= B, so the k-th largest id
   is >= B and every id >= B lies in those groups: only they are read again. Bisection on the
   order of the floats finds the cutoff: by count for top-k, by mass for top-p. Ties stay.

A slot is a row, or a node of a padded draft that names its row.

Traffic: `tile_stats` reads a row once and writes 8 bytes per tile, 512 more with filters.
`find_cutoff` reads those, one tile for the first argmax, and the chosen groups: about 3 % of a row
at top-k 50, up to 1.7 rows from the cache for a flat row at top-p.
Determinism: every sum has a fixed order that depends on the row alone; there are no atomics.
A NaN or an infinity shows in (max, sum), so status costs no pass.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from spec_kernels.kernels._adjust import adjust_logits_
from spec_kernels.kernels._device import (
    GREEDY_TEMPERATURE,
    INF,
    INVALID_TARGET,
    LOG2E,
    MAX_TEMPERATURE,
    NEG_INF,
    OK,
    PAD_TOKEN,
    TOP_P_SLACK,
    TileConfig,
    column_stride,
    combine_tiles,
    config_of,
    first_argmax,
    is_valid_row,
    load_tile,
    measure_tile,
    order_key,
    order_unkey,
)
from spec_kernels.kernels._overlap import overlap
from spec_kernels.types import Law, SamplingParams

__all__ = ["adjust_logits_", "find_cutoff", "overlap", "row_law", "tile_stats"]

GROUP_BLOCK = 4096
"""Group maxima held in registers: every group up to a vocabulary of 262,144."""

FEW = 64
"""Groups whose ids are held in registers during a search: enough for top-k up to 64."""


# ------------------------------------------------------------------------------------ parameters


@triton.jit
def is_sampled(temperature):
    """Not greedy and in range; false for NaN."""
    return (temperature >= GREEDY_TEMPERATURE) & (temperature <= MAX_TEMPERATURE)


@triton.jit
def invert_temperature(temperature):
    """1 / temperature, and 1 where the row isn't sampled.

    One Newton step makes up for the approximate division; the exact one calls a subroutine, for
    which every kernel would save registers.
    """
    divisor = tl.where(is_sampled(temperature), temperature, 1.0)
    inverse = 1.0 / divisor
    return tl.fma(inverse, tl.fma(-divisor, inverse, 1.0), inverse)


@triton.jit
def locate_slot(
    slot,
    slot_row_ptr,  # [slots] i32, or None: slot i is row i
    slot_request_ptr,  # [slots] i32, or None: slot i belongs to request i // nodes
    num_nodes_ptr,  # [batch] i32, or None: every slot is present
    rows,
    batch,
    nodes,
):
    """Row and request of a slot, and whether both exist. Row and request are 0 if not."""
    row = slot
    request = slot // nodes
    if slot_row_ptr is not None:
        row = tl.load(slot_row_ptr + slot)
    if slot_request_ptr is not None:
        request = tl.load(slot_request_ptr + slot)
    exists = (request >= 0) & (request < batch) & (row >= 0) & (row < rows)
    if num_nodes_ptr is not None:
        node = slot - request * nodes
        exists = exists & (node < tl.load(num_nodes_ptr + request, mask=exists, other=0))
    return tl.where(exists, row, 0), tl.where(exists, request, 0), exists


# ------------------------------------------------------------------------------------ statistics


@triton.jit(do_not_specialize=["rows", "batch", "nodes"])
def tile_stats_kernel(
    tile_max_ptr,  # [slots, tiles] f32, out
    tile_sum_ptr,  # [slots, tiles] f32, out: sum of exp2((l - tile max) * scale)
    group_max_ptr,  # [slots, tiles * LANES] f32, out, or None
    logits_ptr,  # [rows, vocab] float
    temperature_ptr,  # [batch] f32
    slot_row_ptr,  # [slots] i32, or None: slot i is row i
    slot_request_ptr,  # [slots] i32, or None: slot i belongs to request i // nodes
    num_nodes_ptr,  # [batch] i32, or None: every slot is present
    logits_stride_row,
    logits_stride_col,
    rows,
    batch,
    nodes,
    vocab,
    CHUNKS: tl.constexpr,
    LANES: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Statistics of one tile. Floor: the tile's bytes once; 8 (bf16) or 7 (f32) instructions an
    id, 128-bit loads on aligned rows. A slot that does not exist writes nothing."""
    slot = tl.program_id(0)
    tile = tl.program_id(1)
    TILE: tl.constexpr = CHUNKS * LANES * WIDTH
    row, request, exists = locate_slot(
        slot, slot_row_ptr, slot_request_ptr, num_nodes_ptr, rows, batch, nodes
    )
    if not exists:
        return

    scale = invert_temperature(tl.load(temperature_ptr + request)) * LOG2E
    row_ptr = logits_ptr + row.to(tl.int64) * logits_stride_row
    x = load_tile(row_ptr, tile * TILE, vocab, NEG_INF, CHUNKS, LANES, WIDTH, logits_stride_col)
    tile_max, tile_sum, lane_max = measure_tile(x, scale)

    place = slot.to(tl.int64) * tl.num_programs(1) + tile
    tl.store(tile_max_ptr + place, tile_max)
    tl.store(tile_sum_ptr + place, tile_sum)
    if group_max_ptr is not None:
        tl.store(group_max_ptr + place * LANES + tl.arange(0, LANES), lane_max)


# --------------------------------------------------------------------------------- cutoff search


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
    limit = tl.maximum(want + want // 4, FEW)
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
    slot_request_ptr,  # [slots] i32, or None: slot i belongs to request i // nodes
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
    """Law of one slot. Floor: 8 bytes per tile and one tile; with filters 512 bytes per tile and
    the listed groups. Of the instructions, 1-2 per group and step of the first search and 5 (count)
    to 9 (mass) per candidate and step of the second."""
    slot = tl.program_id(0)
    row, request, exists = locate_slot(
        slot, slot_row_ptr, slot_request_ptr, num_nodes_ptr, rows, batch, nodes
    )
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
    if valid:
        argmax = first_argmax(
            row_ptr, tile_max, row_max, vocab, CHUNKS, LANES, WIDTH, logits_stride_col
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
                searched, mass, top_k, top_p, least, list_ptr + start, group_max_ptr + start,
                groups, SHIFT, (CHUNKS, LANES, WIDTH), FEW, GROUP_BLOCK,
            )  # fmt: skip
    tl.store(cutoff_ptr + slot, cutoff)
    tl.store(log_sum_ptr + slot, tl.where(sampled, tl.log(mass), 0.0))


# ------------------------------------------------------------------------------------- launchers


class TileStats(NamedTuple):
    """Statistics of the tiles of each slot, and the tile they were made with.

    Attributes:
        tile_max, tile_sum: `[slots, tiles] float32`: largest logit, and `sum exp2((l - tile_max) *
            inv_temperature * LOG2E)`; inv_temperature is 1 in greedy rows. Not written for slots
            that do not exist.
        group_max: `[slots, tiles * lanes] float32`, or None without a filter.
        config: the tile.
    """

    tile_max: Tensor
    tile_sum: Tensor
    group_max: Tensor | None
    config: TileConfig


class Slots(NamedTuple):
    """Which row and request each slot stands for.

    Attributes:
        count: number of slots.
        row: `[slots] int32`, or None: slot i is row i.
        request: `[slots] int32`, or None: slot i belongs to request `i // nodes`.
        num_nodes: `[batch] int32`, or None: every slot is present.
        nodes: slots per request, where `request` is None.
    """

    count: int
    row: Tensor | None = None
    request: Tensor | None = None
    num_nodes: Tensor | None = None
    nodes: int = 1


def has_filters(params: SamplingParams) -> bool:
    """Say whether any request may have a cutoff."""
    return any(tensor is not None for tensor in params[1:])


def tile_stats(
    logits: Tensor, params: SamplingParams, slots: Slots, config: TileConfig | None = None
) -> TileStats:
    """Measure every tile of the slots' rows."""
    rows, vocab = logits.shape
    config = config or config_of(logits)
    tiles = config.tiles(vocab)
    tile_max = logits.new_empty(slots.count, tiles, dtype=torch.float32)
    tile_sum = torch.empty_like(tile_max)
    group_max = None
    if has_filters(params):
        group_max = tile_max.new_empty(slots.count, tiles * config.lanes)
    if slots.count:
        tile_stats_kernel[(slots.count, tiles)](
            tile_max_ptr=tile_max,
            tile_sum_ptr=tile_sum,
            group_max_ptr=group_max,
            logits_ptr=logits,
            temperature_ptr=params.temperature,
            slot_row_ptr=slots.row,
            slot_request_ptr=slots.request,
            num_nodes_ptr=slots.num_nodes,
            logits_stride_row=logits.stride(0),
            logits_stride_col=column_stride(logits),
            rows=rows,
            batch=params.temperature.shape[0],
            nodes=slots.nodes,
            vocab=vocab,
            CHUNKS=config.chunks,
            LANES=config.lanes,
            WIDTH=config.width,
            num_warps=config.num_warps,
        )
    return TileStats(tile_max, tile_sum, group_max, config)


def find_cutoff(logits: Tensor, stats: TileStats, params: SamplingParams, slots: Slots) -> Law:
    """Find the law of every slot from the statistics of its tiles."""
    rows, vocab = logits.shape
    config = stats.config
    tiles = config.tiles(vocab)
    floats = logits.new_empty(4, slots.count, dtype=torch.float32)
    argmax = logits.new_empty(slots.count, dtype=torch.int64)
    status = logits.new_empty(slots.count, dtype=torch.int32)
    law = Law(*floats.unbind(0), argmax, status)
    chosen = None
    if stats.group_max is not None:
        chosen = torch.empty_like(stats.group_max, dtype=torch.int32)
    if slots.count:
        find_cutoff_kernel[(slots.count,)](
            inv_temperature_ptr=law.inv_temperature,
            cutoff_ptr=law.cutoff,
            row_max_ptr=law.row_max,
            log_sum_ptr=law.log_sum,
            argmax_ptr=law.argmax,
            status_ptr=law.status,
            list_ptr=chosen,
            logits_ptr=logits,
            tile_max_ptr=stats.tile_max,
            tile_sum_ptr=stats.tile_sum,
            group_max_ptr=stats.group_max,
            temperature_ptr=params.temperature,
            top_k_ptr=params.top_k,
            top_p_ptr=params.top_p,
            min_p_ptr=params.min_p,
            slot_row_ptr=slots.row,
            slot_request_ptr=slots.request,
            num_nodes_ptr=slots.num_nodes,
            logits_stride_row=logits.stride(0),
            logits_stride_col=column_stride(logits),
            rows=rows,
            batch=params.temperature.shape[0],
            nodes=slots.nodes,
            vocab=vocab,
            tiles=tiles,
            SHIFT={torch.float32: 0, torch.bfloat16: 16, torch.float16: 13}[logits.dtype],
            CHUNKS=config.chunks,
            LANES=config.lanes,
            WIDTH=config.width,
            TILES=triton.next_power_of_2(tiles),
            FEW=FEW if config.width > 1 else FEW // 2,
            GROUP_BLOCK=min(GROUP_BLOCK, triton.next_power_of_2(tiles * config.lanes)),
            num_warps=config.num_warps,
        )
    return law


def row_law(logits: Tensor, params: SamplingParams, row_request: Tensor) -> Law:
    """Compute the law of each row of logits: two launches."""
    params = SamplingParams(*(None if p is None else p.contiguous() for p in params))
    slots = Slots(logits.shape[0], request=row_request.contiguous())
    return find_cutoff(logits, tile_stats(logits, params, slots), params, slots)
