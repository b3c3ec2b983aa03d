"""The adaptor for plain torch.nn decoders that take their attention as an argument."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from spec_kernels._check import require
from spec_kernels.nn import KVShape
from spec_kernels.targets.attention import KVCache, Nodes, make_room, open_cache
from spec_kernels.targets.base import Cache, TargetOutput


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

    One that can stop early takes `layers: int`, how many of its layers to run, as a further keyword
    argument of its call, and returns what its head then reads.

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

    def __call__(self, tokens: Tensor, positions: Tensor, attend: Attend, **options: Any) -> Tensor:
        """Return the last hidden states, `[batch, nodes, size]`."""
        ...

    def head(self, hidden: Tensor) -> Tensor:
        """Return logits, `[..., vocab]`, of hidden states `[..., size]`."""
        ...


class ModuleTarget:
    """Target for a plain torch.nn decoder that takes its attention as an argument.

    Args:
        module: see `DecoderModule`; in evaluation mode, with at least one floating parameter.
        block_size, num_blocks: of a paged cache; by default the device decides (`open_cache`).

    Note:
        Reads no device value. On a CPU, where reading costs nothing, the nodes of all requests are
        packed: the module then sees `[1, tokens]`.
    """

    def __init__(
        self,
        module: DecoderModule,
        *,
        block_size: int | None = None,
        num_blocks: int | None = None,
    ) -> None:
        self.module = module
        self._blocks = block_size, num_blocks
        self._options: dict[str, Any] = {}
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
        heads, dim = self.module.num_kv_heads, self.module.head_dim
        return open_cache(
            [KVShape(heads, dim, dim)] * self.module.num_layers,
            batch,
            capacity,
            dtype=self._dtype,
            device=self._device,
            block_size=self._blocks[0],
            num_blocks=self._blocks[1],
        )

    def exit(self, layers: int) -> ModuleTarget:
        """Return the target of the first layers; see `ExitTarget`."""
        most = self.module.num_layers
        require(1 <= layers <= most, f"layers must be in 1..{most}, got {layers}")
        assert isinstance(self.module, torch.nn.Module)
        if "layers" not in inspect.signature(self.module.forward).parameters:
            name = type(self.module).__name__
            raise NotImplementedError(f"{name} cannot stop early: its call takes no `layers`")
        early = copy.copy(self)
        early._options = {"layers": layers}
        return early

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
        counts = [len(tokens) if b == row else 0 for b in range(cache.batch)]
        num_nodes = torch.tensor(counts, dtype=torch.int32, device=self.device)
        if make_room(cache, num_nodes, len(tokens), is_tree=False) is None:
            cache.reserve(counts)
        new = Nodes(cache, num_nodes, len(tokens), counts, contained=False)
        states = self._run(ids, new)
        cache.advance(counts)
        return states if hidden else None

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
        """Compute one row of logits per node."""
        assert isinstance(cache, KVCache)
        nodes = tokens.shape[1]
        counts = make_room(cache, num_nodes, nodes, is_tree=parents is not None)
        new = Nodes(cache, num_nodes, nodes, counts, parents=parents, start=start)
        ids = tokens[:, start:].clamp(min=0)
        ids = ids if counts is None else new.pick(ids)[None]
        states = self._run(ids, new)
        if new.is_spoiled(states):
            states = self._run(ids, new)
        return TargetOutput(self.module.head(states), new.row, states if hidden else None)

    def _run(self, ids: Tensor, new: Nodes) -> Tensor:
        """Return the last hidden states of the new nodes, `[tokens, size]`."""

        def attend(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            parts = (part.flatten(0, 1) for part in (query, key, value))
            out = new.attend(layer, *parts)
            return out.view(*ids.shape, *out.shape[1:])

        positions = new.positions.view(ids.shape)
        return self.module(ids, positions, attend, **self._options).flatten(0, 1)
