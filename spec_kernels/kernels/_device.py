# ruff: noqa: N803, N806  (compile-time arguments are written in capitals)
"""Tiles of the vocabulary, and the device functions that every operation on rows shares.

A row of logits is cut into tiles of a fixed number of ids. Inside a tile the ids are laid out as
`[CHUNKS, LANES, WIDTH]`: WIDTH neighbouring ids belong to one lane (one 128-bit load), LANES of
them side by side are a chunk, CHUNKS chunks follow one another:

    id = tile * TILE + chunk * LANES * WIDTH + lane * WIDTH + place

Sums run over places and chunks inside a lane first (registers), over lanes last (one reduction of
the block). A *group* is what one lane of one tile holds: CHUNKS * WIDTH ids.

Determinism: the tile size is a function of the vocabulary size alone, the layout one of dtype and
strides. So the value of a row depends on neither the batch, the row's place in it, nor its address.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from spec_kernels import types

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
NEG_INF = tl.constexpr(float("-inf"))
INF = tl.constexpr(float("inf"))
HUGE_EXPONENT = tl.constexpr(1.07e9)  # < 2^30: float32 rounds a number below it by at most 32

PAD_TOKEN = tl.constexpr(types.PAD_TOKEN)
GREEDY_TEMPERATURE = tl.constexpr(types.GREEDY_TEMPERATURE)
MAX_TEMPERATURE = tl.constexpr(types.MAX_TEMPERATURE)
TOP_P_SLACK = tl.constexpr(types.TOP_P_SLACK)
OK = tl.constexpr(types.OK)
INVALID_TARGET = tl.constexpr(types.INVALID_TARGET)

STREAM_DRAFT = tl.constexpr(1 << 24)
STREAM_ACCEPT = tl.constexpr(2 << 24)
STREAM_FINAL = tl.constexpr(3 << 24)
STREAM_COUPLED = tl.constexpr(4 << 24)

VECTOR_BYTES = 16
LANES = 128
TILE = 8192
SMALL_TILE = 1024


class TileConfig(NamedTuple):
    """How a tile of the vocabulary is spread over a block of threads.

    Attributes:
        chunks, lanes, width: the layout `[CHUNKS, LANES, WIDTH]`; all powers of two.
        num_warps: warps per program.
    """

    chunks: int
    lanes: int
    width: int
    num_warps: int

    @property
    def tile(self) -> int:
        """Ids per tile."""
        return self.chunks * self.lanes * self.width

    def tiles(self, vocab: int) -> int:
        """Tiles per row."""
        return -(-vocab // self.tile)


def select_config(vocab: int, dtype: torch.dtype, is_wide: bool) -> TileConfig:
    """Choose the tile of a tensor of rows by vocabulary size, dtype and strides.

    | case | layout | why |
    |---|---|---|
    | vocab <= 1024 | tile of 1024 | a wider tile would only be masked |
    | wide | 16 bytes per lane | 128-bit loads, 64 ids per lane, 6-8 instructions an id |
    | otherwise | WIDTH 1 | narrow loads; a wider lane would be reduced by shuffles, 20 an id |

    Args:
        vocab: ids per row.
        dtype: of the rows.
        is_wide: as in `allows_wide_loads`.

    Example:
        >>> select_config(128256, torch.bfloat16, True)
        TileConfig(chunks=8, lanes=128, width=8, num_warps=4)
        >>> select_config(50257, torch.bfloat16, False)
        TileConfig(chunks=64, lanes=128, width=1, num_warps=4)
    """
    width = VECTOR_BYTES // dtype.itemsize if is_wide else 1
    tile = SMALL_TILE if vocab <= SMALL_TILE else TILE
    return TileConfig(tile // (LANES * width), LANES, width, 4)


def allows_wide_loads(rows: Tensor) -> bool:
    """Say whether the strides allow 128-bit loads, and the compiler sees it: neighbouring ids, and
    a row stride divisible by 16 elements."""
    return rows.stride(0) % 16 == 0 and column_stride(rows) == 1


def align(rows: Tensor) -> Tensor:
    """Return rows that start on a 16-byte boundary if their strides allow wide loads.

    Only a slice that cuts off the first ids of wider rows doesn't, and is copied. Read where it
    lies, the compiler would spread it over the lanes in another way, and so add in another order.
    """
    if not allows_wide_loads(rows) or rows.data_ptr() % VECTOR_BYTES == 0:
        return rows
    vocab = rows.shape[1]
    return rows.new_empty(rows.shape[0], -(-vocab // 16) * 16)[:, :vocab].copy_(rows)


def config_of(*rows: Tensor) -> TileConfig:
    """Choose the tile for tensors of rows that are read together: narrow if one of them is."""
    vocab = max(tensor.shape[1] for tensor in rows)
    configs = [select_config(vocab, x.dtype, allows_wide_loads(x)) for x in rows]
    return min(configs, key=lambda config: config.width if config.width == 1 else -config.width)


def column_stride(rows: Tensor) -> int:
    """Elements from one id of a row to the next. The compiler drops the factor where it is 1.

    Raises:
        ValueError: the ids are so far apart that their offsets in a row exceed 32 bits.
    """
    vocab, stride = rows.shape[1], rows.stride(1)
    if vocab <= 1:
        return 1
    if vocab * stride >= 2**31:
        raise ValueError(f"a row must span less than 2**31 elements, got {vocab} * {stride}")
    return stride


def target_of(tensor: Tensor) -> tuple[str, Any]:
    """Return backend and architecture that launches on this tensor's device compile for."""
    if tensor.device.type == "cpu":  # interpreted or emulated
        return "cuda", 80
    target = triton.runtime.driver.active.get_current_target()
    return target.backend, target.arch


def allow_registers(tensor: Tensor) -> dict[str, int]:
    """Option of the launches that hold much: on NVIDIA's chips, all registers of a thread.

    Left alone, `ptxas` stops some of them at 128 and spills. AMD's compiler knows no such option,
    and needs none.
    """
    return {} if target_of(tensor)[0] == "hip" else {"maxnreg": 255}


@triton.jit
def is_sampled(temperature):
    """Not greedy and in range; false for NaN."""
    return (temperature >= GREEDY_TEMPERATURE) & (temperature <= MAX_TEMPERATURE)


@triton.jit
def invert_temperature(temperature):
    """1 / temperature, and 1 where the row isn't sampled.

    One Newton step makes up for the approximate division; the exact one calls a subroutine, for
    which every kernel would save registers.
    """
    divisor = tl.where(is_sampled(temperature), temperature, 1.0)
    inverse = 1.0 / divisor
    return tl.fma(inverse, tl.fma(-divisor, inverse, 1.0), inverse)


@triton.jit
def locate_slot(
    request,
    node,
    slot_row_ptr,  # [slots] i32, or None: slot i is row i
    slot_request_ptr,  # [slots] i32, or None: a slot is a node of a request
    num_nodes_ptr,  # [batch] i32, or None: every slot is present
    rows,
    batch,
    nodes,
):
    """Slot, its row and request, and whether both exist. Row and request are 0 if not."""
    slot = request * nodes + node
    row = slot
    if slot_row_ptr is not None:
        row = tl.load(slot_row_ptr + slot)
    if slot_request_ptr is not None:
        request = tl.load(slot_request_ptr + slot)
    exists = (request >= 0) & (request < batch) & (row >= 0) & (row < rows)
    if num_nodes_ptr is not None:
        exists = exists & (node < tl.load(num_nodes_ptr + request, mask=exists, other=0))
    return slot, tl.where(exists, row, 0), tl.where(exists, request, 0), exists


@triton.jit
def tile_offsets(CHUNKS: tl.constexpr, LANES: tl.constexpr, WIDTH: tl.constexpr):
    """Place of every element of a tile: `[CHUNKS, LANES, WIDTH]`, in id order."""
    chunk = tl.arange(0, CHUNKS)[:, None, None] * (LANES * WIDTH)
    lane = tl.arange(0, LANES)[None, :, None] * WIDTH
    return chunk + lane + tl.arange(0, WIDTH)[None, None, :]


@triton.jit
def widen(x):
    """Floats as float32, one instruction each: bfloat16 is the upper half, by conversion two."""
    if x.dtype == tl.bfloat16:
        return (x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    else:  # noqa: RET505  (the compiler needs both arms)
        return x.to(tl.float32)


@triton.jit
def load_tile(
    row_ptr,
    first,
    vocab,
    other: tl.constexpr,
    CHUNKS: tl.constexpr,
    LANES: tl.constexpr,
    WIDTH: tl.constexpr,
    stride_col=1,
    only=None,
):
    """Read the ids `first ..` of a row as float32; `other` stands behind the end of the row, and
    outside the mask `only` of lanes, if one is given.

    A masked load is narrow unless the compiler can divide the bound, so tiles inside the row are
    read without a mask.
    """
    offs = first + tile_offsets(CHUNKS, LANES, WIDTH)
    if only is not None:
        mask = only[None, :, None] & (offs < vocab)
        x = widen(tl.load(row_ptr + offs * stride_col, mask=mask, other=other))
    elif first + CHUNKS * LANES * WIDTH <= vocab:
        x = widen(tl.load(row_ptr + offs * stride_col))
    else:
        x = widen(tl.load(row_ptr + offs * stride_col, mask=offs < vocab, other=other))
    return x


@triton.jit
def sum_tile(x):
    """Sum a tile: places and chunks inside the lane first, then lanes."""
    return tl.sum(tl.sum(tl.sum(x, 2), 0), 0)


@triton.jit
def finite_or_zero(x):
    """-inf becomes 0: the reference point of a set without a finite logit."""
    return tl.where(x == NEG_INF, 0.0, x)


@triton.jit
def anchor(reference, scale):
    """Factor, shift and error with which one multiply-add an id gives weights below a reference:

        exp2((x - reference) * scale) = exp2(fma(x, factor, -shift)) * exp2(-error)

    `shift` is `reference * scale` in float32, `error` what rounding took away, which a second
    multiply-add finds exactly. Two floats differ by 2^-24 of themselves at the least, so an error
    is at most the exponent of the next smaller x: no more digits are lost than in `x - reference`.
    Above `HUGE_EXPONENT` an error might overflow. There the next smaller x has a weight below
    2^-63, and a power of two takes the place of `scale`: nothing is rounded, that weight becomes 0.
    """
    shift = reference * scale
    error = tl.fma(reference, scale, -shift)
    exponent = reference.to(tl.uint32, bitcast=True) & 0x7F800000
    power = (0x8E800000 - exponent).to(tl.float32, bitcast=True)  # |reference| * power >= 2^31
    is_huge = tl.abs(shift) > HUGE_EXPONENT
    factor = tl.where(is_huge, power, scale)
    return factor, tl.where(is_huge, reference * power, shift), tl.where(is_huge, 0.0, error)


@triton.jit
def measure_tile(x, scale):
    """Statistics of a tile: largest logit, `sum exp2((x - max) * scale)`, largest per lane.

    `scale > 0`. A NaN or +inf makes the sum NaN; a tile of -inf has the sum 0.
    """
    lane_max = tl.max(tl.max(x, 2), 0)
    factor, shift, error = anchor(finite_or_zero(lane_max), scale)
    factor, shift = factor[None, :, None], shift[None, :, None]
    lane_sum = tl.sum(tl.sum(tl.exp2(tl.fma(x, factor, -shift)), 2), 0)
    tile_max = tl.max(lane_max, 0)
    distance = tl.fma(lane_max - finite_or_zero(tile_max), scale, -error)
    return tile_max, tl.sum(lane_sum * tl.exp2(distance), 0), lane_max


@triton.jit
def combine_tiles(tile_max, tile_sum, scale, axis: tl.constexpr):
    """Largest logit and `sum exp2((x - max) * scale)` of whole rows from their tile statistics.

    Missing tiles are (-inf, 0). `scale` is a scalar, or has `axis` with length 1.
    Added in float64, so that every kernel finds the same float32 sum, whatever its layout.
    """
    row_max = tl.max(tile_max, axis)
    ref = tl.expand_dims(finite_or_zero(row_max), axis)
    weighted = tile_sum * tl.exp2((tile_max - ref) * scale)
    return row_max, tl.sum(weighted.to(tl.float64), axis).to(tl.float32)


@triton.jit
def is_valid_row(row_max, row_sum):
    """No NaN, no +inf, and a finite logit: read off the statistics of a row."""
    return (row_sum == row_sum) & (row_max > NEG_INF) & (row_max < INF)


@triton.jit
def law_weight(x, scale, cutoff, row_max, log2_sum):
    """Probability of logits under the law of a sampled row.

    `scale = inv_temperature * LOG2E > 0`, `log2_sum = log_sum * LOG2E`.
    """
    return tl.where(x >= cutoff, tl.exp2((x - row_max) * scale - log2_sum), 0.0)


class LawRow(NamedTuple):
    """The law of one row, in the units of `exp2`; a row of probabilities has IS_LAW false.

    Attributes:
        scale: inv_temperature * LOG2E; 0 = greedy.
        cutoff, row_max: as in `Law`.
        log2_sum: log_sum * LOG2E.
        argmax: i32.
        is_valid: the row's status is OK.
    """

    scale: Any
    cutoff: Any
    row_max: Any
    log2_sum: Any
    argmax: Any
    is_valid: Any


@triton.jit
def load_law(law, row):
    """Read the law of a row from a `Law` of pointers; a valid dummy if there is none."""
    if law is None:
        return LawRow(1.0, NEG_INF, 0.0, 0.0, PAD_TOKEN, True)
    else:  # noqa: RET505  (the compiler needs both arms)
        return LawRow(
            tl.load(law.inv_temperature + row) * LOG2E,
            tl.load(law.cutoff + row),
            tl.load(law.row_max + row),
            tl.load(law.log_sum + row) * LOG2E,
            tl.load(law.argmax + row).to(tl.int32),
            tl.load(law.status + row) == OK,
        )


@triton.jit
def weigh(x, law, IS_LAW: tl.constexpr):
    """Probabilities of the logits of a sampled row, or of a row of probabilities."""
    if IS_LAW:
        return law_weight(x, law.scale, law.cutoff, law.row_max, law.log2_sum)
    else:  # noqa: RET505  (the compiler needs both arms)
        return x


@triton.jit
def order_key(x):
    """An int32 in the order of the float32 x; the two zeros have the same key."""
    bits = x.to(tl.int32, bitcast=True)
    return tl.where(bits >= 0, bits, -(bits & 0x7FFFFFFF))


@triton.jit
def order_unkey(key):
    """The float32 of an `order_key`."""
    bits = tl.where(key >= 0, key, -key | -2147483648)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def first_argmax(
    row_ptr,
    tile_max,  # [n] f32, maxima of the tiles of the row, -inf behind the last one
    row_max,
    vocab,
    CHUNKS: tl.constexpr,
    LANES: tl.constexpr,
    WIDTH: tl.constexpr,
    stride_col=1,
    group_max_ptr=None,  # [n * LANES] f32, maxima of the groups of the row
):
    """First id with the largest logit: one tile, the first that holds it, is read again, or of that
    tile the groups that hold it.

    In four parts, so that a kernel which only does this on the side needs few registers for it.
    """
    TILE: tl.constexpr = CHUNKS * LANES * WIDTH
    PART: tl.constexpr = CHUNKS // 4 if CHUNKS > 4 else 1
    index = tl.arange(0, tile_max.shape[0])
    tile = tl.min(tl.where(tile_max == row_max, index, tile_max.shape[0] - 1), 0)
    only = None
    if group_max_ptr is not None:
        only = tl.load(group_max_ptr + tile * LANES + tl.arange(0, LANES)) == row_max
    offs = tile_offsets(PART, LANES, WIDTH)
    place = tl.full((PART, LANES, WIDTH), TILE, tl.int32)
    for start in range(0, TILE, PART * LANES * WIDTH):
        first = tile * TILE + start
        x = load_tile(row_ptr, first, vocab, NEG_INF, PART, LANES, WIDTH, stride_col, only)
        place = tl.minimum(place, tl.where(x == row_max, start + offs, TILE))
    return tile * TILE + tl.min(place)


@triton.jit
def take(values, index):
    """`values[index]` of a vector in registers."""
    size: tl.constexpr = values.shape[0]
    return tl.sum(tl.where(tl.arange(0, size) == index, values, 0), 0)


@triton.jit
def find(weights, fraction):
    """Inverse CDF: the first index whose cumulative weight exceeds `fraction` of the total.

    Args:
        weights: `[n]`, >= 0, n a power of two; summed in float64.
        fraction: float64 in [0, 1].

    Returns:
        The index (of a positive weight if there is one; rounding past the end gives the last
        positive one), and the fraction of that weight that lies below the target: the `fraction`
        of the next, finer level. Levels may thus sum the same ids in different orders.
    """
    size: tl.constexpr = weights.shape[0]
    index = tl.arange(0, size)
    weight = weights.to(tl.float64)
    below = tl.cumsum(weight, 0)
    target = fraction * tl.sum(weight, 0)
    first = tl.min(tl.where((below > target) & (weight > 0.0), index, size), 0)
    last = tl.max(tl.where(weight > 0.0, index, 0), 0)
    hit = tl.minimum(first, last)
    mass = take(weights, hit).to(tl.float64)
    rest = target - (take(below, hit) - mass)
    rest = tl.where(mass > 0.0, rest / tl.where(mass > 0.0, mass, 1.0), 0.0)
    return hit, tl.minimum(tl.maximum(rest, 0.0), 1.0)


@triton.jit
def philox(seed, position, word2, word3):
    """Philox4x32-10 with key = seed and counter = (position low, position high, word2, word3).

    Args:
        seed, position: int64.
        word2, word3: int32, of the same shape as position.

    Returns:
        Four uint32 words.
    """
    low = (position & 0xFFFFFFFF).to(tl.uint32)
    high = ((position >> 32) & 0xFFFFFFFF).to(tl.uint32)
    return tl.philox(seed, low, high, word2, word3)


@triton.jit
def coin_of(word0, word1):
    """A float64 in [0, 1) from 53 bits of two words."""
    upper = (word0 >> 5).to(tl.float64) * 67108864.0
    return (upper + (word1 >> 6).to(tl.float64)) * 1.1102230246251565e-16


@triton.jit
def exponential_of(word):
    """A float32 exponential variate from one word, with full relative precision at both ends.

    Small variates are `-log1p(-v)` with `v = (word + 0.5) * 2^-32 <= 0.5`, by the series of
    `2 atanh(v / (2 - v))`; large ones `-log(u)` with `u = 1 - v`, taken from the complement.
    """
    upper = word >= 2147483648
    distance = tl.where(upper, 4294967295 - word, word)
    v = (distance.to(tl.float32) + 0.5) * 2.3283064365386963e-10
    s = v / (2.0 - v)
    z = s * s
    series = 1.0 / 15.0
    series = series * z + 1.0 / 13.0
    series = series * z + 1.0 / 11.0
    series = series * z + 1.0 / 9.0
    series = series * z + 1.0 / 7.0
    series = series * z + 1.0 / 5.0
    series = series * z + 1.0 / 3.0
    series = series * z + 1.0
    return tl.where(upper, -tl.log2(v) * 0.6931471805599453, 2.0 * s * series)
