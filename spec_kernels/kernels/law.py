# ruff: noqa: N803, N806  (compile-time arguments are written in capitals)
"""Laws of rows of logits in two launches, without sorting and without a `[rows, vocab]` tensor.

    p(x) = exp((l(x) - row_max) * inv_temperature - log_sum)   if l(x) >= cutoff, else 0

1. `tile_stats` (requests, nodes, tiles): largest logit and sum of `exp2` of every tile; with
   filters also the largest logit of every group (the ids of one lane).
2. `find_cutoff` (requests, nodes): combines the tiles, and searches cutoffs (see `_cutoff`).

A slot is a row, or a node of a padded draft that names its row. A NaN or an infinity shows in
(max, sum), so status costs no pass. `adjust_logits_` and `overlap` launch the kernels of `_adjust`
and `_overlap`.

Traffic: `tile_stats` reads a row once and writes 8 bytes per tile, 512 more with filters.
Determinism: every sum has a fixed order that depends on the row alone; there are no atomics.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from spec_kernels.kernels._adjust import adjust_kernel
from spec_kernels.kernels._cutoff import find_cutoff_kernel
from spec_kernels.kernels._device import (
    LOG2E,
    NEG_INF,
    TileConfig,
    align,
    column_stride,
    config_of,
    invert_temperature,
    load_tile,
    locate_slot,
    measure_tile,
)
from spec_kernels.kernels._overlap import add_kernel, overlap_kernel
from spec_kernels.types import Law, SamplingParams

BIAS_BLOCK = 128
"""Bias entries that are compared with the bounds of a tile at once."""

GROUP_BLOCK = 4096
"""Group maxima held in registers: every group up to a vocabulary of 262,144."""

FEW = 64
"""Groups whose ids are held in registers during a search: enough for top-k up to 64."""


# ------------------------------------------------------------------------------------ statistics


@triton.jit(do_not_specialize=["rows", "batch", "nodes"])
def tile_stats_kernel(
    tile_max_ptr,  # [slots, tiles] f32, out
    tile_sum_ptr,  # [slots, tiles] f32, out: sum of exp2((l - tile max) * scale)
    group_max_ptr,  # [slots, tiles * LANES] f32, out, or None
    logits_ptr,  # [rows, vocab] float
    temperature_ptr,  # [batch] f32
    slot_row_ptr,  # [slots] i32, or None: slot i is row i
    slot_request_ptr,  # [slots] i32, or None: a slot is a node of a request
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
    """Statistics of one tile; 8 (bf16) or 7 (f32) instructions an id, 128-bit loads on aligned
    rows. A slot that does not exist writes nothing.

    Floor: `slots * vocab * itemsize` bytes: each row once.
    """
    tile = tl.program_id(2)
    TILE: tl.constexpr = CHUNKS * LANES * WIDTH
    slot, row, request, exists = locate_slot(
        tl.program_id(0), tl.program_id(1), slot_row_ptr, slot_request_ptr, num_nodes_ptr, rows,
        batch, nodes,
    )  # fmt: skip
    if not exists:
        return

    scale = invert_temperature(tl.load(temperature_ptr + request)) * LOG2E
    row_ptr = logits_ptr + row.to(tl.int64) * logits_stride_row
    x = load_tile(row_ptr, tile * TILE, vocab, NEG_INF, CHUNKS, LANES, WIDTH, logits_stride_col)
    tile_max, tile_sum, lane_max = measure_tile(x, scale)

    place = slot.to(tl.int64) * tl.num_programs(2) + tile
    tl.store(tile_max_ptr + place, tile_max)
    tl.store(tile_sum_ptr + place, tile_sum)
    if group_max_ptr is not None:
        tl.store(group_max_ptr + place * LANES + tl.arange(0, LANES), lane_max)


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
        count: number of slots, a multiple of `nodes`.
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
        tile_stats_kernel[(slots.count // slots.nodes, slots.nodes, tiles)](
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
        find_cutoff_kernel[(slots.count // slots.nodes, slots.nodes)](
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
    logits = align(logits)
    params = SamplingParams(*(None if p is None else p.contiguous() for p in params))
    slots = Slots(logits.shape[0], request=row_request.contiguous())
    return find_cutoff(logits, tile_stats(logits, params, slots), params, slots)


def adjust_logits_(
    logits: Tensor,
    row_request: Tensor,
    *,
    allowed_words: Tensor | None = None,
    bias_ids: Tensor | None = None,
    bias_values: Tensor | None = None,
    output_counts: Tensor | None = None,
    prompt_words: Tensor | None = None,
    repetition_penalty: Tensor | None = None,
    presence_penalty: Tensor | None = None,
    frequency_penalty: Tensor | None = None,
    draft_tokens: Tensor | None = None,
    row_node: Tensor | None = None,
) -> None:
    """Apply penalties, then bias, then the mask of allowed ids to logits, in place."""
    rows, vocab = logits.shape
    if not logits.numel():
        return
    if bias_ids is None or bias_values is None:
        bias_ids = bias_values = None
    if draft_tokens is None or row_node is None:
        draft_tokens = row_node = None
    per_request = (bias_ids, output_counts, prompt_words, draft_tokens)
    penalties = (repetition_penalty, presence_penalty, frequency_penalty)
    sizes = [tensor.shape[0] for tensor in (*per_request, *penalties) if tensor is not None]
    config = config_of(logits)
    chunks = max(1, config.chunks // 4)
    tile = chunks * config.lanes * config.width
    adjust_kernel[(rows, triton.cdiv(vocab, tile))](
        logits_ptr=logits,
        row_request_ptr=row_request.contiguous(),
        allowed_ptr=_packed(allowed_words),
        bias_ids_ptr=_packed(bias_ids),
        bias_values_ptr=_packed(bias_values),
        counts_ptr=_packed(output_counts),
        prompt_ptr=_packed(prompt_words),
        repetition_ptr=_packed(repetition_penalty),
        presence_ptr=_packed(presence_penalty),
        frequency_ptr=_packed(frequency_penalty),
        draft_tokens_ptr=_packed(draft_tokens),
        row_node_ptr=_packed(row_node),
        logits_stride_row=logits.stride(0),
        logits_stride_col=column_stride(logits),
        batch=min(sizes, default=torch.iinfo(torch.int32).max),
        nodes=0 if draft_tokens is None else draft_tokens.shape[1],
        max_bias=0 if bias_ids is None else bias_ids.shape[1],
        vocab=vocab,
        CHUNKS=chunks,
        LANES=config.lanes,
        WIDTH=config.width,
        BIAS_BLOCK=BIAS_BLOCK,
        num_warps=config.num_warps,
    )


def overlap(
    target_logits: Tensor,
    target_law: Law | None,
    draft_logits: Tensor,
    draft_law: Law | None,
    *,
    target_to_draft: Tensor | None = None,
) -> Tensor:
    """Return the acceptance probability of each pair of rows: `[rows] float32`."""
    target_logits, draft_logits = align(target_logits), align(draft_logits)
    rows, vocab = target_logits.shape
    beta = target_logits.new_empty(rows, dtype=torch.float32)
    if not rows:
        return beta
    if target_law is not None:
        target_law = Law(*(field.contiguous() for field in target_law))
    if draft_law is not None:
        draft_law = Law(*(field.contiguous() for field in draft_law))
    config = config_of(target_logits, draft_logits[:, :vocab])
    tiles = config.tiles(vocab)
    part = target_logits.new_empty(rows, tiles, dtype=torch.float32)
    overlap_kernel[(rows, tiles)](
        part_ptr=part,
        target_ptr=target_logits,
        target_law=target_law,
        draft_ptr=draft_logits,
        draft_law=draft_law,
        map_ptr=None if target_to_draft is None else target_to_draft.contiguous(),
        target_stride_row=target_logits.stride(0),
        target_stride_col=column_stride(target_logits),
        draft_stride_row=draft_logits.stride(0),
        draft_stride_col=column_stride(draft_logits),
        vocab=vocab,
        draft_vocab=draft_logits.shape[1],
        CHUNKS=config.chunks,
        LANES=config.lanes,
        WIDTH=config.width,
        num_warps=config.num_warps,
    )
    add_kernel[(rows,)](
        beta_ptr=beta,
        part_ptr=part,
        target_law=target_law,
        draft_law=draft_law,
        tiles=tiles,
        TILES=triton.next_power_of_2(tiles),
        num_warps=1,
    )
    return beta


def _packed(tensor: Tensor | None) -> Tensor | None:
    """Rows without gaps; a copy only where there are some."""
    return None if tensor is None else tensor.contiguous()
