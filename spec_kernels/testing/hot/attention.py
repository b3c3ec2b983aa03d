"""Hot calls of `verify_attention` and `merge_attention`: 8 nodes a request over long contexts."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Final, NamedTuple

import torch
from torch import Tensor

from spec_kernels.kernels import merge_attention, verify_attention

from ._call import HotCall


class Configuration(NamedTuple):
    """One way to call the attention of a tree over a paged cache.

    Attributes:
        name: in tables and in the budgets.
        dim, group, kv_heads: head dim, query heads per KV head, KV heads.
        nodes: per request.
        block_size: positions per block.
        dtype, cache_dtype: of queries and cache.
        batch, context: requests, committed positions of each.
    """

    name: str
    dim: int = 128
    group: int = 8
    kv_heads: int = 8
    nodes: int = 8
    block_size: int = 16
    dtype: torch.dtype = torch.bfloat16
    cache_dtype: torch.dtype | None = None
    batch: int = 16
    context: int = 8192


CONFIGURATIONS: Final = (
    Configuration("bf16"),
    Configuration("bf16-decode", nodes=1),
    Configuration("bf16-d88-nodes16", dim=88, group=5, kv_heads=2, nodes=16),
    Configuration("bf16-d256", dim=256, group=4),
    Configuration("bf16-nodes16", nodes=16),
    Configuration("bf16-e4m3", cache_dtype=torch.float8_e4m3fn),
)
"""Tiles of 16, 64 and 128 rows; padded and wide heads; a cache of 8 bits."""


def tree_of(tokens: int, nodes: int, device: str) -> dict[str, Tensor]:
    """Return ancestor words and depths of chains, as keywords."""
    node = torch.arange(tokens, device=device, dtype=torch.int32) % nodes
    return {"ancestors": ((2 << node) - 1)[:, None].int(), "depths": node}


def ragged(batch: int, nodes: int, context: int, device: str) -> tuple[Tensor, Tensor, int]:
    """Return context_lens, cu_seqlens_q and max_seqlen_q of equal requests."""
    lens = torch.full((batch,), context, dtype=torch.int32, device=device)
    return lens, torch.arange(batch + 1, dtype=torch.int32, device=device) * nodes, nodes


def table_of(batch: int, positions: int, block_size: int, device: str) -> Tensor:
    """Return a block table with every block in its place."""
    blocks = -(-positions // block_size)
    return torch.arange(batch * blocks, dtype=torch.int32, device=device).view(batch, blocks)


def small(c: Configuration) -> Configuration:
    """Return the same call for one request and KV head, with two splits of context."""
    return c._replace(batch=1, kv_heads=1, context=1500)


def make_verify(c: Configuration, device: str) -> Callable[[], object]:
    """Prepare a call of `kernels.verify_attention`."""
    if device != "meta":
        c = small(c)
    tokens = c.batch * c.nodes
    table = table_of(c.batch, c.context + c.nodes, c.block_size, device)
    shape = (table.numel(), c.block_size, c.kv_heads, c.dim)
    query = torch.ones(tokens, c.kv_heads * c.group, c.dim, dtype=c.dtype, device=device)
    cache = torch.ones(shape, device=device).to(c.cache_dtype or c.dtype)
    one = torch.ones((), device=device) if c.cache_dtype else None
    return partial(
        verify_attention,
        query,
        cache,
        cache.clone(),
        *ragged(c.batch, c.nodes, c.context, device),
        block_table=table,
        key_scale=one,
        value_scale=one,
        return_lse=True,
        **tree_of(tokens, c.nodes, device),
    )


def _counts(c: Configuration) -> dict[str, int]:
    """Positions that are read, and bytes of a position and of rows, a row being node and head."""
    c = small(c)
    itemsize = (c.cache_dtype or c.dtype).itemsize
    return {
        "positions": c.batch * (c.context + c.nodes),
        "position_bytes": 2 * c.dim * itemsize,
        "rows": c.batch * c.nodes * c.group,
        "query_bytes": c.dim * c.dtype.itemsize,
        "splits": -(-(c.context + c.nodes) // 1024),
        "part_bytes": 4 * c.dim + 8,
        "out_bytes": c.dim * c.dtype.itemsize + 4,
    }


def make_merge(rows: int, heads: int, dim: int, device: str) -> Callable[[], object]:
    """Prepare a call of `kernels.merge_attention`."""
    rows = rows if device == "meta" else 8
    out = torch.ones(2, rows, heads, dim, dtype=torch.bfloat16, device=device)
    lse = torch.ones(2, rows, heads, device=device)
    return partial(merge_attention, out[0], lse[0], out[1], lse[1])


CALLS: Final = (
    *(
        HotCall("verify_attention", c.name, partial(make_verify, c), 2, counts=_counts(c))
        for c in CONFIGURATIONS
    ),
    HotCall(
        "merge_attention",
        "bf16",
        partial(make_merge, 128, 64, 128),
        1,
        counts={"rows": 8 * 64, "row_bytes": 260},
    ),
)
