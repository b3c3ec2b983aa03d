# ruff: noqa: N803, N806  (compile-time arguments are written in capitals)
"""Draw one token per row from its law, in two launches: by a coin, or by coupled noise.

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

Traffic: every row once, and one tile per row for the coin; 4 or 8 bytes per tile in between.
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
    TileConfig,
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
    OTHER: tl.constexpr = NEG_INF if IS_LAW else 0.0
    one = load_law(law, row)
    if (not one.is_valid) | (one.scale == 0.0):
        return

    seed = tl.load(seeds_ptr + row)
    position = tl.load(positions_ptr + row)
    member = tl.arange(0, QUADS)[:, None] * 4 + tl.arange(0, 4)[None, :]
    arrival = tl.full((QUADS, 4), INF, tl.float32)
    winner = tl.zeros((QUADS, 4), tl.int32)
    for start in range(tile * TILE, tl.minimum(tile * TILE + TILE, vocab), QUADS * 4):
        ids = start + member
        x = tl.load(rows_ptr + row * stride_row + ids * stride_col, mask=ids < vocab, other=OTHER)
        later = race_quads(x.to(tl.float32), start, seed, position, one, IS_LAW, QUADS)
        winner = tl.where(later < arrival, ids, winner)
        arrival = tl.minimum(arrival, later)

    best = tl.min(arrival)
    place = row * tl.num_programs(1) + tile
    tl.store(arrival_ptr + place, best)
    tl.store(winner_ptr + place, tl.min(tl.where(arrival == best, winner, 2147483647)))


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


def sample(
    logits: Tensor,
    law: Law | None,
    *,
    coins: Tensor | None = None,
    noise: tuple[Tensor, Tensor] | None = None,
    k: int = 1,
    replacement: bool = False,
) -> Tensor:
    """Sample one token per row from its law: `[rows, 1] int64`."""
    if k > 1:
        raise NotImplementedError("k > 1 draws children of a tree; trees are not supported yet")
    if (coins is None) == (noise is None):
        raise ValueError("exactly one of coins and noise must be given")
    tokens = logits.new_empty(logits.shape[0], 1, dtype=torch.int64)
    if not tokens.numel():
        return tokens
    if law is not None:
        law = Law(*(field.contiguous() for field in law))
    if coins is not None:
        _draw(tokens, logits, law, coins.contiguous(), config_of(logits))
    elif noise is not None:
        _race(tokens, logits, law, noise, config_of(logits))
    return tokens


def _draw(
    tokens: Tensor, logits: Tensor, law: Law | None, coins: Tensor, config: TileConfig
) -> None:
    """Draw by coins: tile masses, then the tokens."""
    rows, vocab = logits.shape
    tiles = config.tiles(vocab)
    mass = logits.new_empty(rows, tiles, dtype=torch.float32)
    mass_kernel[(rows, tiles)](
        mass_ptr=mass,
        rows_ptr=logits,
        law=law,
        stride_row=logits.stride(0),
        stride_col=column_stride(logits),
        vocab=vocab,
        CHUNKS=config.chunks,
        LANES=config.lanes,
        WIDTH=config.width,
        num_warps=config.num_warps,
    )
    draw_kernel[(rows,)](
        tokens_ptr=tokens,
        rows_ptr=logits,
        law=law,
        mass_ptr=mass,
        coins_ptr=coins,
        stride_row=logits.stride(0),
        stride_col=column_stride(logits),
        vocab=vocab,
        tiles=tiles,
        CHUNKS=config.chunks,
        LANES=config.lanes,
        WIDTH=config.width,
        TILES=triton.next_power_of_2(tiles),
        num_warps=config.num_warps,
    )


def _race(
    tokens: Tensor,
    logits: Tensor,
    law: Law | None,
    noise: tuple[Tensor, Tensor],
    config: TileConfig,
) -> None:
    """Draw by noise: the winner of each tile, then the winner of the row."""
    rows, vocab = logits.shape
    tiles = config.tiles(vocab)
    arrival = logits.new_empty(rows, tiles, dtype=torch.float32)
    winner = logits.new_empty(rows, tiles, dtype=torch.int32)
    race_kernel[(rows, tiles)](
        arrival_ptr=arrival,
        winner_ptr=winner,
        rows_ptr=logits,
        law=law,
        seeds_ptr=noise[0].contiguous(),
        positions_ptr=noise[1].contiguous(),
        stride_row=logits.stride(0),
        stride_col=column_stride(logits),
        vocab=vocab,
        TILE=config.tile,
        QUADS=min(QUADS, config.tile // 4),
        num_warps=config.num_warps,
    )
    pick_kernel[(rows,)](
        tokens_ptr=tokens,
        law=law,
        arrival_ptr=arrival,
        winner_ptr=winner,
        tiles=tiles,
        TILES=triton.next_power_of_2(tiles),
        num_warps=1,
    )
