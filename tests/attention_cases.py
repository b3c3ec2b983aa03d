"""Random inputs of verification attention: ragged, paged or contiguous, NaN in every dead slot."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from spec_kernels.ops import merge_attention, verify_attention, verify_attention_mla

CHAIN, STAR, COMB, RANDOM = "chain", "star", "comb", "random"


def make_parents(kind: str, nodes: int) -> list[int]:
    """Return the parents of a tree of one kind."""
    if kind == CHAIN:
        return [i - 1 for i in range(nodes)]
    if kind == STAR:
        return ([-1] + [0] * (nodes - 1))[:nodes]
    if kind == COMB:
        return ([-1] + [i - 1 if i % 2 else max(i - 2, 0) for i in range(1, nodes)])[:nodes]
    return ([-1] + [int(torch.randint(0, i, ())) for i in range(1, nodes)])[:nodes]


def describe_tree(parents: list[int], words: int) -> tuple[Tensor, Tensor]:
    """Return ancestor words `[nodes, words]` and depths `[nodes]` of a tree, the slow way."""
    rows: list[int] = []
    depths: list[int] = []
    for node, parent in enumerate(parents):
        rows.append((rows[parent] if parent >= 0 else 0) | 1 << node)
        depths.append(depths[parent] + 1 if parent >= 0 else 0)
    bits = [[(row >> 32 * word) & 0xFFFFFFFF for word in range(words)] for row in rows]
    signed = torch.tensor(bits, dtype=torch.int64).reshape(-1, words)
    signed = torch.where(signed >= 2**31, signed - 2**32, signed)
    return signed.int(), torch.tensor(depths, dtype=torch.int32)


class Case(NamedTuple):
    """A call of `verify_attention`.

    Attributes:
        contexts, nodes: per request.
        heads, kv_heads, dim, v_dim: of queries and cache; v_dim 0 = dim.
        dtype: of queries, and of the cache unless `cache` says "e4m3" or "int8".
        block_size: 0 = contiguous.
        layout: "NHD" or "HND" in memory.
        tree: kind of every request's tree; "" = causal without words.
        scales: of an 8-bit cache, "tensor" or "token".
        window, softcap: options; sinks: with one per head.
        rope: columns of MLA's rotary part; its cache has one head of dim + rope columns.
    """

    contexts: tuple[int, ...] = (0, 1, 15, 16, 17, 33)
    nodes: tuple[int, ...] = (5, 1, 7, 0, 3, 4)
    heads: int = 4
    kv_heads: int = 2
    dim: int = 64
    v_dim: int = 0
    dtype: torch.dtype = torch.bfloat16
    block_size: int = 16
    layout: str = "NHD"
    tree: str = RANDOM
    cache: str = ""
    scales: str = "tensor"
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    rope: int = 0

    def __str__(self) -> str:
        changed = {k: v for k, v in self._asdict().items() if v != self._field_defaults[k]}
        parts = [f"{k}{v}".replace("torch.", "").replace(" ", "") for k, v in changed.items()]
        return "-".join(parts) or "plain"


def _table(case: Case) -> Tensor:
    """Return a block table in random order, -1 behind the live blocks."""
    totals = [c + n for c, n in zip(case.contexts, case.nodes, strict=True)]
    counts = [-(-total // case.block_size) for total in totals]
    free = torch.randperm(sum(counts) + 3).tolist()
    table = torch.full((len(counts), max([*counts, 1])), -1, dtype=torch.int32)
    for row, count in zip(table, counts, strict=True):
        row[:count] = torch.tensor([free.pop() for _ in range(count)])
    return table


def _cache(case: Case, heads: int, dim: int, live: Tensor) -> Tensor:
    """Return a cache with random live rows and NaN elsewhere, laid out as the case says."""
    blocks, slots = live.shape
    x = torch.randn(blocks, slots, heads, dim)
    x[~live] = torch.nan
    if case.layout == "HND":
        x = x.transpose(1, 2).contiguous().transpose(1, 2)
    return x


def _live(case: Case, table: Tensor | None) -> Tensor:
    """Return which slots hold a row of context or draft."""
    totals = [c + n for c, n in zip(case.contexts, case.nodes, strict=True)]
    if table is None:
        return torch.arange(max(totals) + 3) < torch.tensor(totals)[:, None]
    live = torch.zeros(int((table >= 0).sum()) + 3, case.block_size, dtype=torch.bool)
    for row, total in zip(table, totals, strict=True):
        for position in range(total):
            live[row[position // case.block_size], position % case.block_size] = True
    return live


def _quantise(case: Case, x: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return the cache in the case's dtype, and its scales."""
    if not case.cache:
        return x.to(case.dtype), None
    largest = x.nan_to_num(0.0).abs().amax(-1)
    limit = 448.0 if case.cache == "e4m3" else 127.0
    scale = largest / limit + 1e-6
    if case.scales == "tensor":
        scale = scale.max().reshape(())
    y = x / (scale if scale.dim() == 0 else scale[..., None])
    if case.cache == "e4m3":
        return y.to(torch.float8_e4m3fn), scale
    return y.nan_to_num(77.0).round().to(torch.int8), scale


def make(case: Case) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return arguments and keywords of `verify_attention` (`verify_attention_mla` with rope)."""
    table = _table(case) if case.block_size else None
    live = _live(case, table)
    tokens = sum(case.nodes)
    cu = torch.tensor([0, *torch.tensor(case.nodes).cumsum(0)], dtype=torch.int32)
    words = max(1, -(-max(case.nodes) // 32))
    trees = [describe_tree(make_parents(case.tree, n), words) for n in case.nodes]
    keywords: dict[str, Any] = {"return_lse": True}
    if case.tree:
        keywords["ancestors"] = torch.cat([tree[0] for tree in trees])
        keywords["depths"] = torch.cat([tree[1] for tree in trees])
    keywords |= {"block_table": table, "window": case.window, "softcap": case.softcap}
    keywords["sinks"] = torch.randn(case.heads) if case.sinks else None
    width = case.dim + case.rope
    keys, key_scale = _quantise(case, _cache(case, case.kv_heads, width, live))
    query = torch.randn(tokens, case.heads, width).to(case.dtype)
    rest = (torch.tensor(case.contexts, dtype=torch.int32), cu, max(case.nodes))
    if case.rope:
        if key_scale is not None:
            keywords["cache_scale"] = key_scale if key_scale.dim() == 0 else key_scale[..., 0]
        keywords["scale"] = (case.dim + case.rope) ** -0.5
        query_latent, query_rope = query[..., : case.dim], query[..., case.dim :]
        return (query_latent, query_rope, keys[:, :, 0], *rest), keywords
    values = _cache(case, case.kv_heads, case.v_dim or case.dim, live)
    values, value_scale = _quantise(case, values)
    keywords |= {"key_scale": key_scale, "value_scale": value_scale}
    return (query, keys, values, *rest), keywords


@functools.cache
def operations() -> dict[str, Callable[[], Any]]:
    """Call every operation of attention in every form of its arguments."""
    tree, chain = make(Case(window=4)), make(Case(cache="int8", tree="", block_size=0))
    latent = make(Case((3, 4), (2, 1), kv_heads=1, dim=32, rope=16, sinks=True))
    a, b = torch.randn(2, 3, 2, 8).unbind(0)
    lse_a, lse_b = torch.randn(2, 3, 2).unbind(0)
    return {
        "verify_attention": lambda: verify_attention(*tree[0], **tree[1]),
        "verify_attention-int8": lambda: verify_attention(*chain[0], **chain[1]),
        "verify_attention-invariant": lambda: verify_attention(
            *tree[0], **tree[1], invariant=True, max_seqlen_k=40
        ),
        "verify_attention_mla": lambda: verify_attention_mla(*latent[0], **latent[1]),
        "merge_attention": lambda: merge_attention(a, lse_a, b, lse_b),
    }
