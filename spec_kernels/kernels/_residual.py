# ruff: noqa: N803, N806, RET505  (compile-time arguments are written in capitals; a return inside
# a compile-time `if` needs its `else`)
"""The residual of two rows: weights of ids, their sums over a tile, a draw from a tile.

    weight(l) = exp2(l * scale - shift) * factor   if l >= cutoff, else 0        = a * p or q
    residual  = (a p - q)+;  of a one-hot q: a p without its id

`l * scale` alone may be in the thousands and the rounding error of `shift` with it; that error is
the same for all ids of a row, so `factor` undoes it and one fused multiply-add an id is enough.

Source:
    Leviathan et al. 2023, "Fast inference from transformers via speculative decoding".
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from spec_kernels.kernels._chain import draft_laws, log2_draft, no_law, read_laws
from spec_kernels.kernels._device import (
    HUGE_EXPONENT,
    INF,
    LOG2E,
    NEG_INF,
    PAD_TOKEN,
    find,
    sum_tile,
    take,
    tile_offsets,
)
from spec_kernels.types import Law

NOWHERE = tl.constexpr(-2)
RUN = tl.constexpr(8)  # neighbouring ids of a lane when an unaligned tile is drawn from


class Weight(NamedTuple):
    """Constants that turn logits of a row into weights; a probability is multiplied by `scale`."""

    scale: Any
    shift: Any
    cutoff: Any
    factor: Any


class Residual(NamedTuple):
    """The two rows that meet at a node, ready to be weighed.

    Attributes:
        p_law, q_law: their laws; `p_law.status` is false for an invalid row.
        p, q: constants of the weights `a * p` and `q`.
        ratio: factor of q over factor of p.
        p_row, q_row: pointers to the rows.
        row: index of the draft row; -1 where q is fixed, or plays no part.
        has_q: q is subtracted id by id.
        one_hot: the only id of a one-hot q; its weight is 0. Else NOWHERE.
        child: the draft token that was judged here; PAD_TOKEN at the end of the chain.
    """

    p_law: Any
    q_law: Any
    p: Any
    q: Any
    ratio: Any
    p_row: Any
    q_row: Any
    row: Any
    has_q: Any
    one_hot: Any
    child: Any


@triton.jit
def weight_of(law, log2_a, IS_LAW: tl.constexpr):
    """Constants of the weights `a * p` of a row.

    Above `HUGE_EXPONENT` the factor might overflow. There the next smaller logit has a weight below
    2^-63, so all mass is put on the largest one.
    """
    if IS_LAW:
        scale = law.inv_temperature * LOG2E
        peak = law.row_max.to(tl.float64) * scale
        is_huge = tl.abs(peak) > HUGE_EXPONENT
        scale = tl.where(is_huge, 0.0, scale)
        cutoff = tl.where(is_huge, law.row_max, law.cutoff)
        shift = tl.where(is_huge, 0.0, peak) + law.log_sum.to(tl.float64) * LOG2E - log2_a
        rounded = shift.to(tl.float32)
        return Weight(scale, rounded, cutoff, tl.exp2((rounded - shift).to(tl.float32)))
    else:
        return Weight(tl.exp2(log2_a).to(tl.float32), 0.0, NEG_INF, 1.0)


@triton.jit
def weigh(x, weight, IS_LAW: tl.constexpr, HAS_CUTOFF: tl.constexpr):
    """Weights of logits, without the factor of the row."""
    if IS_LAW:
        w = tl.exp2(tl.fma(x, weight.scale, -weight.shift))
        if HAS_CUTOFF:
            w = tl.where(x >= weight.cutoff, w, 0.0)
        return w
    else:
        return x * weight.scale


@triton.jit
def law_at(inputs, laws, slot, row, exists, node, SOURCE: tl.constexpr):
    """Law of the target row at one node; `laws` are those of all nodes of the request."""
    if SOURCE == "tiles":
        row_max = take(laws.row_max, node)
        log_sum = take(laws.log_sum, node)
        valid = take(laws.status.to(tl.int32), node) > 0
        argmax = take(laws.argmax, node)
        return Law(laws.inv_temperature, NEG_INF, row_max, log_sum, argmax, valid)
    elif SOURCE == "rows":
        return read_laws(inputs.target_law, row, exists)
    elif SOURCE == "slots":
        return read_laws(inputs.target_law, slot, exists)
    else:
        return no_law(exists)


@triton.jit
def residual_at(inputs, laws, request, node, end, log2_a, sizes, SOURCE: tl.constexpr):
    """Prepare `(a p - q)+` at a node, or plain `p` at the end of the chain."""
    slot = request * sizes.nodes + node
    row = tl.load(inputs.target_row + slot).to(tl.int64)
    exists = (row >= 0) & (row < sizes.rows)
    p_law = law_at(inputs, laws, slot, row, exists, node, SOURCE)
    p = weight_of(p_law, log2_a, SOURCE != "probabilities")
    p_row = inputs.target_logits + row * sizes.stride
    rejects = node < end
    child = tl.load(inputs.tokens + slot + 1, mask=rejects, other=PAD_TOKEN).to(tl.int64)
    one_hot = tl.where(rejects, child, NOWHERE)
    if inputs.draft_row is None:
        return Residual(p_law, p_law, p, p, 1.0, p_row, p_row, -1, False, one_hot, child)
    else:
        row = tl.load(inputs.draft_row + slot + 1, mask=rejects, other=-1).to(tl.int64)
        q_law = draft_laws(inputs, row, sizes)
        q = weight_of(q_law, 0.0, inputs.draft_law is not None)
        has_q = row >= 0
        one_hot = tl.where(has_q, NOWHERE, one_hot)
        if inputs.draft_law is not None:
            is_one_hot = has_q & (q_law.inv_temperature == 0.0)
            one_hot = tl.where(is_one_hot, q_law.argmax, one_hot)
            if inputs.draft_column is None:  # else the argmax is a column, whose id isn't known
                has_q = has_q & ~is_one_hot
        q_row = inputs.draft_logits + row * sizes.draft_stride
        ratio = q.factor / p.factor
        return Residual(p_law, q_law, p, q, ratio, p_row, q_row, row, has_q, one_hot, child)


@triton.jit
def weigh_draft(inputs, ids, rows, one_hot, sizes, FULL: tl.constexpr, HAS_CUTOFF: tl.constexpr):
    """q of some ids, without its factor."""
    IS_LAW: tl.constexpr = inputs.draft_law is not None
    OTHER: tl.constexpr = NEG_INF if IS_LAW else 0.0
    if inputs.draft_column is not None:
        column = tl.load(inputs.draft_column + ids, mask=ids < sizes.vocab, other=-1)
        known = (column >= 0) & (column < sizes.draft_vocab)
        x = tl.load(rows.q_row + column * sizes.draft_stride_col, mask=known, other=OTHER)
        q = weigh(x.to(tl.float32), rows.q, IS_LAW, True)
        if IS_LAW:
            hot = tl.where(column == one_hot, INF, 0.0)  # nothing of a p is left there
            q = tl.where(rows.q_law.inv_temperature == 0.0, hot, q)
        return q
    else:
        if FULL:
            x = tl.load(rows.q_row + ids * sizes.draft_stride_col)
        else:
            known = ids < tl.minimum(sizes.vocab, sizes.draft_vocab)
            x = tl.load(rows.q_row + ids * sizes.draft_stride_col, mask=known, other=OTHER)
        return weigh(x.to(tl.float32), rows.q, IS_LAW, HAS_CUTOFF)


@triton.jit
def weigh_ids(
    inputs,
    ids,
    rows,
    one_hot,
    sizes,
    SOURCE: tl.constexpr,
    HAS_Q: tl.constexpr,
    FULL: tl.constexpr,  # all ids lie inside both rows
    HAS_CUTOFF: tl.constexpr,
):
    """`a p` of some ids and its residual, both without the factor of p."""
    IS_LAW: tl.constexpr = SOURCE != "probabilities"
    OTHER: tl.constexpr = NEG_INF if IS_LAW else 0.0
    if FULL:
        x = tl.load(rows.p_row + ids * sizes.stride_col)
    else:
        x = tl.load(rows.p_row + ids * sizes.stride_col, mask=ids < sizes.vocab, other=OTHER)
    p = weigh(x.to(tl.float32), rows.p, IS_LAW, HAS_CUTOFF)
    if HAS_Q:
        q = weigh_draft(inputs, ids, rows, one_hot, sizes, FULL, HAS_CUTOFF)
        return p, tl.maximum(tl.fma(q, -rows.ratio, p), 0.0)
    else:
        return p, tl.where(ids == one_hot, 0.0, p)


@triton.jit
def sum_weights(
    inputs, first, rows, one_hot, sizes, SOURCE: tl.constexpr, HAS_Q: tl.constexpr,
    HAS_CUTOFF: tl.constexpr, SHAPE: tl.constexpr,
):  # fmt: skip
    """Sums of `a p` and of its residual over a tile.

    Tiles inside both rows are read unmasked: a masked load is narrow unless the compiler can
    divide the bound. Mapped tiles are read in parts, which need fewer registers.
    """
    TILE: tl.constexpr = SHAPE[0] * SHAPE[1] * SHAPE[2]
    if HAS_Q and inputs.draft_column is not None:
        PART: tl.constexpr = SHAPE[0] // 4 if SHAPE[0] > 4 else 1
        plain = 0.0
        residual = 0.0
        for start in range(0, TILE, PART * SHAPE[1] * SHAPE[2]):
            ids = first + start + tile_offsets(PART, SHAPE[1], SHAPE[2])
            p, r = weigh_ids(inputs, ids, rows, one_hot, sizes, SOURCE, True, False, True)
            plain += sum_tile(p)
            residual += sum_tile(r)
    else:
        ids = first + tile_offsets(SHAPE[0], SHAPE[1], SHAPE[2])
        width = tl.minimum(sizes.vocab, sizes.draft_vocab) if HAS_Q else sizes.vocab
        if first + TILE <= width:
            p, r = weigh_ids(inputs, ids, rows, one_hot, sizes, SOURCE, HAS_Q, True, HAS_CUTOFF)
            plain, residual = sum_tile(p), sum_tile(r)
        else:
            p, r = weigh_ids(inputs, ids, rows, one_hot, sizes, SOURCE, HAS_Q, False, True)
            plain, residual = sum_tile(p), sum_tile(r)
    return plain * rows.p.factor, residual * rows.p.factor


@triton.jit
def mass_of_tile(inputs, slot, tile, rows, log2_a, sizes):
    """Sum of `a p` over a tile, from its statistics."""
    place = slot * sizes.tiles + tile
    largest = tl.load(inputs.target_law.largest + place)
    total = tl.load(inputs.target_law.total + place)
    law = rows.p_law
    log2_peak = (largest - law.row_max) * (law.inv_temperature * LOG2E) - law.log_sum * LOG2E
    return total * tl.exp2(log2_peak + log2_a.to(tl.float32))


@triton.jit
def sum_tiles(
    inputs, residual_ptr, plain_ptr, slot, begin, end, rows, log2_a, sizes, SOURCE: tl.constexpr,
    HAS_Q: tl.constexpr, HAS_CUTOFF: tl.constexpr, SHAPE: tl.constexpr,
):  # fmt: skip
    """Store the sums of `a p` and of the residual over some tiles of a node.

    Statistics are used where they say it: p of a tile without a rejected id.
    """
    TILE: tl.constexpr = SHAPE[0] * SHAPE[1] * SHAPE[2]
    for tile in range(begin, end):
        first = tile * TILE
        if SOURCE == "tiles":
            plain = mass_of_tile(inputs, slot, tile, rows, log2_a, sizes)
            residual = plain
            if HAS_Q or ((rows.one_hot >= first) & (rows.one_hot < first + TILE)):
                _, residual = sum_weights(
                    inputs, first, rows, rows.one_hot, sizes, SOURCE, HAS_Q, HAS_CUTOFF, SHAPE
                )
        else:
            plain, residual = sum_weights(
                inputs, first, rows, rows.one_hot, sizes, SOURCE, HAS_Q, HAS_CUTOFF, SHAPE
            )
        tl.store(residual_ptr + tile, residual)
        tl.store(plain_ptr + tile, plain)


@triton.jit
def mass_at_argmax(inputs, rows, is_hot, log2_a, sizes):
    """Sum of the residual where p is one-hot: `(a - q)+` at its argmax; else 0."""
    argmax = rows.p_law.argmax
    q = tl.where(rows.one_hot == argmax, 1.0, 0.0).to(tl.float64)
    if inputs.draft_row is not None:
        sampled = rows.row >= 0
        log_q = log2_draft(inputs, argmax, rows.row, rows.q_law, sampled, sizes)
        q = tl.where(sampled, tl.exp2(log_q), q)
    return tl.where(is_hot, tl.maximum(tl.exp2(log2_a) - q, 0.0), 0.0).to(tl.float32)


@triton.jit
def sum_runs(
    inputs, first, rows, one_hot, sizes, SOURCE: tl.constexpr, HAS_Q: tl.constexpr,
    LANES: tl.constexpr, EACH: tl.constexpr,
):  # fmt: skip
    """Residuals of LANES runs of neighbouring ids; unmasked where they lie inside both rows, and
    without cutoffs unless the law of p comes from a search."""
    CUT: tl.constexpr = SOURCE == "slots" or SOURCE == "rows"
    ids = first + tl.arange(0, LANES)[:, None] * EACH + tl.arange(0, EACH)[None, :]
    width = tl.minimum(sizes.vocab, sizes.draft_vocab) if HAS_Q else sizes.vocab
    is_plain = first + LANES * EACH <= width
    if not CUT:
        is_plain = is_plain & (rows.p.cutoff == NEG_INF)
        if HAS_Q:
            is_plain = is_plain & (rows.q.cutoff == NEG_INF)
    if is_plain & (inputs.draft_column is None):
        _, w = weigh_ids(inputs, ids, rows, one_hot, sizes, SOURCE, HAS_Q, True, CUT)
        runs = tl.sum(w, 1)
    else:
        _, w = weigh_ids(inputs, ids, rows, one_hot, sizes, SOURCE, HAS_Q, False, True)
        runs = tl.sum(w, 1)
    return runs


@triton.jit
def draw_id(
    inputs, first, fraction, rows, one_hot, sizes, SOURCE: tl.constexpr, HAS_Q: tl.constexpr,
    SHAPE: tl.constexpr,
):  # fmt: skip
    """Inverse CDF inside a tile, in id order: a lane's run of ids, then one of them.

    Unaligned and mapped tiles are read in coalesced spans first: long runs per lane would need a
    load an id, and more registers than there are.
    """
    LANES: tl.constexpr = SHAPE[1]
    IS_WIDE: tl.constexpr = SHAPE[2] > 1 and inputs.draft_column is None
    EACH: tl.constexpr = SHAPE[0] * SHAPE[2] if IS_WIDE else RUN
    SPANS: tl.constexpr = SHAPE[0] * SHAPE[2] // EACH
    if SPANS > 1:
        ids = first + tile_offsets(SPANS, EACH, LANES)
        _, w = weigh_ids(inputs, ids, rows, one_hot, sizes, SOURCE, HAS_Q, False, True)
        place, fraction = find(tl.sum(tl.sum(w, 1), 1), fraction)
        first += place * (LANES * EACH)
    runs = sum_runs(inputs, first, rows, one_hot, sizes, SOURCE, HAS_Q, LANES, EACH)
    runs = tl.gather(runs, tl.arange(0, LANES), 0)  # one each: WIDTH lanes held the same ones
    place, fraction = find(runs, fraction)
    first += place * EACH
    ids = first + tl.arange(0, EACH)
    _, w = weigh_ids(inputs, ids, rows, one_hot, sizes, SOURCE, HAS_Q, False, True)
    place, _ = find(w, fraction)
    return first + place


@triton.jit
def choose_masses(
    inputs, residual, plain, rows, sizes, SOURCE: tl.constexpr, TILES: tl.constexpr,
    SHAPE: tl.constexpr,
):  # fmt: skip
    """Tile masses to draw from, whether q is subtracted in them, and the id that they lack.

    A residual that vanished in rounding gives way to p without the rejected id, then to p.
    """
    TILE: tl.constexpr = SHAPE[0] * SHAPE[1] * SHAPE[2]
    mass = residual
    has_q = rows.has_q
    one_hot = rows.one_hot
    if tl.sum(residual, 0) <= 0.0:
        mass = plain
        one_hot = tl.full((), NOWHERE, tl.int64)
        if has_q:
            tile = (rows.child // TILE).to(tl.int32)
            ids = tile * TILE + tile_offsets(SHAPE[0], SHAPE[1], SHAPE[2])
            _, w = weigh_ids(inputs, ids, rows, rows.child, sizes, SOURCE, False, False, True)
            rest = (sum_tile(w) * rows.p.factor).to(tl.float64)
            without = tl.where(tl.arange(0, TILES) == tile, rest, plain)
            if tl.sum(without, 0) > 0.0:
                mass = without
                one_hot = rows.child
        has_q = has_q & False
    return mass, has_q, one_hot


@triton.jit
def draw_final(
    inputs, coin, residual, plain, rows, sizes, SOURCE: tl.constexpr, TILES: tl.constexpr,
    SHAPE: tl.constexpr,
):  # fmt: skip
    """Draw the token that follows from the tile masses of a node; PAD_TOKEN if all are 0."""
    mass, has_q, one_hot = choose_masses(inputs, residual, plain, rows, sizes, SOURCE, TILES, SHAPE)
    token = tl.full((), PAD_TOKEN, tl.int32)
    total = tl.sum(mass, 0)
    if (total > 0.0) & (total < INF):
        tile, fraction = find(mass, coin)
        first = tile * (SHAPE[0] * SHAPE[1] * SHAPE[2])
        if has_q:
            if inputs.draft_row is not None:
                token = draw_id(inputs, first, fraction, rows, one_hot, sizes, SOURCE, True, SHAPE)
        else:
            token = draw_id(inputs, first, fraction, rows, one_hot, sizes, SOURCE, False, SHAPE)
    return token.to(tl.int64)
