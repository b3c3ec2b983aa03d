# ruff: noqa: N803  (compile-time arguments are written in capitals; a run-time
# condition inside a compile-time one needs its own `if`)
"""Accept or reject trees of drafts, and draw the token that follows, in a fixed number of launches.

With a node's entry acceptance a, its law p and the law q of its sampled children:

    start              s = 0, Z = a, W = Z + (1 - a), rem = mass of q off the fixed children
    entry of child y   b = min(1, (a * gain - s)+ * rem / W);  y fixed: b = a * gain / W
    y is rejected      sampled: s += W / rem, then a *pass*: Z = sum_x r(x), rem;  fixed: Z -= r(y)
    token rule         enter y iff u < b, with a = 1;  block rule: enter every y with a = b
    block rule         h = Z / W once all children are rejected; kept: the first in post-order
                       with u < h, the root for sure
    final token        norm(r) of the kept node

1. `plan` (see `_tree`), a program per node. `rest`, a program per node and tile: rem of the nodes
   with sampled and fixed children.
2. Token rule, `rounds` times: `token_pass`, a program per request and tile, walks down with the
   passes of the launches before and makes the one that is missing first.
   Block rule, `rounds` times: `start` or `advance`, a program per request, judges all nodes whose
   parent and siblings before are known; `block_pass`, a program per node and tile, makes the passes
   that are missing. No a, Z or h depends on a coin, and a pass behind a kept node is left out.
3. `finish`, a program per request: passes that are still missing, one after another; then the
   tile masses that are missing, the final token and the path.

`rounds` never shows in the results: a pass gives the same sums wherever it is made.

Traffic: `rows + nodes with both kinds of children + 2 * passes + 1.2` rows of the vocabulary.
Determinism: fixed tiles and orders of summation, no atomics; no launch reads what it writes.

Source:
    Miao et al. 2024, "SpecInfer"; Weng et al. 2025, "Traversal verification".
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from spec_kernels.kernels._chain import Inputs
from spec_kernels.kernels._device import (
    INVALID_TARGET,
    OK,
    PAD_TOKEN,
    TileConfig,
    allow_registers,
    column_stride,
)
from spec_kernels.kernels._tree import (
    BAD_TREE,
    BIG,
    INVALID_DRAFT,
    Plan,
    Sizes,
    load_tree,
    node_law_kernel,
    plan_kernel,
)
from spec_kernels.kernels._tree_finish import finish_kernel, store_absent
from spec_kernels.kernels._tree_mass import (
    measure_rest,
    rows_at,
    special_children,
)
from spec_kernels.kernels._tree_walk import (
    WANTED,
    Work,
    find_kept,
    judge_nodes,
    load_state,
    make_pass,
    walk,
)
from spec_kernels.types import Acceptance, Law

# --------------------------------------------------------------------------------------- kernels


@triton.jit(do_not_specialize=["nodes", "max_depth", "tiles", "spans", "rows", "draft_rows"])
def rest_kernel(
    work,  # Work, out: first_rest
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
    SOURCE: tl.constexpr,
    NODES: tl.constexpr,
    SHAPE: tl.constexpr,
):
    """Mass that the ids of its fixed children leave of the draft law of a node, in one tile.

    Floor: `mixed * draft_vocab * itemsize` bytes: each draft row with fixed children beside once.
    """
    request = tl.program_id(0).to(tl.int64)
    v = tl.program_id(1)
    sizes = Sizes(
        nodes, max_depth, tiles, spans, vocab, rows, stride, draft_vocab, draft_rows, draft_stride,
        stride_col, draft_stride_col,
    )  # fmt: skip
    if v >= tl.load(plan.count + request):
        return
    slot = request * nodes + v
    if tl.load(plan.is_mixed + slot) == 0:
        return
    tile = tl.program_id(2)
    one = tl.full((), 1.0, tl.float64)
    at = rows_at(inputs, plan, request, v, one, one, sizes, SOURCE)
    special = special_children(inputs, plan, parents_ptr, request, v, -1, False, sizes, NODES)
    none = tl.full((), 0.0, tl.float32)
    rest = measure_rest(inputs, at, special, tile, none, True, sizes, SHAPE)
    tl.store(work.first_rest + slot * spans + tile, rest)


@triton.jit(
    do_not_specialize=[
        "nodes",
        "max_depth",
        "tiles",
        "spans",
        "rows",
        "draft_rows",
        "passes",
        "step",
    ]
)
def token_pass_kernel(
    work,  # Work, out: mass, rest
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
    passes,  # made by the launches before
    step,  # tiles per program
    SOURCE: tl.constexpr,
    REPLACEMENT: tl.constexpr,
    NODES: tl.constexpr,
    TILES: tl.constexpr,
    SHAPE: tl.constexpr,
):
    """Some tiles of the first pass that a request's walk misses.

    Floor: `2 * passes * vocab * itemsize // rounds` bytes: both rows once.
    """
    request = tl.program_id(0).to(tl.int64)
    sizes = Sizes(
        nodes, max_depth, tiles, spans, vocab, rows, stride, draft_vocab, draft_rows, draft_stride,
        stride_col, draft_stride_col,
    )  # fmt: skip
    if tl.load(plan.count + request) <= 0:
        return
    _, _, _, s, missing = walk(work, plan, inputs, request, passes, sizes, REPLACEMENT, TILES)
    if missing >= 0:
        begin = tl.program_id(1) * step
        end = tl.minimum(begin + step, spans)
        one = tl.full((), 1.0, tl.float64)
        make_pass(
            work, plan, inputs, parents_ptr, request, missing, begin, end, one, s, sizes, SOURCE,
            REPLACEMENT, NODES, SHAPE,
        )  # fmt: skip


@triton.jit
def advance(
    work, plan, inputs, parents_ptr, request, count, sizes, IS_FIRST: tl.constexpr,
    REPLACEMENT: tl.constexpr, NODES: tl.constexpr,
):  # fmt: skip
    """Judge what nodes of a request can be judged, and name the passes to be made next."""
    state = load_state(work, plan, parents_ptr, request, sizes, IS_FIRST, REPLACEMENT, NODES)
    a, s, z, rem, stage = judge_nodes(state, state.a, state.s, state.z, state.rem, state.stage)
    _, _, is_missing = find_kept(plan, inputs, request, sizes, state, a, z, stage, NODES)

    node = tl.arange(0, NODES)
    slot = request * sizes.nodes + node
    tl.store(work.a + slot, a, mask=node < count)
    tl.store(work.s + slot, s, mask=node < count)
    tl.store(work.z + slot, z, mask=node < count)
    tl.store(work.rem + slot, rem, mask=node < count)
    tl.store(work.stage + slot, tl.where(is_missing, WANTED, stage), mask=node < count)
    if IS_FIRST:
        tl.store(work.order + slot, state.order, mask=node < count)


@triton.jit(do_not_specialize=["nodes", "max_depth", "tiles", "spans", "rows", "draft_rows"])
def start_kernel(
    work,  # Work, out: a, s, z, rem, stage, order
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
    REPLACEMENT: tl.constexpr,
    NODES: tl.constexpr,
):
    """Rank the nodes of a request, and `advance` from its root.

    Floor: `batch * nodes * 100` bytes: the plan and the state of every node.
    """
    request = tl.program_id(0).to(tl.int64)
    sizes = Sizes(
        nodes, max_depth, tiles, spans, vocab, rows, stride, draft_vocab, draft_rows, draft_stride,
        stride_col, draft_stride_col,
    )  # fmt: skip
    count = tl.load(plan.count + request)
    if count <= 0:
        return
    advance(work, plan, inputs, parents_ptr, request, count, sizes, True, REPLACEMENT, NODES)


@triton.jit(do_not_specialize=["nodes", "max_depth", "tiles", "spans", "rows", "draft_rows"])
def advance_kernel(
    work,  # Work, in and out: a, s, z, rem, stage
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
    REPLACEMENT: tl.constexpr,
    NODES: tl.constexpr,
):
    """`advance` with the passes of the launch before.

    Floor: `batch * nodes * 100` bytes: the plan and the state of every node.
    """
    request = tl.program_id(0).to(tl.int64)
    sizes = Sizes(
        nodes, max_depth, tiles, spans, vocab, rows, stride, draft_vocab, draft_rows, draft_stride,
        stride_col, draft_stride_col,
    )  # fmt: skip
    count = tl.load(plan.count + request)
    if count <= 0:
        return
    advance(work, plan, inputs, parents_ptr, request, count, sizes, False, REPLACEMENT, NODES)


@triton.jit(
    do_not_specialize=["nodes", "max_depth", "tiles", "spans", "rows", "draft_rows", "step"]
)
def block_pass_kernel(
    work,  # Work, out: mass, rest
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
    step,  # tiles per program
    SOURCE: tl.constexpr,
    REPLACEMENT: tl.constexpr,
    NODES: tl.constexpr,
    SHAPE: tl.constexpr,
):
    """Some tiles of the pass behind one child, if it is wanted.

    Floor: `2 * passes * vocab * itemsize // rounds` bytes: both rows once.
    """
    request = tl.program_id(0).to(tl.int64)
    child = tl.program_id(1)
    sizes = Sizes(
        nodes, max_depth, tiles, spans, vocab, rows, stride, draft_vocab, draft_rows, draft_stride,
        stride_col, draft_stride_col,
    )  # fmt: skip
    if child >= tl.load(plan.count + request):
        return
    slot = request * nodes + child
    if tl.load(work.stage + slot) != WANTED:
        return
    begin = tl.program_id(2) * step
    end = tl.minimum(begin + step, spans)
    a = tl.load(work.a + request * nodes + tl.load(parents_ptr + slot))
    make_pass(
        work, plan, inputs, parents_ptr, request, child, begin, end, a, tl.load(work.s + slot),
        sizes, SOURCE, REPLACEMENT, NODES, SHAPE,
    )  # fmt: skip


@triton.jit(do_not_specialize=["nodes", "max_depth"])
def match_tree_kernel(
    outputs,  # Acceptance, out
    tokens_ptr,  # [batch, nodes] i64 or i32
    target_tokens_ptr,  # [batch, nodes] i64 or i32
    num_nodes_ptr,  # [batch] i32
    parents_ptr,  # [batch, nodes] i32
    nodes,
    max_depth,
    NODES: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """Follow the target's own tokens from the root, as far as a child equals them.

    Floor: `batch * nodes * 32` bytes: ids and parents read, tokens and path written.
    """
    request = tl.program_id(0).to(tl.int64)
    parent, _, present, is_sound = load_tree(
        parents_ptr, num_nodes_ptr, request, nodes, max_depth, NODES
    )
    if present <= 0:
        store_absent(outputs, request, max_depth, DEPTH)
        return
    count = tl.where(is_sound, present, 1)
    node = tl.arange(0, NODES)
    base = request * nodes
    tokens = tl.load(tokens_ptr + base + node, mask=node < count, other=PAD_TOKEN).to(tl.int64)
    parent = tl.where((node > 0) & (node < count), parent, -1)
    place = tl.arange(0, DEPTH)
    path = tl.where(place == 0, 0, tl.full((DEPTH,), -1, tl.int32))
    emitted = tl.full((DEPTH,), PAD_TOKEN, tl.int64)
    v = tl.full((), 0, tl.int32)
    depth = tl.full((), 0, tl.int32)
    own = tl.load(target_tokens_ptr + base).to(tl.int64)
    hit = tl.min(tl.where((parent == v) & (tokens == own) & (own >= 0), node, BIG), 0)
    while hit < BIG:
        v = hit
        emitted = tl.where(place == depth, own, emitted)
        depth += 1
        path = tl.where(place == depth, v, path)
        own = tl.load(target_tokens_ptr + base + v).to(tl.int64)
        hit = tl.min(tl.where((parent == v) & (tokens == own) & (own >= 0), node, BIG), 0)
    emitted = tl.where(place == depth, tl.maximum(own, PAD_TOKEN), emitted)
    is_faulty = (parent == v) & (tokens < PAD_TOKEN)
    status = tl.where(own < 0, INVALID_TARGET, OK) | tl.where(is_sound, OK, BAD_TREE)
    status = status | tl.where(tl.max(is_faulty.to(tl.int32), 0) > 0, INVALID_DRAFT, OK)

    width = max_depth + 1
    tl.store(outputs.output_tokens + request * width + place, emitted, mask=place < width)
    tl.store(outputs.path + request * width + place, path, mask=place < width)
    tl.store(outputs.accepted_lens + request, depth)
    tl.store(outputs.status + request, status)


# ------------------------------------------------------------------------------------- launchers


class RoundsConfig(NamedTuple):
    """How the passes of a step are spread over launches; never shows in the results.

    Attributes:
        rounds: launches, or pairs of launches, that make passes tile by tile in parallel.
        step: tiles per program in them.
    """

    rounds: int
    step: int


def select_rounds(rule: str, batch: int, nodes: int, tiles: int) -> RoundsConfig:
    """Choose how many rounds of passes are launched before `finish` makes the rest on its own.

    | case | rounds | why |
    |---|---|---|
    | one tile a row | 0 | there is nothing to spread: a pass takes a program as long as a launch |
    | token rule, 132 requests | 0 | 1-3 passes a request; the requests fill the device already |
    | token rule | 2 | 1-3 passes one after another; the third and later ones are rare |
    | block rule | 4 | the passes of a level at once; a tree of depth 5 has up to 2-4 such rounds |

    A program makes one tile of a pass, or four where that leaves 4096 programs.

    Args:
        rule: "token" or "block".
        batch, nodes: requests, and most nodes of one.
        tiles: tiles per row.

    Example:
        >>> select_rounds("token", 1, 64, 16), select_rounds("block", 32, 64, 16)
        (RoundsConfig(rounds=2, step=1), RoundsConfig(rounds=4, step=4))
        >>> select_rounds("block", 1, 64, 1)
        RoundsConfig(rounds=0, step=1)
    """
    programs = batch * tiles * (1 if rule == "token" else nodes)
    step = 4 if programs >= 4 * 4096 else 1
    if tiles == 1 or (rule == "token" and batch >= 132):
        return RoundsConfig(0, step)
    return RoundsConfig(2 if rule == "token" else 4, step)


def make_plan(like: Tensor, batch: int, nodes: int, has_stats: bool) -> Plan:
    """Allocate a plan."""
    law = None
    if has_stats:
        floats = like.new_empty(4, batch * nodes, dtype=torch.float32).unbind(0)
        argmax = like.new_empty(batch * nodes, dtype=torch.int64)
        law = Law(*floats, argmax, like.new_empty(batch * nodes, dtype=torch.int32))
    gain = like.new_empty(batch, nodes, dtype=torch.float64)
    fields = like.new_empty(9, batch, nodes, dtype=torch.int32).unbind(0)
    return Plan(law, gain, *fields, count=like.new_empty(batch, dtype=torch.int32))


def make_work(like: Tensor, batch: int, nodes: int, spans: int, has_draft: bool) -> Work:
    """Allocate what the launches leave for one another."""
    sums = like.new_empty(3 if has_draft else 1, batch, nodes, spans, dtype=torch.float32)
    mass, rest, first_rest = sums.expand(3, -1, -1, -1).unbind(0)
    numbers = like.new_empty(4, batch, nodes, dtype=torch.float64).unbind(0)
    stage, order = like.new_empty(2, batch, nodes, dtype=torch.int32).unbind(0)
    return Work(mass, rest, first_rest, *numbers, stage, order)


def accept_trees(
    outputs: Acceptance,
    inputs: Inputs,
    parents: Tensor,
    rule: str,
    replacement: bool,
    max_depth: int,
    config: TileConfig,
    source: str,
) -> None:
    """Verify trees behind the launches that measure laws: `plan`, with drafts that were drawn
    `rest`, the rounds, `finish`."""
    batch, nodes = inputs.tokens.shape
    rows, vocab = inputs.target_logits.shape
    draft = inputs.draft_logits
    tiles = config.tiles(vocab)
    spans = tiles if draft is None else max(tiles, config.tiles(draft.shape[1]))
    rounds = select_rounds(rule, batch, nodes, spans)
    num_warps = 8 if nodes > 256 else config.num_warps
    plan = make_plan(inputs.target_logits, batch, nodes, source == "tiles")
    work = make_work(inputs.target_logits, batch, nodes, spans, draft is not None)
    shared = {
        "plan": plan,
        "inputs": inputs,
        "parents_ptr": parents.contiguous(),
        "nodes": nodes,
        "max_depth": max_depth,
        "tiles": tiles,
        "spans": spans,
        "vocab": vocab,
        "rows": rows,
        "stride": inputs.target_logits.stride(0),
        "draft_vocab": 0 if draft is None else draft.shape[1],
        "draft_rows": 0 if draft is None else draft.shape[0],
        "draft_stride": 0 if draft is None else draft.stride(0),
        "stride_col": column_stride(inputs.target_logits),
        "draft_stride_col": 1 if draft is None else column_stride(draft),
        "NODES": max(2, triton.next_power_of_2(nodes)),
        "num_warps": num_warps,
    }
    walks = {**shared, **allow_registers(inputs.target_logits)}
    if nodes > 256:
        shared = walks
    shape = {"SOURCE": source, "SHAPE": (config.chunks, config.lanes, config.width)}
    spread = {"TILES": triton.next_power_of_2(spans), "REPLACEMENT": replacement}
    if source == "tiles":
        names = ("plan", "inputs", "nodes", "tiles", "vocab", "rows", "stride", "stride_col")
        node_law_kernel[(batch, nodes)](
            TILES=triton.next_power_of_2(tiles),
            SHAPE=shape["SHAPE"],
            num_warps=config.num_warps,
            **{name: shared[name] for name in names},
        )
    plan_kernel[(batch,)](
        SOURCE=source, REPLACEMENT=replacement, BLOCK=4 if nodes > 256 else 16, **shared
    )
    if draft is not None:
        rest_kernel[(batch, nodes, spans)](work=work, **shared, **shape)
    programs = triton.cdiv(spans, rounds.step)
    for index in range(rounds.rounds):
        if rule == "token":
            token_pass_kernel[(batch, programs)](
                work=work, passes=index, step=rounds.step, **walks, **shape, **spread
            )
        else:
            kernel = advance_kernel if index else start_kernel
            kernel[(batch,)](work=work, REPLACEMENT=replacement, **shared)
            block_pass_kernel[(batch, nodes, programs)](
                work=work, step=rounds.step, REPLACEMENT=replacement, **shared, **shape
            )
    finish_kernel[(batch,)](
        outputs=outputs,
        work=work,
        passes=rounds.rounds,
        RULE=rule,
        IS_FIRST=rounds.rounds == 0,
        DEPTH=triton.next_power_of_2(max_depth + 1),
        **walks,
        **shape,
        **spread,
    )
