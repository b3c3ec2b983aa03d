# ruff: noqa: N803, N806, RET505  (compile-time arguments are written in capitals; a return inside
# a compile-time `if` needs its `else`)
"""The tensors of an acceptance step as kernels see them, and the laws of their rows.

The law of a target row comes from one of four places, the compile-time argument SOURCE:

    "rows"           a `Law` per row of the logits
    "slots"          a `Law` per node of the padded draft: what `find_cutoff` writes
    "tiles"          tile statistics per node, combined on the spot as `row_law` does it
    "probabilities"  there is none: the rows are probabilities

A slot is `request * nodes + node`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from spec_kernels.kernels._device import (
    GREEDY_TEMPERATURE,
    INF,
    INVALID_TARGET,
    LOG2E,
    MAX_TEMPERATURE,
    NEG_INF,
    OK,
    PAD_TOKEN,
    combine_tiles,
    invert_temperature,
    is_valid_row,
)
from spec_kernels.types import Law

SMALLEST = tl.constexpr(-1075.0)  # log2 of what rounds to 0 in float64: such an id has no mass


class Tiles(NamedTuple):
    """Statistics that laws without filters are combined from.

    Attributes:
        largest: `[slots, tiles] f32`, largest logit.
        total: `[slots, tiles] f32`, sum of `exp2((l - largest) * scale)`.
        argmax: `[slots] i64`, first argmax; written for greedy requests only.
        temperature: `[batch] f32`.
    """

    largest: Any
    total: Any
    argmax: Any
    temperature: Any


class Inputs(NamedTuple):
    """The tensors of a step, as one kernel argument.

    Attributes:
        tokens: `[batch, nodes] i64 or i32`.
        num_nodes: `[batch] i32`.
        draft_logits: `[draft_rows, draft_vocab] float`, or None: every draft is fixed.
        draft_law: the laws of `draft_logits`, or None: they are probabilities.
        draft_row: `[batch, nodes] i32`, or None: every draft is fixed.
        draft_column: `[vocab] i32`, column of each target id in a draft row; None: the id itself.
        target_logits: `[rows, vocab] float`.
        target_law: `Law`, `Tiles` or None, see SOURCE.
        target_row: `[batch, nodes] i32`.
        accept_coins: `[batch, nodes] f64`.
        final_coins: `[batch] f64`.
    """

    tokens: Any
    num_nodes: Any
    draft_logits: Any
    draft_law: Any
    draft_row: Any
    draft_column: Any
    target_logits: Any
    target_law: Any
    target_row: Any
    accept_coins: Any
    final_coins: Any


class Sizes(NamedTuple):
    """Run-time sizes; strides are in elements, from row to row and from id to id."""

    nodes: Any
    max_depth: Any
    tiles: Any
    vocab: Any
    rows: Any
    stride: Any
    draft_vocab: Any
    draft_rows: Any
    draft_stride: Any
    stride_col: Any
    draft_stride_col: Any


@triton.jit
def read_laws(law, row, mask):
    """Laws of rows, whose `status` says whether a row is valid; outside the mask none is."""
    valid = mask & (tl.load(law.status + row, mask=mask, other=INVALID_TARGET) == OK)
    inv_temperature = tl.load(law.inv_temperature + row, mask=valid, other=0.0)
    cutoff = tl.load(law.cutoff + row, mask=valid, other=INF)
    row_max = tl.load(law.row_max + row, mask=valid, other=0.0)
    log_sum = tl.load(law.log_sum + row, mask=valid, other=0.0)
    argmax = tl.load(law.argmax + row, mask=valid, other=PAD_TOKEN)
    return Law(inv_temperature, cutoff, row_max, log_sum, argmax, valid)


@triton.jit
def no_law(valid):
    """What stands for the law of rows of probabilities."""
    return Law(1.0, NEG_INF, 0.0, 0.0, tl.full((), PAD_TOKEN, tl.int64), valid)


@triton.jit
def is_greedy(temperature):
    """In range and below `GREEDY_TEMPERATURE`; false for NaN."""
    return (temperature >= 0.0) & (temperature < GREEDY_TEMPERATURE)


@triton.jit
def combine_laws(stats, request, slot, mask, tiles, TILES: tl.constexpr):
    """Laws without filters of the rows at some slots of a request, as `row_law` makes them."""
    temperature = tl.load(stats.temperature + request)
    greedy = is_greedy(temperature)
    inv_temperature = invert_temperature(temperature)
    tile = tl.arange(0, TILES)
    place = slot[:, None] * tiles + tile[None, :]
    inside = mask[:, None] & (tile < tiles)[None, :]
    largest = tl.load(stats.largest + place, mask=inside, other=NEG_INF)
    total = tl.load(stats.total + place, mask=inside, other=0.0)
    row_max, row_sum = combine_tiles(largest, total, inv_temperature * LOG2E, 1)
    in_range = (temperature >= 0.0) & (temperature <= MAX_TEMPERATURE)
    valid = mask & is_valid_row(row_max, row_sum) & in_range
    argmax = tl.load(stats.argmax + slot, mask=valid & greedy, other=PAD_TOKEN)
    inv_temperature = tl.where(greedy, 0.0, inv_temperature)
    return Law(inv_temperature, NEG_INF, row_max, tl.log(row_sum), argmax, valid)


@triton.jit
def target_laws(inputs, request, slot, row, mask, tiles, SOURCE: tl.constexpr, TILES: tl.constexpr):
    """Laws of the target rows at some slots of a request."""
    if SOURCE == "tiles":
        return combine_laws(inputs.target_law, request, slot, mask, tiles, TILES)
    elif SOURCE == "rows":
        return read_laws(inputs.target_law, row, mask)
    elif SOURCE == "slots":
        return read_laws(inputs.target_law, slot, mask)
    else:
        return no_law(mask)


@triton.jit
def draft_laws(inputs, row, sizes):
    """Laws of draft rows; a row outside the tensor, -1 too, is not valid."""
    inside = (row >= 0) & (row < sizes.draft_rows)
    if inputs.draft_law is None:
        return no_law(inside)
    else:
        return read_laws(inputs.draft_law, row, inside)


@triton.jit
def log2_law(x, is_argmax, law, IS_LAW: tl.constexpr):
    """log2 of the probability of some logits (or of probabilities), in float64."""
    x = x.to(tl.float64)
    if IS_LAW:
        bits = ((x - law.row_max) * law.inv_temperature - law.log_sum) * LOG2E
        sampled = tl.where((x >= law.cutoff) & (bits >= SMALLEST), bits, NEG_INF)
        return tl.where(law.inv_temperature == 0.0, tl.where(is_argmax, 0.0, NEG_INF), sampled)
    else:
        return tl.log2(x)


@triton.jit
def draft_column(inputs, token, sizes):
    """Column of a target id in the draft rows, and whether it has one."""
    if inputs.draft_column is None:
        column = token
    else:
        inside = (token >= 0) & (token < sizes.vocab)
        column = tl.load(inputs.draft_column + token, mask=inside, other=-1).to(tl.int64)
    return column, (column >= 0) & (column < sizes.draft_vocab)


@triton.jit
def log2_draft(inputs, token, row, law, mask, sizes):
    """log2 q of target ids under draft rows; 0, as of a fixed draft, outside the mask."""
    IS_LAW: tl.constexpr = inputs.draft_law is not None
    OTHER: tl.constexpr = NEG_INF if IS_LAW else 0.0
    column, known = draft_column(inputs, token, sizes)
    place = row * sizes.draft_stride + column * sizes.draft_stride_col
    x = tl.load(inputs.draft_logits + place, mask=mask & known, other=OTHER)
    return tl.where(mask, log2_law(x, column == law.argmax, law, IS_LAW), 0.0)
