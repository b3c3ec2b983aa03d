# ruff: noqa: N803, N806, RET505, SIM102  (compile-time arguments are written in capitals; a return
# or a run-time condition inside a compile-time `if` needs its own)
"""The residual of a node of a tree: sums over tiles, and the draw of the final token.

    r(x) = (a p(x) - s q(x))+ off the rejected ids,   q without the fixed children's ids

An id that was drawn and rejected has r = 0 by itself: `a p - s q` was less than the part of q
that its rejection added to s. So only *special* ids are compared one by one: those of fixed
children, and where the sum of q is wanted those of drawn ones. Their tiles are read in parts.

    rest       mass of q off the fixed and the drawn ids, over all columns of a draft row: what
               `1 / c` of the next sampled child is; a sum of its own, never 1 - sum

Determinism: a tile has the same sum wherever and whenever it is summed.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from spec_kernels.kernels._chain import draft_laws, log2_draft
from spec_kernels.kernels._device import INF, NEG_INF, PAD_TOKEN, find, sum_tile, take, tile_offsets
from spec_kernels.kernels._residual import (
    NOWHERE,
    RUN,
    Residual,
    mass_of_tile,
    weigh,
    weigh_draft,
    weight_of,
)
from spec_kernels.kernels._tree import BIG, POSSIBLE, SAMPLED, USABLE, target_law_at

TINY = tl.constexpr(1e-30)  # below it a float32 reciprocal would overflow
LIFT = tl.constexpr(1.2676506002282294e30)  # 2^100
PART = tl.constexpr(1024)  # ids of a tile that are read at once where special ids are among them


class Special(NamedTuple):
    """Children of a node whose ids are compared one by one.

    Attributes:
        node: `[NODES] i32`.
        token: `[NODES] i32`, -1 for the others.
        column: `[NODES] i32`, the draft column of the token, -1 = none.
        rejected: the last child that was rejected; -1 = none yet.
    """

    node: Any
    token: Any
    column: Any
    rejected: Any


@triton.jit
def special_children(
    inputs, plan, parents_ptr, request, v, rejected, with_drawn, sizes, NODES: tl.constexpr
):
    """Fixed children of v; `with_drawn` also the sampled ones up to `rejected`."""
    node = tl.arange(0, NODES)
    slot = request * sizes.nodes + node
    inside = (node > v) & (node < tl.load(plan.count + request))
    is_child = inside & (tl.load(parents_ptr + slot, mask=inside, other=-1) == v)
    kind = tl.load(plan.kind + slot, mask=is_child, other=0)
    is_special = (kind & (USABLE | SAMPLED)) == USABLE
    is_drawn = (kind == (USABLE | SAMPLED | POSSIBLE)) & (node <= rejected)
    is_special = is_special | (is_drawn & with_drawn)
    token = tl.load(inputs.tokens + slot, mask=is_special, other=-1).to(tl.int32)
    column = token
    if inputs.draft_column is not None:
        column = tl.load(inputs.draft_column + token, mask=is_special, other=-1)
    return Special(node, token, column, rejected)


@triton.jit
def next_special(node, ids, behind, first, end):
    """The next special child behind one, whose id lies in `[first, end)`; BIG if there is none."""
    return tl.min(tl.where((ids >= first) & (ids < end) & (node > behind), node, BIG), 0)


@triton.jit
def holds_special(special, tile, SHAPE: tl.constexpr):
    """Whether a tile of target ids holds a special one."""
    TILE: tl.constexpr = SHAPE[0] * SHAPE[1] * SHAPE[2]
    first = tile * TILE
    return next_special(special.node, special.token, -1, first, first + TILE) < BIG


@triton.jit
def rows_at(inputs, plan, request, v, a, s, sizes, SOURCE: tl.constexpr):
    """Prepare `(a p - s q)+` at a node; `ratio` contains s."""
    slot = request * sizes.nodes + v
    row = tl.load(inputs.target_row + slot).to(tl.int64)
    exists = (row >= 0) & (row < sizes.rows)
    p_law = target_law_at(inputs, plan, slot, row, exists, SOURCE)
    p = weight_of(p_law, tl.log2(a), SOURCE != "probabilities")
    p_row = inputs.target_logits + row * sizes.stride
    one_hot = tl.full((), NOWHERE, tl.int64)
    if inputs.draft_row is None:
        return Residual(p_law, p_law, p, p, 1.0, p_row, p_row, -1, False, one_hot, v)
    else:
        row = tl.load(plan.row + slot).to(tl.int64)
        q_law = draft_laws(inputs, row, sizes)
        q = weight_of(q_law, 0.0, inputs.draft_law is not None)
        has_q = (row >= 0) & (s > 0.0)
        if inputs.draft_law is not None:
            is_one_hot = (row >= 0) & (q_law.inv_temperature == 0.0)
            one_hot = tl.where(is_one_hot & (s > 0.0), q_law.argmax, one_hot)
            if inputs.draft_column is None:  # else the argmax is a column, whose id isn't known
                has_q = has_q & ~is_one_hot
        q_row = inputs.draft_logits + row * sizes.draft_stride
        ratio = q.factor / p.factor * s.to(tl.float32)
        return Residual(p_law, q_law, p, q, ratio, p_row, q_row, row, has_q, one_hot, v)


@triton.jit
def weigh_pair(
    inputs, ids, at, sizes, SOURCE: tl.constexpr, HAS_Q: tl.constexpr, FULL: tl.constexpr,
    HAS_CUTOFF: tl.constexpr,
):  # fmt: skip
    """`a p` and q of some ids, each without the factor of its row."""
    IS_LAW: tl.constexpr = SOURCE != "probabilities"
    OTHER: tl.constexpr = NEG_INF if IS_LAW else 0.0
    if FULL:
        x = tl.load(at.p_row + ids * sizes.stride_col)
    else:
        x = tl.load(at.p_row + ids * sizes.stride_col, mask=ids < sizes.vocab, other=OTHER)
    p = weigh(x.to(tl.float32), at.p, IS_LAW, HAS_CUTOFF)
    if HAS_Q:
        return p, weigh_draft(inputs, ids, at, at.one_hot, sizes, FULL, HAS_CUTOFF)
    else:
        return tl.where(ids == at.one_hot, 0.0, p), tl.zeros_like(p)


@triton.jit
def residual_of(p, q, at, HAS_Q: tl.constexpr):
    """`(a p - s q)+` without the factor of p."""
    if HAS_Q:
        return tl.maximum(tl.fma(q, -at.ratio, p), 0.0)
    else:
        return p


@triton.jit
def sum_parts(
    inputs, first, width, at, special, sizes, SOURCE: tl.constexpr, HAS_Q: tl.constexpr,
    SHAPE: tl.constexpr,
):  # fmt: skip
    """Sums of r and q over a tile with special ids or cutoffs, without the factors.

    A masked load is narrow, so parts inside both rows, `width` ids, are read unmasked.
    """
    IS_MAPPED: tl.constexpr = HAS_Q and inputs.draft_column is not None
    LANES: tl.constexpr = SHAPE[1]
    CHUNK: tl.constexpr = LANES * SHAPE[2]
    CHUNKS: tl.constexpr = PART // CHUNK if CHUNK < PART else 1
    mass = tl.zeros((LANES,), tl.float32)
    rest = tl.zeros((LANES,), tl.float32)
    for start in range(0, SHAPE[0] * CHUNK, CHUNKS * CHUNK):
        begin = first + start
        ids = begin + tile_offsets(CHUNKS, LANES, SHAPE[2])
        if IS_MAPPED or begin + CHUNKS * CHUNK > width:
            p, q = weigh_pair(inputs, ids, at, sizes, SOURCE, HAS_Q, False, True)
        else:
            p, q = weigh_pair(inputs, ids, at, sizes, SOURCE, HAS_Q, True, True)
        i = next_special(special.node, special.token, -1, begin, begin + CHUNKS * CHUNK)
        while i < BIG:
            here = ids == take(special.token, i)
            p = tl.where(here & (i <= special.rejected), 0.0, p)
            q = tl.where(here, 0.0, q)
            i = next_special(special.node, special.token, i, begin, begin + CHUNKS * CHUNK)
        mass += tl.sum(tl.sum(residual_of(p, q, at, HAS_Q), 2), 0)
        rest += tl.sum(tl.sum(q, 2), 0)
    return tl.sum(mass, 0), tl.sum(rest, 0)


@triton.jit
def sum_residual(
    inputs, tile, at, special, sizes, SOURCE: tl.constexpr, HAS_Q: tl.constexpr,
    SHAPE: tl.constexpr,
):  # fmt: skip
    """Sums of r and of q over a tile of target ids."""
    TILE: tl.constexpr = SHAPE[0] * SHAPE[1] * SHAPE[2]
    first = tile * TILE
    width = sizes.vocab
    IS_MAPPED: tl.constexpr = HAS_Q and inputs.draft_column is not None
    if HAS_Q:
        width = tl.minimum(sizes.vocab, sizes.draft_vocab)
    in_parts = holds_special(special, tile, SHAPE) | (first + TILE > width)
    in_parts = in_parts | (at.p.cutoff > NEG_INF)
    if HAS_Q:
        in_parts = in_parts | (at.q.cutoff > NEG_INF)
    if IS_MAPPED or in_parts:
        mass, rest = sum_parts(inputs, first, width, at, special, sizes, SOURCE, HAS_Q, SHAPE)
    else:
        ids = first + tile_offsets(SHAPE[0], SHAPE[1], SHAPE[2])
        p, q = weigh_pair(inputs, ids, at, sizes, SOURCE, HAS_Q, True, False)
        mass, rest = sum_tile(residual_of(p, q, at, HAS_Q)), sum_tile(q)
    return mass * at.p.factor, rest * at.q.factor


@triton.jit
def sum_rest(inputs, tile, at, special, sizes, SHAPE: tl.constexpr):
    """Sum of q over a tile of draft columns, off the special ids."""
    IS_LAW: tl.constexpr = inputs.draft_law is not None
    OTHER: tl.constexpr = NEG_INF if IS_LAW else 0.0
    LANES: tl.constexpr = SHAPE[1]
    CHUNK: tl.constexpr = LANES * SHAPE[2]
    CHUNKS: tl.constexpr = PART // CHUNK if CHUNK < PART else 1
    first = tile * (SHAPE[0] * CHUNK)
    rest = tl.zeros((LANES,), tl.float32)
    for start in range(0, SHAPE[0] * CHUNK, CHUNKS * CHUNK):
        begin = first + start
        column = begin + tile_offsets(CHUNKS, LANES, SHAPE[2])
        z = tl.load(
            at.q_row + column * sizes.draft_stride_col, mask=column < sizes.draft_vocab, other=OTHER
        )
        q = weigh(z.to(tl.float32), at.q, IS_LAW, True)
        i = next_special(special.node, special.column, -1, begin, begin + CHUNKS * CHUNK)
        while i < BIG:
            q = tl.where(column == take(special.column, i), 0.0, q)
            i = next_special(special.node, special.column, i, begin, begin + CHUNKS * CHUNK)
        rest += tl.sum(tl.sum(q, 2), 0)
    return tl.sum(rest, 0) * at.q.factor


@triton.jit
def holds(ids, node, up_to, wanted):
    """Whether an id is among those of the special children up to one."""
    return tl.max(((ids == wanted) & (ids >= 0) & (node <= up_to)).to(tl.int32), 0) > 0


@triton.jit
def mass_at_one(inputs, at, special, a, s, sizes):
    """The whole residual of a greedy target row: that of its argmax."""
    argmax = at.p_law.argmax
    weight = a
    if inputs.draft_row is not None:
        has_q = (at.row >= 0) & ~holds(special.token, special.node, BIG, argmax)
        log_q = log2_draft(inputs, argmax, at.row, at.q_law, has_q, sizes)
        weight = tl.where(has_q, tl.maximum(a - s * tl.exp2(log_q), 0.0), a)
    is_gone = holds(special.token, special.node, special.rejected, argmax)
    return tl.where(is_gone, 0.0, weight).to(tl.float32)


@triton.jit
def plain_mass(
    inputs, slot, tile, at, special, log2_a, sizes, SOURCE: tl.constexpr, SHAPE: tl.constexpr
):
    """Sum of `a p` over a tile off the rejected ids, from the statistics where they say it."""
    if SOURCE == "tiles":
        TILE: tl.constexpr = SHAPE[0] * SHAPE[1] * SHAPE[2]
        if holds_special(special, tile, SHAPE) | (at.one_hot // TILE == tile):
            mass, _ = sum_residual(inputs, tile, at, special, sizes, SOURCE, False, SHAPE)
        elif tile < sizes.tiles:
            mass = mass_of_tile(inputs, slot, tile, at, log2_a, sizes)
        else:
            mass = tl.full((), 0.0, tl.float32)
        return mass
    else:
        mass, _ = sum_residual(inputs, tile, at, special, sizes, SOURCE, False, SHAPE)
        return mass


@triton.jit
def measure_pass(
    inputs, slot, tile, at, special, a, s, wants_rest, sizes, SOURCE: tl.constexpr,
    SHAPE: tl.constexpr,
):  # fmt: skip
    """Mass of the residual in a tile, and with `wants_rest` the rest of q in it."""
    mass = tl.full((), 0.0, tl.float32)
    rest = tl.full((), 0.0, tl.float32)
    if at.p_law.inv_temperature == 0.0:
        if tile == 0:
            mass = mass_at_one(inputs, at, special, a, s, sizes)
    elif at.has_q:
        if inputs.draft_row is not None:
            mass, rest = sum_residual(inputs, tile, at, special, sizes, SOURCE, True, SHAPE)
    else:
        mass = plain_mass(inputs, slot, tile, at, special, tl.log2(a), sizes, SOURCE, SHAPE)
    if inputs.draft_row is not None:
        if wants_rest:
            is_known = at.has_q & (at.p_law.inv_temperature != 0.0)
            rest = measure_rest(inputs, at, special, tile, rest, ~is_known, sizes, SHAPE)
    return mass, rest


@triton.jit
def measure_rest(inputs, at, special, tile, known, is_unknown, sizes, SHAPE: tl.constexpr):
    """Rest of q in a tile of draft columns; `known` where the residual was summed with it, and
    each column has its own id."""
    rest = known
    if at.q_law.inv_temperature == 0.0:
        is_gone = holds(special.column, special.node, BIG, at.q_law.argmax)
        rest = tl.where((tile == 0) & ~is_gone, 1.0, 0.0)
    elif is_unknown | (inputs.draft_column is not None):
        rest = sum_rest(inputs, tile, at, special, sizes, SHAPE)
    return rest


# ------------------------------------------------------------------------------------ final token


@triton.jit
def remove_special(r, ids, special, first, end):
    """Weights of ids in `[first, end)`, 0 at the special ones."""
    i = next_special(special.node, special.token, -1, first, end)
    while i < BIG:
        r = tl.where(ids == take(special.token, i), 0.0, r)
        i = next_special(special.node, special.token, i, first, end)
    return r


@triton.jit
def weigh_final(inputs, ids, at, special, first, end, sizes, SOURCE: tl.constexpr,
                HAS_Q: tl.constexpr):  # fmt: skip
    """The residual of ids in `[first, end)` where every child is rejected."""
    p, q = weigh_pair(inputs, ids, at, sizes, SOURCE, HAS_Q, False, True)
    return remove_special(residual_of(p, q, at, HAS_Q), ids, special, first, end)


@triton.jit
def divide(x, y):
    """x / y in float64, 0 where y is not positive: Newton steps from a float32 reciprocal.

    The division of the language calls a subroutine, for which the kernel would save registers.
    """
    lift = tl.where(y < TINY, LIFT, 1.0)
    divisor = tl.where(y > 0.0, y * lift, 1.0)
    inverse = (1.0 / divisor.to(tl.float32)).to(tl.float64)
    inverse = tl.fma(inverse, tl.fma(-divisor, inverse, 1.0), inverse)
    inverse = tl.fma(inverse, tl.fma(-divisor, inverse, 1.0), inverse)
    quotient = x * lift * inverse
    quotient = tl.fma(tl.fma(-quotient, divisor, x * lift), inverse, quotient)
    return tl.where(y > 0.0, quotient, 0.0)


@triton.jit
def draw_id(
    inputs, first, fraction, at, special, sizes, SOURCE: tl.constexpr, HAS_Q: tl.constexpr,
    SHAPE: tl.constexpr,
):  # fmt: skip
    """Inverse CDF inside a tile, in id order, with the levels of the chain's draw.

    Read RUN ids of each lane at a time: with special ids about, more would not fit registers.
    """
    LANES: tl.constexpr = SHAPE[1]
    IS_WIDE: tl.constexpr = SHAPE[2] > 1 and inputs.draft_column is None
    EACH: tl.constexpr = SHAPE[0] * SHAPE[2] if IS_WIDE else RUN
    SPANS: tl.constexpr = SHAPE[0] * SHAPE[2] // EACH
    if SPANS > 1:
        SPAN: tl.constexpr = LANES * EACH
        masses = tl.zeros((SPANS,), tl.float32)
        for span in range(SPANS):
            start = first + span * SPAN
            ids = start + tl.arange(0, EACH)[:, None] * LANES + tl.arange(0, LANES)[None, :]
            w = weigh_final(inputs, ids, at, special, start, start + SPAN, sizes, SOURCE, HAS_Q)
            mass = tl.sum(tl.sum(w, 0), 0)
            masses = tl.where(tl.arange(0, SPANS) == span, mass, masses)
        place, fraction = find(masses, fraction)
        first += place * SPAN
    end = first + LANES * EACH
    w = tl.zeros((LANES, RUN), tl.float32)
    for start in range(0, EACH, RUN):
        ids = first + start + tl.arange(0, LANES)[:, None] * EACH + tl.arange(0, RUN)[None, :]
        w += weigh_final(inputs, ids, at, special, first, end, sizes, SOURCE, HAS_Q)
    place, fraction = find(tl.sum(w, 1), fraction)
    first += place * EACH
    ids = first + tl.arange(0, EACH)
    w = weigh_final(inputs, ids, at, special, first, first + EACH, sizes, SOURCE, HAS_Q)
    place, _ = find(w, fraction)
    return first + place


@triton.jit
def draw_token(inputs, coin, mass, at, special, sizes, SOURCE: tl.constexpr, SHAPE: tl.constexpr):
    """Draw an id from the tile masses of a node."""
    tile, fraction = find(mass, coin)
    first = tile * (SHAPE[0] * SHAPE[1] * SHAPE[2])
    token = tl.full((), PAD_TOKEN, tl.int32)
    if at.has_q:
        if inputs.draft_row is not None:
            token = draw_id(inputs, first, fraction, at, special, sizes, SOURCE, True, SHAPE)
    else:
        token = draw_id(inputs, first, fraction, at, special, sizes, SOURCE, False, SHAPE)
    return token.to(tl.int64)


@triton.jit
def can_draw(mass):
    """Whether tile masses have a positive, finite sum."""
    total = tl.sum(mass, 0)
    return (total > 0.0) & (total < INF)
