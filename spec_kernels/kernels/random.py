# ruff: noqa: N803  (compile-time arguments are written in capitals)
"""Addressed random numbers on the device: Philox4x32-10, bit-equal to the other layers.

    coin = ((word0 >> 5) * 2^26 + (word1 >> 6)) * 2^-53           float64 in [0, 1)
    words = philox(key = seed, counter = (position low, high, node, stream << 24 | lane))

1. Every program makes BLOCK numbers of a flat output and derives request, node and lane from
   their place.
2. One Philox call per number; nothing is stored between calls.

Traffic: 8 bytes written per number; seeds and positions come from the cache.
Determinism: a number is a function of its address alone.

Source:
    Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3".
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from spec_kernels.kernels._device import (
    STREAM_ACCEPT,
    STREAM_COUPLED,
    STREAM_DRAFT,
    STREAM_FINAL,
    coin_of,
    exponential_of,
    philox,
)

BLOCK = 256


@triton.jit
def coin_at(seed, position, node, word3):
    """The float64 coin at an address: one Philox call."""
    word0, word1, _, _ = philox(seed, position, node, word3)
    return coin_of(word0, word1)


@triton.jit
def pick_word(word0, word1, word2, word3, index):
    """One of the four words of a Philox call."""
    low = tl.where(index == 0, word0, word1)
    high = tl.where(index == 2, word2, word3)
    return tl.where(index < 2, low, high)


@triton.jit(do_not_specialize=["nodes", "total"])
def coins_kernel(
    accept_ptr,  # [batch, nodes] f64, out
    final_ptr,  # [batch] f64, out
    seeds_ptr,  # [batch] i64
    positions_ptr,  # [batch] i64
    nodes,
    total,  # batch * (nodes + 1): the coins of the nodes, then the final one
    BLOCK: tl.constexpr,
):
    """Coins of a step. Floor: `8 * coins` bytes: one store each."""
    offs = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offs < total
    request = offs // (nodes + 1)
    node = (offs % (nodes + 1)).to(tl.int32)
    is_final = node == nodes

    seed = tl.load(seeds_ptr + request, mask=mask, other=0)
    position = tl.load(positions_ptr + request, mask=mask, other=0)
    stream = tl.where(is_final, STREAM_FINAL, STREAM_ACCEPT)
    coin = coin_at(seed, position, tl.where(is_final, 0, node), stream)

    tl.store(accept_ptr + request * nodes + node, coin, mask=mask & (node < nodes))
    tl.store(final_ptr + request, coin, mask=mask & is_final)


@triton.jit(do_not_specialize=["nodes", "lanes", "total"])
def draft_coins_kernel(
    out_ptr,  # [batch, nodes, lanes] f64
    seeds_ptr,  # [batch] i64
    positions_ptr,  # [batch] i64
    nodes,
    lanes,
    total,  # batch * nodes * lanes
    BLOCK: tl.constexpr,
):
    """Coins of drafts. Floor: `8 * coins` bytes: one store each."""
    offs = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offs < total
    lane = (offs % lanes).to(tl.int32)
    node = ((offs // lanes) % nodes).to(tl.int32)
    request = offs // lanes // nodes

    seed = tl.load(seeds_ptr + request, mask=mask, other=0)
    position = tl.load(positions_ptr + request, mask=mask, other=0)

    tl.store(out_ptr + offs, coin_at(seed, position, node, STREAM_DRAFT + lane), mask=mask)


@triton.jit(do_not_specialize=["total"])
def exponential_kernel(
    out_ptr,  # [total] f32
    seeds_ptr,  # [total] i64
    positions_ptr,  # [total] i64
    ids_ptr,  # [total] i64
    total,
    BLOCK: tl.constexpr,
):
    offs = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offs < total

    seed = tl.load(seeds_ptr + offs, mask=mask, other=0)
    position = tl.load(positions_ptr + offs, mask=mask, other=0)
    token = tl.load(ids_ptr + offs, mask=mask, other=0)

    stream = tl.full((BLOCK,), STREAM_COUPLED, tl.int32)
    words = philox(seed, position, (token >> 2).to(tl.int32), stream)
    word = pick_word(words[0], words[1], words[2], words[3], (token & 3).to(tl.int32))

    tl.store(out_ptr + offs, exponential_of(word), mask=mask)


def coins(seeds: Tensor, root_positions: Tensor, nodes: int) -> tuple[Tensor, Tensor]:
    """Return the coins that judge the nodes of a step, and the coin of its final token."""
    batch = seeds.shape[0]
    accept_coins = torch.empty(batch, nodes, dtype=torch.float64, device=seeds.device)
    final_coins = torch.empty(batch, dtype=torch.float64, device=seeds.device)
    total = batch * (nodes + 1)
    if total:
        coins_kernel[(triton.cdiv(total, BLOCK),)](
            accept_ptr=accept_coins,
            final_ptr=final_coins,
            seeds_ptr=seeds.contiguous(),
            positions_ptr=root_positions.contiguous(),
            nodes=nodes,
            total=total,
            BLOCK=BLOCK,
        )
    return accept_coins, final_coins


def draft_coins(seeds: Tensor, root_positions: Tensor, nodes: int, lanes: int = 1) -> Tensor:
    """Return `[batch, nodes, lanes] float64` coins: `[b, n, l]` draws the l-th child of node n."""
    out = torch.empty(seeds.shape[0], nodes, lanes, dtype=torch.float64, device=seeds.device)
    if out.numel():
        draft_coins_kernel[(triton.cdiv(out.numel(), BLOCK),)](
            out_ptr=out,
            seeds_ptr=seeds.contiguous(),
            positions_ptr=root_positions.contiguous(),
            nodes=nodes,
            lanes=lanes,
            total=out.numel(),
            BLOCK=BLOCK,
        )
    return out


def exponential(seeds: Tensor, positions: Tensor, ids: Tensor) -> Tensor:
    """Return the float32 exponential variates of the coupled noise; the arguments broadcast."""
    seeds, positions, ids = torch.broadcast_tensors(seeds, positions, ids)
    out = torch.empty(ids.shape, dtype=torch.float32, device=ids.device)
    if out.numel():
        exponential_kernel[(triton.cdiv(out.numel(), BLOCK),)](
            out_ptr=out,
            seeds_ptr=seeds.contiguous(),
            positions_ptr=positions.contiguous(),
            ids_ptr=ids.contiguous(),
            total=out.numel(),
            BLOCK=BLOCK,
        )
    return out
