"""The adaptor for plain torch.nn decoders that take their attention as an argument."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from spec_kernels.targets.base import Cache, TargetOutput, TreeCache, contain_faults, padded_rows
from spec_kernels.tree import ancestor_mask, depths


class KVCache(TreeCache):
    """Contiguous K/V for `ModuleTarget`, `[batch, rows, kv_heads, head_dim]` per layer.

    The last row of each request is a bin: K/V of padding are written there and never read.
    """

    def __init__(
        self, shape: Sequence[int], *, layers: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        batch, capacity, kv_heads, head_dim = shape
        super().__init__(batch, capacity, device=device)
        full = (batch, capacity + 1, kv_heads, head_dim)
        self.keys = [torch.zeros(full, dtype=dtype, device=device) for _ in range(layers)]
        self.values = [torch.zeros(full, dtype=dtype, device=device) for _ in range(layers)]

    @property
    def bin(self) -> int:
        """The last row of each request; the rows before it can be attended to."""
        return self.keys[0].shape[1] - 1

    def reserve(self, nodes: int) -> None:
        """Make room for the rows of a tree behind any context: `capacity + nodes` in all."""
        missing = self.capacity + nodes - self.keys[0].shape[1]
        if missing > 0:
            pads = (0, 0, 0, 0, 0, missing)
            keys, values = ([F.pad(t, pads) for t in all_] for all_ in (self.keys, self.values))
            self.keys, self.values = keys, values

    def _move(self, source: Tensor, target: Tensor) -> None:
        request = torch.arange(source.shape[0], device=source.device)[:, None]
        for store in (*self.keys, *self.values):
            store[request, target] = store[request, source]


class Attend(Protocol):
    """The attention that `ModuleTarget` hands to a model: it stores K/V and looks back at them."""

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Attend from each node to its context, its ancestors and itself.

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
        count = torch.tensor([len(tokens)], device=self.device)
        whole = _Nodes(cache, torch.tensor([row], device=self.device), count, ids.shape[1])
        states = self.module(ids, whole.positions, whole.attention(contained=False))
        cache.context_lens[row] += len(tokens)
        return states[0] if hidden else None

    @torch.no_grad()
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
        """Compute one row of logits per node, padded: row b * (nodes - start) + i - start."""
        assert isinstance(cache, KVCache)
        batch, nodes = tokens.shape
        cache.holds_tree = parents is not None
        if parents is not None:
            cache.reserve(nodes)
        rows = torch.arange(batch, device=self.device)
        new = _Nodes(cache, rows, num_nodes, nodes, parents, start)
        ids = tokens[:, start:].clamp(min=0)
        states = self.module(ids, new.positions, new.attention(contained=nodes > 1)).flatten(0, 1)
        row = padded_rows(num_nodes, batch, nodes, start)
        return TargetOutput(self.module.head(states), row, states if hidden else None)


class _Nodes:
    """New nodes of a forward: where their K/V go, where they stand, what they see.

    Attributes:
        positions: `[batch, new] int64`, 0 for padding.
        slots: `[batch, new] int64`: their rows; padding goes to the bin.
        sees: `[batch, new, new] bool`: which of the new nodes each one sees.
        visible: `[batch, new, rows] bool`: which rows of the cache it sees.
    """

    def __init__(
        self,
        cache: KVCache,
        rows: Tensor,
        num_nodes: Tensor,
        nodes: int,
        parents: Tensor | None = None,
        start: int = 0,
    ) -> None:
        self._cache, self._rows = cache, rows
        context = cache.context_lens[rows, None].long()
        node = torch.arange(nodes, device=rows.device)
        if parents is None:
            depth = node.expand(len(rows), nodes)
            block = node <= node[:, None].expand(len(rows), nodes, nodes)
        else:
            depth = depths(parents, num_nodes).clamp(min=0)
            block = ancestor_mask(parents, num_nodes) | (node == node[:, None])
        new = slice(start, None)
        positions = context + depth[:, new]
        real = (node[new] < num_nodes[:, None]) & (positions < cache.capacity)
        self.slots = torch.where(real, context + node[new], cache.bin)
        self.positions = torch.where(real, positions, 0)
        self.sees = block[:, new, new]
        behind = torch.arange(cache.bin, device=rows.device) - context  # row - context = node
        is_node = (behind >= 0) & (behind < nodes)
        seen = behind.clamp(0, nodes - 1)[:, None].expand(-1, nodes - start, -1)
        inside = block[:, new].gather(2, seen) & is_node[:, None]
        self.visible = inside | (behind < 0)[:, None]

    def attention(self, *, contained: bool) -> Attend:
        """Return the attention of these nodes; `contained` keeps faulty ones to themselves."""
        cache, rows = self._cache, self._rows

        def attend(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            poison = None
            if contained:
                key, value, poison = contain_faults(key, value, self.sees)
            cache.keys[layer][rows[:, None], self.slots] = key
            cache.values[layer][rows[:, None], self.slots] = value
            past = (cache.keys[layer], cache.values[layer])
            k, v = (store[rows, : cache.bin].transpose(1, 2) for store in past)
            out = F.scaled_dot_product_attention(
                query.transpose(1, 2), k, v, attn_mask=self.visible[:, None], enable_gqa=True
            ).transpose(1, 2)
            return out if poison is None else out + poison[:, :, None, None].to(out.dtype)

        return attend
