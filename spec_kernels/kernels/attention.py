# ruff: noqa: N803  (compile-time arguments are written in capitals)
"""Attention of draft nodes over a long cache: split over the KV axis, merged in a fixed order.

    s = softcap * tanh(q . k * scale / softcap), or q . k * scale
    out = sum_j exp(s_j - lse) v_j,  lse = log sum_j exp(s_j)       over the visible positions j

Node i sees the whole context and, of the draft block, its ancestors and itself (or nodes 0 .. i).

1. `verify_split_kernel`, a program per split, request, KV head and tile of rows; a row is a node
   and one of the query heads that share the KV head. The context is read without a mask; only the
   tile that meets the draft block is masked, by 32 ancestor bits at a time.
2. `merge_splits_kernel`, a program per token and head: the splits in ascending order.

Traffic: keys and values once per request, KV head and tile of rows (up to 64 rows one tile:
independent of query heads and nodes), and 8 * v_dim + 16 bytes per row and split of 1024 positions
for the partial results, written and read.
Determinism: tiles and splits lie at absolute positions, no atomics. A row's result depends on its
request alone, given max_seqlen_q, which chooses the tile of rows; with `invariant` not on that.

Source:
    Dao et al. 2023, "Flash-Decoding", for the split over the KV axis.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from spec_kernels.kernels._attention import (
    Form,
    Inputs,
    Strides,
    merge_splits_kernel,
    verify_split_kernel,
)
from spec_kernels.kernels._device import LN2, LOG2E, NEG_INF, allow_registers, target_of

SPLIT = 1024
"""Positions per split: partial results are a twelfth of the keys and values of 64 rows."""

INVARIANT_NODES = 16
"""With `invariant`, the tile of rows is that of this many nodes."""

MERGE_BLOCK = 128


class Config(NamedTuple):
    """The tile of the split kernel.

    Attributes:
        block_m, block_n: rows and positions of a tile.
        num_warps: warps per program.
        num_stages: depth of the pipeline of loads; 1 = none.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


def select_config(
    rows: int,
    dim: int,
    dtype: torch.dtype,
    target: tuple[str, Any],
    *,
    is_paged: bool = True,
    is_plain: bool = True,
    is_padded: bool = False,
    is_byte: bool = False,
) -> Config:
    """Choose the tile by the number of rows, the padded head dim, the dtype and the chip.

    | case | tile | why |
    |---|---|---|
    | rows | 16, 32, 64; 128 up to dim 128 | 128 rows at 64 would read the cache twice |
    | dim <= 128, 64 rows | 4 warps; 8 on sm_80, or with a window or soft cap | 4 spill there |
    | dim <= 128, 128 rows | 8 warps | 4 warps spill |
    | the same on AMD, sm_80 | 32 positions; 16 on sm_80 if padded | more spill |
    | the same of 8 bits on gfx950 | 64 positions | 32 are less than 16 bytes for each lane |
    | dim 256 | 32 positions, 8 warps from 32 rows | more doesn't fit the registers |
    | latents (dim 512) | 32 positions, up to 32 rows, 8 warps from 32 | 64 rows spill |
    | paged | 5 stages | two buffers for K and V behind the load of the block number |
    | contiguous | 3 stages | two buffers |
    | AMD | 2 stages, latents 16 rows | 64 KB of shared memory on gfx942 |
    | float32 | 32 positions and rows; above dim 128 16 of both, 2 stages | twice the bytes |
    | latents of float32 on AMD | 4 warps | 8 have half the registers each, and spill |
    | float32, 8-bit cache | 4 warps on AMD or at dim 64, 64 positions at both | 16 bytes a lane |

    Args:
        rows: nodes times query heads per KV head.
        dim: the larger of the padded dims of keys and values.
        dtype: of the queries.
        target: ("cuda", 80) or ("hip", "gfx942").
        is_paged: block numbers are loaded first.
        is_plain: neither window nor soft cap.
        is_padded: head dims are no powers of two.
        is_byte: the cache holds numbers of 8 bits.

    Example:
        >>> select_config(64, 128, torch.bfloat16, ("cuda", 90))
        Config(block_m=64, block_n=64, num_warps=4, num_stages=5)
    """
    backend, arch = target
    is_amd = backend == "hip"
    stages = 2 if is_amd else 5 if is_paged else 3
    most = 128 if dim <= 128 else 64 if dim <= 256 else 16 if is_amd else 32
    if dtype == torch.float32:
        most = min(most, 32 if dim <= 128 else 16)
    block_m = min(max(triton.next_power_of_2(rows), 16), most)
    if dtype == torch.float32:
        is_narrow, wide = is_byte and dim <= 64, dim <= 128
        num_warps = 4 if is_narrow or (is_amd and (is_byte or dim > 256)) else 8
        block_n = 64 if is_narrow and is_amd else 32 if wide else 16
        return Config(block_m, block_n, num_warps, stages if wide or is_amd else 2)
    if dim <= 128:
        narrow = 64 if is_amd or (arch > 80 and is_plain) else 32
        block_n = 64
        if block_m == 128 and (is_amd or arch == 80) and not (is_byte and arch == "gfx950"):
            block_n = 16 if is_padded and not is_amd else 32
        return Config(block_m, block_n, 4 if block_m <= narrow else 8, stages)
    return Config(block_m, 32, 4 if block_m == 16 or is_amd else 8, stages)


def select_unit(*tensors: Tensor) -> int:
    """Choose the unit of the strides of some tensors: 16 bytes if they and all addresses allow it.

    A stride of 40 elements is no multiple of 16, so the compiler would load 2 bytes at a time; 5
    units of 8 elements keep loads of 16 bytes.
    """
    unit = 16 // tensors[0].element_size()
    for tensor in tensors:
        strides = [s for s, n in zip(tensor.stride(), tensor.shape, strict=True) if n > 1]
        if tensor.data_ptr() % 16 or any(stride % unit for stride in strides[:-1]):
            return 1
    return unit


def _check_span(tensor: Tensor, name: str, unit: int) -> None:
    if (tensor.shape[1] - 1) * tensor.stride(1) // unit >= 2**31:
        raise ValueError(
            f"a block of {name} must span less than 2**31 units of {unit} elements, "
            f"got {tensor.shape[1]} * {tensor.stride(1)}"
        )


def _with_unit_columns(tensor: Tensor) -> Tensor:
    """Return the tensor, copied only if neighbouring columns aren't neighbours in memory."""
    return tensor if tensor.stride(-1) == 1 or tensor.shape[-1] == 1 else tensor.contiguous()


def _scale_strides(scale: Tensor | None) -> tuple[int, ...]:
    return (0, 0, 0) if scale is None or scale.dim() < 3 else tuple(scale.stride())


class Options(NamedTuple):
    """The keywords of a call, as both forms of attention share them."""

    block_table: Tensor | None
    ancestors: Tensor | None
    depths: Tensor | None
    scale: float
    window: int | None
    softcap: float | None
    sinks: Tensor | None
    key_scale: Tensor | None
    value_scale: Tensor | None
    return_lse: bool
    max_seqlen_k: int | None
    invariant: bool


def _capacity(keys: Tensor, options: Options) -> int:
    """Return how many positions a request may have."""
    slots = keys.shape[1]
    if options.block_table is not None:
        slots *= options.block_table.shape[1]
    return slots if options.max_seqlen_k is None else min(slots, options.max_seqlen_k)


def _optional(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.contiguous()


def _make_form(
    query: Tensor, query_rope: Tensor | None, keys: Tensor, values: Tensor, shares: bool,
    config: Config, options: Options,
) -> Form:  # fmt: skip
    """Collect what the split kernel is compiled for."""
    backend, arch = target_of(query)
    qk_dim, v_dim = query.shape[2], values.shape[3]
    rope_dim = 0 if query_rope is None else query_rope.shape[2]
    has_type = keys.dtype != torch.float8_e4m3fn or (backend == "cuda" and arch >= 89)
    queries = (query,) if rope_dim == 0 else (query, query_rope)
    return Form(
        group=query.shape[1] // keys.shape[2],
        block_m=config.block_m,
        block_n=config.block_n,
        split=SPLIT,
        stages=config.num_stages,
        block_size=0 if options.block_table is None else keys.shape[1],
        query_unit=select_unit(*queries),
        cache_unit=select_unit(keys) if shares else select_unit(keys, values),
        qk_dim=qk_dim,
        qk_block=max(triton.next_power_of_2(qk_dim), 16),
        v_dim=v_dim,
        v_block=max(triton.next_power_of_2(v_dim), 16),
        rope_dim=rope_dim,
        rope_block=max(triton.next_power_of_2(rope_dim), 16),
        shares=shares,
        has_tree=options.ancestors is not None,
        has_depths=options.depths is not None,
        has_window=options.window is not None,
        has_softcap=options.softcap is not None,
        bytes="" if has_type else "e4m3",
        token_scales=options.key_scale is not None and options.key_scale.dim() > 1,
        # copies straight to the shared memory of gfx950 are 32 or 128 bits wide; transposed after
        # the load, 8-bit keys would be laid out there in pieces of 64, and so come by 32
        key_columns=arch == "gfx950" and keys.dtype == torch.int8,
        # as the second product of tf32 takes them, 8-bit values would come in pieces of 64 bits
        value_columns=backend == "cuda"
        and query.dtype == torch.float32
        and keys.element_size() == 1,
        precision="tf32x3" if backend == "cuda" else "ieee",
    )


def _make_strides(
    form: Form, query: Tensor, query_rope: Tensor | None, keys: Tensor, values: Tensor,
    options: Options,
) -> Strides:  # fmt: skip
    """Collect strides in the units of the form."""
    rope = (0, 0) if query_rope is None else query_rope.stride()[:2]
    table = options.block_table
    return Strides(
        *(stride // form.query_unit for stride in (*query.stride()[:2], *rope)),
        *(stride // form.cache_unit for stride in (*keys.stride()[:3], *values.stride()[:3])),
        *_scale_strides(options.key_scale),
        *_scale_strides(options.value_scale),
        0 if table is None else table.stride(0),
    )


def attend(
    query: Tensor,
    query_rope: Tensor | None,
    keys: Tensor,
    values: Tensor,
    context_lens: Tensor,
    cu_seqlens_q: Tensor,
    max_seqlen_q: int,
    options: Options,
) -> tuple[Tensor, Tensor | None]:
    """Launch both kernels: verification attention over keys and values, latent ones or not.

    Args:
        query: `[tokens, heads, qk_dim]`.
        query_rope: `[tokens, heads, rope_dim]`, or None; then the values are columns of the keys.
        keys: `[blocks, block_size, kv_heads, qk_dim + rope_dim]`.
        values: `[blocks, block_size, kv_heads, v_dim]`.
        context_lens, cu_seqlens_q, max_seqlen_q: as in the public functions.
        options: their keywords.
    """
    tokens, heads = query.shape[:2]
    batch, kv_heads, v_dim = context_lens.shape[0], keys.shape[2], values.shape[3]
    out = query.new_empty(tokens, heads, v_dim)
    lse = query.new_empty(tokens, heads, dtype=torch.float32) if options.return_lse else None
    if tokens == 0 or heads == 0:
        return out, lse
    shares = query_rope is not None
    if query_rope is not None and query_rope.shape[2] == 0:
        query_rope = None
    query, keys = _with_unit_columns(query), _with_unit_columns(keys)
    values = keys[..., :v_dim] if shares else _with_unit_columns(values)
    query_rope = None if query_rope is None else _with_unit_columns(query_rope)
    nodes = INVARIANT_NODES if options.invariant else max_seqlen_q
    dim = triton.next_power_of_2(max(query.shape[2], v_dim))
    is_paged = options.block_table is not None
    config = select_config(
        max(nodes, 1) * (heads // kv_heads),
        dim,
        query.dtype,
        target_of(query),
        is_paged=is_paged,
        is_plain=options.window is None and options.softcap is None,
        is_padded=not dim == query.shape[2] == v_dim,
        is_byte=keys.element_size() == 1,
    )
    if options.invariant:
        config = config._replace(block_m=min(config.block_m, 64))
    form = _make_form(query, query_rope, keys, values, shares, config, options)
    strides = _make_strides(form, query, query_rope, keys, values, options)
    _check_span(keys, "key_cache", form.cache_unit)
    _check_span(values, "value_cache", form.cache_unit)
    if form.bytes:
        keys, values = keys.view(torch.uint8), values.view(torch.uint8)
    capacity = _capacity(keys, options)
    splits = max(triton.cdiv(capacity, SPLIT), 1)
    part = query.new_empty(splits, tokens, heads, v_dim, dtype=torch.float32)
    largest, total = query.new_empty(2, splits, tokens, heads, dtype=torch.float32).unbind(0)
    inputs = Inputs(
        query,
        query_rope,
        keys,
        values,
        options.block_table,
        context_lens.contiguous(),
        cu_seqlens_q.contiguous(),
        _optional(options.ancestors),
        _optional(options.depths),
        options.key_scale,
        options.value_scale,
    )
    fusion = {"enable_fp_fusion": False} if options.invariant else {}
    window = 0 if options.window is None else options.window
    m_tiles = triton.cdiv(max_seqlen_q * form.group, config.block_m)
    if batch * m_tiles:
        verify_split_kernel[(batch * kv_heads * m_tiles, splits)](
            part_ptr=part,
            largest_ptr=largest,
            total_ptr=total,
            inputs=inputs,
            strides=strides,
            tokens=tokens,
            heads=heads,
            kv_heads=kv_heads,
            words=0 if options.ancestors is None else options.ancestors.shape[1],
            capacity=capacity,
            m_tiles=m_tiles,
            scale=float(options.scale) * LOG2E.value,
            softcap=float(options.softcap or 0.0),
            window=window,
            FORM=form,
            num_warps=config.num_warps,
            num_stages=config.num_stages,
            **allow_registers(query),
            **fusion,
        )
    merge_splits_kernel[(tokens, heads)](
        out_ptr=out,
        lse_ptr=lse,
        part_ptr=part,
        largest_ptr=largest,
        total_ptr=total,
        context_lens_ptr=inputs.context_lens,
        cu_seqlens_q_ptr=inputs.cu_seqlens_q,
        sinks_ptr=_optional(options.sinks),
        value_scale_ptr=None if form.token_scales else options.value_scale,
        tokens=tokens,
        heads=heads,
        batch=batch if m_tiles else 0,
        capacity=capacity,
        window=window,
        SPLIT=SPLIT,
        V_DIM=v_dim,
        V_BLOCK=form.v_block,
        HAS_WINDOW=form.has_window,
        BLOCK=MERGE_BLOCK,
        num_warps=1,
        **fusion,
    )
    return out, lse


def verify_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    context_lens: Tensor,
    cu_seqlens_q: Tensor,
    max_seqlen_q: int,
    *,
    block_table: Tensor | None = None,
    ancestors: Tensor | None = None,
    depths: Tensor | None = None,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    key_scale: Tensor | None = None,
    value_scale: Tensor | None = None,
    return_lse: bool = False,
    max_seqlen_k: int | None = None,
    invariant: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Attend from the nodes of every request to its context and their ancestors: two launches."""
    scale = query.shape[2] ** -0.5 if scale is None else scale
    options = Options(
        block_table, ancestors, depths, scale, window, softcap, sinks, key_scale, value_scale,
        return_lse, max_seqlen_k, invariant,
    )  # fmt: skip
    return attend(
        query, None, key_cache, value_cache, context_lens, cu_seqlens_q, max_seqlen_q, options
    )


@triton.jit(do_not_specialize=["rows"])
def merge_attention_kernel(
    out_ptr,  # [rows, dim] float, out
    lse_ptr,  # [rows] f32, out
    out_a_ptr,  # [rows, dim] float
    lse_a_ptr,  # [rows] f32
    out_b_ptr,  # [rows, dim] float
    lse_b_ptr,  # [rows] f32
    rows,
    DIM: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
):
    """Merge two partial attentions, some rows a program.

    Floor: `3 * rows * row_bytes` bytes.
    """
    row = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    column = tl.arange(0, BLOCK_DIM)
    ok = row < rows
    place = row[:, None] * DIM + column[None, :]
    mask = ok[:, None] & (column < DIM)[None, :]
    lse_a = tl.load(lse_a_ptr + row, mask=ok, other=NEG_INF)
    lse_b = tl.load(lse_b_ptr + row, mask=ok, other=NEG_INF)
    out_a = tl.load(out_a_ptr + place, mask=mask, other=0.0).to(tl.float32)
    out_b = tl.load(out_b_ptr + place, mask=mask, other=0.0).to(tl.float32)

    largest = tl.maximum(lse_a, lse_b)
    origin = tl.where(largest == NEG_INF, 0.0, largest)
    weight_a = tl.exp2((lse_a - origin) * LOG2E)
    weight_b = tl.exp2((lse_b - origin) * LOG2E)
    total = weight_a + weight_b
    inverse = 1.0 / tl.where(total == 0.0, 1.0, total)
    out = (out_a * weight_a[:, None] + out_b * weight_b[:, None]) * inverse[:, None]

    tl.store(out_ptr + place, out.to(out_ptr.dtype.element_ty), mask=mask)
    tl.store(lse_ptr + row, largest + tl.log2(total) * LN2, mask=ok)


def merge_attention(
    out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor
) -> tuple[Tensor, Tensor]:
    """Merge attention over two disjoint sets of positions: one launch."""
    out, lse = torch.empty_like(out_a.contiguous()), torch.empty_like(lse_a.contiguous())
    rows, dim = lse.numel(), out.shape[-1]
    if out.numel():
        block_dim = triton.next_power_of_2(dim)
        block_rows = max(2048 // block_dim, 1)
        merge_attention_kernel[(triton.cdiv(rows, block_rows),)](
            out_ptr=out,
            lse_ptr=lse,
            out_a_ptr=out_a.contiguous(),
            lse_a_ptr=lse_a.contiguous(),
            out_b_ptr=out_b.contiguous(),
            lse_b_ptr=lse_b.contiguous(),
            rows=rows,
            DIM=dim,
            BLOCK_ROWS=block_rows,
            BLOCK_DIM=block_dim,
        )
    return out, lse
