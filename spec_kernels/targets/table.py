"""A target without a model."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from spec_kernels.targets.base import Cache, ChainCache, TargetOutput, padded_rows


class TableTarget:
    """A Markov chain as a target: the logits depend on the last token only.

    For examples, and for proving decoders and proposers without a model.

    Args:
        table: `[vocab, vocab]` logits of the token after each token.
        max_length: most positions, or None.

    Example:
        >>> target = TableTarget(torch.eye(3))
        >>> cache = target.open(batch=1, capacity=4)
        >>> one = torch.ones(1, dtype=torch.int32)
        >>> target.forward(torch.tensor([[2]]), one, cache).logits
        tensor([[0., 0., 1.]])
    """

    def __init__(self, table: Tensor, *, max_length: int | None = None) -> None:
        self.table = table
        self.max_length: int | None = max_length
        self.vocab_size: int = table.shape[1]
        self.device: torch.device = table.device

    def open(self, batch: int, capacity: int) -> ChainCache:
        """Return an empty cache: lengths only."""
        return ChainCache(batch, device=self.device)

    def prefill(
        self, cache: Cache, row: int, tokens: Sequence[int], *, hidden: bool = False
    ) -> Tensor | None:
        """Move the length of one request."""
        cache.context_lens[row] += len(tokens)
        return self.embed(torch.tensor(list(tokens), dtype=torch.int64)) if hidden else None

    def forward(
        self,
        tokens: Tensor,
        num_nodes: Tensor,
        cache: Cache,
        *,
        parents: Tensor | None = None,
        start: int = 0,
        hidden: bool = False,
    ) -> TargetOutput:
        """Look the rows up, whatever the parents; the hidden states are the embeddings."""
        batch, nodes = tokens.shape
        row = padded_rows(num_nodes, batch, nodes, start)
        ids = torch.where(row[:, start:] >= 0, tokens[:, start:].clamp(min=0), 0).flatten()
        return TargetOutput(self.table[ids], row, self.embed(ids) if hidden else None)

    def embed(self, tokens: Tensor) -> Tensor:
        """Return one-hot embeddings."""
        return F.one_hot(tokens, self.table.shape[0]).to(self.table.dtype)
