# ruff: noqa: N803, SIM102  (compile-time arguments are written in capitals; a run-time
# condition inside a compile-time one needs its own `if`)
"""Walk through a planned tree, with the passes over the vocabulary that have been made so far.

A pass is named by the sampled child that it rejects: it gives Z of the parent's residual behind
that child, and the mass that it leaves of q where a sampled sibling behind needs that.

    token rule   from the root down, child after child, until a pass is missing
    block rule   all nodes whose parent and siblings before are known, at once, until there is none;
                 kept so far: the first in post-order with u < h

No sum runs over nodes, so the number of walks does not show in the results.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from spec_kernels.kernels._tree import POSSIBLE, SAMPLED
from spec_kernels.kernels._tree_mass import divide, measure_pass, rows_at, special_children


class Work(NamedTuple):
    """What the launches leave for one another. A pass is named by the child that it rejects.

    Attributes:
        mass: `[batch, nodes, tiles] f32`, tile sums of the residual, by pass.
        rest: `[batch, nodes, tiles] f32`, tile sums of what is left of q, by pass.
        first_rest: `[batch, nodes, tiles] f32`, the same before the first child, by node.
        a: `[batch, nodes] f64`, entry acceptance of a node.
        s, z, rem: `[batch, nodes] f64`, state of the parent once a child is rejected.
        stage: `[batch, nodes] i32`: WAITING, JUDGED, WANTED, KNOWN.
        order: `[batch, nodes] i32`, nodes behind a node in post-order.
    """

    mass: Any
    rest: Any
    first_rest: Any
    a: Any
    s: Any
    z: Any
    rem: Any
    stage: Any
    order: Any


WAITING = tl.constexpr(0)  # nothing is known of the node
JUDGED = tl.constexpr(1)  # a is known
WANTED = tl.constexpr(2)  # and the next launch makes its pass
KNOWN = tl.constexpr(3)  # and the state of its parent behind it


@triton.jit
def add_tiles(ptr, slot, tiles, TILES: tl.constexpr):
    """Sum of the tile masses of a slot, in float64."""
    tile = tl.arange(0, TILES)
    mass = tl.load(ptr + slot * tiles + tile, mask=tile < tiles, other=0.0)
    return tl.sum(mass.to(tl.float64), 0)


@triton.jit
def wants_rest(plan, slot, base, REPLACEMENT: tl.constexpr):
    """Whether a sampled sibling behind this sampled child needs what it leaves of q."""
    wants = tl.full((), 0, tl.int32)
    if not REPLACEMENT:
        if (tl.load(plan.kind + slot) & POSSIBLE) > 0:
            behind = tl.load(plan.behind + slot)
            while behind >= 0:
                wants = wants | (tl.load(plan.kind + base + behind) & SAMPLED)
                behind = tl.load(plan.behind + base + behind)
    return wants > 0


@triton.jit
def make_pass(
    work, plan, inputs, parents_ptr, request, child, begin, end, a, s, sizes,
    SOURCE: tl.constexpr, REPLACEMENT: tl.constexpr, NODES: tl.constexpr, SHAPE: tl.constexpr,
):  # fmt: skip
    """Store some tile sums of the residual behind a sampled child, and of the rest of q."""
    base = request * sizes.nodes
    v = tl.load(parents_ptr + base + child)
    with_rest = wants_rest(plan, base + child, base, REPLACEMENT)
    special = special_children(
        inputs, plan, parents_ptr, request, v, child, with_rest, sizes, NODES
    )
    at = rows_at(inputs, plan, request, v, a, s, sizes, SOURCE)
    place = (base + child) * sizes.spans
    for tile in range(begin, end):
        mass, rest = measure_pass(
            inputs, base + v, tile, at, special, a, s, with_rest, sizes, SOURCE, SHAPE
        )
        tl.store(work.mass + place + tile, mass)
        if with_rest:
            tl.store(work.rest + place + tile, rest)


@triton.jit
def first_rem(work, plan, slot, sizes, TILES: tl.constexpr):
    """Mass of q off the fixed children of a node."""
    rem = tl.full((), 1.0, tl.float64)
    if tl.load(plan.is_mixed + slot) > 0:
        rem = add_tiles(work.first_rest, slot, sizes.spans, TILES)
    return rem


@triton.jit
def walk(
    work, plan, inputs, request, passes, sizes, REPLACEMENT: tl.constexpr, TILES: tl.constexpr
):
    """Token rule: walk down from the root with the first `passes` passes of the walk.

    Returns:
        The node, its last rejected child (-1 = none), its last pass (-1 = none), s, and the pass
        that is missing to go on, -1 if the walk has ended.
    """
    base = request * sizes.nodes
    v = tl.full((), 0, tl.int32)
    child = tl.load(plan.first + base)
    rejected = tl.full((), -1, tl.int32)
    last_pass = tl.full((), -1, tl.int32)
    missing = tl.full((), -1, tl.int32)
    made = tl.full((), 0, tl.int32)
    s = tl.full((), 0.0, tl.float64)
    z = tl.full((), 1.0, tl.float64)
    rem = first_rem(work, plan, base, sizes, TILES)
    while (child >= 0) & (missing < 0):
        slot = base + child
        gain = tl.load(plan.gain + slot)
        kind = tl.load(plan.kind + slot)
        coin = tl.load(inputs.accept_coins + slot)
        is_fixed = (kind & SAMPLED) == 0
        share = tl.where(is_fixed, gain, tl.maximum(gain - s, 0.0) * rem)
        if (z > 0.0) & (coin * z < share):
            v = child
            rejected = tl.full((), -1, tl.int32)
            last_pass = tl.full((), -1, tl.int32)
            s = tl.full((), 0.0, tl.float64)
            z = tl.full((), 1.0, tl.float64)
            rem = first_rem(work, plan, slot, sizes, TILES)
            child = tl.load(plan.first + slot)
        else:
            rejected = child
            if is_fixed:
                z = tl.maximum(z - gain, 0.0)
                child = tl.load(plan.behind + slot)
            else:
                s += divide(z, rem)
                last_pass = child
                if made < passes:
                    made += 1
                    z = add_tiles(work.mass, slot, sizes.spans, TILES)
                    base_wants = wants_rest(plan, slot, base, REPLACEMENT)
                    if base_wants:
                        rem = add_tiles(work.rest, slot, sizes.spans, TILES)
                    child = tl.load(plan.behind + slot)
                else:
                    missing = child
    return v, rejected, last_pass, s, missing


# ------------------------------------------------------------------------------------- block rule


@triton.jit
def rank_nodes(plan, parent, base, inside, NODES: tl.constexpr):
    """How many nodes follow each node in post-order, by doubling.

    Behind a node comes the first leaf below its next sibling, or its parent.
    """
    node = tl.arange(0, NODES)
    leaf = tl.load(plan.first + base + node, mask=inside, other=-1)
    leaf = tl.where(leaf >= 0, leaf, node)
    moved = tl.full((), 1, tl.int32)
    while moved > 0:
        lower = tl.gather(leaf, leaf, 0)
        moved = tl.max((lower != leaf).to(tl.int32), 0)
        leaf = lower
    behind = tl.load(plan.behind + base + node, mask=inside, other=-1)
    after = tl.where(behind >= 0, tl.gather(leaf, tl.maximum(behind, 0), 0), parent)
    after = tl.where(inside & (node > 0), after, 0)
    follow = (after != node).to(tl.int32)
    while tl.max(after, 0) > 0:
        follow += tl.gather(follow, after, 0)
        after = tl.gather(after, after, 0)
    return follow


class State(NamedTuple):
    """The block rule's numbers of every node of a request; vectors `[NODES]` as in `Work`.

    Attributes:
        parent: of each node, 0 outside the tree.
        before, kind, gain: of `Plan`.
        own_rem: mass of q off the fixed children of a node.
    """

    parent: Any
    before: Any
    kind: Any
    gain: Any
    own_rem: Any
    a: Any
    s: Any
    z: Any
    rem: Any
    stage: Any
    order: Any


@triton.jit
def sum_tiles(ptr, slot, mask, spans):
    """Tile masses of some slots, added up in float64."""
    total = tl.zeros(slot.shape, tl.float64)
    for tile in range(spans):
        total += tl.load(ptr + slot * spans + tile, mask=mask, other=0.0).to(tl.float64)
    return total


@triton.jit
def leaves_rest(plan, base, parent, kind, inside, NODES: tl.constexpr):
    """Which sampled children have a sampled sibling behind them that is judged by the rest of q."""
    node = tl.arange(0, NODES)
    is_sampled = (kind & SAMPLED) > 0
    last = tl.where(is_sampled, node, -1)
    behind = tl.load(plan.behind + base + node, mask=inside & is_sampled, other=-1)
    while tl.max(behind, 0) >= 0:
        next_kind = tl.gather(kind, tl.maximum(behind, 0), 0)
        last = tl.where((behind >= 0) & ((next_kind & SAMPLED) > 0), behind, last)
        behind = tl.load(plan.behind + base + behind, mask=behind >= 0, other=-1)
    return is_sampled & (last > node) & ((kind & POSSIBLE) > 0)


@triton.jit
def load_state(
    work, plan, parents_ptr, request, sizes, IS_FIRST: tl.constexpr, REPLACEMENT: tl.constexpr,
    NODES: tl.constexpr,
):  # fmt: skip
    """State of all nodes, with the passes of the launch before."""
    node = tl.arange(0, NODES)
    base = request * sizes.nodes
    slot = base + node
    inside = node < tl.load(plan.count + request)
    parent = tl.maximum(tl.load(parents_ptr + slot, mask=inside & (node > 0), other=0), 0)
    before = tl.load(plan.before + slot, mask=inside, other=-1)
    kind = tl.load(plan.kind + slot, mask=inside, other=0)
    gain = tl.load(plan.gain + slot, mask=inside, other=0.0)
    is_mixed = tl.load(plan.is_mixed + slot, mask=inside, other=0) > 0
    own_rem = tl.full((NODES,), 1.0, tl.float64)
    if tl.max(is_mixed.to(tl.int32), 0) > 0:
        own_rem = tl.where(is_mixed, sum_tiles(work.first_rest, slot, is_mixed, sizes.spans), 1.0)
    if IS_FIRST:
        a = tl.where(node == 0, 1.0, tl.zeros((NODES,), tl.float64))
        s = tl.zeros((NODES,), tl.float64)
        z = tl.zeros((NODES,), tl.float64)
        rem = tl.zeros((NODES,), tl.float64)
        stage = tl.where(node == 0, JUDGED, tl.full((NODES,), WAITING, tl.int32))
        order = rank_nodes(plan, parent, base, inside, NODES)
    else:
        a = tl.load(work.a + slot, mask=inside, other=0.0)
        s = tl.load(work.s + slot, mask=inside, other=0.0)
        z = tl.load(work.z + slot, mask=inside, other=0.0)
        rem = tl.load(work.rem + slot, mask=inside, other=0.0)
        stage = tl.load(work.stage + slot, mask=inside, other=WAITING)
        order = tl.load(work.order + slot, mask=inside, other=0)
        wanted = stage == WANTED
        if tl.max(wanted.to(tl.int32), 0) > 0:
            z = tl.where(wanted, sum_tiles(work.mass, slot, wanted, sizes.spans), z)
            if not REPLACEMENT:
                reads = wanted & leaves_rest(plan, base, parent, kind, inside, NODES)
                rem = tl.where(reads, sum_tiles(work.rest, slot, reads, sizes.spans), rem)
            stage = tl.where(wanted, KNOWN, stage)
    return State(parent, before, kind, gain, own_rem, a, s, z, rem, stage, order)


@triton.jit
def judge_nodes(state, a, s, z, rem, stage):
    """Judge every node whose parent is judged and whose siblings before are rejected, until there
    is none: all of a level, or of several levels, at once."""
    is_fixed = (state.kind & SAMPLED) == 0
    has_left = state.before >= 0
    left = tl.maximum(state.before, 0)
    num_ready = tl.full((), 1, tl.int32)
    while num_ready > 0:
        is_open = tl.gather(stage, state.parent, 0) >= JUDGED
        is_open = is_open & (~has_left | (tl.gather(stage, left, 0) == KNOWN))
        ready = is_open & (state.kind > 0) & (stage == WAITING)
        num_ready = tl.sum(ready.to(tl.int32), 0)
        above = tl.gather(a, state.parent, 0)
        s_left = tl.where(has_left, tl.gather(s, left, 0), 0.0)
        z_left = tl.where(has_left, tl.gather(z, left, 0), above)
        own_rem = tl.gather(state.own_rem, state.parent, 0)
        rem_left = tl.where(has_left, tl.gather(rem, left, 0), own_rem)
        whole = z_left + (1.0 - above)  # (z + 1) - a would lose a small z
        scaled = above * state.gain
        share = tl.where(is_fixed, scaled, tl.maximum(scaled - s_left, 0.0) * rem_left)
        a = tl.where(ready, tl.minimum(divide(share, whole), 1.0), a)
        s = tl.where(ready, s_left + tl.where(is_fixed, 0.0, divide(whole, rem_left)), s)
        z = tl.where(ready, tl.where(is_fixed, tl.maximum(z_left - scaled, 0.0), 0.0), z)
        rem = tl.where(ready, rem_left, rem)
        stage = tl.where(ready, tl.where(is_fixed | (above == 0.0), KNOWN, JUDGED), stage)
    return a, s, z, rem, stage


@triton.jit
def find_kept(plan, inputs, request, sizes, state, a, z, stage, NODES: tl.constexpr):
    """Place in post-order of the first node that is surely kept, -1 if there is none yet; which
    nodes are kept by their coins; and which passes before the first one are missing."""
    node = tl.arange(0, NODES)
    slot = request * sizes.nodes + node
    inside = node < tl.load(plan.count + request)
    last = tl.load(plan.last + slot, mask=inside, other=-1)
    has_child = last >= 0
    last = tl.maximum(last, 0)
    mass = tl.where(has_child, tl.gather(z, last, 0), a)
    has_ended = ~has_child | (tl.gather(stage, last, 0) == KNOWN)
    has_ended = has_ended & (stage >= JUDGED)
    whole = mass + (1.0 - a)
    h = tl.where(whole > 0.0, divide(mass, whole), 1.0)
    coin = tl.load(inputs.accept_coins + slot, mask=inside & (node > 0), other=0.0)
    is_kept = inside & has_ended & ((coin < h) | (node == 0))
    kept = tl.max(tl.where(is_kept, state.order, -1), 0)
    is_missing = (stage == JUDGED) & (node > 0) & (state.order > kept)
    return kept, is_kept, is_missing
