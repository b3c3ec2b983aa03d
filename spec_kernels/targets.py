"""What a decoder must offer to be decoded speculatively, and an adaptor for plain torch.nn models.

A `Target` turns token ids into logits and keeps K/V in a cache that it opens itself. One forward
takes a whole draft: node 0 is the root (the last committed token, not yet in the cache), behind it
come the drafts. The K/V of all nodes are written behind `context_lens`; `keep` then makes the
accepted ones permanent by moving the length, and the others are overwritten by the next step.

The loop invariant: the cache holds K/V of every committed token but the last, so `context_lens[b]`
is also the position of the root of request b.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.nn import functional as F


class TargetOutput(NamedTuple):
    """What one forward over a draft computed.

    Attributes:
        logits: `[rows, vocab]` float, packed in any order. The caller may write into it.
        row: `[batch, nodes] int32`: row of `logits` that was computed at node i, so the law of the
            token *after* node i; -1 behind `num_nodes`.
        hidden: `[rows, size]` float, the last hidden states in the order of `logits`, or None if
            they were not asked for.
    """

    logits: Tensor
    row: Tensor
    hidden: Tensor | None = None


class Cache(Protocol):
    """The K/V of a batch of requests: one row per request, each with its own length.

    Attributes:
        context_lens: `[batch] int32`, committed rows of each request, on the target's device.
    """

    context_lens: Tensor

    def keep(self, path: Tensor, accepted_lens: Tensor) -> None:
        """Make the root and the accepted nodes of the last forward permanent.

        Args:
            path: `[batch, max_depth + 1] int32`: kept nodes, root first, then -1. A row of -1
                (absent request) keeps its length.
            accepted_lens: `[batch] int32`: accepted drafts; `context_lens` grows by this plus one.
        """
        ...

    def truncate(self, lens: Tensor) -> None:
        """Set `context_lens` to `lens`, `[batch] int32`, none of them above the present length."""
        ...


@runtime_checkable
class Target(Protocol):
    """A decoder model behind its cache. Draft models are driven through the same protocol.

    Attributes:
        vocab_size: width of the logits.
        max_length: most positions that the model can hold, or None without a limit.
        device: where the model computes.
    """

    @property
    def vocab_size(self) -> int:
        """Width of the logits."""
        ...

    @property
    def max_length(self) -> int | None:
        """Most positions, or None."""
        ...

    @property
    def device(self) -> torch.device:
        """Where tokens and caches are."""
        ...

    def open(self, batch: int, capacity: int) -> Cache:
        """Return an empty cache for `batch` requests of at most `capacity` positions each."""
        ...

    def prefill(
        self, cache: Cache, row: int, tokens: Sequence[int], *, hidden: bool = False
    ) -> Tensor | None:
        """Append `tokens` (possibly none) to request `row` and commit them, without logits.

        Returns:
            `[len(tokens), size]` last hidden states if `hidden` and there are tokens, else None.
        """
        ...

    def forward(
        self, tokens: Tensor, num_nodes: Tensor, cache: Cache, *, hidden: bool = False
    ) -> TargetOutput:
        """Compute the logits at every node and write their K/V behind `cache.context_lens`.

        Lengths are not changed: call `cache.keep` or forget the nodes. A failure leaves the cache
        as it was.

        Args:
            tokens: `[batch, nodes] int64`, chains; node i stands at position context_lens[b] + i.
                Ids below `vocab_size`, or `PAD_TOKEN` behind `num_nodes`.
            num_nodes: `[batch] int32`; 0 = absent request.
            cache: opened by this target.
            hidden: also return the last hidden states.
        """
        ...

    def embed(self, tokens: Tensor) -> Tensor:
        """Return the input embeddings of `tokens`, `[...] int64`, as `[..., size]`."""
        ...


class ChainCache:
    """Lengths of a cache whose drafts are chains: keeping a prefix moves the length only.

    Example:
        >>> cache = ChainCache(2, device="cpu")
        >>> cache.keep(torch.tensor([[0, 1, -1], [-1, -1, -1]]), torch.tensor([1, 0]))
        >>> cache.context_lens
        tensor([2, 0], dtype=torch.int32)
    """

    def __init__(self, batch: int, *, device: torch.device | str) -> None:
        self.context_lens = torch.zeros(batch, dtype=torch.int32, device=device)

    def keep(self, path: Tensor, accepted_lens: Tensor) -> None:
        """Advance by `accepted_lens + 1` where the request is present."""
        grown = self.context_lens + accepted_lens.to(torch.int32) + 1
        self.context_lens = torch.where(path[:, 0] >= 0, grown, self.context_lens)

    def truncate(self, lens: Tensor) -> None:
        """Set the lengths, each to at most its present value."""
        self.context_lens = torch.minimum(self.context_lens, lens.to(torch.int32))


class KVCache(ChainCache):
    """Contiguous K/V for `ModuleTarget`, `[batch, capacity + 1, kv_heads, head_dim]` per layer.

    The last row of each request is a bin: K/V of padding are written there and never read.
    """

    def __init__(
        self, shape: Sequence[int], *, layers: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        batch, capacity, kv_heads, head_dim = shape
        super().__init__(batch, device=device)
        full = (batch, capacity + 1, kv_heads, head_dim)
        self.keys = [torch.zeros(full, dtype=dtype, device=device) for _ in range(layers)]
        self.values = [torch.zeros(full, dtype=dtype, device=device) for _ in range(layers)]
        self.capacity = capacity


class Attend(Protocol):
    """The attention that `ModuleTarget` hands to a model: it stores K/V and looks back at them."""

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Attend causally from each node to its context and to the nodes before it.

        Args:
            layer: index of the layer.
            query: `[batch, nodes, heads, head_dim]`, positions already encoded.
            key, value: `[batch, nodes, kv_heads, head_dim]`; heads is a multiple of kv_heads.

        Returns:
            `[batch, nodes, heads, head_dim]`.
        """
        ...


class DecoderModule(Protocol):
    """What `ModuleTarget` asks of a plain torch.nn decoder.

    Attributes:
        num_layers, num_kv_heads, head_dim: shape of the cache.
        vocab_size: width of the logits.
        max_length: most positions, or None.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_length: int | None

    def embed(self, tokens: Tensor) -> Tensor:
        """Return the embeddings of `tokens`, `[batch, nodes] int64`."""
        ...

    def __call__(self, tokens: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Return the last hidden states, `[batch, nodes, size]`."""
        ...

    def head(self, hidden: Tensor) -> Tensor:
        """Return logits, `[..., vocab]`, of hidden states `[..., size]`."""
        ...


class ModuleTarget:
    """Target for a plain torch.nn decoder that takes its attention as an argument.

    Args:
        module: see `DecoderModule`; in evaluation mode, with at least one floating parameter.

    Note:
        Reads no device value. Every forward attends over the whole capacity under a mask.
    """

    def __init__(self, module: DecoderModule) -> None:
        self.module = module
        assert isinstance(module, torch.nn.Module)
        parameter = next(module.parameters())
        self._device, self._dtype = parameter.device, parameter.dtype

    @property
    def vocab_size(self) -> int:
        """Width of the logits."""
        return self.module.vocab_size

    @property
    def max_length(self) -> int | None:
        """Most positions, or None."""
        return self.module.max_length

    @property
    def device(self) -> torch.device:
        """Where the parameters are."""
        return self._device

    def open(self, batch: int, capacity: int) -> KVCache:
        """Return an empty cache."""
        shape = (batch, capacity, self.module.num_kv_heads, self.module.head_dim)
        return KVCache(shape, layers=self.module.num_layers, dtype=self._dtype, device=self._device)

    def embed(self, tokens: Tensor) -> Tensor:
        """Return the input embeddings."""
        return self.module.embed(tokens)

    @torch.no_grad()
    def prefill(
        self, cache: Cache, row: int, tokens: Sequence[int], *, hidden: bool = False
    ) -> Tensor | None:
        """Append the tokens of one request, the other requests being absent from the forward."""
        assert isinstance(cache, KVCache)
        if not tokens:
            return None
        ids = torch.tensor([list(tokens)], dtype=torch.int64, device=self.device)
        rows = torch.tensor([row], device=self.device)
        states = self._hidden(ids, torch.tensor([len(tokens)], device=self.device), cache, rows)
        cache.context_lens[row] += len(tokens)
        return states[0] if hidden else None

    @torch.no_grad()
    def forward(
        self, tokens: Tensor, num_nodes: Tensor, cache: Cache, *, hidden: bool = False
    ) -> TargetOutput:
        """Compute one row of logits per node, padded: row b * nodes + i."""
        assert isinstance(cache, KVCache)
        batch, nodes = tokens.shape
        rows = torch.arange(batch, device=self.device)
        states = self._hidden(tokens, num_nodes, cache, rows).flatten(0, 1)
        row = torch.arange(batch * nodes, dtype=torch.int32, device=self.device)
        row = row.view(batch, nodes)
        real = torch.arange(nodes, device=self.device) < num_nodes[:, None]
        return TargetOutput(
            self.module.head(states), torch.where(real, row, -1), states if hidden else None
        )

    def _hidden(self, tokens: Tensor, num_nodes: Tensor, cache: KVCache, rows: Tensor) -> Tensor:
        context = cache.context_lens[rows, None].long()
        offset = torch.arange(tokens.shape[1], device=self.device)
        positions = context + offset
        real = (offset < num_nodes[:, None]) & (positions < cache.capacity)
        slots = torch.where(real, positions, cache.capacity)
        visible = torch.arange(cache.capacity, device=self.device) <= positions[..., None]

        def attend(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            cache.keys[layer][rows[:, None], slots] = key
            cache.values[layer][rows[:, None], slots] = value
            past = (cache.keys[layer], cache.values[layer])
            k, v = (store[rows, : cache.capacity].transpose(1, 2) for store in past)
            out = F.scaled_dot_product_attention(
                query.transpose(1, 2), k, v, attn_mask=visible[:, None], enable_gqa=True
            )
            return out.transpose(1, 2)

        positions = torch.where(real, positions, 0)
        return self.module(tokens.clamp(min=0), positions, attend)


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
        self, tokens: Tensor, num_nodes: Tensor, cache: Cache, *, hidden: bool = False
    ) -> TargetOutput:
        """Look the rows up; the hidden states are the embeddings."""
        real = torch.arange(tokens.shape[1], device=self.device) < num_nodes[:, None]
        row = torch.arange(tokens.numel(), dtype=torch.int32, device=self.device)
        ids = torch.where(real, tokens, 0).flatten()
        return TargetOutput(
            self.table[ids],
            torch.where(real, row.view_as(tokens), -1),
            self.embed(ids) if hidden else None,
        )

    def embed(self, tokens: Tensor) -> Tensor:
        """Return one-hot embeddings."""
        return F.one_hot(tokens, self.table.shape[0]).to(self.table.dtype)
