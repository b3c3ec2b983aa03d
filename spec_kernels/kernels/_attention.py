# ruff: noqa: N803, N806, SIM102  (compile-time arguments are written in capitals; a run-time
# condition inside a compile-time one needs its own `if`)
"""Device functions and kernels that both forms of verification attention share.

A program attends from BLOCK_M rows, a row being a node of one request and one of the query heads of
a KV head, to one split of the KV axis: SPLIT positions from a multiple of SPLIT on, in tiles of
BLOCK_N. Positions count from the start of the request: context first, then its nodes. Three loops
over the tiles of a split:

1. tiles that some row's window cuts (masked; only with a window),
2. tiles that lie in the context and that every row sees whole: no mask at all,
3. tiles that meet the draft block (masked by ancestor words, or causally).

Scores are in units of log2. Splits are merged by `merge_splits_kernel`, one after the other.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from spec_kernels.kernels._device import LN2, LOG2E, NEG_INF


class Inputs(NamedTuple):
    """The tensors of a call, as one kernel argument.

    Attributes:
        query: `[tokens, heads, qk_dim]` float.
        query_rope: `[tokens, heads, rope_dim]` float; read if rope_dim > 0.
        key_cache: `[blocks, block_size, kv_heads, qk_dim + rope_dim]`, or `[batch, max_len, ...]`.
        value_cache: `[blocks, block_size, kv_heads, v_dim]`; not read if shared with the keys.
        block_table: `[batch, max_blocks] i32`, or None: contiguous.
        context_lens: `[batch] i32`.
        cu_seqlens_q: `[batch + 1] i32`.
        ancestors: `[tokens, words] i32`, or None: causal.
        depths: `[tokens] i32`, or None: the node's index.
        key_scale, value_scale: f32, one number or one per token and head, or None.
    """

    query: Any
    query_rope: Any
    key_cache: Any
    value_cache: Any
    block_table: Any
    context_lens: Any
    cu_seqlens_q: Any
    ancestors: Any
    depths: Any
    key_scale: Any
    value_scale: Any


class Strides(NamedTuple):
    """Strides of the inputs: queries and cache in units of elements, the others in elements."""

    query_token: Any
    query_head: Any
    rope_token: Any
    rope_head: Any
    key_block: Any
    key_slot: Any
    key_head: Any
    value_block: Any
    value_slot: Any
    value_head: Any
    key_scale_block: Any
    key_scale_slot: Any
    key_scale_head: Any
    value_scale_block: Any
    value_scale_slot: Any
    value_scale_head: Any
    table: Any


class Sizes(NamedTuple):
    """Run-time numbers of a call.

    Attributes:
        tokens, heads, kv_heads, words: of queries and ancestors.
        capacity: positions that a request may have.
        m_tiles: tiles of rows per request and KV head.
        scale: of the scores, times log2 e.
        softcap: in natural units.
        window: visible positions by depth.
    """

    tokens: Any
    heads: Any
    kv_heads: Any
    words: Any
    capacity: Any
    m_tiles: Any
    scale: Any
    softcap: Any
    window: Any


class Form(NamedTuple):
    """What the split kernel is compiled for: one compile-time argument.

    Attributes:
        group: query heads per KV head.
        block_m, block_n, split, stages: the tile.
        block_size: of a paged cache; 0 = contiguous.
        query_unit, cache_unit: elements in one unit of their strides.
        qk_dim, v_dim, rope_dim: columns; qk_block, v_block, rope_block: padded to powers of two.
        shares: values are the first columns of the keys.
        has_tree, has_depths: ancestor words and depths of the nodes are given.
        has_window, has_softcap: options.
        bytes: how the cache is read: "" as its dtype, "e4m3" bits of an 8-bit float.
        token_scales: a scale per token and head.
        key_columns, value_columns: they are loaded with a position per column, as the first product
            takes keys.
        precision: of float32 products.
    """

    group: int
    block_m: int
    block_n: int
    split: int
    stages: int
    block_size: int
    query_unit: int
    cache_unit: int
    qk_dim: int
    qk_block: int
    v_dim: int
    v_block: int
    rope_dim: int
    rope_block: int
    shares: bool
    has_tree: bool
    has_depths: bool
    has_window: bool
    has_softcap: bool
    bytes: str
    token_scales: bool
    key_columns: bool
    value_columns: bool
    precision: str


class Rows(NamedTuple):
    """The rows of a program. For an absent pointer another one stands in, which is never read:
    functions of Triton 3.6 can't return None.

    Attributes:
        query, query_rope: their queries.
        node, depth: `[BLOCK_M] i32`, of each row.
        ok: `[BLOCK_M]`, the row exists.
        words: `[BLOCK_M]` pointers to ancestor words.
        depths: pointer to the depths of the request's nodes.
    """

    query: Any
    query_rope: Any
    node: Any
    depth: Any
    ok: Any
    words: Any
    depths: Any


class Cache(NamedTuple):
    """Pointers to one KV head of one request, and its extent. Absent ones: as in `Rows`.

    Attributes:
        key_ptr, value_ptr, key_scale_ptr, value_scale_ptr: at slot 0.
        table_ptr: the request's row of the block table.
        context, end: positions of the context, and of context and nodes.
    """

    key_ptr: Any
    value_ptr: Any
    key_scale_ptr: Any
    value_scale_ptr: Any
    table_ptr: Any
    context: Any
    end: Any


@triton.jit
def decode_e4m3(byte):
    """Exact float16 of the bits of an e4m3 number; NaN stays NaN. For chips without the type."""
    bits = byte.to(tl.uint16)
    half = ((bits & 0x80) << 8) | ((bits & 0x7F) << 7)
    half = tl.where((bits & 0x7F) == 0x7F, tl.full(bits.shape, 0x7E00, tl.uint16), half)
    return half.to(tl.float16, bitcast=True) * 256.0


@triton.jit
def load_rows(base, row, first, ok, dtype, DIM: tl.constexpr, BLOCK: tl.constexpr,
              MASKED: tl.constexpr, IS_E4M3: tl.constexpr,
              AS_COLUMNS: tl.constexpr = False):  # fmt: skip
    """Columns `first ..` of cache rows in the dtype of the queries; 0 where `ok` is false."""
    column = tl.arange(0, BLOCK)
    R: tl.constexpr = 0 if AS_COLUMNS else 1
    place = base + tl.expand_dims(row, R) + tl.expand_dims(first + column, 1 - R)
    exists = tl.expand_dims(column < DIM, 1 - R)
    OTHER: tl.constexpr = 0.0 if base.dtype.element_ty.is_floating() else 0
    if MASKED:
        x = tl.load(place, mask=tl.expand_dims(ok, R) & exists, other=OTHER)
    elif DIM != BLOCK:
        x = tl.load(place, mask=exists, other=OTHER)
    else:
        x = tl.load(place)
    if IS_E4M3:
        x = decode_e4m3(x)
    return x.to(dtype)


@triton.jit
def load_scales(base, row, ok, MASKED: tl.constexpr):
    """Scales of cache rows."""
    return tl.load(base + row, mask=ok, other=0.0) if MASKED else tl.load(base + row)


@triton.jit
def ancestor_bits(words, ok, first, count):
    """32 bits of every row's ancestor words from bit `first` on, which may be negative."""
    word = first >> 5
    shift = first & 31
    low = tl.load(words + word, mask=ok & (word >= 0) & (word < count), other=0)
    high = tl.load(words + word + 1, mask=ok & (word >= -1) & (word + 1 < count), other=0)
    low = low.to(tl.uint32, bitcast=True) >> shift
    high = high.to(tl.uint32, bitcast=True) << ((32 - shift) & 31)
    return low | tl.where(shift == 0, tl.zeros_like(high), high)


@triton.jit
def find_visible(rows, cache, start, sizes, FORM: tl.constexpr):
    """Which positions of the tile at `start` each row sees: `[BLOCK_M, BLOCK_N]`."""
    offs = tl.arange(0, FORM.block_n)
    position = start + offs
    node = position - cache.context
    if FORM.has_tree:
        visible = rows.ok[:, None] & (node < 0)[None, :]
        for i in tl.static_range((FORM.block_n + 31) // 32):
            first = start - cache.context + 32 * i
            bits = ancestor_bits(rows.words, rows.ok, first, sizes.words)
            bit = (bits[:, None] >> (offs & 31).to(tl.uint32)[None, :]) & 1
            visible = visible | ((bit != 0) & ((node >= 0) & (offs // 32 == i))[None, :])
    else:
        visible = node[None, :] <= rows.node[:, None]
    visible = visible & (position < cache.end)[None, :]
    if FORM.has_window:
        depth = node
        if FORM.has_depths:
            is_node = (node >= 0) & (position < cache.end)
            depth = tl.where(is_node, tl.load(rows.depths + node, mask=is_node, other=0), node)
        visible = visible & (depth[None, :] > (rows.depth - sizes.window)[:, None])
    return visible


@triton.jit
def cap_scores(scores, sizes):
    """`softcap * tanh(scores * scale / softcap)` in units of log2."""
    x = scores * (sizes.scale / (sizes.softcap * LOG2E))
    square = x * x
    tanh = 1.0 - 2.0 / (1.0 + tl.exp2(x * (2.0 * LOG2E)))
    # the difference loses digits near 0
    series = x * (1.0 - square * (1 / 3 - square * (2 / 15 - square * (17 / 315))))
    return tl.where(square < 0.04, series, tanh) * (sizes.softcap * LOG2E)


@triton.jit
def attend_tile(acc, largest, total, rows, cache, start, strides, sizes, FORM: tl.constexpr,
                MASKED: tl.constexpr):  # fmt: skip
    """Add the tile of BLOCK_N positions at `start` to the running softmax of every row."""
    position = start + tl.arange(0, FORM.block_n)
    ok = position < cache.end
    slot = position  # 32 bits: the launcher sees to it that a block spans less
    block = tl.full((FORM.block_n,), 0, tl.int64)
    if FORM.block_size > 0:
        number = position // FORM.block_size
        if MASKED:
            block = tl.load(cache.table_ptr + number, mask=ok, other=0).to(tl.int64)
        else:
            block = tl.load(cache.table_ptr + number).to(tl.int64)
        slot = position % FORM.block_size
    row = (block * strides.key_block + slot * strides.key_slot) * FORM.cache_unit

    dtype = rows.query.dtype
    IS_E4M3: tl.constexpr = FORM.bytes == "e4m3"
    keys = load_rows(
        cache.key_ptr, row, 0, ok, dtype, FORM.qk_dim, FORM.qk_block, MASKED, IS_E4M3,
        FORM.key_columns,
    )  # fmt: skip
    columns = keys if FORM.key_columns else tl.trans(keys)
    scores = tl.dot(rows.query, columns, input_precision=FORM.precision)
    if FORM.rope_dim > 0:
        rope = load_rows(
            cache.key_ptr, row, FORM.qk_dim, ok, dtype, FORM.rope_dim, FORM.rope_block, MASKED,
            IS_E4M3, FORM.key_columns,
        )  # fmt: skip
        rope = rope if FORM.key_columns else tl.trans(rope)
        scores = tl.dot(rows.query_rope, rope, scores, input_precision=FORM.precision)
    if FORM.token_scales:
        place = block * strides.key_scale_block + slot * strides.key_scale_slot
        scores = scores * load_scales(cache.key_scale_ptr, place, ok, MASKED)[None, :]
    scores = cap_scores(scores, sizes) if FORM.has_softcap else scores * sizes.scale
    if MASKED:
        visible = find_visible(rows, cache, start, sizes, FORM)
        scores = tl.where(visible, scores, NEG_INF)
    new_largest = tl.maximum(largest, tl.max(scores, 1))
    origin = new_largest
    if MASKED:  # -inf minus -inf
        origin = tl.where(new_largest == NEG_INF, 0.0, new_largest)
    weights = tl.exp2(scores - origin[:, None])
    shrink = tl.exp2(largest - origin)
    total = total * shrink + tl.sum(weights, 1)

    if FORM.shares:
        values = tl.trans(keys) if FORM.key_columns else keys
    else:
        row = (block * strides.value_block + slot * strides.value_slot) * FORM.cache_unit
        values = load_rows(
            cache.value_ptr, row, 0, ok, dtype, FORM.v_dim, FORM.v_block, MASKED, IS_E4M3,
            FORM.value_columns,
        )  # fmt: skip
        values = tl.trans(values) if FORM.value_columns else values
    if FORM.token_scales:
        place = block * strides.value_scale_block + slot * strides.value_scale_slot
        scale = load_scales(cache.value_scale_ptr, place, ok, MASKED)
        if dtype == tl.float16:  # scaled weights would be too small for it
            values = (values.to(tl.float32) * scale[:, None]).to(dtype)
        else:
            weights = weights * scale[None, :]
    acc = tl.dot(weights.to(dtype), values, acc * shrink[:, None], input_precision=FORM.precision)
    return acc, new_largest, total


@triton.jit
def load_queries(inputs, request, kv_head, m_tile, strides, sizes, FORM: tl.constexpr):
    """The rows of a program, and the index of each in `[tokens, heads]`."""
    first = tl.load(inputs.cu_seqlens_q + request)
    nodes = tl.load(inputs.cu_seqlens_q + request + 1) - first
    r = m_tile * FORM.block_m + tl.arange(0, FORM.block_m)
    node = r // FORM.group
    head = kv_head * FORM.group + r % FORM.group
    ok = node < nodes
    token = (first + node).to(tl.int64)

    column = tl.arange(0, FORM.qk_block)
    row = (token * strides.query_token + head * strides.query_head) * FORM.query_unit
    mask = ok[:, None] & (column < FORM.qk_dim)[None, :]
    query = tl.load(inputs.query + row[:, None] + column[None, :], mask=mask, other=0.0)
    query_rope = query
    if FORM.rope_dim > 0:
        column = tl.arange(0, FORM.rope_block)
        row = (token * strides.rope_token + head * strides.rope_head) * FORM.query_unit
        mask = ok[:, None] & (column < FORM.rope_dim)[None, :]
        place = inputs.query_rope + row[:, None] + column[None, :]
        query_rope = tl.load(place, mask=mask, other=0.0)

    depth = node
    depths = inputs.cu_seqlens_q
    if FORM.has_depths:
        depths = inputs.depths + first
        if FORM.has_window:
            depth = tl.load(depths + node, mask=ok, other=0)
    words = inputs.cu_seqlens_q
    if FORM.has_tree:
        words = inputs.ancestors + token * sizes.words
    rows = Rows(query, query_rope, node, depth, ok, words, depths)
    return rows, nodes, token * sizes.heads + head


@triton.jit
def locate_cache(inputs, request, kv_head, nodes, strides, sizes, FORM: tl.constexpr):
    """Pointers to the rows of one KV head of a request."""
    kv_head = kv_head.to(tl.int64)
    own = request  # the block in which a contiguous cache starts
    table = inputs.context_lens
    if FORM.block_size > 0:
        own = tl.zeros((), tl.int64)
        table = inputs.block_table + request * strides.table
    key_first = own * strides.key_block + kv_head * strides.key_head
    keys = inputs.key_cache + key_first * FORM.cache_unit
    value_first = own * strides.value_block + kv_head * strides.value_head
    values = inputs.value_cache + value_first * FORM.cache_unit
    key_scale = inputs.context_lens
    value_scale = inputs.context_lens
    if FORM.token_scales:
        head = own * strides.key_scale_block + kv_head * strides.key_scale_head
        key_scale = inputs.key_scale + head
        head = own * strides.value_scale_block + kv_head * strides.value_scale_head
        value_scale = inputs.value_scale + head
    context = tl.load(inputs.context_lens + request)
    end = tl.minimum(context + nodes, sizes.capacity)
    return Cache(keys, values, key_scale, value_scale, table, context, end)


@triton.jit(do_not_specialize=["tokens", "words", "capacity", "m_tiles", "window"])
def verify_split_kernel(
    part_ptr,  # [splits, tokens, heads, v_dim] f32, out: weighted sums of values
    largest_ptr,  # [splits, tokens, heads] f32, out: largest score
    total_ptr,  # [splits, tokens, heads] f32, out: sum of exp2(score - largest)
    inputs,  # Inputs
    strides,  # Strides
    tokens,
    heads,
    kv_heads,
    words,
    capacity,
    m_tiles,
    scale,
    softcap,
    window,
    FORM: tl.constexpr,
):
    """Attend from some rows to one split, and store its partial result.

    Floor: `positions * position_bytes + rows * query_bytes + rows * splits * part_bytes` bytes.
    """
    pid = tl.program_id(0)
    split = tl.program_id(1)
    m_tile = pid % m_tiles
    kv_head = (pid // m_tiles) % kv_heads
    request = (pid // (m_tiles * kv_heads)).to(tl.int64)
    sizes = Sizes(tokens, heads, kv_heads, words, capacity, m_tiles, scale, softcap, window)
    if inputs.key_scale is not None and not FORM.token_scales:
        scale = scale * tl.load(inputs.key_scale)
        sizes = Sizes(tokens, heads, kv_heads, words, capacity, m_tiles, scale, softcap, window)
    first_token = tl.load(inputs.cu_seqlens_q + request)
    nodes = tl.load(inputs.cu_seqlens_q + request + 1) - first_token
    cache = locate_cache(inputs, request, kv_head, nodes, strides, sizes, FORM)
    begin = split * FORM.split
    if (begin >= cache.end) | (m_tile * FORM.block_m >= nodes * FORM.group):
        return
    end = tl.minimum(begin + FORM.split, cache.end)
    if FORM.has_window:
        if end <= cache.context - window + 1:  # behind every window; the merge skips it
            return
    rows, nodes, place = load_queries(inputs, request, kv_head, m_tile, strides, sizes, FORM)

    largest = tl.full((FORM.block_m,), NEG_INF, tl.float32)
    total = tl.full((FORM.block_m,), 0.0, tl.float32)
    acc = tl.full((FORM.block_m, FORM.v_block), 0.0, tl.float32)
    whole = begin  # from here on every row sees all of the context
    if FORM.has_window:
        lowest = tl.maximum(cache.context - window + 1, 0) // FORM.block_n * FORM.block_n
        deepest = tl.max(tl.where(rows.ok, rows.depth, 0), 0)
        whole = tl.cdiv(tl.maximum(cache.context + deepest - window + 1, 0), FORM.block_n)
        whole = tl.minimum(tl.maximum(whole * FORM.block_n, begin), end)
        for start in tl.range(tl.maximum(lowest, begin), whole, FORM.block_n, num_stages=1):
            acc, largest, total = attend_tile(
                acc, largest, total, rows, cache, start, strides, sizes, FORM, True
            )
        whole = tl.cdiv(whole, FORM.block_n) * FORM.block_n
    draft = tl.maximum(whole, tl.minimum(cache.context, end) // FORM.block_n * FORM.block_n)
    for start in tl.range(whole, draft, FORM.block_n, num_stages=FORM.stages):
        acc, largest, total = attend_tile(
            acc, largest, total, rows, cache, start, strides, sizes, FORM, False
        )
    for start in tl.range(draft, end, FORM.block_n, num_stages=FORM.stages):
        acc, largest, total = attend_tile(
            acc, largest, total, rows, cache, start, strides, sizes, FORM, True
        )

    place += split.to(tl.int64) * tokens * heads
    column = tl.arange(0, FORM.v_block)
    part = part_ptr + place[:, None] * FORM.v_dim + column[None, :]
    tl.store(part, acc, mask=rows.ok[:, None] & (column < FORM.v_dim)[None, :])
    tl.store(largest_ptr + place, largest, mask=rows.ok)
    tl.store(total_ptr + place, total, mask=rows.ok)


@triton.jit
def find_request(cu_seqlens_q_ptr, token, batch, BLOCK: tl.constexpr):
    """The request of a token; `batch` for tokens behind the last request."""
    request = 0
    for first in range(0, batch, BLOCK):
        offs = first + tl.arange(0, BLOCK)
        ends = tl.load(cu_seqlens_q_ptr + 1 + offs, mask=offs < batch, other=2**31 - 1)
        request += tl.sum((ends <= token).to(tl.int32), 0)
    return request


@triton.jit(do_not_specialize=["tokens", "batch", "capacity", "window"])
def merge_splits_kernel(
    out_ptr,  # [tokens, heads, v_dim] float, out
    lse_ptr,  # [tokens, heads] f32, out, or None
    part_ptr,  # [splits, tokens, heads, v_dim] f32
    largest_ptr,  # [splits, tokens, heads] f32
    total_ptr,  # [splits, tokens, heads] f32
    context_lens_ptr,  # [batch] i32
    cu_seqlens_q_ptr,  # [batch + 1] i32
    sinks_ptr,  # [heads] float, or None
    value_scale_ptr,  # [] f32, or None
    tokens,
    heads,
    batch,
    capacity,
    window,
    SPLIT: tl.constexpr,
    V_DIM: tl.constexpr,
    V_BLOCK: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Merge the splits of one row in ascending order.

    Floor: `rows * splits * part_bytes + rows * out_bytes` bytes.
    """
    token = tl.program_id(0)
    head = tl.program_id(1)
    row = token.to(tl.int64) * heads + head
    step = tokens.to(tl.int64) * heads
    column = tl.arange(0, V_BLOCK)
    request = find_request(cu_seqlens_q_ptr, token, batch, BLOCK)
    first = 0
    last = 0
    if request < batch:
        nodes = tl.load(cu_seqlens_q_ptr + request + 1) - tl.load(cu_seqlens_q_ptr + request)
        context = tl.load(context_lens_ptr + request)
        last = tl.cdiv(tl.minimum(context + nodes, capacity), SPLIT)
        if HAS_WINDOW:
            first = tl.maximum(context - window + 1, 0) // SPLIT

    largest = tl.full((), NEG_INF, tl.float32)
    for split in range(first, last):
        largest = tl.maximum(largest, tl.load(largest_ptr + split * step + row))
    total = tl.zeros((), tl.float32)
    if sinks_ptr is not None:
        sink = tl.load(sinks_ptr + head).to(tl.float32) * LOG2E
        if request < batch:
            largest = tl.maximum(largest, sink)
            total += tl.exp2(sink - tl.where(largest == NEG_INF, 0.0, largest))
    origin = tl.where(largest == NEG_INF, 0.0, largest)
    acc = tl.zeros((V_BLOCK,), tl.float32)
    for split in range(first, last):
        place = split * step + row
        weight = tl.exp2(tl.load(largest_ptr + place) - origin)
        total += weight * tl.load(total_ptr + place)
        part = tl.load(part_ptr + place * V_DIM + column, mask=column < V_DIM, other=0.0)
        acc += weight * part

    inverse = 1.0 / tl.where(total == 0.0, 1.0, total)
    if value_scale_ptr is not None:
        inverse *= tl.load(value_scale_ptr)
    out = (acc * inverse).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + row * V_DIM + column, out, mask=column < V_DIM)
    if lse_ptr is not None:
        tl.store(lse_ptr + row, (largest + tl.log2(total)) * LN2)
