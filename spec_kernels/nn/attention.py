"""Attention of draft nodes as a module: what a layer fixes, and what a step brings."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from spec_kernels import ops, tree


class AttentionStep(NamedTuple):
    """Which tokens of a step belong to which request, and what they see: one for all layers.

    Attributes:
        context_lens: `[batch] int32`, committed rows of each request.
        cu_seqlens_q: `[batch + 1] int32`, first token of each request.
        max_seqlen_q: most nodes of a request.
        block_table: `[batch, max_blocks] int32`, or None for contiguous caches.
        ancestors: `[tokens, words] int32`, or None: chains.
        depths: `[tokens] int32`, or None: chains.
        max_seqlen_k: positions that a request may have, or None: what the cache holds.
    """

    context_lens: Tensor
    cu_seqlens_q: Tensor
    max_seqlen_q: int
    block_table: Tensor | None = None
    ancestors: Tensor | None = None
    depths: Tensor | None = None
    max_seqlen_k: int | None = None

    @staticmethod
    def padded(
        context_lens: Tensor,
        nodes: int,
        *,
        parents: Tensor | None = None,
        num_nodes: Tensor | None = None,
        block_table: Tensor | None = None,
        max_seqlen_k: int | None = None,
    ) -> AttentionStep:
        """Describe a padded draft: token `b * nodes + i` is node i of request b.

        Nodes behind num_nodes are attended too, as if they were there; their results mean nothing
        and no other node sees them.

        Args:
            context_lens: `[batch] int32`.
            nodes: width of the padded draft.
            parents: `[batch, nodes] int32` as in `Draft`, or None: chains.
            num_nodes: `[batch] int32`, needed with parents.
            block_table, max_seqlen_k: as in `AttentionStep`.

        Raises:
            ValueError: parents without num_nodes.

        Example:
            >>> lens, sizes = torch.tensor([7], dtype=torch.int32), torch.tensor([3])
            >>> siblings = torch.tensor([[-1, 0, 0]], dtype=torch.int32)
            >>> step = AttentionStep.padded(lens, 3, parents=siblings, num_nodes=sizes.int())
            >>> step.cu_seqlens_q, step.ancestors.flatten(), step.depths
            (tensor([0, 3], dtype=torch.int32), tensor([1, 3, 5], dtype=torch.int32),
             tensor([0, 1, 1], dtype=torch.int32))
        """
        batch, device = context_lens.shape[0], context_lens.device
        cu_seqlens_q = torch.arange(batch + 1, dtype=torch.int32, device=device) * nodes
        ancestors = depths = None
        if parents is not None:
            if num_nodes is None:
                raise ValueError("parents need num_nodes")
            ancestors = tree.ancestor_words(parents, num_nodes).flatten(0, 1)
            depths = tree.depths(parents, num_nodes).flatten().int()
        return AttentionStep(
            context_lens, cu_seqlens_q, nodes, block_table, ancestors, depths, max_seqlen_k
        )


class VerifyAttention(torch.nn.Module):
    """Attention over a KV cache that already holds the step's own rows (`ops.verify_attention`).

    Args:
        scale: of the scores, by default `qk_dim ** -0.5`.
        window: visible positions by depth, or None.
        softcap: bound of the scores, or None.
        sinks: `[heads]` float, or None; kept as a buffer.
        invariant: make the bits of a row independent of the other nodes.

    Example:
        >>> attention = VerifyAttention(window=2)
        >>> cache = torch.arange(1.0, 5.0).view(1, 4, 1, 1)
        >>> step = AttentionStep.padded(torch.tensor([2], dtype=torch.int32), 2)
        >>> attention(torch.zeros(2, 1, 1), cache, cache, step).flatten()
        tensor([2.5000, 3.5000])
    """

    sinks: Tensor | None

    def __init__(
        self,
        *,
        scale: float | None = None,
        window: int | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
        invariant: bool = False,
    ) -> None:
        super().__init__()
        self.scale, self.window, self.softcap = scale, window, softcap
        self.invariant = invariant
        self.register_buffer("sinks", sinks)

    def forward(
        self,
        query: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        step: AttentionStep,
        *,
        key_scale: Tensor | None = None,
        value_scale: Tensor | None = None,
    ) -> Tensor:
        """Attend from the step's tokens.

        Args:
            query: `[tokens, heads, qk_dim]`.
            key_cache, value_cache: this layer's cache.
            step: the tokens and what they see.
            key_scale, value_scale: of 8-bit caches.

        Returns:
            `[tokens, heads, v_dim]` in the dtype of query.
        """
        out, _ = ops.verify_attention(
            query,
            key_cache,
            value_cache,
            step.context_lens,
            step.cu_seqlens_q,
            step.max_seqlen_q,
            block_table=step.block_table,
            ancestors=step.ancestors,
            depths=step.depths,
            scale=self.scale,
            window=self.window,
            softcap=self.softcap,
            sinks=self.sinks,
            key_scale=key_scale,
            value_scale=value_scale,
            max_seqlen_k=step.max_seqlen_k,
            invariant=self.invariant,
        )
        return out

    def extra_repr(self) -> str:
        """Return the options for `print`."""
        return (
            f"scale={self.scale}, window={self.window}, softcap={self.softcap}, "
            f"invariant={self.invariant}"
        )
