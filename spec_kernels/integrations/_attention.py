"""The attention that `TransformersTarget` gives to the layers of a model, and the K/V behind it."""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from spec_kernels.targets import TreeCache, contain_faults
from spec_kernels.tree import ancestor_mask, depths

_HARMLESS: Final = frozenset(
    {"position_ids", "position_embeddings", "cache", "past_key_values", "use_cache", "is_causal"}
    | {"output_attentions", "output_hidden_states", "output_router_logits", "return_dict"}
    | {"cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "cache_position"}
)
"""Keyword arguments of layers that change nothing here; any other one is refused."""


class TransformersCache(TreeCache):
    """Keys and values of every layer for a batch of requests, each with its own length.

    Attributes:
        context_lens: `[batch] int32`, committed rows of each request.
        rows: usable rows of each request; one more is a bin for the K/V of padding.
        keys, values: per layer `[batch, kv_heads, rows + 1, head_dim]`; None until the layer has
            run.
    """

    def __init__(self, batch: int, capacity: int, layers: int, device: torch.device) -> None:
        super().__init__(batch, capacity, device=device)
        self.batch, self.rows = batch, capacity
        self.keys: list[Tensor | None] = [None] * layers
        self.values: list[Tensor | None] = [None] * layers

    def extend(self, nodes: int) -> None:
        """Make room for the rows of a tree behind any context."""
        missing = self.capacity + nodes - 1 - self.rows
        if missing > 0:
            grown = [
                [None if t is None else pad(t, (0, 0, 0, missing)) for t in stores]
                for stores in (self.keys, self.values)
            ]
            self.keys, self.values = grown
            self.rows += missing

    def _move(self, source: Tensor, target: Tensor) -> None:
        request = torch.arange(source.shape[0], device=source.device)[:, None]
        for store in (*self.keys, *self.values):
            if store is not None:
                store[request, :, target] = store[request, :, source]


class Trees(NamedTuple):
    """The trees of the requests that take part in a forward.

    Attributes:
        first: the node where the forward begins; K/V of the earlier ones are in the cache.
        depth: `[rows, nodes] int32`, of each node.
        sees: `[rows, nodes, nodes] bool`: which nodes each node sees.
    """

    first: int
    depth: Tensor
    sees: Tensor

    @staticmethod
    def make(parents: Tensor, num_nodes: Tensor, first: int) -> Trees:
        """Find depths and ancestors; padding sees itself."""
        node = torch.arange(parents.shape[1], device=parents.device)
        sees = ancestor_mask(parents, num_nodes) | (node == node[:, None])
        return Trees(first, depths(parents, num_nodes).clamp(min=0), sees)

    def of(self, rows: Tensor) -> Trees:
        """Return those of some requests."""
        return Trees(self.first, self.depth[rows], self.sees[rows])


class Step:
    """What one forward tells the attention of every layer.

    Args:
        cache: the requests' K/V.
        rows: the requests that take part.
        starts: rows of the cache in front of the new nodes of each.
        counts: new nodes of each.
        trees: of these requests; None for chains.
        contained: keep K/V that are NaN from nodes that must not see them; not for a prompt, all
            of which is seen by what follows.

    Attributes:
        width: most new nodes; K/V of padding go to the bin.
        longest: rows that a layer may have to look at.
        position_ids: `[rows, width]`; on chains padding repeats the last real position.
        layers_seen: calls of the attention so far.
    """

    def __init__(
        self,
        cache: TransformersCache,
        rows: list[int],
        starts: list[int],
        counts: list[int],
        trees: Trees | None = None,
        *,
        contained: bool = True,
    ) -> None:
        device = cache.context_lens.device
        self.cache, self.layers_seen, self._trees = cache, 0, trees
        self.width = max(counts)
        self.longest = max(s + n for s, n in zip(starts, counts, strict=True))
        self.single = (rows[0], starts[0]) if len(rows) == 1 else None
        self.needs_mask = self.width > 1 or len(set(starts)) > 1 or trees is not None
        self._masks: dict[int | None, Tensor] = {}
        node = torch.arange(self.width)
        start, count = torch.tensor(starts)[:, None], torch.tensor(counts)[:, None]
        if trees is None:
            self.position_ids = (start + torch.minimum(node, count - 1)).to(device)
            sees = node <= node[:, None].to(device)
        else:
            new = slice(trees.first, trees.first + self.width)
            self._context = start.to(device) - trees.first
            self.position_ids = self._context + trees.depth[:, new]
            sees = trees.sees[:, new, new]
        self._sees = sees if contained and self.width > 1 else None
        if self.single is None:
            places = torch.where(node < count, start + node, cache.rows).to(device)
            self.rows = torch.tensor(rows, device=device)
            self.index = (self.rows[:, None], slice(None), places)
            self.all_rows = len(rows) == cache.batch

    def append(
        self, layer: int, key: Tensor, value: Tensor
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Write the new K/V rows of a layer; return those that the step may look at, and what to
        add to the output `[rows, width]`: NaN where a node sees a faulty one."""
        self.layers_seen += 1
        poison = None
        if self._sees is not None:
            by_node = (key.transpose(1, 2), value.transpose(1, 2))
            key, value, poison = contain_faults(*by_node, self._sees)
            key, value = key.transpose(1, 2), value.transpose(1, 2)
        return (
            self._append(self.cache.keys, layer, key),
            self._append(self.cache.values, layer, value),
            poison,
        )

    def _append(self, buffers: list[Tensor | None], layer: int, new: Tensor) -> Tensor:
        buffer = buffers[layer]
        if buffer is None:
            cache, (_, heads, _, size) = self.cache, new.shape
            buffer = new.new_zeros(cache.batch, heads, cache.rows + 1, size)
            buffers[layer] = buffer
        if self.single is not None:
            row, start = self.single
            seen = buffer[row : row + 1, :, : self.longest]
            seen[:, :, start:] = new
            return seen
        buffer[self.index] = new.transpose(1, 2)
        seen = buffer[:, :, : self.longest]
        return seen if self.all_rows else seen[self.rows]

    def mask(self, window: int | None, query: Tensor, groups: int) -> Tensor | None:
        """Return what to add to the scores `[rows, 1, groups * width, longest]`; None = nothing."""
        if not self.needs_mask and (window is None or self.longest <= window):
            return None
        if window not in self._masks:
            hidden, standing = self._hidden()
            if window is not None:
                hidden = hidden | (standing <= self.position_ids[:, :, None] - window)
            zeros = torch.zeros(hidden.shape, dtype=query.dtype, device=query.device)
            self._masks[window] = zeros.masked_fill_(hidden, float("-inf")).repeat(1, groups, 1)
        return self._masks[window][:, None]

    def _hidden(self) -> tuple[Tensor, Tensor]:
        """Return which rows each new node must not see, `[rows, width, longest]`, and the position
        at which each row stands, broadcast to it."""
        place, trees = torch.arange(self.longest, device=self.position_ids.device), self._trees
        if trees is None:
            return place > self.position_ids[:, :, None], place
        node = place - self._context
        nodes = trees.depth.shape[1]
        index = node.clamp(0, nodes - 1)
        rows = trees.sees[:, trees.first : trees.first + self.width]
        sees = rows.gather(2, index[:, None].expand(-1, self.width, -1))
        hidden = (node >= nodes)[:, None] | ((node >= 0)[:, None] & ~sees)
        standing = torch.where(node < 0, place, self._context + trees.depth.gather(1, index))
        return hidden, standing[:, None]


def attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    spec_kernels_step: Step | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Append this layer's K/V and attend: the function that transformers' layers call."""
    step, name = spec_kernels_step, type(module).__name__
    if step is None:
        raise NotImplementedError(f"{name} does not hand keyword arguments on to its attention")
    layer = _check_layer(module, name, sliding_window, kwargs)
    key, value, poison = step.append(layer, key, value)
    rows, heads, width, size = query.shape
    kv_heads = key.shape[1]
    groups = heads // kv_heads
    packed = query.reshape(rows, kv_heads, groups * width, size)
    mask = step.mask(sliding_window, query, groups)
    if softcap is None:
        out = scaled_dot_product_attention(packed, key, value, attn_mask=mask, scale=scaling)
    else:
        out = _softcapped_attention(packed, key, value, mask, scaling, softcap)
    out = out.reshape(rows, heads, width, value.shape[-1]).transpose(1, 2)
    return out if poison is None else out + poison[:, :, None, None].to(out.dtype), None


def _softcapped_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scaling: float | None,
    softcap: float,
) -> Tensor:
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    scores = torch.tanh(query @ key.transpose(-1, -2) * (scale / softcap)) * softcap
    scores = scores if mask is None else scores + mask
    wide = torch.promote_types(query.dtype, torch.float32)
    return torch.softmax(scores, -1, dtype=wide).to(query.dtype) @ value


def _check_layer(
    module: torch.nn.Module, name: str, window: int | None, kwargs: dict[str, Any]
) -> int:
    """Return the layer's number; refuse what this attention would silently get wrong."""
    layer = getattr(module, "layer_idx", None)
    if not isinstance(layer, int):
        raise NotImplementedError(f"{name} does not know its number (layer_idx)")
    if getattr(module, "is_causal", True) is False or kwargs.get("is_causal") is False:
        raise NotImplementedError(f"{name} attends in both directions")
    unknown = [k for k, v in kwargs.items() if v is not None and k not in _HARMLESS]
    if unknown:
        raise NotImplementedError(f"{name} asks for {', '.join(unknown)}, not supported here")
    kinds = getattr(getattr(module, "config", None), "layer_types", None)
    if kinds and kinds[layer] == "sliding_attention" and window is None:
        raise NotImplementedError(f"{name} hides its sliding window from the attention interface")
    return layer
