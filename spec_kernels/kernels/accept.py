# ruff: noqa: N803, N806, SIM102  (compile-time arguments are written in capitals; a run-time
# condition inside a compile-time one needs its own `if`)
"""Accept or reject chains of drafts, and draw the token that follows, in few passes over the rows.

    token rule   accept y_i iff u_i < p_i(y_i) / q_i(y_i), up to the first rejection
    block rule   log2 a_i = L_i - max(0, L_1 .. L_i),  L_i = sum_(j <= i) log2 p_j(y_j) / q_j(y_j)
                 h_i = Z_i / (Z_i + (1 - a_i)),  Z_i = sum_x (a_i p_(i+1)(x) - q_(i+1)(x))+
                 n = the largest i with u_i < h_i; at the end of the chain h = a
    final token  the plain target law after the last draft, else norm((a_n p_(n+1) - q_(n+1))+)

1. `law.tile_stats` measures the tiles of every target row; not needed where laws are given.
   With filters `law.find_cutoff` makes laws of them.
2. `residual_mass`, a program per request, node and tile: repeat the accept scan (a cumulative sum
   and a cumulative maximum over the chain, no loop), then sum the residual over one tile. The
   weight a goes into the exponent. The token rule needs the row of its first rejection only.
3. `decide`, a program per request: the scan, the coins, then the final token: tile by the tile
   masses in float64, lane and id by reading that tile again.

Fixed drafts have a one-hot law: tile masses come from the statistics, only the tile of the
rejected id is read. A weight is `exp2(l * scale - shift) * factor`: one fused multiply-add an id,
with the rounding error of `shift` carried exactly by `factor`.

Traffic: rows * vocab + 2 * residual rows * vocab elements, and 12 bytes per row and tile.
Residual rows: one per request (token rule), one per draft (block rule). Instructions an id pair
(sm_90, scan included): at most 16 for bfloat16, 13 for float32, 4 more with cutoffs.
Determinism: fixed tiles and orders of summation, no atomics; a request depends on itself alone.

Source:
    Leviathan et al. 2023; Chen et al. 2023; Sun et al. 2025, "Block verification".
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from spec_kernels import types
from spec_kernels.kernels._chain import (
    Inputs,
    Sizes,
    Tiles,
    draft_laws,
    is_greedy,
    log2_draft,
    log2_law,
    target_laws,
)
from spec_kernels.kernels._device import (
    INVALID_TARGET,
    NEG_INF,
    OK,
    PAD_TOKEN,
    TileConfig,
    align,
    column_stride,
    config_of,
    first_argmax,
    take,
    target_of,
)
from spec_kernels.kernels._residual import draw_final, mass_at_argmax, residual_at, sum_tiles
from spec_kernels.kernels._tree_accept import accept_trees, match_tree_kernel
from spec_kernels.kernels.law import Slots, find_cutoff, has_filters, tile_stats
from spec_kernels.types import Acceptance, Draft, Law, SamplingParams

INVALID_DRAFT = tl.constexpr(types.INVALID_DRAFT)
ZERO_Q = tl.constexpr(types.ZERO_Q)


class Scan(NamedTuple):
    """A chain closed at node `end` (-1: absent request); vectors are `[NODES]`, by parent node.

    Attributes:
        end: drafts that may be accepted.
        status: why the chain is closed.
        tokens: i64, the child of each node.
        gain: f64, log2 p - log2 q of the child; -inf if p or q is 0; 0 from `end` on.
        is_zero_q: the child is sampled, but q gives it 0.
        laws: of the target rows.
    """

    end: Any
    status: Any
    tokens: Any
    gain: Any
    is_zero_q: Any
    laws: Any


@triton.jit
def last_node(num_nodes_ptr, nodes, max_depth):
    """The last node that may be reached; -1 if the request is absent."""
    present = tl.minimum(tl.maximum(tl.load(num_nodes_ptr), 0), nodes)
    return tl.minimum(present - 1, max_depth)


@triton.jit
def accept_scan(
    inputs, request, sizes, SOURCE: tl.constexpr, NODES: tl.constexpr, TILES: tl.constexpr
):
    """Close a request's chain, and compare the two laws at every draft in it."""
    node = tl.arange(0, NODES)
    slot = request * sizes.nodes + node
    limit = last_node(inputs.num_nodes + request, sizes.nodes, sizes.max_depth)
    has_child = node < limit
    row = tl.load(inputs.target_row + slot, mask=node <= limit, other=-1).to(tl.int64)
    row_exists = (row >= 0) & (row < sizes.rows)
    p = target_laws(inputs, request, slot, row, row_exists, sizes.tiles, SOURCE, TILES)
    tokens = tl.load(inputs.tokens + slot + 1, mask=has_child, other=PAD_TOKEN).to(tl.int64)
    width = sizes.vocab
    is_usable = tokens >= 0
    is_fixed = has_child
    if inputs.draft_row is not None:
        draft_row = tl.load(inputs.draft_row + slot + 1, mask=has_child, other=-1).to(tl.int64)
        is_fixed = draft_row == -1
        q = draft_laws(inputs, draft_row, sizes)
        is_usable = is_usable & (is_fixed | q.status)
        if inputs.draft_column is None:
            widest = tl.maximum(sizes.vocab, sizes.draft_vocab)
            width = tl.where(is_fixed, sizes.vocab, widest)
    is_usable = is_usable & (tokens < width)

    closes = ((tokens == PAD_TOKEN) | ~is_usable | ~p.status) & (node <= limit)
    end = tl.min(tl.where(closes, node, NODES), 0)
    is_faulty = (tokens != PAD_TOKEN) & ~is_usable
    flags = tl.where(is_faulty, INVALID_DRAFT, OK) | tl.where(p.status, OK, INVALID_TARGET)
    status = take(flags, end)
    end = tl.where(limit < 0, -1, end)

    IS_LAW: tl.constexpr = SOURCE != "probabilities"
    OTHER: tl.constexpr = NEG_INF if IS_LAW else 0.0
    judged = node < end
    place = row * sizes.stride + tokens * sizes.stride_col
    x = tl.load(inputs.target_logits + place, mask=judged & (tokens < sizes.vocab), other=OTHER)
    log_p = log2_law(x, tokens == p.argmax, p, IS_LAW)
    log_q = tl.zeros((NODES,), tl.float64)
    if inputs.draft_row is not None:
        log_q = log2_draft(inputs, tokens, draft_row, q, judged & ~is_fixed, sizes)
    gain = tl.where((log_p > NEG_INF) & (log_q > NEG_INF), log_p - log_q, NEG_INF)
    is_zero_q = judged & (log_q == NEG_INF)
    return Scan(end, status, tokens, tl.where(judged, gain, 0.0), is_zero_q, p)


@triton.jit
def largest_of(a, b):
    """The larger of two numbers: combines a cumulative maximum."""
    return tl.maximum(a, b)


@triton.jit
def log2_acceptance(scan):
    """log2 a of the child of each node under the block rule: a walk reflected at 0."""
    walk = tl.cumsum(scan.gain, 0)
    return walk - tl.maximum(tl.associative_scan(walk, 0, largest_of), 0.0)


@triton.jit
def load_coins(inputs, request, sizes, end, NODES: tl.constexpr):
    """The coin that judges the child of each node; 2, which rejects, from `end` on."""
    node = tl.arange(0, NODES)
    place = request * sizes.nodes + node + 1
    return tl.load(inputs.accept_coins + place, mask=node < end, other=2.0)


@triton.jit
def count_accepted(inputs, request, sizes, scan, NODES: tl.constexpr):
    """Token rule: drafts before the first rejection."""
    coins = load_coins(inputs, request, sizes, scan.end, NODES)
    accepted = coins < tl.exp2(scan.gain)
    return tl.min(tl.where(accepted, NODES, tl.arange(0, NODES)), 0)


# --------------------------------------------------------------------------------------- kernels


@triton.jit
def store_argmax(inputs, request, node, sizes, TILES: tl.constexpr, SHAPE: tl.constexpr):
    """First argmax of the row at a node of a greedy request, for `decide`."""
    slot = request * sizes.nodes + node
    row = tl.load(inputs.target_row + slot).to(tl.int64)
    if (row >= 0) & (row < sizes.rows):
        tile = tl.arange(0, TILES)
        place = inputs.target_law.largest + slot * sizes.tiles + tile
        largest = tl.load(place, mask=tile < sizes.tiles, other=NEG_INF)
        row_ptr = inputs.target_logits + row * sizes.stride
        row_max = tl.max(largest, 0)
        argmax = first_argmax(
            row_ptr, largest, row_max, sizes.vocab, SHAPE[0], SHAPE[1], SHAPE[2], sizes.stride_col
        )
        tl.store(inputs.target_law.argmax + slot, argmax.to(tl.int64))


@triton.jit(do_not_specialize=["nodes", "max_depth", "tiles", "rows", "draft_rows", "step"])
def residual_mass_kernel(
    residual_ptr,  # [slots, tiles] f32, out: sum of the residual
    plain_ptr,  # [slots, tiles] f32, out: sum of a * p
    inputs,  # Inputs
    nodes,
    max_depth,
    tiles,
    vocab,
    rows,
    stride,
    draft_vocab,
    draft_rows,
    draft_stride,
    stride_col,
    draft_stride_col,
    step,  # tiles per program
    RULE: tl.constexpr,
    SOURCE: tl.constexpr,
    NODES: tl.constexpr,
    TILES: tl.constexpr,
    SHAPE: tl.constexpr,
):
    """Masses of some tiles at one node of a request, up to the end of its chain; under the token
    rule at the node of its first rejection, in slot `request`.

    Floor: `2 * pairs * vocab * itemsize` bytes: both rows of a pair once. A pair is a sampled draft
    under the block rule, a sampled draft that is rejected under the token rule.
    """
    request = tl.program_id(0).to(tl.int64)
    node = tl.program_id(1)
    sizes = Sizes(
        nodes, max_depth, tiles, vocab, rows, stride, draft_vocab, draft_rows, draft_stride,
        stride_col, draft_stride_col,
    )  # fmt: skip
    if node >= tl.load(inputs.num_nodes + request):
        return
    if SOURCE == "tiles":
        if is_greedy(tl.load(inputs.target_law.temperature + request)):
            if tl.program_id(2) == 0:
                store_argmax(inputs, request, node, sizes, TILES, SHAPE)
            return
    if RULE == "token":
        if node > 0:
            return
    scan = accept_scan(inputs, request, sizes, SOURCE, NODES, TILES)
    if RULE == "token":
        node = count_accepted(inputs, request, sizes, scan, NODES)
        log2_a = tl.full((), 0.0, tl.float64)
        out = request * tiles
    else:
        log2_a = take(log2_acceptance(scan), node - 1)
        # at the end p stands alone: a p might vanish
        log2_a = tl.where((node == scan.end) & (log2_a > NEG_INF), 0.0, log2_a)
        out = (request * nodes + node) * tiles
    if node > scan.end:
        return
    at = residual_at(inputs, scan.laws, request, node, scan.end, log2_a, sizes, SOURCE)
    if not at.p_law.status:
        return

    begin = tl.program_id(2) * step
    end = tl.minimum(begin + step, tiles)
    slot = request * nodes + node
    residual_ptr += out
    plain_ptr += out
    is_hot = at.p_law.inv_temperature == 0.0
    if is_hot | (log2_a == NEG_INF):
        mass = mass_at_argmax(inputs, at, is_hot, log2_a, sizes)
        for tile in range(begin, end):
            tl.store(residual_ptr + tile, tl.where(tile == 0, mass, 0.0))
            tl.store(plain_ptr + tile, 0.0)
    elif at.has_q:
        if inputs.draft_row is not None:
            # Two loops: the compiler would merge the two forms of a tile and run out of registers.
            if (at.p.cutoff > NEG_INF) | (at.q.cutoff > NEG_INF):
                sum_tiles(
                    inputs, residual_ptr, plain_ptr, slot, begin, end, at, log2_a, sizes, SOURCE,
                    True, True, SHAPE,
                )  # fmt: skip
            else:
                sum_tiles(
                    inputs, residual_ptr, plain_ptr, slot, begin, end, at, log2_a, sizes, SOURCE,
                    True, False, SHAPE,
                )  # fmt: skip
    else:
        sum_tiles(
            inputs, residual_ptr, plain_ptr, slot, begin, end, at, log2_a, sizes, SOURCE,
            False, True, SHAPE,
        )  # fmt: skip


@triton.jit
def load_masses(ptr, slot, mask, tiles, TILES: tl.constexpr):
    """Tile masses of slots in float64; 0 outside the mask and behind the last tile."""
    tile = tl.arange(0, TILES)
    place = tl.expand_dims(slot * tiles, -1) + tile
    inside = tl.expand_dims(mask, -1) & (tile < tiles)
    return tl.load(ptr + place, mask=inside, other=0.0).to(tl.float64)


@triton.jit
def keep_block(
    inputs, request, residual_ptr, sizes, scan, SOURCE: tl.constexpr, NODES: tl.constexpr,
    TILES: tl.constexpr,
):  # fmt: skip
    """Block rule: the last draft that its coin keeps, and log2 of the scale of p behind it."""
    node = tl.arange(0, NODES)
    inner = node + 1 < scan.end
    if SOURCE == "tiles":  # a is 0 or 1 at a greedy request, and no mass was stored
        inner = inner & ~is_greedy(tl.load(inputs.target_law.temperature + request))
    slot = request * sizes.nodes + node + 1
    mass = tl.sum(load_masses(residual_ptr, slot, inner, sizes.tiles, TILES), 1)
    log2_a = log2_acceptance(scan)
    a = tl.exp2(log2_a)
    whole = mass + (1.0 - a)
    h = tl.where(whole > 0.0, mass / tl.where(whole > 0.0, whole, 1.0), 1.0)
    h = tl.where(node + 1 == scan.end, a, h)
    coins = load_coins(inputs, request, sizes, scan.end, NODES)
    kept = tl.max(tl.where(coins < h, node + 1, 0), 0)
    return kept, tl.where(kept == scan.end, 0.0, take(log2_a, kept - 1))


@triton.jit
def store_result(
    outputs, request, tokens, kept, final, status, max_depth, NODES: tl.constexpr,
    DEPTH: tl.constexpr,
):  # fmt: skip
    """Write the kept drafts, the final token, and padding; `kept` is -1 for an absent request."""
    node = tl.arange(0, NODES)
    place = request * (max_depth + 1) + node
    emitted = tl.where(node < kept, tokens, tl.where(node == kept, final, PAD_TOKEN))
    path = tl.where(node <= kept, node, -1)
    tl.store(outputs.output_tokens + place, emitted, mask=node <= max_depth)
    tl.store(outputs.path + place, path, mask=node <= max_depth)
    if DEPTH > NODES:
        node = tl.arange(0, DEPTH)
        place = request * (max_depth + 1) + node
        behind = (node >= NODES) & (node <= max_depth)
        tl.store(outputs.output_tokens + place, PAD_TOKEN, mask=behind)
        tl.store(outputs.path + place, -1, mask=behind)
    tl.store(outputs.accepted_lens + request, tl.maximum(kept, 0))
    tl.store(outputs.status + request, status)


@triton.jit(do_not_specialize=["nodes", "max_depth", "tiles", "rows", "draft_rows"])
def decide_kernel(
    outputs,  # Acceptance, out
    residual_ptr,  # [slots, tiles] f32
    plain_ptr,  # [slots, tiles] f32
    inputs,  # Inputs
    nodes,
    max_depth,
    tiles,
    vocab,
    rows,
    stride,
    draft_vocab,
    draft_rows,
    draft_stride,
    stride_col,
    draft_stride_col,
    RULE: tl.constexpr,
    SOURCE: tl.constexpr,
    NODES: tl.constexpr,
    DEPTH: tl.constexpr,
    TILES: tl.constexpr,
    SHAPE: tl.constexpr,
):
    """Accepted drafts and final token of one request. Floor: its tile masses and one tile."""
    request = tl.program_id(0).to(tl.int64)
    sizes = Sizes(
        nodes, max_depth, tiles, vocab, rows, stride, draft_vocab, draft_rows, draft_stride,
        stride_col, draft_stride_col,
    )  # fmt: skip
    scan = accept_scan(inputs, request, sizes, SOURCE, NODES, TILES)
    kept = scan.end
    status = tl.full((), OK, tl.int32)
    final = tl.full((), PAD_TOKEN, tl.int64)
    if scan.end >= 0:
        if RULE == "token":
            slot = request
            kept = count_accepted(inputs, request, sizes, scan, NODES)
            log2_a = tl.full((), 0.0, tl.float64)
        else:
            kept, log2_a = keep_block(
                inputs, request, residual_ptr, sizes, scan, SOURCE, NODES, TILES
            )
            slot = request * nodes + kept
        is_zero_q = take(scan.is_zero_q.to(tl.int32), kept) > 0
        status = tl.where(kept == scan.end, scan.status, tl.where(is_zero_q, ZERO_Q, OK))
        at = residual_at(inputs, scan.laws, request, kept, scan.end, log2_a, sizes, SOURCE)
        if at.p_law.status:
            if at.p_law.inv_temperature == 0.0:
                final = at.p_law.argmax
            else:
                residual = load_masses(residual_ptr, slot, kept < scan.end, tiles, TILES)
                plain = load_masses(plain_ptr, slot, kept >= 0, tiles, TILES)
                coin = tl.load(inputs.final_coins + request)
                final = draw_final(inputs, coin, residual, plain, at, sizes, SOURCE, TILES, SHAPE)
        status = status | tl.where(final == PAD_TOKEN, INVALID_TARGET, OK)
    store_result(outputs, request, scan.tokens, kept, final, status, max_depth, NODES, DEPTH)


@triton.jit(do_not_specialize=["nodes", "max_depth"])
def match_kernel(
    outputs,  # Acceptance, out
    tokens_ptr,  # [batch, nodes] i64 or i32
    target_tokens_ptr,  # [batch, nodes] i64 or i32
    num_nodes_ptr,  # [batch] i32
    nodes,
    max_depth,
    NODES: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """Drafts of one request that equal the target's tokens, then the target's token.

    Floor: `batch * nodes * 28` bytes: both rows of ids read, tokens and path written.
    """
    request = tl.program_id(0).to(tl.int64)
    node = tl.arange(0, NODES)
    limit = last_node(num_nodes_ptr + request, nodes, max_depth)
    place = request * nodes + node
    drafts = tl.load(tokens_ptr + place + 1, mask=node < limit, other=PAD_TOKEN).to(tl.int64)
    own = tl.load(target_tokens_ptr + place, mask=node <= limit, other=PAD_TOKEN).to(tl.int64)
    is_kept = (node < limit) & (own >= 0) & (drafts == own)
    kept = tl.min(tl.where(is_kept, NODES, node), 0)
    flags = tl.where(own < 0, INVALID_TARGET, OK) | tl.where(drafts < PAD_TOKEN, INVALID_DRAFT, OK)
    status = tl.where(limit < 0, OK, take(flags, kept))
    kept = tl.where(limit < 0, -1, kept)
    final = tl.maximum(take(own, kept), PAD_TOKEN)
    store_result(outputs, request, drafts, kept, final, status, max_depth, NODES, DEPTH)


# ------------------------------------------------------------------------------------- launchers


def select_step(tiles: int) -> int:
    """Choose how many tiles a program of `residual_mass` sums one after another.

    Every program repeats the accept scan, about 500 instructions a thread; tiles share it once 512
    programs are left, four for each of 128 processors. No result shows it: each tile has its sum.

    Args:
        tiles: of all rows of the step.

    Example:
        >>> select_step(64), select_step(32 * 5 * 16)
        (1, 4)
    """
    return 4 if tiles >= 4 * 512 else 2 if tiles >= 2 * 512 else 1


def _outputs(tokens: Tensor, max_depth: int) -> Acceptance:
    batch = tokens.shape[0]
    return Acceptance(
        tokens.new_empty(batch, max_depth + 1, dtype=torch.int64),
        tokens.new_empty(batch, dtype=torch.int32),
        tokens.new_empty(batch, max_depth + 1, dtype=torch.int32),
        tokens.new_empty(batch, dtype=torch.int32),
    )


def _target_law(
    logits: Tensor, law: Law | SamplingParams | None, row: Tensor, num_nodes: Tensor
) -> tuple[Law | Tiles | None, str]:
    """Prepare the target's laws, and say where the kernels find them (SOURCE)."""
    if law is None:
        return None, "probabilities"
    if isinstance(law, Law):
        return Law(*(field.contiguous() for field in law)), "rows"
    params = SamplingParams(*(None if p is None else p.contiguous() for p in law))
    slots = Slots(row.numel(), row=row, num_nodes=num_nodes, nodes=row.shape[1])
    stats = tile_stats(logits, params, slots)
    if has_filters(params):
        return find_cutoff(logits, stats, params, slots), "slots"
    argmax = logits.new_empty(slots.count, dtype=torch.int64)
    return Tiles(stats.tile_max, stats.tile_sum, argmax, params.temperature), "tiles"


def _arguments(
    inputs: Inputs, max_depth: int, config: TileConfig, rule: str, source: str
) -> dict[str, Any]:
    """Collect the arguments that `residual_mass` and `decide` share."""
    nodes = inputs.tokens.shape[1]
    rows, vocab = inputs.target_logits.shape
    draft = inputs.draft_logits
    tiles = config.tiles(vocab)
    return {
        "inputs": inputs,
        "nodes": nodes,
        "max_depth": max_depth,
        "tiles": tiles,
        "vocab": vocab,
        "rows": rows,
        "stride": inputs.target_logits.stride(0),
        "draft_vocab": 0 if draft is None else draft.shape[1],
        "draft_rows": 0 if draft is None else draft.shape[0],
        "draft_stride": 0 if draft is None else draft.stride(0),
        "stride_col": column_stride(inputs.target_logits),
        "draft_stride_col": 1 if draft is None else column_stride(draft),
        "RULE": rule,
        "SOURCE": source,
        "NODES": triton.next_power_of_2(nodes),
        "TILES": triton.next_power_of_2(tiles),
        "SHAPE": (config.chunks, config.lanes, config.width),
        "num_warps": config.num_warps,
    }


def residual_mass(arguments: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Sum the residuals, and p itself, by tile: per node, or under the token rule per request."""
    batch, nodes = arguments["inputs"].tokens.shape
    tiles = arguments["tiles"]
    slots, places = batch * nodes, nodes
    if arguments["RULE"] == "token":
        slots = batch
        places = nodes if arguments["SOURCE"] == "tiles" else 1  # rows whose argmax is stored
    logits = arguments["inputs"].target_logits
    residual, plain = logits.new_empty(2, slots, tiles, dtype=torch.float32).unbind(0)
    step = select_step(batch * places * tiles)
    residual_mass_kernel[(batch, places, triton.cdiv(tiles, step))](
        residual_ptr=residual, plain_ptr=plain, step=step, **arguments
    )
    return residual, plain


def accept(
    draft: Draft,
    target_logits: Tensor,
    target_law: Law | SamplingParams | None,
    target_row: Tensor,
    accept_coins: Tensor,
    final_coins: Tensor,
    *,
    rule: str = "block",
    replacement: bool = False,
    max_depth: int,
    target_to_draft: Tensor | None = None,
) -> Acceptance:
    """Verify drafts; chains in three launches from parameters, four with filters, two where laws or
    probabilities are given, whatever the batch and the length. Trees: see `_tree_accept`."""
    if rule not in ("block", "token"):
        raise ValueError(f'rule must be "block" or "token", got {rule!r}')
    outputs = _outputs(draft.tokens, max_depth)
    if draft.tokens.shape[0] == 0:
        return outputs
    target_logits = align(target_logits)
    num_nodes, target_row = draft.num_nodes.contiguous(), target_row.contiguous()
    law, source = _target_law(target_logits, target_law, target_row, num_nodes)
    if draft.row is None or draft.logits is None:  # without logits any row is out of range
        draft = draft._replace(logits=None if draft.row is None else target_logits[:0], law=None)
    inputs = Inputs(
        tokens=draft.tokens.contiguous(),
        num_nodes=num_nodes,
        draft_logits=None if draft.logits is None else align(draft.logits),
        draft_law=None if draft.law is None else Law(*(x.contiguous() for x in draft.law)),
        draft_row=None if draft.row is None else draft.row.contiguous(),
        draft_column=None if target_to_draft is None else target_to_draft.contiguous(),
        target_logits=target_logits,
        target_law=law,
        target_row=target_row,
        accept_coins=accept_coins.contiguous(),
        final_coins=final_coins.contiguous(),
    )
    config = config_of(target_logits)
    if inputs.draft_logits is not None:  # the tile depends on the target's vocabulary alone
        config = config_of(target_logits, inputs.draft_logits[:, : target_logits.shape[1]])
    if draft.parents is not None:
        accept_trees(outputs, inputs, draft.parents, rule, replacement, max_depth, config, source)
        return outputs
    arguments = _arguments(inputs, max_depth, config, rule, source)
    residual, plain = residual_mass(arguments)
    if config.width == 1 and target_of(target_logits) < ("cuda", 90):  # there four warps spill
        arguments["num_warps"] *= 2
    decide_kernel[(draft.tokens.shape[0],)](
        outputs=outputs,
        residual_ptr=residual,
        plain_ptr=plain,
        DEPTH=triton.next_power_of_2(max_depth + 1),
        **arguments,
    )
    return outputs


def match(draft: Draft, target_tokens: Tensor, *, max_depth: int) -> Acceptance:
    """Accept drafts while they equal the target's own tokens: one launch."""
    batch, nodes = draft.tokens.shape
    outputs = _outputs(draft.tokens, max_depth)
    tree = {} if draft.parents is None else {"parents_ptr": draft.parents.contiguous()}
    if batch:
        (match_tree_kernel if tree else match_kernel)[(batch,)](
            outputs=outputs,
            tokens_ptr=draft.tokens.contiguous(),
            target_tokens_ptr=target_tokens.contiguous(),
            num_nodes_ptr=draft.num_nodes.contiguous(),
            **tree,
            nodes=nodes,
            max_depth=max_depth,
            NODES=triton.next_power_of_2(nodes),
            DEPTH=triton.next_power_of_2(max_depth + 1),
            num_warps=1,
        )
    return outputs
