# ruff: noqa: N803, N806, RET505  (compile-time arguments are written in capitals; a return inside
# a compile-time `if` needs its `else`)
"""Plan the verification of trees: what no coin and no residual decides, for all nodes at once.

1. `node_law`, a program per node, only from tile statistics: the law of its target row.
2. `plan`, a program per request: the children of each node that can be judged, and for each of
   them `gain = p(y) / q(y)`, or p(y) if it is fixed; 0 where it is never accepted.

    usable      a token that isn't padding or faulty; sampled siblings share one draft row
    impossible  sampled, but its draft law, without fixed siblings and earlier ones, gives it 0
    gain = 0    impossible, or the id was rejected before

A malformed tree is planned as a root alone. Vectors over all nodes stay in registers; a node reads
another one's value by `tl.gather`.

Traffic: the laws, and two logits per node. Determinism: no order of summation but that of
`combine_tiles`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from spec_kernels import types
from spec_kernels.kernels._chain import (
    draft_laws,
    is_greedy,
    log2_draft,
    log2_law,
    no_law,
    read_laws,
)
from spec_kernels.kernels._device import (
    INVALID_TARGET,
    LOG2E,
    MAX_TEMPERATURE,
    NEG_INF,
    OK,
    PAD_TOKEN,
    combine_tiles,
    first_argmax,
    invert_temperature,
    is_valid_row,
)

INVALID_DRAFT = tl.constexpr(types.INVALID_DRAFT)
ZERO_Q = tl.constexpr(types.ZERO_Q)
BAD_TREE = tl.constexpr(types.BAD_TREE)

USABLE = tl.constexpr(1)  # bits of `Plan.kind`
SAMPLED = tl.constexpr(2)
POSSIBLE = tl.constexpr(4)

BIG = tl.constexpr(2147483647)
MAX_GAIN = tl.constexpr(1000.0)  # log2; keeps products with an acceptance finite


class Sizes(NamedTuple):
    """Run-time sizes of a tree step, named as those of a chain step; strides are in elements.

    `spans` counts tiles of the wider of both vocabularies, `tiles` those of the target's.
    """

    nodes: Any
    max_depth: Any
    tiles: Any
    spans: Any
    vocab: Any
    rows: Any
    stride: Any
    draft_vocab: Any
    draft_rows: Any
    draft_stride: Any
    stride_col: Any
    draft_stride_col: Any


class Plan(NamedTuple):
    """What `plan` finds out, `[batch, nodes]` but for `count`; i32 but for the laws and `gain`.

    Attributes:
        law: `Law` of each node's target row, written where it comes from tile statistics.
        gain: f64, of each child.
        first, last: children of a node that can be judged, -1 = none.
        before, behind: siblings of a child that can be judged, -1 = none.
        kind: USABLE, SAMPLED, POSSIBLE of a child.
        row: the draft row of a node's sampled children, -1 = none.
        is_mixed: a node has sampled and fixed children that can be judged.
        depth: of a node.
        status: what the request reports if the walk ends at a node.
        count: `[batch]`, nodes to be judged; 1 if the tree is malformed, 0 if it is absent.
    """

    law: Any
    gain: Any
    first: Any
    last: Any
    before: Any
    behind: Any
    kind: Any
    row: Any
    is_mixed: Any
    depth: Any
    status: Any
    count: Any


@triton.jit
def load_tree(parents_ptr, num_nodes_ptr, request, nodes, max_depth, NODES: tl.constexpr):
    """Parents and depths of a request's nodes, how many there are, and whether the tree is sound.

    Depths by doubling: every node adds the depth of the ancestor that it points to, and points to
    that one's ancestor.
    """
    node = tl.arange(0, NODES)
    count = tl.minimum(tl.maximum(tl.load(num_nodes_ptr + request), 0), nodes)
    parent = tl.load(parents_ptr + request * nodes + node, mask=node < count, other=-1)
    is_fine = tl.where(node == 0, parent == -1, (parent >= 0) & (parent < node))
    is_sound = tl.min(tl.where(node < count, is_fine.to(tl.int32), 1), 0) > 0
    depth = ((node > 0) & (node < count)).to(tl.int32)
    above = tl.where((node < count) & is_fine & (node > 0), parent, 0)
    while tl.max(above, 0) > 0:
        depth += tl.gather(depth, above, 0)
        above = tl.gather(above, above, 0)
    is_sound = is_sound & (tl.max(depth, 0) <= max_depth)
    return parent, depth, count, is_sound


@triton.jit
def target_law_at(inputs, plan, slot, row, exists, SOURCE: tl.constexpr):
    """Law of the target row at a slot; `status` says whether it is valid."""
    if SOURCE == "tiles":
        return read_laws(plan.law, slot, exists)
    elif SOURCE == "rows":
        return read_laws(inputs.target_law, row, exists)
    elif SOURCE == "slots":
        return read_laws(inputs.target_law, slot, exists)
    else:
        return no_law(exists)


@triton.jit(do_not_specialize=["nodes", "tiles", "rows"])
def node_law_kernel(
    plan,  # Plan, out: law
    inputs,  # Inputs
    nodes,
    tiles,
    vocab,
    rows,
    stride,
    stride_col,
    TILES: tl.constexpr,
    SHAPE: tl.constexpr,
):
    """Law of a node's target row from the statistics of its tiles, as `row_law` makes it.

    Floor: `batch * nodes * (8 * tiles + 32)` bytes: statistics read, a law written.
    """
    request = tl.program_id(0).to(tl.int64)
    node = tl.program_id(1)
    if node >= tl.load(inputs.num_nodes + request):
        return
    slot = request * nodes + node
    row = tl.load(inputs.target_row + slot).to(tl.int64)
    exists = (row >= 0) & (row < rows)
    temperature = tl.load(inputs.target_law.temperature + request)
    greedy = is_greedy(temperature)
    inv_temperature = invert_temperature(temperature)

    tile = tl.arange(0, TILES)
    inside = tile < tl.where(exists, tiles, 0)
    largest = tl.load(inputs.target_law.largest + slot * tiles + tile, mask=inside, other=NEG_INF)
    total = tl.load(inputs.target_law.total + slot * tiles + tile, mask=inside, other=0.0)
    row_max, row_sum = combine_tiles(largest, total, inv_temperature * LOG2E, 0)
    in_range = (temperature >= 0.0) & (temperature <= MAX_TEMPERATURE)
    valid = exists & is_valid_row(row_max, row_sum) & in_range
    argmax = tl.full((), PAD_TOKEN, tl.int32)
    if valid & greedy:
        row_ptr = inputs.target_logits + row * stride
        argmax = first_argmax(
            row_ptr, largest, row_max, vocab, SHAPE[0], SHAPE[1], SHAPE[2], stride_col
        )

    tl.store(plan.law.inv_temperature + slot, tl.where(greedy, 0.0, inv_temperature))
    tl.store(plan.law.cutoff + slot, tl.full((), NEG_INF, tl.float32))
    tl.store(plan.law.row_max + slot, row_max)
    tl.store(plan.law.log_sum + slot, tl.log(row_sum))
    tl.store(plan.law.argmax + slot, argmax.to(tl.int64))
    tl.store(plan.law.status + slot, tl.where(valid, OK, INVALID_TARGET))


class Block(NamedTuple):
    """BLOCK nodes that are compared with all nodes at once.

    Attributes:
        node: `[BLOCK] i32`.
        inside: where they are, among the nodes that are there.
        is_child: `[NODES, BLOCK]`: a node of the block is a child of a node.
    """

    node: Any
    inside: Any
    is_child: Any


@triton.jit
def take_block(start, parent, count, NODES: tl.constexpr, BLOCK: tl.constexpr):
    """The nodes from `start` on."""
    node = start + tl.arange(0, BLOCK)
    inside = tl.minimum(node, NODES - 1)
    above = tl.where(node < count, tl.gather(parent, inside, 0), -1)
    return Block(node, inside, above[None, :] == tl.arange(0, NODES)[:, None])


@triton.jit
def any_of(matrix):
    """Rows of a boolean matrix that hold a true."""
    return tl.max(matrix.to(tl.int32), 1) > 0


@triton.jit
def share_rows(parent, is_sampled, row, count, NODES: tl.constexpr, BLOCK: tl.constexpr):
    """The draft row of each node's sampled children, that of the first usable one; -1 = none."""
    first = tl.full((NODES,), BIG, tl.int32)
    for start in range(1, count, BLOCK):
        block = take_block(start, parent, count, NODES, BLOCK)
        sampled = (tl.gather(is_sampled.to(tl.int32), block.inside, 0) > 0)[None, :]
        found = tl.where(block.is_child & sampled, block.node[None, :], BIG)
        first = tl.minimum(first, tl.min(found, 1))
    return tl.where(first < BIG, tl.gather(row, tl.where(first < BIG, first, 0), 0), -1)


class Families(NamedTuple):
    """How usable nodes hang together, `[NODES]`.

    Attributes:
        first, last: children of a node, BIG and -1 = none.
        before: sibling before a node, -1 = none.
        has_fixed: a child of the node is fixed.
        has_fault: a child of the node can't be judged.
        after_fixed: a fixed sibling before a node has its id.
        beside_fixed: any fixed sibling has.
        after_sampled: a sampled sibling before it has.
    """

    first: Any
    last: Any
    before: Any
    has_fixed: Any
    has_fault: Any
    after_fixed: Any
    beside_fixed: Any
    after_sampled: Any


@triton.jit
def gather_families(
    parent, tokens, usable, fixed, faulty, count, NODES: tl.constexpr, BLOCK: tl.constexpr
):
    """Compare all nodes with all nodes, BLOCK at a time."""
    node = tl.arange(0, NODES)
    kind = tl.where(usable, 1, 0) | tl.where(fixed, 2, 0) | tl.where(faulty, 4, 0)
    first = tl.full((NODES,), BIG, tl.int32)
    last = tl.full((NODES,), -1, tl.int32)
    before = tl.full((NODES,), -1, tl.int32)
    has_fixed = node < 0
    has_fault = node < 0
    after_fixed = node < 0
    beside_fixed = node < 0
    after_sampled = node < 0
    for start in range(1, count, BLOCK):
        block = take_block(start, parent, count, NODES, BLOCK)
        other = block.node[None, :]
        other_kind = tl.gather(kind, block.inside, 0)[None, :]
        is_usable = (other_kind & 1) > 0
        is_fixed = (other_kind & 2) > 0
        child = block.is_child & is_usable
        first = tl.minimum(first, tl.min(tl.where(child, other, BIG), 1))
        last = tl.maximum(last, tl.max(tl.where(child, other, -1), 1))
        has_fixed = has_fixed | any_of(child & is_fixed)
        has_fault = has_fault | any_of(block.is_child & ((other_kind & 4) > 0))

        above = tl.gather(parent, block.inside, 0)[None, :]
        sibling = (above == parent[:, None]) & is_usable & (other < count)
        earlier = sibling & (other < node[:, None])
        before = tl.maximum(before, tl.max(tl.where(earlier, other, -1), 1))
        same = tl.gather(tokens, block.inside, 0)[None, :] == tokens[:, None]
        beside_fixed = beside_fixed | any_of(sibling & same & is_fixed)
        after_fixed = after_fixed | any_of(earlier & same & is_fixed)
        after_sampled = after_sampled | any_of(earlier & same & ~is_fixed)
    return Families(
        first, last, before, has_fixed, has_fault, after_fixed, beside_fixed, after_sampled
    )


@triton.jit(do_not_specialize=["nodes", "max_depth", "tiles", "spans", "rows", "draft_rows"])
def plan_kernel(
    plan,  # Plan, out
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
    SOURCE: tl.constexpr,
    REPLACEMENT: tl.constexpr,
    NODES: tl.constexpr,
    BLOCK: tl.constexpr,  # nodes that are compared with all others at once
):
    """Topology, children and gains of a request.

    Floor: `batch * nodes * 200` bytes: tree and laws read, a sector of two logits, the plan.
    """
    request = tl.program_id(0).to(tl.int64)
    sizes = Sizes(
        nodes, max_depth, tiles, spans, vocab, rows, stride, draft_vocab, draft_rows, draft_stride,
        stride_col, draft_stride_col,
    )  # fmt: skip
    parent, depth, present, is_sound = load_tree(
        parents_ptr, inputs.num_nodes, request, nodes, max_depth, NODES
    )
    count = tl.where(is_sound, present, tl.minimum(present, 1))
    tl.store(plan.count + request, count)
    if count <= 0:
        return
    node = tl.arange(0, NODES)
    base = request * nodes
    slot = base + node
    inside = node < count
    is_child = inside & (node > 0)
    above = tl.where(is_child, parent, 0)

    row = tl.load(inputs.target_row + slot, mask=inside, other=-1).to(tl.int64)
    p_own = target_law_at(inputs, plan, slot, row, inside & (row >= 0) & (row < rows), SOURCE)
    row = tl.load(inputs.target_row + base + above, mask=is_child, other=-1).to(tl.int64)
    exists = is_child & (row >= 0) & (row < rows)
    p = target_law_at(inputs, plan, base + above, row, exists, SOURCE)

    tokens = tl.load(inputs.tokens + slot, mask=is_child, other=PAD_TOKEN).to(tl.int64)
    is_fixed = is_child
    is_usable = is_child & (tokens >= 0)
    width = vocab
    q_row = tl.full((NODES,), -1, tl.int32)
    if inputs.draft_row is not None:
        draft_row = tl.load(inputs.draft_row + slot, mask=is_child, other=-1)
        is_fixed = draft_row == -1
        q = draft_laws(inputs, draft_row.to(tl.int64), sizes)
        if inputs.draft_column is None:
            width = tl.where(is_fixed, vocab, tl.maximum(vocab, draft_vocab))
        is_usable = is_usable & (is_fixed | q.status) & (tokens < width)
        q_row = share_rows(parent, is_usable & ~is_fixed, draft_row, count, NODES, BLOCK)
        is_usable = is_usable & (is_fixed | (draft_row == tl.gather(q_row, above, 0)))
    is_usable = is_usable & (tokens < width)
    is_faulty = is_child & (tokens != PAD_TOKEN) & ~is_usable
    is_usable = is_usable & p.status
    is_fixed = is_fixed & is_child
    family = gather_families(parent, tokens, is_usable, is_fixed, is_faulty, count, NODES, BLOCK)

    IS_LAW: tl.constexpr = SOURCE != "probabilities"
    OTHER: tl.constexpr = NEG_INF if IS_LAW else 0.0
    place = row * stride + tokens * stride_col
    x = tl.load(inputs.target_logits + place, mask=is_usable & (tokens < vocab), other=OTHER)
    log_p = log2_law(x, tokens == p.argmax, p, IS_LAW)
    log_q = tl.zeros((NODES,), tl.float64)
    if inputs.draft_row is not None:
        sampled = is_usable & ~is_fixed
        log_q = log2_draft(inputs, tokens, draft_row.to(tl.int64), q, sampled, sizes)
    is_out = family.beside_fixed
    if not REPLACEMENT:
        is_out = is_out | family.after_sampled
    is_possible = (log_q > NEG_INF) & (is_fixed | ~is_out)
    repeats = tl.where(is_fixed, family.after_fixed, family.after_sampled)
    can_pass = is_usable & is_possible & (log_p > NEG_INF) & ~repeats
    gain = tl.exp2(tl.minimum(tl.where(can_pass, log_p - log_q, 0.0), MAX_GAIN))

    kind = tl.where(is_fixed, USABLE, USABLE | SAMPLED) | tl.where(is_possible, POSSIBLE, 0)
    before = tl.where(is_usable, family.before, -1)
    is_last = node == tl.gather(family.last, above, 0)
    status = tl.where(family.has_fault, INVALID_DRAFT, OK)
    status = status | tl.where(p_own.status, OK, INVALID_TARGET)
    tl.store(plan.gain + slot, tl.where(can_pass, gain, 0.0), mask=inside)
    tl.store(plan.first + slot, tl.where(family.first < BIG, family.first, -1), mask=inside)
    tl.store(plan.last + slot, family.last, mask=inside)
    tl.store(plan.before + slot, before, mask=inside)
    tl.store(plan.behind + base + before, node, mask=before >= 0)
    tl.store(plan.behind + slot, -1, mask=inside & (is_last | ~is_usable))
    tl.store(plan.kind + slot, tl.where(is_usable, kind, 0), mask=inside)
    tl.store(plan.row + slot, q_row, mask=inside)
    has_sampled = p_own.status & (q_row >= 0)
    tl.store(plan.is_mixed + slot, (family.has_fixed & has_sampled).to(tl.int32), mask=inside)
    tl.store(plan.depth + slot, depth, mask=inside)
    tl.store(plan.status + slot, status | tl.where(is_sound, OK, BAD_TREE), mask=inside)
