"""Hot calls of `verify_attention_mla`: latents of 512 columns with a rotary part of 64."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Final

import torch

from spec_kernels.kernels import verify_attention_mla

from ._call import HotCall
from .attention import ragged, table_of, tree_of

LATENT, ROPE, BLOCK_SIZE = 512, 64, 64
CONTEXT = 1200


def make_verify(heads: int, nodes: int, device: str) -> Callable[[], object]:
    """Prepare a call of `kernels.verify_attention_mla`; on "cpu" of one request."""
    batch, context = (16, 8192) if device == "meta" else (1, CONTEXT)
    table = table_of(batch, context + nodes, BLOCK_SIZE, device)
    shape = (batch * nodes, heads, LATENT + ROPE)
    query = torch.ones(shape, dtype=torch.bfloat16, device=device)
    cache = torch.ones(
        table.numel(), BLOCK_SIZE, LATENT + ROPE, dtype=torch.bfloat16, device=device
    )
    return partial(
        verify_attention_mla,
        query[..., :LATENT],
        query[..., LATENT:],
        cache,
        *ragged(batch, nodes, context, device),
        scale=0.1,
        block_table=table,
        return_lse=True,
        **tree_of(batch * nodes, nodes, device),
    )


def _counts(heads: int, nodes: int) -> dict[str, int]:
    return {
        "positions": CONTEXT + nodes,
        "position_bytes": 2 * (LATENT + ROPE),
        "rows": nodes * heads,
        "query_bytes": 2 * (LATENT + ROPE),
        "splits": 2,
        "part_bytes": 4 * LATENT + 8,
        "out_bytes": 2 * LATENT + 4,
    }


CALLS: Final = tuple(
    HotCall(
        "verify_attention_mla",
        name,
        partial(make_verify, heads, nodes),
        2,
        counts=_counts(heads, nodes),
    )
    for name, heads, nodes in (("bf16", 16, 2), ("bf16-decode", 16, 1))
)
"""32 rows and 16, the tiles that don't spill; more rows take more tiles of them."""
