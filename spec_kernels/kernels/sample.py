# ruff: noqa: N803, N806  (compile-time arguments are written in capitals)
"""Draw tokens of each row from its law, in two launches: by coins, or by coupled noise.

    coin    first id with cumulative weight > coin * total, in id order
    noise   argmin over kept ids of E(seed, position, id) / weight(id)   ==   argmax (log p + g)

Coin:
1. `mass_kernel` (rows, tiles): sum of the weights of a tile.
2. `draw_kernel` (rows,): float64 prefix sum of the tile masses; the tile that holds the coin is
   read again and cut into pieces, the piece into runs, the run into ids. Each level passes on
   which fraction of its weight lies below the coin, so float32 sums in different orders agree.
Noise:
1. `race_kernel` (rows, tiles): first id with the smallest arrival; one Philox call per four ids.
2. `pick_kernel` (rows,): first tile with the smallest arrival.
Several tokens, or excluded ids: `draw_children_kernel` and `pick_children_kernel` take the place of
the second launches. Tiles that hold excluded ids are measured again without them; after each draw
without replacement the piece (coins) or the tile (noise) of the drawn id is.

Traffic: every row once, and one tile per row and coin; 4 or 8 bytes per tile in between. Several
tokens by noise: one tile more for each.
Determinism: a minimum has no order of summation, so the noise gives the same token for any
alignment; the coin's sums follow the tile (see `_device`).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from spec_kernels.kernels._device import (
    INF,
    NEG_INF,
    PAD_TOKEN,
    STREAM_COUPLED,
    align,
    allow_registers,
    column_stride,
    config_of,
    exponential_of,
    find,
    load_law,
    load_tile,
    philox,
    sum_tile,
    take,
    weigh,
)
from spec_kernels.types import Law

PIECE_RUNS = tl.constexpr(128)
RUN = tl.constexpr(8)
"""A piece of a tile is 128 runs of 8 ids: the small tile."""

BIG = tl.constexpr(2147483647)

QUADS = 512
"""Groups of four ids whose noise is made at once: 16 ids per thread."""


@triton.jit
def mass_kernel(
    mass_ptr,  # [rows, tiles] f32, out
    rows_ptr,  # [rows, vocab] float
    law,  # Law of pointers, or None: rows are probabilities
    stride_row,
    stride_col,
    vocab,
    CHUNKS: tl.constexpr,
    LANES: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Weight of one tile. Floor: `rows * vocab * itemsize` bytes: each row once; 9 instructions an
    id."""
    row = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    IS_LAW: tl.constexpr = law is not None
    OTHER: tl.constexpr = NEG_INF if IS_LAW else 0.0
    one = load_law(law, row)
    if (not one.is_valid) | (one.scale == 0.0):
        return

    first = tile * (CHUNKS * LANES * WIDTH)
    row_ptr = rows_ptr + row * stride_row
    x = load_tile(row_ptr, first, vocab, OTHER, CHUNKS, LANES, WIDTH, stride_col)
    tl.store(mass_ptr + row * tl.num_programs(1) + tile, sum_tile(weigh(x, one, IS_LAW)))


@triton.jit
def draw(
    row_ptr,
    mass,  # [n] f32, masses of the tiles, 0 behind the last one
    coin,
    law,
    stride_col,
    vocab,
    IS_LAW: tl.constexpr,
    CHUNKS: tl.constexpr,
    LANES: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """The id that a coin draws from a row: tile, piece of it, run of ids, id."""
    OTHER: tl.constexpr = NEG_INF if IS_LAW else 0.0
    PIECE: tl.constexpr = PIECE_RUNS * RUN
    PIECES: tl.constexpr = CHUNKS * LANES * WIDTH // PIECE
    tile, rest = find(mass, coin)
    first = tile * (CHUNKS * LANES * WIDTH)
    if PIECES > 1:
        x = load_tile(row_ptr, first, vocab, OTHER, CHUNKS, LANES, WIDTH, stride_col)
        weight = tl.reshape(weigh(x, law, IS_LAW), (PIECES, CHUNKS // PIECES, LANES, WIDTH))
        piece, rest = find(tl.sum(tl.sum(tl.sum(weight, 3), 1), 1), rest)
        first += piece * PIECE

    offs = first + tl.arange(0, PIECE_RUNS)[:, None] * RUN + tl.arange(0, RUN)[None, :]
    x = tl.load(row_ptr + offs * stride_col, mask=offs < vocab, other=OTHER).to(tl.float32)
    run, rest = find(tl.sum(weigh(x, law, IS_LAW), 1), rest)
    first += run * RUN

    offs = first + tl.arange(0, RUN)
    x = tl.load(row_ptr + offs * stride_col, mask=offs < vocab, other=OTHER).to(tl.float32)
    place, _ = find(weigh(x, law, IS_LAW), rest)
    return first + place


@triton.jit
def draw_kernel(
    tokens_ptr,  # [rows] i64, out
    rows_ptr,  # [rows, vocab] float
    law,  # Law of pointers, or None: rows are probabilities
    mass_ptr,  # [rows, tiles] f32
    coins_ptr,  # [rows] f64
    stride_row,
    stride_col,
    vocab,
    tiles,
    CHUNKS: tl.constexpr,
    LANES: tl.constexpr,
    WIDTH: tl.constexpr,
    TILES: tl.constexpr,  # >= tiles, a power of two
):
    """Token of one row. Floor: 4 bytes per tile and the drawn tile; 20 instructions for each of its
    ids."""
    row = tl.program_id(0).to(tl.int64)
    IS_LAW: tl.constexpr = law is not None
    one = load_law(law, row)
    is_greedy = one.scale == 0.0

    tile = tl.arange(0, TILES)
    mask_tile = tile < tl.where(one.is_valid & (not is_greedy), tiles, 0)
    mass = tl.load(mass_ptr + row * tiles + tile, mask=mask_tile, other=0.0)
    total = tl.sum(mass, 0)
    token = tl.full((), PAD_TOKEN, tl.int32)
    if (total > 0.0) & (total < INF):
        token = draw(
            rows_ptr + row * stride_row, mass, tl.load(coins_ptr + row), one, stride_col, vocab,
            IS_LAW, CHUNKS, LANES, WIDTH,
        )  # fmt: skip
    if one.is_valid & is_greedy:
        token = one.argmax
    tl.store(tokens_ptr + row, token.to(tl.int64))


@triton.jit
def load_excluded(excluded_ptr, row, num_excluded, vocab, REMOVED: tl.constexpr):
    """Excluded ids of a row in front, -1 for those outside the vocabulary and in the places behind:
    `[REMOVED] i32`."""
    removed = tl.full((REMOVED,), -1, tl.int32)
    if excluded_ptr is not None:
        place = tl.arange(0, REMOVED)
        ids = tl.load(
            excluded_ptr + row * num_excluded + place, mask=place < num_excluded, other=-1
        )
        removed = tl.where((ids >= 0) & (ids < vocab), ids, -1).to(tl.int32)
    return removed


@triton.jit
def next_removed(removed, behind):
    """The smallest removed id (or tile) that is larger; BIG if there is none."""
    return tl.min(tl.where(removed > behind, removed, BIG), 0)


@triton.jit
def replace_ids(values, ids, first, end, removed, other):
    """Values of some ids in `[first, end)`, with `other` in the places of the removed ones."""
    gone = next_removed(removed, first - 1)
    while gone < end:
        values = tl.where(ids == gone, other, values)
        gone = next_removed(removed, gone)
    return values


@triton.jit
def load_piece(row_ptr, first, law, removed, stride_col, vocab, IS_LAW: tl.constexpr):
    """Weights of a piece without the removed ids: `[PIECE_RUNS, RUN]`."""
    OTHER: tl.constexpr = NEG_INF if IS_LAW else 0.0
    ids = first + tl.arange(0, PIECE_RUNS)[:, None] * RUN + tl.arange(0, RUN)[None, :]
    x = tl.load(row_ptr + ids * stride_col, mask=ids < vocab, other=OTHER).to(tl.float32)
    return replace_ids(weigh(x, law, IS_LAW), ids, first, first + PIECE_RUNS * RUN, removed, 0.0)


@triton.jit
def measure_pieces(
    row_ptr, first, law, removed, stride_col, vocab, IS_LAW: tl.constexpr, PIECES: tl.constexpr
):
    """Masses of the pieces of a tile without the removed ids: `[PIECES]`."""
    masses = tl.zeros((PIECES,), tl.float32)
    for piece in range(PIECES):
        start = first + piece * (PIECE_RUNS * RUN)
        weight = load_piece(row_ptr, start, law, removed, stride_col, vocab, IS_LAW)
        masses = tl.where(tl.arange(0, PIECES) == piece, tl.sum(tl.sum(weight, 1), 0), masses)
    return masses


@triton.jit
def draw_child(
    row_ptr, mass, coin, law, removed, stride_col, vocab, IS_LAW: tl.constexpr,
    PIECES: tl.constexpr,
):  # fmt: skip
    """The id that a coin draws from the masses of the tiles; its tile, and that tile's mass without
    it."""
    tile, rest = find(mass, coin)
    first = tile * (PIECES * PIECE_RUNS * RUN)
    masses = measure_pieces(row_ptr, first, law, removed, stride_col, vocab, IS_LAW, PIECES)
    piece, rest = find(masses, rest)
    first += piece * (PIECE_RUNS * RUN)
    weight = load_piece(row_ptr, first, law, removed, stride_col, vocab, IS_LAW)
    run, rest = find(tl.sum(weight, 1), rest)
    in_run = tl.arange(0, PIECE_RUNS)[:, None] == run
    place, _ = find(tl.sum(tl.where(in_run, weight, 0.0), 0), rest)
    drawn = in_run & (tl.arange(0, RUN)[None, :] == place)
    others = tl.sum(tl.sum(tl.where(drawn, 0.0, weight), 1), 0)
    masses = tl.where(tl.arange(0, PIECES) == piece, others, masses)
    return first + run * RUN + place, tile, tl.sum(masses.to(tl.float64), 0)


@triton.jit(do_not_specialize=["children", "num_excluded"])
def draw_children_kernel(
    tokens_ptr,  # [rows, children] i64, out
    rows_ptr,  # [rows, vocab] float
    law,  # Law of pointers, or None: rows are probabilities
    mass_ptr,  # [rows, tiles] f32
    coins_ptr,  # [rows, children] f64
    excluded_ptr,  # [rows, num_excluded] i64, or None
    stride_row,
    stride_col,
    vocab,
    tiles,
    children,
    num_excluded,
    REPLACEMENT: tl.constexpr,
    PIECES: tl.constexpr,
    TILES: tl.constexpr,  # >= tiles, a power of two
    CHILDREN: tl.constexpr,  # >= children, a power of two
    REMOVED: tl.constexpr,  # >= num_excluded + children, a power of two
):
    """Tokens of one row, one after the other. Floor: 4 bytes per tile, and per token its tile."""
    row = tl.program_id(0).to(tl.int64)
    TILE: tl.constexpr = PIECES * PIECE_RUNS * RUN
    IS_LAW: tl.constexpr = law is not None
    one = load_law(law, row)
    is_greedy = one.scale == 0.0
    row_ptr = rows_ptr + row * stride_row
    removed = load_excluded(excluded_ptr, row, num_excluded, vocab, REMOVED)

    tile = tl.arange(0, TILES)
    mask_tile = tile < tl.where(one.is_valid & (not is_greedy), tiles, 0)
    mass = tl.load(mass_ptr + row * tiles + tile, mask=mask_tile, other=0.0).to(tl.float64)
    if excluded_ptr is not None:
        tile_of = tl.where((removed >= 0) & (tl.sum(mass, 0) > 0.0), removed // TILE, -1)
        at = next_removed(tile_of, -1)
        while at < BIG:
            masses = measure_pieces(
                row_ptr, at * TILE, one, removed, stride_col, vocab, IS_LAW, PIECES
            )
            mass = tl.where(tile == at, tl.sum(masses.to(tl.float64), 0), mass)
            at = next_removed(tile_of, at)

    child = tl.arange(0, CHILDREN)
    tokens = tl.full((CHILDREN,), PAD_TOKEN, tl.int64)
    for j in range(children):
        total = tl.sum(mass, 0)
        if (total > 0.0) & (total < INF):
            coin = tl.load(coins_ptr + row * children + j)
            token, at, others = draw_child(
                row_ptr, mass, coin, one, removed, stride_col, vocab, IS_LAW, PIECES
            )
            tokens = tl.where(child == j, token.to(tl.int64), tokens)
            if not REPLACEMENT:
                removed = tl.where(tl.arange(0, REMOVED) == num_excluded + j, token, removed)
                mass = tl.where(tile == at, others, mass)
    if one.is_valid & is_greedy:
        tokens = argmax_first(one.argmax, removed, child, REPLACEMENT)
    tl.store(tokens_ptr + row * children + child, tokens, mask=child < children)


@triton.jit
def argmax_first(argmax, removed, child, REPLACEMENT: tl.constexpr):
    """Tokens of a greedy row: the argmax, if it isn't removed, and padding."""
    is_drawn = tl.sum((removed == argmax).to(tl.int32), 0) == 0
    if not REPLACEMENT:
        is_drawn = is_drawn & (child == 0)
    return tl.where(is_drawn, argmax, PAD_TOKEN + tl.zeros_like(child)).to(tl.int64)


@triton.jit
def race_quads(x, first, seed, position, law, IS_LAW: tl.constexpr, QUADS: tl.constexpr):
    """Arrival of `[QUADS, 4]` ids from `first` on; inf where the weight is 0."""
    quad = first // 4 + tl.arange(0, QUADS)
    where = position + tl.zeros((QUADS,), tl.int64)
    stream = tl.full((QUADS,), STREAM_COUPLED, tl.int32)
    w0, w1, w2, w3 = philox(seed, where, quad, stream)
    words = tl.reshape(tl.join(tl.join(w0, w2), tl.join(w1, w3)), (QUADS, 4))
    noise = exponential_of(words)
    if IS_LAW:
        slower = tl.exp2((law.row_max - x) * law.scale)
        return tl.where((x >= law.cutoff) & (x > NEG_INF), noise * slower, INF)
    else:  # noqa: RET505  (the compiler needs both arms)
        return tl.where(x > 0.0, noise / x, INF)


@triton.jit
def race_tile(
    row_ptr,
    tile,
    seed,
    position,
    law,
    removed,  # [n] i32, ids that don't take part, or None
    stride_col,
    vocab,
    IS_LAW: tl.constexpr,
    TILE: tl.constexpr,
    QUADS: tl.constexpr,
):
    """Smallest arrival in one tile, inf if there is none, and the first id that has it."""
    OTHER: tl.constexpr = NEG_INF if IS_LAW else 0.0
    member = tl.arange(0, QUADS)[:, None] * 4 + tl.arange(0, 4)[None, :]
    arrival = tl.full((QUADS, 4), INF, tl.float32)
    winner = tl.zeros((QUADS, 4), tl.int32)
    for start in range(tile * TILE, tl.minimum(tile * TILE + TILE, vocab), QUADS * 4):
        ids = start + member
        x = tl.load(row_ptr + ids * stride_col, mask=ids < vocab, other=OTHER)
        later = race_quads(x.to(tl.float32), start, seed, position, law, IS_LAW, QUADS)
        if removed is not None:
            later = replace_ids(later, ids, start, start + QUADS * 4, removed, INF)
        winner = tl.where(later < arrival, ids, winner)
        arrival = tl.minimum(arrival, later)
    best = tl.min(arrival)
    return best, tl.min(tl.where(arrival == best, winner, BIG))


@triton.jit
def race_kernel(
    arrival_ptr,  # [rows, tiles] f32, out
    winner_ptr,  # [rows, tiles] i32, out
    rows_ptr,  # [rows, vocab] float
    law,  # Law of pointers, or None: rows are probabilities
    seeds_ptr,  # [rows] i64
    positions_ptr,  # [rows] i64
    stride_row,
    stride_col,
    vocab,
    TILE: tl.constexpr,
    QUADS: tl.constexpr,
):
    """First id with the smallest arrival in one tile. Floor: `rows * vocab * itemsize` bytes; 90
    instructions an id, 20 of them Philox: bound by arithmetic, not memory."""
    row = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    IS_LAW: tl.constexpr = law is not None
    one = load_law(law, row)
    if (not one.is_valid) | (one.scale == 0.0):
        return

    best, winner = race_tile(
        rows_ptr + row * stride_row, tile, tl.load(seeds_ptr + row), tl.load(positions_ptr + row),
        one, None, stride_col, vocab, IS_LAW, TILE, QUADS,
    )  # fmt: skip
    place = row * tl.num_programs(1) + tile
    tl.store(arrival_ptr + place, best)
    tl.store(winner_ptr + place, winner)


@triton.jit
def pick_kernel(
    tokens_ptr,  # [rows] i64, out
    law,  # Law of pointers, or None: rows are probabilities
    arrival_ptr,  # [rows, tiles] f32
    winner_ptr,  # [rows, tiles] i32
    tiles,
    TILES: tl.constexpr,  # >= tiles, a power of two
):
    """Token of one row: the winner of the first tile with the smallest arrival. 8 bytes a tile."""
    row = tl.program_id(0).to(tl.int64)
    one = load_law(law, row)
    is_greedy = one.scale == 0.0

    tile = tl.arange(0, TILES)
    mask_tile = tile < tl.where(one.is_valid & (not is_greedy), tiles, 0)
    arrival = tl.load(arrival_ptr + row * tiles + tile, mask=mask_tile, other=INF)
    winner = tl.load(winner_ptr + row * tiles + tile, mask=mask_tile, other=0)
    best = tl.min(arrival, 0)
    token = take(winner, tl.min(tl.where(arrival == best, tile, TILES - 1), 0))
    token = tl.where(best < INF, token, PAD_TOKEN)
    token = tl.where(one.is_valid & is_greedy, one.argmax, token)
    tl.store(tokens_ptr + row, token.to(tl.int64))


@triton.jit(do_not_specialize=["children", "num_excluded"])
def pick_children_kernel(
    tokens_ptr,  # [rows, children] i64, out
    rows_ptr,  # [rows, vocab] float
    law,  # Law of pointers, or None: rows are probabilities
    arrival_ptr,  # [rows, tiles] f32
    winner_ptr,  # [rows, tiles] i32
    seeds_ptr,  # [rows] i64
    positions_ptr,  # [rows] i64
    excluded_ptr,  # [rows, num_excluded] i64, or None
    stride_row,
    stride_col,
    vocab,
    tiles,
    children,
    num_excluded,
    TILE: tl.constexpr,
    QUADS: tl.constexpr,
    TILES: tl.constexpr,  # >= tiles, a power of two
    CHILDREN: tl.constexpr,  # >= children, a power of two
    REMOVED: tl.constexpr,  # >= num_excluded + children, a power of two
):
    """Tokens of one row, the smallest arrivals first. Floor: 8 bytes per tile, and a tile for each
    token but the last and each tile whose winner is excluded."""
    row = tl.program_id(0).to(tl.int64)
    IS_LAW: tl.constexpr = law is not None
    one = load_law(law, row)
    is_greedy = one.scale == 0.0
    removed = load_excluded(excluded_ptr, row, num_excluded, vocab, REMOVED)

    tile = tl.arange(0, TILES)
    mask_tile = tile < tl.where(one.is_valid & (not is_greedy), tiles, 0)
    arrival = tl.load(arrival_ptr + row * tiles + tile, mask=mask_tile, other=INF)
    winner = tl.load(winner_ptr + row * tiles + tile, mask=mask_tile, other=BIG)
    child = tl.arange(0, CHILDREN)
    tokens = tl.full((CHILDREN,), PAD_TOKEN, tl.int64)
    j = 0
    while j < children:
        best = tl.min(arrival, 0)
        at = tl.min(tl.where(arrival == best, tile, TILES - 1), 0)
        token = take(winner, at)
        is_gone = tl.sum((removed == token).to(tl.int32), 0) > 0
        if (best < INF) & (not is_gone):
            tokens = tl.where(child == j, token.to(tl.int64), tokens)
            removed = tl.where(tl.arange(0, REMOVED) == num_excluded + j, token, removed)
        if (best == INF) | (not is_gone):
            j += 1
        if (best < INF) & (j < children):
            best, token = race_tile(
                rows_ptr + row * stride_row, at, tl.load(seeds_ptr + row),
                tl.load(positions_ptr + row), one, removed, stride_col, vocab, IS_LAW, TILE, QUADS,
            )  # fmt: skip
            arrival = tl.where(tile == at, best, arrival)
            winner = tl.where(tile == at, token, winner)
    if one.is_valid & is_greedy:
        tokens = argmax_first(one.argmax, removed, child, False)
    tl.store(tokens_ptr + row * children + child, tokens, mask=child < children)


def sample(
    logits: Tensor,
    law: Law | None,
    *,
    coins: Tensor | None = None,
    noise: tuple[Tensor, Tensor] | None = None,
    k: int = 1,
    replacement: bool = False,
    excluded: Tensor | None = None,
) -> Tensor:
    """Sample k tokens per row from its law, without `excluded`: `[rows, k] int64`."""
    if (coins is None) == (noise is None):
        raise ValueError("exactly one of coins and noise must be given")
    if noise is not None and replacement and k > 1:
        raise ValueError("noise draws without replacement: the same noise gives the same token")
    tokens = logits.new_empty(logits.shape[0], k, dtype=torch.int64)
    if not tokens.numel():
        return tokens
    logits = align(logits)
    if law is not None:
        law = Law(*(field.contiguous() for field in law))
    if excluded is not None:
        excluded = excluded.contiguous() if excluded.shape[1] else None
    if coins is not None:
        _draw(tokens, logits, law, coins.contiguous(), excluded, replacement)
    elif noise is not None:
        _race(tokens, logits, law, noise, excluded)
    return tokens


def _sizes(tokens: Tensor, excluded: Tensor | None) -> dict[str, int]:
    """Arguments that count the tokens and the excluded ids of a row."""
    children, num_excluded = tokens.shape[1], 0 if excluded is None else excluded.shape[1]
    return {
        "children": children,
        "num_excluded": num_excluded,
        "CHILDREN": triton.next_power_of_2(children),
        "REMOVED": triton.next_power_of_2(num_excluded + children),
    }


def _draw(
    tokens: Tensor,
    logits: Tensor,
    law: Law | None,
    coins: Tensor,
    excluded: Tensor | None,
    replacement: bool,
) -> None:
    """Draw by coins: tile masses, then the tokens."""
    rows, vocab = logits.shape
    config = config_of(logits)
    tiles = config.tiles(vocab)
    mass = logits.new_empty(rows, tiles, dtype=torch.float32)
    shared = {"rows_ptr": logits, "law": law, "mass_ptr": mass, "num_warps": config.num_warps}
    shared |= {"stride_row": logits.stride(0), "stride_col": column_stride(logits), "vocab": vocab}
    layout = {"CHUNKS": config.chunks, "LANES": config.lanes, "WIDTH": config.width}
    mass_kernel[(rows, tiles)](**shared, **layout)
    shared |= {"coins_ptr": coins, "tiles": tiles, "TILES": triton.next_power_of_2(tiles)}
    if tokens.shape[1] == 1 and excluded is None:
        draw_kernel[(rows,)](tokens_ptr=tokens, **shared, **layout)
        return
    draw_children_kernel[(rows,)](
        tokens_ptr=tokens,
        excluded_ptr=excluded,
        REPLACEMENT=replacement,
        PIECES=config.tile // (PIECE_RUNS * RUN).value,
        **shared,
        **_sizes(tokens, excluded),
    )


def _race(
    tokens: Tensor,
    logits: Tensor,
    law: Law | None,
    noise: tuple[Tensor, Tensor],
    excluded: Tensor | None,
) -> None:
    """Draw by noise: the winner of each tile, then the winners of the row."""
    rows, vocab = logits.shape
    config = config_of(logits)
    tiles = config.tiles(vocab)
    arrival = logits.new_empty(rows, tiles, dtype=torch.float32)
    winner = logits.new_empty(rows, tiles, dtype=torch.int32)
    races = {
        "rows_ptr": logits,
        "law": law,
        "arrival_ptr": arrival,
        "winner_ptr": winner,
        "seeds_ptr": noise[0].contiguous(),
        "positions_ptr": noise[1].contiguous(),
        "stride_row": logits.stride(0),
        "stride_col": column_stride(logits),
        "vocab": vocab,
        "TILE": config.tile,
        "QUADS": min(QUADS, config.tile // 4),
        "num_warps": config.num_warps,
    }
    race_kernel[(rows, tiles)](**races)
    if tokens.shape[1] == 1 and excluded is None:
        pick_kernel[(rows,)](
            tokens_ptr=tokens,
            law=law,
            arrival_ptr=arrival,
            winner_ptr=winner,
            tiles=tiles,
            TILES=triton.next_power_of_2(tiles),
            num_warps=1,
        )
        return
    pick_children_kernel[(rows,)](
        tokens_ptr=tokens,
        excluded_ptr=excluded,
        tiles=tiles,
        TILES=triton.next_power_of_2(tiles),
        **allow_registers(logits),
        **races,
        **_sizes(tokens, excluded),
    )
