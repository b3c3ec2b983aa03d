# ruff: noqa: N803, N806  (compile-time arguments are written in capitals; a run-time
# condition inside a compile-time one needs its own `if`)
"""Finish the verification of a tree: the passes that are missing, the final token, the path.

Everything here runs in one program per request. A pass is stored like those of the launches before
and read back by the same code.
"""

from __future__ import annotations

import triton
import triton.language as tl

from spec_kernels.kernels._device import INVALID_TARGET, OK, PAD_TOKEN, take
from spec_kernels.kernels._tree import BIG, POSSIBLE, SAMPLED, ZERO_Q, Sizes
from spec_kernels.kernels._tree_mass import (
    Special,
    can_draw,
    draw_token,
    measure_pass,
    next_special,
    rows_at,
    special_children,
)
from spec_kernels.kernels._tree_walk import (
    KNOWN,
    add_tiles,
    find_kept,
    judge_nodes,
    load_state,
    make_pass,
    walk,
    wants_rest,
)


@triton.jit
def finish_walk(
    work, plan, inputs, parents_ptr, request, passes, sizes, SOURCE: tl.constexpr,
    REPLACEMENT: tl.constexpr, NODES: tl.constexpr, TILES: tl.constexpr, SHAPE: tl.constexpr,
):  # fmt: skip
    """Token rule: walk to the end, pass after pass; the results of `walk`, with a before s."""
    one = tl.full((), 1.0, tl.float64)
    v = tl.full((), 0, tl.int32)
    rejected = tl.full((), -1, tl.int32)
    last_pass = tl.full((), -1, tl.int32)
    s = tl.full((), 0.0, tl.float64)
    missing = tl.full((), 0, tl.int32)
    while missing >= 0:
        v, rejected, last_pass, s, missing = walk(
            work, plan, inputs, request, passes, sizes, REPLACEMENT, TILES
        )
        if missing >= 0:
            make_pass(
                work, plan, inputs, parents_ptr, request, missing, 0, sizes.spans, one, s, sizes,
                SOURCE, REPLACEMENT, NODES, SHAPE,
            )  # fmt: skip
            tl.debug_barrier()  # every thread reads the sums
            passes += 1
            v = tl.full((), 0, tl.int32)  # constants need no registers during a pass
            rejected = tl.full((), -1, tl.int32)
            last_pass = tl.full((), -1, tl.int32)
            s = tl.full((), 0.0, tl.float64)
    return v, rejected, last_pass, one, s


@triton.jit
def finish_levels(
    work, plan, inputs, parents_ptr, request, sizes, SOURCE: tl.constexpr, IS_FIRST: tl.constexpr,
    REPLACEMENT: tl.constexpr, NODES: tl.constexpr, TILES: tl.constexpr, SHAPE: tl.constexpr,
):  # fmt: skip
    """Block rule: judge to the end, of the missing passes always the first in post-order."""
    node = tl.arange(0, NODES)
    base = request * sizes.nodes
    state = load_state(work, plan, parents_ptr, request, sizes, IS_FIRST, REPLACEMENT, NODES)
    a, s, z, rem, stage = state.a, state.s, state.z, state.rem, state.stage
    v = tl.full((), -1, tl.int32)
    while v < 0:
        a, s, z, rem, stage = judge_nodes(state, a, s, z, rem, stage)
        kept, is_kept, is_missing = find_kept(
            plan, inputs, request, sizes, state, a, z, stage, NODES
        )
        place = tl.max(tl.where(is_missing, state.order, -1), 0)
        if place >= 0:
            child = tl.max(tl.where(is_missing & (state.order == place), node, -1), 0)
            above = take(a, take(state.parent, child))
            make_pass(
                work, plan, inputs, parents_ptr, request, child, 0, sizes.spans, above,
                take(s, child), sizes, SOURCE, REPLACEMENT, NODES, SHAPE,
            )  # fmt: skip
            tl.debug_barrier()  # every thread reads the sums
            here = node == child
            z = tl.where(here, add_tiles(work.mass, base + child, sizes.spans, TILES), z)
            if wants_rest(plan, base + child, base, REPLACEMENT):
                rem = tl.where(here, add_tiles(work.rest, base + child, sizes.spans, TILES), rem)
            stage = tl.where(here, KNOWN, stage)
        else:
            v = tl.max(tl.where(is_kept & (state.order == kept), node, -1), 0)
    is_child = (state.parent == v) & (state.kind > 0)
    rejected = tl.max(tl.where(is_child, node, -1), 0)
    last_pass = tl.max(tl.where(is_child & ((state.kind & SAMPLED) > 0), node, -1), 0)
    return v, rejected, last_pass, take(a, v), tl.where(rejected >= 0, take(s, rejected), 0.0)


@triton.jit
def final_token(
    work, plan, inputs, parents_ptr, request, v, rejected, last_pass, a, s, sizes,
    SOURCE: tl.constexpr, NODES: tl.constexpr, TILES: tl.constexpr, SHAPE: tl.constexpr,
):  # fmt: skip
    """Draw from the residual of the kept node; where it vanishes from p without the ids that were
    rejected; where that does too, from p."""
    TILE: tl.constexpr = SHAPE[0] * SHAPE[1] * SHAPE[2]
    slot = request * sizes.nodes + v
    token = tl.full((), PAD_TOKEN, tl.int64)
    a = tl.where(rejected < 0, 1.0, a)  # p stands alone: a p might vanish
    attempt = tl.full((), 0, tl.int32)
    while attempt < 3:
        share = tl.where(attempt == 0, s, 0.0)
        made = tl.where(attempt == 0, last_pass, -1)
        at = rows_at(inputs, plan, request, v, a, share, sizes, SOURCE)
        special = special_children(
            inputs, plan, parents_ptr, request, v, rejected, attempt == 1, sizes, NODES
        )
        special = hide(special, attempt == 2)
        mass = tl.zeros((TILES,), tl.float64)
        if at.p_law.status:
            if at.p_law.inv_temperature == 0.0:
                token = at.p_law.argmax
                attempt = tl.full((), 3, tl.int32)
            else:
                for tile in range(sizes.spans):
                    first = tile * TILE
                    changed = next_special(special.node, special.token, made, first, first + TILE)
                    if (made >= 0) & (changed == BIG):
                        place = (request * sizes.nodes + made) * sizes.spans + tile
                        part = tl.load(work.mass + place)
                    else:
                        part, _ = measure_pass(
                            inputs, slot, tile, at, special, a, share, False, sizes, SOURCE, SHAPE
                        )
                    mass = tl.where(tl.arange(0, TILES) == tile, part.to(tl.float64), mass)
        if can_draw(mass):
            coin = tl.load(inputs.final_coins + request)
            token = draw_token(inputs, coin, mass, at, special, sizes, SOURCE, SHAPE)
            attempt = tl.full((), 3, tl.int32)
        attempt += 1
    return token


@triton.jit
def has_zero_q(plan, parents_ptr, request, v, sizes, NODES: tl.constexpr):
    """Whether a child of v claims to be drawn from a law that gives it probability 0."""
    node = tl.arange(0, NODES)
    slot = request * sizes.nodes + node
    inside = (node > v) & (node < tl.load(plan.count + request))
    is_child = inside & (tl.load(parents_ptr + slot, mask=inside, other=-1) == v)
    kind = tl.load(plan.kind + slot, mask=is_child, other=0)
    return tl.max(((kind > 0) & ((kind & POSSIBLE) == 0)).to(tl.int32), 0) > 0


@triton.jit
def hide(special, is_hidden):
    """No special children at all, if `is_hidden`."""
    token = tl.where(is_hidden, -1, special.token)
    column = tl.where(is_hidden, -1, special.column)
    return Special(special.node, token, column, special.rejected)


@triton.jit
def store_path(outputs, inputs, plan, parents_ptr, request, v, final, status, sizes,
               DEPTH: tl.constexpr):  # fmt: skip
    """Write the path to a node with its tokens, the final token behind it, and padding."""
    base = request * sizes.nodes
    width = sizes.max_depth + 1
    depth = tl.load(plan.depth + base + v)
    place = tl.arange(0, DEPTH)
    tokens = tl.where(place == depth, final, PAD_TOKEN)
    path = tl.full((DEPTH,), -1, tl.int32)
    at = depth
    node = v
    while at >= 0:
        path = tl.where(place == at, node, path)
        if at > 0:
            token = tl.load(inputs.tokens + base + node).to(tl.int64)
            tokens = tl.where(place == at - 1, token, tokens)
            node = tl.load(parents_ptr + base + node)
        at -= 1
    tl.store(outputs.output_tokens + request * width + place, tokens, mask=place < width)
    tl.store(outputs.path + request * width + place, path, mask=place < width)
    tl.store(outputs.accepted_lens + request, depth)
    tl.store(outputs.status + request, status)


@triton.jit
def store_absent(outputs, request, max_depth, DEPTH: tl.constexpr):
    """Write the result of an absent request."""
    place = tl.arange(0, DEPTH)
    width = max_depth + 1
    tokens = tl.full((DEPTH,), PAD_TOKEN, tl.int64)
    tl.store(outputs.output_tokens + request * width + place, tokens, mask=place < width)
    path = tl.full((DEPTH,), -1, tl.int32)
    tl.store(outputs.path + request * width + place, path, mask=place < width)
    tl.store(outputs.accepted_lens + request, 0)
    tl.store(outputs.status + request, OK)


@triton.jit(
    do_not_specialize=["nodes", "max_depth", "tiles", "spans", "rows", "draft_rows", "passes"]
)
def finish_kernel(
    outputs,  # Acceptance, out
    work,  # Work, in and out: mass, rest
    plan,  # Plan
    inputs,  # Inputs
    parents_ptr,  # [batch, nodes] i32
    nodes,
    max_depth,
    tiles,
    spans,
    vocab,
    rows,
    stride,
    draft_vocab,
    draft_rows,
    draft_stride,
    stride_col,
    draft_stride_col,
    passes,  # token rule: made by the launches before
    RULE: tl.constexpr,
    SOURCE: tl.constexpr,
    IS_FIRST: tl.constexpr,
    REPLACEMENT: tl.constexpr,
    NODES: tl.constexpr,
    DEPTH: tl.constexpr,
    TILES: tl.constexpr,
    SHAPE: tl.constexpr,
):
    """Path and final token of one request, with the passes that no launch before made.

    Floor: `batch * (nodes * 100 + 8192 * 2 * itemsize)` bytes: the state, and a tile of both rows.
    """
    request = tl.program_id(0).to(tl.int64)
    sizes = Sizes(
        nodes, max_depth, tiles, spans, vocab, rows, stride, draft_vocab, draft_rows, draft_stride,
        stride_col, draft_stride_col,
    )  # fmt: skip
    if tl.load(plan.count + request) <= 0:
        store_absent(outputs, request, max_depth, DEPTH)
        return
    if RULE == "token":
        v, rejected, last_pass, a, s = finish_walk(
            work, plan, inputs, parents_ptr, request, passes, sizes, SOURCE, REPLACEMENT, NODES,
            TILES, SHAPE,
        )  # fmt: skip
    else:
        v, rejected, last_pass, a, s = finish_levels(
            work, plan, inputs, parents_ptr, request, sizes, SOURCE, IS_FIRST, REPLACEMENT, NODES,
            TILES, SHAPE,
        )  # fmt: skip
    token = final_token(
        work, plan, inputs, parents_ptr, request, v, rejected, last_pass, a, s, sizes, SOURCE,
        NODES, TILES, SHAPE,
    )  # fmt: skip
    status = tl.load(plan.status + request * nodes + v)
    status = status | tl.where(has_zero_q(plan, parents_ptr, request, v, sizes, NODES), ZERO_Q, OK)
    status = status | tl.where(token == PAD_TOKEN, INVALID_TARGET, OK)
    store_path(outputs, inputs, plan, parents_ptr, request, v, token, status, sizes, DEPTH)
